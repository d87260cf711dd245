"""rope: tokens stand alone, every path has the same bits, angles are right far out, bad arguments are named."""

import pytest
import torch
from conftest import Kinds, room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.rope.reference import rope_cos_sin_ref, rope_ref
from vexact_ops.testing import assert_bitwise, check_repeatable, check_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("rope"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
INTERLEAVED = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
KINDS = Kinds(
    few=4,
    seed=0,
    size=[(2, 2), (6, 4), (16, 16), (64, 64), (80, 32), (72, 70), (128, 128), (5, 0)],  # head dim, rotated dims
    heads=[(3, 2), (8, 1), (17, 5)],
    fp32_table=[False, True],
)


def inverse_frequencies(rotary, device="cpu", base=10000.0):
    return (1.0 / base ** (torch.arange(0, rotary, 2).double() / max(rotary, 1))).float().to(device)


def make(tokens, dim, rotary, dtype, device, seed, heads=(3, 2), table=None):
    q, k = (tricky(tokens, h, dim, seed=seed + i, dtype=dtype, device=device) for i, h in enumerate(heads))
    positions = torch.randint(0, 5000, (tokens,), generator=torch.Generator().manual_seed(seed)).to(device)
    cos, sin = vx.rope_cos_sin(positions, inverse_frequencies(rotary, device))
    return q, k, cos.to(table or dtype), sin.to(table or dtype)


@BACKENDS
@DTYPES
@INTERLEAVED
@given(kind=KINDS.drawn, tokens=st.integers(1, 7), seed=st.integers(0, 2**16))
def test_tokens_stand_alone(device, backend, dtype, interleaved, kind, tokens, seed):
    kind = KINDS.at(kind, device, dtype)
    inputs = make(tokens, *kind.size, dtype, device, seed, table=torch.float32 if kind.fp32_table else None)
    check_rows(lambda *a: vx.rope(*a, interleaved=interleaved, backend=backend), *inputs, seed=seed)


@BACKENDS
@DTYPES
@given(kind=KINDS.drawn, tokens=st.integers(1, 7), seed=st.integers(0, 2**16))
def test_gradients_stand_alone(device, backend, dtype, kind, tokens, seed):
    size = KINDS.at(kind, device, dtype).size
    q, k, cos, sin = make(tokens, *size, dtype, device, seed)
    dq, dk, _, _ = make(tokens, *size, dtype, device, seed + 7)

    def grads(q, k, cos, sin, dq, dk):
        q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
        return torch.autograd.grad(vx.rope(q, k, cos, sin, backend=backend), (q, k), (dq, dk))

    check_rows(grads, q, k, cos, sin, dq, dk, seed=seed)


@pytest.mark.parametrize("device,backend", room_backends("rope", "triton"))
@pytest.mark.parametrize("heads", [(3, 1), (40, 5)], ids=str)
@pytest.mark.parametrize("size", [(128, 128), (80, 32), (6, 4)], ids=str)
def test_many_tokens_have_the_bits_of_few(device, backend, size, heads, monkeypatch):
    """Where a program takes a whole token, and where it takes a few heads of it."""
    from vexact_ops.rope import triton

    q, k, cos, sin = make(9, *size, torch.bfloat16, device, 3, heads=heads)
    v, slots = tricky(9, heads[1], 24, seed=7, dtype=torch.bfloat16, device=device), torch.arange(9, device=device) - 1

    def everything():
        caches = caches_for(k, v)
        norms = {"q_weight": q[0, 0], "k_weight": k[0, 0]}
        one, other = (vx.rope_kv_store(q, k, v, cos, sin, *caches, slots, **n) for n in ({}, norms))
        return *vx.rope(q, k, cos, sin), one, other, *caches

    few = everything()
    monkeypatch.setattr(triton, "MANY", 9)
    assert_bitwise(everything(), few)


def caches_for(k, v, pages=5, page_size=4):
    return tuple(torch.full((pages, page_size, *x.shape[1:]), 7.0, dtype=x.dtype, device=x.device) for x in (k, v))


@BACKENDS
@DTYPES
@INTERLEAVED
@given(kind=KINDS.drawn, tokens=st.integers(0, 7), width=st.sampled_from([1, 40, 128]), seed=st.integers(0, 2**16))
def test_rope_kv_store_has_the_bits_of_both_ops_alone(device, backend, dtype, interleaved, kind, tokens, width, seed):
    size = KINDS.at(kind, device, dtype).size
    q, k, cos, sin = make(tokens, *size, dtype, device, seed)
    v = tricky(tokens, 3, 2 * width, seed=seed, dtype=dtype, device=device)[:, 1:, :width]
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:tokens].to(device)
    slots[::3] = -1
    expected, ours = caches_for(k, v), caches_for(k, v)
    q_expected, k_turned = vx.rope(q, k, cos, sin, interleaved=interleaved, backend=backend)
    for x, cache in zip((k_turned, v), expected):
        cache.flatten(0, 1)[slots[slots >= 0]] = x[slots >= 0]
    got = vx.rope_kv_store(q, k, v, cos, sin, *ours, slots, interleaved=interleaved, backend=backend)
    assert_bitwise((got, *ours), (q_expected, *expected))


@BACKENDS
@DTYPES
@INTERLEAVED
@pytest.mark.parametrize("style", ["llama", "gemma"])
@given(kind=KINDS.drawn, tokens=st.integers(0, 7), seed=st.integers(0, 2**16))
def test_rope_kv_store_of_normalised_heads(device, backend, dtype, interleaved, style, kind, tokens, seed):
    """Heads as views of one projection, as the engine has them; the norm alone is not the rotation's business."""
    kind = KINDS.at(kind, device, dtype)
    size, heads, dim = kind.size, kind.heads, kind.size[0]
    q, k, cos, sin = make(tokens, *size, dtype, device, seed, heads=heads)
    fused = torch.cat((q, k, k.flip(-1)), 1)
    q, k, v = fused.split([heads[0], heads[1], heads[1]], 1)
    q_weight, k_weight = tricky(2, dim, seed=seed + 1, dtype=dtype, device=device)
    slots = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:tokens].to(device)
    slots[::3] = -1
    eps = 1e-3 if seed % 2 else 1e-6
    options = {"interleaved": interleaved, "backend": backend}
    expected, ours = caches_for(k, v), caches_for(k, v)
    normed = (vx.rmsnorm(x, w, eps, style=style, backend=backend) for x, w in ((q, q_weight), (k, k_weight)))
    turned = vx.rope_kv_store(*normed, v, cos, sin, *expected, slots, **options)
    norms = {"q_weight": q_weight, "k_weight": k_weight, "eps": eps, "style": style}
    got = vx.rope_kv_store(q, k, v, cos, sin, *ours, slots, **norms, **options)
    assert_bitwise((got, *ours), (turned, *expected))


def test_rope_kv_store_names_bad_norms():
    q, k, cos, sin = make(3, 16, 16, torch.float32, "cpu", 0)
    args = q, k, k, cos, sin, *caches_for(k, k), torch.tensor([2, 0, 5])
    weight = torch.ones(16, dtype=torch.float32)
    with pytest.raises(ValueError, match="rope_kv_store: k_weight: got None next to the other one's weight"):
        vx.rope_kv_store(*args, q_weight=weight)
    with pytest.raises(ValueError, match=r"rope_kv_store: q_weight: got shape \(8,\)"):
        vx.rope_kv_store(*args, q_weight=weight[:8], k_weight=weight)
    with pytest.raises(TypeError, match="rope_kv_store: k_weight: got dtype"):
        vx.rope_kv_store(*args, q_weight=weight, k_weight=weight.bfloat16())
    with pytest.raises(ValueError, match="rope_kv_store: style: got 'other'"):
        vx.rope_kv_store(*args, q_weight=weight, k_weight=weight, style="other")
    with pytest.raises(RuntimeError, match="rope_kv_store: q_weight requires a gradient"):
        vx.rope_kv_store(*args, q_weight=weight.clone().requires_grad_(), k_weight=weight)


@BACKENDS
def test_rope_kv_store_writes_into_no_other_slot(device, backend):
    q, k, cos, sin = make(3, 16, 16, torch.float32, device, 0)
    caches = caches_for(k, k)
    for bad in (-2, 20, 2**40):
        slots = torch.tensor([2, bad, 5], device=device)
        if backend == "cpu":
            with pytest.raises(ValueError, match=r"slot_mapping\[1\]: got slot"):
                vx.rope_kv_store(q, k, k, cos, sin, *caches, slots, backend=backend)
            assert (caches[0] == 7).all()
        else:  # looking at a slot would make the host wait
            vx.rope_kv_store(q, k, k, cos, sin, *caches, slots, backend=backend)
            untouched = [i for i in range(20) if i not in (2, 5)]
            assert all((c.flatten(0, 1)[untouched] == 7).all() for c in caches)


@BACKENDS
def test_rope_kv_store_opcheck(device, backend):
    q, k, cos, sin = make(3, 16, 16, torch.float32, device, 0)
    args = q, k, k, cos, sin, *caches_for(k, k), torch.tensor([2, 0, 5], device=device), False
    for norms in ((None, None), (torch.ones(16, device=device), torch.ones(16, device=device))):
        torch.library.opcheck(torch.ops.vexact.rope_kv_store.default, (*args, *norms, 1e-6, False, backend))


def test_rope_kv_store_names_bad_arguments():
    q, k, cos, sin = make(3, 16, 16, torch.float32, "cpu", 0)
    caches, slots = caches_for(k, k), torch.tensor([2, 0, 5])
    with pytest.raises(TypeError, match="rope_kv_store: q: got dtype float64"):
        vx.rope_kv_store(q.double(), k, k, cos, sin, *caches, slots)
    with pytest.raises(ValueError, match=r"rope_kv_store: k_cache: got shape"):
        vx.rope_kv_store(q, k, k, cos, sin, caches[0][..., :8], caches[1], slots)
    with pytest.raises(TypeError, match="rope_kv_store: slot_mapping: got dtype int32"):
        vx.rope_kv_store(q, k, k, cos, sin, *caches, slots.int())
    with pytest.raises(RuntimeError, match="rope_kv_store: q, k or v requires a gradient"):
        vx.rope_kv_store(q.requires_grad_(), k, k, cos, sin, *caches, slots)


@BACKENDS
@given(tokens=st.integers(1, 9), frequencies=st.integers(0, 40), seed=st.integers(0, 2**16), scaling=st.floats(0.1, 2))
def test_table_rows_stand_alone(device, backend, tokens, frequencies, seed, scaling):
    positions = torch.randint(0, 2**20, (tokens,), generator=torch.Generator().manual_seed(seed)).to(device)
    inv_freq = inverse_frequencies(2 * frequencies, device)
    check_rows(lambda p: vx.rope_cos_sin(p, inv_freq, scaling=scaling, backend=backend), positions, seed=seed)


@BACKENDS
@DTYPES
def test_repeatable(device, backend, dtype):
    q, k, cos, sin = make(67, 80, 72, dtype, device, 0, heads=(9, 3))
    positions, inv_freq = torch.arange(67, device=device) * 15000, inverse_frequencies(70, device)

    def run():
        a, b = q.clone().requires_grad_(), k.clone().requires_grad_()
        table = vx.rope_cos_sin(positions, inv_freq, scaling=1.1, dtype=dtype, backend=backend)
        out = [vx.rope(a, b, cos, sin, interleaved=i, backend=backend) for i in (False, True)]
        grads = [torch.autograd.grad(o, (a, b), (k.repeat(1, 3, 1), k)) for o in out]
        return *table, *out[0], *out[1], *grads[0], *grads[1]

    check_repeatable(run)


@BACKENDS
@DTYPES
@INTERLEAVED
def test_heads_of_a_fused_projection_and_neighbouring_heads(device, backend, dtype, interleaved):
    q, k, cos, sin = make(5, 24, 16, dtype, device, 3)
    fused = torch.cat((q, k, k), 1)  # (T, Hq + 2 Hk, D): both parts are strided views
    expected = vx.rope(q, k, cos, sin, interleaved=interleaved, backend=backend)
    views = fused[:, :3], fused[:, 3:5]
    assert not views[0].is_contiguous()
    assert_bitwise(vx.rope(*views, cos, sin, interleaved=interleaved, backend=backend), expected)
    by_head = q.transpose(0, 1).contiguous().transpose(0, 1)  # heads outermost in memory
    assert_bitwise(vx.rope(by_head, k, cos, sin, interleaved=interleaved, backend=backend)[0], expected[0])
    alone = vx.rope(q[:, 1:2], k[:, :0], cos, sin, interleaved=interleaved, backend=backend)[0]
    assert_bitwise(alone, expected[0][:, 1:2], "a head alone")
    assert_bitwise(expected[0][..., 16:], q[..., 16:], "what passes through")


@pytest.mark.parametrize("device,backend", room_backends("rope", "triton"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@INTERLEAVED
@given(kind=KINDS.drawn, tokens=st.integers(1, 7), seed=st.integers(0, 2**16))
def test_a_gpu_has_the_bits_of_a_cpu(device, backend, dtype, interleaved, kind, tokens, seed):
    size = KINDS.at(kind, device, dtype).size
    q, k, *_ = make(tokens, *size, dtype, "cpu", seed)
    positions = torch.randint(-(2**23), 2**23, (tokens,), generator=torch.Generator().manual_seed(seed))

    def run(device, backend):
        a, b = (t.to(device).requires_grad_() for t in (q, k))
        table = positions.to(device), inverse_frequencies(size[1], device)
        cos, sin = vx.rope_cos_sin(*table, scaling=0.9, dtype=dtype, backend=backend)
        out = vx.rope(a, b, cos, sin, interleaved=interleaved, backend=backend)
        return [t.cpu() for t in (cos, sin, *out, *torch.autograd.grad(out, (a, b), (a * 0.5, b * 2)))]

    assert_bitwise(run(device, backend), run("cpu", "cpu"))


@pytest.mark.parametrize("device,backend", room_backends("rope", "triton"))
def test_what_has_no_angle_is_nan_on_a_gpu(device, backend):
    positions, inv_freq = torch.tensor([0, 2**24, 5], device=device), torch.tensor([1.0, 65.0], device=device)
    for table in vx.rope_cos_sin(positions, inv_freq, backend=backend):
        assert table.isnan().tolist() == [[False, True] * 2, [True] * 4, [False, True] * 2]


def test_a_table_that_sees_the_batch_is_caught():
    def dynamic(positions):  # frequencies stretched by the longest sequence in the batch
        stretch = max(1.0, positions.max().item() / 50)
        return vx.rope_cos_sin(positions, inverse_frequencies(16, base=10000.0 * stretch))

    with pytest.raises(AssertionError, match="differ"):
        check_rows(dynamic, torch.arange(90, 100))


@BACKENDS
@pytest.mark.parametrize("scaling", [1.0, 0.8])
def test_angles_are_right_far_out(device, backend, scaling):
    positions = torch.cat([torch.arange(-3, 3000), torch.randint(0, 2**20, (3000,)), torch.tensor([2**24 - 1])])
    inv_freq = inverse_frequencies(64)
    exact = rope_cos_sin_ref(positions, inv_freq)
    ours = vx.rope_cos_sin(positions.to(device), inv_freq.to(device), scaling=scaling, backend=backend)
    for name, o, e in zip(("cos", "sin"), ours, exact):
        # fp32 rounds once (and a second time where it is scaled); only a near tie may go the other way
        rounded = e.float() * torch.tensor(scaling, dtype=torch.float32)
        assert (o.cpu() != rounded).float().mean() < 1e-5, name
        assert ((o.cpu().double() - e * scaling).abs() <= 1.3e-7 * e.abs()).all(), name


@BACKENDS
@DTYPES
@INTERLEAVED
def test_accuracy(device, backend, dtype, interleaved):
    g = torch.Generator().manual_seed(1)
    q, k, dq, dk = (torch.randn(50, h, 64, generator=g).to(device, dtype) for h in (4, 2, 4, 2))
    table = vx.rope_cos_sin(torch.arange(50, device=device), inverse_frequencies(48, device))
    cos, sin = (t.to(dtype) for t in table)

    def run(fn, q, k, cos, sin, dq, dk):
        q, k = q.detach().clone().requires_grad_(), k.detach().clone().requires_grad_()
        out = fn(q, k, cos, sin)
        return *out, *torch.autograd.grad(out, (q, k), (dq, dk))

    inputs = q, k, cos, sin, dq, dk
    exact = run(lambda *a: rope_ref(*a, interleaved=interleaved), *(t.double() for t in inputs))
    ours = run(lambda *a: vx.rope(*a, interleaved=interleaved, backend=backend), *inputs)
    stock = run(lambda *a: rope_ref(*a, interleaved=interleaved), *inputs)  # rounds at each step, as Hugging Face
    for name, o, t, e in zip(("q", "k", "dq", "dk"), ours, stock, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= stock_error + 1e-7, f"{name}: {error:.3g} against the stock's {stock_error:.3g}"


@BACKENDS
def test_opcheck(device, backend):
    q, k, cos, sin = make(3, 24, 16, torch.float32, device, 0)
    q.requires_grad_()
    k.requires_grad_()
    torch.library.opcheck(torch.ops.vexact.rope.default, (q, k, cos, sin, False, False, backend))
    positions = torch.arange(3, device=device)
    args = (positions, inverse_frequencies(16, device), 1.0, torch.bfloat16)
    torch.library.opcheck(torch.ops.vexact.rope_cos_sin.default, (*args, None, backend))
    args = (torch.stack((positions, positions)), *args[1:], [0, 1] * 4)
    torch.library.opcheck(torch.ops.vexact.rope_cos_sin.default, (*args, backend))


@BACKENDS
@DTYPES
@given(tokens=st.integers(0, 9), seed=st.integers(0, 2**16))
def test_a_frequency_reads_its_own_axis(device, backend, dtype, tokens, seed):
    """Of each axis the columns that the table of that axis alone has, and no neighbour's."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.randint(-5000, 5000, (3, tokens), generator=g).to(device)
    inv_freq = inverse_frequencies(36, device)
    axes = torch.randint(0, 3, inv_freq.shape, generator=g).tolist()
    options = {"scaling": 1.25, "dtype": dtype, "backend": backend}
    whole = vx.rope_cos_sin(positions, inv_freq, axes=axes, **options)
    for axis in range(3):
        alone = vx.rope_cos_sin(positions[axis], inv_freq, **options)
        mine = [i for i in range(len(axes)) if axes[i] == axis]
        mine += [i + len(axes) for i in mine]
        assert_bitwise([t[:, mine] for t in whole], [t[:, mine] for t in alone], f"axis {axis}")
    exact = rope_cos_sin_ref(positions, inv_freq, axes=axes, scaling=1.25)
    for got, want in zip(whole, exact):
        torch.testing.assert_close(got.double(), want, rtol=2**-7, atol=2**-20)
    if tokens:
        assert_bitwise(vx.rope_cos_sin(positions[:, -1:], inv_freq, axes=axes, **options), [t[-1:] for t in whole])


def test_bad_arguments_are_named():
    q, k, cos, sin = make(4, 16, 8, torch.float32, "cpu", 0)
    with pytest.raises(TypeError, match=r"rope: q: got dtype float64"):
        vx.rope(q.double(), k, cos, sin)
    with pytest.raises(TypeError, match=r"rope: k: got dtype bfloat16, expected float32 as q has"):
        vx.rope(q, k.bfloat16(), cos, sin)
    with pytest.raises(TypeError, match=r"rope: cos: got dtype bfloat16"):
        vx.rope(q, k, cos.bfloat16(), sin)
    with pytest.raises(ValueError, match=r"rope: q: got shape \(4, 48\), expected 3 dimensions"):
        vx.rope(q.flatten(1), k, cos, sin)
    with pytest.raises(ValueError, match=r"rope: k: got shape \(3, 2, 16\), expected \(4, Hk, 16\)"):
        vx.rope(q, k[:3], cos, sin)
    with pytest.raises(ValueError, match=r"rope: sin: got shape \(4, 6\), expected \(4, 8\)"):
        vx.rope(q, k, cos, sin[:, :6])
    with pytest.raises(ValueError, match=r"rope: cos: got shape \(4, 7\), expected an even last dimension"):
        vx.rope(q, k, cos[:, :7], sin[:, :7])
    with pytest.raises(ValueError, match="rope: q: got stride"):
        vx.rope(q.transpose(1, 2).contiguous().transpose(1, 2), k, cos, sin)
    with pytest.raises(ValueError, match="rope: cos: requires grad"):
        vx.rope(q, k, cos.clone().requires_grad_(), sin)
    inv_freq = inverse_frequencies(8)
    with pytest.raises(TypeError, match="rope_cos_sin: positions: got dtype float32"):
        vx.rope_cos_sin(torch.arange(4.0), inv_freq)
    with pytest.raises(TypeError, match=r"rope_cos_sin: dtype: got dtype float16"):
        vx.rope_cos_sin(torch.arange(4), inv_freq, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"rope_cos_sin: positions: got 0 to 16777216"):
        vx.rope_cos_sin(torch.tensor([0, 2**24]), inv_freq)
    with pytest.raises(ValueError, match=r"rope_cos_sin: inv_freq: got nan"):
        vx.rope_cos_sin(torch.arange(4), torch.tensor([1.0, float("nan")]))
    with pytest.raises(ValueError, match=r"rope_cos_sin: positions: got shape \(4,\), expected 2 dimensions"):
        vx.rope_cos_sin(torch.arange(4), inv_freq, axes=[0] * 4)
    two = torch.arange(4).view(2, 2)
    for axes in ([0, 1, 2, 0], [0, 1], [0, 1, 0, -1]):
        with pytest.raises(ValueError, match=r"rope_cos_sin: axes: got .*, expected 4 numbers from 0 to 1"):
            vx.rope_cos_sin(two, inv_freq, axes=axes)
    with pytest.raises(TypeError, match=r"rope_cos_sin: axes: got .*, expected a sequence of 4 ints"):
        vx.rope_cos_sin(two, inv_freq, axes=[0.0, 1.0, 0.0, 1.0])
    with pytest.raises(ValueError, match="rope_cos_sin: scaling: got nan"):
        vx.rope_cos_sin(torch.arange(4), inv_freq, scaling=float("nan"))


def test_zero_tokens():
    cos, sin = vx.rope_cos_sin(torch.empty(0, dtype=torch.int64), inverse_frequencies(8))
    assert cos.shape == sin.shape == (0, 8)
    q, k = vx.rope(torch.empty(0, 3, 16), torch.empty(0, 2, 16), cos, sin)
    assert q.shape == (0, 3, 16) and k.shape == (0, 2, 16)
