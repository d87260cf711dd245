"""Log-probabilities and the loss over a vocabulary, forward and forward + backward, against the stock composition."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape


def _stock_logprobs(hidden, weight, target):
    return -F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="none")


def _stock_loss(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


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

        def bits(hidden, weight, target):
            one = vx.linear_logprobs(hidden[-1:], weight, target[-1:])
            return one, vx.linear_logprobs(hidden, weight, target)[-1:]

        product = 2 * count * shape.H * shape.V
        size = (count * shape.H + shape.V * shape.H) * dtype.itemsize
        name = f"{shape.name} T={count} {str(dtype)[6:]}"
        for label, ours, stock, times in (
            ("logprobs fwd", vx.linear_logprobs, _stock_logprobs, 1),
            ("logprobs fwd+bwd", _with_backward(vx.linear_logprobs), _with_backward(_stock_logprobs), 3),
            ("loss fwd+bwd", _with_backward(vx.linear_cross_entropy), _with_backward(_stock_loss), 3),
        ):
            yield Case(
                "linear_cross_entropy",
                f"{label} {name}",
                make,
                {"vexact": ours, "torch": stock},
                bits,
                bytes=size if times == 1 else 2 * size,
                flops=times * product,
            )
