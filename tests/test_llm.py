"""LLM: the offline API, on tiny random models."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import (
    LLM,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    InvalidRequestError,
    RequestFailedError,
    SamplingParams,
)
from octavo.sampling_params import BeamSearchOptions
from tests.tiny_models import make_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Altered:
    """A model whose hidden states pass through a function of them and the step's token ids."""

    def __init__(self, model: Any, alter: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        self.model = model
        self.logits, self.most_likely = model.logits, model.most_likely
        self.alter = alter

    def __call__(self, input_ids: torch.Tensor, ctx: object) -> torch.Tensor:
        hidden_states: torch.Tensor = self.model(input_ids, ctx)
        self.alter(input_ids, hidden_states)
        return hidden_states


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_folder(tmp_path_factory.mktemp("llm") / "tiny", "llama")
    return LLM(str(folder), use_tqdm=False, max_num_seqs=8)


@pytest.fixture(scope="module")
def eager_llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Whose model may be altered: it is called in every step."""
    folder = make_folder(tmp_path_factory.mktemp("llm") / "tiny", "llama")
    return LLM(str(folder), use_tqdm=False, max_num_seqs=8, enforce_eager=True)


def test_prompts_may_be_text_token_ids_or_dicts(llm: LLM) -> None:
    text = "the quick brown fox"
    ids = llm.tokenizer.encode(text)
    outputs = llm.generate([text, ids, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].prompt_token_ids == ids
    assert llm.generate(text, GREEDY, use_tqdm=False)[0].prompt == text


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    (output,) = llm.generate("over the lazy dog", GREEDY, use_tqdm=False)[0].outputs
    assert len(output.token_ids) == 12
    assert output.finish_reason == "length"
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_a_stop_string_ends_text_tokens_and_logprobs_together(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    (free,) = llm.generate("jumps over", params, use_tqdm=False)[0].outputs
    stop = free.text[len(free.text) // 2 :][:2]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1, stop=(stop,))
    (stopped,) = llm.generate("jumps over", params, use_tqdm=False)[0].outputs
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.logprobs is not None
    assert len(stopped.logprobs) == len(stopped.token_ids) < 12
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]


def test_n_completions_are_distinct_and_repeat_for_the_same_seed(llm: LLM) -> None:
    params = SamplingParams(n=4, seed=11, max_tokens=12, ignore_eos=True)
    first, again = (llm.generate("the forest", params, use_tqdm=False)[0] for _ in range(2))
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in first.outputs}) == 4
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in again.outputs]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_choices_that_share_a_prompt_are_those_of_requests_by_themselves(
    tmp_path: Path, enable_prefix_caching: bool
) -> None:
    folder = str(make_folder(tmp_path))
    params = SamplingParams(n=5, seed=3, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    results = []
    for max_num_seqs in (1, 8):  # with one seat nothing is shared
        llm = LLM(
            folder,
            use_tqdm=False,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=24,
            enable_prefix_caching=enable_prefix_caching,
        )
        prompts = [[50 + i % 7 for i in range(length)] for length in (15, 16, 17, 48, 50)]
        requests = llm.generate(prompts, params, use_tqdm=False)
        results.append([[(o.token_ids, o.logprobs) for o in request.outputs] for request in requests])
        results[-1].append([request.prompt_logprobs for request in requests])
        assert all(len(request.prompt_logprobs or ()) == len(request.prompt_token_ids) for request in requests)
    assert results[0] == results[1]
    assert llm.engine.stats().num_preemptions == 0


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    outputs = llm.generate(["the night"] * 4, params, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4


def test_chat_renders_the_template_and_stream_chat_joins_to_the_same_text(llm: LLM) -> None:
    messages = [{"role": "user", "content": "run"}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt == "<s>user\nrun</s>\n<s>assistant\n"
    assert "".join(llm.stream_chat(messages, GREEDY)) == answer.outputs[0].text


def test_a_stream_that_is_left_early_leaves_nothing_behind(llm: LLM) -> None:
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    stream = llm.stream_chat([{"role": "user", "content": "run"}], params)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.stats().num_used_blocks == 0


def test_an_interrupt_ends_a_run_between_steps_and_leaves_nothing_behind(eager_llm: LLM) -> None:
    runner = eager_llm.engine.executor._runner.forward.model  # type: ignore[attr-defined]
    model = runner.model

    runner.model = Altered(model, lambda input_ids, hidden_states: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            eager_llm.generate("the lazy dog", GREEDY, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, before)
        runner.model = model
    eager_llm.engine.scheduler.check()
    assert eager_llm.engine.stats().num_used_blocks == 0


def test_the_model_s_sampling_defaults_apply_where_no_parameters_are_given(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tiny", "llama")
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 5}')
    llm = LLM(str(folder), use_tqdm=False)
    assert llm.default_sampling_params(seed=3) == SamplingParams(temperature=0.0, max_tokens=5, seed=3)
    (own,) = llm.generate("the lazy dog", use_tqdm=False)
    (same,) = llm.generate("the lazy dog", SamplingParams(temperature=0.0, max_tokens=5), use_tqdm=False)
    assert own == same
    assert LLM(str(folder), use_tqdm=False, generation_config="none").default_sampling_params() == SamplingParams()


def test_a_bad_word_is_not_written(llm: LLM) -> None:
    (free,) = llm.generate("the quick brown", GREEDY, use_tqdm=False)[0].outputs
    words = {token_id: llm.tokenizer.token_text(token_id) for token_id in free.token_ids}
    token_id, word = next((i, word) for i, word in words.items() if llm.tokenizer.encode(word.strip()) == [i])
    (other,) = llm.generate("the quick brown", replace(GREEDY, bad_words=(word,)), use_tqdm=False)[0].outputs
    assert token_id not in other.token_ids


def test_one_bad_prompt_is_refused_before_any_runs(llm: LLM) -> None:
    received = llm.engine.stats().num_received
    with pytest.raises(ContextLengthError, match="500 tokens in the prompt and asks for 100 more, 600 together"):
        llm.generate([[5] * 10, [5] * 500], SamplingParams(max_tokens=100), use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="Token id 384 in the prompt is outside the vocabulary"):
        llm.generate([5, 384], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="2 sampling_params were given for 1 prompts"):
        llm.generate("fox", [GREEDY, GREEDY], use_tqdm=False)
    assert llm.engine.stats().num_received == received


def test_an_unknown_option_names_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"no option 'max_model_length'\. Did you mean 'max_model_len'"):
        LLM("somewhere", max_model_length=5)


def test_a_failing_step_fails_its_requests_and_the_next_ones_are_served(eager_llm: LLM) -> None:
    runner = eager_llm.engine.executor._runner.forward.model  # type: ignore[attr-defined]
    model = runner.model

    def fail(input_ids: torch.Tensor, hidden_states: torch.Tensor) -> None:
        raise RuntimeError("a kernel fell over")

    expected = eager_llm.generate("the lazy dog", GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    runner.model = Altered(model, fail)
    with pytest.raises(RequestFailedError, match="a kernel fell over"):
        eager_llm.generate("the lazy dog", GREEDY, use_tqdm=False)
    runner.model = model
    assert eager_llm.generate("the lazy dog", GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected
    eager_llm.engine.scheduler.check()


def test_a_nan_fails_its_own_request_only(eager_llm: LLM, tmp_path: Path) -> None:
    runner = eager_llm.engine.executor._runner.forward.model  # type: ignore[attr-defined]
    model = runner.model
    expected = [o.outputs[0].token_ids for o in eager_llm.generate([[7] * 5, [8] * 9], GREEDY, use_tqdm=False)]

    def poison(input_ids: torch.Tensor, hidden_states: torch.Tensor) -> None:
        hidden_states[input_ids == 9] = float("nan")

    runner.model = Altered(model, poison)
    try:
        with pytest.raises(RequestFailedError, match="not finite"):
            eager_llm.generate([[7] * 5, [9] * 7], GREEDY, use_tqdm=False)
    finally:
        runner.model = model
    assert [o.outputs[0].token_ids for o in eager_llm.generate([[7] * 5, [8] * 9], GREEDY, use_tqdm=False)] == expected


def test_one_request_may_use_the_whole_pool_however_many_could_run(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "llama")
    llm = LLM(str(folder), use_tqdm=False, max_num_seqs=64, kv_cache_memory_bytes=512 * 3 * 2 * 2 * 16 * 4)
    assert llm.info.config.scheduler.num_blocks == 512 // 16
    (output,) = llm.generate([7] * 480, SamplingParams(max_tokens=32, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 32


def test_two_streams_and_a_run_between_take_turns_on_one_engine(llm: LLM) -> None:
    messages = [{"role": "user", "content": "run"}]
    (alone,) = llm.chat(messages, GREEDY, use_tqdm=False)
    first, second = llm.stream_chat(messages, GREEDY), llm.stream_chat(messages, GREEDY)
    texts = [next(first), next(second)]
    (between,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert between.outputs[0].text == alone.outputs[0].text
    assert [text + "".join(stream) for text, stream in zip(texts, (first, second), strict=True)] == [
        alone.outputs[0].text
    ] * 2
    assert llm.engine.stats().num_used_blocks == 0


def test_a_stream_that_is_left_early_does_not_end_another(llm: LLM) -> None:
    messages = [{"role": "user", "content": "run"}]
    (alone,) = llm.chat(messages, GREEDY, use_tqdm=False)
    left, kept = llm.stream_chat(messages, GREEDY), llm.stream_chat(messages, GREEDY)
    text = next(kept)
    next(left)
    left.close()
    assert text + "".join(kept) == alone.outputs[0].text


def test_a_failure_reaches_the_call_whose_request_failed(eager_llm: LLM) -> None:
    runner = eager_llm.engine.executor._runner.forward.model  # type: ignore[attr-defined]
    model = runner.model

    def poison(input_ids: torch.Tensor, hidden_states: torch.Tensor) -> None:
        hidden_states[input_ids == 9] = float("nan")

    messages = [{"role": "user", "content": "run"}]
    runner.model = Altered(model, poison)
    try:
        text = "".join(eager_llm.stream_chat(messages, GREEDY))
        stream = eager_llm.stream_chat(messages, GREEDY)
        begun = next(stream)
        with pytest.raises(RequestFailedError, match="not finite"):
            eager_llm.generate([9] * 7, GREEDY, use_tqdm=False)
        assert begun + "".join(stream) == text
    finally:
        runner.model = model


def test_a_request_that_only_the_engine_refuses_leaves_no_other_behind(llm: LLM) -> None:
    """Beam search looks at so many tokens at a time that the model has to have them."""
    wide = SamplingParams(n=128, beam_search=BeamSearchOptions(), stop_token_ids=tuple(range(4, 304)), max_tokens=2)
    with pytest.raises(InvalidRequestError, match="n must be smaller for beam search"):
        llm.generate(["the night"] * 2, [GREEDY, wide], use_tqdm=False)
    assert not llm.engine.has_unfinished_requests
    assert llm.engine.stats().num_used_blocks == 0


SIGNALLED = """
import signal, sys
from octavo.llm import _interrupts_held_back

signal.signal(signal.SIGINT, getattr(signal, sys.argv[1]))
with _interrupts_held_back():
    signal.raise_signal(signal.SIGINT)
    print("the step ends", flush=True)
print("ignored", flush=True)
"""


@pytest.mark.parametrize(
    ("handler", "status", "output"),
    [("SIG_DFL", -signal.SIGINT, "the step ends\n"), ("SIG_IGN", 0, "the step ends\nignored\n")],
)
def test_an_interrupt_does_after_the_step_what_the_process_has_set(handler: str, status: int, output: str) -> None:
    run = subprocess.run([sys.executable, "-c", SIGNALLED, handler], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (status, output)


def test_none_means_the_default_as_in_vllm() -> None:
    unset: dict[str, Any] = dict.fromkeys(("stop", "stop_token_ids", "logit_bias", "bad_words"))
    assert SamplingParams(**unset) == SamplingParams()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "8"}, "--max-num-seqs must be a whole number, got '8'"),
        ({"max_num_seqs": True}, "--max-num-seqs must be a whole number, got True"),
        ({"max_model_len": 1.5}, "--max-model-len must be a whole number, got 1.5"),
        ({"enforce_eager": "yes"}, "--enforce-eager must be true or false, got 'yes'"),
        ({"swap_space": "4"}, "--swap-space must be a finite number, got '4'"),
        ({"swap_space": float("nan")}, "--swap-space must be a finite number, got nan"),
        ({"dtype": torch.float32}, "--dtype must be a text, got torch.float32"),
        ({"max_num_seqs": None}, "--max-num-seqs must be a whole number, got None"),
    ],
)
def test_an_option_of_another_type_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM("somewhere", **options)


def test_a_model_may_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing"):
        LLM(tmp_path / "nothing", use_tqdm=False)
