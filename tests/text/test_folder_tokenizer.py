"""Tokenizers from Hugging Face folders against transformers' AutoTokenizer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from octavo.errors import CheckpointError
from octavo.text.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "  indented code:\n    return value + 1234\n",
    "naïve café 日本語のテキスト مرحبا 😀 👍",
] * 10
SPECIAL = ["<unk>", "<s>", "</s>", "<|user|>"]

Config = dict[str, Any]


def byte_level() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen save theirs; a post-processor adds BOS."""
    pipeline = tokenizers.Tokenizer(models.BPE())
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    pipeline.train_from_iterator(CORPUS, trainer)
    pipeline.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    pipeline.add_tokens([tokenizers.AddedToken("<think>", special=False), tokenizers.AddedToken("é|", special=False)])
    return pipeline


def sentencepiece_bpe(metaspace: bool) -> tokenizers.Tokenizer:
    """As Llama 2, Mistral and Gemma save theirs: in the older form, by a normalizer, or the newer, by `Metaspace`."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL[:3] + bytes_, show_progress=False)
    )
    state = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in state["merges"]]
    pipeline = tokenizers.Tokenizer(
        models.BPE(state["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    if metaspace:
        pipeline.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        pipeline.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    pipeline.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pipeline.add_special_tokens(SPECIAL[:3])
    pipeline.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return pipeline


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "normalizer": lambda: sentencepiece_bpe(metaspace=False),
    "metaspace": lambda: sentencepiece_bpe(metaspace=True),
}
NAMES: Config = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


def save(path: Path, pipeline: tokenizers.Tokenizer, config: Config | None = None, **files: Config | str) -> Path:
    pipeline.save(str(path / "tokenizer.json"))
    contents = {"tokenizer_config": NAMES if config is None else config} | files
    for name, content in contents.items():
        suffix, text = (".jinja", content) if isinstance(content, str) else (".json", json.dumps(content))
        (path / (name + suffix)).write_text(text, encoding="utf-8")
    return path


def reference(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path))


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    path = save(tmp_path_factory.mktemp(request.param), KINDS[request.param]())
    return load_tokenizer(path, None), reference(path)


def test_encodes_as_transformers_does(pair: tuple[Tokenizer, Any], awkward: str) -> None:
    tokenizer, auto = pair
    for add_special_tokens in (True, False):
        expected = auto(awkward, add_special_tokens=add_special_tokens).input_ids
        assert tokenizer.encode(awkward, add_special_tokens) == expected


def test_decodes_text_as_transformers_does(pair: tuple[Tokenizer, Any], awkward: str) -> None:
    tokenizer, auto = pair
    token_ids = auto(awkward).input_ids
    for skip in (True, False):
        assert tokenizer.decode(token_ids, skip) == auto.decode(token_ids, skip_special_tokens=skip)


def test_decodes_any_byte_level_tokens_as_transformers_does(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level())
    tokenizer, auto = load_tokenizer(path, None), reference(path)
    plain = [i for i in range(len(tokenizer)) if tokenizer.token_text(i) != "é|"]  # the library spells é as one byte
    token_ids = np.random.default_rng(1).choice(plain, size=3000).tolist()
    for skip in (True, False):
        assert tokenizer.decode(token_ids, skip) == auto.decode(token_ids, skip_special_tokens=skip)


def test_added_tokens_are_their_own_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, byte_level()), None)
    token_ids = tokenizer.encode("<think>é|", add_special_tokens=False)
    assert [tokenizer.token_bytes(token_id) for token_id in token_ids] == [b"<think>", "é|".encode()]
    assert tokenizer.decode(token_ids) == "<think>é|"


def test_names_come_from_the_config(pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, auto = pair
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (auto.bos_token_id, (auto.eos_token_id,))
    assert tokenizer.special_tokens == auto.special_tokens_map
    assert len(tokenizer) == len(auto)
    special_ids = {token_id for token_id, token in auto.added_tokens_decoder.items() if token.special}
    assert {token_id for token_id in range(len(auto)) if tokenizer.is_special(token_id)} == special_ids


ADDED = {"5": {"content": "<unk>", "special": True}}


@pytest.mark.parametrize(
    ("config", "special_tokens_map"),
    [
        ({}, {"eos_token": "</s>"}),
        ({"eos_token": "<s>"}, {"eos_token": "</s>"}),
        ({"eos_token": {"content": "</s>", "special": True, "__type": "AddedToken"}}, {}),
        ({"eos_token": "</s>", "added_tokens_decoder": ADDED}, {"eos_token": "<s>"}),
        ({"eos_token": "<new>", "extra_special_tokens": ["<one>", "<two>"]}, {}),
        ({"additional_special_tokens": ["<one>"]}, {"pad_token": {"content": "<pad>", "lstrip": False}}),
        ({"added_tokens_decoder": {"402": {"content": "<late>", "special": False, "normalized": False}}}, {}),
    ],
)
def test_special_tokens_are_those_transformers_finds(
    tmp_path: Path, config: Config, special_tokens_map: Config
) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    path = save(tmp_path, byte_level(), config, special_tokens_map=special_tokens_map)
    tokenizer, auto = load_tokenizer(path, None), reference(path)
    assert tokenizer.special_tokens == auto.special_tokens_map
    assert len(tokenizer) == len(auto)
    text = "the <unk></s> <new> <one><two> <pad> <late> é| <think>"
    assert tokenizer.encode(text) == auto(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == auto.decode(
        auto(text).input_ids, skip_special_tokens=True
    ).replace("\ufffd|", "é|")


def test_flags_in_the_config_do_not_override_the_post_processor(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level(), NAMES | {"add_bos_token": False, "add_eos_token": True})
    assert load_tokenizer(path, None).encode("the") == reference(path)("the").input_ids


def test_saved_padding_and_truncation_are_not_applied(tmp_path: Path) -> None:
    pipeline = byte_level()
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=64)
    assert len(load_tokenizer(save(tmp_path, pipeline), None).encode("the quick brown fox jumps")) in range(5, 64)


def test_ids_without_a_token_are_no_text(tmp_path: Path) -> None:
    pipeline = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 7}, []))
    pipeline.decoder = decoders.ByteLevel()
    tokenizer = load_tokenizer(save(tmp_path, pipeline, {}), None)
    assert (len(tokenizer), tokenizer.decode([0, 3, 7, 8])) == (8, "ab")


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "inline"}, {}, "inline"),
        ({"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "named"}]}, {}, "named"),
        ({"chat_template": {"rag": "x", "default": "named"}}, {}, "named"),
        ({"chat_template": {"chatml": "only"}}, {}, "only"),
        ({"chat_template": {"rag": "x", "tools": "y"}}, {}, None),
        ({"chat_template": "inline"}, {"chat_template": "{{ file }}"}, "{{ file }}"),
        ({}, {"chat_template": {"chat_template": "json"}}, "json"),
        ({}, {}, None),
    ],
)
def test_the_chat_template_is_found(tmp_path: Path, config: Config, files: Config, expected: str | None) -> None:
    assert load_tokenizer(save(tmp_path, byte_level(), config, **files), None).chat_template == expected


def test_a_folder_without_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no tokenizer.json.*--tokenizer"):
        load_tokenizer(tmp_path, None)


@pytest.mark.parametrize(
    ("file", "text"),
    [("tokenizer.json", '{"model": 1}'), ("tokenizer_config.json", "[1]"), ("tokenizer_config.json", "{")],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, text: str) -> None:
    save(tmp_path, byte_level())
    (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=file):
        load_tokenizer(tmp_path, None)


def test_an_unknown_decoder_is_named(tmp_path: Path) -> None:
    pipeline = byte_level()
    pipeline.decoder = decoders.BPEDecoder()
    with pytest.raises(CheckpointError, match=r"decodes tokens with BPEDecoder"):
        load_tokenizer(save(tmp_path, pipeline), None)
