"""The limits that keep the code readable, counted in its source. What exceeds one is named here, with the reason."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from octavo.core.request import Request
from octavo.core.step import SchedulerOutput

ROOT = Path(__file__).parents[1]
MAX_ATTRIBUTES = 12
MAX_METHODS = 25
MAX_LINES = 400

LARGE_CLASSES = {
    "octavo/checkpoint/checkpoint.py:Vocabulary": "one field for each part of a tokenizer that a GGUF file stores",
    "octavo/core/scheduler_stats.py:SchedulerStats": "one field for each counter that is exported",
    "octavo/core/request.py:Request": "its slots have a limit of their own",
    "octavo/core/scheduler_config.py:SchedulerConfig": "one field for each limit and policy",
    "octavo/options.py:EngineConfig": "one field an option",
    "octavo/sampling_params.py:SamplingParams": "one field for each parameter of a request",
    "octavo/server/options.py:ServerConfig": "one field an option",
    "octavo/server/requests/sampling.py:SamplingRequest": "one field for each parameter of a request",
    "octavo/checkpoint/model_config.py:ModelConfig": "one field for each thing that the engine asks of any model",
}
LONG_FILES = {
    "csrc/cpu/ops.h": "the one list of all ops and their arguments",
    "csrc/cpu/tests/check.cpp": "one case for each op, and what compares them",
}
FILES_WITH_DEVICE_NAMES = {
    "octavo/cli/retired.py": "the values that a user types after vLLM's --device",
}
MAX_REQUEST_SLOTS = 16


def files(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> Iterator[tuple[str, str]]:
    """(path, text) of every source file."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path.relative_to(ROOT).as_posix(), path.read_text()


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path, text in files("octavo"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                yield f"{path}:{node.name}", node


def methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]


def attributes(node: ast.ClassDef) -> set[str]:
    """Declared fields, and what methods set on `self`."""
    declared = {ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)}
    set_by_methods = {
        item.attr
        for method in methods(node)
        for item in ast.walk(method)
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and ast.unparse(item.value) == "self"
    }
    return declared | set_by_methods


def assert_only(found: Iterable[str], allowed: dict[str, str]) -> None:
    """An exception that is no longer needed has to go, too."""
    assert set(found) == set(allowed)


def test_a_class_has_few_attributes_and_methods() -> None:
    large = [
        name for name, node in classes() if len(attributes(node)) > MAX_ATTRIBUTES or len(methods(node)) > MAX_METHODS
    ]
    assert_only(large, LARGE_CLASSES)


def test_a_request_and_a_step_are_small() -> None:
    assert len(Request.__slots__) <= MAX_REQUEST_SLOTS
    assert len(SchedulerOutput.__struct_fields__) <= 8


def test_a_file_can_be_held_in_mind() -> None:
    sources = files("octavo", "csrc", "tests", "benchmarks", suffixes=(".py", ".pyi", ".cpp", ".h"))
    assert_only((path for path, text in sources if text.count("\n") > MAX_LINES), LONG_FILES)


def test_a_device_is_named_in_its_folder_only() -> None:
    named = {
        path
        for path, text in files("octavo")
        if not path.startswith("octavo/devices/")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and str(node.value).lower() in ("cpu", "cuda")
    }
    assert_only(named, FILES_WITH_DEVICE_NAMES)


def test_the_core_names_no_option() -> None:
    assert not [path for path, text in files("octavo/core") if re.search(r"--[a-z]", text)]
