"""The experts of a mixture: every token through its own few gated feed-forward blocks, and their weighted sum."""

from collections.abc import Callable

import torch
from torch import Tensor

from .._core import check
from .._core.operator import Operator
from ..silu_mul.op import ACTIVATIONS as GATES
from . import swiglu
from .swiglu import ROOM as ROOM

ACTIVATIONS = (*GATES, swiglu.ACTIVATION)


def fused_moe(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    between: Callable[[Tensor], Tensor] | None = None,
    backend: str | None = None,
) -> Tensor:
    """sum over slots s of topk_weights[t, s] * down[e](silu_mul(gate_up[e](x[t]))), e = topk_ids[t, s].

    x               (T, H) bf16 | fp32, on a GPU also fp16
    gate_up_weight  (E, 2I, H) in x.dtype: an expert's gate rows, then its up rows; matrices and rows of any stride
    down_weight     (E, H, I) in x.dtype
    topk_weights    (T, k) fp32, as moe_route gives them
    topk_ids        (T, k) int32; a slot whose id is no expert (-1, E) is empty: it adds nothing, and costs nothing
    activation      as in silu_mul; or gpt-oss's "swigluoai", of rows of gates and ups by turns, each with a bias:
                    g sigmoid(1.702 g) (u + 1) of g = min(gate, 7) and u = up from -7 to 7, fp32 inside, rounded once
    gate_up_bias    (E, 2I) in x.dtype, with "swigluoai" and never without
    down_bias       (E, H) likewise. A bias is added to the rounded product and the sum rounded, as Hugging Face does
    between         for a rank with some rows of every matrix: a function of its (Tk, I) activations, sorted by expert,
                    whose (Tk, J) result the second product takes: a gather of all ranks' columns, or a landing of
                    theirs (fused_moe_send). down_weight is (E, N, J) then, the result (T, N); without gradients
    returns         (T, H) in x.dtype
    bits            a token's row depends on that row, its weights and ids, and its experts alone: never on how many
                    other tokens an expert has. Its k results are those of grouped_linear, silu_mul and grouped_linear,
                    each rounded to x.dtype; they are added by fma(weight, result, sum) in slot order in fp32 and
                    rounded once. Hugging Face's loop rounds each product and each sum to x.dtype, experts ascending
    grad            dx and dtopk_weights as bits. dx adds a token's k gradients, rounded to x.dtype, in slot order in
                    fp32. The gradients of the expert weights sum an expert's rows, tokens ascending, repeatable for one
                    fixed batch; experts without rows get 0. Saved for it: x and the (Tk, 2I) gates. That of
                    down_bias is of weights rounded to x.dtype, and a weight's part from a bias is rounded to it
    memory          beside inputs, results and what is saved, on a GPU: forward at most (Tk, H), (Tk, 2I) and (Tk, I),
                    backward as much
    raises          TypeError on dtype, ValueError on shape or device, BackendUnavailable. Shared experts stay outside
    example
    >>> x, gate_up, down = torch.randn(5, 16), torch.randn(4, 2 * 8, 16), torch.randn(4, 16, 8)  # four experts
    >>> weights, ids = vx.moe_route(torch.randn(5, 4), top_k=2)
    >>> y = vx.fused_moe(x, gate_up, down, weights, ids)
    >>> vx.same_bits(y[3:4], vx.fused_moe(x[3:4], gate_up, down, weights[3:4], ids[3:4]))
    True
    """
    check.tensor("fused_moe", "x", x, check.FLOATS, ndim=2)
    hidden = x.shape[1]
    check.tensor("fused_moe", "gate_up_weight", gate_up_weight, ndim=3)
    check.same_dtype("fused_moe", "gate_up_weight", gate_up_weight, "x", x)
    check.shape("fused_moe", "gate_up_weight", gate_up_weight, ("E", "2I", hidden))
    experts, width = gate_up_weight.shape[:2]
    if experts == 0 or width % 2:
        raise ValueError(
            f"fused_moe: gate_up_weight: got shape {tuple(gate_up_weight.shape)}, expected (E, 2I, {hidden}), E above 0"
        )
    check.tensor("fused_moe", "down_weight", down_weight)
    check.same_dtype("fused_moe", "down_weight", down_weight, "x", x)
    rest = ("N", "J") if between else (hidden, width // 2)
    check.shape("fused_moe", "down_weight", down_weight, (experts, *rest))
    check.tensor("fused_moe", "topk_weights", topk_weights, (torch.float32,))
    check.shape("fused_moe", "topk_weights", topk_weights, (x.shape[0], "k"))
    check.tensor("fused_moe", "topk_ids", topk_ids, (torch.int32,))
    check.shape("fused_moe", "topk_ids", topk_ids, topk_weights.shape)
    check.same_device(
        "fused_moe",
        x=x,
        gate_up_weight=gate_up_weight,
        down_weight=down_weight,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
    )
    check.choice("fused_moe", "activation", activation, ACTIVATIONS)
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    clamped = activation == swiglu.ACTIVATION
    for (name, bias), weight in zip(biases.items(), (gate_up_weight, down_weight)):
        if clamped is (bias is None):
            got = "None" if bias is None else "one"
            raise ValueError(
                f"fused_moe: {name}: got {got} with {activation!r}, expected one with {swiglu.ACTIVATION!r} alone"
            )
        if bias is not None:
            check.tensor("fused_moe", name, bias)
            check.same_dtype("fused_moe", name, bias, "x", x)
            check.shape("fused_moe", name, bias, tuple(weight.shape[:2]))
            check.same_device("fused_moe", x=x, **{name: bias})
    backend = ROOM.resolve(x.device, backend)
    check.served("fused_moe", "x", x.dtype, backend)
    learning = (x, gate_up_weight, down_weight, topk_weights, gate_up_bias, down_bias)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in learning)
    gelu = activation == "gelu_tanh"
    if between is not None and keep:
        raise ValueError("fused_moe: between: got tensors that require gradients, expected none: it has no backward")
    if gate_up_bias is not None and down_bias is not None:
        args = x, gate_up_weight, down_weight, gate_up_bias, down_bias, topk_weights, topk_ids
        if between is not None:
            return swiglu.rows(*args, False, backend, between)[0]
        return swiglu.fused_moe_swiglu(*args, keep, backend)[0]
    if between is not None:
        return _rows(x, gate_up_weight, down_weight, topk_weights, topk_ids, gelu, False, backend, between)[0]
    return _fused_moe(x, gate_up_weight, down_weight, topk_weights, topk_ids, gelu, keep, backend)[0]


def _rows(x, gate_up, down, weights, ids, gelu, keep, backend, between=None):
    args = check.rows(x), check.matrices(gate_up), check.matrices(down), weights.contiguous(), ids.contiguous()
    return ROOM.module(backend).fused_moe_fwd(*args, gelu, keep, between)


def _fwd(x, gate_up, down, weights, ids, gelu, keep, backend):
    out, h, *plan = _rows(x, gate_up, down, weights, ids, gelu, keep, backend)
    return out, x.new_empty(0, gate_up.shape[1]) if h is None else h, *plan


def _fake(x, gate_up, down, weights, ids, gelu, keep, backend):
    slots = ids.shape[0] * ids.shape[1]
    return (
        x.new_empty(x.shape),
        x.new_empty(slots if keep else 0, gate_up.shape[1]),
        ids.new_empty(gate_up.shape[0] + 1),
        ids.new_empty(slots),
        ids.new_empty(slots),
    )


def _setup(ctx, inputs, output):
    x, gate_up, down, weights, _, ctx.gelu, ctx.keep, ctx.backend = inputs
    _, h, offsets, order, position = output
    ctx.mark_non_differentiable(h, offsets, order, position)
    ctx.save_for_backward(x, gate_up, down, weights, h, offsets, order, position)


def _backward(ctx, dy, *_):
    if not ctx.keep:
        raise RuntimeError("fused_moe: called with keep=False, which leaves nothing for a backward pass")
    needs = ctx.needs_input_grad[:4]
    grads = _fused_moe_bwd(dy, *ctx.saved_tensors, ctx.gelu, *needs[:3], ctx.backend)
    return *(grad if need else None for grad, need in zip(grads, needs)), None, None, None, None


def _bwd(dy, x, gate_up, down, weights, h, offsets, order, position, gelu, need_dx, need_dgate_up, need_ddown, backend):
    args = check.rows(dy), check.rows(x), check.matrices(gate_up), check.matrices(down), weights.contiguous()
    grads = ROOM.module(backend).fused_moe_bwd(
        *args, h, offsets, order, position, gelu, need_dx, need_dgate_up, need_ddown
    )
    return tuple(x.new_empty(0) if grad is None else grad for grad in grads)


def _bwd_fake(
    dy, x, gate_up, down, weights, h, offsets, order, position, gelu, need_dx, need_dgate_up, need_ddown, backend
):
    def like(t, needed=True):
        return t.new_empty(t.shape if needed else 0)

    return like(x, need_dx), like(gate_up, need_dgate_up), like(down, need_ddown), like(weights)


_fused_moe_bwd = Operator(
    "fused_moe_bwd(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor h, Tensor offsets,"
    " Tensor order, Tensor position, bool gelu, bool need_dx, bool need_dgate_up, bool need_ddown, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
_fused_moe = Operator(
    "fused_moe(Tensor x, Tensor gate_up, Tensor down, Tensor weights, Tensor ids, bool gelu, bool keep,"
    " str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fake,
    _setup,
    _backward,
)
