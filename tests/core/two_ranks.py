"""A rank that samples nothing: it sees the steps alone, and must be able to say what tokens each of them computes."""

from octavo.core.step import SchedulerOutput


class FirstRank:
    """Keeps, of each request, the tokens that steps brought, by position."""

    def __init__(self) -> None:
        self._tokens: dict[int, dict[int, int]] = {}

    def input_ids(self, step: SchedulerOutput) -> dict[int, list[int]]:
        """By request, the tokens that the step computes. Raises KeyError for one that no step brought."""
        for request_id in step.forgotten_request_ids:
            self._tokens.pop(request_id, None)
        for new in step.new_requests:
            self._tokens[new.request_id] = dict(enumerate(new.prompt_token_ids))
        for given in step.given_tokens:
            self._tokens[given.request_id].update(enumerate(given.token_ids, given.position))
        return {
            entry.request_id: [
                self._tokens[entry.request_id][position]
                for position in range(entry.first_position, entry.first_position + entry.num_tokens)
            ]
            for entry in step.entries
        }
