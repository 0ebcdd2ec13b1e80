"""EngineProcess: starts the engine's process and knows when it is gone. The parent's side of `engine/process.py`.

Imports little: it runs before anything else in the API process. Knows nothing of requests.
"""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

from octavo.ipc.folder import PrivateFolder
from octavo.ipc.launch import NOT_FOR_THE_ENGINE, Launch, write_launch
from octavo.ipc.pulse import Pulse
from octavo.options import EngineConfig

__all__ = ["ENGINE_COMMAND", "EngineProcess"]

ENGINE_COMMAND = (sys.executable, "-m", "octavo.engine.process")
EXIT_GRACE_S = 2.0
STDERR = 2


class EngineProcess:
    """A running engine.

    Invariant: the engine ends when the write end of its standard input closes, which the kernel does for a parent that
    is killed; nothing else holds that end.
    """

    def __init__(self, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> None:
        """Raises ConfigError where the two processes can't have a folder to meet in."""
        self._folder = PrivateFolder()
        launch = Launch(config=config, folder=self._folder.path, started_at=time.time())
        self.address = launch.address
        self.pulse = Pulse(launch.folder)
        # Its stray prints belong to the log. In a process group of its own the terminal's Ctrl-C does not reach it;
        # other signals wait until it has said that it ignores them.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_FOR_THE_ENGINE)
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=STDERR, process_group=0)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        assert self._process.stdin is not None
        write_launch(launch, self._process.stdin)

    @property
    def pid(self) -> int:
        return self._process.pid

    def when_gone(self, callback: Callable[[int], None]) -> None:
        """Call `callback(exit status)` from a thread of its own, once the process is gone."""
        threading.Thread(target=lambda: callback(self._process.wait()), name="engine-watch", daemon=True).start()

    def close(self) -> None:
        """End the process, forcibly if need be, and remove the private folder."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.remove()
