"""Kernels of the CuTe stack, compiled once: kept in this process for good, for a CUDA graph may hold one, and on disk,
since that takes seconds: as shared libraries, which TVM's runtime alone loads, in milliseconds; where nothing links one
here, as object files, which want the compiler's modules, seconds of imports. A loaded kernel knows no defaults: it is
called with every argument but the stream, in their order.

A file holds for the sources and versions that its name was made of, so what is loaded is what would be compiled. One
that cannot be read or loaded is compiled again, and replaced.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path

import torch

from .._core import admit

STACK = "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi"  # what a kernel is made with
_FUNCTION = "vexact"  # its name in a file
_LIBRARY, _OBJECT = ".so", ".o"
_SHA256 = 32  # bytes of one, of what stands before it in a library's file
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


def kept(versions: str) -> bool:
    """Whether some of these sources and libraries are kept that load without the compiler's modules."""
    base = admit.folder("kernels")
    return base is not None and any(base.glob(f"{_of(versions)}*{_LIBRARY}"))


def _path(name: str, device: torch.device, key: tuple, versions: str) -> Path | None:
    """Without a suffix."""
    base = admit.folder("kernels")
    of = name, key, versions, torch.cuda.get_device_capability(device), torch.version.cuda
    return base and base / (_of(versions) + hashlib.sha256(repr(of).encode()).hexdigest()[:24])


def _of(versions: str) -> str:
    return hashlib.sha256(versions.encode()).hexdigest()[:8]


def _made(path: Path | None, compile: Callable) -> Callable:
    for suffix, load in ((_LIBRARY, _load_library), (_OBJECT, _load_object)) if path is not None else ():
        file = path.with_suffix(suffix)
        if file.exists():
            try:
                module = load(file)
                found = getattr(module, _FUNCTION)
            except Exception:  # cut short, or of another machine: whatever it is, compiling mends it
                continue
            _modules.append(module)
            return found
    made = compile()
    if path is not None:
        _keep(made, path)
    return made


def _load_library(file: Path):
    import tvm_ffi

    content = file.read_bytes()
    if content[-_SHA256:] != hashlib.sha256(content[:-_SHA256]).digest():  # half a library ends the process, unasked
        raise OSError(f"{file} is not whole")
    return tvm_ffi.load_module(str(file))


def _load_object(file: Path):
    from cutlass.cute import runtime

    return runtime.load_module(str(file), enable_tvm_ffi=True)


def _keep(made, path: Path) -> None:
    """Whole or not at all: others may be reading. A cache that cannot be written is no obstacle."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="new-") as folder:
            object_file = Path(folder, "kernel.o")
            made.export_to_c(object_file_path=str(object_file), function_name=_FUNCTION)
            library = _linked(object_file)
            os.replace(library or object_file, path.with_suffix(_LIBRARY if library else _OBJECT))
    except Exception:  # of the file system, or of an export that a kernel does not know
        pass


def _linked(object_file: Path) -> Path | None:
    """As a library beside it, which finds what the stack's kernels call where that lies now; None where nothing links,
    or what lies here is not loaded as a program's. Triton, too, wants a C compiler."""
    from cutlass.runtime import find_runtime_libraries

    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    found = find_runtime_libraries(enable_tvm_ffi=True)
    places = [f"-Wl,-rpath,{Path(one).parent}" for one in found]
    library = object_file.with_suffix(_LIBRARY)
    # each has symbols of its own under the same names
    command = [compiler, "-shared", "-Wl,-Bsymbolic", "-o", library, object_file, *found, *places]
    with contextlib.suppress(Exception):  # of the linker, of the file system, of what loads it
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        library.write_bytes((content := library.read_bytes()) + hashlib.sha256(content).digest())
        getattr(_load_library(library), _FUNCTION)
        return library
    return None
