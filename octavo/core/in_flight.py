"""InFlight: the steps that were scheduled and have not returned, and who depends on what they write.

Knows steps, requests and blocks; decides nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain

from octavo.core.request import Request
from octavo.core.step import SchedulerOutput

__all__ = ["InFlight"]


class InFlight:
    """Invariants: steps return in the order in which they began; each has something to do, no request twice, and its
    first entry has tokens; `num_steps_in_flight` of a request counts those that compute its tokens. It counts the one
    that copies the request's blocks too, and then it is in no other.
    """

    def __init__(self) -> None:
        self._steps: dict[int, SchedulerOutput] = {}  # by step id, in order
        self._copied_for: dict[int, list[int]] = {}  # by step id: running requests that wait for its copies
        self.waiting_ids: set[int] = set()
        """Requests that wait for copies."""

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, step: SchedulerOutput) -> None:
        self._steps[step.step_id] = step

    def wait_for_copies(self, step_id: int, request: Request) -> None:
        """Leave a running request out until this step, which copies some of its blocks, has returned."""
        request.num_steps_in_flight += 1
        self._copied_for.setdefault(step_id, []).append(request.request_id)
        self.waiting_ids.add(request.request_id)

    def is_oldest(self, step: SchedulerOutput) -> bool:
        return next(iter(self._steps)) == step.step_id

    def retire(self, step: SchedulerOutput) -> list[int]:
        """The step has returned. Returns the requests that waited for its copies."""
        del self._steps[step.step_id]
        waited = self._copied_for.pop(step.step_id, [])
        self.waiting_ids.difference_update(waited)
        return waited

    def dependents(
        self, failed_step: SchedulerOutput, block_ids: Callable[[int, int], set[int]]
    ) -> tuple[list[int], set[int]]:
        """block_ids: of a request, from a position on.

        Returns the requests in the failed step, and those in later ones that share a block which these have written
        since; and the blocks that all of them wrote.
        """
        failed: dict[int, None] = {}
        bad: set[int] = set()
        steps = [step for step in self._steps.values() if step.step_id >= failed_step.step_id]
        sources = {copy: source for step in steps[1:] for source, copy in step.copies}

        def blocks_of(request_id: int, from_position: int = 0) -> set[int]:
            """Also those that were shared with others before the request got a copy of its own."""
            blocks = block_ids(request_id, from_position)
            return blocks | {sources[block_id] for block_id in blocks & sources.keys()}

        for step in steps:
            # In batch order: a request shares blocks only of those before it.
            for entry in step.entries:
                if step is failed_step or not bad.isdisjoint(blocks_of(entry.request_id)):
                    failed[entry.request_id] = None
                    bad |= blocks_of(entry.request_id, entry.first_position)
            for request_id in self._copied_for.get(step.step_id, ()):
                if not bad.isdisjoint(blocks_of(request_id)):
                    failed[request_id] = None
        return list(failed), bad

    def check(self, requests: Iterable[Request], max_num_seqs: int, max_num_tokens: int) -> None:
        """Assert the invariants, `requests` being all that are waiting, running or in a step."""
        num_in_flight = Counter(chain.from_iterable(step.request_ids for step in self._steps.values()))
        num_waiting = Counter(chain.from_iterable(self._copied_for.values()))
        assert num_waiting.keys() == self.waiting_ids
        assert set(num_waiting.values()) <= {1}
        num_in_flight += num_waiting
        for request in requests:
            is_finished = request.finish_reason is not None
            assert request.num_steps_in_flight == num_in_flight.pop(request.request_id, 0) >= is_finished
        assert not num_in_flight
        for step in self._steps.values():
            assert not step.is_empty
            assert len(step.entries) == len(set(step.request_ids)) <= max_num_seqs
            assert not step.entries or step.entries[0].num_tokens > 0
            assert step.num_tokens <= max_num_tokens
