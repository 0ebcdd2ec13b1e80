"""Swap against recompute on a load that preempts, and the automatic choice between them.

    python benchmarks/preemption.py [--requests 24] [--prompt 128] [--output 128] [--pool 0.35] [--repeats 5]

All requests come at once; the pool holds a share of what they need, the tier all of it. The modes take turns, so that
noise of the machine hits all alike, and the best of each mode's times counts. Without prefix caching, so that what is
lost is lost.
"""

import argparse
import time

from server_overhead import default_model

from octavo import LLM, SamplingParams

MODES = ("recompute", "swap", "auto")
BLOCK = 16


def load(mode: str, num_blocks: int, num_swap_blocks: int, max_num_batched_tokens: int) -> LLM:
    return LLM(
        default_model(),
        max_model_len=1024,
        kv_cache_memory_bytes=num_blocks * BLOCK * 23_040,
        num_swap_blocks=num_swap_blocks,
        preemption_mode=mode,
        enable_prefix_caching=False,
        admission_policy="greedy",
        max_num_batched_tokens=max_num_batched_tokens,
        use_tqdm=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--pool", type=float, default=0.35)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-num-batched-tokens", type=int, default=128)
    args = parser.parse_args()
    prompts = [[(17 * i + 31 * j) % 49_000 for i in range(args.prompt)] for j in range(args.requests)]
    params = SamplingParams(temperature=0.0, max_tokens=args.output, ignore_eos=True)
    need = args.requests * -(-(args.prompt + args.output) // BLOCK)
    engines = {mode: load(mode, int(need * args.pool), need, args.max_num_batched_tokens) for mode in MODES}
    best = dict.fromkeys(MODES, float("inf"))
    for _ in range(args.repeats):
        for mode, llm in engines.items():
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            best[mode] = min(best[mode], time.perf_counter() - start)
    print(
        f"{args.requests} x ({args.prompt} + {args.output}) tokens, pool {args.pool:.0%} of the need of {need} blocks"
    )
    for mode, llm in engines.items():
        stats = llm.engine.stats()
        print(
            f"{mode:9} {best[mode]:6.2f} s, {args.requests * args.output / best[mode]:6.1f} tokens/s; "
            f"{stats.num_preemptions} preemptions, {stats.num_swap_preemptions} of them swaps; "
            f"{stats.num_blocks_swapped_out} blocks out, {stats.num_blocks_swapped_in} in"
        )
    print(f"auto takes {best['auto'] / min(best['recompute'], best['swap']):.3f} of the better one's time")


if __name__ == "__main__":
    main()
