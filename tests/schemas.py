"""JSON schemas drawn at random: the same for the same seed."""

import random
from typing import Any

__all__ = ["random_schema"]

PATTERNS = ["^[a-f]{2,4}$", "^(red|green)-[0-9]{1,3}$", "x[yz]+", "^\\d{3}-\\d{4}$", "^[A-Z][a-z]*( [A-Z][a-z]*)?$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email", "hostname", "made-up"]


def random_schema(seed: int) -> dict[str, Any]:
    """An object or another value; every string and array has a length limit, so that most answers end."""
    rng = random.Random(seed)
    definitions: dict[str, Any] = {}
    schema = _schema(rng, 3, definitions)
    if definitions:
        schema = {"$defs": definitions, **schema}
    return schema


def _schema(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    kinds = [_integer, _number, _string, _enum, _literal]
    if depth:
        kinds += [_object, _object, _object, _array, _any_of, _reference]
    return rng.choice(kinds)(rng, depth, definitions)


def _integer(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    schema: dict[str, Any] = {"type": "integer"}
    if rng.random() < 0.7:
        schema |= {rng.choice(["minimum", "exclusiveMinimum"]): low, "maximum": low + rng.randint(20, 5000)}
    if rng.random() < 0.3:
        schema["multipleOf"] = rng.choice([2, 5, 7])
    return schema


def _number(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    low = round(rng.uniform(-100, 100), 2)
    high = round(low + rng.uniform(1, 50), 2)
    bounds = {"minimum": low, rng.choice(["maximum", "exclusiveMaximum"]): high}
    return {"type": "number"} | (bounds if rng.random() < 0.7 else {})


def _string(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    match rng.randrange(3):
        case 0:
            return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 24}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS), "maxLength": 40}
    low = rng.randint(0, 5)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 12)}


def _enum(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    return {"enum": rng.sample(["red", "", 'a "quoted"\n', "naïve 😀", "</s>", 3, -1.5, None, True, [1, "x"]], 3)}


def _literal(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    return rng.choice([{"const": {"k": [1, 2]}}, {"type": ["boolean", "null"]}, {"type": "boolean"}, {"const": "<s>"}])


def _object(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    names = rng.sample(["name", "age", "id", "näme", "a b", 'q"t', "tags", "x"], rng.randint(1, 4))
    properties = {name: _schema(rng, depth - 1, definitions) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if rng.random() < 0.15:
        schema = {"type": "object", "additionalProperties": _integer(rng, 0, definitions), "maxProperties": 2}
    return schema


def _array(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    low = rng.randint(0, 2)
    schema = {"type": "array", "items": _schema(rng, depth - 1, definitions), "minItems": low, "maxItems": low + 2}
    if rng.random() < 0.3:
        prefix = [_schema(rng, depth - 1, definitions) for _ in range(2)]
        schema = {"type": "array", "prefixItems": prefix, "items": False, "minItems": 2}
    return schema


def _any_of(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, depth - 1, definitions) for _ in range(rng.randint(2, 3))]}


def _reference(rng: random.Random, depth: int, definitions: dict[str, Any]) -> dict[str, Any]:
    """To a definition, which may be a list that refers to itself."""
    name = f"d{len(definitions)}"
    definitions[name] = {}
    if rng.random() < 0.3:
        nested = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
        properties = {"value": _integer(rng, 0, definitions), "next": nested}
        definitions[name] = {"type": "object", "properties": properties, "required": ["value", "next"]}
        definitions[name]["additionalProperties"] = False
    else:
        definitions[name] = _schema(rng, depth - 1, definitions)
    return {"$ref": f"#/$defs/{name}"}
