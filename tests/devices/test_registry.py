"""A device is there because its folder is, under the name that the folder says."""

import pytest

from octavo.devices import cpu
from octavo.devices.cpu.device import CpuDevice
from octavo.devices.reference.device import ReferenceDevice
from octavo.devices.registry import open_device
from octavo.errors import ConfigError


def test_a_device_is_found_by_its_option_in_any_case() -> None:
    assert type(open_device("CPU")) is type(open_device("cpu")) is CpuDevice
    assert type(open_device("REFERENCE")) is ReferenceDevice


def test_an_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="--attention-backend must be one of auto, CPU, REFERENCE, got 'TPU'"):
        open_device("TPU")


def test_auto_takes_the_fastest_and_warns_where_that_is_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(open_device()) is CpuDevice
    monkeypatch.setattr(cpu, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="native kernels are not built"):
        assert type(open_device()) is ReferenceDevice
