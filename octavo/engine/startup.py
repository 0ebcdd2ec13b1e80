"""build_engine: from a user's options to an engine that is ready to step, one timed stage after the other."""

import math
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from msgspec import structs

from octavo.checkpoint.checkpoint import Checkpoint
from octavo.checkpoint.model_config import ModelConfig
from octavo.core.request import RequestLimits
from octavo.core.scheduler import Scheduler
from octavo.core.step import NewRequest, ScheduledRequest, SchedulerOutput
from octavo.devices.device import Device, StepRoom
from octavo.devices.machine import available_cpus, free_disk_bytes
from octavo.devices.registry import open_device
from octavo.engine.executor import InlineExecutor, Runner, ThreadExecutor
from octavo.engine.grammars import Grammars
from octavo.engine.llm_engine import LLMEngine
from octavo.engine.memory_roof import MemoryRoof, kv_token_bytes
from octavo.ipc.messages import EngineInfo
from octavo.layers.gguf_blocks import QUANTIZED_TYPES
from octavo.layers.weights import WeightFormat, packed_bytes, quantized_form
from octavo.models.loader import CausalLM, Encoder, load_encoder, load_model, multiplied_weights, open_checkpoint
from octavo.options import EngineConfig
from octavo.plan.facts import Facts
from octavo.resolve import ResolvedConfig, resolve, resolve_num_threads, resolve_quantization
from octavo.runner.kv_cache import kv_layout
from octavo.runner.model_runner import ModelRunner
from octavo.runner.pooling_runner import PoolingRunner
from octavo.sampling_params import SamplingParams
from octavo.text.text_side import load_model_tokenizer

if TYPE_CHECKING:
    from octavo.text.grammar import GrammarCompiler

__all__ = ["StartProgress", "build_engine"]


class StartProgress:
    """Told what the start is doing. This one keeps quiet; the engine process logs, `LLM` draws a bar."""

    def stage_started(self, name: str) -> None:
        """A stage begins."""

    def stage_finished(self, name: str, seconds: float) -> None:
        """The stage is over."""

    def weights_read(self, done_bytes: int, total_bytes: int) -> None:
        """Checkpoint bytes read so far."""

    def roof_measured(self, roof: MemoryRoof) -> None:
        """How fast memory lets the model decode; not told where that can't be measured, or nothing is decoded."""

    def resolved(self, config: ResolvedConfig) -> None:
        """Every value the engine runs with, and why."""


class _Stages:
    def __init__(self, progress: StartProgress) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress.stage_started(name)
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        self.progress.stage_finished(name, self.seconds[name])


def build_engine(config: EngineConfig, progress: StartProgress | None = None) -> tuple[LLMEngine, EngineInfo]:
    """Open the checkpoint, gather facts, resolve the configuration, load the weights and time reading them, warm up.

    Raises ConfigError for options that can't work, CheckpointError for files that can't be served.
    """
    progress = progress or StartProgress()
    stages = _Stages(progress)
    with stages.stage("open checkpoint"):
        checkpoint = open_checkpoint(config.model, config.download_dir, config.revision)
    with stages.stage("measure machine"):
        device, facts = _gather_facts(config, checkpoint)
        resolved = resolve(config, facts)
    progress.resolved(resolved)
    with stages.stage("load weights"):
        grammars = Grammars(partial(_grammar_compiler, config, checkpoint.config))
        model = _load_model(checkpoint, device, resolved, progress)
        runner = _make_runner(model, device, resolved, checkpoint.config)
    with stages.stage("measure memory"):
        roof = _measure_roof(model, device, resolved, checkpoint.config)
    if roof is not None:
        progress.roof_measured(roof)
    info = _describe(resolved, checkpoint.config)
    engine = _assemble(info, device, runner, grammars, roof)
    with stages.stage("warm up"):
        _warm_up(runner, resolved)
    return engine, structs.replace(info, start_seconds=stages.seconds)


def _gather_facts(config: EngineConfig, checkpoint: Checkpoint) -> tuple[Device, Facts]:
    device = open_device(config.attention_backend)
    num_threads = resolve_num_threads(config, available_cpus())
    device.set_num_threads(num_threads)
    dtype = torch.float32 if config.dtype in ("float32", "float") else torch.bfloat16
    tensors = checkpoint.tensors.values()
    has_blocks = any(tensor.dtype in QUANTIZED_TYPES for tensor in tensors)
    form = quantized_form(resolve_quantization(config, has_blocks), checkpoint.config.dtype)
    int8_activations = config.activation_dtype in ("auto", "int8")
    facts = Facts(
        model=checkpoint.config,
        provider=device.name,
        provider_remark=device.remark,
        num_threads=num_threads,
        free_memory_bytes=device.free_memory_bytes(),
        temporary_dir=tempfile.gettempdir(),
        free_disk_bytes=free_disk_bytes(config.kv_cache_dir or tempfile.gettempdir()),
        num_parameters=sum(math.prod(tensor.shape) for tensor in tensors),
        flops_per_s=device.flops_per_s(checkpoint.config.hidden_size, dtype, form, int8_activations),
        packed_bytes=sum(packed_bytes(tensor) for tensor in tensors) if has_blocks else None,
    )
    return device, facts


def _grammar_compiler(config: EngineConfig, model_config: ModelConfig) -> "GrammarCompiler":
    """For the first request that asks for structured output."""
    from octavo.text.grammar import GrammarCompiler

    return GrammarCompiler(load_model_tokenizer(config), model_config.vocab_size, model_config.eos_token_ids)


def _load_model(checkpoint: Checkpoint, device: Device, config: ResolvedConfig, progress: StartProgress) -> Encoder:
    total_bytes = sum(tensor.num_bytes for tensor in checkpoint.tensors.values())
    done_bytes = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += num_bytes
        progress.weights_read(done_bytes, total_bytes)

    load = load_model if config.runtime.pooling is None else load_encoder
    weights = config.weights
    weight_format = WeightFormat(getattr(torch, weights.dtype), weights.quantization, weights.int8_activations)
    return load(checkpoint, device.ops, weight_format, config.runtime.max_model_len, on_bytes)


def _make_runner(model: Encoder, device: Device, config: ResolvedConfig, model_config: ModelConfig) -> Runner:
    limits, runtime = config.scheduler, config.runtime
    dtype = getattr(torch, config.weights.dtype)
    room = StepRoom(
        num_tokens=limits.max_num_batched_tokens,
        num_requests=limits.max_num_seqs,
        num_logits=limits.max_num_seqs,
        max_model_len=runtime.max_model_len,
        block_size=limits.block_size,
        num_groups=len(limits.group_windows),
        vocab_size=model_config.vocab_size,
    )
    layout = None
    if not model_config.is_encoder:
        tier = (limits.num_swap_blocks, config.kv.folder)
        layout = kv_layout(model_config, limits.num_blocks, limits.block_size, config.kv.dtype, *tier)
    if runtime.pooling is not None:
        pooling, eager = runtime.pooling, runtime.enforce_eager
        return PoolingRunner(model, model_config, device, dtype, room, layout, pooling, eager)
    assert layout is not None
    return ModelRunner(cast(CausalLM, model), model_config, device, dtype, room, layout, runtime.enforce_eager)


def _measure_roof(
    model: Encoder, device: Device, config: ResolvedConfig, model_config: ModelConfig
) -> MemoryRoof | None:
    """The weights themselves are read: from where they are, in memory or, of a small model, in a cache."""
    if config.runtime.pooling is not None:
        return None
    matrices = [weight.data for weight in multiplied_weights(model)]
    bytes_per_s = device.read_bytes_per_s(matrices)
    if bytes_per_s is None:
        return None
    kv_bytes = kv_token_bytes(model_config.kv_groups, config.scheduler.block_bytes // config.scheduler.block_size)
    return MemoryRoof(bytes_per_s, sum(matrix.nbytes for matrix in matrices), kv_bytes)


def _assemble(
    info: EngineInfo, device: Device, runner: Runner, grammars: Grammars, roof: MemoryRoof | None
) -> LLMEngine:
    config = info.config
    scheduler = Scheduler(replace(config.scheduler, copy_bytes_per_s=_copy_rate(runner)))
    steps = config.runtime.max_steps_in_flight
    executor = InlineExecutor(runner) if steps == 1 else ThreadExecutor(runner)
    return LLMEngine(
        scheduler,
        executor,
        info.limits,
        frozenset(info.eos_token_ids),
        max_steps_in_flight=steps,
        seed=config.scheduler.seed,
        is_pooling=config.runtime.pooling is not None,
        progress=device.progress,
        grammars=grammars,
        roof=roof,
    )


def _copy_rate(runner: Runner) -> float:
    """Bytes a second between the pool and the tier, if there is one."""
    return runner.kv_pool.measure_copy_rate() if isinstance(runner, ModelRunner) else 1.0


def _warm_up(runner: Runner, config: ResolvedConfig) -> None:
    """Compute a step that is nobody's, so that the first request does not pay for first touches."""
    limits = config.scheduler
    prompt = [0] * min(limits.block_size, limits.max_num_batched_tokens, config.runtime.max_model_len)
    request = NewRequest(-1, prompt, SamplingParams(temperature=0.0), seed=0)
    entry = ScheduledRequest(-1, 0, len(prompt), 1, tuple([0] for _ in limits.group_windows))
    runner.begin(SchedulerOutput(-1, [entry], new_requests=[request]))
    runner.forget([-1])


def _describe(config: ResolvedConfig, model: ModelConfig) -> EngineInfo:
    limits = RequestLimits(
        vocab_size=model.vocab_size,
        max_model_len=config.runtime.max_model_len,
        kv_capacity_tokens=config.scheduler.kv_capacity_tokens,
    )
    return EngineInfo(
        limits=limits,
        eos_token_ids=list(model.eos_token_ids),
        embedding_size=model.hidden_size,
        config=config,
        start_seconds={},
    )
