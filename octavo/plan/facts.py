"""Facts: what is known of a model and a machine before anything is loaded; Reasons: why each derived value is what it
is.

Plain data: the engine's start gathers the facts, `resolve()` and the planner compute with them.
"""

from dataclasses import dataclass

from octavo.checkpoint.model_config import ModelConfig

__all__ = ["Facts", "Reasons", "gib"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    model: ModelConfig
    provider: str
    """Name of the device that will compute."""
    provider_remark: str = ""
    """What is to be said of it, if it has a drawback."""
    num_threads: int
    free_memory_bytes: int
    """Bytes that this process can still take: the smallest of what the machine, its container and its limits leave."""
    num_parameters: int
    temporary_dir: str = ""
    """Folder for temporary files."""
    free_disk_bytes: int = 0
    """Free bytes in the folder of the tier's file."""
    flops_per_s: float
    """Multiplications and additions a second, measured on a matrix product of the model's hidden size."""
    packed_bytes: int | None = None
    """Bytes of the weights if the checkpoint's quantised blocks are kept; None if it has no such blocks."""


class Reasons(list[tuple[str, str]]):
    """(option, its value and why) for every derived value."""

    def note(self, name: str, value: object, why: str) -> None:
        self.append((f"--{name}", f"{value}: {why}"))


def gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
