"""PrivateFolder: the folder in which a server's two processes meet, and what is left of such folders.

Knows paths and locks; nothing of what lies in the folder.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from octavo.errors import ConfigError

__all__ = ["PrivateFolder"]

PREFIX = "octavo-"
LOCK = "lock"
MAX_PATH_BYTES = 80
"""A socket's path may have 107 bytes; this leaves room for a name, and for the folder's own."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")
NEW_S = 60.0
"""A folder without a lock may be one that is just being made."""


class PrivateFolder:
    """A new folder of mode 0700, with a lock that its maker holds as long as it lives.

    The kernel lets go of the lock of a process that is killed, so the next server that starts can tell such a folder
    from one in use, and removes it.
    """

    def __init__(self) -> None:
        """Raises ConfigError where no folder can be made whose path is short enough for a socket."""
        place = _writable_place()
        _remove_leftovers(place)
        self.path = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        self._lock = open(Path(self.path, LOCK), "wb")  # noqa: SIM115 - held as long as the folder is in use
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """A second time does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _writable_place() -> str:
    """The user's folder for temporary files, or where that is too long or can't be written to another one."""
    for place in _places():
        if len(os.fsencode(place)) <= MAX_PATH_BYTES and os.access(place, os.W_OK | os.X_OK):
            return place
    raise ConfigError(
        f"No folder for the engine's socket: it must be writable, and its path must have {MAX_PATH_BYTES} bytes at "
        "most. Set TMPDIR to such a folder."
    )


def _places() -> Iterator[str]:
    with suppress(FileNotFoundError):  # nothing is writable where Python looks
        yield tempfile.gettempdir()
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    yield from (runtime, *SHORT_FOLDERS) if runtime else SHORT_FOLDERS


def _remove_leftovers(place: str) -> None:
    """Folders of this user whose makers are gone: the kernel has let go of their locks."""
    for path in Path(place).glob(PREFIX + "*"):
        with suppress(OSError):
            facts = path.lstat()
            if facts.st_uid == os.getuid() and path.is_dir() and not path.is_symlink() and _is_left(path):
                shutil.rmtree(path, ignore_errors=True)


def _is_left(path: Path) -> bool:
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return (path / "pulse").exists() and time.time() - path.lstat().st_mtime > NEW_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
