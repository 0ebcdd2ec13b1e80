"""Log-probabilities of a prompt: what they are, and that nothing around the request changes a bit of them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, RequestFailedError, SamplingParams
from octavo.devices.registry import open_device
from octavo.layers.weights import WeightFormat
from octavo.models.loader import CausalLM, load_model, open_checkpoint
from tests.models.driver import sequence_logits
from tests.tiny_models import make_folder

PROMPT = [2 + 37 * i % 380 for i in range(150)]  # more than two blocks of rows
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1, prompt_logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("prompt-logprobs"))


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), use_tqdm=False, attention_backend="CPU", **options)


def bits(llm: LLM, *prompts: list[int], params: SamplingParams = PARAMS) -> list[tuple[Any, ...]]:
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [(one.prompt_logprobs, one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[Any, ...]:
    """The prompt alone, in one step, without a cache."""
    (one,) = bits(load(folder, enable_prefix_caching=False, max_num_batched_tokens=512), PROMPT)
    return one


def test_each_is_the_prompt_token_s_in_the_softmax_of_the_logits_before_it(
    folder: Path, expected: tuple[Any, ...]
) -> None:
    checkpoint = open_checkpoint(str(folder))
    model = load_model(checkpoint, open_device("CPU").ops, WeightFormat(torch.float32), 512)
    logits = sequence_logits(model, open_device("CPU").ops, checkpoint.config, PROMPT)
    reference = torch.log_softmax(logits.double(), dim=-1)
    first, *rest = expected[0]
    assert first is None
    assert len(rest) == len(PROMPT) - 1
    for position, entry in enumerate(rest):
        row = reference[position]
        assert entry.logprob == pytest.approx(float(row[PROMPT[position + 1]]), abs=1e-5)
        assert entry.rank == int((row > row[PROMPT[position + 1]]).sum()) + 1
        assert [token_id for token_id, _ in entry.top] == row.topk(3).indices.tolist()


@pytest.mark.parametrize("max_num_batched_tokens", [1, 7, 64, 100])
def test_chunks_and_company_change_nothing(
    folder: Path, expected: tuple[Any, ...], max_num_batched_tokens: int
) -> None:
    llm = load(folder, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=4)
    first, *_, last = bits(llm, PROMPT, PROMPT[:20], PROMPT[5:], PROMPT)
    assert first == last == expected


def test_steps_in_flight_change_nothing(folder: Path, expected: tuple[Any, ...]) -> None:
    llm = load(folder, max_num_batched_tokens=48, async_scheduling=True)
    assert bits(llm, PROMPT, PROMPT[1:], PROMPT)[::2] == [expected] * 2


def test_a_cached_prompt_is_computed_all_the_same(folder: Path, expected: tuple[Any, ...]) -> None:
    llm = load(folder)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    ((_, *generated),) = bits(llm, PROMPT, params=params)
    assert generated == list(expected[1:])
    assert bits(llm, PROMPT) == [expected]
    assert llm.engine.stats().prefix_cache_hits == 0
    assert bits(llm, PROMPT, params=params) == [(None, *expected[1:])]
    assert llm.engine.stats().prefix_cache_hits > 0  # its own blocks can be shared


def test_preemption_while_the_prompt_is_read_repeats_and_loses_none(folder: Path, expected: tuple[Any, ...]) -> None:
    block_bytes = 16 * 3 * 2 * 2 * 16 * 4
    llm = load(folder, max_num_batched_tokens=8, kv_cache_memory_bytes=14 * block_bytes, admission_policy="greedy")
    assert llm.info.config.scheduler.num_blocks == 14
    # The first request's sixth block is taken from the second, of whose ten the last is half full.
    assert bits(llm, PROMPT[:60], PROMPT)[1] == expected
    assert llm.engine.stats().num_preemptions == 1


def test_a_prompt_is_scored_without_generating(folder: Path, expected: tuple[Any, ...]) -> None:
    llm = load(folder, max_model_len=len(PROMPT))  # and there is no room to generate
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=0, prompt_logprobs=3), use_tqdm=False)
    assert output.prompt_logprobs == expected[0]
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "length"
    assert llm.engine.stats().num_generation_tokens == 0
    assert llm.engine.stats().num_used_blocks == 0


def test_a_prompt_of_one_token_has_no_logprobs_to_tell(folder: Path) -> None:
    (output,) = load(folder).generate([[5]], SamplingParams(max_tokens=0, prompt_logprobs=0), use_tqdm=False)
    assert output.prompt_logprobs == [None]


class Watched:
    """A model that notes how many rows of logits are asked for at a time."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.most_rows = 0

    def __call__(self, input_ids: torch.Tensor, ctx: Any) -> torch.Tensor:
        return self.model(input_ids, ctx)

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: Any) -> torch.Tensor:
        self.most_rows = max(self.most_rows, len(rows))
        return self.model.logits(hidden_states, rows, ctx)


def test_logits_in_memory_are_bounded_however_long_the_prompt(folder: Path) -> None:
    llm = load(folder, max_num_batched_tokens=512, enforce_eager=True)
    runner = llm.engine.executor._runner.forward.model  # type: ignore[attr-defined]
    runner.model = Watched(runner.model)
    bits(llm, PROMPT * 3)
    assert runner.model.most_rows <= 64


def test_a_nan_in_the_prompt_fails_the_request(folder: Path) -> None:
    class Poisoned(Watched):
        def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: Any) -> torch.Tensor:
            logits = super().logits(hidden_states, rows, ctx)
            logits[rows == 7] = float("inf")
            return logits

    llm = load(folder, max_num_batched_tokens=512, enforce_eager=True)
    runner = llm.engine.executor._runner.forward.model  # type: ignore[attr-defined]
    runner.model = Poisoned(runner.model)
    with pytest.raises(RequestFailedError, match="not finite"):
        bits(llm, PROMPT)
    llm.engine.scheduler.check()
