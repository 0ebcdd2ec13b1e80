"""Siblings: requests with the same prompt, of which one, the leader, computes it for all.

The others follow: they wait, and begin where the leader's prompt ends. Should it not get there, the next one leads.
"""

from octavo.core.request import Request

__all__ = ["follow", "leave", "take_followers"]


def follow(follower: Request, leader: Request) -> None:
    """Let a new request wait for one that was not scheduled yet."""
    assert leader.leader is None
    assert leader.prompt_token_ids == follower.prompt_token_ids
    follower.leader = leader
    leader.followers.append(follower)
    if leader.sampling_params.prompt_logprobs is not None:
        leader.prompt_logprobs = []


def take_followers(leader: Request) -> list[Request]:
    """The leader's prompt is computed: nobody waits for it any longer."""
    followers, leader.followers = leader.followers, []
    for follower in followers:
        follower.leader = None
    return followers


def leave(request: Request) -> Request | None:
    """The request is over. If it led, the first of its followers leads the others. Returns the leader, who may not have
    to wait any longer, if there is one."""
    if request.leader is not None:
        leader, request.leader = request.leader, None
        leader.followers.remove(request)
        return leader
    if not request.followers:
        return None
    first, *others = take_followers(request)
    for follower in others:
        follow(follower, first)
    return first
