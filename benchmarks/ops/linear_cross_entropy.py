"""Log-probabilities and the loss over a vocabulary, forward and forward + backward, against the stock composition."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..harness import Case, peers, random
from ..shapes import Shape


def _stock_logprobs(hidden, weight, target):
    return -F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="none")


def _stock_loss(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def _liger():
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, target: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]


def _sum(hidden, weight, target):
    return vx.linear_cross_entropy(hidden, weight, target, reduction="sum")


def _with_backward(fn):
    def run(hidden, weight, target):
        hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(fn(hidden, weight, target).sum(), (hidden, weight))

    return run


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for count in rows:

        def make(count=count):
            hidden = random(count, shape.H, dtype=dtype, device=device, seed=1)
            weight = random(shape.V, shape.H, dtype=dtype, device=device, seed=2, scale=shape.H**-0.5)
            g = torch.Generator().manual_seed(0)
            return hidden, weight, torch.randint(shape.V, (count,), generator=g).to(device)

        def alone(fn):
            """The last token alone and among all: a value, or the gradient of its row of hidden."""

            def bits(hidden, weight, target):
                one, all_of_them = fn(hidden[-1:], weight, target[-1:]), fn(hidden, weight, target)
                return (one, all_of_them[-1:]) if isinstance(one, torch.Tensor) else (one[0], all_of_them[0][-1:])

            return bits

        product = 2 * count * shape.H * shape.V
        size = (count * shape.H + shape.V * shape.H) * dtype.itemsize
        name = f"{shape.name} T={count} {str(dtype)[6:]}"
        logprobs, loss = _with_backward(vx.linear_logprobs), _with_backward(vx.linear_cross_entropy)
        liger = peers(liger=_liger) if device == "cuda" and dtype is not torch.float32 else {}
        liger = {peer: _with_backward(fn) for peer, fn in liger.items()}
        for label, ours, rows_of, stock, others, times in (
            ("logprobs fwd", vx.linear_logprobs, vx.linear_logprobs, _stock_logprobs, {}, 1),
            ("logprobs fwd+bwd", logprobs, logprobs, _with_backward(_stock_logprobs), {}, 3),
            ("loss fwd+bwd", loss, _with_backward(_sum), _with_backward(_stock_loss), liger, 3),
        ):
            yield Case(
                "linear_cross_entropy",
                f"{label} {name}",
                make,
                {"vexact": ours, "torch": stock, **others},
                alone(rows_of),
                bytes=size if times == 1 else 2 * size,
                flops=times * product,
                captured="loss" not in label,  # it asks whether any token is ignored
            )
