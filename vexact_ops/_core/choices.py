"""What was chosen for its speed before, so that a new process, or a new machine, need not time it again.

Of this machine it is in the user's cache directory; of other GPUs of its kind it comes with the library, as data
(chosen/<gpu>.json, which `python -m benchmarks start --record` writes). None of it decides bits: a kernel that is named
here is verified as any other, and a name that nobody knows is as none. VEXACT_CHOICES=0 times everything anew.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from pathlib import Path

import torch

from . import digest, disk, gpu

__all__ = ["collected", "kernel", "recall", "record", "remember", "shipped"]

FOLDER = Path(__file__).parent / "chosen"
KERNELS = "kernels"
_noted: dict[str, dict[str, object]] = {}  # what was chosen in this process, as a file that is shipped has it


def is_off(variable: str) -> bool:
    """Whether it is set to 0. ValueError on what would leave it on in silence."""
    if (asked := os.environ.get(variable) or "1") not in ("0", "1"):
        raise ValueError(f"{variable}: got {asked!r}, expected 0 (off) or 1, as it is without")
    return asked == "0"


def recall(kind: str, about: str, device: torch.device | str) -> object | None:
    """What was chosen, as `remember` was given it: on this machine, else on others of its kind; None: nothing.

    kind    "graphs", or another name of a file's section
    about   all that it was chosen for
    example
    >>> print(vx.recall("graphs", "a model that nobody has met", "cpu"))
    None
    """
    if is_off("VEXACT_CHOICES"):
        return None
    device = gpu.with_index(device)
    try:
        kept = json.loads(path.read_text()) if (path := _path(kind, about, device)) else None
        if kept is not None and kept["about"] == about:
            return kept["chosen"]
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return shipped(device).get(kind, {}).get(about)


def remember(kind: str, about: str, device: torch.device | str, chosen: object) -> None:
    """Keep what was chosen for the processes to come on this machine; where nothing can be written, for none.

    chosen   JSON: numbers, texts, lists and dictionaries of them
    example
    >>> vx.remember("graphs", "an example", "cpu", [1, 2, 4])
    """
    record(kind, about, chosen)
    disk.store(_path(kind, about, gpu.with_index(device)), json.dumps({"about": about, "chosen": chosen}))


def record(kind: str, about: str, chosen: object) -> None:
    """Note it for whoever writes what is shipped: of this process, and in $VEXACT_RECORD, a folder, of many."""
    _noted.setdefault(kind, {})[about] = chosen
    if folder := os.environ.get("VEXACT_RECORD"):
        with contextlib.suppress(OSError), open(Path(folder, f"{os.getpid()}.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps([kind, about, chosen]) + "\n")


def recorded() -> dict[str, dict[str, object]]:
    """All that was noted in this process."""
    return {kind: dict(sorted(of.items())) for kind, of in sorted(_noted.items())}


def collected(folder: str | Path) -> dict[str, dict[str, object]]:
    """All that processes have noted in $VEXACT_RECORD, of each the newest."""
    found: dict[str, dict[str, object]] = {}
    for path in sorted(Path(folder).glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        for kind, about, chosen in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            found.setdefault(kind, {})[about] = chosen
    return found


def kernel(key: str, device: torch.device) -> str | None:
    """The kernel that was the fastest for a proposal of this key on GPUs of this kind, where that is known."""
    if is_off("VEXACT_CHOICES"):
        return None
    return shipped(device).get(KERNELS, {}).get(key)


def shipped(device: torch.device) -> dict[str, dict]:
    """What the library brings for this kind of GPU, by kinds; empty where it has not been recorded."""
    return _read(name_of(device)) if device.type == "cuda" else {}


@functools.cache
def name_of(device: torch.device) -> str:
    """The kind of a GPU, as its file is named: "nvidia-h100-80gb-hbm3"."""
    return re.sub(r"\W+", "-", torch.cuda.get_device_properties(device).name.lower()).strip("-")


@functools.cache
def _read(name: str) -> dict[str, dict]:
    try:
        found = json.loads((FOLDER / f"{name}.json").read_text())
        return {kind: of for kind, of in found.items() if isinstance(of, dict)}
    except (OSError, ValueError, AttributeError):
        return {}


def _path(kind: str, about: str, device: torch.device) -> Path | None:
    base = disk.folder("chosen")
    of = [kind, about, digest.of_all_extensions()]  # other kernels take other times
    name = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:32]
    return base / disk.machine(device) / f"{name}.json" if base else None
