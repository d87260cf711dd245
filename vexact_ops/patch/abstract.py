"""Forwards on tensors that have shapes, dtypes and devices, and no numbers: what a patch is judged by.

torch's FakeTensorMode does this for every program, at 0.2 ms an operation: half a second for every ten layers. An
abstract tensor holds one on meta, on which torch's own kernels run: a tenth of that. What those do not settle (a number
that is read from a tensor, two devices in one call, another library's operators) raises, and the forward runs once more
in FakeTensorMode.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .._core.registry import OPERATORS

Saw = Callable[..., None]  # (func, args, kwargs, out) of an operation, as __torch_dispatch__ has them
_T = TypeVar("_T")
_KNOWN: dict[torch._ops.OpOverload, bool] = {}  # by operation, of those that have been met


def run(forward: Callable[["Observed"], _T]) -> _T:
    """forward(mode) without numbers: every tensor that it makes is fake, and what it reads of real ones is their shape.
    mode.saw, where it sets that, is told of every operation.

    It may run twice, from the beginning: what it changes on the way is as if it had not been run.
    """
    with torch.inference_mode(False), torch.no_grad():  # inference mode has composite operations come as one
        try:
            with _AbstractMode() as mode:
                return forward(mode)
        except Exception:  # of whatever kind: the other mode says it in torch's words
            pass
        with FakeTensorMode(allow_non_fake_inputs=True), Observed() as mode:
            return forward(mode)


class Observed(TorchDispatchMode):
    """Tells of every operation, once it is computed."""

    saw: Saw | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = self.compute(func, args, kwargs or {})
        if self.saw is not None:
            self.saw(func, args, kwargs or {}, out)
        return out

    def compute(self, func, args: tuple, kwargs: dict):
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard against it is a third of the time


class Abstract(FakeTensor):
    """A tensor that says where it is, and holds one on meta (`inner`): for whoever asks, a fake one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device):
        self = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
        )
        self.inner = inner
        return self

    def __init__(self, *_):
        pass

    device = Tensor.device  # its own: FakeTensor asks its mode
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(f"{func}: called with an abstract tensor after its forward")


class _AbstractMode(Observed):
    """raises  NotImplementedError on operations that it does not know; what kernels for meta raise"""

    def compute(self, func, args: tuple, kwargs: dict):
        if func not in _KNOWN:
            _KNOWN[func] = func.namespace in ("aten", "prims", "vexact") and torch.Tag.inplace_view not in func.tags
        if not _KNOWN[func]:
            raise NotImplementedError(f"{func}: not on abstract tensors")
        call = _Unwrapped()
        given = [call.inner(arg) for arg in args]
        named = {name: call.inner(arg) for name, arg in kwargs.items()} if kwargs else {}
        if func.namespace == "vexact":
            return call.outer(OPERATORS[func.overloadpacket.__name__].fake(*given, **named))
        if named.get("device") is not None:
            call.device = _with_index(named["device"])
        if "device" in named or not call.owners:
            named["device"] = "meta"
        return call.outer(func(*given, **named))


class _Unwrapped:
    """The tensors of one call, inside out and back."""

    def __init__(self):
        self.owners: dict[int, Tensor] = {}
        self.device: torch.device | None = None
        self.vague = True  # so far it has seen scalars alone, which go with any device

    def inner(self, x):
        kind = type(x)
        if kind is Abstract:
            inner = x.inner
        elif kind in (list, tuple):
            return [self.inner(each) for each in x]
        elif isinstance(x, Tensor):
            inner = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        else:
            return x
        if self.device is None or (self.vague and inner.dim()):
            self.device, self.vague = x.device, not inner.dim()
        elif inner.dim() and x.device != self.device:
            raise NotImplementedError(f"tensors on {self.device} and {x.device} in one call")
        self.owners[id(inner)] = x
        return inner

    def outer(self, out):
        if isinstance(out, Tensor):
            return self.owners[id(out)] if id(out) in self.owners else Abstract(out, self.device or torch.device("cpu"))
        return type(out)(map(self.outer, out)) if type(out) in (list, tuple) else out


def _with_index(device: torch.device) -> torch.device:
    if device.type == "meta":
        raise NotImplementedError("a tensor that is asked for on meta")
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())
