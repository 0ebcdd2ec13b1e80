"""Memory arithmetic: bytes of weights and of keys and values, blocks of the pool and of its tier, tokens of a step.

Computes from options and facts alone, so that `resolve()` and the planner get the same numbers.
"""

from octavo.checkpoint.model_config import ModelConfig
from octavo.core.kv_groups import most_blocks
from octavo.errors import ConfigError
from octavo.options import EngineConfig
from octavo.plan.facts import Facts, Reasons, gib

__all__ = [
    "DTYPE_BYTES",
    "check_step",
    "kv_block_bytes",
    "kv_bytes_per_token",
    "num_pool_blocks",
    "num_tier_blocks",
    "step_bytes",
    "step_tokens",
    "weights_bytes",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {"int8": 1.0625, "int4": 0.625}
"""Bytes of a weight with its share of a scale and a minimum."""
KV_BYTES = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "fp8": (1, 4), "int8": (1, 4)}
"""Bytes of one element of a key or value, and of the scale that all its elements share."""
WIDTHS = 16
"""Values of one token that a step holds at once, in multiples of the hidden size: an upper bound over the families."""
STEP_SECONDS = 0.2
"""A CPU step of this length keeps streams smooth while a long prompt is read in, and is long enough to be efficient."""


def weights_bytes(facts: Facts, dtype: str, quantization: str) -> int:
    if quantization == "gguf" and facts.packed_bytes is not None:
        return facts.packed_bytes
    return int(facts.num_parameters * QUANTIZED_BYTES.get(quantization, DTYPE_BYTES[dtype]))


def kv_bytes_per_token(model: ModelConfig, kv_cache_dtype: str) -> int:
    """Bytes that one token takes in a block of any group: 2·L·N_kv·(D·B + scale), for the L layers of the largest
    group."""
    element, scale = KV_BYTES[kv_cache_dtype]
    per_layer = 2 * model.num_key_value_heads * (model.head_dim * element + scale)
    return max(len(group.layers) for group in model.kv_groups) * per_layer


def kv_block_bytes(model: ModelConfig, kv_cache_dtype: str, block_size: int) -> int:
    """Bytes of one block over all layers of a group; 0 in encoders, which keep nothing."""
    return 0 if model.is_encoder else kv_bytes_per_token(model, kv_cache_dtype) * block_size


def step_tokens(config: EngineConfig, facts: Facts, max_model_len: int, reasons: Reasons) -> int:
    """Most tokens of one step."""
    budget = config.max_num_batched_tokens or _default_step_tokens(config, facts, reasons)
    if facts.model.is_encoder and budget < max_model_len:
        reasons.note("max-num-batched-tokens", max_model_len, "raised, since an encoder computes a text in one step")
        return max_model_len
    return budget


def _default_step_tokens(config: EngineConfig, facts: Facts, reasons: Reasons) -> int:
    num_multiplied = facts.num_parameters
    if facts.model.is_encoder:  # its embedding is only looked up
        num_multiplied = max(num_multiplied - facts.model.vocab_size * facts.model.hidden_size, 1)
    tokens_per_s = facts.flops_per_s / (2 * num_multiplied)
    tokens = int(tokens_per_s * STEP_SECONDS) // 16 * 16
    budget = min(max(tokens, config.max_num_seqs), 8192)
    why = f"about {tokens_per_s:.0f} tokens/s by measurement, for steps of {STEP_SECONDS * 1000:.0f} ms"
    if tokens < budget:
        why += ", raised so that every running request gets its token"
    reasons.note("max-num-batched-tokens", budget, why)
    return budget


def step_bytes(model: ModelConfig, dtype: str, max_num_seqs: int, budget: int, max_model_len: int) -> int:
    """About as many bytes as a step of so many tokens and requests computes with: activations, logits, and each
    request's tokens and block tables."""
    per_token = WIDTHS * model.hidden_size * DTYPE_BYTES[dtype]
    per_request = 4 * (model.vocab_size + 2 * max_model_len)
    return budget * per_token + (0 if model.is_encoder else max_num_seqs * per_request)


def check_step(facts: Facts, weights: int, step: int) -> None:
    """Raises ConfigError if there is no room for what a step computes with, beside so many bytes of weights."""
    left = facts.free_memory_bytes - weights
    if 0 < left < step:
        raise ConfigError(
            f"A step needs about {gib(step)}, and {gib(left)} of the {gib(facts.free_memory_bytes)} free are left "
            "beside the weights. Lower --max-num-batched-tokens or --max-num-seqs."
        )


def num_pool_blocks(
    config: EngineConfig,
    facts: Facts,
    weights: int,
    step: int,
    block_bytes: int,
    max_model_len: int,
    budget: int,
    reasons: Reasons,
) -> int:
    """Blocks of the KV pool beside so many bytes of weights and of a step's values. Raises ConfigError if there is no
    room for one."""
    if facts.model.is_encoder:
        if weights > facts.free_memory_bytes:
            raise ConfigError(
                f"The weights need {gib(weights)} and {gib(facts.free_memory_bytes)} are free. Choose a smaller "
                "--dtype."
            )
        return 0
    blocks_per_seq = sum(
        most_blocks(group.window, max_model_len, config.block_size, budget) for group in facts.model.kv_groups
    )
    most = config.max_num_seqs * blocks_per_seq * block_bytes
    pool_bytes, pool_option = _pool_bytes(config, facts, weights, step, most, reasons)
    if pool_bytes < block_bytes:
        raise ConfigError(
            f"The KV pool of {gib(max(pool_bytes, 0))} has no room for one block of {block_bytes} bytes: "
            f"{gib(facts.free_memory_bytes)} are free and the weights need {gib(weights)}. "
            f"Raise {pool_option}, or choose a smaller --dtype or --kv-cache-dtype."
        )
    return pool_bytes // block_bytes


def _pool_bytes(
    config: EngineConfig, facts: Facts, weights: int, step: int, most: int, reasons: Reasons
) -> tuple[int, str]:
    """Bytes of the KV pool, and the option that sets them."""
    free = facts.free_memory_bytes
    if config.kv_cache_memory_bytes is not None:
        if config.kv_cache_memory_bytes > max(free - weights, 0):
            raise ConfigError(
                f"--kv-cache-memory-bytes asks for {gib(config.kv_cache_memory_bytes)}; {gib(free)} are free, of which "
                f"the weights need {gib(weights)}. Lower it."
            )
        return config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    if config.gpu_memory_utilization is not None:
        pool = int(free * config.gpu_memory_utilization) - weights
        rule = f"{config.gpu_memory_utilization:.0%} of {gib(free)} free, less {gib(weights)} of weights"
    else:
        pool = min((free - weights) // 2, free - weights - step)
        rule = f"half of {gib(free)} free less {gib(weights)} of weights"
        if pool < (free - weights) // 2:
            rule = f"{gib(free)} free less {gib(weights)} of weights and {gib(step)} of a step's values"
    if pool >= most:
        pool, rule = most, "all that --max-num-seqs requests of --max-model-len tokens need"
    reasons.note("kv-cache-memory-bytes", gib(max(pool, 0)), rule)
    return pool, "--gpu-memory-utilization or --kv-cache-memory-bytes"


def num_tier_blocks(config: EngineConfig, facts: Facts, block_bytes: int, is_pooling: bool, reasons: Reasons) -> int:
    """Blocks of the tier. Raises ConfigError where it can't be of use, or the disk has no room."""
    sizes = [int(config.swap_space * 2**30) // block_bytes] if config.swap_space and block_bytes else []
    sizes += [config.num_swap_blocks] if config.num_swap_blocks is not None else []
    num_blocks = min(sizes, default=0)
    if not num_blocks:
        if config.preemption_mode == "swap":
            raise ConfigError("--preemption-mode swap has nowhere to swap to. Set --swap-space or --num-swap-blocks.")
        return 0
    if is_pooling:
        raise ConfigError("--swap-space and --num-swap-blocks are of no use with --runner pooling. Leave them out.")
    if num_blocks * block_bytes > facts.free_disk_bytes:
        raise ConfigError(
            f"The tier of {gib(num_blocks * block_bytes)} does not fit into the {gib(facts.free_disk_bytes)} free in "
            "its folder. Lower --swap-space or --num-swap-blocks, or choose another --kv-cache-dir."
        )
    reasons.note("num-swap-blocks", num_blocks, f"{gib(num_blocks * block_bytes)} in blocks of {block_bytes} bytes")
    return num_blocks
