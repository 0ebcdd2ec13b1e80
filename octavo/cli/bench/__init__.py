"""`octavo bench`: measurements whose options and result fields are those of `vllm bench`."""

from typing import Any

from octavo.cli.arguments import Parser
from octavo.cli.bench import latency, serve, startup, throughput

__all__ = ["add_parser"]


def add_parser(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "bench",
        help="measure throughput, latency, a server, a start",
        description="Measure octavo or an OpenAI server.",
    )
    benchmarks = parser.add_subparsers(metavar="BENCHMARK", required=True, parser_class=Parser)
    for benchmark in (throughput, latency, serve, startup):
        benchmark.add_parser(benchmarks)
    parser.set_defaults(parser=parser)
