"""The fingerprint: what fixes the bits in this process. Trainer and engine compare it before weights change hands."""

import importlib
import pkgutil

import torch

from .backend import ROOMS, BackendUnavailable, Room

CONTRACT_VERSION = 1


def _import_rooms() -> None:
    package = importlib.import_module("vexact_ops")
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg and not module.name.startswith("_") and module.name not in ("patch", "testing"):
            importlib.import_module(f"vexact_ops.{module.name}.op")


def numerics_class(device: torch.device | str = "cpu") -> str:
    """The set of kernels whose bits are equal: "cpu" for any x86-64 with FMA, "sm90" and the like for a GPU."""
    device = torch.device(device)
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm{major}{minor}"
    raise ValueError(f"numerics: device: got {device}, expected a cpu or cuda device")


def _in_use(room: Room, device: torch.device) -> str:
    try:
        return room.resolve(device, None)
    except BackendUnavailable as error:
        return str(error)


def numerics(device: torch.device | str | None = None, **options: object) -> dict:
    """Everything that fixes the bits, as a JSON-serialisable dictionary.

    device    whose class is meant; by default the current GPU where there is one, else the CPU
    options   further declared options that change bits, such as kv_segment=2048
    returns   {"contract", "class", "rooms": {room: revision}, "backends": {room: backend in use, for rooms where
              it decides the bits}, "options", "libraries"}; two processes with equal dictionaries promise equal bits
    """
    _import_rooms()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = numerics_class(device)
    libraries = {} if name == "cpu" else {"torch": torch.__version__, "cuda": torch.version.cuda}
    device = torch.device(device)
    return {
        "contract": CONTRACT_VERSION,
        "class": name,
        "rooms": {room: ROOMS[room].revision for room in sorted(ROOMS)},
        "backends": {
            room: _in_use(ROOMS[room], device)
            for room in sorted(ROOMS)
            if not ROOMS[room].one_class and len(ROOMS[room].backends(device.type)) > 1
        },
        "options": {key: options[key] for key in sorted(options) if options[key] is not None},
        "libraries": libraries,
    }
