"""For verl's own side of rl_step.py and ulysses.py: flash attention 2 as torch has it.

verl builds its actor with transformers' "flash_attention_2", which needs a package that is compiled for each version of
torch, or a hub. torch brings the same kernels, forward and backward, over packed rows: here they are an attention of
transformers' by the name "torch_varlen". verl imports this module where it is named by model.external_lib. As
flash-attn 2 under transformers it is told where sequences begin by the positions; that is looked up once a forward.
Under Ulysses heads are exchanged for rows before it and back behind it by verl's own functions, as verl does around
flash-attn.
"""

import functools
import weakref

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from verl.utils import ulysses

NAME = "torch_varlen"
_found: tuple = (lambda: None, None, 0)


def sequences(position_ids: Tensor, ranks: int = 1) -> tuple[Tensor, int]:
    """Of one packed row, of which each rank of Ulysses has a part: where its sequences begin and the last one ends, and
    how long the longest is."""
    global _found
    if _found[0]() is not position_ids:
        flat = position_ids.flatten()
        if ranks > 1:
            parts = [torch.empty_like(flat) for _ in range(ranks)]
            torch.distributed.all_gather(parts, flat, group=ulysses.get_ulysses_sequence_parallel_group())
            flat = torch.cat(parts)
        begin = (flat == 0).nonzero()[:, 0]
        ends = torch.cat((begin, begin.new_tensor([len(flat)]))).int()
        _found = weakref.ref(position_ids), ends, int(ends.diff().max())
    return _found[1:]


def kernel(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None) -> Tensor:
    """query (T, Hq, D), key and value (T, Hk, D) -> (T, Hq, D); causal in each sequence"""
    if not query.is_cuda:  # slower, and for tests alone
        parts = zip(*(x.transpose(0, 1)[None].split(ends.diff().tolist(), 2) for x in (query, key, value)))
        attend = functools.partial(scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=True)
        return torch.cat([attend(*part) for part in parts], 2)[0].transpose(0, 1)
    places = ends, ends, longest, longest
    return torch.ops.aten._flash_attention_forward(query, key, value, *places, 0.0, True, False, scale=scale)[0]


def attention(module, query, key, value, attention_mask, scaling=None, position_ids=None, dropout=0.0, **options):
    """query (1, Hq, T, D), key and value (1, Hk, T, D) -> (1, T, Hq, D)"""
    if attention_mask is not None or position_ids is None or dropout or options.get("sliding_window"):
        raise ValueError(f"{NAME}: expected packed rows and their positions: no mask, no dropout, no window")
    query, key, value = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    ranks = ulysses.get_ulysses_sequence_parallel_world_size()
    if ranks > 1:
        repeats = max(ranks // key.shape[1], 1)
        key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
        query, key, value = (ulysses.gather_seq_scatter_heads(x, seq_dim=0, head_dim=1) for x in (query, key, value))
    out = kernel(query, key, value, *sequences(position_ids, ranks), scaling)
    if ranks > 1:
        out = ulysses.gather_heads_scatter_seq(out, head_dim=1, seq_dim=0)
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
