"""A decoder of the Llama kind as a flat loop over aligned ops, with the bits of its patched Hugging Face forward.

The modules' own Python costs more than the kernels of a small model. Here a layer is ten calls: q, k and v are one
product, gate and up are one, and each residual sum is part of the norm that follows. Rows of a concatenated weight are
independent, so nothing of that changes a bit; and it is not taken on faith: `fuse` compares the two forwards byte for
byte before it hands this one out.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vexact_ops as vx
from vexact_ops.testing import same_bits

from .batch import Batch, plain

log = logging.getLogger(__name__)

_LLAMA = frozenset({"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"})
_SANDWICH = _LLAMA | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})


@dataclass(frozen=True)
class Family:
    """What tells one family from another, by the classes that transformers gives it."""

    layer: frozenset[str] = _LLAMA
    attention: frozenset[str] = _ATTENTION
    style: str = "llama"
    activation: str = "silu"


_QWEN3 = Family(attention=_ATTENTION | {"q_norm", "k_norm"})
_DENSE = frozenset({"gate_proj", "up_proj", "down_proj"})
_MIXTURE = frozenset({"gate", "experts"})
_GEMMA2 = Family(_SANDWICH, style="gemma", activation="gelu_tanh")
FAMILIES = {
    "transformers.models.llama.modeling_llama.LlamaForCausalLM": Family(),
    "transformers.models.mistral.modeling_mistral.MistralForCausalLM": Family(),
    "transformers.models.qwen2.modeling_qwen2.Qwen2ForCausalLM": Family(),
    "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM": _QWEN3,
    "transformers.models.gemma2.modeling_gemma2.Gemma2ForCausalLM": _GEMMA2,
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeForCausalLM": _QWEN3,
    "transformers.models.mixtral.modeling_mixtral.MixtralForCausalLM": Family(),
}


def fuse(
    model: nn.Module, patched: Callable, cache_shape: tuple, kv_segment: int | None
) -> tuple[Callable | None, str]:
    """The fused forward and "", or None and the reason why this model keeps `patched`.

    Weights that are computed together are moved into one storage, each parameter a view of its rows: memory stays what
    it was, and writing into a parameter is writing into what is computed with.
    """
    family = FAMILIES.get(f"{type(model).__module__}.{type(model).__qualname__}")
    if family is None:
        return None, f"{type(model).__name__} is no family with a fused forward"
    reason = _differs(model, family)
    if reason:
        return None, reason
    decoder = _Decoder(model, family, kv_segment)
    if not _same_bits(model, decoder, patched, cache_shape):
        reason = f"its bits are not those of the patched {type(model).__name__}"
        log.warning("fused forward: not used: %s", reason)
        return None, reason
    return decoder, ""


def _differs(model: nn.Module, family: Family) -> str:
    """What this model has that the family's loop does not compute, or ""."""
    base = model.base_model
    if {name for name, _ in base.named_children()} != {"embed_tokens", "layers", "norm", "rotary_emb"}:
        return "its decoder has other parts"
    for layer in base.layers:
        if {name for name, _ in layer.named_children()} != family.layer:
            return "a layer has other parts"
        if {name for name, _ in layer.self_attn.named_children()} != family.attention:
            return "an attention module has other parts"
        parts = {name for name, _ in layer.mlp.named_children()}
        if parts != _MIXTURE and not parts >= _DENSE:
            return "a feed-forward block has other parts"
        for group in _groups(layer):
            if len({p.bias is None for p in group}) != 1 or len({p.weight.dtype for p in group}) != 1:
                return "projections that belong together differ in kind"
    return ""


def _groups(layer: nn.Module) -> tuple[tuple[nn.Linear, ...], ...]:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = attention.q_proj, attention.k_proj, attention.v_proj
    return (qkv, (mlp.gate_proj, mlp.up_proj)) if hasattr(mlp, "gate_proj") else (qkv,)


@torch.no_grad()
def join(parameters: Sequence[nn.Parameter]) -> Tensor:
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


def _eps(norm: nn.Module) -> float:
    return next(getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name))


class _Layer:
    """One layer's weights and options, read once: parameters are only ever written in place."""

    def __init__(self, layer: nn.Module, config, family: Family):
        attention, mlp = layer.self_attn, layer.mlp
        qkv, *gate_up = _groups(layer)
        self.qkv, self.qkv_bias = _join_all(qkv)
        self.experts = None
        if gate_up:
            self.gate_up, self.gate_up_bias = _join_all(*gate_up)
            self.down, self.down_bias = mlp.down_proj.weight, mlp.down_proj.bias
        else:  # two patched modules: nothing between them is left out but a view
            self.router, self.experts = mlp.gate, mlp.experts
        self.o, self.o_bias = attention.o_proj.weight, attention.o_proj.bias
        self.dim = attention.head_dim
        self.q_rows, self.k_rows = attention.q_proj.weight.shape[0], attention.k_proj.weight.shape[0]
        self.q_norm = self.k_norm = None
        if "q_norm" in family.attention:
            self.q_norm, self.k_norm = (n.weight for n in (attention.q_norm, attention.k_norm))
            self.qk_eps = _eps(attention.q_norm), _eps(attention.k_norm)
        layer_types = getattr(config, "layer_types", None)
        windowed = layer_types is None or layer_types[attention.layer_idx] == "sliding_attention"
        self.attention = {
            "scale": attention.scaling,
            "window": getattr(config, "sliding_window", None) if windowed else None,
            "softcap": getattr(attention, "attn_logit_softcapping", None),
        }
        before = layer.input_layernorm
        self.before, self.before_eps = before.weight, _eps(before)
        middle, self.after_attention, self.after_mlp = layer.post_attention_layernorm, None, None
        if family.layer is _SANDWICH:
            self.after_attention, self.after_attention_eps = middle.weight, _eps(middle)
            after = layer.post_feedforward_layernorm
            self.after_mlp, self.after_mlp_eps = after.weight, _eps(after)
            middle = layer.pre_feedforward_layernorm
        self.middle, self.middle_eps = middle.weight, _eps(middle)


def _join_all(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    weight = join([linear.weight for linear in linears])
    return weight, None if linears[0].bias is None else join([linear.bias for linear in linears])


class _Decoder:
    """batch -> (T, H) final hidden states."""

    def __init__(self, model: nn.Module, family: Family, kv_segment: int | None):
        base = model.base_model
        self.embed, self.rotary, self.kv_segment = base.embed_tokens, base.rotary_emb, kv_segment
        self.style, self.activation = family.style, family.activation
        self.layers = [_Layer(layer, base.config, family) for layer in base.layers]
        self.norm, self.eps = base.norm.weight, _eps(base.norm)

    def __call__(self, batch: Batch) -> Tensor:
        style, activation, segment = self.style, self.activation, self.kv_segment
        paged = batch.paged
        table = paged.block_table, paged.context_lens, paged.cu_seqlens_q, paged.max_seqlen_q
        x, residual = self.embed(batch.input_ids), None
        cos, sin = (part[0] for part in self.rotary(x[None], batch.positions[None]))
        tokens = x.shape[0]
        for layer, k_cache, v_cache in zip(self.layers, paged.k_caches, paged.v_caches):
            if residual is None:
                h, residual = vx.rmsnorm(x, layer.before, layer.before_eps, style=style), x
            else:
                h, residual = vx.rmsnorm(x, layer.before, layer.before_eps, residual, style=style)
            heads = vx.linear(h, layer.qkv, layer.qkv_bias).view(tokens, -1, layer.dim)
            q_heads, k_heads = layer.q_rows // layer.dim, layer.k_rows // layer.dim
            q, k = heads[:, :q_heads], heads[:, q_heads : q_heads + k_heads]
            if layer.q_norm is not None:
                q = vx.rmsnorm(q, layer.q_norm, layer.qk_eps[0], style=style)
                k = vx.rmsnorm(k, layer.k_norm, layer.qk_eps[1], style=style)
            q = vx.rope_kv_store(q, k, heads[:, q_heads + k_heads :], cos, sin, k_cache, v_cache, paged.slot_mapping)
            x = vx.attention_paged(q, k_cache, v_cache, *table, **layer.attention, kv_segment=segment)
            x = vx.linear(x.view(tokens, -1), layer.o, layer.o_bias)
            if layer.after_attention is not None:
                x = vx.rmsnorm(x, layer.after_attention, layer.after_attention_eps, style=style)
            h, residual = vx.rmsnorm(x, layer.middle, layer.middle_eps, residual, style=style)
            if layer.experts is None:
                h = vx.silu_mul(vx.linear(h, layer.gate_up, layer.gate_up_bias), activation=activation)
                x = vx.linear(h, layer.down, layer.down_bias)
            else:
                _, weights, ids = layer.router(h)
                x = layer.experts(h, ids, weights)
            if layer.after_mlp is not None:
                x = vx.rmsnorm(x, layer.after_mlp, layer.after_mlp_eps, style=style)
        return vx.rmsnorm(x, self.norm, self.eps, residual, style=style)[0]


@torch.no_grad()
def _same_bits(model: nn.Module, fused: Callable, patched: Callable, cache_shape: tuple) -> bool:
    """Both forwards on a prompt, and on a chunk that ends behind every window; layers share one cache of noise."""
    layers, heads, *dims = cache_shape[:4]
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(0)
    windows = {layer.attention["window"] or 0 for layer in fused.layers}
    limit = getattr(model.config, "max_position_embeddings", None) or 1 << 20
    context = max(1, min(max(windows) + 70, limit))
    prompt, chunk, page = min(5, limit), min(3, context), 16
    pages = -(-context // page)
    cache = [
        torch.randn(pages + 1, page, heads, dim, dtype=torch.float32, generator=generator).to(first.device, first.dtype)
        for dim in dims
    ]
    ids = torch.randint(model.get_input_embeddings().weight.shape[0], (prompt + chunk,), generator=generator)
    spans, tables = [(0, prompt), (context - chunk, context)], [[pages], range(pages)]
    outs = []
    for forward in (patched, fused):
        k, v = (part.clone() for part in cache)
        outs.append((forward(plain(([k] * layers, [v] * layers), tables, spans, ids)), k, v))
    return all(same_bits(a, b) for a, b in zip(*outs))
