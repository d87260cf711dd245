"""A short causal convolution of each channel by itself: over packed sequences, and over rows that go on from a ring."""

import torch
from torch import Tensor

from .._core import check, sequences
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("causal_conv", cpu=("cpu",), cuda=("triton",))
ACTIVATIONS = (None, "silu")
WIDEST = 8


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    activation: str | None = "silu",
    backend: str | None = None,
) -> Tensor:
    """activation(sum over w of weight[:, w] * x[t - (W - 1) + w] + bias) within each sequence; the training form.

    x           (T, D) bf16 | fp32, on a GPU also fp16; the sequences' rows one sequence after another
    weight      (D, W) in x.dtype, W from 2 to 8; column W - 1 is that of the row itself (a depthwise Conv1d's weight
                is (D, 1, W))
    bias        (D,) in x.dtype
    cu_seqlens  (B + 1,) int32: sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1]; from 0 to T. A sequence
                may have no rows. None: all rows are one sequence
    activation  "silu" or None
    returns     (T, D) in x.dtype. Rows before a sequence's first are zeros
    bits        a row depends on itself, the W - 1 rows before it in its sequence, weight and bias: fp32 inside, taps
                from the oldest to the newest in one accumulator, then the bias, then the activation, and one rounding,
                as causal-conv1d does. Hugging Face's form in torch rounds before the activation too. Equal to
                causal_conv_paged
    grad        x as bits of its own sequence; weight and bias sum rows in a fixed order (on a CPU ascending),
                repeatable for one fixed batch
    raises      TypeError on dtype, ValueError on shape, values (on CPU) or device, BackendUnavailable
    source      Gu and Dao, Mamba, arXiv 2312.00752
    example
    >>> x, weight = torch.randn(7, 16), torch.randn(16, 4)
    >>> packed = vx.causal_conv(x, weight, cu_seqlens=torch.tensor([0, 3, 7], dtype=torch.int32))
    >>> vx.same_bits(packed[3:], vx.causal_conv(x[3:], weight))
    True
    """
    op = "causal_conv"
    _check(op, x, weight, bias, activation)
    if cu_seqlens is not None:
        sequences.check_offsets(op, "cu_seqlens", cu_seqlens)
    check.same_device(op, x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens)
    backend = ROOM.resolve(x.device, backend)
    check.served(op, "x", x.dtype, backend)
    return _causal_conv(check.rows(x), weight, bias, cu_seqlens, activation == "silu", backend)


def causal_conv_paged(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    taps: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    *,
    activation: str | None = "silu",
    singles: int = 0,
    backend: str | None = None,
) -> Tensor:
    """causal_conv of the last rows of each sequence, which goes on from the inputs in its slot and leaves its own last
    ones there; whole prefills, chunks and single tokens may share a call. No gradients.

    x, weight, bias, activation   as in causal_conv
    taps          (slots, ring, D) in x.dtype: the last inputs of each sequence, that of position p in row p % ring;
                  ring a power of two of at least W. Each slot contiguous. Written in place: of rows of this call the
                  last `ring`
    slots         (B,) int32: each sequence's slot, no two the same. -1: none; what lies before its rows counts as
                  zeros, and nothing is stored (padding of a step)
    context_lens  (B,) int32: rows of each sequence so far, this call's included
    cu_seqlens_q  (B + 1,) int32: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; from 0 to T. A
                  sequence may have no rows
    singles       the first so many sequences have one row each, as where decodes come first; no effect on bits
    returns       (T, D) in x.dtype. Positions below 0 are zeros, whatever a slot holds
    bits          those of causal_conv for the same sequence, for any split into calls, slot and batch. Up to
                  ring - W + 1 rows that were appended too many are forgotten by a call with a smaller context_len
    grad          none: a RuntimeError where an input requires one in grad mode
    raises        TypeError on dtype, ValueError on shape, strides, values (on CPU) or device, BackendUnavailable. On a
                  GPU values are not looked at (that would stall the stream); they touch no memory but the arguments'
    example
    >>> x, weight, taps = torch.randn(6, 16), torch.randn(16, 4), torch.zeros(3, 4, 16)
    >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> first = vx.causal_conv_paged(x[:5], weight, None, taps, ints(2), ints(5), ints(0, 5))
    >>> last = vx.causal_conv_paged(x[5:], weight, None, taps, ints(2), ints(6), ints(0, 1))
    >>> vx.same_bits(torch.cat([first, last]), vx.causal_conv(x, weight))
    True
    """
    op = "causal_conv_paged"
    if paged_fits(x, weight, bias, taps, slots, context_lens, cu_seqlens_q):
        check.choice(op, "activation", activation, ACTIVATIONS)
    else:
        check_paged(op, x, weight, bias, taps, activation)
        sequences.check_slots(op, slots, context_lens, cu_seqlens_q)
        tensors = {"x": x, "weight": weight, "bias": bias, "taps": taps, "slots": slots}
        check.same_device(op, **tensors, context_lens=context_lens, cu_seqlens_q=cu_seqlens_q)
    sequences.check_singles(op, singles, slots.shape[0])
    if torch.is_grad_enabled():
        sequences.no_gradient(op, "causal_conv", x=x, weight=weight, bias=bias, taps=taps)
    backend = ROOM.resolve(x.device, backend)
    check.served(op, "x", x.dtype, backend)
    step = slots, context_lens, cu_seqlens_q, singles
    return _causal_conv_paged(check.rows(x), weight, bias, taps, *step, activation == "silu", backend)


def paged_fits(x, weight, bias, taps, slots, context_lens, cu_seqlens_q) -> bool:
    """Whether the checks with messages would find nothing: the engine asks at every layer of every step."""
    if not (check.alike(x, weight, taps) and check.alike(slots, context_lens, cu_seqlens_q)):
        return False
    if not (x.dim() == weight.dim() == 2 and taps.dim() == 3 and cu_seqlens_q.dim() == 1):
        return False
    (channels, width), (_, ring, columns), batch = weight.shape, taps.shape, (cu_seqlens_q.shape[0] - 1,)
    return (
        x.dtype in check.FLOATS
        and slots.dtype == torch.int32
        and slots.device == x.device
        and x.shape[1] == channels == columns
        and 2 <= width <= min(ring, WIDEST)
        and ring & (ring - 1) == 0
        and (bias is None or (check.alike(x, bias) and bias.shape == (channels,)))
        and taps.is_contiguous()
        and slots.shape == context_lens.shape == batch
    )


def check_paged(
    op: str, x: Tensor, weight: Tensor, bias: Tensor | None, taps: Tensor, activation: str | None = None
) -> None:
    _check(op, x, weight, bias, activation)
    check.tensor(op, "taps", taps, ndim=3)
    check.same_dtype(op, "taps", taps, "x", x)
    check.shape(op, "taps", taps, ("slots", "ring", x.shape[1]))
    ring, width = taps.shape[1], weight.shape[1]
    if ring < width or ring & (ring - 1):
        raise ValueError(f"{op}: taps: got a ring of {ring}, expected a power of two of at least {width}, the taps")
    sequences.contiguous_slots(op, "taps", taps)


def _check(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> None:
    check.tensor(op, "x", x, check.FLOATS, 2)
    check.tensor(op, "weight", weight, ndim=2)
    check.same_dtype(op, "weight", weight, "x", x)
    check.shape(op, "weight", weight, (x.shape[1], "W"))
    if not 2 <= weight.shape[1] <= WIDEST:
        raise ValueError(f"{op}: weight: got {weight.shape[1]} taps, expected 2 to {WIDEST}")
    if bias is not None:
        check.tensor(op, "bias", bias)
        check.same_dtype(op, "bias", bias, "x", x)
        check.shape(op, "bias", bias, (x.shape[1],))
    check.choice(op, "activation", activation, ACTIVATIONS)


def _offsets(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is None:  # made on the device: a copy from the host would not go into a graph
        return torch.arange(2, dtype=torch.int32, device=x.device) * x.shape[0]
    return cu_seqlens.contiguous()


def _fwd(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, silu: bool, backend: str):
    return ROOM.module(backend).varlen_fwd(x, weight, bias, _offsets(x, cu_seqlens), silu)


def _fake(x, *rest):
    return x.new_empty(x.shape)


def _setup(ctx, inputs, output):
    *tensors, ctx.silu, ctx.backend = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):
    tensors = ctx.saved_tensors  # once: under activation checkpointing they cannot be had twice
    dx, dweight, dbias = _causal_conv_bwd(dy, *tensors, ctx.silu, ctx.backend)
    return dx, dweight, None if tensors[2] is None else dbias, None, None, None


def _bwd(dy, x, weight, bias, cu_seqlens, silu, backend):
    dx, dweight, dbias = ROOM.module(backend).varlen_bwd(
        dy.contiguous(), x, weight, bias, _offsets(x, cu_seqlens), silu
    )
    return dx, dweight, x.new_empty(0) if bias is None else dbias


def _bwd_fake(dy, x, weight, bias, *rest):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(0 if bias is None else bias.shape)


def _paged(x, weight, bias, taps, slots, context_lens, cu_seqlens_q, singles, silu, backend):
    step = slots.contiguous(), context_lens.contiguous(), cu_seqlens_q.contiguous(), singles
    return ROOM.module(backend).paged_fwd(x, weight, bias, taps, *step, silu)


_causal_conv_bwd = Operator(
    "causal_conv_bwd(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, bool silu, str backend)"
    " -> (Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
_causal_conv = Operator(
    "causal_conv(Tensor x, Tensor weight, Tensor? bias, Tensor? cu_seqlens, bool silu, str backend) -> Tensor",
    _fwd,
    _fake,
    _setup,
    _backward,
)
_causal_conv_paged = Operator(
    "causal_conv_paged(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) taps, Tensor slots, Tensor context_lens,"
    " Tensor cu_seqlens_q, SymInt singles, bool silu, str backend) -> Tensor",
    _paged,
    _fake,
)
