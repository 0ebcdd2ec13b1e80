"""POST /invocations, by which SageMaker calls a model: a chat, a completion or embeddings, as the fields say."""

from fastapi import APIRouter, Response

from octavo.errors import InvalidRequestError
from octavo.server.requests.fields import ApiRequest
from octavo.server.requests.parsing import validate
from octavo.server.routes import chat, completions, embeddings
from octavo.server.routes.context import Call, post

__all__ = ["Invocation", "router"]

router = APIRouter()


class Invocation(ApiRequest):
    """The fields of the route that is meant."""


@post(router, "/invocations")
async def invoke(body: Invocation, call: Call) -> Response:
    fields = {name: getattr(body, name) for name in body.model_fields_set}
    embeds = call.model.info.config.runtime.pooling is not None
    if "task" in fields and embeds:
        return await embeddings.pool(validate(embeddings.PoolingRequest, fields), call)
    if "input" in fields or ("messages" in fields and embeds):
        return await embeddings.create_embeddings(validate(embeddings.EmbeddingRequest, fields), call)
    if "messages" in fields:
        return await chat.chat_completions(validate(chat.ChatCompletionRequest, fields), call)
    if "prompt" in fields:
        return await completions.completions(validate(completions.CompletionRequest, fields), call)
    raise InvalidRequestError("Send messages for a chat, prompt for a completion or input for embeddings.")
