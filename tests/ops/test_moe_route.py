"""moe_route: tokens are routed alone, ties go to the lower id, weights and gradients are right, as Hugging Face's."""

import random

import pytest
import torch
from conftest import room_backends
from hypothesis import example, given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.moe_route.reference import moe_route_ref
from vexact_ops.testing import assert_bitwise, check_repeatable, check_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("moe_route"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
SEED = st.integers(0, 2**16)


def router_of(number):
    """(experts, top_k, options, bias wanted)"""
    source = random.Random(number)
    groups = source.choice([None, 1, 2, 4, 8])
    experts = (groups or 1) * source.choice([2, 3, 8, 16, 33])
    options = {
        "score": source.choice(["softmax", "sigmoid"]),
        "normalize": source.random() < 0.5,
        "scale": source.choice([1.0, 2.5]),
    }
    most = experts
    if groups:
        options |= {"groups": groups, "top_k_groups": source.randint(1, groups)}
        most = experts // groups * options["top_k_groups"]
    return experts, source.randint(1, min(8, most)), options, source.random() < 0.5


# Every one is a kernel to compile: a GPU sees twelve, the same ones in all tests
ROUTERS = (st.integers(0, 11) if torch.cuda.is_available() else st.integers(0, 2**16)).map(router_of)


def test_twelve_routers_are_of_every_kind():
    some = [router_of(number) for number in range(12)]
    assert {options.get("groups") for _, _, options, _ in some} == {None, 1, 2, 4, 8}
    kinds = {(options["score"], options["normalize"]) for _, _, options, _ in some}
    assert len(kinds) == 4 and {biased for *_, biased in some} == {False, True}


def logits_of(rows, experts, seed, dtype, device):
    g = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(rows, experts, generator=g)).to(device, dtype)


def bias_of(experts, seed, device):
    return 0.3 * torch.randn(experts, generator=torch.Generator().manual_seed(seed + 1)).to(device)


@BACKENDS
@DTYPES
@given(router=ROUTERS, rows=st.integers(1, 9), seed=SEED)
def test_tokens_are_routed_alone(device, backend, dtype, router, rows, seed):
    experts, top_k, options, biased = router
    bias = bias_of(experts, seed, device) if biased else None
    g = torch.Generator().manual_seed(seed)

    def run(logits, dweights):
        logits = logits.clone().requires_grad_()
        weights, ids = vx.moe_route(logits, top_k, bias=bias, backend=backend, **options)
        return weights.detach(), ids, *torch.autograd.grad(weights, logits, dweights)

    logits = tricky(rows, experts, seed=seed, dtype=dtype, device=device)
    check_rows(run, logits, torch.randn(rows, top_k, generator=g).to(device), seed=seed)


@BACKENDS
@DTYPES
@given(router=ROUTERS, seed=SEED)
def test_choice_and_weights_are_the_references(device, backend, dtype, router, seed):
    experts, top_k, options, biased = router
    logits = logits_of(30, experts, seed, dtype, "cpu")
    bias = bias_of(experts, seed, "cpu") if biased else None
    weights, ids = vx.moe_route(
        logits.to(device), top_k, bias=None if bias is None else bias.to(device), backend=backend, **options
    )
    wide = {"bias": None if bias is None else bias.double(), **options}
    exact, exact_ids = moe_route_ref(logits.double(), top_k, **wide)
    # in fp32 two experts may tie, or swap, that float64 tells apart: judge the choice by what it is worth
    same = (ids.cpu() == exact_ids).all(1)
    assert same.sum() >= 28
    error = (weights.cpu().double() - exact)[same].abs() / exact[same].abs().clamp(min=1e-6)
    assert error.max() < 3e-6
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    assert all(len(set(row)) == top_k and min(row) >= 0 and max(row) < experts for row in ids.tolist())


@BACKENDS
@DTYPES
@given(router=ROUTERS, seed=SEED)
def test_gradients(device, backend, dtype, router, seed):
    experts, top_k, options, biased = router
    bias = bias_of(experts, seed, device) if biased else None
    logits = logits_of(40, experts, seed, dtype, device).requires_grad_()
    dweights = torch.randn(40, top_k, generator=torch.Generator().manual_seed(seed)).to(device)
    weights, ids = vx.moe_route(logits, top_k, bias=bias, backend=backend, **options)
    (ours,) = torch.autograd.grad(weights, logits, dweights)

    def of_scores(logits):  # the reference's weights of the experts that were chosen
        scores = logits.softmax(-1) if options["score"] == "softmax" else logits.sigmoid()
        w = scores.gather(1, ids.long())
        return options["scale"] * (w / (w.sum(1, keepdim=True) + 1e-20) if options["normalize"] else w)

    def grad(logits):
        logits = logits.detach().clone().requires_grad_()
        return torch.autograd.grad(of_scores(logits), logits, dweights.to(logits.dtype))[0].double()

    exact, stock = grad(logits.double()), grad(logits.float()).to(dtype).double()
    rounding = 1e-7 * options["scale"] * dweights.norm()  # all there is of one expert's gradient, normalised: it is 0
    assert (ours.double() - exact).norm() <= 2 * (stock - exact).norm() + rounding


@pytest.mark.parametrize("device,backend", room_backends("moe_route", "triton"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@example(router=(3, 2, {"score": "softmax", "normalize": True}, False), rows=3, seed=2)  # a gradient of -0.0
@given(router=ROUTERS, rows=st.integers(1, 9), seed=SEED)
def test_a_gpu_has_the_bits_of_a_cpu(device, backend, dtype, router, rows, seed):
    experts, top_k, options, biased = router
    logits = tricky(rows, experts, seed=seed, dtype=dtype)
    bias = bias_of(experts, seed, "cpu") if biased else None
    dweights = torch.randn(rows, top_k, generator=torch.Generator().manual_seed(seed))

    def run(device, backend):
        l2 = logits.to(device).requires_grad_()
        b = None if bias is None else bias.to(device)
        weights, ids = vx.moe_route(l2, top_k, bias=b, backend=backend, **options)
        return [t.cpu() for t in (weights, ids, *torch.autograd.grad(weights, l2, dweights.to(device)))]

    assert_bitwise(run(device, backend), run("cpu", "cpu"))


@BACKENDS
@DTYPES
def test_ties_go_to_the_lower_id(device, backend, dtype):
    logits = torch.tensor([[1, 2, 2, 0, 2], [0.0, -0.0, 0, -0.0, -1], [5, 5, 5, 5, 5]], device=device).to(dtype)
    _, ids = vx.moe_route(logits, 3, backend=backend)
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2]]
    bias = torch.tensor([0.0, 0, 1, 0, 0], device=device)
    _, ids = vx.moe_route(logits[2:], 3, bias=bias, score="sigmoid", backend=backend)
    assert ids.tolist() == [[2, 0, 1]]
    groups = {"groups": 3, "top_k_groups": 2, "score": "sigmoid", "backend": backend}
    _, ids = vx.moe_route(torch.zeros(1, 6, dtype=dtype, device=device), 4, **groups)
    assert ids.tolist() == [[0, 1, 2, 3]]


@BACKENDS
def test_a_closed_group_stays_closed(device, backend):
    """Scores with a negative bias: a masked expert must not win by being 0."""
    logits = torch.tensor([[3.0, 3, -3, -3, 2, 2]], device=device)
    bias = torch.tensor([-5.0, -5, -5, -5, -6, -6], device=device)
    options = {"score": "sigmoid", "groups": 3, "top_k_groups": 1, "bias": bias, "backend": backend}
    assert vx.moe_route(logits, 2, **options)[1].tolist() == [[0, 1]]


@BACKENDS
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_what_is_no_number_shows(device, backend, score):
    logits = torch.zeros(3, 8, device=device)
    logits[1, 5] = float("nan")
    weights, ids = vx.moe_route(logits, 2, score=score, backend=backend)
    assert weights[[0, 2]].isfinite().all() and weights[1].isnan().any()
    assert ids[1, 0] == 5 and ids.min() >= 0 and ids.max() < 8
    all_bad = torch.full((1, 8), float("nan"), device=device)
    assert vx.moe_route(all_bad, 2, score=score, backend=backend)[1].tolist() == [[0, 1]]


@BACKENDS
@DTYPES
def test_repeatable(device, backend, dtype):
    logits = logits_of(70, 96, 3, dtype, device).requires_grad_()
    bias = bias_of(96, 0, device)

    def run():
        a = vx.moe_route(logits, 8, backend=backend)
        b = vx.moe_route(logits, 6, score="sigmoid", groups=8, top_k_groups=3, bias=bias, scale=2.5, backend=backend)
        return *a, *b, *torch.autograd.grad(a[0][:, 0].sum() + b[0][:, 0].sum(), logits)

    check_repeatable(run)


def test_a_router_that_looks_at_the_batch_is_caught():
    def capacity(logits):  # an expert takes its best tokens and no more
        weights, ids = moe_route_ref(logits, 1)
        full = logits.argmax(1)[:, None].eq(logits.argmax(1)).sum(1) > 3
        return weights, torch.where(full[:, None], -1, ids)

    with pytest.raises(AssertionError, match="differ"):
        check_rows(capacity, torch.randn(16, 3, generator=torch.Generator().manual_seed(0)))


class Config:
    """What the routers of transformers read."""

    hidden_size, num_experts, num_local_experts, num_experts_per_tok, norm_topk_prob = 64, 32, 32, 4, True
    n_routed_experts, n_group, topk_group, routed_scaling_factor = 32, 4, 2, 2.5


@BACKENDS
@DTYPES
@pytest.mark.parametrize("family", ["qwen3_moe.Qwen3MoeTopKRouter", "mixtral.MixtralTopKRouter"])
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "plain"])
def test_softmax_routers_of_transformers(device, backend, dtype, family, normalize):
    name, cls = family.split(".")
    router = _router(f"transformers.models.{name}.modeling_{name}", cls, norm_topk_prob=normalize).to(device, dtype)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    _, theirs, their_ids = router(x)
    logits = vx.linear(x, router.weight, backend=backend)
    weights, ids = vx.moe_route(logits, 4, normalize=normalize or "mixtral" in family, backend=backend)
    same = (ids == their_ids).all(1)  # their linear may round another way, or their ties go elsewhere
    assert same.float().mean() > 0.9
    assert torch.allclose(weights[same], theirs[same].float(), rtol=2e-2 if dtype != torch.float32 else 2e-5)


@BACKENDS
@DTYPES
def test_the_deepseek_router_of_transformers(device, backend, dtype):
    router = _router("transformers.models.deepseek_v3.modeling_deepseek_v3", "DeepseekV3TopkRouter").to(device, dtype)
    router.e_score_correction_bias = 0.3 * torch.randn(32, generator=torch.Generator().manual_seed(2)).to(device)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    out = router(x)
    if not isinstance(out, tuple):
        pytest.skip("this transformers keeps the choice in the block around the router")
    _, theirs, their_ids = out
    logits = vx.linear(x, router.weight, out_dtype=torch.float32, backend=backend)
    options = {"score": "sigmoid", "groups": 4, "top_k_groups": 2, "scale": 2.5, "backend": backend}
    weights, ids = vx.moe_route(logits, 4, bias=router.e_score_correction_bias, **options)
    their_ids, order = their_ids.sort(1)  # theirs are in no particular order
    ids, ours = ids.sort(1)
    same = (ids == their_ids).all(1)
    assert same.float().mean() > 0.9
    assert torch.allclose(weights.gather(1, ours)[same], theirs.gather(1, order)[same].float(), rtol=2e-5)


def _router(module, cls, **changes):
    router = getattr(pytest.importorskip(module), cls)(type("C", (Config,), changes)())
    router.requires_grad_(False)
    router.weight.copy_(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) / 8)
    return router


@BACKENDS
@DTYPES
@given(router=ROUTERS, seed=SEED)
@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16], ids=["to bf16", "to fp16"])
def test_rounded_weights_are_the_weights_rounded(device, backend, dtype, rounded, router, seed):
    experts, top_k, options, biased = router
    logits = tricky(5, experts, seed=seed, dtype=dtype, device=device)
    bias = tricky(experts, seed=seed + 1, dtype=torch.float32, device=device) if biased else None
    options = {**options, "bias": bias, "backend": backend}
    weights, ids = vx.moe_route(logits, top_k, **options)
    assert_bitwise(vx.moe_route(logits, top_k, rounded=rounded, **options), (weights.to(rounded).float(), ids))


def test_rounded_weights_have_no_gradient():
    logits = torch.randn(3, 8, dtype=torch.float32, requires_grad=True)
    with pytest.raises(RuntimeError, match="moe_route: rounded: got one with logits that require a gradient"):
        vx.moe_route(logits, 2, rounded=torch.bfloat16)
    with pytest.raises(TypeError, match=r"moe_route: rounded: got torch.float64"):
        vx.moe_route(logits, 2, rounded=torch.float64)
    with torch.no_grad():
        vx.moe_route(logits, 2, rounded=torch.bfloat16)


@BACKENDS
def test_opcheck(device, backend):
    logits, bias = torch.randn(3, 16, device=device, requires_grad=True), torch.randn(16, device=device)
    torch.library.opcheck(
        torch.ops.vexact.moe_route.default, (logits, 2, False, True, 0, 0, None, 1.0, torch.float32, backend)
    )
    torch.library.opcheck(
        torch.ops.vexact.moe_route.default, (logits, 2, True, False, 4, 2, bias, 2.5, torch.bfloat16, backend)
    )


@BACKENDS
def test_no_tokens(device, backend):
    logits = torch.empty(0, 8, device=device, requires_grad=True)
    weights, ids = vx.moe_route(logits, 2, backend=backend)
    assert weights.shape == ids.shape == (0, 2)
    weights.sum().backward()
    assert logits.grad.shape == (0, 8)


def test_bad_arguments_are_named():
    logits = torch.randn(3, 8)
    with pytest.raises(TypeError, match=r"moe_route: logits: got dtype float64"):
        vx.moe_route(logits.double(), 2)
    with pytest.raises(ValueError, match=r"moe_route: logits: got shape \(3, 2, 4\), expected 2 dimensions"):
        vx.moe_route(logits.view(3, 2, 4), 2)
    with pytest.raises(ValueError, match="moe_route: top_k: got 9, expected 1 to 8"):
        vx.moe_route(logits, 9)
    with pytest.raises(TypeError, match="moe_route: top_k: got float, expected an int"):
        vx.moe_route(logits, 2.0)
    with pytest.raises(ValueError, match="moe_route: score: got 'relu'"):
        vx.moe_route(logits, 2, score="relu")
    with pytest.raises(ValueError, match="moe_route: scale: got 0"):
        vx.moe_route(logits, 2, scale=0)
    with pytest.raises(ValueError, match="moe_route: top_k_groups: expected with groups"):
        vx.moe_route(logits, 2, groups=2)
    with pytest.raises(ValueError, match="moe_route: groups: got 1 of 3 for 8 experts"):
        vx.moe_route(logits, 2, groups=3, top_k_groups=1)
    with pytest.raises(ValueError, match=r"moe_route: groups: got 1 of 4 for 8 experts, .* that hold top_k = 3"):
        vx.moe_route(logits, 3, groups=4, top_k_groups=1)
    with pytest.raises(TypeError, match="moe_route: bias: got dtype bfloat16, expected float32"):
        vx.moe_route(logits, 2, bias=torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"moe_route: bias: got shape \(7,\), expected \(8,\)"):
        vx.moe_route(logits, 2, bias=torch.zeros(7))
