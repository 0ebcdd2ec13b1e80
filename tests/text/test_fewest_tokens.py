"""A bound on a text's tokens that needs no counting."""

import unicodedata
from pathlib import Path

import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from octavo.options import EngineConfig
from octavo.text.text_side import load_model_tokenizer
from octavo.text.tokenizer import load_tokenizer
from tests.server.running import make_tokenizer_folder
from tests.smollm2 import gguf_path

SMOLLM2 = load_model_tokenizer(EngineConfig(model=gguf_path()))
PIECES = " ", "\n", "the", "é", "e\u0301", "\U0001f600", "\x16", "\x16\x16", "\U00040000", "\u1f82", "    ", "x" * 30
pieces = st.sampled_from([*PIECES, "<|im_start|>"])


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces | st.text(max_size=5), max_size=40).map("".join))
def test_no_text_has_fewer(text: str) -> None:
    if not any(0xD800 <= ord(character) < 0xE000 for character in text):
        assert len(SMOLLM2.encode(text)) >= SMOLLM2.fewest_tokens(text)


def test_a_run_of_what_the_longest_token_holds_has_just_so_many() -> None:
    longest = max(range(SMOLLM2.vocab_size), key=lambda token_id: len(SMOLLM2.token_bytes(token_id)))
    text = SMOLLM2.decode([longest], skip_special_tokens=False) * 50
    assert SMOLLM2.fewest_tokens(text) == 50


def test_what_composes_characters_may_have_fewer(tmp_path: Path) -> None:
    folder = make_tokenizer_folder(tmp_path)
    plain = load_tokenizer(folder, None)
    pipeline = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pipeline.normalizer = normalizers.NFC()
    pipeline.save(str(folder / "tokenizer.json"))
    composing = load_tokenizer(folder, None)
    text = unicodedata.normalize("NFD", "\u1f82" * 100)
    assert 0 < composing.fewest_tokens(text) <= len(composing.encode(text)) < len(plain.encode(text))
    pipeline.normalizer = normalizers.Strip()
    pipeline.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder, None).fewest_tokens("a" * 10_000) == 0
