"""linear on every matrix of a model, against the stock product, batch_invariant_ops (or, where that is not here, our
stand-in for its one fixed Triton tile) and quack."""

import importlib.util
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx
from vexact_ops.testing import cancelling

from ..checks import reference, row_alone
from ..harness import Case, random
from ..peers import batch_invariant, installed
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


def _batch_invariant():
    product = batch_invariant("matmul_persistent")
    return lambda x, weight: product(x, weight.t())


def _others() -> dict:
    """Products of other libraries on a GPU; the stand-in only where what it stands for is not."""
    others = installed(batch_invariant_ops=_batch_invariant, quack=_quack)
    return others if "batch_invariant_ops" in others else others | installed(**{"fixed-tile": _fixed_tile})


FREE = {"n": "N", "k": "K"}


def _tiled(t: torch.Tensor, rows: int) -> torch.Tensor:
    return t.repeat(-(-rows // t.shape[0]), 1)[:rows]


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    others = _others() if device == "cuda" else {}
    for name, (n, k) in shape.linears().items():
        for count in rows:
            if count * n > 2**28:
                continue  # a head over many rows is linear_cross_entropy's case

            def make(count=count, n=n, k=k):
                return random(count, k, dtype=dtype, device=device, seed=1), random(
                    n, k, dtype=dtype, device=device, seed=2, scale=k**-0.5
                )

            def cancel(x, weight, k=k):
                few, some = cancelling(min(x.shape[0], 32), k, min(weight.shape[0], 128), 0, dtype, device)
                return _tiled(few, x.shape[0]), _tiled(some, weight.shape[0])

            def bits(x, weight, cancel=cancel):
                x, weight = cancel(x, weight)
                y = vx.linear(x, weight)
                if device != "cuda":
                    return vx.linear(x[-1:], weight), y[-1:]
                return (vx.linear(x[-1:], weight), y), (y[-1:], vx.linear(x, weight, backend="triton"))

            def alone(fn, x, weight, cancel=cancel):
                return row_alone(0)(fn, *cancel(x, weight))

            yield Case(
                "linear",
                f"{shape.name} {name} M={count} {str(dtype)[6:]}",
                make,
                {"vexact": vx.linear, "torch": F.linear, **others},
                bits,
                bytes=(count * k + n * k + count * n) * dtype.itemsize,
                flops=2 * count * n * k,
                alone=alone,
                reference=reference("linear", "linear_ref"),
                terms=k,
            )
