"""`octavo bench serve` against a small server: what it sends, counts and reports."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.bench.dataset import random_requests
from octavo.cli.bench.load import Answer
from octavo.cli.bench.report import latency_fields, percentiles
from octavo.cli.bench.serve_result import serve_result
from octavo.cli.main import main
from octavo.cli.openai_stream import Choice, Event, Usage
from tests.cli.conftest import Fails
from tests.cli.fake_server import FakeServer

VLLM_FIELDS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests",
    "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms",
    "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
    "date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency",
}  # fmt: skip
VLLM_DETAILS = {
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts", "errors",
}  # fmt: skip


def bench(server: FakeServer, tmp_path: Path, *options: str, status: int = 0) -> dict[str, Any]:
    argv = ["bench", "serve", f"--base-url={server.url}", f"--result-dir={tmp_path}", "--result-filename=r.json"]
    assert main([*argv, "--save-result", "--num-prompts=4", "--input-len=5", "--output-len=3", *options]) == status
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    return result


def dataset(**options: Any) -> argparse.Namespace:
    defaults = {
        "dataset_name": "random", "dataset_path": None, "num_prompts": 50, "random_input_len": 20,
        "random_output_len": 10, "random_prefix_len": 0, "random_range_ratio": 0.0, "seed": 0,
    }  # fmt: skip
    return argparse.Namespace(**(defaults | options))


def test_the_result_has_vllms_fields(server: FakeServer, tmp_path: Path) -> None:
    assert set(bench(server, tmp_path)) == VLLM_FIELDS
    assert set(bench(server, tmp_path, "--save-detailed")) == VLLM_FIELDS | VLLM_DETAILS


def test_tokens_are_counted_from_usage(server: FakeServer, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--save-detailed")
    assert (result["completed"], result["failed"]) == (4, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (4 * 7, 4 * 3)
    assert result["output_throughput"] == pytest.approx(12 / result["duration"])
    assert result["generated_texts"] == ["Hello there"] * 4
    assert [len(gaps) for gaps in result["itls"]] == [2] * 4


def test_without_usage_each_event_is_a_token(server: FakeServer, tmp_path: Path) -> None:
    server.with_usage = False
    assert bench(server, tmp_path)["total_output_tokens"] == 12


def test_completions_get_token_ids_and_the_full_length(server: FakeServer, tmp_path: Path) -> None:
    bench(server, tmp_path, "--seed=3", "--temperature=0.5", '--extra-body={"top_k": 4}')
    ready, *bodies = server.bodies
    assert len(ready["prompt"]) == 8
    assert ready["max_tokens"] == 1
    assert [body.pop("prompt") for body in bodies] == [
        request.prompt_token_ids
        for request in random_requests(dataset(num_prompts=4, random_input_len=5, random_output_len=3, seed=3))
    ]
    assert bodies == 4 * [
        {
            "model": "fake-model", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True},
            "temperature": 0.5, "ignore_eos": True, "top_k": 4,
        }
    ]  # fmt: skip


def test_chat_gets_text(server: FakeServer, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--backend=openai-chat", "--save-detailed", "--model=m", "--no-ignore-eos")
    assert result["generated_texts"] == ["Hello there"] * 4
    assert result["model_id"] == "m"
    (message,) = server.bodies[1]["messages"]
    assert len(message["content"].split()) == 5
    assert "ignore_eos" not in server.bodies[1]


def test_max_concurrency_holds(server: FakeServer, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--max-concurrency=2", "--num-prompts=12")
    assert result["completed"] == 12
    assert server.max_open <= 2
    assert 1 <= result["max_concurrent_requests"] <= 2


def test_a_request_rate_spaces_the_requests(server: FakeServer, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--request-rate=100", "--burstiness=1000", "--num-prompts=11", "--save-detailed")
    times = result["start_times"]
    assert times[-1] - times[0] == pytest.approx(0.1, rel=0.5)
    assert result["request_rate"] == 100


@pytest.mark.parametrize(
    ("way", "error"),
    [
        ({"break_after": 1}, "closed before the answer ended"),
        ({"error_after": 1}, "the engine broke"),
        ({"pieces": []}, "no token"),
    ],
)
def test_an_answer_that_breaks_off_is_a_failure(
    server: FakeServer, tmp_path: Path, way: dict[str, Any], error: str
) -> None:
    server.after_first = way
    result = bench(server, tmp_path, "--save-detailed", status=1)
    assert (result["completed"], result["failed"]) == (0, 4)
    assert all(error in found for found in result["errors"])
    assert result["total_output_tokens"] == 0
    assert result["mean_ttft_ms"] == 0


def test_tokens_without_text_are_known_by_the_usage() -> None:
    answer = Answer(5, start_s=1.0)
    answer.record(Event(choices=[Choice(finish_reason="length")]), 2.0)
    answer.record(Event(usage=Usage(prompt_tokens=5, completion_tokens=2)), 3.5)
    answer.close()
    assert (answer.ttft_s, answer.latency_s, answer.output_len) == (2.5, 2.5, 2)


def test_other_requests_are_not_touched_by_a_failure() -> None:
    good = Answer(5, start_s=1.0, ttft_s=0.5, latency_s=2.5, gaps_s=[1.0, 1.0], output_len=3, pieces=["a", "b", "c"])
    bad = Answer(5, start_s=2.0, ttft_s=0.1, latency_s=0.1, output_len=1, pieces=["a"], error="broke")
    result = serve_result([good, bad], 4.0, ["ttft", "tpot", "itl", "e2el"], [50, 99.9])
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["output_throughput"] == 0.75
    assert result["total_token_throughput"] == 2.0
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 1.0
    latencies = ("mean_ttft_ms", "mean_tpot_ms", "p50_itl_ms", "p99.9_e2el_ms")
    assert [result[name] for name in latencies] == [500, 1000, 1000, 2500]


def test_percentiles_interpolate() -> None:
    assert percentiles([1.0, 2.0, 3.0, 4.0], [0, 50, 90, 100]) == pytest.approx(
        {"0": 1, "50": 2.5, "90": 3.7, "100": 4}
    )
    assert latency_fields("itl", [0.001, 0.003], [99])["std_itl_ms"] == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_requests() -> None:
    assert random_requests(dataset()) == random_requests(dataset())
    assert random_requests(dataset()) != random_requests(dataset(seed=1))


def test_a_prefix_is_shared_and_comes_on_top() -> None:
    requests = random_requests(dataset(random_prefix_len=8))
    assert len({tuple(request.prompt_token_ids[:8]) for request in requests}) == 1
    assert {len(request.prompt_token_ids) for request in requests} == {28}


def test_a_range_ratio_spreads_the_lengths() -> None:
    requests = random_requests(dataset(random_range_ratio=0.5), vocab_size=7)
    lengths = {len(request.prompt_token_ids) for request in requests}
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(lengths) > 5
    assert max(max(request.prompt_token_ids) for request in requests) == 6


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--dataset-name", "sharegpt"), "only random is supported"),
        (("--num-prompts", "0"), "--num-prompts must be at least 1, got 0."),
        (("--random-range-ratio", "1"), "--random-range-ratio must be"),
        (("--percentile-metrics", "ttft,speed"), "not 'speed'"),
        (("--metric-percentiles", "101"), "from 0 to 100"),
        (("--request-rate", "0"), "--request-rate must be above 0"),
        (("--max-concurrency", "0"), "--max-concurrency must be at least 1"),
        (("--extra-body", "[1"), "--extra-body must be a JSON object"),
        (("--base-url", "ftp://x"), "not the address of a server"),
    ],
)
def test_wrong_values_are_refused_in_a_line(fails: Fails, options: tuple[str, ...], part: str) -> None:
    error = fails("bench", "serve", *options)
    assert part in error
    assert error.count("\n") == 1


def test_a_server_that_is_not_there_is_one_line(fails: Fails) -> None:
    error = fails("bench", "serve", "--port=1", "--ready-check-timeout-sec=0", status=1)
    assert error.startswith("octavo: error: No server answers at http://127.0.0.1:1")
    assert error.count("\n") == 1


def test_a_servers_own_error_is_shown(server: FakeServer, fails: Fails) -> None:
    server.status = 404
    error = fails("bench", "serve", f"--port={server.port}", "--ready-check-timeout-sec=0", status=1)
    assert error == "octavo: error: HTTP 404: the fake refuses\n"
