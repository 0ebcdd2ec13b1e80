"""Guard: turns away requests without a key."""

import hmac
import os
from collections.abc import Iterable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.errors import ConfigError
from octavo.server.http.errors import Error, send_error
from octavo.server.http.health import OPEN_PATHS
from octavo.server.options import ServerConfig

__all__ = ["ApiKeys", "load_keys"]

KEYS_VARIABLE = "OCTAVO_API_KEY"


def load_keys(config: ServerConfig) -> list[str]:
    """The keys of the option, of its files and of the environment. Raises ConfigError for a file without any."""
    keys = os.environ.get(KEYS_VARIABLE, "").split()
    for key in config.api_key:
        keys += _keys_in_file(key.removeprefix("@")) if key.startswith("@") else [key]
    if not all(keys):
        raise ConfigError("--api-key was given an empty key.")
    return keys


def _keys_in_file(path: str) -> list[str]:
    try:
        keys = Path(path).read_text().split()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--api-key @{path}: {error}") from None
    if not keys:
        raise ConfigError(f"--api-key @{path} holds no key.")
    return keys


class ApiKeys:
    """Lets a request pass that bears one of the keys, as `Authorization: Bearer KEY`; every path but the probes'."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in OPEN_PATHS or self._is_known(_bearer(scope)):
            await self._app(scope, receive, send)
            return
        message = "No valid API key: send one as the header Authorization: Bearer KEY."
        error = Error(message=message, type="invalid_request_error", code="invalid_api_key")
        await send_error(send, 401, error, [(b"www-authenticate", b"Bearer")])

    def _is_known(self, given: bytes) -> bool:
        """In a time that does not tell how much of a key is right, nor which of them."""
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def _bearer(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return bytes(key.strip()) if scheme.lower() == b"bearer" else b""
    return b""
