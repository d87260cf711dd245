"""Which implementation computes an op: the argument, else the process setting, else the device's one default."""

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType

import torch

from . import native


class BackendUnavailable(RuntimeError):
    """A backend that was asked for, or is the only one for a device, cannot run here; the message says why."""


def _cpu() -> str | None:
    return native.unavailable()


def _cuda() -> str | None:
    if native.unavailable():
        return native.unavailable()
    if not native.built_with_cuda():
        return "the extension was built without CUDA; rebuild where nvcc is found, or with VEXACT_BUILD=cuda"
    return _cuda_device()


@functools.cache
def _cuda_device() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device is visible to torch"


@functools.cache
def _triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return _cuda_device()


@functools.cache
def _cute() -> str | None:
    missing = [name for name in ("quack", "flash_attn", "cutlass") if importlib.util.find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (pip install 'vexact[cute]')"
    return _cuda_device()


# What each backend needs, as a function that returns the reason it cannot run here, or None.
PROBES: dict[str, Callable[[], str | None]] = {"cpu": _cpu, "triton": _triton, "cuda": _cuda, "cute": _cute}


def _reason(name: str) -> str | None:
    return PROBES[name]()


# A probe touches files and devices, which torch.compile cannot trace. The mark is what torch.compiler's
# assume_constant_result sets; the decorator itself would import torch._dynamo, and with it triton, on import.
_reason._dynamo_marked_constant = True


_setting: str | None = os.environ.get("VEXACT_BACKEND") or None


def set_backend(name: str | None) -> None:
    """Make `name` this process's backend wherever a call names none; None goes back to each device's default."""
    global _setting
    if name is not None and name not in PROBES:
        raise ValueError(f"set_backend: name: got {name!r}, expected one of {sorted(PROBES)} or None")
    _setting = name


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """`set_backend` for the length of a with block."""
    before = _setting
    set_backend(name)
    try:
        yield
    finally:
        set_backend(before)


ROOMS: dict[str, "Room"] = {}


@dataclass
class Room:
    """One op family: its name (the package under vexact_ops) and its backends per device type, the default first."""

    name: str
    cpu: tuple[str, ...] = ("cpu",)
    cuda: tuple[str, ...] = ()
    revision: int = 1  # of the canonical kernel: it goes up when the bits change
    one_class: bool = (
        True  # whether a device type's backends are proven equal; else the one in use is in the fingerprint
    )
    _modules: dict[str, ModuleType] = field(default_factory=dict, repr=False)
    _defaults: dict[torch.device, str] = field(default_factory=dict, repr=False)  # resolved once, for the common call

    def __post_init__(self):
        ROOMS[self.name] = self

    def backends(self, device_type: str) -> tuple[str, ...]:
        names = getattr(self, device_type, ()) if device_type in ("cpu", "cuda") else ()
        if device_type == "cpu" and "triton" in self.cuda and os.environ.get("TRITON_INTERPRET") == "1":
            names = (*names, "triton")  # Triton's interpreter runs kernels on CPU tensors
        return names

    def resolve(self, device: torch.device, asked: str | None) -> str:
        """The backend's name. Raises BackendUnavailable (with the reason) or ValueError for a name nobody knows."""
        if asked is None and _setting is None and device in self._defaults:
            return self._defaults[device]
        names = self.backends(device.type)
        name = asked or _setting or (names[0] if names else None)
        if name is None:
            raise BackendUnavailable(f"{self.name}: no backend for device type {device.type!r}")
        if name in self._modules and name in names:
            return name
        if name not in PROBES:
            raise ValueError(f"{self.name}: backend: got {name!r}, expected one of {sorted(PROBES)}")
        if name not in names:
            have = ", ".join(names) or "none"
            raise BackendUnavailable(
                f"{self.name}: backend {name!r} does not serve {device.type} tensors (has: {have})"
            )
        reason = _reason(name)
        if reason:
            others = [other for other in names if other != name and PROBES[other]() is None]
            hint = f"; set_backend({others[0]!r}) or backend={others[0]!r} would work here" if others else ""
            raise BackendUnavailable(f"{self.name}: backend {name!r}: {reason}{hint}")
        if name == names[0]:
            self._defaults[device] = name
        return name

    def module(self, name: str) -> ModuleType:
        """The file <room>/<backend>.py, imported on first use."""
        module = self._modules.get(name)
        if module is None:
            module = self._modules[name] = importlib.import_module(f"vexact_ops.{self.name}.{name}")
        return module


def backends() -> dict[str, str]:
    """Every backend and what stands in its way here: {"cpu": "available", "cuda": "no CUDA device ...", ...}."""
    return {name: probe() or "available" for name, probe in PROBES.items()}
