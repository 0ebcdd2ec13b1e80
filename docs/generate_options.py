"""Writes docs/options.md from the config dataclasses and the table of retired options."""

from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from octavo.cli.retired import RETIRED, Retired
from octavo.options import EngineConfig
from octavo.server.options import ServerConfig

PAGE = Path(__file__).with_name("options.md")
HEAD = """\
# Options

Made by `python docs/generate_options.py`; do not edit.

`octavo serve MODEL [options]` takes all of these; `octavo chat MODEL`, `octavo bench throughput`, `latency` and
`startup` take the engine's, and so does `LLM(model, ...)`, with underscores. Whole numbers understand suffixes: 8k is
8000, 8K is 8192, 2G is 2 GiB.
"""


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            HEAD,
            "## Engine\n",
            *_table(EngineConfig),
            "\n## Server\n",
            *_table(ServerConfig),
            "\n## vLLM's other options\n",
            "Accepted, and said to be without effect:\n",
            *_retired([row for row in RETIRED if row.accepts is None]),
            "\nAccepted where they ask for what octavo does anyway, otherwise refused:\n",
            *_retired([row for row in RETIRED if row.accepts]),
            "\nRefused:\n",
            *_retired([row for row in RETIRED if row.accepts == ()]),
            "",
        ]
    )


def _table(config: type[Any]) -> Iterator[str]:
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    for item in fields(config):
        name = item.name.replace("_", "-")
        option = f"`--{name}`, `--no-{name}`" if item.type is bool else f"`--{name}`"
        value = " ".join(item.default) if isinstance(item.default, tuple) else item.default
        default = "" if value in (MISSING, None, "") else f"`{value}`"
        meaning = item.metadata["help"]
        if item.metadata["choices"]:
            meaning += " One of " + ", ".join(f"`{choice}`" for choice in item.metadata["choices"]) + "."
        yield f"| {option} | {default} | {meaning} |"


def _retired(rows: list[Retired]) -> Iterator[str]:
    yield "| option | |"
    yield "|---|---|"
    for row in rows:
        names = ", ".join(f"`{name}`" for name in row.names.split())
        accepted = f" (accepted: {', '.join(f'`{value}`' for value in row.accepts)})" if row.accepts else ""
        yield f"| {names}{accepted} | {row.note[0].upper()}{row.note[1:]} |"


if __name__ == "__main__":
    PAGE.write_text(page())
