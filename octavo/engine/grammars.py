"""Grammars: the matchers of constrained requests, built beside the engine's steps and advanced as tokens are sampled.

Knows no queue and no device: the engine asks what is built and for a step's masks, and tells what was sampled.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.core.step import TokenMask
from octavo.errors import OctavoError
from octavo.sampling_params import StructuredOutputs

if TYPE_CHECKING:  # llguidance is only loaded for the first request that needs it
    from octavo.text.grammar import GrammarCompiler, Matcher

__all__ = ["STACK_BYTES", "Grammars"]

STACK_BYTES = 256 << 20
"""For threads that compile or match: llguidance recurses as deep as rules refer to one another. Address space, of which
only what is used is taken."""
NUM_BUILDERS = 2
"""Threads: one slow grammar does not hold up the others."""


class Grammars:
    """Invariants: a request is in `_open` from `open` to `close`, and in `_matchers` once its grammar is built, which
    `open` or `take_built` tells the engine before it schedules the request. A matcher is touched by one thread at a
    time: its builder's, then the one that computes masks, in the order of the steps.
    """

    def __init__(self, load_compiler: Callable[[], "GrammarCompiler"]) -> None:
        """`load_compiler` is called once, in another thread, for the first request that is constrained."""
        self._load_compiler = load_compiler
        self._compiler: GrammarCompiler | None = None
        self._loading = threading.Lock()
        self._builders = ThreadPoolExecutor(NUM_BUILDERS, thread_name_prefix="octavo-grammar")
        self._masker = ThreadPoolExecutor(1, thread_name_prefix="octavo-masks")
        self._open: set[int] = set()
        self._matchers: dict[int, Matcher] = {}
        self._errors: dict[int, str] = {}
        self._built: queue.SimpleQueue[tuple[int, OctavoError | None]] = queue.SimpleQueue()
        self._has_news = threading.Event()
        self._advancing: Future[None] | None = None
        self._foreseen: dict[int, list[TokenMask]] = {}  # by request whose next step verifies drafts

    # ---- before a request is scheduled

    def open(self, request_id: int, structure: StructuredOutputs) -> bool:
        """Whether the grammar is there already; else it is being built, and `take_built` tells the end."""
        self._open.add(request_id)
        matcher = self._compiler.find(structure) if self._compiler is not None else None
        if matcher is None:
            _submit(self._builders, partial(self._build, request_id, structure))
            return False
        self._matchers[request_id] = matcher
        return True

    def close(self, request_id: int) -> str | None:
        """Forget a request. Returns why its grammar failed, if that is what ended it."""
        self._open.discard(request_id)
        self._matchers.pop(request_id, None)
        self._foreseen.pop(request_id, None)
        return self._errors.pop(request_id, None)

    @property
    def are_built(self) -> bool:
        """Whether `take_built` has something to tell."""
        return not self._built.empty()

    def take_built(self) -> list[tuple[int, OctavoError | None]]:
        """Requests whose grammar was built since the last call, or why it could not be."""
        built = []
        while not self._built.empty():
            built.append(self._built.get())
        return [(request_id, error) for request_id, error in built if request_id in self._open]

    def wait_built(self, timeout_s: float) -> None:
        """Sleep until `take_built` has something to tell, or until the time is over."""
        if self._has_news.wait(timeout_s):
            self._has_news.clear()

    def _build(self, request_id: int, structure: StructuredOutputs) -> None:
        if request_id not in self._open:
            return
        error: OctavoError | None = None
        try:
            self._matchers[request_id] = self._get_compiler().compile(structure)
        except OctavoError as refusal:
            error = refusal
        except Exception as failure:  # whatever it is, it is this request's alone
            error = OctavoError(f"{type(failure).__name__}: {failure}")
        if request_id not in self._open:
            self._matchers.pop(request_id, None)
        self._built.put((request_id, error))
        self._has_news.set()

    def _get_compiler(self) -> "GrammarCompiler":
        with self._loading:
            if self._compiler is None:
                self._compiler = self._load_compiler()
            return self._compiler

    # ---- a step's second phase

    @property
    def are_wanted(self) -> bool:
        """Whether any request is constrained."""
        return bool(self._matchers)

    def constrained(self, request_ids: Iterable[int]) -> list[int]:
        """Those of these requests that are."""
        return [request_id for request_id in request_ids if request_id in self._matchers]

    def masks(self, request_ids: Iterable[int]) -> tuple[dict[int, Sequence[TokenMask]], dict[int, str]]:
        """Wait for the masks of these requests: one, or what was foreseen for each of their rows of logits; and why one
        could not be had. There is none then, nor for a request that is over."""
        if self._advancing is not None:
            self._advancing.result()
        masks: dict[int, Sequence[TokenMask]] = {}
        for request_id in request_ids:
            matcher = None if request_id in self._errors else self._matchers.get(request_id)
            foreseen = self._foreseen.pop(request_id, None)
            masks[request_id] = () if matcher is None else foreseen or (matcher.mask,)
        return masks, {request_id: self._errors[request_id] for request_id in masks if request_id in self._errors}

    def foresee(self, drafts: Mapping[int, Sequence[int]]) -> None:
        """Guessed tokens, by request, that a step in flight verifies. Returns at once; a mask for each of them, and one
        more, is then under way."""
        if drafts:
            self._advancing = _submit(self._masker, partial(self._follow_drafts, drafts))

    def _follow_drafts(self, drafts: Mapping[int, Sequence[int]]) -> None:
        for request_id, token_ids in drafts.items():
            matcher = self._matchers.get(request_id)
            if matcher is None or request_id in self._errors:
                continue
            try:
                self._foreseen[request_id] = _masks_along(matcher.copy(), token_ids)
            except Exception as error:  # whatever it is, it is this request's alone
                self._errors[request_id] = str(error)

    def accept(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        """What was accepted, by request. Returns at once; the next masks are then under way."""
        if token_ids:
            self._advancing = _submit(self._masker, partial(self._advance, token_ids))

    def _advance(self, token_ids: Mapping[int, Sequence[int]]) -> None:
        for request_id, accepted in token_ids.items():
            matcher = self._matchers.get(request_id)
            if matcher is None:
                continue  # finished meanwhile
            try:
                for token_id in accepted:
                    matcher.accept(token_id)
            except Exception as error:  # whatever it is, it is this request's alone
                self._errors[request_id] = str(error)
            if request_id not in self._open:
                self._errors.pop(request_id, None)


def _masks_along(matcher: "Matcher", token_ids: Sequence[int]) -> list[TokenMask]:
    """A mask before each of these tokens and after the last. Behind one that is not allowed masks are of no account:
    nothing there is accepted."""
    masks: list[TokenMask] = [bytes(matcher.mask)]
    for number, token_id in enumerate(token_ids):
        if not masks[-1][token_id // 8] >> token_id % 8 & 1:
            return masks + masks[-1:] * (len(token_ids) - number)
        matcher.accept(token_id)
        masks.append(bytes(matcher.mask))
    return masks


def _submit(pool: ThreadPoolExecutor, work: Callable[[], Any]) -> "Future[Any]":
    """In a thread with room for deep recursion: the pool starts its threads as work arrives."""
    previous = threading.stack_size(STACK_BYTES)
    try:
        return pool.submit(work)
    finally:
        threading.stack_size(previous)
