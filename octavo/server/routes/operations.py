"""What operators ask for beside the probes: GET /version and GET /metrics."""

import msgspec
from fastapi import APIRouter, Response

from octavo import __version__
from octavo.server.routes.context import json_answer
from octavo.server.service import TheService

__all__ = ["Version", "router"]

router = APIRouter()


class Version(msgspec.Struct, frozen=True):
    version: str


@router.get("/version")
async def version() -> Response:
    return json_answer(Version(__version__))


@router.get("/metrics")
async def metrics(service: TheService) -> Response:
    return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")
