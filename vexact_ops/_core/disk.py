"""What outlives a process: files in the user's cache directory, of one machine or of any."""

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from . import digest


def folder(kind: str = "admissions") -> Path | None:
    """Where verdicts are kept, or another kind of files: in $VEXACT_CACHE, or the user's cache directory; None for a
    user who has none."""
    if os.environ.get("VEXACT_CACHE"):
        return Path(os.environ["VEXACT_CACHE"]) / kind
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "vexact" / kind
    except (RuntimeError, KeyError, OSError):
        return None


@functools.cache
def machine(device: torch.device) -> str:
    """A digest of what could change any kernel's bits or time: the GPU, and what compiles for it."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    parts = [device.type, torch.__version__, torch.version.cuda, triton_version, os.environ.get("TRITON_INTERPRET")]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        api = torch._C._cuda_getDriverVersion() if hasattr(torch._C, "_cuda_getDriverVersion") else None
        parts += [
            properties.name,
            properties.major,
            properties.minor,
            properties.multi_processor_count,
            digest.driver(),
            api,
        ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def store(path: Path | None, content: str) -> None:
    """Atomic: other processes see the whole file or none. A cache that cannot be written is no obstacle."""
    if path is None:
        return
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            if temporary:
                os.unlink(temporary)
