"""linear on every matrix of a model, against the stock product, a fixed Triton tile and quack."""

import importlib.util
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx
from vexact_ops.testing import cancelling

from ..harness import Case, peers, random
from ..shapes import Shape


def _fixed_tile():
    from ..fixed_tile import linear

    return linear


def _quack():
    if importlib.util.find_spec("quack") is None:
        raise ImportError("quack is not installed")

    def linear(x, weight):
        from quack.gemm_interface import gemm  # seconds, which runs without this peer are spared

        return gemm(x, weight.t(), tuned=False)

    return linear


def _tiled(t: torch.Tensor, rows: int) -> torch.Tensor:
    return t.repeat(-(-rows // t.shape[0]), 1)[:rows]


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    others = peers(**{"fixed-tile": _fixed_tile, "quack": _quack}) if device == "cuda" else {}
    for name, (n, k) in shape.linears().items():
        for count in rows:
            if count * n > 2**28:
                continue  # a head over many rows is linear_cross_entropy's case

            def make(count=count, n=n, k=k):
                return random(count, k, dtype=dtype, device=device, seed=1), random(
                    n, k, dtype=dtype, device=device, seed=2, scale=k**-0.5
                )

            def bits(x, weight, k=k):
                few, some = cancelling(min(x.shape[0], 32), k, min(weight.shape[0], 128), 0, dtype, device)
                x, weight = _tiled(few, x.shape[0]), _tiled(some, weight.shape[0])
                y = vx.linear(x, weight)
                if device != "cuda":
                    return vx.linear(x[-1:], weight), y[-1:]
                return (vx.linear(x[-1:], weight), y), (y[-1:], vx.linear(x, weight, backend="triton"))

            yield Case(
                "linear",
                f"{shape.name} {name} M={count} {str(dtype)[6:]}",
                make,
                {"vexact": vx.linear, "torch": F.linear, **others},
                bits,
                bytes=(count * k + n * k + count * n) * dtype.itemsize,
                flops=2 * count * n * k,
            )
