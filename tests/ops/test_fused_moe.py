"""fused_moe: a token's row depends on that token alone, whoever shares its experts; gradients; bad arguments."""

import contextlib
import dataclasses

import pytest
import torch
from conftest import SLOW, Kinds, interpreted, room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.fused_moe.op import ROOM
from vexact_ops.fused_moe.reference import fused_moe_ref
from vexact_ops.testing import assert_bitwise, cancelling, check_repeatable, check_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("fused_moe"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swigluoai"])
TOKENS = st.one_of(st.integers(1, 12), st.sampled_from([33]))
KINDS = Kinds(few=4, seed=0, experts=[1, 4, 16], hidden=[*range(1, 41), 64, 130], inner=[*range(1, 41), 64])
SEED = st.integers(0, 2**16)


def inputs_of(tokens, experts, top_k, hidden, inner, seed, dtype, device):
    """x and gate_up cancel to almost nothing, so that a changed order shows; ids are distinct for each token."""
    g = torch.Generator().manual_seed(seed)
    x, gate_up = cancelling(tokens, hidden, experts * 2 * inner, seed, dtype, device)
    if dtype == torch.float16:  # 25 binades overflow there
        x = x.clamp(-64, 64)
    down = tricky(experts, hidden, inner, seed=seed, dtype=dtype, device=device).clamp(-4, 4)
    weights = torch.rand(tokens, top_k, generator=g).to(device)
    ids = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(tokens)]).to(device, torch.int32)
    return x, gate_up.view(experts, 2 * inner, hidden), down, weights, ids


def biases_of(activation, gate_up, down, seed=0):
    """Of gpt-oss's experts, as large as its limits and larger."""
    if activation != "swigluoai":
        return {}
    shapes = {"gate_up_bias": gate_up.shape[:2], "down_bias": down.shape[:2]}
    return {
        name: (8 * tricky(*shape, seed=seed + i, dtype=gate_up.dtype, device=gate_up.device)).clamp(-12, 12)
        for i, (name, shape) in enumerate(shapes.items())
    }


def canonical(backend):
    """What the ops that this one is composed of are computed with."""
    return "triton" if backend == "cuda" else backend


def swiglu_apart(h, backend):
    """Of one expert's rows, in fp32 by operations that are rounded once each."""
    gate, up = h[..., ::2].float().clamp(max=7), h[..., 1::2].float().clamp(-7, 7)
    sigmoid = vx.sigmoid_mul(torch.ones_like(gate), gate * 1.702, backend=backend)
    return ((gate * sigmoid) * (up + 1)).to(h.dtype)


def ops_apart(x, gate_up, down, weights, ids, activation, backend, gate_up_bias=None, down_bias=None):
    """The contract spelled out with the dense ops, one token and slot at a time."""
    rows, backend = [], canonical(backend)
    for t in range(x.shape[0]):
        acc = torch.zeros(x.shape[1], dtype=torch.float64)
        for s in range(ids.shape[1]):
            e = int(ids[t, s])
            if not 0 <= e < gate_up.shape[0]:
                continue
            h = vx.linear(x[t : t + 1], gate_up[e], backend=backend)
            if gate_up_bias is None:
                a = vx.silu_mul(h, activation=activation, backend=backend)
            else:
                a = swiglu_apart(h + gate_up_bias[e], backend)
            y = vx.linear(a, down[e], backend=backend)[0]
            y = (y if down_bias is None else y + down_bias[e]).cpu()
            # one fused multiply-add: the product is exact in float64, and so is its sum but for far apart terms,
            # which rounding to odd keeps from being rounded twice
            acc = _add_once(weights[t, s].cpu().double() * y.double(), acc)
        rows.append(acc.float().to(x.dtype))
    return torch.stack(rows)


def _add_once(product, acc):
    total = product + acc
    back = total - product
    error = (product - (total - back)) + (acc - back)
    odd = (total.view(torch.int64) & 1) == 0
    up = torch.where(error > 0, torch.inf, -torch.inf).double()
    total = torch.where((error != 0) & odd & total.isfinite(), torch.nextafter(total, up), total)
    return total.float().double()


@BACKENDS
@DTYPES
@ACTIVATIONS
@given(tokens=st.integers(1, 6), kind=KINDS.drawn, seed=SEED)
def test_it_is_the_dense_ops_in_slot_order(device, backend, dtype, activation, tokens, kind, seed):
    of = KINDS.at(kind, device, dtype)
    inputs = inputs_of(tokens, of.experts, min(4, of.experts), of.hidden, of.inner, seed, dtype, device)
    biases = biases_of(activation, inputs[1], inputs[2], seed)
    y = vx.fused_moe(*inputs, activation=activation, backend=backend, **biases)
    assert_bitwise(y.cpu(), ops_apart(*inputs, activation, backend, **biases))


@BACKENDS
@DTYPES
@ACTIVATIONS
@given(tokens=TOKENS, kind=KINDS.drawn, seed=SEED)
def test_tokens_stand_alone(device, backend, dtype, activation, tokens, kind, seed):
    tokens = min(tokens, 5) if interpreted(device, backend) else tokens
    of = KINDS.at(kind, device, dtype)
    inputs = inputs_of(tokens, of.experts, min(4, of.experts), of.hidden, of.inner, seed, dtype, device)
    x, gate_up, down, weights, ids = inputs
    options = {"activation": activation, "backend": backend, **biases_of(activation, gate_up, down, seed)}
    dy = tricky(tokens, of.hidden, seed=seed + 1, dtype=dtype, device=device).clamp(-4, 4)

    def run(x, weights, ids, dy):
        args = [t.clone().requires_grad_() for t in (x, weights)]
        y = vx.fused_moe(args[0], gate_up, down, args[1], ids, **options)
        return y.detach(), *torch.autograd.grad(y, args, dy)

    check_rows(run, x, weights, ids, dy, seed=seed)


@BACKENDS
@DTYPES
def test_whoever_shares_the_experts(device, backend, dtype):
    x, gate_up, down, weights, ids = inputs_of(40, 8, 3, 96, 48, 1, dtype, device)
    expected = vx.fused_moe(x, gate_up, down, weights, ids, backend=backend)
    crowd = ids.clone()
    crowd[5:] = ids[2]  # everybody goes where token 2 goes
    y = vx.fused_moe(x, gate_up, down, weights, crowd, backend=backend)
    assert_bitwise(y[:5], expected[:5], "a crowd at the same experts")
    broken = gate_up.clone()
    others = [e for e in range(8) if e not in ids[2].tolist()]
    broken[others] = float("nan")
    y = vx.fused_moe(x, broken, down, weights, ids, backend=backend)
    assert_bitwise(y[2], expected[2], "NaN in the experts it does not go to")


def test_a_batch_dependent_sum_is_caught():
    x, gate_up, down, weights, ids = inputs_of(16, 4, 3, 64, 32, 0, torch.float32, "cpu")

    def by_expert(x, weights, ids):  # adds in expert order where there are many tokens, in slot order where few
        if len(x) > 4:
            ids, order = ids.sort(1)
            weights = weights.gather(1, order)
        return vx.fused_moe(x, gate_up, down, weights, ids)

    with pytest.raises(AssertionError, match="differ"):
        check_rows(by_expert, x, weights, ids)


@BACKENDS
@DTYPES
def test_empty_slots_add_nothing(device, backend, dtype):
    x, gate_up, down, weights, ids = inputs_of(10, 5, 3, 50, 20, 2, dtype, device)
    ids[1, 1], ids[2], ids[3, 0], ids[9, 2] = -1, 5, 2**31 - 1, -(2**31)
    weights[ids.lt(0) | ids.ge(5)] = float("nan")
    args = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    y = vx.fused_moe(*args, ids, backend=backend)
    dx, dgate_up, ddown, dweights = torch.autograd.grad(y, args, torch.ones_like(y))
    assert_bitwise(y.detach().cpu(), ops_apart(*[t.detach() for t in args], ids, "silu", backend))
    assert not y[2].any() and not dx[2].any()
    assert not dweights[ids.lt(0) | ids.ge(5)].any() and dweights.isfinite().all()
    assert all(t.isfinite().all() for t in (dx, dgate_up, ddown))


@BACKENDS
@DTYPES
def test_gradients_of_weights_are_the_dense_ones(device, backend, dtype):
    """An expert's gradients are those of linear over its tokens, ascending; without tokens, 0."""
    x, gate_up, down, weights, ids = inputs_of(30, 6, 2, 40, 24, 3, dtype, device)
    ids[ids == 4] = 1
    ids[:, 1] = torch.where(ids[:, 1] == ids[:, 0], 6, ids[:, 1])
    args = [t.requires_grad_() for t in (gate_up, down)]
    dy = tricky(30, 40, seed=5, dtype=dtype, device=device).clamp(-4, 4)
    grads = torch.autograd.grad(vx.fused_moe(x, *args, weights, ids, backend=backend), args, dy)
    assert not grads[0][4].any() and not grads[1][4].any()
    backend = canonical(backend)
    for e in (0, 1, 2, 3, 5):
        token, slot = (ids == e).nonzero(as_tuple=True)
        g, d = (t[e].detach().clone().requires_grad_() for t in args)
        h = vx.linear(x[token], g, backend=backend)
        a = vx.silu_mul(h, backend=backend)
        da = torch.autograd.grad(vx.linear(a, d, backend=backend), a, dy[token])[0]
        w = weights[token, slot][:, None]
        scaled = (w * a.detach().float()).to(dtype)
        (expected,) = torch.autograd.grad(vx.linear(scaled, d, backend=backend), d, dy[token])
        assert_bitwise(grads[1][e], expected, f"down of expert {e}")
        if dtype == torch.float32:  # otherwise the weighted gradient is rounded between the ops, and not in the op
            (expected,) = torch.autograd.grad(h, g, torch.autograd.grad(vx.silu_mul(h, backend=backend), h, w * da)[0])
            assert_bitwise(grads[0][e], expected, f"gate and up of expert {e}")


@BACKENDS
@DTYPES
@pytest.mark.parametrize("tokens", [1, 3, 50])
def test_repeatable(device, backend, dtype, tokens):
    *args, ids = inputs_of(tokens, 9, 3, 136, 40, 5, dtype, device)
    args = [t.requires_grad_() for t in args]
    dy = tricky(tokens, 136, seed=7, dtype=dtype, device=device)

    def run():
        y = vx.fused_moe(*args, ids, backend=backend)
        return y, *torch.autograd.grad(y, args, dy)

    check_repeatable(run)


@BACKENDS
@DTYPES
@ACTIVATIONS
def test_accuracy(device, backend, dtype, activation):
    g = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g) * scale).to(device, dtype)

    x, gate_up, down, dy = normal(60, 96), normal(6, 128, 96, scale=0.1), normal(6, 96, 64, scale=0.1), normal(60, 96)
    logits = torch.randn(60, 6, generator=g).to(device)
    weights, ids = vx.moe_route(logits, 3)
    inputs = x, gate_up, down, weights, *biases_of(activation, gate_up, down).values()

    def run(fn, *inputs):
        args = [t.detach().clone().requires_grad_() for t in inputs]
        biases = dict(zip(("gate_up_bias", "down_bias"), args[4:]))
        y = fn(*args[:4], ids, activation=activation, **biases)
        return y.detach(), *torch.autograd.grad(y, args, dy.to(y.dtype))

    exact = run(fused_moe_ref, *(t.double() for t in inputs))
    ours = run(lambda *a, **k: vx.fused_moe(*a, backend=backend, **k), *inputs)
    stock = run(fused_moe_ref, *inputs)
    names = "y", "dx", "dgate_up", "ddown", "dweights", "dgate_up_bias", "ddown_bias"
    for name, o, t, e in zip(names, ours, stock, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 1e-6, f"{name}: {error:.3g} against the stock's {stock_error:.3g}"


@BACKENDS
@DTYPES
def test_views_and_frozen_weights(device, backend, dtype):
    x, gate_up, down, weights, ids = inputs_of(12, 4, 2, 48, 16, 2, dtype, device)
    expected = vx.fused_moe(x, gate_up, down, weights, ids, backend=backend)
    wide = torch.full((4, 40, 60), float("nan"), dtype=dtype, device=device)
    wide[:, 4:36, :48] = gate_up
    turned = down.transpose(1, 2).contiguous().transpose(1, 2)
    y = vx.fused_moe(
        x.t().contiguous().t(), wide[:, 4:36, :48], turned, weights.t().contiguous().t(), ids, backend=backend
    )
    assert_bitwise(y, expected, "views")
    x.requires_grad_()
    (dx,) = torch.autograd.grad(vx.fused_moe(x, gate_up, down, weights, ids, backend=backend).float().sum(), x)
    args = [t.requires_grad_() for t in (x, gate_up, down, weights)]
    grads = torch.autograd.grad(vx.fused_moe(*args, ids, backend=backend).float().sum(), args)
    assert_bitwise(dx, grads[0], "frozen experts")


@BACKENDS
def test_opcheck(device, backend):
    *args, ids = inputs_of(5, 4, 2, 16, 8, 0, torch.float32, device)
    args = [t.requires_grad_() for t in args]
    torch.library.opcheck(torch.ops.vexact.fused_moe.default, (*args, ids, False, True, backend))
    x, gate_up, down, weights = args
    biases = [b.requires_grad_() for b in biases_of("swigluoai", gate_up.detach(), down.detach()).values()]
    operator = torch.ops.vexact.fused_moe_swiglu.default
    torch.library.opcheck(operator, (x, gate_up, down, *biases, weights, ids, True, backend))


@BACKENDS
@DTYPES
def test_the_bits_do_not_depend_on_whether_a_gradient_is_wanted(device, backend, dtype):
    x, gate_up, down, weights, ids = inputs_of(20, 4, 2, 48, 16, 4, dtype, device)
    y = vx.fused_moe(x, gate_up, down, weights, ids, backend=backend)
    trained = vx.fused_moe(x.requires_grad_(), gate_up, down, weights, ids, backend=backend)
    assert_bitwise(y, trained.detach())
    with torch.no_grad():
        assert_bitwise(vx.fused_moe(x, gate_up, down, weights, ids, backend=backend), y)


@BACKENDS
def test_no_tokens(device, backend):
    *args, ids = inputs_of(1, 4, 2, 16, 8, 0, torch.float32, device)
    x, gate_up, down, weights = (t.requires_grad_() for t in (args[0][:0], args[1], args[2], args[3][:0]))
    y = vx.fused_moe(x, gate_up, down, weights, ids[:0], backend=backend)
    assert y.shape == (0, 16)
    dgate_up, ddown = torch.autograd.grad(y.sum(), (gate_up, down))
    assert not dgate_up.any() and not ddown.any()


def test_bad_arguments_are_named():
    x, gate_up, down, weights, ids = inputs_of(5, 4, 2, 16, 8, 0, torch.float32, "cpu")
    with pytest.raises(TypeError, match=r"fused_moe: x: got dtype float64"):
        vx.fused_moe(x.double(), gate_up, down, weights, ids)
    with pytest.raises(TypeError, match=r"fused_moe: down_weight: got dtype bfloat16"):
        vx.fused_moe(x, gate_up, down.bfloat16(), weights, ids)
    with pytest.raises(TypeError, match=r"fused_moe: topk_weights: got dtype bfloat16, expected float32"):
        vx.fused_moe(x, gate_up, down, weights.bfloat16(), ids)
    with pytest.raises(TypeError, match=r"fused_moe: topk_ids: got dtype int64, expected int32"):
        vx.fused_moe(x, gate_up, down, weights, ids.long())
    with pytest.raises(ValueError, match=r"fused_moe: x: got shape \(1, 5, 16\), expected 2 dimensions"):
        vx.fused_moe(x[None], gate_up, down, weights, ids)
    with pytest.raises(ValueError, match=r"fused_moe: gate_up_weight: got shape \(4, 15, 16\), expected \(E, 2I, 16\)"):
        vx.fused_moe(x, gate_up[:, 1:], down, weights, ids)
    with pytest.raises(ValueError, match=r"fused_moe: down_weight: got shape \(4, 16, 7\), expected \(4, 16, 8\)"):
        vx.fused_moe(x, gate_up, down[..., 1:], weights, ids)
    with pytest.raises(ValueError, match=r"fused_moe: topk_ids: got shape \(5, 1\), expected \(5, 2\)"):
        vx.fused_moe(x, gate_up, down, weights, ids[:, :1])
    with pytest.raises(ValueError, match="fused_moe: activation: got 'relu'"):
        vx.fused_moe(x, gate_up, down, weights, ids, activation="relu")


def test_biases_come_with_their_gate_alone():
    x, gate_up, down, weights, ids = inputs_of(5, 4, 2, 16, 8, 0, torch.float32, "cpu")
    biases = biases_of("swigluoai", gate_up, down)
    both = {"activation": "swigluoai", **biases}
    with pytest.raises(ValueError, match="fused_moe: gate_up_bias: got one with 'silu', expected one with 'swigluoai'"):
        vx.fused_moe(x, gate_up, down, weights, ids, **biases)
    with pytest.raises(ValueError, match="fused_moe: down_bias: got None with 'swigluoai'"):
        vx.fused_moe(x, gate_up, down, weights, ids, **{**both, "down_bias": None})
    with pytest.raises(ValueError, match=r"fused_moe: gate_up_bias: got shape \(4, 15\), expected \(4, 16\)"):
        vx.fused_moe(x, gate_up, down, weights, ids, **{**both, "gate_up_bias": biases["gate_up_bias"][:, 1:]})
    with pytest.raises(TypeError, match="fused_moe: down_bias: got dtype bfloat16"):
        vx.fused_moe(x, gate_up, down, weights, ids, **{**both, "down_bias": biases["down_bias"].bfloat16()})


@BACKENDS
@DTYPES
def test_empty_slots_and_matrices_that_stand_the_other_way_round(device, backend, dtype):
    """As gpt-oss has them: (E, H, 2I) and (E, I, H), here turned; biases of experts with empty slots beside them."""
    x, gate_up, down, weights, ids = inputs_of(12, 5, 3, 50, 20, 2, dtype, device)
    ids[1, 1], ids[2], ids[3, 0] = -1, 5, 2**31 - 1
    weights[ids.lt(0) | ids.ge(5)] = float("nan")
    biases = biases_of("swigluoai", gate_up, down)
    stored = [t.transpose(1, 2).contiguous().requires_grad_() for t in (gate_up, down)]
    turned = [t.transpose(1, 2) for t in stored]
    args = [x.requires_grad_(), *stored, weights.requires_grad_(), *(b.requires_grad_() for b in biases.values())]
    y = vx.fused_moe(x, *turned, weights, ids, activation="swigluoai", backend=backend, **biases)
    grads = torch.autograd.grad(y, args, torch.ones_like(y))
    plain = [t.detach() for t in (x, gate_up, down, weights)]
    apart = {name: bias.detach() for name, bias in biases.items()}
    assert_bitwise(y.detach().cpu(), ops_apart(*plain, ids, "swigluoai", backend, **apart))
    assert not y[2].any() and not grads[0][2].any()
    assert all(g.isfinite().all() for g in grads) and not grads[3][ids.lt(0) | ids.ge(5)].any()


def plan_by_sorting(ids, experts):
    ids = ids.flatten().long()
    key = torch.where((ids >= 0) & (ids < experts), ids, experts)
    order = key.sort(stable=True)[1]
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(ids), device=ids.device))
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    order[offsets[-1] :] = 0
    return tuple(t.int() for t in (offsets, order, torch.where(key < experts, position, -1)))


@BACKENDS
@pytest.mark.parametrize("experts", [1, 7] if SLOW else [1, 7, 128, 512, 600])
@pytest.mark.parametrize("kind", ["any", "all there", "one hot"])
def test_the_plan_is_a_stable_sort(device, backend, experts, kind):
    g = torch.Generator().manual_seed(experts)
    low, high = {"any": (-2, experts + 2), "all there": (0, experts), "one hot": (experts - 1, experts)}[kind]
    for slots in (0, 1, 33, 200) if SLOW else (0, 1, 33, 1024, 1025, 4000, 8193, 140000):
        ids = torch.randint(low, high, (slots,), generator=g, dtype=torch.int32)
        if kind == "any" and slots > 4:
            ids[1], ids[3] = 2**31 - 1, -(2**31)
        ids = ids.to(device)
        assert_bitwise(ROOM.module(backend).plan(ids, experts), plan_by_sorting(ids, experts), f"{slots} slots")


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@GPU
@DTYPES
@pytest.mark.parametrize("n", [1, 8, 130, 768, 1408, 2048])
@pytest.mark.parametrize("option", [1, 3, 6, 8, 11])
def test_the_cuda_kernels_have_the_bits_of_the_canonical_ones(dtype, n, option):
    from vexact_ops.fused_moe import cuda, triton

    for case in cuda._combine_cases(dtype, torch.device("cuda", 0), n, option):
        assert_bitwise(cuda._combine_kernel(*case), triton._combine(*case), "combine")
    for case in cuda._gate_bwd_cases(dtype, torch.device("cuda", 0), n, option % 2):
        assert_bitwise(cuda._gate_bwd_live(*case), cuda._canonical_gate_bwd_live(*case), "gate_bwd")
    for case in cuda._plan_cases(torch.device("cuda", 0), 8 * option):
        assert_bitwise(cuda._plan_kernel(*case), triton.plan(*case), "plan")


@GPU
def test_admission_refuses_another_order(monkeypatch, tmp_path):
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    from vexact_ops._core.admit import Candidate, admitted
    from vexact_ops.fused_moe import cuda, triton

    def backwards(y, position, weights, tokens):  # the last slot first
        position = position.view(tokens, -1).flip(1).flatten()
        return triton._combine(y, position, None if weights is None else weights.flip(1).contiguous(), tokens)

    def by_halves(h, da, order, weights, offsets, gelu):  # dweights as torch adds them
        dh, scaled, dweights = triton._gate_bwd(h, da, order, weights, offsets, gelu)
        live = int(offsets[-1])
        dweights.flatten()[order[:live].long()] = (da.float() * vx.silu_mul(h).float()).sum(1)[:live]
        return cuda._live(dh, scaled, dweights, offsets)

    device = torch.device("cuda", 0)
    for broken, decide, *of in (
        (backwards, cuda._combining, torch.bfloat16, 768, 8),
        (by_halves, cuda._gating, torch.bfloat16, 768, False),
    ):
        proposal = decide.__wrapped__(device, *of)
        proposal = dataclasses.replace(proposal, candidates=[Candidate("broken", broken, "1")])
        (verdict,) = admitted(proposal, device).verdicts
        assert verdict.different, verdict.error


@DTYPES
@ACTIVATIONS
@BACKENDS
def test_rows_of_every_matrix_on_several_ranks_are_the_whole(device, backend, activation, dtype):
    """Each rank has some rows of gates, ups and downs; between the two products columns are put side by side."""
    if device == "cpu" and dtype == torch.float16:
        pytest.skip("the CPU's kernels take none")
    x, gate_up, down, weights, ids = inputs_of(33, 8, 3, 40, 24, 5, dtype, device)
    if dtype == torch.float16:
        x = x + 0.25  # where all but cancels, a product of two is nothing in fp16
    ids[::5, 1] = -1
    options = {"activation": activation, "backend": backend}
    biases = biases_of(activation, gate_up, down)
    whole, taken = vx.fused_moe(x, gate_up, down, weights, ids, **options, **biases), []
    first = biases.get("gate_up_bias")
    halves = [torch.cat(pair, 1) for pair in zip(*(part.chunk(2, 1) for part in gate_up.chunk(2, 1)))]
    for i, half in enumerate(gate_up.chunk(2, 1) if biases else halves):  # gates and ups by turns
        own = {"gate_up_bias": first.chunk(2, 1)[i], "down_bias": biases["down_bias"]} if biases else {}
        put = {"between": lambda a: taken.append(a) or a.repeat(1, 2)}
        vx.fused_moe(x, half, down, weights, ids, **put, **options, **own)
    columns = torch.cat(taken, 1)
    assert columns.shape == (99, 24)
    for orders, says in (([0, 1], None), ([1, 0], "differ")):
        options["between"] = lambda a: columns
        parts = [
            vx.fused_moe(
                x, gate_up, down.chunk(2, 1)[i], weights, ids, **options,
                **({"gate_up_bias": first, "down_bias": biases["down_bias"].chunk(2, 1)[i]} if biases else {}),
            )
            for i in orders
        ]  # fmt: skip
        with contextlib.nullcontext() if says is None else pytest.raises(AssertionError, match=says):
            assert_bitwise(torch.cat(parts, 1), whole)


def test_between_has_no_backward():
    x, gate_up, down, weights, ids = inputs_of(3, 4, 2, 8, 8, 0, torch.float32, "cpu")
    with pytest.raises(ValueError, match="fused_moe: between: got tensors that require gradients, expected none"):
        vx.fused_moe(x.requires_grad_(), gate_up, down, weights, ids, between=lambda a: a)
    with pytest.raises(ValueError, match=r"fused_moe: down_weight: got shape \(4, 8, 8, 1\), expected \(4, N, J\)"):
        vx.fused_moe(x.detach(), gate_up, down[..., None], weights, ids, between=lambda a: a)


@GPU
def test_a_graph_serves_any_routing():
    x, gate_up, down, weights, ids = inputs_of(32, 8, 3, 128, 64, 3, torch.bfloat16, "cuda")
    static = torch.full_like(ids, -1)
    vx.fused_moe(x, gate_up, down, weights, static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = vx.fused_moe(x, gate_up, down, weights, static)
    for shift in range(3):
        static.copy_((ids + shift) % 8)
        graph.replay()
        assert_bitwise(y, vx.fused_moe(x, gate_up, down, weights, static.clone()), f"routing {shift}")


@GPU
@pytest.mark.parametrize("way", ["_scatter", "_gather"])
def test_rows_go_where_the_plan_says(way):
    from vexact_ops.fused_moe import cuda

    copy = getattr(cuda, way)
    for case in cuda._rows_cases(torch.bfloat16, torch.device("cuda", 0), 136, 3):
        assert_bitwise(copy(*case), cuda._gathered(*case), "every slot has a row")
    x, *_, ids = inputs_of(50, 8, 3, 136, 8, 1, torch.bfloat16, "cuda")
    ids[3], ids[7, 1] = -1, 8
    offsets, order, position = cuda.plan(ids, 8)
    live = int(offsets[-1])
    assert live == 146
    wide = torch.full((50, 144), float("nan"), dtype=x.dtype, device="cuda")
    wide[:, :136] = x
    for rows in (x, wide[:, :136]):
        assert_bitwise(copy(rows, offsets, order, position)[:live], x[order[:live].long() // 3], "some have none")


@GPU
@pytest.mark.parametrize("tokens", [30, 600])  # few rows for each expert, read through the order; many, copied first
def test_the_class_is_the_canonical_layer_at_sizes_that_fast_kernels_serve(tokens):
    *args, ids = inputs_of(tokens, 8, 4, 256, 256, 3, torch.bfloat16, "cuda")
    ids[::7, 1] = -1
    args = [t.requires_grad_() for t in args]
    dy = tricky(tokens, 256, seed=9, dtype=torch.bfloat16, device="cuda").clamp(-4, 4)

    def run(backend):
        y = vx.fused_moe(*args, ids, backend=backend)
        return y.detach(), *torch.autograd.grad(y, args, dy)

    assert_bitwise(run("cuda"), run("triton"))
