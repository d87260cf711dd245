"""PyTorch's own products and sums on aligned kernels, for models that no patch knows: whatever code calls them.

A dispatch mode sees every operation of its thread below autograd, those of backward passes too, so a model's Python,
autograd's formulas and library code are all the same to it. It lives on the thread's mode stack and nowhere else:
nothing is registered, and after undo() nothing is left.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import vexact_ops as vx

from ..linear.op import ROOM as LINEAR
from ..linear.op import _linear_dweight, _linear_dx
from ..log_softmax.op import ROOM as LOG_SOFTMAX
from ..log_softmax.op import _log_softmax_bwd
from . import audit
from .report import table

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_LOCAL = threading.local()


@dataclass(frozen=True)
class Operation:
    """What became of the calls of one operation."""

    name: str
    calls: int
    replacement: str  # the aligned op that computed them, or "" where they stayed stock
    note: str


class Operations(list):
    """One Operation for each way in which an operation was computed; as a string a table."""

    def __str__(self) -> str:
        rows = [(o.name, str(o.calls), o.replacement or "-", o.note) for o in self]
        return table(("operation", "calls", "aligned op", "note"), rows)


class Refused(Exception):
    """Why a call stays stock."""


def _serve(*tensors: Tensor) -> None:
    """All are what the aligned ops take. Raises Refused."""
    first = tensors[0]
    for t in tensors:
        if t.layout is not torch.strided:
            raise Refused(f"layout {t.layout}")
        if t.dtype != first.dtype:
            raise Refused("operands of two dtypes")
        if t.device != first.device:
            raise Refused("operands on two devices")
    known = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
    if first.dtype not in known.get(first.device.type, ()):
        raise Refused(f"{str(first.dtype).removeprefix('torch.')} on {first.device.type}")


def _fits(holds: bool) -> None:
    """Stock refuses other shapes in its own words."""
    if not holds:
        raise Refused("shapes that do not fit")


# Products. The layout picks the kernel, never the bits: all of them have linear's order.


def _product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(M, K) @ (K, N), both served."""
    if b.stride(0) == 1 and a.stride(1) == 1:  # b is a weight's transpose
        return vx.linear(a, b.t(), out_dtype=out_dtype)
    backend = LINEAR.resolve(a.device, None)
    if b.stride(1) == 1 and a.stride(1) == 1:
        return _linear_dx(a, b, out_dtype, backend)
    if b.stride(1) == 1 and a.stride(0) == 1:
        return _linear_dweight(a.t(), b, out_dtype, backend)
    return vx.bmm(a[None], b[None], out_dtype=out_dtype)[0]


def mm(a: Tensor, b: Tensor) -> Tensor:
    _serve(a, b)
    _fits(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0])
    return _product(a, b, a.dtype)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    _serve(a, b)
    _fits(a.dim() == b.dim() == 3 and a.shape[::2] == b.shape[:2])
    return vx.bmm(a, b)


def mv(a: Tensor, x: Tensor) -> Tensor:
    _fits(x.dim() == 1)
    return mm(a, x[:, None])[:, 0]


def dot(x: Tensor, y: Tensor) -> Tensor:
    _fits(x.dim() == y.dim() == 1)
    return mm(x[None], y[:, None]).view(())


def _plus(c: Tensor, product: Tensor, beta, alpha, dtype: torch.dtype) -> Tensor:
    """beta * c + alpha * product in fp32, one rounding a step; with beta 0, c is not looked at."""
    shape = product.shape[product.dim() - min(c.dim(), product.dim()) :]
    _fits(c.dim() <= product.dim() and all(n in (1, m) for n, m in zip(c.shape, shape)))
    if alpha != 1:
        product = product * alpha
    if beta != 0:
        c = c.float()
        product = product + (c if beta == 1 else c * beta)
    return product.to(dtype)


def addmm(c: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    _serve(a, b, c)
    _fits(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0])
    if alpha == beta == 1 and c.shape == b.shape[1:] and b.stride(0) == 1 and a.stride(1) == 1:
        return vx.linear(a, b.t(), c)
    return _plus(c, _product(a, b, torch.float32), beta, alpha, a.dtype)


def addmv(c: Tensor, a: Tensor, x: Tensor, *, beta=1, alpha=1) -> Tensor:
    _serve(a, x, c)
    _fits(a.dim() == 2 and x.shape == a.shape[1:])
    return _plus(c, _product(a, x[:, None], torch.float32)[:, 0], beta, alpha, a.dtype)


def baddbmm(c: Tensor, a: Tensor, b: Tensor, *, beta=1, alpha=1) -> Tensor:
    _serve(a, b, c)
    _fits(a.dim() == b.dim() == 3 and a.shape[::2] == b.shape[:2])
    return _plus(c, vx.bmm(a, b, out_dtype=torch.float32), beta, alpha, a.dtype)


# Reductions


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    _serve(x)
    if x.dim() == 0 or x.shape[dim] == 0:
        raise Refused("nothing to reduce")
    y = vx.log_softmax(x.movedim(dim, -1), out_dtype=torch.float32 if half_to_float else None)
    return y.movedim(-1, dim).contiguous()


def log_softmax_backward(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    _serve(dy, y)
    if y.dim() == 0 or y.shape[dim] == 0:
        raise Refused("nothing to reduce")
    flat = [t.movedim(dim, -1).reshape(-1, t.shape[dim]).contiguous() for t in (dy, y)]
    known = y.new_zeros((len(flat[1]), 2), dtype=torch.float32)  # y is its own logit with a log-sum-exp of 0
    dx = _log_softmax_bwd(*flat, known, LOG_SOFTMAX.resolve(y.device, None))
    shape = y.movedim(dim, -1).shape
    return dx.to(input_dtype).view(shape).movedim(-1, dim).contiguous()


def _reduction(op: str) -> Callable:
    def reduce(x: Tensor, dim=None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is not None:
            x = x.to(dtype)  # as stock: first the cast, then the sum
        _serve(x)
        if x.dim() == 0:  # torch lets it have a dimension 0 to reduce
            dim = None
        dims = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
        _fits(all(-x.dim() <= d < x.dim() for d in dims) and len({d % x.dim() for d in dims}) == len(dims))
        return getattr(vx, op)(x, dims, keepdim)

    return reduce


def _whole(op: str) -> Callable:
    reduce = _reduction(op)
    return lambda x, *, dtype=None: reduce(x, None, dtype=dtype)


def _into(route: Callable, place: Callable) -> Callable:
    """A route for the variant that writes its result into one of its arguments."""

    def write(*args, **kwargs):
        target = place(args, kwargs)
        kwargs.pop("out", None)
        result = route(*args, **kwargs)
        if target.shape != result.shape or target.dtype != result.dtype:
            raise Refused("the result is written into a tensor of another kind")
        return target.copy_(result)

    return write


def _routes() -> dict:
    aten = torch.ops.aten
    functional = {  # packet, overload, overload with out=, in-place packet: the aligned op, its route
        (aten.mm, "default", "out", None): ("linear", mm),
        (aten.bmm, "default", "out", None): ("bmm", bmm),
        (aten.mv, "default", "out", None): ("linear", mv),
        (aten.dot, "default", "out", None): ("linear", dot),
        (aten.addmm, "default", "out", aten.addmm_): ("linear", addmm),
        (aten.addmv, "default", "out", aten.addmv_): ("linear", addmv),
        (aten.baddbmm, "default", "out", aten.baddbmm_): ("bmm", baddbmm),
        (aten._log_softmax, "default", "out", None): ("log_softmax", log_softmax),
        (aten._log_softmax_backward_data, "default", "out", None): ("log_softmax", log_softmax_backward),
        (aten.mean, "default", "dtype_out", None): ("mean", _whole("mean")),
        (aten.mean, "dim", "out", None): ("mean", _reduction("mean")),
        (aten.sum, "default", "out", None): ("sum", _whole("sum")),
        (aten.sum, "dim_IntList", "IntList_out", None): ("sum", _reduction("sum")),
    }
    routes = {}
    for (packet, overload, out, in_place), (op, route) in functional.items():
        routes[getattr(packet, overload)] = op, route
        if out in packet.overloads():
            routes[getattr(packet, out)] = op, _into(route, lambda args, kwargs: kwargs["out"])
        if in_place is not None:
            routes[in_place.default] = op, _into(route, lambda args, kwargs: args[0])
    return routes


@functools.cache
def _is_composite(func) -> bool:
    """Made of other operations: under inference mode it arrives here whole."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


class _Mode(TorchDispatchMode):
    """Routes and counts. Shared by the nested handles of one thread."""

    # Each mode also saves, sets and restores flags of the whole process (they tell torch.compile that some mode is
    # active). Threads may leave in another order than they entered: the last one to leave restores what the first saw.
    _FLAGS = (
        "old_dispatch_mode_flags",
        "old_non_infra_dispatch_mode_flags",
        "old_without_ignore_compile_internals_dispatch_mode_flags",
    )
    _lock, _entered, _first = threading.Lock(), 0, {}

    def __enter__(self):
        with _Mode._lock:
            super().__enter__()
            if _Mode._entered == 0:
                _Mode._first = {name: getattr(self, name)[-1] for name in self._FLAGS if hasattr(self, name)}
            _Mode._entered += 1
        return self

    def __exit__(self, *exception):
        with _Mode._lock:
            _Mode._entered -= 1
            for name, value in _Mode._first.items():
                getattr(self, name)[-1] = value or _Mode._entered > 0
            super().__exit__(*exception)

    def __init__(self):
        super().__init__()
        self.routes, self.counts, self.handles = _routes(), Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(t, (FakeTensor, FunctionalTensor)) for t in types):
            return func(*args, **kwargs)  # a trace, or a question about shapes: nothing is computed
        if any(t not in _PLAIN for t in types):
            return NotImplemented  # a subclass first: what it is made of comes here again, in plain tensors
        note = "stock: its bits may depend on the batch"
        known = self.routes.get(func)
        if known is not None:
            op, route = known
            try:
                out = route(*args, **kwargs)
                self.counts[_name(func), op, ""] += 1
                return out
            except Refused as reason:
                note = f"stock: {reason}"
        elif _is_composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if not audit.exact(func, args, kwargs, out) and _reads_floats(args, kwargs):
            self.counts[_name(func), "", note] += 1
        return out


def _reads_floats(args, kwargs) -> bool:
    read = pytree.tree_leaves((args, kwargs))
    return any(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in read)


def _name(func) -> str:
    return func.overloadpacket._qualified_op_name.replace("::", ".")


class AtenHandle:
    """The patch of one thread. A context manager; `undo()` takes it back, and does so at most once."""

    def __init__(self, mode: _Mode):
        self._mode, self._thread, self._active = mode, threading.get_ident(), True
        self._before, self._after = Counter(mode.counts), None

    def __enter__(self) -> "AtenHandle":
        return self

    def __exit__(self, *exception) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<vexact patch of aten, {'active' if self._active else 'undone'}, {len(self.report())} operations>"

    def report(self) -> Operations:
        """What this thread has computed since: each operation that was routed, and each that was not although its bits
        may depend on the batch, with the number of calls. str() makes a table of it."""
        counts = (self._mode.counts if self._after is None else self._after) - self._before
        rows = [Operation(name, calls, op, note) for (name, op, note), calls in counts.items()]
        return Operations(sorted(rows, key=lambda row: (not row.replacement, row.name)))

    def undo(self) -> None:
        """Give the thread its stock operations back (with the last handle). Raises RuntimeError in another thread, and
        where a mode that was entered later is still active."""
        if not self._active:
            return
        if threading.get_ident() != self._thread:
            raise RuntimeError("undo: this patch belongs to another thread: undo it there")
        if self._mode.handles == 1:
            if _get_current_dispatch_mode() is not self._mode:
                raise RuntimeError("undo: a dispatch mode that was entered after the patch is active: leave that first")
            self._mode.__exit__(None, None, None)
            del _LOCAL.mode
        self._mode.handles -= 1
        self._active, self._after = False, Counter(self._mode.counts)


def aten() -> AtenHandle:
    """Compute this thread's stray matrix products and reductions by aligned ops, in any model or code, until undone.

    Routed, on CPU (fp32, bf16) and CUDA (and fp16): mm, bmm, mv, dot, addmm, addmv, baddbmm, and with them linear,
    matmul, einsum and the products of backward passes; log_softmax and its gradient; mean and sum of floats; in-place
    and out= variants too. In-place sums and scalings around a product (addmm's beta and alpha) are made in fp32, each
    rounded, and the result once to its dtype.

    Not routed: other dtypes and devices, and every other operation (softmax, layer norms, convolutions, fused
    attention ...): the report counts those whose bits may depend on the batch. So this narrows a difference where
    patch.hf does not know a model, and says what is left of it; it promises nothing for what it does not route. Every
    operation passes through Python, a few microseconds each.

    returns  an AtenHandle: context manager, report(), undo(). It acts at once, on the calling thread and the backward
             passes that are started there, and on no other thread. Another aten() inside is one more handle on the
             same patch: stock again when the last of them is undone. torch.compile steps aside under any dispatch mode:
             compiled functions run uncompiled, and one that was first called so may stay it (torch.compiler.reset())
    grad     those of the stock operations, from aligned products and sums
    bits     of every routed operation: those of linear, bmm, log_softmax, mean and sum
    example
    >>> x, weight = torch.randn(5, 64), torch.randn(8, 64)
    >>> with vx.patch.aten() as handle:
    ...     y = torch.nn.functional.linear(x, weight)
    >>> vx.same_bits(y, vx.linear(x, weight))
    True
    """
    mode = getattr(_LOCAL, "mode", None)
    if mode is None:
        mode = _LOCAL.mode = _Mode()
        mode.__enter__()
    mode.handles += 1
    return AtenHandle(mode)
