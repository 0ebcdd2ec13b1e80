"""From clients' answers to the fields that `vllm bench serve` reports."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from octavo.cli.bench.load import Answer
from octavo.cli.bench.report import latency_fields, print_rows, print_title

__all__ = ["print_result", "serve_result"]

TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


def serve_result(
    answers: Sequence[Answer], duration_s: float, metrics: Sequence[str], percentages: Sequence[float]
) -> dict[str, Any]:
    """Totals and rates of the answers without an error, latencies of the chosen metrics, and each request's details."""
    good = [answer for answer in answers if answer.error is None]
    num_input = sum(answer.input_len for answer in good)
    num_output = sum(answer.output_len for answer in good)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": _peak_token_rate(good),
        "max_concurrent_requests": _peak_concurrency(answers),
        "input_lens": [answer.input_len for answer in answers],
        "output_lens": [answer.output_len for answer in answers],
        "ttfts": [answer.ttft_s or 0.0 for answer in answers],
        "itls": [answer.gaps_s for answer in answers],
        "latencies": [answer.latency_s for answer in answers],
        "start_times": [answer.start_s for answer in answers],
        "generated_texts": ["".join(answer.pieces) for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }
    values = _latencies(good)
    for name in metrics:
        result |= latency_fields(name, values[name], percentages)
    return result


def _latencies(good: Sequence[Answer]) -> dict[str, list[float]]:
    return {
        "ttft": [answer.ttft_s or 0.0 for answer in good],
        "tpot": [
            (answer.latency_s - (answer.ttft_s or 0.0)) / (answer.output_len - 1)
            for answer in good
            if answer.output_len > 1
        ],
        "itl": [gap for answer in good for gap in answer.gaps_s],
        "e2el": [answer.latency_s for answer in good],
    }


def _peak_token_rate(good: Sequence[Answer]) -> float:
    """Most pieces of answers that arrived within one second, counted from the first request on."""
    if not good:
        return 0.0
    first_s = min(answer.start_s for answer in good)
    arrivals = [
        time_s - first_s
        for answer in good
        for time_s in accumulate(answer.gaps_s, initial=answer.start_s + (answer.ttft_s or 0.0))
    ]
    return float(np.bincount(np.asarray(arrivals).astype(int)).max())


def _peak_concurrency(answers: Sequence[Answer]) -> int:
    starts = [(answer.start_s, 1) for answer in answers]
    ends = [(answer.start_s + answer.latency_s, -1) for answer in answers]
    return max(accumulate(change for _, change in sorted(starts + ends)), default=0)


def print_result(result: dict[str, Any], metrics: Sequence[str]) -> None:
    print_title("Serving Benchmark Result")
    print_rows(
        {
            "Successful requests": result["completed"],
            "Failed requests": result["failed"],
            "Benchmark duration (s)": result["duration"],
            "Total input tokens": result["total_input_tokens"],
            "Total generated tokens": result["total_output_tokens"],
            "Request throughput (req/s)": result["request_throughput"],
            "Output token throughput (tok/s)": result["output_throughput"],
            "Peak output token throughput (tok/s)": result["max_output_tokens_per_s"],
            "Peak concurrent requests": result["max_concurrent_requests"],
            "Total token throughput (tok/s)": result["total_token_throughput"],
        }
    )
    for name in metrics:
        short, long = TITLES[name]
        print_title(long, "-")
        for field, value in result.items():
            if field.endswith(f"_{name}_ms"):
                kind = field.removesuffix(f"_{name}_ms")
                print_rows({f"{kind.capitalize()} {short} (ms)": value})
    print_title("")
    for error in sorted({error for error in result["errors"] if error}):
        print(f"{result['errors'].count(error)} failed: {error}")
