"""Memory of an engine on a CPU that a trainer's process writes into itself: no bucket lies between, and no second copy
of a byte.

What was lent in a hand-over that has failed is never lent again, nor used: who has stalled may go on writing there.
"""

import mmap
import os
import secrets
import struct
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from ..errors import HandoverFailed
from . import messages as m
from .buffers import HostMemory, memory_name, no_room

_ALIGN = 64  # bytes: as torch's own memory


class Segment(mmap.mmap):
    """An anonymous file that storages are parts of. It ends with the last of them: nobody else need hold it.

    size     bytes at most; none is taken before `storage` asks for it
    raises   HandoverFailed where there is no room
    """

    def __new__(cls, size: int) -> "Segment":
        name = secrets.token_hex(8)
        file = os.memfd_create(memory_name(name), os.MFD_CLOEXEC)
        try:
            with no_room(size, "the engine's weights"):
                os.ftruncate(file, size)
            self = super().__new__(cls, file, size)
        except BaseException:
            os.close(file)
            raise
        self.name, self.size = name, size
        self._file, self._pid, self._used = file, os.getpid(), 0
        self._begin = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        return self

    @staticmethod
    def bytes_of(sizes: list[int]) -> int:
        """How large one is that has storages of these sizes."""
        return sum(_aligned(size) for size in sizes)

    def storage(self, nbytes: int) -> torch.UntypedStorage:
        """HandoverFailed where there is no room."""
        begin = self._used
        with no_room(nbytes, "the engine's weights"):
            os.posix_fallocate(self._file, begin, nbytes)
        self._used += _aligned(nbytes)
        return torch.frombuffer(self, dtype=torch.uint8, count=nbytes, offset=begin).untyped_storage()

    def offset(self, tensor: Tensor) -> int | None:
        """Of a tensor's first byte, if all of it lies here side by side."""
        begin = tensor.data_ptr() - self._begin
        inside = begin >= 0 and begin + tensor.nbytes <= self._used
        return begin if inside and tensor.nbytes and tensor.is_contiguous() else None

    def lend(self, tensors: dict[str, Tensor], live: list[str]) -> m.Lent:
        """What a sender is told: which of these tensors lie here, and where."""
        places = {name: at for name, tensor in tensors.items() if (at := self.offset(tensor)) is not None}
        return m.Lent(self.name, self.size, struct.pack("<qq", os.getpid(), self._file), places, live)

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # in a fork they are still the weights of the process that it came from
            with suppress(OSError, ValueError):
                self.madvise(mmap.MADV_REMOVE)  # a sender that still has it open keeps no memory with it
        os.close(self._file)


class Borrowed:
    """The same memory in the sender's process.

    tensors   by name: those that are written there
    raises    HandoverFailed where it does not open, or is not what was said
    """

    def __init__(self, lent: m.Lent, manifest: dict[str, tuple[tuple[int, ...], torch.dtype]]):
        self.tensors: dict[str, Tensor] = {}
        self._memory = HostMemory.of(lent.handle, memory_name(lent.name), lent.size, pin=False)
        try:
            for name, offset in lent.places.items():
                shape, dtype = manifest[name]
                end = offset + prod(shape) * dtype.itemsize
                if offset < 0 or end > lent.size:
                    raise HandoverFailed(f"weights: {name} is said to lie outside of the memory that was lent")
                self.tensors[name] = self._memory.tensor[offset:end].view(dtype).view(shape)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.tensors.clear()
        self._memory.close()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
