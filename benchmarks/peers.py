"""Peers and octavo on the same work, by turns, and the ratio of the medians.

    python benchmarks/peers.py [--rounds 3] [--requests 64] [--input-len 128] [--output-len 128]

The work: requests of random token ids, all at once, each answered with a fixed number of tokens. octavo is measured
over HTTP by `octavo bench serve`, against a server of its own; transformers generates one static batch in a process of
its own. Nothing else should run meanwhile: the machine's state is part of the figure, so only the ratios of one run
mean something.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from octavo.cli.bench.server_start import free_port

OCTAVO = str(Path(sys.executable).parent / "octavo")


def main() -> None:
    parser = argparse.ArgumentParser(description="octavo against its peers, by turns.")
    parser.add_argument("--model", required=True, help="a .gguf file that transformers reads too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--run", choices=PEERS, help="measure this one alone and print its output tokens/s")
    args = parser.parse_args()
    if args.run:
        print(json.dumps(PEERS[args.run](args)))
        return
    figures: dict[str, list[float]] = {name: [] for name in PEERS}
    for index in range(args.rounds):
        for name in PEERS:
            command = [sys.executable, __file__, *sys.argv[1:], "--run", name]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            figures[name].append(float(json.loads(printed.splitlines()[-1])))
            print(f"round {index + 1}: {name}: {figures[name][-1]:.1f} output tokens/s", flush=True)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, median in medians.items():
        print(f"{name}: median {median:.1f} output tokens/s; octavo is {medians['octavo'] / median:.2f} times as fast")


def run_octavo(args: argparse.Namespace) -> float:
    """A server's output tokens per second, with the time from the first request to the last token."""
    port = free_port()
    server = subprocess.Popen(
        [OCTAVO, "serve", args.model, f"--port={port}", "--disable-access-log", "--served-model-name=model"],
        stdout=sys.stderr,
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            load = [f"--random-input-len={args.input_len}", f"--random-output-len={args.output_len}"]
            where = ["--save-result", f"--result-dir={folder}", f"--result-filename={result.name}"]
            model = [f"--port={port}", "--model=model", f"--tokenizer={args.model}"]
            command = [OCTAVO, "bench", "serve", *model, f"--num-prompts={args.requests}", *load, *where]
            subprocess.run(command, check=True, stdout=sys.stderr)
            report = json.loads(result.read_text())
        assert report["failed"] == 0
        return float(report["output_throughput"])
    finally:
        server.terminate()
        server.wait()


def run_transformers(args: argparse.Namespace) -> float:
    """One static batch in bfloat16, with all threads, after a short one for warming up."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    path = Path(args.model)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    generator = torch.Generator().manual_seed(0)
    shape = (args.requests, args.input_len)
    prompts = torch.randint(0, model.config.vocab_size, shape, generator=generator)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(prompts[:, :8], max_new_tokens=2, min_new_tokens=2, **options)
        start = time.perf_counter()
        output = model.generate(prompts, max_new_tokens=args.output_len, min_new_tokens=args.output_len, **options)
        seconds = time.perf_counter() - start
    num_tokens = output.shape[0] * (output.shape[1] - args.input_len)
    assert num_tokens == args.requests * args.output_len
    return float(num_tokens / seconds)


PEERS: dict[str, Callable[[argparse.Namespace], float]] = {"octavo": run_octavo, "transformers": run_transformers}

if __name__ == "__main__":
    main()
