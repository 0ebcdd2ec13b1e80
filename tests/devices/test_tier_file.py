"""TierFile: blocks go to a file and come back as they were, and whatever the disk does is an answer."""

import logging
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from octavo.devices.cpu.tier_file import PAGE_BYTES, TierFile, TierLayout
from octavo.errors import ConfigError

NUM_POOL, NUM_TIER = 5, 7


def make_tier(folder: Path, layer_block_bytes: tuple[int, ...] = (4096, 4096, 192)) -> TierFile:
    return TierFile(str(folder), TierLayout(NUM_TIER, 16, "float32", layer_block_bytes), NUM_POOL)


def caches(tier: TierFile) -> list[torch.Tensor]:
    sizes = tier.layout.layer_block_bytes
    return [tier.cache(i, torch.uint8, (NUM_POOL + NUM_TIER, size)) for i, size in enumerate(sizes)]


def fill(tensors: list[torch.Tensor], block: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        tensor[block] = torch.randint(0, 256, tensor[block].shape, generator=generator, dtype=torch.uint8)
    return [tensor[block].clone() for tensor in tensors]


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("sizes", [(4096,), (192, 64, 12_288), (PAGE_BYTES + 64, 2048)])
def test_blocks_are_read_in_place_and_come_back_bit_for_bit(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    tier = make_tier(tmp_path, sizes)
    tensors = caches(tier)
    contents = [fill(tensors, block, seed=block) for block in range(NUM_POOL)]
    out = [(block, NUM_POOL + NUM_TIER - 1 - block) for block in range(NUM_POOL)]
    assert tier.copy(out).failed == []
    for tensor, parts in zip(tensors, zip(*contents, strict=True), strict=True):
        for (_, there), part in zip(out, parts, strict=True):
            assert torch.equal(tensor[there], part)
        tensor[:NUM_POOL] = 0
    assert tier.copy([(there, NUM_POOL - 1 - here) for here, there in out]).failed == []
    for tensor, parts in zip(tensors, zip(*contents, strict=True), strict=True):
        for block, part in enumerate(parts):
            assert torch.equal(tensor[NUM_POOL - 1 - block], part)


def test_copies_are_done_in_order(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tensors = caches(tier)
    first, second = fill(tensors, 0, seed=1), fill(tensors, 1, seed=2)
    assert tier.copy([(0, NUM_POOL), (1, NUM_POOL + 1), (NUM_POOL, 1), (NUM_POOL + 1, 0)]).failed == []
    assert [torch.equal(tensor[1], part) for tensor, part in zip(tensors, first, strict=True)] == [True] * 3
    assert [torch.equal(tensor[0], part) for tensor, part in zip(tensors, second, strict=True)] == [True] * 3


def test_the_file_is_private_and_has_no_name(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    status = os.fstat(tier._file)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    header = os.pread(tier._file, PAGE_BYTES, 0)
    assert header.startswith(b'octavoKV{"num_blocks": 7')
    assert b'"version": 1' in header


def test_a_block_that_changed_on_the_disk_is_not_read_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = make_tier(tmp_path)
    fill(caches(tier), 0, seed=3)
    assert tier.copy([(0, NUM_POOL), (0, NUM_POOL + 1)]).failed == []
    os.pwrite(tier._file, b"\xff\x00\xff", tier.layout.region_offsets()[1] + 5)
    assert tier.copy([(NUM_POOL, 1), (NUM_POOL + 1, 2)]).failed == [0]
    assert "checksum" in caplog.text


def test_a_disk_that_is_full_fails_the_copies_it_has_no_room_for_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = make_tier(tmp_path)
    fill(caches(tier), 0, seed=4)
    limit = tier.layout.region_offsets()[0] + 2 * 4096 + 100  # two blocks of the first layer, none of the others
    with caplog.at_level(logging.WARNING), file_size_limit(limit):
        assert tier.copy([(0, NUM_POOL), (0, NUM_POOL + 1)]).failed == [0, 1]
    assert len(caplog.records) == 1
    assert "--kv-cache-dir" in caplog.text
    assert tier.copy([(0, NUM_POOL)]).failed == []


def test_a_folder_or_a_disk_that_can_not_hold_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.*--kv-cache-dir"):
        make_tier(tmp_path / "nowhere")
    with file_size_limit(PAGE_BYTES), pytest.raises(ConfigError, match="--num-swap-blocks"):
        make_tier(tmp_path)
    with pytest.raises(ConfigError, match="multiples of 64"):
        make_tier(tmp_path, (100,))


def test_blocks_are_brought_into_memory_before_they_are_read(tmp_path: Path) -> None:
    tier = make_tier(tmp_path)
    tensors = caches(tier)
    fill(tensors, 0, seed=5)
    tier.copy([(0, NUM_POOL + i) for i in range(NUM_TIER)])
    tier.populate(torch.tensor([-1, 0, NUM_POOL + 2, NUM_POOL + 3, NUM_POOL + 6], dtype=torch.int32).numpy())
    os.ftruncate(tier._file, PAGE_BYTES)
    with pytest.raises(OSError, match=r"address"):
        tier.populate(torch.tensor([NUM_POOL + 2], dtype=torch.int32).numpy())
