"""Tokenizers from GGUF vocabularies against transformers, `tokenizers` and sentencepiece."""

import io
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from octavo.checkpoint.checkpoint import Vocabulary
from octavo.errors import CheckpointError, InvalidRequestError
from octavo.text.pre_tokenizers import PATTERNS
from octavo.text.tokenizer import Tokenizer, load_tokenizer

NOWHERE = Path("model.gguf")


@pytest.fixture(scope="session")
def transformers_smollm(smollm_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm_path.parent), gguf_file=smollm_path.name)


@pytest.fixture(scope="session")
def digits_smollm(transformers_smollm: Any) -> Any:
    """The same tokenizer as SmolLM2's tokenizer.json defines it: transformers' GGUF conversion leaves `Digits` out."""
    from copy import deepcopy

    pipeline = deepcopy(transformers_smollm.backend_tokenizer)
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return pipeline


def has_digit_that_merges(text: str) -> bool:
    return any(character.isnumeric() and not character.isascii() for character in text)


def test_smollm_encodes_as_transformers_does(smollm: Tokenizer, transformers_smollm: Any, awkward: str) -> None:
    if not has_digit_that_merges(awkward):
        assert smollm.encode(awkward) == transformers_smollm(awkward).input_ids


def test_smollm_encodes_as_its_own_tokenizer_json_would(smollm: Tokenizer, digits_smollm: Any, awkward: str) -> None:
    assert smollm.encode(awkward) == digits_smollm.encode(awkward).ids


def test_smollm_decodes_as_transformers_does(smollm: Tokenizer, transformers_smollm: Any) -> None:
    token_ids = np.random.default_rng(0).integers(0, len(smollm), size=5000).tolist()
    for skip in (True, False):
        assert smollm.decode(token_ids, skip) == transformers_smollm.decode(token_ids, skip_special_tokens=skip)


def test_smollm_decodes_what_it_encoded(smollm: Tokenizer, awkward: str) -> None:
    assert smollm.decode(smollm.encode(awkward), skip_special_tokens=False) == awkward


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80))
def test_any_text_encodes_as_the_tokenizer_json_would(smollm: Tokenizer, digits_smollm: Any, text: str) -> None:
    assert smollm.encode(text) == digits_smollm.encode(text).ids


def test_token_bytes_are_true_bytes_and_join_to_the_text(smollm: Tokenizer) -> None:
    text = "naïve 🦊\n\t漢字"
    pieces = [smollm.token_bytes(token_id) for token_id in smollm.encode(text)]
    assert b"".join(pieces) == text.encode()
    assert any(piece.decode(errors="replace") == "\ufffd" for piece in pieces)


def test_names_and_special_tokens_of_smollm(smollm: Tokenizer) -> None:
    assert (len(smollm), smollm.vocab_size, smollm.bos_token_id, smollm.eos_token_ids) == (49152, 49152, 1, (2,))
    assert smollm.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm.chat_template is not None
    assert smollm.is_special(2)
    assert not smollm.is_special(17)
    assert smollm.token_text(2) == "<|im_end|>"


@pytest.mark.parametrize("token_id", [-1, 49152, 10**9])
def test_ids_outside_the_vocabulary_are_no_text(smollm: Tokenizer, token_id: int) -> None:
    assert smollm.token_bytes(token_id) == b""
    assert smollm.decode([19556, token_id]) == "Hello"
    assert not smollm.is_special(token_id)


def test_a_lone_surrogate_is_the_requests_fault(smollm: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83D, at character 2"):
        smollm.encode("ab\ud83d")


def test_a_real_vocabulary_loads_fast(smollm_path: Path, smollm_vocabulary: Vocabulary) -> None:
    def load_s() -> float:
        begin = time.perf_counter()
        load_tokenizer(smollm_path, smollm_vocabulary)
        return time.perf_counter() - begin

    assert min(load_s() for _ in range(3)) < 0.5


def words(patterns: Sequence[str], text: str) -> list[str]:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


def test_pre_tokenizers_cut_as_transformers_does(awkward: str) -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    shared = PATTERNS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o"} <= shared
    for name in shared:
        assert words(PATTERNS[name], awkward) == words([GGUF_PRE_TOKENIZER_SPLITS[name]], awkward), name


def test_the_gpt2_pattern_cuts_as_the_library_does(awkward: str) -> None:
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PATTERNS["gpt-2"][0]), "isolated"), letters])
    assert own.pre_tokenize_str(awkward) == pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(awkward)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("smollm", "in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("llama-bpe", "in 2024", ["in", " ", "202", "4"]),
        ("qwen2", "in 2024", ["in", " ", "2", "0", "2", "4"]),
        ("gpt-2", "in 2024", ["in", " 2024"]),
        ("default", "in 2024!", ["in", " ", "202", "4", "!"]),
        ("falcon", "a12345=b", ["a", "123", "45", "=", "b"]),
        ("deepseek-v3", "x=漢字かな 1234", ["x", "=", "漢字かな", " ", "123", "4"]),
        ("deepseek-coder", "a b漢字\n12", ["a", " b", "漢字", "\n", "1", "2"]),
        ("tekken", "helloWorld ABCdef", ["hello", "World", " ABCdef"]),
        ("gpt-4o", "we've DON'T", ["we've", " DON'T"]),
    ],
)
def test_words_of_each_pre_tokenizer(name: str, text: str, expected: list[str]) -> None:
    assert words(PATTERNS[name], text) == expected


@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_no_pre_tokenizer_loses_text(name: str, awkward_texts: list[str]) -> None:
    text = "".join(text for text in awkward_texts if len(text) < 1000)
    assert "".join(words(PATTERNS[name], text)) == text


def byte_level(tokens: Sequence[str], merges: Sequence[str], **changes: Any) -> Vocabulary:
    """A small vocabulary of kind gpt2; tokens in angle brackets are control tokens."""
    types = [3 if token.startswith("<") else 1 for token in tokens]
    settings = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": list(tokens),
        "token_types": np.array(types, np.int32),
        "scores": None,
        "merges": list(merges),
        "bos_token_id": None,
        "eos_token_id": None,
        "unk_token_id": None,
        "pad_token_id": None,
        "add_bos_token": None,
        "add_eos_token": None,
        "add_space_prefix": None,
        "chat_template": None,
    }
    return Vocabulary(**settings | changes)


SMALL = ["a", "b", "c", "ab", "abc", "<s>", "</s>"]


def test_whole_words_need_no_merges_where_llama3_reads_them() -> None:
    assert load_tokenizer(NOWHERE, byte_level(SMALL, ["a b"], pre="gpt-2")).encode("abc") == [3, 2]
    assert load_tokenizer(NOWHERE, byte_level(SMALL, ["a b"], pre="llama-bpe")).encode("abc") == [4]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"pre": "gpt-2"}, [0]),
        ({"pre": "llama-bpe"}, [5, 0]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [0]),
        ({"pre": "gpt-2", "add_bos_token": True}, [5, 0]),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, [5, 0, 6]),
        ({"pre": "gpt-2", "add_eos_token": True}, [0, 6]),
        ({"pre": "gpt-2", "add_bos_token": True, "bos_token_id": None}, [0]),
    ],
)
def test_bos_and_eos_are_added_as_the_file_says(changes: dict[str, Any], expected: list[int]) -> None:
    vocabulary = byte_level(SMALL, ["a b"], **{"bos_token_id": 5, "eos_token_id": 6} | changes)
    tokenizer = load_tokenizer(NOWHERE, vocabulary)
    assert tokenizer.encode("a") == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [0]


def test_user_defined_tokens_are_found_whole_but_are_text() -> None:
    vocabulary = replace(byte_level([*SMALL, "bc"], []), token_types=np.array([1, 1, 1, 1, 1, 3, 3, 4], np.int32))
    tokenizer = load_tokenizer(NOWHERE, vocabulary)
    assert tokenizer.encode("abc") == [0, 7]
    assert tokenizer.decode([0, 7, 6]) == "abc"


def test_a_user_defined_token_that_ends_turns_is_special() -> None:
    vocabulary = replace(byte_level(["a", "<|im_end|>"], []), token_types=np.array([1, 4], np.int32))
    assert load_tokenizer(NOWHERE, vocabulary).is_special(1)


def test_unused_tokens_are_no_text() -> None:
    vocabulary = replace(byte_level(["a", "[PAD1]"], []), token_types=np.array([1, 5], np.int32))
    assert load_tokenizer(NOWHERE, vocabulary).decode([0, 1, 0]) == "aa"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "mystery"}, "'mystery'.*Known: .*llama-bpe.*smollm"),
        ({"model": "rwkv"}, "'rwkv'.*Known: gpt2, llama"),
        ({"merges": None}, "no merges"),
        ({"merges": ["a z"]}, "contradicts itself"),
        ({"model": "llama"}, "no scores"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_named(changes: dict[str, Any], message: str) -> None:
    vocabulary = replace(byte_level(SMALL, ["a b"]), **changes)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(NOWHERE, vocabulary)


# SentencePiece: a model trained here, its own package as the judge.

TRAINING_TEXT = [
    "the quick brown fox jumps over the lazy dog and runs away from the other foxes",
    "  indented code    with   runs of spaces, def function(argument): return argument",
    "naïve café Ünïcödé 日本語のテキスト 中文字符 مرحبا بالعالم emoji 😀 👍",
    "numbers 1 2 3 12 123 1234 2024 and punctuation !? ... --- (((",
    "the theory of the thing is that there are these other things, then the rest",
] * 20


@pytest.fixture(scope="session", params=[True, False], ids=["prefixed", "unprefixed"])
def sentencepiece_pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Any]:
    """Our tokenizer and sentencepiece's for one model, with and without the space put before a text."""
    prefixed: bool = request.param
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAINING_TEXT),
        model_writer=file,
        model_type="bpe",
        vocab_size=680,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefixed,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    size = reference.get_piece_size()

    def kind(i: int) -> int:
        checks = (
            (reference.is_unknown, 2),
            (reference.is_control, 3),
            (reference.is_byte, 6),
            (reference.is_unused, 5),
        )
        return next((number for check, number in checks if check(i)), 1)

    vocabulary = Vocabulary(
        model="llama",
        pre="default",
        tokens=[reference.id_to_piece(i) for i in range(size)],
        token_types=np.array([kind(i) for i in range(size)], np.int32),
        scores=np.array([reference.get_score(i) for i in range(size)], np.float32),
        merges=None,
        bos_token_id=reference.bos_id(),
        eos_token_id=reference.eos_id(),
        unk_token_id=reference.unk_id(),
        pad_token_id=None,
        add_bos_token=None,
        add_eos_token=None,
        add_space_prefix=prefixed,
        chat_template=None,
    )
    return load_tokenizer(NOWHERE, vocabulary), reference


def holds_special_token(text: str) -> bool:
    return any(token in text for token in ("<s>", "</s>", "<unk>"))


def test_sentencepiece_vocabularies_encode_as_sentencepiece_does(
    sentencepiece_pair: tuple[Tokenizer, Any], awkward: str
) -> None:
    tokenizer, reference = sentencepiece_pair
    if not holds_special_token(awkward):
        assert tokenizer.encode(awkward, add_special_tokens=False) == reference.encode(awkward)
        assert tokenizer.encode(awkward) == [reference.bos_id(), *reference.encode(awkward)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(["the", "re", " ", "  ", "n", "123", "é", "\n", "日", "🦊", "th", "▁", "e"]), max_size=30
    ).map("".join)
)
def test_mixtures_encode_as_sentencepiece_does(sentencepiece_pair: tuple[Tokenizer, Any], text: str) -> None:
    tokenizer, reference = sentencepiece_pair
    assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)


def test_sentencepiece_vocabularies_decode_what_they_encoded(
    sentencepiece_pair: tuple[Tokenizer, Any], awkward: str
) -> None:
    tokenizer, _ = sentencepiece_pair
    if "▁" not in awkward and not holds_special_token(awkward):  # ▁ is a space to SentencePiece
        assert tokenizer.decode(tokenizer.encode(awkward)) == awkward


def test_byte_tokens_are_the_bytes_they_name(sentencepiece_pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, reference = sentencepiece_pair
    newline = reference.piece_to_id("<0x0A>")
    assert tokenizer.token_bytes(newline) == b"\n"
    assert tokenizer.token_bytes(reference.piece_to_id("▁the")) == b" the"


def test_special_tokens_in_text_are_recognised_in_sentencepiece_vocabularies(
    sentencepiece_pair: tuple[Tokenizer, Any],
) -> None:
    tokenizer, reference = sentencepiece_pair
    token_ids = tokenizer.encode("<s>the</s>", add_special_tokens=False)
    assert token_ids == [reference.bos_id(), *reference.encode("the"), reference.eos_id()]
