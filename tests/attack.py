"""Attacks the promise at random: `python tests/attack.py [--checks 1000] [--device cuda] [--jobs 4] [ROOM ...]`.

A check draws sizes, options and values (rows of infinities, NaN, negative zeros, subnormals and the largest finite
values among ordinary rows that cancel), computes a batch once, then some of its rows again: one alone, or several in
another order, in storage that begins one element off any boundary, by every backend whose bits are promised equal,
with gradients where the op has them. Bytes are compared. What differs is printed with the seed that draws it again:
`python tests/attack.py ROOM --seed S --checks 1`. The exit status is 1 where anything differs or raises.

What a kernel is compiled for (types, widths, options, which operands begin off a boundary) is drawn anew with every
50th seed only, in some rooms with every 100th: compiling takes far longer than checking. With --jobs such campaigns run
side by side, those of one room too.
"""

import argparse
import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import vexact_ops as vx
from vexact_ops._core.proof.inputs import SMALL
from vexact_ops.testing import Pages, assert_bitwise, attention_inputs, cancelling, offsets, special_rows, tricky

Outputs = tuple[Tensor, ...]
CAMPAIGN = 50  # checks of one compiled kind
LONG = {
    "attention": 100,
    "linear_cross_entropy": 100,
    "linear_sample": 100,
}  # where compiling or admission takes longest


class Draw:
    """Random choices of one check, all from one seed."""

    def __init__(self, seed: int, device: str, campaign: int = CAMPAIGN):
        self.seed, self.device = seed, device
        self.g = torch.Generator().manual_seed(seed)
        self.campaign = seed // campaign
        self._kinds = torch.Generator().manual_seed(-1 - self.campaign)
        self._way, self._placed = self.of(["copy", "off", "wide"]), 0
        dtypes = [torch.bfloat16, torch.bfloat16, torch.float32] + [torch.float16] * (device == "cuda")
        self.dtype = self.kind(dtypes)

    def int(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(torch.randint(low, high + 1, (1,), generator=self.g))

    def of(self, choices: Sequence):
        return choices[self.int(0, len(choices) - 1)]

    def kind(self, choices: Sequence):
        """The same for all checks of a campaign."""
        return choices[int(torch.randint(len(choices), (1,), generator=self._kinds))]

    def chance(self, p: float) -> bool:
        return float(torch.rand((), generator=self.g)) < p

    def rows(self) -> int:
        most = 300 if self.device == "cuda" else 40
        return self.of([1, 2, 3, self.int(1, 16), self.int(1, 70), self.int(1, most)])

    def index(self, rows: int) -> Tensor:
        """Which rows are computed again: one, or some in another order."""
        count = self.of([1, 1, self.int(1, rows)])
        return torch.randperm(rows, generator=self.g)[:count].to(self.device)

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = tricky(*shape, seed=self.int(0, 1 << 20), dtype=dtype or self.dtype, device=self.device)
        return x.clamp(-64, 64) if x.dtype == torch.float16 else x

    def special(self, x: Tensor) -> Tensor:
        """With special rows half of the time."""
        return special_rows(x, seed=self.seed, first=self.int(0, 30)) if self.chance(0.5) else x

    def placed(self, x: Tensor) -> Tensor:
        """The same values somewhere else: off by one element, in wider rows, or just copied. Which operands are
        off, and how much wider rows are, is the same in a campaign: kernels are compiled for it."""
        self._placed += 1
        way, which = self._way, torch.Generator().manual_seed(self.campaign * 64 + self._placed % 16)
        pick = int(torch.randint(4, (1,), generator=which))
        if way == "off" and (self.campaign % 2 or pick % 2):  # all of them, or some
            flat = x.new_empty(x.numel() + 1)
            return flat[1:].view(x.shape).copy_(x)
        if way == "wide" and x.dim() == 2:
            wider = x.shape[1] + (1 if pick == 0 else 8)
            wide = x.new_full((x.shape[0], wider), float("nan") if x.is_floating_point() else 0)
            return wide[:, -x.shape[1] :].copy_(x) if x.shape[1] else x.clone()
        return x.clone()


def again(d: Draw, fn: Callable[..., object], rowwise: Sequence[Tensor], others: Sequence[Callable] = ()) -> None:
    """fn of all rows; then of some of them, by fn and by others, which promise its bits."""
    expected = fn(*rowwise)
    expected = expected if isinstance(expected, tuple) else (expected,)
    index = d.index(rowwise[0].shape[0])
    for number, run in enumerate((fn, *others)):
        actual = run(*(d.placed(t[index]) for t in rowwise))
        actual = actual if isinstance(actual, tuple) else (actual,)
        assert_bitwise(actual, tuple(e[index] for e in expected), f"rows {index.tolist()[:8]} by way {number}")


def backends(d: Draw, room: str) -> tuple[str | None, ...]:
    """The default, then every other one with its bits."""
    return (
        (None, "triton")
        if d.device == "cuda"
        and room in ("linear", "grouped_linear", "head", "moe", "linear_sample", "linear_silu_mul")
        else (None,)
    )


def with_gradients(d: Draw, fn: Callable[..., object], count: int) -> Callable[..., Outputs]:
    """fn of `count` differentiable tensors and then their outputs' gradients: (outputs, gradients of the tensors)."""

    def run(*args: Tensor) -> Outputs:
        inputs = [a.detach().requires_grad_() for a in args[:count]]
        out = fn(*inputs)
        out = out if isinstance(out, tuple) else (out,)
        grads = torch.autograd.grad(out, inputs, [a.view_as(o) for a, o in zip(args[count:], out)])
        return *(o.detach() for o in out), *grads

    return run


# ---- one check of each room ------------------------------------------------------------------------------------------


def linear(d: Draw) -> None:
    k, n = d.kind([(64, 64), (520, 256), (576, 1536), (1024, 1024), (2048, 512), (96, 8), (7, 33), (1, 16)])
    rows = d.rows()
    x, weight = cancelling(rows, k, n, d.seed, d.dtype, d.device)
    x = d.special(x.clamp(-64, 64) if d.dtype == torch.float16 else x)
    bias = d.placed(d.values(n)) if d.chance(0.4) else None
    out_dtype = d.kind([None, torch.float32])
    ways = [lambda x, b=b: vx.linear(x, weight, bias, out_dtype=out_dtype, backend=b) for b in backends(d, "linear")]
    again(d, ways[0], (x,), ways[1:])
    dy = d.values(rows, n)
    ways = [with_gradients(d, lambda x, b=b: vx.linear(x, weight, backend=b), 1) for b in backends(d, "linear")]
    again(d, ways[0], (x, dy), ways[1:])


def grouped_linear(d: Draw) -> None:
    k, n = d.kind([(64, 64), (256, 520), (512, 384), (33, 8)])
    experts, rows = d.kind([1, 4, 16]), d.rows()
    x, weight = cancelling(rows, k, experts * n, d.seed, d.dtype, d.device)
    x, weight = d.special(x.clamp(-64, 64) if d.dtype == torch.float16 else x), weight.view(experts, n, k)
    ids = torch.randint(experts, (rows,), generator=d.g).sort().values
    ends = torch.bincount(ids, minlength=experts).cumsum(0)
    offset = torch.cat([ends.new_zeros(1), ends]).to(d.device, torch.int32)
    row = d.int(0, rows - 1)
    expected = vx.linear(d.placed(x[row : row + 1]), weight[int(ids[row])])
    for backend in backends(d, "grouped_linear"):
        actual = vx.grouped_linear(d.placed(x), weight, offset, backend=backend)
        assert_bitwise(actual[row : row + 1], expected, f"row {row} of expert {int(ids[row])} by {backend}")


def moe_inputs(d: Draw) -> tuple[Tensor, ...]:
    experts, hidden, inner = d.kind([(8, 64, 64), (16, 256, 128), (4, 40, 24), (64, 128, 64)])
    rows, top_k = d.rows(), d.kind([1, 2, 4])
    x, gate_up = cancelling(rows, hidden, experts * 2 * inner, d.seed, d.dtype, d.device)
    x = d.special(x.clamp(-64, 64) if d.dtype == torch.float16 else x)
    down = d.values(experts, hidden, inner).clamp(-4, 4)
    weights = torch.rand(rows, top_k, generator=d.g, dtype=torch.float32).to(d.device)
    ids = torch.stack([torch.randperm(experts, generator=d.g)[:top_k] for _ in range(rows)])
    return x, weights, ids.to(d.device, torch.int32), gate_up.view(experts, 2 * inner, hidden), down


def fused_moe(d: Draw) -> None:
    x, weights, ids, gate_up, down = moe_inputs(d)

    def way(backend: str | None) -> Callable:
        return lambda x, weights, ids: vx.fused_moe(x, gate_up, down, weights, ids, backend=backend)

    first, *others = (way(b) for b in backends(d, "moe"))
    again(d, first, (x, weights, ids), others)


def moe_route(d: Draw) -> None:
    groups = d.kind([None, None, 2, 4])
    experts = (groups or 1) * d.kind([4, 8, 33])
    options = {"score": d.kind(["softmax", "sigmoid"]), "normalize": d.chance(0.5), "scale": d.of([1.0, 2.5])}
    options |= {"groups": groups, "top_k_groups": groups and d.int(1, groups)}
    bias = 0.3 * d.values(experts, dtype=torch.float32) if d.chance(0.3) else None
    top_k = d.int(1, min(4, experts // (groups or 1)))
    logits = d.special(d.values(d.rows(), experts))
    again(d, lambda x: vx.moe_route(x, top_k, bias=bias, **options), (logits,))


def rmsnorm(d: Draw) -> None:
    n, rows = d.kind([64, 100, 576, 2048, 4096, 1]), d.rows()
    weight, x, dy = d.values(n), d.special(d.values(rows, n)), d.values(rows, n)
    again(d, with_gradients(d, lambda x: vx.rmsnorm(x, weight), 1), (x, dy))
    residual = d.special(d.values(rows, n))
    again(d, lambda x, r: vx.rmsnorm(x, weight, residual=r), (x, residual))
    again(d, with_gradients(d, lambda x, g: vx.rmsnorm_gated(x, g, weight), 2), (x, residual, dy))


def layer_norm(d: Draw) -> None:
    n, rows = d.kind([64, 100, 576, 2048, 4096, 1]), d.rows()
    weight, bias = (d.values(n) if d.chance(0.7) else None for _ in range(2))
    x, dy, residual = d.special(d.values(rows, n)), d.values(rows, n), d.special(d.values(rows, n))
    again(d, with_gradients(d, lambda x: vx.layer_norm(x, weight, bias), 1), (x, dy))
    again(d, lambda x, r: vx.layer_norm(x, weight, bias, residual=r), (x, residual))


def rope(d: Draw) -> None:
    dim, rotary = d.kind([(64, 64), (128, 128), (80, 32), (6, 4)])
    rows, heads = d.rows(), d.kind([(3, 1), (4, 4), (8, 2)])
    q, k = (d.special(d.values(rows, h, dim)) for h in heads)
    inv_freq = (10000.0 ** -(torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)).to(d.device)
    positions = torch.randint(0, 1 << 20, (rows,), generator=d.g).to(d.device)
    interleaved = d.chance(0.3)

    def run(q: Tensor, k: Tensor, positions: Tensor) -> Outputs:
        cos, sin = vx.rope_cos_sin(positions, inv_freq, dtype=q.dtype)
        return *vx.rope(q, k, cos, sin, interleaved=interleaved), cos, sin

    again(d, run, (q, k, positions))


def linear_silu_mul(d: Draw) -> None:
    k, inner = d.kind([(64, 64), (520, 256), (576, 1536), (1024, 1024), (2048, 520), (96, 8), (7, 33)])
    rows = d.of([d.rows(), d.int(1, 64)])
    x, weight = cancelling(rows, k, 2 * inner, d.seed, d.dtype, d.device)
    half = weight[inner:] if d.chance(0.5) else weight[:inner]
    half.copy_(d.values(inner, k) * k**-0.5)  # where gates and ups both cancel, their product is next to nothing
    x = d.special(x.clamp(-64, 64) if d.dtype == torch.float16 else x)
    bias = d.placed(d.values(2 * inner)) if d.chance(0.2) else None
    activation = d.kind(["silu", "gelu_tanh"])

    def way(backend: str | None) -> Callable:
        return lambda x: vx.linear_silu_mul(x, weight, bias, activation=activation, backend=backend)

    first, *others = (way(b) for b in backends(d, "linear_silu_mul"))
    again(d, first, (x,), (*others, lambda x: vx.silu_mul(vx.linear(x, weight, bias), activation=activation)))


def silu_mul(d: Draw) -> None:
    n, rows = d.kind([64, 100, 1536, 7]), d.rows()
    gate, up, dy = d.special(d.values(rows, n)), d.special(d.values(rows, n)), d.values(rows, n)
    activation, approximate = d.kind(["silu", "gelu_tanh"]), d.kind(["none", "tanh"])
    again(d, with_gradients(d, lambda g, u: vx.silu_mul(g, u, activation=activation), 2), (gate, up, dy))
    again(d, with_gradients(d, lambda x: vx.gelu(x, approximate=approximate), 1), (gate, dy))
    again(d, with_gradients(d, vx.sigmoid_mul, 2), (up, gate if d.chance(0.5) else gate[:, :1], dy))


def log_softmax(d: Draw) -> None:
    n, rows = d.kind([1, 64, 1000, 4097, 20000]), d.rows()
    x, dy = d.special(d.values(rows, n)), d.values(rows, n)
    run = with_gradients(d, vx.log_softmax, 1)
    again(d, lambda x, dy: run(x, dy.to(vx.log_softmax(x[:1]).dtype)), (x, dy))


def mean(d: Draw) -> None:
    x = d.special(d.values(d.rows(), d.kind([1, 64, 1000, 4097, 20000])))
    again(d, d.of([lambda x: vx.mean(x, -1), lambda x: vx.sum(x, -1)]), (x,))


def linear_cross_entropy(d: Draw) -> None:
    hidden, vocabulary = d.kind([(64, 500), (128, 3000), (256, 1300), (40, 129)])
    rows = d.rows()
    x, weight = cancelling(rows, hidden, vocabulary, d.seed, d.dtype, d.device)
    x = d.special((x.float() / x.float().abs().amax(-1, keepdim=True).clamp(min=1e-6)).to(d.dtype))
    target = torch.randint(vocabulary, (rows,), generator=d.g).to(d.device)
    temperature = d.values(rows, dtype=torch.float32).abs().clamp(0.3, 3.0)
    softcap = d.kind([None, None, 5.0])

    def way(backend: str | None) -> Callable:
        def run(x: Tensor, target: Tensor, temperature: Tensor, up: Tensor, up_entropy: Tensor) -> Outputs:
            x = x.detach().requires_grad_()
            options = {"temperature": temperature, "softcap": softcap, "backend": backend}
            logprob, entropy = vx.linear_logprobs(x, weight, target, return_entropy=True, **options)
            (dx,) = torch.autograd.grad((logprob, entropy), x, (up, up_entropy))
            return logprob.detach(), entropy.detach(), dx

        return run

    ups = d.values(rows, dtype=torch.float32), d.values(rows, dtype=torch.float32)
    first, *others = (way(b) for b in backends(d, "head"))
    again(d, first, (x, target, temperature.contiguous(), *ups), [] if softcap else others)
    logits = vx.linear_logits(x, weight, softcap=softcap) / temperature[:, None]
    expected = vx.log_softmax(logits).gather(1, target[:, None])[:, 0]
    assert_bitwise(first(x, target, temperature, *ups)[0], expected, "linear_logprobs against log_softmax")


def sampler(d: Draw) -> None:
    n, rows = d.kind([2, 65, 1025, 20000]), d.rows()
    logits = d.special(d.values(rows, n, dtype=torch.float32))
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=d.g).to(d.device)
    positions = torch.randint(0, 2**40, (rows,), generator=d.g).to(d.device)

    def column(choices: Sequence[float], dtype: torch.dtype) -> Tensor:
        picks = torch.randint(len(choices), (rows,), generator=d.g)
        return torch.tensor(choices, dtype=dtype)[picks].to(d.device)

    temperature, top_k = column([0.0, 0.3, 1.0, 1.7], torch.float32), column([0, 1, 5, 200], torch.int64)
    top_p, min_p = column([1.0, 0.95, 0.5, 0.01], torch.float32), column([0.0, 0.02, 0.3], torch.float32)

    def run(logits, seeds, positions, temperature, top_k, top_p, min_p):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return vx.sample(logits, seeds, positions, **options)

    again(d, run, (logits, seeds, positions, temperature, top_k, top_p, min_p))


# Vocabulary and width: for the kernels that draw where logits are made, fewer tiles than a GPU has processors, and more
HEADS = (1, 8), (130, 64), (1025, 200), (20_000, 64), (38_659, 512), (32_000, 2048)


@functools.lru_cache(1)
def head(vocabulary: int, width: int, dtype: torch.dtype, device: str) -> Tensor:
    """The weight of a campaign: rows of which half come twice, so that logits are tied, a few of them special."""
    g = torch.Generator(device).manual_seed(vocabulary)
    weight = torch.randn(vocabulary, width, generator=g, dtype=torch.float32, device=device).to(dtype)
    if vocabulary > 8:
        weight[2:10] = special_rows(weight[2:10], first=3, kinds=SMALL)
    return weight[torch.randint(vocabulary, (vocabulary,), generator=g, device=device)]


def linear_sample(d: Draw) -> None:
    vocabulary, width = d.kind(HEADS if d.device == "cuda" else HEADS[:4])
    dtype, softcap = d.kind([torch.bfloat16, torch.bfloat16, d.dtype]), d.kind([None, None, 5.0])
    rows = d.of([d.rows(), d.int(1, 8), d.int(9, 128), d.int(129, 400)] if d.device == "cuda" else [d.rows()])
    weight = head(vocabulary, width, dtype, d.device)
    x = tricky(rows, width, seed=d.seed, device=d.device)
    scale = torch.rand(rows, 1, generator=d.g, dtype=torch.float32) * d.of([0.01, 0.3, 3.0]) / width**0.5
    x = d.special((x * scale.to(d.device)).to(dtype))
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=d.g).to(d.device)
    positions = torch.randint(0, 2**40, (rows,), generator=d.g).to(d.device)
    choices = torch.tensor(d.of([[1.0], [0.0, 0.3, 1.0, 1.0, 1.7, 1e-4], [40.0, 0.7, 1e-3, 1e-30, 1e38]]))
    temperature = choices[torch.randint(len(choices), (rows,), generator=d.g)].to(d.device, torch.float32)

    def way(backend: str | None) -> Callable:
        def run(x: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor) -> Outputs:
            options = {"temperature": temperature, "softcap": softcap, "backend": backend}
            return vx.linear_sample(x, weight, seeds, positions, **options)

        return run

    first, *others = (way(b) for b in backends(d, "linear_sample"))
    again(d, first, (x, seeds, positions, temperature), others)
    logits = vx.linear_logits(x, weight, softcap=softcap)
    expected = vx.sample(logits, seeds, positions, temperature=temperature)
    assert_bitwise(first(x, seeds, positions, temperature), expected, "linear_sample against sample")


def kv_cache(d: Draw) -> None:
    rows, heads = d.rows(), d.kind([1, 3, 8])
    dim, dv, page = *d.kind([(64, 64), (192, 128), (5, 7)]), d.kind([1, 4, 16])
    pages = -(-rows // page) + 3
    k, v = d.special(d.values(rows, heads, dim)), d.special(d.values(rows, heads, dv))
    caches = [d.values(pages, page, heads, size) for size in (dim, dv)]
    slots = torch.randperm(pages * page, generator=d.g)[:rows].to(d.device)
    slots[torch.rand(rows, generator=d.g).to(d.device) < 0.2] = -1
    expected = [c.clone() for c in caches]
    for cache, x in zip(expected, (k, v)):
        cache.flatten(0, 1)[slots[slots >= 0]] = x[slots >= 0]
    order = torch.randperm(rows, generator=d.g).to(d.device)
    vx.kv_cache_store(d.placed(k[order]), d.placed(v[order]), *caches, slots[order].contiguous())
    assert_bitwise(tuple(caches), tuple(expected), "the cache")


def attention(d: Draw) -> None:
    hk, group = d.kind([1, 2]), d.kind([1, 2, 4])
    dim, dv = d.kind([(64, 64), (128, 128), (128, 128), (256, 256), (80, 80), (192, 128)])
    most = 700 if d.device == "cuda" else 150
    lengths = [d.of([1, 2, d.int(1, 70), d.int(1, most)]) for _ in range(d.int(1, 4))]
    q, k, v = attention_inputs(lengths, hk * group, hk, dim, dv, seed=d.seed, dtype=torch.float32, device=d.device)
    q, k, v = (x.clamp(-64, 64).to(d.dtype) for x in (q, k, v))
    options = {"window": d.kind([None, None, 50, 200]), "kv_segment": d.kind([None, None, 128, 256])}
    options["softcap"] = d.kind([None, None, 20.0])
    chosen = d.int(0, len(lengths) - 1)
    begin, end = sum(lengths[:chosen]), sum(lengths[: chosen + 1])
    for x in (q, k, v):  # all but one sequence: special values next door
        beside = d.special(x)
        x[:begin], x[end:] = beside[:begin], beside[end:]
    cu = offsets(lengths, d.device)
    whole = vx.attention_varlen(q, k, v, cu, max(lengths), **options)
    expected = whole[begin:end]
    parts = [d.placed(x[begin:end]) for x in (q, k, v)]
    alone = vx.attention_varlen(*parts, offsets([end - begin], d.device), end - begin, **options)
    assert_bitwise(alone, expected, f"sequence {chosen} alone")
    # the same from pages: a chunk at the end of some sequences, single queries of others, keys behind them poisoned
    page = d.kind([8, 16, 64, 128])
    reach = [d.int(1, n) for n in lengths]  # keys that are cached
    counts = [d.of([1, d.int(1, n)]) for n in reach]
    pages = Pages.of(k, v, lengths, page, seed=d.seed).put(k, v)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    poison = torch.cat([torch.arange(s + r, s + n) for s, r, n in zip(starts, reach, lengths)]).to(d.device)
    value = d.of([float("nan"), float("inf"), torch.finfo(d.dtype).max])
    for cache in (pages.k_cache, pages.v_cache):
        cache.flatten(0, 1)[pages.slots[poison]] = value
    rows = torch.cat([torch.arange(s + r - c, s + r) for s, r, c in zip(starts, reach, counts)]).to(d.device)
    context = torch.tensor(reach, dtype=torch.int32, device=d.device)
    paged = vx.attention_paged(
        d.placed(q[rows]), pages.k_cache, pages.v_cache, pages.block_table, context, offsets(counts, d.device),
        max(counts), **options,
    )  # fmt: skip
    assert_bitwise(paged, whole[rows], f"from pages of {page}: {counts} queries of {reach} keys")


def causal_conv(d: Draw) -> None:
    channels, width = d.kind([1, 16, 70, 300]), d.kind([2, 4, 4, 8])
    activation, ring = d.kind(["silu", None]), 16
    lengths = [d.of([1, 2, d.int(1, 70)]) for _ in range(d.int(1, 4))]
    x, weight = d.values(sum(lengths), channels), d.values(channels, width)
    bias = d.values(channels) if d.kind([True, False]) else None
    chosen = d.int(0, len(lengths) - 1)
    begin, end = sum(lengths[:chosen]), sum(lengths[: chosen + 1])
    beside = d.special(x)
    x = torch.cat([beside[:begin], x[begin:end], beside[end:]])

    def run(x: Tensor, lengths: list[int]) -> Tensor:
        return vx.causal_conv(x, weight, bias, cu_seqlens=offsets(lengths, d.device), activation=activation)

    expected = run(x, lengths)[begin:end]
    x = d.placed(x[begin:end])
    assert_bitwise(run(x, [end - begin]), expected, f"sequence {chosen} alone")
    taps, outs, at = torch.full((3, ring, channels), torch.nan, dtype=x.dtype, device=d.device), [], 0
    while at < len(x):
        count = min(d.of([1, 1, 3, d.int(1, 40)]), len(x) - at)
        step = [torch.tensor([v], dtype=torch.int32, device=d.device) for v in (1, at + count)]
        call = *step, offsets([count], d.device)
        outs.append(vx.causal_conv_paged(x[at : at + count], weight, bias, taps, *call, activation=activation))
        at += count
    assert_bitwise(torch.cat(outs), expected, f"in {len(outs)} calls")


def gated_delta(d: Draw) -> None:
    hk, group = d.kind([1, 2]), d.kind([1, 2, 3])
    dk, dv = d.kind([(16, 16), (32, 48), (64, 64), (128, 128)])
    options = {"qk_l2norm": d.kind([True, True, False])}
    lengths = [d.of([1, 2, 64, d.int(1, 70), d.int(1, 200)]) for _ in range(d.int(1, 3))]
    total = sum(lengths)
    q, k, v = d.values(total, hk, dk), d.values(total, hk, dk), d.values(total, hk * group, dv)
    if not options["qk_l2norm"]:
        k = (k.float() / (1 + k.float().norm(dim=-1, keepdim=True))).to(k.dtype)
    g = -d.values(total, hk * group, dtype=torch.float32).abs()
    beta = torch.sigmoid(d.values(total, hk * group, dtype=torch.float32)).to(d.dtype)
    chosen = d.int(0, len(lengths) - 1)
    begin, end = sum(lengths[:chosen]), sum(lengths[: chosen + 1])
    for x in (q, k, v):  # all but one sequence: special values next door
        beside = d.special(x.flatten(1)).view(x.shape)
        x[:begin], x[end:] = beside[:begin], beside[end:]
    rows = q, k, v, g, beta

    def run(rows: Outputs, lengths: list[int]) -> Outputs:
        return vx.gated_delta_varlen(*rows, offsets(lengths, d.device), return_final_state=True, **options)

    out, final = run(rows, lengths)
    out, final = out[begin:end], final[chosen : chosen + 1]
    rows = tuple(d.placed(x[begin:end]) for x in rows)
    assert_bitwise(run(rows, [end - begin]), (out, final), f"sequence {chosen} alone")
    shapes = ((hk * group, dk, dv), (64, hk, dk), (64, hk * group, dv), (64, hk * group))
    memory = [torch.full((3, *shape), torch.nan, dtype=torch.float32, device=d.device) for shape in shapes]
    memory[1], outs, at = memory[1].to(d.dtype), [], 0
    while at < end - begin:
        count = min(d.of([1, 1, 1, 3, 16, 64, d.int(1, 130)]), end - begin - at)
        step = [torch.tensor([v], dtype=torch.int32, device=d.device) for v in (1, at + count)]
        call = *step, offsets([count], d.device), count
        outs.append(vx.gated_delta_paged(*(x[at : at + count] for x in rows), *memory, *call, **options))
        at += count
    assert_bitwise(torch.cat(outs), out, f"in {len(outs)} calls")
    if at % 64 == 0:
        assert_bitwise(memory[0][1:2], final, "the state where a chunk ends")


ROOMS: dict[str, Callable[[Draw], None]] = {
    check.__name__: check
    for check in (
        attention, causal_conv, fused_moe, gated_delta, grouped_linear, kv_cache, layer_norm, linear,
        linear_cross_entropy, linear_sample, linear_silu_mul, log_softmax, mean, moe_route, rmsnorm, rope, sampler,
        silu_mul,
    )
}  # fmt: skip


def attack(room: str, device: str, checks: int, seed: int, until: float = float("inf")) -> Iterator[tuple[int, str]]:
    """Yields (seed, what went wrong or "") for each check; stops at a time of time.time()."""
    for number in range(seed, seed + checks):
        if time.time() > until:
            return
        try:
            ROOMS[room](Draw(number, device, LONG.get(room, CAMPAIGN)))
            yield number, ""
        except AssertionError as error:
            yield number, str(error)
        except Exception as error:  # an op must take all that is drawn here
            yield number, f"{type(error).__name__}: {error}"


def campaign(room: str, device: str, checks: int, seed: int, until: float) -> tuple[str, int, float, list]:
    """Some checks of a room in this process: how many were made, in how many seconds, and what went wrong."""
    begin, found = time.monotonic(), list(attack(room, device, checks, seed, until))
    return room, len(found), time.monotonic() - begin, [(number, error) for number, error in found if error]


def campaigns(rooms: Sequence[str], checks: int, seed: int) -> list[tuple[str, int, int]]:
    """(room, how many checks, first seed) of every campaign; those of rooms that take longest first."""
    found = []
    for room in sorted(rooms, key=lambda room: room not in LONG):
        size, first = LONG.get(room, CAMPAIGN), seed
        while first < seed + checks:
            end = min((first // size + 1) * size, seed + checks)
            found.append((room, end - first, first))
            first = end
    return found


class Tally:
    """What came of a room's campaigns; prints each failure, and a line when the last is done."""

    def __init__(self, room: str, left: int, args: argparse.Namespace):
        self.room, self.left, self.args = room, left, args
        self.done = self.differ = 0
        self.seconds = 0.0

    def add(self, done: int, seconds: float, failures: list[tuple[int, str]]) -> None:
        self.left, self.done, self.seconds = self.left - 1, self.done + done, self.seconds + seconds
        self.differ += len(failures)
        for number, error in failures:
            sys.stdout.write(f"{self.room}: seed {number}: {error}\n")
        if self.left == 0:
            counts = {"checks": self.done, "differ": self.differ, "seconds": round(self.seconds, 1)}
            if self.args.json:
                with self.args.json.open("a") as file:
                    file.write(json.dumps({"room": self.room, "device": self.args.device, **counts}) + "\n")
            sys.stdout.write(f"{self.room:<22} {self.done} checks, {self.differ} differ, {self.seconds:.1f} s\n")
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(ROOMS)}; all by default")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checks", type=int, default=1000, help="for each room")
    parser.add_argument("--seed", type=int, default=0, help="of the first check; the next ones count on")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the most for all of them")
    parser.add_argument("--jobs", type=int, default=1, help="campaigns at a time, in as many processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line for each room")
    args = parser.parse_args()
    if unknown := sorted(set(args.rooms) - set(ROOMS)):
        parser.error(f"no room is called {', '.join(unknown)}")
    until, todo = time.time() + args.seconds, campaigns(args.rooms or list(ROOMS), args.checks, args.seed)
    tallies = {room: Tally(room, sum(one[0] == room for one in todo), args) for room, *_ in todo}
    if args.jobs == 1:
        for room, checks, seed in todo:
            tallies[room].add(*campaign(room, args.device, checks, seed, until)[1:])
    else:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(args.jobs, context, torch.set_num_threads, (2,)) as pool:
            for one in as_completed([pool.submit(campaign, r, args.device, n, s, until) for r, n, s in todo]):
                room, *came = one.result()
                tallies[room].add(*came)
    return int(any(tally.differ or not tally.done for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
