"""How a model is run on a Batch: through its patched Hugging Face forward, or a fused path with the same bits."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

import vexact_ops as vx

from ..batch import Batch
from .fused import fuse

Forward = Callable[[Batch, Sequence[Tensor], Sequence[Tensor]], Tensor]


def decoder_config(model: torch.nn.Module):
    """The config that describes the decoder, where a composite one wraps it."""
    return model.config.get_text_config(decoder=True)


class CacheShape(NamedTuple):
    """The KV cache of a model: its keys and values may differ in size, or values be the first part of the keys."""

    layers: int
    heads: int
    k_dim: int
    v_dim: int
    shared: bool = False

    @property
    def per_token(self) -> int:
        """Elements of one token, all layers together."""
        return self.layers * self.heads * (self.k_dim if self.shared else self.k_dim + self.v_dim)


def cache_shape(model: torch.nn.Module, *, latent: bool = False) -> CacheShape:
    """latent: of a model that is patched with latent=True."""
    config = decoder_config(model)
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    if latent:
        return CacheShape(layers, 1, config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank, shared=True)
    if getattr(config, "kv_lora_rank", None):  # every head's keys and values, expanded
        return CacheShape(layers, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return CacheShape(layers, getattr(config, "num_key_value_heads", None) or heads, dim, dim)


def vocab_size(model: torch.nn.Module) -> int:
    return model.get_input_embeddings().weight.shape[0]


def max_positions(model: torch.nn.Module) -> int | None:
    """How long a text the model was made for; None where it does not say."""
    return getattr(decoder_config(model), "max_position_embeddings", None)


def forward(model: torch.nn.Module, *, kv_segment: int | None = None) -> tuple[Forward, str]:
    """A function (batch, k_caches, v_caches) -> (T, H) final hidden states for a patched model, and how it computes:
    "fused", or "patched: " and why it is not fused. Both have the same bits."""
    plain = patched_forward(model)
    fused, reason = fuse(model, plain, cache_shape(model), kv_segment)
    return (plain, f"patched: {reason}") if fused is None else (fused, "fused")


def patched_forward(model: torch.nn.Module) -> Forward:
    """The decoder's own Python, on aligned ops: any family that vexact_ops.patch.hf covers."""
    base = model.base_model

    def run(batch: Batch, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor]) -> Tensor:
        paged = vx.patch.PagedBatch(
            k_caches,
            v_caches,
            batch.slot_mapping,
            batch.block_table,
            batch.context_lens,
            batch.cu_seqlens_q,
            batch.max_seqlen_q,
        )
        out = base(
            input_ids=batch.input_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            return_dict=True,
            vexact_paged=paged,
        )
        return out.last_hidden_state[0]

    return run
