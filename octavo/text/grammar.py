"""Grammars: what StructuredOutputs asks for, compiled by llguidance against a tokenizer into masks of allowed tokens.

Everything that a request can make expensive is limited here: sizes, llguidance's own fuel, the time a matcher takes.
Knows nothing of requests, batches or sampling. Import it where a grammar is met: llguidance is only loaded then.
"""

import copy
import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import any_to_lark

from octavo.core.step import TokenMask
from octavo.errors import InvalidRequestError
from octavo.sampling_params import StructuredOutputs
from octavo.text.json_schema import demands, rewrite
from octavo.text.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "Matcher", "grammar_source"]

LIMITS: dict[str, Any] = {"step_max_items": 20_000, "verbose_errors": False}
"""Where llguidance's own limits are too wide for a step that others wait for."""
FREE_CPU_S, CPU_S_A_TOKEN = 1.0, 0.02
"""Time a matcher may take in all, and for each token: a few milliseconds are much."""
WHITESPACE = r" |\n[ ]{0,40}|\n\t{1,10}"
"""Between the tokens of JSON: compact or indented. Without a limit small models fill the output with blanks."""
JSON_OPTIONS: dict[str, Any] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}
"""All that "x-guidance" in a schema could set: the output is JSON that the schema accepts, whatever it says."""
STRING_CHARACTER = r'[^"\\\x00-\x1F\x7F]'
SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{STRING_CHARACTER}{{1,{length}}}" for length in (5, 10, 15, 20, 30)),
    f"{STRING_CHARACTER}+",
]
"""Sets of tokens that llguidance judges as one where a grammar allows all of a set: blanks, and parts of JSON strings
up to some lengths. With more lengths than its own two, masks within strings of limited length take half the time."""
MAX_COMPILED = 32
"""Grammars kept ready for the next request that asks for the same."""
KNOWN_FORMATS = frozenset(["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"])
MAX_MESSAGE_CHARACTERS = 500


def _refusal(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"The structured output can't be compiled: {message}", param="structured_outputs")


def grammar_source(structure: StructuredOutputs) -> str:
    """The grammar as llguidance takes it. Raises InvalidRequestError where it is not even text of its kind."""
    if structure.json_object:
        return _from_schema({"type": "object"}, structure.whitespace_pattern)
    if structure.json is not None:
        return _from_schema(_parsed(str(structure.json)), structure.whitespace_pattern)
    if structure.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(structure.regex)
    if structure.choice is not None:
        return llguidance.LLMatcher.grammar_from_regex("|".join(map(_literal, structure.choice)))
    assert structure.grammar is not None
    try:
        return llguidance.LLMatcher.grammar_from_lark(any_to_lark(structure.grammar))
    except Exception as error:  # the converter of GBNF is Python, and recursive
        raise _refusal(f"{type(error).__name__}: {error}") from None


def _parsed(schema: str) -> object:
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"the schema is not JSON: {error}") from None


def _from_schema(schema: object, whitespace: str | None) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _refusal("a schema must be an object that something satisfies.")
    try:
        text = json.dumps(rewrite(rewrite(schema, demands), _without_unknown_formats), ensure_ascii=False)
        options = JSON_OPTIONS if whitespace is None else _with_whitespace(whitespace)
        return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options)  # type: ignore[arg-type]
    except (ValueError, RecursionError) as error:
        raise _refusal(str(error)) from None


def _with_whitespace(pattern: str) -> dict[str, Any]:
    """JSON_OPTIONS with other white space between the tokens; "" allows none."""
    if not pattern:
        return {key: value for key, value in JSON_OPTIONS.items() if key != "whitespace_pattern"} | {
            "whitespace_flexible": False
        }
    return JSON_OPTIONS | {"whitespace_pattern": pattern.replace(r"\s", r"[ \t\n\r]")}  # JSON knows no other


def _without_unknown_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """A format that nobody knows is an annotation (JSON Schema 2020-12, validation, 7.2.1)."""
    form = schema.get("format")
    if isinstance(form, str) and form not in KNOWN_FORMATS:
        return {key: value for key, value in schema.items() if key != "format"}
    return schema


def _literal(text: str) -> str:
    """A regular expression for just this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


class _Vocabulary:
    """A Tokenizer as llguidance wants it: bytes by id, and how text is split where a grammar leaves no choice."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        named = (token_id for token_id in range(vocab_size) if tokenizer.is_special(token_id))
        self.special_token_ids = sorted({*named, *eos_token_ids})
        special = frozenset(self.special_token_ids)
        self._ordinary = {token_id: text for token_id, text in enumerate(self.tokens) if token_id not in special}
        # Of a byte and a letter with the same bytes the letter comes later.
        self._ids = {text: token_id for token_id, text in self._ordinary.items()}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are exactly the text's: where the tokenizer puts a space before it, or reads a special
        token in it, the longest tokens that match."""
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if b"".join(self._ordinary.get(token_id, b"") for token_id in token_ids) == text.encode():
            return token_ids
        return self._longest_matches(text.encode())

    def _longest_matches(self, text: bytes) -> list[int]:
        token_ids, position = [], 0
        while position < len(text):
            ends = range(min(len(text), position + self._longest), position, -1)
            found = next((end for end in ends if text[position:end] in self._ids), None)
            if found is None:
                break  # a byte that no token has: llguidance refuses the grammar
            token_ids.append(self._ids[text[position:found]])
            position = found
        return token_ids


class GrammarCompiler:
    """Compiles for one model's vocabulary, and remembers the latest results; for any thread.

    Building it takes a third of a second for 50,000 tokens.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`vocab_size` is the model's: its embedding may have more rows than the tokenizer has tokens. They are never
        allowed. Raises InvalidRequestError for a model without an end-of-sequence token."""
        if not eos_token_ids:
            raise _refusal("the model has no end-of-sequence token to end the output with.")
        vocabulary = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_token_ids))
        self._tokenizer = llguidance.LLTokenizer(vocabulary, eos_token=list(eos_token_ids), slices=SLICES)
        self._eos_mask = _mask_of(eos_token_ids, vocab_size)
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[StructuredOutputs, Matcher] = OrderedDict()  # the latest used last
        self._lock = threading.Lock()

    def find(self, structure: StructuredOutputs) -> "Matcher | None":
        """A new matcher, at once, for what was compiled before."""
        with self._lock:
            matcher = self._compiled.get(structure)
            if matcher is None:
                return None
            self._compiled.move_to_end(structure)
            return matcher.copy()

    def compile(self, structure: StructuredOutputs) -> "Matcher":
        """Raises InvalidRequestError, with the compiler's message, for what can't be compiled or never ends well."""
        found = self.find(structure)
        if found is not None:
            return found
        source = grammar_source(structure)
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = Matcher(
            llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits), self._vocab_size, self._eos_mask
        )
        with self._lock:
            self._compiled[structure] = matcher
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return matcher.copy()


def _mask_of(token_ids: Sequence[int], vocab_size: int) -> TokenMask:
    bits = sum(1 << token_id for token_id in set(token_ids))
    return bits.to_bytes(-(-vocab_size // 8), "little")


class Matcher:
    """Where one output is in its grammar. For one thread at a time.

    `mask` is of the tokens that may come next; after the output's end, of the end-of-sequence tokens. Its memory is
    written anew by `accept`.
    """

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, eos_mask: TokenMask) -> None:
        """Raises InvalidRequestError, as `accept` does."""
        self._matcher = matcher
        self._eos_mask = eos_mask
        self._hold(np.zeros(-(-vocab_size // 32), np.int32))
        self._cpu_left_s = FREE_CPU_S
        self._check()
        self.mask = self._next_mask()

    def copy(self) -> "Matcher":
        """Another one at the same place."""
        other = copy.copy(self)
        other._matcher = self._matcher.deep_copy()
        other._hold(self._words.copy())
        if self.mask is not self._eos_mask:
            other.mask = other._own_mask
        return other

    def _hold(self, words: npt.NDArray[np.int32]) -> None:
        """Let masks be written to this memory."""
        self._words, self._address, self._own_mask = words, words.ctypes.data, words.data.cast("B")

    def accept(self, token_id: int) -> None:
        """Go on by a token that `mask` allows. Raises InvalidRequestError for a grammar that turns out too complex."""
        start_s = time.thread_time()
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
            self._check()
        self.mask = self._next_mask()
        self._cpu_left_s += CPU_S_A_TOKEN - (time.thread_time() - start_s)
        if self._cpu_left_s < 0:
            raise _refusal("following it takes too long; make it less ambiguous.")

    def _next_mask(self) -> TokenMask:
        if self._matcher.is_stopped():
            return self._eos_mask
        self._matcher.unsafe_compute_mask_ptr(self._address, self._words.nbytes)
        self._check()
        return self._own_mask

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _refusal(_first_part(self._matcher.get_error()))


def _first_part(message: str) -> str:
    """llguidance's message without the dump of its state that follows."""
    text = re.split(r"<(?:backtrace|state|non-verbose/)>", message)[0].strip()
    if text.startswith("NoExtension"):
        return "nothing satisfies it."
    return f"{text[:MAX_MESSAGE_CHARACTERS]}."
