"""The C++ kernel (csrc/sampler/cpu_kernels.cpp)."""

import torch
from torch import Tensor

from .._core import native


def sample(logits: Tensor, *params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[0]
    ids = torch.empty(rows, dtype=torch.int64)
    logprobs, raw_logprobs = (torch.empty(rows, dtype=torch.float32) for _ in range(2))
    native.ops().sample(logits, *params, ids, logprobs, raw_logprobs)
    return ids, logprobs, raw_logprobs
