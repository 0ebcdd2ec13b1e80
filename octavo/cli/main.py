"""`octavo`: picks the command, and turns errors into one line and an exit status. 2: the command line; 1: the rest."""

import sys
from collections.abc import Sequence

from octavo import __version__
from octavo.cli.arguments import Parser, add_commands, dashed, parse
from octavo.errors import ConfigError, OctavoError

__all__ = ["main"]


COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "chat": "talk to a model in the terminal",
    "bench": "measure throughput, latency, a server, a start",
}


def build_parser(argv: list[str]) -> Parser:
    """The parser for `argv`: of the commands, only the one it names is imported."""
    parser = Parser(prog="octavo", description="LLM inference and serving: paged, continuous, exact.")
    parser.add_argument("-v", "--version", action="version", version=f"octavo {__version__}")
    add_commands(parser, "octavo.cli", COMMANDS, argv)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's) and return the exit status."""
    arguments = [dashed(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    try:
        args = parse(build_parser(arguments), arguments)
        status: int = args.run(args)
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    return status
