"""Loads the compiled extension once, on first use, and says what to do where it cannot be loaded."""

import contextlib
import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_LIBRARY = Path(__file__).parent.parent / "_native.abi3.so"


class BackendUnavailable(RuntimeError):
    """A backend that was asked for, or is the only one for a device, cannot run here; the message says why."""


@functools.cache
def _load() -> str | None:
    if not _LIBRARY.exists():
        return f"the compiled extension is missing ({_LIBRARY.name}); install with `pip install -e .` from a clone"
    try:
        torch.ops.load_library(str(_LIBRARY))
    except OSError as error:
        return f"the compiled extension does not load under torch {torch.__version__}: {error.__cause__ or error}"
    return None


def unavailable() -> str | None:
    """Why the native extension cannot be used here, or None where it can."""
    return _load()


def ops():
    """torch.ops.vexact_native, loaded. Raises BackendUnavailable with the reason."""
    reason = _load()
    if reason is not None:
        raise BackendUnavailable(reason)
    return torch.ops.vexact_native


def built_with_cuda() -> bool:
    return unavailable() is None and torch.ops.vexact_native.built_with_cuda()


def cpu_isa(request: str | None = None) -> str:
    """The instruction set the CPU kernels run on; with `request` ("scalar", "avx2", "avx512"), switch to it (tests)."""
    return ops().cpu_isa(request)


DEFAULT_FLOAT_MODE = 0x1F80  # x86-64: subnormals kept, rounding to nearest, nothing trapped


def float_mode() -> int:
    """The calling thread's floating-point mode, as a number whose only meaning is its processor's."""
    return ops().float_mode(None)


@contextlib.contextmanager
def default_float_mode() -> Iterator[None]:
    """IEEE 754's default for the length of a with block, in this thread: subnormals kept, rounding to nearest. The
    kernels see to themselves; this is for scalars on a CPU that an op leaves to torch."""
    found = ops().float_mode(DEFAULT_FLOAT_MODE)
    try:
        yield
    finally:
        ops().float_mode(found)


def full(count: int, value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.full((count,), value), rounded to nearest whatever the calling thread's mode."""
    if torch.compiler.is_compiling() or device.type != "cpu" or unavailable():
        return torch.full((count,), value, dtype=dtype, device=device)
    with default_float_mode():
        return torch.full((count,), value, dtype=dtype, device=device)


@functools.cache
def fingerprint() -> str | None:
    """A digest of the extension's own bytes: verdicts on kernels hold for one build of it. None where it is missing."""
    return hashlib.sha256(_LIBRARY.read_bytes()).hexdigest()[:24] if _LIBRARY.exists() else None
