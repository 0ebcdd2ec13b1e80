"""`octavo bench startup`: from starting `octavo serve` to its first token, measured from outside."""

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from octavo.cli.arguments import Parser, add_config_options, config_values
from octavo.cli.bench.offline import add_engine_options, required_model
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError, OctavoError

__all__ = ["add_parser"]

POLL_S = 0.01
STOP_TIMEOUT_S = 30.0
STAGES = ("port open", "ready", "first token")


def add_parser(benchmarks: Any) -> None:
    parser: Parser = benchmarks.add_parser(
        "startup",
        help="from a command to the first token",
        description="Start `octavo serve` again and again; time to the open port, to readiness and to the first token.",
    )
    parser.add_argument("--num-iters-warmup", type=int, default=0, metavar="N", help="Not counted. Default: 0.")
    parser.add_argument("--num-iters", type=int, default=3, metavar="N", help="Counted. Default: 3.")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="Default: 600 seconds.")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="Save the result here.")
    add_engine_options(parser)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if args.num_iters < 1:
        raise ConfigError(f"--num-iters must be at least 1, got {args.num_iters}.")
    model = required_model(args)
    EngineConfig(**config_values(args, EngineConfig) | {"model": model})  # a wrong value is refused before any start
    from octavo.cli.bench.report import percentiles, write_json

    runs: list[dict[str, float]] = []
    for iteration in range(args.num_iters_warmup + args.num_iters):
        seconds = _measure(model, args)
        print("  ".join(f"{stage} {seconds[stage]:.2f} s" for stage in STAGES))
        if iteration >= args.num_iters_warmup:
            runs.append(seconds)
    values = {stage: [seconds[stage] for seconds in runs] for stage in STAGES}
    print("Median seconds from the command on:")
    for stage in STAGES:
        print(f"  {stage:<12} {percentiles(values[stage])['50']:.2f}")
    if args.output_json:
        ready = values["ready"]
        result = {
            "avg_startup_time": sum(ready) / len(ready),
            "startup_times": ready,
            "startup_percentiles": percentiles(ready),
            "port_open_times": values["port open"],
            "first_token_times": values["first token"],
        }
        write_json(args.output_json, result)
    return 0


def _measure(model: str, args: argparse.Namespace) -> dict[str, float]:
    """One start: stage -> seconds since the command."""
    port = _free_port()
    command = [sys.executable, "-m", "octavo", "serve", model, f"--port={port}", *_engine_arguments(args)]
    with tempfile.TemporaryFile() as log:
        start_s = time.perf_counter()
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            seconds = asyncio.run(_watch(server, port, start_s, args.start_timeout))
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
        probe.bind((ServerConfig.host, 0))
        return int(probe.getsockname()[1])


def _engine_arguments(args: argparse.Namespace) -> list[str]:
    arguments = []
    for name, value in config_values(args, EngineConfig).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif name != "model":
            arguments.append(f"--{option}={value}")
    return arguments


async def _watch(server: "subprocess.Popen[bytes]", port: int, start_s: float, timeout_s: float) -> dict[str, float]:
    from octavo.cli.bench.dataset import BenchRequest
    from octavo.cli.bench.load import LoadClient
    from octavo.cli.http_client import HttpClient, ServerError

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
            client = LoadClient(http, "/v1/completions", None, {"ignore_eos": True}, is_chat=False)
            await client.wait_until_ready(0)
    except TimeoutError:
        raise OctavoError(f"The server was not ready within --start-timeout {timeout_s:g} seconds.") from None
    answer = await client.send(BenchRequest([1] * 8, 1))
    if answer.ttft_s is None:
        raise OctavoError(answer.error or "The server gave no token.")
    seconds["first token"] = answer.start_s + answer.ttft_s - start_s
    return seconds
