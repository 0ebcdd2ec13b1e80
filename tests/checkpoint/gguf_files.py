"""Small GGUF files, written by the gguf package, for the checkpoint tests."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = [
    "HEADS",
    "HIDDEN",
    "INTERMEDIATE",
    "KV_HEADS",
    "LAYERS",
    "TOKENS",
    "TOKEN_TYPES",
    "VOCAB",
    "tiny_tensors",
    "write_gguf",
]

HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS, VOCAB = 64, 4, 2, 96, 2, 12
TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab", "Ġ", "é", "日本", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
TOKEN_TYPES = [2, 3, 3, 1, 1, 1, 1, 1, 1, 3, 3, 1]


def tiny_tensors(arch: str, tied: bool = False) -> dict[str, np.ndarray]:
    """Random float32 tensors of a two-layer model by GGUF name, outermost dimension first."""
    rng = np.random.default_rng(0)
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        shapes[prefix + "attn_norm.weight"] = shapes[prefix + "ffn_norm.weight"] = (HIDDEN,)
        shapes[prefix + "attn_q.weight"] = shapes[prefix + "attn_output.weight"] = (HIDDEN, HIDDEN)
        shapes[prefix + "attn_k.weight"] = shapes[prefix + "attn_v.weight"] = (kv_size, HIDDEN)
        shapes[prefix + "ffn_gate.weight"] = shapes[prefix + "ffn_up.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[prefix + "ffn_down.weight"] = (HIDDEN, INTERMEDIATE)
        if arch == "qwen2":
            shapes[prefix + "attn_q.bias"] = (HIDDEN,)
            shapes[prefix + "attn_k.bias"] = shapes[prefix + "attn_v.bias"] = (kv_size,)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    arch: str = "llama",
    keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    matrix_type: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    alignment: int | None = None,
    **writer_options: Any,
) -> Path:
    """A tiny model of `arch`; `keys` adds or (None) drops metadata; matrices are stored as `matrix_type`."""
    writer = gguf.GGUFWriter(path, arch, **writer_options)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    metadata: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 256,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": INTERMEDIATE,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TOKEN_TYPES,
        "tokenizer.ggml.scores": [float(-index) for index in range(VOCAB)],
        "tokenizer.ggml.merges": ["a b", "Ġ a"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }
    for key, value in (metadata | dict(keys or {})).items():
        if value is not None:
            writer.add_key_value(key, value, *_value_type(value))
    for name, tensor in (tiny_tensors(arch) if tensors is None else tensors).items():
        if tensor.ndim > 1:
            writer.add_tensor(name, gguf.quants.quantize(tensor, matrix_type), raw_dtype=matrix_type)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _value_type(value: Any) -> tuple[gguf.GGUFValueType, gguf.GGUFValueType | None]:
    if isinstance(value, list):
        return gguf.GGUFValueType.ARRAY, None
    if isinstance(value, int) and not isinstance(value, bool):
        return (gguf.GGUFValueType.UINT32 if value >= 0 else gguf.GGUFValueType.INT32), None
    return gguf.GGUFValueType.get_type(value), None
