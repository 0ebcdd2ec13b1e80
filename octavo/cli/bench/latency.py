"""`octavo bench latency`: one batch of requests from start to end, again and again."""

import argparse
import random
import time
from pathlib import Path

from octavo.cli.arguments import Parser
from octavo.cli.bench.offline import add_engine_options, load
from octavo.errors import ConfigError

__all__ = ["configure"]


def configure(parser: Parser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.description = "Time of one batch from start to end."
    parser.add_argument("--input-len", type=int, default=32, metavar="N", help="Prompt tokens. Default: 32.")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="Output tokens. Default: 128.")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="Requests at once. Default: 8.")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="Completions a prompt. Default: 1.")
    parser.add_argument("--num-iters-warmup", type=int, default=10, metavar="N", help="Not counted. Default: 10.")
    parser.add_argument("--num-iters", type=int, default=30, metavar="N", help="Counted. Default: 30.")
    parser.add_argument("--disable-detokenize", action="store_true", help="Leave detokenizing out of the measurement.")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="Save the result here.")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}.")
    llm = load(args, enable_prefix_caching=False)  # from the second time on, a cache would answer for the prompts
    from octavo.cli.bench.report import percentiles, write_json
    from octavo.sampling_params import SamplingParams

    generator = random.Random(getattr(args, "seed", 0))
    prompts = [generator.choices(range(llm.info.limits.vocab_size), k=args.input_len) for _ in range(args.batch_size)]
    detokenize = not args.disable_detokenize
    params = SamplingParams(n=args.n, max_tokens=args.output_len, ignore_eos=True, detokenize=detokenize)

    def measure() -> float:
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    for _ in range(args.num_iters_warmup):
        measure()
    latencies = [measure() for _ in range(args.num_iters)]
    average = sum(latencies) / len(latencies)
    tails = percentiles(latencies)
    print(f"Avg latency: {average} seconds")
    for percentage, value in tails.items():
        print(f"{percentage}% percentile latency: {value} seconds")
    share = llm.engine.memory_roof_share
    if share is not None:
        print(f"Share of the memory roof, last decode steps: {share:.3f}")
    if args.output_json:
        result = {"avg_latency": average, "latencies": latencies, "percentiles": tails, "memory_roof_share": share}
        write_json(args.output_json, result)
    return 0
