"""A captured step gives the bits of the eager one, in every model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.devices.cpu.capture import ReplayedForward
from octavo.devices.eager import EagerForward
from tests.tiny_encoders import make_encoder_folder
from tests.tiny_models import FAMILIES, make_folder

PROMPTS = [[2 + (37 * i + 11 * row) % 380 for i in range(length)] for row, length in enumerate((1, 70, 16, 33, 90))]
PARAMS = [
    SamplingParams(temperature=t, seed=7, max_tokens=20, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    for t in (0.0, 0.9, 0.0, 0.0, 0.7)
]


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), use_tqdm=False, attention_backend="CPU", **options)


def generated(llm: LLM) -> list[tuple[Any, ...]]:
    """With log-probabilities, and without, where the captured step draws its tokens itself: any, or the likeliest."""
    plain = [replace(params, logprobs=None, prompt_logprobs=None) for params in PARAMS]
    greedy = [replace(params, temperature=0.0) for params in plain]
    outputs = [output for params in (PARAMS, plain, greedy) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    return [(one.prompt_logprobs, one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_replayed_equals_the_decoder_op_by_op(family: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, family)
    options: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 3}
    assert generated(load(folder, **options)) == generated(load(folder, enforce_eager=True, **options))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"dtype": "float16"}])
def test_every_format_of_weights_replays(options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    assert generated(load(folder, **options)) == generated(load(folder, enforce_eager=True, **options))


def test_an_encoder_replayed_equals_the_encoder_op_by_op(tmp_path: Path) -> None:
    folder = make_encoder_folder(tmp_path)
    prompts = [[5 + (7 * i) % 190 for i in range(length)] for length in (1, 60, 128, 17)]
    eager, replayed = (load(folder, enforce_eager=value).embed(prompts, use_tqdm=False) for value in (True, False))
    assert [one.embedding for one in replayed] == [one.embedding for one in eager]


def test_enforce_eager_and_other_providers_turn_capture_off(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)

    def forward(**options: Any) -> type:
        llm = LLM(str(folder), use_tqdm=False, **options)
        return type(llm.engine.executor._runner.forward)  # type: ignore[attr-defined]

    assert forward() is ReplayedForward
    assert forward(enforce_eager=True) is EagerForward
    assert forward(attention_backend="REFERENCE") is EagerForward
