"""The HTTP application: its routes. Started by `octavo.server.launch.serve`.

Handlers check everything before they answer; what they share lies in `service.py`, the answers in `stream.py`.
"""

import json
import time
from collections.abc import Sequence
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response

from octavo import __version__
from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams
from octavo.server import embeddings
from octavo.server.embeddings import EmbeddingRequest, EmbeddingResponse
from octavo.server.formats import ChatFormat, Format, TextFormat
from octavo.server.http import health
from octavo.server.http.access_log import request_id_of
from octavo.server.http.errors import install_error_handlers, model_not_found
from octavo.server.http.openapi import install_openapi
from octavo.server.logprobs import LogprobFormat
from octavo.server.plain_answers import Detokenized, ModelCard, ModelList, Tokenized, Version
from octavo.server.schema import (
    ApiRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingRequest,
    TokenizeRequest,
)
from octavo.server.served_model import Prompt, ServedModel
from octavo.server.service import Service
from octavo.server.stream import GenerationJob, GenerationResponse
from octavo.server.wanted import ShownPrompt, Wanted
from octavo.text.detokenizer import TokenBytes

__all__ = ["create_app"]

MAX_WARNED_FIELDS = 10
router = APIRouter()


def create_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="octavo",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.service = service
    app.include_router(router)
    app.include_router(health.router)
    install_error_handlers(app)
    install_openapi(app)
    return app


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _ready_model(request: Request) -> ServedModel:
    return _service(request).ready_model()


def _request_id(request: Request) -> str:
    return request_id_of(request.scope)


TheService = Annotated[Service, Depends(_service)]
TheModel = Annotated[ServedModel, Depends(_ready_model)]
RequestId = Annotated[str, Depends(_request_id)]


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatCompletionRequest, model: TheModel, service: TheService, request_id: RequestId
) -> Response:
    headers = _check_fields(body, model)
    choice = body.chosen_tools()
    params = await model.complete(choice.constrain(body.sampling_params(model.info.sampling_defaults)))
    if body.template_tools and not model.text.chat_template.takes_tools:
        headers.append((b"x-octavo-warning", b"the tools are not shown to the model: its chat template has no place"))
    await model.check_structure(params, body.structure_field or "tools")
    prompt = model.truncated(await model.chat_prompt(body), body.truncate_prompt_tokens, params)
    params = model.with_max_tokens(params, len(prompt))
    reading = model.reading(body, choice, prompt, is_free=params.structured_outputs is None)
    shown = ShownPrompt(prompt, body.echoed)
    answer = ChatFormat(request_id, model.name, params.n, shown, _wanted(body, model, params), reading)
    return _generation(body, model, service, [prompt], params, answer, headers, tokens=reading.visible(model.tokenizer))


@router.post("/v1/completions")
async def completions(body: CompletionRequest, model: TheModel, service: TheService, request_id: RequestId) -> Response:
    headers = _check_fields(body, model)
    params = await model.complete(body.sampling_params(model.info.sampling_defaults))
    await model.check_structure(params, body.structure_field)
    prompts = await _text_prompts(body, model, service, params)
    shown = [ShownPrompt(prompt.token_ids, model.echo(prompt) if body.echo else None) for prompt in prompts]
    choices = [prompt for prompt in shown for _ in range(params.n)]
    answer = TextFormat(request_id, model.name, choices, _wanted(body, model, params))
    return _generation(body, model, service, [prompt.token_ids for prompt in prompts], params, answer, headers)


@router.post("/v1/embeddings")
async def create_embeddings(body: EmbeddingRequest, model: TheModel, service: TheService) -> Response:
    headers = _check_fields(body, model)
    return EmbeddingResponse(model, await embeddings.prepare(body, model, service, headers), service)


@router.get("/v1/models")
async def list_models(model: TheModel) -> Response:
    return _json(ModelList(data=[_model_card(model)]))


@router.get("/v1/models/{name:path}")
async def get_model(name: str, model: TheModel) -> Response:
    if name != model.name:
        raise model_not_found(name, model.name)
    return _json(_model_card(model))


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, model: TheModel) -> Response:
    headers = _check_fields(body, model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Send either prompt or messages.", param="prompt")
    if body.prompt is None:
        token_ids = await model.chat_prompt(body)
    else:
        token_ids = (await model.text_prompt(body.prompt, body.add_special_tokens is not False)).token_ids
    texts = [model.tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    answer = Tokenized(count=len(token_ids), max_model_len=model.info.max_model_len, tokens=token_ids, token_strs=texts)
    return _json(answer, headers)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, model: TheModel) -> Response:
    headers = _check_fields(body, model)
    for token_id in body.tokens:
        if not 0 <= token_id < model.info.vocab_size:
            raise InvalidRequestError(
                f"Token id {token_id} is outside the vocabulary: ids go from 0 to {model.info.vocab_size - 1}.",
                param="tokens",
            )
    return _json(Detokenized(model.decode(body.tokens)), headers)


@router.get("/version")
async def version() -> Response:
    return _json(Version(__version__))


@router.get("/metrics")
async def metrics(service: TheService) -> Response:
    return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _check_fields(body: ApiRequest, model: ServedModel) -> list[tuple[bytes, bytes]]:
    """Headers that name the fields nobody knows. Raises for another model, and for fields that octavo can't serve."""
    if body.model is not None and body.model != model.name:
        raise model_not_found(body.model, model.name)
    if isinstance(body, SamplingRequest):
        model.check_generates()
    headers = []
    if isinstance(body, SamplingRequest) and (older := body.guided_fields()):
        text = f"{', '.join(older)}: deprecated in favour of structured_outputs"
        headers.append((b"x-octavo-warning", text.encode("ascii")))
    if unknown := body.unknown_fields():
        # JSON's escapes keep control characters out of the header.
        names = ", ".join(json.dumps(name[:64]) for name in unknown[:MAX_WARNED_FIELDS])
        if model.is_strict:
            raise InvalidRequestError(f"Unknown fields, which --strict refuses: {names}.", param=unknown[0][:64])
        headers.append((b"x-octavo-warning", f"unknown fields ignored: {names}".encode("ascii")))
    return headers


def _json(content: msgspec.Struct, headers: Sequence[tuple[bytes, bytes]] = ()) -> Response:
    text_headers = {name.decode(): value.decode() for name, value in headers}
    return Response(msgspec.json.encode(content), headers=text_headers, media_type="application/json")


async def _text_prompts(
    body: CompletionRequest, model: ServedModel, service: Service, params: SamplingParams
) -> list[Prompt]:
    """The prompt or prompts, whichever of four forms they have."""
    given = body.prompt
    if not isinstance(given, str) and given and isinstance(given[0], int):
        given = [given]  # a list of token ids is one prompt
    if not given:
        raise InvalidRequestError("The prompt is empty: it must hold at least one token.", param="prompt")
    given = [given] if isinstance(given, str) else given
    service.check_num_choices(len(given), params.n)
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append(await model.text_prompt(prompt, body.add_special_tokens is not False))
        else:
            assert isinstance(prompt, list)
            prompts.append(Prompt(prompt))
    if body.truncate_prompt_tokens is None:
        return prompts
    return [Prompt(model.truncated(prompt.token_ids, body.truncate_prompt_tokens, params)) for prompt in prompts]


def _wanted(body: SamplingRequest, model: ServedModel, params: SamplingParams) -> Wanted:
    names_ids = bool(body.return_tokens_as_token_ids)
    return Wanted(
        format=LogprobFormat(model.tokenizer, params.skip_special_tokens, names_ids),
        num_logprobs=params.logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids),
    )


def _generation(
    body: SamplingRequest,
    model: ServedModel,
    service: Service,
    prompts: list[list[int]],
    params: SamplingParams,
    answer: Format,
    headers: list[tuple[bytes, bytes]],
    tokens: TokenBytes | None = None,
) -> Response:
    """Raises InvalidRequestError for a prompt that can't be served; the generation begins with the response."""
    for prompt in prompts:
        model.limits.check(prompt, params)
    job = GenerationJob(
        prompts=prompts,
        params=params,
        format=answer,
        stream=bool(body.stream),
        includes_usage=body.includes_usage,
        has_continuous_usage=body.has_continuous_usage,
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        headers=headers,
        tokens=tokens or model.tokenizer,
    )
    return GenerationResponse(model, job, service)


def _model_card(model: ServedModel) -> ModelCard:
    return ModelCard(id=model.name, created=int(time.time()), root=model.root, max_model_len=model.info.max_model_len)
