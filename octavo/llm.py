"""LLM: the engine in this process, for offline work. Text in, text out, with a progress bar.

The same LLMEngine, tokenizer and detokenizer serve here and behind the HTTP server.
"""

import difflib
import signal
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from itertools import count, islice
from os import PathLike, fspath
from typing import Any, cast

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.api.choice import Choice
from octavo.api.embedding import check_dimensions, cut_off, pooling_of, vector_of
from octavo.checkpoint.model_config import PoolingConfig
from octavo.core.step import RequestDelta
from octavo.engine.startup import StartProgress, build_engine
from octavo.errors import ConfigError, InvalidRequestError, OctavoError
from octavo.ipc.messages import AddPooling, AddRequest
from octavo.options import EngineConfig
from octavo.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, EmbeddingOutput, RequestOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.text.text_side import load_text_side

__all__ = ["LLM"]

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class _Call:
    """One `generate`, `embed` or stream. Calls may overlap: a step that one makes serves the requests of all."""

    open_ids: set[int] = field(default_factory=set)
    """Its requests that have not ended."""
    error: OctavoError | None = None
    """Why one of them failed."""


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One completion while it is generated."""

    call: _Call
    request: RequestOutput
    output: CompletionOutput
    choice: Choice
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class _Text:
    """One text while it is embedded."""

    call: _Call
    output: EmbeddingOutput
    pooling: PoolingConfig
    dimensions: int | None


class _LoadingBar(StartProgress):
    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.task = progress.add_task("Loading weights", total=None)

    def weights_read(self, done_bytes: int, total_bytes: int) -> None:
        self.progress.update(self.task, completed=done_bytes >> 20, total=total_bytes >> 20)


def _progress(show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, disable=not show, transient=False)


def _engine_config(model: str | PathLike[str], options: Mapping[str, Any]) -> EngineConfig:
    known = [item.name for item in fields(EngineConfig)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"LLM has no option {name!r}.{hint}")
    return EngineConfig(model=fspath(model), **options)


class LLM:
    """A model, loaded and ready.

    `options` are those of `octavo serve`, as keyword arguments. Raises ConfigError and CheckpointError.
    """

    def __init__(
        self, model: str | PathLike[str], *, chat_template: str | None = None, use_tqdm: bool = True, **options: Any
    ) -> None:
        config = _engine_config(model, options)
        with _progress(use_tqdm) as progress:
            self.engine, self.info = build_engine(config, _LoadingBar(progress))
        text_side = load_text_side(config, chat_template)
        self.tokenizer, self.chat_template = text_side.tokenizer, text_side.chat_template
        self._open: dict[int, _Sequence | _Text] = {}
        self._request_ids = count()

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """What prompts get without `sampling_params`: the model's own recommendation (--generation-config)."""
        return SamplingParams(**{**self.info.config.runtime.sampling_defaults, **changes})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the prompts' order.

        Raises InvalidRequestError before anything runs if a prompt can't be served, RequestFailedError if a step fails.
        """
        prompt_list = _as_prompts(prompts)
        encoded = [self._encode(prompt) for prompt in prompt_list]
        return self._run(encoded, self._params(sampling_params, len(encoded)), use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """Search for every prompt's likeliest continuations; results in the prompts' order. Raises as `generate` does.

        Tokens and scores are those of transformers' `generate` with `num_beams` and `num_return_sequences` equal.
        """
        return [self._beams(request) for request in self.generate(prompts, params.sampling_params(), use_tqdm=use_tqdm)]

    def _beams(self, request: RequestOutput) -> BeamSearchOutput:
        prompt = self.tokenizer.decode(request.prompt_token_ids) if request.prompt is None else request.prompt
        return BeamSearchOutput(
            [
                BeamSearchSequence(
                    prompt + output.text,
                    request.prompt_token_ids + output.token_ids,
                    output.logprobs or [],
                    sum(entry.logprob for entry in output.logprobs or ()),
                    output.score or 0.0,
                    output.finish_reason,
                    output.stop_reason,
                )
                for output in request.outputs
            ]
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several. `template_options` reach the chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], [messages] if one else messages)
        encoded = [self._encode_chat(conversation, template_options) for conversation in conversations]
        return self._run(encoded, self._params(sampling_params, len(encoded)), use_tqdm)

    def stream_chat(
        self, messages: Messages, sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """Answer one conversation, yielding text as it is generated. Closing the generator aborts the request."""
        params = sampling_params or self.default_sampling_params(max_tokens=None)
        params = params.with_bad_words_encoded(self._encode_plain)
        prompt, sent = self._encode_chat(messages, {}), 0
        with self._call() as call:
            output = self._add(call, *prompt, params).outputs[0]
            while True:
                if new := output.text[sent:]:  # another call may have made the step
                    sent += len(new)
                    yield new
                elif not self._is_running(call):
                    return
                else:
                    self._step()

    def _params(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequestError(f"{len(params)} sampling_params were given for {count} prompts; give one each.")
        return list(params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Embed every text; results in their order.

        `dimensions` cuts the embeddings of models that were trained for it; `truncate_prompt_tokens` keeps so many
        tokens of each text's beginning, -1 as many as the model takes. Raises as `generate` does.
        """
        pooling = pooling_of(self.info)
        check_dimensions(dimensions, self.info)
        most = cut_off(truncate_prompt_tokens, self.info.limits.max_model_len)
        outputs = [EmbeddingOutput(*self._encode(prompt, most)) for prompt in _as_prompts(prompts)]
        for output in outputs:
            self.engine.limits.check_input(output.prompt_token_ids)
        with self._call() as call:
            for output in outputs:
                request_id = next(self._request_ids)
                self.engine.add_pooling(AddPooling(request_id=request_id, prompt_token_ids=output.prompt_token_ids))
                self._open[request_id] = _Text(call, output, pooling, dimensions)
                call.open_ids.add(request_id)
            self._finish(call, "Embeddings", use_tqdm)
        return outputs

    def _encode(self, prompt: Prompt, most: int | None = None) -> tuple[str | None, list[int]]:
        """The prompt's text, where it has one, and its tokens, of which the first `most` are kept."""
        if isinstance(prompt, Mapping):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, max_tokens=most)
        return None, list(cast(Sequence[int], prompt))[:most]

    def _encode_plain(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _encode_chat(self, messages: Messages, template_options: Mapping[str, Any]) -> tuple[str | None, list[int]]:
        text = self.chat_template.render([dict(message) for message in messages], **template_options)
        return text, self._encode_plain(text)

    def _run(
        self, prompts: list[tuple[str | None, list[int]]], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        params = [one.with_bad_words_encoded(self._encode_plain) for one in params]
        for (_, token_ids), one in zip(prompts, params, strict=True):
            self.engine.limits.check(token_ids, one)
        with self._call() as call:
            requests = [self._add(call, text, ids, one) for (text, ids), one in zip(prompts, params, strict=True)]
            self._finish(call, "Completions", use_tqdm)
        return requests

    @contextmanager
    def _call(self) -> Iterator[_Call]:
        """A call without requests yet. Those that it adds and that have not ended when it is left are aborted."""
        call = _Call()
        try:
            yield call
        finally:
            for request_id in call.open_ids:
                del self._open[request_id]
                self.engine.abort(request_id)
            while not self._open and self.engine.has_unfinished_requests:  # what is in flight is nobody's
                self.engine.step()

    def _finish(self, call: _Call, description: str, use_tqdm: bool) -> None:
        """Step until every request of the call has ended. Raises RequestFailedError as soon as one fails."""
        total = len(call.open_ids)
        shown: AbstractContextManager[Progress | None] = _progress(use_tqdm) if use_tqdm else nullcontext()
        with shown as progress:
            task = progress.add_task(description, total=total) if progress else None
            while self._is_running(call):
                self._step()
                if progress and task is not None:
                    progress.update(task, completed=total - len(call.open_ids))

    def _is_running(self, call: _Call) -> bool:
        """Whether requests of the call are open. Raises the error of one that failed."""
        if call.error is not None:
            raise call.error
        return bool(call.open_ids)

    def _add(self, call: _Call, text: str | None, token_ids: list[int], params: SamplingParams) -> RequestOutput:
        request = RequestOutput(text, token_ids, [CompletionOutput(index) for index in range(params.n)])
        request_ids = list(islice(self._request_ids, params.n))
        self.engine.add_request(
            AddRequest(request_id=request_ids[0], prompt_token_ids=token_ids, sampling_params=params)
        )
        for request_id, output in zip(request_ids, request.outputs, strict=True):
            if params.logprobs is not None:
                output.logprobs = []
            self._open[request_id] = _Sequence(call, request, output, Choice(self.tokenizer, params), params)
            call.open_ids.add(request_id)
        return request

    def _step(self) -> None:
        with _interrupts_held_back():
            deltas = self.engine.step()
        for delta in deltas:
            opened = self._open.get(delta.request_id)
            if opened is None:
                continue
            try:
                has_ended = self._apply(opened, delta) if isinstance(opened, _Sequence) else _embed(opened, delta)
            except OctavoError as error:
                opened.call.error, has_ended = error, True
            if has_ended:
                del self._open[delta.request_id]
                opened.call.open_ids.remove(delta.request_id)

    def _apply(self, sequence: _Sequence, delta: RequestDelta) -> bool:
        """Whether the completion has ended."""
        output, choice = sequence.output, sequence.choice
        piece = choice.append(delta)
        sequence.request.num_cached_tokens = max(sequence.request.num_cached_tokens, choice.num_cached_tokens)
        if piece.prompt_logprobs is not None:
            sequence.request.prompt_logprobs = [None, *piece.prompt_logprobs]
        output.token_ids += piece.token_ids
        if sequence.params.detokenize:
            output.text += piece.text
        if output.logprobs is not None:
            output.logprobs += piece.logprobs or []
        output.score = delta.score
        output.finish_reason, output.stop_reason = piece.finish_reason, piece.stop_reason
        if choice.is_finished and delta.finish_reason is None:  # a stop string, which the engine doesn't see
            self.engine.finish(delta.request_id, choice.num_tokens)
        return choice.is_finished


def _embed(text: _Text, delta: RequestDelta) -> bool:
    text.output.num_cached_tokens = delta.num_cached_tokens
    text.output.embedding = vector_of(delta, text.pooling, text.dimensions).tolist()
    return True


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let Ctrl-C arrive after the block: a step that ends half-way would leave the scheduler waiting for it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:  # None: not Python's to restore
        yield
        return
    arrived: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if arrived:
        signal.raise_signal(signal.SIGINT)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # one prompt of token ids
    return list(prompts)  # type: ignore[arg-type]
