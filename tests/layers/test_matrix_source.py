"""Slices of a matrix put together are the whole, bit for bit, whatever the file stores; ranks make the same product."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import TensorInfo
from octavo.devices.registry import open_device
from octavo.errors import ConfigError
from octavo.kernels.ops import Ops
from octavo.kernels.quantized import QuantizedForm, QuantizedMatrix
from octavo.layers.context import StepContext
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.linear import Linear
from octavo.layers.matrix_source import MatrixSource, StoredMatrix
from octavo.layers.quantization import SUPPORTED_TYPES, dequantize, quantize_int4, quantize_int8, unpermute_rope
from octavo.layers.sharding import Ranks
from octavo.layers.weights import WeightFormat, WeightLoader
from octavo.models.llama import Args
from tests.layers.block_bytes import finite_blocks

ROWS, COLUMNS = 64, 1024


class Files:
    """A checkpoint in memory."""

    path, vocabulary = Path("memory"), None
    config = Args(
        model_type="llama", vocab_size=ROWS, hidden_size=COLUMNS, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=8, max_position_embeddings=8,
    )  # fmt: skip

    def __init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.data: dict[str, npt.NDArray[np.uint8]] = {}

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: npt.NDArray[np.generic], heads: int = 0) -> None:
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self.data[name] = flat
        self.tensors[name] = TensorInfo(
            name=name, shape=shape, dtype=dtype, path=self.path, offset=0, num_bytes=flat.size,
            rope_interleaved_heads=heads,
        )  # fmt: skip

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        return self.data[name]


def random_matrix(dtype: str, shape: tuple[int, int], seed: int = 0) -> npt.NDArray[np.generic]:
    if dtype in QUANTIZED_TYPES:
        return finite_blocks(dtype, shape, seed)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    return {
        "F32": values, "F16": values.half().view(torch.int16), "BF16": values.bfloat16().view(torch.int16)
    }[dtype].numpy()  # fmt: skip


def files_with(dtype: str, shape: tuple[int, int] = (ROWS, COLUMNS), heads: int = 0) -> Files:
    files = Files()
    files.add("w.weight", dtype, shape, random_matrix(dtype, shape), heads)
    return files


def columns_of(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def whole_of(dtype: str, files: Files, heads: int) -> torch.Tensor:
    """As the loader made it before there were slices."""
    dense = dequantize(files.read("w.weight"), dtype, (ROWS, COLUMNS), torch.float32)
    return unpermute_rope(dense, heads) if heads else dense


@pytest.mark.parametrize("dtype", SUPPORTED_TYPES)
@pytest.mark.parametrize("heads", [0, 4])
def test_slices_put_together_are_the_whole(dtype: str, heads: int) -> None:
    files = files_with(dtype, heads=heads)
    source = StoredMatrix(files, files.tensors["w.weight"])
    expected, every_row, every_column = whole_of(dtype, files, heads), slice(0, ROWS), slice(0, COLUMNS)
    assert torch.equal(source.dense(every_row, every_column, torch.float32), expected)
    group = 1 if source.form is None else source.form.group
    for row_step in (ROWS, ROWS // 2, 13):
        for column_step in (COLUMNS // 2, 7 * max(group, 16), group * 3):
            rows = [
                torch.cat([source.dense(r, c, torch.float32) for c in columns_of(COLUMNS, column_step)], dim=1)
                for r in columns_of(ROWS, row_step)
            ]
            assert torch.equal(torch.cat(rows), expected)
    if source.form is not None:
        matrix = source.quantized(every_row, every_column)
        assert torch.equal(matrix.dequantized(), expected)
        for r in columns_of(ROWS, 24):
            for c in columns_of(COLUMNS, 5 * group):
                part = source.quantized(r, c)
                assert torch.equal(part.values, matrix.values[r, c])
                assert torch.equal(part.dequantized(), expected[r, c])


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
def test_slices_quantised_at_load_are_the_whole_quantised(quantize: object) -> None:
    files = files_with("BF16")
    source = StoredMatrix(files, files.tensors["w.weight"])
    whole = quantize(source.dense(slice(0, ROWS), slice(0, COLUMNS), torch.float32))  # type: ignore[operator]
    for r in columns_of(ROWS, 24):
        for c in columns_of(COLUMNS, 96):
            part = quantize(source.dense(r, c, torch.float32))  # type: ignore[operator]
            assert torch.equal(part.values, whole.values[r, c])
            assert torch.equal(part.dequantized(), whole.dequantized()[r, c])


def test_a_stack_of_matrices_gives_each_expert() -> None:
    """As mixtures of experts are stored in GGUF: [experts, out, in]."""
    files = Files()
    files.add("w.weight", "Q4_K", (4, 16, COLUMNS), random_matrix("Q4_K", (ROWS, COLUMNS)))
    source = StoredMatrix(files, files.tensors["w.weight"])
    whole = dequantize(files.read("w.weight"), "Q4_K", (4, 16, COLUMNS), torch.float32)
    for rank in range(2):
        for expert in Ranks(rank, 2).experts(4):
            rows = slice(16 * expert, 16 * (expert + 1))
            assert torch.equal(source.quantized(rows, slice(0, COLUMNS)).dequantized(), whole[expert])


def context(ops: Ops, dtype: torch.dtype) -> StepContext:
    none = torch.zeros(0, dtype=torch.int32)
    return StepContext(ops, dtype, none, (), (), none, none, [])


FORMATS = [("BF16", "none"), ("F32", "none"), ("BF16", "int8"), ("F16", "int4"), ("Q4_1", "gguf"), ("Q6_K", "gguf")]


@pytest.mark.parametrize("name", ["REFERENCE", "CPU"])
@pytest.mark.parametrize(("dtype", "quantization"), FORMATS)
def test_two_ranks_make_the_product_of_one(name: str, dtype: str, quantization: str) -> None:
    """By columns bit for bit; by rows up to the order of additions: a rank's half is a sum of its own."""
    ops = open_device(name).ops
    files = files_with(dtype)
    for part, seed in (("q", 1), ("k", 2)):
        files.add(f"{part}.weight", dtype, (ROWS, COLUMNS), random_matrix(dtype, (ROWS, COLUMNS), seed))
    for part in "wqk":
        files.add(f"{part}.bias", "F32", (ROWS,), np.linspace(-1, 1, ROWS, dtype=np.float32))
    x = torch.randn((5, COLUMNS), generator=torch.Generator().manual_seed(9))
    ctx = context(ops, torch.float32)

    def product(ranks: Ranks, names: list[str], shard: str) -> torch.Tensor:
        loader = WeightLoader(files, ops, WeightFormat(torch.float32, quantization), ranks=ranks)
        linear = Linear(loader, names, COLUMNS, [ROWS] * len(names), True, shard)  # type: ignore[arg-type]
        columns = ranks.columns(shard, COLUMNS)  # type: ignore[arg-type]
        return linear(x[:, columns].contiguous(), ctx)

    one, halves = Ranks(), [Ranks(0, 2), Ranks(1, 2)]
    q, k = product(one, ["q", "k"], "column").split(ROWS, dim=1)
    parts = [product(ranks, ["q", "k"], "column").split(ROWS // 2, dim=1) for ranks in halves]
    assert torch.equal(torch.cat([part[0] for part in parts], dim=1), q)
    assert torch.equal(torch.cat([part[1] for part in parts], dim=1), k)
    whole = product(one, ["w"], "row")
    summed = product(halves[0], ["w"], "row") + product(halves[1], ["w"], "row")
    assert (summed - whole).abs().max() <= 1e-5 * whole.abs().max()


def test_a_vocabulary_is_cut_by_rows_and_its_padding_left_out() -> None:
    files = files_with("Q8_0")

    def rows(ranks: Ranks, padding: int) -> torch.Tensor:
        ops = Ops()
        loader = WeightLoader(files, ops, WeightFormat(torch.float32, "gguf"), ranks=ranks)
        return loader.matrix(["w.weight"], COLUMNS, [ROWS - padding], "vocabulary", padding).data

    whole = rows(Ranks(), 0)
    assert torch.equal(rows(Ranks(), 3), whole[: ROWS - 3])
    assert torch.equal(torch.cat([rows(Ranks(rank, 4), 3) for rank in range(4)]), whole[: ROWS - 3])


def test_what_cannot_be_cut_is_told() -> None:
    with pytest.raises(ConfigError, match="63 outputs can't be cut evenly among 2 ranks"):
        Ranks(0, 2).rows("column", 63)
    with pytest.raises(ConfigError, match="96 inputs, quantised in groups of 32, can't be cut evenly among 2 ranks"):
        Ranks(0, 2).columns("row", 96, 32)


class ThreeTensors:
    """Bytes, zeros and scales of groups of 32, stored apart and transposed: what AWQ and GPTQ have, in small."""

    form = QuantizedForm(8, 32, 0, True, torch.float32)

    def __init__(self, files: Checkpoint, name: str) -> None:
        self.tensors = tuple(files.tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        self._files = files
        self.shape = self.tensors[0].shape[::-1]

    def dense(self, rows: slice, columns: slice, dtype: torch.dtype) -> torch.Tensor:
        return self.quantized(rows, columns).dequantized().to(dtype)

    def quantized(self, rows: slice, columns: slice) -> QuantizedMatrix:
        values, zeros = (torch.tensor(self._files.read(t.name)).view(t.shape).T[rows] for t in self.tensors[:2])
        scales = torch.tensor(self._files.read(self.tensors[2].name)).view(torch.float32).view(self.tensors[2].shape).T
        scales = scales[rows].contiguous()
        matrix = QuantizedMatrix(self.form, values.contiguous(), scales, (scales * zeros).contiguous())
        return matrix.columns(columns)


def test_a_source_may_be_made_of_several_tensors() -> None:
    rng, files = np.random.default_rng(5), Files()
    values = rng.integers(0, 256, (COLUMNS, ROWS), np.uint8)
    zeros = rng.integers(0, 256, (COLUMNS // 32, ROWS), np.uint8)
    scales = rng.random((COLUMNS // 32, ROWS), np.float32)
    files.add("w.qweight", "U8", values.shape, values)
    files.add("w.qzeros", "U8", zeros.shape, zeros)
    files.add("w.scales", "F32", scales.shape, scales)
    expected = torch.from_numpy(np.repeat(scales, 32, 0).T * (values.T.astype(np.float32))) - torch.from_numpy(
        np.repeat(scales * zeros, 32, 0).T.copy()
    )

    def find(checkpoint: Checkpoint, name: str) -> MatrixSource | None:
        return ThreeTensors(checkpoint, name.removesuffix(".weight"))

    ranks = [Ranks(0, 2), Ranks(1, 2)]
    for quantization in ("gguf", "none"):
        parts = []
        for rank in ranks:
            loader = WeightLoader(files, Ops(), WeightFormat(torch.float32, quantization), ranks=rank, find_source=find)
            parts.append(loader.matrix(["w.weight"], COLUMNS, [ROWS], "row").data)
            loader.finish()  # every one of the tensors was asked for
        assert torch.equal(torch.cat(parts, dim=1), expected)
