"""Witness: a process of its own that looks on how a server treats others while a test sends it hostile requests.

Run as `python -m tests.server.witness URL PATH BODY PID...`. It keeps a stream open, asks for /health all the while,
and adds up the memory of each process with its descendants. For each line on standard input it prints the worst since
the line before, as JSON.
"""

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil

__all__ = ["Seen", "Witness"]

ROOT = Path(__file__).parents[2]
PAUSE_S = 0.01
TROUBLED_S = 0.2
START_S = 20


@dataclass
class Seen:
    """The worst since the last look; times in seconds."""

    gap: float = 0.0
    """Between two events of a stream."""
    health: float = 0.0
    """Until /health has answered."""
    num_events: int = 0
    memory: list[int] = field(default_factory=list)
    """The most bytes resident, of each process and what it started."""
    trouble: str = ""
    """What went wrong with the stream or the probe."""


class Witness:
    """The test's end."""

    def __init__(self, url: str, path: str, body: dict[str, Any], *pids: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.witness", url, path, json.dumps(body), *map(str, pids)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "Witness":
        deadline = time.monotonic() + START_S
        while not (seen := self.look()).num_events:
            assert time.monotonic() < deadline, seen.trouble
            time.sleep(PAUSE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def look(self) -> Seen:
        """The worst since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Seen(**json.loads(self._process.stdout.readline()))


class _Watch:
    def __init__(self, url: str, path: str, body: str, pids: list[int]) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        self._path, self._body = path, body
        self._processes = [psutil.Process(pid) for pid in pids]
        self._lock = threading.Lock()
        self._seen = Seen(memory=[0] * len(pids))
        self._event_at: float | None = None  # of the stream that runs

    def start(self) -> None:
        for work in (self._stream, self._probe, self._weigh):
            threading.Thread(target=self._for_ever, args=(work,), daemon=True).start()

    def look(self) -> Seen:
        with self._lock:
            seen, self._seen = self._seen, Seen(memory=[0] * len(self._processes))
            if self._event_at is not None:  # what lasts still
                seen.gap = max(seen.gap, time.monotonic() - self._event_at)
        return seen

    def _for_ever(self, work: Any) -> None:
        while True:
            try:
                work()
            except (httpx.HTTPError, AssertionError, psutil.Error) as error:
                with self._lock:
                    self._seen.trouble = f"{work.__name__}: {error!r}"
                time.sleep(TROUBLED_S)

    def _stream(self) -> None:
        try:
            headers = {"Content-Type": "application/json"}
            with self._http.stream("POST", self._path, content=self._body, headers=headers) as response:
                assert response.status_code == 200, response.read()
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        assert '"error"' not in line, line
                        self._see_event(time.monotonic())
        finally:
            self._event_at = None

    def _see_event(self, now: float) -> None:
        with self._lock:
            self._seen.num_events += 1
            if self._event_at is not None:
                self._seen.gap = max(self._seen.gap, now - self._event_at)
            self._event_at = now

    def _probe(self) -> None:
        start = time.monotonic()
        response = self._http.get("/health")
        duration = time.monotonic() - start
        with self._lock:
            self._seen.health = max(self._seen.health, duration)
        assert response.status_code == 200, response.text
        time.sleep(PAUSE_S)

    def _weigh(self) -> None:
        engines = {process.pid for process in self._processes}
        for index, process in enumerate(self._processes):
            family = [process]
            family += [child for child in process.children(recursive=True) if child.pid not in engines]
            num_bytes = sum(member.memory_info().rss for member in family)
            with self._lock:
                self._seen.memory[index] = max(self._seen.memory[index], num_bytes)
        time.sleep(2 * PAUSE_S)


def main(url: str, path: str, body: str, *pids: str) -> None:
    watch = _Watch(url, path, body, list(map(int, pids)))
    watch.start()
    for _ in sys.stdin:
        print(json.dumps(asdict(watch.look())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
