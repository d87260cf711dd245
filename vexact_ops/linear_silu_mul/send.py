"""The first half of a gated feed-forward block, whose columns other ranks need as well."""

from torch import Tensor

from .._core.peers import Peers, Sent
from .op import ROOM, linear_silu_mul


def linear_silu_mul_send(
    x: Tensor, weight: Tensor, bias: Tensor | None, peers: Peers, *, activation: str = "silu"
) -> Tensor | Sent:
    """linear_silu_mul(x, weight, bias), for peers.receive: either the tensor, or what says that the kernel has sent its
    columns to every rank. It is received before anything else is sent.

    x, weight, bias  (R, K), (2I, K), (2I,) as in linear_silu_mul, on a GPU; every rank's are alike in shape and dtype
    bits             linear_silu_mul's. Kernels that were proven for it send what they would have stored
    raises           as linear_silu_mul
    """
    backend = ROOM.resolve(x.device, None)
    if backend != "cuda" or x.dim() != 2 or x.shape[0] == 0 or weight.shape[1:] != x.shape[1:]:
        return linear_silu_mul(x, weight, bias, activation=activation)
    bias = None if bias is None else bias.contiguous()
    return ROOM.module(backend).linear_silu_mul_send(x.contiguous(), weight, bias, activation == "gelu_tanh", peers)
