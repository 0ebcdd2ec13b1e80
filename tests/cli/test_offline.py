"""`octavo bench throughput`, `octavo bench latency` and `octavo chat MODEL` on a tiny model in this process."""

import io
import json
from pathlib import Path

import pytest

from octavo.cli.main import main
from tests.tiny_models import make_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_folder(tmp_path_factory.mktemp("cli") / "tiny", "llama"))


SMALL = ("--attention-backend", "REFERENCE", "--num-threads", "1", "--max-num-seqs", "4")


def test_throughput_has_vllms_fields(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    lengths = ("--num-prompts", "6", "--input-len", "20", "--output-len", "5")
    assert main(["bench", "throughput", "--model", model, *lengths, "--output-json", str(path), *SMALL]) == 0
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (6, 6 * 25)
    assert result["requests_per_second"] == pytest.approx(6 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(150 / result["elapsed_time"])
    output = capsys.readouterr().out
    assert f"{result['requests_per_second']:.2f} requests/s, " in output
    assert "Total num prompt tokens:  120\nTotal num output tokens:  30\n" in output


def test_latency_has_vllms_fields(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    sizes = (
        "--batch-size",
        "2",
        "--input-len",
        "4",
        "--output-len",
        "3",
        "--num-iters",
        "3",
        "--num-iters-warmup",
        "1",
    )
    assert main(["bench", "latency", model, *sizes, "--n", "2", "--output-json", str(path), *SMALL]) == 0
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert "99% percentile latency: " in capsys.readouterr().out


def test_latency_tells_the_share_of_the_memory_roof(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "result.json"
    sizes = ("--batch-size", "1", "--output-len", "20", "--num-iters", "2", "--num-iters-warmup", "1")
    assert main(["bench", "latency", model, *sizes, "--output-json", str(path), "--max-num-seqs", "4"]) == 0
    share = json.loads(path.read_text())["memory_roof_share"]
    assert 0 < share < 1.2
    assert f"Share of the memory roof, last decode steps: {share:.3f}\n" in capsys.readouterr().out


def test_a_context_that_is_too_short_is_one_line(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", model, "--input-len", "600", *SMALL]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("octavo: error: ")
    assert "512" in error


def test_chat_loads_a_model_in_place(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("the quick\nbrown fox\n"))
    assert main(["chat", model, "--temperature", "0", "--max-tokens", "8", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("> ") for line in lines) == 3
