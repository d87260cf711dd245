"""fused_moe of gpt-oss's experts: projections with biases, and a gate between limits (op.py has the contract)."""

from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("fused_moe", cpu=("cpu",), cuda=("cuda", "triton"))
ACTIVATION = "swigluoai"
ALPHA, LIMIT = 1.702, 7.0
_COLUMNS = 8  # of ones, which sum a bias's gradient: as many as a product wants


def rows(x, gate_up, down, gate_up_bias, down_bias, weights, ids, keep, backend, between=None):
    """(out, h before its bias or None, offsets, order, position)."""
    x, gate_up, down, weights, ids = (
        check.rows(x), check.matrices(gate_up), check.matrices(down), weights.contiguous(), ids.contiguous()
    )  # fmt: skip
    room = ROOM.module(backend)
    offsets, order, position = room.plan(ids, gate_up.shape[0])
    read, *through = room.read(x, offsets, order, position)
    h = room.grouped_linear_fwd(read, gate_up, offsets, *through)
    del read
    a = room.swiglu_fwd(h, gate_up_bias.contiguous(), ids, order, offsets)
    h = h if keep else None
    a = a if between is None else between(a)
    y = room.grouped_linear_fwd(a, down, offsets)
    del a
    out = room.combine_biased(y, down_bias.contiguous(), position, weights, ids, order, offsets)
    return out, h, offsets, order, position


def _fwd(x, gate_up, down, gate_up_bias, down_bias, weights, ids, keep, backend):
    out, h, *plan = rows(x, gate_up, down, gate_up_bias, down_bias, weights, ids, keep, backend)
    return out, x.new_empty(0, gate_up.shape[1]) if h is None else h, *plan


def _fake(x, gate_up, down, gate_up_bias, down_bias, weights, ids, keep, backend):
    slots = ids.shape[0] * ids.shape[1]
    h = x.new_empty(slots if keep else 0, gate_up.shape[1])
    return x.new_empty(x.shape), h, *(ids.new_empty(n) for n in (gate_up.shape[0] + 1, slots, slots))


def _setup(ctx, inputs, output):
    *tensors, ctx.keep, ctx.backend = inputs
    _, h, offsets, order, position = output
    ctx.mark_non_differentiable(h, offsets, order, position)
    ctx.save_for_backward(*tensors, h, offsets, order, position)


def _backward(ctx, dy, *_):
    if not ctx.keep:
        raise RuntimeError("fused_moe: called with keep=False, which leaves nothing for a backward pass")
    needs = ctx.needs_input_grad[:6]
    grads = _fused_moe_swiglu_bwd(dy, *ctx.saved_tensors, *needs[:5], ctx.backend)
    return *(grad if need else None for grad, need in zip(grads, needs)), None, None, None


def _bwd(
    dy, x, gate_up, down, gate_up_bias, down_bias, weights, ids, h, offsets, order, position,
    need_dx, need_dgate_up, need_ddown, need_dgate_up_bias, need_ddown_bias, backend,
):  # fmt: skip
    room = ROOM.module(backend)
    canonical = ROOM.module("triton") if backend == "cuda" else room  # of products with a column or a few
    dy, x, gate_up, down = check.rows(dy), check.rows(x), check.matrices(gate_up), check.matrices(down)
    weights, ids, down_bias = weights.contiguous(), ids.contiguous(), down_bias.contiguous()
    read, *through = room.read(dy, offsets, order, position)
    da = room.grouped_linear_dx(read, down, offsets, *through)
    of_bias = canonical.grouped_linear_fwd(read, down_bias[:, None], offsets, *through)
    dh, scaled, dweights = room.swiglu_bwd(h, gate_up_bias.contiguous(), da, of_bias, ids, order, weights, offsets)
    del da, of_bias
    dx = dgate_up = ddown = dgate_up_bias = ddown_bias = None
    if need_ddown:
        ddown = _dweight(room, read, scaled, offsets, through, "dy")
    if need_ddown_bias:
        column = weights.flatten()[order.long()].to(dy.dtype)[:, None].expand(-1, _COLUMNS).contiguous()
        ddown_bias = _dweight(canonical, read, column, offsets, through, "dy")[..., 0]
    if need_dgate_up_bias:
        dgate_up_bias = _dweight(canonical, dh, dh.new_ones(len(dh), _COLUMNS), offsets, [], "")[..., 0]
    if need_dx:
        dx = room._combine(room.grouped_linear_dx(dh, gate_up, offsets), position, None, x.shape[0])
    if need_dgate_up:
        read, *through = room.read(x, offsets, order, position)
        dgate_up = _dweight(room, dh, read, offsets, through, "x")
    grads = dx, dgate_up, ddown, dgate_up_bias, ddown_bias
    return *(x.new_empty(0) if grad is None else grad for grad in grads), dweights


def _dweight(room, dy: Tensor, x: Tensor, offsets: Tensor, through: list, gathered: str) -> Tensor:
    if not through or through[0] is None:
        return room.grouped_linear_dweight(dy, x, offsets)
    return room.grouped_linear_dweight(dy, x, offsets, *through, gathered=gathered)


def _bwd_fake(
    dy, x, gate_up, down, gate_up_bias, down_bias, weights, ids, h, offsets, order, position,
    need_dx, need_dgate_up, need_ddown, need_dgate_up_bias, need_ddown_bias, backend,
):  # fmt: skip
    pairs = (
        (x, need_dx), (gate_up, need_dgate_up), (down, need_ddown),
        (gate_up_bias, need_dgate_up_bias), (down_bias, need_ddown_bias), (weights, True),
    )  # fmt: skip
    return tuple(x.new_empty(t.shape if need else 0, dtype=t.dtype) for t, need in pairs)


_fused_moe_swiglu_bwd = Operator(
    "fused_moe_swiglu_bwd(Tensor dy, Tensor x, Tensor gate_up, Tensor down, Tensor gate_up_bias, Tensor down_bias,"
    " Tensor weights, Tensor ids, Tensor h, Tensor offsets, Tensor order, Tensor position, bool need_dx,"
    " bool need_dgate_up, bool need_ddown, bool need_dgate_up_bias, bool need_ddown_bias, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
fused_moe_swiglu = Operator(
    "fused_moe_swiglu(Tensor x, Tensor gate_up, Tensor down, Tensor gate_up_bias, Tensor down_bias, Tensor weights,"
    " Tensor ids, bool keep, str backend) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _fwd,
    _fake,
    _setup,
    _backward,
)
