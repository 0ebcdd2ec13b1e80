"""Forecast: whether the pool will hold what runs until it has ended, by how long outputs have been.

Knows the tokens and blocks of requests; knows nothing of queues, budgets or who is preempted for whom.
"""

from collections.abc import Collection, Iterable

from octavo.core.kv_cache_manager import BlockTables, KVCacheManager
from octavo.core.length_predictor import LengthPredictor, predicted_peak
from octavo.core.request import Request
from octavo.core.step import FinishReason

__all__ = ["Forecast"]


class Forecast:
    """Predicts lengths and, from these, the memory in flight; counts how near the predictions were."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.num_predicted_tokens = 0
        """Output tokens expected, at their admission, of the requests that have ended by `stop` or `length`."""
        self.num_actual_tokens = 0
        """Output tokens of these."""
        self.num_mispredicted_tokens = 0
        """By how many the two differed, added up over these requests."""
        self._kv = kv
        self._predictor = LengthPredictor()

    def begin(self, request: Request) -> None:
        """The request is scheduled for the first time."""
        request.predicted_tokens = self._predictor.predict(0, request.max_tokens)

    def end(self, request: Request, reason: FinishReason) -> None:
        """Learn from a request that generated and is over, other than by an error."""
        num_tokens, num_predicted = request.num_output_tokens, request.predicted_tokens
        self._predictor.observe(num_tokens, is_cut_off=reason != "stop")
        if reason != "abort":
            self.num_predicted_tokens += num_predicted
            self.num_actual_tokens += num_tokens
            self.num_mispredicted_tokens += abs(num_predicted - num_tokens)

    def fits(
        self, request: Request, prefix: BlockTables, running: Collection[Request], staying: Iterable[Request]
    ) -> bool:
        """Whether the pool will probably hold the request, which shares `prefix`, and those that run until they have
        ended, so that none is preempted but those that are not `staying`. What is alone always fits."""
        windows, block_size, pool = self._kv.group_windows, self._kv.block_size, self._kv.pool
        if not running or not windows:
            return True
        loads = [self._load(request, self._kv.num_used(prefix) // len(windows) * block_size)]
        loads += (self._load(other, other.num_shared_tokens) for other in staying)
        num_own = sum(self._kv.num_slots(r, r.num_computed_tokens - r.num_shared_tokens) for r in running)
        num_shared = max(pool.num_used * block_size - num_own, 0)
        return num_shared + predicted_peak(loads) <= pool.num_blocks * block_size

    def _load(self, request: Request, num_shared_tokens: int) -> tuple[int, int, int]:
        """Slots of its own that the request holds when its gap is closed, how many tokens it will probably add, and the
        slots that each of them takes."""
        if self._kv.is_long(request):
            num_windows = sum(map(bool, self._kv.group_windows))
            num_step_tokens = min(request.gap, self._kv.most_new_tokens(request))
            return self._kv.num_slots(request, request.num_tokens) + num_windows * num_step_tokens, 0, 0
        num_tokens, num_output_tokens = request.num_tokens, request.num_tokens - request.num_prompt_tokens
        num_more = self._predictor.predict(num_output_tokens, request.max_tokens) - num_output_tokens
        num_unused = self._kv.block_size // 2  # of its last block, on average
        num_per_token = sum(not window or num_tokens < window for window in self._kv.group_windows)
        num_slots = self._kv.num_slots(request, num_tokens - num_shared_tokens + num_unused)
        return num_slots, max(num_more - 1, 0), num_per_token
