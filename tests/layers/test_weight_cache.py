"""Packed weights from the cache are those from the files, and a file that does not fit is not used."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.checkpoint.content_digest import content_digest
from octavo.devices.provider import ProviderName, resolve_ops
from octavo.kernels.ops import Weight
from octavo.layers import weight_cache
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.packed_file import PackedTensor
from octavo.layers.weight_cache import WeightCache
from octavo.layers.weights import WeightLoader
from tests.models.test_formats import MemoryCheckpoint

MIXED = ["F16", *QUANTIZED_TYPES]


def open_cache(
    checkpoint: MemoryCheckpoint, folder: Path | str, quantization: str = "gguf", provider: ProviderName = "cpu"
) -> WeightCache:
    return WeightCache(str(folder), checkpoint, resolve_ops(provider), torch.bfloat16, quantization, True, 2)


def load(
    checkpoint: MemoryCheckpoint,
    cache: WeightCache | None,
    quantization: str = "gguf",
    provider: ProviderName = "cpu",
) -> list[Weight | torch.Tensor]:
    """Weights of every kind, as a model asks for them."""
    loader = WeightLoader(checkpoint, resolve_ops(provider), torch.bfloat16, quantization=quantization, cache=cache)
    loaded: list[Weight | torch.Tensor] = [loader.matrix(["model.embed_tokens.weight"], 256, [300])]
    name = "model.layers.0."
    loaded.append(loader.matrix([f"{name}self_attn.{part}_proj.weight" for part in "qkv"], 256, [256, 128, 128]))
    loaded.append(loader.matrix([f"{name}mlp.down_proj.weight"], 512, [256]))
    loaded.append(loader.vector([f"{name}input_layernorm.weight", "model.norm.weight"], [256, 256]))
    loaded.append(loader.table("model.layers.1.mlp.gate_proj.weight", (512, 256)))
    return loaded


def save(cache: WeightCache) -> list[Path]:
    """The files written."""
    saved: list[Path] = []
    thread = cache.save_in_background(lambda path, _: saved.append(path))
    if thread is not None:
        thread.join()
    return saved


def fill(checkpoint: MemoryCheckpoint, folder: Path) -> Path:
    cache = open_cache(checkpoint, folder)
    load(checkpoint, cache)
    (path,) = save(cache)
    return path


def assert_same(actual: list[Weight | torch.Tensor], expected: list[Weight | torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        if isinstance(one, Weight) and isinstance(other, Weight):
            assert (one.num_rows, one.num_cols, one.form) == (other.num_rows, other.num_cols, other.form)
            assert one.int8_activations == other.int8_activations
            assert one.data.data_ptr() % 64 == 0
            one, other = one.data, other.data
        assert isinstance(one, torch.Tensor)
        assert isinstance(other, torch.Tensor)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.array_equal(one.view(torch.uint8).numpy(), other.view(torch.uint8).numpy())


@pytest.mark.parametrize("provider", ["cpu", "reference"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "gguf"])
def test_weights_from_the_cache_are_those_from_the_files(
    quantization: str, provider: ProviderName, tmp_path: Path
) -> None:
    checkpoint = MemoryCheckpoint(MIXED)
    expected = load(checkpoint, None, quantization, provider)
    first = open_cache(checkpoint, tmp_path, quantization, provider)
    assert first.path is None
    assert_same(load(checkpoint, first, quantization, provider), expected)
    (path,) = save(first)
    second = open_cache(checkpoint, tmp_path, quantization, provider)
    assert second.path == path
    assert_same(load(checkpoint, second, quantization, provider), expected)
    assert save(second) == []


def test_each_format_has_a_file_of_its_own(tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint(["Q4_1"])
    fill(checkpoint, tmp_path)
    for quantization, provider in (("none", "cpu"), ("int8", "cpu"), ("gguf", "reference")):
        assert open_cache(checkpoint, tmp_path, quantization, provider).path is None  # type: ignore[arg-type]


def test_a_changed_byte_of_the_checkpoint_is_noticed(tmp_path: Path) -> None:
    """Its size, names and dates being the same."""
    checkpoint = MemoryCheckpoint(["Q4_1"])
    path = fill(checkpoint, tmp_path)
    checkpoint.read("model.layers.0.mlp.down_proj.weight")[1000] ^= 1
    cache = open_cache(checkpoint, tmp_path)
    assert cache.path is None
    assert_same(load(checkpoint, cache), load(checkpoint, None))
    assert save(cache) == [path]
    assert open_cache(checkpoint, tmp_path).path == path


def test_the_digest_is_that_of_the_content_whatever_the_threads() -> None:
    one, same, other = MemoryCheckpoint(["Q4_1"]), MemoryCheckpoint(["Q4_1"]), MemoryCheckpoint(["Q5_1"])
    assert content_digest(one, 1) == content_digest(same, 3) != content_digest(other, 1)


@pytest.mark.parametrize("place", [3, 20, 200, -10_000])
def test_a_damaged_file_is_packed_again(place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Damage in the preamble, in the sizes, in the index, in a tensor."""
    checkpoint = MemoryCheckpoint(["Q4_1"])
    path = fill(checkpoint, tmp_path)
    data = bytearray(path.read_bytes())
    data[place] ^= 16
    path.write_bytes(data)
    cache = open_cache(checkpoint, tmp_path)
    assert cache.path is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert_same(load(checkpoint, cache), load(checkpoint, None))
    assert save(cache) == [path]
    assert open_cache(checkpoint, tmp_path).path == path


@pytest.mark.parametrize("num_bytes", [0, 10, 1000, 100_000])
def test_a_truncated_file_is_not_used(num_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = MemoryCheckpoint(["Q4_1"])
    os.truncate(fill(checkpoint, tmp_path), num_bytes)
    assert open_cache(checkpoint, tmp_path).path is None
    assert len(caplog.records) == 1


def test_what_a_file_lacks_is_packed_and_added(tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint(["Q4_1"])
    part = open_cache(checkpoint, tmp_path)
    WeightLoader(checkpoint, resolve_ops("cpu"), torch.bfloat16, quantization="gguf", cache=part).vector(
        ["model.norm.weight"], [256]
    )
    (path,) = save(part)
    small = path.stat().st_size
    cache = open_cache(checkpoint, tmp_path)
    assert_same(load(checkpoint, cache), load(checkpoint, None))
    assert save(cache) == [path]
    assert path.stat().st_size > small


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint(["Q4_1"])
    caches = [open_cache(checkpoint, tmp_path) for _ in range(4)]
    for cache in caches:
        load(checkpoint, cache)
    threads = [threading.Thread(target=save, args=(cache,)) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = tmp_path.iterdir()
    assert open_cache(checkpoint, tmp_path).path == path


def test_what_a_killed_writer_left_is_written_over(tmp_path: Path) -> None:
    checkpoint = MemoryCheckpoint(["Q4_1"])
    path = fill(checkpoint, tmp_path)
    path.rename(path.with_name(path.name + ".part"))
    assert fill(checkpoint, tmp_path) == path
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_to_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = MemoryCheckpoint(["Q4_1"])
    (tmp_path / "file").write_text("")
    cache = open_cache(checkpoint, tmp_path / "file")
    load(checkpoint, cache)
    assert save(cache) == []
    assert len(caplog.records) == 1
    assert "--weight-cache" in caplog.text


class TestAuto:
    @pytest.fixture(autouse=True)
    def folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
        (tmp_path / "model").mkdir()
        (tmp_path / "file").write_text("")  # nothing can be written below it, whoever the user is

    def load_auto(self, path: Path, seconds: float) -> list[Path]:
        """The files written where packing took so many seconds more than it did."""
        checkpoint = MemoryCheckpoint(["Q4_1"])
        checkpoint.path = path
        cache = open_cache(checkpoint, "auto")
        load(checkpoint, cache)
        cache.put("", PackedTensor(torch.zeros(1)), seconds)
        return save(cache)

    def test_tiny_models_are_not_kept(self, tmp_path: Path) -> None:
        assert self.load_auto(tmp_path / "model" / "m.gguf", 1e6) == []

    @pytest.mark.parametrize(("worth_seconds", "seconds", "is_kept"), [(1e3, 1e6, True), (1e9, 1e6, False)])
    def test_what_takes_long_to_pack_is_kept_beside_the_model(
        self, worth_seconds: float, seconds: float, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(weight_cache, "WORTH_BYTES", 0)
        monkeypatch.setattr(weight_cache, "WORTH_SECONDS", worth_seconds)
        saved = self.load_auto(tmp_path / "model" / "m.gguf", seconds)
        assert [path.parent for path in saved] == [tmp_path / "model"] * is_kept

    def test_or_in_the_users_cache_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(weight_cache, "WORTH_BYTES", 0)
        (path,) = self.load_auto(tmp_path / "file" / "m.gguf", 1e6)
        assert path.parent == tmp_path / "user" / "octavo"
