"""What the engine process logs while it starts: stages, how much of the weights is read, derived values."""

import sys

from octavo.engine.llm_engine import LLMEngine
from octavo.engine.memory_roof import MemoryRoof
from octavo.engine.startup import StartProgress, build_engine
from octavo.ipc.messages import EngineInfo
from octavo.options import EngineConfig
from octavo.resolve import ResolvedConfig

__all__ = ["StartLog", "build_logged_engine"]


class StartLog(StartProgress):
    """Lines on standard error; how far the weights are is only shown on a terminal."""

    def stage_started(self, name: str) -> None:
        log(f"{name} ...")

    def stage_finished(self, name: str, seconds: float) -> None:
        log(f"{name}: {seconds:.2f} s")

    def weights_read(self, done_bytes: int, total_bytes: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done_bytes == total_bytes else ""
            share = done_bytes / total_bytes
            print(f"\r[engine] {share:4.0%} of {total_bytes / 1e6:.0f} MB", end=end, file=sys.stderr, flush=True)

    def roof_measured(self, roof: MemoryRoof) -> None:
        rate, num_bytes = roof.bytes_per_s / 1e9, roof.weight_bytes / 1e6
        log(f"roof of one stream: {rate:.1f} GB/s over {num_bytes:.0f} MB a token = {roof.tokens_per_s:.0f} tokens/s")

    def resolved(self, config: ResolvedConfig) -> None:
        for option, reason in config.reasons:
            log(f"{option} {reason}")


def log(text: str) -> None:
    print(f"[engine] {text}", file=sys.stderr, flush=True)


def build_logged_engine(config: EngineConfig) -> tuple[LLMEngine, EngineInfo]:
    return build_engine(config, StartLog())
