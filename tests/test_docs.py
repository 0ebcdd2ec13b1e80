"""Generated pages are current, and what the documentation points to is there."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_options_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate_options", ROOT / "docs" / "generate_options.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python docs/generate_options.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_every_kind_of_failure_in_the_field_names_tests_that_exist() -> None:
    lines = (ROOT / "docs/field_failures.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith("| kind")]
    named = [re.findall(r"`([\w/]+\.py)::(\w+)`", row) for row in rows]
    assert all(named)
    for path, name in (test for tests in named for test in tests):
        body = ast.parse((ROOT / "tests" / path).read_text()).body
        functions = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in functions, f"{path} has no {name}"
