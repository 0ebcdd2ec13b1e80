"""The reference device: plain torch and numpy in the host's memory, for tests and where no kernels are built."""

from octavo.devices.device import Device

__all__ = ["OPTION", "PREFERENCE", "is_available", "make_device"]

OPTION = "REFERENCE"
PREFERENCE = 0


def is_available() -> bool:
    return True


def make_device() -> Device:
    from octavo.devices.reference.device import ReferenceDevice

    return ReferenceDevice()
