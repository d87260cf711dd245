"""The promise as executable properties: a row's bits depend on that row alone, on every path that may compute it."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .._core import native
from .._core.proof.bitwise import assert_bitwise

ISAS = ("scalar", "avx2", "avx512")


@contextlib.contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Run with this many CPU threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def on_cpu_isa(name: str) -> Iterator[None]:
    """Run the CPU kernels on this instruction set ("scalar", "avx2", "avx512")."""
    before = native.cpu_isa()
    native.cpu_isa(name)
    try:
        yield
    finally:
        native.cpu_isa(before)


def cpu_isas() -> list[str]:
    """The instruction sets that are built and that this CPU runs."""
    before, found = native.cpu_isa(), []
    for name in ISAS:
        with contextlib.suppress(RuntimeError):
            native.cpu_isa(name)
            found.append(name)
    native.cpu_isa(before)
    return found


def _tuple(value) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def check_repeatable(fn: Callable[[], object], *, threads: Sequence[int] = (1, 2, 3), isas: bool = True) -> None:
    """fn() has the same bits again, with other thread counts and, on CPU, on every instruction set."""
    expected = _tuple(fn())
    assert_bitwise(_tuple(fn()), expected, "a second run")
    if any(t is not None and t.is_cuda for t in expected):
        return
    for count in threads:
        with with_threads(count):
            assert_bitwise(_tuple(fn()), expected, f"{count} threads")
    for name in cpu_isas() if isas and native.unavailable() is None else ():
        with on_cpu_isa(name):
            assert_bitwise(_tuple(fn()), expected, f"instruction set {name}")


def check_rows(
    fn: Callable[..., object],
    *rowwise: Tensor,
    seed: int = 0,
    neighbours: Sequence[float] = (float("nan"), float("inf")),
) -> None:
    """fn takes tensors whose first dimension is rows and returns such tensors; each row's bits depend on it alone.

    Checked against one call on all rows: every row alone, random contiguous chunks, a permutation, padding by other
    rows, strided row storage, and neighbours turned into NaN or Inf (floating-point inputs only).
    Raises AssertionError naming the first property that fails.
    """
    rows = rowwise[0].shape[0]
    expected = _tuple(fn(*rowwise))
    g = torch.Generator().manual_seed(seed)

    def run(index: Tensor, inputs=rowwise) -> tuple[Tensor, ...]:
        return _tuple(fn(*(t[index] for t in inputs)))

    def compare(label: str, outputs: tuple[Tensor, ...], index: Tensor) -> None:
        assert_bitwise(outputs, tuple(e[index.to(e.device)] for e in expected), label)

    def device_index(index: Tensor) -> Tensor:
        return index.to(rowwise[0].device)

    for row in range(min(rows, 4)):
        index = device_index(torch.randint(rows, (1,), generator=g) if row else torch.arange(rows - 1, rows))
        compare("a row alone", run(index), index)
    if rows > 1:
        cut = int(torch.randint(1, rows, (1,), generator=g))
        for begin, end in ((0, cut), (cut, rows)):
            index = device_index(torch.arange(begin, end))
            compare(f"the chunk {begin}:{end}", _tuple(fn(*(t[begin:end] for t in rowwise))), index)
    order = device_index(torch.randperm(rows, generator=g))
    compare("a permutation", run(order), order)
    padded = device_index(torch.cat([torch.randint(rows, (3,), generator=g), torch.arange(rows), torch.arange(1)]))
    outputs = run(padded)
    compare("padding", tuple(o[3 : 3 + rows] for o in outputs), device_index(torch.arange(rows)))
    wide = tuple(torch.cat([t, t], dim=-1)[..., : t.shape[-1]] if t.dim() > 1 else t for t in rowwise)
    compare("strided rows", _tuple(fn(*wide)), device_index(torch.arange(rows)))
    for value in neighbours if rows > 1 else ():
        keep = int(torch.randint(rows, (1,), generator=g))
        poisoned = []
        for t in rowwise:
            t = t.clone()
            if t.is_floating_point():
                t[torch.arange(rows, device=t.device) != keep] = value
            poisoned.append(t)
        index = device_index(torch.arange(keep, keep + 1))
        compare(f"{value} next door", tuple(o[index] for o in _tuple(fn(*poisoned))), index)
