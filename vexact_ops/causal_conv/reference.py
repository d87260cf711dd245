"""The meaning of causal_conv in plain PyTorch, in x's own precision: call it with float64."""

import itertools

import torch
from torch import Tensor


def causal_conv_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
    activation: str | None = "silu",
) -> Tensor:
    width = weight.shape[1]
    offsets = [0, x.shape[0]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs = []
    for begin, end in itertools.pairwise(offsets):
        padded = torch.nn.functional.pad(x[begin:end], (0, 0, width - 1, 0))
        y = sum(weight[:, w] * padded[w : w + end - begin] for w in range(width))
        y = y if bias is None else y + bias
        outputs.append(y * torch.sigmoid(y) if activation == "silu" else y)
    return torch.cat(outputs) if outputs else torch.zeros_like(x)
