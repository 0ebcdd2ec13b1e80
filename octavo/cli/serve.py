"""`octavo serve MODEL`: the OpenAI server."""

import argparse

from octavo.cli.arguments import Parser, add_config_options, add_model_option, config_values, model_argument
from octavo.cli.retired import add_retired_options
from octavo.errors import ConfigError
from octavo.options import EngineConfig
from octavo.server.options import ServerConfig

__all__ = ["configure"]


def configure(parser: Parser) -> None:
    parser.usage = "%(prog)s MODEL [options]"
    parser.description = "Serve a model over the OpenAI API."
    parser.epilog = (
        "vLLM's other options are accepted where they would change nothing but speed, and refused with the reason "
        "where not."
    )
    add_model_option(parser)
    add_config_options(parser, ServerConfig, "server")
    add_config_options(parser, EngineConfig, "engine", skip=("model",))
    add_retired_options(parser)
    parser.set_defaults(run=run)


def configs(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig]:
    """Raises ConfigError for a missing model or a value out of range."""
    model = model_argument(args)
    if model is None:
        raise ConfigError("octavo serve needs a model: a Hugging Face folder, a .gguf file or a Hub name.")
    engine_values = config_values(args, EngineConfig) | {"model": model}
    return EngineConfig(**engine_values), ServerConfig(**config_values(args, ServerConfig))


def run(args: argparse.Namespace) -> int:
    engine_config, server_config = configs(args)
    from octavo.server.launch import serve

    status: int = serve(engine_config, server_config)
    return status
