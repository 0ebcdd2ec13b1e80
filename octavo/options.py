"""EngineConfig: the engine's options, as a user sets them; and how the option classes check their values.

Options carry vLLM's names. The command line, `LLM(...)` and docs/options.md are made from these fields.
"""

import math
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, get_args

from octavo.errors import ConfigError

__all__ = ["EngineConfig", "check_options", "option"]

KIND_NAMES: dict[Any, str] = {
    str: "a text",
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    tuple[str, ...]: "a tuple of texts",
}
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field with its help, the values that it takes, and its name for a value in the help."""
    return field(
        default=default,
        metadata={"help": help, "choices": choices, "least": least, "most": most, "metavar": metavar},
    )


def check_options(config: Any) -> None:
    """Raises ConfigError for a field whose value is not of its type, its choices or its range."""
    for item in fields(config):
        name, value, known = f"--{item.name.replace('_', '-')}", getattr(config, item.name), item.metadata
        kinds = get_args(item.type) if isinstance(item.type, UnionType) else (item.type,)
        if value is None and NoneType in kinds:
            continue
        kind = kinds[0]
        if not _is_of_kind(kind, value):
            raise ConfigError(f"{name} must be {KIND_NAMES[kind]}, got {value!r}.")
        if known["choices"] and value not in known["choices"]:
            raise ConfigError(f"{name} must be one of {', '.join(known['choices'])}, got {value!r}.")
        least, most = known["least"], known["most"]
        if (least is not None and value < least) or (most is not None and value > most):
            allowed = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ConfigError(f"{name} must be {allowed}, got {value}.")


def _is_of_kind(kind: Any, value: object) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == tuple[str, ...]:
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    return isinstance(value, kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The engine's options, as the user set them; None or "auto": derived by `resolve`."""

    model: str = option(MISSING, "Hugging Face folder, .gguf file, or Hub name (org/name, org/name:file.gguf).")
    tokenizer: str | None = option(None, "Folder or .gguf file with the tokenizer, if not the model's own.")
    revision: str | None = option(None, "Branch, tag or commit of a Hub model.")
    download_dir: str | None = option(None, "Where Hub models are kept; default: Hugging Face's cache.")
    runner: str = option(
        "auto",
        "generate text, or pool hidden states into embeddings; auto: as the model was made for.",
        choices=("auto", "generate", "pooling"),
    )
    dtype: str = option("auto", "Type of weights and activations; auto: the checkpoint's own.", choices=DTYPES)
    quantization: str = option(
        "auto",
        "auto: a GGUF file's quantised blocks are computed with as they are, other weights are of --dtype; none: all "
        "are of --dtype; int8, int4: weights are quantised as they are loaded, 32 to a scale.",
        choices=("auto", "none", "int8", "int4"),
    )
    activation_dtype: str = option(
        "auto",
        "Type of what quantised weights are multiplied with; auto: int8, quantised as they are computed, 32 to a "
        "scale; the others leave activations as they are, and set --dtype.",
        choices=("auto", "int8", "bfloat16", "float16", "float32"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Type of the KV cache; auto: as --dtype. int8 and fp8 (e4m3) take about half of 16 bits; each key and each "
        "value of a head has a scale.",
        choices=("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "int8"),
    )
    max_model_len: int | None = option(
        None, "Most tokens of prompt and output together; default: the model's own.", least=1
    )
    max_num_seqs: int = option(128, "Most requests in one step.", least=1)
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens in one step; default: on the CPU what takes about 200 ms by measurement, on a GPU 8192. "
        "At least --max-model-len in encoders, which compute a text in one step.",
        least=1,
    )
    block_size: int = option(16, "Tokens in a KV block: a multiple of 16.")
    enable_prefix_caching: bool = option(True, "Keep the KV of finished prompts and reuse it.")
    kv_eviction_policy: str = option(
        "lru",
        "Which kept KV block is given up first: the least recently used, the first kept, or any.",
        choices=("lru", "fifo", "random"),
    )
    scheduling_policy: str = option(
        "fcfs",
        "fcfs: first come, first served; priority: the lowest value of the request field priority first, which also "
        "preempts higher ones. Every 256 steps of waiting count for one value less.",
        choices=("fcfs", "priority"),
    )
    admission_policy: str = option(
        "predicted",
        "predicted: a request starts when the KV pool will probably hold it to its end, going by past outputs; "
        "greedy: when the pool holds it now, which preempts more.",
        choices=("predicted", "greedy"),
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the free memory that weights and KV pool may take (on the CPU too: of the container's memory).",
        least=0.01,
        most=1.0,
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV pool in bytes; suffixes K, M, G are understood.", least=1
    )
    swap_space: float = option(
        0.0,
        "GiB of a second tier of KV blocks: for preempted requests, evicted prefixes, sequences longer than the pool.",
        least=0,
    )
    num_swap_blocks: int | None = option(
        None, "The same in blocks; where both are given the smaller wins.", metavar="NUM_SWAP_BLOCKS", least=0
    )
    kv_cache_dir: str | None = option(
        None, "Folder for the file that holds the tier on the CPU; default: the one for temporary files."
    )
    preemption_mode: str = option(
        "auto",
        "What becomes of a preempted request's KV: it is recomputed, or swapped to the tier; auto: what costs less.",
        choices=("auto", "recompute", "swap"),
    )
    enforce_eager: bool = option(False, "Run each step op by op instead of replaying a captured one.")
    attention_backend: str = option(
        "auto", "Which kernels compute: auto, CPU, or REFERENCE (plain torch).", choices=("auto", "CPU", "REFERENCE")
    )
    num_threads: int | None = option(
        None, "CPU threads that compute; default: what affinity and the container's CPU quota allow.", least=1
    )
    async_scheduling: bool = option(False, "Schedule the next step while one computes.")
    seed: int = option(0, "Seeds requests that bring no seed of their own.")
    generation_config: str = option(
        "auto",
        "Where sampling defaults come from; auto: the model's generation_config.json, none or vllm: nowhere.",
        choices=("auto", "none", "vllm"),
    )
    override_generation_config: str | None = option(
        None, "Sampling defaults that go before those, as a JSON object.", metavar="JSON"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.block_size < 16 or self.block_size % 16:
            raise ConfigError(f"--block-size must be a positive multiple of 16, got {self.block_size}.")
