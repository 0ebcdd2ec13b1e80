"""What the engine's process says when it fails."""

import errno
import os

import pytest

from octavo.engine.process import failure
from octavo.errors import CheckpointError


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8192 bytes."),
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    ],
    ids=["Python", "the kernel", "torch", "the loader"],
)
def test_too_little_memory_is_one_line_with_what_to_set(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    failed = failure(error)
    assert failed.kind == "ConfigError"
    assert "ulimit -v" in failed.message
    assert "\n" not in failed.message
    assert capsys.readouterr().err == ""


def test_other_faults_keep_their_kind_and_only_unknown_ones_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure(CheckpointError("no weights")).kind == "CheckpointError"
    assert capsys.readouterr().err == ""
    assert failure(ZeroDivisionError("division by zero")).message == "division by zero"
    assert "ZeroDivisionError" in capsys.readouterr().err
