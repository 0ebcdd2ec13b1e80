"""`octavo`: picks the command, and turns errors into one line and an exit status. 2: the command line; 1: the rest."""

import sys
from collections.abc import Sequence

from octavo import __version__
from octavo.cli import bench, chat, serve
from octavo.cli.arguments import Parser, parse
from octavo.errors import ConfigError, OctavoError

__all__ = ["main"]


def build_parser() -> Parser:
    parser = Parser(prog="octavo", description="LLM inference and serving: paged, continuous, exact.")
    parser.add_argument("-v", "--version", action="version", version=f"octavo {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for command in (serve, chat, bench):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit status."""
    try:
        args = parse(build_parser(), argv)
        status: int = args.run(args)
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return status
