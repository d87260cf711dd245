"""What rooms ask of a GPU and of operands before they choose a kernel."""

import functools

import torch
from torch import Tensor

__all__ = ["aligned_rows", "multiprocessors", "not_sm90", "sm90", "with_index"]


def with_index(device: torch.device | str) -> torch.device:
    """The device by its number, which "cuda" alone leaves to the thread that asks."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def sm90(device: torch.device) -> bool:
    """Whether kernels that are written for SM90 (H100, H200) run there."""
    return _capability(device) == (9, 0)


def not_sm90(device: torch.device) -> str | None:
    """Why such kernels do not run there."""
    return None if sm90(device) else "other kernels are for SM90, and this is SM{}{}".format(*_capability(device))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def aligned_rows(t: Tensor) -> bool:
    """Whether rows begin on 16-byte boundaries and none is another's, as the copy engine needs (in 16 bits)."""
    rows = t.shape[0] <= 1 or (t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1])
    return rows and t.data_ptr() % 16 == 0
