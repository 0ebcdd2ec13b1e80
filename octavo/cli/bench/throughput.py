"""`octavo bench throughput`: many requests at once through the engine in this process."""

import argparse
import time
from pathlib import Path

from octavo.cli.arguments import Parser
from octavo.cli.bench.dataset import add_dataset_options, check_dataset_options, random_requests
from octavo.cli.bench.offline import add_engine_options, load

__all__ = ["configure"]


def configure(parser: Parser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.description = "Throughput of the engine by itself: many requests at once."
    add_dataset_options(parser, input_len=1024, output_len=128, num_prompts=1000)
    parser.add_argument("--disable-detokenize", action="store_true", help="Leave detokenizing out of the measurement.")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="Save the result here.")
    add_engine_options(parser)
    parser.set_defaults(run=run, parser=parser, seed=0)


def run(args: argparse.Namespace) -> int:
    check_dataset_options(args)
    llm = load(args)
    from octavo.cli.bench.report import write_json
    from octavo.sampling_params import SamplingParams

    requests = random_requests(args, llm.info.limits.vocab_size)
    params = [
        SamplingParams(max_tokens=request.output_len, ignore_eos=True, detokenize=not args.disable_detokenize)
        for request in requests
    ]
    start = time.perf_counter()
    outputs = llm.generate([request.prompt_token_ids for request in requests], params)
    elapsed_s = time.perf_counter() - start
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    num_output_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_tokens = num_prompt_tokens + num_output_tokens
    print(
        f"Throughput: {len(requests) / elapsed_s:.2f} requests/s, {num_tokens / elapsed_s:.2f} total tokens/s, "
        f"{num_output_tokens / elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt_tokens}")
    print(f"Total num output tokens:  {num_output_tokens}")
    if args.output_json:
        write_json(
            args.output_json,
            {
                "elapsed_time": elapsed_s,
                "num_requests": len(requests),
                "total_num_tokens": num_tokens,
                "requests_per_second": len(requests) / elapsed_s,
                "tokens_per_second": num_tokens / elapsed_s,
                "output_tokens_per_second": num_output_tokens / elapsed_s,
            },
        )
    return 0
