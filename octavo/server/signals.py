"""Signals: what a server hears of signals from its first moment on, before it can act on them."""

import asyncio
import signal

__all__ = ["Signals"]

DRAINING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
IGNORED = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
"""They would end a process that has no use for them."""


class Signals:
    """SIGTERM, SIGINT and SIGHUP: the first asks for a drain, the second for the end at once.

    A signal that is ignored when the server starts stays so, as SIGHUP under `nohup`.
    """

    def __init__(self) -> None:
        """Signals count from now on; `listen` makes events of them. Call it in the main thread."""
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._num_early = 0
        self._heard = [number for number in DRAINING if signal.getsignal(number) is not signal.SIG_IGN]
        for number in self._heard:
            signal.signal(number, self._on_early_signal)
        for number in IGNORED:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _ignore)

    def listen(self) -> None:
        """From now on in the running event loop."""
        loop = asyncio.get_running_loop()
        for number in self._heard:
            loop.add_signal_handler(number, self._on_signal)
        for _ in range(self._num_early):
            self._on_signal()

    def _on_early_signal(self, *_: object) -> None:
        self._num_early += 1

    def _on_signal(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _ignore(*_: object) -> None:
    """A handler: unlike SIG_IGN it is not handed on to child processes, some of which set themselves an alarm."""
