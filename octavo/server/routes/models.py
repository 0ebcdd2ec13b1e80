"""GET /v1/models: what is served, under each of its names."""

import time

import msgspec
from fastapi import APIRouter, Response

from octavo.server.http.errors import model_not_found
from octavo.server.routes.context import TheModel, json_answer
from octavo.server.served_model import ServedModel

__all__ = ["ModelCard", "ModelList", "router"]

router = APIRouter()


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "octavo"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


@router.get("/v1/models")
async def list_models(model: TheModel) -> Response:
    return json_answer(ModelList(data=[_card(name, model) for name in model.names]))


@router.get("/v1/models/{name:path}")
async def get_model(name: str, model: TheModel) -> Response:
    if name not in model.names:
        raise model_not_found(name, model.name)
    return json_answer(_card(name, model))


def _card(name: str, model: ServedModel) -> ModelCard:
    return ModelCard(id=name, created=int(time.time()), root=model.root, max_model_len=model.limits.max_model_len)
