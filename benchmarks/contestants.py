"""What `peers.py` measures: each engine as it is best run on a CPU, over HTTP or in place, and how figures are read.

An engine stays out of the way while another is measured: servers are started once and stopped by SIGSTOP between their
turns, engines in place are processes of their own that end with the measurement.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.bench.server_start import free_port

OCTAVO = str(Path(sys.executable).parent / "octavo")
HERE = Path(__file__).parent
READY_TIMEOUT_S = 600.0
NUM_THREADS = len(os.sched_getaffinity(0))

Figures = dict[str, float]
"""Name -> value, in the name's unit."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Where the peers are installed, each apart from the others."""

    models: Path
    """Folder of peer_models.py: hf/, and NAME.gguf for each of its formats."""
    llama: Path
    """Folder of llama-server and llama-bench."""
    openvino: Path
    """Python interpreter that has openvino_genai."""
    vllm: Path
    """The `vllm` command."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of random token ids, all of one size."""

    num_requests: int
    prefix_len: int
    input_len: int
    output_len: int
    max_concurrency: int

    def options(self, seed: int) -> list[str]:
        """Of `octavo bench`. Another seed for each turn: no cache has seen the prompts."""
        return [
            f"--num-prompts={self.num_requests}",
            f"--random-prefix-len={self.prefix_len}",
            f"--random-input-len={self.input_len}",
            f"--random-output-len={self.output_len}",
            f"--seed={seed}",
        ]


class Server:
    """An OpenAI server that runs only while it is measured, by the same client as every other."""

    def __init__(self, command: list[str], model: str, environment: dict[str, str]) -> None:
        self.port, self.model = free_port(), model
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
        command = [part.replace("{port}", str(self.port)) for part in command]
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, env=os.environ | environment, start_new_session=True
        )
        self._wait_ready()
        self._signal(signal.SIGSTOP)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        self.log.seek(0)
        self.close()
        raise RuntimeError(f"no server came up; its log ends with:\n{self.log.read().decode()[-3000:]}")

    def measure(self, load: Load, seed: int) -> Figures:
        self._signal(signal.SIGCONT)
        try:
            with tempfile.TemporaryDirectory() as folder:
                where = ["--save-result", f"--result-dir={folder}", "--result-filename=result.json"]
                server = [f"--port={self.port}", f"--tokenizer={self.model}", "--num-warmups=2"]
                limit = f"--max-concurrency={load.max_concurrency}"
                _run([OCTAVO, "bench", "serve", *server, *load.options(seed), limit, *where])
                report = json.loads((Path(folder) / "result.json").read_text())
        finally:
            self._signal(signal.SIGSTOP)
        assert report["failed"] == 0, report
        assert report["total_output_tokens"] == load.num_requests * load.output_len, report["total_output_tokens"]
        return {
            "output tok/s": report["output_throughput"],
            "TTFT ms": report["mean_ttft_ms"],
            "TPOT ms": report["mean_tpot_ms"],
        }

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def octavo_options(name: str) -> tuple[str, list[str]]:
    """File and options of a format: a checkpoint's own (q8_0, q4_0, …) or one made at load (bf16, int8, int4); with
    -kv8 at the end keys and values are int8."""
    if name.endswith("-kv8"):
        file, options = octavo_options(name.removesuffix("-kv8"))
        return file, [*options, "--kv-cache-dtype=int8"]
    if name == "bf16":
        return "bf16", ["--quantization=none", "--dtype=bfloat16"]
    if name in ("int8", "int4"):
        return "bf16", [f"--quantization={name}"]
    return name, []


def serve(engine: str, name: str, peers: Peers) -> Server:
    """A server of `engine` with the weights in format `name`."""
    if engine == "octavo":
        file, options = octavo_options(name)
        model = str(peers.models / f"{file}.gguf")
        return Server([OCTAVO, "serve", model, "--port={port}", "--access-log=off", *options], model, {})
    if engine == "llama.cpp":
        model = str(peers.models / f"{name}.gguf")
        options = ["-c", "32768", "-np", "64", "-t", str(NUM_THREADS), "--no-webui"]
        return Server([str(peers.llama / "llama-server"), "-m", model, "--port", "{port}", *options], model, {})
    if engine == "vllm":
        assert name == "bf16", "vLLM is measured in bf16"
        folder = str(peers.models / "hf")
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_THREADS - 1}",
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{peers.vllm.parent}:{os.environ['PATH']}",
        }
        options = ["--dtype=bfloat16", "--max-model-len=4096"]
        return Server([str(peers.vllm), "serve", folder, "--port={port}", *options], folder, environment)
    raise ValueError(f"{engine} is not measured over HTTP")


def run_offline(engine: str, name: str, load: Load, seed: int, peers: Peers) -> Figures:
    """All requests at once in a process of its own, without HTTP."""
    if engine == "octavo":
        file, options = octavo_options(name)
        model = f"--model={peers.models / f'{file}.gguf'}"
        printed = _run([OCTAVO, "bench", "throughput", model, *load.options(seed), *options])
        return {"output tok/s": _number(r"([\d.]+) output tokens/s", printed)}
    sizes = [str(size) for size in (load.input_len, load.output_len, seed)]
    if engine == "openvino":
        command = [str(peers.openvino), str(HERE / "openvino_throughput.py"), str(peers.models / f"{name}.gguf")]
        printed = _run([*command, str(load.num_requests), *sizes])
    elif engine in ("transformers", "transformers-single"):
        command = [sys.executable, str(HERE / "transformers_throughput.py"), str(peers.models / "hf")]
        printed = _run([*command, str(load.num_requests if engine == "transformers" else 1), *sizes])
    else:
        raise ValueError(f"{engine} is not measured in place")
    return dict(json.loads(printed.splitlines()[-1]))


def run_alone(engine: str, name: str, load: Load, seed: int, peers: Peers) -> Figures:
    """Tokens per second of one request, without HTTP: of its prompt, if that is all but one of them, else of its
    output. llama-bench reads no prompt before it generates."""
    is_prompt = load.output_len == 1
    figure, num_tokens = ("prompt tok/s", load.input_len) if is_prompt else ("output tok/s", load.output_len)
    if engine == "octavo":
        file, options = octavo_options(name)
        model = f"--model={peers.models / f'{file}.gguf'}"
        sizes = [f"--input-len={load.input_len}", f"--output-len={load.output_len}", "--batch-size=1"]
        printed = _run([OCTAVO, "bench", "latency", model, *sizes, "--num-iters-warmup=2", "--num-iters=8", *options])
        return {figure: num_tokens / _number(r"Avg latency: ([\d.e-]+)", printed)}
    if engine == "llama.cpp":
        model = str(peers.models / f"{name}.gguf")
        sizes = ["-p", str(load.input_len), "-n", "0"] if is_prompt else ["-p", "0", "-n", str(load.output_len)]
        command = [str(peers.llama / "llama-bench"), "-m", model, *sizes, "-r", "8", "-t", str(NUM_THREADS)]
        return {figure: float(json.loads(_run([*command, "-o", "json"]))[0]["avg_ts"])}
    raise ValueError(f"{engine} is not measured on one request alone")


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{result.stdout[-1500:]}\n{result.stderr[-3000:]}")
    return result.stdout


def _number(pattern: str, text: str) -> float:
    found: Any = re.search(pattern, text)
    assert found, f"{pattern!r} is not in:\n{text}"
    return float(found[1])
