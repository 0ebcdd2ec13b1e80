"""serve: from two configurations to a running server, and its exit status.

Imports neither FastAPI nor anything else slow at its top: the port is bound and the engine's process running before
they load.
"""

import os
import resource
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress

from octavo.api.engine_process import ENGINE_COMMAND, EngineProcess
from octavo.errors import ConfigError
from octavo.ipc.output import never_wait_for_readers, open_standard_files
from octavo.options import EngineConfig
from octavo.server.options import ServerConfig, shown_path
from octavo.server.signals import Signals

__all__ = ["serve", "url_of"]

BACKLOG = 4096
LEAST_FILES = 64
"""Open files with which a few connections can be served."""


def serve(
    engine_config: EngineConfig, server_config: ServerConfig, engine_command: Sequence[str] = ENGINE_COMMAND
) -> int:
    """Serve until a signal or the engine's end. Returns the process's exit status: 0 after SIGTERM or SIGINT.

    What goes wrong on the way is printed in one line. Call from the main thread.
    """
    started_at = time.perf_counter()
    open_standard_files()
    never_wait_for_readers()
    signals = Signals()
    max_files = _raise_file_limit()
    if max_files < LEAST_FILES:
        print(
            f"octavo: a process may have {max_files} files open here, and the server needs {LEAST_FILES}. "
            "Raise the limit (ulimit -n).",
            file=sys.stderr,
        )
        return 1
    host, port = server_config.host, server_config.port
    try:
        listeners = _listen(host, port)
    except (OSError, UnicodeError) as error:
        number = getattr(error, "errno", None) or 0
        why = os.strerror(number) if number > 0 else error
        print(f"octavo: can't listen on {host}, port {port}: {why}. Choose another --port or --host.", file=sys.stderr)
        return 1
    print(
        f"octavo: listening on {url_of(listeners[0], server_config)}, starting {shown_path(engine_config.model)}",
        flush=True,
    )
    try:
        with ExitStack() as stack:
            for listener in listeners:
                stack.enter_context(listener)
            process = stack.enter_context(closing(EngineProcess(engine_config, engine_command)))
            from octavo.server.lifecycle import run

            return run(engine_config, server_config, process, listeners, signals, started_at)
    except ConfigError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1


def url_of(listener: socket.socket, config: ServerConfig) -> str:
    """An address that a client on this machine can use."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if config.ssl_certfile else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _raise_file_limit() -> int:
    """A connection is an open file, and the usual limit of 1024 is there for programs that use select()."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems have a limit below the one they name
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _listen(host: str, port: int) -> list[socket.socket]:
    """Bound and listening: early connections wait, and a second server fails before it loads anything.

    `localhost` is both loopback addresses, on the same port (RFC 6761), whatever the machine's table of hosts says.
    """
    if host == "localhost":
        first = _bind("127.0.0.1", port)
        with suppress(OSError):  # no IPv6 here, or the port is another's there
            return [first, _bind("::1", first.getsockname()[1])]
        return [first]
    return [_bind(host.removeprefix("[").removesuffix("]") if ":" in host else host, port)]


def _bind(host: str, port: int) -> socket.socket:
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    is_all = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=is_all)
