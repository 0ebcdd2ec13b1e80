"""GGUF files are read as the gguf package reads them, and mean what llama.cpp takes them to mean."""

import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.checkpoint.gguf_format import GGML_TYPES, GGUFFile
from octavo.errors import CheckpointError, UnknownArchitectureError
from octavo.text.tokenizer import load_tokenizer
from tests.checkpoint.gguf_files import (
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    TOKEN_TYPES,
    TOKENS,
    VOCAB,
    tiny_tensors,
    write_gguf,
)
from tests.checkpoint.opening import open_gguf


def assert_equals_reference(path: Path) -> None:
    file, reference = GGUFFile(path), gguf.GGUFReader(path)
    keys = [key for key in reference.fields if not key.startswith("GGUF.")]
    assert list(file.metadata) == keys
    for key in keys:
        expected, actual = reference.fields[key].contents(), file.metadata[key]
        assert (actual.tolist() if isinstance(actual, np.ndarray) else actual) == expected, key
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(tensor.shape.tolist()[::-1])
        assert (ours.type.name, ours.offset, ours.num_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
        assert np.array_equal(file.file.view(ours.offset, ours.num_bytes), tensor.data.view(np.uint8).reshape(-1))


def test_the_real_file_is_read_as_by_the_gguf_package(smollm_path: Path) -> None:
    assert_equals_reference(smollm_path)


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
@pytest.mark.parametrize("alignment", [None, 64])
def test_written_files_are_read_as_by_the_gguf_package(tmp_path: Path, arch: str, alignment: int | None) -> None:
    keys = {
        "general.tags": ["x", "", "ü"],
        "test.floats": [0.5, -1.5],
        "test.bools": [True, False, True],
        "test.negative": -7,
        "test.flag": False,
        "test.text": "",
        "test.nested": [[1, 2], [3]],
    }
    path = write_gguf(tmp_path / "m.gguf", arch, keys, alignment=alignment, matrix_type=gguf.GGMLQuantizationType.Q8_0)
    del keys["test.nested"]  # the package's reader flattens nested arrays
    assert [items.tolist() for items in GGUFFile(path).metadata["test.nested"]] == [[1, 2], [3]]
    assert_equals_reference(write_gguf(path, arch, keys, alignment=alignment))


def test_the_type_table_is_the_gguf_packages() -> None:
    reference = {int(type_id): (type_id.name, *sizes) for type_id, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {i: (t.name, t.block_size, t.block_bytes) for i, t in GGML_TYPES.items()} == reference


def test_the_real_file_opens_in_a_fraction_of_a_second(smollm_path: Path) -> None:
    start = time.process_time()
    open_gguf(smollm_path)
    assert time.process_time() - start < 0.5  # measured 0.08


def test_the_real_checkpoint_is_smollm2(smollm_path: Path) -> None:
    checkpoint = open_gguf(smollm_path)
    config = checkpoint.config
    assert (config.model_type, config.vocab_size, config.hidden_size, config.head_dim) == ("llama", 49152, 576, 64)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert config.tie_word_embeddings
    assert config.rope.rope_theta == 100_000.0
    assert config.sliding_windows == (None,) * 30
    assert (config.dtype, config.bos_token_id, config.eos_token_ids) == ("Q4_1", 1, (2, 0))
    vocabulary = checkpoint.vocabulary
    assert vocabulary is not None
    assert (vocabulary.model, vocabulary.pre, len(vocabulary.tokens)) == ("gpt2", "smollm", 49152)
    assert vocabulary.merges is not None
    assert len(vocabulary.merges) == 48900
    assert vocabulary.chat_template is not None
    assert len(checkpoint.tensors) == 272


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_tensors_have_hugging_face_names_and_shapes_and_their_bytes(tmp_path: Path, arch: str) -> None:
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", arch))
    written = tiny_tensors(arch)
    assert len(checkpoint.tensors) == len(written)
    for hf_name, gguf_name in [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("lm_head.weight", "output.weight"),
        ("model.layers.1.self_attn.k_proj.weight", "blk.1.attn_k.weight"),
        ("model.layers.0.self_attn.o_proj.weight", "blk.0.attn_output.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.1.post_attention_layernorm.weight", "blk.1.ffn_norm.weight"),
    ]:
        assert checkpoint.tensors[hf_name].shape == written[gguf_name].shape
        assert checkpoint.read(hf_name).tobytes() == written[gguf_name].tobytes()
    assert not checkpoint.read("lm_head.weight").flags.writeable


def test_only_queries_and_keys_of_arch_llama_are_marked_as_interleaved(tmp_path: Path) -> None:
    biases = {f"blk.{i}.attn_{p}.bias": np.zeros(n, np.float32) for i in range(2) for p, n in [("q", 64), ("k", 32)]}
    llama = open_gguf(write_gguf(tmp_path / "l.gguf", tensors=tiny_tensors("llama") | biases))
    marked = {name: info.rope_interleaved_heads for name, info in llama.tensors.items() if info.rope_interleaved_heads}
    assert marked == {
        f"model.layers.{layer}.self_attn.{part}_proj.{kind}": heads
        for layer in range(LAYERS)
        for part, heads in [("q", HEADS), ("k", KV_HEADS)]
        for kind in ("weight", "bias")
    }
    qwen2 = open_gguf(write_gguf(tmp_path / "q.gguf", "qwen2"))
    assert not any(info.rope_interleaved_heads for info in qwen2.tensors.values())
    assert qwen2.config.attention_bias
    assert not qwen2.config.attention_output_bias


def test_a_missing_output_matrix_means_tied_embeddings(tmp_path: Path) -> None:
    assert not open_gguf(write_gguf(tmp_path / "m.gguf")).config.tie_word_embeddings
    path = write_gguf(tmp_path / "m.gguf", tensors=tiny_tensors("llama", tied=True))
    assert open_gguf(path).config.tie_word_embeddings


@pytest.mark.parametrize(
    ("keys", "field", "expected"),
    [
        ({}, "head_dim", 16),
        ({"attention.key_length": 32, "attention.value_length": 32}, "head_dim", 32),
        ({"attention.head_count_kv": None}, "num_key_value_heads", HEADS),
        ({"attention.head_count_kv": [2, 2]}, "num_key_value_heads", 2),
        ({}, "sliding_windows", (None, None)),
        ({"attention.sliding_window": 100}, "sliding_windows", (100, 100)),
        ({"attention.sliding_window": 0}, "sliding_windows", (None, None)),
        ({"vocab_size": 999}, "vocab_size", VOCAB),
        ({}, "dtype", "float32"),
    ],
)
def test_configuration_follows_the_metadata(tmp_path: Path, keys: dict[str, Any], field: str, expected: object) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys={f"llama.{key}": value for key, value in keys.items()})
    assert getattr(open_gguf(path).config, field) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10_000.0}),
        ({"freq_base": 5e5, "dimension_count": 16}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default", "factor": 1.0}),
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scaling.factor": 0.0}, {"rope_type": "default"}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": None},
        ),
        ({"scaling.type": "yarn", "scaling.factor": 4.0}, {"original_max_position_embeddings": 256}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.attn_factor": 0.5},
            {"attention_factor": pytest.approx(0.5 * (1 + 0.1 * np.log(4.0)))},
        ),
    ],
)
def test_rotary_scaling_follows_the_metadata(tmp_path: Path, keys: dict[str, Any], expected: dict[str, Any]) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys={f"llama.rope.{key}": value for key, value in keys.items()})
    rope = open_gguf(path).config.rope
    assert {name: getattr(rope, name) for name in expected} == expected


def test_rope_freqs_become_divisors_and_stored_frequencies_are_left_out(tmp_path: Path) -> None:
    extras = {
        "rope_freqs.weight": np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32),
        "blk.0.attn_rot_embd.weight": np.ones(8, np.float32),
    }
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", tensors=tiny_tensors("llama") | extras))
    assert checkpoint.config.rope.frequency_divisors == (1, 1, 1, 2, 4, 8, 8, 8)
    assert len(checkpoint.tensors) == len(tiny_tensors("llama"))


def test_sampling_defaults_come_from_the_general_keys(tmp_path: Path) -> None:
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.mirostat": 1}
    config = open_gguf(write_gguf(tmp_path / "m.gguf", keys=keys)).config
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": 20}


def test_norms_of_heads_have_their_names(tmp_path: Path) -> None:
    norms = {f"blk.{i}.attn_{part}_norm.weight": np.ones(16, np.float32) for i in range(LAYERS) for part in "qk"}
    keys = {"qwen3.attention.key_length": 16}
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", "qwen3", keys, tiny_tensors("qwen3") | norms))
    assert (checkpoint.config.model_type, checkpoint.config.head_dim) == ("qwen3", 16)
    assert checkpoint.tensors["model.layers.1.self_attn.k_norm.weight"].shape == (16,)


def test_a_named_token_of_minus_1_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = {f"tokenizer.ggml.{name}_token_id": -1 for name in ("eot", "eom", "bos", "padding")}
    assert open_gguf(write_gguf(tmp_path / "m.gguf", keys=keys)).config.eos_token_ids == (2, 10)
    assert "eot_token_id is -1, which is no token" in caplog.text


def test_the_end_of_turn_that_the_template_writes_ends_a_turn_whatever_its_type(tmp_path: Path) -> None:
    chatml = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' }}{% endfor %}"
    keys = {
        "tokenizer.ggml.token_type": [*TOKEN_TYPES[:9], 1, 1, 1],
        "tokenizer.chat_template": chatml,
        "tokenizer.ggml.merges": ["a b"],
    }
    checkpoint = open_gguf(write_gguf(tmp_path / "m.gguf", keys=keys))
    assert checkpoint.config.eos_token_ids == (2, 10)
    assert checkpoint.vocabulary is not None
    tokenizer = load_tokenizer(checkpoint.path, checkpoint.vocabulary)
    assert tokenizer.encode("<|im_start|>ab<|im_end|>", add_special_tokens=False) == [9, 5, 10]
    assert tokenizer.is_special(10)


def test_named_chat_templates_are_read(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"tokenizer.chat_templates": ["rag", "tool_use"], "tokenizer.ggml.merges": ["a b"]}
    keys |= {f"tokenizer.chat_template.{name}": f"{name}!" for name in ("rag", "tool_use")}
    vocabulary = open_gguf(write_gguf(tmp_path / "m.gguf", keys=keys)).vocabulary
    assert vocabulary is not None
    assert load_tokenizer(tmp_path, vocabulary).chat_templates == {
        "default": "{{ messages[0]['content'] }}",
        "rag": "rag!",
        "tool_use": "tool_use!",
    }


def test_end_of_turn_tokens_are_the_named_ones_and_known_control_tokens(tmp_path: Path) -> None:
    # <|im_end|> (10) is a control token here; <|eot_id|> (11) is an ordinary one.
    assert open_gguf(write_gguf(tmp_path / "m.gguf")).config.eos_token_ids == (2, 10)
    keys = {"tokenizer.ggml.eot_token_id": 11, "tokenizer.ggml.eom_token_id": 3, "tokenizer.ggml.eos_token_id": 10}
    assert open_gguf(write_gguf(tmp_path / "m.gguf", keys=keys)).config.eos_token_ids == (10, 11, 3)


def test_the_vocabulary_is_complete(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.padding_token_id": -1, "tokenizer.ggml.pre": None}
    vocabulary = open_gguf(write_gguf(tmp_path / "m.gguf", keys=keys)).vocabulary
    assert vocabulary is not None
    assert vocabulary.tokens == TOKENS
    assert vocabulary.pre == "default"
    assert vocabulary.merges == ["a b", "Ġ a"]
    assert vocabulary.scores is not None
    assert vocabulary.scores.tolist() == [-float(i) for i in range(VOCAB)]
    assert (vocabulary.bos_token_id, vocabulary.eos_token_id, vocabulary.unk_token_id) == (1, 2, 0)
    assert vocabulary.pad_token_id is None
    assert (vocabulary.add_bos_token, vocabulary.add_eos_token) == (True, None)
    assert vocabulary.chat_template == "{{ messages[0]['content'] }}"


def test_a_split_model_is_one_checkpoint_from_any_of_its_parts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", split_max_tensors=7)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    for part in parts:
        checkpoint = open_gguf(part)
        assert len(checkpoint.tensors) == len(tiny_tensors("llama"))
        name = "model.layers.1.mlp.down_proj.weight"
        assert checkpoint.read(name).tobytes() == tiny_tensors("llama")["blk.1.ffn_down.weight"].tobytes()
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00003\.gguf: no such file"):
        open_gguf(parts[0])


def test_an_unknown_architecture_is_named_with_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match=r"m\.gguf.*'mamba'.*llama, qwen2"):
        open_gguf(write_gguf(tmp_path / "m.gguf", "mamba"))


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({}, {"blk.0.ffn_gate_inp.weight": np.ones((4, HIDDEN), np.float32)}, r"tensor 'blk\.0\.ffn_gate_inp\.weight'"),
        ({}, {"blk.2.attn_q.weight": np.ones((HIDDEN, HIDDEN), np.float32)}, r"blk\.2\.attn_q\.weight.* 2 layers"),
        ({}, {"rope_freqs.weight": np.ones(3, np.float32)}, r"rope_freqs\.weight' has 3 values, not 8"),
        ({}, {"rope_freqs.weight": np.zeros(8, np.float32)}, r"rope_freqs\.weight' has values"),
        ({"llama.block_count": None}, {}, r"llama\.block_count is missing"),
        ({"llama.block_count": 4_000_000_000}, {}, r"llama\.block_count is 4000000000"),
        ({"llama.attention.head_count": "four"}, {}, r"llama\.attention\.head_count is 'four'"),
        ({"llama.attention.head_count_kv": 3}, {}, "4 attention heads can't share 3"),
        ({"llama.attention.head_count_kv": [2, 1]}, {}, r"head_count_kv differs between layers \(\[1, 2\]\)"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, {}, "layer_norm_rms_epsilon is nan"),
        ({"llama.attention.value_length": 8}, {}, r"attention\.value_length differs"),
        ({"llama.rope.dimension_count": 8}, {}, r"rope\.dimension_count is 8; only the whole head, 16"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, {}, "'longrope'; none, linear"),
        ({"tokenizer.ggml.token_type": [1, 2]}, {}, "token_type has 2 entries where the vocabulary has 12"),
        ({"tokenizer.ggml.eos_token_id": 12}, {}, "eos_token_id is 12, which is not an integer from 0 to 11"),
        ({"tokenizer.ggml.tokens": [1, 2]}, {}, "tokens is not a list of strings"),
        ({"split.count": 2}, {}, "one part of a split model"),
    ],
)
def test_what_cannot_be_right_is_named(
    tmp_path: Path, keys: dict[str, Any], tensors: dict[str, np.ndarray], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", keys=keys, tensors=tiny_tensors("llama") | tensors)
    with pytest.raises(CheckpointError, match=message) as raised:
        open_gguf(path)
    assert str(path) in str(raised.value)
