"""Golden digests: what every op gives on fixed inputs, so that bits do not change unannounced.

    python tests/golden.py record            the class of this machine's GPU, else of its CPU (--device says which)
    python -m pytest tests/test_golden.py    compares

On a GPU the canonical kernels are recorded (VEXACT_ADMIT=0), in several processes, since most of the time goes into
compiling them; what is admitted has to have their bits. Inputs are made of integers alone, bit by bit, so that they
depend on no random number generator and no rounding. Record anew only where bits are meant to change, and say so in the
commit: the fingerprint changes by itself.
"""

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from golden_inputs import Inputs
from torch import Tensor

import vexact_ops as vx

PATH = Path(__file__).with_name("golden.json")
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- cases ----------------------------------------------------------------------------------------------------------


def with_grads(make: Inputs, fn: Callable, *given: Tensor) -> list[Tensor]:
    """What fn returns, and the gradients of all that it is given."""
    leaves = [x.detach().requires_grad_() for x in given]
    out = fn(*leaves)
    out = [out] if isinstance(out, Tensor) else list(out)
    wanted = [x for x in out if x.requires_grad]
    douts = [make.values(*x.shape).to(x.dtype) for x in wanted]
    return [*out, *torch.autograd.grad(wanted, leaves, douts)]


def offsets(lengths: list[int], device: str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


Case = tuple[str, str, Callable[[Inputs], list[Tensor]]]


def _products(device: str, half: bool) -> Iterator[Case]:
    for rows, n, k in ((1, 130, 70), (5, 33, 513), (7, 9, 1), (200, 256, 512)):
        size = f"{rows}x{n}x{k}"

        def run(make, rows=rows, n=n, k=k):
            x, w = make.cancelling(rows, k, n)
            return with_grads(make, vx.linear, x, w, make.values(n))

        yield "linear", f"bias {size}", run

        def wide(make, rows=rows, n=n, k=k):
            x, w = make.cancelling(rows, k, n)
            hard = make.hard(rows, k)
            return [*with_grads(make, lambda x, w: vx.linear(x, w, out_dtype=torch.float32), x, w), vx.linear(hard, w)]

        yield "linear", f"fp32 out, special values {size}", wide

    def bmm(make):
        a, b = make.cancelling(6, 96, 40)
        a, b = torch.stack([a, a.flip(1)]), torch.stack([b.t(), b.t()])
        return [*with_grads(make, vx.bmm, a, b), vx.bmm(a, b, out_dtype=torch.float32)]

    yield "linear", "bmm", bmm

    for rows, width, k in ((1, 24, 70), (13, 256, 512), (70, 64, 200)):
        for activation in ("silu", "gelu_tanh"):

            def gated(make, rows=rows, width=width, k=k, activation=activation):
                x, w = make.cancelling(rows, k, 2 * width)
                plain, hard = make.values(width, k, low=-6, high=-2), make.hard(rows, k)
                weights = torch.cat([w[:width], plain]), torch.cat([plain, w[width:]])
                return [vx.linear_silu_mul(y, v, activation=activation) for y in (x, hard) for v in weights]

            yield "linear_silu_mul", f"{activation} {rows}x{width}x{k}", gated

    for sizes, n, k in (([3, 0, 1, 20], 48, 70), ([64, 0, 100, 36], 256, 512)):

        def grouped(make, sizes=sizes, n=n, k=k):
            rows = sum(sizes)
            x, w = make.cancelling(rows, k, n * len(sizes))
            w, at = w.view(len(sizes), n, k), offsets(sizes, device)
            fn = lambda x, w: vx.grouped_linear(x, w, at)  # noqa: E731
            return [*with_grads(make, fn, x, w), vx.grouped_linear(make.hard(rows, k), w, at)]

        yield "grouped_linear", f"{sum(sizes)}x{n}x{k}", grouped

    for tokens, hidden, width in ((1, 64, 24), (19, 70, 33), (150, 256, 128)):
        for activation in ("silu", "gelu_tanh", "swigluoai"):

            def moe(make, tokens=tokens, hidden=hidden, width=width, activation=activation):
                experts, k = 6, 3
                x = make.values(tokens, hidden)
                up, down = make.values(experts, 2 * width, hidden), make.values(experts, hidden, width)
                weights = make.values(tokens, k).abs().float()
                ids = make.distinct(tokens, k, experts)
                clamped = activation == "swigluoai"
                biases = (make.values(experts, 2 * width, high=3), make.values(experts, hidden)) if clamped else ()

                def fn(x, up, down, weights, *biases):
                    more = dict(zip(("gate_up_bias", "down_bias"), biases))
                    return vx.fused_moe(x, up, down, weights, ids, activation=activation, **more)

                hard = fn(make.hard(tokens, hidden), up, down, weights, *biases)
                return [*with_grads(make, fn, x, up, down, weights, *biases), hard]

            yield "fused_moe", f"{activation} {tokens}x{hidden}x{width}", moe


def _elementwise(device: str, half: bool) -> Iterator[Case]:
    for style in ("llama", "gemma"):
        for n in (1, 70, 1024):

            def norm(make, style=style, n=n):
                x, weight, residual = make.tricky(9, n), make.values(n), make.values(9, n)
                both = lambda x, w, r: vx.rmsnorm(x, w, 1e-5, r, style=style)  # noqa: E731
                one = lambda x, w: vx.rmsnorm(x, w, style=style)  # noqa: E731
                hard = vx.rmsnorm(make.hard(12, n), weight, style=style)
                return [*with_grads(make, one, x, weight), *with_grads(make, both, x, weight, residual), hard]

            yield "rmsnorm", f"{style} N={n}", norm

    for n in (1, 70, 1024):

        def layer(make, n=n):
            x, weight, bias, residual = make.tricky(9, n), make.values(n), make.values(n), make.values(9, n)
            both = lambda x, w, r: vx.layer_norm(x, w, None, 1e-5, r)  # noqa: E731
            hard = vx.layer_norm(make.hard(12, n), weight, bias), vx.layer_norm(make.hard(12, n))
            return [
                *with_grads(make, vx.layer_norm, x, weight, bias),
                *with_grads(make, both, x, weight, residual),
                *hard,
            ]

        yield "layer_norm", f"N={n}", layer

    for form in ("none", "tanh"):

        def gelu(make, form=form):
            fn = lambda x: vx.gelu(x, approximate=form)  # noqa: E731
            return [*with_grads(make, fn, make.tricky(9, 70, low=-4, high=4)), fn(make.hard(12, 70))]

        yield "silu_mul", f"gelu {form}", gelu

    for interleaved in (False, True):

        def rope(make, interleaved=interleaved):
            q, k = make.tricky(11, 4, 64), make.values(11, 2, 64)
            angles = make.below(1 << 20, 11), torch.tensor([1.0, 0.25, 2.0**-9, 2.0**-20] * 4, device=device)
            found = []
            for dtype in {make.dtype: 0, torch.float32: 0}:
                cos, sin = vx.rope_cos_sin(*angles, scaling=1.25, dtype=dtype)
                fn = lambda q, k, c=cos, s=sin: vx.rope(q, k, c, s, interleaved=interleaved)  # noqa: E731
                found += [cos, sin, *with_grads(make, fn, q, k)]
            k_cache, v_cache = make.values(3, 8, 2, 64), make.values(3, 8, 2, 64)
            slots = torch.tensor([5, 0, -1, 23, 7, 8, 9, -1, 10, 2, 1], device=device)
            stored = vx.rope_kv_store(q, k, k.flip(0), cos, sin, k_cache, v_cache, slots, interleaved=interleaved)
            return [*found, stored, k_cache, v_cache]

        yield "rope", "interleaved" if interleaved else "halves", rope

    def axes(make):
        positions = make.below(1 << 20, 33).view(3, 11)
        frequencies = torch.tensor([1.0, 0.25, 2.0**-9, 2.0**-20] * 4, device=device)
        return list(vx.rope_cos_sin(positions, frequencies, axes=[0, 1, 2, 0] * 4, dtype=make.dtype))

    yield "rope", "axes", axes

    for activation in ("silu", "gelu_tanh"):

        def gated(make, activation=activation):
            gate, up = make.tricky(9, 70, low=-8, high=5), make.tricky(9, 70)
            two = lambda g, u: vx.silu_mul(g, u, activation=activation)  # noqa: E731
            one = lambda x: vx.silu_mul(x, activation=activation)  # noqa: E731
            hard = vx.silu_mul(make.hard(44, 64), activation=activation)
            return [*with_grads(make, two, gate, up), *with_grads(make, one, torch.cat([gate, up], 1)), hard]

        yield "silu_mul", activation, gated

    for n in (1, 70, 1500):

        def soft(make, n=n):
            x = make.tricky(9, n, low=-8, high=3)
            wide = lambda x: vx.log_softmax(x, out_dtype=torch.float32)  # noqa: E731
            hard = vx.log_softmax(make.hard(44, n))
            return [*with_grads(make, vx.log_softmax, x), *with_grads(make, wide, x), hard]

        yield "log_softmax", f"N={n}", soft

        def mean(make, n=n):
            x = make.tricky(3, 5, n, low=-8, high=8)
            found = [vx.mean(make.hard(44, n)), vx.sum(make.hard(44, n), -1), vx.mean(x, None), vx.sum(x)]
            for dim in (-1, 0, (0, 2)):
                found += with_grads(make, lambda x, d=dim: vx.mean(x, d), x)
                found += with_grads(make, lambda x, d=dim: vx.sum(x, d), x)
            return found

        yield "mean", f"N={n}", mean

    def store(make):
        k, v = make.hard(40, 64).view(20, 2, 64), make.hard(40, 32).view(20, 2, 32)
        k_cache, v_cache = make.values(4, 16, 2, 64), make.values(4, 16, 2, 32)
        vx.kv_cache_store(k, v, k_cache, v_cache, make.distinct(1, 20, 64, torch.int64)[0])
        return [k_cache, v_cache]

    yield "kv_cache", "store", store

    for options in (
        {},
        {"normalize": False, "scale": 2.5},
        {"score": "sigmoid"},
        {"score": "sigmoid", "groups": 4, "top_k_groups": 2, "bias": True},
    ):

        def route(make, options=options):
            logits, bias = make.tricky(30, 16), make.values(16).float()
            known = {**options, "bias": bias} if options.get("bias") else options
            return with_grads(make, lambda x: vx.moe_route(x, 3, **known), logits)

        yield "moe_route", " ".join(f"{key}={value}" for key, value in options.items()) or "softmax", route


def _head(device: str, half: bool) -> Iterator[Case]:
    tokens, width, vocabulary = 37, 64, 1100

    def given(make):
        hidden, weight = make.values(tokens, width), make.values(vocabulary, width, low=-6, high=-2)
        return hidden, weight, make.below(vocabulary, tokens)

    for softcap in (None, 7.5):
        name = "" if softcap is None else f", softcap={softcap}"

        def logits(make, softcap=softcap):
            hidden, weight, _ = given(make)
            hard = vx.linear_logits(make.hard(44, width), weight, softcap=softcap)
            return [*with_grads(make, lambda h, w: vx.linear_logits(h, w, softcap=softcap), hidden, weight), hard]

        yield "linear_cross_entropy", f"logits{name}", logits

        for kind in ("one temperature", "a temperature each"):

            def logprobs(make, softcap=softcap, kind=kind):
                hidden, weight, target = given(make)
                each = make.values(tokens, low=-1, high=0).abs().float()
                options = {"temperature": 0.7 if kind == "one temperature" else each, "softcap": softcap}
                fn = lambda h, w: vx.linear_logprobs(h, w, target, return_entropy=True, **options)  # noqa: E731
                hard = vx.linear_logprobs(make.hard(tokens, width), weight, target, **options)
                return [*with_grads(make, fn, hidden, weight), hard]

            yield "linear_cross_entropy", f"logprobs, {kind}{name}", logprobs

        for reduction in ("mean", "sum", "none"):

            def loss(make, softcap=softcap, reduction=reduction):
                hidden, weight, target = given(make)
                target[3::5] = -100
                options = {"reduction": reduction, "softcap": softcap}
                return with_grads(make, lambda h, w: vx.linear_cross_entropy(h, w, target, **options), hidden, weight)

            yield "linear_cross_entropy", f"{reduction}{name}", loss


def _sampler(device: str, half: bool) -> Iterator[Case]:
    for name, options in {
        "greedy": {"temperature": 0.0},
        "plain": {},
        "temperature": {"temperature": 0.6},
        "top_k": {"top_k": 7},
        "top_p": {"top_p": 0.6, "temperature": 1.5},
        "min_p": {"min_p": 0.05},
        "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    }.items():

        def sample(make, options=options):
            logits = torch.cat([make.tricky(20, 1500, low=-6, high=2), make.hard(44, 1500)]).float()
            return list(vx.sample(logits, make.below(1 << 40, 64), make.below(1 << 20, 64), **options))

        yield "sampler", name, sample


def _linear_sample(device: str, half: bool) -> Iterator[Case]:
    cut = {"top_k": 7, "top_p": 0.9, "min_p": 0.01}
    for name, options in {"greedy": {"temperature": 0.0}, "plain": {}, "softcap": {"softcap": 5.0}, "cut": cut}.items():

        def drawn(make, options=options):
            hidden, weight = make.values(70, 64), make.values(1100, 64, low=-6, high=-2)
            each = make.values(70, low=-1, high=0).abs().float()
            found = []
            for rows in (hidden, hidden[:5], make.hard(44, 64)):
                of = make.below(1 << 40, len(rows)), make.below(1 << 20, len(rows))
                found += vx.linear_sample(rows, weight, *of, **{"temperature": each[: len(rows)], **options})
            return found

        yield "linear_sample", name, drawn


def _delta(device: str, half: bool) -> Iterator[Case]:
    lengths = [1, 33, 70]
    for width, bias, activation in ((4, True, "silu"), (4, False, None), (2, False, "silu"), (8, True, None)):

        def conv(make, width=width, bias=bias, activation=activation):
            x, weight = make.tricky(sum(lengths), 70), make.values(70, width)
            more, cu = [make.values(70)] if bias else [], offsets(lengths, device)
            fn = lambda x, w, b=None: vx.causal_conv(x, w, b, cu_seqlens=cu, activation=activation)  # noqa: E731
            taps, count = make.values(4, 8, 70), torch.tensor([9, 33, 80], dtype=torch.int32, device=device)
            slots = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
            options = {"activation": activation}
            bias_or_none = more[0] if more else None
            y = vx.causal_conv_paged(x, weight, bias_or_none, taps, slots, count, cu, **options)
            return [*with_grads(make, fn, x, weight, *more), y, taps]

        yield "causal_conv", f"W={width} bias={bias} {activation}", conv

    for heads, dims, norm in (((1, 2), (32, 48), True), ((2, 2), (16, 16), False), ((1, 1), (24, 40), True)):

        def rows(make, count, heads=heads, dims=dims, norm=norm):
            low = {} if norm else {"low": -4, "high": -3}  # without the norm, keys are short enough not to explode
            q, k = (make.values(count, heads[0], dims[0], **low) for _ in "qk")
            g = -make.values(count, heads[1], low=-12, high=-2).float().abs()
            return q, k, make.values(count, heads[1], dims[1]), g, make.values(count, heads[1], low=-5, high=-2).abs()

        def train(make, rows=rows, heads=heads, dims=dims, norm=norm):
            initial = make.values(3, heads[1], *dims, low=-6, high=-2).float()
            cu, given = offsets(lengths, device), rows(make, sum(lengths))
            options = {"qk_l2norm": norm, "return_final_state": True}
            fn = lambda *t: vx.gated_delta_varlen(*t[:5], cu, initial_state=t[5], **options)  # noqa: E731
            return with_grads(make, fn, *given, initial)

        def paged(make, rows=rows, heads=heads, dims=dims, norm=norm):
            memory = [make.values(4, heads[1], *dims, low=-6, high=-2).float(), make.values(4, 64, heads[0], dims[0])]
            memory += [make.values(4, 64, heads[1], dims[1], low=-4, high=0).float()]
            sums = -(torch.arange(1, 65, dtype=torch.float32) / 64)[:, None]  # exact in any mode of rounding
            memory += [sums.expand(4, 64, heads[1]).contiguous().to(device)]
            counts = [1, 1, 70, 3]
            step = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([2, 0, 3, 1], [64, 90, 100, 3])]
            call = *step, offsets(counts, device), max(counts)
            return [vx.gated_delta_paged(*rows(make, sum(counts)), *memory, *call, qk_l2norm=norm), *memory]

        name = f"{heads[0]}/{heads[1]} x {dims[0]}/{dims[1]}{'' if norm else ', no norm'}"
        yield "gated_delta", name, train
        yield "gated_delta", f"{name}, paged", paged

    def gates(make):
        a, b = make.tricky(20, 48, low=-4, high=5), make.tricky(20, 48, low=-4, high=5)
        a_log, dt_bias = make.values(48).float(), make.values(48).float()
        return with_grads(make, vx.delta_gates, a, b, a_log, dt_bias)

    yield "gated_delta", "gates", gates

    for n in (1, 70, 1500):

        def gated(make, n=n):
            x, gate, weight = make.tricky(9, n), make.tricky(9, n, low=-4, high=3), make.values(n)
            return [
                *with_grads(make, vx.rmsnorm_gated, x, gate, weight),
                vx.rmsnorm_gated(make.hard(44, n), make.hard(44, n), weight),
            ]

        yield "rmsnorm", f"gated N={n}", gated

        def sigmoid(make, n=n):
            x, gate, one = make.tricky(9, n), make.tricky(9, n, low=-4, high=3), make.values(9, 1)
            hard = vx.sigmoid_mul(make.hard(44, n), make.hard(44, n))
            return [*with_grads(make, vx.sigmoid_mul, x, gate), *with_grads(make, vx.sigmoid_mul, x, one), hard]

        yield "silu_mul", f"sigmoid N={n}", sigmoid


# What a case has: lengths, (Hq, Hk, D, Dv), options.
ATTENTION = {
    "causal": ([1, 130, 33], (4, 2, 64, 64), {}),
    "one head": ([70], (1, 1, 40, 24), {"scale": 0.3}),
    "no mask": ([5, 130], (2, 2, 64, 64), {"causal": False}),
    "no mask, 72": ([5, 130, 64], (2, 2, 72, 72), {"causal": False}),
    "no mask, 80": ([70], (2, 2, 80, 80), {"causal": False}),
    "window": ([1, 200], (4, 1, 128, 128), {"window": 70}),
    "softcap": ([100, 7], (2, 1, 64, 64), {"softcap": 5.0}),
    "sinks": ([100, 7], (4, 2, 64, 64), {"sinks": True}),
    "window, sinks": ([100, 7], (4, 2, 64, 64), {"sinks": True, "window": 20}),
    "segments": ([1, 270, 129], (2, 1, 128, 128), {"kv_segment": 128}),
    "segments, window": ([300], (2, 1, 64, 64), {"kv_segment": 128, "window": 140}),
    "192/128": ([1, 100], (2, 2, 192, 128), {}),
    "256": ([1, 100], (2, 1, 256, 256), {}),
    "latent": ([1, 70], (3, 1, 576, 512), {}),
    "latent, segments": ([140], (3, 1, 576, 512), {"kv_segment": 128}),
}
LONG = {
    "long": ([1, 1100], (4, 2, 128, 128), {}),
    "long, window": ([1100], (4, 2, 64, 64), {"window": 300}),
    "long, segments": ([1100], (4, 2, 128, 128), {"kv_segment": 256}),
}


def _attention(device: str, half: bool) -> Iterator[Case]:
    named = ATTENTION | LONG if device == "cuda" and half else ATTENTION
    for name, (lengths, (hq, hk, d, dv), options) in named.items():

        def train(make, lengths=lengths, sizes=(hq, hk, d, dv), options=options, grads=False):
            q, k, v = make.keys(lengths, *sizes)
            cu, longest = offsets(lengths, device), max(lengths)
            if options.get("sinks"):
                others = {key: value for key, value in options.items() if key != "sinks"}
                fn = lambda q, k, v, s: vx.attention_varlen(q, k, v, cu, longest, sinks=s, **others)  # noqa: E731
                found = with_grads(make, fn, q, k, v, make.values(sizes[0]))
            else:
                found = with_grads(make, lambda q, k, v: vx.attention_varlen(q, k, v, cu, longest, **options), q, k, v)
            return found[1:] if grads else found[:1]

        yield "attention", f"{name}, training", train
        yield "attention", f"{name}, gradients", lambda make, train=train: train(make, grads=True)
        if options.get("causal", True):

            def paged(make, lengths=lengths, sizes=(hq, hk, d, dv), options=options):
                page, known = 16, dict(options)
                q, k, v = make.keys(lengths, *sizes)
                if options.get("sinks"):
                    known["sinks"] = make.values(sizes[0])
                needed = [-(-length // page) for length in lengths]
                order = make.distinct(1, sum(needed), sum(needed))[0].tolist()
                table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
                caches = [make.values(sum(needed), page, *x.shape[1:]) for x in (k, v)]
                begin = 0
                for row, (length, pages) in enumerate(zip(lengths, needed)):
                    mine, order = order[:pages], order[pages:]
                    table[row, :pages] = torch.tensor(mine)
                    for cache, x in zip(caches, (k, v)):
                        for number, where in enumerate(mine):
                            part = x[begin : begin + length][number * page : (number + 1) * page]
                            cache[where, : len(part)] = part
                    begin += length
                lens = torch.tensor(lengths, dtype=torch.int32, device=device)
                found = []
                for chunk in (max(lengths), 1):  # whole prompts, then the last token alone, as a decode step has it
                    rows = [min(length, chunk) for length in lengths]
                    ends = torch.tensor(lengths).cumsum(0).tolist()
                    mine = torch.cat([q[end - count : end] for end, count in zip(ends, rows)])
                    step = table.to(device), lens, offsets(rows, device), max(rows)
                    found.append(vx.attention_paged(mine, *caches, *step, **known))
                return found

            yield "attention", f"{name}, paged", paged


def dtypes(device: str) -> dict[str, torch.dtype]:
    some = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return some if device == "cpu" else {**some, "fp16": torch.float16}


def cases(device: str) -> Iterator[tuple[str, str, Callable[[], list[Tensor]]]]:
    """(room, name, run): every op and option, in every dtype that the device's kernels take."""
    for family in (
        _products,
        _elementwise,
        _head,
        _linear_sample,
        _sampler,
        _delta,
        _attention,
    ):  # the slowest to compile last
        for short, dtype in dtypes(device).items():
            if family is _sampler and dtype != torch.float32:
                continue
            for room, name, run in family(device, dtype != torch.float32):
                yield room, f"{short} {name}", lambda run=run, dtype=dtype: run(Inputs(dtype, device))


# --- digests --------------------------------------------------------------------------------------------------------


def digest(tensors: list[Tensor]) -> str:
    """Of bytes, dtypes and shapes; any NaN counts as one."""
    found = hashlib.sha256()
    for x in tensors:
        x = x.detach().cpu().contiguous()
        if x.dtype.is_floating_point:
            x = torch.where(x.isnan(), torch.full((), torch.nan, dtype=x.dtype), x)
        found.update(f"{x.dtype} {tuple(x.shape)} ".encode())
        found.update(x.reshape(-1).view(_INTS[x.element_size()]).numpy().tobytes())
    return found.hexdigest()[:16]


@functools.cache
def _cases(device: str) -> list[tuple[str, str, Callable[[], list[Tensor]]]]:
    return list(cases(device))


def _one(number: int, device: str) -> tuple[str, str, str | None, str]:
    """(room, case, digest or None, what went wrong)"""
    room, name, run = _cases(device)[number]
    try:
        return room, name, digest(run()), ""
    except Exception as error:
        return room, name, None, f"{type(error).__name__}: {error}"


def _each(
    device: str, seconds: float, known: dict[str, dict[str, str]], wanted: Callable[[str, str], bool], jobs: int
) -> Iterator[tuple[str, str, str | None, str]]:
    numbers = [number for number, (room, name, _) in enumerate(_cases(device)) if wanted(room, name)]
    numbers = sorted(numbers, key=lambda number: _cases(device)[number][1] in known.get(_cases(device)[number][0], {}))
    if device == "cpu":
        yield from (_one(number, device) for number in numbers)
        return
    end, before = time.monotonic() + seconds, os.environ.get("VEXACT_ADMIT")
    os.environ["VEXACT_ADMIT"] = "0"  # for the processes, which read it
    try:
        with multiprocessing.get_context("spawn").Pool(min(jobs, os.cpu_count() or 1)) as pool:
            done = pool.imap_unordered(functools.partial(_one, device=device), numbers)
            for _ in numbers:
                try:
                    yield done.next(max(0.0, end - time.monotonic()))
                except multiprocessing.TimeoutError:
                    return
    finally:
        os.environ.pop("VEXACT_ADMIT")
        if before is not None:
            os.environ["VEXACT_ADMIT"] = before


def measure(
    device: str,
    seconds: float = 3600.0,
    known: dict[str, dict[str, str]] | None = None,
    wanted: Callable[[str, str], bool] = lambda room, name: True,
    jobs: int = 16,
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """{room: {case: digest}} of the canonical kernels, and what failed; of the wanted ones as many as there is time
    for, and those that are known last. jobs: processes, on a GPU."""
    found, failed = {}, []
    for room, name, value, error in _each(device, seconds, known or {}, wanted, jobs):
        if value is None:
            failed.append(f"{room}: {name}: {error}")
        else:
            found.setdefault(room, {})[name] = value
    return found, failed


def numerics_class(device: str) -> str:
    return vx.numerics(device)["class"]


def stored(name: str) -> dict[str, dict[str, str]] | None:
    return json.loads(PATH.read_text()).get(name) if PATH.exists() else None


def record(device: str, path: Path = PATH, seconds: float = 3600.0) -> str:
    """Measure and write; returns what was done. What there was no time for keeps the digest that it had, if any."""
    name, known = numerics_class(device), json.loads(path.read_text()) if path.exists() else {}
    before, names = known.get(name) or {}, {(room, case) for room, case, _ in _cases(device)}
    found, failed = measure(device, seconds, before)
    changed = [f"{room}: {case}" for room in found for case in found[room]
               if before.get(room, {}).get(case) != found[room][case]]  # fmt: skip
    kept = {room: {case: before[room][case] for case in before[room] if (room, case) in names} for room in before}
    new = {room: kept.get(room, {}) | found.get(room, {}) for room in sorted({*kept, *found})}
    path.write_text(json.dumps(known | {name: new}, indent=1, sort_keys=True) + "\n")
    count = sum(map(len, found.values()))
    lines = [f"{name}: {count} of {len(names)} digests, {len(changed)} new or changed", *changed[:40]]
    return "\n".join([*lines, *(f"failed: {line}" for line in failed)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Golden digests of every op's outputs and gradients.")
    parser.add_argument("what", choices=("record",))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--output", type=Path, default=PATH)
    parser.add_argument("--seconds", type=float, default=3600.0, help="on a GPU: record what is done by then")
    args = parser.parse_args()
    sys.stdout.write(record(args.device, args.output, args.seconds) + "\n")
