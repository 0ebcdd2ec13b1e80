"""resolve(): from a user's options and the facts to every value that the engine runs with.

Pure: computes from its arguments alone, so that each derived value can be tested and explained.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from octavo.checkpoint.generation_config import resolve_sampling_defaults
from octavo.checkpoint.model_config import ModelConfig, PoolingConfig
from octavo.core.eviction import EvictionPolicyName
from octavo.core.scheduler_config import AdmissionPolicy, SchedulerConfig, SchedulingPolicy
from octavo.core.swap_cost import PreemptionMode
from octavo.errors import ConfigError
from octavo.options import EngineConfig
from octavo.plan.facts import Facts, Reasons
from octavo.plan.memory import (
    DTYPE_BYTES,
    check_step,
    kv_block_bytes,
    num_pool_blocks,
    num_tier_blocks,
    step_bytes,
    step_tokens,
    weights_bytes,
)

__all__ = [
    "KVConfig",
    "ResolvedConfig",
    "RuntimeConfig",
    "WeightsConfig",
    "resolve",
    "resolve_num_threads",
    "resolve_quantization",
]

THREADS_PER_CPU = 4
MANY_THREADS = 64
DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp8_e4m3": "fp8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsConfig:
    """What weights are kept as and multiplied with."""

    dtype: str
    """Type of activations, and of weights that are not quantised."""
    quantization: str
    """none, int8, int4, or gguf: the checkpoint's own blocks."""
    int8_activations: bool
    """Whether activations are quantised before they are multiplied with quantised weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVConfig:
    """What keys and values are kept as, and where their tier is."""

    dtype: str
    folder: str
    """Folder of the tier's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """What computes steps, and for what purpose."""

    max_model_len: int
    """Most tokens of prompt and output together."""
    max_steps_in_flight: int
    provider: str
    num_threads: int
    enforce_eager: bool
    pooling: PoolingConfig | None
    """How texts become embeddings; None in an engine that generates."""
    sampling_defaults: Mapping[str, int | float]
    """Sampling parameters of requests that set none, by the names of SamplingParams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Every value the engine runs with."""

    weights: WeightsConfig
    kv: KVConfig
    scheduler: SchedulerConfig
    runtime: RuntimeConfig
    reasons: tuple[tuple[str, str], ...] = ()
    """(option, its value and why) for every derived value; printed once at start."""


def resolve(config: EngineConfig, facts: Facts) -> ResolvedConfig:
    """Turn options and facts into the values the engine runs with.

    Raises ConfigError where they can't work together: a context longer than the model's, a pool without room.
    """
    reasons, model = Reasons(), facts.model
    pooling = _resolve_pooling(config, facts, reasons)
    weights = _resolve_weights(config, facts, reasons)
    kv_cache_dtype = DTYPE_ALIASES.get(config.kv_cache_dtype, config.kv_cache_dtype)
    if kv_cache_dtype == "auto":
        kv_cache_dtype = weights.dtype
    max_model_len = _resolve_max_model_len(config, facts, reasons)
    scheduler = _resolve_scheduler(config, facts, weights, kv_cache_dtype, max_model_len, pooling is not None, reasons)
    if facts.provider_remark:
        reasons.note("attention-backend", facts.provider.upper(), facts.provider_remark)
    runtime = RuntimeConfig(
        max_model_len=max_model_len,
        max_steps_in_flight=2 if config.async_scheduling else 1,
        provider=facts.provider,
        num_threads=facts.num_threads,
        enforce_eager=config.enforce_eager,
        pooling=pooling,
        sampling_defaults=_resolve_sampling_defaults(config, model, reasons),
    )
    kv = KVConfig(dtype=kv_cache_dtype, folder=config.kv_cache_dir or facts.temporary_dir)
    return ResolvedConfig(weights=weights, kv=kv, scheduler=scheduler, runtime=runtime, reasons=tuple(reasons))


def _resolve_weights(config: EngineConfig, facts: Facts, reasons: Reasons) -> WeightsConfig:
    quantization = _resolve_quantization(config, facts, reasons)
    return WeightsConfig(
        dtype=_resolve_dtype(config, facts, quantization, reasons),
        quantization=quantization,
        int8_activations=config.activation_dtype in ("auto", "int8"),
    )


def _resolve_scheduler(
    config: EngineConfig,
    facts: Facts,
    weights: WeightsConfig,
    kv_cache_dtype: str,
    max_model_len: int,
    is_pooling: bool,
    reasons: Reasons,
) -> SchedulerConfig:
    model = facts.model
    budget = step_tokens(config, facts, max_model_len, reasons)
    block_bytes = kv_block_bytes(model, kv_cache_dtype, config.block_size)
    num_weight_bytes = weights_bytes(facts, weights.dtype, weights.quantization)
    step = step_bytes(model, weights.dtype, config.max_num_seqs, budget, max_model_len)
    check_step(facts, num_weight_bytes, step)
    num_blocks = num_pool_blocks(config, facts, num_weight_bytes, step, block_bytes, max_model_len, budget, reasons)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        num_blocks=num_blocks,
        block_size=config.block_size,
        group_windows=tuple(group.window for group in model.kv_groups),
        enable_prefix_caching=config.enable_prefix_caching and not model.is_encoder,
        kv_eviction_policy=cast(EvictionPolicyName, config.kv_eviction_policy),
        seed=config.seed,
        scheduling_policy=cast(SchedulingPolicy, config.scheduling_policy),
        admission_policy=cast(AdmissionPolicy, config.admission_policy),
        num_swap_blocks=num_tier_blocks(config, facts, block_bytes, is_pooling, reasons),
        preemption_mode=cast(PreemptionMode, config.preemption_mode),
        block_bytes=block_bytes,
        prefill_tokens_per_s=facts.flops_per_s / (2 * facts.num_parameters),
    )


def resolve_num_threads(config: EngineConfig, num_cpus: int) -> int:
    """Threads that compute. Raises ConfigError for many more than there are CPUs to run them."""
    most = max(THREADS_PER_CPU * num_cpus, MANY_THREADS)
    if config.num_threads is not None and config.num_threads > most:
        raise ConfigError(
            f"--num-threads must be at most {most} on this machine, where {num_cpus} CPUs may be used, got "
            f"{config.num_threads}."
        )
    return config.num_threads or num_cpus


def resolve_quantization(config: EngineConfig, has_blocks: bool) -> str:
    """none, int8, int4 or gguf (the checkpoint's own quantised blocks)."""
    if config.quantization == "auto":
        return "gguf" if has_blocks else "none"
    return config.quantization


def _resolve_quantization(config: EngineConfig, facts: Facts, reasons: Reasons) -> str:
    quantization = resolve_quantization(config, facts.packed_bytes is not None)
    if quantization == "gguf":
        reasons.note("quantization", "gguf", "the checkpoint's own blocks, computed with as they are")
    if quantization == "none" and config.activation_dtype == "int8":
        raise ConfigError("--activation-dtype int8 needs quantised weights. Choose --quantization int8 or int4 too.")
    return quantization


def _resolve_dtype(config: EngineConfig, facts: Facts, quantization: str, reasons: Reasons) -> str:
    chosen = None if config.dtype == "auto" else DTYPE_ALIASES.get(config.dtype, config.dtype)
    if config.activation_dtype in DTYPE_BYTES:
        if chosen not in (None, config.activation_dtype):
            raise ConfigError(
                f"--activation-dtype {config.activation_dtype} and --dtype {chosen} differ. Leave one of them out."
            )
        return config.activation_dtype
    if chosen is not None:
        return chosen
    own = facts.model.dtype
    if own in DTYPE_BYTES:
        reasons.note("dtype", own, "the checkpoint's own")
        return own
    dequantised = quantization == "none"
    why = f"the checkpoint's {own} blocks are dequantised at load" if dequantised else "of activations between products"
    reasons.note("dtype", "bfloat16", why)
    return "bfloat16"


def _resolve_max_model_len(config: EngineConfig, facts: Facts, reasons: Reasons) -> int:
    longest, why = facts.model.longest_context
    if config.max_model_len is None:
        cut_off = facts.model.max_sequence_length
        if cut_off is not None and cut_off < longest:
            longest, why = cut_off, "where sentence-transformers cuts texts off"
        reasons.note("max-model-len", longest, why)
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {longest} positions the model was made for. "
            f"Use at most {longest}."
        )
    return config.max_model_len


def _resolve_pooling(config: EngineConfig, facts: Facts, reasons: Reasons) -> PoolingConfig | None:
    model = facts.model
    if config.runner == "generate" and model.is_encoder:
        raise ConfigError(
            f"--runner generate: {model.model_type} is an encoder, which generates nothing. Leave the option out."
        )
    if config.runner == "generate" or (config.runner == "auto" and not model.is_encoder and model.pooling is None):
        return None
    pooling = model.pooling or PoolingConfig(mode="mean" if model.is_encoder else "last")
    if pooling.mode != "last" and not model.is_encoder:
        raise ConfigError(
            f"The model's files ask for {pooling.mode} pooling. Decoders pool their last token only, since a prompt is "
            "computed in chunks. --runner generate serves the model without embeddings."
        )
    if config.runner == "auto":
        why = "an encoder" if model.is_encoder else "sentence-transformers' files are beside the model"
        reasons.note("runner", "pooling", why)
    return pooling


def _resolve_sampling_defaults(config: EngineConfig, model: ModelConfig, reasons: Reasons) -> dict[str, int | float]:
    defaults = resolve_sampling_defaults(
        model.sampling_defaults, config.generation_config, config.override_generation_config
    )
    if defaults:
        values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        reasons.note("generation-config", values, "the model's defaults, for requests that set no others")
    return defaults
