"""Random requests for benchmarks: token ids drawn from a seed, so that a run can be repeated anywhere."""

import argparse
import random
from dataclasses import dataclass

from octavo.cli.arguments import Parser
from octavo.errors import ConfigError

__all__ = ["BenchRequest", "add_dataset_options", "as_text", "check_dataset_options", "random_requests"]

DEFAULT_VOCAB_SIZE = 10_000
"""Token ids below this exist in the models that are benchmarked, when the real size is not known."""

WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "it", "was", "for", "on", "are", "as", "with", "his", "they",
    "at", "be", "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were", "when", "we",
    "there", "can", "an", "your", "which",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt_token_ids: list[int]
    output_len: int


def add_dataset_options(parser: Parser, *, input_len: int, output_len: int, num_prompts: int) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--dataset-name", default="random", metavar="NAME", help="Only random is supported.")
    group.add_argument("--dataset-path", metavar="PATH", help=argparse.SUPPRESS)
    group.add_argument("--num-prompts", type=int, default=num_prompts, metavar="N", help=f"Default: {num_prompts}.")
    group.add_argument(
        "--random-input-len",
        "--input-len",
        type=int,
        default=input_len,
        metavar="N",
        help=f"Prompt tokens a request, without the prefix. Default: {input_len}.",
    )
    group.add_argument(
        "--random-output-len",
        "--output-len",
        type=int,
        default=output_len,
        metavar="N",
        help=f"Output tokens a request. Default: {output_len}.",
    )
    group.add_argument(
        "--random-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="Tokens that all prompts begin with, before those of their own. Default: 0.",
    )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="Lengths are drawn from [len * (1 - R), len * (1 + R)]. Default: 0.",
    )


def check_dataset_options(args: argparse.Namespace) -> None:
    """Raises ConfigError; called before anything is loaded."""
    if args.dataset_name != "random" or args.dataset_path is not None:
        raise ConfigError(f"--dataset-name {args.dataset_name}: only random is supported.")
    if args.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {args.num_prompts}.")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {args.random_range_ratio}.")
    if args.random_input_len + args.random_prefix_len < 1 or args.random_output_len < 1:
        raise ConfigError("--random-input-len (with --random-prefix-len) and --random-output-len must be at least 1.")


def random_requests(args: argparse.Namespace, vocab_size: int | None = None) -> list[BenchRequest]:
    """The requests that the options ask for; the same seed gives the same ones. Raises ConfigError."""
    check_dataset_options(args)
    generator = random.Random(args.seed)
    tokens = range(vocab_size or DEFAULT_VOCAB_SIZE)
    prefix = generator.choices(tokens, k=args.random_prefix_len)

    def length(middle: int) -> int:
        spread = int(middle * args.random_range_ratio)
        return generator.randint(max(middle - spread, 0 if prefix else 1), middle + spread)

    return [
        BenchRequest(
            prefix + generator.choices(tokens, k=length(args.random_input_len)),
            max(length(args.random_output_len), 1),
        )
        for _ in range(args.num_prompts)
    ]


def as_text(request: BenchRequest) -> str:
    """Common words, about one token each, for servers that take only text."""
    return " ".join(WORDS[token_id % len(WORDS)] for token_id in request.prompt_token_ids)
