"""Gated delta nets, tried like all other pieces (see pieces.py): the layer, and the gated norm that it ends with.

A layer projects a token to queries, keys and values (which a short convolution mixes with those of the tokens before),
a gate z, and two numbers a value head from which come how fast its state decays and how much of a value is written. Its
own forward knows no packed rows, and computes a prompt and a token that follows it in two ways; here both are one op's.
"""

import functools
import inspect
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vexact_ops as vx

from ..gated_delta.op import WIDEST
from .batch import Asked, Layout, given
from .description import State, delta_state
from .forwards import one_cache
from .pieces import NotCovered, agree, class_of, is_linear, random, run_stock, small_linear, twin
from .ulysses import Ulysses

_NARROWEST = 16  # heads, as the op says
_SPELT = {"swish": "silu"}  # of transformers' activations, who calls one otherwise than the op does


class Form(NamedTuple):
    """What a class calls its parts: what reads the hidden states (`_projected` says of what), the norm, the output."""

    reads: tuple[str, ...]
    norm: str = "norm"
    out: str = "out_proj"


APART = Form(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"))
BY_HEAD = Form(("in_proj_qkvz", "in_proj_ba"))
EACH = Form(("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_norm", "o_proj")
FORMS = APART, BY_HEAD, EACH
_SIZES = {"num_v_heads": 4, "num_k_heads": 2, "head_k_dim": 6, "head_v_dim": 5, "conv_kernel_size": 4}
_HIDDEN = 7


def is_delta(module: nn.Module) -> bool:
    names, numbers = set(module._modules), {"A_log", "dt_bias"} <= set(module._parameters)
    parts = any({"conv1d", form.norm, form.out} <= names for form in FORMS)
    return parts and numbers and set(_SIZES) <= set(vars(module))


def is_packed(module: nn.Module) -> bool:
    """Whether it is VeOmni's, which takes packed rows, and computes them by kernels that it is given."""
    return "cu_seq_lens_q" in inspect.signature(inspect.unwrap(class_of(module).forward)).parameters


def form_of(module: nn.Module) -> Form:
    form = next((form for form in FORMS if {*form.reads, form.norm, form.out} <= set(module._modules)), None)
    if form is None or not all(is_linear(module._modules[name]) for name in (*form.reads, form.out)):
        raise NotCovered("a gated delta net with projections of another form")
    return form


def is_doubled(module: nn.Module) -> bool:
    """Whether what is written is weighed from 0 to 2, so that a state's eigenvalues go down to -1."""
    return bool(getattr(module, "allow_neg_eigval", False))


def delta_forward(module: nn.Module, tried: dict) -> tuple[Callable, str]:
    """The aligned forward of a gated delta net, once it is known to be the same function as its own; `tried` keeps what
    is known of modules that are alike."""
    form, doubled = form_of(module), is_doubled(module)
    parts, norm = module._modules.keys() - {"act"}, module._modules[form.norm]  # an act that some have and do not call
    if parts != {*form.reads, "conv1d", form.norm, form.out} or len(module._parameters) != 2:
        raise NotCovered("a gated delta net with parts that no aligned op covers")
    if not is_gated_norm(norm):
        raise NotCovered(f"a gated delta net that ends with a {type(norm).__name__}")
    conv = module.conv1d
    if not isinstance(conv, nn.Conv1d) or "forward" in conv.__dict__ or type(conv).forward is not nn.Conv1d.forward:
        raise NotCovered("its convolution has a forward of its own")
    if _SPELT.get(module.activation, module.activation) != "silu":
        raise NotCovered(f"its activation is {module.activation!r}, expected 'silu' (hidden_act)")
    key = class_of(module), form, doubled, conv.bias is None, module.activation
    if key not in tried:
        try:
            _check(module, form)
            tried[key] = ""
        except NotCovered as reason:
            tried[key] = str(reason)
    if tried[key]:
        raise NotCovered(tried[key])
    return _delta_forward(form, doubled), "causal_conv, delta_gates, gated_delta_varlen, gated_delta_paged"


def _check_widths(module: nn.Module) -> None:
    for kind in ("key", "value"):
        if not _NARROWEST <= (size := getattr(module, f"head_{kind[0]}_dim")) <= WIDEST:
            raise NotCovered(f"its linear_{kind}_head_dim is {size}, expected {_NARROWEST} to {WIDEST}")


@functools.cache
def _delta_forward(form: Form, doubled: bool) -> Callable:
    def delta_forward(
        self,
        hidden_states,
        cache=None,
        attention_mask=None,
        cache_params=None,
        cu_seq_lens_q=None,
        vexact_layout=None,
        **kwargs,
    ):
        layout = given(cu_seq_lens_q) if vexact_layout is None else vexact_layout
        if layout is None:
            raise RuntimeError("vexact: call the patched model, not its layers: its forward describes the batch")
        if layout.seen is not None:
            _check_widths(self)
            layout.seen.append(Asked(self, {}, memory_of(self)))
        x = hidden_states.flatten(0, 1)
        if layout.q_index is not None:
            x = x[layout.q_index]
        qkv, z, b, a = _projected(self, x, form)
        weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        decay, ulysses = (self.A_log, self.dt_bias), layout.ulysses
        if ulysses is not None:
            qkv, b, a, weight, bias, decay = _to_heads(self, ulysses, qkv, b, a, weight, bias)
        slots, step, longest, singles = _remembered(self, layout, one_cache(cache, cache_params), x)
        activation = _SPELT.get(self.activation, self.activation)
        if slots is None:
            qkv = vx.causal_conv(qkv, weight, bias, cu_seqlens=layout.cu_q, activation=activation)
        else:
            state, taps, *opened = slots
            qkv = vx.causal_conv_paged(qkv, weight, bias, taps, *step, activation=activation, singles=singles)
        share = 1 if ulysses is None else ulysses.size
        q, k, v = qkv.split([dim // share for dim in (self.key_dim, self.key_dim, self.value_dim)], -1)
        q, k = (t.unflatten(1, (-1, self.head_k_dim)) for t in (q, k))
        v = v.unflatten(1, (-1, self.head_v_dim))
        g, beta = vx.delta_gates(a, b, *decay)
        if doubled:
            beta = beta * 2.0
        if slots is None:
            out = vx.gated_delta_varlen(q, k, v, g, beta, layout.cu_q)
        else:
            out = vx.gated_delta_paged(q, k, v, g, beta, state, *opened, *step, longest, singles=singles)
        if ulysses is not None:
            out = ulysses.to_rows(self.num_k_heads, self.num_v_heads, out)
        out = self._modules[form.out](self._modules[form.norm](out, z).flatten(1))
        if layout.q_index is not None:
            full = out.new_zeros(hidden_states.shape[:2].numel(), out.shape[1])
            out = full.index_copy(0, layout.q_index, out)
        return out.view(*hidden_states.shape[:2], -1)

    return delta_forward


def _to_heads(module: nn.Module, ulysses: Ulysses, qkv: Tensor, b: Tensor, a: Tensor, weight: Tensor, bias):
    """Whole sequences of this rank's heads, and what of the weights is theirs."""
    keys, values = module.num_k_heads, module.num_v_heads
    if keys % ulysses.size:
        raise ValueError(
            f"sequence_parallel: got {ulysses.size} ranks for a gated delta net of {keys} key heads, expected a divisor"
        )
    dims, heads = (module.key_dim, module.key_dim, module.value_dim), (keys, keys, values)
    q, k, v = (t.unflatten(1, (count, -1)) for t, count in zip(qkv.split(dims, -1), heads))
    *qkv, b, a = (t.flatten(1) for t in ulysses.to_heads(keys, q, k, v, b[..., None], a[..., None]))
    own = ulysses.own(values, keys)

    def of_heads(channels: Tensor) -> Tensor:
        parts = (t.unflatten(0, (count, -1)) for t, count in zip(channels.split(dims), heads))
        return torch.cat([part[ulysses.own(count, keys)].flatten(0, 1) for part, count in zip(parts, heads)])

    bias = None if bias is None else of_heads(bias)
    return torch.cat(qkv, -1), b, a, of_heads(weight), bias, (module.A_log[own], module.dt_bias[own])


def _remembered(module: nn.Module, layout: Layout, cache, x: Tensor):
    """The tensors of the slots that a call goes on from; slots, lengths and offsets of its sequences; the most rows of
    one; how many have one row and come first. None for the slots: its sequences begin and end with it."""
    paged = layout.paged
    if paged is not None:
        step = paged.state_slots, paged.context_lens, paged.cu_seqlens_q
        return paged.states[next(layout.turns)], step, paged.max_seqlen_q, paged.singles
    if cache is None:
        return None, None, None, 0
    lengths = (layout.cu_q if layout.cu_k is None else layout.cu_k).diff()
    slots = torch.arange(len(lengths), dtype=torch.int32, device=x.device)
    kept = _cached(module, cache, len(lengths), x)
    return kept, (slots, lengths, layout.cu_q), layout.max_q, 0


def _cached(module: nn.Module, cache, batch: int, x: Tensor) -> list[Tensor]:
    """What a cache of transformers holds of this layer, a slot a row of the batch: as several recurrent states of it,
    so that what reorders or selects rows does so with these."""
    layer = cache.layers[module.layer_idx] if module.layer_idx < len(cache.layers) else None
    if not hasattr(layer, "recurrent_states"):
        raise ValueError(
            f"cache: its layer {module.layer_idx} is a {type(layer).__name__}, which keeps no states: expected one "
            "made for the model, as DynamicCache(config=model.config)"
        )
    kept = memory_of(module).slot()
    if layer.number_of_states != len(kept):
        if any(layer.has_previous_state.values()):
            raise ValueError("cache: got one that was begun without the patch, expected one of the patched model's")
        names = "conv_states", "is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state"
        for name, value in zip(names, (None, False, True, True)):
            setattr(layer, name, dict.fromkeys(range(len(kept)), value))
        layer.conv_kernel_size = dict.fromkeys(range(len(kept)), module.conv1d.weight.shape[-1])
        layer.number_of_states, layer.device, layer.dtype = len(kept), x.device, x.dtype
        layer.recurrent_states = {
            i: torch.zeros(batch, *part.shape, dtype=part.dtype or x.dtype, device=x.device)
            for i, part in enumerate(kept)
        }
    return list(layer.recurrent_states.values())


def memory_of(module: nn.Module) -> State:
    heads = module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim
    return delta_state(*heads, module.conv1d.weight.shape[-1])


def _projected(module: nn.Module, x: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(T, D) to qkv (T, C), z (T, Hv, dv), b and a (T, Hv)."""
    made = [module._modules[name](x) for name in form.reads]
    if form is BY_HEAD:
        made = by_head(*made, module.num_k_heads, module.head_k_dim, module.head_v_dim)
    elif form is EACH:
        made = [torch.cat(made[:3], -1), *made[3:]]
    qkv, z, b, a = made
    return qkv, z.unflatten(1, (-1, module.head_v_dim)), b, a


def by_head(qkvz: Tensor, ba: Tensor, heads: int, k_dim: int, v_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From columns that go key head by key head: of each its query, its key, its values and its gates; and its b, its
    a. Returns qkv, z, b and a."""
    shared = ba.shape[1] // (2 * heads)  # value heads of a key head
    q, k, v, z = qkvz.unflatten(1, (heads, -1)).split((k_dim, k_dim, shared * v_dim, shared * v_dim), -1)
    b, a = ba.unflatten(1, (heads, -1)).split((shared, shared), -1)
    return torch.cat([part.flatten(1) for part in (q, k, v)], 1), z.flatten(1), b.flatten(1), a.flatten(1)


def _check(module: nn.Module, form: Form) -> None:
    """Run its own forward on a small float64 twin: it has to compute what the ops do."""
    sizes = dict(_SIZES)
    hv, hk, dk, dv, taps = sizes.values()
    sizes |= {"hidden_size": _HIDDEN, "key_dim": hk * dk, "value_dim": hv * dv, "conv_dim": 2 * hk * dk + hv * dv}
    widths = {
        APART: (sizes["conv_dim"], hv * dv, hv, hv),
        BY_HEAD: (sizes["conv_dim"] + hv * dv, 2 * hv),
        EACH: (hk * dk, hk * dk, hv * dv, hv * dv, hv, hv),
    }[form]
    modules = {name: small_linear(_HIDDEN, width, i + 1) for i, (name, width) in enumerate(zip(form.reads, widths))}
    modules[form.out] = small_linear(hv * dv, _HIDDEN, 7)
    modules[form.norm] = twin(module._modules[form.norm], parameters={"weight": random(dv, seed=8)})
    channels, bias = sizes["conv_dim"], module.conv1d.bias is not None
    conv = torch.nn.utils.skip_init(
        nn.Conv1d, channels, channels, taps, groups=channels, padding=taps - 1, bias=bias, dtype=torch.float64
    )
    for i, parameter in enumerate(conv.parameters()):
        parameter.data.copy_(random(*parameter.shape, seed=9 + i))
    modules["conv1d"] = conv
    tried = twin(module, modules, {"A_log": random(hv, seed=11), "dt_bias": random(hv, seed=12)})
    tried.__dict__.update(sizes, training=False)
    x, forward = 2 * random(2, 9, _HIDDEN, seed=13), _torch_forward(type(module)).__get__(tried)
    expected = torch.stack([_plain(tried, row, form) for row in x])
    if is_packed(module):
        tried.__dict__.update(causal_conv1d_fn=_plain_conv, chunk_gated_delta_rule=_plain_delta)
        offsets = torch.arange(0, 19, 9, dtype=torch.int32)
        got = run_stock(tried, x.flatten(0, 1)[None], forward=functools.partial(forward, cu_seq_lens_q=offsets))
        got = got.view_as(expected)
    else:
        got = run_stock(tried, x, forward=forward)
    if not agree(got, expected):
        raise NotCovered("a gated delta net of another form than the aligned op's")


def _torch_forward(cls: type) -> Callable:
    """The class's forward on torch alone: where other libraries are installed, it calls theirs."""
    original = inspect.unwrap(cls.forward)
    scope = dict(original.__globals__)
    for name in original.__code__.co_names:
        if isinstance(scope.get(name), types.FunctionType):
            scope[name] = inspect.unwrap(scope[name])
    forward = types.FunctionType(original.__code__, scope, original.__name__, original.__defaults__)
    forward.__kwdefaults__ = original.__kwdefaults__
    return forward


@torch.no_grad()
def _plain(module: nn.Module, x: Tensor, form: Form) -> Tensor:
    """Token by token, of one sequence (T, H), as the ops' contracts have it."""
    qkv, z, b, a = _projected(module, x, form)
    whole = torch.tensor([0, len(x)], dtype=torch.int32)
    qkv, _ = _plain_conv(qkv[None], module.conv1d.weight.squeeze(1), module.conv1d.bias, "silu", cu_seqlens=whole)
    q, k, v = qkv.split((module.key_dim, module.key_dim, module.value_dim), -1)
    heads = module.num_v_heads // module.num_k_heads
    q, k = (t.unflatten(2, (-1, module.head_k_dim)).repeat_interleave(heads, 2) for t in (q, k))
    g = -module.A_log.exp() * nn.functional.softplus(a + module.dt_bias)
    v, beta = v.unflatten(2, (-1, module.head_v_dim)), b.sigmoid() * (2 if is_doubled(module) else 1)
    out, _ = _plain_delta(q, k, v, g[None], beta[None], cu_seqlens=whole, use_qk_l2norm_in_kernel=True)
    norm = module._modules[form.norm]
    return module._modules[form.out](_plain_norm(out[0], z, norm.weight, _eps(norm)).flatten(1))


def _plain_conv(x: Tensor, weight: Tensor, bias=None, activation=None, cu_seqlens=None, **_) -> tuple[Tensor, None]:
    """(1, T, C) of packed sequences."""
    made = []
    for rows in x[0].tensor_split(cu_seqlens[1:-1].tolist()):
        padded = torch.cat((rows.new_zeros(weight.shape[1] - 1, rows.shape[1]), rows))
        y = (padded.unfold(0, weight.shape[1], 1) * weight).sum(-1)
        y = y if bias is None else y + bias
        made.append(y * y.sigmoid() if activation in ("silu", "swish") else y)
    return torch.cat(made)[None], None


def _plain_delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens=None, use_qk_l2norm_in_kernel=False, **_
) -> tuple[Tensor, None]:
    """(1, T, Hv, dim) of packed sequences, a key for each value."""
    rows, starts = [], set(cu_seqlens.tolist())
    if use_qk_l2norm_in_kernel:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    for t, (one_q, one_k, one_v, decay, write) in enumerate(zip(q[0], k[0], v[0], g[0].to(q.dtype).exp(), beta[0])):
        if t in starts:
            state = q.new_zeros(v.shape[2], q.shape[3], v.shape[3])
        state = state * decay[:, None, None]
        written = write[:, None] * (one_v - torch.einsum("hkv,hk->hv", state, one_k))
        state = state + one_k[:, :, None] * written[:, None]
        rows.append(torch.einsum("hkv,hk->hv", state, one_q) * q.shape[3] ** -0.5)
    return torch.stack(rows)[None], None


# the gated norm


def is_gated_norm(module: nn.Module) -> bool:
    takes = list(inspect.signature(inspect.unwrap(class_of(module).forward)).parameters)
    return set(module._parameters) == {"weight"} and not module._modules and len(takes) == 3 and takes[2] == "gate"


def _eps(module: nn.Module) -> float:
    return getattr(module, _eps_name(module))


def _eps_name(module: nn.Module) -> str:
    name = next((name for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float)), None)
    if name is None:
        raise NotCovered("not a root-mean-square norm: it has no epsilon")
    return name


def _plain_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * (gate * gate.sigmoid())


def gated_norm_forward(module: nn.Module) -> Callable:
    """The aligned forward of a root-mean-square norm whose output is multiplied by a gate's silu."""
    name, n = _eps_name(module), module.weight.shape[0]
    weight, x, gate = random(n, seed=1), random(3, n, seed=2), random(3, n, seed=3)
    x[0] *= getattr(module, name) ** 0.5  # so small that epsilon shows
    got = run_stock(twin(module, parameters={"weight": weight}), x, gate)
    if not agree(got, _plain_norm(x, gate, weight, getattr(module, name))):
        raise NotCovered("not a gated root-mean-square norm that an aligned op computes")
    return _gated_norm_forward(name)


@functools.cache
def _gated_norm_forward(eps_name: str) -> Callable:
    def gated_norm_forward(self, hidden_states, gate):
        return vx.rmsnorm_gated(hidden_states, gate, self.weight, getattr(self, eps_name))

    return gated_norm_forward
