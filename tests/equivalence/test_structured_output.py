"""Structured output on tiny random models, which know nothing of JSON: what they say is what the grammar lets them."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo import LLM, InvalidRequestError, RequestOutput, SamplingParams, StructuredOutputs
from tests.schemas import random_schema
from tests.tiny_models import make_folder

NUM_SCHEMAS = 200
NUM_COMPLETED = 180
FEW_BLOCKS = {
    "kv_cache_memory_bytes": 500_000,
    "max_model_len": 256,
    "max_num_seqs": 32,
    "admission_policy": "greedy",
}
PROMPT = [5, 6, 7]
OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("structured"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), use_tqdm=False, max_num_seqs=64, dtype="float32")


def constrained(seed: int = 0, max_tokens: int = 600, temperature: float = 2.0, **structure: Any) -> SamplingParams:
    structured_outputs = StructuredOutputs(**structure)
    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, seed=seed, structured_outputs=structured_outputs
    )


def generate(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate([PROMPT] * len(params), params, use_tqdm=False)


def tokens(results: list[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def validator(schema: dict[str, Any]) -> jsonschema.Draft202012Validator:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return jsonschema.Draft202012Validator(schema, format_checker=checker)


def test_every_completed_answer_validates_against_its_schema(llm: LLM) -> None:
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS)]
    results = generate(llm, [constrained(seed, json=schema) for seed, schema in enumerate(schemas)])
    answers = [(r.outputs[0].text, s) for r, s in zip(results, schemas, strict=True) if is_complete(r)]
    assert len(answers) > NUM_COMPLETED
    for text, schema in answers:
        validator(schema).validate(json.loads(text))


def is_complete(result: RequestOutput) -> bool:
    return result.outputs[0].finish_reason == "stop"


def test_any_json_object_is_a_json_object(llm: LLM) -> None:
    results = [r for r in generate(llm, [constrained(i, 300, json_object=True) for i in range(20)]) if is_complete(r)]
    assert results
    assert all(isinstance(json.loads(r.outputs[0].text), dict) for r in results)


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": r"[a-f]{2,5}-\d{3}"}, r"[a-f]{2,5}-\d{3}"),
        ({"regex": r"^(yes|no)!$"}, r"(yes|no)!"),
        ({"choice": ["a", "ab", 'q"uo\\te\n', "</s>", "naïve 😀"]}, 'a|ab|q"uo\\\\te\n|</s>|naïve 😀'),
        ({"grammar": 'start: "x=" NUMBER ("," NUMBER)~0..3\nNUMBER: /[0-9]{1,3}/'}, r"x=\d{1,3}(,\d{1,3}){0,3}"),
        ({"grammar": 'root ::= "<" word ">"\nword ::= [a-z] [a-z]?'}, "<[a-z]{1,2}>"),
    ],
)
def test_the_whole_answer_matches(llm: LLM, structure: dict[str, Any], pattern: str) -> None:
    results = generate(llm, [constrained(seed, 100, **structure) for seed in range(12)])
    assert all(is_complete(result) for result in results)
    assert all(re.fullmatch(pattern, result.outputs[0].text) for result in results)


def test_constrained_requests_do_not_change_free_ones_in_their_batch(llm: LLM) -> None:
    free = [SamplingParams(max_tokens=40, temperature=1.0, seed=i, logprobs=2) for i in range(6)]
    strict = [constrained(i, 40, json=OBJECT) for i in range(6)]
    alone, alone_strict = generate(llm, free), generate(llm, strict)
    mixed = generate(llm, [params for pair in zip(free, strict, strict=True) for params in pair])
    assert [r.outputs[0] for r in mixed[::2]] == [r.outputs[0] for r in alone]
    assert tokens(mixed[1::2]) == tokens(alone_strict)


@pytest.mark.parametrize("options", [{"async_scheduling": True}, FEW_BLOCKS, FEW_BLOCKS | {"async_scheduling": True}])
def test_overlap_and_preemption_change_nothing(llm: LLM, folder: Path, options: dict[str, Any]) -> None:
    params = [constrained(seed, 200, json=random_schema(seed)) for seed in range(24)]
    params += [constrained(seed, 200, json_object=True) for seed in range(8)]
    params += [SamplingParams(max_tokens=60, temperature=1.0, seed=seed) for seed in range(8)]
    other = LLM(str(folder), use_tqdm=False, dtype="float32", **options)
    assert tokens(generate(other, params)) == tokens(generate(llm, params))
    assert bool(other.engine.stats().num_preemptions) == ("kv_cache_memory_bytes" in options)


def test_an_answer_that_the_limit_cuts_says_so(llm: LLM) -> None:
    (result,) = generate(llm, [constrained(1, 5, json=OBJECT)])
    assert result.outputs[0].finish_reason == "length"
    assert len(result.outputs[0].token_ids) == 5


def test_the_end_of_the_grammar_ends_the_answer_whatever_else_is_asked(llm: LLM) -> None:
    structure = StructuredOutputs(choice=("one",))
    params = SamplingParams(max_tokens=50, min_tokens=30, ignore_eos=True, structured_outputs=structure)
    (result,) = generate(llm, [params])
    assert result.outputs[0].text == "one"
    assert result.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("structure", [{"regex": "(a"}, {"json": {"$ref": "#"}}, {"regex": "[b-d]{3}a{1000000}"}])
def test_a_grammar_that_fails_early_or_late_is_the_request_s_fault(llm: LLM, structure: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="can't be compiled"):
        generate(llm, [constrained(**structure)])
    (result,) = generate(llm, [constrained(choice=["one"])])
    assert result.outputs[0].text == "one"
