"""`octavo bench startup`: from starting `octavo serve` to its first token, measured from outside."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.arguments import Parser, config_values
from octavo.cli.bench.offline import add_engine_options, required_model
from octavo.errors import ConfigError
from octavo.options import EngineConfig

if TYPE_CHECKING:
    from octavo.cli.bench.server_start import Start

__all__ = ["configure"]


def configure(parser: Parser) -> None:
    parser.usage = "%(prog)s [options]"
    parser.description = (
        "Start `octavo serve` again and again; time to the open port, to readiness and to the first token."
    )
    parser.add_argument("--num-iters-warmup", type=int, default=0, metavar="N", help="Not counted. Default: 0.")
    parser.add_argument("--num-iters", type=int, default=3, metavar="N", help="Counted. Default: 3.")
    parser.add_argument("--start-timeout", type=float, default=600.0, metavar="S", help="Default: 600 seconds.")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="Save the result here.")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.num_iters < 1:
        raise ConfigError(f"--num-iters must be at least 1, got {args.num_iters}.")
    model = required_model(args)
    EngineConfig(**config_values(args, EngineConfig) | {"model": model})  # a wrong value is refused before any start
    from octavo.cli.bench.server_start import MILESTONES, measure_start

    command = [sys.executable, "-m", "octavo", "serve", model, *_engine_arguments(args)]
    starts = []
    for iteration in range(args.num_iters_warmup + args.num_iters):
        start = measure_start(command, args.start_timeout)
        print("  ".join(f"{name} {start.seconds[name]:.2f} s" for name in MILESTONES), flush=True)
        if iteration >= args.num_iters_warmup:
            starts.append(start)
    _report(starts, args.output_json)
    return 0


def _report(starts: "Sequence[Start]", output_json: Path | None) -> None:
    from octavo.cli.bench.report import percentiles, print_rows, print_title, write_json

    seconds = {name: [start.seconds[name] for start in starts] for name in starts[0].seconds}
    stages = {name: [start.stages[name] for start in starts] for name in starts[0].stages}
    print_title("Start, median seconds")
    print_rows({f"Command to {name}": percentiles(values)["50"] for name, values in seconds.items()})
    print_title("Stages of the engine", "-")
    print_rows({name.capitalize(): percentiles(values)["50"] for name, values in stages.items()})
    print_title("")
    if output_json:
        ready = seconds["ready"]
        result = {
            "avg_startup_time": sum(ready) / len(ready),
            "startup_times": ready,
            "startup_percentiles": percentiles(ready),
            "port_open_times": seconds["port open"],
            "first_token_times": seconds["first token"],
            "stage_times": stages,
        }
        write_json(output_json, result)


def _engine_arguments(args: argparse.Namespace) -> list[str]:
    arguments = []
    for name, value in config_values(args, EngineConfig).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments.append(f"--{option}={value}")
    return arguments
