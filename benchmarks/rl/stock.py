"""For verl's own side of rl_step.py: flash attention 2 as torch has it.

verl builds its actor with transformers' "flash_attention_2", which needs a package that is compiled for each version of
torch, or a hub. torch brings the same kernels, forward and backward, over packed rows: here they are an attention of
transformers' by the name "torch_varlen". verl imports this module where it is named by model.external_lib. As
flash-attn 2 under transformers it is told where sequences begin by the positions; that is looked up once a forward.
"""

import weakref

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "torch_varlen"
_found: tuple = (lambda: None, None, 0)


def sequences(position_ids: Tensor) -> tuple[Tensor, int]:
    """Of one packed row: where its sequences begin and the last one ends, and how long the longest is."""
    global _found
    if _found[0]() is not position_ids:
        flat = position_ids.flatten()
        begin = (flat == 0).nonzero()[:, 0]
        ends = torch.cat((begin, begin.new_tensor([len(flat)]))).int()
        _found = weakref.ref(position_ids), ends, int(ends.diff().max())
    return _found[1:]


def kernel(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None) -> Tensor:
    """query (T, Hq, D), key and value (T, Hk, D) -> (T, Hq, D); causal in each sequence"""
    places = ends, ends, longest, longest
    return torch.ops.aten._flash_attention_forward(query, key, value, *places, 0.0, True, False, scale=scale)[0]


def attention(module, query, key, value, attention_mask, scaling=None, position_ids=None, dropout=0.0, **options):
    """query (1, Hq, T, D), key and value (1, Hk, T, D) -> (1, T, Hq, D)"""
    if attention_mask is not None or position_ids is None or dropout or options.get("sliding_window"):
        raise ValueError(f"{NAME}: expected packed rows and their positions: no mask, no dropout, no window")
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    return kernel(query, key, value, *sequences(position_ids), scaling)[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
