"""Which implementation computes an op: the argument, else the block that it is called in (use_backend), else the
process's setting (set_backend), else the device's one default."""

import contextlib
import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType

import torch

from . import native
from .native import BackendUnavailable as BackendUnavailable  # the public name is this module's


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


# Of the process; of the block that this thread or task is in ("": each device's default; None: in no block); and the
# blocks that are open anywhere. While none is, nobody asks for a context; and torch.compile, which cannot trace a
# ContextVar, holds what it compiled to the blocks that were open then.
_setting: str | None = os.environ.get("VEXACT_BACKEND") or None
_block: ContextVar[str | None] = ContextVar("vexact_backend", default=None)
_open: tuple[str, ...] = ()
_opening = threading.Lock()


def _of_block() -> str | None:
    return _block.get()


_of_block._dynamo_marked_constant = True


def _check_name(op: str, name: str | None) -> None:
    if name is not None and name not in PROBES:
        raise ValueError(f"{op}: name: got {name!r}, expected one of {sorted(PROBES)} or None")


def set_backend(name: str | None) -> None:
    """Make `name` the backend of the whole process, all its threads, wherever a call names none and is in no block of
    use_backend; None goes back to each device's default."""
    global _setting
    _check_name("set_backend", name)
    _setting = name


@contextlib.contextmanager
def use_backend(name: str | None) -> Iterator[None]:
    """Make `name` the backend of what this thread, or asyncio task, calls in a with block; None means each device's
    default. No other thread sees it, not even one that starts in the block. A backward pass runs on the backend of its
    forward wherever it runs. A function from torch.compile takes the backend of the block that it is called in, but do
    not call the same one in other threads while a block is open: it knows that one is, and not whose it is.

    example
    >>> with vx.use_backend("cpu"):
    ...     vx.current_backend()
    'cpu'
    """
    global _open
    _check_name("use_backend", name)
    entry = name or ""
    with _opening:
        _open = (*_open, entry)
    token = _block.set(entry)
    try:
        yield
    finally:
        _block.reset(token)
        with _opening:  # equal entries are one another's equals: the last one goes
            at = len(_open) - 1 - _open[::-1].index(entry)
            _open = _open[:at] + _open[at + 1 :]


def current_backend() -> str | None:
    """What use_backend takes to ask, in another thread, for what a call that names no backend asks for here."""
    block = _block.get() if _open else None
    return _setting if block is None else block or None


ROOMS: dict[str, "Room"] = {}


@dataclass
class Room:
    """One op family: its name (the package under vexact_ops) and its backends per device type, the default first."""

    name: str
    cpu: tuple[str, ...] = ("cpu",)
    cuda: tuple[str, ...] = ()
    one_class: bool = True  # a device type's backends are proven equal; else the fingerprint says which one is in use
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
        if asked is None:
            asked = _setting
            if _open and (block := _of_block()) is not None:
                asked = block
            if not asked and device in self._defaults:
                return self._defaults[device]
        names = self.backends(device.type)
        name = asked or (names[0] if names else None)
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
    """Every backend and what stands in its way here: {"cpu": "available", "cuda": "no CUDA device ...", ...}.

    example
    >>> vx.backends()["cpu"]
    'available'
    """
    return {name: probe() or "available" for name, probe in PROBES.items()}
