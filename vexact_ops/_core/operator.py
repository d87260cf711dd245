"""Registers vexact::* operators: schema, implementation, fake and autograd in one place.

Calling an Operator goes straight to the implementation where nothing would watch the dispatcher (plain tensors, no
gradient, no tracing): a decode step makes hundreds of calls, and the dispatcher's Python round trip costs more than
some kernels. Everything else (autograd, torch.compile, fake tensors, functorch) goes through torch.ops.vexact.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("vexact", "FRAGMENT")
_PLAIN = (Tensor, torch.nn.Parameter)


class Operator:
    """One operator of the vexact namespace.

    schema          "name(Tensor x, ...) -> Tensor"; every argument is passed by position
    impl            computes it on real tensors; registered for CPU and CUDA
    fake            the outputs' metadata from fake inputs
    setup_context   (ctx, inputs, output) -> None and
    backward        (ctx, *grads) -> one gradient per input, as torch.library.register_autograd takes them
    """

    def __init__(
        self,
        schema: str,
        impl: Callable,
        fake: Callable,
        setup_context: Callable | None = None,
        backward: Callable | None = None,
    ):
        name = schema.split("(", 1)[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, impl, "CPU")
        _LIBRARY.impl(name, impl, "CUDA")
        torch.library.register_fake(f"vexact::{name}", fake, lib=_LIBRARY)
        if backward is not None:
            torch.library.register_autograd(f"vexact::{name}", backward, setup_context=setup_context, lib=_LIBRARY)
        self.impl = impl
        self.op = getattr(torch.ops.vexact, name).default
        self.differentiable = backward is not None

    def __call__(self, *args):
        if torch.compiler.is_compiling() or self._watched(args):
            return self.op(*args)
        return self.impl(*args)

    def _watched(self, args) -> bool:
        if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
            return True
        if torch._C._functorch.maybe_current_level() is not None:
            return True
        grad = self.differentiable and torch.is_grad_enabled()
        for arg in args:
            if isinstance(arg, Tensor) and (type(arg) not in _PLAIN or (grad and arg.requires_grad)):
                return True
        return False
