"""What each format costs in quality: perplexity, KL divergence from float32 and greedy agreement, on a fixed real text.

    python benchmarks/quality.py [--model FILE.gguf] [--num-tokens 50000] [--chunk 512] [--formats float32,bf16,q8_0]

The text is Python's own documentation strings, standard library modules in alphabetical order: the same for everybody
with the same Python. The model reads it in chunks that share nothing, and predicts each token but the first. A GGUF
format is made from the model's float32 weights by the gguf package's quantiser; `own` is the file's blocks as they are.
Formats end in -w where activations stay in bfloat16. A format may also be another file of the same model, which other
tools quantised: its blocks are taken as they are.
"""

import argparse
import ast
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from server_overhead import default_model

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import TensorInfo
from octavo.devices.machine import available_cpus
from octavo.devices.reference.device import ReferencePool
from octavo.devices.registry import open_device
from octavo.kernels.ops import Ops
from octavo.layers.context import StepContext
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.quantization import dequantize
from octavo.layers.weights import WeightFormat
from octavo.models.loader import CausalLM, load_model, open_checkpoint
from octavo.runner.kv_cache import kv_layout, layer_caches
from octavo.text.tokenizer import load_tokenizer

MADE = [name for name in QUANTIZED_TYPES if not name.endswith("_K")]  # the gguf package quantises to these
FORMATS = ["float32", "bf16", "own", "own-w", "int8", "int4", *(name.lower() for name in MADE)]


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity and divergence of each format.")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--num-tokens", type=int, default=50_000)
    parser.add_argument("--chunk", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--formats", default=",".join(FORMATS))
    args = parser.parse_args()
    device = open_device("CPU")
    device.set_num_threads(available_cpus())
    ops = device.ops
    checkpoint = open_checkpoint(args.model)
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.vocabulary)
    chunks = read_chunks(tokenizer.encode(documentation(8 * args.num_tokens)), args.num_tokens, args.chunk)

    formats = ["float32", *(name for name in args.formats.split(",") if name != "float32")]
    scores = {name: Score() for name in formats}
    start = time.perf_counter()
    models = {name: make_model(name, checkpoint, ops, args.chunk) for name in formats}
    for number, chunk in enumerate(chunks):
        targets, exact = torch.tensor(chunk[1:]), None
        for name, (model, dtype) in models.items():
            logits = chunk_logits(model, ops, checkpoint, chunk, dtype)[:-1]
            exact = exact or Exact(logits)
            scores[name].add(logits, exact, targets)
        print(f"\r{number + 1} of {len(chunks)} chunks, {time.perf_counter() - start:.0f} s", end="", flush=True)
    print(f"\n\n{sum(map(len, chunks))} tokens in chunks of {args.chunk}\n")
    print("| format | perplexity | to bf16 | mean KL to float32 | greedy agreement |\n|---|---|---|---|---|")
    base = scores.get("bf16", scores["float32"]).perplexity
    for name, score in scores.items():
        print(f"| {Path(name).stem} | {score.perplexity:.3f} | {score.perplexity / base - 1:+.2%} | {score.row} |")


def documentation(num_characters: int) -> str:
    """The documentation strings of Python's standard library, in the order of its files."""
    parts: list[str] = []
    for path in sorted(Path(ast.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = (node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)))
        parts += [text for text in map(ast.get_docstring, nodes) if text and len(text) > 200]
        if sum(map(len, parts)) > num_characters:
            break
    return "\n\n".join(parts)


def read_chunks(token_ids: list[int], num_tokens: int, size: int) -> list[list[int]]:
    if len(token_ids) < num_tokens:
        raise SystemExit(f"the text has only {len(token_ids)} tokens. Choose a smaller --num-tokens")
    return [token_ids[first : first + size] for first in range(0, num_tokens, size)]


class Exact:
    """What float32 predicts, of logits [T, vocab_size]."""

    def __init__(self, logits: torch.Tensor) -> None:
        norm = torch.logsumexp(logits, dim=-1, keepdim=True)
        self.p = (logits - norm).exp()
        self.entropy = float(torch.linalg.vecdot(self.p, norm - logits).double().sum())
        self.best = logits.argmax(dim=-1)


@dataclass(slots=True)
class Score:
    """Sums over predicted tokens."""

    num_tokens: int = 0
    loss: float = 0.0
    divergence: float = 0.0
    agreed: int = 0

    def add(self, logits: torch.Tensor, exact: Exact, targets: torch.Tensor) -> None:
        """logits [T, vocab_size], targets [T]"""
        norm = torch.logsumexp(logits, dim=-1)
        self.num_tokens += len(targets)
        self.loss += float((norm - logits.gather(1, targets.unsqueeze(1)).squeeze(1)).double().sum())
        cross_entropy = torch.linalg.vecdot(exact.p, norm.unsqueeze(1) - logits).double().sum()
        self.divergence += float(cross_entropy) - exact.entropy  # the same sums for float32 itself: 0
        self.agreed += int((logits.argmax(dim=-1) == exact.best).sum())

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.loss / self.num_tokens))

    @property
    def row(self) -> str:
        return f"{self.divergence / self.num_tokens:.1e} | {self.agreed / self.num_tokens:.2%}"


class Requantized:
    """A checkpoint whose matrices are made anew in one of GGUF's types."""

    def __init__(self, original: Checkpoint, dtype_name: str) -> None:
        self.original, self.dtype_name = original, dtype_name
        self.path, self.config, self.vocabulary = original.path, original.config, original.vocabulary
        self.tensors: Mapping[str, TensorInfo] = {
            name: replace(info, dtype=dtype_name) if len(info.shape) == 2 else info
            for name, info in original.tensors.items()
        }

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        info, data = self.original.tensors[name], self.original.read(name)
        if len(info.shape) != 2:
            return data
        weight = dequantize(data, info.dtype, info.shape, torch.float32).numpy()
        kind = gguf.GGMLQuantizationType[self.dtype_name]
        return gguf.quants.quantize(weight, kind).view(np.uint8).reshape(-1)


def make_model(name: str, checkpoint: Checkpoint, ops: Ops, max_model_len: int) -> tuple[CausalLM, torch.dtype]:
    """The model in this format, and the type of its activations between products."""
    if name.endswith(".gguf"):
        checkpoint, name = open_checkpoint(name), "own"
    form, _, suffix = name.partition("-")
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    if form.upper() in MADE:
        checkpoint, quantization = Requantized(checkpoint, form.upper()), "gguf"
    else:
        quantization = {"own": "gguf", "int8": "int8", "int4": "int4"}.get(form, "none")
    model = load_model(
        checkpoint, ops, WeightFormat(dtype, quantization, int8_activations=suffix != "w"), max_model_len
    )
    return model, dtype


def chunk_logits(
    model: CausalLM, ops: Ops, checkpoint: Checkpoint, token_ids: list[int], dtype: torch.dtype
) -> torch.Tensor:
    """[len(token_ids), vocab_size] float32, in one step."""
    count, block_size, num_groups = len(token_ids), 16, len(checkpoint.config.kv_groups)
    num_blocks = -(-count // block_size)
    positions = torch.arange(count, dtype=torch.int32)
    tables = torch.arange(num_blocks * num_groups, dtype=torch.int32).view(num_groups, 1, num_blocks)
    layout = kv_layout(checkpoint.config, num_blocks * num_groups, block_size, str(dtype).removeprefix("torch."))
    caches = layer_caches(checkpoint.config, ReferencePool(ops, layout).caches)
    ctx = StepContext(
        ops=ops,
        dtype=dtype,
        positions=positions,
        slot_mappings=tuple(positions + group * num_blocks * block_size for group in range(num_groups)),
        block_tables=tuple(tables),
        query_start=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        kv_caches=caches,
    )
    with torch.inference_mode():
        return model.logits(model(torch.tensor(token_ids, dtype=torch.int32), ctx), positions, ctx)


if __name__ == "__main__":
    main()
