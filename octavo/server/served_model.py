"""ServedModel: the model that a server serves, as its handlers know it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

from octavo.api.engine_client import EngineClient
from octavo.errors import InvalidRequestError
from octavo.ipc.messages import EngineInfo
from octavo.options import EngineConfig
from octavo.sampling_params import SamplingParams
from octavo.server.body_reader import BodyReader, Resident
from octavo.server.grammar_check import GrammarChecker
from octavo.server.limits import Limits
from octavo.server.options import ServerConfig, shown_path
from octavo.server.prompts import PromptMaker
from octavo.text.reasoning import ReasoningFormat, find_reasoning_format
from octavo.text.text_side import TextSide, load_text_side
from octavo.text.tool_calls import ToolFormat, find_tool_format

if TYPE_CHECKING:
    from octavo.server.service import Service

__all__ = ["ServedModel", "load_resident"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    names: tuple[str, ...]
    """Requests may use any of them; answers to requests without a model have the first."""
    root: str
    """The --model value."""
    client: EngineClient
    prompts: PromptMaker
    limits: Limits
    tool_format: ToolFormat | None = None
    reasoning_format: ReasoningFormat | None = None
    grammars: GrammarChecker | None = None
    """Refuses structured output that the engine would refuse."""
    bodies: BodyReader | None = None
    """Runs the handlers of bodies; None runs them all on the event loop."""
    is_strict: bool = False
    """Whether fields that nobody knows are refused."""

    @classmethod
    def of(
        cls,
        engine_config: EngineConfig,
        config: ServerConfig,
        info: EngineInfo,
        text: TextSide,
        client: EngineClient,
        grammars: GrammarChecker | None = None,
        bodies: BodyReader | None = None,
    ) -> Self:
        return cls(
            names=config.names(engine_config.model),
            root=shown_path(engine_config.model),
            client=client,
            prompts=PromptMaker(text, config.trust_request_chat_template),
            limits=Limits(info, config.max_request_choices),
            tool_format=find_tool_format(config.tool_call_parser, text.chat_template.source),
            reasoning_format=find_reasoning_format(config.reasoning_parser, text.chat_template.source),
            grammars=grammars,
            bodies=bodies,
            is_strict=config.strict,
        )

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def info(self) -> EngineInfo:
        return self.limits.info

    def check_generates(self) -> None:
        """Raises InvalidRequestError for a model that only embeds."""
        if self.info.config.runtime.pooling is not None:
            raise InvalidRequestError(
                f"{self.name!r} embeds texts, it does not generate (--runner pooling). Send them to /v1/embeddings.",
                param="model",
            )

    async def check_structure(self, params: SamplingParams, param: str | None) -> None:
        """Raises InvalidRequestError for structured output, asked for by the field `param`, that can't be compiled."""
        if self.grammars is None or params.structured_outputs is None:
            return
        if problem := await self.grammars.problem(params.structured_outputs):
            raise InvalidRequestError(problem, param=param)

    def resident(self, service: "Service") -> Resident:
        """What responses refer to that exists in the process which prepares them too, each by its own."""
        return {"model": self, "client": self.client, "tokenizer": self.prompts.tokenizer, "service": service}

    def close(self) -> None:
        """End the processes that work for it."""
        if self.grammars is not None:
            self.grammars.close()
        if self.bodies is not None:
            self.bodies.close()


def load_resident(engine_config: EngineConfig, config: ServerConfig, info: EngineInfo) -> Resident:
    """The same objects in a process that only prepares: there is no engine."""
    text = load_text_side(engine_config, config.chat_template)
    model = ServedModel.of(engine_config, config, info, text, cast(EngineClient, object()))
    return model.resident(cast("Service", object()))
