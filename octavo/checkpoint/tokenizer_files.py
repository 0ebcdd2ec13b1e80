"""What others than the tokenizer ask of a folder's tokenizer files: chat templates, ends of turns, number of tokens.

Knows nothing of tokenisation.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from octavo.checkpoint.turn_ends import written_turn_ends
from octavo.errors import CheckpointError

__all__ = ["TokenFacts", "chat_templates", "default_template", "read_json", "read_token_facts", "read_tokenizer_config"]

DEFAULT = "default"


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = []


class _TokenizerFile(msgspec.Struct):
    """What of tokenizer.json is asked for; the rest is skipped."""

    model: _Model
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, slots=True)
class TokenFacts:
    num_tokens: int | None
    """The highest id of a token, plus one; None where it can't be told."""
    turn_end_ids: tuple[int, ...]
    """Known ends of a turn that the default chat template writes."""


def read_token_facts(folder: Path) -> TokenFacts:
    """Damaged files give nothing here: loading the tokenizer says what is wrong with them."""
    try:
        config = read_tokenizer_config(folder)
        template = default_template(chat_templates(folder, config)) or ""
        file = msgspec.json.decode((folder / "tokenizer.json").read_bytes(), type=_TokenizerFile)
        listed = {token["content"]: int(key) for key, token in config.get("added_tokens_decoder", {}).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, CheckpointError):
        return TokenFacts(None, ())
    added = listed | {token.content: token.id for token in file.added_tokens}
    vocabulary = file.model.vocab
    last = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    ends = written_turn_ends(template)
    turn_end_ids = tuple(token_id for content, token_id in added.items() if content in ends)
    return TokenFacts(max(last, *added.values(), -1) + 1 + _num_unlisted(config, added), turn_end_ids)


def _num_unlisted(config: Mapping[str, Any], added: Mapping[str, int]) -> int:
    """At most so many tokens follow that only have a name."""
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    named = [value for key, value in config.items() if key.endswith("_token") and isinstance(value, str | dict)]
    texts = (token["content"] if isinstance(token, dict) else token for token in (*named, *extra))
    return sum(text not in added for text in set(texts))


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json; special_tokens_map.json counts only where the first does not list the added tokens."""
    config = read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" in config:
        return config
    return config | read_json(path / "special_tokens_map.json")


def read_json(path: Path) -> dict[str, Any]:
    """The file's object; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(data).__name__}.")
    return data


def chat_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The folder's templates by name: files of their own before the entry in tokenizer_config.json, `config`.

    An entry is one template, the default, or several: an object of names and templates, or a list of such pairs.
    """
    given = read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(given, list):
        given = {entry["name"]: entry["template"] for entry in given if isinstance(entry, dict) and len(entry) >= 2}
    elif not isinstance(given, dict):
        given = {} if given is None else {DEFAULT: given}
    for name, template in given.items():
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(f"{path}: the chat template {str(name)[:80]!r} is not a string.")
    files = {DEFAULT: path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    return given | {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}


def default_template(templates: Mapping[str, str]) -> str | None:
    """The one called so, or the only one."""
    only = next(iter(templates.values())) if len(templates) == 1 else None
    return templates.get(DEFAULT, only)
