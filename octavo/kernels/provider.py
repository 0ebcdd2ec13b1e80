"""resolve_ops: the ops provider by name."""

import importlib.util
import warnings
from typing import Literal

from octavo.kernels.ops import Ops

__all__ = ["ProviderName", "resolve_ops"]

ProviderName = Literal["auto", "cpu", "reference"]


def resolve_ops(name: ProviderName) -> Ops:
    """The provider called `name`; "auto": the native CPU kernels, or where they aren't built the reference with a
    warning.
    """
    if name == "reference":
        return Ops()
    if name == "auto" and importlib.util.find_spec("octavo.kernels._cpu") is None:
        warnings.warn(
            "The native kernels are not built, so plain torch computes, many times slower. `make setup` builds them.",
            stacklevel=2,
        )
        return Ops()
    from octavo.kernels.cpu import CpuOps

    return CpuOps()
