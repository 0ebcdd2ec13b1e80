"""Choices: requests with the same prompt, of which one, the leader, computes it for all; and who waits for a grammar.

The others follow: they wait, and begin where the leader's prompt ends. Should it not get there, the next one leads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.core.request import Request
from octavo.core.step import TokenLogprobs

__all__ = ["ChoiceGroup", "Choices"]


@dataclass(slots=True, eq=False)
class ChoiceGroup:
    leader: Request
    followers: list[Request] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    """What was reported of the prompt, for those that follow, where it was asked for."""


class Choices:
    """Invariants: a request is in one group at most, as its leader or as a follower; none of a group is scheduled
    before all their grammars are there; what forked is known here until its first token is accepted.
    """

    def __init__(self) -> None:
        self._groups: dict[int, ChoiceGroup] = {}
        self._forks: dict[int, ChoiceGroup] = {}  # by follower
        self._unready: set[int] = set()  # wait for their grammars

    @property
    def num_unready(self) -> int:
        return len(self._unready)

    def add(self, request: Request, is_ready: bool, leader: Request | None) -> None:
        """A new request; its leader, if it has one, was not scheduled yet."""
        if not is_ready:
            self._unready.add(request.request_id)
        if leader is not None:
            self._follow(request, leader)

    def _follow(self, follower: Request, leader: Request) -> None:
        assert leader.prompt_token_ids == follower.prompt_token_ids
        group = self._groups.get(leader.request_id)
        if group is None:
            wants_logprobs = leader.sampling_params.prompt_logprobs is not None
            group = ChoiceGroup(leader, prompt_logprobs=[] if wants_logprobs else None)
        assert group.leader is leader
        group.followers.append(follower)
        self._groups[leader.request_id] = self._groups[follower.request_id] = group

    def make_ready(self, request: Request) -> Request:
        """The request's grammar is there. Returns the one that may be scheduled now."""
        self._unready.discard(request.request_id)
        group = self._groups.get(request.request_id)
        return request if group is None else group.leader

    def are_held(self, request: Request) -> bool:
        """Whether the request waits for a grammar, its own or one of its group's, or for its leader."""
        if request.request_id in self._unready:
            return True
        group = self._groups.get(request.request_id)
        if group is None:
            return False
        return group.leader is not request or any(other.request_id in self._unready for other in group.followers)

    # ---- forks

    @property
    def has_groups(self) -> bool:
        return bool(self._groups)

    @property
    def has_forks(self) -> bool:
        """Whether any request forked and has no token yet."""
        return bool(self._forks)

    def has_followers(self, leader: Request) -> bool:
        group = self._groups.get(leader.request_id)
        return group is not None and group.leader is leader and bool(group.followers)

    def take_followers(self, leader: Request) -> list[Request]:
        """The leader's prompt is computed: nobody waits for it any longer."""
        group = self._groups[leader.request_id]
        followers, group.followers = group.followers, []
        for follower in followers:
            del self._groups[follower.request_id]
        return followers

    def fork(self, follower: Request, leader: Request) -> None:
        """One of those taken begins where the leader's prompt ends, and samples from the same logits."""
        self._forks[follower.request_id] = self._groups[leader.request_id]

    def leader_of(self, fork: Request) -> Request | None:
        """Whose logits the request samples from first, if it forked and no token of it was accepted yet."""
        group = self._forks.get(fork.request_id)
        return None if group is None else group.leader

    def with_forks(self, failed: Mapping[int, str], request_ids: Sequence[int]) -> dict[int, str]:
        """Failed requests, with those among the others that began where a failed one's prompt ends."""
        forks = {i: group.leader.request_id for i in request_ids if (group := self._forks.get(i)) is not None}
        return {**failed, **{i: failed[leader_id] for i, leader_id in forks.items() if leader_id in failed}}

    def keep_prompt_logprobs(self, request_id: int, rows: list[TokenLogprobs]) -> None:
        group = self._groups.get(request_id)
        if group is not None and group.prompt_logprobs is not None:
            group.prompt_logprobs += rows

    def accept_first(self, request: Request, own: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
        """A token was accepted. Returns the prompt's log-probabilities to report with it: a fork's are its leader's."""
        group = self._forks.pop(request.request_id, None)
        return own if group is None else group.prompt_logprobs

    # ---- ends

    def leave(self, request: Request) -> Request | None:
        """The request is over. If it led, the first of its followers leads the others. Returns the leader, who may not
        have to wait any longer, if there is one."""
        request_id = request.request_id
        self._unready.discard(request_id)
        self._forks.pop(request_id, None)
        group = self._groups.pop(request_id, None)
        if group is None:
            return None
        if group.leader is not request:
            group.followers.remove(request)
            return group.leader
        if not group.followers:
            return None
        first, *others = group.followers
        del self._groups[first.request_id]
        for follower in others:
            self._follow(follower, first)
        return first

    def check(self, requests: Mapping[int, Request]) -> None:
        """Assert the invariants, `requests` being all that are waiting, running or in a step."""
        assert self._unready <= requests.keys()
        assert self._forks.keys() <= requests.keys()
        for request_id, group in self._groups.items():
            assert [group.leader, *group.followers].count(requests[request_id]) == 1
            assert all(self._groups[follower.request_id] is group for follower in group.followers)
            assert not group.followers or group.leader.num_output_tokens == 0
