"""Kernels of the CuTe stack, compiled once: kept in this process for good, since a CUDA graph may hold one, and as
object files on disk, since compiling one takes seconds. A loaded one knows no defaults: it is called with every
argument but the stream, in their order.

An object holds for the sources and versions that its name was made of, so what is loaded is what would be compiled. One
that cannot be read or loaded is compiled again, and replaced.
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch

from .._core import admit

STACK = "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi"  # what a kernel is made with
DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
_FUNCTION = "vexact"  # its name in an object file
_kernels: dict[tuple, Callable] = {}
_modules: list = []  # what a function was loaded from is not unloaded under it


def kernel(
    name: str,
    device: torch.device,
    key: tuple[Hashable, ...],
    compile: Callable,
    versions: Callable[[], str],
) -> Callable:
    """The kernel `name` for what it is specialised to.

    key       dtypes, widths, flags: all that `compile` reads; the class of the GPU is added to it
    compile   makes it, with TVM's calling convention
    versions  gives what sources and libraries it is made of
    """
    known = (name, device, *key)
    found = _kernels.get(known)
    if found is None:
        found = _kernels[known] = _made(_path(name, device, key, versions()), compile)
    return found


def _path(name: str, device: torch.device, key: tuple, versions: str) -> Path | None:
    base = admit.folder("kernels")
    of = name, key, versions, torch.cuda.get_device_capability(device), torch.version.cuda
    return base and base / f"{hashlib.sha256(repr(of).encode()).hexdigest()[:32]}.o"


def _made(path: Path | None, compile: Callable) -> Callable:
    if path is not None and path.exists():
        try:
            module = cute.runtime.load_module(str(path), enable_tvm_ffi=True)
            found = getattr(module, _FUNCTION)
        except Exception:  # cut short, or of another machine: whatever it is, compiling mends it
            pass
        else:
            _modules.append(module)
            return found
    made = compile()
    if path is not None:
        _keep(made, path)
    return made


def _keep(made, path: Path) -> None:
    """Whole or not at all: others may be reading. A cache that cannot be written is no obstacle."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".o")
        os.close(handle)
        made.export_to_c(object_file_path=temporary, function_name=_FUNCTION)
        os.replace(temporary, path)
    except Exception:  # of the file system, or of an export that a kernel does not know
        with contextlib.suppress(OSError):
            if temporary:
                os.unlink(temporary)
