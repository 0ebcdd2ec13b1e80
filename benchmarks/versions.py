"""Two versions of octavo against each other: are their bits the same, and is the new one as fast?

    python benchmarks/versions.py bits OLD NEW --models DIR
    python benchmarks/versions.py speed OLD NEW --models DIR [--formats bf16,q4_1] [--loads prompt] [--rounds 5]

OLD and NEW are source trees, each set up by `make setup`; DIR is the folder that peer_models.py made. `bits` compares
tokens and log-probabilities in every format, greedy and seeded, one by one and all at once. `speed` measures the two by
turns and prints the medians' ratio: only what stands in one table may be compared.
"""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import contestants
from contestants import Figures, Load, Peers
from peers import LOADS, print_table
from server_overhead import default_model

FORMATS: dict[str, tuple[str, dict[str, str]]] = {
    "hf, bfloat16": ("hf", {"dtype": "bfloat16"}),
    "hf, float16": ("hf", {"dtype": "float16"}),
    "hf, float32": ("hf", {"dtype": "float32"}),
    "hf, int8": ("hf", {"quantization": "int8"}),
    "hf, int4": ("hf", {"quantization": "int4"}),
    "hf, int4, bfloat16 activations": ("hf", {"quantization": "int4", "activation_dtype": "bfloat16"}),
    "bf16.gguf": ("bf16.gguf", {}),
    "f16.gguf": ("f16.gguf", {}),
    "q8_0": ("q8_0.gguf", {}),
    "q4_0": ("q4_0.gguf", {}),
    "q4_1": ("q4_1.gguf", {}),
    "q5_0": ("q5_0.gguf", {}),
    "q5_1": ("q5_1.gguf", {}),
    "q4_1, int8 cache": ("q4_1.gguf", {"kv_cache_dtype": "int8"}),
    "q4_1, fp8 cache": ("q4_1.gguf", {"kv_cache_dtype": "fp8"}),
    "default model": ("", {}),
    "gemma": ("gemma-3-270m-q4_k_m.gguf", {}),
}
"""Name -> file in the models' folder and options; formats whose file is not there are left out."""

WORKER = """
import json, sys
from octavo import LLM, SamplingParams
model, options, prompts = json.load(sys.stdin)
llm = LLM(model, use_tqdm=False, max_num_batched_tokens=64, **options)
greedy = SamplingParams(temperature=0, max_tokens=24, logprobs=4)
seeded = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=7, max_tokens=24, logprobs=1, n=2)
def shown(outputs):
    return [
        [o.token_ids, [[e.logprob.hex(), e.rank, [[t, p.hex()] for t, p in e.top]] for e in o.logprobs]]
        for output in outputs for o in output.outputs
    ]
json.dump([shown(llm.generate(prompts, greedy)), shown(llm.generate(prompts, seeded)),
           [shown(llm.generate([prompt], greedy)) for prompt in prompts[:4]]], sys.stdout)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Two versions of octavo against each other.")
    parser.add_argument("what", choices=("bits", "speed"))
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--models", type=Path, required=True, help="the folder that peer_models.py made")
    parser.add_argument("--formats", default="bf16,q4_1", help="of speed, as peers.py names them")
    parser.add_argument("--loads", default="stream-http,batch-http,prompt,prefix-http")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.what == "bits":
        compare_bits(args.old, args.new, args.models)
    else:
        for load in args.loads.split(","):
            for name in args.formats.split(","):
                compare_speed(args.old, args.new, args.models, load, name, args.rounds)


def compare_bits(old: Path, new: Path, models: Path) -> None:
    from tests.smollm2 import PROMPTS

    for name, (file, options) in FORMATS.items():
        path = models / file if file else Path(default_model())
        if not path.exists():
            print(f"{name}: {path} is not there")
            continue
        task = json.dumps([str(path), options, PROMPTS])
        results = [run_in(tree, ["-c", WORKER], task) for tree in (old, new)]
        print(f"{name}: {'same bits' if results[0] == results[1] else 'DIFFERENT'}", flush=True)


def run_in(tree: Path, command: list[str], task: str) -> Any:
    python = (tree / ".venv/bin/python").absolute()
    printed = subprocess.run([str(python), *command], input=task, cwd=tree, capture_output=True, text=True)
    if printed.returncode:
        raise RuntimeError(f"{tree}: {printed.stderr[-3000:]}")
    return json.loads(printed.stdout.splitlines()[-1])  # after what the load has to say


def compare_speed(old: Path, new: Path, models: Path, load_name: str, name: str, num_rounds: int) -> None:
    """One table: the old version first, then the new one."""
    load, peers = LOADS[load_name], Peers(models.absolute(), Path(), Path(), Path())
    figures: dict[str, list[Figures]] = {f"{version} {name}": [] for version in ("old", "new")}
    trees = [tree.absolute() for tree in (old, new)]
    servers = []
    try:
        if load_name.endswith("-http"):
            servers = [serve_from(tree, name, peers) for tree in trees]
        for index in range(num_rounds):
            order = [0, 1] if index % 2 == 0 else [1, 0]
            for place in order:
                if servers:
                    measured = servers[place].measure(load, seed=index + 1)
                else:
                    measured = measure_from(trees[place], name, load, index + 1, peers)
                figures[list(figures)[place]].append(measured)
    finally:
        for server in servers:
            server.close()
    print(f"\n{load_name}, {num_rounds} rounds")
    print_table(figures)


def serve_from(tree: Path, name: str, peers: Peers) -> contestants.Server:
    contestants.OCTAVO = str(tree / ".venv/bin/octavo")
    server = contestants.serve("octavo", name, peers)
    contestants.OCTAVO = CLIENT
    return server


def measure_from(tree: Path, name: str, load: Load, seed: int, peers: Peers) -> Figures:
    contestants.OCTAVO = str(tree / ".venv/bin/octavo")
    run = contestants.run_alone if load.num_requests == 1 else contestants.run_offline
    measured = run("octavo", name, load, seed, peers)
    contestants.OCTAVO = CLIENT
    return measured


CLIENT = contestants.OCTAVO
"""The same client measures both versions."""

if __name__ == "__main__":
    main()
