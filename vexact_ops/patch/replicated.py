"""A model in DistributedDataParallel: who calls it itself, and not its wrapper, has gradients that no rank adds up."""

import sys
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .instances import instances

if TYPE_CHECKING:
    from .state import Patch


def check(patch: "Patch", op: str) -> None:
    """RuntimeError where a backward of this call would leave each rank with gradients of its own. A model does not know
    its wrapper: that is looked for, which takes time, and so only where as many hold a parameter as never did yet."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return
    parameter = next((p for p in patch.model.parameters() if p.requires_grad), None)
    if parameter is None or sys.getrefcount(parameter) in patch.holders:
        return
    for wrapper in instances(DistributedDataParallel):
        if wrapper.require_backward_grad_sync and any(module is patch.model for module in wrapper.modules()):
            raise RuntimeError(
                f"{op}: the model is in DistributedDataParallel, which adds up gradients of its own forwards alone: "
                "call it with vexact_score=vexact_ops.patch.Score(...), or this under torch.no_grad() or no_sync()"
            )
    patch.holders.add(sys.getrefcount(parameter))
