"""Whatever the bytes, opening a file succeeds or raises CheckpointError, soon and without much memory."""

import json
import struct
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from octavo.checkpoint.gguf_format import GGUFFile
from octavo.checkpoint.hf_config import parse_config
from octavo.checkpoint.safetensors import SafetensorsFile
from octavo.errors import CheckpointError
from octavo.models.loader import families
from tests.checkpoint.gguf_files import tiny_tensors, write_gguf
from tests.checkpoint.opening import open_gguf

MAX_S = 2.0
U64_MAX = 2**64 - 1
DATA_BYTES = sum(tensor.nbytes for tensor in tiny_tensors("llama").values())
INTERESTING = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, U64_MAX, 2**60, 100_000_000])
MUTATION = st.one_of(
    st.tuples(st.just("byte"), st.floats(0, 1, exclude_max=True), st.integers(0, 255)),
    st.tuples(st.just("word"), st.floats(0, 1, exclude_max=True), INTERESTING),
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.just(0)),
)
FUZZ = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def mutate(data: bytes, mutations: list[tuple[str, float, int]], reach: int) -> bytes:
    """`data` with changes at fractions of its first `reach` bytes."""
    changed = bytearray(data)
    for kind, where, value in mutations:
        at = int(where * min(reach, len(changed)))
        if kind == "byte":
            changed[at : at + 1] = bytes([value])
        elif kind == "word":
            changed[at : at + 8] = struct.pack("<Q", value)
        else:
            del changed[at:]
    return bytes(changed)


def complaint(open_it: Callable[[], object]) -> str:
    """The CheckpointError's message, or nothing where opening succeeded."""
    try:
        open_it()
    except CheckpointError as error:
        return str(error)
    return ""


def assert_opens_or_complains(kind: Any, path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)  # a new file: earlier mappings must keep theirs
    path.write_bytes(data)
    start = time.process_time()

    def open_and_check_bounds() -> None:
        assert all(info.offset + info.num_bytes <= len(data) for info in kind(path).tensors.values())

    message = complaint(open_and_check_bounds)
    assert message == "" or str(path) in message
    assert len(message) < 2000
    assert time.process_time() - start < MAX_S


# Not fixtures: hypothesis would print them whole with a failing example.
@cache
def gguf_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return write_gguf(Path(folder) / "m.gguf").read_bytes()


@cache
def safetensors_bytes() -> bytes:
    tensors: dict[str, np.ndarray] = {"a.weight": np.ones((4, 8), np.float32), "b": np.ones(3, np.float16)}
    return bytes(save(tensors, metadata={"format": "pt"}))


@FUZZ
@given(mutations=st.lists(MUTATION, min_size=1, max_size=4))
def test_a_damaged_gguf_is_a_checkpoint_error(tmp_path: Path, mutations: list[tuple[str, float, int]]) -> None:
    data = mutate(gguf_bytes(), mutations, reach=len(gguf_bytes()) - DATA_BYTES)
    assert_opens_or_complains(open_gguf, tmp_path / "m.gguf", data)


def test_a_gguf_cut_anywhere_is_a_checkpoint_error(tmp_path: Path) -> None:
    path, whole = tmp_path / "m.gguf", gguf_bytes()
    for length in [*range(0, len(whole) - DATA_BYTES, 7), len(whole) - 1]:
        path.unlink(missing_ok=True)
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"m\.gguf"):
            open_gguf(path)


@FUZZ
@given(data=st.binary(max_size=200))
@example(b"")
@example(struct.pack("<4sIQQ", b"GGUF", 3, U64_MAX, U64_MAX))
@example(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**40))  # 2^40 strings
@example(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 9) + struct.pack("<IQ", 9, 1) * 900)
@example(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
@example(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
def test_random_bytes_are_a_checkpoint_error(tmp_path: Path, data: bytes) -> None:
    for kind in (GGUFFile, SafetensorsFile):
        if kind is GGUFFile and not data.startswith(b"GGUF"):
            data = b"GGUF" + struct.pack("<I", 3) + data
        assert_opens_or_complains(kind, tmp_path / "file", data)


def test_a_big_endian_gguf_and_an_old_one_are_told(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0))
    with pytest.raises(CheckpointError, match="big-endian"):
        GGUFFile(path)
    path.unlink()
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0))
    with pytest.raises(CheckpointError, match="version 1 is not supported"):
        GGUFFile(path)


def test_duplicate_keys_and_tensors_are_told(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    key = struct.pack("<Q1sII", 1, b"k", 4, 7)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + key + key)
    with pytest.raises(CheckpointError, match=r"'k'.*twice"):
        GGUFFile(path)
    path.unlink()
    tensor = struct.pack("<Q1sIQIQ", 1, b"t", 1, 4, 0, 0)
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 2, 0) + tensor + tensor + bytes(64))
    with pytest.raises(CheckpointError, match=r"'t'.*twice"):
        GGUFFile(path)


@FUZZ
@given(mutations=st.lists(MUTATION, min_size=1, max_size=3))
def test_a_damaged_safetensors_is_a_checkpoint_error(tmp_path: Path, mutations: list[tuple[str, float, int]]) -> None:
    data = mutate(safetensors_bytes(), mutations, len(safetensors_bytes()))
    assert_opens_or_complains(SafetensorsFile, tmp_path / "m.safetensors", data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F33", ""]) | JSON,
        "shape": st.lists(st.integers(-2, 2**70), max_size=10) | JSON,
        "data_offsets": st.lists(st.integers(-2, 2**70), max_size=3) | JSON,
    },
)


@FUZZ
@given(header=st.dictionaries(st.text(max_size=5), ENTRY | JSON, max_size=3) | JSON)
def test_any_json_as_a_safetensors_header_is_a_checkpoint_error(tmp_path: Path, header: Any) -> None:
    text = json.dumps(header).encode()
    data = struct.pack("<Q", len(text)) + text + bytes(64)
    assert_opens_or_complains(SafetensorsFile, tmp_path / "m.safetensors", data)


def test_a_deeply_nested_header_is_a_checkpoint_error(tmp_path: Path) -> None:
    text = b'{"a":' * 100_000
    assert_opens_or_complains(
        SafetensorsFile, tmp_path / "m.safetensors", struct.pack("<Q", len(text)) + text + bytes(64)
    )


CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "use_sliding_window": True,
    "sliding_window": 4,
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
    "eos_token_id": [1, 2],
    "rms_norm_eps": 1e-6,
    "head_dim": 16,
    "dtype": "float32",
}


@FUZZ
@given(
    model_type=st.sampled_from(["llama", "mistral", "qwen2"]),
    changes=st.dictionaries(st.sampled_from(sorted(CONFIG)), JSON | INTERESTING, min_size=1, max_size=3),
    rope=st.dictionaries(
        st.sampled_from(["rope_type", "factor", "rope_theta", "truncate", "mscale"]), JSON, max_size=2
    ),
)
def test_any_value_in_config_json_is_a_checkpoint_error_or_fine(
    model_type: str, changes: dict[str, Any], rope: dict[str, Any]
) -> None:
    values = CONFIG | {"model_type": model_type, "rope_parameters": CONFIG["rope_parameters"] | rope} | changes

    def parse() -> None:
        config = parse_config(Path("config.json"), values, {}, families())
        assert len(config.sliding_windows) == config.num_hidden_layers

    message = complaint(parse)
    assert message == "" or "config.json" in message


def test_a_name_of_impossible_length_does_not_fill_the_message(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 50_000) + b"x" * 60_000)
    message = complaint(lambda: GGUFFile(path))
    assert "name is longer than 256 bytes" in message
    assert len(message) < 300 + len(str(path))
