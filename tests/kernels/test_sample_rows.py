"""`Ops.sample_rows` on every provider: exact where it is defined exactly, the same on all instruction sets."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.devices.cpu import ops as cpu
from octavo.devices.cpu.ops import CpuOps
from octavo.kernels.ops import Ops
from octavo.kernels.quantized import QuantizedForm
from octavo.kernels.sampling import GOOD, NOT_FINITE, NOTHING_LEFT, SampleRows, make_draws, mask_bytes, rows_of
from tests.kernels.expected import random_quantized

VOCAB = 2500  # neither a multiple of a vector's lanes, nor of a mask's byte, nor of a block
FILTERS = [(-1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.8, 0.01), (0, 0.999999, 0.0)]


def make_logits(num_rows: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((num_rows, VOCAB), dtype=np.float32) * np.float32(3)


def make_rows(num_rows: int, temperature: float = 0.0) -> SampleRows:
    rows = rows_of(make_draws(num_rows))
    rows["seed"], rows["position"] = np.arange(num_rows, dtype=np.uint64) + np.uint64(2**63), 9
    rows["top_p"], rows["temperature"] = 1.0, temperature
    return rows


def sample(
    ops: Ops, logits: npt.NDArray[np.float32], rows: SampleRows, masks: npt.NDArray[np.uint8] | None = None
) -> None:
    """`ops.sample_rows` over these arrays."""
    rows["is_masked"] = masks is not None
    if masks is None:
        masks = np.zeros((len(rows), mask_bytes(logits.shape[1])), np.uint8)
    ops.sample_rows(torch.from_numpy(logits), draws_of(rows), torch.from_numpy(masks))


def draws_of(rows: SampleRows) -> torch.Tensor:
    return torch.from_numpy(rows.view(np.uint8).reshape(len(rows), -1))


def masks(num_rows: int, share: float) -> npt.NDArray[np.uint8]:
    allowed = np.random.default_rng(1).random((num_rows, VOCAB)) < share
    allowed[:, 1234] = True
    return np.packbits(allowed, axis=1, bitorder="little")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_greedy_rows_take_the_first_of_the_largest_allowed(ops: Ops, share: float) -> None:
    logits = np.round(make_logits(24))  # many equals, zeros of both signs among them
    logits[0] = np.where(np.arange(VOCAB) % 2, 0.0, -0.0)
    bits, rows = masks(24, share), make_rows(24)
    allowed = np.unpackbits(bits, axis=1, count=VOCAB, bitorder="little")
    expected = np.where(allowed, logits, -np.inf).argmax(axis=1)
    sample(ops, logits, rows, bits)
    assert rows["status"].tolist() == [GOOD] * 24
    assert rows["token_id"].tolist() == expected.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_says_why(ops: Ops, temperature: float) -> None:
    logits, rows = make_logits(6), make_rows(6, temperature)
    logits[0, 2499], logits[1, 7], logits[2], logits[5, 3] = np.nan, np.inf, -np.inf, -np.inf
    logits[3, 100] = np.copysign(np.nan, -1)
    bits = np.full((6, mask_bytes(VOCAB)), 255, np.uint8)
    bits[4] = 0
    sample(ops, logits, rows, bits)
    assert rows["status"].tolist() == [NOT_FINITE] * 4 + [NOTHING_LEFT, GOOD]


def test_draws_agree_with_the_reference(native: CpuOps) -> None:
    for top_k, top_p, min_p in FILTERS:
        results = []
        for ops in (Ops(), native):
            rows = make_rows(100, 0.8)
            rows["top_k"], rows["top_p"], rows["min_p"] = top_k, top_p, min_p
            sample(ops, make_logits(100), rows)
            results.append(rows["token_id"])
        assert np.count_nonzero(results[0] != results[1]) <= 1  # noise within rounding of an edge


def test_a_row_alone_equals_the_row_among_others_on_every_instruction_set() -> None:
    results, before = [], cpu.isa()
    for isa in cpu.supported_isas():
        cpu.set_isa(isa)
        together = make_rows(30, 0.7)
        together["top_p"][::2] = 0.95
        alone = together.copy()
        sample(CpuOps(), make_logits(30), together)
        for i in range(30):
            sample(CpuOps(), make_logits(30)[i : i + 1].copy(), alone[i : i + 1])
        results += [together["token_id"].tolist(), alone["token_id"].tolist()]
    cpu.set_isa(before)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("vocab_size", [1, 31, 390, 2500])
@pytest.mark.parametrize("num_rows", [1, 3, 30, 135])
def test_the_most_likely_tokens_are_those_of_the_stored_logits(ops: Ops, num_rows: int, vocab_size: int) -> None:
    torch.manual_seed(num_rows)
    form = QuantizedForm(4, 32, 0, True, torch.float16)
    dense, matrix = torch.randn(vocab_size, 70), random_quantized(form, vocab_size, 70)
    dense[vocab_size // 2 :] = dense[: vocab_size - vocab_size // 2].clone()  # equals
    x = torch.randn(num_rows, 70)
    x[0] = 0.0
    if num_rows > 2:
        x[1, 3], x[2] = torch.nan, torch.inf
    packed = [
        ops.pack(dense),
        ops.pack(dense.bfloat16()),
        ops.pack_quantized(matrix),
        ops.pack_quantized(matrix, False),
    ]
    for weight in packed:
        expected, actual = make_rows(num_rows), make_rows(num_rows)
        sample(ops, ops.linear(x, weight, None, torch.float32).numpy(), expected)
        ops.most_likely(x, weight, draws_of(actual))
        assert actual["status"].tolist() == expected["status"].tolist()
        good = expected["status"] == GOOD
        assert actual["token_id"][good].tolist() == expected["token_id"][good].tolist()
        assert good[0]
        assert num_rows < 3 or good.sum() == num_rows - 2
