"""What `LLM` returns: a prompt with its completions, its likeliest continuations, or a text with its embedding."""

from dataclasses import dataclass, field

from octavo.core.step import TokenLogprobs

__all__ = ["BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "EmbeddingOutput", "RequestOutput"]


@dataclass(slots=True)
class CompletionOutput:
    """One of a prompt's `n` completions."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    """One entry a token, where asked for."""
    finish_reason: str | None = None
    """"stop" (end of sequence, stop token or stop string) or "length"."""
    stop_reason: int | str | None = None
    """The stop token or stop string; None for the model's own end of sequence."""
    score: float | None = None
    """What beam search ranks the completions by; None without it."""


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was taken from the prefix cache."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """One entry a token of the prompt, where asked for; None for the first."""


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A prompt and one of its continuations."""

    text: str
    """Of both, without the token that ended it."""
    tokens: list[int]
    """Of both, with the token that ended it."""
    logprobs: list[TokenLogprobs]
    """One entry a token of the continuation."""
    cum_logprob: float
    score: float
    """cum_logprob / number of the continuation's tokens ** length_penalty."""
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """A prompt's likeliest continuations, as far as beam search finds them, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class EmbeddingOutput:
    """A text and its embedding."""

    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    """Tokens whose KV was taken from the prefix cache."""
