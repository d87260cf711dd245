"""rmsnorm with the residual addition, against the arithmetic of the stock modules ("torch", which Hugging Face models
run), torch's fused op ("torch-fused"), quack, Liger, FlashInfer, and batch_invariant_ops, whose mode runs the stock
modules with its own mean."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..checks import reference, row_alone
from ..harness import Case, random
from ..peers import batch_invariant, installed
from ..shapes import Shape


def _stock(x, weight, residual):
    h = x + residual
    wide = h.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * normed.to(x.dtype), h


def _fused(x, weight, residual):
    h = x + residual
    return F.rms_norm(h, (h.shape[-1],), weight, 1e-6), h


def _quack():
    from quack.rmsnorm import rmsnorm

    return lambda x, w, r: rmsnorm(x, w, residual=r, eps=1e-6, prenorm=True)


def _liger():
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

    return lambda x, w, r: LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6)


def _flashinfer():
    from flashinfer.norm import fused_add_rmsnorm

    def run(x, w, r):  # in place
        fused_add_rmsnorm(x, r, w, 1e-6)
        return x, r

    return run


def _batch_invariant():
    mean_dim = batch_invariant("mean_dim")

    def run(x, weight, residual):
        h = x + residual
        wide = h.float()
        normed = wide * torch.rsqrt(mean_dim(wide.pow(2), -1, keepdim=True) + 1e-6)
        return weight * normed.to(x.dtype), h

    return run


FREE = {"n": "H"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    size, others = dtype.itemsize, {}
    if device == "cuda":
        others = installed(quack=_quack, liger=_liger, flashinfer=_flashinfer, batch_invariant_ops=_batch_invariant)
    for count in rows:

        def make(count=count):
            x, residual = (random(count, shape.H, dtype=dtype, device=device, seed=s) for s in (1, 2))
            return x, random(shape.H, dtype=dtype, device=device, seed=3), residual

        def bits(x, weight, residual):
            one, all_rows = vx.rmsnorm(x[-1:], weight, 1e-6, residual[-1:]), vx.rmsnorm(x, weight, 1e-6, residual)
            return one, tuple(t[-1:] for t in all_rows)

        yield Case(
            "rmsnorm",
            f"{shape.name} +residual R={count} {str(dtype)[6:]}",
            make,
            {"vexact": lambda x, w, r: vx.rmsnorm(x, w, 1e-6, r), "torch": _stock, "torch-fused": _fused, **others},
            bits,
            bytes=(4 * count + 1) * shape.H * size,
            flops=5 * count * shape.H,
            alone=row_alone(0, 2),
            reference=lambda x, w, r: reference("rmsnorm", "rmsnorm_ref")(x, w, 1e-6, r),
        )
