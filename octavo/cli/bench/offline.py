"""What the benchmarks of the engine in this process share: its options, and loading it."""

import argparse
import gc
from typing import TYPE_CHECKING, Any

from octavo.cli.arguments import Parser, add_config_options, add_model_option, config_values, model_argument
from octavo.cli.retired import add_retired_options
from octavo.errors import ConfigError
from octavo.options import EngineConfig

if TYPE_CHECKING:
    from octavo.llm import LLM

__all__ = ["add_engine_options", "load", "required_model"]


def add_engine_options(parser: Parser) -> None:
    add_model_option(parser)
    add_config_options(parser, EngineConfig, "engine", skip=("model",))
    add_retired_options(parser)


def required_model(args: argparse.Namespace) -> str:
    model = model_argument(args)
    if model is None:
        raise ConfigError("A model is needed: --model with a Hugging Face folder, a .gguf file or a Hub name.")
    return model


def load(args: argparse.Namespace, **defaults: Any) -> "LLM":
    """The engine with the options of the command line; `defaults` are for those that were not given."""
    model = required_model(args)
    from octavo.llm import LLM

    llm = LLM(model, **(defaults | config_values(args, EngineConfig)))
    gc.freeze()  # as a server's engine does
    return llm
