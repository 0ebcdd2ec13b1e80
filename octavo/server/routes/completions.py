"""POST /v1/completions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Response

from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams
from octavo.server.prompts import Prompt
from octavo.server.requests.numbers import Int
from octavo.server.requests.sampling import SamplingRequest
from octavo.server.routes.context import Call, check_fields, post, warn_of_structure
from octavo.server.routes.generation import GenerationJob, GenerationResponse
from octavo.server.served_model import ServedModel
from octavo.server.text_out.completion import TextFormat
from octavo.server.text_out.extras import Extras, ShownPrompt

__all__ = ["CompletionRequest", "router"]

router = APIRouter()


class CompletionRequest(SamplingRequest):
    prompt: str | list[str] | list[Int] | list[list[Int]]
    max_tokens: Int | None = 16
    logprobs: Int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequestError(
                "max_tokens must be an integer of at least 1, got 0. With echo: true it can be 0.", param="max_tokens"
            )
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise InvalidRequestError("echo with logprobs is not supported with beam search.", param="echo")
        params = self.make_params(defaults, max_tokens=self.max_tokens, logprobs=self.logprobs)
        if self.echo and self.logprobs is not None:
            return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))
        return params


@post(router, "/v1/completions")
async def completions(body: CompletionRequest, call: Call) -> Response:
    model = call.model
    headers = check_fields(body, model)
    model.check_generates()
    params = await model.prompts.with_bad_words(body.sampling_params(model.info.config.runtime.sampling_defaults))
    headers += warn_of_structure(params)
    prompts = await _prompts(body, model, params)
    token_ids = [prompt.token_ids for prompt in prompts]
    params = model.limits.with_max_tokens(params, token_ids, "max_tokens" in body.model_fields_set)
    shown = [ShownPrompt(prompt.token_ids, model.prompts.shown(prompt) if body.echo else None) for prompt in prompts]
    choices = [prompt for prompt in shown for _ in range(params.n)]
    tokenizer = model.prompts.tokenizer
    answer = TextFormat(call.request_id, model.name, choices, Extras.of(body, tokenizer, params))
    job = GenerationJob.of(body, token_ids, params, answer, tokenizer, headers)
    return GenerationResponse(model, call.service, job)


async def _prompts(body: CompletionRequest, model: ServedModel, params: SamplingParams) -> list[Prompt]:
    """The prompt or prompts, whichever of four forms they have."""
    given = body.prompt
    if not isinstance(given, str) and given and isinstance(given[0], int):
        given = [given]  # a list of token ids is one prompt
    if not given:
        raise InvalidRequestError("The prompt is empty: it must hold at least one token.", param="prompt")
    given = [given] if isinstance(given, str) else given
    model.limits.check_num_choices(len(given), params.n)
    most = model.limits.most_tokens(body.truncate_prompt_tokens)
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            prompts.append(await model.prompts.of_text(prompt, body.add_special_tokens is not False, most))
        else:
            assert isinstance(prompt, list)
            prompts.append(Prompt(prompt))
    if body.truncate_prompt_tokens is None:
        return prompts
    length, side = body.truncate_prompt_tokens, body.truncation_side
    return [Prompt(model.limits.truncated(prompt.token_ids, length, side, params)) for prompt in prompts]
