"""A path or a Hub name opens the right checkpoint; what could not be found is told with where it was looked for."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.checkpoint.folder import FolderCheckpoint
from octavo.checkpoint.gguf import GGUFCheckpoint
from octavo.checkpoint.hub import select_files
from octavo.errors import CheckpointError
from octavo.models.loader import open_checkpoint
from tests.checkpoint.gguf_files import write_gguf

CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_folder(path: Path, tokenizer: bool = True) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    if tokenizer:
        (path / "tokenizer.json").write_text("{}")
    save_file({"model.norm.weight": np.ones(8, np.float32)}, path / "model.safetensors")
    return path


def snapshot(cache: Path, repo: str, revision: str = "main", commit: str = COMMIT) -> Path:
    """An empty snapshot, laid out as huggingface_hub lays out its cache."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    (root / "snapshots" / commit).mkdir(parents=True)
    return root / "snapshots" / commit


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def cache(tmp_path: Path, offline: None) -> Path:
    return tmp_path / "cache"


def test_a_gguf_file_a_folder_and_a_folder_with_one_gguf_open(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    assert isinstance(open_checkpoint(str(folder)), FolderCheckpoint)
    (tmp_path / "g").mkdir()
    gguf = write_gguf(tmp_path / "g" / "m.gguf")
    assert isinstance(open_checkpoint(str(gguf)), GGUFCheckpoint)
    assert open_checkpoint(str(tmp_path / "g")).path == gguf
    (tmp_path / "g" / "config.json").write_text(json.dumps(CONFIG))  # as GGUF repositories often have
    (tmp_path / "g" / "mmproj-m.gguf").write_bytes(b"")
    assert open_checkpoint(str(tmp_path / "g")).path == gguf


def test_a_folder_with_a_split_gguf_opens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", split_max_tensors=7)
    assert open_checkpoint(str(tmp_path)).path.name == "m-00001-of-00003.gguf"


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gguf(tmp_path / "m.gguf")
    assert open_checkpoint("~/m.gguf").path == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "neither config.json nor a .gguf file"),
        (["a.gguf", "b.gguf"], "there are 2 GGUF models.*a, b"),
        (["config.json", "pytorch_model.bin"], ".bin and .pth files are not read"),
    ],
)
def test_a_folder_that_is_no_model_is_told(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / file).write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("model", ["/no/such", "./nothing", "../x/y", "a/b/c", "x/m.gguf", "m.gguf", "", "~/nope"])
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_name(model: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_checkpoint(model)


def test_files_that_are_not_models_are_told(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(str(tmp_path / "x.txt"))
    with pytest.raises(CheckpointError, match="Give the folder"):
        open_checkpoint(str(write_folder(tmp_path / "hf") / "model.safetensors"))


def test_a_cached_hub_folder_opens_without_a_network(cache: Path) -> None:
    folder = write_folder(snapshot(cache, "org/name"))
    assert open_checkpoint("org/name", str(cache)).path == folder
    assert open_checkpoint("org/name", str(cache), COMMIT).path == folder


def test_the_revision_chooses_the_snapshot(cache: Path) -> None:
    write_folder(snapshot(cache, "org/name"))
    other = write_folder(snapshot(cache, "org/name", "v2", "f" * 40))
    assert open_checkpoint("org/name", str(cache), "v2").path == other


@pytest.mark.parametrize("wanted", ["m-Q8_0.gguf", "Q8_0", "q8_0"])
def test_a_cached_gguf_is_chosen_by_file_or_quantisation(cache: Path, wanted: str) -> None:
    folder = snapshot(cache, "org/name")
    write_gguf(folder / "m-IQ8_0.gguf")
    expected = write_gguf(folder / "m-Q8_0.gguf")
    assert open_checkpoint(f"org/name:{wanted}", str(cache)).path == expected


def test_a_cached_gguf_is_found_though_the_repository_has_more_files(cache: Path) -> None:
    """huggingface_hub calls such a snapshot incomplete."""
    folder = snapshot(cache, "org/name")
    expected = write_gguf(folder / "m-Q8_0.gguf")
    assert open_checkpoint("org/name", str(cache)).path == expected


@pytest.mark.parametrize("model", ["org/name", "org/name:Q4_0", "gpt2"])
def test_offline_what_is_not_cached_is_told_with_the_cache_and_the_remedy(cache: Path, model: str) -> None:
    write_gguf(snapshot(cache, "org/other") / "m-Q8_0.gguf")
    with pytest.raises(CheckpointError, match=f"{model} is no file .* not in the cache {cache}.*Unset it"):
        open_checkpoint(model, str(cache))


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors"])
def test_an_incomplete_cached_folder_is_not_used(cache: Path, missing: str) -> None:
    (write_folder(snapshot(cache, "org/name")) / missing).unlink()
    with pytest.raises(CheckpointError, match="it is only in part in the cache"):
        open_checkpoint("org/name", str(cache))


def test_a_cached_folder_without_all_its_shards_is_not_used(cache: Path) -> None:
    folder = write_folder(snapshot(cache, "org/name"))
    shutil.move(folder / "model.safetensors", folder / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(CheckpointError, match="it is only in part in the cache"):
        open_checkpoint("org/name", str(cache))


def test_the_environment_variable_is_honoured_and_torch_is_not_imported(tmp_path: Path) -> None:
    write_folder(snapshot(tmp_path / "hub", "org/name"))
    code = (
        "import sys; from octavo.checkpoint.model_config import ModelConfig\n"
        "from octavo.checkpoint.open import open_checkpoint\n"
        "families = {'llama': ModelConfig}\n"
        "assert 'huggingface_hub' not in sys.modules\n"
        "print(open_checkpoint('org/name', families).config.model_type)\n"
        "assert not {'torch', 'transformers', 'gguf', 'safetensors'} & set(sys.modules)\n"
        "open_checkpoint('org/absent', families)"
    )
    environment = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(p for p in sys.path if p)}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert run.stdout == "llama\n"
    assert "CheckpointError: org/absent is no file or folder here" in run.stderr


FOLDER_FILES = ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"]


@pytest.mark.parametrize(
    ("files", "wanted", "expected"),
    [
        ([*FOLDER_FILES, "consolidated.safetensors", "onnx/model.onnx", "README.md", "x.gguf"], "", FOLDER_FILES),
        (["config.json", "m.Q8_0.gguf", "README.md"], "", ["m.Q8_0.gguf"]),
        (["a-Q4_K_M.gguf", "a-Q8_0.gguf", "a-IQ4_K_M.gguf"], "Q4_K_M", ["a-Q4_K_M.gguf"]),
        (
            ["x/a-Q4_0-00002-of-00002.gguf", "x/a-Q4_0-00001-of-00002.gguf", "b-Q8_0.gguf"],
            "q4_0",
            ["x/a-Q4_0-00001-of-00002.gguf", "x/a-Q4_0-00002-of-00002.gguf"],
        ),
        (["a-Q8_0.gguf", "mmproj-a-Q8_0.gguf"], "Q8_0", ["a-Q8_0.gguf"]),
    ],
)
def test_of_a_repository_only_the_files_of_one_model_are_wanted(
    files: list[str], wanted: str, expected: list[str]
) -> None:
    assert select_files(files, wanted, "org/name") == expected


@pytest.mark.parametrize(
    ("files", "wanted", "message"),
    [
        (["a-Q4_0.gguf", "a-Q8_0.gguf"], "", "org/name: there are 2 GGUF models.*a-Q4_0, a-Q8_0"),
        (["a-Q4_0.gguf"], "Q8_0", "0 GGUF models match 'Q8_0'.*a-Q4_0"),
        (["config.json", "pytorch_model.bin"], "", "found none. PyTorch's .bin files are not read"),
        (["config.json", "model.safetensors"], "Q8_0", "looked for a .gguf file for 'Q8_0', found none"),
        (["README.md"], "", "looked for model.safetensors or a .gguf file, found none"),
    ],
)
def test_a_repository_without_one_model_is_told(files: list[str], wanted: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        select_files(files, wanted, "org/name")
