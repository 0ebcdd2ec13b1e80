"""LengthPredictor and predicted_peak against what they estimate."""

import random

import pytest

from octavo.core.length_predictor import EDGES, LengthPredictor, predicted_peak

BUCKET = 2**0.25


def test_a_prediction_is_never_above_max_tokens_nor_short_of_the_next_token() -> None:
    predictor = LengthPredictor()
    for _ in range(500):
        predictor.observe(300, is_cut_off=False)
    assert predictor.predict(0, max_tokens=50) == 50
    assert predictor.predict(5_000, max_tokens=5_001) == 5_001
    assert predictor.predict(50, max_tokens=50) == 50
    assert predictor.predict(4_000, max_tokens=100_000) > 4_000


@pytest.mark.parametrize("num_tokens", [0, 50, 200])
def test_the_prediction_is_the_quantile_of_outputs_that_are_as_long_already(num_tokens: int) -> None:
    draw, predictor = random.Random(0), LengthPredictor(quantile=0.8)
    lengths = [int(draw.lognormvariate(5, 0.8)) for _ in range(2_000)]
    for length in lengths:
        predictor.observe(length, is_cut_off=False)
    longer = sorted(length for length in lengths if length >= num_tokens)
    exact = longer[int(0.8 * len(longer))]
    assert exact / BUCKET**1.5 < predictor.predict(num_tokens, max_tokens=10_000) < exact * BUCKET**1.5


def test_outputs_that_were_cut_off_do_not_pass_for_short_ones() -> None:
    draw, predictor = random.Random(1), LengthPredictor(quantile=0.5)
    for _ in range(2_000):
        length, limit = int(draw.expovariate(1 / 400)), draw.choice([50, 100, 5_000])
        predictor.observe(min(length, limit), is_cut_off=length >= limit)
    assert 400 * 0.69 / 1.4 < predictor.predict(0, max_tokens=10_000) < 400 * 0.69 * 1.4


def test_where_outputs_only_end_at_max_tokens_that_is_what_is_predicted() -> None:
    predictor = LengthPredictor()
    for _ in range(200):
        predictor.observe(1_000, is_cut_off=True)
    assert predictor.predict(0, max_tokens=1_000) == 1_000


def test_new_lengths_replace_old_ones() -> None:
    predictor = LengthPredictor()
    for length in [2_000] * 5_000 + [30] * 20_000:
        predictor.observe(length, is_cut_off=False)
    assert predictor.predict(0, max_tokens=10_000) < 50


def test_any_length_has_a_bucket() -> None:
    predictor = LengthPredictor()
    for length in (0, 1, 15, 16, 17, EDGES[-1] - 1, EDGES[-1], 10 * EDGES[-1]):
        predictor.observe(length, is_cut_off=False)
        predictor.observe(length, is_cut_off=True)
        assert predictor.predict(length, max_tokens=length + 5) > length


def test_the_peak_is_that_of_a_simulation() -> None:
    draw = random.Random(2)
    for _ in range(200):
        loads = [(draw.randrange(50), draw.randrange(20), draw.randrange(3)) for _ in range(draw.randrange(12))]
        simulated = 0
        for step in range(20):
            simulated = max(simulated, sum(held + step * rate for held, more, rate in loads if more >= step))
        assert predicted_peak(loads) == simulated
