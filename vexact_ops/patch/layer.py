"""A decoder layer in one autograd node.

Of a small model's training step a GPU waits for Python most of the time: fourteen modules a layer, an op each with its
checks and its node. Where a description says that a layer is attention and a gated feed-forward block between norms and
residual sums, and nothing else is to run in it, its ops' kernels are called here one after the other, with the tensors
and in the order of the modules: outputs and gradients have the bits that those give. Where what follows attention is
another block (a mixture), the node ends before it, and its module is called. What stands in the way (hooks, adapters, a
cache, a padded batch, torch.compile, a profiler, another forward of a module) sends a call to the modules.

A layer's first call computes both ways and compares the bytes (contract: verify, then trust).
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

from .._core.operator import watched
from .._core.registry import OPERATORS
from ..attention.op import ROOM as ATTENTION
from ..linear.op import ROOM as LINEAR
from ..rmsnorm.op import ROOM as RMSNORM
from ..rope.op import ROOM as ROPE
from ..silu_mul.op import ACTIVATIONS
from ..silu_mul.op import ROOM as SILU_MUL
from . import forwards
from .batch import Layout
from .description import Attention, Block, Decoder, Layer, Linear, Mlp, Norm, NotDescribed

_LOG = logging.getLogger(__name__)
# What a layer is called with besides, none of which changes what is computed here; a cache comes by one of these names.
_IDLE = frozenset({"attention_mask", "position_ids", "use_cache"}) | forwards.PASSED
_CACHES = frozenset({*forwards.CACHES, forwards.LAYERS_CACHE})
_PLAIN = (nn.Parameter, Tensor)


@dataclass(frozen=True)
class Shape:
    """What is computed, beyond the weights. `heads`, `kv_heads` and `dim` are attention's."""

    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    options: tuple  # scale, causal, window, softcap
    kv_segment: int | None
    interleaved: bool
    eps: tuple[float, float, float, float]  # of the norms before attention, of q, of k, before the feed-forward block
    gemma: tuple[bool, bool, bool, bool]
    gelu: bool


# Whose weights and biases a node takes, in this order, and then those of norms; a bias and norms of heads may be None.
LINEARS = "q", "k", "v", "o", "gate", "up", "down"


class Fused:
    """What one layer's forward is replaced by.

    places   of each weight: the parameters of its module, and its name among them
    rest     the module of the block behind attention, where the node ends before it
    """

    def __init__(
        self,
        layer: nn.Module,
        shape: Shape,
        places: list[tuple[dict, str] | None],
        attention: nn.Module,
        rest: nn.Module | None,
    ):
        self.layer, self.shape, self.attention, self.rest = layer, shape, attention, rest
        self._places, self.stock = places, _stock(layer)
        self._inside = [(module, _forward_of(module)) for module in layer.modules() if module is not layer]
        self.verified: bool | None = None

    def weights(self, x: Tensor) -> list[Tensor | None] | None:
        """None where they are not plain tensors of one dtype (a shard of one, say)."""
        found = [None if place is None else place[0].get(place[1]) for place in self._places]
        for tensor, place in zip(found, self._places):
            if place is not None and (type(tensor) not in _PLAIN or tensor.dtype != x.dtype):
                return None
        return found

    def undisturbed(self) -> bool:
        """Nothing but the layer's own modules would run inside it."""
        if _has_any_global_hook() or _stock(self.layer) is not self.stock:
            return False
        if getattr(self.attention, "attention_dropout", 0.0):  # which attention refuses
            return False
        for module, forward in self._inside:
            if (
                module._forward_hooks
                or module._forward_pre_hooks
                or module._backward_hooks
                or module._backward_pre_hooks
                or _forward_of(module) is not forward
            ):
                return False
        return True

    def takes(self, x: Tensor, options: dict) -> bool:
        layout = options.get("vexact_layout")
        if layout is None or layout.cu_k is not None or layout.q_index is not None or layout.paged is not None:
            return False
        if layout.seen is not None or layout.ulysses is not None or type(x) not in _PLAIN:
            return False
        if layout.autocast and x.dtype == torch.float32:  # which attention refuses
            return False
        if x.dtype == torch.float16 and not x.is_cuda:  # no kernel of a CPU's takes it, and its op says so
            return False
        for name, value in options.items():
            if value is not None and name not in _IDLE and name not in ("vexact_layout", "position_embeddings"):
                return False
        return options.get("position_embeddings") is not None and not watched() and self.undisturbed()

    def __call__(self, x: Tensor, options: dict) -> Tensor | None:
        if self.verified is False or not self.takes(x, options):
            return None
        weights = self.weights(x)
        if weights is None:
            return None
        batch, length, _ = x.shape
        cos, sin = (t.expand(batch, length, -1).reshape(batch * length, -1) for t in options["position_embeddings"])
        layout = options["vexact_layout"]
        if self.verified is None and not self._verify(x, cos, sin, layout, weights, options):
            return None
        return self._whole(_Node.apply(x, cos, sin, layout, self.shape, *weights))

    def _whole(self, out: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        """The layer's output, of the node's."""
        if self.rest is None:
            return out
        normed, residual = out
        y = self.rest(normed)
        return residual + (y[0] if isinstance(y, tuple) else y)  # some have what their router said beside it

    def _verify(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout, weights: list, options: dict) -> bool:
        with torch.no_grad():
            expected = self.stock(self.layer, x, **options)
            got = self._whole(_Pass(x, cos, sin, layout, self.shape, weights).out)
        self.verified = isinstance(expected, Tensor) and _same(expected, got)
        if not self.verified:
            _LOG.info("patch.hf: %s: computed by its modules, whose output has other bits", type(self.layer).__name__)
        return self.verified


def _same(a: Tensor, b: Tensor) -> bool:
    as_numbers = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(as_numbers), b.contiguous().view(as_numbers))


def _forward_of(module: nn.Module) -> Callable:
    """Without a bound method, which is another one each time."""
    own = module.__dict__.get("forward")
    return type(module).forward if own is None else own


_CHECKPOINTING = "forward_with_checkpointing"  # from 5.24 on transformers has it around the forward of a layer's class


def _stock(layer: nn.Module) -> Callable:
    """The forward of its class, without transformers' checkpointing."""
    forward = type(layer).forward
    while forward.__code__.co_name == _CHECKPOINTING:
        forward = forward.__wrapped__
    return forward


def _own(layer: nn.Module) -> bool:
    """Whether the forward of its class is one that came with it, and nobody's around that."""
    where = _stock(layer).__globals__["__name__"]
    return where.startswith("transformers.") or where in {cls.__module__ for cls in type(layer).__mro__}


def _checkpoints(layer: nn.Module) -> bool:
    """Whether the forward of its class would be a checkpoint: of a layer's call it is one outside."""
    wrapped = type(layer).forward.__code__.co_name == _CHECKPOINTING
    return wrapped and layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()


def fuse(patch) -> list[nn.Module]:
    """Give each layer of the patched decoder that can be computed so its forward. Returns those layers."""
    try:
        found = list(_layers(patch))
    except NotDescribed as reason:
        _LOG.debug("patch.hf: no layer in one node: %s", reason)
        return []
    except Exception:  # a model that cannot be looked at so is computed by its modules, as it was
        _LOG.warning("patch.hf: layers are computed by their modules, with the same bits", exc_info=True)
        return []
    for fused in found:
        fused.layer.__dict__["forward"] = _forward(fused)
    return [fused.layer for fused in found]


def _layers(patch) -> Iterator[Fused]:
    described = patch.described_in_fp32()
    by_name = {
        f"{path}.{leaf}" if path else leaf: (module, leaf)
        for path, module in reversed(list(patch.model.named_modules(remove_duplicate=False)))
        for leaf, p in module._parameters.items()
        if p is not None
    }
    lists = [module for module in patch.base.modules() if isinstance(module, nn.ModuleList)]
    layers = [layer for each in lists for layer in each]
    for layer in described.layers:
        if (fused := _fused(described, layer, layers, by_name)) is not None:
            yield fused


def unfuse(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        if hasattr(layer.__dict__.get("forward"), "vexact_fused"):
            del layer.__dict__["forward"]


def _forward(fused: Fused) -> Callable:
    layer = fused.layer

    def inside(hidden_states: Tensor, **kwargs):
        out = fused(hidden_states, kwargs)
        return fused.stock(layer, hidden_states, **kwargs) if out is None else out

    def forward(hidden_states: Tensor, *args, **kwargs):
        if torch.compiler.is_compiling():
            return type(layer).forward(layer, hidden_states, *args, **kwargs)
        if not args and _checkpoints(layer):
            if not any(kwargs.get(name) for name in (*_CACHES, "use_cache")):  # of which the class says more
                return layer._gradient_checkpointing_func(functools.partial(inside, **kwargs), hidden_states)
        elif not args and (out := fused(hidden_states, kwargs)) is not None:
            return out
        return type(layer).forward(layer, hidden_states, *args, **kwargs)

    forward.vexact_fused = fused
    return forward


def _fused(described: Decoder, layer: Layer, modules: list[nn.Module], by_name: dict) -> Fused | None:
    shape = _shape(described, layer)
    if shape is None:
        return None
    (attention, other), whole = (block.part for block in layer.blocks), _gated(layer.blocks[1].part)
    parts: list = [getattr(attention, name) for name in LINEARS[:4]]
    parts += [getattr(other, name) if whole else None for name in LINEARS[4:]]
    norms: list[Norm | None] = [layer.blocks[0].before, attention.q_norm, attention.k_norm, layer.blocks[1].before]
    names = [name for part in parts for name in ((part.weight, part.bias) if part else (None, None))]
    names += [norm and norm.weight for norm in norms]
    if any(name is not None and name not in by_name for name in names):
        return None
    places = [None if name is None else by_name[name] for name in names]
    owned = {id(module._parameters[leaf]) for module, leaf in filter(None, places)}
    module, rest = _module_of(owned, modules, whole)
    if module is None or "forward" in module.__dict__ or not _own(module):
        return None
    inside = list(_own_modules(module, rest))
    if any(isinstance(m, nn.Dropout) or m._parameters.keys() - _leaves(m, places) for m in inside):
        return None
    if any(buffer is not None for m in inside for buffer in m._buffers.values()):
        return None
    takes = inspect.signature(_stock(module)).parameters
    if list(takes)[1:2] != ["hidden_states"] or "position_embeddings" not in takes:
        return None
    projections = [by_name[part.weight][0] for part in parts[:4]]
    around = [m for m in inside if all(p in list(m.children()) for p in projections)]
    if len(around) != 1:
        return None
    pairs = [None if place is None else (place[0]._parameters, place[1]) for place in places]
    return Fused(module, shape, pairs, around[0], rest)


def _module_of(owned: set[int], modules: list[nn.Module], whole: bool) -> tuple[nn.Module | None, nn.Module | None]:
    """The layer that has these parameters; and, where they are not the whole of it, its child that has all others."""
    for module in modules:
        found = {id(p) for p in module.parameters()}
        if whole and found == owned:
            return module, None
        if not whole and found > owned:
            rest = [child for child in module.children() if {id(p) for p in child.parameters()} == found - owned]
            return (module, rest[0]) if len(rest) == 1 else (None, None)
    return None, None


def _own_modules(layer: nn.Module, rest: nn.Module | None) -> Iterator[nn.Module]:
    """It, and those in it that are not the rest's."""
    beside = set() if rest is None else set(rest.modules())
    return (module for module in layer.modules() if module not in beside)


def _leaves(module: nn.Module, places: list) -> set[str]:
    known = {leaf for holder, leaf in filter(None, places) if holder is module}
    return known | {name for name, p in module._parameters.items() if p is None}


def _shape(described: Decoder, layer: Layer) -> Shape | None:
    """None where the layer is another one than what a node computes."""
    if len(layer.blocks) != 2 or len(described.rotary) != 1 or described.images is not None:
        return None
    if not all(_plain_block(block) for block in layer.blocks):
        return None
    attention, other = (block.part for block in layer.blocks)
    if not isinstance(attention, Attention):
        return None
    rope, norms = attention.rope, (attention.q_norm, attention.k_norm)
    if rope is None or rope.apart or attention.sinks or attention.v_factor or attention.out_norm or attention.gated:
        return None
    if (norms[0] is None) != (norms[1] is None) or attention.norms_after_rope:
        return None
    if any(norm is not None and (not _rms(norm) or norm.size != attention.dim) for norm in norms):
        return None
    if any(part.rows is not None for part in _linears(attention)):
        return None
    each = [layer.blocks[0].before, *norms, layer.blocks[1].before]
    return Shape(
        attention.heads, attention.kv_heads, attention.dim, attention.v_dim,
        (attention.scale, True, attention.window, attention.softcap), described.kv_segment, rope.interleaved,
        tuple(0.0 if norm is None else norm.eps for norm in each),
        tuple(norm is not None and norm.style == "gemma" for norm in each),
        _gated(other) and other.activation == "gelu_tanh",
    )  # fmt: skip


def _gated(part) -> bool:
    """Whether it is a feed-forward block that a node computes."""
    if not isinstance(part, Mlp) or part.gate is None or part.norm is not None or part.activation not in ACTIVATIONS:
        return False
    return all(linear.rows is None for linear in _linears(part))


def _plain_block(block: Block) -> bool:
    return block.before is not None and _rms(block.before) and block.after is None and block.factor is None


def _rms(norm: Norm) -> bool:
    return norm.style in ("llama", "gemma") and norm.weight is not None and norm.bias is None


def _linears(part) -> Iterator[Linear]:
    for name in LINEARS:
        if isinstance(one := getattr(part, name, None), Linear):
            yield one


_FORWARDS = {name: OPERATORS[name].impl for name in ("linear", "rmsnorm", "rope", "attention_varlen", "silu_mul")}
_BACKWARDS = {
    name: OPERATORS[name].impl
    for name in ("linear_dx", "linear_dweight", "linear_dbias", "rmsnorm_bwd", "attention_varlen_bwd", "silu_mul_bwd")
}
_linear, _rmsnorm, _rope, _attention, _silu_mul = _FORWARDS.values()
_dx, _dweight, _dbias, _norm_bwd, _attention_bwd, _silu_mul_bwd = _BACKWARDS.values()


class _Pass:
    """A forward, and what its backward needs.

    out   the layer's; without weights of a feed-forward block what that is called with, and what is added to its output
    """

    def __init__(self, hidden: Tensor, cos: Tensor, sin: Tensor, layout: Layout, shape: Shape, weights: list):
        wq, bq, wk, bk, wv, bv, wo, bo, wg, bg, wu, bu, wd, bd, norm, q_norm, k_norm, mlp_norm = weights
        device, dtype = hidden.device, hidden.dtype
        linear = LINEAR.resolve(device, None)
        norms, rope = RMSNORM.resolve(device, None), ROPE.resolve(device, None)
        attention, silu = ATTENTION.resolve(device, None), SILU_MUL.resolve(device, None)
        self.backends = linear, norms, rope, attention, silu
        x = hidden.flatten(0, 1)
        x = x if x.is_contiguous() else x.contiguous()
        n, _, rstd = _rmsnorm(x, norm, None, shape.eps[0], shape.gemma[0], norms)
        q = _linear(n, wq, bq, dtype, linear).view(-1, shape.heads, shape.dim)
        k = _linear(n, wk, bk, dtype, linear).view(-1, shape.kv_heads, shape.dim)
        v = _linear(n, wv, bv, dtype, linear).view(-1, shape.kv_heads, shape.v_dim)
        q_raw = k_raw = q_rstd = k_rstd = None
        if q_norm is not None:
            q_raw, k_raw = q.flatten(0, 1), k.flatten(0, 1)
            q_normed, _, q_rstd = _rmsnorm(q_raw, q_norm, None, shape.eps[1], shape.gemma[1], norms)
            k_normed, _, k_rstd = _rmsnorm(k_raw, k_norm, None, shape.eps[2], shape.gemma[2], norms)
            q, k = q_normed.view(q.shape), k_normed.view(k.shape)
        q, k = _rope(q, k, cos, sin, shape.interleaved, False, rope)
        cu = layout.cu_q
        a, lse = _attention(q, k, v, cu, None, layout.max_q, None, *shape.options, shape.kv_segment, attention)
        o = _linear(a.flatten(1), wo, bo, dtype, linear)
        m, h, m_rstd = _rmsnorm(o, mlp_norm, x, shape.eps[3], shape.gemma[3], norms)  # of x + o, rounded, which is h
        gate = up = s = None
        if wg is None:
            self.out: Tensor | tuple[Tensor, Tensor] = (m.view(hidden.shape), h.view(hidden.shape))
        else:
            gate, up = _linear(m, wg, bg, dtype, linear), _linear(m, wu, bu, dtype, linear)
            s = _silu_mul(gate, up, shape.gelu, silu)
            self.out = (h + _linear(s, wd, bd, dtype, linear)).view(hidden.shape)
        self.saved = x, n, rstd, q_raw, k_raw, q_rstd, k_rstd, q, k, v, a, lse, cu, h, m, m_rstd, gate, up, s, cos, sin


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin, layout, shape, *weights):
        done = _Pass(x, cos, sin, layout, shape, weights)
        ctx.shape, ctx.backends, ctx.size = shape, done.backends, x.shape
        ctx.save_for_backward(*done.saved, *weights)
        return done.out

    @staticmethod
    @once_differentiable
    def backward(ctx, *given):
        saved = ctx.saved_tensors  # once: under activation checkpointing they cannot be had twice
        x, n, rstd, q_raw, k_raw, q_rstd, k_rstd, q, k, v, a, lse, cu, h, m, m_rstd, gate, up, s, cos, sin = saved[:21]
        weights = saved[21:]
        wq, _, wk, _, wv, _, wo, _, wg, _, wu, _, wd, _, norm, q_norm, k_norm, mlp_norm = weights
        linear, norms, rope, attention, silu = ctx.backends
        shape, wanted = ctx.shape, ctx.needs_input_grad[5:]
        found: list[Tensor | None] = [None] * len(weights)

        def of_linear(at: int, dy: Tensor, into: Tensor, weight: Tensor) -> Tensor:
            """The gradient of what was projected; those of the weight and the bias are put in their places."""
            if wanted[at]:
                found[at] = _dweight(dy, into, weight.dtype, linear)
            if wanted[at + 1]:
                found[at + 1] = _dbias(dy, weights[at + 1].dtype, linear)
            return _dx(dy, weight, into.dtype, linear)

        def of_norm(at: int, dy: Tensor, of: Tensor, weight: Tensor, scale: Tensor, gemma: bool) -> Tensor:
            dx, dweight = _norm_bwd(dy, None, of, weight, scale, gemma, norms)
            if wanted[at]:
                found[at] = dweight
            return dx

        *before, dout = (one.reshape(x.shape).contiguous() for one in given)
        if before:
            (dm,) = before
        else:
            dgate, dup = _silu_mul_bwd(of_linear(12, dout, s, wd), gate, up, shape.gelu, silu)
            dm = of_linear(10, dup, m, wu)
            dm = dm + of_linear(8, dgate, m, wg)
        dh = dout + of_norm(17, dm, h, mlp_norm, m_rstd, shape.gemma[3])
        da = of_linear(6, dh, a.flatten(1), wo).view(a.shape)
        scale, causal, window, softcap = shape.options
        dq, dk, dv, _ = _attention_bwd(da, q, k, v, a, lse, cu, None, None, scale, causal, window, softcap, attention)
        dq, dk = _rope(dq, dk, cos, sin, shape.interleaved, True, rope)
        if q_norm is not None:
            dq = of_norm(15, dq.flatten(0, 1), q_raw, q_norm, q_rstd, shape.gemma[1])
            dk = of_norm(16, dk.flatten(0, 1), k_raw, k_norm, k_rstd, shape.gemma[2])
        # order: as the engine of autograd adds them, what was computed last first
        rows = len(x)
        dn = of_linear(4, dv.reshape(rows, -1), n, wv)
        dn = dn + of_linear(2, dk.view(rows, -1), n, wk)
        dn = dn + of_linear(0, dq.view(rows, -1), n, wq)
        dx = dh + of_norm(14, dn, x, norm, rstd, shape.gemma[0])
        return dx.view(ctx.size), None, None, None, None, *found
