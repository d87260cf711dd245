"""Experts that lie on several ranks (VeOmni's expert parallelism): each token goes to where its experts are.

A row comes out with the bits of fused_moe over all experts at home, and so do the gradients of rows and of their
weights: an expert's results are rounded where they are made, travel as they are, and are added at home, in slot order.
The gradients of an expert's weights sum the rows of all ranks, ranks ascending, tokens ascending within each.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

import vexact_ops as vx

from .._core import check
from ..fused_moe.op import ROOM


def experts(module, x: Tensor, weights: Tensor, ids: Tensor, activation: str) -> Tensor:
    """fused_moe with a module's stacked experts, of which this rank may hold a part: gate_up_proj, down_proj, and
    num_experts in all."""
    held, total = module.gate_up_proj.shape[0], getattr(module, "num_experts", module.gate_up_proj.shape[0])
    if held == total or isinstance(x, FakeTensor):
        return vx.fused_moe(x, module.gate_up_proj, module.down_proj, weights, ids, activation=activation)
    group = _group(held, total)
    gelu = activation == "gelu_tanh"
    return _Experts.apply(x, module.gate_up_proj, module.down_proj, weights, ids, gelu, group)


def _group(held: int, total: int) -> dist.ProcessGroup:
    from veomni.distributed.parallel_state import get_parallel_state

    state = get_parallel_state()
    size = state.ep_size if state.ep_enabled else 1
    if held * size != total:
        raise RuntimeError(f"experts: got {held} of {total} on each of {size} ranks, expected all of them")
    return state.ep_group


class _Exchange:
    """Which rows go where and come from where, for one layer's tokens."""

    def __init__(self, ids: Tensor, held: int, group: dist.ProcessGroup):
        self.group, ranks = group, dist.get_world_size(group)
        owner = ids.flatten().long() // held
        self.order = owner.argsort(stable=True)  # order: ranks ascending, slots ascending within each
        sent = torch.bincount(owner, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        self.sent, self.received = sent.tolist(), received.tolist()
        self.position = torch.empty_like(self.order, dtype=torch.int32)
        self.position[self.order] = torch.arange(len(self.order), dtype=torch.int32, device=ids.device)

    def out(self, rows: Tensor) -> Tensor:
        return self._move(rows, self.sent, self.received)

    def back(self, rows: Tensor) -> Tensor:
        return self._move(rows, self.received, self.sent)

    def _move(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        got = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(got, rows.contiguous(), received, sent, group=self.group)
        return got


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate_up, down, weights, ids, gelu, group):
        room = ROOM.module(ROOM.resolve(x.device, None))
        x, gate_up, down = check.rows(x), check.matrices(gate_up), check.matrices(down)
        weights, held, top_k = weights.contiguous(), gate_up.shape[0], ids.shape[1]
        moves = _Exchange(ids, held, group)
        rows = moves.out(x[moves.order // top_k])
        own = moves.out(ids.flatten()[moves.order] % held)[:, None].contiguous()
        ones = weights.new_ones(own.shape)
        keep = any(ctx.needs_input_grad[:4])
        y, h, *plan = room.fused_moe_fwd(rows, gate_up, down, ones, own, gelu, keep)
        ctx.room, ctx.moves, ctx.gelu = room, moves, gelu
        if keep:
            ctx.save_for_backward(rows, gate_up, down, weights, h, *plan)
        return room._combine(moves.back(y), moves.position, weights, x.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        rows, gate_up, down, weights, h, offsets, order, position = ctx.saved_tensors
        room, moves, tokens, top_k = ctx.room, ctx.moves, *weights.shape
        dy = moves.out(check.rows(dy)[moves.order // top_k])
        w = moves.out(weights.flatten()[moves.order])[:, None].contiguous()
        dx, dgate_up, ddown, dw = room.fused_moe_bwd(
            dy, rows, gate_up, down, w, h, offsets, order, position, ctx.gelu, *ctx.needs_input_grad[:3]
        )
        if dx is not None:
            dx = room._combine(moves.back(dx), moves.position, None, tokens)
        dw = moves.back(dw.flatten())[moves.position.long()].view(weights.shape)
        return dx, dgate_up, ddown, dw, None, None, None
