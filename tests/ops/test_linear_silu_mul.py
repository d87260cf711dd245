"""linear_silu_mul: the bytes of silu_mul(linear(...)), whatever kernel computes it, and what follows from that."""

import functools
import re
import types
from pathlib import Path

import pytest
import torch
from conftest import room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.linear_silu_mul.reference import linear_silu_mul_ref
from vexact_ops.testing import assert_bitwise, cancelling, check_repeatable, check_rows, special_rows

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("linear_silu_mul"))
ON_SM90 = pytest.mark.parametrize("device,backend", room_backends("linear_silu_mul", "cuda"))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
ACTIVATIONS = st.sampled_from(["silu", "gelu_tanh"])


def make(rows, width, k, seed, dtype, device, plain=None):
    """x, and a weight whose products with it are next to nothing: of gates and ups, or, with `plain` 0 or 1, of all but
    the gates or the ups, as a product of two such is nothing at all."""
    x, weight = cancelling(rows, k, 2 * width, seed=seed, dtype=dtype, device=device)
    if dtype == torch.float16:
        x = x.clamp(-64, 64)
    if plain is not None:
        g = torch.Generator().manual_seed(seed)
        values = torch.randn(width, k, generator=g, dtype=torch.float32) * k**-0.5
        weight.view(2, width, k)[plain] = values.to(device, dtype)
    return x, weight


def composed(x, weight, bias=None, *, activation="silu", backend=None):
    y = vx.linear(x, weight, bias, backend=backend)
    return vx.silu_mul(y, activation=activation, backend="triton" if backend == "cuda" else backend)


@BACKENDS
@DTYPES
@given(
    rows=st.sampled_from([1, 2, 7, 8, 9, 17, 33, 64, 65]),
    shape=st.sampled_from([(1, 1), (8, 64), (9, 70), (24, 72), (136, 520)]),
    plain=st.sampled_from([None, 0, 1]),
    has_bias=st.booleans(),
    activation=ACTIVATIONS,
    seed=st.integers(0, 2**16),
)
def test_it_is_silu_mul_of_linear(device, backend, dtype, rows, shape, plain, has_bias, activation, seed):
    x, weight = make(rows, *shape, seed, dtype, device, plain)
    bias = weight[:, 0].clone() if has_bias else None
    options = {"activation": activation, "backend": backend}
    for rows in (x, special_rows(x, seed=seed)):
        assert_bitwise(vx.linear_silu_mul(rows, weight, bias, **options), composed(rows, weight, bias, **options))


@BACKENDS
@DTYPES
@given(rows=st.sampled_from([1, 3, 20, 70]), activation=ACTIVATIONS, seed=st.integers(0, 2**16))
def test_rows_stand_alone(device, backend, dtype, rows, activation, seed):
    x, weight = make(rows, 328, 256, seed, dtype, device, plain=1)  # large enough to be verified for
    check_rows(lambda x: vx.linear_silu_mul(x, weight, activation=activation, backend=backend), x, seed=seed)


@BACKENDS
def test_an_unrounded_product_would_be_caught(device, backend):
    x, weight = make(40, 64, 256, 3, torch.bfloat16, device, plain=1)
    ours = vx.linear_silu_mul(x, weight, backend=backend)
    unrounded = vx.linear(x, weight, out_dtype=torch.float32, backend=backend)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(ours, vx.silu_mul(unrounded).bfloat16())


@BACKENDS
@DTYPES
def test_leading_dimensions_no_rows_and_again(device, backend, dtype):
    x, weight = make(12, 40, 64, 0, dtype, device, plain=0)
    expected = vx.linear_silu_mul(x, weight, backend=backend)
    assert_bitwise(vx.linear_silu_mul(x.view(2, 3, 2, 64), weight, backend=backend), expected.view(2, 3, 2, 40))
    assert_bitwise(vx.linear_silu_mul(x[3], weight, backend=backend), expected[3])
    assert vx.linear_silu_mul(x[:0], weight, backend=backend).shape == (0, 40)
    assert vx.linear_silu_mul(x, weight[:0], backend=backend).shape == (12, 0)
    check_repeatable(lambda: vx.linear_silu_mul(x, weight, backend=backend))


@BACKENDS
@pytest.mark.parametrize("shape", [(64, 72), (328, 256)], ids=str)
def test_strides_and_alignments_do_not_show(device, backend, shape):
    width, k = shape
    x, weight = make(20, width, k, 0, torch.bfloat16, device, plain=0)
    expected = vx.linear_silu_mul(x, weight, backend=backend)
    for t, run in (
        (x, lambda t: vx.linear_silu_mul(t, weight, backend=backend)),
        (weight, lambda t: vx.linear_silu_mul(x, t, backend=backend)),
    ):
        for offset, apart in ((1, k + 1), (3, k + 16), (8, k + 8)):
            wide = torch.full((len(t) * apart + 8,), float("nan"), dtype=t.dtype, device=device)
            strided = wide.as_strided(t.shape, (apart, 1), offset)
            strided.copy_(t)
            assert_bitwise(run(strided), expected)
        assert_bitwise(run(t.t().contiguous().t()), expected)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gradients_are_the_two_ops(device, backend, dtype, activation):
    tensors = (*make(9, 24, 64, 5, dtype, device, plain=1), torch.ones(48, dtype=dtype, device=device))

    def run(function):
        inputs = [t.clone().requires_grad_() for t in tensors]
        y = function(*inputs, activation=activation, backend=backend)
        return y.detach(), *torch.autograd.grad(y.float().square().sum(), inputs)

    assert_bitwise(run(vx.linear_silu_mul), run(composed))


@BACKENDS
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_accuracy(device, backend, activation):
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 256, generator=g, dtype=torch.float32) / 16 for n in (33, 2 * 72))
    x, weight = (t.bfloat16().to(device) for t in (x * 16, weight))
    ours = vx.linear_silu_mul(x, weight, activation=activation, backend=backend).double()
    exact = linear_silu_mul_ref(x.double(), weight.double(), activation=activation)
    stock = linear_silu_mul_ref(x, weight, activation=activation).double()
    assert (ours - exact).abs().max() <= 2 * (stock - exact).abs().max()


@BACKENDS
def test_opcheck(device, backend):
    x, weight = make(3, 16, 24, 0, torch.float32, device)
    op = torch.ops.vexact.linear_silu_mul.default
    torch.library.opcheck(op, (x, weight, None, False, backend))
    torch.library.opcheck(op, (x, weight, weight[:, 0].clone(), True, backend))


def test_bad_arguments_are_named():
    x, weight = torch.ones(2, 16), torch.ones(8, 16)
    with pytest.raises(TypeError, match="linear_silu_mul: x: got dtype float64"):
        vx.linear_silu_mul(x.double(), weight)
    with pytest.raises(TypeError, match="linear_silu_mul: weight: got dtype bfloat16"):
        vx.linear_silu_mul(x, weight.bfloat16())
    with pytest.raises(ValueError, match=r"linear_silu_mul: x: got shape \(\)"):
        vx.linear_silu_mul(x[0, 0], weight)
    with pytest.raises(ValueError, match=r"linear_silu_mul: weight: got shape \(8, 15\), expected \(2I, 16\)"):
        vx.linear_silu_mul(x, weight[:, :15])
    with pytest.raises(ValueError, match=r"linear_silu_mul: weight: got shape \(7, 16\), expected \(2I, 16\)"):
        vx.linear_silu_mul(x, weight[:7])
    with pytest.raises(ValueError, match=r"linear_silu_mul: bias: got shape \(4,\), expected \(8\,?\)"):
        vx.linear_silu_mul(x, weight, torch.ones(4))
    with pytest.raises(ValueError, match="linear_silu_mul: activation: got 'relu'"):
        vx.linear_silu_mul(x, weight, activation="relu")
    with pytest.raises(TypeError, match="linear_silu_mul: x: got dtype float16, which a GPU serves"):
        vx.linear_silu_mul(x.half(), weight.half(), backend="cpu")


def test_kernels_that_are_proposed_fit():
    from vexact_ops.linear.tiles import SHARED_BYTES, Skinny
    from vexact_ops.linear_silu_mul import cuda

    assert str(Skinny(48, 8, 4, 3, 1, 1000)) == "wgmma 48x8x256 ring 3 ahead 1 lead 1000"
    assert str(Skinny(64, 16, 2, 13, 6, 9, 1)) == "wgmma 64x16x128 ring 13 ahead 6 lead 9 persistent 1"
    assert str(cuda.Wide(256, 192, 4)) == "wgmma wide 256x192 ring 4"
    for n, k in ((160, 640), (6144, 1024), (12288, 2048), (24576, 4096), (57344, 8192)):
        for rows in (1, 16, 40, 64, 65, 128, 250, 1024):
            top = cuda.class_of(rows)
            found = cuda.kernels(top, n, k, 132)
            assert found and len(set(map(str, found))) == len(found)
            assert all(isinstance(tile, Skinny) == (rows <= 64) for tile in found)
            for high, tokens, boxes, ring, *_ in found if rows <= 64 else ():
                shared = ring * boxes * (high * 128 + max(1024, tokens * 128)) + -high % 64 * 128 + 1024
                assert high % 16 == 0 and tokens >= top and ring >= 3 and shared <= SHARED_BYTES
                assert -(-n // high) > 132 or 2 * shared + 2048 > SHARED_BYTES, "a wave spreads over all of them"
            for tokens, width, ring in found if rows > 64 else ():
                assert (tokens, width) in cuda.WIDE and ring >= 2
                assert tokens == 64 or -(-top // (tokens - 64)) > -(-top // tokens), "no fewer rows would do"
                assert ring * (tokens + width) * 128 + 1024 <= SHARED_BYTES
    assert [cuda.class_of(rows) for rows in (0, 1, 8, 9, 33, 64, 65, 1024, 1025)] == [0, 8, 8, 16, 40, 64, 72, 1024, 0]


def test_the_tiles_that_there_are():
    from vexact_ops.linear_silu_mul import cuda

    source = (Path(cuda.__file__).parents[2] / "csrc/linear_silu_mul/wide.cu").read_text()
    compiled = [tuple(map(int, of)) for of in re.findall(r"try_launch<(\d+), (\d+)>\(s", source)]
    assert sorted(cuda.WIDE) == sorted(compiled)


def test_a_wave_of_tiles_is_cut_to_the_multiprocessors():
    """Gates and ups of 8B over 256 rows are 128 tiles of 256 by 192; of 1.7B, half as many columns, of 128."""
    from vexact_ops.linear_silu_mul import cuda

    assert cuda.kernels(256, 24576, 4096, 132)[0][:2] == (256, 192)
    assert cuda.kernels(256, 12288, 2048, 132)[0][:2] == (128, 192)


# --- the choice, on a CPU: kernels in the place of SM90's


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """The room's CUDA half over the CPU's kernels; what it did; kernels' microseconds, and what is wrong with one."""
    from vexact_ops._core import admit
    from vexact_ops.linear import cpu as linear_cpu
    from vexact_ops.linear_silu_mul import cpu, cuda
    from vexact_ops.rmsnorm import cpu as rmsnorm_cpu
    from vexact_ops.silu_mul import cpu as silu_mul_cpu

    asked = types.SimpleNamespace(ran=[], us=lambda name: 1.0, wrong=None)

    def few(x, weight, gelu, *sizes):
        *sizes, out = sizes
        asked.ran.append(tuple(sizes))
        out.copy_(cpu.linear_silu_mul(x, weight, None, gelu))
        if asked.wrong == tuple(sizes):
            out[0, 0] += 1

    def race(calls, **options):
        for call in calls:
            call[0]()  # with what follows
        return [asked.us(call[0].args[0].name) for call in calls]

    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    monkeypatch.delenv("VEXACT_ADMIT", raising=False)
    monkeypatch.setattr(admit, "_decisions", {})
    monkeypatch.setattr(cuda.gpu, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(cuda.gpu, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda.linear, "SMALL", 0)
    monkeypatch.setattr(cuda, "_native", lambda: (few, few))
    monkeypatch.setattr(cuda, "_canonical", lambda x, weight, gelu: cpu.linear_silu_mul(x, weight, None, gelu))
    monkeypatch.setattr(cuda, "race_on_gpu", race)
    monkeypatch.setattr(cuda.linear, "linear_fwd", linear_cpu.linear_fwd)
    monkeypatch.setattr(cuda, "silu_mul_fwd", silu_mul_cpu.silu_mul_fwd)
    monkeypatch.setattr(cuda, "rmsnorm_fwd", rmsnorm_cpu.rmsnorm_fwd)
    return cuda, asked


# as _decision keeps what it knows in a dictionary of its own: widths that no other test has
@pytest.mark.parametrize("rows,width", [(5, 24), (70, 56)])
@pytest.mark.parametrize("faster", ["one", "two", "none has the bytes", "one, by chance"])
def test_the_faster_way_is_taken_of_those_with_the_bytes(on_cpu, rows, width, faster):
    cuda, asked = on_cpu
    width += 8 * ["one", "two", "none has the bytes", "one, by chance"].index(faster)
    x, weight = make(rows, width, 72, 0, torch.bfloat16, "cpu", plain=0)
    tiles = cuda.kernels(cuda.class_of(rows), 2 * width, 72)
    best = str(tiles[1])
    apart = {"one": 2.03, "two": 1.0, "one, by chance": 2.01}.get(faster)
    asked.us = lambda name: {best: 2.0, cuda.UNFUSED: apart}.get(name, 3.0)
    if faster == "none has the bytes":
        asked.wrong = tiles[1]
        asked.us = lambda name: 1.0 if name == cuda.UNFUSED else 2.0
    assert_bitwise(cuda.linear_silu_mul(x, weight, None, True), composed(x, weight, activation="gelu_tanh"))
    assert set(asked.ran) == set(tiles), "each of them was verified"
    asked.ran.clear()
    assert_bitwise(cuda.linear_silu_mul(x, weight, None, False), composed(x, weight))
    assert asked.ran == ([tiles[1]] if faster == "one" else [])
    decision = cuda._decision(x.device, x.dtype, 2 * width, 72, cuda.class_of(rows))
    assert decision.chosen.name == (best if faster == "one" else cuda.UNFUSED)
    refused = [v.candidate for v in decision.verdicts if not v.admitted]
    assert refused == ([best] if asked.wrong else [])


@pytest.mark.parametrize("rows", [6, 80])
def test_the_race_is_long_and_as_in_a_model(on_cpu, monkeypatch, rows):
    cuda, _ = on_cpu
    width, k, ran = 96, 40, []
    for name in ("rmsnorm_fwd", "_unfused", "_run"):
        ours = getattr(cuda, name)
        monkeypatch.setattr(cuda, name, lambda *a, name=name, ours=ours: ran.append(name) or ours(*a))
    product = cuda.linear.linear_fwd
    monkeypatch.setattr(cuda.linear, "linear_fwd", lambda *a: ran.append(tuple(a[1].shape)) or product(*a))
    monkeypatch.setattr(cuda, "_copy_of", lambda seconds, device: lambda: ran.append(seconds))
    raced = []
    monkeypatch.setattr(cuda, "race_on_gpu", lambda calls, **how: raced.append((calls, how)) or [1.0] * len(calls))
    x, weight = make(rows, width, k, 0, torch.bfloat16, "cpu")
    one = cuda.candidate(cuda.kernels(cuda.class_of(rows), 2 * width, k)[0], "")
    cuda._race([one, cuda.Candidate(cuda.UNFUSED, None, "")], (x, weight, False))
    ((calls, how),) = raced
    sets = {call.args[1].data_ptr() for call in calls[0]}
    assert len(sets) == 8 and [c.args[1:] for c in calls[0]] == [c.args[1:] for c in calls[1]], "the same weights"
    assert len(calls[0]) * 8e-6 >= 1e-3 and how["final"] >= 20, "some per cent of a chain are told apart"
    for competitor in calls:
        competitor[0]()
    first, down = (2 * width, k), (k, width)
    rest = [] if rows <= 64 else [pytest.approx(12e-6)]
    assert ran == [*rest, "rmsnorm_fwd", "_run", down, *rest, "rmsnorm_fwd", "_unfused", first, down]


@pytest.mark.parametrize("seconds,parts", [(12e-6, 1), (100e-6, 2)])
def test_a_copy_that_takes_so_long(monkeypatch, seconds, parts):
    from vexact_ops.linear_silu_mul import cuda

    copied = []
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, of: copied.append(to.nbytes + of.nbytes))
    cuda._copy_of(seconds, "cpu")()
    assert len(copied) == parts and sum(copied) / 4e12 == pytest.approx(seconds, rel=1e-3)


def test_what_the_kernels_do_not_take_is_two_ops(on_cpu):
    cuda, asked = on_cpu
    for rows, width, k, dtype, has_bias in (
        (1025, 48, 72, torch.bfloat16, False), (5, 44, 72, torch.bfloat16, False), (5, 48, 70, torch.bfloat16, False),
        (5, 48, 72, torch.float32, False), (5, 48, 72, torch.bfloat16, True), (0, 48, 72, torch.bfloat16, False),
    ):  # fmt: skip
        x, weight = make(max(rows, 1), width, k, 0, dtype, "cpu", plain=0)
        x, bias = x[:rows], weight[:, 0].clone() if has_bias else None
        assert_bitwise(cuda.linear_silu_mul(x, weight, bias, False), composed(x, weight, bias))
    assert not asked.ran


# --- SM90's own kernels


@functools.lru_cache(4)
def weights(width, k, dtype, device):
    return [make(1024, width, k, 7, dtype, device, plain) for plain in (None, 0, 1)]


# 33 * 8 gates: a last tile with fewer; 5 * 8: fewer than a tile; K off a box, off a stage, and longer than a ring
SHAPES = pytest.mark.parametrize("width,k", [(264, 1000), (40, 4104), (2056, 64), (720, 576)], ids=str)


@ON_SM90
@HALVES
@SHAPES
@given(
    rows=st.one_of(st.integers(1, 64), st.integers(65, 1024)),
    plain=st.sampled_from([0, 1, 2]),
    special=st.booleans(),
    activation=ACTIVATIONS,
    seed=st.integers(0, 2**16),
)
def test_every_kernel_has_the_bytes_of_the_two(
    device, backend, dtype, width, k, rows, plain, special, activation, seed
):
    """Each that may be chosen for so many rows, on rows and strides of any kind."""
    from vexact_ops.linear_silu_mul import cuda

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("they are for SM90")
    x, weight = weights(width, k, dtype, device)[plain]
    x = x.roll(seed, 0)[:rows]
    x = special_rows(x, seed=seed) if special else x
    wide = torch.full((rows, k + 16), float("nan"), dtype=dtype, device=device)
    wide[:, 8 : 8 + k] = x
    expected = composed(x, weight, activation=activation, backend="triton")
    tiles = {tile: 0 for n in (2 * width, 12288, 24576) for tile in cuda.kernels(cuda.class_of(rows), n, k)}
    if rows > 64:
        tiles |= {cuda.Wide(*of, ring): 0 for of in cuda.WIDE for ring in (2, 4)}
    for tile in tiles:
        for operand in (x, wide[:, 8 : 8 + k]):
            assert_bitwise(cuda._run(tile, operand, weight, activation == "gelu_tanh"), expected, str(tile))


@ON_SM90
@HALVES
@pytest.mark.parametrize("rows", [1, 8, 13, 16, 31, 64, 65, 200, 1000])
def test_all_are_admitted(device, backend, dtype, rows):
    from vexact_ops.linear_silu_mul import cuda

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("they are for SM90")
    decision = cuda.admit(2 * 768, 1000, rows, dtype, device)
    assert len(decision.verdicts) > 2 and all(v.admitted for v in decision.verdicts), decision
    x, weight = make(rows, 768, 1000, rows, dtype, device, plain=1)
    assert_bitwise(vx.linear_silu_mul(x, weight), composed(x, weight, backend="triton"))
    assert decision.chosen.name in vx.explain(vx.linear_silu_mul, x, weight).kernels


@ON_SM90
def test_bindings_refuse_what_would_leave_memory(device, backend):
    from vexact_ops._core import native

    few, sizes = native.ops().linear_silu_mul_few.default, [48, 8, 2, 4, 2, 2, 0]
    wide, tile = native.ops().linear_silu_mul_wide.default, [64, 128, 4]
    bad_sizes = {0: 56}, {0: 144}, {1: 12}, {2: 3}, {3: 1}, {3: 33}, {4: -1}, {6: 9}
    bad_tiles = {0: 80}, {0: 320}, {1: 96}, {1: 256}, {2: 0}, {2: 1}, {2: 10}
    refuses(few, sizes, bad_sizes, device)
    refuses(wide, tile, bad_tiles, device)


def refuses(run, sizes, changes, device):
    x, weight, out = (torch.ones(n, m, dtype=torch.bfloat16, device=device) for n, m in ((4, 64), (96, 64), (4, 48)))
    run(x, weight, False, *sizes, out)
    for change in changes:
        with pytest.raises(RuntimeError):
            run(x, weight, False, *(change.get(i, s) for i, s in enumerate(sizes)), out)
    wide = torch.ones(96, 72, dtype=torch.bfloat16, device=device)
    for bad in (
        (x, weight, out[:, :40]), (x, weight, out.half()), (x, weight, out[:3]), (x.float(), weight, out),
        (x, weight[:88], out[:, :44]), (x, weight.half(), out), (x, wide[:, 1:65], out), (wide[:4, 1:65], weight, out),
    ):  # fmt: skip
        with pytest.raises(RuntimeError):
            run(*bad[:2], False, *sizes, bad[2])
