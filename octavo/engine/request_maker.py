"""RequestMaker: what a message asks for, as requests of the scheduler.

Knows the model's end tokens and the engine's seed; knows no queue.
"""

import hashlib

from octavo.core.beam_search import MAX_CANDIDATES, BeamSearch
from octavo.core.request import Request
from octavo.errors import InvalidRequestError
from octavo.ipc.messages import AddPooling, AddRequest
from octavo.sampling_params import SamplingParams

__all__ = ["RequestMaker"]

POOLED = SamplingParams(max_tokens=0, temperature=0.0)
"""Of requests that sample nothing."""
NOTHING: frozenset[int] = frozenset()


class RequestMaker:
    """Requests that were sent together share one set of tokens to stop at: there may be thousands of both."""

    def __init__(self, eos_token_ids: frozenset[int], seed: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._seed = seed
        self._latest: tuple[SamplingParams, frozenset[int]] | None = None

    def completion(self, request: AddRequest, params: SamplingParams, choice: int, max_tokens: int) -> Request:
        """One of the request's choices."""
        request_id = request.request_id + choice
        return Request(
            request_id,
            request.prompt_token_ids,
            params,
            max_tokens=max_tokens,
            eos_token_ids=self._eos_token_ids,
            stop_token_ids=self._stop_token_ids(params),
            seed=self._draw_seed(request_id) if params.seed is None else params.seed,
            choice=choice,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    def pooled(self, request: AddPooling) -> Request:
        return Request(
            request.request_id,
            request.prompt_token_ids,
            POOLED,
            max_tokens=0,
            eos_token_ids=NOTHING,
            stop_token_ids=NOTHING,
            seed=0,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )

    def beam_search(self, params: SamplingParams, max_tokens: int, vocab_size: int) -> BeamSearch:
        """Raises InvalidRequestError for one that looks at more than there is, or than others can wait for."""
        assert params.beam_search is not None
        end_token_ids = frozenset(params.stop_token_ids) | (NOTHING if params.ignore_eos else self._eos_token_ids)
        search = BeamSearch(params.n, params.beam_search, max_tokens, end_token_ids)
        if search.num_candidates > vocab_size:
            raise InvalidRequestError(
                f"n must be smaller for beam search, got {params.n}: it looks at {search.num_candidates} tokens at a "
                f"time, and the model has {vocab_size}.",
                param="n",
            )
        num_candidates = params.n * search.num_candidates
        if num_candidates > MAX_CANDIDATES:
            raise InvalidRequestError(
                f"Beam search with n = {params.n} and {len(end_token_ids)} tokens to stop at looks at {num_candidates} "
                f"continuations a step; one request may have {MAX_CANDIDATES}. Name fewer stop tokens, or lower n.",
                param="stop_token_ids",
            )
        return search

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        if self._latest is None or self._latest[0] is not params:
            takes_eos = not params.ignore_eos or params.structured_outputs is not None
            own = frozenset(params.stop_token_ids)
            self._latest = params, own | self._eos_token_ids if takes_eos else own
        return self._latest[1]

    def _draw_seed(self, request_id: int) -> int:
        """A seed for a request without one: differs between requests, repeats from run to run."""
        digest = hashlib.sha256(f"{self._seed}:{request_id}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1
