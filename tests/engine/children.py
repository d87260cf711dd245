"""What /proc says of processes, which may end while it is read."""

import contextlib
import os
from pathlib import Path


def children_of(pid):
    found, tasks = [], Path(f"/proc/{pid}/task")
    with contextlib.suppress(OSError):
        for thread in os.listdir(tasks):
            with contextlib.suppress(OSError):
                found += map(int, (tasks / thread / "children").read_text().split())
    return found


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
