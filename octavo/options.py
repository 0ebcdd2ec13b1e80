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
        "What the model is used for: generate text, or pool hidden states into embeddings. auto: what it was made for.",
        choices=("auto", "generate", "pooling"),
    )
    dtype: str = option("auto", "Type of weights and activations; auto: the checkpoint's own.", choices=DTYPES)
    quantization: str = option(
        "auto",
        "auto keeps a GGUF file's quantised blocks and holds other weights in --dtype; none holds all weights in "
        "--dtype; int8 and int4 quantise them at load, 32 to a scale.",
        choices=("auto", "none", "int8", "int4"),
    )
    activation_dtype: str = option(
        "auto",
        "Type of the values that are multiplied with quantised weights. auto and int8 quantise them, 32 to a scale; "
        "the other types keep them as they are computed, and set --dtype.",
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
        "Most tokens in one step. Default: what takes about 200 ms by measurement, 8192 at most. Encoders, which "
        "compute a text in one step, take at least --max-model-len.",
        least=1,
    )
    block_size: int = option(16, "Tokens in a KV block: a multiple of 16.")
    enable_prefix_caching: bool = option(True, "Keep the KV of finished requests and reuse it for the same prefixes.")
    kv_eviction_policy: str = option(
        "lru",
        "Which cached KV block is given up first: the least recently used, the first cached, or a random one.",
        choices=("lru", "fifo", "random"),
    )
    scheduling_policy: str = option(
        "fcfs",
        "fcfs serves requests in order of arrival. priority serves the lowest value of the request field priority "
        "first and preempts higher ones; 256 steps of waiting lower the value by one.",
        choices=("fcfs", "priority"),
    )
    admission_policy: str = option(
        "predicted",
        "predicted starts a request when the KV pool will probably hold it to its end, judged by past outputs; "
        "greedy starts it when the pool holds it now, which preempts more.",
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
        "GiB of a second tier of KV blocks, for preempted requests, evicted prefixes and overlong sequences.",
        least=0,
    )
    num_swap_blocks: int | None = option(
        None,
        "Size of that tier in blocks. If both are given, the smaller size counts.",
        metavar="NUM_SWAP_BLOCKS",
        least=0,
    )
    kv_cache_dir: str | None = option(
        None, "Folder of the tier's file on the CPU. Default: the folder for temporary files."
    )
    preemption_mode: str = option(
        "auto",
        "Whether a preempted request's KV is recomputed or swapped to the tier. auto: whatever costs less.",
        choices=("auto", "recompute", "swap"),
    )
    enforce_eager: bool = option(False, "Run each step op by op instead of replaying a captured one.")
    attention_backend: str = option(
        "auto", "Which device computes: CPU, REFERENCE (plain torch), or auto, the fastest that is there."
    )
    num_threads: int | None = option(
        None, "CPU threads that compute. Default: as many as affinity and the container's CPU quota allow.", least=1
    )
    async_scheduling: bool = option(False, "Schedule the next step while one computes.")
    seed: int = option(0, "Seed for requests without one.")
    generation_config: str = option(
        "auto",
        "Where sampling defaults come from. auto: the model's generation_config.json; none, vllm: OpenAI's defaults.",
        choices=("auto", "none", "vllm"),
    )
    override_generation_config: str | None = option(
        None, "Sampling defaults that override those, as a JSON object.", metavar="JSON"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.block_size < 16 or self.block_size % 16:
            raise ConfigError(f"--block-size must be a positive multiple of 16, got {self.block_size}.")
