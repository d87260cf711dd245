"""What a call does: its backend, the kernels that compute it, and why those. `explain` asks; VEXACT_LOG writes it down.

Where a room's module chooses among kernels it does so in one function, `route(call) -> Decision`: dispatch takes what
it returns, `admit` asks it ahead of time, and `explain(operator, **arguments)` gives pairs of a part's name and what it
returns for that part. Arguments come by their names in the operator's schema: one that is new disturbs nobody.
Of a module that offers none, its name says all: it has one kernel for each thing it does.
"""

import functools
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import admit
from .admit import Decision, canonical_by_rule
from .registry import OPERATORS


@dataclass(frozen=True)
class ExplainedCall:
    """One call of an operator: what was given to it, and the decision on each of its parts."""

    operator: str
    backend: str
    tensors: tuple[str, ...]
    parts: tuple[tuple[str, Decision], ...]

    @property
    def kernels(self) -> str:
        return ", ".join(
            d.chosen.name if len(self.parts) == 1 else f"{part}: {d.chosen.name}" for part, d in self.parts
        )


class Explanation(list):
    """The calls behind an op, first to last; a str to read. `.kernels` are the names alone."""

    @property
    def kernels(self) -> list[str]:
        return [decision.chosen.name for call in self for _, decision in call.parts]

    def __repr__(self) -> str:
        lines = []
        for call in self:
            lines.append(f"{call.operator}, backend {call.backend}: {', '.join(call.tensors)}")
            for part, decision in call.parts:
                lines.append(f"  {part}: {decision.chosen.name}")
                lines.append(f"    because {decision.why}")
                if decision.key:
                    lines.append(f"    key {decision.key}")
                ranked = sorted(decision.verdicts, key=lambda v: (not v.admitted, v.us or 0.0))
                lines += [f"    {'equal  ' if v.admitted else 'refused'} {v}" for v in ranked]
        return "\n".join(lines)

    __str__ = __repr__


def explain(op: Callable[..., object], *args: object, **kwargs: object) -> Explanation:
    """Which backend and which kernels compute op(*args, **kwargs), and why: the verdict on every candidate.

    op       a function of vexact_ops, such as vx.linear
    args     as for the call itself. Where one requires a gradient, the backward pass is explained too
    returns  a list of ExplainedCall, to be printed or asked
    effects  none but those of the first such call: candidates that are not known are verified (not inside a CUDA
             graph). Nothing of the call itself is computed, and nothing is written into its arguments
    raises   what the call raises for arguments that it does not take
    example
    >>> found = vx.explain(vx.linear, torch.randn(5, 64), torch.randn(8, 64))
    >>> print(found)  # doctest: +ELLIPSIS
    linear...
    """
    if not callable(op):
        raise TypeError(f"explain: op: got {type(op).__name__}, expected a function such as vexact_ops.linear")
    with _Recording() as recorded:
        result = op(*args, **kwargs)
        outputs = [t for t in admit.tensors_of(result) if t.requires_grad]
        inputs = [t for t in admit.tensors_of([list(args), list(kwargs.values())]) if t.requires_grad]
        if outputs and inputs:
            grads = [torch.empty_like(t) for t in outputs]
            torch.autograd.grad(outputs, inputs, grads, allow_unused=True)
    if not recorded.calls:
        raise ValueError(f"explain: op: {getattr(op, '__name__', op)!r} called none of vexact's operators")
    return Explanation(described(name, given) for name, given in recorded.calls)


class _Recording(TorchDispatchMode):
    """Takes down the calls of our operators, and answers with tensors of the right shape that hold anything."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "vexact":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("vexact::")
        self.calls.append((name, args))
        return OPERATORS[name].fake(*args)


def described(name: str, args: tuple) -> ExplainedCall:
    """A call by what the operator was given."""
    operator = OPERATORS[name]
    tensors = tuple(_shown(t) for t in admit.tensors_of(list(args)))
    if not operator.has_backend:
        return ExplainedCall(name, "torch", tensors, ())
    *given, backend = args
    room = operator.room
    module = importlib.import_module(f"vexact_ops.{room}.{backend}")
    hook = getattr(module, "explain", None)
    names = (argument.name for argument in operator.op._schema.arguments)
    parts = hook(name, **dict(zip(names, given))) if hook else []
    if not parts:
        parts = [("kernel", canonical_by_rule(f"{room}/{backend}.py", "it is the backend's one kernel"))]
    return ExplainedCall(name, backend, tensors, tuple(parts))


def _shown(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}"


# --- VEXACT_LOG -----------------------------------------------------------------------------------------------------


def _level() -> int:
    asked = os.environ.get("VEXACT_LOG") or "0"
    if asked not in ("0", "1", "2"):
        raise ValueError(f"VEXACT_LOG: got {asked!r}, expected 0 (nothing), 1 (a line for each call) or 2 (more)")
    return int(asked)


LEVEL = _level()  # read once: where it is 0, calls have nothing in their way


def logged(name: str, impl: Callable) -> Callable:
    """impl, followed by a line on standard error."""

    @functools.wraps(impl)
    def run(*args):
        result = impl(*args)
        try:
            _write(_line(described(name, args), args))
        except Exception as error:  # what is only written down must not stop a run
            _write(f"vexact {name}: it could not be explained ({type(error).__name__}: {error})")
        return result

    return run


def _line(call: ExplainedCall, args: tuple) -> str:
    line = f"vexact {call.operator} {call.backend} [{call.kernels}] {' '.join(call.tensors)}"
    if LEVEL > 1:
        tensors = list(admit.tensors_of(list(args)))
        where = ", ".join(dict.fromkeys(str(t.device) for t in tensors))
        strides = " ".join(f"{t.stride()}+{t.data_ptr() % 16}" for t in tensors)
        line += f" | {where} | strides and bytes off 16: {strides}"
        line += "".join(f" | {part}: {decision.why}" for part, decision in call.parts)
    return line


def _settled(decision: Decision) -> None:
    admitted = sum(v.admitted for v in decision.verdicts)
    line = f"vexact settled {decision.key}: {decision.chosen.name}, {admitted} of {len(decision.verdicts)} candidates "
    line += f"have the canonical kernel's bytes ({decision.seconds:.2f} s)"
    shown = [v for v in decision.verdicts if LEVEL > 1 or not v.admitted]
    _write("\n".join([line, *(f"vexact   {'equal  ' if v.admitted else 'refused'} {v}" for v in shown)]))


def _write(text: str) -> None:
    sys.stderr.write(text + "\n")


if LEVEL:
    admit.watchers.append(_settled)
