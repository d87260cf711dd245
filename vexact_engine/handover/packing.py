"""Tensors in buckets, one behind the other, and those that are larger than one in pieces."""

from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import Tensor

from .messages import Part, dtype_name, dtype_of

ALIGN = 16  # bytes: every part of a bucket begins at a multiple


def check_whole(name: str, tensor: object, op: str = "weights") -> None:
    """TypeError unless it is a tensor whose elements are all here."""
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"{op}: {name} is sharded (a DTensor), expected a whole tensor: give its full_tensor()")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} is a {type(tensor).__name__}, expected a dense tensor")
    if tensor.layout is not torch.strided or tensor.is_meta:
        got = "a meta tensor" if tensor.is_meta else f"a tensor of layout {tensor.layout}"
        raise TypeError(f"{op}: {name} is {got}, expected a dense tensor")


@torch.no_grad()
def pack(items: Iterable[tuple[str, Tensor]], buckets: Iterator[Tensor]) -> Iterator[tuple[Tensor, list[Part]]]:
    """Fill bucket after bucket, in the tensors' own dtypes: the bytes of each that are in use, and what lies there.

    buckets   bytes on any device. The next is asked for once the caller comes back: by then it may be filled
    """
    memory, used, parts = next(buckets), 0, []
    for name, tensor in items:
        flat, start, size = tensor.detach().reshape(-1), 0, tensor.dtype.itemsize
        while start < len(flat):
            count = min((len(memory) - used) // size, len(flat) - start)
            if not count:
                yield memory[:used], parts
                memory, used, parts = next(buckets), 0, []
                continue
            memory[used : used + count * size].view(flat.dtype).copy_(flat[start : start + count])
            parts.append(Part(name, tuple(tensor.shape), dtype_name(flat.dtype), start, count, used))
            start, used = start + count, min(used + -(-count * size // ALIGN) * ALIGN, len(memory))
    if parts:
        yield memory[:used], parts


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
