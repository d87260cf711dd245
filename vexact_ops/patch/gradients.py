"""Gradients that do not depend on how many ranks computed them: one tree over all backward passes of a step."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


class TreeGradients:
    """Sums the gradients of a step's leaves in one tree, whatever ranks they lie on. A leaf is one backward pass.

    Leaf j of a step is computed by rank j % ranks, in rounds: every rank computes one, and calls `add`. Sums are fp32,
    of pairs of neighbours, then of pairs of those: ranks are a power of two, and so each rank's sums of a round are the
    tree's own. 1, 2, 4 and 8 ranks then end with equal gradients, provided that the leaves are equal: cut a batch by
    its order alone, and weigh the loss by the whole of it (FSDP2's mean over ranks is a sum here).

        tree = vx.patch.TreeGradients(model)      # after fully_shard
        for leaf in leaves[rank::ranks]:
            loss(leaf).backward()
            tree.add()
        norm = tree.finish(max_norm=1.0)          # p.grad of all parameters, clipped
        optimizer.step()

    model    under FSDP2, sharded over one mesh of one dimension: its units reduce gradients by this tree from now on.
             Or plain, in a process alone
    raises   ValueError: other meshes, ranks that are no power of two, a reduce_dtype other than fp32
    source   the tree is that of pairwise summation; FSDP2's set_custom_reduce_scatter carries it between ranks
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        meshes = {mesh for p in self._parameters if (mesh := getattr(p, "device_mesh", None)) is not None}
        if len(meshes) > 1 or any(mesh.ndim != 1 for mesh in meshes):
            raise ValueError(f"TreeGradients: model: got meshes {meshes}, expected one of one dimension")
        self._mesh = meshes.pop() if meshes else None
        self.ranks = 1 if self._mesh is None else self._mesh.size()
        if self.ranks & (self.ranks - 1):
            raise ValueError(f"TreeGradients: model: got {self.ranks} ranks, expected a power of two")
        for unit in units:
            policy = unit._get_fsdp_state()._mp_policy
            kinds = {policy.reduce_dtype or policy.param_dtype or p.dtype for p in unit.parameters(recurse=False)}
            if kinds - {torch.float32}:
                raise ValueError(f"TreeGradients: model: reduces gradients in {kinds}, expected reduce_dtype fp32")
            unit.set_custom_reduce_scatter(_TreeReduceScatter())
        self._sums: list[tuple[int, list[Tensor | None]]] = []  # (rounds, sums of these): the tree's left edge

    def add(self) -> None:
        """After a backward pass: takes the gradients as this round's, and leaves parameters without any."""
        rounds, sums = 1, [None if p.grad is None else _local(p.grad) for p in self._parameters]
        for p in self._parameters:
            p.grad = None
        while self._sums and self._sums[-1][0] == rounds:
            sums = _join(self._sums.pop()[1], sums)
            rounds *= 2
        self._sums.append((rounds, sums))

    @torch.no_grad()
    def finish(self, max_norm: float | None = None) -> Tensor:
        """The step's gradients, in p.grad. Returns their norm, () fp32 on the parameters' device; where it is above
        max_norm they are scaled down to it. Every rank has to call."""
        if not self._sums:
            raise RuntimeError("TreeGradients: finish: no backward pass was added")
        _, sums = self._sums.pop()
        while self._sums:
            sums = _join(self._sums.pop()[1], sums)
        norm = norm_by_rows(self._parameters, sums)
        scale = None if max_norm is None else clip(norm, max_norm)
        for parameter, total in zip(self._parameters, sums):
            if total is not None:
                total = total if scale is None else total * scale
                parameter.grad = _like(parameter, total)
        return norm


def norm_by_rows(parameters: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Tensor:
    """() fp32: the norm of these gradients of parameters that FSDP2 has sharded over one mesh of one dimension, or of
    plain ones; of a sharded one each rank gives its own rows. Of each row its squares are summed, then all rows', in
    pairs of halves: the same bits on any number of ranks. Every rank has to call.

    raises  ValueError: another mesh
    """
    rows = []
    for parameter, total in zip(parameters, gradients):
        if total is not None:
            squares = _local(total).square()
            squares = squares.flatten(1) if squares.ndim > 1 else squares.unsqueeze(-1)
            rows.append(_gathered(fold(squares), parameter))
    return fold(torch.cat(rows)).sqrt() if rows else torch.zeros((), dtype=torch.float32)


def clip(norm: Tensor, max_norm: float) -> Tensor:
    """By what gradients of this norm are multiplied, so that it is at most max_norm."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def _gathered(rows: Tensor, parameter: Tensor) -> Tensor:
    """(rows of the whole parameter,) of each rank's own."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return rows.reshape(-1)
    if mesh.ndim != 1:
        raise ValueError(f"norm_by_rows: parameters: got mesh {mesh}, expected one of one dimension")
    count, ranks = parameter.shape[0], mesh.size()
    share = -(-count // ranks)  # as FSDP2 cuts
    padded = rows.new_zeros(share)
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=mesh.get_group())
    return torch.cat(parts)[:count]


def fold(values: Tensor) -> Tensor:
    """Sums over the last dimension, of any length, in pairs of halves: the same bits however many rows there are."""
    size = values.shape[-1]
    while size > 1:
        half = 1 << (size - 1).bit_length() - 1
        rest = size - half
        values = torch.cat((values[..., :rest] + values[..., half:size], values[..., rest:half]), -1)
        size = half
    return values[..., 0] if size else values.new_zeros(values.shape[:-1])


def _join(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right)]


def _local(gradient: Tensor) -> Tensor:
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local.float()


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """A gradient of this parameter, of its dtype."""
    local = local.to(parameter.dtype)
    if not hasattr(parameter, "device_mesh"):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


class _TreeReduceScatter:
    """FSDP2's reduce-scatter as an exchange of shards and their sum in pairs of neighbouring ranks. What FSDP2 would
    divide by is not heeded: it is a sum."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        ranks = dist.get_world_size(group)
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        sums = list(parts.view(ranks, -1).unbind())
        while len(sums) > 1:
            sums = [a + b for a, b in zip(sums[::2], sums[1::2])]
        output_tensor.copy_(sums[0])
