"""RunningServer: a server in a process of its own, with what it printed and the engine it started."""

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

import psutil
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.server.scripted_engine import SPECIAL_TOKENS

__all__ = ["RunningServer", "make_tokenizer_folder", "scripted"]

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 60
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] == 'nobody' %}{{ raise_exception('Nobody may not speak.') }}{% endif %}"
    "{% for message in messages %}{{ '<s>' + message['role'] + '\n' + message['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)


class RunningServer:
    """Leaving the context kills what still runs."""

    def __init__(self, module: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "RunningServer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that matches, once it is printed."""

        def found() -> re.Match[str] | None:
            return next((match for line in list(self.lines) if (match := re.search(pattern, line))), None)

        with self._news:
            self._news.wait_for(lambda: found() or not self._reader.is_alive(), START_TIMEOUT_S)
        match = found()
        assert match is not None, f"{pattern!r} was not printed:\n" + "\n".join(self.lines)
        return match

    def wait_exit(self, timeout: float = 20) -> int:
        status = self.process.wait(timeout)
        self._reader.join()
        return status

    @property
    def url(self) -> str:
        return self.wait_for(r"listening on (https?://\S+),")[1]

    def wait_ready(self) -> "RunningServer":
        self.wait_for(r"^Try: ")
        return self

    @property
    def engine(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (engine,) = [child for child in children if "engine" in " ".join(child.cmdline())]
        return engine


def scripted(folder: Path, *options: str, start: str = "", environment: dict[str, str] | None = None) -> RunningServer:
    """`options` are those of `octavo serve`."""
    environment = (environment or {}) | ({"OCTAVO_SCRIPTED_START": start} if start else {})
    return RunningServer("tests.server.scripted_server", str(folder), *options, environment=environment)


def make_tokenizer_folder(path: Path) -> Path:
    """A byte-level tokenizer with the script's special tokens, then the 256 bytes, then a few merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHAT_TEMPLATE}))
    return path
