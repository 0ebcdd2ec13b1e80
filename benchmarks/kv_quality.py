"""What a KV cache's type costs: perplexity of real text, and divergence from the run whose cache is as --dtype.

    python benchmarks/kv_quality.py MODEL [--tokens 16384] [--window 1024] [--backend cpu]

The text is Python's own reference documentation, as the interpreter carries it (pydoc_data.topics), read in windows
that begin with an empty cache. Divergence is KL(run with --dtype's cache ‖ other) in nats, the mean over tokens;
agreement is how often both find the same token likeliest.
"""

import argparse
import math
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch

from octavo.devices.machine import available_cpus
from octavo.devices.registry import open_device
from octavo.kernels.ops import Ops
from octavo.layers.context import StepContext
from octavo.layers.weights import WeightFormat
from octavo.models.loader import CausalLM, load_model, open_checkpoint
from octavo.runner.kv_cache import kv_layout, layer_caches
from octavo.text.tokenizer import load_tokenizer

BLOCK_SIZE = 16
CHUNK = 128
"""Tokens computed at once: as many rows of logits are held for each run."""


@dataclass(slots=True)
class Run:
    """The model with a cache of one type, and what its predictions add up to."""

    model: CausalLM
    ops: Ops
    dtype: torch.dtype
    kv_caches: list[torch.Tensor]
    block_tables: tuple[torch.Tensor, ...]  # of each group of layers [1, blocks] int32: blocks one after the other
    nats: float = 0.0
    divergence: float = 0.0
    num_agreed: int = 0

    def log_probabilities(self, token_ids: torch.Tensor, first: int) -> torch.Tensor:
        """Of what follows each of token_ids [n], the window's tokens from `first` on: [n, vocab_size] float32."""
        positions = torch.arange(first, first + len(token_ids), dtype=torch.int32)
        ctx = StepContext(
            ops=self.ops,
            dtype=self.dtype,
            positions=positions,
            slot_mappings=tuple(positions + table[0, 0] * BLOCK_SIZE for table in self.block_tables),
            block_tables=self.block_tables,
            query_start=torch.tensor([0, len(token_ids)], dtype=torch.int32),
            seq_lens=torch.tensor([first + len(token_ids)], dtype=torch.int32),
            kv_caches=self.kv_caches,
        )
        rows = torch.arange(len(token_ids), dtype=torch.int32)
        return torch.log_softmax(self.model.logits(self.model(token_ids, ctx), rows, ctx), dim=-1)

    def count(self, predicted: torch.Tensor, exact: torch.Tensor, targets: torch.Tensor) -> None:
        self.nats -= predicted.gather(1, targets.long().unsqueeze(1)).double().sum().item()
        self.divergence += (exact.exp() * (exact - predicted)).sum(dim=-1).double().sum().item()
        self.num_agreed += int((predicted.argmax(dim=-1) == exact.argmax(dim=-1)).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="What a KV cache's type costs in quality.")
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kv-cache-dtypes", default="float32,int8,fp8", help="to compare with, comma-separated")
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--backend", choices=("cpu", "reference"), default="cpu")
    args = parser.parse_args()

    checkpoint, device, dtype = open_checkpoint(args.model), open_device(args.backend), getattr(torch, args.dtype)
    device.set_num_threads(available_cpus())
    ops = device.ops
    model = load_model(checkpoint, ops, WeightFormat(dtype), args.window)
    text = "\n\n".join(topics.values())[: 8 * args.tokens]
    token_ids = torch.tensor(
        load_tokenizer(checkpoint.path, checkpoint.vocabulary).encode(text)[: args.tokens], dtype=torch.int32
    )
    names, num_blocks = [args.dtype, *args.kv_cache_dtypes.split(",")], -(-args.window // BLOCK_SIZE)
    num_groups, config = len(checkpoint.config.kv_groups), checkpoint.config
    blocks = torch.arange(num_groups * num_blocks, dtype=torch.int32).view(num_groups, 1, num_blocks)
    layouts = [kv_layout(config, num_groups * num_blocks, BLOCK_SIZE, name) for name in names]
    caches = [layer_caches(config, device.make_kv_pool(layout).caches) for layout in layouts]
    runs = [Run(model, ops, dtype, kv_caches, blocks.unbind(0)) for kv_caches in caches]
    num_predicted = compare(runs, token_ids, args.window)
    print(f"{num_predicted} tokens in windows of {args.window}, {args.dtype}, {args.backend}\n")
    print("| KV cache | perplexity | change | divergence | agreement |\n|---|---|---|---|---|")
    for name, run in zip(names, runs, strict=True):
        perplexity, change = math.exp(run.nats / num_predicted), math.expm1((run.nats - runs[0].nats) / num_predicted)
        cells = [f"{perplexity:.4f}", f"{change:+.3%}", f"{run.divergence / num_predicted:.6f}"]
        print(f"| {name} | {' | '.join(cells)} | {run.num_agreed / num_predicted:.2%} |")


@torch.inference_mode()
def compare(runs: list[Run], token_ids: torch.Tensor, window: int) -> int:
    """Count every run's predictions against the first one's; returns how many tokens were predicted."""
    num_predicted = 0
    for start in range(0, len(token_ids), window):
        tokens = token_ids[start : start + window]
        for first in range(0, len(tokens) - 1, CHUNK):
            targets = tokens[first + 1 : first + CHUNK + 1]
            inputs = tokens[first : first + len(targets)]
            exact = runs[0].log_probabilities(inputs, first)
            for run in runs:
                run.count(exact if run is runs[0] else run.log_probabilities(inputs, first), exact, targets)
            num_predicted += len(targets)
    return num_predicted


if __name__ == "__main__":
    main()
