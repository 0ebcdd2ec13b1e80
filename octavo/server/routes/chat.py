"""POST /v1/chat/completions."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter, Response

from octavo.errors import InvalidRequestError
from octavo.sampling_params import SamplingParams
from octavo.server.requests.messages import ChatInput, Message
from octavo.server.requests.numbers import Int
from octavo.server.requests.sampling import SamplingRequest
from octavo.server.requests.tool_use import ToolUse, choose
from octavo.server.requests.tools import FunctionName, NamedToolChoice
from octavo.server.routes.context import Call, check_fields, post, warn_of_structure
from octavo.server.routes.generation import GenerationJob, GenerationResponse
from octavo.server.served_model import ServedModel
from octavo.server.text_out.chat import ChatFormat
from octavo.server.text_out.extras import Extras, ShownPrompt
from octavo.server.text_out.reading import Reading, plan_reading

__all__ = ["ChatCompletionRequest", "router"]

router = APIRouter()
LONGEST_TAG = 32
"""Tokens, at the end of a prompt, that a tag and white space can take."""


class ChatCompletionRequest(ChatInput, SamplingRequest):
    messages: list[Message]
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    """Goes before max_tokens, which OpenAI has retired."""
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    echo: bool | None = None
    """Begin the answer with the last message, if that is the assistant's."""
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    """None is "auto"."""
    function_call: Literal["none", "auto"] | FunctionName | None = None
    """The same, in OpenAI's former way."""
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        """A model that shall call none is shown none."""
        return None if self._tool_choice == "none" else super().template_tools

    @property
    def _tool_choice(self) -> Literal["none", "auto", "required"] | NamedToolChoice | None:
        if self.tool_choice is not None:
            return self.tool_choice
        choice = self.function_call
        return NamedToolChoice(function=choice) if isinstance(choice, FunctionName) else choice

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequestError for tools, or a choice among them, that can't be."""
        return choose(
            self.all_tools,
            self._tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
            is_former=self.functions is not None and not self.tools,
        )

    @property
    def echoed(self) -> str:
        last = self.messages[-1] if self.messages else None
        return last.text if self.echo and last is not None and last.role == "assistant" else ""

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true.", param="top_logprobs")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if max_tokens == 0:
            name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise InvalidRequestError(f"{name} must be an integer of at least 1, got 0.", param=name)
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.make_params(defaults, max_tokens=max_tokens, logprobs=logprobs)


@post(router, "/v1/chat/completions")
async def chat_completions(body: ChatCompletionRequest, call: Call) -> Response:
    model = call.model
    headers = check_fields(body, model)
    model.check_generates()
    tools = body.tool_use()
    params = tools.constrain(body.sampling_params(model.info.config.runtime.sampling_defaults))
    model.limits.check_num_choices(1, params.n)
    params = await model.prompts.with_bad_words(params)
    if body.template_tools and not model.prompts.text.chat_template.takes_tools:
        headers.append((b"x-octavo-warning", b"the tools are not shown to the model: its chat template has no place"))
    for role in model.prompts.dropped_roles(body):
        warning = f"the chat template shows the model no messages of the role {json.dumps(role)}"
        headers.append((b"x-octavo-warning", warning.encode("ascii")))
    headers += warn_of_structure(params)
    prompt = await model.prompts.of_messages(body, call.size, model.limits.most_tokens(body.truncate_prompt_tokens))
    prompt = model.limits.truncated(prompt, body.truncate_prompt_tokens, body.truncation_side, params)
    params = model.limits.with_max_tokens(params, [prompt], is_asked=params.max_tokens is not None)
    reading = _reading(body, model, tools, prompt, is_free=params.structured_outputs is None)
    extras = Extras.of(body, model.prompts.tokenizer, params)
    answer = ChatFormat(call.request_id, model.name, params.n, ShownPrompt(prompt, body.echoed), extras, reading)
    tokens = reading.visible(model.prompts.tokenizer)
    return GenerationResponse(model, call.service, GenerationJob.of(body, [prompt], params, answer, tokens, headers))


def _reading(
    body: ChatCompletionRequest, model: ServedModel, tools: ToolUse, prompt: list[int], is_free: bool
) -> Reading:
    """How to read the answers; one that a grammar rules is not `is_free` and has no reasoning."""
    form = model.reasoning_format if is_free else None
    is_open = False
    if form is not None and body.continue_final_message:
        is_open = form.is_open_after(body.messages[-1].text)
    elif form is not None:
        is_open = form.is_opened_by(model.prompts.decode(prompt[-LONGEST_TAG:]))
    return plan_reading(
        tools,
        model.tool_format,
        form,
        is_reasoning_open=is_open,
        keeps_reasoning=body.include_reasoning is not False,
    )
