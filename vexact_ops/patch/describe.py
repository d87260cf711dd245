"""Reads a trace (trace.py) into a description (description.py). Nothing is known by the names of classes or children:
a norm is what a residual sum is normalised by, a query is what attention takes as one."""

import torch
from torch import nn

from ..fused_moe import swiglu
from ..rmsnorm.op import STYLES
from ..silu_mul.op import ACTIVATIONS
from .description import (
    Adapter,
    Attention,
    Block,
    Decoder,
    Embedding,
    Experts,
    Factor,
    GatedDelta,
    Head,
    Latent,
    Layer,
    Linear,
    Mixture,
    Mlp,
    Norm,
    NotDescribed,
    Rope,
    Rotary,
    Router,
)
from .trace import Value, hidden_states

ROUTED = "fused_moe", swiglu.fused_moe_swiglu.name
GATED = "relu", "gelu", "pow", "square"  # what a gate has last been through, where silu_mul does not compute it


def describe(model: nn.Module, base: nn.Module, head: Head | None, kv_segment: int | None) -> Decoder:
    """The description of a patched model. Raises NotDescribed."""
    return read(hidden_states(model, base), head, kv_segment)


def read(hidden: Value, head: Head | None, kv_segment: int | None) -> Decoder:
    """The description of the decoder whose final hidden states these are. Raises NotDescribed."""
    return _Reader().decoder(hidden, head, kv_segment)


def _refuse(where: str, value: object) -> NotDescribed:
    return NotDescribed(f"{where}: {value!r} has no words in a description")


class _Reader:
    def __init__(self):
        self.rotary: list[Rotary] = []

    def decoder(self, hidden: Value, head: Head | None, kv_segment: int | None) -> Decoder:
        norm = self.norm(hidden, "the final hidden states")
        stream, sums = hidden.args[0], []
        while stream.op == "add":
            parts = stream.args
            if len(parts) != 2 or not all(isinstance(part, Value) for part in parts):
                raise _refuse("a residual sum", stream)
            older, branch = sorted(parts, key=lambda part: part.call)
            sums.append((older, branch))
            stream = older
        factor, table = self.factor(stream)
        if table.op != "embedding" or table.args[0].op != "parameter":
            raise _refuse("the embedding", table)
        embedding = Embedding(table.args[0].args[0], factor)
        blocks = [self.block(stream, branch, f"block {i}") for i, (stream, branch) in enumerate(reversed(sums))]
        begins = [i for i, block in enumerate(blocks) if block.part.memory is not None]
        if blocks and begins[:1] != [0]:
            raise NotDescribed("block 0: it remembers nothing, expected attention before all else")
        layers = (Layer(tuple(blocks[a:b])) for a, b in zip(begins, (*begins[1:], len(blocks))))
        return Decoder(embedding, tuple(self.rotary), tuple(layers), norm, head, kv_segment)

    # pieces

    def factor(self, value: Value) -> tuple[Factor | None, Value]:
        """What it was multiplied by at last, and what was."""
        if value.op != "mul":
            return None, value
        for x, number in (value.args, reversed(value.args)):
            if isinstance(number, (int, float)):
                return (Factor(float(number)) if number != 1 else None), x
            if isinstance(number, Value) and not number.shape:
                if number.op == "number":
                    return Factor(float(number.args[0]), dtype=number.dtype), x
                cast = number.args[0] if number.op == "to" else number
                if cast.op == "parameter":
                    return Factor(buffer=cast.args[0], dtype=number.dtype), x
        return None, value

    def is_norm(self, value: Value) -> bool:
        residual = {"rmsnorm": 2, "layer_norm": 3}.get(value.op)
        return residual is not None and value.out == 0 and value.args[residual] is None

    def norm(self, value: Value, where: str) -> Norm:
        if not self.is_norm(value):
            raise _refuse(where, value)
        if value.op == "layer_norm":
            _, weight, bias, _, eps, _ = value.args
            names = (None if p is None else self.name(p, where) for p in (weight, bias))
            return Norm(next(names), eps, "layer", value.shape[-1], next(names))
        _, weight, _, eps, gemma, _ = value.args
        return Norm(self.name(weight, where), eps, STYLES[gemma], weight.shape[0])

    def normed(self, value: Value, where: str) -> tuple[Norm | None, Value]:
        """Its norm, if it is one's, and what is normalised."""
        return (self.norm(value, where), value.args[0]) if self.is_norm(value) else (None, value)

    def name(self, value: Value, where: str) -> str:
        if value.op != "parameter":
            raise _refuse(where, value)
        return value.args[0]

    def linear(self, value: Value, where: str, *, dtype: bool = True) -> tuple[Linear, Value]:
        """A projection, or a part of one, and what is projected."""
        rows = None
        if value.op == "slice":
            whole, dim, first, end, step = value.args
            of = self.adapted(whole)[0]
            if of.op == "linear" and (dim, step) == (-1, 1) and whole.shape[-1] == of.args[1].shape[0]:
                value, rows = whole, (first, end)
        value, adapters = self.adapted(value)
        if value.op != "linear":
            raise _refuse(where, value)
        x, weight, bias, out_dtype, _ = value.args
        if dtype and out_dtype != x.dtype:
            raise _refuse(where, value)
        found = []
        for down, up, scale in adapters:
            read = down.args[0]
            if (read.args[0] if read.op == "to" and read is not x else read) is not x:
                raise _refuse(f"{where}: another input of an adapter", read)
            found.append(Adapter(self.name(down.args[1], where), self.name(up.args[1], where), scale))
        bias = None if bias is None else self.name(bias, where)
        linear = Linear(self.name(weight, where), bias, *weight.shape, adapters=tuple(found))
        return linear if rows is None else linear.part(*rows), x

    def adapted(self, value: Value) -> tuple[Value, list[tuple[Value, Value, float]]]:
        """What adapters' products are added to, and of each the two products and its number; of others themselves."""
        found, of = [], value.args[0] if value.op == "to" and value.args[0].op == "add" else value
        while of.op == "add" and len(of.args) == 2 and (adapter := self.adapter(of.args[1])) is not None:
            found.append(adapter)
            of = of.args[0]
        return (of, found[::-1]) if found and of.dtype == value.dtype else (value, [])

    def adapter(self, value: object) -> tuple[Value, Value, float] | None:
        if not isinstance(value, Value) or value.op != "mul" or not isinstance(value.args[1], int | float):
            return None
        up, scale = value.args
        if up.op != "linear" or up.args[0].op != "linear" or not up.dtype == up.args[0].dtype == value.dtype:
            return None
        down = up.args[0]
        return (down, up, float(scale)) if up.args[2] is down.args[2] is None else None

    def rope(self, call: Value, apart: bool, where: str) -> Rope:
        _, _, cos, sin, interleaved, transpose, _ = call.args
        if cos.op != "rope_cos_sin" or cos.call != sin.call or (cos.out, sin.out) != (0, 1) or transpose:
            raise _refuse(where, cos)
        _, inv_freq, scaling, dtype, axes, _ = cos.args
        if inv_freq.op == "to" and inv_freq.dtype == torch.float32:
            inv_freq = inv_freq.args[0]
        rotary = Rotary(self.name(inv_freq, where), scaling, dtype, axes)
        if rotary not in self.rotary:
            self.rotary.append(rotary)
        return Rope(self.rotary.index(rotary), cos.shape[-1], interleaved, apart)

    def apart(self, value: Value) -> tuple[bool, Value]:
        """Whether neighbours were put apart, and of what."""
        if value.op == "cat" and len(value.args) == 2 and all(v.op == "slice" for v in value.args):
            (a, dim_a, first_a, end_a, step_a), (b, dim_b, first_b, end_b, step_b) = (v.args for v in value.args)
            parts = (dim_a, first_a, end_a, step_a), (dim_b, first_b, end_b, step_b)
            if a is b and parts == ((-1, 0, a.shape[-1], 2), (-1, 1, a.shape[-1], 2)):
                return True, a
        return False, value

    # blocks

    def block(self, stream: Value, branch: Value, where: str) -> Block:
        factor, value = self.factor(branch)
        after, value = self.normed(value, where)
        part, x = self.part(value, where)
        before, x = self.normed(x, where)
        if x is not stream:
            raise _refuse(f"{where}: what it reads besides the residual stream", x)
        return Block(part, before, after, factor)

    def part(self, value: Value, where: str):
        of, _ = self.adapted(value)
        if of.op == "linear":
            inner, inside = self.normed(of.args[0], where)
            if inside.op == "attention_varlen":
                o, _ = self.linear(value, where)
                return self.attention(inside, o, inner, where)
            if inner is None and (gated := self.gate_of(inside)) is not None:
                o, _ = self.linear(value, where)
                return self.gated(*gated, o, where)
            if inside.op == "rmsnorm_gated":
                o, _ = self.linear(value, where)
                return self.delta(inside, o, where)
            if inside.op == "bmm":
                o, _ = self.linear(value, where)
                return self.absorbed(inside, o, where)
            return self.mlp(value, where)
        return self.mixture(value, where)

    def mlp(self, value: Value, where: str) -> tuple[Mlp, Value]:
        where = f"{where}: its feed-forward block"
        down, inner = self.linear(value, where)
        norm, inner = self.normed(inner, where)
        gate = None
        if inner.op == "silu_mul":
            gate, up, gelu, _ = inner.args
            activation = ACTIVATIONS[gelu]
            if up is not None and up.op == "ones_like" and activation == "silu":
                gate, up = None, gate
            elif up is None:
                both, x = self.linear(gate, where)
                half = both.features // 2
                if both.rows is not None:
                    raise _refuse(where, gate)
                parts = [both.part(i * half, (i + 1) * half) for i in (0, 1)]
                return Mlp(*parts, down, activation, norm), x
        elif inner.op == "gelu":
            up, tanh, _ = inner.args
            activation = "gelu_tanh" if tanh else "gelu"
        else:
            activation, up = "relu2", inner
            if inner.op == "mul" and all(isinstance(part, Value) for part in inner.args):
                inner, up = sorted(inner.args, key=lambda part: part.op not in GATED)  # either may stand first
                gate = True
            if inner.op == "relu" or (gate and inner.op == "gelu" and not inner.args[1]):
                activation = inner.op
            elif inner.op not in ("pow", "square") or inner.args[1:] not in ((2,), ()) or inner.args[0].op != "relu":
                raise _refuse(where, inner)
            of = inner.args[0].args[0] if activation == "relu2" else inner.args[0]
            gate, up = (of, up) if gate else (None, of)
        up, x = self.linear(up, where)
        if gate is not None:
            gate, of = self.linear(gate, where)
            if of is not x:
                raise _refuse(f"{where}: another input of its gate", of)
        return Mlp(gate, up, down, activation, norm), x

    def mixture(self, value: Value, where: str) -> tuple[Mixture, Value]:
        where = f"{where}: its mixture"
        shared, of, shared_gate = None, None, None
        if (parts := self.added(value)) is not None:
            routed, added = sorted(parts, key=lambda part: part.op not in ROUTED)
            gate = self.gate_of(added)
            shared, of = self.mlp(added if gate is None else gate[0], where)
            if gate is not None:
                shared_gate, read = self.linear(gate[1], where)
                if read is not of or shared_gate.features != 1:
                    raise _refuse(f"{where}: its shared experts' gate", gate[1])
            value = routed
        if value.op not in ROUTED or value.out != 0:
            raise _refuse(where, value)
        if value.op == "fused_moe":
            x, gate_up, down, weights, ids, gelu, *_ = value.args
            activation, biases = ACTIVATIONS[gelu], ()
        else:
            x, gate_up, down, *biases, weights, ids, _, _ = value.args
            activation = swiglu.ACTIVATION
        turned = gate_up.op == "turned"
        if turned != (down.op == "turned"):
            raise _refuse(f"{where}: matrices of which one is transposed", down)
        matrices = (m.args[0] if turned else m for m in (gate_up, down))
        names = [self.name(m, where) for m in (*matrices, *biases)]
        experts = Experts(*names[:2], activation, *names[2:], turned=turned)
        rounded = None
        while weights.op == "to":
            rounded = weights.args[1] if weights.dtype.itemsize < 4 else rounded
            weights = weights.args[0]
        while ids.op == "to":
            ids = ids.args[0]
        if weights.op != "moe_route" or weights.call != ids.call or (weights.out, ids.out) != (0, 1):
            raise _refuse(f"{where}: its router", weights)
        logits, top_k, sigmoid, normalize, groups, kept, bias, scale, *_ = weights.args
        options = {
            "top_k": top_k,
            "score": "sigmoid" if sigmoid else "softmax",
            "normalize": normalize,
            "groups": groups or None,
            "top_k_groups": kept or None,
            "bias": None if bias is None else self.name(bias.args[0] if bias.op == "to" else bias, where),
            "scale": scale,
        }
        router = self.router(logits, options, rounded, where)
        read = logits.args[0]
        read = read.args[0] if router.cast and read.op == "to" else read
        if read is not x or of not in (None, x):
            raise _refuse(f"{where}: another input of its router or shared experts", read)
        return Mixture(router, experts, shared, shared_gate), x

    def added(self, value: Value) -> tuple[Value, ...] | None:
        """Of a sum what is added: one of two numbers of 16 bits is the same in their dtype and in fp32, rounded."""
        if value.op == "add":
            return value.args
        wide = value.args[0].args if value.op == "to" and value.args[0].op == "add" else ()
        narrow = [part.args[0] for part in wide if isinstance(part, Value) and part.op == "to"]
        if len(narrow) == 2 and all(part.dtype == value.dtype for part in narrow) and wide[0].dtype.itemsize == 4:
            return tuple(narrow)
        return None

    def router(self, logits: Value, options: dict, rounded, where: str) -> Router:
        if logits.op != "linear":
            raise _refuse(f"{where}: its router", logits)
        x, weight, bias, dtype, _ = logits.args
        cast = x.op == "to" or weight.op == "to"
        of, added = (part.args[0] if part is not None and part.op == "to" else part for part in (weight, bias))
        linear = Linear(self.name(of, where), None if added is None else self.name(added, where), *of.shape)
        return Router(linear, wide=dtype.itemsize == 4, cast=cast, rounded=rounded, **options)

    # gates

    def gate_of(self, value: Value) -> tuple[Value, Value] | None:
        """Of a product with a sigmoid: what is multiplied, and what the sigmoid is of."""
        if value.op == "sigmoid_mul":
            return value.args[0], value.args[1]
        parts = [part for part in value.args if isinstance(part, Value)] if value.op == "mul" else []
        gates = [part for part in parts if part.op == "sigmoid_mul" and part.args[0].op == "ones_like"]
        if len(parts) != 2 or len(gates) != 1:
            return None
        return next(part for part in parts if part is not gates[0]), gates[0].args[1]

    def gated(self, value: Value, gate: Value, o: Linear, where: str):
        """Attention whose queries' projection has of each head a query and a gate."""
        if value.op != "attention_varlen":
            raise _refuse(where, value)
        return self.attention(value, o, None, where, gate)

    # gated delta nets

    def delta(self, value: Value, o: Linear, where: str):
        where = f"{where}: its gated delta net"
        rows, z, weight, eps, *_ = value.args
        norm = Norm(self.name(weight, where), eps, "gated", weight.shape[0])
        if rows.op != "gated_delta_varlen" or rows.out != 0:
            raise _refuse(where, rows)
        q, k, v, g, beta, _, initial, scale, l2norm, *_ = rows.args
        (_, key_heads, k_dim), _, (_, value_heads, v_dim) = rows.inputs[:3]
        if initial is not None or not l2norm or scale != k_dim**-0.5:
            raise _refuse(where, rows)
        conv = self.columns((q, k, v), (key_heads * k_dim, key_heads * k_dim, value_heads * v_dim), where)
        if conv.op != "causal_conv" or not conv.args[4]:
            raise _refuse(where, conv)
        mixed, taps, bias, *_ = conv.args
        factor, beta = self.factor(beta)
        if factor not in (None, Factor(2.0)):
            raise _refuse(where, beta)
        if g.op != "delta_gates" or g.call != beta.call or (g.out, beta.out) != (0, 1):
            raise _refuse(where, g)
        a, b, a_log, dt_bias, *_ = g.args
        if mixed.op == "cat" and mixed.args[0].op == "slice":
            shared = value_heads // key_heads
            qkvz = self.columns((*mixed.args, z), (k_dim, k_dim, shared * v_dim, shared * v_dim), where)
            (qkv, x), (b, read) = (
                self.linear(qkvz, where),
                self.linear(self.columns((b, a), (shared,) * 2, where), where),
            )
            widths, qkv, z, a, others = (qkv.features, b.features), (qkv,), None, None, [read]
            if widths != (key_heads * 2 * (k_dim + shared * v_dim), 2 * value_heads):
                raise _refuse(where, qkvz)
        else:
            read = mixed.args if mixed.op == "cat" else (mixed,)
            (*qkv, z, b, a), (x, *others) = zip(*(self.linear(part, where) for part in (*read, z, b, a)))
            if len(qkv) not in (1, 3):
                raise _refuse(where, mixed)
        if any(of is not x for of in others):
            raise _refuse(f"{where}: another input of a gate", others[0])
        found = GatedDelta(
            tuple(qkv), z, b, a, o, self.name(taps, where), None if bias is None else self.name(bias, where),
            taps.shape[-1], self.name(a_log, where), self.name(dt_bias, where), norm, key_heads, value_heads, k_dim,
            v_dim, factor is not None,
        )  # fmt: skip
        return found, x

    def columns(self, parts: tuple[Value, ...], widths: tuple[int, ...], where: str) -> Value:
        """What these are the columns of, one after another."""
        at, whole = 0, None
        for part, width in zip(parts, widths):
            of, *cut = part.args if part.op == "slice" else (None,)
            if cut != [-1, at, at + width, 1] or whole not in (None, of):
                raise _refuse(where, part)
            at, whole = at + width, of
        return whole

    # attention

    def attention(self, value: Value, o: Linear, out_norm: Norm | None, where: str, gate: Value | None = None):
        where = f"{where}: its attention"
        q, k, v, _, cu_k, _, sinks, scale, causal, window, softcap, *_ = value.args
        if not causal or cu_k is not None:
            raise _refuse(where, value)
        asked = {
            "scale": scale,
            "window": window,
            "softcap": softcap,
            "sinks": None if sinks is None else self.name(sinks, where),
        }
        if q.op == "cat":
            if out_norm is not None:
                raise _refuse(where, value)
            return self.expanded(q, k, v, o, value, asked, where)
        (q, q_norms, rope), (k, k_norms, k_rope) = (self.head(part, where) for part in (q, k))
        if rope is not None or k_rope is not None:
            if rope is None or k_rope is None or rope.call != k_rope.call or (rope.out, k_rope.out) != (0, 1):
                raise _refuse(f"{where}: the rotation", rope or k_rope)
            turned = self.rope(rope, False, where)
        else:
            turned = None
        before, after = zip(q_norms, k_norms)
        norms = before if any(before) else after
        if any(before) and any(after):
            raise NotDescribed(f"{where}: norms before and after the rotation have no words in a description")
        (_, heads, dim), (_, kv_heads, _), (_, _, v_dim) = value.inputs[:3]
        if gate is not None:  # a head's query and then its gate
            q = self.columns((q, gate), (dim, dim), f"{where}: its gate")
        v_factor, v = self.factor(v)
        (q, x), (k, of_k), (v, of_v) = (self.linear(part, where) for part in (q, k, v))
        if of_k is not x or of_v is not x:
            raise _refuse(f"{where}: another input of keys or values", of_k)
        if q.features != (heads if gate is None else 2 * heads) * dim:
            raise NotDescribed(f"{where}: its queries have no words in a description")
        found = Attention(
            q, k, v, o, heads, kv_heads, dim, v_dim, rope=turned, q_norm=norms[0], k_norm=norms[1],
            norms_after_rope=any(after), v_factor=v_factor, out_norm=out_norm, gated=gate is not None, **asked,
        )  # fmt: skip
        return found, x

    def head(self, value: Value, where: str):
        """A query or key: its projection, (norm before, norm after the rotation), the call that rotates it or None."""
        after, value = self.normed(value, where)
        rope, before = None, None
        if value.op == "rope":
            rope, value = value, value.args[value.out]
            before, value = self.normed(value, where)
        elif after is not None:
            before, after = after, None
        return value, (before, after), rope

    def expanded(self, q: Value, k: Value, v: Value, o: Linear, value: Value, asked: dict, where: str):
        found = self.latent_parts(q, where)
        if k.op != "cat" or len(k.args) != 2:
            raise _refuse(where, k)
        k_nope, k_turned = k.args
        heads, v_dim = value.shape[-2:]
        nope = found["nope"]
        width = nope + v_dim
        parts = [part.args if part.op == "slice" else None for part in (k_nope, v)]
        if parts[0] is None or parts[1] is None or parts[0][0] is not parts[1][0]:
            raise _refuse(where, k_nope)
        if [part[1:] for part in parts] != [(-1, 0, nope, 1), (-1, nope, width, 1)]:
            raise _refuse(where, v)
        kv_b, c = self.linear(parts[0][0], where)
        if kv_b.features != heads * width or kv_b.rows is not None:
            raise _refuse(where, parts[0][0])
        return self.latent(found, k_turned, c, kv_b, o, asked, v_dim, False, where)

    def absorbed(self, value: Value, o: Linear, where: str):
        where = f"{where}: its latent attention"
        mixed, w_v, *_ = value.args
        if mixed.op != "attention_varlen" or w_v.op != "slice":
            raise _refuse(where, mixed)
        q, k, v, _, cu_k, _, sinks, scale, causal, window, softcap, *_ = mixed.args
        if not causal or cu_k is not None or q.op != "cat" or len(q.args) != 2 or q.args[0].op != "bmm":
            raise _refuse(where, q)
        asked = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks and self.name(sinks, where)}
        inner, w_k, *_ = q.args[0].args
        if w_k.op != "slice" or w_k.args[0] is not w_v.args[0] or k.op != "cat" or len(k.args) != 2:
            raise _refuse(where, w_k)
        found = self.latent_parts(q, where, inner)
        weight, nope, v_dim = w_k.args[0], found["nope"], value.shape[-1]
        rows = [part.args[1:] for part in (w_k, w_v)]
        if rows != [(-2, 0, nope, 1), (-2, nope, nope + v_dim, 1)]:
            raise _refuse(where, w_v)
        c, k_turned = k.args
        if v.op != "slice" or v.args[0] is not k or v.args[1:] != (-1, 0, c.shape[-1], 1):
            raise _refuse(where, v)
        kv_b = Linear(self.name(weight, where), None, *weight.shape)
        return self.latent(found, k_turned, c, kv_b, o, asked, v_dim, True, where)

    def latent_parts(self, q: Value, where: str, nope: Value | None = None) -> dict:
        """Of a query that is put together of a part that passes and one that is rotated."""
        if len(q.args) != 2 or q.args[1].op != "rope" or q.args[1].out != 0:
            raise _refuse(where, q)
        passed, turned = nope or q.args[0], q.args[1]
        apart, rotated = self.apart(turned.args[0])
        if passed.op != "slice" or rotated.op != "slice" or passed.args[0] is not rotated.args[0]:
            raise _refuse(where, passed)
        size, rope = passed.args[3], self.rope(turned, apart, where)
        if passed.args[1:] != (-1, 0, size, 1) or rotated.args[1:] != (-1, size, size + rope.dim, 1):
            raise _refuse(where, passed)
        return {"q": passed.args[0], "nope": size, "rope": rope, "turned": turned}

    def latent(
        self, found: dict, k_turned: Value, c: Value, kv_b: Linear, o: Linear, asked: dict, v_dim: int, absorbed, where
    ):
        turned, rope = found["turned"], found["rope"]
        apart, k_rotated = self.apart(turned.args[1])
        if k_turned.op != "rope" or k_turned.call != turned.call or k_turned.out != 1 or apart != rope.apart:
            raise _refuse(where, k_turned)
        kv_norm, c = self.norm(c, where), c.args[0]
        rank = kv_norm.size
        if c.op != "slice" or k_rotated.op != "slice" or c.args[0] is not k_rotated.args[0]:
            raise _refuse(where, c)
        if c.args[1:] != (-1, 0, rank, 1) or k_rotated.args[1:] != (-1, rank, rank + rope.dim, 1):
            raise _refuse(where, k_rotated)
        kv_a, x = self.linear(c.args[0], where)
        q, of = self.linear(found["q"], where)
        q_a_norm, of = self.normed(of, where) if of is not x else (None, of)
        q_a = None
        if of is not x:
            q_a, of = self.linear(of, where)
        if of is not x or kv_a.rows or q.rows or (q_a_norm is None) != (q_a is None):
            raise _refuse(f"{where}: another input of its queries", of)
        heads = q.features // (found["nope"] + rope.dim)
        found = Latent(
            q, q_a, q_a_norm, kv_a, kv_norm, kv_b, o, heads, rank, found["nope"], v_dim, rope=rope, absorbed=absorbed,
            **asked,
        )  # fmt: skip
        return found, x
