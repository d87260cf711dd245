"""Latent attention kept latent: what is attended to is the compressed key, and the value is a part of it.

DeepSeek's attention makes each head's keys and values from one compressed row c per token: k = W_k c next to a rotary
part that all heads share, v = W_v c. As q . (W_k c) = (W_k^T q) . c, queries can go to the compressed space instead,
and a head's sum of c can come out of it through W_v: one key head of size kv_lora_rank + rope, whose first kv_lora_rank
are the value. Training and decode both do so here, with one order of operations, so their bits agree; but they are not
those of the expanded form, so it is an option that both sides declare.

Its price and gain per layer (Moonlight: 16 heads, 512 + 64 against 192 and 128): a query meets a key with 1,088
multiply-adds a head instead of 320, and a cached token takes 576 numbers instead of 5,120. With 512 + 64 numbers in 16
bits on SM90 the attention is a kernel of its own (csrc/attention/flash_latent.cuh) that reads a cached key once for up
to 64 heads, in training and decode alike; its gradients are the Triton kernels'.
"""

import inspect
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

import vexact_ops as vx

from .batch import attend
from .forwards import one_cache
from .pieces import TURNS, NotCovered, agree, random, rope_function, small_linear, twin
from .whole import by_heads

_PARTS = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
_SMALL = {
    "num_heads": 3,
    "q_lora_rank": 7,
    "kv_lora_rank": 6,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 9,
    "v_head_dim": 8,
}


def is_latent(module: nn.Module) -> bool:
    if not (set(module._modules) >= _PARTS and set(_SMALL) <= set(vars(module))):
        return False
    return getattr(module.kv_b_proj, "bias", None) is None


def latent_forward(module: nn.Module, tried: dict) -> tuple[Callable, str]:
    """The aligned latent forward of an attention module, once it is known to be the same function as its own; `tried`
    keeps what is known of modules that are alike."""
    if not isinstance(module.kv_b_proj, nn.Linear):
        raise NotCovered(
            f"latent: its kv_b_proj is a {type(module.kv_b_proj).__name__}, of which no one weight is read"
        )
    scope = inspect.unwrap(type(module).forward).__globals__
    turn = TURNS[1] if getattr(module.config, "rope_interleave", False) else TURNS[0]
    key = type(module), turn, module.q_lora_rank is None
    if key not in tried:
        tried[key] = _check(module, scope, turn)
    if tried[key]:
        raise NotCovered(tried[key])
    return _forward(vx.bmm, rope_function(scope[turn]), attend), "bmm, attention_varlen, attention_paged, rope"


def _forward(bmm: Callable, turn: Callable, attend: Callable) -> Callable:
    def latent_forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, cache=None, **kwargs
    ):
        cache = one_cache(cache, past_key_values)
        batch, length = hidden_states.shape[:2]
        rank, nope, rope = self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim
        if self.q_lora_rank is None:
            q = self.q_proj(hidden_states)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q, q_turned = q.view(batch, length, -1, nope + rope).transpose(1, 2).split((nope, rope), -1)
        c, k_turned = self.kv_a_proj_with_mqa(hidden_states).split((rank, rope), -1)
        c, k_turned = self.kv_a_layernorm(c)[:, None], k_turned[:, None]
        q_turned, k_turned = turn(q_turned, k_turned, *position_embeddings)
        if cache is not None:
            c, k_turned = cache.update(c, k_turned, self.layer_idx)
        heads = q.shape[1]
        product = by_heads(bmm, self.kv_b_proj) if bmm is vx.bmm else bmm
        w_k, w_v = self.kv_b_proj.weight.view(heads, -1, rank).split((nope, self.v_head_dim), 1)
        q = product(q.transpose(0, 1).reshape(heads, -1, nope), w_k).view(heads, batch, length, rank).transpose(0, 1)
        key = torch.cat((c, k_turned), -1)
        query = torch.cat((q, q_turned), -1)
        dropout = self.attention_dropout if self.training else 0.0
        mixed, _ = attend(
            self, query, key, key[..., :rank], attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        mixed = mixed.reshape(-1, heads, rank).transpose(0, 1)
        out = product(mixed, w_v.transpose(1, 2)).transpose(0, 1).reshape(batch, length, -1)
        return self.o_proj(out), None

    return latent_forward


def _plain_attention(module, q: Tensor, k: Tensor, v: Tensor, mask=None, scaling: float = 1.0, **kwargs):
    k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) * scaling).masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), None


class _Plain:
    def get_interface(self, name, default=None):
        return _plain_attention


def _check(module: nn.Module, scope: dict, turn: str) -> str:
    """Why the module's own forward is another function than the latent one, or ""; on a small float64 twin."""
    small = dict(_SMALL)
    heads, rank, nope, rope, v_dim = (
        small[n] for n in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    hidden = 10
    modules = {
        "kv_a_proj_with_mqa": small_linear(hidden, rank + rope, 1),
        "kv_a_layernorm": twin(module.kv_a_layernorm, parameters={"weight": random(rank, seed=2)}),
        "kv_b_proj": small_linear(rank, heads * (nope + v_dim), 3),
        "o_proj": small_linear(heads * v_dim, hidden, 4),
    }
    if module.q_lora_rank is None:
        small["q_lora_rank"] = None
        modules["q_proj"] = small_linear(hidden, heads * (nope + rope), 5)
    else:
        modules["q_a_proj"] = small_linear(hidden, small["q_lora_rank"], 5)
        modules["q_a_layernorm"] = twin(
            module.q_a_layernorm, parameters={"weight": random(small["q_lora_rank"], seed=6)}
        )
        modules["q_b_proj"] = small_linear(small["q_lora_rank"], heads * (nope + rope), 7)
    tried = twin(module, modules)
    tried.__dict__.update(small, hidden_size=hidden, training=False)
    original = inspect.unwrap(type(module).forward)
    own = types.FunctionType(
        original.__code__, {**scope, "ALL_ATTENTION_FUNCTIONS": _Plain()}, original.__name__, original.__defaults__,
        original.__closure__,
    )  # fmt: skip
    own.__kwdefaults__ = original.__kwdefaults__
    angle = random(2, 6, rope // 2, seed=8)
    tables = tuple(torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    x = 2 * random(2, 6, hidden, seed=9)
    try:
        with torch.no_grad():
            expected = own(tried, x, tables, None)[0]
            got = _forward(torch.bmm, scope[turn], _plain_attention)(tried, x, tables, None)[0]
    except Exception as error:
        return f"its attention has no latent form that aligned ops compute: a small one raises {type(error).__name__}"
    return "" if agree(got, expected, 1e-5) else "its attention has no latent form that aligned ops compute"
