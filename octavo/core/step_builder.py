"""StepBuilder: a step while it is being scheduled. Knows entries and lists; decides nothing."""

from octavo.core.step import GivenTokens, NewRequest, ScheduledRequest, SchedulerOutput

__all__ = ["StepBuilder"]


class StepBuilder:
    """Collects what one step does, then hands it over as a value. Used for one step.

    Invariant: a new or reset request has an entry too, appended by the caller in the same breath.
    """

    __slots__ = ("entries", "given_tokens", "new_requests", "reset_request_ids", "step_id")

    def __init__(self, step_id: int) -> None:
        self.step_id = step_id
        self.entries: list[ScheduledRequest] = []
        self.new_requests: list[NewRequest] = []
        self.reset_request_ids: list[int] = []
        self.given_tokens: list[GivenTokens] = []

    def build(self, forgotten_request_ids: list[int], copies: list[tuple[int, int]]) -> SchedulerOutput:
        return SchedulerOutput(
            self.step_id,
            self.entries,
            self.new_requests,
            self.reset_request_ids,
            forgotten_request_ids,
            copies,
            self.given_tokens,
        )
