"""How a model is run on a Batch: through its patched Hugging Face forward, or a fused path with the same bits."""

from collections.abc import Callable

import torch
from torch import Tensor

from .batch import Batch
from .decoder import fuse
from .shapes import cache_shape

Forward = Callable[[Batch], Tensor]


def forward(handle) -> tuple[Forward, str]:
    """A function batch -> (T, H) final hidden states for the model of a patch, and how it computes: "fused", or
    "patched: " and why it is not fused. Both have the same bits."""
    model = handle.model
    plain = patched_forward(model)
    fused, reason = fuse(model, plain, cache_shape(model), handle.options["kv_segment"])
    return (plain, f"patched: {reason}") if fused is None else (fused, "fused")


def patched_forward(model: torch.nn.Module) -> Forward:
    """The decoder's own Python, on aligned ops: any family that vexact_ops.patch.hf covers."""
    base = model.base_model

    def run(batch: Batch) -> Tensor:
        out = base(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            return_dict=True,
            vexact_paged=batch.paged,
        )
        return out.last_hidden_state[0]

    return run
