"""attention: training, prefill, chunks and decode have the same bits; unseen keys have none; gradients are right.

More than 600 lines in one file because the roads to one row (training, pages, latent keys, kernels of two libraries)
share what compares them.
"""

import functools
import itertools
import os

import pytest
import torch
from conftest import Kinds, interpreted, room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.attention.op import KEY_BLOCK, ROOM
from vexact_ops.attention.reference import attention_varlen_ref
from vexact_ops.testing import (
    Pages,
    assert_bitwise,
    attention_inputs,
    check_attention,
    check_packing,
    check_paging,
    check_repeatable,
    check_unseen,
    offsets,
)

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("attention"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
KINDS = Kinds(
    few=6,
    seed=4,  # whose kinds take every road, as a test holds
    heads=[(9, 3), (4, 2), (2, 2), (7, 1), (16, 2)],
    dims=[(64, 64), (128, 128), (96, 96), (192, 128), (33, 7), (5, 40), (256, 256)],
    windowed=[False, True],
    segment=[None, 1, 2],  # in blocks of keys
    cap_and_sinks=[*[(None, False)] * 3, (3.0, False), (None, True), (3.0, True)],
)
LENGTHS = st.lists(st.sampled_from([0, 1, 3, 30, 63, 64, 65, 100, 130]), min_size=1, max_size=4).filter(any)
WINDOWS = st.sampled_from([1, 20, 64, 70])  # of a kind that has one
ODD = [float("nan"), float("inf")]
SEEDS = st.integers(0, 2**16)


@pytest.mark.skipif("VEXACT_KINDS" in os.environ, reason="VEXACT_KINDS asks for others")
def test_what_a_gpu_sees_takes_every_road():
    for dtype in (torch.bfloat16, torch.float32):
        plain = [kind for kind in KINDS.of(dtype) if kind.cap_and_sinks == (None, False) and min(kind.dims) >= 64]
        assert len({kind.dims for kind in plain}) >= 2 and {kind.windowed for kind in plain} == {False, True}
        assert len({kind.dims for kind in KINDS.of(dtype)}) == 6 and len({kind.heads for kind in KINDS.of(dtype)}) == 5
        assert {kind.segment for kind in KINDS.of(dtype)} == {None, 1, 2}
    assert len({kind.dims for dtype in (torch.bfloat16, torch.float32) for kind in KINDS.of(dtype)}) == 7


def functions(backend, kind, device, window, seed):
    g = torch.Generator().manual_seed(seed + 1)
    softcap, with_sinks = kind.cap_and_sinks
    sinks = torch.randn(kind.heads[0], generator=g).to(device) if with_sinks else None
    segment = kind.segment and kind.segment * KEY_BLOCK[backend]
    options = {"window": window, "softcap": softcap, "kv_segment": segment, "sinks": sinks, "backend": backend}
    return tuple(functools.partial(f, **options) for f in (vx.attention_varlen, vx.attention_paged))


@BACKENDS
@DTYPES
@given(LENGTHS, KINDS.drawn, WINDOWS, st.sampled_from([1, 7, 16, 80]), SEEDS)
def test_every_path_has_the_same_bits(device, backend, dtype, lengths, kind, window, page_size, seed):
    kind = KINDS.at(kind, device, dtype)
    window = window if kind.windowed else None
    varlen, paged = functions(backend, kind, device, window, seed)
    case = {"window": window, "seed": seed, "dtype": dtype, "device": device, "page_sizes": (page_size,)}
    check_attention(varlen, paged, lengths, *kind.heads, *kind.dims, **case)


def gradients(varlen):
    def run(q, k, v, cu, longest):
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out = varlen(q, k, v, cu, longest)
        weight = torch.cos(torch.arange(out.shape[1] * out.shape[2], device=q.device)).view(out.shape[1:])  # of a row
        return torch.autograd.grad(out, (q, k, v), weight.to(out.dtype).expand_as(out))

    return run


@BACKENDS
@DTYPES
@given(LENGTHS, KINDS.drawn, WINDOWS, SEEDS)
def test_gradients_of_a_sequence_stand_alone(device, backend, dtype, lengths, kind, window, seed):
    kind = KINDS.at(kind, device, dtype)
    if interpreted(device, backend):  # two blocks of keys, and of queries, are a sequence's most
        (heads, heads_k), lengths = kind.heads, [min(n, 70) for n in lengths]
        kind.heads = heads // heads_k, 1
    varlen, _ = functions(backend, kind, device, window if kind.windowed else None, seed)
    q, k, v = attention_inputs(lengths, *kind.heads, *kind.dims, seed=seed, dtype=dtype, device=device)
    flash = backend == "cuda" and dtype != torch.float32 and kind.cap_and_sinks[0] is None
    # of flash-attn-4's backward the op says that what is not finite may spread
    neighbours = () if flash else (float("nan"), float("inf"))
    check_packing(gradients(varlen), q, k, v, lengths, seed=seed, neighbours=neighbours)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("dim", [64, 72, 80, 128])
def test_patches_see_their_own_image(device, backend, dtype, dim):
    """Patches see those of their own image, all of them; an image's output and gradients are those of it alone."""
    lengths, heads = [20, 1, 70], (1, 1) if interpreted(device, backend) else (2, 2)
    q, k, v = attention_inputs(lengths, *heads, dim, dim, seed=dim, dtype=dtype, device=device)
    image = functools.partial(vx.attention_varlen, causal=False, backend=backend)
    check_packing(image, q, k, v, lengths, seed=dim)
    flash = backend == "cuda" and dtype != torch.float32  # of whose backward the op says that NaN may spread
    check_packing(gradients(image), q, k, v, lengths, seed=dim, neighbours=() if flash else None)
    cu, longest = offsets(lengths, device), max(lengths)
    exact = attention_varlen_ref(q.double(), k.double(), v.double(), cu, causal=False)
    size = attention_varlen_ref(q.double(), k.double(), v.double().abs(), cu, causal=False)
    error = ((image(q, k, v, cu, longest).double() - exact).abs() / size).max()
    assert error < (2**-6 if dtype == torch.bfloat16 else 2**-18)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("dim", [72, 80])
def test_columns_of_zeros_change_nothing(device, backend, dtype, dim):
    """Heads of 72 and 80 have the bits of heads of 96 that end in zeros: on SM90 those are what is computed."""
    lengths = [20, 1, 70, 300]
    q, k, v = attention_inputs(lengths, 4, 2, dim, dim, seed=dim, dtype=dtype, device=device)
    args = offsets(lengths, device), max(lengths)

    def run(width):
        wide = [torch.nn.functional.pad(x, (0, width - dim)).requires_grad_() for x in (q, k, v)]
        out = vx.attention_varlen(*wide, *args, causal=False, scale=dim**-0.5, backend=backend)
        weight = torch.cos(torch.arange(out.shape[0] * 4 * dim, device=device)).view(-1, 4, dim).to(dtype)
        grads = torch.autograd.grad(out, wide, torch.nn.functional.pad(weight, (0, width - dim)))
        return [x[..., :dim] for x in (out, *grads)]

    assert_bitwise(run(dim), run(96))


def test_patches_see_their_own_image_can_fail():
    q, k, v = attention_inputs([64, 130], 2, 2, 72, 72, seed=1)

    def batch_dependent(q, k, v, cu, longest):
        segment = 64 if len(cu) > 2 else None
        return vx.attention_varlen(q, k, v, cu, longest, causal=False, kv_segment=segment)

    with pytest.raises(AssertionError, match="differ"):
        check_packing(batch_dependent, q, k, v, [64, 130])


@BACKENDS
@DTYPES
@given(st.sampled_from([1, 40, 64, 65, 150]), KINDS.drawn, WINDOWS, st.sampled_from(ODD), st.data())
def test_gradients_know_nothing_of_what_is_not_seen(device, backend, dtype, length, kind, window, value, data):
    now, kind = data.draw(st.integers(0, length - 1)), KINDS.at(kind, device, dtype)
    window = window if kind.windowed else None
    q, k, v = attention_inputs([length], *kind.heads, 24, 40, seed=length, dtype=dtype, device=device)
    dout, _, _ = attention_inputs([length], kind.heads[0], 1, 40, 1, seed=now, dtype=dtype, device=device)
    args = offsets([length], device), length

    def run(q, k, v, dout):
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        out = vx.attention_varlen(q, k, v, *args, window=window, softcap=2.0, backend=backend)
        return torch.autograd.grad(out, (q, k, v), dout)

    def poison(x, begin, end):  # all but these rows
        x = x.clone()
        x[: max(begin, 0)] = x[end:] = value
        return x

    dq, dk, dv = run(q, k, v, dout)
    reach = window or length
    keys = (poison(x, now + 1 - reach, now + 1) for x in (k, v))  # what the query at `now` sees
    assert_bitwise(run(q, *keys, dout)[0][now], dq[now], "dq")
    queries, douts = (poison(x, now, now + reach) for x in (q, dout))  # what sees the key at `now`
    _, dk2, dv2 = run(queries, k, v, douts)
    assert_bitwise((dk2[now], dv2[now]), (dk[now], dv[now]), "dk and dv")


@BACKENDS
@pytest.mark.parametrize(
    ("page_size", "heads", "segment", "each"),
    [(16, (4, 2), None, 1), (8, (16, 1), 128, 1), (128, (6, 6), None, 1), (16, (8, 2), None, 9)],
)
def test_settled_keys_are_read_beside_the_kernels_before(device, backend, page_size, heads, segment, each):
    """Steps of a model's order (a product, its keys stored, attention) without a pause between: what is settled may be
    read at any time from the product on, a step's own keys only once they are stored."""
    if device == "cpu" and segment:
        segment = 64
    (hq, hk), dim, steps, sizes = heads, 64, 12, [1, 40, 127, 128, 300, 511]
    g = torch.Generator().manual_seed(page_size)
    dtype = torch.bfloat16
    rows = len(sizes) * each
    x, weight = torch.randn(rows, 256, generator=g), torch.randn((hq + 2 * hk) * dim, 256, generator=g) / 16
    x, weight = x.to(device, dtype), weight.to(device, dtype)
    width = (max(sizes) + each * steps) // page_size + 1
    table = torch.randperm(len(sizes) * width, generator=g).to(torch.int32).view(len(sizes), width)
    shape = table.numel(), page_size, hk, dim
    first = [torch.randn(shape, generator=g).to(device, dtype) for _ in range(2)]
    lengths = torch.tensor(sizes) + each * torch.arange(1, steps + 1)[:, None]
    places = (lengths[:, :, None] - each + torch.arange(each)).flatten(1)
    owners = torch.arange(len(sizes)).repeat_interleave(each)
    slots = table[owners, places // page_size] * page_size + places % page_size
    contexts, slots, table = lengths.to(device, torch.int32), slots.contiguous().to(device), table.to(device)
    cu, inv_freq = offsets([each] * len(sizes), device), torch.ones(dim // 2, device=device) / 7
    tables = [vx.rope_cos_sin(n.to(device), inv_freq, dtype=dtype) for n in places]

    def decode(settled: bool):
        k_cache, v_cache = (cache.clone() for cache in first)
        h, found = x, []
        for step in range(steps):
            q, k, v = vx.linear(h, weight).view(rows, -1, dim).split((hq, hk, hk), 1)
            q = vx.rope_kv_store(q, k, v, *tables[step], k_cache, v_cache, slots[step])
            args = table, contexts[step], cu, each
            out = vx.attention_paged(q, k_cache, v_cache, *args, kv_segment=segment, settled=settled, backend=backend)
            found.append(out)
            h = vx.rmsnorm(h + out.flatten(1)[:, :64].repeat(1, 4), torch.ones_like(h[0]), 1e-6)
        return torch.stack(found), k_cache, v_cache

    expected = decode(False)
    for _ in range(1 if device == "cpu" else 20):
        assert_bitwise(decode(True), expected)
    if device == "cuda":
        graph, out = torch.cuda.CUDAGraph(), None
        with torch.cuda.graph(graph):
            out = decode(True)
        for _ in range(20):
            graph.replay()
            assert_bitwise(out, expected)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("window", [None, 40], ids=["full", "window"])
def test_repeatable(device, backend, dtype, window):
    lengths = [70, 1, 0, 131]
    q, k, v = attention_inputs(lengths, 6, 2, 40, 24, seed=3, dtype=dtype, device=device)
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(4)).to(device)
    inputs = tuple(x.requires_grad_() for x in (q, k, v, sinks))

    def run():
        segment = KEY_BLOCK[backend]
        options = {"window": window, "softcap": 4.0, "sinks": sinks, "kv_segment": segment, "backend": backend}
        out = vx.attention_varlen(q, k, v, offsets(lengths, device), 131, **options)
        return out, *torch.autograd.grad(out, inputs, torch.cos(out.detach()))

    check_repeatable(run)


@BACKENDS
@DTYPES
@given(LENGTHS, KINDS.drawn, WINDOWS, SEEDS)
def test_grouped_heads_are_repeated_heads(device, backend, dtype, lengths, kind, window, seed):
    kind = KINDS.at(kind, device, dtype)
    window, group = window if kind.windowed else None, kind.heads[0] // kind.heads[1]
    q, k, v = attention_inputs(lengths, *kind.heads, *kind.dims, seed=seed, dtype=dtype, device=device)
    args = offsets(lengths, device), max(lengths)
    wide = vx.attention_varlen(
        q, *(x.repeat_interleave(group, 1) for x in (k, v)), *args, window=window, backend=backend
    )
    assert_bitwise(vx.attention_varlen(q, k, v, *args, window=window, backend=backend), wide)


@BACKENDS
@DTYPES
@given(LENGTHS, KINDS.drawn, SEEDS)
def test_a_window_or_segment_as_long_as_the_sequence_changes_nothing(device, backend, dtype, lengths, kind, seed):
    heads = KINDS.at(kind, device, dtype).heads
    q, k, v = attention_inputs(lengths, *heads, 64, 64, seed=seed, dtype=dtype, device=device)
    run = functools.partial(vx.attention_varlen, q, k, v, offsets(lengths, device), max(lengths), backend=backend)
    expected = run()
    assert_bitwise(run(window=max(lengths)), expected, "the window")
    assert_bitwise(run(kv_segment=-(-max(lengths) // 128) * 128), expected, "the segment")


@BACKENDS
def test_a_segment_changes_bits_where_the_sequence_is_longer(device, backend):
    q, k, v = attention_inputs([200], 2, 2, 64, 64, seed=0, device=device)
    run = functools.partial(vx.attention_varlen, q, k, v, offsets([200], device), 200, backend=backend)
    whole, cut = run(), run(kv_segment=128)
    assert_bitwise(cut[:128], whole[:128], "rows inside the first segment")
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(cut, whole)
    torch.testing.assert_close(cut, whole, rtol=1e-3, atol=1e-3)


@BACKENDS
@DTYPES
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(0, 130)), min_size=1, max_size=3), st.booleans(), SEEDS)
def test_queries_stand_at_the_end_of_their_keys(device, backend, dtype, pairs, causal, seed):
    q_lens, k_lens = zip(*pairs)
    q, _, _ = attention_inputs(q_lens, 4, 2, 48, 32, seed=seed, dtype=dtype, device=device)
    _, k, v = attention_inputs(k_lens, 4, 2, 48, 32, seed=seed + 1, dtype=dtype, device=device)
    cu, cu_k = offsets(q_lens, device), offsets(k_lens, device)
    got = vx.attention_varlen(q, k, v, cu, max(q_lens), cu_seqlens_k=cu_k, causal=causal, backend=backend)
    exact = attention_varlen_ref(q.double(), k.double(), v.double(), cu, cu_seqlens_k=cu_k, causal=causal)
    size = attention_varlen_ref(q.double(), k.double(), v.double().abs(), cu, cu_seqlens_k=cu_k, causal=causal)
    unit = 2e-6 if dtype == torch.float32 else 2**-8 + 2e-6
    if backend != "cpu" and dtype != torch.float32:
        unit *= 2  # matrix units take the probabilities in 16 bits: rounded once more
    assert ((got.double() - exact).abs() <= unit * size + 1e-30).all()
    at, at_k = cu.tolist(), cu_k.tolist()
    for b, (n, m) in enumerate(pairs):
        rows, keys = slice(at[b], at[b + 1]), slice(at_k[b], at_k[b + 1])
        if causal and n <= m:  # the last n queries of m
            padded = torch.cat([q.new_zeros(m - n, *q.shape[1:]), q[rows]])
            full = vx.attention_varlen(padded, k[keys], v[keys], offsets([m], device), m, backend=backend)
            assert_bitwise(got[rows], full[m - n :], "the last queries")
        if causal and n > m:
            assert_bitwise(got[at[b] : at[b] + n - m], torch.zeros_like(got[: n - m]), "queries that see no key")


@BACKENDS
@DTYPES
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 50}, {"softcap": 2.0}, {"causal": False}, {"kv_segment": 128}],
    ids=["causal", "window", "softcap", "full", "segment"],
)
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_accuracy(device, backend, dtype, options, with_sinks):
    lengths = [150, 90]
    g = torch.Generator().manual_seed(5)
    shapes = (sum(lengths), 6, 64), (sum(lengths), 2, 64), (sum(lengths), 2, 32), (sum(lengths), 6, 32)
    q, k, v, dout = (torch.randn(s, generator=g).to(device, dtype) for s in shapes)
    sinks = torch.randn(6, generator=g).to(device) if with_sinks else None
    cu = offsets(lengths, device)
    meaning = {key: value for key, value in options.items() if key != "kv_segment"}

    def run(fn, *inputs):
        inputs = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
        out = fn(*inputs)
        return out.detach(), *torch.autograd.grad(out, [x for x in inputs if x is not None], dout.to(out.dtype))

    def ref(q, k, v, sinks):
        return attention_varlen_ref(q, k, v, cu, sinks=sinks, **meaning)

    def ours(q, k, v, sinks):
        return vx.attention_varlen(q, k, v, cu, max(lengths), sinks=sinks, backend=backend, **options)

    exact = run(ref, *(None if x is None else x.double() for x in (q, k, v, sinks)))
    stock = run(lambda q, k, v, s: ref(q, k, v, s).to(dtype), q, k, v, sinks)  # eager PyTorch in the same dtype
    for name, o, s, e in zip(("out", "dq", "dk", "dv", "dsinks"), run(ours, q, k, v, sinks), stock, exact):
        error, stock_error = ((x.double() - e).norm() / e.norm() for x in (o, s))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"


# --- SM90: one order in several kernels ------------------------------------------------------------------------------

SM90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
)


def step_of(lengths, k, v, page_size, seed=0):
    """What attention_paged takes to decode the last token of every sequence."""
    pages = Pages.of(k, v, lengths, page_size, seed).put(k, v)
    lens = torch.tensor(lengths, dtype=torch.int32, device=k.device)
    return pages.k_cache, pages.v_cache, pages.block_table, lens, torch.arange(len(lens) + 1, device=k.device).int()


@SM90
@pytest.mark.parametrize(
    "dims,heads,segment,window",
    [
        ((128, 128), (8, 2), None, None),
        ((128, 128), (8, 2), 256, 300),
        ((128, 128), (40, 2), 256, None),
        ((128, 128), (3, 3), None, 300),
        ((64, 64), (8, 2), 256, None),
        ((64, 64), (8, 2), None, 300),
        ((96, 96), (8, 2), 256, None),
        ((96, 96), (8, 2), None, 300),
        ((192, 128), (8, 2), 256, None),
        ((192, 128), (8, 2), None, 300),
        ((256, 256), (8, 2), None, None),
        ((256, 256), (16, 2), 256, None),
        ((256, 256), (8, 2), None, 300),
    ],
    ids=str,
)
def test_long_contexts_have_the_same_bits_on_every_road(dims, heads, segment, window):
    lengths = [1500, 1, 700, 256, 129, 2049]
    q, k, v = attention_inputs(lengths, *heads, *dims, seed=7, dtype=torch.bfloat16, device="cuda")
    cu = offsets(lengths, "cuda")
    options = {"window": window, "kv_segment": segment, "backend": "cuda"}
    expected = vx.attention_varlen(q, k, v, cu, max(lengths), **options)  # flash-attn-4 where it is installed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ROOM.module("cuda"), "LONG", 1 << 30)
        assert_bitwise(vx.attention_varlen(q, k, v, cu, max(lengths), **options), expected, "our own training kernel")
    last = (cu[1:] - 1).long()
    for page_size in (8, 16, 48, 64, 128, 256, 1000):  # the copy engine fetches some, the threads the others
        step = step_of(lengths, k, v, page_size)
        prefill = vx.attention_paged(q, *step[:4], cu, max(lengths), **options)
        assert_bitwise(prefill, expected, f"prefill, pages of {page_size}, NaN behind the last key")
        finite = *(x.nan_to_num(nan=5.0) for x in step[:2]), *step[2:4]
        for long in (256, 1 << 30):  # flash-attn-4's kernel, where it is installed; ours
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ROOM.module("cuda"), "LONG", long)
                prefill = vx.attention_paged(q, *finite, cu, max(lengths), **options)
            assert_bitwise(prefill, expected, f"prefill, pages of {page_size}, long from {long}")
        for most in (1 << 26, 0):  # segments in parallel, and one after another
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(ROOM.module("cuda"), "MOST_PARTIAL", most)
                decoded = vx.attention_paged(q[last], *step, 1, **options)
            assert_bitwise(decoded, expected[last], f"decode, pages of {page_size}, {most} values aside")


@SM90
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("heads", [(8, 2), (24, 2)], ids=["heads8-2", "heads24-2"])
@pytest.mark.parametrize(
    "count,length,segment", [(1, 70000, 256), (1, 40000, None), (5, 9000, 512), (80, 900, 256), (140, 300, None)]
)
def test_decode_of_few_sequences_and_of_many_has_the_bits_of_training(count, length, segment, heads, page_size):
    lengths = [length - 37 * i % length for i in range(count)]
    q, k, v = attention_inputs(lengths, *heads, 128, 128, seed=24, dtype=torch.bfloat16, device="cuda")
    options, step = {"kv_segment": segment, "backend": "cuda"}, step_of(lengths, k, v, page_size)
    q, one = q[(offsets(lengths, "cuda")[1:] - 1).long()], step[-1]
    expected = vx.attention_varlen(q, k, v, one, 1, cu_seqlens_k=offsets(lengths, "cuda"), **options)
    for _ in range(3):  # segments are joined as they come
        assert_bitwise(vx.attention_paged(q, *step, 1, **options), expected, f"{count} x {length}")


@SM90
@pytest.mark.parametrize("heads", [8, 32], ids=["4 heads of a key", "16 heads of a key"])
@pytest.mark.parametrize("segment", [None, 512], ids=["whole", "segments"])
def test_every_launch_of_decode_takes_every_item(segment, heads):
    """Blocks take what comes next from a counter, which every launch has to leave as it found it."""
    from vexact_ops.attention import cuda

    lengths = [97 * i % 1400 for i in range(1, 201)]
    q, k, v = attention_inputs(lengths, heads, 2, 128, 128, seed=25, dtype=torch.bfloat16, device="cuda")
    step, at = step_of(lengths, k, v, 16), offsets(lengths, "cuda")
    q = q[(at[1:] - 1).long()]
    expected = vx.attention_varlen(q, k, v, step[-1], 1, cu_seqlens_k=at, kv_segment=segment, backend="cuda")
    outs, partial = [torch.empty_like(q) for _ in range(3)], None
    if segment is not None:
        partial = torch.empty(len(lengths) * -(-step[2].shape[1] * 16 // segment) * heads * 131, device="cuda")

    def decode():
        for out in outs:
            cuda.ours_paged(q, *step, 1, 128**-0.5, None, segment, None, out, partial)

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for launch in (decode, graph.replay, decode, graph.replay, graph.replay):
        for out in outs if partial is None else (*outs, partial):
            out.fill_(float("nan"))
        launch()
        for out in outs:
            assert_bitwise(out, expected)


@SM90
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("segment", [None, 512], ids=["whole", "segments"])
def test_a_prompt_in_chunks_of_any_size_has_the_bits_of_training(page_size, segment):
    lengths = [3000, 700]
    q, k, v = attention_inputs(lengths, 8, 2, 128, 128, seed=21, dtype=torch.bfloat16, device="cuda")
    cu, begin = offsets(lengths, "cuda"), [0, 3000]
    options = {"kv_segment": segment, "backend": "cuda"}
    expected = vx.attention_varlen(q, k, v, cu, max(lengths), **options)
    pages = Pages.of(k, v, lengths, page_size).put(k, v)
    caches = pages.k_cache.nan_to_num(nan=5.0), pages.v_cache.nan_to_num(nan=5.0), pages.block_table
    for ends, counts in (
        ((600, 300), (600, 300)),
        ((1801, 301), (1201, 1)),
        ((2999, 700), (1198, 399)),
        ((3000, 9), (1, 0)),
    ):
        rows = torch.cat([torch.arange(b + e - c, b + e) for b, e, c in zip(begin, ends, counts)]).to("cuda")
        lens = torch.tensor(ends, dtype=torch.int32, device="cuda")
        got = vx.attention_paged(q[rows], *caches, lens, offsets(counts, "cuda"), max(counts), **options)
        assert_bitwise(got, expected[rows], f"{counts} up to {ends}")


@SM90
@pytest.mark.parametrize(
    "heads,dim,dtype",
    [
        ((8, 2), 128, torch.bfloat16),
        ((10, 2), 64, torch.float16),
        ((2, 2), 128, torch.float16),
        ((16, 2), 64, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [16, 128, 256])
@pytest.mark.parametrize("window", [None, 5, 200])
def test_few_queries_of_a_sequence_have_the_bits_of_many(heads, dim, dtype, page_size, window):
    """By a kernel of which a tile holds the queries of several positions, and a thread block has several tiles; also of
    values that are not finite, which some of them see."""
    cuda, lengths = ROOM.module("cuda"), [1, 3, 127, 128, 129, 400, 40, 260, 1000]
    q, k, v = attention_inputs(lengths, *heads, dim, dim, seed=23, dtype=dtype, device="cuda")
    for special in (False, True):
        if special:
            v = v.clone()
            v[::7, :, 3], v[5::11, :, 9], v[2::13, :, -1] = float("inf"), float("nan"), float("-inf")
        k_cache, v_cache, table, lens, _ = step_of(lengths, k, v, page_size)
        k_cache, v_cache = (x.nan_to_num(nan=5.0) if not special else x for x in (k_cache, v_cache))
        for most in (1, 2, 5, 9, 16):
            counts = [min(length, most - i % 2 if most > 1 else 1) for i, length in enumerate(lengths)]
            ends = offsets(lengths).tolist()[1:]
            rows = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, counts)]).to("cuda")
            step = k_cache, v_cache, table, lens, offsets(counts, "cuda"), most
            expected = torch.full((len(rows), heads[0], dim), 7.0, dtype=dtype, device="cuda")
            cuda.ours_paged(q[rows], *step, dim**-0.5, window, None, None, expected)
            for tiles in cuda.FEW_TILES:
                out = torch.full_like(expected, 7.0)
                cuda.few_paged(q[rows], *step, dim**-0.5, window, None, out, tiles)
                assert_bitwise(out, expected, f"up to {most} queries, {tiles} tiles at a time, {special=}")
            paged = vx.attention_paged(q[rows], *step, window=window, backend="cuda")
            assert_bitwise(paged, expected, "as dispatched")


@SM90
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("dim", [64, 128])
@given(
    st.lists(st.tuples(st.integers(0, 16), st.integers(0, 700)), min_size=1, max_size=6),
    st.sampled_from([(1, 1), (4, 2), (8, 2), (8, 1), (12, 1), (40, 2)]),
    st.sampled_from([8, 16, 64, 256]),
    st.sampled_from([None, 1, 60, 130]),
    st.booleans(),
    SEEDS,
)
def test_few_queries_of_any_sequences(dim, dtype, sequences, heads, page_size, window, with_sinks, seed):
    """Sequences without a query, or with more queries than keys, among others; and where blocks take more than one."""
    cuda = ROOM.module("cuda")
    counts, lengths = [n for n, _ in sequences], [max(n + before, 1) for n, before in sequences]
    if not any(counts):
        return
    q, k, v = attention_inputs(lengths, *heads, dim, dim, seed=seed, dtype=dtype, device="cuda")
    step = step_of(lengths, k, v, page_size)
    caches = *(x.nan_to_num(nan=5.0) for x in step[:2]), step[2]
    lens = torch.tensor([max(n - seed % 3, 0) for n in lengths], dtype=torch.int32, device="cuda")
    sinks = torch.linspace(-2, 9, heads[0], device="cuda") if with_sinks else None
    q = q[: sum(counts)]
    given = q, *caches, lens, offsets(counts, "cuda"), max(counts), dim**-0.5, window
    expected = torch.empty_like(q)
    cuda.ours_paged(*given, None, sinks, expected)
    for tiles in cuda.FEW_TILES:
        out = torch.empty_like(q)
        cuda.few_paged(*given, sinks, out, tiles, settled=seed % 2 == 0)
        assert_bitwise(out, expected, f"{tiles} tiles at a time")


def test_tiles_that_a_block_takes_of_few_queries(monkeypatch):
    """All of a sequence's where not all run at once, in even parts; else as few as do."""
    cuda = ROOM.module("cuda")
    monkeypatch.setattr(cuda.gpu, "multiprocessors", lambda device: 132)
    k_cache = torch.empty(1, 16, 8, 128, device="meta")

    def tiles(sequences, most, group=4):
        return cuda.few_tiles(torch.empty(1, 8 * group, 128, device="meta"), k_cache, sequences, most)

    assert [tiles(n, 9) for n in (1, 5, 6, 8, 9, 16, 64)] == [1, 1, 2, 2, 3, 3, 3]
    assert [tiles(64, most) for most in (2, 4, 5, 8, 9, 12, 13, 16)] == [1, 1, 2, 2, 3, 3, 2, 2]
    assert [tiles(64, most, group=8) for most in (8, 9, 12, 13, 16)] == [2, 3, 3, 3, 3]
    assert tiles(0, 9) == 1


@SM90
@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_every_launch_of_few_queries_takes_every_item(tiles):
    """As of decode: of more items than run at once blocks take what comes next from a counter."""
    from vexact_ops.attention import cuda

    lengths = [97 * i % 1400 + 16 for i in range(1, 201)]
    counts = [i % 17 for i in range(200)]
    q, k, v = attention_inputs(lengths, 8, 2, 128, 128, seed=26, dtype=torch.bfloat16, device="cuda")
    step = (*step_of(lengths, k, v, 16)[:4], offsets(counts, "cuda"), 16)
    q = q[: sum(counts)]
    expected, outs = torch.empty_like(q), [torch.empty_like(q) for _ in range(3)]
    cuda.ours_paged(q, *step, 128**-0.5, None, None, None, expected)

    def launches():
        for out in outs:
            cuda.few_paged(q, *step, 128**-0.5, None, None, out, tiles)

    launches()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launches()
    for launch in (launches, graph.replay, launches, graph.replay, graph.replay):
        for out in outs:
            out.fill_(float("nan"))
        launch()
        for out in outs:
            assert_bitwise(out, expected)


@SM90
@pytest.mark.parametrize("padding", [1, 31, 32, 97, 128, 400])
@pytest.mark.parametrize("sequences", [1, 16, 33, 130])
def test_padding_behind_few_queries_is_no_sequence(sequences, padding):
    """However many sequences without a query stand behind the others, of which one may have none either."""
    from vexact_ops.attention import cuda

    lengths = [97 * i % 700 + 16 for i in range(1, sequences + 1)]
    counts = [1 if i == sequences - 1 else i % 5 for i in range(sequences)]
    q, k, v = attention_inputs(lengths, 8, 2, 128, 128, seed=27, dtype=torch.bfloat16, device="cuda")
    *kept, table, lens, _ = step_of(lengths, k, v, 16)[:5]
    q, behind = q[: sum(counts)], torch.zeros(padding, dtype=torch.int32, device="cuda")
    padded = torch.cat([table, table.new_zeros(padding, table.shape[1])]), torch.cat([lens, behind])
    expected, found = torch.empty_like(q), torch.full_like(q, float("nan"))
    cuda.ours_paged(q, *kept, table, lens, offsets(counts, "cuda"), 16, 128**-0.5, None, None, None, expected)
    cuda.few_paged(q, *kept, *padded, offsets(counts + [0] * padding, "cuda"), 16, 128**-0.5, None, None, found, 1)
    assert_bitwise(found, expected)


@SM90
@pytest.mark.parametrize("heads,dtype", [(16, torch.bfloat16), (128, torch.bfloat16), (5, torch.float16)], ids=str)
@pytest.mark.parametrize("segment,window", [(None, None), (128, None), (None, 200), (256, 70)], ids=str)
def test_latent_keys_hold_their_values(heads, dtype, segment, window):
    lengths = [300, 1, 130] if heads == 128 else [700, 1, 130, 257]
    q, k, _ = attention_inputs(lengths, heads, 1, 576, 1, seed=22, dtype=dtype, device="cuda")
    cu, at = offsets(lengths, "cuda"), offsets(lengths).tolist()
    options = {"kv_segment": segment, "window": window, "backend": "cuda"}
    expected = vx.attention_varlen(q, k, k[..., :512], cu, max(lengths), **options)
    reference = attention_varlen_ref(*(x.cpu().double() for x in (q, k, k[..., :512])), cu.cpu(), window=window)
    error = (expected.cpu().double() - reference).norm() / reference.norm()
    assert error < (3e-3 if dtype == torch.bfloat16 else 5e-4)
    apart = vx.attention_varlen(q, k, k[..., :512].clone(), cu, max(lengths), **options)
    assert_bitwise(apart, expected, "values that lie elsewhere")
    for b, length in enumerate(lengths):
        s = slice(at[b], at[b + 1])
        alone = vx.attention_varlen(q[s], k[s], k[s, :, :512], offsets([length], "cuda"), length, **options)
        assert_bitwise(alone, expected[s], f"sequence {b} alone")
    last, some = (cu[1:] - 1).long(), [min(length, 1 + 40 * b) for b, length in enumerate(lengths)]
    rows = torch.cat([torch.arange(end - n, end) for end, n in zip(at[1:], some)]).to("cuda")
    for page_size in (8, 48, 64, 256):
        step = step_of(lengths, k, k[..., :512], page_size)
        for values in (step[0][..., :512], step[1]):
            paged = functools.partial(
                vx.attention_paged, k_cache=step[0], v_cache=values, block_table=step[2], **options
            )
            chunks = paged(q[rows], context_lens=step[3], cu_seqlens_q=offsets(some, "cuda"), max_seqlen_q=max(some))
            assert_bitwise(chunks, expected[rows], f"chunks, pages of {page_size}")
            for most in (1 << 26, 0):  # segments in parallel, and one after another
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(ROOM.module("cuda"), "MOST_PARTIAL", most)
                    decoded = paged(q[last], context_lens=step[3], cu_seqlens_q=step[4], max_seqlen_q=1)
                assert_bitwise(decoded, expected[last], f"decode, pages of {page_size}, {most} values aside")
    k2 = k.clone()
    k2[250:300] = float("inf")
    k2[230, 0, 5] = float("nan")
    got = vx.attention_varlen(q, k2, k2[..., :512], cu, max(lengths), **options)
    assert_bitwise(got[:230], expected[:230], "before keys that are not finite")
    assert got[230:250].isnan().all() and not got[250].isfinite().any()


@SM90
def test_latent_gradients():
    q, k, _ = attention_inputs([70, 5], 4, 1, 576, 1, seed=23, dtype=torch.bfloat16, device="cuda")
    cu = offsets([70, 5], "cuda")

    def gradients_of(q, k, cu, attention):
        q, k = (x.clone().requires_grad_() for x in (q, k))
        out = attention(q, k, k[..., :512], cu)
        weight = torch.cos(torch.arange(out.shape[1] * 512, device=q.device)).view(-1, 512).to(out.dtype)
        return torch.autograd.grad(out, (q, k), weight.expand_as(out))

    ours = gradients_of(q, k, cu, lambda *args: vx.attention_varlen(*args, 70, backend="cuda"))
    alone = gradients_of(
        q[70:], k[70:], offsets([5], "cuda"), lambda *args: vx.attention_varlen(*args, 5, backend="cuda")
    )
    assert_bitwise(tuple(x[70:] for x in ours), alone, "a sequence alone")
    wide = gradients_of(q.cpu().double(), k.cpu().double(), cu.cpu(), attention_varlen_ref)
    for got, expected in zip(ours, wide):
        assert (got.cpu().double() - expected).norm() / expected.norm() < 1e-2


@SM90
@pytest.mark.parametrize("segment", [None, 256], ids=["whole", "segments"])
def test_a_value_that_is_not_finite_reaches_those_who_see_it_alone(segment):
    lengths = [1000, 1100, 200]
    q, k, v = attention_inputs(lengths, 4, 2, 64, 64, seed=8, dtype=torch.bfloat16, device="cuda")
    cu = offsets(lengths, "cuda")
    run = functools.partial(vx.attention_varlen, q, k, kv_segment=segment, backend="cuda")
    expected = run(v, cu, max(lengths))
    odd = v.clone()
    odd[500, 0, 3], odd[1500, 1, 7], odd[1600, 1, 7] = float("nan"), float("inf"), float("-inf")
    got = run(odd, cu, max(lengths))
    seen = torch.zeros_like(got, dtype=torch.bool)
    seen[500:1000, :2, 3] = seen[1500:2100, 2:, 7] = True
    assert_bitwise(got[~seen], expected[~seen], "what nobody sees")
    assert got[500:1000, :2, 3].isnan().all() and got[1600:2100, 2:, 7].isnan().all()
    assert (got[1500:1600, 2:, 7] == float("inf")).all()


@SM90
@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize("segment", [None, 128], ids=["whole", "segments"])
def test_a_graph_follows_lengths_and_pages(page_size, segment):
    lengths = [900, 40, 513, 129]
    q, k, v = attention_inputs(lengths, 8, 2, 128, 128, seed=9, dtype=torch.bfloat16, device="cuda")
    expected = vx.attention_varlen(q, k, v, offsets(lengths, "cuda"), 900, kv_segment=segment, backend="cuda")
    k_cache, v_cache, table, lens, cu = step_of(lengths, k, v, page_size)
    queries, begin = q[:4].clone(), offsets(lengths, "cuda")[:-1].long()
    run = functools.partial(vx.attention_paged, queries, k_cache, v_cache, table, lens, cu, 1, kv_segment=segment)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for places in ([0, 0, 0, 0], [899, 39, 512, 128], [127, 5, 128, 100], [640, 20, 256, 127]):
        at = begin + torch.tensor(places, device="cuda")
        queries.copy_(q[at])
        lens.copy_(torch.tensor(places, device="cuda") + 1)
        graph.replay()
        assert_bitwise(out, expected[at], f"at {places}")


@SM90
def test_values_out_of_range_touch_nothing_else():
    lengths = [300, 200, 100]
    q, k, v = attention_inputs(lengths, 4, 2, 128, 128, seed=10, dtype=torch.bfloat16, device="cuda")
    for page_size, segment in itertools.product((16, 48, 128), (None, 128)):
        k_cache, v_cache, table, lens, cu = step_of(lengths, k, v, page_size)
        last = (offsets(lengths, "cuda")[1:] - 1).long()
        run = functools.partial(vx.attention_paged, q[last], k_cache, v_cache, kv_segment=segment, backend="cuda")
        expected = run(table, lens, cu, 1)
        wild_table, wild_lens = table.clone(), lens.clone()
        wild_table[0] = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32, device="cuda").repeat(table.shape[1])[
            : table.shape[1]
        ]
        wild_lens[1] = 2**31 - 1
        for max_q in (1, 4):
            got = run(wild_table, lens, cu, max_q)
            assert_bitwise(got[1:], expected[1:], "beside pages that are not there")
            got = run(table, wild_lens, cu, max_q)
            assert_bitwise(got[[0, 2]], expected[[0, 2]], "beside a length above the table")
        run(table, lens, torch.tensor([0, 5, -3, 2**31 - 1], dtype=torch.int32, device="cuda"), 4)
        assert_bitwise(run(table, lens, cu, 1), expected, "afterwards")
    long = attention_inputs([3000], 4, 2, 128, 128, seed=12, dtype=torch.bfloat16, device="cuda")
    expected = vx.attention_varlen(*long, offsets([3000], "cuda"), 3000, backend="cuda")
    for wild in ([0, 5000], [-7, 2**31 - 1], [0, 2000, 1000, 3000], [100, 3000, -5]):
        cu = torch.tensor(wild, dtype=torch.int32, device="cuda")
        inputs = tuple(x.clone().requires_grad_() for x in long)
        out = vx.attention_varlen(*inputs, cu, 3000, backend="cuda")
        torch.autograd.grad(out.sum(), inputs)
    assert_bitwise(vx.attention_varlen(*long, offsets([3000], "cuda"), 3000, backend="cuda"), expected, "afterwards")


@SM90
def test_the_two_orders_are_told_apart():
    q, k, v = attention_inputs([700], 4, 2, 128, 128, seed=11, dtype=torch.bfloat16, device="cuda")
    run = functools.partial(vx.attention_varlen, q, k, v, offsets([700], "cuda"), 700)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(run(backend="cuda"), run(backend="triton"))
    with vx.use_backend("triton"):
        other = vx.numerics("cuda")
    assert other["backends"] == {"attention": "triton"} and vx.numerics("cuda")["backends"] == {"attention": "cuda"}


# --- twins that must fail -------------------------------------------------------------------------------------------


def blockwise(q, k, v, block_of, mask_by_product=False, after=0):
    """Online softmax of one sequence over blocks of block_of(keys); after: keys before the first query."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = torch.empty(q.shape[0], q.shape[1], v.shape[2])
    for i in range(q.shape[0]):
        end = k.shape[0] if mask_by_product else after + i + 1
        m, total, acc = torch.full((q.shape[1],), -torch.inf), 0.0, 0.0
        for at in range(0, end, block_of):
            s = torch.einsum("hd,khd->hk", q[i], k[at : min(at + block_of, end)])
            if mask_by_product:
                s = s.masked_fill(torch.arange(at, at + s.shape[1])[None] > after + i, -torch.inf)
            new = torch.maximum(m, s.amax(1))
            p = torch.exp(s - new[:, None])
            total = total * torch.exp(m - new) + p.sum(1)
            acc = acc * torch.exp(m - new)[:, None] + torch.einsum("hk,khd->hd", p, v[at : at + s.shape[1]])
            m = new
        out[i] = acc / total[:, None]
    return out


def twin_varlen(q, k, v, cu, longest, block_of=lambda longest: 16, **kwargs):
    at = cu.tolist()
    parts = [blockwise(q[a:b], k[a:b], v[a:b], block_of(longest), **kwargs) for a, b in itertools.pairwise(at) if b > a]
    return torch.cat(parts)


def twin_paged(q, k_cache, v_cache, table, lens, cu, longest, block_of):
    at, parts = cu.tolist(), []
    for b, n in enumerate(lens.tolist()):
        keys, values = (
            cache[table[b, : -(-n // cache.shape[1])].long()].flatten(0, 1)[:n] for cache in (k_cache, v_cache)
        )
        rows = q[at[b] : at[b + 1]]
        parts.append(blockwise(rows, keys, values, block_of, after=n - len(rows)))
    return torch.cat(parts)


def test_attention_whose_block_depends_on_the_batch_is_caught():
    q, k, v = attention_inputs([40, 70], 2, 1, 16, 16, seed=0)
    check_packing(twin_varlen, q, k, v, [40, 70])  # the twin is sound with a fixed block
    with pytest.raises(AssertionError, match="sequence 0 alone"):
        check_packing(functools.partial(twin_varlen, block_of=lambda n: 16 if n < 64 else 32), q, k, v, [40, 70])


def test_masking_by_multiplication_is_caught():
    q, k, v = attention_inputs([24], 2, 1, 16, 16, seed=0)
    check_unseen(twin_varlen, q, k, v, [24])
    with pytest.raises(AssertionError, match="before nan differ"):
        check_unseen(functools.partial(twin_varlen, mask_by_product=True), q, k, v, [24])


def test_decode_that_blocks_keys_another_way_is_caught():
    q, k, v = attention_inputs([40], 2, 1, 16, 16, seed=0)
    same, other = (functools.partial(twin_paged, block_of=n) for n in (16, 8))
    check_paging(twin_varlen, same, q, k, v, [40], page_sizes=(8,))
    with pytest.raises(AssertionError, match="whole prefill, pages of 8 differ"):
        check_paging(twin_varlen, other, q, k, v, [40], page_sizes=(8,))


# --- the operators --------------------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
def test_opcheck(device, backend, with_sinks):
    lengths = [5, 3]
    q, k, v = (x.requires_grad_() for x in attention_inputs(lengths, 4, 2, 16, 8, seed=0, device=device))
    sinks = torch.zeros(4, device=device, requires_grad=True) if with_sinks else None
    cu = offsets(lengths, device)
    args = q, k, v, cu, None, 5, sinks, 0.25, True, 3, 2.0, 64, backend
    torch.library.opcheck(torch.ops.vexact.attention_varlen.default, args)
    pages = Pages.of(k, v, lengths, 4).put(k.detach(), v.detach())
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    caches = pages.k_cache, pages.v_cache, pages.block_table
    sinks = None if sinks is None else sinks.detach()
    args = q.detach(), *caches, lens, cu, 5, sinks, 0.25, None, None, None, True, backend
    torch.library.opcheck(torch.ops.vexact.attention_paged.default, args)


def test_compiled_graphs_hold_the_operators():
    q, k, v = attention_inputs([5, 3], 4, 2, 16, 8, seed=0)
    cu, lens, pages = offsets([5, 3]), torch.tensor([5, 3], dtype=torch.int32), Pages.of(k, v, [5, 3], 4)

    def train(q, k, v):
        return torch.autograd.grad(vx.attention_varlen(q * 2, k, v, cu, 5, window=3).sum(), (q, k, v))

    def roll(q, k, v, k_cache, v_cache):
        vx.kv_cache_store(k, v, k_cache, v_cache, pages.slots)
        return vx.attention_paged(q * 2, k_cache, v_cache, pages.block_table, lens, cu, 5, window=3)

    with torch.no_grad():
        out = torch.compile(roll, backend="aot_eager", fullgraph=True)(q, k, v, pages.k_cache, pages.v_cache)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert_bitwise(out, vx.attention_varlen(q * 2, k, v, cu, 5, window=3))
    compiled = torch.compile(lambda *x: vx.attention_varlen(x[0] * 2, *x[1:], cu, 5, window=3), backend="aot_eager")
    assert_bitwise(torch.autograd.grad(compiled(*inputs).sum(), inputs), train(*inputs))


def test_zero_tokens_give_zero_rows():
    q = torch.empty(0, 4, 8, requires_grad=True)
    k = torch.empty(0, 2, 8, requires_grad=True)
    for lengths in ([], [0], [0, 0]):
        out = vx.attention_varlen(q, k, k, offsets(lengths), 0)
        assert out.shape == (0, 4, 8)
        assert torch.autograd.grad(out.sum(), k)[0].shape == (0, 2, 8)
    lens, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)
    cache = torch.zeros(1, 4, 2, 8)
    out = vx.attention_paged(q.detach(), cache, cache, table, lens, offsets([0, 0]), 0)
    assert out.shape == (0, 4, 8)


def test_keys_without_queries_get_zero_gradients():
    q, k = torch.randn(2, 2, 8), torch.randn(7, 1, 8, requires_grad=True)
    cu, cu_k = torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([0, 3, 7], dtype=torch.int32)
    out = vx.attention_varlen(q, k, k.detach(), cu, 2, cu_seqlens_k=cu_k)
    (dk,) = torch.autograd.grad(out.sum(), k)
    assert torch.equal(dk[3:], torch.zeros(4, 1, 8))


def test_strided_heads_and_rows_have_the_same_bits():
    q, k, v = attention_inputs([70], 4, 2, 32, 32, seed=1)
    cu = offsets([70])
    expected = vx.attention_varlen(q, k, v, cu, 70)
    head_first = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v))
    assert_bitwise(vx.attention_varlen(*head_first, cu, 70), expected, "head-first storage")
    dim_first = (x.transpose(0, 2).contiguous().transpose(0, 2) for x in (q, k, v))
    assert_bitwise(vx.attention_varlen(*dim_first, cu, 70), expected, "dim-first storage")


def test_scores_of_minus_infinity_in_a_first_block_do_not_poison_the_rest():
    q, k = torch.ones(1, 1, 4), torch.ones(70, 1, 4)
    k[:64, :, 0] = -torch.inf
    v = torch.arange(70.0).view(70, 1, 1)
    out = vx.attention_varlen(q, k, v, offsets([1]), 1, cu_seqlens_k=offsets([70]))
    assert out.item() == pytest.approx(66.5)


def varlen_arguments():
    q, k, v = attention_inputs([5, 3], 4, 2, 16, 16, seed=0)
    return {"q": q, "k": k, "v": v, "cu_seqlens": offsets([5, 3]), "max_seqlen": 5}


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"q": torch.zeros(8, 4, 16, dtype=torch.float64)}, TypeError, "q: got dtype float64"),
        ({"k": torch.zeros(8, 2, 16, dtype=torch.bfloat16)}, TypeError, "k: got dtype bfloat16, expected float32"),
        ({"k": torch.zeros(8, 2, 15)}, ValueError, r"k: got shape \(8, 2, 15\), expected \(8, Hk, 16\)"),
        ({"v": torch.zeros(7, 2, 16)}, ValueError, r"v: got shape \(7, 2, 16\), expected \(8, 2, Dv\)"),
        ({"k": torch.zeros(8, 3, 16), "v": torch.zeros(8, 3, 16)}, ValueError, "k: got 3 heads for q's 4"),
        ({"cu_seqlens": torch.tensor([0, 5, 8])}, TypeError, "cu_seqlens: got dtype int64, expected int32"),
        ({"cu_seqlens": offsets([5, 2])}, ValueError, "cu_seqlens: got 7 as its last value, expected 8"),
        ({"cu_seqlens": offsets([9, -1])}, ValueError, "cu_seqlens: got 8 after 9 at index 2"),
        ({"cu_seqlens": offsets([5, 3]) + 1}, ValueError, "cu_seqlens: got 1 as its first value, expected 0"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, r"cu_seqlens: got shape \(0,\)"),
        ({"cu_seqlens_k": offsets([5, 2])}, ValueError, "cu_seqlens_k: got 7 as its last value, expected 8"),
        ({"cu_seqlens_k": offsets([8])}, ValueError, r"cu_seqlens_k: got shape \(2,\), expected \(3,\)"),
        ({"max_seqlen": 4}, ValueError, "max_seqlen: got 4, expected at least 5"),
        ({"max_seqlen": torch.tensor(5)}, TypeError, "max_seqlen: got Tensor, expected an int"),
        ({"window": 0}, ValueError, "window: got 0, expected at least 1"),
        ({"window": 2.0}, TypeError, "window: got float"),
        ({"window": 4, "causal": False}, ValueError, "window: got 4 with causal=False"),
        ({"softcap": 0.0}, ValueError, "softcap: got 0.0"),
        ({"scale": float("nan")}, ValueError, "scale: got nan"),
        ({"sinks": torch.zeros(2)}, ValueError, r"sinks: got shape \(2,\), expected \(4,\)"),
        ({"kv_segment": 96}, ValueError, "kv_segment: got 96, expected None or a multiple of 64"),
        ({"kv_segment": 0}, ValueError, "kv_segment: got 0, expected None or a multiple of 64"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_varlen_arguments_are_named(change, error, message):
    with pytest.raises(error, match="attention_varlen: " + message):
        vx.attention_varlen(**{**varlen_arguments(), **change})


def paged_arguments():
    q, k, v = attention_inputs([5, 3], 4, 2, 16, 16, seed=0)
    pages = Pages.of(k, v, [5, 3], 4).put(k, v)
    return {
        "q": q,
        "k_cache": pages.k_cache,
        "v_cache": pages.v_cache,
        "block_table": pages.block_table,
        "context_lens": torch.tensor([5, 3], dtype=torch.int32),
        "cu_seqlens_q": offsets([5, 3]),
        "max_seqlen_q": 5,
    }


@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"k_cache": torch.zeros(6, 4, 2, 16, dtype=torch.bfloat16)}, TypeError, "k_cache: got dtype bfloat16"),
        ({"k_cache": torch.zeros(6, 4, 16, 2).transpose(2, 3)}, ValueError, "k_cache: got strides"),
        ({"v_cache": torch.zeros(6, 3, 2, 16)}, ValueError, r"v_cache: got shape \(6, 3, 2, 16\)"),
        ({"block_table": torch.zeros(2, 3)}, TypeError, "block_table: got dtype float32, expected int32"),
        ({"block_table": torch.full((2, 3), 6, dtype=torch.int32)}, ValueError, r"block_table\[0, 0\]: got page 6"),
        ({"block_table": torch.full((2, 3), -1, dtype=torch.int32)}, ValueError, r"block_table\[0, 0\]: got page -1"),
        ({"block_table": torch.zeros(3, 3, dtype=torch.int32)}, ValueError, r"block_table: got shape \(3, 3\)"),
        (
            {"context_lens": torch.tensor([13, 3], dtype=torch.int32)},
            ValueError,
            r"context_lens\[0\]: got 13, expected at m",
        ),
        (
            {"context_lens": torch.tensor([5, 2], dtype=torch.int32)},
            ValueError,
            r"context_lens\[1\]: got 2, expected at le",
        ),
        ({"cu_seqlens_q": offsets([5, 2])}, ValueError, "cu_seqlens_q: got 7 as its last value"),
        ({"max_seqlen_q": 3}, ValueError, "max_seqlen_q: got 3, expected at least 5"),
        ({"softcap": -1.0}, ValueError, "softcap: got -1.0"),
        ({"q": torch.zeros(8, 4, 16, requires_grad=True)}, RuntimeError, "q requires a gradient"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, RuntimeError, "sinks requires a gradient"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_bad_paged_arguments_are_named(change, error, message):
    vx.attention_paged(**paged_arguments())
    with pytest.raises(error, match="attention_paged: " + message):
        vx.attention_paged(**{**paged_arguments(), **change})
