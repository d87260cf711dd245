"""What /proc says of processes, which may end while it is read."""

import contextlib
import os
from pathlib import Path

import forks


def children_of(pid):
    """Without what forks for it (forks.py), which ends with it."""
    found, tasks = [], Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        for thread in os.listdir(tasks):
            with contextlib.suppress(OSError):
                found += map(int, (tasks / thread / "children").read_text().split())
    return [child for child in found if _name(child) != forks.NAME]


def _name(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
