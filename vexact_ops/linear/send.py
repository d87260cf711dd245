"""A product whose columns other ranks need as well."""

from torch import Tensor

from .._core.peers import Peers, Sent
from .op import ROOM, _check, _rows, linear


def linear_send(x: Tensor, weight: Tensor, bias: Tensor | None, peers: Peers) -> Tensor | Sent:
    """linear(x, weight, bias), for peers.receive or rmsnorm_gather: either the tensor, or what says that the kernel of
    the product has sent its columns to every rank. It is received before anything else is sent.

    x, weight, bias  (R, K), (N, K) and (N,) as in linear, on a GPU; every rank's are alike in shape and dtype
    bits             linear's. Kernels that were proven for it send what they would have stored
    raises           as linear
    """
    backend = ROOM.resolve(x.device, None)
    if backend != "cuda" or x.dim() != 2 or x.shape[0] == 0:
        return linear(x, weight, bias)
    _check(x, weight, bias)
    bias = None if bias is None else bias.contiguous()
    return ROOM.module(backend).linear_send(_rows(x), _rows(weight), bias, peers)
