"""Every supported family, in float32, against transformers: logits to 1e-4, greedy tokens exactly."""

from pathlib import Path

import pytest
import torch

from octavo.devices.registry import open_device
from octavo.errors import CheckpointError
from octavo.kernels.ops import Ops
from octavo.layers.weights import WeightFormat
from octavo.models.loader import load_model, open_checkpoint
from tests.models.driver import sequence_logits
from tests.tiny_models import FAMILIES, make_folder, make_model

TOLERANCE = 1e-4
NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 150, 24


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return open_device(request.param).ops


def _prompt(seed: int, length: int = NUM_PROMPT_TOKENS) -> list[int]:
    return torch.randint(2, 384, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_equal_transformers(family: str, ops: Ops, tmp_path: Path) -> None:
    reference = make_model(family)
    checkpoint = open_checkpoint(str(make_folder(tmp_path, family, shards=True)))
    model = load_model(checkpoint, ops, WeightFormat(torch.float32), 512)
    token_ids = _prompt(seed=1)
    for _ in range(NUM_NEW_TOKENS):
        with torch.inference_mode():
            expected = reference(torch.tensor([token_ids])).logits[0]
        best, second = expected[-1].topk(2).values.tolist()
        actual = sequence_logits(model, ops, checkpoint.config, token_ids)
        assert (actual - expected).abs().max() < TOLERANCE
        if best - second >= TOLERANCE:  # closer ones may fall either way: exempt
            assert int(actual[-1].argmax()) == int(expected[-1].argmax())
        token_ids.append(int(expected[-1].argmax()))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_bits_in_chunks_of_any_size(family: str, tmp_path: Path) -> None:
    ops = open_device("CPU").ops
    checkpoint = open_checkpoint(str(make_folder(tmp_path, family)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = load_model(checkpoint, ops, WeightFormat(dtype), 512)
        token_ids = _prompt(seed=2, length=70)
        whole = sequence_logits(model, ops, checkpoint.config, token_ids, dtype)
        for chunk in (1, 7, 16, 33):
            assert torch.equal(sequence_logits(model, ops, checkpoint.config, token_ids, dtype, chunk), whole)


def test_missing_surplus_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_folder(tmp_path, "llama")
    path = folder / "model.safetensors"
    tensors = load_file(path)

    def load_with(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, path)
        load_model(open_checkpoint(str(folder)), Ops(), WeightFormat(torch.float32), 512)

    name = "model.layers.1.mlp.down_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name}.*missing"):
        load_with({key: value for key, value in tensors.items() if key != name})
    with pytest.raises(CheckpointError, match=r"does not use: model\.layers\.0\.surprise"):
        load_with(tensors | {"model.layers.0.surprise": torch.zeros(3)})
    with pytest.raises(CheckpointError, match=rf"{name}.*\[64, 100\].*\[64, 112\]"):
        load_with(tensors | {name: torch.zeros(64, 100)})
