"""Tiny models with random weights in every supported architecture, as Hugging Face folders, made by transformers.

Weights are larger than a fresh initialisation's, so that logits are far apart and every term of a layer matters.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

__all__ = ["FAMILIES", "make_folder", "make_model", "make_tokenizer"]

SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


GEMMA3: dict[str, Any] = {
    "head_dim": 32,
    "query_pre_attn_scalar": 48,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


def _config(family: str, **overrides: Any) -> PreTrainedConfig:
    sizes = SIZES | overrides
    match family:
        case "llama":
            return LlamaConfig(**sizes)
        case "llama-tied-mha":  # SmolLM's and Llama 1's shape
            return LlamaConfig(**(sizes | {"tie_word_embeddings": True, "num_key_value_heads": 4}))
        case "llama-bias-head-dim":
            return LlamaConfig(**sizes, attention_bias=True, mlp_bias=True, head_dim=32)
        case "llama3-rope":
            return LlamaConfig(**sizes, rope_parameters=LLAMA3_ROPE)
        case "llama-linear-rope":
            rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
            return LlamaConfig(**sizes, rope_parameters=rope)
        case "llama-dynamic-rope":
            rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
            return LlamaConfig(**sizes, rope_parameters=rope)
        case "llama-yarn-rope":
            return LlamaConfig(**sizes, rope_parameters=YARN_ROPE)
        case "mistral":
            return MistralConfig(**sizes, sliding_window=24, head_dim=16)
        case "qwen2":
            return Qwen2Config(**sizes, use_sliding_window=False)
        case "qwen2-window":
            return Qwen2Config(**sizes, use_sliding_window=True, sliding_window=20, max_window_layers=1)
        case "qwen3":  # whose heads need not share the hidden size evenly
            return Qwen3Config(**sizes, head_dim=32)
        case "qwen3-window-bias":
            windows = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
            return Qwen3Config(**sizes, **windows, head_dim=16, attention_bias=True, tie_word_embeddings=True)
        case "gemma3":
            return Gemma3TextConfig(**(GEMMA3 | sizes))
        case "gemma3-linear-rope":
            rope = {
                "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
            return Gemma3TextConfig(**(GEMMA3 | sizes), rope_parameters=rope)
    raise ValueError(family)


FAMILIES = [
    "llama",
    "llama-tied-mha",
    "llama-bias-head-dim",
    "llama3-rope",
    "llama-linear-rope",
    "llama-dynamic-rope",
    "llama-yarn-rope",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "qwen3-window-bias",
    "gemma3",
    "gemma3-linear-rope",
]


def make_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 transformers model of the family, the same for the same seed."""
    model = AutoModelForCausalLM.from_config(_config(family, **overrides), attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * (1.5 / parameter.shape[1] ** 0.5))
            else:
                around_1 = "norm" in name and not family.startswith("gemma")  # Gemma adds 1 itself
                parameter.copy_(0.1 * noise + (1.0 if around_1 else 0.0))
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of 384 tokens, as many as the models' embeddings have rows, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the quick brown fox jumps over the lazy dog and runs through the forest until the night is over "
    tokenizer.train_from_iterator([text * 20], trainer)
    tokenizer.add_tokens([f"<filler{i}>" for i in range(384 - tokenizer.get_vocab_size())])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = (
        "{% for message in messages %}{{ '<s>' + message['role'] + '\\n' + message['content'] + '</s>\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\\n' }}{% endif %}"
    )
    return fast


def make_folder(path: Path, family: str = "llama", seed: int = 0, shards: bool = False, **overrides: Any) -> Path:
    """Save a tiny model and its tokenizer to `path`, as one safetensors file or in shards."""
    model = make_model(family, seed, **overrides)
    model.save_pretrained(path, max_shard_size="100KB" if shards else "5GB")
    make_tokenizer().save_pretrained(path)
    return path
