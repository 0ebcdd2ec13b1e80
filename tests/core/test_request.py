"""Request and RequestLimits: where an output ends, and which requests are refused with which numbers."""

import pytest

from octavo.core.request import Request, RequestLimits
from octavo.errors import ContextLengthError, InvalidRequestError
from octavo.sampling_params import SamplingParams

EOS, STOP = 2, 7
LIMITS = RequestLimits(vocab_size=100, max_model_len=50, kv_capacity_tokens=32)


def make_request(*, max_tokens: int = 8, stop: tuple[int, ...] = (STOP,), **params: object) -> Request:
    sampling_params = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, **params)  # type: ignore[arg-type]
    return Request(0, [1, 1], sampling_params, max_tokens, frozenset(stop), frozenset({EOS}), seed=0)


def test_an_ordinary_token_ends_nothing() -> None:
    assert make_request().append(5) is None


def test_end_of_sequence_stops_without_a_stop_reason() -> None:
    request = make_request()
    assert (request.append(EOS), request.stop_reason) == ("stop", None)


def test_a_stop_token_stops_and_is_named() -> None:
    request = make_request()
    assert (request.append(STOP), request.stop_reason) == ("stop", STOP)


def test_ignore_eos_ignores_it_unless_the_request_names_it() -> None:
    assert make_request(ignore_eos=True).append(EOS) is None
    assert make_request(ignore_eos=True, stop=(EOS,)).append(EOS) == "stop"
    assert make_request(ignore_eos=True).append(STOP) == "stop"


def test_no_stop_before_min_tokens() -> None:
    request = make_request(min_tokens=3)
    assert [request.append(EOS) for _ in range(3)] == [None, None, "stop"]


def test_max_tokens_ends_with_length_and_a_stop_there_is_a_stop() -> None:
    request = make_request(max_tokens=2)
    assert [request.append(5), request.append(5)] == [None, "length"]
    assert make_request(max_tokens=1).append(EOS) == "stop"


def test_the_token_that_reaches_max_tokens_is_not_computed() -> None:
    request = make_request(max_tokens=1)
    request.num_computed_tokens, request.num_placeholders = 2, 1
    assert request.gap == 0


@pytest.mark.parametrize(("prompt", "max_tokens"), [(1, 1), (20, 13), (32, 1), (1, 32), (32, None)])
def test_a_request_that_fits_exactly_passes(prompt: int, max_tokens: int | None) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    LIMITS.check([0] * prompt, params)
    assert LIMITS.max_tokens(prompt, params) == (max_tokens or 1)


@pytest.mark.parametrize(("prompt", "max_tokens"), [(20, 14), (33, 1), (33, None), (1, 33)])
def test_a_request_beyond_the_pool_is_refused_with_the_numbers(prompt: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthError) as refused:
        LIMITS.check([0] * prompt, SamplingParams(max_tokens=max_tokens))
    asked = max_tokens or 1
    assert "KV cache holds 32 tokens" in refused.value.message
    assert f"{prompt} tokens in the prompt and asks for {asked} more" in refused.value.message
    assert f"room for {prompt + asked - 1}." in refused.value.message
    assert "--kv-cache-memory-bytes" in refused.value.message


@pytest.mark.parametrize(("prompt", "max_tokens"), [(50, 1), (1, 50), (60, None)])
def test_a_request_beyond_the_context_is_refused_with_the_numbers(prompt: int, max_tokens: int | None) -> None:
    with pytest.raises(ContextLengthError) as refused:
        LIMITS.check([0] * prompt, SamplingParams(max_tokens=max_tokens))
    assert refused.value.code == "context_length_exceeded"
    assert "maximum context length is 50 tokens" in refused.value.message
    assert f"{prompt + (max_tokens or 1)} together" in refused.value.message
    assert "--max-model-len" in refused.value.message


def test_without_max_tokens_the_output_fills_what_is_left() -> None:
    params = SamplingParams(max_tokens=None)
    assert LIMITS.max_tokens(10, params) == 23
    assert RequestLimits(vocab_size=100, max_model_len=50, kv_capacity_tokens=1000).max_tokens(10, params) == 40


@pytest.mark.parametrize(("prompt", "says"), [([], "empty"), ([5, -1], "Token id -1"), ([100], "Token id 100")])
def test_a_prompt_that_is_no_prompt_is_refused(prompt: list[int], says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        LIMITS.check(prompt, SamplingParams())


def test_a_stop_token_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        LIMITS.check([1], SamplingParams(stop_token_ids=(100,)))
