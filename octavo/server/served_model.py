"""ServedModel: the model that a server serves, as its handlers know it."""

from dataclasses import dataclass

from octavo.api.engine_client import EngineClient
from octavo.errors import InvalidRequestError
from octavo.ipc.messages import EngineInfo
from octavo.sampling_params import SamplingParams
from octavo.server.grammar_check import GrammarChecker
from octavo.server.limits import Limits
from octavo.server.prompts import PromptMaker
from octavo.text.reasoning import ReasoningFormat
from octavo.text.tool_calls import ToolFormat

__all__ = ["ServedModel"]


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
    is_strict: bool = False
    """Whether fields that nobody knows are refused."""

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
