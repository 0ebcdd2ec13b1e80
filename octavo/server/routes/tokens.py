"""POST /tokenize and POST /detokenize."""

import msgspec
from fastapi import APIRouter, Response

from octavo.errors import InvalidRequestError
from octavo.server.requests.fields import ApiRequest
from octavo.server.requests.messages import ChatInput
from octavo.server.requests.numbers import Int
from octavo.server.routes.context import Call, check_fields, json_answer, post

__all__ = ["DetokenizeRequest", "Detokenized", "TokenizeRequest", "Tokenized", "router"]

router = APIRouter()


class TokenizeRequest(ChatInput):
    """A prompt, or messages as for a chat completion."""

    prompt: str | None = None
    return_token_strs: bool | None = None
    """Return the tokens as the vocabulary spells them, too."""


class DetokenizeRequest(ApiRequest):
    tokens: list[Int]


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


@post(router, "/tokenize")
async def tokenize(body: TokenizeRequest, call: Call) -> Response:
    model = call.model
    headers = check_fields(body, model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Send either prompt or messages.", param="prompt")
    if body.prompt is None:
        token_ids = await model.prompts.of_messages(body, call.size)
    else:
        token_ids = (await model.prompts.of_text(body.prompt, body.add_special_tokens is not False)).token_ids
    texts = list(map(model.prompts.tokenizer.spelling, token_ids)) if body.return_token_strs else None
    answer = Tokenized(
        count=len(token_ids), max_model_len=model.limits.max_model_len, tokens=token_ids, token_strs=texts
    )
    return json_answer(answer, headers)


@post(router, "/detokenize")
async def detokenize(body: DetokenizeRequest, call: Call) -> Response:
    model = call.model
    headers = check_fields(body, model)
    model.limits.check_vocabulary(body.tokens, "tokens")
    return json_answer(Detokenized(model.prompts.decode(body.tokens)), headers)
