"""Gradients of weights under Ulysses with the bits of one rank.

A weight's gradient is a sum over the rows of a batch, and ranks that hold a share of the rows each would add parts of
it, in another order. So no part is added: a module that has weights sends all ranks' rows, and the gradients of what it
made of them, to one rank, which computes the module's gradient over all rows as one rank alone would. Modules are dealt
to ranks by their sizes. The others give -0.0, which no sum notices, whatever the sign of a zero.

What attention and gated delta nets have of weights (sinks, a convolution, decays) belongs to heads, and is whole on the
rank that has the head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from . import routed

# Ops of modules that look at one row at a time.
_OF_ROWS = {
    "linear", "linear_logits", "rmsnorm", "rmsnorm_gated", "layer_norm", "fused_moe", "linear, moe_route", "embedding",
}  # fmt: skip


class Rows:
    """The modules of a patch whose gradients are computed whole.

    share   tokens of the row that this rank has, in the forward that runs
    tokens  of all ranks together that are no filling; None: all of them
    """

    def __init__(self) -> None:
        self.share, self.tokens = 0, None
        self._sizes: dict[int, int] = {}  # of each module's parameters, by the first of them: tied ones go together
        self._owners: dict[int, int] = {}
        self._keys: dict[int, int] = {}  # of modules

    def cover(self, module: nn.Module, forward: Callable, ops: str, refuse: Callable[[str], None]) -> Callable:
        """Its forward, with whole gradients. refuse is told of weights whose gradients would not be."""
        own = [p for p in module._parameters.values() if p is not None]
        if ops == "linear, moe_route":  # whose matrix may be a child's
            own = list(module.parameters())
        if not own:
            return forward
        if ops not in _OF_ROWS:
            if not ("attention" in ops or "gated_delta" in ops):
                refuse(f"whole_gradients: it has weights, and {ops or 'what it runs'} is not known to go row by row")
            return forward
        key = id(own[0])
        self._keys[id(module)] = key
        self._sizes[key] = max(self._sizes.get(key, 0), sum(p.numel() for p in own))
        return _covered(forward, ops)

    def owner(self, module: nn.Module, ranks: int) -> int:
        if not self._owners:
            loads = [0] * ranks
            for each, size in self._sizes.items():  # in the order of the model's modules, as on every rank
                self._owners[each] = loads.index(min(loads))
                loads[self._owners[each]] += size
        return self._owners[self._keys[id(module)]]


class Then:
    """What the output layer is asked for, with what that needs of each row, given to it again. No dataclass and no
    closure: FSDP2 would not see the one, and look into the other."""

    __slots__ = "call", "rows"

    def __init__(self, call: Callable, *rows: Tensor) -> None:
        self.call, self.rows = call, rows

    def __call__(self, x: Tensor, weight: Tensor) -> Any:
        return self.call(x, weight, *self.rows)


def _covered(forward: Callable, ops: str) -> Callable:
    @functools.wraps(forward)
    def whole_forward(self, *args, **kwargs):
        if not _wanted(self):
            return forward(self, *args, **kwargs)
        if ops == "fused_moe":
            held = self.gate_up_proj.shape[0]
            if held != getattr(self, "num_experts", held):
                raise ValueError(
                    f"whole_gradients: got {held} of {self.num_experts} experts on this rank, expected all"
                )
            x, ids, weights = args
            args = x, ids, routed.uncast(self, ids, weights)
        names = [name for name, p in self.named_parameters() if p is not None]
        parameters = [self.get_parameter(name) for name in names]
        then = kwargs.get("then")
        places = [i for i, a in enumerate(args) if isinstance(a, Tensor) and (a.dim() > 1 or ops == "embedding")]
        rows = [args[i] for i in places] + list(then.rows if isinstance(then, Then) else ())

        def run(*tensors: Tensor):
            given, weights = list(args), tensors[len(rows) :]
            for place, tensor in zip(places, tensors):
                given[place] = tensor
            options = dict(kwargs)
            if isinstance(then, Then):
                options["then"] = Then(then.call, *tensors[len(places) : len(rows)])
            return forward(_with(self, dict(zip(names, weights))), *given, **options)

        out = _Whole.apply(_Call(run, self, len(rows)), *rows, *parameters)
        if ops == "linear, moe_route":
            routed.give_again(*out[1:])
        return out

    return whole_forward


def _wanted(module: nn.Module) -> bool:
    patch = module._vexact
    if patch.rows is None or patch.ulysses is None or patch.seen is not None or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():
        raise RuntimeError("whole_gradients: got torch.compile, expected none: gradients are exchanged by hand")
    return True


def by_heads(bmm: Callable, linear: nn.Module) -> Callable:
    """bmm(x, w) of (heads, T, D) with a view of this linear layer's weight, whose own forward does not run."""
    if not _wanted(linear):
        return bmm
    return lambda x, w: _Whole.apply(_Call(bmm, linear, 1, along=1), x, w)


def _with(module: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """The same object with these in the places of its parameters, and of its children's."""
    other = object.__new__(type(module))
    other.__dict__.update(module.__dict__)
    own = {name: tensor for name, tensor in tensors.items() if "." not in name}
    other.__dict__["_parameters"] = {**module._parameters, **own}
    children = dict(module._modules)
    for child in {name.partition(".")[0] for name in tensors if "." in name}:
        its = {n.partition(".")[2]: t for n, t in tensors.items() if n.startswith(f"{child}.")}
        children[child] = _with(children[child], its)
    other.__dict__["_modules"] = children
    return other


class _Call:
    """One call of a module: run(*rows, *parameters), of whose tensors the first `count` are rows, along this dimension
    of each, or along that which has as many as there are tokens."""

    __slots__ = "along", "count", "owner", "run", "share", "tokens", "ulysses"

    def __init__(self, run: Callable, module: nn.Module, count: int, along: int | None = None) -> None:
        patch = module._vexact
        self.run, self.count, self.along, self.ulysses = run, count, along, patch.ulysses
        self.owner = patch.rows.owner(module, self.ulysses.size)
        self.share, self.tokens = patch.rows.share, patch.rows.tokens

    def grads(self, tensors: Sequence[Tensor], wanted: Sequence[int], given: dict[int, Tensor]) -> Sequence[Tensor]:
        """Of the wanted ones of these tensors, for these gradients of outputs."""
        leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
        with torch.enable_grad(), torch.autocast(tensors[0].device.type, enabled=False):
            out = self.run(*leaves)
            outs = out if isinstance(out, tuple) else (out,)
            kept = [i for i in given if outs[i].requires_grad]
            return torch.autograd.grad(
                [outs[i] for i in kept], [leaves[i] for i in wanted], [given[i] for i in kept], materialize_grads=True
            )

    def dim(self, tensor: Tensor) -> int:
        """Along which its rows lie."""
        if self.along is not None:
            return self.along
        last = tensor.dim() - (tensor.dim() > 1 and tensor.is_floating_point())
        found = [d for d in range(last) if tensor.shape[d] == self.share]
        if not found:
            shape = tuple(tensor.shape)
            raise RuntimeError(
                f"whole_gradients: got {shape}, expected {self.share} tokens along one of its dimensions"
            )
        if self.share == 1:
            return found[-1]
        return max(found, key=lambda d: (tensor.stride(d), -d))  # heads of a token lie beside each other

    def gathered(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """All ranks' rows of each, without the filling, on the owner; None on others."""
        size, dims = self.ulysses.size, [self.dim(t) for t in tensors]
        firsts = [t.movedim(d, 0).contiguous() for t, d in zip(tensors, dims)]
        sent = torch.cat([t.view(-1).view(torch.uint8) for t in firsts])
        own = self.ulysses.rank == self.owner
        found = sent.new_empty(size * len(sent) if own else 0)
        counts = [len(sent) if rank == self.owner else 0 for rank in range(size)]
        dist.all_to_all_single(found, sent, [len(sent) if own else 0] * size, counts, self.ulysses.group)
        if not own:
            return None
        found, whole, begin = found.view(size, -1), [], 0
        for first, d in zip(firsts, dims):
            end = begin + first.numel() * first.element_size()
            part = found[:, begin:end].contiguous().view(-1).view(first.dtype)
            whole.append(part.view(size * self.share, *first.shape[1:])[: self.tokens].movedim(0, d))
            begin = end
        return whole


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor):
        ctx.call = call
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        out = call.run(*tensors)
        outs = out if isinstance(out, tuple) else (out,)
        ctx.mark_non_differentiable(*(t for t in outs if not t.is_floating_point()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        call, tensors, needs = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[1:]
        given = {i: grad for i, grad in enumerate(grads) if grad is not None}
        found: list[Tensor | None] = [None] * len(tensors)
        if not given:
            return None, *found
        rows = [i for i in range(call.count) if needs[i]]
        weights = [i for i in range(call.count, len(tensors)) if needs[i]]
        if rows:
            for i, grad in zip(rows, call.grads(tensors, rows, given)):
                found[i] = grad
        if weights:
            whole = call.gathered((*tensors[: call.count], *given.values()))
            if whole is None:
                each = (torch.full_like(tensors[i], -0.0) for i in weights)
            else:
                of_rows, of_outputs = whole[: call.count], dict(zip(given, whole[call.count :]))
                each = call.grads((*of_rows, *tensors[call.count :]), weights, of_outputs)
            for i, grad in zip(weights, each):
                found[i] = grad
        return None, *found
