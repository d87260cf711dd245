"""Registers vexact::* operators: schema, implementation, fake and autograd in one place.

Calling an Operator goes straight to the implementation where nothing would watch the dispatcher (plain tensors, no
gradient, no tracing): a decode step makes hundreds of calls, and the dispatcher's Python round trip costs more than
some kernels. Everything else (autograd, torch.compile, fake tensors, functorch) goes through torch.ops.vexact.
"""

from collections.abc import Callable

import torch
from torch import _C, Tensor

_LIBRARY = torch.library.Library("vexact", "FRAGMENT")
_PLAIN = frozenset((Tensor, torch.nn.Parameter))


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
        if (
            torch.compiler.is_compiling()
            or _C._len_torch_dispatch_stack()
            or _C._len_torch_function_stack()
            or _C._functorch.maybe_current_level() is not None
        ):
            return self.op(*args)
        grad = self.differentiable and torch.is_grad_enabled()
        for arg in args:
            if type(arg) in _PLAIN:
                if grad and arg.requires_grad:
                    return self.op(*args)
            elif isinstance(arg, Tensor):  # a subclass: fake, functional, distributed
                return self.op(*args)
        return self.impl(*args)
