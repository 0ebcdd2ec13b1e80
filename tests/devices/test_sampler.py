"""The sampler against its definition, written out for one row in plain numpy."""

import math
import tracemalloc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from octavo.core.step import NewRequest, ScheduledRequest, TokenLogprobs, TokenMask
from octavo.devices.device import Device, Sampler, StepBuffers, StepRoom
from octavo.devices.registry import open_device
from octavo.kernels.philox import uniform
from octavo.sampling_params import SamplingParams

VOCAB = 3000  # more than the sampler's candidates, so that both of its paths are taken


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is of both: `_sampler` makes samplers over it."""
    device, room = open_device(request.param), StepRoom(4000, 4000, 4000, 100, 16, 1, VOCAB)
    monkeypatch.setattr(Under, "device", device, raising=False)
    monkeypatch.setattr(Under, "buffers", device.make_step_buffers(room), raising=False)


class Under:
    """What is tested, with room for 4000 rows of logits."""

    device: Device
    buffers: StepBuffers


def _sampler(params: list[SamplingParams], prompt: list[int] | None = None, stop: tuple[int, ...] = ()) -> Sampler:
    sampler = Under.device.make_sampler(VOCAB, Under.buffers)
    for row, one in enumerate(params):
        sampler.add(row, NewRequest(row, prompt or [1, 2, 3], one, seed=100 + row, stop_token_ids=stop))
    return sampler


class Sampled(NamedTuple):
    """Of requests that have one row of logits each."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failed: dict[int, str]


def _sample(
    sampler: Sampler,
    logits: npt.NDArray[np.float32],
    rows: list[int],
    positions: npt.NDArray[np.int32],
    masks: Mapping[int, TokenMask] = MappingProxyType({}),
) -> Sampled:
    """The rows' requests are computed up to these positions, from which a token is sampled."""
    Under.buffers.fill(rows, [ScheduledRequest(row, int(p), 0, 1, ()) for row, p in zip(rows, positions, strict=True)])
    sampler.prepare(rows, [1] * len(rows))
    sampled = sampler.sample(torch.from_numpy(logits), {i: [mask] for i, mask in masks.items()})
    logprobs = [None if entry is None else entry[0] for entry in sampled.logprobs]
    return Sampled([token_id for (token_id,) in sampled.token_ids], logprobs, sampled.failed)


def _logits(rows: int, seed: int, spread: float = 3.0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, VOCAB), dtype=np.float32) * np.float32(spread)


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    exact = logits.astype(np.float64)
    result: npt.NDArray[np.float64] = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    return result


def _positions(rows: int, position: int = 10) -> npt.NDArray[np.int32]:
    return np.full(rows, position, dtype=np.int32)


def _kept_by_definition(logits: npt.NDArray[np.float32], params: SamplingParams) -> dict[int, float]:
    """Probabilities of the tokens that may be drawn, most likely first."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = [i for i in order if probs[i] >= params.min_p * probs[order[0]]]
    if params.top_k > 0:
        order = order[: params.top_k]
    total, before, kept = sum(probs[order]), 0.0, {}
    for i in order:
        if before >= params.top_p * total and kept:
            break
        kept[i] = float(probs[i])
        before += probs[i]
    return kept


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 2000},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.1},
    {"min_p": 1e-6},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.3, "top_p": 0.9},
    {"temperature": 5.0, "top_p": 0.99},
]


@pytest.mark.parametrize("options", FILTERS)
def test_a_drawn_token_is_the_definitions_for_the_same_noise(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    logits = _logits(40, seed=3)
    sampler = _sampler([params] * 40)
    token_ids = _sample(sampler, logits.copy(), [*range(40)], _positions(40)).token_ids
    noise = uniform(np.arange(100, 140, dtype=np.uint64), np.zeros(40, np.uint32), np.full(40, 10, np.uint32))
    for row, token_id in enumerate(token_ids):
        kept = _kept_by_definition(logits[row], params)
        filtered = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        order = list(kept) if filtered else sorted(kept)
        cumulative = np.cumsum([kept[i] for i in order])
        target = noise[row] * cumulative[-1]
        index = int(np.searchsorted(cumulative, target, side="right"))
        # float32 probabilities against float64: a target within rounding of an edge may fall on either side.
        near = [i for i in (index - 1, index, index + 1) if 0 <= i < len(order)]
        edges = [abs(cumulative[min(i, index)] - target) < 1e-5 for i in near]
        allowed = {order[index]} | {order[i] for i, edge in zip(near, edges, strict=True) if edge}
        assert int(token_id) in allowed


def test_draws_follow_the_distribution() -> None:
    logits = np.full((1, VOCAB), -math.inf, np.float32)
    logits[0, :4] = np.log([0.1, 0.2, 0.3, 0.4])
    rows = 4000
    sampler = _sampler([SamplingParams()] * rows)
    token_ids = _sample(sampler, logits.repeat(rows, axis=0), [*range(rows)], _positions(rows)).token_ids
    share = np.bincount(token_ids, minlength=4)[:4] / rows
    assert np.abs(share - [0.1, 0.2, 0.3, 0.4]).max() < 0.03


def test_a_rows_result_does_not_depend_on_the_batch() -> None:
    params = [SamplingParams(**FILTERS[i % len(FILTERS)], logprobs=5) for i in range(48)]
    logits = _logits(48, seed=9)
    together = _sample(_sampler(params), logits.copy(), [*range(48)], _positions(48))
    sampler = _sampler(params)
    for row in range(48):
        alone = _sample(sampler, logits[row : row + 1].copy(), [row], _positions(1))
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == together.logprobs[row]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [700, 20, 1500]] = 4.0
    params = [SamplingParams(temperature=0.0)] * 2
    assert _sample(_sampler(params), logits, [*range(2)], _positions(2)).token_ids == [0, 20]


def test_a_nan_fails_its_own_row_only() -> None:
    logits = _logits(3, seed=1)
    expected = logits.argmax(axis=-1)
    logits[1, 2999] = math.nan
    sampled = _sample(_sampler([SamplingParams(temperature=0.0)] * 3), logits, [*range(3)], _positions(3))
    assert list(sampled.failed) == [1]
    assert sampled.token_ids[::2] == expected[::2].tolist()


def test_logit_bias_and_penalties_change_the_choice_as_defined() -> None:
    base = np.zeros((1, VOCAB), np.float32)
    base[0, 5], base[0, 6], base[0, 7] = 3.0, 2.9, 2.8
    greedy = {"temperature": 0.0}
    biased = _sampler([SamplingParams(**greedy, logit_bias={7: 1.0})])
    assert _sample(biased, base.copy(), [0], _positions(1)).token_ids[0] == 7
    repeated = _sampler([SamplingParams(**greedy, repetition_penalty=1.5)], prompt=[5])
    assert [int(_sample(repeated, base.copy(), [0], _positions(1)).token_ids[0]) for _ in range(3)] == [6, 7, 5]
    present = _sampler([SamplingParams(**greedy, presence_penalty=0.15)], prompt=[5])
    assert [int(_sample(present, base.copy(), [0], _positions(1)).token_ids[0]) for _ in range(3)] == [5, 6, 5]
    frequent = _sampler([SamplingParams(**greedy, frequency_penalty=0.15)])
    assert [int(_sample(frequent, base.copy(), [0], _positions(1)).token_ids[0]) for _ in range(4)] == [5, 6, 5, 7]


def test_stop_tokens_are_not_sampled_before_min_tokens() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 9], logits[0, 4] = 5.0, 1.0
    sampler = _sampler([SamplingParams(temperature=0.0, min_tokens=2)], prompt=[1, 2, 3], stop=(9,))
    tokens = [int(_sample(sampler, logits.copy(), [0], _positions(1, p)).token_ids[0]) for p in (3, 4, 5)]
    assert tokens == [4, 4, 9]


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = _logits(1, seed=5)
    reference = _log_softmax(logits[0])
    params = SamplingParams(temperature=0.2, top_k=2, logprobs=3, logit_bias={17: 50.0})
    sampled = _sample(_sampler([params]), logits.copy(), [0], _positions(1))
    entry = sampled.logprobs[0]
    assert entry is not None
    assert sampled.token_ids[0] == 17
    assert entry.logprob == pytest.approx(float(reference[17]), abs=1e-5)
    assert entry.rank == int((reference > reference[17]).sum()) + 1
    assert [i for i, _ in entry.top] == np.argsort(-reference)[:3].tolist()


def test_extreme_temperatures_neither_fail_nor_divide_by_zero() -> None:
    logits = _logits(3, seed=6)
    best = int(logits[0].argmax())
    params = [SamplingParams(temperature=t) for t in (1e-300, 1e-4, 100.0)]
    sampled = _sample(_sampler(params), logits[:1].repeat(3, axis=0), [*range(3)], _positions(3))
    assert sampled.token_ids[:2] == [best, best]
    assert not sampled.failed


def test_only_allowed_tokens_are_sampled() -> None:
    logits = _logits(2, seed=8)
    params = [SamplingParams(temperature=t, allowed_token_ids=(9, 40), logit_bias={9: 5.0}) for t in (0.0, 5.0)]
    sampler = _sampler(params)
    drawn = [_sample(sampler, logits.copy(), [*range(2)], _positions(2, p)).token_ids for p in range(10, 60)]
    assert {greedy for greedy, _ in drawn} == {9 if logits[0, 9] + 5 > logits[0, 40] else 40}
    assert {random for _, random in drawn} == {9, 40}


def test_the_last_token_of_a_bad_word_is_not_sampled_after_the_others() -> None:
    base = np.zeros((1, VOCAB), np.float32)
    base[0, 5], base[0, 6], base[0, 7] = 3.0, 2.0, 1.0
    params = SamplingParams(temperature=0.0, bad_words=("x", "y"), bad_words_token_ids=((5, 5, 5), (6,)))
    sampler = _sampler([params], prompt=[5, 5])  # what is in the prompt does not count
    assert [int(_sample(sampler, base.copy(), [0], _positions(1)).token_ids[0]) for _ in range(6)] == [5, 5, 7, 5, 5, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_rules_out_every_token_fails_alone(temperature: float) -> None:
    logits = _logits(2, seed=2)
    barred = SamplingParams(temperature=temperature, allowed_token_ids=(9,), min_tokens=3, logprobs=2)
    sampler = _sampler([barred, SamplingParams(temperature=0.0)], stop=(9,))
    sampled = _sample(sampler, logits.copy(), [*range(2)], _positions(2, 3))
    assert list(sampled.failed) == [0]
    assert "No token is left" in sampled.failed[0]
    assert sampled.token_ids[1] == logits[1].argmax()


def _mask(*token_ids: int) -> bytes:
    return sum(1 << token_id for token_id in token_ids).to_bytes((VOCAB + 7) // 8 + 4, "little")


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_a_mask_rules_out_all_other_tokens_of_its_row_only(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, seed=1)] * 3
    logits = _logits(3, 5)
    for position in range(20):
        positions = _positions(3, position)
        free = _sample(_sampler(params), logits.copy(), [0, 1, 2], positions).token_ids
        masked = _sample(_sampler(params), logits.copy(), [0, 1, 2], positions, {1: _mask(3, 9, 17)}).token_ids
        assert masked[1] in (3, 9, 17)
        assert masked[::2] == free[::2]


def test_a_mask_of_end_tokens_alone_goes_before_min_tokens() -> None:
    sampler = _sampler([SamplingParams(min_tokens=90, max_tokens=100)], stop=(3, 4))
    assert _sample(sampler, _logits(1, 5), [0], _positions(1), {0: _mask(4)}).token_ids == [4]
    assert _sample(sampler, _logits(1, 5), [0], _positions(1), {0: _mask(4, 6)}).token_ids == [6]


def test_a_mask_that_contradicts_the_allowed_tokens_fails_the_row() -> None:
    sampler = _sampler([SamplingParams(allowed_token_ids=(5,))])
    assert list(_sample(sampler, _logits(1, 5), [0], _positions(1), {0: _mask(6)}).failed) == [0]


def test_requests_that_name_the_same_tokens_hold_them_once() -> None:
    """A thousand prompts with a bias for every token cost what one does."""
    every = tuple(range(VOCAB))
    stop = frozenset(every)
    params = SamplingParams(logit_bias=dict.fromkeys(every, 1.0), allowed_token_ids=every, min_tokens=2)
    sampler = Under.device.make_sampler(VOCAB, Under.buffers)
    tracemalloc.start()
    for row in range(500):
        sampler.add(row, NewRequest(row, [1, 2, 3], params, seed=row, stop_token_ids=stop))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 100 * VOCAB + 500 * 2000
    assert params.without_prompt_logprobs().logit_bias is params.logit_bias


MANY = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, top_p=0.9, logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.4),
    SamplingParams(temperature=0.7, bad_words=("x",), bad_words_token_ids=((5,), (6, 7), (7, 6, 5)), logprobs=1),
    SamplingParams(temperature=0.0, min_tokens=3, logit_bias={6: 1.0}, allowed_token_ids=(5, 6, 7, 8, 9)),
]


@pytest.mark.parametrize("params", MANY, ids=str)
def test_rows_behind_drafts_are_sampled_as_if_these_were_output(params: SamplingParams) -> None:
    """And what follows sees accepted tokens alone, however many drafts were right."""
    num_rows, start = 6, 10
    logits = _logits(1, seed=3).repeat(num_rows, axis=0)  # likely to repeat itself
    logits[:, [5, 6, 7, 8]] += 9.0
    masks = [_mask(5, 6, 7, 8, 9), _mask(6, 7, 8, 9), _mask(*range(100)), _mask(9, 8), _mask(5, 7), _mask(8, 7, 6)]
    one_by_one = _sampler([params], prompt=[1, 5, 3], stop=(8, 9))
    expected = [
        _sample(one_by_one, logits[:1].copy(), [0], _positions(1, start + j), {0: masks[j]}) for j in range(num_rows)
    ]
    tokens, logprobs = [one.token_ids[0] for one in expected], [one.logprobs[0] for one in expected]
    for num_right in range(4):
        sampler = _sampler([params], prompt=[1, 5, 3], stop=(8, 9))
        drafts = [*tokens[:num_right], *(token_id + 1 for token_id in tokens[num_right:3])]
        Under.buffers.write_tokens(0, start, drafts)
        Under.buffers.fill([0], [ScheduledRequest(0, start - 1, 4, 4, ())])
        sampler.prepare([0], [4])
        sampled = sampler.sample(torch.from_numpy(logits[:4].copy()), {0: masks[:4]})
        assert sampled.token_ids == [tokens[: num_right + 1]]
        if params.logprobs is not None:
            assert sampled.logprobs == [logprobs[: num_right + 1]]
        for j in range(num_right + 1, num_rows):
            after = _sample(sampler, logits[:1].copy(), [0], _positions(1, start + j), {0: masks[j]})
            assert after == expected[j]


def test_a_mask_that_is_too_short_is_an_error_and_leaves_no_other_masked() -> None:
    sampler, logits = _sampler([SamplingParams(temperature=0.0)] * 2), _logits(2, 5)
    with pytest.raises(IndexError, match="a mask of 8 bits for a vocabulary of 3000"):
        _sample(sampler, logits.copy(), [0, 1], _positions(2), {0: _mask(4), 1: b"x"})
    assert _sample(sampler, logits.copy(), [0, 1], _positions(2)).token_ids == logits.argmax(axis=-1).tolist()
