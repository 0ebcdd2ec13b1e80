"""What a user may set (EngineConfig, ServerConfig), what the machine is (Facts), and the function that joins them.

Pure: `resolve` computes from its arguments alone, so that every derived value can be tested and explained. Options
carry vLLM's names; the command line is generated from these classes.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, cast

from octavo.checkpoint.generation_config import resolve_sampling_defaults
from octavo.checkpoint.model_config import ModelConfig, PoolingConfig
from octavo.core.eviction import EvictionPolicyName
from octavo.core.kv_groups import capacity_tokens, most_blocks
from octavo.core.scheduler_config import AdmissionPolicy, SchedulingPolicy
from octavo.core.swap_cost import PreemptionMode
from octavo.errors import ConfigError
from octavo.text.reasoning import REASONING_FORMATS
from octavo.text.tool_calls import TOOL_FORMATS

__all__ = [
    "EngineConfig",
    "Facts",
    "ResolvedConfig",
    "ServerConfig",
    "kv_bytes_per_token",
    "resolve",
    "resolve_quantization",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {"int8": 1.0625, "int4": 0.625}  # a weight and its share of a scale and a minimum
KV_BYTES = {"float32": (4, 0), "bfloat16": (2, 0), "float16": (2, 0), "fp8": (1, 4), "int8": (1, 4)}
"""Of an element of a key or a value in the KV cache, and of the scale of them all."""
DTYPES = ("auto", "bfloat16", "float16", "half", "float32", "float")
DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp8_e4m3": "fp8"}
STEP_SECONDS = 0.2
"""A CPU step of this length keeps streams smooth while a long prompt is read in, and is long enough to be efficient."""


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None, metavar: str | None = None) -> Any:
    """A dataclass field with what the command line needs to know of it."""
    metadata = {"help": help, "choices": choices, "metavar": metavar}
    return field(default=default, metadata=metadata)


def _check_choices(config: Any) -> None:
    for item in fields(config):
        choices, value = item.metadata.get("choices"), getattr(config, item.name)
        if choices and value is not None and value not in choices:
            name = item.name.replace("_", "-")
            raise ConfigError(f"--{name} must be one of {', '.join(choices)}, got {value!r}.")


def _check_range(config: Any, name: str, low: float, high: float | None = None) -> None:
    value = getattr(config, name)
    if value is None or (value >= low and (high is None or value <= high)):
        return
    allowed = f"at least {low}" if high is None else f"from {low} to {high}"
    raise ConfigError(f"--{name.replace('_', '-')} must be {allowed}, got {value}.")


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
    max_model_len: int | None = option(None, "Most tokens of prompt and output together; default: the model's own.")
    max_num_seqs: int = option(128, "Most requests in one step.")
    max_num_batched_tokens: int | None = option(
        None,
        "Most tokens in one step; default: on the CPU what takes about 200 ms by measurement, on a GPU 8192. "
        "At least --max-model-len in encoders, which compute a text in one step.",
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
        None, "Share of the free memory that weights and KV pool may take (on the CPU too: of the container's memory)."
    )
    kv_cache_memory_bytes: int | None = option(None, "Size of the KV pool in bytes; suffixes K, M, G are understood.")
    swap_space: float = option(
        0.0,
        "GiB of a second tier of KV blocks: for preempted requests, evicted prefixes, sequences longer than the pool.",
    )
    num_swap_blocks: int | None = option(
        None, "The same in blocks; where both are given the smaller wins.", metavar="NUM_SWAP_BLOCKS"
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
        None, "CPU threads that compute; default: what affinity and the container's CPU quota allow."
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
        _check_choices(self)
        _check_range(self, "max_model_len", 1)
        _check_range(self, "max_num_seqs", 1)
        _check_range(self, "max_num_batched_tokens", 1)
        _check_range(self, "kv_cache_memory_bytes", 1)
        _check_range(self, "num_threads", 1)
        _check_range(self, "swap_space", 0)
        _check_range(self, "num_swap_blocks", 0)
        _check_range(self, "gpu_memory_utilization", 0.01, 1.0)
        if self.block_size < 16 or self.block_size % 16:
            raise ConfigError(f"--block-size must be a positive multiple of 16, got {self.block_size}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server's options."""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all.")
    port: int = option(8000, "Port to listen on; 0 picks a free one.")
    served_model_name: str | None = option(None, "Name clients use for the model; default: the --model value.")
    chat_template: str | None = option(
        None, "Chat template, a file with one, or the name of one of the model's, instead of its default."
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring a chat template of their own: a program, which can take long."
    )
    tool_call_parser: str | None = option(
        None, "How the model writes tool calls; default: found from the chat template.", choices=(*TOOL_FORMATS, "none")
    )
    reasoning_parser: str | None = option(
        None,
        "How the model marks its reasoning; default: found from the chat template.",
        choices=(*REASONING_FORMATS, "none"),
    )
    strict: bool = option(False, "Refuse requests with fields that nobody knows, instead of naming them in a header.")
    disable_access_log: bool = option(False, "Do not log each request.")
    access_log_format: str = option("text", "How each request is logged.", choices=("text", "json"))
    shutdown_timeout: float = option(30.0, "Seconds that open requests get to finish after SIGTERM.")
    max_num_queued_reqs: int = option(
        1024, "Requests that may wait for their first token; more are refused with status 429 and Retry-After."
    )
    max_num_queued_tokens: int = option(1_000_000, "Prompt tokens that may wait likewise.")
    request_timeout: float | None = option(None, "Seconds after which a request ends with an error; default: never.")
    client_timeout: float = option(
        60.0, "Seconds that a client may take to send a request, or read nothing of its answer, before it is cut off."
    )
    api_key: tuple[str, ...] = option(
        (), "Keys, one of which a request must bear; also read from the environment variable OCTAVO_API_KEY."
    )
    api_key_file: str | None = option(None, "File with keys, one a line, which then no list of processes shows.")
    ssl_keyfile: str | None = option(None, "Private key, to serve HTTPS.")
    ssl_certfile: str | None = option(None, "Certificate, with those that it was signed with after it.")
    ssl_ca_certs: str | None = option(None, "Authorities whose certificates clients may show.")
    ssl_cert_reqs: int = option(0, "Whether clients must show a certificate: 0 no, 1 they may, 2 they must.")
    allowed_origins: tuple[str, ...] = option((), "Origins whose pages browsers let call the server; * for all.")
    allowed_methods: tuple[str, ...] = option(("*",), "Methods that they may use.")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that they may send.")
    allow_credentials: bool = option(False, "Let them send cookies and the like.")
    max_header_bytes: int = option(65_536, "Most bytes of a request's headers.")
    max_body_bytes: int = option(16 << 20, "Most bytes of a request's body.")
    max_request_choices: int = option(2048, "Most choices of one request: its prompts times n.")

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_range(self, "port", 0, 65535)
        _check_range(self, "shutdown_timeout", 0)
        _check_range(self, "max_num_queued_reqs", 1)
        _check_range(self, "max_num_queued_tokens", 1)
        _check_range(self, "request_timeout", 0.001)
        _check_range(self, "client_timeout", 0.001)
        _check_range(self, "ssl_cert_reqs", 0, 2)
        _check_range(self, "max_header_bytes", 1024)
        _check_range(self, "max_body_bytes", 1024)
        _check_range(self, "max_request_choices", 1)
        if (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs) and not self.ssl_certfile:
            raise ConfigError("HTTPS needs --ssl-certfile beside the other --ssl options.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was gathered about the model and the machine before anything is loaded."""

    model: ModelConfig
    provider: str
    """Name of the ops provider that will compute: cpu, reference."""
    num_threads: int
    free_memory_bytes: int
    """What the container can still take: the smaller of its limit less its use, and the machine's free memory."""
    num_parameters: int
    temporary_dir: str = ""
    """Folder for temporary files."""
    free_disk_bytes: int = 0
    """Of the folder that the tier's file goes to."""
    flops_per_s: float
    """Measured on a matrix product of the model's hidden size, in operations (multiplications and additions)."""
    packed_bytes: int | None = None
    """What the weights take where the checkpoint's quantised blocks are kept; None: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """Every value the engine runs with."""

    dtype: str
    quantization: str
    """none, int8, int4, or gguf: the checkpoint's own blocks."""
    int8_activations: bool
    """What quantised weights are multiplied with is quantised too."""
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    group_windows: tuple[int, ...] = (0,)
    """The window of each group of layers that share a block table, 0 for none; encoders have no groups."""
    num_swap_blocks: int = 0
    """Blocks of the second tier."""
    block_bytes: int = 0
    """Of a KV block in all layers of a group."""
    kv_cache_dir: str = ""
    preemption_mode: PreemptionMode = "auto"
    prefill_tokens_per_s: float = 1.0
    """As measured on a matrix product."""
    enable_prefix_caching: bool
    kv_eviction_policy: EvictionPolicyName = "lru"
    scheduling_policy: SchedulingPolicy = "fcfs"
    admission_policy: AdmissionPolicy = "predicted"
    enforce_eager: bool
    provider: str
    num_threads: int
    max_steps_in_flight: int
    seed: int
    pooling: PoolingConfig | None = None
    """How texts become embeddings; None in an engine that generates."""
    sampling_defaults: Mapping[str, int | float]
    """For requests that say nothing, by the names of SamplingParams."""
    reasons: tuple[tuple[str, str], ...] = ()
    """(option, why it has its value), for every derived value; printed once at start."""

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that one request can have computed at once, in pool and tier."""
        return capacity_tokens(
            self.group_windows, self.num_blocks, self.block_size, self.max_num_batched_tokens, self.num_swap_blocks
        )


def kv_bytes_per_token(model: ModelConfig, kv_cache_dtype: str) -> int:
    """Bytes of KV cache one token takes in a block of any group: 2·L·N_kv·(D·B + the scale's), of the L layers of the
    largest group."""
    element, scale = KV_BYTES[kv_cache_dtype]
    per_layer = 2 * model.num_key_value_heads * (model.head_dim * element + scale)
    return max(len(group.layers) for group in model.kv_groups) * per_layer


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


class _Reasons(list[tuple[str, str]]):
    def note(self, name: str, value: object, why: str) -> None:
        self.append((f"--{name}", f"{value}: {why}"))


def resolve_quantization(config: EngineConfig, has_blocks: bool) -> str:
    """none, int8, int4 or gguf, for a checkpoint that has quantised blocks or none."""
    if config.quantization == "auto":
        return "gguf" if has_blocks else "none"
    return config.quantization


def _resolve_quantization(config: EngineConfig, facts: Facts, reasons: _Reasons) -> str:
    quantization = resolve_quantization(config, facts.packed_bytes is not None)
    if quantization == "gguf":
        reasons.note("quantization", "gguf", "the checkpoint's own blocks, computed with as they are")
    if quantization == "none" and config.activation_dtype == "int8":
        raise ConfigError("--activation-dtype int8 needs quantised weights. Choose --quantization int8 or int4 too.")
    return quantization


def _resolve_dtype(config: EngineConfig, facts: Facts, quantization: str, reasons: _Reasons) -> str:
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


def _longest_context(model: ModelConfig) -> tuple[int, str]:
    """Positions the model was made for, and where the number comes from."""
    longest, rope = model.max_position_embeddings, model.rope
    if rope.rope_type == "yarn" and rope.original_max_position_embeddings is not None:
        scaled = int(rope.original_max_position_embeddings * rope.factor)
    elif rope.rope_type == "linear" and model.local_rope is None:
        scaled = int(longest * rope.factor)
    else:  # llama3's and Gemma 3's max_position_embeddings is the scaled length already
        scaled = longest
    if scaled > longest:
        return scaled, f"the model's {rope.rope_type} rotary scaling by {rope.factor:g}"
    return longest, "the model's max_position_embeddings"


def _resolve_max_model_len(config: EngineConfig, facts: Facts, reasons: _Reasons) -> int:
    longest, why = _longest_context(facts.model)
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


def _resolve_pooling(config: EngineConfig, facts: Facts, reasons: _Reasons) -> PoolingConfig | None:
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


def _resolve_token_budget(config: EngineConfig, facts: Facts, max_model_len: int, reasons: _Reasons) -> int:
    budget = config.max_num_batched_tokens or _default_token_budget(config, facts, reasons)
    if facts.model.is_encoder and budget < max_model_len:
        reasons.note("max-num-batched-tokens", max_model_len, "raised, since an encoder computes a text in one step")
        return max_model_len
    return budget


def _default_token_budget(config: EngineConfig, facts: Facts, reasons: _Reasons) -> int:
    num_multiplied = facts.num_parameters
    if facts.model.is_encoder:  # whose embedding is looked up only
        num_multiplied = max(num_multiplied - facts.model.vocab_size * facts.model.hidden_size, 1)
    tokens_per_s = facts.flops_per_s / (2 * num_multiplied)
    tokens = int(tokens_per_s * STEP_SECONDS) // 16 * 16
    budget = min(max(tokens, config.max_num_seqs), 8192)
    why = f"about {tokens_per_s:.0f} tokens/s by measurement, for steps of {STEP_SECONDS * 1000:.0f} ms"
    if tokens < budget:
        why += ", raised so that every running request gets its token"
    reasons.note("max-num-batched-tokens", budget, why)
    return budget


def _resolve_kv_bytes(
    config: EngineConfig, facts: Facts, weights_bytes: int, most: int, reasons: _Reasons
) -> tuple[int, str]:
    """Bytes of the KV pool, and the option that sets it."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, "--kv-cache-memory-bytes"
    free = facts.free_memory_bytes
    if config.gpu_memory_utilization is not None:
        pool = int(free * config.gpu_memory_utilization) - weights_bytes
        rule = f"{config.gpu_memory_utilization:.0%} of {_gib(free)} free, less {_gib(weights_bytes)} of weights"
    else:
        pool = (free - weights_bytes) // 2
        rule = f"half of {_gib(free)} free less {_gib(weights_bytes)} of weights"
    if pool >= most:
        pool, rule = most, "all that --max-num-seqs requests of --max-model-len tokens need"
    reasons.note("kv-cache-memory-bytes", _gib(max(pool, 0)), rule)
    return pool, "--gpu-memory-utilization or --kv-cache-memory-bytes"


def _weights_bytes(facts: Facts, dtype: str, quantization: str) -> int:
    if quantization == "gguf" and facts.packed_bytes is not None:
        return facts.packed_bytes
    return int(facts.num_parameters * QUANTIZED_BYTES.get(quantization, DTYPE_BYTES[dtype]))


def _resolve_num_blocks(
    config: EngineConfig,
    facts: Facts,
    weights_bytes: int,
    kv_cache_dtype: str,
    max_model_len: int,
    max_step_tokens: int,
    reasons: _Reasons,
) -> int:
    """Blocks of the KV pool. Raises ConfigError where there is no room for one beside the weights."""
    if facts.model.is_encoder:
        if weights_bytes > facts.free_memory_bytes:
            raise ConfigError(
                f"The weights need {_gib(weights_bytes)} and {_gib(facts.free_memory_bytes)} are free. Choose a "
                "smaller --dtype."
            )
        return 0
    block_bytes = kv_bytes_per_token(facts.model, kv_cache_dtype) * config.block_size
    blocks_per_seq = sum(
        most_blocks(group.window, max_model_len, config.block_size, max_step_tokens) for group in facts.model.kv_groups
    )
    most = config.max_num_seqs * blocks_per_seq * block_bytes
    pool_bytes, pool_option = _resolve_kv_bytes(config, facts, weights_bytes, most, reasons)
    if pool_bytes < block_bytes:
        raise ConfigError(
            f"The KV pool of {_gib(max(pool_bytes, 0))} has no room for one block of {block_bytes} bytes: "
            f"{_gib(facts.free_memory_bytes)} are free and the weights need {_gib(weights_bytes)}. "
            f"Raise {pool_option}, or choose a smaller --dtype or --kv-cache-dtype."
        )
    return pool_bytes // block_bytes


def _resolve_tier(config: EngineConfig, facts: Facts, block_bytes: int, is_pooling: bool, reasons: _Reasons) -> int:
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
            f"The tier of {_gib(num_blocks * block_bytes)} does not fit into the {_gib(facts.free_disk_bytes)} free in "
            "its folder. Lower --swap-space or --num-swap-blocks, or choose another --kv-cache-dir."
        )
    reasons.note("num-swap-blocks", num_blocks, f"{_gib(num_blocks * block_bytes)} in blocks of {block_bytes} bytes")
    return num_blocks


def _resolve_sampling_defaults(config: EngineConfig, facts: Facts, reasons: _Reasons) -> dict[str, int | float]:
    defaults = resolve_sampling_defaults(
        facts.model.sampling_defaults, config.generation_config, config.override_generation_config
    )
    if defaults:
        values = ", ".join(f"{name} {value:g}" for name, value in defaults.items())
        reasons.note("generation-config", values, "the model's defaults, for requests that set no others")
    return defaults


def resolve(config: EngineConfig, facts: Facts) -> ResolvedConfig:
    """Turn options and facts into the values the engine runs with.

    Raises ConfigError where they can't work together: a context longer than the model's, a pool without room.
    """
    reasons = _Reasons()
    pooling = _resolve_pooling(config, facts, reasons)
    quantization = _resolve_quantization(config, facts, reasons)
    dtype = _resolve_dtype(config, facts, quantization, reasons)
    kv_cache_dtype = DTYPE_ALIASES.get(config.kv_cache_dtype, config.kv_cache_dtype)
    if kv_cache_dtype == "auto":
        kv_cache_dtype = dtype
    max_model_len = _resolve_max_model_len(config, facts, reasons)
    budget = _resolve_token_budget(config, facts, max_model_len, reasons)
    weights_bytes = _weights_bytes(facts, dtype, quantization)
    num_blocks = _resolve_num_blocks(config, facts, weights_bytes, kv_cache_dtype, max_model_len, budget, reasons)
    is_encoder = facts.model.is_encoder
    block_bytes = 0 if is_encoder else kv_bytes_per_token(facts.model, kv_cache_dtype) * config.block_size
    num_swap_blocks = _resolve_tier(config, facts, block_bytes, pooling is not None, reasons)
    if facts.provider == "reference":
        reasons.note("attention-backend", "REFERENCE", "plain torch; the native kernels are not used")
    return ResolvedConfig(
        dtype=dtype,
        quantization=quantization,
        int8_activations=config.activation_dtype in ("auto", "int8"),
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        block_size=config.block_size,
        num_blocks=num_blocks,
        group_windows=tuple(group.window for group in facts.model.kv_groups),
        num_swap_blocks=num_swap_blocks,
        block_bytes=block_bytes,
        kv_cache_dir=config.kv_cache_dir or facts.temporary_dir,
        preemption_mode=cast(PreemptionMode, config.preemption_mode),
        prefill_tokens_per_s=facts.flops_per_s / (2 * facts.num_parameters),
        enable_prefix_caching=config.enable_prefix_caching and not facts.model.is_encoder,
        kv_eviction_policy=cast(EvictionPolicyName, config.kv_eviction_policy),
        scheduling_policy=cast(SchedulingPolicy, config.scheduling_policy),
        admission_policy=cast(AdmissionPolicy, config.admission_policy),
        enforce_eager=config.enforce_eager,
        provider=facts.provider,
        num_threads=facts.num_threads,
        max_steps_in_flight=2 if config.async_scheduling else 1,
        seed=config.seed,
        pooling=pooling,
        sampling_defaults=_resolve_sampling_defaults(config, facts, reasons),
        reasons=tuple(reasons),
    )
