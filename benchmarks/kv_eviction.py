"""How much of the prompts each eviction policy finds in the cache, against an oracle that knows what comes.

    python benchmarks/kv_eviction.py [--requests 3000] [--seeds 3] [--blocks 2000]

Generated traces run through the real KVCacheManager, 16 requests at a time. The oracle evicts what is needed again last
(Belady, IBM Systems Journal 5, 1966), and of blocks that are needed again at the same time the one that is further from
the prompt's start. "lru, head first" gives each request's blocks up from its first on, the order that the pool avoids;
"lru, unused first" gives blocks that were never hit up before those that were, until these are 80 % of the free ones.
"""

import argparse
import random
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush

from octavo.core.block_pool import hash_block, root_hash
from octavo.core.eviction import EvictionPolicy, Fifo, Lru, Random
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.kv_geometry import KVGeometry
from octavo.core.request import Request
from octavo.sampling_params import SamplingParams

BLOCK = 16
NUM_RUNNING = 16
NEVER = 1 << 60
Trace = list[list[int]]
PARAMS = SamplingParams(max_tokens=1)


def text(draw: random.Random, num_tokens: int) -> list[int]:
    return draw.choices(range(50_000), k=num_tokens)


def zipf(draw: random.Random, num_items: int) -> int:
    """Item i with a weight of 1 / (i + 1)."""
    return draw.choices(range(num_items), [1 / (item + 1) for item in range(num_items)])[0]


def system_prompts(draw: random.Random, num_requests: int) -> Trace:
    """Each request has one of 200 system prompts (512 tokens, Zipf) and 64 of its own."""
    prompts = [text(draw, 512) for _ in range(200)]
    return [prompts[zipf(draw, 200)] + text(draw, 64) for _ in range(num_requests)]


def chats(draw: random.Random, num_requests: int) -> Trace:
    """150 chats at a time, any of which has the next turn of 128 tokens; each ends with a chance of 1 in 8."""
    trace: Trace = []
    open_chats: list[list[int]] = []
    for _ in range(num_requests):
        if len(open_chats) < 150:
            open_chats.append(text(draw, 64))
        chat = draw.choice(open_chats)
        chat += text(draw, 128)
        trace.append(list(chat))
        if draw.random() < 1 / 8:
            open_chats.remove(chat)
    return trace


def few_shot(draw: random.Random, num_requests: int) -> Trace:
    """One of 40 tasks (Zipf): its instructions (128 tokens), 1 to 8 of its examples (96 each), a question (48)."""
    tasks = [text(draw, 128 + 8 * 96) for _ in range(40)]
    return [tasks[zipf(draw, 40)][: 128 + 96 * draw.randint(1, 8)] + text(draw, 48) for _ in range(num_requests)]


def scans(draw: random.Random, num_requests: int) -> Trace:
    """As the system prompts, but every third request is a document of 2,000 tokens that never comes again."""
    return [
        text(draw, 2_000) if index % 3 == 2 else prompt
        for index, prompt in enumerate(system_prompts(draw, num_requests))
    ]


def loop(draw: random.Random, num_requests: int) -> Trace:
    """120 prompts of 512 tokens, over and over: the worst for lru when the pool holds fewer."""
    prompts = [text(draw, 512) for _ in range(120)]
    return [prompts[index % 120] + text(draw, 16) for index in range(num_requests)]


class Oracle:
    """Evicts what is needed last, and what is never needed again before all else."""

    def __init__(self, trace: Trace) -> None:
        self.now = 0
        self.key: Callable[[int], tuple[int, bytes] | None] = lambda block_id: None
        self._uses: dict[bytes, list[int]] = {}
        self._depth: dict[bytes, int] = {}
        for time, prompt in enumerate(trace):
            parent = root_hash(None)
            for depth in range(len(prompt) // BLOCK):
                parent = hash_block(parent, prompt[depth * BLOCK : (depth + 1) * BLOCK])
                self._uses.setdefault(parent, []).append(time)
                self._depth[parent] = depth
        self.num_distinct = len(self._uses)
        self._free: dict[int, tuple[int, int, int]] = {}
        self._heap: list[tuple[int, int, int]] = []

    def __len__(self) -> int:
        return len(self._free)

    def add(self, block_id: int) -> None:
        key = self.key(block_id)
        assert key is not None
        uses = self._uses[key[1]]
        index = bisect_right(uses, self.now)
        next_use = uses[index] if index < len(uses) else NEVER
        self._free[block_id] = entry = (-next_use, -self._depth[key[1]], block_id)
        heappush(self._heap, entry)

    def remove(self, block_id: int) -> None:
        del self._free[block_id]

    def evict(self) -> int:
        while True:
            entry = heappop(self._heap)
            if self._free.get(entry[2]) == entry:
                del self._free[entry[2]]
                return entry[2]


class HeadFirst(Lru):
    """Turns the order around in which a request's blocks are given up."""

    def __init__(self) -> None:
        super().__init__()
        self.batch: list[int] = []

    def __len__(self) -> int:
        return super().__len__() + len(self.batch)

    def add(self, block_id: int) -> None:
        self.batch.append(block_id)

    def flush(self) -> None:
        for block_id in reversed(self.batch):
            super().add(block_id)
        self.batch.clear()


def hit_rate(trace: Trace, num_blocks: int, policy: EvictionPolicy) -> float:
    kv = KVCacheManager(KVGeometry((0,), BLOCK, num_blocks), eviction=policy)
    if isinstance(policy, Oracle):
        policy.key = kv.pool.key
    running: deque[Request] = deque()
    num_found = 0
    for time, prompt in enumerate(trace):
        request = Request(time, prompt, PARAMS, 1, frozenset(), frozenset(), seed=0)
        prefix = kv.match_prefix(request)
        while len(running) >= NUM_RUNNING or (running and not kv.can_hold(request, prefix)):
            kv.free(running.popleft())
            if isinstance(policy, HeadFirst):
                policy.flush()
            prefix = kv.match_prefix(request)
        if isinstance(policy, Oracle):
            policy.now = time
        request.num_computed_tokens = kv.open(request, prefix)
        num_found += request.num_computed_tokens
        assert kv.allocate(request, request.gap) is not None
        request.num_computed_tokens += request.gap
        kv.register_full_blocks(request)
        running.append(request)
    return num_found / sum(map(len, trace))


class UnusedFirst:
    """Two queues, as in segmented LRU (Karedla, Love and Wherry, IEEE Computer 27, 1994)."""

    def __init__(self) -> None:
        self._unused, self._hit = Lru(), Lru()
        self._was_hit: set[int] = set()

    def __len__(self) -> int:
        return len(self._unused) + len(self._hit)

    def add(self, block_id: int) -> None:
        (self._hit if block_id in self._was_hit else self._unused).add(block_id)

    def remove(self, block_id: int) -> None:
        (self._hit if block_id in self._was_hit else self._unused).remove(block_id)
        self._was_hit.add(block_id)

    def evict(self) -> int:
        if len(self._unused) and len(self._hit) < 0.8 * len(self):
            return self._unused.evict()
        if not len(self._hit):
            return self._unused.evict()
        block_id = self._hit.evict()
        self._was_hit.remove(block_id)
        return block_id


TRACES = {
    "system prompts": system_prompts,
    "chats": chats,
    "few-shot": few_shot,
    "scans": scans,
    "loop": loop,
}
POLICIES: dict[str, Callable[[Trace], EvictionPolicy]] = {
    "lru": lambda trace: Lru(),
    "fifo": lambda trace: Fifo(),
    "random": lambda trace: Random(),
    "lru, unused first": lambda trace: UnusedFirst(),
    "lru, head first": lambda trace: HeadFirst(),
    "Belady": Oracle,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Eviction policies on generated traces.")
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=2_000, help="blocks of the pool")
    args = parser.parse_args()
    print(f"| trace | {' | '.join(POLICIES)} |")
    print("|---" * (len(POLICIES) + 1) + "|")
    for name, make_trace in TRACES.items():
        rates: dict[str, list[float]] = {}
        for seed in range(args.seeds):
            trace = make_trace(random.Random(seed), args.requests)
            for policy, make_policy in POLICIES.items():
                rates.setdefault(policy, []).append(hit_rate(trace, args.blocks, make_policy(trace)))
        print(f"| {name} | {' | '.join(f'{statistics.mean(values):.1%}' for values in rates.values())} |", flush=True)


if __name__ == "__main__":
    main()
