"""`octavo bench serve`: load on an OpenAI server, and what its clients see."""

import argparse
import json
import math
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.cli.arguments import Parser
from octavo.cli.bench.dataset import add_dataset_options, random_requests
from octavo.errors import ConfigError

__all__ = ["configure"]

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
METRICS = ("ttft", "tpot", "itl", "e2el")
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "generated_texts", "errors")


def configure(parser: Parser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.description = "Load on a running OpenAI server: octavo, vLLM, llama.cpp and others."
    server = parser.add_argument_group("server")
    server.add_argument("--backend", choices=sorted(ENDPOINTS), default="openai", help="Which API. Default: openai.")
    server.add_argument("--base-url", metavar="URL", help="Address, instead of --host and --port.")
    server.add_argument("--host", default="127.0.0.1", help="Default: 127.0.0.1.")
    server.add_argument("--port", type=int, default=8000, metavar="N", help="Default: 8000.")
    server.add_argument("--endpoint", metavar="PATH", help="Default: the backend's, e.g. /v1/completions.")
    server.add_argument("--model", metavar="NAME", help="Which of the server's models; default: its first.")
    server.add_argument("--served-model-name", metavar="NAME", help="The same, where --model is a path.")
    server.add_argument("--tokenizer", metavar="PATH", help="Model whose vocabulary prompts are drawn from.")
    server.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=600.0,
        metavar="S",
        help="Wait so long for a first answer. Default: 600.",
    )
    add_dataset_options(parser, input_len=1024, output_len=128, num_prompts=1000)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="Requests a second; inf: all at once. Default: inf.",
    )
    load.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1: arrivals as of a Poisson process; below: in bursts; above: evenly.",
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="Most requests at once; default: no limit.")
    load.add_argument("--num-warmups", type=int, default=0, metavar="N", help="Requests sent before. Default: 0.")
    load.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Generate the full output length. Default: on.",
    )
    load.add_argument("--temperature", type=float, default=0.0, metavar="X", help="Default: 0.")
    load.add_argument("--extra-body", metavar="JSON", help="Fields added to each request's body.")
    load.add_argument("--seed", type=int, default=0, metavar="N", help="Of prompts and arrivals. Default: 0.")
    result = parser.add_argument_group("result")
    result.add_argument(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="LIST",
        help="Of ttft, tpot, itl, e2el. Default: ttft,tpot,itl.",
    )
    result.add_argument("--metric-percentiles", default="99", metavar="LIST", help="For example 50,90,99. Default: 99.")
    result.add_argument("--label", metavar="NAME", help="Begins the result's file name; default: the backend.")
    result.add_argument("--save-result", action="store_true", help="Save the result as JSON.")
    result.add_argument("--save-detailed", action="store_true", help="Save each request's times and texts as well.")
    result.add_argument("--result-dir", type=Path, default=Path(), metavar="DIR")
    result.add_argument("--result-filename", metavar="NAME")
    result.add_argument("--disable-tqdm", action="store_true", help="No progress bar.")
    result.add_argument("--trust-remote-code", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    metrics, percentages = _metrics(args.percentile_metrics), _percentages(args.metric_percentiles)
    for name in ("request_rate", "burstiness"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name)}.")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}.")
    requests = random_requests(args, _vocab_size(args.tokenizer))
    from octavo.cli.bench.load import Load, LoadClient, run_load
    from octavo.cli.bench.serve_result import print_result, serve_result
    from octavo.cli.http_client import HttpClient

    http = HttpClient(args.base_url or f"http://{args.host}:{args.port}", os.environ.get("OPENAI_API_KEY"))
    client = LoadClient(
        http,
        args.endpoint or ENDPOINTS[args.backend],
        args.served_model_name or args.model,
        _sampling_fields(args),
        is_chat=args.backend == "openai-chat",
    )
    load = Load(
        requests=requests,
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        max_concurrency=args.max_concurrency,
        num_warmups=args.num_warmups,
        seed=args.seed,
    )
    show_progress = sys.stderr.isatty() and not args.disable_tqdm
    answers, duration_s = run_load(client, load, args.ready_check_timeout_sec, show_progress)
    result = serve_result(answers, duration_s, metrics, percentages)
    print_result(result, metrics)
    if args.save_result or args.save_detailed:
        _save(args, client.model or "", result)
    return 0 if result["failed"] == 0 else 1


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"--percentile-metrics knows {', '.join(METRICS)}, not {name!r}.")
    return names


def _percentages(text: str) -> list[float]:
    try:
        percentages = [float(part) for part in text.split(",")]
    except ValueError:
        percentages = [-1.0]
    if not all(0 <= percentage <= 100 for percentage in percentages):
        raise ConfigError(f"--metric-percentiles must be numbers from 0 to 100 with commas between, got {text!r}.")
    return percentages


def _vocab_size(tokenizer: str | None) -> int | None:
    if tokenizer is None:
        return None
    from octavo.checkpoint.open import open_text
    from octavo.text.tokenizer import load_tokenizer

    return load_tokenizer(*open_text(tokenizer)).vocab_size


def _sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    fields = {"temperature": args.temperature} | ({"ignore_eos": True} if args.ignore_eos else {})
    if args.extra_body is None:
        return fields
    try:
        return fields | dict(json.loads(args.extra_body))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--extra-body must be a JSON object: {error}.") from error


def _save(args: argparse.Namespace, model: str, result: dict[str, Any]) -> None:
    from octavo.cli.bench.report import write_json

    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    settings = {
        "date": date,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": args.tokenizer or model,
        "num_prompts": args.num_prompts,
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if not args.save_detailed:
        result = {name: value for name, value in result.items() if name not in DETAILS}
    limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    base = model.rpartition("/")[2]
    default = f"{args.label or args.backend}-{args.request_rate}qps{limit}-{base}-{date}.json"
    path = args.result_dir / (args.result_filename or default)
    write_json(path, settings | result)
    print(f"Saved {path}")
