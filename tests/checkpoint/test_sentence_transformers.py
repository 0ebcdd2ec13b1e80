"""sentence-transformers' files: what they say of pooling and length, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.checkpoint.model_config import PoolingConfig
from octavo.checkpoint.sentence_transformers import read_max_sequence_length, read_pooling
from octavo.errors import CheckpointError
from tests.tiny_encoders import write_modules


@pytest.mark.parametrize(("name", "mode"), [("mean", "mean"), ("cls", "cls"), ("lasttoken", "last")])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_and_normalisation_are_read(name: str, mode: Any, normalize: bool, tmp_path: Path) -> None:
    write_modules(tmp_path, name, normalize)
    assert read_pooling(tmp_path, {}) == PoolingConfig(mode=mode, normalize=normalize)
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": name}))
    assert read_pooling(tmp_path, {}) == PoolingConfig(mode=mode, normalize=normalize)


@pytest.mark.parametrize(
    ("config", "dimensions"),
    [({}, ()), ({"is_matryoshka": True}, None), ({"is_matryoshka": True, "matryoshka_dimensions": [64, 32]}, (32, 64))],
)
def test_matryoshka_sizes_are_read_from_config_json(config: dict[str, Any], dimensions: Any, tmp_path: Path) -> None:
    write_modules(tmp_path, "mean")
    pooling = read_pooling(tmp_path, config)
    assert pooling is not None
    assert pooling.dimensions == dimensions


def test_a_folder_without_the_files_says_nothing(tmp_path: Path) -> None:
    assert read_pooling(tmp_path, {}) is None
    assert read_max_sequence_length(tmp_path) is None


def test_the_length_at_which_texts_are_cut_off_is_read(tmp_path: Path) -> None:
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 77}')
    assert read_max_sequence_length(tmp_path) == 77
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": -3}')
    with pytest.raises(CheckpointError, match=r"max_seq_length is -3"):
        read_max_sequence_length(tmp_path)


def test_a_module_or_a_pooling_that_octavo_lacks_is_named(tmp_path: Path) -> None:
    write_modules(tmp_path, "mean", more=["Dense"])
    with pytest.raises(CheckpointError, match=r"models\.Dense|Dense'; Transformer, Pooling and Normalize"):
        read_pooling(tmp_path, {})
    write_modules(tmp_path, "max")
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json: pools by pooling_mode_max_tokens"):
        read_pooling(tmp_path, {})
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode": "weightedmean"}')
    with pytest.raises(CheckpointError, match="pooling_mode is 'weightedmean'; supported: mean, cls, lasttoken"):
        read_pooling(tmp_path, {})


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[5]", "[[]]", '[{"type": 5}]', "[{}]", "[]", '"x"', "[" * 5000, "1, 2]", '[{"type": "a.Pooling"}]',
     '[{"type": "Pooling", "path": "../secret"}]', '[{"type": "Pooling", "path": "a\\u0000b"}]', "\x00\xff",
     '[], "modules": []'],
)  # fmt: skip
def test_damaged_files_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"modules\.json|config\.json"):
        read_pooling(tmp_path, {})
