"""What a request's parameters may cost is bounded before any work is done for them."""

import time

import pytest

from octavo import SamplingParams
from octavo.errors import InvalidRequestError
from octavo.sampling_params import MAX_BAD_WORD_CHARACTERS, MAX_STOP_CHARACTERS
from octavo.text.detokenizer import StopMatcher


@pytest.mark.parametrize(
    ("fields", "most"),
    [
        ({"stop": ("x" * (MAX_STOP_CHARACTERS + 1),)}, MAX_STOP_CHARACTERS),
        ({"stop": ("xy" * 100,) * 30}, MAX_STOP_CHARACTERS),
        ({"bad_words": ("x" * 5000,) * 2}, MAX_BAD_WORD_CHARACTERS),
    ],
)
def test_strings_are_bounded_in_length_and_together(fields: dict[str, tuple[str, ...]], most: int) -> None:
    (name,) = fields
    num_characters = sum(map(len, fields[name]))
    with pytest.raises(InvalidRequestError, match=f"{name} has {num_characters} .* {most}") as caught:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert caught.value.param == name


def test_ids_count_once() -> None:
    params = SamplingParams(allowed_token_ids=(5, 3, 5) * 1000, stop_token_ids=(9, 9, 2) * 1000)
    assert params.allowed_token_ids == (5, 3)
    assert params.stop_token_ids == (9, 2)


@pytest.mark.parametrize("name", ["allowed_token_ids", "stop_token_ids"])
def test_one_id_among_millions_is_found_and_named(name: str) -> None:
    start = time.thread_time()
    with pytest.raises(InvalidRequestError, match=f"{name} must be made of token ids of at least 0, got -1"):
        SamplingParams(**{name: [*range(1_000_000), -1]})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=f"{name} must be made of token ids below .* 49152"):
        SamplingParams(**{name: [5] * 3_000_000 + [49_152]}).check_vocabulary(49_152)  # type: ignore[arg-type]
    assert time.thread_time() - start < 3


def test_a_message_shows_no_more_than_a_line_of_a_value() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(temperature="x" * 1_000_000)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 200


def test_the_longest_stop_strings_cost_each_choice_nothing() -> None:
    stops = tuple(f"{i:02}" + "x" * (MAX_STOP_CHARACTERS // 64 - 2) for i in range(64))
    matchers = [StopMatcher(stops)]
    start = time.thread_time()
    matchers += [StopMatcher(stops) for _ in range(127)]
    assert time.thread_time() - start < 0.05
    assert all(matcher.feed(f"a{stops[7]}b") == (stops[7], len(stops[7]) + 1) for matcher in matchers)
