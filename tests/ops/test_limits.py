"""Sizes beyond what a kernel takes in one go: many sequences, wide rows, strides and tensors beyond 2^31 elements. And
what a window has left behind. Nothing is left out, and nothing is written where it does not belong."""

import itertools

import pytest
import torch
from conftest import SLOW, room_backends
from op_cases import PARAMS, Inputs, run

import vexact_ops as vx
from vexact_ops.log_softmax.reference import log_softmax_ref
from vexact_ops.testing import Pages, assert_bitwise, attention_inputs, check_unseen, offsets

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MANY = 16_500


def attention_cases(dims, options):
    """(device, backend, dtype, dims, options) for all backends and dtypes. On a GPU Triton's kernels, of which each
    takes seconds to compile, meet every dtype with all dims and either with all options, but not all three with each
    other; what other kernels serve meets all that they do."""
    for place in room_backends("attention"):
        device, backend = place.values
        for i, d in enumerate(dims):
            for j, (dtype_name, dtype) in enumerate(FLOATS.items()):
                for k, (option, given) in enumerate(options.items()):
                    by_triton = backend == "triton" or "softcap" in given
                    if device == "cuda" and by_triton and (i + j) % len(options) != k:
                        continue
                    name = f"{place.id}-{dtype_name}-d{d[0]}x{d[1]}-{option}"
                    yield pytest.param(device, backend, dtype, d, given, id=name, marks=place.marks)


def attention(dims, options):
    return pytest.mark.parametrize("device,backend,dtype,dims,options", list(attention_cases(dims, options)))


# What a window has left behind


DIMS = [(64, 64), (80, 80)] if SLOW else [(64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (576, 512)]


@attention(DIMS, {"plain": {}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": True}})
def test_decode_does_not_see_what_left_the_window(device, backend, dtype, dims, options):
    sinks = torch.linspace(-1, 1, 4, device=device) if "sinks" in options else None
    options = {"window": 50, **options, "sinks": sinks, "backend": backend}
    lengths = [100, 130] if SLOW else [100, 1, 300, 130]
    q, k, v = attention_inputs(lengths, 4, 2, *dims, seed=1, dtype=dtype, device=device)

    def varlen(*args):
        return vx.attention_varlen(*args, **options)

    def paged(*args):
        return vx.attention_paged(*args, **options)

    check_unseen(varlen, q, k, v, lengths, window=50, paged=paged, seed=2)


# Many sequences


def varlen_and_gradients(q, k, v, lengths, backend, **options):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = vx.attention_varlen(q, k, v, offsets(lengths, q.device), max(lengths), backend=backend, **options)
    upstream = torch.cos(torch.arange(v.shape[-1], device=q.device)).to(out.dtype).expand_as(out)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)


@attention([(16, 16)], {"plain": {}, "softcap": {"softcap": 5.0}})
def test_most_of_many_sequences_are_empty(device, backend, dtype, dims, options):
    lengths = dict.fromkeys(range(MANY), 0) | {3: 1, 1023: 2, 1024: 70, 16_383: 2, 16_384: 33, MANY - 1: 1}
    lengths = list(lengths.values())
    few = [n for n in lengths if n]
    q, k, v = attention_inputs(few, 4, 2, *dims, seed=0, dtype=dtype, device=device)
    many_results = varlen_and_gradients(q, k, v, lengths, backend, **options)
    assert_bitwise(many_results, varlen_and_gradients(q, k, v, few, backend, **options), "with and without empty ones")
    pages = Pages.of(k, v, lengths, 16).put(k, v)
    sizes = [min(n, 2) for n in lengths]
    ends = itertools.accumulate(lengths)
    rows = torch.cat([torch.arange(end - size, end) for end, size in zip(ends, sizes)])
    context = torch.tensor(lengths, dtype=torch.int32, device=device)
    args = pages.k_cache, pages.v_cache, pages.block_table, context, offsets(sizes, device), 2
    out = vx.attention_paged(q[rows.to(device)], *args, backend=backend, **options)
    assert_bitwise(out, many_results[0][rows.to(device)], "paged")


@pytest.mark.skipif(SLOW, reason="thousands of programs, each of them interpreted")
@attention([(64, 64), (16, 16)], {"plain": {}, "softcap": {"softcap": 5.0}, "window": {"window": 2}})
def test_many_sequences(device, backend, dtype, dims, options):
    lengths = [1 + i % 3 for i in range(MANY)]
    q, k, v = attention_inputs([sum(lengths)], 2, 1, *dims, seed=0, dtype=dtype, device=device)
    many = varlen_and_gradients(q, k, v, lengths, backend, **options)
    for first, last in ((0, 500), (MANY - 300, MANY)):
        rows = slice(sum(lengths[:first]), sum(lengths[:last]))
        part = varlen_and_gradients(q[rows], k[rows], v[rows], lengths[first:last], backend, **options)
        assert_bitwise(tuple(x[rows] for x in many), part, f"sequences {first} to {last}")
    pages = Pages.of(k, v, lengths, 4).put(k, v)
    last = offsets(lengths, device)[1:] - 1
    context = torch.tensor(lengths, dtype=torch.int32, device=device)
    args = pages.k_cache, pages.v_cache, pages.block_table, context
    for size in (1, 2):  # the queries of the last ones are two, if so many are there
        sizes = [min(n, size) if i > MANY - 300 else 1 for i, n in enumerate(lengths)]
        rows = torch.cat([torch.arange(int(e) + 1 - n, int(e) + 1) for e, n in zip(last.tolist(), sizes)]).to(device)
        out = vx.attention_paged(q[rows], *args, offsets(sizes, device), size, backend=backend, **options)
        assert_bitwise(out, many[0][rows], f"decode, at most {size}")


# Wide rows

COLUMNS = 2_200_000


def gradient(function, x, upstream):
    x = x.detach().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, upstream)[0]


@pytest.mark.parametrize("device,backend", room_backends("log_softmax"))
def test_log_softmax_of_millions_of_columns(device, backend):
    x = torch.randn(1, COLUMNS, generator=torch.Generator().manual_seed(0)).to(device)
    x[0, -1] = 9.0
    upstream = torch.ones(1, 1, device=device).expand(1, COLUMNS)
    y, dx = gradient(lambda x: vx.log_softmax(x, backend=backend), x, upstream)
    assert abs(float(y.double().exp().sum()) - 1.0) < 1e-5
    assert float((y.double() - log_softmax_ref(x.double())).abs().max()) < 1e-5
    expected = 1.0 - COLUMNS * log_softmax_ref(x.double()).exp()
    assert float(((dx.double() - expected) / (1 + expected.abs())).abs().max()) < 1e-5


@pytest.fixture
def few_joined(monkeypatch):
    """Sums of 16 blocks of 128 make a tree: rows of more than 2,048 columns have several."""
    triton = pytest.importorskip("vexact_ops.log_softmax.triton")
    monkeypatch.setattr(triton, "JOINED", 16)


@pytest.mark.parametrize("columns", [2048, 2049, 4096, 6000])
@pytest.mark.parametrize("device,backend", room_backends("log_softmax", only="triton"))
def test_rows_of_several_trees(device, backend, columns, few_joined):
    g = torch.Generator().manual_seed(columns)
    hidden, weight = (torch.randn(n, 16, generator=g).to(device) for n in (3, columns))
    weight[:2048] *= 0.1  # what decides lies behind the first tree, if there is more than one
    target = torch.tensor([0, columns // 2, columns - 1], device=device)
    x = vx.linear_logits(hidden, weight, backend=backend)
    expected = log_softmax_ref(x.double())
    upstream = torch.zeros_like(x).scatter_(1, target[:, None], 1.0)
    y, dx = gradient(lambda x: vx.log_softmax(x, backend=backend), x, upstream)
    assert float((y.double() - expected).abs().max()) < 1e-5
    assert float((dx.double() - (upstream.double() - expected.exp())).abs().max()) < 1e-6
    own = y.gather(1, target[:, None])[:, 0]
    results = vx.linear_logprobs(hidden, weight, target, return_entropy=True, backend=backend)
    assert_bitwise(results[0], own, "linear_logprobs")
    assert float((results[1].double() + (expected.exp() * expected).sum(-1)).abs().max()) < 1e-5
    seeds = torch.arange(3, device=device)
    for options in ({"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}, {"top_k": 2000, "top_p": 0.9}):
        ids, _, raw = vx.sample(x, seeds, seeds, **options, backend=backend)
        assert_bitwise(raw, y.gather(1, ids[:, None])[:, 0], f"sample {options}")
        cpu = vx.sample(x.cpu(), seeds.cpu(), seeds.cpu(), **options, backend="cpu")[0]
        assert ids.tolist() == cpu.tolist(), options


def test_a_size_beyond_a_program_raises():
    triton = pytest.importorskip("vexact_ops._core.triton")
    assert [triton.block(n, "op: n") for n in (0, 16, 17, 16384)] == [16, 16, 32, 16384]
    with pytest.raises(ValueError, match="rmsnorm: columns: got 16385, expected at most 16384"):
        triton.block(16385, "rmsnorm: columns")
    assert [triton.chunk(n, 64) for n in (0, 33, 64, 1000)] == [16, 64, 64, 64]


# Elements beyond 2^31


@pytest.fixture(scope="module")
def buffers():
    """Of 2^31 and a few elements each, by device and dtype; on a CPU nothing but what is touched takes memory."""
    made = {}

    def get(dtype, device):
        if (dtype, device) not in made:
            made[dtype, device] = torch.empty(71 << 25, dtype=dtype, device=device)
        return made[dtype, device]

    yield get
    made.clear()


class FarApart(Inputs):
    """The same values; the first dimension of a tensor that has more steps from the beginning of a buffer to beyond its
    2^31st element."""

    def __init__(self, dtype, device, buffers):
        super().__init__(dtype, device)
        self.buffers, self.made = buffers, 0

    def new(self, *shape, dtype=None, least=None):
        x = super().new(*shape, dtype=dtype, least=least).detach()
        if x.dim() < 2 or x.shape[0] < 2 or x.numel() == 0:
            return x.requires_grad_()
        self.made += 1
        step = -(-(1 << 31) // (x.shape[0] - 1) // 8) * 8
        far = self.buffers(x.dtype, self.device).as_strided(x.shape, (step, *x.stride()[1:]), self.made << 14)
        assert far[-1].storage_offset() >= 1 << 31
        return far.copy_(x).detach().requires_grad_()


@pytest.mark.parametrize("name,device,backend", PARAMS)
def test_rows_beyond_the_2_to_31st_element(name, device, backend, buffers):
    dtype = torch.bfloat16
    far = run(name, FarApart(dtype, device, buffers), backend)
    assert_bitwise([x.contiguous() for x in far], run(name, Inputs(dtype, device), backend))


@pytest.mark.parametrize("device,backend", room_backends("linear"))
def test_steps_along_k_beyond_2_to_the_31(device, backend, buffers):
    buffer, g = buffers(torch.bfloat16, device), torch.Generator().manual_seed(0)
    a, b = torch.randn(1, 3, 70, generator=g).bfloat16(), torch.randn(1, 70, 5, generator=g).bfloat16()
    far_a = buffer.as_strided((1, 3, 70), (0, 1, 1 << 25)).copy_(a)
    far_b = buffer.as_strided((1, 70, 5), (0, 1 << 25, 1), 64).copy_(b)
    assert_bitwise(vx.bmm(far_a, far_b, backend=backend), vx.bmm(a.to(device), b.to(device), backend=backend))
