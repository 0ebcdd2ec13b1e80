"""The `tokenizer.*` keys of a GGUF file as a Vocabulary, and which of its tokens end a turn.

Knows nothing of tokenisation.
"""

import numpy as np
import numpy.typing as npt

from octavo.checkpoint.checkpoint import Vocabulary
from octavo.checkpoint.fields import Fields
from octavo.checkpoint.gguf_format import GGUFFile
from octavo.checkpoint.turn_ends import END_OF_TURN_TOKENS, written_turn_ends

__all__ = ["end_of_turn_ids", "read_vocabulary"]

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4


def read_vocabulary(file: GGUFFile) -> Vocabulary | None:
    """None for a file without a tokenizer. Raises CheckpointError where lists and ids don't fit together."""
    fields = Fields(file.path, file.metadata, prefix="tokenizer.ggml.")
    if fields.get("tokens") is None:
        return None
    tokens = _strings(fields, "tokens")
    if tokens is None or not tokens:
        fields.fail("tokens", "is empty.")
    num_tokens = len(tokens)
    token_types = _numbers(fields, "token_type", num_tokens)
    scores = _numbers(fields, "scores", num_tokens)

    def token_id(key: str) -> int | None:
        return fields.optional_token_id(key, high=num_tokens - 1)

    return Vocabulary(
        model=fields.text("model"),
        pre=fields.text("pre", "default"),
        tokens=tokens,
        token_types=np.full(num_tokens, NORMAL, np.int32) if token_types is None else token_types.astype(np.int32),
        scores=None if scores is None else scores.astype(np.float32),
        merges=_strings(fields, "merges"),
        bos_token_id=token_id("bos_token_id"),
        eos_token_id=token_id("eos_token_id"),
        unk_token_id=token_id("unknown_token_id"),
        pad_token_id=token_id("padding_token_id"),
        add_bos_token=fields.optional_flag("add_bos_token"),
        add_eos_token=fields.optional_flag("add_eos_token"),
        add_space_prefix=fields.optional_flag("add_space_prefix"),
        chat_template=Fields(file.path, file.metadata).optional_text("tokenizer.chat_template"),
        chat_templates=_named_templates(file),
    )


def _named_templates(file: GGUFFile) -> dict[str, str]:
    fields = Fields(file.path, file.metadata, prefix="tokenizer.")
    names = _strings(fields, "chat_templates") or []
    return {name: fields.text(f"chat_template.{name}") for name in names}


def _strings(fields: Fields, key: str) -> list[str] | None:
    value = fields.get(key)
    if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        fields.fail(key, "is not a list of strings.")
    return value


def _numbers(fields: Fields, key: str, num_tokens: int) -> npt.NDArray[np.generic] | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, np.ndarray):
        fields.fail(key, "is not a list of numbers.")
    if len(value) != num_tokens:
        fields.fail(key, f"has {len(value)} entries where the vocabulary has {num_tokens} tokens.")
    return value


def end_of_turn_ids(file: GGUFFile, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The end-of-sequence token first, then others that end a turn: named by a key, or known by text and either special
    or written by the chat template."""
    fields = Fields(file.path, file.metadata, prefix="tokenizer.ggml.")
    last = len(vocabulary.tokens) - 1
    named = [fields.optional_token_id(key, high=last) for key in ("eot_token_id", "eom_token_id")]
    special = np.flatnonzero(np.isin(vocabulary.token_types, (CONTROL, USER_DEFINED))).tolist()
    known = [token_id for token_id in special if vocabulary.tokens[token_id] in END_OF_TURN_TOKENS]
    ends = written_turn_ends(vocabulary.chat_template or "")
    written = [token_id for token_id, token in enumerate(vocabulary.tokens) if token in ends] if ends else []
    candidates = [vocabulary.eos_token_id, *named, *known, *written]
    return tuple(dict.fromkeys(token_id for token_id in candidates if token_id is not None))
