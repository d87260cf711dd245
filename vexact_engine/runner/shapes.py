"""What a model's config says of it: the sizes of its cache, its vocabulary, how long a text it was made for."""

from typing import NamedTuple

import torch


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
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, torch.nn.Embedding):
        got = type(embedding).__name__
        raise TypeError(f"Engine: model: the embedding of the {type(model).__name__} is a {got}, expected an Embedding")
    return embedding.weight.shape[0]


def max_positions(model: torch.nn.Module) -> int | None:
    """How long a text the model was made for; None where it does not say. With YaRN that is its factor times the length
    before it, which model cards have one write down beside max_position_embeddings as it was."""
    config = decoder_config(model)
    said = getattr(config, "max_position_embeddings", None)
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *given.values()):  # of all layers, or by their kind
        if not isinstance(rope, dict) or rope.get("rope_type") != "yarn":
            continue
        before = rope.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        stretched = int(before * rope["factor"]) if before and rope.get("factor") else 0
        said = max(said or 0, stretched) or None
    return said
