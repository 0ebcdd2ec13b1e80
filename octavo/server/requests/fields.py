"""ApiRequest: the fields that all requests have, and what becomes of those that octavo does not serve.

Types are checked here, ranges in `SamplingParams`. Limits of the vocabulary and the context are checked later.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from octavo.errors import InvalidRequestError

__all__ = ["HARMLESS", "UNSUPPORTED", "ApiRequest", "Fields"]

HARMLESS = frozenset(
    [
        "guided_decoding_backend",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "verbosity",
    ]
)
"""Fields that clients send and that change nothing in what octavo answers."""

UNSUPPORTED = {
    "audio": "audio output",
    "kv_transfer_params": "moving KV between engines",
    "logits_processors": "logits processors of a request's own",
    "modalities": "output other than text",
    "prediction": "predicted outputs",
    "prompt_embeds": "prompts given as embeddings",
    "suffix": "filling in before a suffix",
    "web_search_options": "web search",
}
"""Fields that would change the answer, and what they ask for."""

NEUTRAL: Mapping[str, Sequence[Any]] = {
    "modalities": [["text"]],
}
"""Values of these fields that ask for nothing, beside null, false and empty ones."""


def _stop_at_faults(part: Any) -> None:
    if isinstance(part, dict):
        if part.get("type") in ("list", "dict"):
            part["fail_fast"] = True
        part = list(part.values())
    if isinstance(part, list):
        for inner in part:
            _stop_at_faults(inner)


class Fields(BaseModel):
    """No coercion: "5" is no number. Unknown fields are kept. A list is checked up to its first fault, so that what is
    wrong takes no longer than what is right."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        _stop_at_faults(schema)
        return schema


class ApiRequest(Fields):
    model: str | None = None
    user: str | None = None

    def warnings(self) -> list[str]:
        """What the client should know of the fields it used."""
        return []

    def unknown_fields(self) -> list[str]:
        """Fields that mean nothing here. Raises InvalidRequestError for one that octavo knows but can't serve."""
        extra = self.model_extra or {}
        for name, value in extra.items():
            wish = UNSUPPORTED.get(name)
            asks = value is not None and value is not False and value not in ("", [], {})
            if wish is not None and asks and value not in NEUTRAL.get(name, ()):
                raise InvalidRequestError(
                    f"{name} is not supported: octavo can't do {wish} yet. Leave the field out.", param=name
                )
        return [name for name in extra if name not in UNSUPPORTED and name not in HARMLESS]
