"""Weights on their way to other processes of this machine: buckets of tensors in memory that both sides map."""

import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from .messages import Entry

BUCKET = 256 << 20  # bytes
_ALIGN = 64


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


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def size_of(specs: Mapping[str, tuple[Iterable[int], torch.dtype]]) -> int:
    """Of buckets for these: as large as the largest tensor at least, and not larger than all of them."""
    sizes = [_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in specs.values()]
    return max(max(sizes, default=0), min(BUCKET, sum(sizes)), mmap.PAGESIZE)


@torch.no_grad()
def pack(pairs: Iterable[tuple[str, Tensor]], buffers: Iterator[Tensor]) -> Iterator[tuple[int, list[Entry]]]:
    """Copy tensors into one buffer after the other, as many as each holds: bytes used and what lies where."""
    buffer, entries, used = None, [], 0
    for name, tensor in pairs:
        tensor = tensor.detach()
        if buffer is not None and used + tensor.nbytes > len(buffer):
            yield used, entries
            buffer = None
        if buffer is None:
            buffer, entries, used = next(buffers), [], 0
        there = buffer[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        there.copy_(tensor)
        entries.append(Entry(name, dtype_name(tensor.dtype), list(tensor.shape), used))
        used += _aligned(tensor.nbytes)
    if buffer is not None:
        yield used, entries


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
