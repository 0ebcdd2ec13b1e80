"""Service: what all handlers share, and where the server is in its life."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Annotated

from fastapi import Depends, Request

from octavo.api.metrics import EngineMetrics
from octavo.server.http.errors import not_serving
from octavo.server.served_model import ServedModel

__all__ = ["Phase", "Service", "TheService"]


class Phase(Enum):
    """The value is what `/health` says."""

    STARTING = "starting"
    READY = "ok"
    DRAINING = "draining"
    DEAD = "engine dead"


class Service:
    """Invariant: `is_idle` is set exactly while no accepted request is being prepared or answered."""

    def __init__(self, model_name: str, metrics: EngineMetrics, ping_s: float = 0.0) -> None:
        """`ping_s`: seconds of silence after which a stream gets a comment; 0 for none."""
        self.model_name = model_name
        self.metrics = metrics
        self.ping_s = ping_s
        self.phase = Phase.STARTING
        self.model: ServedModel | None = None
        self.is_idle = asyncio.Event()
        self.is_idle.set()
        self._num_open = 0

    def ready_model(self) -> ServedModel:
        """Raises the 503 that says why no request is taken. A dead engine is reported by its client."""
        if self.phase is Phase.DRAINING:
            raise not_serving("The server is shutting down and takes no new requests.", retry_after_s=10)
        if self.model is None:
            raise not_serving(f"The server is still loading {self.model_name}.", retry_after_s=3)
        return self.model

    def engine_trouble(self) -> str | None:
        """Why an engine that was ready does not get on, though it is not known to be dead."""
        if self.model is None or self.phase is Phase.DEAD:
            return None
        return self.model.client.trouble()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Around each request that a shutdown waits for."""
        self._num_open += 1
        self.is_idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if not self._num_open:
                self.is_idle.set()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(_service)]
"""What a handler declares to be given it."""
