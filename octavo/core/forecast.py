"""Forecast: whether the pool will hold what runs until it has ended, by how long outputs have been.

Knows the tokens and blocks of requests; knows nothing of queues, budgets or who is preempted for whom.
"""

from collections.abc import Collection, Iterable, Mapping

from octavo.core.block_tables import Tables
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.length_predictor import LengthPredictor, predicted_peak
from octavo.core.request import Request
from octavo.core.step import FinishReason

__all__ = ["Forecast"]


class Forecast:
    """Predicts lengths and, from these, the memory in flight; counts how near the predictions were.

    Invariant: a request is known from the step that schedules it first until it is over.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self.num_predicted_tokens = 0
        """Output tokens expected, at their admission, of the requests that have ended by `stop` or `length`."""
        self.num_actual_tokens = 0
        """Output tokens of these."""
        self.num_mispredicted_tokens = 0
        """By how many the two differed, added up over these requests."""
        self._kv = kv
        self._predictor = LengthPredictor()
        self._predicted: dict[int, int] = {}  # by request, when it was first admitted
        self._num_shared: dict[int, int] = {}  # by request, tokens in others' blocks then, or when it forked last

    def begin(self, request: Request) -> None:
        """The request is scheduled for the first time."""
        self._predicted[request.request_id] = self._predictor.predict(0, request.max_tokens)
        self.share(request, request.num_computed_tokens)

    def share(self, request: Request, num_tokens: int) -> None:
        """The request begins with so many tokens in others' blocks."""
        self._num_shared[request.request_id] = num_tokens

    def end(self, request: Request, reason: FinishReason) -> None:
        """Learn from a request that is over, if it was scheduled and did not fail."""
        num_predicted = self._predicted.pop(request.request_id, 0)
        self._num_shared.pop(request.request_id, None)
        if not num_predicted or reason == "error":
            return
        num_tokens = request.num_output_tokens
        self._predictor.observe(num_tokens, is_cut_off=reason != "stop")
        if reason != "abort":
            self.num_predicted_tokens += num_predicted
            self.num_actual_tokens += num_tokens
            self.num_mispredicted_tokens += abs(num_predicted - num_tokens)

    def fits(
        self,
        request: Request,
        prefix: Tables,
        running: Collection[Request],
        staying: Iterable[Request],
        num_alike: int = 1,
    ) -> bool:
        """Whether the pool will probably hold the request, or so many like it, which share `prefix`, and those that run
        until they have ended, so that none is preempted but those that are not `staying`. What is alone always fits."""
        geometry, pool = self._kv.geometry, self._kv.pool
        if not running or not geometry.windows:
            return True
        num_prefix_tokens = self._kv.num_used(prefix) // len(geometry.windows) * geometry.block_size
        loads = [self._load(request, num_prefix_tokens)] * num_alike
        loads += (self._load(other, self._num_shared.get(other.request_id, 0)) for other in staying)
        num_own = sum(
            geometry.num_slots(r, r.num_computed_tokens - self._num_shared.get(r.request_id, 0)) for r in running
        )
        num_shared = max(pool.num_used * geometry.block_size - num_own, 0)
        return num_shared + predicted_peak(loads) <= pool.num_blocks * geometry.block_size

    def _load(self, request: Request, num_shared_tokens: int) -> tuple[int, int, int]:
        """Slots of its own that the request holds when its gap is closed, how many tokens it will probably add, and the
        slots that each of them takes."""
        geometry = self._kv.geometry
        if geometry.is_long(request):
            num_windows = sum(map(bool, geometry.windows))
            num_step_tokens = min(request.gap, geometry.most_new_tokens(request))
            return geometry.num_slots(request, request.num_tokens) + num_windows * num_step_tokens, 0, 0
        num_tokens, num_output_tokens = request.num_tokens, request.num_tokens - request.num_prompt_tokens
        num_more = self._predictor.predict(num_output_tokens, request.max_tokens) - num_output_tokens
        num_unused = geometry.block_size // 2  # of its last block, on average
        num_per_token = sum(not window or num_tokens < window for window in geometry.windows)
        num_slots = geometry.num_slots(request, num_tokens - num_shared_tokens + num_unused)
        return num_slots, max(num_more - 1, 0), num_per_token

    def check(self, requests: Mapping[int, Request]) -> None:
        """Assert the invariants, `requests` being all that are waiting, running or in a step."""
        going_on = {request_id for request_id, request in requests.items() if request.finish_reason is None}
        assert self._predicted.keys() == self._num_shared.keys() <= going_on
