"""The head of a language model: logits, log-probabilities and the loss, with no T x V logits in training."""

from typing import Literal, overload

import torch
from torch import Tensor

from .._core import check, native
from .._core.backend import Room
from .._core.operator import Operator
from ..linear.op import linear

ROOM = Room("linear_cross_entropy", cpu=("cpu",), cuda=("cuda", "triton"))
REDUCTIONS = ("mean", "sum", "none")


def linear_logits(
    hidden: Tensor, weight: Tensor, *, softcap: float | None = None, backend: str | None = None
) -> Tensor:
    """hidden @ weight.T in fp32, then softcap * tanh(. / softcap) where one is given.

    hidden   (..., H) bf16 | fp32, on a GPU also fp16
    weight   (V, H) in hidden.dtype
    softcap  above 0, or None
    returns  (..., V) fp32: the accumulators of `linear`, never rounded to bf16
    bits     a logit depends on its row of hidden, its row of weight and softcap alone
    grad     as `linear`: dhidden as bits, dweight repeatable for one fixed batch
    raises   TypeError on dtype, ValueError on shape or device, BackendUnavailable
    example
    >>> hidden, weight = torch.randn(3, 16).bfloat16(), torch.randn(50, 16).bfloat16()
    >>> vx.linear_logits(hidden, weight).dtype
    torch.float32
    """
    _check_head("linear_logits", hidden, weight)
    softcap = _softcap("linear_logits", softcap)
    logits = linear(hidden, weight, out_dtype=torch.float32, backend=backend)
    if not softcap:
        return logits
    return _softcap_op(check.rows(logits), softcap, ROOM.resolve(hidden.device, backend)).view(logits.shape)


@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """log softmax(linear_logits(hidden, weight, softcap=softcap) / temperature)[target], T x V logits never stored.

    hidden       (..., H) bf16 | fp32, on a GPU also fp16
    weight       (V, H) in hidden.dtype
    target       (...) int64 | int32, ids in [0, V)
    temperature  above 0: a number, or a tensor like target in fp32
    softcap      above 0, or None
    returns      (...) fp32; with return_entropy, the pair with the entropy of the same distribution, (...) fp32
    bits         of a token depend on that token, weight and the options: its logits are those of linear_logits, their
                 log-softmax has the order of log_softmax on the same device, so rollout and training agree: the
                 same as log_softmax(linear_logits(...) / temperature) and as sample's logprobs
    grad         of both results: dhidden as bits, the vocabulary ascending in one fp32 accumulator per element;
                 dweight sums tokens ascending in one fp32 accumulator, repeatable for one fixed batch. Logits are made
                 again; their gradients stay in fp32 (in bf16 for bf16 inputs on a GPU); each result is rounded once
                 to its input's dtype
    raises       TypeError on dtype, ValueError on shape, device, parameters or a target outside the vocabulary (on a
                 GPU, where a look at values would make the host wait, such a token gives NaN), BackendUnavailable
    example
    >>> hidden, weight, target = torch.randn(3, 16), torch.randn(50, 16), torch.tensor([4, 0, 49])
    >>> logprobs, entropy = vx.linear_logprobs(hidden, weight, target, temperature=0.7, return_entropy=True)
    >>> whole = vx.log_softmax(vx.linear_logits(hidden, weight) / 0.7)
    >>> vx.same_bits(logprobs, whole.gather(1, target[:, None])[:, 0])
    True
    """
    op = "linear_logprobs"
    target = _check_target(op, hidden, weight, target)
    softcap, backend = _softcap(op, softcap), ROOM.resolve(hidden.device, backend)
    check.served(op, "hidden", hidden.dtype, backend)
    if isinstance(temperature, Tensor):
        check.tensor(op, "temperature", temperature, (torch.float32,))
        check.shape(op, "temperature", temperature, target.shape)
        check.same_device(op, hidden=hidden, temperature=temperature)
        temperature = temperature.detach().reshape(-1)
    else:
        check.number(op, "temperature", temperature, above=0.0)
        temperature = native.full(1, temperature, torch.float32, hidden.device)
    args = check.rows(hidden), check.rows(weight), target.reshape(-1), temperature, softcap, return_entropy, backend
    logprob, entropy, _ = _linear_logprobs(*args)
    if target.dim() != 1:  # FSDP2 warns of outputs that are views
        logprob, entropy = logprob.view(target.shape), entropy.view(target.shape if return_entropy else 0)
    return (logprob, entropy) if return_entropy else logprob


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    softcap: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """-linear_logprobs(hidden, weight, target, softcap=softcap), reduced over the tokens that are not ignored.

    hidden        (..., H) bf16 | fp32, on a GPU also fp16
    weight        (V, H) in hidden.dtype
    target        (...) int64 | int32, ids in [0, V) or ignore_index
    reduction     "mean" over the tokens that are not ignored (NaN where all are, as torch's), "sum", or "none": 0 where
                  ignored
    ignore_index  tokens with this target take no part: their loss and gradient are 0 whatever their hidden holds. On a
                  GPU the others are counted and brought together there: nothing makes the host wait, a CUDA graph may
                  hold it, and in bf16 on SM90 what is ignored is hardly paid for
    returns       () fp32, or (...) fp32 with "none"
    bits          of a token as linear_logprobs; the reduction adds tokens ascending in fp64, rounded once: repeatable
                  for one fixed batch
    grad          as linear_logprobs. On a GPU, of "mean" and "sum" in bf16 without softcap: a probability is e^(z - its
                  block's largest z), rounded to bf16, times e^(that largest - lse), but the target's is not rounded;
                  what the loss is multiplied with comes last. So they can be made with the forward, from the same
                  logits, and the fast kernels do that where a gradient is wanted (and keep it until the backward; of
                  few tokens, what the gradient of weight is made of).
                  A loss that only is looked at belongs under torch.no_grad(): that is the forward alone
    raises        as linear_logprobs, and ValueError on reduction (on a GPU a target outside the vocabulary that is not
                  ignored makes the loss NaN)
    example
    >>> hidden, weight = torch.randn(3, 16, requires_grad=True), torch.randn(50, 16)
    >>> vx.linear_cross_entropy(hidden, weight, torch.tensor([4, -100, 49])).backward()
    >>> hidden.grad[1].count_nonzero().item()  # an ignored token has no gradient
    0
    """
    op = "linear_cross_entropy"
    target = _check_target(op, hidden, weight, target)
    check.choice(op, "reduction", reduction, REDUCTIONS)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(f"{op}: ignore_index: got {type(ignore_index).__name__}, expected an int")
    softcap, backend = _softcap(op, softcap), ROOM.resolve(hidden.device, backend)
    check.served(op, "hidden", hidden.dtype, backend)
    wanted = tuple(torch.is_grad_enabled() and t.requires_grad for t in (hidden, weight))
    rows = check.rows(hidden)
    if backend != "cuda" or not _unit(hidden.dtype, reduction, softcap, backend) or _is_open(rows.shape[0]):
        wanted = False, False
    args = rows, check.rows(weight), target.reshape(-1), reduction, ignore_index, softcap, *wanted
    loss = _linear_cross_entropy(*args, backend)[0]
    return loss.view(target.shape) if reduction == "none" else loss


def _check_head(op: str, hidden: Tensor, weight: Tensor) -> None:
    check.tensor(op, "hidden", hidden, check.FLOATS)
    check.tensor(op, "weight", weight, ndim=2)
    check.same_dtype(op, "weight", weight, "hidden", hidden)
    if hidden.dim() == 0:
        raise ValueError(f"{op}: hidden: got shape (), expected (..., H)")
    check.shape(op, "weight", weight, ("V", hidden.shape[-1]))
    if weight.shape[0] == 0:
        raise ValueError(f"{op}: weight: got shape {tuple(weight.shape)}, expected (V, H) with V of at least 1")
    check.same_device(op, hidden=hidden, weight=weight)


def _check_target(op: str, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    _check_head(op, hidden, weight)
    check.tensor(op, "target", target, (torch.int64, torch.int32))
    check.shape(op, "target", target, hidden.shape[:-1])
    check.same_device(op, hidden=hidden, target=target)
    return target.long()


def _softcap(op: str, softcap: float | None) -> float:
    return 0.0 if softcap is None else check.number(op, "softcap", softcap, above=0.0)


def _check_ids(op: str, target: Tensor, vocabulary: int) -> None:
    if target.device.type == "cpu" and target.numel():
        low, high = target.aminmax()
        if low < 0 or high >= vocabulary:
            got = low if low < 0 else high
            raise ValueError(f"{op}: target: got id {got.item()}, expected ids in [0, {vocabulary})")


# ---- log-probabilities


def _logprobs(hidden, weight, target, temperature, softcap, want_entropy, backend):
    _check_ids("linear_logprobs", target, weight.shape[0])
    if temperature.device.type == "cpu" and not bool(((temperature > 0) & (temperature < torch.inf)).all()):
        bad = temperature[~((temperature > 0) & (temperature < torch.inf))][0].item()
        raise ValueError(f"linear_logprobs: temperature: got {bad}, expected finite numbers above 0")
    module = ROOM.module(backend)
    args = hidden, weight, target.contiguous(), temperature.contiguous(), softcap, want_entropy
    logprob, entropy, lse = module.linear_logprobs_fwd(*args)
    return logprob, logprob.new_empty(0) if entropy is None else entropy, lse


def _logprobs_fake(hidden, weight, target, temperature, softcap, want_entropy, backend):
    tokens = hidden.shape[0]
    sizes = (tokens,), (tokens if want_entropy else 0,), (tokens, 2)
    return tuple(hidden.new_empty(s, dtype=torch.float32) for s in sizes)


def _logprobs_setup(ctx, inputs, output):
    hidden, weight, target, temperature, ctx.softcap, ctx.has_entropy, ctx.backend = inputs
    _, entropy, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(hidden, weight, target, temperature, entropy, lse)


def _logprobs_backward(ctx, dlogprob, dentropy, _):
    hidden, weight, target, temperature, entropy, lse = ctx.saved_tensors
    need_dhidden, need_dweight = ctx.needs_input_grad[:2]
    dentropy = dentropy if ctx.has_entropy else None
    args = dlogprob, dentropy, hidden, weight, target, temperature, ctx.softcap, entropy, lse
    dhidden, dweight = _linear_logprobs_bwd(*args, need_dhidden, need_dweight, ctx.backend)
    return dhidden if need_dhidden else None, dweight if need_dweight else None, None, None, None, None, None


def _logprobs_bwd(
    dlogprob, dentropy, hidden, weight, target, temperature, softcap, entropy, lse, need_dhidden, need_dweight, backend
):
    dentropy = None if dentropy is None else dentropy.contiguous()
    args = dlogprob.contiguous(), dentropy, hidden, weight, target.contiguous(), temperature.contiguous(), softcap
    grads = ROOM.module(backend).linear_logprobs_bwd(*args, entropy, lse, need_dhidden, need_dweight)
    return tuple(hidden.new_empty(0) if g is None else g for g in grads)


def _logprobs_bwd_fake(dlogprob, dentropy, hidden, weight, *rest):
    need_dhidden, need_dweight, _ = rest[-3:]
    return hidden.new_empty(hidden.shape if need_dhidden else (0,)), weight.new_empty(
        weight.shape if need_dweight else (0,)
    )


_linear_logprobs_bwd = Operator(
    "linear_logprobs_bwd(Tensor dlogprob, Tensor? dentropy, Tensor hidden, Tensor weight, Tensor target, "
    "Tensor temperature, float softcap, Tensor entropy, Tensor lse, bool need_dhidden, bool need_dweight, str backend)"
    " -> (Tensor, Tensor)",
    _logprobs_bwd,
    _logprobs_bwd_fake,
)
_linear_logprobs = Operator(
    "linear_logprobs(Tensor hidden, Tensor weight, Tensor target, Tensor temperature, float softcap, "
    "bool want_entropy, str backend) -> (Tensor, Tensor, Tensor)",
    _logprobs,
    _logprobs_fake,
    _logprobs_setup,
    _logprobs_backward,
)


# ---- the loss


class _Kept:
    """The tokens that are not ignored. On a CPU they alone; on a GPU, where nobody knows how many they are, before
    zeros: `live` is their number."""

    def __init__(self, target: Tensor, ignored: int, backend: str):
        target = target.contiguous()  # kernels step from id to id
        self.given, self.ignored, self.backend = target, ignored, backend
        self.place = self.last = self.live = None
        if backend != "cpu":
            self.last, self.live, self.share = ROOM.module(backend).count(target, ignored)
            self.count = self.live
            return
        out = target == ignored
        if bool(out.any()):
            self.place = (~out).nonzero()[:, 0]
        self.count = target.shape[0] if self.place is None else self.place.shape[0]

    def tokens(self, hidden: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Their hidden and target."""
        target = self.given
        if target.device.type == "cpu":  # elsewhere a look at values would make the host wait
            _check_ids("linear_cross_entropy", target[target != self.ignored], vocabulary)
        if self.last is not None:
            return ROOM.module(self.backend).compact(hidden, target, self.ignored, self.last, vocabulary)
        if self.place is not None:
            hidden, target = hidden[self.place], target[self.place]
        return hidden, target.contiguous()

    def scale(self, reduction: str) -> Tensor | None:
        """What the gradient of every token's loss is multiplied with, on a GPU."""
        return self.share if reduction == "mean" else None

    def rows(self, x: Tensor) -> Tensor:
        """Of all tokens' x those of the kept ones, and zeros."""
        if self.place is not None:
            return x[self.place]
        if self.last is None:
            return x
        number = torch.arange(x.shape[0], device=x.device)
        place = torch.where(self.given != self.ignored, self.last - 1, self.live + number - self.last)
        return torch.empty_like(x).index_copy_(0, place, self._only(x))

    def among(self, x: Tensor) -> Tensor:
        """The kept ones' x among zeros for the others."""
        if self.place is not None:
            return x.new_zeros(self.given.shape[0], *x.shape[1:]).index_copy_(0, self.place, x)
        return x if self.last is None else self._only(x.index_select(0, (self.last - 1).clamp(min=0)))

    def scaled_among(self, x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """among(x * factor), rounded once; on a GPU."""
        return ROOM.module(self.backend).spread(x, self.given, self.ignored, self.last, factor, dtype)

    def _only(self, x: Tensor) -> Tensor:
        kept = (self.given != self.ignored).view(-1, *[1] * (x.dim() - 1))
        return torch.where(kept, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _unit(dtype: torch.dtype, reduction: str, softcap: float, backend: str) -> bool:
    """Gradients are made first and multiplied with that of the loss afterwards."""
    return backend != "cpu" and dtype == torch.bfloat16 and reduction != "none" and not softcap


def _is_open(tokens: int) -> bool:
    """Compiled for a number of tokens that only the data knows (those that a mask picks): nobody can say what would be
    kept of them."""
    if isinstance(tokens, int) and not torch.compiler.is_compiling():
        return False
    from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

    return guard_or_true(tokens > 1) != guard_or_false(tokens > 1)


def _loss(hidden, weight, target, reduction, ignore_index, softcap, want_dhidden, want_dweight, backend):
    module, kept = ROOM.module(backend), _Kept(target, ignore_index, backend)
    kept_hidden, kept_target = kept.tokens(hidden, weight.shape[0])
    dhidden, dweight = hidden.new_empty(0, dtype=torch.float32), weight.new_empty(0)  # or what it is made of
    live = () if backend == "cpu" else (kept.live,)
    if want_dhidden or want_dweight:
        wanted = want_dhidden, want_dweight
        args = kept_hidden, weight, kept_target, kept.scale(reduction), *wanted
        logprob, lse, *made = module.loss_with_gradients(*args, *live)
        dhidden, dweight = (made[0] if want_dhidden else dhidden), (made[1] if want_dweight else dweight)
    else:
        one = torch.ones(1, dtype=torch.float32, device=hidden.device)
        args = kept_hidden, weight, kept_target, one, softcap, False
        logprob, _, lse = module.linear_logprobs_fwd(*args, *live)
    if reduction == "none":
        loss = kept.among(-logprob)
    else:
        loss = module.loss_of(logprob, kept.count if reduction == "mean" else None)
    if kept.place is not None:
        lse = kept.among(lse)
    return loss, lse, dhidden, dweight


def _loss_fake(hidden, weight, target, reduction, ignore_index, softcap, want_dhidden, want_dweight, backend):
    def new(*shape):
        return hidden.new_empty(shape, dtype=torch.float32)

    tokens = hidden.shape[0]
    loss = new(tokens) if reduction == "none" else new()
    kept = want_dweight and ROOM.module(backend).kept_shape(hidden, weight)
    dweight = weight.new_empty(kept or (weight.shape if want_dweight else (0,)))
    return loss, new(tokens, 2), new(*hidden.shape) if want_dhidden else new(0), dweight


def _loss_setup(ctx, inputs, output):
    hidden, weight, target, *ctx.options, want_dhidden, want_dweight, ctx.backend = inputs
    ctx.made = want_dhidden, want_dweight
    _, lse, dhidden, dweight = output
    ctx.mark_non_differentiable(lse, dhidden, dweight)
    ctx.set_materialize_grads(False)  # no zeros as large as these for what has no gradient
    ctx.save_for_backward(hidden, weight, target, lse, dhidden, dweight)


def _loss_backward(ctx, dloss, *_):
    need = need_dhidden, need_dweight = ctx.needs_input_grad[:2]
    made = all(made or not needed for made, needed in zip(ctx.made, need))
    dhidden, dweight = _linear_cross_entropy_bwd(dloss, *ctx.saved_tensors, *need, made, *ctx.options, ctx.backend)
    grads = dhidden if need_dhidden else None, dweight if need_dweight else None
    return *grads, *(None,) * 7


def _loss_bwd(
    dloss, hidden, weight, target, lse, dhidden, dweight, need_dhidden, need_dweight, made, reduction, ignore_index,
    softcap, backend,
):  # fmt: skip
    module, need, dtype = ROOM.module(backend), (need_dhidden, need_dweight), hidden.dtype
    unit = _unit(dtype, reduction, softcap, backend)
    kept = _Kept(target, ignore_index, backend)
    live = () if backend == "cpu" else (kept.live,)
    unfinished = unit and made and need_dweight and dweight.dim() == 3
    if not made or unfinished:
        kept_hidden, kept_target = kept.tokens(hidden, weight.shape[0])
    if not made:
        lse = lse if kept.place is None else lse[kept.place]
    if unit and not made:
        args = kept_hidden, weight, kept_target, lse, kept.scale(reduction), *need
        dhidden, dweight = module.unit_gradients(*args, *live)
    elif not made:
        one = torch.ones(1, dtype=torch.float32, device=hidden.device)
        if reduction == "mean" and backend == "cpu":
            with native.default_float_mode():
                dloss = dloss / max(kept.count, 1)
        elif reduction == "mean":
            dloss = dloss * kept.scale(reduction)
        dlogprob = kept.rows(-dloss.expand(target.shape[0])).contiguous()
        args = dlogprob, None, kept_hidden, weight, kept_target, one, softcap, None, lse
        dhidden, dweight = module.linear_logprobs_bwd(*args, *need, *live)
        dhidden = kept.among(dhidden) if need_dhidden else None
    if unit:
        dhidden = kept.scaled_among(dhidden, dloss, dtype) if need_dhidden else None
        if unfinished:
            dweight = module.unit_dweight(dweight, kept_hidden, weight, kept.scale(reduction), dloss, kept.live)
        else:
            dweight = module.scaled(dweight, dloss, dtype) if need_dweight else None
    return tuple(g if needed else hidden.new_empty(0) for g, needed in zip((dhidden, dweight), need))


_linear_cross_entropy_bwd = Operator(
    "linear_cross_entropy_bwd(Tensor dloss, Tensor hidden, Tensor weight, Tensor target, Tensor lse, Tensor dhidden, "
    "Tensor dweight, bool need_dhidden, bool need_dweight, bool made, str reduction, int ignore_index, float softcap, "
    "str backend) -> (Tensor, Tensor)",
    _loss_bwd,
    lambda dloss, hidden, weight, target, lse, dhidden, dweight, need_dhidden, need_dweight, *options: (
        hidden.new_empty(hidden.shape if need_dhidden else (0,)),
        weight.new_empty(weight.shape if need_dweight else (0,)),
    ),
)
_linear_cross_entropy = Operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, str reduction, int ignore_index, "
    "float softcap, bool want_dhidden, bool want_dweight, str backend) -> (Tensor, Tensor, Tensor, Tensor)",
    _loss,
    _loss_fake,
    _loss_setup,
    _loss_backward,
)


# ---- softcap


def _softcap_setup(ctx, inputs, output):
    x, ctx.cap, ctx.backend = inputs
    ctx.save_for_backward(x)


_softcap_bwd_op = Operator(
    "softcap_bwd(Tensor dy, Tensor x, float cap, str backend) -> Tensor",
    lambda dy, x, cap, backend: ROOM.module(backend).softcap_bwd(check.rows(dy), x, cap),
    lambda dy, x, cap, backend: x.new_empty(x.shape),
)
_softcap_op = Operator(
    "softcap(Tensor x, float cap, str backend) -> Tensor",
    lambda x, cap, backend: ROOM.module(backend).softcap_fwd(x, cap),
    lambda x, cap, backend: x.new_empty(x.shape),
    _softcap_setup,
    lambda ctx, dy: (_softcap_bwd_op(dy, *ctx.saved_tensors, ctx.cap, ctx.backend), None, None),
)
