"""Hostile bodies for every field of every POST route, made from /openapi.json alone.

A value is JSON text, so that it can repeat keys, nest beyond any parser and hold lone surrogates. Sizes are in bytes.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

__all__ = ["Adversary", "Case"]

FIRST_ID = 16
"""The scripted engine takes some ids below for instructions."""
MAX_CHOICES = 128
NUM_PROMPTS = 2048
MAX_DEPTH = 5
"""Levels of declared objects within one another that are followed."""

Schema = Mapping[str, Any]
Write = Callable[[int], str]
"""JSON text of about so many bytes."""


def _repeated(start: str, item: str, end: str) -> Write:
    return lambda size: start + (item * (size // len(item)))[:-1] + end


def _numbered(start: str, item: str, end: str, most: int = 2**31) -> Write:
    """`item` has a place for a number below `most`."""

    def write(size: int) -> str:
        parts = (item % number for number in range(FIRST_ID, min(size // (len(item) + 4), most)))
        return f"{start}{','.join(parts)}{end}"

    return write


def _nested(start: str, end: str) -> Write:
    return lambda size: start * (size // len(start + end)) + end * (size // len(start + end))


def _text(piece: str) -> Write:
    return lambda size: f'"{piece * (size // len(piece.encode()))}"'


TEXTS: Mapping[str, Write] = {
    "a letter": _text("a"),
    "words": _text("The quick, brown fox. "),
    "spaces": _text(" "),
    "escapes": _text("\\u00e9"),
    "emoji": _text("\U0001f600"),
    "lone surrogates": _text("\\ud800"),
}
ANYTHING: Mapping[str, Write] = {
    **{f"a text of {name}": write for name, write in TEXTS.items()},
    "a lone surrogate": lambda size: '"\\ud800"',
    "an integer of 4000 digits": lambda size: "9" * 4000,
    "an endless integer": lambda size: "9" * size,
    "minus one": lambda size: "-1",
    "a float without end": lambda size: "1e999",
    "NaN": lambda size: "NaN",
    "zeros": _repeated("[", "0,", "]"),
    "zeros and a text": _repeated("[", "0,", ',"x"]'),
    "numbers": _numbered("[", "%d", "]"),
    "empty texts": _repeated("[", '"",', "]"),
    "texts": _numbered("[", '"%d"', "]"),
    "nulls": _repeated("[", "null,", "]"),
    "empty objects": _repeated("[", "{},", "]"),
    "empty lists": _repeated("[", "[],", "]"),
    "lists of one": _repeated("[", "[0],", "]"),
    "deep lists": _nested("[", "]"),
    "lists 400 deep": lambda size: _nested("[", "]")(800),
    "deep objects": lambda size: _nested('{"a":', "}")(size).replace(":}", ":0}", 1),
    "numbered keys": _numbered("{", '"%d":1', "}"),
    "256 numbers": _numbered("[", "%d", "]", 256),
    "256 numbered keys": _numbered("{", '"%d":1', "}", 256),
    "40000 numbers": _numbered("[", "%d", "]", 40_000),
    "40000 numbered keys": _numbered("{", '"%d":1', "}", 40_000),
    "one key again and again": _repeated("{", '"0":1,', "}"),
    "a long key": lambda size: '{"' + "k" * size + '":0}',
}
"""What any field may be sent, whatever its type."""


@dataclass(frozen=True)
class Case:
    path: str
    description: str
    write: Callable[[], str]

    @cached_property
    def body(self) -> bytes:
        return self.write().encode()

    def __str__(self) -> str:
        return f"{self.path} {self.description}"


class Adversary:
    """All cases of a server whose /openapi.json is `document`."""

    def __init__(self, document: Schema) -> None:
        self._document = document

    def cases(self, size: int) -> Iterator[Case]:
        """Each field of each route with each value, together with different multipliers by turns."""
        turns = count()
        for path, operations in self._document["paths"].items():
            if "post" not in operations:
                continue
            content = operations["post"]["requestBody"]["content"]
            schema = self._resolved(content["application/json"]["schema"])
            for field, of_field in schema["properties"].items():
                for name, write in {**ANYTHING, **dict(self._grown(of_field))}.items():
                    multipliers = self._multipliers(schema)
                    multiplier = list(multipliers)[next(turns) % len(multipliers)]
                    fields = self._least_fields(schema) | multipliers[multiplier] | {field: write}
                    yield Case(path, f"{field}: {name}, {size} bytes{multiplier}", _body(fields, size))
            extra = self._least_fields(schema) | {"unknown": ANYTHING["empty objects"]}
            yield Case(path, f"an unknown field, {size} bytes", _body(extra, size))
            yield Case(path, f"only unknown fields, {size} bytes", lambda: ANYTHING["numbered keys"](size))
            for name in ("zeros", "deep lists", "a text of words"):
                yield Case(path, f"{name} for a body, {size} bytes", lambda write=ANYTHING[name]: write(size))

    def _multipliers(self, schema: Schema) -> dict[str, dict[str, Write]]:
        found: dict[str, dict[str, Write]] = {"": {}}
        if "n" in schema["properties"]:
            found[f" n={MAX_CHOICES}"] = {"n": lambda size: str(MAX_CHOICES)}
            found[" n=16 streamed"] = {"n": lambda size: "16", "stream": lambda size: "true"}
        for name in schema.get("required", ()):
            kinds = {kind.get("type") for kind in self._alternatives(schema["properties"][name])}
            if {"string", "array"} <= kinds:
                found[f" {NUM_PROMPTS} times {name}"] = {name: lambda size: json.dumps(["a"] * NUM_PROMPTS)}
        return found

    def _least_fields(self, schema: Schema) -> dict[str, Write]:
        least = {name: self._least(schema["properties"][name]) for name in schema.get("required", ())}
        if "max_tokens" in schema["properties"]:
            least["max_tokens"] = "4"
        return {name: lambda size, text=text: text for name, text in least.items()}

    def _least(self, schema: Schema, depth: int = 0) -> str:
        """The smallest value that a schema allows; objects have a property more than they must."""
        schema = self._alternatives(schema)[0]
        if "enum" in schema or "const" in schema:
            return json.dumps(schema["const"] if "const" in schema else schema["enum"][0])
        match schema.get("type"):
            case "string":
                return '"a"'
            case "array":
                return f"[{self._least(schema.get('items', {}), depth + 1)}]"
            case "object" if "properties" in schema and depth < MAX_DEPTH:
                required = schema.get("required", ())
                names = [*required, *[name for name in schema["properties"] if name not in required][:1]]
                parts = (f"{json.dumps(name)}:{self._least(schema['properties'][name], depth + 1)}" for name in names)
                return f"{{{','.join(parts)}}}"
            case "object":
                return "{}"
            case "boolean":
                return "true"
            case "null":
                return "null"
        return "1"

    def _grown(self, schema: Schema, depth: int = 0) -> Iterator[tuple[str, Write]]:
        """Values that a schema allows, each large in another place."""
        for kind in self._alternatives(schema):
            match kind.get("type"):
                case "string" if depth and "enum" not in kind and "const" not in kind:
                    for name in ("words", "spaces"):
                        yield f"a text of {name}", TEXTS[name]
                case "array":
                    item = self._least(kind.get("items", {}))
                    yield f"many {item}", _repeated("[", f"{item},", "]")
                    for name, write in self._grown(kind.get("items", {}), depth + 1):
                        yield f"[{name}]", lambda size, write=write: f"[{write(size)}]"
                case "object" if depth < MAX_DEPTH:
                    yield from self._grown_object(kind, depth)

    def _grown_object(self, schema: Schema, depth: int) -> Iterator[tuple[str, Write]]:
        properties = schema.get("properties", {})
        for grown in properties:
            least = {name: self._least(properties[name]) for name in schema.get("required", ()) if name != grown}
            for name, write in self._grown(properties[grown], depth + 1):
                parts = [f"{json.dumps(key)}:{text}" for key, text in least.items()]
                start = "{" + "".join(f"{part}," for part in parts) + f"{json.dumps(grown)}:"
                yield f"{{{grown}: {name}}}", lambda size, start=start, write=write: start + write(size) + "}"
        if schema.get("additionalProperties"):
            least = {name: self._least(properties[name]) for name in schema.get("required", ())}
            start = "{" + "".join(f"{json.dumps(key)}:{text}," for key, text in least.items())
            for name in ("numbered keys", "empty objects", "deep lists", "a text of words"):
                write = ANYTHING[name]
                yield f"{{...: {name}}}", lambda size, s=start, w=write: f'{s}"more":{w(size)}}}'

    def _alternatives(self, schema: Schema) -> list[Schema]:
        schema = self._resolved(schema)
        return [one for part in schema["anyOf"] for one in self._alternatives(part)] if "anyOf" in schema else [schema]

    def _resolved(self, schema: Schema) -> Schema:
        while "$ref" in schema:
            schema = self._document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
        return schema


def _body(fields: Mapping[str, Write], size: int) -> Callable[[], str]:
    return lambda: "{" + ",".join(f"{json.dumps(name)}:{write(size)}" for name, write in fields.items()) + "}"
