"""The cpu device: the native kernels of csrc/cpu on a thread pool of their own, steps replayed by one native call."""

import importlib.util

from octavo.devices.device import Device

__all__ = ["OPTION", "PREFERENCE", "is_available", "make_device"]

OPTION = "CPU"
PREFERENCE = 1


def is_available() -> bool:
    """Whether the extension is built."""
    return importlib.util.find_spec("octavo.devices.cpu._cpu") is not None


def make_device() -> Device:
    from octavo.devices.cpu.device import CpuDevice

    return CpuDevice()
