"""`octavo bench`: measurements whose options and result fields are those of `vllm bench`."""

from octavo.cli.arguments import Parser, add_commands

__all__ = ["configure"]

BENCHMARKS = {
    "throughput": "many requests at once through the engine in this process",
    "latency": "one batch through the engine in this process, again and again",
    "serve": "load on a running server",
    "startup": "from `octavo serve` to the first token",
}


def configure(parser: Parser, argv: list[str]) -> None:
    parser.description = "Measure octavo, or any OpenAI server."
    add_commands(parser, __name__, BENCHMARKS, argv)
