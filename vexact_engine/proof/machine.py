"""What runs here: versions and processor, for reports."""

import platform
from importlib import metadata

import torch

import vexact_ops as vx


def environment(device: torch.device | str = "cpu") -> dict:
    """What ran this: versions, processor, threads."""
    device = torch.device(device)
    found = {"vexact": vx.__version__, "python": platform.python_version(), "torch": torch.__version__}
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
