"""Which files of a Hugging Face folder are its weights, what they hold, and what is wrong with them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from octavo.errors import CheckpointError
from octavo.models.loader import open_checkpoint
from tests.checkpoint.opening import OLD, open_folder

TENSORS: dict[str, np.ndarray] = {
    "model.embed_tokens.weight": np.arange(96 * 32, dtype=np.float16).reshape(96, 32),
    "model.norm.weight": np.ones(32, np.float32),
    "lm_head.weight": np.ones((96, 32), np.float16),
    "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One weights file; just enough tensors to be read, which a model would find too few."""
    (tmp_path / "config.json").write_text(json.dumps(OLD))
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    names = sorted(TENSORS)
    shards = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for shard, held in shards.items():
        save_file({name: TENSORS[name] for name in held}, folder / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("layout", ["folder", "sharded"])
def test_tensors_are_read_from_one_file_or_shards(layout: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(layout)
    checkpoint = open_folder(path)
    assert set(checkpoint.tensors) == {name for name in TENSORS if "inv_freq" not in name}
    for file in path.glob("*.safetensors"):
        for name, expected in load_file(file).items():
            if name in checkpoint.tensors:
                assert checkpoint.tensors[name].shape == expected.shape
                assert checkpoint.tensors[name].dtype == {"float16": "F16", "float32": "F32"}[str(expected.dtype)]
                assert checkpoint.read(name).tobytes() == expected.tobytes()
    assert checkpoint.config.dtype == "float16"
    assert checkpoint.vocabulary is None


def test_an_output_matrix_beside_tied_embeddings_is_left_out(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(OLD | {"tie_word_embeddings": True}))
    assert "lm_head.weight" not in open_folder(folder).tensors


@pytest.mark.parametrize(
    "names",
    [
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["model-00001-of-00001.safetensors"],
        ["weights.safetensors"],
        ["pytorch_model-1-of-2.safetensors", "pytorch_model-2-of-2.safetensors"],
        ["model-00001-of-00001.safetensors", "adapter_model.safetensors", "consolidated.safetensors"],
    ],
)
def test_weights_without_an_index_are_found_by_their_names(folder: Path, names: list[str]) -> None:
    (folder / "model.safetensors").unlink()
    stored = sorted(TENSORS)
    own = [name for name in names if not name.startswith(("adapter", "consolidated"))]
    for i, name in enumerate(own):
        save_file({key: TENSORS[key] for key in stored[i :: len(own)]}, folder / name)
    for name in set(names) - set(own):
        save_file({"other": np.ones(2, np.float32)}, folder / name)
    checkpoint = open_checkpoint(str(folder))
    assert set(checkpoint.tensors) == {name for name in TENSORS if "inv_freq" not in name}


def test_an_index_of_another_name_is_found(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").rename(sharded / "pytorch_model.safetensors.index.json")
    assert set(open_folder(sharded).tensors) == {name for name in TENSORS if "inv_freq" not in name}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], "of 3 shards, 1 are missing: 2"),
        (["model-00001-of-00002.safetensors", "model-00002-of-00003.safetensors"], "not the shards of one model"),
        (["model-00001-of-999999999.safetensors"], "not the shards of one model"),
        (["a.safetensors", "b.safetensors"], "several sets of weights.*a, b"),
    ],
)
def test_shards_that_make_no_model_are_named(folder: Path, names: list[str], message: str) -> None:
    for name in names:
        (folder / name).write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "name",
    [
        "model.rotary_emb.inv_freq",
        "rotary_emb.inv_freq",
        "model.rotary_emb_local.inv_freq",
        "model.layers.1.self_attn.rotary_emb.cos_cached",
        "model.layers.0.self_attn.masked_bias",
        "embeddings.token_type_ids",
    ],
)
def test_buffers_that_follow_from_the_configuration_are_left_out(folder: Path, name: str) -> None:
    save_file(TENSORS | {name: np.ones(4, np.float32)}, folder / "model.safetensors")
    assert set(open_folder(folder).tensors) == {name for name in TENSORS if "inv_freq" not in name}


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        open_folder(sharded)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors: tensor 'model\.extra\.weight'"):
        open_folder(sharded)


def test_the_index_decides_which_of_two_shards_holds_a_tensor(sharded: Path) -> None:
    weight_map = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    save_file(TENSORS, sharded / "model-00002-of-00002.safetensors")
    checkpoint = open_folder(sharded)
    assert {name: info.path.name for name, info in checkpoint.tensors.items()} == {
        name: shard for name, shard in weight_map.items() if "inv_freq" not in name
    }


def test_a_tensor_in_two_shards_is_named_where_no_index_decides(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    save_file(TENSORS, sharded / "model-00002-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is also in model-00001"):
        open_folder(sharded)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "x.bin", 3, "a/model.safetensors"])
def test_an_index_cannot_lead_out_of_its_folder(sharded: Path, shard: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="weight_map is not an object of tensor names and file names"):
        open_folder(sharded)


def test_a_truncated_weights_file_is_named_with_the_tensor(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor '.*truncated"):
        open_folder(folder)


def test_an_unknown_tensor_type_is_named(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data.replace(b'"F16"', b'"F17"'))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* unknown type 'F17'"):
        open_folder(folder)


def test_pytorch_files_are_refused_with_the_remedy(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"\.bin and \.pth files are not read.*save_pretrained"):
        open_folder(folder)


def test_a_folder_without_weights_or_with_damaged_json_is_told(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: the file is not valid JSON"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{{ '<|im_start|>user' + messages[0]['content'] + '<|im_end|>' }}", (3, 4)),
        ({"default": "<|im_end|>", "tool_use": "<|eot_id|>"}, (3, 4)),
        ("<|end|> and <|return|>", (3, 6)),  # gpt-oss ends a message by the first, a turn by the second
        ("{{ messages[0]['content'] }}", (3,)),
        (None, (3,)),
    ],
)
def test_the_end_of_turn_that_the_chat_template_writes_ends_a_turn(folder: Path, template: Any, ends: Any) -> None:
    (folder / "config.json").write_text(json.dumps(OLD | {"eos_token_id": 3}))
    added = {"<|im_end|>": 4, "<|end|>": 5, "<|return|>": 6, "<|eot_id|>": 7}
    tokens = [{"id": token_id, "content": content} for content, token_id in added.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}, "added_tokens": tokens}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert open_folder(folder).config.eos_token_ids == ends
