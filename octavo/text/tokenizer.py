"""Tokenizer: text to token ids and back, for a Hugging Face folder or a GGUF vocabulary, over the `tokenizers` library.

Encoding is the library's. Decoding is ours, by the true bytes of each token, so that text can be cut at any token.
Knows nothing of chat templates beyond their source.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tokenizers
import tokenizers.normalizers

from octavo.checkpoint.checkpoint import Vocabulary
from octavo.checkpoint.tokenizer_files import chat_templates, default_template, read_tokenizer_config
from octavo.errors import CheckpointError, InvalidRequestError
from octavo.text.gguf_pipeline import SPACE, TokenType, build_pipeline

__all__ = ["Tokenizer", "load_tokenizer"]

Spelling = Literal["byte_level", "sentencepiece", "wordpiece"]
"""How a token's text spells its bytes: GPT-2's alphabet of 256 letters, plain text with ▁ for a space and <0xNN>, or
plain text with ## before what continues a word."""

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

MAX_COMPOSED = 4
"""Characters that NFC makes one of: a letter and three marks."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _letter_table() -> dict[int, int]:
    """GPT-2's byte alphabet, letter to byte: printable Latin-1 stands for itself, the rest follows from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


_LETTERS = _letter_table()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """What a loader knows of the tokens beside the pipeline that encodes."""

    texts: Sequence[str]
    """By id, in the vocabulary's spelling; "" for an id without a token."""
    spelling: Spelling
    added_ids: frozenset[int]
    """Tokens whose text is not in the vocabulary's spelling but plain."""
    special_ids: frozenset[int]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Names such as "bos_token" and their texts, as chat templates see them."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    strips_first_space: bool = False
    """Encoding puts a space before the text, so decoding a whole text takes it away."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Token ids of text, text and bytes of token ids.

    `vocab_size` is the highest id plus one; a model's embedding may be larger. Ids that name no token are b"".
    """

    def __init__(self, pipeline: tokenizers.Tokenizer, table: TokenTable) -> None:
        pipeline.no_truncation()
        pipeline.no_padding()
        self._pipeline = pipeline
        self._table = table
        self._bytes: list[bytes | None] = [None] * len(table.texts)  # filled as tokens are met
        self._longest = _longest_token(pipeline, table)
        self._dropped = _dropped_characters(table)

    def __len__(self) -> int:
        return len(self._table.texts)

    @property
    def vocab_size(self) -> int:
        return len(self._table.texts)

    @property
    def bos_token_id(self) -> int | None:
        return self._table.bos_token_id

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokenizer's own end-of-sequence token. `ModelConfig.eos_token_ids` has all that end a turn."""
        return () if self._table.eos_token_id is None else (self._table.eos_token_id,)

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the tokens that have a name ("bos_token", "eos_token", …): variables of the chat template."""
        return self._table.special_tokens

    @property
    def chat_template(self) -> str | None:
        """The source of the model's own chat template, the default one."""
        return default_template(self._table.chat_templates)

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """The sources of all its templates by name."""
        return self._table.chat_templates

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised.

        `add_special_tokens` puts BOS and EOS where the model wants them. A rendered chat template has written them
        already: encode that with False. `max_tokens` cuts a longer text off, so that it has as many with those added.
        Raises InvalidRequestError for text that is not Unicode (a lone surrogate).
        """
        encoding = self._encode(text, add_special_tokens)
        if max_tokens is None or len(encoding.ids) <= max_tokens:
            return encoding.ids
        num_special = self._pipeline.num_special_tokens_to_add(False) if add_special_tokens else 0
        encoding = self._encode(text, add_special_tokens=False)
        encoding.truncate(max(max_tokens - num_special, 0))
        return self._pipeline.post_process(encoding, add_special_tokens=add_special_tokens).ids[:max_tokens]

    def fewest_tokens(self, text: str) -> int:
        """So many tokens the text has at least: found without encoding it. 0 where nothing is known."""
        if self._longest is None:
            return 0
        num_encoded = len(text) - sum(map(text.count, self._dropped))
        return -(-num_encoded // self._longest)

    def _encode(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            # As a batch of one: unlike `encode` it lets other Python threads run, and is quicker.
            return self._pipeline.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as error:
            surrogate = re.search("[\ud800-\udfff]", text)
            if surrogate is None:
                raise
            raise InvalidRequestError(
                f"The text is not valid Unicode: it has a lone surrogate, U+{ord(surrogate[0]):04X}, at character "
                f"{surrogate.start()}."
            ) from error

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD.

        Undoes `encode`, so the space that a SentencePiece vocabulary puts before a text is taken away again. Output
        that continues a prompt keeps it: that is what `Detokenizer` gives. A WordPiece vocabulary forgets the text's
        spaces; the library puts them where they usually are.
        """
        if self._table.spelling == "wordpiece":
            return self._pipeline.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        shown = (i for i in token_ids if not (skip_special_tokens and self.is_special(i)))
        text = b"".join(map(self.token_bytes, shown)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._table.strips_first_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes this token adds to the text: possibly part of a character, b"" for an id without a token."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._spelled(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token for display; parts of characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def spelling(self, token_id: int) -> str:
        """One token as the vocabulary spells it: "Ġthe", "▁the", "##ing"; "" for an id without a token."""
        return self._table.texts[token_id] if 0 <= token_id < len(self._table.texts) else ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._table.special_ids

    def _spelled(self, token_id: int) -> bytes:
        text = self._table.texts[token_id]
        if token_id in self._table.added_ids:
            return text.encode()
        if self._table.spelling == "byte_level":
            try:
                return bytes(_LETTERS[ord(letter)] for letter in text)
            except KeyError:  # not in the alphabet: stands for itself
                return text.encode()
        if self._table.spelling == "wordpiece":
            return (text[2:] if text.startswith("##") else f" {text}").encode()
        byte = _BYTE_TOKEN.fullmatch(text)
        return bytes((int(byte[1], 16),)) if byte else text.replace(SPACE, " ").encode()


def _longest_token(pipeline: tokenizers.Tokenizer, table: TokenTable) -> int | None:
    """The most characters that can become one token. None where a tokenizer drops or joins characters at will."""
    added = pipeline.get_added_tokens_decoder().values()
    normalizer = pipeline.normalizer
    if table.spelling != "byte_level" or any(token.lstrip or token.rstrip for token in added):
        return None
    if any(0x80 <= ord(character) < 0xC0 for character in _dropped_characters(table)):
        return None  # part of most characters
    if normalizer is not None and not isinstance(normalizer, tokenizers.normalizers.NFC):
        return None
    most_joined = 1 if normalizer is None else MAX_COMPOSED
    return max(map(len, table.texts), default=1) * most_joined


def _dropped_characters(table: TokenTable) -> list[str]:
    """ASCII characters, and as U+0080 and on the further bytes of others, that a vocabulary has no token for: encoding
    leaves them out."""
    letters = {byte: chr(letter) for letter, byte in _LETTERS.items()}
    known = set(table.texts)
    return [chr(byte) for byte in range(0xC0) if letters[byte] not in known]


def load_tokenizer(path: Path, vocabulary: Vocabulary | None) -> Tokenizer:
    """The tokenizer of a GGUF `vocabulary`, or else of the Hugging Face folder at `path`.

    Raises CheckpointError naming the file, the kind or the pre-tokenizer that can't be read.
    """
    return _from_folder(path) if vocabulary is None else _from_vocabulary(vocabulary)


def _from_vocabulary(vocabulary: Vocabulary) -> Tokenizer:
    pipeline = build_pipeline(vocabulary)
    added = pipeline.get_added_tokens_decoder()
    kinds = vocabulary.token_types.tolist()
    named = {
        "bos_token": vocabulary.bos_token_id,
        "eos_token": vocabulary.eos_token_id,
        "unk_token": vocabulary.unk_token_id,
        "pad_token": vocabulary.pad_token_id,
    }
    own = {} if vocabulary.chat_template is None else {"default": vocabulary.chat_template}
    table = TokenTable(
        texts=["" if kind == TokenType.UNUSED else text for text, kind in zip(vocabulary.tokens, kinds, strict=True)],
        spelling="byte_level" if vocabulary.model == "gpt2" else "sentencepiece",
        added_ids=frozenset(added),
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        special_tokens={name: vocabulary.tokens[i] for name, i in named.items() if i is not None},
        bos_token_id=vocabulary.bos_token_id,
        eos_token_id=vocabulary.eos_token_id,
        strips_first_space=vocabulary.model == "llama" and vocabulary.add_space_prefix is not False,
        chat_templates={**own, **vocabulary.chat_templates},
    )
    return Tokenizer(pipeline, table)


def _from_folder(path: Path) -> Tokenizer:
    source = path / "tokenizer.json"
    if not source.is_file():
        raise CheckpointError(
            f"{path} has no tokenizer.json. Convert the model's tokenizer to that format, or name another folder "
            "with --tokenizer."
        )
    try:
        pipeline = tokenizers.Tokenizer.from_buffer(source.read_bytes())
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{source} can't be read: {error}.") from error
    decoder = {} if pipeline.decoder is None else json.loads(pipeline.decoder.__getstate__())
    spelling, strips_first_space = _spelling_of(decoder, source)
    config = read_tokenizer_config(path)
    special_tokens = {name: _content(config[name]) for name in SPECIAL_TOKEN_NAMES if config.get(name)}
    _add_missing_tokens(pipeline, config, special_tokens.values())
    added = pipeline.get_added_tokens_decoder()
    named = {name: pipeline.token_to_id(token) for name, token in special_tokens.items()}
    table = TokenTable(
        texts=_texts_by_id(pipeline),
        spelling=spelling,
        added_ids=frozenset(added),
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        special_tokens=special_tokens,
        bos_token_id=named.get("bos_token"),
        eos_token_id=named.get("eos_token"),
        strips_first_space=strips_first_space,
        chat_templates=chat_templates(path, config),
    )
    return Tokenizer(pipeline, table)


def _spelling_of(decoder: dict[str, Any], source: Path) -> tuple[Spelling, bool]:
    """How the file's decoder turns tokens into bytes, and whether it takes a leading space away."""
    steps = decoder.get("decoders", [decoder])
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        return "byte_level", False
    if kinds & {"ByteFallback", "Metaspace"}:
        prepended = any(s.get("type") == "Metaspace" and s.get("prepend_scheme") != "never" for s in steps)
        return "sentencepiece", prepended or "Strip" in kinds
    if "WordPiece" in kinds:
        return "wordpiece", True
    found = ", ".join(sorted(str(kind) for kind in kinds))
    raise CheckpointError(
        f"{source} decodes tokens with {found}; octavo knows ByteLevel, ByteFallback, Metaspace and WordPiece."
    )


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _add_missing_tokens(pipeline: tokenizers.Tokenizer, config: dict[str, Any], special: Iterable[str]) -> None:
    """Tokens that only tokenizer_config.json knows: those it lists by id, then named and extra special tokens."""
    present = {token.content for token in pipeline.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder", {})
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    for token_id in sorted(listed, key=int):
        token = listed[token_id]
        if token["content"] not in present:
            options = {name: token[name] for name in flags if name in token}
            pipeline.add_tokens([tokenizers.AddedToken(**options)])
            present.add(token["content"])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    missing = [text for text in (*special, *map(_content, extra)) if text not in present]
    pipeline.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _texts_by_id(pipeline: tokenizers.Tokenizer) -> list[str]:
    ids = pipeline.get_vocab(with_added_tokens=True)
    texts = [""] * (max(ids.values(), default=-1) + 1)
    for text, token_id in ids.items():
        texts[token_id] = text
    return texts
