"""How byte-level BPE vocabularies cut text into words before merging: one list of patterns for each `pre` name of GGUF.

Knows patterns only; each splits what the previous ones left, matches and gaps both becoming words.
"""

from octavo.errors import CheckpointError

__all__ = ["PATTERNS", "WHOLE_WORD_NAMES", "patterns_of"]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SPACE}"
QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION_AND_SPACE}"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_PUNCTUATION_AND_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_PUNCTUATION_AND_SLASH}"
GPT4O = (
    rf"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_SLASH}"
)

DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
FALCON = (r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")  # what llama.cpp does for a file without a name
SINGLE_DIGITS = (r"\p{N}", GPT2)

PATTERNS: dict[str, tuple[str, ...]] = {
    "default": DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "roberta-bpe"), (GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        SINGLE_DIGITS,
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "dbrx", "smaug-bpe"), (LLAMA3,)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"), (QWEN2,)),
    "tekken": (TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4"), (GPT4O,)),
    "deepseek-coder": DEEPSEEK_CODER,
    "deepseek-v3": DEEPSEEK_V3,
    "falcon": FALCON,
}

WHOLE_WORD_NAMES = frozenset(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "tekken"))
"""Vocabularies in which a word that is a token is that token, whether or not the merges lead there. They also begin a
text with BOS where the file doesn't say."""


def patterns_of(name: str) -> tuple[str, ...]:
    """The patterns for a `tokenizer.ggml.pre`; CheckpointError, listing the known names, for another one."""
    patterns = PATTERNS.get(name)
    if patterns is None:
        raise CheckpointError(
            f"The GGUF vocabulary needs the pre-tokenizer {name!r}, which octavo does not have. "
            f"Known: {', '.join(sorted(PATTERNS))}. --tokenizer can name a folder with the model's tokenizer.json."
        )
    return patterns
