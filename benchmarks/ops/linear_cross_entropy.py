"""Log-probabilities and the loss over a vocabulary, forward and forward + backward, against the stock composition,
Liger, and what batch_invariant_ops' mode makes of the stock composition."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..checks import reference, row_alone
from ..harness import Case, random
from ..peers import batch_invariant, installed
from ..shapes import Shape


def _stock_logprobs(hidden, weight, target):
    return -F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="none")


def _cooled(hidden, weight, target):
    return vx.linear_logprobs(hidden, weight, target, temperature=0.7)


def _stock_cooled(hidden, weight, target):
    return -F.cross_entropy(F.linear(hidden, weight).float() / 0.7, target, reduction="none")


def _stock_loss(hidden, weight, target):
    return F.cross_entropy(F.linear(hidden, weight).float(), target)


def _liger():
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return lambda hidden, weight, target: LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]


def _batch_invariant():
    product, log_softmax = batch_invariant("matmul_persistent"), batch_invariant("log_softmax")

    def run(hidden, weight, target):
        return log_softmax(product(hidden, weight.t()).float()).gather(1, target[:, None])[:, 0]

    return run


FREE = {"n": "V", "k": "H"}


def _sum(hidden, weight, target):
    return vx.linear_cross_entropy(hidden, weight, target, reduction="sum")


def _log_probabilities(hidden, weight, target):
    return reference("linear_cross_entropy", "linear_logprobs_ref")(hidden, weight, target)[0]


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
        liger = {}
        if device == "cuda" and dtype is not torch.float32 and count >= 1024:
            liger = installed(
                liger=_liger
            )  # its chunks are meant for training's sizes: 64 tokens took it 37 times torch's
        liger = {peer: _with_backward(fn) for peer, fn in liger.items()}
        invariant = installed(batch_invariant_ops=_batch_invariant) if device == "cuda" else {}
        kinds = [
            ("logprobs fwd", vx.linear_logprobs, vx.linear_logprobs, _stock_logprobs, invariant, 1),
            ("logprobs fwd t=0.7", _cooled, _cooled, _stock_cooled, {}, 1),
            ("logprobs fwd+bwd", logprobs, logprobs, _with_backward(_stock_logprobs), {}, 3),
            ("loss fwd+bwd", loss, _with_backward(_sum), _with_backward(_stock_loss), {}, 3),
        ]
        if liger:  # it looks at values on the host: no graph takes it
            kinds.append(("launched loss fwd+bwd", loss, _with_backward(_sum), _with_backward(_stock_loss), liger, 3))
        for label, ours, rows_of, stock, others, times in kinds:
            yield Case(
                "linear_cross_entropy",
                f"{label} {name}",
                make,
                {"vexact": ours, "torch": stock, **others},
                alone(rows_of),
                bytes=size if times == 1 else 2 * size,
                flops=times * product,
                captured=not label.startswith("launched"),
                # of a loss no row is seen, and its gradient is one over the number of tokens
                alone=None if "loss" in label else row_alone(0, 2, results=1),
                reference=_log_probabilities if label == "logprobs fwd" and count * shape.V <= 2**31 else None,
                terms=shape.H,
            )
