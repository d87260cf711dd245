"""What a gated delta net's decay and write strength are made of."""

import torch
from torch import Tensor

from .._core import check
from .._core.operator import Operator
from .op import ROOM


def delta_gates(
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    *,
    beta_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """g = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b), as Hugging Face's Qwen3.5 and Qwen3-Next do.

    a, b      (T, Hv) bf16 | fp32, on a GPU also fp16; rows may be strided, as parts of one projection
    a_log     (Hv,) bf16 | fp16 | fp32: the logarithm of each head's rate
    dt_bias   (Hv,) likewise
    beta_dtype  b.dtype (default), or torch.float32: the same numbers, as kernels of chunks read them
    returns   g (T, Hv) fp32, at most 0, and beta (T, Hv) in beta_dtype, from 0 to 1: for gated_delta_varlen and
              gated_delta_paged. softplus(x) is x where x is above 20, as torch has it
    bits      elementwise in fp32, the same on a CPU and a GPU; g is not rounded, beta once, to b.dtype
    grad      a and b as bits; a_log and dt_bias sum rows in a fixed order (on a CPU ascending), repeatable for one
              fixed batch
    raises    TypeError on dtype, ValueError on shape or device, BackendUnavailable
    example
    >>> g, beta = vx.delta_gates(torch.randn(3, 4), torch.randn(3, 4), torch.zeros(4), torch.ones(4))
    >>> bool((g < 0).all()), bool(((beta > 0) & (beta < 1)).all())
    (True, True)
    """
    op = "delta_gates"
    if not gates_fit(a, b, a_log, dt_bias):
        check_gates(op, a, b, a_log, dt_bias)
        check.same_device(op, a=a, b=b, a_log=a_log, dt_bias=dt_bias)
    if beta_dtype is None:
        beta_dtype = b.dtype
    elif beta_dtype not in (b.dtype, torch.float32):
        raise TypeError(f"{op}: beta_dtype: got {beta_dtype}, expected {b.dtype} or torch.float32")
    backend = ROOM.resolve(a.device, backend)
    check.served(op, "a", a.dtype, backend)
    return _delta_gates(check.rows(a), check.rows(b), a_log, dt_bias, beta_dtype, backend)


def gates_fit(a, b, a_log, dt_bias) -> bool:
    """Whether the checks with messages would find nothing: the engine asks at every layer of every step."""
    return (
        check.alike(a, b)
        and check.alike(a_log, dt_bias)
        and a.dtype in check.FLOATS
        and a_log.dtype in check.FLOATS
        and a_log.device == a.device
        and a.dim() == 2
        and a.shape == b.shape
        and a_log.shape == dt_bias.shape == a.shape[1:]
        and a.shape[1] > 0
    )


def check_gates(op: str, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> None:
    check.tensor(op, "a", a, check.FLOATS, 2)
    check.tensor(op, "b", b)
    check.same_dtype(op, "b", b, "a", a)
    check.shape(op, "b", b, a.shape)
    if a.shape[1] == 0:
        raise ValueError(f"{op}: a: got shape {tuple(a.shape)}, expected (T, Hv) with Hv of at least 1")
    for arg, x in (("a_log", a_log), ("dt_bias", dt_bias)):
        check.tensor(op, arg, x, check.FLOATS)
        check.shape(op, arg, x, a.shape[1:])


def _fwd(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, beta_dtype: torch.dtype, backend: str):
    g, beta = a.new_empty(*a.shape, dtype=torch.float32), b.new_empty(*b.shape, dtype=beta_dtype)
    ROOM.module(backend).delta_gates_fwd(a, b, a_log.contiguous(), dt_bias.contiguous(), g, beta)
    return g, beta


def _bwd(dg, dbeta, a, b, a_log, dt_bias, backend):
    tensors = dg.contiguous(), dbeta.to(b.dtype).contiguous(), a, b, a_log.contiguous(), dt_bias.contiguous()
    da, db, da_log, ddt_bias = ROOM.module(backend).delta_gates_bwd(*tensors)
    return da, db, da_log.to(a_log.dtype), ddt_bias.to(dt_bias.dtype)


def _setup(ctx, inputs, output):
    *tensors, _, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dg, dbeta):
    return *_delta_gates_bwd(dg, dbeta, *ctx.saved_tensors, ctx.backend), None, None


_delta_gates_bwd = Operator(
    "delta_gates_bwd(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    lambda dg, dbeta, *rest: tuple(x.new_empty(x.shape) for x in rest[:4]),
)
_delta_gates = Operator(
    "delta_gates(Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, ScalarType beta_dtype, str backend)"
    " -> (Tensor, Tensor)",
    _fwd,
    lambda a, b, a_log, dt_bias, beta_dtype, backend: (
        a.new_empty(a.shape, dtype=torch.float32),
        b.new_empty(b.shape, dtype=beta_dtype),
    ),
    _setup,
    _backward,
)
