"""One batched draw with its log-probabilities, against the stock way and FlashInfer's (which give
no log-probabilities)."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..harness import Case, random
from ..peers import flashinfer_sample, installed
from ..shapes import Shape


def _stock(logits, top_p=1.0, top_k=0):
    """As Hugging Face's generate: top-k by the k-th value, top-p by a sort, then softmax and multinomial."""
    logits = logits / 0.7
    if top_k:
        logits = logits.masked_fill(logits < torch.topk(logits, top_k)[0][:, -1:], -torch.inf)
    if top_p < 1:
        ordered, index = torch.sort(logits)
        gone = ordered.softmax(-1).cumsum(-1) <= 1 - top_p
        logits = logits.masked_fill(gone.scatter(1, index, gone), -torch.inf)
    return torch.multinomial(torch.softmax(logits, -1), 1)


OPTIONS = {"": {}, " top_p=0.9": {"top_p": 0.9}, " top_p=0.9 top_k=50": {"top_p": 0.9, "top_k": 50}}
FREE = {"n": "V"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    if device == "cpu" and dtype != torch.float32:
        return  # logits are fp32 always: once is enough where a CPU's default has two dtypes
    dtype = torch.float32
    for count in rows:
        if count > 256:
            continue

        def make(count=count):
            seeds = torch.arange(count, device=device)
            return random(count, shape.V, dtype=dtype, device=device, scale=3.0), seeds, seeds + 7

        for label, options in OPTIONS.items():

            def ours(logits, seeds, positions, options=options):
                return vx.sample(logits, seeds, positions, temperature=0.7, **options)

            def stock(logits, seeds, positions, options=options):
                return _stock(logits, **options)

            def bits(*args, ours=ours):
                return ours(*(a[-1:] for a in args)), tuple(t[-1:] for t in ours(*args))

            size = count * shape.V * 4
            name = f"{shape.name} R={count} t=0.7{label}"
            others = {}
            if device == "cuda":
                others = installed(flashinfer=lambda options=options: flashinfer_sample(0.7, **options))
            yield Case("sampler", name, make, {"vexact": ours, "torch": stock, **others}, bits, bytes=size, flops=size)
