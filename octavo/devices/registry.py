"""open_device: a device by the name that --attention-backend gives it. A device is there because its folder is."""

import importlib
import pkgutil
import warnings
from collections.abc import Iterator
from types import ModuleType

import octavo.devices
from octavo.devices.device import Device
from octavo.errors import ConfigError

__all__ = ["open_device"]


def open_device(option: str = "auto") -> Device:
    """The device whose `OPTION` this is, in any case; "auto": the one of the highest `PREFERENCE` that is available.

    Warns where "auto" finds plain torch only. Raises ConfigError for a name that no folder has.
    """
    folders = {folder.OPTION: folder for folder in _folders()}
    if option == "auto":
        chosen = max((folder for folder in folders.values() if folder.is_available()), key=lambda f: f.PREFERENCE)
        if chosen.PREFERENCE == 0:
            warnings.warn(
                "The native kernels are not built, so plain torch computes, many times slower. `make setup` builds "
                "them.",
                stacklevel=2,
            )
    elif option.upper() in folders:
        chosen = folders[option.upper()]
    else:
        names = ", ".join(["auto", *sorted(folders)])
        raise ConfigError(f"--attention-backend must be one of {names}, got {option!r}.")
    device: Device = chosen.make_device()
    return device


def _folders() -> Iterator[ModuleType]:
    """The packages beside this file. Each has `OPTION`, its name as an option; `PREFERENCE`, 0 for plain torch and more
    for what is faster; `is_available()`; and `make_device()`. None imports its kernels before it is asked to."""
    for module in pkgutil.iter_modules(octavo.devices.__path__):
        if module.ispkg:
            yield importlib.import_module(f"{octavo.devices.__name__}.{module.name}")
