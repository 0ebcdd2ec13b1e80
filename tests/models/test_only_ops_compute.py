"""DESIGN 7: a model computes through ops and views alone, so that a step can be captured and moved to any device."""

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.kernels.ops import Ops
from octavo.layers.weights import WeightFormat
from octavo.models.loader import load_model, open_checkpoint
from tests.models.driver import sequence_logits
from tests.tiny_models import FAMILIES, make_folder

VIEWS = {
    "view",
    "slice",
    "split",
    "select",
    "unsqueeze",
    "squeeze",
    "transpose",
    "permute",
    "expand",
    "alias",
    "detach",
}


class WatchedOps(Ops):
    """The reference provider, telling whether an op is being computed."""

    depth = 0

    def __getattribute__(self, name: str) -> Any:
        attribute = super().__getattribute__(name)
        if name.startswith("_") or not callable(attribute):
            return attribute

        def watched(*args: Any, **kwargs: Any) -> Any:
            WatchedOps.depth += 1
            try:
                return attribute(*args, **kwargs)
            finally:
                WatchedOps.depth -= 1

        return watched


class OnlyOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.removesuffix("_copy")
        if WatchedOps.depth == 0 and name not in VIEWS:
            line = traceback.extract_stack()[-2]  # this method's caller
            raise AssertionError(f"{func} is computed outside of ops at {line.filename}:{line.lineno}: {line.line}")
        return func(*args, **(kwargs or {}))


class _Watching:
    """A model whose calls, and nothing around them, are watched."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: torch.Tensor, ctx: Any) -> torch.Tensor:
        with OnlyOps():
            result: torch.Tensor = self.model(input_ids, ctx)
            return result

    def logits(self, hidden_states: torch.Tensor, rows: torch.Tensor, ctx: Any) -> torch.Tensor:
        with OnlyOps():
            result: torch.Tensor = self.model.logits(hidden_states, rows, ctx)
            return result


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_computes_through_ops_alone(family: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_folder(tmp_path, family)))
    model = load_model(checkpoint, WatchedOps(), WeightFormat(torch.float32), 512)
    sequence_logits(_Watching(model), WatchedOps(), checkpoint.config, list(range(2, 40)))


def test_a_computing_call_outside_of_ops_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_folder(tmp_path, "llama")))
    model = load_model(checkpoint, WatchedOps(), WeightFormat(torch.float32), 512)

    class Careless:
        logits = model.logits

        def __call__(self, input_ids: torch.Tensor, ctx: Any) -> torch.Tensor:
            return model(input_ids, ctx) * 2.0

    with pytest.raises(AssertionError, match=r"aten\.mul"):
        sequence_logits(_Watching(Careless()), WatchedOps(), checkpoint.config, [2, 3, 4])
