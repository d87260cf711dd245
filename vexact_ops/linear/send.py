"""A product whose columns other ranks need as well."""

from torch import Tensor

from .._core.peers import Peers, Sent
from .op import ROOM, _check, _rows, linear


def _kernels():
    from . import cuda_send

    return cuda_send


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
    return _kernels().linear_send(_rows(x), _rows(weight), bias, peers)


def linear_gather_send(x: Tensor | Sent, weight: Tensor, bias: Tensor | None, peers: Peers) -> Tensor | Sent:
    """linear_send(peers.receive(x), weight, bias, peers): by one kernel where rows are few, which waits for all ranks
    while its weight is on its way.

    x                (R, K / peers.size) of each rank, alike in shape and dtype; what linear_silu_mul_send gave, too
    weight, bias     (N, K) and (N,) as in linear
    bits             linear's: such a kernel is verified before it is used
    raises           as linear
    """
    if ROOM.resolve(weight.device, None) == "cuda" and weight.dim() == 2:
        bias = None if bias is None else bias.contiguous()
        found = _kernels().linear_received(x, _rows(weight), bias, peers)
        if found is not None:
            return found
    return linear_send(peers.receive(x), weight, bias, peers)


def linear_awaited(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """linear(x, weight, bias), of an x that other ranks are waited for: of few rows the kernel asks for more of the
    weight meanwhile.

    bits      linear's
    raises    as linear
    example
    >>> x, weight = torch.randn(5, 64), torch.randn(8, 64)
    >>> vx.same_bits(vx.linear_awaited(x, weight), vx.linear(x, weight))
    True
    """
    backend = ROOM.resolve(x.device, None)
    if backend != "cuda" or x.dim() != 2:
        return linear(x, weight, bias)
    _check(x, weight, bias)
    return _kernels().linear_awaited(_rows(x), _rows(weight), None if bias is None else bias.contiguous())
