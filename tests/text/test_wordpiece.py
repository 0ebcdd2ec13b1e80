"""WordPiece vocabularies: encoding as transformers does it, cut off with the special tokens kept, decoding, bytes."""

from pathlib import Path

import pytest
from transformers.models.bert.tokenization_bert import BertTokenizer

from octavo.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_encoders import TEXTS, make_encoder_folder, minilm_path


@pytest.fixture(scope="module", params=["tiny", "minilm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return minilm_path() if request.param == "minilm" else make_encoder_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder, None)


@pytest.fixture(scope="module")
def reference(folder: Path) -> BertTokenizer:
    tokenizer: BertTokenizer = BertTokenizer.from_pretrained(folder)
    return tokenizer


@pytest.mark.parametrize("text", [*TEXTS, "", " ", "[MASK] and [SEP]", "a" * 300])
def test_texts_become_the_ids_that_transformers_gives(
    tokenizer: Tokenizer, reference: BertTokenizer, text: str
) -> None:
    assert tokenizer.encode(text) == reference(text)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("length", [2, 3, 4, 7, 16, 1000])
def test_a_text_is_cut_off_between_its_special_tokens(
    tokenizer: Tokenizer, reference: BertTokenizer, length: int
) -> None:
    for text in TEXTS:
        expected = reference(text, truncation=True, max_length=length)["input_ids"]
        assert tokenizer.encode(text, max_tokens=length) == expected
        assert (
            tokenizer.encode(text, add_special_tokens=False, max_tokens=length)
            == (tokenizer.encode(text, add_special_tokens=False)[:length])
        )
    assert len(tokenizer.encode(TEXTS[0], max_tokens=1)) == 1


def test_pieces_of_a_word_are_joined_and_words_set_apart(tokenizer: Tokenizer) -> None:
    text = "the unbelievable password jumps."
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    inner = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, inner)) == b" the unbelievable password jumps ."
    assert tokenizer.token_bytes(ids[0]) == b"[CLS]"
    assert tokenizer.is_special(ids[0])
