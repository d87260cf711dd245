"""A decoder, or some of its layers, as a flat loop over aligned ops: what `handle.describe()` found, with fewer calls.

The modules' own Python costs more than the kernels of a small model. Here projections that read the same states are one
product, residual sums are part of the norms that follow, and nothing is called but ops. Rows of a joined weight are
independent, so none of it changes a bit; and it is not taken on faith: forward.py compares the two forwards byte for
byte before it hands this one out.

Nothing here waits for the device or looks at what is on it, so a call may be captured into a CUDA graph.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

import vexact_ops as vx
from vexact_ops.patch import description as d
from vexact_ops.patch.delta import by_head

from .batch import Batch, rows_of
from .memory import Caches
from .projections import Output, Projection, Projections, Weights
from .ranks import Alone, Columns, Ranks, Tokens, gathered

_ALONE = Alone()
_FEW = 16  # tokens of a sequence: with more attention waits for what was stored before it


class _RmsNorm:
    __slots__ = ("eps", "style", "weight")

    def __init__(self, weight: Tensor, eps: float, style: str):
        self.weight, self.eps, self.style = weight, eps, style

    def __call__(self, x: Tensor | Columns, residual: Tensor | None = None):
        if isinstance(x, Columns) and residual is not None:
            return x.normed(self.weight, self.eps, residual, self.style)
        return vx.rmsnorm(gathered(x), self.weight, self.eps, residual, style=self.style)


def norm_of(weights: Weights, norm: d.Norm | None) -> Callable | None:
    """(x, residual=None) -> the norm's output; with a residual, as its op returns it. x may be columns of ranks."""
    if norm is None:
        return None
    weight, bias, eps, style = weights.maybe(norm.weight), weights.maybe(norm.bias), norm.eps, norm.style
    if style == "layer":
        return lambda x, residual=None: vx.layer_norm(gathered(x), weight, bias, eps, residual)
    return _RmsNorm(weight, eps, style)


def factor_of(weights: Weights, factor: d.Factor | None) -> float | Tensor | None:
    if factor is None:
        return None
    if factor.buffer is not None:
        return weights.cast(factor.buffer, factor.dtype)
    return factor.value if factor.dtype is None else torch.tensor(factor.value, dtype=factor.dtype).item()


class StepParts:
    """What all layers of a step share."""

    __slots__ = ("settled", "singles", "states", "table", "tables", "tokens", "windowed")

    def __init__(self, batch: Batch, rotary: Sequence[tuple]):
        paged = batch.paged
        self.tokens, self.states, self.singles = batch.positions.shape[0], paged.state_slots, paged.singles
        lengths = paged.context_lens, paged.cu_seqlens_q, paged.max_seqlen_q
        self.table, self.windowed = (
            (slots, (table, *lengths)) for slots, table in (paged.places(None), paged.places(1))
        )
        # Of this step no other sequence's keys or values are seen, and a projection lies behind all the rest.
        self.settled = paged.max_seqlen_q <= _FEW and not batch.apart
        self.tables = []
        for inv_freq, scaling, dtype, axes in rotary:
            places, axes = (batch.positions, None) if batch.axes is None else (batch.axes, axes)
            self.tables.append(vx.rope_cos_sin(places, inv_freq, scaling=scaling, dtype=dtype, axes=axes))


def _asked(weights: Weights, part: d.Attention | d.Latent, kv_segment: int | None) -> dict:
    """What attention_paged is asked for."""
    asked = {"scale": part.scale, "window": part.window, "softcap": part.softcap, "kv_segment": kv_segment}
    return asked if part.sinks is None else {**asked, "sinks": weights[part.sinks]}


class _Attention:
    def __init__(self, weights: Weights, part: d.Attention, ranks: Ranks, kv_segment: int | None):
        self.ranks = ranks
        self.qkv, self.o = Projections(weights, part.q, part.k, part.v), Output(weights, part.o, ranks)
        self.heads, self.kv_heads, self.dim, self.v_dim = part.heads, part.kv_heads, part.dim, part.v_dim
        self.gated = part.gated
        self.alike = [part.heads, part.kv_heads, part.kv_heads] if part.v_dim == part.dim and not part.gated else None
        self.norms = norm_of(weights, part.q_norm), norm_of(weights, part.k_norm)
        if part.q_norm is not None and part.q_norm.size != part.dim:  # of all heads together
            self.alike = None
        self.across = tuple(norm is not None and norm.size != part.dim for norm in (part.q_norm, part.k_norm))
        self.whole = tuple(norm.size if across else 0 for norm, across in zip((part.q_norm, part.k_norm), self.across))
        self.before = not part.norms_after_rope
        q, k = part.q_norm, part.k_norm
        self.fused_norms = {}  # with the rotation
        alike = q and k and (q.eps, q.style) == (k.eps, k.style) and q.style != "layer"
        if self.before and part.rope and alike and not any(self.across):
            self.norms = None, None
            self.fused_norms = {"eps": q.eps, "style": q.style}
            self.fused_norms |= {"q_weight": weights[q.weight], "k_weight": weights[k.weight]}
        self.tables, self.interleaved = (
            (None, False) if part.rope is None else (part.rope.tables, part.rope.interleaved)
        )
        self.v_factor, self.out_norm = factor_of(weights, part.v_factor), norm_of(weights, part.out_norm)
        self.asked = _asked(weights, part, kv_segment)

    def __call__(
        self, x: Tensor, step: StepParts, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None = None
    ) -> Tensor | Columns:
        tokens, (q_norm, k_norm) = step.tokens, self.norms
        slots, table = step.table if self.asked["window"] is None else step.windowed
        if self.alike is not None:
            q, k, v = self.qkv.whole(x, self.ranks).view(tokens, -1, self.dim).split_with_sizes(self.alike, 1)
        else:
            q, k, v = self.qkv(x, self.ranks)
            if self.gated:
                q, gate = q.view(tokens, self.heads, 2 * self.dim).split_with_sizes((self.dim, self.dim), 2)
            if self.across[0]:
                q = _across(q, q_norm, self.whole[0], self.ranks)
            if self.across[1]:
                k = _across(k, k_norm, self.whole[1], self.ranks)
            if not self.gated:
                q = q.view(tokens, self.heads, self.dim)
            k = k.view(tokens, self.kv_heads, self.dim)
            v = v.view(tokens, self.kv_heads, self.v_dim)
        if self.v_factor is not None:
            v = v * self.v_factor
        if self.before:
            q, k = self._normed(q, k)
        if self.tables is None:
            vx.kv_cache_store(k, v, k_cache, v_cache, slots)
        elif self.before:
            tables, options = step.tables[self.tables], self.fused_norms
            q = vx.rope_kv_store(q, k, v, *tables, k_cache, v_cache, slots, interleaved=self.interleaved, **options)
        else:
            q, k = self._normed(*vx.rope(q, k, *step.tables[self.tables], interleaved=self.interleaved))
            vx.kv_cache_store(k, v, k_cache, v_cache, slots)
        out = vx.attention_paged(q, k_cache, v_cache, *table, settled=step.settled, **self.asked)
        out = rows_of(out, rows)
        if self.gated:
            out = vx.sigmoid_mul(out, rows_of(gate, rows))
        out = self.ranks.later(out.flatten(1))
        if self.out_norm is not None:
            out = self.out_norm(out)
        return self.o(out)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q_norm, k_norm = self.norms
        if q_norm is not None and not self.across[0]:
            q = q_norm(q)
        if k_norm is not None and not self.across[1]:
            k = k_norm(k)
        return q, k


def _across(x: Tensor, norm: Callable[[Tensor], Tensor], width: int, ranks: Ranks) -> Tensor:
    """A norm over all heads' columns, of which a rank has some; heads that several ranks have lie side by side."""
    if ranks.size == 1:
        return norm(x)
    own = x.shape[1]
    alike = ranks.size * own // width
    whole = ranks.gather(x).view(len(x), -1, alike, own)[:, :, 0]
    return norm(whole.reshape(len(x), width)).narrow(1, ranks.rank // alike * own, own)


class _Latent:
    """Of compressed keys and values, expanded to every head's before attention, or absorbed into queries and outputs
    (vexact_ops/patch/latent.py says how the two differ)."""

    def __init__(self, weights: Weights, part: d.Latent, ranks: Ranks, kv_segment: int | None):
        self.ranks = ranks
        first = part.q if part.q_a is None else part.q_a
        self.down = Projections(weights, first, part.kv_a)
        self.q_norm = norm_of(weights, part.q_a_norm)
        self.q_up = None if part.q_a is None else Projection(weights, part.q)
        self.kv_norm, self.o = norm_of(weights, part.kv_norm), Output(weights, part.o, ranks)
        self.heads, self.rank, self.nope, self.v_dim, self.rope = (
            part.heads, part.rank, part.nope, part.v_dim, part.rope,
        )  # fmt: skip
        self.absorbed = part.absorbed
        self.kv_up = None if part.absorbed else Projection(weights, part.kv_b)
        if part.absorbed:
            both = weights.rows(part.kv_b)[0].view(part.heads, -1, part.rank)
            self.w_k, w_v = both.split_with_sizes((part.nope, part.v_dim), 1)
            self.w_v = w_v.transpose(1, 2)
        self.asked = _asked(weights, part, kv_segment)

    def __call__(
        self, x: Tensor, step: StepParts, k_cache: Tensor, v_cache: Tensor, rows: Tensor | None = None
    ) -> Tensor | Columns:
        slots, table = step.table if self.asked["window"] is None else step.windowed
        tokens, heads, rank, nope, rope = step.tokens, self.heads, self.rank, self.nope, self.rope
        q, compressed = self.down(x)
        if self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q, q_turned = q.view(tokens, heads, nope + rope.dim).split_with_sizes((nope, rope.dim), 2)
        c, k_turned = compressed.split_with_sizes((rank, rope.dim), 1)
        c, k_turned = self.kv_norm(c), k_turned[:, None]
        if rope.apart:
            q_turned, k_turned = _halves(q_turned), _halves(k_turned)
        q_turned, k_turned = vx.rope(q_turned, k_turned, *step.tables[rope.tables], interleaved=rope.interleaved)
        if self.absorbed:
            q = vx.bmm(q.transpose(0, 1), self.w_k).transpose(0, 1)
            k = torch.cat((c[:, None], k_turned), 2)
            v = k[..., :rank]
        else:
            k, v = self.kv_up(c).view(tokens, heads, -1).split_with_sizes((nope, self.v_dim), 2)
            k = torch.cat((k, k_turned.expand(-1, heads, -1)), 2)
        vx.kv_cache_store(k, v, k_cache, v_cache, slots)
        out = vx.attention_paged(torch.cat((q, q_turned), 2), k_cache, v_cache, *table, **self.asked)
        out = rows_of(out, rows)
        if self.absorbed:
            out = vx.bmm(out.transpose(0, 1), self.w_v).transpose(0, 1)
        return self.o(self.ranks.later(out.flatten(1)))


def _halves(x: Tensor) -> Tensor:
    """Neighbours x0, x1, x2, x3 half a head apart: x0, x2, x1, x3."""
    return x.unflatten(2, (-1, 2)).transpose(2, 3).reshape(x.shape)


class _GatedDelta:
    def __init__(self, weights: Weights, part: d.GatedDelta, ranks: Ranks):
        self.ranks = ranks
        self.by_head, self.heads = part.z is None, (part.key_heads, part.k_dim, part.v_dim)
        others = [linear for linear in (part.z, part.b, part.a) if linear is not None]
        self.read, self.doubled = Projections(weights, *part.qkv, *others), part.doubled
        sizes = sum(linear.features for linear in part.qkv), *(linear.features for linear in others)
        self.sizes = sizes if len(part.qkv) > 1 else None
        self.conv = weights[part.conv].squeeze(1), weights.maybe(part.conv_bias)
        self.gates = weights[part.a_log], weights[part.dt_bias]
        self.norm, self.o = (weights[part.norm.weight], part.norm.eps), Output(weights, part.o, ranks)

    def __call__(self, x: Tensor, step: StepParts, *slots: Tensor, rows: Tensor | None = None) -> Tensor | Columns:
        state, taps, *opened = slots
        parts = self.read(x) if self.sizes is None else self.read.whole(x).split_with_sizes(self.sizes, 1)
        qkv, z, b, a = by_head(*parts, *self.heads) if self.by_head else parts
        _, (_, context, offsets, longest) = step.table
        memory, given = (state, *opened, step.states, context, offsets, longest), (taps, a, b, *self.gates)
        options = {"double_beta": self.doubled, "singles": step.singles}
        out = vx.conv_gated_delta_paged(qkv, *self.conv, *given, *memory, **options)
        out, z = rows_of(out, rows), rows_of(z, rows)
        weight, eps = self.norm
        out = vx.rmsnorm_gated(out, z.unflatten(1, (-1, self.heads[2])), weight, eps)
        return self.o(self.ranks.later(out.flatten(1)))


# Activations that are rounded before what follows: of gates, and without any.
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu2": lambda x: x.relu().square(),
    "gelu": lambda x: vx.gelu(x),
}
_UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    **_GATES,
    "silu": lambda x: vx.silu_mul(x, torch.ones_like(x)),
    "gelu_tanh": lambda x: vx.gelu(x, approximate="tanh"),
}


class _Mlp:
    def __init__(self, weights: Weights, part: d.Mlp, ranks: Ranks):
        self.ranks = ranks
        gated = part.gate is not None
        self.up = Projections(weights, part.gate, part.up) if gated else Projections(weights, part.up)
        self.activation, self.gated, self.norm = part.activation, gated, norm_of(weights, part.norm)
        self.down = Output(weights, part.down, ranks)

    def __call__(self, x: Tensor) -> Tensor | Columns:
        return self.down(self._inner(x))

    def columns(self, x: Tensor) -> Tensor:
        """A rank's of the output."""
        return self.down.own(gathered(self._inner(x)))

    def _inner(self, x: Tensor) -> Tensor | Columns:
        if self.gated and self.activation not in _GATES:
            h = self.up.gated(x, self.activation, self.ranks)
            return h if self.norm is None else self.norm(h)
        if self.gated:
            gate, up = self.up(x)
            h = _GATES[self.activation](gate) * up
        else:
            h = _UNGATED[self.activation](self.up.whole(x))
        h = self.ranks.later(h)
        return h if self.norm is None else self.norm(h)


class _Mixture:
    def __init__(self, weights: Weights, part: d.Mixture, ranks: Ranks):
        self.ranks = ranks
        router, experts = part.router, part.experts
        (self.router, self.added), self.bias = weights.rows(router.linear), weights.maybe(router.bias)
        self.dtype = torch.float32 if router.wide else None
        self.cast, self.top_k = router.cast, router.top_k
        names = "score", "normalize", "groups", "top_k_groups", "scale", "rounded"
        self.options = {name: getattr(router, name) for name in names}
        read = weights.turned if experts.turned else weights.__getitem__
        self.experts = read(experts.gate_up), read(experts.down)
        self.gate = {"activation": experts.activation}
        for name in ("gate_up_bias", "down_bias"):
            self.gate |= {} if getattr(experts, name) is None else {name: weights[getattr(experts, name)]}
        self.between = None if ranks.size == 1 else ranks.gather
        if ranks.size > 1 and len(self.experts[0]) == len(self.router) and experts.gate_up_bias is None:
            self.between = ranks.between(self.experts[0], self.top_k, experts.activation)
        self.shared = None if part.shared is None else _Mlp(weights, part.shared, ranks)
        self.shared_gate = None if part.gate is None else weights.rows(part.gate)

    def __call__(self, x: Tensor) -> Tensor | Columns:
        read, weight, added = x, self.router, self.added
        if self.cast:
            read, weight, added = x.float(), weight.float(), None if added is None else added.float()
        logits = vx.linear(read, weight, added, out_dtype=self.dtype)
        bias = None if self.bias is None else self.bias.float().flatten()
        chosen, ids = vx.moe_route(logits, self.top_k, bias=bias, **self.options)
        if len(self.experts[0]) < len(self.router):
            out = self._by_expert(x, chosen, ids)
            if self.shared is None:
                return out
            shared = gathered(self.shared(x))
            return out + self._gated(x, shared)
        out = vx.fused_moe(x, *self.experts, chosen, ids, **self.gate, between=self.between)
        if self.shared is not None:
            out = out + self._gated(x, self.shared.columns(x))
        return self.ranks.later(out)

    def _gated(self, x: Tensor, shared: Tensor) -> Tensor:
        return shared if self.shared_gate is None else vx.sigmoid_mul(shared, vx.linear(x, *self.shared_gate))

    def _by_expert(self, x: Tensor, chosen: Tensor, ids: Tensor) -> Tensor:
        """Of whole experts on each rank: rows of all slots, and their sums in slot order on every rank."""
        (tokens, slots), count = ids.shape, len(self.experts[0])
        own = ids - self.ranks.rank * count
        own = torch.where((own >= 0) & (own < count), own, -1).view(-1, 1)
        rows, ones = x.repeat_interleave(slots, 0), torch.ones_like(own, dtype=torch.float32)
        rows = self.ranks.only(vx.fused_moe(rows, *self.experts, ones, own, **self.gate))
        placed = (ids >= 0) & (ids < len(self.router))
        weights = torch.where(placed, chosen, 0.0)[:, None]  # a slot without an expert adds nothing
        return vx.bmm(weights, rows.view(tokens, slots, -1).float())[:, 0].to(x.dtype)


class Block:
    """A part, and what is done to its input and output."""

    __slots__ = ("after", "before", "factor", "part")

    def __init__(self, weights: Weights, block: d.Block, ranks: Ranks, kv_segment: int | None):
        kind = _PARTS[type(block.part)]
        options = (kv_segment,) if kind in (_Attention, _Latent) else ()
        self.part = kind(weights, block.part, ranks, *options)
        self.before = norm_of(weights, block.before)
        self.after, self.factor = norm_of(weights, block.after), factor_of(weights, block.factor)

    def read(self, x: Tensor | Columns, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the part is given, and the sum so far."""
        if self.before is None:
            x = gathered(x)
            residual = x if residual is None else residual + x
            return residual, residual
        return (self.before(x), x) if residual is None else self.before(x, residual)

    def then(self, x: Tensor | Columns) -> Tensor | Columns:
        if self.after is not None:
            x = self.after(x)
        return x if self.factor is None else gathered(x) * self.factor


def _put(images: vx.patch.Encoded, rows: Tensor, x: Tensor) -> Tensor:
    """Rows of images in place of those of their tokens."""
    return x.masked_scatter(images.where[0, :, None], rows.to(x.dtype))


def _alike(layers: Sequence[d.Layer]) -> frozenset[int]:
    """Of each kind of layer all but the first one, beside the first and the last of all: there is no sum before the
    one, and the other has fewer rows."""
    kinds: set[tuple] = set()
    found = set()
    for i, layer in enumerate(layers[1:-1], 1):
        kind = (getattr(layer.memory, "window", None), *(type(block.part) for block in layer.blocks))
        if kind in kinds:
            found.add(i)
        kinds.add(kind)
    return frozenset(found)


_PARTS = {
    d.Attention: _Attention,
    d.Latent: _Latent,
    d.GatedDelta: _GatedDelta,
    d.Mlp: _Mlp,
    d.Mixture: _Mixture,
}


class Decoder:
    """The layers of a range, with the embedding where it is the first stage and the final norm where it is the last.

    weights      by name, all that `described.names(layers)` says
    described    handle.describe(), or what a rank has of it (weights/cut.py)
    ranks        over which weights are cut
    share        tokens of the vocabulary that each of them has but the last
    """

    def __init__(self, weights: Weights, described: d.Decoder, layers: range, ranks: Ranks = _ALONE, share: int = 0):
        first, last = 0 in layers, len(described.layers) - 1 in layers
        chosen = [described.layers[i] for i in layers]
        table = weights[described.embedding.weight] if first else None
        self.embedding = table if ranks.size == 1 else None
        self.tokens = None if table is None or ranks.size == 1 else Tokens(table, ranks, share)
        self.factor = factor_of(weights, described.embedding.factor) if first else None
        self.rotary = [(weights.cast(r.inv_freq, torch.float32), r.scaling, r.dtype, r.axes) for r in described.rotary]
        self._first = layers.start
        self.layers = [
            tuple(Block(weights, block, ranks, described.kv_segment) for block in layer.blocks) for layer in chosen
        ]
        self.norm = norm_of(weights, described.norm) if last else None
        self._copied = weights.copied
        self._left_out: frozenset[int] = frozenset()
        self._alike = _alike(chosen)

    def _embed(self, batch: Batch) -> Tensor:
        if self.tokens is not None:
            x = self.tokens(batch.input_ids)
        else:
            x = self.embedding[batch.input_ids] if batch.embedded is None else batch.embedded
        return x if batch.images is None else _put(batch.images, batch.images.rows, x)

    @contextlib.contextmanager
    def one_of_each(self) -> Iterator[None]:
        """In a with block layers that launch what others do are left out: for whoever wants kernels to be met once, and
        not what they compute."""
        self._left_out = self._alike
        try:
            yield
        finally:
            self._left_out = frozenset()

    @property
    def outdated(self) -> bool:
        """Whether something has been written since that it computes with a copy of."""
        return any(tensor._version != version for tensor, version in self._copied)

    def __call__(
        self,
        batch: Batch,
        hidden: Tensor | None = None,
        residual: Tensor | None = None,
        seen: Callable[[Tensor], object] | None = None,
    ):
        """A stage that is not the first is given the two that the one before it gave.

        batch     its caches are those of these layers, in their order; its rows are for the last stage
        seen      called with the residual stream (T, H) before each layer and behind the last
        returns   (T, H) final hidden states from the last stage, or (R, H) of its rows; from others two tensors (T, H),
                  whose sum is the residual stream: what the next one is called with
        """
        step, x = StepParts(batch, self.rotary), hidden
        if self.embedding is not None or self.tokens is not None:
            x = self._embed(batch)
            if self.factor is not None:
                x = x * self.factor
        last = None if self.norm is None else self.layers[-1]
        paged = batch.paged
        added = () if batch.images is None else batch.images.deepstack[self._first :]
        caches = Caches(paged.k_caches, paged.v_caches, paged.states).layers()
        for i, (layer, kept) in enumerate(zip(self.layers, caches)):
            if i in self._left_out:
                continue
            if seen is not None:
                x = gathered(x)
                seen(x if residual is None else x + residual)
            (first, *others), rows = layer, batch.rows if layer is last else None
            h, residual = first.read(x, residual)
            residual = rows_of(residual, rows)  # there before columns of ranks are: a norm reads it while they come
            x = first.then(first.part(h, step, *kept, rows=rows))
            for block in others:
                h, residual = block.read(x, residual)
                x = block.then(block.part(h))
            if i < len(added):  # to other tokens -0.0, which changes none
                x = gathered(x)
                residual = residual + x
                x = rows_of(_put(batch.images, added[i], x.new_full((step.tokens, x.shape[1]), -0.0)), rows)
        if seen is not None:
            x = gathered(x)
            seen(x + residual)
        if self.norm is None:
            return gathered(x), residual
        return self.norm(x, residual)[0]
