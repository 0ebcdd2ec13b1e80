"""One start of `octavo serve` in a process of its own, timed from outside up to the first token."""

import asyncio
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from octavo.cli.bench.dataset import BenchRequest
from octavo.cli.bench.load import LoadClient
from octavo.cli.http_client import HttpClient, ServerError
from octavo.errors import OctavoError

__all__ = ["MILESTONES", "Start", "free_port", "measure_start"]

POLL_S = 0.01
STOP_TIMEOUT_S = 30.0
MILESTONES = ("port open", "ready", "first token")


@dataclass(frozen=True, slots=True)
class Start:
    seconds: dict[str, float]
    """Milestone -> seconds since the command."""
    stages: dict[str, float]
    """Stage of the engine's start -> its seconds, as the server prints them when it is ready."""


def measure_start(command: Sequence[str], timeout_s: float) -> Start:
    """Run `command` with a free --port until it gives a token, then stop it.

    Raises OctavoError with the server's last lines if it ends early or is not ready in time.
    """
    port = free_port()
    with tempfile.TemporaryFile() as log:
        start_s = time.perf_counter()
        server = subprocess.Popen(
            [*command, f"--port={port}"], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            seconds = asyncio.run(_watch(server, port, start_s, timeout_s))
        except OctavoError as error:
            tail = "\n".join(_read(log).splitlines()[-20:])
            raise OctavoError(f"{error} The server's last lines:\n{tail}") from error
        finally:
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        return Start(seconds, _stages(_read(log)))


def _read(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read().decode(errors="replace")


def _stages(log: str) -> dict[str, float]:
    """From a line such as `engine: imports 1.20 s, load weights 0.35 s; beside it: tokenizer 0.11 s`."""
    line = next((line for line in log.splitlines() if line.lstrip().startswith("engine: ")), "")
    return {name: float(seconds) for name, seconds in re.findall(r"([a-z][a-z ]*) (\d+\.\d+) s", line)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _watch(server: "subprocess.Popen[bytes]", port: int, start_s: float, timeout_s: float) -> dict[str, float]:
    http = HttpClient(f"http://127.0.0.1:{port}")
    seconds: dict[str, float] = {}

    async def until(stage: str, attempt: Any) -> None:
        while True:
            try:
                await attempt()
            except (ServerError, OSError):
                if server.poll() is not None:
                    raise OctavoError(f"The server ended with status {server.returncode} before: {stage}.") from None
                await asyncio.sleep(POLL_S)
            else:
                seconds[stage] = time.perf_counter() - start_s
                return

    async def connect() -> None:
        _, writer = await asyncio.open_connection(http.host, http.port)
        writer.close()

    try:
        async with asyncio.timeout(timeout_s):
            await until("port open", connect)
            await until("ready", lambda: http.get("/health"))
    except TimeoutError:
        raise OctavoError(f"The server was not ready within --start-timeout {timeout_s:g} seconds.") from None
    client = LoadClient(http, "/v1/completions", None, {"ignore_eos": True}, is_chat=False)
    await client.find_model()
    answer = await client.send(BenchRequest([1] * 8, 1))
    if answer.ttft_s is None:
        raise OctavoError(answer.error or "The server gave no token.")
    seconds["first token"] = answer.start_s + answer.ttft_s - start_s
    return seconds
