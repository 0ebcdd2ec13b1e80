"""Fifty schemas, regular expressions and grammars that are malformed, contradictory, deep, huge or explosive.

`REFUSED` can only be answered by a 400. For `EITHER` an answer that obeys is as good. All are fields of
`structured_outputs`.
"""

import itertools
import string
from typing import Any

__all__ = ["EITHER", "REFUSED", "definitions"]

NAMES = ["".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=3)]


def _chain(first: str, names: list[str]) -> str:
    rules = [f"{name}: {following}" for name, following in itertools.pairwise(names)]
    return "\n".join([f"start: {first}", *rules, f'{names[-1]}: "a"'])


def _doubled(names: list[str]) -> str:
    rules = [f"{name}: {following} {following}" for name, following in itertools.pairwise(names)]
    return "\n".join([f"start: {names[0]}", *rules, f'{names[-1]}: "a"'])


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + '{"type":"null"}' + "}" * depth


def definitions(depth: int, keyword: str, last: dict[str, Any]) -> dict[str, Any]:
    """Each level refers twice to the next."""
    two = {i: [{"$ref": f"#/$defs/{i + 1}"}] * 2 for i in range(depth)}
    return {"$ref": "#/$defs/0", "$defs": {**{str(i): {keyword: both} for i, both in two.items()}, str(depth): last}}


REFUSED: dict[str, dict[str, Any]] = {
    "json that is none": {"json": "{nope"},
    "json that is empty": {"json": ""},
    "json that is a list": {"json": "[1, 2]"},
    "json with a lone surrogate": {"json": '{"const": "\\ud800"}'},
    "nested beyond the parser": {"json": _nested(5000)},
    "a type that is none": {"json": {"type": "wibble"}},
    "a type that is a number": {"json": {"type": 5}},
    "properties in a list": {"json": {"type": "object", "properties": [1]}},
    "a negative length": {"json": {"type": "string", "minLength": -5}},
    "bounds that exclude all": {"json": {"type": "integer", "minimum": 5, "maximum": 1}},
    "a number out of range": {"json": '{"minimum": ' + "9" * 400 + "}"},
    "a number of many digits": {"json": '{"minimum": ' + "9" * 9000 + "}"},
    "a multiple of nothing": {"json": {"type": "integer", "multipleOf": 0}},
    "a multiple with a million states": {"json": {"type": "integer", "multipleOf": 1000003}},
    "a reference to the network": {"json": {"$ref": "http://127.0.0.1:9/schema.json"}},
    "a reference to a file": {"json": {"$ref": "file:///etc/passwd"}},
    "a reference beside an id": {"json": {"$id": "http://127.0.0.1:9/x/", "$ref": "y"}},
    "a reference to nothing": {"json": {"$ref": "#/$defs/none"}},
    "a reference to itself": {"json": {"$ref": "#"}},
    "references in a circle": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "all of itself": {"json": {"allOf": [{"$ref": "#"}]}},
    "a schema of 2 MB": {"json": {"enum": [f"value {i}" for i in range(150_000)]}},
    "a product of choices": {
        "json": {
            "allOf": [
                {"anyOf": [{"required": [f"p{i}{j}"], "properties": {f"p{i}{j}": {}}} for j in range(4)]}
                for i in range(12)
            ]
        }
    },
    "a pattern that is open": {"json": {"type": "string", "pattern": "("}},
    "an open regex": {"regex": "(["},
    "a regex that looks ahead": {"regex": "(?=a)b"},
    "a regex that looks back": {"regex": r"(a)\1"},
    "a regex nested 5000 deep": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "a regex that matches nothing": {"regex": r"[^\x00-\x{10FFFF}]"},
    "a regex of a million letters": {"regex": "a{1000000}"},
    "a regex of a billion letters": {"regex": "((a{1000}){1000}){1000}"},
    "a regex that grows late": {"regex": "(b|c)(d|e)((a{1000}){1000}){1000}"},
    "a grammar without rules": {"grammar": ""},
    "a grammar with an unknown name": {"grammar": "start: nope"},
    "a grammar that imports a file": {"grammar": '%import "/etc/passwd"\nstart: "a"'},
    "a grammar that never ends": {"grammar": 'start: "a" start'},
    "a grammar of itself": {"grammar": "start: start"},
    "a terminal of itself": {"grammar": "start: A\nA: A"},
    "brackets nested 20000 deep": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "GBNF nested 5000 deep": {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "terminals that double": {"grammar": _doubled([name.upper() for name in NAMES[:30]])},
    "a token that is none": {"grammar": "start: <[99999999]>"},
    "no choices": {"choice": []},
    "everything at once": {"json": {}, "regex": "a"},
}

EITHER: dict[str, dict[str, Any]] = {
    "rules chained 12000 deep": {"grammar": _chain(NAMES[0], NAMES[:12_000])},
    "definitions that double": {"json": definitions(30, "allOf", {"type": "boolean"})},
    "alternatives that double": {"json": definitions(30, "anyOf", {"type": "boolean"})},
    "two thousand properties": {
        "json": {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}
    },
    "a grammar of every reading": {"grammar": 'start: start start | start "a" | "b" | '},
    "a regex of a thousand wildcards": {"regex": ".*" * 1000 + "x"},
    "ten thousand choices": {"choice": [f"choice {i}" for i in range(8000)]},
    "loops in loops": {"regex": "((((((((((a*)*)*)*)*)*)*)*)*)*)*b"},
}
