"""Products of few rows between ranks, by kernels that linear has chosen: they send their columns to every rank, receive
their rows from them, or ask for more of a weight while they are waited for. Each is verified once for a class of
products before it is used, in this process: with memory of one rank in place of all (Loopback), against the kernel that
stores."""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from .._core import gpu, native
from .._core.peers import Loopback, Peers, Sent, kind_of, on_8, since_of
from .._core.proof.bitwise import same_bits
from . import cuda as linear
from . import tiles
from .tiles import SMALL_M, Skinny

SENT = 3  # what linear_send returns where out was not written
WHILE_WAITING = 16 << 20  # bytes of a weight
RECEIVED = 4  # rows that a product waits for itself, where ranks have sent them
_log = logging.getLogger(__name__)


def linear_send(x: Tensor, weight: Tensor, bias: Tensor | None, peers: Peers) -> Tensor | Sent:
    """linear_fwd, or its columns on their way to every rank, where this product's kernel sends them."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    call = x, weight, True, bias, out, False
    if sends(peers, out):
        product = linear.Product.of(*call)
        if product not in linear._chosen:
            linear._settle(*call)
        kernel = linear._kernels.get(linear._chosen.get(product, linear.TRITON))
        if isinstance(kernel, Skinny) and _proved(product, kernel):
            done = native.ops().linear_send(x, weight, bias, out, linear._number(kernel), *peers.places)
            if done == SENT:
                return Sent(*out.shape, out.dtype)
    return linear._matmul(*call)


def linear_received(x: Tensor | Sent, weight: Tensor, bias: Tensor | None, peers: Peers) -> Tensor | Sent | None:
    """linear_send(peers.receive(x), ...) by one kernel, where this product's takes so few rows; else None."""
    (rows, columns, dtype), (n, k) = kind_of(x), weight.shape
    fits = rows <= RECEIVED and dtype.itemsize == 2 and columns * peers.size == k and weight.dtype == dtype
    if not fits or n % 4 or not (peers.sends(rows, columns, dtype) and peers.sends(rows, n, dtype)):
        return None
    call = weight.new_empty(rows, k), weight, True, bias, weight.new_empty(rows, n), False
    product = linear.Product.of(*call)
    if product not in linear._chosen:
        linear._settle(*call)
    kernel = linear._kernels.get(linear._chosen.get(product, linear.TRITON))
    if not isinstance(kernel, Skinny) or kernel.tokens != 8 or not gpu.aligned_rows(weight):
        return None
    key = product, kernel, peers.size
    if not proved(_receiving, key, functools.partial(_receives, *key)):
        return None
    own = None if isinstance(x, Sent) else on_8(x)
    since = since_of(x)
    _run_received(own, weight, bias, rows, kernel, since, peers)
    return Sent(rows, n, dtype, since + 1)


def _run_received(own, weight, bias, m: int, kernel: Skinny, since: int, peers: Peers) -> None:
    """In half of the shared memory, or what the kernel had: so much of the weight is there when the last columns come.
    Where they are sent here, all of it is on its way into the L2 cache before: what precedes reads little."""
    stage, steps = kernel.boxes * (kernel.rows * 128 + 1024), -(-weight.shape[1] // (64 * kernel.boxes))
    half = (tiles.SHARED_BYTES // 2 - 2048 - -kernel.rows % 64 * 128) // stage
    ring, ahead = max(kernel.ring, min(half, steps, 32)), 0 if own is None else steps
    rows, _, *sizes = kernel._replace(ring=ring, ahead=ahead)
    native.ops().linear_received(own, weight, bias, m, rows, *sizes, since, *peers.waiting)


_receiving: dict[tuple, bool] = {}


def _receives(product: linear.Product, kernel: Skinny, size: int) -> bool:
    """As the first of ranks that have sent before, or not."""
    loop = Loopback(size, product.device)
    for a, b, _, bias, out in product.cases():
        for rows in range(0, len(a), RECEIVED) if len(a) < RECEIVED * 3 else (0,):
            x, y = a[rows : rows + RECEIVED], out[rows : rows + RECEIVED]
            expected = linear._run(kernel, False, x, b, True, bias, y)
            own, *others = (part.contiguous() for part in x.chunk(size, 1))
            for first in (own, None):
                loop.begin(others if first is not None else (own, *others))
                _run_received(first, b, bias, len(x), kernel, 0, loop)
                found = loop.sent(*expected.shape, expected.dtype, 0)
                if found is None or not same_bits(found, expected):
                    return False
    return True


def linear_awaited(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """linear_fwd by a kernel that asks for more of the weight while others are waited for."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    call = x, weight, True, bias, out, False
    if 0 < x.shape[0] <= SMALL_M and x.element_size() == 2:
        product = linear.Product.of(*call)
        if product not in linear._chosen:
            linear._settle(*call)
        kernel = linear._kernels.get(linear._chosen.get(product, linear.TRITON))
        if isinstance(kernel, Skinny) and (tile := waiting(kernel, product.n)) != kernel:
            key = product, tile
            if proved(_awaited, key, functools.partial(_alike, product, kernel, tile)):
                done = linear._ops()[1](*call, linear._number(tile))
                if done == linear.DONE:
                    return out
    return linear._matmul(*call)


def waiting(tile: Skinny, n: int) -> Skinny:
    """The kernel, where what it reads comes from other ranks: while it waits some microseconds for them, nobody else
    reads memory, so more of the weight is asked for."""
    stages = WHILE_WAITING // (-(-n // tile.rows) * tile.boxes * tile.rows * 128)
    return tile._replace(ahead=max(tile.ahead, stages))


_awaited: dict[tuple, bool] = {}


def _alike(product: linear.Product, kernel: Skinny, tile: Skinny) -> bool:
    return all(
        same_bits(linear._run(tile, False, *case), linear._run(kernel, False, *case)) for case in product.cases()
    )


def sends(peers: Peers, out: Tensor) -> bool:
    """Whether a kernel may send such columns: 16 bits of each, in fours, of all rows of a class."""
    rows, columns = out.shape
    return 0 < rows <= SMALL_M and out.dtype.itemsize == 2 and peers.sends(linear.class_of(rows), columns, out.dtype)


_sending: dict[tuple, bool] = {}


def proved(verdicts: dict[tuple, bool], key: tuple, prove: Callable[[], bool]) -> bool:
    """Whether a kernel has the bits of the one that stores. Inside a graph nothing can be verified: what was not before
    is not trusted."""
    if key not in verdicts:
        if torch.cuda.is_current_stream_capturing():
            return False
        verdicts[key] = prove()
        if not verdicts[key]:
            _log.warning("%s: between ranks it has other bits, and is not used there", " ".join(map(str, key)))
    return verdicts[key]


def _proved(product: linear.Product, kernel: Skinny) -> bool:
    return proved(_sending, (product, kernel), functools.partial(_sends, product, kernel))


def _sends(product: linear.Product, kernel: Skinny) -> bool:
    loop, number = Loopback(2, product.device), linear._number(kernel)
    for a, b, b_t, bias, out in product.cases():
        expected = linear._run(kernel, False, a, b, b_t, bias, out)
        loop.begin()
        done = native.ops().linear_send(a, b, bias, linear._copy(out), number, *loop.places)
        found = loop.sent(*out.shape, out.dtype)
        if done != SENT or found is None or not same_bits(found, expected):
            return False
    return True
