"""What runs here: versions and processor, for reports; and how a document of ours came about."""

import datetime
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

import vexact_ops as vx


def environment(device: torch.device | str = "cpu") -> dict:
    """What ran this: versions, processor, threads."""
    device = torch.device(device)
    found = {"vexact": vx.__version__, "commit": commit(), "python": platform.python_version()}
    found["torch"] = torch.__version__
    for package in ("transformers", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    found |= {"platform": platform.platform(), "processor": processor(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found


def processor() -> str:
    """The CPU's name."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name") and "unknown" not in line:
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


SCHEMA = 1  # of all documents: one more whenever a reader of the last version could misread the next


def made_by(kind: str, line: str | None = None) -> dict:
    """The head of every JSON document: what it is, and when, by which command and of which commit it was made."""
    return {
        "schema": f"vexact.{kind}",
        "schema_version": SCHEMA,
        "date": now(),
        "command": line,
        "vexact": vx.__version__,
        "commit": commit(),
    }


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def commit() -> str | None:
    """The commit that this package is of, with a + where files have changed since; None where nobody knows. A tree that
    was copied without its history is told by VEXACT_COMMIT."""
    if told := os.environ.get("VEXACT_COMMIT"):
        return told
    root = Path(vx.__file__).parents[1]
    if (root / ".git").exists():
        try:
            found = _git(root, "rev-parse", "--short", "HEAD")
            return found + "+" * bool(_git(root, "status", "--porcelain")) if found else None
        except OSError:  # no git here
            return None
    try:
        origin = json.loads(metadata.distribution("vexact").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None
    return origin.get("vcs_info", {}).get("commit_id")


def _git(root: Path, *args: str) -> str:
    return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True).stdout.strip()
