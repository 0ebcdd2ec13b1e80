"""One start of `octavo serve` in a process of its own, timed from outside up to the first token."""

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from octavo.cli.bench.dataset import BenchRequest
from octavo.cli.bench.load import LoadClient
from octavo.cli.http_client import HttpClient, ServerError
from octavo.errors import OctavoError

__all__ = ["STAGES", "measure_start"]

POLL_S = 0.01
STOP_TIMEOUT_S = 30.0
STAGES = ("port open", "ready", "first token")


def measure_start(arguments: Sequence[str], timeout_s: float) -> dict[str, float]:
    """Start `octavo serve` with `arguments`, then stop it. Stage -> seconds since the command.

    Raises OctavoError with the server's last lines if it ends early or is not ready in time.
    """
    port = _free_port()
    command = [sys.executable, "-m", "octavo", "serve", *arguments, f"--port={port}"]
    with tempfile.TemporaryFile() as log:
        start_s = time.perf_counter()
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            seconds = asyncio.run(_watch(server, port, start_s, timeout_s))
        except OctavoError as error:
            log.seek(0)
            tail = b"\n".join(log.read().splitlines()[-20:]).decode(errors="replace")
            raise OctavoError(f"{error} The server's last lines:\n{tail}") from error
        finally:
            server.terminate()
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    return seconds


def _free_port() -> int:
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
