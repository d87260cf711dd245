"""A decoder's projections: weights by name, those that read the same states as one product, and what adapters add."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import vexact_ops as vx
from vexact_ops.patch import description as d

from .ranks import Alone, Columns, Ranks, gathered

_ALONE = Alone()


@torch.no_grad()
def join(parameters: Sequence[Tensor]) -> Tensor:
    """One tensor of all their rows; the parameters become views of it. Nothing moves if they are that already."""
    rows = [p.shape[0] for p in parameters]
    first, end = parameters[0].detach(), parameters[0].data_ptr()
    for parameter in parameters:
        if parameter.data_ptr() != end or not parameter.is_contiguous():
            break
        end += parameter.nbytes
    else:
        if len({p.untyped_storage().data_ptr() for p in parameters}) == 1:
            return first.as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
    joined = torch.cat([p.detach() for p in parameters])
    for parameter, part in zip(parameters, joined.split(rows)):
        parameter.data = part
    return joined


class Weights:
    """A model's tensors by name. Read once: parameters are only ever written in place from then on.

    Weights that are computed together are moved into one storage, each parameter a view of its rows: memory stays what
    it was, and writing into a parameter is writing into what is computed with.
    """

    def __init__(self, model: nn.Module):
        self._tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._read: set[str] = set()  # and so not to be moved any more
        self.copied: list[tuple[Tensor, int]] = []  # of which copies are computed with, and their versions then

    def __getitem__(self, name: str) -> Tensor:
        self._read.add(name)
        return self._tensors[name].detach()

    def cast(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self[name]
        if tensor.dtype != dtype and not tensor.is_inference():
            self.copied.append((tensor, tensor._version))
        return tensor.to(dtype)

    @torch.no_grad()
    def turned(self, name: str) -> Tensor:
        """Stacked matrices, each transposed, with rows that lie together: the parameter becomes a view of them."""
        tensor, found = self._tensors[name], self[name].transpose(1, 2)
        if not found.is_contiguous():
            tensor.data = found.contiguous().transpose(1, 2)
        return self[name].transpose(1, 2)

    def maybe(self, name: str | None) -> Tensor | None:
        return None if name is None else self[name]

    def rows(self, linear: d.Linear) -> tuple[Tensor, Tensor | None]:
        """Raises NotDescribed where it has adapters: `adapters` has those."""
        if linear.adapters:
            raise vx.patch.NotDescribed(f"adapters on {linear.weight}")
        weight, bias = self[linear.weight], self.maybe(linear.bias)
        if linear.rows is None:
            return weight, bias
        rows = slice(*linear.rows)
        return weight[rows], None if bias is None else bias[rows]

    def adapters(self, linear: d.Linear) -> "Adapters | None":
        if not linear.adapters:
            return None
        rows = slice(None) if linear.rows is None else slice(*linear.rows)
        return Adapters([(self[of.down], self[of.up][rows], of.scale) for of in linear.adapters])

    def together(self, *linears: d.Linear) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of one product that has the columns of all of them; None where they cannot be one."""
        names = [linear.weight for linear in linears]
        biases = [linear.bias for linear in linears]
        if len(set(names)) == 1 and linears[0].rows is not None:  # parts of one, one after another
            at = linears[0].rows[0]
            for linear in linears:
                if linear.rows != (at, at + linear.features):
                    return None
                at += linear.features
            first = linears[0]
            return self.rows(d.Linear(first.weight, first.bias, 0, first.inputs, (first.rows[0], at)))
        whole = all(linear.rows is None for linear in linears)
        alike = len({b is None for b in biases}) == 1 and len({self._tensors[n].dtype for n in names}) == 1
        used = {*names, *biases} - {None}
        tied = len(used) < len([*names, *biases]) - biases.count(None)  # the same parameter twice
        if not whole or not alike or tied or self._read & used:
            return None
        self._read |= used
        weight = join([self._tensors[name] for name in names])
        return weight, None if biases[0] is None else join([self._tensors[bias] for bias in biases])


class Adapters:
    """What LoRA adds to a projection's outputs: (y, x) -> y + scale * B(A(x)), of one adapter after another, rounded as
    PEFT's layers round: at each product, at the scale and at each sum, in the wider of the two dtypes; then to y's."""

    def __init__(self, of: Sequence[tuple[Tensor, Tensor, float]]):
        self._of = of

    def __call__(self, y: Tensor, x: Tensor) -> Tensor:
        out = y
        for down, up, scale in self._of:
            out = out + vx.linear(vx.linear(x.to(down.dtype), down), up) * scale
        return out.to(y.dtype)


def _plain(linear: d.Linear) -> d.Linear:
    return dataclasses.replace(linear, adapters=())


class Projection:
    """x -> one."""

    def __init__(self, weights: Weights, linear: d.Linear):
        self.weight, self.adapters = weights.rows(_plain(linear)), weights.adapters(linear)

    def __call__(self, x: Tensor) -> Tensor:
        y = vx.linear(x, *self.weight)
        return y if self.adapters is None else self.adapters(y, x)


class Output(Projection):
    """x -> one whose columns all ranks are to have; `own`: this rank's."""

    def __init__(self, weights: Weights, linear: d.Linear, ranks: Ranks):
        super().__init__(weights, linear)
        self._ranks, self.own = ranks, super().__call__

    def __call__(self, x: Tensor | Columns) -> Tensor | Columns:
        if self.adapters is None:
            return self._ranks.linear(x, *self.weight)
        return self._ranks.later(self.own(gathered(x)))


class Projections:
    """x -> the outputs of some projections of it, as columns of one product where their weights can be one."""

    def __init__(self, weights: Weights, *linears: d.Linear):
        self.sizes = [linear.features for linear in linears]
        self.adapters = [weights.adapters(linear) for linear in linears]
        self.adapted, plain = any(self.adapters), [_plain(linear) for linear in linears]
        joined = weights.together(*plain) if len(plain) > 1 else weights.rows(plain[0])
        self.joined, self.parts = joined, None if joined else [weights.rows(linear) for linear in plain]

    def __call__(self, x: Tensor, ranks: Ranks = _ALONE) -> Sequence[Tensor]:
        if self.joined is not None:
            found = ranks.project(x, *self.joined).split_with_sizes(self.sizes, 1)
        else:
            found = [ranks.project(x, weight, bias) for weight, bias in self.parts]
        if not self.adapted:
            return found
        return [y if added is None else added(y, x) for y, added in zip(found, self.adapters)]

    def whole(self, x: Tensor, ranks: Ranks = _ALONE) -> Tensor:
        """The columns side by side."""
        if self.joined is not None and not self.adapted:
            return ranks.project(x, *self.joined)
        return torch.cat(self(x, ranks), 1)

    def gated(self, x: Tensor, activation: str, ranks: Ranks) -> Tensor | Columns:
        """Of gates and ups: silu_mul of them, of all ranks."""
        if self.joined is not None and not self.adapted:
            return ranks.linear_silu_mul(x, *self.joined, activation)
        return ranks.later(vx.silu_mul(*self(x), activation=activation))
