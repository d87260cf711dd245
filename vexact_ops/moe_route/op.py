"""The router of a mixture of experts: which experts a token goes to, and with what weights."""

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("moe_route", cpu=("cpu",), cuda=("triton",))
SCORES = ("softmax", "sigmoid")


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    normalize: bool = True,
    groups: int | None = None,
    top_k_groups: int | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    rounded: torch.dtype | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The top_k experts of each token by score, and their scores as weights; fp32 inside.

    logits        (T, E) bf16 | fp32, on a GPU also fp16
    top_k         experts per token, 1 to E
    score         "softmax" over the E experts, or "sigmoid" of each
    normalize     divide the chosen scores by their sum (plus 1e-20)
    groups        the experts come in this many groups of E / groups, and only those in the top_k_groups best groups can
                  be chosen; a group is worth the sum of its two best scores (bias included)
    bias          (E,) fp32, added to the scores for the choice alone; it has no gradient
    scale         a factor of the weights, at the end
    rounded       bf16 | fp16: the weights are rounded to it last of all, for routers that do so; not where gradients
                  are wanted, whose own rounding is the caller's
    returns       weights (T, top_k) fp32, not rounded to logits.dtype of themselves; ids (T, top_k) int32, best first
    ties          equal choices go to the lower id (groups: the lower group). A NaN counts as the best, so that it shows
    choice        by the logits themselves where there is neither bias nor groups, which is the order of the scores
                  without their rounding; otherwise by score + bias
    bits          a row depends on that row, bias and the options alone: the softmax's sum adds neighbours pairwise over
                  the next power of two, the sum of the chosen scores goes by slot; the same on a CPU and a GPU
    grad          dlogits as bits, through the scores; the choice has none
    raises        TypeError on dtype, ValueError on shape, device or value, BackendUnavailable
    source        Qwen3-MoE and Mixtral: softmax, normalised (Hugging Face's Qwen3MoeTopKRouter then rounds the weights
                  to the logits' dtype, its MixtralTopKRouter does not); DeepSeek-V3, arXiv 2412.19437: sigmoid, groups,
                  bias, scale, on fp32 logits
    example
    >>> weights, ids = vx.moe_route(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), top_k=3)
    >>> ids.tolist(), f"{weights.sum().item():.3f}"  # a tie goes to the lower id
    ([[1, 3, 2]], '1.000')
    """
    check.tensor("moe_route", "logits", logits, check.FLOATS, ndim=2)
    experts = logits.shape[1]
    _between("top_k", top_k, 1, experts)
    check.choice("moe_route", "score", score, SCORES)
    check.number("moe_route", "scale", scale, above=0.0)
    if (groups is None) != (top_k_groups is None):
        raise ValueError("moe_route: top_k_groups: expected with groups, and neither without the other")
    if groups is not None:
        _between("groups", groups, 1, experts // 2)
        _between("top_k_groups", top_k_groups, 1, groups)
        if experts % groups or top_k_groups * (experts // groups) < top_k:
            raise ValueError(
                f"moe_route: groups: got {top_k_groups} of {groups} for {experts} experts, expected even groups that "
                f"hold top_k = {top_k} experts"
            )
    if bias is not None:
        check.tensor("moe_route", "bias", bias, (torch.float32,))
        check.shape("moe_route", "bias", bias, (experts,))
        check.same_device("moe_route", logits=logits, bias=bias)
        bias = bias.detach().contiguous()
    if rounded is not None:
        if rounded not in (torch.bfloat16, torch.float16):
            raise TypeError(f"moe_route: rounded: got {rounded}, expected torch.bfloat16, torch.float16 or None")
        if torch.is_grad_enabled() and logits.requires_grad:
            raise RuntimeError(
                "moe_route: rounded: got one with logits that require a gradient, which that rounding has not: round "
                "the weights afterwards, or call it under torch.no_grad()"
            )
    backend = ROOM.resolve(logits.device, backend)
    check.served("moe_route", "logits", logits.dtype, backend)
    options = score == "sigmoid", bool(normalize), groups or 0, top_k_groups or 0
    return _moe_route(check.rows(logits), top_k, *options, bias, float(scale), rounded or torch.float32, backend)


def _between(arg: str, value, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"moe_route: {arg}: got {type(value).__name__}, expected an int")
    if not low <= value <= high:
        raise ValueError(f"moe_route: {arg}: got {value}, expected {low} to {high}")


def _fwd(logits, top_k, sigmoid, normalize, groups, top_groups, bias, scale, rounded, backend):
    args = logits, top_k, sigmoid, normalize, groups, top_groups, bias, scale, rounded
    return ROOM.module(backend).moe_route_fwd(*args)


def _fake(logits, top_k, sigmoid, normalize, groups, top_groups, bias, scale, rounded, backend):
    shape = logits.shape[0], top_k
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _setup(ctx, inputs, output):
    logits, _, ctx.sigmoid, ctx.normalize, _, _, _, ctx.scale, _, ctx.backend = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, *output)


def _backward(ctx, dweights, _):
    dlogits = _moe_route_bwd(dweights, *ctx.saved_tensors, ctx.sigmoid, ctx.normalize, ctx.scale, ctx.backend)
    return dlogits, *(None,) * 9


def _bwd(dweights, logits, weights, ids, sigmoid, normalize, scale, backend):
    args = dweights.contiguous(), logits, weights, ids
    return ROOM.module(backend).moe_route_bwd(*args, sigmoid, normalize, scale)


_moe_route_bwd = Operator(
    "moe_route_bwd(Tensor dweights, Tensor logits, Tensor weights, Tensor ids, bool sigmoid, bool normalize,"
    " float scale, str backend) -> Tensor",
    _bwd,
    lambda dweights, logits, *_: logits.new_empty(logits.shape),
)
_moe_route = Operator(
    "moe_route(Tensor logits, int top_k, bool sigmoid, bool normalize, int groups, int top_groups, Tensor? bias,"
    " float scale, ScalarType rounded, str backend) -> (Tensor, Tensor)",
    _fwd,
    _fake,
    _setup,
    _backward,
)
