"""The norm of columns that ranks have one beside the other, where it is all that they are gathered for."""

import functools

import torch
from torch import Tensor

from .._core.peers import Loopback, Peers, Sent, kind_of
from .._core.proof.bitwise import same_bits
from .._core.proof.inputs import special_rows, tricky
from .op import rmsnorm

_WIDEST = 16384  # columns that the kernel takes


def rmsnorm_gather(
    x: Tensor | Sent,
    weight: Tensor,
    eps: float,
    residual: Tensor,
    peers: Peers,
    *,
    style: str = "llama",
    settled: bool = False,
) -> tuple[Tensor, Tensor]:
    """rmsnorm(peers.receive(x), weight, eps, residual), by one kernel on each rank where it was verified.

    x         (T, N / peers.size) of each rank, alike in shape and dtype; what linear_send gave, too
    weight    (N,)
    residual  (T, N), the same on every rank
    settled   whether weight and residual were there before what has sent x was called: they are read while that still
              computes
    returns   (normed, x + residual), (T, N)
    bits      rmsnorm's
    raises    as rmsnorm
    """
    rows, columns, dtype = kind_of(x)
    wide = peers.size * columns
    plain = (
        residual.shape == (rows, wide)
        and weight.shape == (wide,)
        and residual.dtype == weight.dtype == dtype
        and residual.is_contiguous()
        and weight.is_contiguous()
        and (residual.data_ptr() | weight.data_ptr()) % 8 == 0
    )
    packed = plain and isinstance(x, Tensor) and peers.norms(rows, columns, dtype)
    if packed and _verified((_verify_packed, peers.device, dtype, wide, peers.size, style)):
        return peers.norm_packed(x, weight, eps, residual, style == "gemma")
    fits = plain and wide <= _WIDEST and peers.sends(rows, columns, dtype)
    if fits and _verified((_verify, peers.device, dtype, wide, peers.size, style)):
        return peers.norm(x, weight, eps, residual, style == "gemma", settled)
    return rmsnorm(peers.receive(x), weight, eps, residual, style=style)


_verdicts: dict[tuple, bool] = {}


def _verified(key: tuple) -> bool:
    """Inside a graph nothing can be: what was not before is not trusted."""
    if key not in _verdicts:
        if torch.cuda.is_current_stream_capturing():
            return False
        by, *about = key
        _verdicts[key] = by(*about)
    return _verdicts[key]


@torch.no_grad()
def _verify(device: torch.device, dtype: torch.dtype, n: int, size: int, style: str) -> bool:
    """As one of ranks that have sent before, on rows of special values among others."""
    loop, new = Loopback(size, device), functools.partial(tricky, dtype=dtype, device=device)
    weight = special_rows(new(1, n, seed=1), seed=1)[0]
    for rows, eps, special in (
        (1, 1e-6, False),
        (7, 1e-6, True),
        (40, 0.0, True),
        (129, 1e-5, True),
        (300, 1e-6, False),
    ):
        if not loop.sends(rows, n // size, dtype):
            continue
        x, residual = new(rows, n, seed=rows), new(rows, n, seed=rows + 1)
        if special:
            x = special_rows(x, seed=rows)
        expected = rmsnorm(x, weight, eps, residual, style=style)
        own, *others = (part.contiguous() for part in x.chunk(size, 1))
        for first in (own, Sent(*own.shape, dtype)):
            loop.begin(others if isinstance(first, Tensor) else (own, *others))
            found = loop.norm(first, weight, eps, residual, style == "gemma", True)
            if not all(same_bits(a, b) for a, b in zip(found, expected)):
                return False
    return True


@torch.no_grad()
def _verify_packed(device: torch.device, dtype: torch.dtype, n: int, size: int, style: str) -> bool:
    """The same of packed lines: what is sent, too."""
    loop, new = Loopback(size, device), functools.partial(tricky, dtype=dtype, device=device)
    weight = special_rows(new(1, n, seed=1), seed=1)[0]
    for rows, eps, special in ((1, 1e-6, False), (7, 1e-6, True), (65, 0.0, True), (128, 1e-5, True)):
        x, residual = new(rows, n, seed=rows), new(rows, n, seed=rows + 1)
        if special:
            x = special_rows(x, seed=rows)
        expected = rmsnorm(x, weight, eps, residual, style=style)
        own, *others = (part.contiguous() for part in x.chunk(size, 1))
        loop.begin_packed(others)
        found = loop.norm_packed(own, weight, eps, residual, style == "gemma")
        if not (all(same_bits(a, b) for a, b in zip(found, expected)) and loop.has_sent(own)):
            return False
    return True
