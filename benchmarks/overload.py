"""What a server does at three times its capacity: nothing is lost, nothing times out, and no capacity is wasted.

    python benchmarks/overload.py [--model FILE] [--seconds 60] [--overload 3] [--record FILE]

First the most that the server can do is measured, with as many clients as run at once, each with one request after the
other. Then new clients arrive at random (Poisson) at three times that rate; one that is refused comes back when
Retry-After says, until the time is over. Reported: goodput (output tokens of complete answers) against the most, how
each request ended, and the wait that clients were told first against the one that they had. `--record` writes when
each accepted request had its first token, in seconds.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from server_overhead import default_model, random_prompt, wait_ready

TIMEOUT_S = 120.0


@dataclass
class Tally:
    """What became of the requests of one phase."""

    started: float = field(default_factory=time.monotonic)
    ends: list[tuple[float, int]] = field(default_factory=list)  # when an answer was complete; its output tokens
    first_tokens: list[float] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)  # seconds told at the first refusal, and waited
    num_refusals: int = 0
    num_given_up: int = 0
    num_timeouts: int = 0
    lost: list[str] = field(default_factory=list)

    def tokens_per_s(self, seconds: float) -> float:
        return sum(tokens for end, tokens in self.ends if end - self.started <= seconds) / seconds


@dataclass(frozen=True)
class Load:
    http: httpx.AsyncClient
    num_prompt: int
    num_output: int

    async def ask(self, tally: Tally, until: float) -> None:
        """Send one request until it is accepted, and take its answer; after `until` a refusal is final."""
        prompt, refused_at, told = random_prompt(self.num_prompt), 0.0, 0.0
        body = {"prompt": prompt, "max_tokens": random.randint(1, 2 * self.num_output - 1), "temperature": 0.0}
        body |= {"model": "m", "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        while True:
            sent = time.monotonic()
            try:
                retry_after = await self._answer(tally, body)
            except httpx.TimeoutException:
                tally.num_timeouts += 1
                return
            except (httpx.HTTPError, ValueError) as error:
                tally.lost.append(repr(error))
                return
            if retry_after is None:
                if refused_at:
                    tally.waits.append((told, sent - refused_at))
                return
            tally.num_refusals += 1
            if not refused_at:
                refused_at, told = sent, retry_after
            if sent + retry_after > until:
                tally.num_given_up += 1
                return
            await asyncio.sleep(retry_after)

    async def _answer(self, tally: Tally, body: dict[str, object]) -> float | None:
        """None for an answer that came complete, the seconds told for a refusal. Raises ValueError for all else."""
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 429:
                return float(response.headers["retry-after"])
            if response.status_code != 200:
                raise ValueError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
            num_tokens, is_first, last = 0, True, ""
            async for line in response.aiter_lines():
                if line.startswith("data:"):
                    last = line
                    if is_first:
                        tally.first_tokens.append(time.monotonic())
                        is_first = False
                    if '"usage":{' in line:
                        num_tokens = json.loads(line[5:])["usage"]["completion_tokens"]
            if last != "data: [DONE]" or not num_tokens:
                raise ValueError(f"the answer broke off after {last!r}")
        tally.ends.append((time.monotonic(), num_tokens))
        return None


async def measure_most(load: Load, num_clients: int, seconds: float) -> Tally:
    tally = Tally()

    async def client() -> None:
        while time.monotonic() < tally.started + seconds:
            await load.ask(tally, tally.started)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    return tally


async def overload(load: Load, requests_per_s: float, seconds: float) -> tuple[Tally, int]:
    tally, tasks = Tally(), []
    until = tally.started + seconds
    while time.monotonic() < until:
        tasks.append(asyncio.create_task(load.ask(tally, until)))
        await asyncio.sleep(random.expovariate(requests_per_s))
    await asyncio.gather(*tasks)
    return tally, len(tasks)


async def run(args: argparse.Namespace, url: str) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:
        load = Load(http, args.prompt, args.output)
        await measure_most(load, args.max_num_seqs, min(args.seconds, 3.0))  # warm
        most = await measure_most(load, args.max_num_seqs, args.seconds)
        most_rate = sum(end - most.started <= args.seconds for end, _ in most.ends) / args.seconds
        tally, num_sent = await overload(load, args.overload * most_rate, args.seconds)
    report(args, most, most_rate, tally, num_sent)


def report(args: argparse.Namespace, most: Tally, most_rate: float, tally: Tally, num_sent: int) -> None:
    best, good = most.tokens_per_s(args.seconds), tally.tokens_per_s(args.seconds)
    print(f"most: {best:.0f} tokens/s, {most_rate:.1f} requests/s with {args.max_num_seqs} clients")
    print(f"at {args.overload:g} times that for {args.seconds:g} s: {good:.0f} tokens/s, {good / best:.0%} of the most")
    print(
        f"{num_sent} clients: {len(tally.ends)} answered, {tally.num_given_up} refused to the end with Retry-After, "
        f"{tally.num_timeouts} timed out, {len(tally.lost)} lost; {tally.num_refusals} refusals"
    )
    for what in tally.lost[:5]:
        print("  lost:", what)
    if tally.waits:
        ratios = sorted(told / waited for told, waited in tally.waits)
        share = sum(0.5 <= ratio <= 2 for ratio in ratios) / len(ratios)
        print(
            f"{len(ratios)} clients were refused first and answered later: told / waited "
            f"{statistics.median(ratios):.2f} in the median, within a factor of two for {share:.0%}; "
            f"longest wait {max(waited for _, waited in tally.waits):.0f} s"
        )
    if args.record:
        first = [round(at - tally.started, 3) for at in sorted(tally.first_tokens)]
        Path(args.record).write_text(json.dumps(first))


def main() -> None:
    parser = argparse.ArgumentParser(description="A server at three times its capacity.")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--overload", type=float, default=3.0)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=32, help="mean tokens of the answers")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--max-num-queued-reqs", type=int, default=32)
    parser.add_argument("--record", help="file to write the times of first tokens to")
    args = parser.parse_args()
    options = ["--port", "0", "--served-model-name", "m", "--access-log=off"]
    for name in ("max_num_seqs", "max_num_queued_reqs"):
        options += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command = [sys.executable, "-m", "octavo", "serve", args.model, *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        asyncio.run(run(args, wait_ready(server)))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
