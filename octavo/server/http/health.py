"""The probes: `/health` and `/ping` say whether requests are served, `/livez` whether a restart would help."""

import msgspec
from fastapi import APIRouter, Response

from octavo.server.service import Phase, Service, TheService

__all__ = ["OPEN_PATHS", "Health", "router"]

OPEN_PATHS = frozenset(["/health", "/ping"])
"""Served without an API key."""
router = APIRouter()


class Health(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    status: str
    model: str
    detail: str | None = None
    """What is wrong with an engine that is alive but does not get on."""


@router.get("/health")
@router.head("/health", include_in_schema=False)
@router.get("/ping")
@router.head("/ping", include_in_schema=False)
async def health(service: TheService) -> Response:
    """200 when requests are taken and the engine gets on with them."""
    return _answer(service, service.phase is Phase.READY)


@router.get("/livez")
@router.head("/livez", include_in_schema=False)
async def livez(service: TheService) -> Response:
    """200 unless the engine is dead or stuck: also while the server starts or drains."""
    return _answer(service, service.phase is not Phase.DEAD)


def _answer(service: Service, is_well: bool) -> Response:
    trouble = service.engine_trouble()
    status = service.phase.value if trouble is None else "engine stalled"
    body = Health(status=status, model=service.model_name, detail=trouble)
    code = 200 if is_well and trouble is None else 503
    return Response(msgspec.json.encode(body), code, media_type="application/json")
