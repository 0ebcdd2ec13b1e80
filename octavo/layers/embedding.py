"""Embedding, LMHead and Decoder: token ids to the residual stream, and the residual stream to logits."""

import torch

from octavo.checkpoint.model_config import ModelConfig
from octavo.kernels.ops import Weight
from octavo.layers.context import StepContext
from octavo.layers.weights import WeightLoader

__all__ = ["Decoder", "Embedding", "LMHead"]


class Embedding:
    """Rows of a matrix, times `scale`. Rows after those of the vocabulary are left out."""

    def __init__(self, weights: WeightLoader, name: str, config: ModelConfig, scale: float = 1.0) -> None:
        self.weight = _vocabulary_matrix(weights, f"{name}.weight", config)
        self.scale = scale

    def __call__(self, token_ids: torch.Tensor, ctx: StepContext) -> torch.Tensor:  # [T] -> [T, H] float32
        rows = ctx.ops.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else ctx.ops.scale(rows, self.scale)


def _vocabulary_matrix(weights: WeightLoader, name: str, config: ModelConfig) -> Weight:
    sizes = (config.hidden_size, [config.vocab_size])
    return weights.matrix([name], *sizes, shard="vocabulary", num_padding_rows=config.num_padding_tokens)


class LMHead:
    """Logits of chosen rows. Shares the embedding's matrix where the model ties them."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def __call__(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """hidden_states [T, H], rows [S] int32 -> [S, V] float32."""
        return ctx.ops.linear(ctx.ops.gather_rows(hidden_states, rows), self.weight, None, torch.float32)

    def most_likely(
        self, hidden_states: torch.Tensor, rows: torch.Tensor, draws: torch.Tensor, ctx: StepContext
    ) -> None:
        """The likeliest token of each row [S], into `draws` [S, DRAW_BYTES]."""
        ctx.ops.most_likely(ctx.ops.gather_rows(hidden_states, rows), self.weight, draws)


class Decoder:
    """What every decoder has at its ends: an embedding and a head, which share a matrix where the model ties them."""

    def __init__(self, config: ModelConfig, weights: WeightLoader, scale: float = 1.0) -> None:
        """`scale` multiplies the embedding's rows."""
        self.embedding = Embedding(weights, "model.embed_tokens", config, scale)
        is_tied = config.tie_word_embeddings
        self.lm_head = LMHead(
            self.embedding.weight if is_tied else _vocabulary_matrix(weights, "lm_head.weight", config)
        )

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: StepContext) -> torch.Tensor:
        """hidden_states as the model returns them, rows [S] int32 -> logits [S, vocab_size] float32 of these tokens."""
        return self.lm_head(hidden_states, rows, ctx)

    def most_likely(
        self, hidden_states: torch.Tensor, rows: torch.Tensor, draws: torch.Tensor, ctx: StepContext
    ) -> None:
        """Fill in `draws` [S, DRAW_BYTES] by these logits, which need not be stored: all of temperature 0, unmasked."""
        self.lm_head.most_likely(hidden_states, rows, draws, ctx)
