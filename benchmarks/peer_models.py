"""One model in every form that `peers.py` needs, all made from the same weights.

    python benchmarks/peer_models.py DIR --llama-quantize FILE [--model FILE.gguf | --qwen2]

DIR gets bf16, f16, q8_0, q4_0 and q4_1 as GGUF and hf/, a Hugging Face folder in bfloat16. The weights are those of
a file (the default model's if none is given) or, with --qwen2, random ones in the shape of Qwen2-0.5B with the default
model's tokens, which serve for measuring speed.
"""

import argparse
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from server_overhead import default_model

FORMATS = ("bf16", "f16", "q8_0", "q4_0", "q4_1")
LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCAB = 24, 896, 14, 2, 4864, 151_936
HEAD_DIM = HIDDEN // HEADS


def main() -> None:
    parser = argparse.ArgumentParser(description="One model in every form that peers.py needs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-quantize", type=Path, required=True)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--qwen2", action="store_true", help="random weights in the shape of Qwen2-0.5B")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    source = args.model or Path(default_model())
    if args.qwen2:
        source = args.folder / "source.gguf"
        write_qwen2(source)
    for name in FORMATS:
        quantize = [str(args.llama_quantize), "--allow-requantize"]
        subprocess.run([*quantize, str(source), str(args.folder / f"{name}.gguf"), name.upper()], check=True)
    write_hf(args.folder / "bf16.gguf", args.folder / "hf")


def write_qwen2(path: Path) -> None:
    writer = GGUFWriter(path, "qwen2")
    writer.add_name("random weights in the shape of Qwen2-0.5B")
    writer.add_context_length(32_768)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(32)
    add_vocabulary(writer)
    generator = np.random.default_rng(0)

    def add(name: str, *shape: int, scale: float = 0.02, mean: float = 0.0) -> None:
        values = generator.standard_normal(shape, dtype=np.float32) * np.float32(scale) + np.float32(mean)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:  # the upper half of a float32
            halves = (values.view(np.uint32) >> 16).astype(np.uint16)
            writer.add_tensor(name, halves.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)

    add("token_embd.weight", VOCAB, HIDDEN)
    add("output_norm.weight", HIDDEN, mean=1.0)
    for i in range(LAYERS):
        for part, size in (("q", HIDDEN), ("k", KV_HEADS * HEAD_DIM), ("v", KV_HEADS * HEAD_DIM)):
            add(f"blk.{i}.attn_{part}.weight", size, HIDDEN)
            add(f"blk.{i}.attn_{part}.bias", size)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{i}.attn_norm.weight", HIDDEN, mean=1.0)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN, mean=1.0)
        add(f"blk.{i}.ffn_gate.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{i}.ffn_up.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=True)
    writer.close()


def add_vocabulary(writer: GGUFWriter) -> None:
    """The default model's, with tokens that never occur up to the size of Qwen2's."""
    fields = GGUFReader(default_model()).fields
    for name, field in fields.items():
        if not name.startswith("tokenizer."):
            continue
        value: Any = field.contents()
        if name == "tokenizer.ggml.tokens":
            value = value + [f"<|unused_{i}|>" for i in range(VOCAB - len(value))]
        if name == "tokenizer.ggml.token_type":
            value = value + [5] * (VOCAB - len(value))
        kind, *inner = field.types
        if kind == GGUFValueType.ARRAY:
            writer.add_key_value(name, value, kind, inner[0])
        else:
            writer.add_key_value(name, value, kind)


def write_hf(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    if hasattr(model.config, "quantization_config"):  # not of floats
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


if __name__ == "__main__":
    main()
