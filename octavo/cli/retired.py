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
NO_SPECULATION = "speculative decoding is not supported yet."
NO_TASK = "models generate text or embed: see --runner, whose pooling is set by embed here."
ONE_DEVICE = "only one device is supported yet; leave it out."
ONE_HOST = "everything runs in one engine process on this host, so this has no effect."
CHUNKED = "prompts are always read in chunks that fit --max-num-batched-tokens; this has no effect."

RETIRED: tuple[Retired, ...] = (
    # Accepted
    _ignored_flag(
        "--disable-preemption",
        "requests are preempted only when the KV pool is full, and lose nothing; see --preemption-mode.",
    ),
    _ignored_flag("--enforce-ranked-decoder", "this option never existed, in vLLM either; it has no effect."),
    _ignored_flag("--trust-remote-code", "no remote code is ever run; models are octavo's own files."),
    _ignored("--code-revision", "no remote code is ever run."),
    _ignored_flag("--use-v2-block-manager", "there is one block manager; this has no effect."),
    _ignored_flag("--disable-log-requests --enable-log-requests", "replaced by --disable-access-log."),
    _ignored_flag("--disable-log-stats", "statistics are at /metrics only; this has no effect."),
    _ignored("--max-log-len", "prompts are never logged; this has no effect."),
    _ignored("--uvicorn-log-level", "replaced by --disable-access-log."),
    _ignored_flag("--disable-uvicorn-access-log", "replaced by --disable-access-log."),
    _ignored("--h11-max-incomplete-event-size --h11-max-header-count", "replaced by --max-header-bytes."),
    _ignored_flag("--enable-ssl-refresh", "certificates are read at the start; this has no effect."),
    _ignored_flag("--enable-request-id-headers", "answers always bear X-Request-Id; this has no effect."),
    _ignored_flag("--worker-use-ray --engine-use-ray --disable-frontend-multiprocessing", ONE_HOST),
    _ignored("--max-parallel-loading-workers", ONE_HOST),
    _ignored_flag("--enable-auto-tool-choice", "the model may always choose a tool."),
    _ignored_flag("--exclude-tools-when-tool-choice-none", "that is always done."),
    _ignored_flag("--enable-reasoning", "reasoning is always told apart, if the model writes any."),
    _ignored_flag("--disable-custom-all-reduce", ONE_HOST),
    _ignored_flag("--enable-chunked-prefill", CHUNKED),
    _ignored("--max-num-partial-prefills --max-long-partial-prefills --long-prefill-token-threshold", CHUNKED),
    _ignored("--max-paddings --scheduler-delay-factor", "requests join the next step; this has no effect."),
    _ignored("--num-scheduler-steps", "replaced by --async-scheduling."),
    _ignored_flag("--multi-step-stream-outputs --disable-async-output-proc", "replaced by --async-scheduling."),
    _ignored("--num-gpu-blocks-override", "replaced by --kv-cache-memory-bytes; the pool keeps its size."),
    _ignored("--num-lookahead-slots", NO_SPECULATION + " This has no effect."),
    _ignored("--compilation-config -O --cudagraph-capture-sizes --cuda-graph-sizes", NO_COMPILER),
    _ignored("--max-seq-len-to-capture --max-context-len-to-capture --max-cudagraph-capture-size", NO_COMPILER),
    _ignored("--performance-mode --optimization-level", "not available yet; the defaults stay."),
    _ignored("--tokenizer-pool-size --tokenizer-pool-type", "tokenizing takes no pool; this has no effect."),
    _ignored("--safetensors-load-strategy --ignore-patterns", "files are mapped into memory; this has no effect."),
    _ignored_flag("--use-tqdm-on-load", "loading shows its own progress; this has no effect."),
    _ignored("--prefix-caching-hash-algo", "blocks are always hashed with SHA-256; this has no effect."),
    _ignored("--cpu-offload-gb", "weights stay where they are computed with; this has no effect on the CPU."),
    # Accepted where they ask for what happens anyway
    _refused("--metrics-backend", "metrics are in Prometheus's format only, at /metrics.", "prometheus"),
    _refused("--device", "only the CPU is supported yet.", "auto", "cpu"),
    Retired("--task", None, NO_TASK, ("auto", "generate"), pooling=("embed", "embedding")),
    Retired("--convert", None, NO_TASK, ("auto", "none"), pooling=("embed",)),
    _refused("--model-impl", "models are octavo's own files only.", "auto", "vllm"),
    _refused("--load-format", "the format is read from the files: safetensors or GGUF.", "auto", "safetensors", "gguf"),
    _refused("--config-format", "the format is read from the files.", "auto", "hf"),
    _refused("--tokenizer-mode", "the tokenizer is read from the model's files.", "auto", "hf", "fast"),
    _refused("-q", "spell it out: --quantization none, int8 or int4.", "auto", "none", "int8", "int4"),
    _refused("--tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp", ONE_DEVICE, "1"),
    _refused("--decode-context-parallel-size -dcp --nnodes --api-server-count -asc", ONE_DEVICE, "1"),
    _refused("--distributed-executor-backend", ONE_DEVICE, "mp", "uni"),
    _refused("--chat-template-content-format", "the format is found from the template.", "auto", "string"),
    _refused("--response-role", "answers have the role assistant.", "assistant"),
    _refused("--logprobs-mode", "logprobs are those of the raw distribution.", "raw_logprobs"),
    _refused("--max-logprobs", "at most 20 logprobs are returned for a token.", "20"),
    # Refused
    _refused("--config", "option files are not supported; give the options on the command line."),
    _refused("--hf-token", "set the environment variable HF_TOKEN instead."),
    _refused("--tokenizer-revision", "replaced by --revision, for model and tokenizer together."),
    _refused("--hf-overrides --rope-scaling --rope-theta", "a model's config can't be overridden."),
    _refused("--speculative-model --speculative-draft-tokens --num-speculative-tokens", NO_SPECULATION),
    _refused("--speculative-config -sc", NO_SPECULATION),
    _refused_flag("--enable-lora", NO_LORA),
    _refused("--lora-modules", NO_LORA, nargs="+"),
    _refused("--max-loras --max-lora-rank --max-cpu-loras", NO_LORA),
    _refused("--tool-parser-plugin --reasoning-parser-plugin", "parsers are octavo's own."),
    _refused("--tool-server", "tools are run by the client."),
    _refused(
        "--guided-decoding-backend --structured-outputs-config",
        "structured output is compiled by llguidance.",
        "auto",
        "guidance",
    ),
    _refused("--kv-transfer-config --kv-events-config", "moving KV between engines is not supported yet."),
    _refused_flag("--enable-expert-parallel", ONE_DEVICE),
    _refused("--uds", "the server listens on --host and --port only."),
    _refused("--root-path --middleware", "not supported; put a proxy such as nginx in front."),
    _refused("--otlp-traces-endpoint --collect-detailed-traces", "nothing is sent anywhere; use /metrics."),
    _refused("--limit-mm-per-prompt --mm-processor-kwargs", "only text is supported."),
    _refused("--pooler-config --override-pooler-config", "how texts are pooled is read from the model's files."),
    _refused_flag("--calculate-kv-scales --disable-sliding-window --skip-tokenizer-init --headless", "not supported."),
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
