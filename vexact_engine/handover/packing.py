"""Tensors in buckets, one behind the other, and those that are larger than one in pieces."""

from collections.abc import Callable, Iterable, Iterator
from math import prod
from mmap import PAGESIZE
from typing import Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from ..weights.update import Piece, pairs_of, wrapped
from .messages import Part, dtype_name, dtype_of

ALIGN = 16  # bytes: every part of a bucket begins at a multiple


def in_turn(given: object) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors that a sender is given; what is wrong with them, or with it, is raised as they are asked for:
    by then there is a receiver that has to be told."""
    yield from pairs_of(given, "weights", plain=False)


def check_whole(name: str, tensor: object, op: str = "weights") -> None:
    """TypeError unless it is a tensor whose elements are all here."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"{op}: {name} is sharded (a DTensor), expected a whole tensor: give its full_tensor()")
    if what := wrapped(tensor):
        raise TypeError(f"{op}: {name} is {what}")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}, expected a dense tensor")
    if tensor.layout is not torch.strided or tensor.is_meta:
        got = "a meta tensor" if tensor.is_meta else f"a tensor of layout {tensor.layout}"
        raise TypeError(f"{op}: {name} is {got}, expected a dense tensor")


class Space(Protocol):
    """A bucket of `size` bytes that is to be filled; `part` is so many elements of it from a byte on."""

    size: int

    def part(self, offset: int, count: int, dtype: torch.dtype) -> Tensor: ...


class Bytes:
    """A tensor of bytes, as a bucket."""

    def __init__(self, memory: Tensor):
        self.memory, self.size = memory, len(memory)

    def part(self, offset: int, count: int, dtype: torch.dtype) -> Tensor:
        return self.memory[offset : offset + count * dtype.itemsize].view(dtype)


S = TypeVar("S", bound=Space)
Filled: TypeAlias = tuple[S, int, list[Part]]  # a bucket, the bytes of it that are in use, and what lies there


class Packer(Generic[S]):
    """Fills bucket after bucket with tensors, one behind the other.

    spaces   the next is asked for once there is something to put there and the one before has been handed on
    copy     a tensor's elements into as many of a bucket
    """

    def __init__(self, spaces: Iterator[S], copy: Callable[[Tensor, Tensor], object] = Tensor.copy_):
        self._spaces, self._copy = spaces, copy
        self._space: S | None = None
        self._used, self._parts = 0, []

    def put(self, name: str, value: Tensor | Piece, dtype: torch.dtype | None = None) -> Iterator[Filled]:
        """Each bucket that it fills. In another dtype the tensor is rounded."""
        tensor, first, shape = value, 0, None
        if isinstance(value, Piece):
            tensor, first, shape = value.values, value.start, (0,)  # of what, the reader knows
        shape = tuple(tensor.shape) if shape is None else shape
        dtype = tensor.dtype if dtype is None else dtype
        flat, done, size, kind = tensor.detach(), 0, dtype.itemsize, dtype_name(dtype)
        flat = flat if flat.dim() == 1 else flat.reshape(-1)
        total = flat.numel()
        while done < total:
            if self._space is None:
                self._space, self._used, self._parts = next(self._spaces), 0, []
            count = min((self._space.size - self._used) // size, total - done)
            if not count:
                yield from self.flush()
                continue
            into = self._space.part(self._used, count, dtype)
            self._copy(into, flat if count == total else flat[done : done + count])
            self._parts.append(Part(name, shape, kind, first + done, count, self._used))
            done, self._used = done + count, min(self._used + -(-count * size // ALIGN) * ALIGN, self._space.size)

    def flush(self) -> Iterator[Filled]:
        """The last one, if there is something in it."""
        if self._space is not None:
            space, self._space = self._space, None
            yield space, self._used, self._parts


def packed(items: Iterable[tuple[str, Tensor | Piece]], spaces: Iterator[S]) -> Iterator[Filled]:
    """All of them, in their own dtypes."""
    packer = Packer(spaces)
    for name, value in items:
        yield from packer.put(name, value)
    yield from packer.flush()


def pack(items: Iterable[tuple[str, Tensor]], buckets: Iterator[Tensor]) -> Iterator[tuple[Tensor, list[Part]]]:
    """`packed` into tensors of bytes, on any device: what of each is in use, and what lies there. The next is asked for
    once the caller comes back: by then it may be filled."""
    for space, used, parts in packed(items, map(Bytes, buckets)):
        yield space.memory[:used], parts


def bucket_bytes(specs: Iterable[tuple[Iterable[int], torch.dtype]], most: int) -> int:
    """Of a bucket for tensors of these shapes and dtypes: so many at most, and not more than all of them take."""
    sizes = (-(-prod(shape) * dtype.itemsize // ALIGN) * ALIGN for shape, dtype in specs)
    return max(min(most, sum(sizes)), PAGESIZE)


@torch.no_grad()
def unpack(buckets: Iterable[tuple[Tensor, list[Part]]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors again, each good until the next is asked for."""
    whole = None
    for memory, parts in buckets:
        for part in parts:
            dtype = dtype_of(part.dtype)
            values = memory[part.offset : part.offset + part.count * dtype.itemsize].view(dtype)
            if part.count == prod(part.shape):
                yield part.name, values.view(part.shape)
                continue
            if part.start == 0:
                whole = torch.empty(part.shape, dtype=dtype, device=memory.device)
            whole.view(-1)[part.start : part.start + part.count] = values
            if part.start + part.count == whole.numel():
                yield part.name, whole
