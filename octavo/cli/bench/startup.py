"""`octavo bench startup`: from starting `octavo serve` to its first token, measured from outside."""

import argparse
from pathlib import Path

from octavo.cli.arguments import Parser, config_values
from octavo.cli.bench.offline import add_engine_options, required_model
from octavo.config import EngineConfig
from octavo.errors import ConfigError

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
    from octavo.cli.bench.report import percentiles, write_json
    from octavo.cli.bench.server_start import STAGES, measure_start

    runs: list[dict[str, float]] = []
    for iteration in range(args.num_iters_warmup + args.num_iters):
        seconds = measure_start([model, *_engine_arguments(args)], args.start_timeout)
        print("  ".join(f"{stage} {seconds[stage]:.2f} s" for stage in STAGES))
        if iteration >= args.num_iters_warmup:
            runs.append(seconds)
    values = {stage: [seconds[stage] for seconds in runs] for stage in STAGES}
    print("Median seconds from the command on:")
    for stage in STAGES:
        print(f"  {stage:<12} {percentiles(values[stage])['50']:.2f}")
    if args.output_json:
        ready = values["ready"]
        result = {
            "avg_startup_time": sum(ready) / len(ready),
            "startup_times": ready,
            "startup_percentiles": percentiles(ready),
            "port_open_times": values["port open"],
            "first_token_times": values["first token"],
        }
        write_json(args.output_json, result)
    return 0


def _engine_arguments(args: argparse.Namespace) -> list[str]:
    arguments = []
    for name, value in config_values(args, EngineConfig).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            arguments.append(f"--{option}={value}")
    return arguments
