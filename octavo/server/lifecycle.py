"""run: a server's life, from the start over being ready to its end by a signal or with the engine."""

import asyncio
import gc
import json
import logging
import resource
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvloop

from octavo import __version__
from octavo.api.admission import Admission
from octavo.api.engine_client import EngineClient
from octavo.api.engine_process import EngineProcess
from octavo.api.metrics import EngineMetrics
from octavo.errors import ConfigError, EngineDeadError, OctavoError
from octavo.options import EngineConfig
from octavo.server.app import create_app
from octavo.server.body_reader import BodyReader
from octavo.server.grammar_check import GrammarChecker
from octavo.server.http.access_log import open_log
from octavo.server.http.connection import ConnectionLimits, connections_within
from octavo.server.http.edge import with_edge
from octavo.server.launch import url_of
from octavo.server.options import ServerConfig
from octavo.server.served_model import ServedModel
from octavo.server.service import Phase, Service
from octavo.server.signals import Signals
from octavo.text.text_side import load_text_side

__all__ = ["run"]

DEAD_S = 2.0
"""How long `/health` tells of a dead engine, so that a balancer hears of it."""
FLUSH_S = 5.0
"""How long clients get to read the error that a dead engine left them with."""
MAX_HEADER_BYTES = 64 << 10
MAX_QUEUED_TOKENS = 1_000_000
"""Prompt tokens that may wait for the engine."""
OTHER_FILES = 200
"""Open files that are no connections."""


def run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    process: EngineProcess,
    listeners: list[socket.socket],
    signals: Signals,
    started_at: float,
) -> int:
    """Serve until the end; returns the exit status. `started_at` is on the clock of `time.perf_counter`."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Server(engine_config, server_config, process, listeners, signals, started_at).live())


class _HttpServer(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(
        self,
        engine_config: EngineConfig,
        server_config: ServerConfig,
        process: EngineProcess,
        listeners: list[socket.socket],
        signals: Signals,
        started_at: float,
    ) -> None:
        self._engine_config = engine_config
        self._config = server_config
        self._process = process
        self._listeners = listeners
        self._signals = signals
        self._started_at = started_at
        self._name = server_config.names(engine_config.model)[0]

    async def live(self) -> int:
        self._signals.listen()
        metrics = EngineMetrics(self._name)
        admission = Admission(self._config.max_num_queued_reqs, MAX_QUEUED_TOKENS)
        self._client = EngineClient(self._process, metrics, admission, self._config.request_timeout)
        self._service = Service(self._name, metrics, self._config.sse_ping_interval)
        try:
            http = _HttpServer(self._http_config())
            serving = asyncio.create_task(http.serve(sockets=self._listeners))
            try:
                return await self._until_end()
            finally:
                self._client.close(EngineDeadError("The server is shutting down."))
                if self._service.model is not None:
                    self._service.model.close()
                http.should_exit = True
                http.force_exit = self._signals.second.is_set()
                await serving
        except OctavoError as error:
            print(f"octavo: {error}", file=sys.stderr, flush=True)
            return 1

    async def _until_end(self) -> int:
        """Start, be ready, drain. Raises the OctavoError that ended it."""
        signals, service, client = self._signals, self._service, self._client
        await _first_of(self._start(), client.wait_dead(), signals.first.wait())
        if service.model is None:
            if client.is_dead:
                await client.wait_ready()  # raises what the start failed with
            return 0
        await _first_of(client.wait_dead(), signals.first.wait())
        if not client.is_dead:
            service.phase = Phase.DRAINING
            timeout = self._config.shutdown_timeout
            await _first_of(service.is_idle.wait(), client.wait_dead(), signals.second.wait(), timeout=timeout)
        if client.is_dead:
            service.phase = Phase.DEAD
            await _first_of(signals.first.wait(), timeout=DEAD_S)
            await _first_of(service.is_idle.wait(), timeout=FLUSH_S)
            raise await client.wait_dead()
        return 128 + signal.SIGTERM if signals.second.is_set() else 0

    async def _start(self) -> None:
        start = time.perf_counter()
        text = await asyncio.to_thread(load_text_side, self._engine_config, self._config.chat_template)
        tokenizer_s = time.perf_counter() - start
        info = await self._client.wait_ready()
        self._service.model = ServedModel.of(
            self._engine_config,
            self._config,
            info,
            text,
            self._client,
            GrammarChecker(self._engine_config, info.limits.vocab_size, info.eos_token_ids),
            BodyReader(self._engine_config, self._config, info),
        )
        gc.freeze()  # what the start made stays: no collection walks over it while answers stream
        self._service.phase = Phase.READY
        self._announce(info.start_seconds, tokenizer_s)

    def _http_config(self) -> uvicorn.Config:
        """Raises ConfigError for keys and certificates that can't be read."""
        options = self._config
        max_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limits = ConnectionLimits(
            max_header_bytes=MAX_HEADER_BYTES,
            client_timeout_s=options.client_timeout,
            max_connections=max(max_files - OTHER_FILES, max_files // 4),
        )
        open_log(options.access_log)
        config = uvicorn.Config(
            with_edge(create_app(self._service), options, self._service),
            http=connections_within(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=options.timeout_keep_alive,
            headers=[("Keep-Alive", f"timeout={options.timeout_keep_alive}")],
            timeout_graceful_shutdown=2,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
            ssl_ca_certs=options.ssl_ca_certs,
            ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
        )
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-certfile {options.ssl_certfile} and what belongs to it: {error}") from None
        return config

    def _announce(self, engine_seconds: dict[str, float], tokenizer_s: float) -> None:
        model = self._service.model
        assert model is not None
        url = url_of(self._listeners[0], self._config)
        stages = ", ".join(f"{stage} {seconds:.2f} s" for stage, seconds in engine_seconds.items())
        info, ready_s = model.info, time.perf_counter() - self._started_at
        pool, runtime = info.config.scheduler, info.config.runtime
        cache = f"{info.config.kv.dtype} KV in {pool.num_blocks} blocks of {pool.block_size} tokens; "
        print(
            f"octavo {__version__} serves {model.name} on {url}, ready in {ready_s:.2f} s\n"
            f"  engine: {stages}; beside it: tokenizer {tokenizer_s:.2f} s\n"
            f"  {info.config.weights.dtype}; {cache if pool.num_blocks else ''}context {runtime.max_model_len}; "
            f"{runtime.provider} kernels on {runtime.num_threads} threads\n"
            f"{_forms(model)}"
            f"Try: {_curl(url, model)}",
            flush=True,
        )


def _forms(model: ServedModel) -> str:
    """A line on how the model's messages are taken apart, if they are."""
    known = []
    if model.tool_format is not None:
        known.append(f"tool calls as {model.tool_format.name} writes them")
    if model.reasoning_format is not None:
        known.append(f"reasoning as {model.reasoning_format.name} writes it")
    return f"  reads {' and '.join(known)}\n" if known else ""


def _curl(url: str, model: ServedModel) -> str:
    path, body = "completions", dict[str, object](prompt="The sky is blue because", max_tokens=64)
    if model.info.config.runtime.pooling is not None:
        path, body = "embeddings", {"input": "Why is the sky blue?"}
    elif model.prompts.text.has_chat_template:
        messages = [{"role": "user", "content": "Why is the sky blue?"}]
        path, body = "chat/completions", {"messages": messages, "max_tokens": 64}
    data = json.dumps({"model": model.name, **body})
    return shlex.join(["curl", f"{url}/v1/{path}", "-H", "Content-Type: application/json", "-d", data])


async def _first_of(*awaited: Coroutine[Any, Any, Any], timeout: float | None = None) -> None:
    """Return when one of them is done, or after `timeout` seconds; raises what that one raised. The others end."""
    tasks = [asyncio.create_task(one) for one in awaited]
    done, pending = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()
