"""docs/field_failures.md names a test for each kind of failure; here it is checked that those tests are there."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [
    line.strip("|").split("|")
    for line in (TESTS.parent / "docs/field_failures.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| kind")
]


def test_every_kind_is_listed() -> None:
    assert len(ROWS) == 25


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip())
def test_each_kind_has_tests_that_exist(row: list[str]) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])
    assert named
    for path, name in named:
        tree = ast.parse((TESTS / path).read_text())
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{path} has no {name}"
