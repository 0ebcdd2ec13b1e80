"""Command-line options made from the config dataclasses, and the parser that names the closest match for a typo.

Knows nothing of what the options mean: the dataclasses check their values.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from importlib import import_module
from itertools import chain
from typing import Any, NoReturn

from octavo.errors import ConfigError

__all__ = [
    "Parser",
    "add_commands",
    "add_config_options",
    "add_model_option",
    "config_values",
    "count",
    "dashed",
    "model_argument",
    "parse",
]

METAVARS: dict[Any, str] = {int: "N", float: "X"}
SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def count(text: str) -> int:
    """An integer with an optional suffix: 1k is 1000, 1K is 1024, 2G is 2 GiB, 1.5k is 1500. Raises ValueError."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)(?:([kmgtKMGT])(?:i?B)?)?", text)
    if match is None:
        raise ValueError(f"{text!r} is not a number")
    digits, suffix = match.groups()
    value = round((float(digits) if "." in digits else int(digits)) * SUFFIXES.get(suffix, 1), 6)
    if value != int(value):
        raise ValueError(f"{text} is not a whole number")
    return int(value)


count.__name__ = "number"  # argparse says "invalid number value: 'x'"


def words(text: str) -> list[str]:
    """One of a list option's values, or as in vLLM all of them as a JSON list. Raises ValueError."""
    if not text.startswith("["):
        return [text]
    import json

    values: list[str] = json.loads(text)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{text} is not a list of strings")
    return values


words.__name__ = "list"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and which takes no abbreviations: a typo must not pick an option."""

    def __init__(self, **kwargs: Any) -> None:
        settings: dict[str, Any] = {"formatter_class": _HelpFormatter, "allow_abbrev": False}
        super().__init__(**(settings | kwargs))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def option_names(self) -> list[str]:
        """Every long option that is shown in the help."""
        shown = (action for action in self._actions if action.help is not argparse.SUPPRESS)
        return [name for action in shown for name in action.option_strings if name.startswith("--")]

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """End with an error for arguments that no option took."""
        name = next((argument for argument in unknown if argument.startswith("-")), None)
        if name is None:
            self.error(f"unexpected argument {unknown[0]!r}. See {self.prog} --help.")
        import difflib

        close = difflib.get_close_matches(name.split("=")[0], self.option_names(), n=1, cutoff=0.5)
        hint = f"Did you mean {close[0]}?" if close else f"See {self.prog} --help."
        self.error(f"unknown option {name.split('=')[0]}. {hint}")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)


def add_commands(parser: Parser, package: str, commands: Mapping[str, str], argv: Sequence[str]) -> None:
    """Subcommands, each with its line of help. Only the one that `argv` begins with is imported, from its module in
    `package`, and configured: `configure(parser)`, or `configure(parser, argv)` where it has subcommands itself."""
    parsers = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for name, help_text in commands.items():
        command = parsers.add_parser(name, help=help_text)
        command.set_defaults(parser=command)
        if argv and argv[0] == name:
            module = import_module(f"{package}.{name}")
            if hasattr(module, "__path__"):
                module.configure(command, argv[1:])
            else:
                module.configure(command)


def parse(parser: Parser, argv: Sequence[str]) -> argparse.Namespace:
    """As parse_args, but an unknown option's error names the closest of the command's own options."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        getattr(args, "parser", parser).refuse(unknown)
    return args


def dashed(argument: str) -> str:
    """--max_model_len=8k -> --max-model-len=8k, as in vLLM."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def add_config_options(parser: Parser, config: type[Any], title: str, *, skip: Sequence[str] = ()) -> None:
    """One option for each field of `config`, in a group of its own in the help."""
    group = parser.add_argument_group(title)
    for item in fields(config):
        if item.name not in skip:
            _add_option(group, item)


def _add_option(group: Any, item: "Field[Any]") -> None:
    is_list = getattr(item.type, "__origin__", None) is tuple
    kinds = (words,) if is_list else getattr(item.type, "__args__", (item.type,))
    kind = next(kind for kind in kinds if kind is not type(None))
    help_text = item.metadata["help"].replace("%", "%%")
    if isinstance(item.default, tuple) and item.default:
        help_text += f" Default: {' '.join(item.default)}."
    elif item.default not in (None, MISSING, ()) and kind is not bool:
        help_text += f" Default: {item.default}."
    details: dict[str, Any] = {"dest": item.name, "help": help_text, "default": argparse.SUPPRESS}
    if kind is bool:
        details["action"] = argparse.BooleanOptionalAction
        details["help"] += f" Default: {'on' if item.default else 'off'}."
    else:
        details["nargs"] = "+" if is_list else None
        details["type"] = count if kind is int else kind
        details["metavar"] = item.metadata["metavar"] or METAVARS.get(kind, "TEXT")
    if item.metadata["choices"]:
        details["choices"] = item.metadata["choices"]
        details["metavar"] = "{" + ",".join(item.metadata["choices"]) + "}"
    group.add_argument("--" + item.name.replace("_", "-"), **details)


def config_values(args: argparse.Namespace, config: type[Any]) -> dict[str, Any]:
    """The fields of `config` that were given on the command line."""
    given = {item.name: getattr(args, item.name) for item in fields(config) if hasattr(args, item.name)}
    return {name: tuple(chain(*value)) if isinstance(value, list) else value for name, value in given.items()}


def add_model_option(parser: Parser) -> None:
    """The model, as an argument or as --model."""
    kinds = "Hugging Face folder, .gguf file, or Hub name (org/name, org/name:file.gguf)."
    parser.add_argument("model_tag", metavar="MODEL", nargs="?", help=kinds)
    parser.add_argument("--model", dest="model_option", metavar="MODEL", help="The same as an option.")


def model_argument(args: argparse.Namespace) -> str | None:
    """The model given either way; None if neither."""
    if args.model_tag and args.model_option and args.model_tag != args.model_option:
        raise ConfigError(f"Two models were given: {args.model_tag} and --model {args.model_option}. Give one.")
    model: str | None = args.model_tag or args.model_option
    return model
