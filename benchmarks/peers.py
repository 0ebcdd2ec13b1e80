"""Peers and octavo on the same work, by turns: medians, their ratios, and the machine's ceilings of that run.

    python benchmarks/peers.py batch-http octavo:bf16 vllm:bf16 llama.cpp:q4_0 --models DIR [--rounds 3]
        [--llama DIR] [--openvino PYTHON] [--vllm COMMAND]

Loads (64 requests of 128 random prompt tokens and 128 generated, unless said otherwise):
    batch-http     all at once, over HTTP, one client for all engines
    batch-offline  all at once, without HTTP
    stream-http    4 requests, one after the other
    stream-offline one request of 16 prompt tokens and 128 generated, without HTTP
    prompt         one prompt of 512 tokens, without HTTP
    prefix-http    64 requests, 512 shared + 32 own + 32 generated tokens, 16 at once
Contestants are engine:format; formats are the files that `peer_models.py` makes, and for octavo also int8 and int4,
quantised at load; with -kv8 at the end its KV cache is int8, as OpenVINO's is by default. Ratios are the first
contestant's median to each other's. Nothing else should run meanwhile: the machine's state is part of every figure,
so only ratios of one run mean something.
"""

import argparse
import statistics
from pathlib import Path

from contestants import Figures, Load, Peers, Server, run_alone, run_offline, serve
from kernels import Ceilings

from octavo.devices.cpu import ops as cpu
from octavo.devices.machine import available_cpus

LOADS = {
    "batch-http": Load(64, 0, 128, 128, 64),
    "batch-offline": Load(64, 0, 128, 128, 64),
    "stream-http": Load(4, 0, 128, 128, 1),
    "stream-offline": Load(1, 0, 16, 128, 1),
    "prompt": Load(1, 0, 512, 1, 1),
    "prefix-http": Load(64, 512, 32, 32, 16),
}
LOWER_IS_BETTER = ("TTFT ms", "TPOT ms")


def main() -> None:
    args = parse_arguments()
    peers = Peers(args.models, args.llama, args.openvino, args.vllm)
    servers: dict[str, Server] = {}
    cpu.set_num_threads(available_cpus())
    ceilings = Ceilings()
    figures: dict[str, list[Figures]] = {contestant: [] for contestant in args.contestants}
    try:
        if args.load.endswith("-http"):
            for contestant in args.contestants:
                servers[contestant] = serve(*contestant.split(":"), peers)
        for index in range(args.rounds):
            for contestant in args.contestants:
                measured = measure(args.load, contestant, index, servers, peers)
                figures[contestant].append(measured)
                shown = ", ".join(f"{name} {value:.1f}" for name, value in measured.items())
                print(f"round {index + 1}: {contestant}: {shown}", flush=True)
                ceilings.measure()
    finally:
        for server in servers.values():
            server.close()
    print(f"\nceilings of this run: {ceilings}\n")
    print_table(figures)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="octavo against its peers, by turns.")
    parser.add_argument("load", choices=LOADS)
    parser.add_argument("contestants", nargs="+", metavar="ENGINE:FORMAT")
    parser.add_argument("--models", type=Path, required=True, help="the folder that peer_models.py made")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama", type=Path, default=Path(), help="folder of llama-server and llama-bench")
    parser.add_argument("--openvino", type=Path, default=Path("python"), help="a Python that has openvino_genai")
    parser.add_argument("--vllm", type=Path, default=Path("vllm"), help="the vllm command")
    return parser.parse_args()


def measure(load_name: str, contestant: str, index: int, servers: dict[str, Server], peers: Peers) -> Figures:
    load, (engine, name) = LOADS[load_name], contestant.split(":")
    if contestant in servers:
        return servers[contestant].measure(load, seed=index + 1)
    run = run_alone if load.num_requests == 1 else run_offline
    return run(engine, name, load, index + 1, peers)


def print_table(figures: dict[str, list[Figures]]) -> None:
    names = list(next(iter(figures.values()))[0])
    medians = {
        contestant: {name: statistics.median(measured[name] for measured in rounds) for name in names}
        for contestant, rounds in figures.items()
    }
    first = next(iter(medians.values()))
    print("| | " + " | ".join(f"{name} | ratio" for name in names) + " |")
    print("|---|" + "---|---|" * len(names))
    for contestant, values in medians.items():
        cells = []
        for name, value in values.items():
            ratio = value / first[name] if name in LOWER_IS_BETTER else first[name] / value
            cells.append(f"{value:.1f} | {ratio:.2f}")
        print(f"| {contestant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
