"""Which requests depend on what a failed step was to write. Knows steps and blocks; changes nothing."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from octavo.core.step import SchedulerOutput

__all__ = ["find_dependents"]


def find_dependents(
    steps: Sequence[SchedulerOutput],
    block_ids: Callable[[int, int], set[int]],
    copied_for: Mapping[int, Iterable[int]],
) -> tuple[list[int], set[int]]:
    """steps: the failed one, then those in flight since. block_ids: of a request, from a position on. copied_for: by
    step id, the requests that wait for its copies.

    Returns the requests in the failed step, and those in later ones that share a block which these have written since;
    and the blocks that all of them wrote.
    """
    failed: dict[int, None] = {}
    bad: set[int] = set()
    sources = {copy: source for step in steps[1:] for source, copy in step.copies}

    def blocks_of(request_id: int, from_position: int = 0) -> set[int]:
        """Also those that were shared with others before the request got a copy of its own."""
        blocks = block_ids(request_id, from_position)
        return blocks | {sources[block_id] for block_id in blocks & sources.keys()}

    for step in steps:
        # In batch order: a request shares blocks only of those before it.
        for entry in step.entries:
            if step is steps[0] or not bad.isdisjoint(blocks_of(entry.request_id)):
                failed[entry.request_id] = None
                bad |= blocks_of(entry.request_id, entry.first_position)
        for request_id in copied_for.get(step.step_id, ()):
            if not bad.isdisjoint(blocks_of(request_id)):
                failed[request_id] = None
    return list(failed), bad
