"""Memory that buckets of weights travel in to other processes of this machine: both sides map it."""

import math
import mmap
import os
from collections.abc import Iterable, Mapping

import torch

from ..handover.packing import ALIGN

BUCKET = 256 << 20  # bytes


class SharedMemory:
    """Memory with a file descriptor and without a name: it is gone with the processes that have it, however they end.

    key    what others know it by
    """

    def __init__(self, key: int, size: int):
        self.key, self.size = key, size
        self.descriptor = os.memfd_create("vexact-weights")
        try:
            os.ftruncate(self.descriptor, size)
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        os.close(self.descriptor)
        self.bytes = None


def size_of(specs: Mapping[str, tuple[Iterable[int], torch.dtype]]) -> int:
    """Of buckets for these: not larger than all of them."""
    sizes = (-(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN for shape, dtype in specs.values())
    return max(min(BUCKET, sum(sizes)), mmap.PAGESIZE)
