"""StepBuilder: the step that is being scheduled, and what the runner has been told of requests. Decides nothing."""

from octavo.core.block_tables import Tables
from octavo.core.request import Request
from octavo.core.step import GivenTokens, NewRequest, ScheduledRequest, SchedulerOutput

__all__ = ["StepBuilder"]


class StepBuilder:
    """Collects what one step does, hands it over as a value, and begins the next.

    Invariants: the runner knows a request from the step that has it as new to the one that has it as forgotten; a new
    or reset request of a step has an entry in it. Nothing that was handed over is changed.
    """

    def __init__(self, sends_sampled_tokens: bool) -> None:
        self.step_id = 0
        self.entries: list[ScheduledRequest] = []
        self._sends_sampled_tokens = sends_sampled_tokens
        self._new_requests: list[NewRequest] = []
        self._reset_request_ids: list[int] = []
        self._given_tokens: list[GivenTokens] = []
        self._forgotten_request_ids: list[int] = []
        self.num_cached_tokens: dict[int, int] = {}
        """By request that the runner knows, prompt tokens whose KV was in the prefix cache when it was told first."""

    def knows(self, request_id: int) -> bool:
        """Whether the runner does."""
        return request_id in self.num_cached_tokens

    def introduce(self, new_request: NewRequest, num_cached_tokens: int) -> None:
        self.num_cached_tokens[new_request.request_id] = num_cached_tokens
        self._new_requests.append(new_request)

    def reset(self, request_id: int) -> None:
        """The request's table starts anew."""
        self._reset_request_ids.append(request_id)

    def add(
        self,
        request: Request,
        first_position: int,
        num_tokens: int,
        num_logits: int,
        new_block_ids: Tables,
        given_from: int | None,
    ) -> None:
        """given_from: position from which on the runner does not know the request's known tokens."""
        request_id = request.request_id
        self.entries.append(ScheduledRequest(request_id, first_position, num_tokens, num_logits, new_block_ids))
        if request.draft_token_ids or given_from is not None or self._sends_sampled_tokens:
            self._give(request, first_position, given_from)

    def _give(self, request: Request, first_position: int, given_from: int | None) -> None:
        known, end = request.token_ids, request.num_computed_tokens
        if self._sends_sampled_tokens:
            start = max(first_position, request.num_prompt_tokens)
            token_ids = [*known[start:end], *request.draft_token_ids]
        elif given_from is not None:
            start, token_ids = given_from, known[given_from:]
        else:
            start, token_ids = len(known), list(request.draft_token_ids)
        if token_ids:
            self._given_tokens.append(GivenTokens(request.request_id, start, token_ids))

    def forget(self, request_id: int) -> None:
        """The request is over."""
        if self.num_cached_tokens.pop(request_id, None) is not None:
            self._forgotten_request_ids.append(request_id)

    def forget_again(self, step: SchedulerOutput) -> None:
        """The step failed: perhaps nobody has read what it said."""
        self._forgotten_request_ids += step.forgotten_request_ids

    def build(self, copies: list[tuple[int, int]]) -> SchedulerOutput:
        step = SchedulerOutput(
            self.step_id,
            self.entries,
            self._new_requests,
            self._reset_request_ids,
            self._forgotten_request_ids,
            copies,
            self._given_tokens,
        )
        self.step_id += 1
        self.entries, self._new_requests, self._reset_request_ids = [], [], []
        self._given_tokens, self._forgotten_request_ids = [], []
        return step

    def check(self, requests: dict[int, Request]) -> None:
        """Assert the invariants between two steps, `requests` being all that are waiting, running or in a step."""
        assert not any((self.entries, self._new_requests, self._reset_request_ids, self._given_tokens))
        assert self.num_cached_tokens.keys() <= requests.keys()
