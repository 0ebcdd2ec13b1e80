"""Builds a `tokenizers` pipeline from a GGUF file's own vocabulary, as llama.cpp reads it.

Two kinds: "gpt2", byte-level BPE with a named pre-tokenizer, and "llama", SentencePiece BPE whose merges are rebuilt
from the pieces' scores. Knows nothing of decoding.
"""

import re
from collections.abc import Iterable
from enum import IntEnum

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from octavo.checkpoint.checkpoint import Vocabulary
from octavo.checkpoint.turn_ends import END_OF_TURN_TOKENS, written_turn_ends
from octavo.errors import CheckpointError
from octavo.text.pre_tokenizers import WHOLE_WORD_NAMES, patterns_of

__all__ = ["SPACE", "TokenType", "build_pipeline"]

CONTROL_LOOKING = re.compile(r"<\|[^<>|\s]{1,64}\|>")
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space


class TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_pipeline(vocabulary: Vocabulary) -> Tokenizer:
    """Raises CheckpointError for an unknown kind or pre-tokenizer, and for data that contradict themselves."""
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if vocabulary.model not in builders:
        raise CheckpointError(
            f"The GGUF vocabulary is of kind {vocabulary.model!r} (tokenizer.ggml.model), which octavo can't read. "
            f"Known: {', '.join(sorted(builders))}. --tokenizer can name a folder with the model's tokenizer.json."
        )
    pipeline = builders[vocabulary.model](vocabulary)
    _add_special_tokens(pipeline, vocabulary)
    _set_first_and_last(pipeline, vocabulary)
    return pipeline


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    if vocabulary.merges is None:
        raise CheckpointError('The GGUF vocabulary of kind "gpt2" has no merges (tokenizer.ggml.merges).')
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns_of(vocabulary.pre)]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=bool(vocabulary.add_space_prefix), use_regex=False)
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.merges)]
    pipeline = Tokenizer(_bpe(vocabulary, merges, ignore_merges=vocabulary.pre in WHOLE_WORD_NAMES))
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    return pipeline


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    merges = _merges_from_scores(vocabulary)
    unknown = None if vocabulary.unk_token_id is None else vocabulary.tokens[vocabulary.unk_token_id]
    pipeline = Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    prefixed = vocabulary.add_space_prefix is not False
    pipeline.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    return pipeline


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: object) -> BPE:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    try:
        return BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"The GGUF vocabulary contradicts itself: {error}.") from error


def _merges_from_scores(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best score first: SentencePiece merges whatever pair scores best."""
    if vocabulary.scores is None:
        raise CheckpointError('The GGUF vocabulary of kind "llama" has no scores (tokenizer.ggml.scores).')
    types, scores = vocabulary.token_types.tolist(), vocabulary.scores.tolist()
    pieces = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, types, scores, strict=True)
        if kind == TokenType.NORMAL
    }
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(pieces, key=pieces.__getitem__, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]


def _add_special_tokens(pipeline: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens are recognised in text and hidden from it; user-defined ones are recognised only.

    Tokens that end a turn are control tokens, even where the file calls them user-defined; so are ordinary ones that
    the chat template writes in the way of control tokens.
    """
    template = vocabulary.chat_template or ""
    written = written_turn_ends(template) | set(CONTROL_LOOKING.findall(template))
    named = (vocabulary.bos_token_id, vocabulary.eos_token_id)
    special: list[str] = []
    plain: list[str] = []
    for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.token_types.tolist(), strict=True)):
        is_written = kind == TokenType.NORMAL and token in written
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN) or token_id in named or is_written:
            special.append(token)
        elif kind == TokenType.USER_DEFINED:
            (special if token in END_OF_TURN_TOKENS else plain).append(token)
    pipeline.add_special_tokens(_added(special, special=True))
    pipeline.add_tokens(_added(plain, special=False))


def _added(tokens: Iterable[str], special: bool) -> list[AddedToken]:
    return [AddedToken(token, special=special, normalized=False) for token in tokens if token]


def _set_first_and_last(pipeline: Tokenizer, vocabulary: Vocabulary) -> None:
    """Add BOS and EOS as the file says; where it doesn't, as llama.cpp does for its kind."""
    add_bos = vocabulary.add_bos_token
    if add_bos is None:
        add_bos = vocabulary.model == "llama" or vocabulary.pre in WHOLE_WORD_NAMES
    first = [vocabulary.bos_token_id] if add_bos and vocabulary.bos_token_id is not None else []
    last = [vocabulary.eos_token_id] if vocabulary.add_eos_token and vocabulary.eos_token_id is not None else []
    if not first and not last:
        return
    names = {token_id: vocabulary.tokens[token_id] for token_id in (*first, *last)}
    pipeline.post_processor = processors.TemplateProcessing(
        single=[*(names[i] for i in first), "$A", *(names[i] for i in last)],
        pair=[*(names[i] for i in first), "$A", "$B", *(names[i] for i in last)],
        special_tokens=[(name, token_id) for token_id, name in names.items()],
    )
