"""The C++ kernels (csrc/linear_cross_entropy/cpu_kernels.cpp)."""

import functools

import torch
from torch import Tensor

from .._core import native

# The chunks that logits are made in. They bound the memory beyond the gradients; no bit depends on them.
FWD_TOKENS = 4096  # whose block sums are held at once: 12 bytes for every 512 logits
BWD_TOKENS, BWD_VOCABULARY = 2048, 1024  # of one chunk of dlogits: 8 MiB; fewer tokens take more of the vocabulary
LSE_BLOCK = 512
_fp32 = functools.partial(torch.empty, dtype=torch.float32)  # whatever torch's default is at the time


def linear_logprobs_fwd(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, softcap: float, want_entropy: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    blocks = -(-vocabulary // LSE_BLOCK)
    logprob, lse = _fp32(tokens), _fp32(tokens, 2)
    entropy = _fp32(tokens) if want_entropy else None
    if tokens:
        workspace = _fp32(min(tokens, FWD_TOKENS), 3 * blocks + 1)
        args = hidden, weight, target, temperature, softcap
        native.ops().linear_logprobs_fwd(*args, workspace, logprob, entropy, lse)
    return logprob, entropy, lse


def linear_logprobs_bwd(
    dlogprob: Tensor,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor,
    softcap: float,
    entropy: Tensor | None,
    lse: Tensor,
    need_dhidden: bool,
    need_dweight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    (tokens, width), vocabulary = hidden.shape, weight.shape[0]
    if tokens == 0:
        return (
            torch.zeros(hidden.shape, dtype=hidden.dtype) if need_dhidden else None,
            torch.zeros(weight.shape, dtype=weight.dtype) if need_dweight else None,
        )
    dhidden = _fp32(tokens, width) if need_dhidden else None
    dweight = torch.empty(weight.shape, dtype=weight.dtype) if need_dweight else None
    rows = min(tokens, BWD_TOKENS)
    chunk = min(vocabulary, BWD_TOKENS // rows * BWD_VOCABULARY)
    workspace = _fp32(rows, chunk)
    own_sums = need_dweight and weight.dtype != torch.float32 and tokens > BWD_TOKENS
    sums = _fp32(chunk, width) if own_sums else None
    args = dlogprob, dentropy, hidden, weight, target, temperature, softcap, entropy, lse
    native.ops().linear_logprobs_bwd(*args, workspace, sums, dhidden, dweight)
    return dhidden.to(hidden.dtype) if need_dhidden else None, dweight


def softcap_fwd(x: Tensor, cap: float) -> Tensor:
    y = _fp32(x.shape)
    native.ops().softcap_fwd(x, cap, y)
    return y


def softcap_bwd(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    dx = _fp32(x.shape)
    native.ops().softcap_bwd(dy, x, cap, dx)
    return dx


def loss_of(logprob: Tensor, count: int | None) -> Tensor:
    """Minus the sum of (T,) fp32, over count where there is one: in fp64, tokens ascending, rounded once."""
    total = torch.empty((), dtype=torch.float64)
    native.ops().token_sum(logprob, total)
    with native.default_float_mode():
        return (-total if count is None else -total / count).float()
