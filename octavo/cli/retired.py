"""vLLM's options that octavo has no need of, or does not have yet: what each says when it is used.

An option without which results and promises stay the same is accepted with its line. One that a user relies on is an
error, except for the values that ask for what octavo does anyway.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["RETIRED", "Retired", "add_retired_options"]


@dataclass(frozen=True, slots=True)
class Retired:
    """`names` are separated by spaces. `nargs` is argparse's; 0 is a flag."""

    names: str
    nargs: int | str | None
    note: str
    accepts: tuple[str, ...] | None = None
    """None: any value is accepted, with the note. Otherwise these are, silently, and any other is refused with it."""
    pooling: tuple[str, ...] = ()
    """Values that mean --runner pooling, which is set and said in a line."""


def _ignored(names: str, note: str, nargs: int | str | None = None) -> Retired:
    return Retired(names, nargs, note)


def _ignored_flag(names: str, note: str) -> Retired:
    return Retired(names, 0, note)


def _refused(names: str, note: str, *unless: str, nargs: int | str | None = None) -> Retired:
    return Retired(names, nargs, note, unless)


def _refused_flag(names: str, note: str) -> Retired:
    return Retired(names, 0, note, ())


NO_COMPILER = "nothing is compiled at run time, so this has no effect; --enforce-eager turns step capture off."
NO_LORA = "LoRA adapters are not supported yet."
NO_TASK = "models generate text or embed: see --runner, whose pooling is set by embed here."
ONE_DEVICE = "only one device is supported yet; leave it out."
ONE_HOST = "everything runs in one engine process on this host, so this has no effect."
ACCESS_LOG = "replaced by --access-log."

RETIRED: tuple[Retired, ...] = (
    # Accepted
    _ignored_flag(
        "--disable-preemption",
        "requests are preempted only when the KV pool is full, and lose nothing; see --preemption-mode.",
    ),
    _ignored_flag("--enforce-ranked-decoder", "this option never existed, in vLLM either; it has no effect."),
    _ignored_flag("--trust-remote-code", "no remote code is ever run; models are octavo's own files."),
    _ignored_flag("--use-v2-block-manager", "there is one block manager; this has no effect."),
    _ignored_flag("--disable-log-requests --enable-log-requests --disable-uvicorn-access-log", ACCESS_LOG),
    _ignored("--uvicorn-log-level", ACCESS_LOG),
    _ignored_flag("--disable-log-stats", "statistics are at /metrics only; this has no effect."),
    _ignored_flag("--worker-use-ray --engine-use-ray --disable-frontend-multiprocessing", ONE_HOST),
    _ignored_flag("--disable-custom-all-reduce", ONE_HOST),
    _ignored_flag("--enable-auto-tool-choice", "the model may always choose a tool."),
    _ignored_flag(
        "--enable-chunked-prefill",
        "prompts are always read in chunks that fit --max-num-batched-tokens; this has no effect.",
    ),
    _ignored("--compilation-config -O --cudagraph-capture-sizes --max-seq-len-to-capture", NO_COMPILER),
    _ignored("--performance-mode", "not available yet; the defaults stay."),
    _ignored("--cpu-offload-gb", "weights stay where they are computed with; this has no effect on the CPU."),
    # Accepted where they ask for what happens anyway
    _refused("--metrics-backend", "metrics are in Prometheus's format only, at /metrics.", "prometheus"),
    _refused("--device", "only the CPU is supported yet.", "auto", "cpu"),
    Retired("--task", None, NO_TASK, ("auto", "generate"), pooling=("embed", "embedding")),
    Retired("--convert", None, NO_TASK, ("auto", "none"), pooling=("embed",)),
    _refused("--load-format", "the format is read from the files: safetensors or GGUF.", "auto", "safetensors", "gguf"),
    _refused("--tokenizer-mode", "the tokenizer is read from the model's files.", "auto", "hf", "fast"),
    _refused("-q", "spell it out: --quantization none, int8 or int4.", "auto", "none", "int8", "int4"),
    _refused("--tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp", ONE_DEVICE, "1"),
    _refused("--distributed-executor-backend", ONE_DEVICE, "mp", "uni"),
    _refused("--chat-template-content-format", "the format is found from the template.", "auto", "string"),
    _refused("--allowed-methods --allowed-headers", "pages may use all of them.", "*", '["*"]', nargs="+"),
    _refused("--ssl-cert-reqs", "clients must show a certificate if --ssl-ca-certs is given.", "2"),
    # Refused
    _refused_flag("--allow-credentials", "there are no cookies; a page sends its key as a header."),
    _refused(
        "--speculative-model --speculative-draft-tokens --speculative-config -sc",
        "speculative decoding is not supported yet.",
    ),
    _refused_flag("--enable-lora", NO_LORA),
    _refused("--lora-modules", NO_LORA, nargs="+"),
    _refused_flag("--enable-expert-parallel", ONE_DEVICE),
    _refused("--hf-overrides", "a model's config can't be overridden."),
)


class _RetiredAction(argparse.Action):
    def __init__(self, option_strings: Sequence[str], dest: str, row: Retired) -> None:
        super().__init__(option_strings, dest, row.nargs, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        self.row = row

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        values = values if isinstance(values, list) else [values]
        given = " ".join([option or "", *values])
        if values and values[0] in self.row.pooling:
            namespace.runner = "pooling"
            print(f"{parser.prog}: {given}: replaced by --runner pooling.", file=sys.stderr)
        elif self.row.accepts is None:
            print(f"{parser.prog}: {given}: {self.row.note}", file=sys.stderr)
        elif not (option or "").startswith("--no-") and (not values or any(v not in self.row.accepts for v in values)):
            parser.error(f"{given}: {self.row.note}")


def add_retired_options(parser: argparse.ArgumentParser) -> None:
    """Add every retired option that `parser` has none of its own for; they are not shown in its help."""
    taken = parser._option_string_actions
    for row in RETIRED:
        names = row.names.split()
        if row.nargs == 0:
            names += [name.replace("--", "--no-", 1) for name in names]
        for name in names:
            if name not in taken:
                parser.add_argument(name, dest=argparse.SUPPRESS, action=_RetiredAction, row=row)
