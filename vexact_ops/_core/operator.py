"""Registers vexact::* operators: schema, implementation, fake and autograd in one place.

Calling an Operator goes straight to the implementation, under autograd to its node, where nothing would watch the
dispatcher (plain tensors, no tracing, no profiler): a decode step and a layer's forward make hundreds of calls, and the
dispatcher's round trips through Python cost more than some kernels. Everything else (torch.compile, fake tensors,
functorch, profiles) goes through torch.ops.vexact.

Gradients are first derivatives in reverse mode. Whoever asks for more is told so: a backward pass under create_graph
works, and what it computes raises when it is differentiated in its turn; forward mode and the gradient transforms of
torch.func raise at the call.
"""

import os
import re
from collections.abc import Callable

import torch
from torch import _C, Tensor
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad, profiler
from torch.compiler import is_compiling

from .registry import OPERATORS

_functorch_level = _C._functorch.maybe_current_level
_LIBRARY = torch.library.Library("vexact", "FRAGMENT")
_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_VALUES = frozenset((type(None), bool, int, float, str, torch.dtype))  # arguments that are no tensors


def watched() -> bool:
    """Whether something would watch the dispatcher: calls then have to go through it."""
    return (
        is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or _functorch_level() is not None
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
    )


class Operator:
    """One operator of the vexact namespace.

    schema          "name(Tensor x, ...) -> Tensor"; every argument is passed by position
    impl            computes it on real tensors; registered for CPU and CUDA
    fake            the outputs' metadata from fake inputs
    setup_context   (ctx, inputs, output) -> None and
    backward        (ctx, *grads) -> one gradient per input, as torch.library.register_autograd takes them. Without the
                    two, outputs of inputs that require a gradient raise when theirs is asked for
    """

    def __init__(
        self,
        schema: str,
        impl: Callable,
        fake: Callable,
        setup_context: Callable | None = None,
        backward: Callable | None = None,
    ):
        self.name = schema.split("(", 1)[0]
        OPERATORS[self.name] = self
        self.room = impl.__module__.split(".")[1]
        self.has_backend = "str backend)" in schema
        if os.environ.get("VEXACT_LOG"):
            from . import explain

            impl = explain.logged(self.name, impl) if explain.LEVEL else impl
        _LIBRARY.define(schema)
        _LIBRARY.impl(self.name, impl, "CPU")
        _LIBRARY.impl(self.name, impl, "CUDA")
        torch.library.register_fake(f"vexact::{self.name}", fake, lib=_LIBRARY)
        self.impl, self.fake, self.setup_context, self.backward = impl, fake, setup_context, backward
        self.op = getattr(torch.ops.vexact, self.name).default
        self._node = type(f"vexact_{self.name}", (_Node,), {})  # its name is that of the outputs' grad_fn
        self._apply = super(torch.autograd.Function, self._node).apply  # what is left of it outside functorch
        _LIBRARY.impl(self.name, self._autograd, "Autograd", with_keyset=True)

    def __call__(self, *args):
        if watched():
            return self.op(*args)
        grad = False
        for arg in args:
            kind = type(arg)
            if kind in _PLAIN:
                grad = grad or arg.requires_grad
            elif kind not in _VALUES and isinstance(arg, Tensor):  # a subclass: fake, functional, distributed
                return self.op(*args)
        if grad and torch.is_grad_enabled():
            return self._apply(*args, (self, None))
        return self.impl(*args)

    def _autograd(self, keyset, *args):
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise NotImplementedError(
                f"{self._asked()}: got a dual tensor, but it has no forward-mode derivative (torch.func.jvp, jacfwd, "
                "hessian, torch.autograd.forward_ad): use reverse mode (backward, torch.autograd.grad), or compute "
                "this part by PyTorch's own operations"
            )
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return self._below(keyset, args)
        if _C._are_functorch_transforms_active():
            raise NotImplementedError(
                f"{self._asked()}: called under a gradient transform of torch.func (grad, vjp, jacrev, hessian), which "
                "it does not support: use backward or torch.autograd.grad"
            )
        return self._node.apply(*args, (self, keyset))

    def _below(self, keyset, args):
        with _C._AutoDispatchBelowAutograd():
            return self.op.redispatch(keyset & _C._after_autograd_keyset, *args)

    def _asked(self) -> str:
        """The op that was called: part of whose backward pass this may be."""
        return re.sub(r"_(bwd|dx|dweight|dbias)$", "", self.name)


class _Node(torch.autograd.Function):
    """What autograd keeps of a call; a subclass for each operator."""

    @staticmethod
    def forward(ctx, *args):
        *args, (ctx.operator, keyset) = args
        output = ctx.operator.impl(*args) if keyset is None else ctx.operator._below(keyset, args)
        if ctx.operator.setup_context is not None:
            ctx.operator.setup_context(ctx, tuple(args), output)
        return output

    @staticmethod
    def backward(ctx, *grads):
        operator = ctx.operator
        if operator.backward is not None:
            return *operator.backward(ctx, *grads), None
        if operator._asked() == operator.name:
            raise NotImplementedError(
                f"{operator.name}: a gradient through it was asked for, and it has none: call it under torch.no_grad()"
            )
        raise NotImplementedError(
            f"{operator._asked()}: a gradient of its gradient was asked for (create_graph=True: a gradient penalty, a "
            "Hessian), but it is differentiable once: compute what is differentiated twice by PyTorch's own operations"
        )
