"""SamplingParams: what one request asks of the sampler and of the end of its output.

Knows nothing of HTTP or of devices; the server's schemas turn into this, and `LLM.generate` takes it directly.
"""

import json
import math
import re
import reprlib
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from octavo.errors import InvalidRequestError

__all__ = ["BeamSearchOptions", "BeamSearchParams", "SamplingParams", "StructuredOutputs"]

MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 4096  # of all stop strings together
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 8192  # of all bad words together
SEED_BITS = 63
RANDOM_SEED = -1  # as in vLLM and llama.cpp
MAX_STRUCTURE_CHARACTERS = 128 << 10  # of a schema, a regular expression, a grammar or all choices
GREEDY_BELOW = 1e-5  # dividing logits by less than this overflows or changes nothing


def _fail(name: str, value: object, allowed: str) -> None:
    raise InvalidRequestError(f"{name} must be {allowed}, got {reprlib.repr(value)}.", param=name)


def _check_number(name: str, value: float, low: float, high: float, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _fail(name, value, allowed)
    if not low <= value <= high:
        _fail(name, value, allowed)


def _check_token_ids(name: str, ids: Collection[int], allowed: str) -> None:
    """As quick as counting them: there may be as many as the vocabulary has."""
    if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0):
        for token_id in ids:
            _check_int(name, token_id, 0, math.inf, allowed)


def _check_length(name: str, texts: Sequence[str], most: int) -> None:
    num_characters = sum(map(len, texts))
    if num_characters > most:
        raise InvalidRequestError(
            f"{name} has {num_characters} characters in all; the limit is {most}. Send fewer or shorter strings.",
            param=name,
        )


def _check_int(name: str, value: int, low: int, high: float, allowed: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _fail(name, value, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """What the output must conform to: exactly one of these. Field names are vLLM's."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, as JSON text or as a dict, which becomes text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """In the syntax of Rust's regex crate, without look-around and back-references; matches the whole output."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A grammar in Lark's syntax, as llguidance reads it, or in GBNF."""
    whitespace_pattern: str | None = None
    """A regular expression for the white space between tokens of JSON; "" allows none."""

    def __post_init__(self) -> None:
        if self.whitespace_pattern is not None and not _whitespace_only(self.whitespace_pattern):
            raise InvalidRequestError(
                "whitespace_pattern must be a regular expression of at most 100 characters that matches white space "
                f"alone, got {self.whitespace_pattern[:100]!a}.",
                param="structured_outputs",
            )
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) + self.json_object != 1:
            raise InvalidRequestError(
                "structured_outputs must set exactly one of json, json_object, regex, choice and grammar.",
                param="structured_outputs",
            )
        if isinstance(self.json, dict):
            object.__setattr__(self, "json", _json_text(self.json))
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        for name in given:
            _check_structure(name, getattr(self, name))


_whitespace_only = re.compile(r"(?=.{0,100}\Z)(?:[ \t\n\r\[\]()|?*+]|\\[sntr]|\(\?:|\{\d*,?\d*\})*\Z", re.DOTALL).match


def _check_structure(name: str, value: object) -> None:
    texts = [value] if name != "choice" else value if isinstance(value, tuple) else ()
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"structured_outputs has no text in {name}.", param="structured_outputs")
    num_characters = sum(map(len, texts))
    if num_characters > MAX_STRUCTURE_CHARACTERS:
        raise InvalidRequestError(
            f"{name} in structured_outputs has {num_characters} characters; the limit is {MAX_STRUCTURE_CHARACTERS}.",
            param="structured_outputs",
        )


def _json_text(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The JSON schema can't be read: {error}.", param="structured_outputs") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchOptions:
    """How beams are ranked and when the search ends. Names and meanings are transformers'."""

    length_penalty: float = 1.0
    """Scores are sums of log-probabilities divided by the number of generated tokens to this power: above 0 longer
    outputs gain."""
    early_stopping: bool | Literal["never"] = False
    """When to end, once as many beams ended as are asked for: at once (true); when none that lives is better than the
    worst of them at its present length (false), or at its longest ("never")."""

    def __post_init__(self) -> None:
        _check_number("length_penalty", self.length_penalty, -10.0, 10.0, "a number from -10 to 10")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            _fail("early_stopping", self.early_stopping, 'true, false or "never"')


NO_BEAM_SEARCH: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("temperature", (0.0, 1.0)),
    ("top_p", (1.0,)),
    ("top_k", (0, -1)),
    ("min_p", (0.0,)),
    ("repetition_penalty", (1.0,)),
    ("presence_penalty", (0.0,)),
    ("frequency_penalty", (0.0,)),
    ("logit_bias", ({},)),
    ("allowed_token_ids", (None,)),
    ("bad_words", ((),)),
    ("min_tokens", (0,)),
    ("stop", ((),)),
    ("logprob_token_ids", ((),)),
    ("prompt_logprobs", (None,)),
    ("structured_outputs", (None,)),
)
"""Fields that beam search has no place for, and the values that ask for nothing."""


NOTHING: dict[str, Any] = {"logit_bias": {}, "bad_words": (), "stop": (), "stop_token_ids": (), "logprob_token_ids": ()}
"""What None means, which is vLLM's default for these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose a request's tokens and when to stop. Field names and meanings are vLLM's.

    Raises InvalidRequestError naming the field, its value and its range. Limits that depend on the model (the
    vocabulary, the context) are checked by `check_vocabulary` and by the engine.
    """

    n: int = 1
    """Completions to return for the prompt."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: up to the model's context. 0 reads the prompt only, for its log-probabilities."""
    min_tokens: int = 0
    """Before this many tokens were generated, end-of-sequence and stop tokens are not sampled and stop strings do not
    count."""
    temperature: float = 1.0
    """0 is greedy: the most likely token, the lowest id among equals."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities add up to this."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 or -1: all."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1 divides positive (multiplies negative) logits of tokens that are in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens that are in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output, once per occurrence."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids, -100 to 100."""
    seed: int | None = None
    """The result for a seed depends on neither the batch nor the load; None and -1 draw a
    seed."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Sample these tokens only."""
    bad_words: tuple[str, ...] = ()
    """Words that are not generated: the last token of a word's is not sampled after the others."""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """The words' tokens, filled in by `with_bad_words_encoded` where there is a tokenizer."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    logprobs: int | None = None
    """Return the log-probability of each generated token and of this many most likely ones (0: the token's own)."""
    logprob_token_ids: tuple[int, ...] = ()
    """Return the log-probabilities of these tokens, in their order, in place of the most likely ones'."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. Such a request does not read the prefix cache."""
    structured_outputs: StructuredOutputs | None = None
    """What the output must conform to. The output ends with it, whatever `ignore_eos` says."""
    beam_search: BeamSearchOptions | None = None
    """Instead of sampling, search for the `n` most likely outputs with as many beams."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool = True
    """False: return token ids only."""

    def __post_init__(self) -> None:
        for name, nothing in NOTHING.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, nothing)
        _check_int("n", self.n, 1, 128, "an integer from 1 to 128")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0, math.inf, "an integer of at least 0")
        _check_int("min_tokens", self.min_tokens, 0, math.inf, "an integer of at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        _check_number("temperature", self.temperature, 0.0, 100.0, "a number from 0 to 100")
        _check_number("top_p", self.top_p, 0.0, 1.0, "a number above 0 and at most 1")
        if self.top_p == 0.0:
            _fail("top_p", self.top_p, "a number above 0 and at most 1")
        _check_int("top_k", self.top_k, -1, math.inf, "an integer of at least 1, or 0 or -1 for all tokens")
        _check_number("min_p", self.min_p, 0.0, 1.0, "a number from 0 to 1")
        _check_number("repetition_penalty", self.repetition_penalty, 1e-6, 100.0, "a number above 0 and at most 100")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number from -2 to 2")
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number from -2 to 2")
        _check_token_ids("logit_bias", self.logit_bias, "keyed by token ids of at least 0")
        biases = self.logit_bias.values()
        if not (set(map(type, biases)) <= {int, float} and all(map(math.isfinite, biases))) or (
            biases and not -100.0 <= min(biases) <= max(biases) <= 100.0
        ):
            for bias in biases:
                _check_number("logit_bias", bias, -100.0, 100.0, "values from -100 to 100")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**SEED_BITS), 2**SEED_BITS - 1, "a 64-bit integer")
            if self.seed == RANDOM_SEED:
                object.__setattr__(self, "seed", None)
        self._check_tokens()
        if isinstance(self.stop, str):  # what every client is tempted to write
            object.__setattr__(self, "stop", (self.stop,))
        if len(self.stop) > MAX_STOP_STRINGS:
            _fail("stop", len(self.stop), f"at most {MAX_STOP_STRINGS} strings")
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                _fail("stop", stop, "made of strings that are not empty")
        if self.stop and not self.detokenize:
            _fail("stop", list(self.stop), "empty when detokenize is false: stop strings are found in text")
        _check_length("stop", self.stop, MAX_STOP_CHARACTERS)
        object.__setattr__(self, "stop", tuple(self.stop))
        _check_token_ids("stop_token_ids", self.stop_token_ids, "made of token ids of at least 0")
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))
        for name in ("logprobs", "prompt_logprobs"):
            if (number := getattr(self, name)) is not None:
                _check_int(name, number, 0, MAX_LOGPROBS, f"an integer from 0 to {MAX_LOGPROBS}")

        object.__setattr__(self, "logprob_token_ids", tuple(self.logprob_token_ids))
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequestError("logprob_token_ids needs logprobs.", param="logprob_token_ids")
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            _fail("logprob_token_ids", len(self.logprob_token_ids), f"at most {MAX_LOGPROB_TOKEN_IDS} token ids")
        for token_id in self.logprob_token_ids:
            _check_int("logprob_token_ids", token_id, 0, math.inf, "made of token ids of at least 0")
        if self.beam_search is not None:
            self._check_beam_search()

    def _check_beam_search(self) -> None:
        for name, neutral in NO_BEAM_SEARCH:
            if getattr(self, name) not in neutral:
                raise InvalidRequestError(
                    f"{name} is not supported with beam search, which ranks outputs by the model's own probabilities. "
                    "Leave the field out.",
                    param=name,
                )
        if self.max_tokens == 0:
            _fail("max_tokens", 0, "at least 1 with beam search")

    def _check_tokens(self) -> None:
        """What restricts the choice of tokens."""
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                _fail("allowed_token_ids", [], "a list of at least one token id")
            _check_token_ids("allowed_token_ids", self.allowed_token_ids, "made of token ids of at least 0")
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
        object.__setattr__(self, "bad_words", (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words)
        object.__setattr__(self, "bad_words", tuple(self.bad_words))
        object.__setattr__(self, "bad_words_token_ids", tuple(map(tuple, self.bad_words_token_ids)))
        if len(self.bad_words) > MAX_BAD_WORDS:
            _fail("bad_words", len(self.bad_words), f"at most {MAX_BAD_WORDS} strings")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                _fail("bad_words", word, "made of strings that are not blank")
        _check_length("bad_words", self.bad_words, MAX_BAD_WORD_CHARACTERS)

    def with_bad_words_encoded(self, encode: Callable[[str], list[int]]) -> Self:
        """These parameters with `bad_words_token_ids` for `bad_words`; `encode` adds no special tokens.

        Each word is banned in two spellings: as a text begins with it, and after a space.
        """
        if not self.bad_words:
            return self
        sequences: list[tuple[int, ...]] = []
        for word in map(str.lstrip, self.bad_words):
            first, spaced = tuple(encode(word)), tuple(encode(f" {word}"))
            sequences.append(first)
            if spaced[-len(first) :] != first:  # else the first bans it too
                sequences.append(spaced)
        return replace(self, bad_words_token_ids=tuple(filter(None, sequences)))

    def without_prompt_logprobs(self) -> Self:
        """The rest of them, as they are: nothing is checked again."""
        params = copy(self)
        object.__setattr__(params, "prompt_logprobs", None)
        return params

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequestError for a token id outside the model's vocabulary."""
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("logprob_token_ids", self.logprob_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("bad_words", [token_id for sequence in self.bad_words_token_ids for token_id in sequence]),
        ):
            if ids and (highest := max(ids)) >= vocab_size:
                _fail(name, highest, f"made of token ids below the vocabulary's size ({vocab_size})")

    @property
    def constraint(self) -> str | None:
        """The first of the fields that rule tokens out."""
        for name in ("allowed_token_ids", "structured_outputs", "bad_words", "logit_bias"):
            if getattr(self, name):
                return name
        return "min_tokens" if self.min_tokens else None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """What `LLM.beam_search` is asked for. Field names are vLLM's, and transformers' where vLLM has none."""

    beam_width: int
    """Beams, and outputs that are returned."""
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    """vLLM's field; anything but 0 is refused."""
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a beam beside the model's own end of sequence."""
    include_stop_str_in_output: bool = False
    """Whether the token that ended a beam is part of its text."""

    def sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError naming the field that is out of range."""
        _check_int("beam_width", self.beam_width, 1, 128, "an integer from 1 to 128")
        if self.temperature != 0.0:
            _fail("temperature", self.temperature, "0 with beam search")
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=self.include_stop_str_in_output,
            logprobs=0,
            beam_search=BeamSearchOptions(length_penalty=self.length_penalty, early_stopping=self.early_stopping),
        )
