"""BERT against transformers, packed and alone, through ops only, from checkpoints of every naming."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.devices.registry import open_device
from octavo.errors import CheckpointError
from octavo.kernels.ops import Ops
from octavo.layers.context import StepContext
from octavo.layers.weights import WeightFormat
from octavo.models.loader import Encoder, load_encoder, open_checkpoint
from tests.models.test_only_ops_compute import OnlyOps, WatchedOps
from tests.tiny_encoders import make_encoder, make_encoder_folder, reference_hidden_states

NOTHING = torch.empty(0, dtype=torch.int32)
LENGTHS = [1, 37, 128, 16, 2]


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return open_device(request.param).ops


def prompts(lengths: list[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 200, (length,), generator=generator).tolist() for length in lengths]


def hidden_states(
    model: Encoder, ops: Ops, token_ids: list[list[int]], dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """One tensor a prompt, of one packed step."""
    sizes = list(map(len, token_ids))
    ctx = StepContext(
        ops=ops,
        dtype=dtype,
        positions=torch.cat([torch.arange(size, dtype=torch.int32) for size in sizes]),
        slot_mappings=(),
        block_tables=(),
        query_start=torch.tensor([0, *sizes]).cumsum(0).to(torch.int32),
        seq_lens=NOTHING,
        kv_caches=[],
    )
    with torch.inference_mode():
        states = model(torch.tensor(list(chain.from_iterable(token_ids)), dtype=torch.int32), ctx)
    return list(states.split(sizes))


def test_hidden_states_equal_transformers(ops: Ops, tmp_path: Path) -> None:
    reference = make_encoder()
    model = load_encoder(open_checkpoint(str(make_encoder_folder(tmp_path))), ops, WeightFormat(torch.float32), 128)
    for token_ids, states in zip(prompts(), hidden_states(model, ops, prompts()), strict=True):
        assert (states - reference_hidden_states(reference, token_ids)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_prompt_packed_with_others_gives_the_bits_it_gives_alone(dtype: torch.dtype, tmp_path: Path) -> None:
    ops = open_device("CPU").ops
    model = load_encoder(open_checkpoint(str(make_encoder_folder(tmp_path))), ops, WeightFormat(dtype), 128)
    for token_ids, states in zip(prompts(), hidden_states(model, ops, prompts(), dtype), strict=True):
        assert torch.equal(hidden_states(model, ops, [token_ids], dtype)[0], states)


def test_it_computes_through_ops_alone(tmp_path: Path) -> None:
    model = load_encoder(
        open_checkpoint(str(make_encoder_folder(tmp_path))), WatchedOps(), WeightFormat(torch.float32), 128
    )

    def watched(input_ids: torch.Tensor, ctx: Any) -> torch.Tensor:
        with OnlyOps():
            result: torch.Tensor = model(input_ids, ctx)
            return result

    hidden_states(watched, WatchedOps(), prompts([7, 3]))


def rename(name: str) -> str:
    """As BertForPreTraining of 2019 names its tensors."""
    return "bert." + name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def test_checkpoints_with_a_head_and_old_names_load_the_same(tmp_path: Path) -> None:
    ops = open_device("CPU").ops
    folder = make_encoder_folder(tmp_path)
    model = load_encoder(open_checkpoint(str(folder)), ops, WeightFormat(torch.float32), 128)
    before = hidden_states(model, ops, prompts())
    path = folder / "model.safetensors"
    tensors = {rename(name): tensor for name, tensor in load_file(path).items()}
    save_file(
        tensors | {"cls.predictions.bias": torch.zeros(200), "bert.embeddings.position_ids": torch.zeros(1)}, path
    )
    after = hidden_states(
        load_encoder(open_checkpoint(str(folder)), ops, WeightFormat(torch.float32), 128), ops, prompts()
    )
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"is_decoder": True}, "is_decoder is true"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'; absolute"),
        ({"hidden_act": "gelu_new"}, "'gelu_new' is not supported; gelu is"),
    ],
)
def test_a_bert_of_another_kind_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = make_encoder_folder(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path))
