"""The head: log-probabilities are those of log_softmax and sample bit for bit; gradients are right and never T x V.

One file because all of it compares with the same inputs.
"""

import functools
import importlib
import itertools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.linear_cross_entropy import op
from vexact_ops.linear_cross_entropy.reference import (
    linear_cross_entropy_ref,
    linear_logits_ref,
    linear_logprobs_ref,
)
from vexact_ops.testing import assert_bitwise, cancelling, check_repeatable, check_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("linear_cross_entropy"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
VOCABULARIES = st.sampled_from([1, 17, 511, 512, 513, 1300])
OPTIONS = st.fixed_dictionaries({"softcap": st.sampled_from([None, None, 5.0])})


def make(tokens, vocabulary, width, dtype, device, seed):
    """Odd tokens see logits that cancel almost to zero, where every order of k would give other bits."""
    hidden, weight = cancelling(tokens, width, vocabulary, seed, dtype=torch.float32)
    hidden = hidden / hidden.abs().amax(-1, keepdim=True)
    hidden[::2] = torch.randn(hidden[::2].shape, generator=torch.Generator().manual_seed(seed))
    target = torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed + 1))
    temperature = torch.tensor([0.7, 1.0, 1.3]).repeat(tokens)[:tokens]
    return hidden.to(device, dtype), weight.to(device, dtype), target.to(device), temperature.to(device)


def gradients(fn, hidden, weight, *upstream):
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    outputs = fn(hidden, weight)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return *(o.detach() for o in outputs), *torch.autograd.grad(outputs, (hidden, weight), upstream)


@BACKENDS
@DTYPES
@given(v=VOCABULARIES, tokens=st.integers(1, 9), options=OPTIONS, seed=st.integers(0, 2**16))
def test_rows_stand_alone(device, backend, dtype, v, tokens, options, seed):
    hidden, weight, target, temperature = make(tokens, v, 24, dtype, device, seed)

    def run(hidden, row):
        kwargs = {**options, "temperature": temperature[row], "return_entropy": True, "backend": backend}
        logits = vx.linear_logits(hidden, weight, **options, backend=backend)
        return logits, *vx.linear_logprobs(hidden, weight, target[row], **kwargs)

    check_rows(run, hidden, torch.arange(tokens, device=device), seed=seed)


@BACKENDS
@DTYPES
@given(v=VOCABULARIES, tokens=st.integers(1, 7), options=OPTIONS, seed=st.integers(0, 2**16))
def test_gradient_rows_stand_alone(device, backend, dtype, v, tokens, options, seed):
    hidden, weight, target, temperature = make(tokens, v, 24, dtype, device, seed)
    up = tricky(2, tokens, seed=seed, device=device)

    def dhidden(hidden, row):
        hidden = hidden.clone().requires_grad_()
        kwargs = {**options, "temperature": temperature[row], "return_entropy": True, "backend": backend}
        outputs = vx.linear_logprobs(hidden, weight, target[row], **kwargs)
        return torch.autograd.grad(outputs, hidden, (up[0][row], up[1][row]))

    check_rows(dhidden, hidden, torch.arange(tokens, device=device), seed=seed)


def test_a_vocabulary_cut_that_the_row_count_picks_is_caught():
    hidden, weight, target, _ = make(8, 1300, 24, torch.float32, "cpu", 0)

    def batch_dependent(hidden, target):
        logits = hidden @ weight.t()
        parts = [p.logsumexp(-1) for p in logits.chunk(1 if len(hidden) < 4 else 7, -1)]
        return logits.gather(1, target[:, None])[:, 0] - torch.stack(parts).logsumexp(0)

    with pytest.raises(AssertionError, match="differ"):
        check_rows(batch_dependent, hidden, target, neighbours=())


@BACKENDS
@DTYPES
@given(
    v=VOCABULARIES,
    tokens=st.sampled_from([1, 3, 60]),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.7]),
    softcap=st.sampled_from([None, 4.0]),
    seed=st.integers(0, 2**16),
)
def test_rollout_and_training_give_one_number(device, backend, dtype, v, tokens, temperature, softcap, seed):
    """The promise that the library is for: sample's log-probability of what it drew, log_softmax's and ours."""
    hidden, weight, _, _ = make(tokens, v, 24, dtype, device, seed)
    theirs = None if backend == "cuda" else backend  # the other rooms' backend on the same device
    logits = vx.linear_logits(hidden, weight, softcap=softcap, backend=backend)
    places, draw = torch.arange(tokens, device=device), {"temperature": temperature, "top_p": 0.9}
    ids, sampled, raw = vx.sample(logits, seed, places, **draw, backend=theirs)
    for t, expected in ((temperature, sampled), (1.0, raw)):
        kwargs = {"temperature": t, "softcap": softcap, "backend": backend}
        ours = vx.linear_logprobs(hidden, weight, ids, **kwargs)
        assert_bitwise(ours, expected)
        scaled = logits / torch.tensor(t, device=device)  # by a number, CUDA multiplies with the reciprocal
        assert_bitwise(ours, vx.log_softmax(scaled, backend=theirs).gather(1, ids[:, None])[:, 0])
        assert_bitwise(vx.linear_logprobs(hidden, weight, ids, return_entropy=True, **kwargs)[0], expected)
        trained = vx.linear_logprobs(hidden.clone().requires_grad_(), weight, ids, **kwargs)
        assert_bitwise(trained.detach(), expected)


@BACKENDS
@DTYPES
def test_logits_are_those_of_linear(device, backend, dtype):
    hidden, weight, _, _ = make(9, 700, 40, dtype, device, 0)
    logits = vx.linear_logits(hidden, weight, backend=backend)
    assert logits.dtype == torch.float32
    assert_bitwise(logits, vx.linear(hidden, weight, out_dtype=torch.float32, backend=backend))
    if dtype is torch.bfloat16:
        assert (logits.bfloat16().float() != logits).any()


@BACKENDS
@DTYPES
def test_repeatable(device, backend, dtype):
    hidden, weight, target, temperature = make(70, 1300, 24, dtype, device, 0)
    up = tricky(2, 70, seed=1, device=device)

    def head(hidden, weight):
        kwargs = {"softcap": 5.0, "temperature": temperature, "return_entropy": True, "backend": backend}
        return vx.linear_logprobs(hidden, weight, target, **kwargs)

    def loss(hidden, weight):
        return vx.linear_cross_entropy(hidden, weight, target, ignore_index=int(target[3]), backend=backend)

    def logits(hidden, weight):
        return vx.linear_logits(hidden, weight, softcap=5.0, backend=backend)

    one, dlogits = torch.tensor(1.0, device=device), tricky(70, 1300, seed=2, device=device)
    check_repeatable(
        lambda: [
            *gradients(head, hidden, weight, *up),
            *gradients(loss, hidden, weight, one),
            *gradients(logits, hidden, weight, dlogits),
        ]
    )


CHUNKS = {  # how much of the logits a backend holds at once, by the names that its module has for that
    "cpu": [{"FWD_TOKENS": a, "BWD_TOKENS": b, "BWD_VOCABULARY": c} for a, b, c in ((16, 32, 512), (7, 33, 1024))],
    "triton": [{"FWD_TOKENS": a, "BWD_TOKENS": b, "BWD_VOCABULARY": c} for a, b, c in ((16, 64, 512), (7, 128, 1024))],
    "cuda": [{"FWD_TOKENS": 16, "CHUNK": 256, "KEPT_BYTES": b} for b in (1, 3 * 130 * 256 * 2, 1 << 30)],
}


@BACKENDS
@DTYPES
@pytest.mark.parametrize(
    "ignored,width", [(False, 24), (True, 24), (True, 136)], ids=["all", "some", "some-few-tokens"]
)
def test_the_chunks_do_not_show(device, backend, dtype, ignored, width, monkeypatch):
    """However logits are cut to bound memory, kept or made again, until the backward where tokens are fewer than the
    width: values, and all gradients, have the same bits."""
    hidden, weight, target, temperature = make(130, 1300, width, dtype, device, 0)
    up = tricky(2, 130, seed=1, device=device)
    module = importlib.import_module(f"vexact_ops.linear_cross_entropy.{backend}")

    def head(hidden, weight):
        kwargs = {"temperature": temperature, "return_entropy": True, "backend": backend}
        return vx.linear_logprobs(hidden, weight, target, **kwargs)

    def loss(hidden, weight):
        ignore = int(target[3]) if ignored else -100
        return vx.linear_cross_entropy(hidden, weight, target, ignore_index=ignore, backend=backend)

    def everything():
        return *gradients(head, hidden, weight, *up), *gradients(loss, hidden, weight, up[0, 0])

    whole = everything()
    for sizes in CHUNKS[backend]:
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)
        assert_bitwise(everything(), whole, f"results with {sizes}")


@pytest.mark.parametrize("device,backend", room_backends("linear_cross_entropy", "cuda"))
def test_however_many_tokens_there_are_a_row_has_the_same_bits(device, backend):
    """Kernels are chosen by their number: each is used here, on the same first rows."""
    hidden, weight, target, temperature = make(1100, 1300, 512, torch.bfloat16, device, 0)
    up = tricky(2, 1100, seed=1, device=device)

    def head(hidden, weight, count):
        kwargs = {"temperature": temperature[:count], "return_entropy": True, "backend": backend}
        return vx.linear_logprobs(hidden, weight, target[:count], **kwargs)

    def loss(hidden, weight, count):
        return vx.linear_cross_entropy(hidden, weight, target[:count], reduction="sum", backend=backend)

    def rows(count):
        *outputs, dhidden, _ = gradients(functools.partial(head, count=count), hidden[:count], weight, *up[:, :count])
        of_loss = gradients(functools.partial(loss, count=count), hidden[:count], weight, up[0, 0])[1]
        return *outputs, dhidden, of_loss

    whole = rows(1100)
    for count in (1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 1025):
        assert_bitwise(rows(count), tuple(r[:count] for r in whole), f"the first {count} tokens")


@pytest.mark.parametrize(
    "tokens,width,vocabulary", [(8192, 4096, 151936), (300, 64, 5000), (64, 512, 5000), (9, 8, 40)]
)
@pytest.mark.parametrize("chunk", [256, 2048])
@pytest.mark.parametrize("beside", [1, 3, 40])
def test_no_gradient_of_logits_is_overwritten_before_it_is_read(tokens, width, vocabulary, chunk, beside):
    """Where the fast loss keeps them inside of the gradient of the weight, by simulation: extents in elements."""
    pytest.importorskip("triton")
    from vexact_ops.linear_cross_entropy.cuda import _layout, _steps

    inside, apart, others = _layout(tokens, width, vocabulary, chunk, beside)
    assert inside >= 0 and 1 <= others <= beside and (inside + others - 1) * chunk < vocabulary
    held = [(chunk * width + j * apart, chunk * width + j * apart + tokens * chunk) for j in range(inside)]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(held))
    assert not held or held[-1][1] <= vocabulary * width
    steps = _steps(0, inside, width, chunk, apart)
    assert [j for first, end in steps for j in range(first, end)] == list(range(inside))
    for first, end in steps:
        assert all(begin >= end * chunk * width for begin, _ in held[first:])
    if (tokens, width, vocabulary, chunk, beside) == (8192, 4096, 151936, 2048, 40):
        assert inside + others == 75  # nothing of the head of an 8B model is made twice


@BACKENDS
@DTYPES
@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_accuracy(device, backend, dtype, softcap, temperature):
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(80, 64, generator=g).to(device, dtype), torch.randn(2000, 64, generator=g) * 0.3
    weight, target = weight.to(device, dtype), torch.randint(2000, (80,), generator=g).to(device)
    up = torch.randn(2, 80, generator=g).to(device)

    def stock(hidden, weight):
        logits = F.linear(hidden, weight).float()
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logp = torch.log_softmax(logits / temperature, -1)
        return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)

    options = {"temperature": temperature, "softcap": softcap}
    exact = gradients(
        lambda h, w: linear_logprobs_ref(h, w, target, **options), hidden.double(), weight.double(), *up.double()
    )
    ours = gradients(
        lambda h, w: vx.linear_logprobs(h, w, target, return_entropy=True, **options, backend=backend),
        hidden,
        weight,
        *up,
    )
    theirs = gradients(stock, hidden, weight, *up)
    for name, o, t, e in zip(("logprob", "entropy", "dhidden", "dweight"), ours, theirs, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        # dhidden is one sequential accumulator over the vocabulary, which errs like sqrt(V) roundings: hence the floor
        assert error <= max(2 * stock_error, 2.0**-24 * math.sqrt(2000)), (
            f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"
        )


@BACKENDS
@DTYPES
def test_logits_accuracy(device, backend, dtype):
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(30, 64, generator=g).to(device, dtype), torch.randn(300, 64, generator=g)
    weight, up = weight.to(device, dtype), torch.randn(30, 300, generator=g).to(device)
    exact = gradients(lambda h, w: linear_logits_ref(h, w, softcap=6.0), hidden.double(), weight.double(), up.double())
    ours = gradients(lambda h, w: vx.linear_logits(h, w, softcap=6.0, backend=backend), hidden, weight, up)
    theirs = gradients(lambda h, w: 6.0 * torch.tanh(F.linear(h, w).float() / 6.0), hidden, weight, up)
    for name, o, t, e in zip(("logits", "dhidden", "dweight"), ours, theirs, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"


@BACKENDS
@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [0.0, 0.4], ids=["all", "some"])
def test_loss(device, backend, dtype, reduction, ignored):
    g = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(60, 64, generator=g).to(device, dtype), torch.randn(900, 64, generator=g) * 0.3
    weight, target = weight.to(device, dtype), torch.randint(900, (60,), generator=g)
    target[torch.rand(60, generator=g) < ignored] = 7
    target = target.to(device)
    up = torch.randn(60, generator=g).to(device) if reduction == "none" else torch.tensor(0.3, device=device)
    options = {"reduction": reduction, "ignore_index": 7 if ignored else -100}
    exact = gradients(
        lambda h, w: linear_cross_entropy_ref(h, w, target, **options), hidden.double(), weight.double(), up.double()
    )
    ours = gradients(lambda h, w: vx.linear_cross_entropy(h, w, target, **options, backend=backend), hidden, weight, up)
    theirs = gradients(lambda h, w: F.cross_entropy(F.linear(h, w).float(), target, **options), hidden, weight, up)
    for name, o, t, e in zip(("loss", "dhidden", "dweight"), ours, theirs, exact):
        assert o.shape == t.shape and o.dtype == t.dtype
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= max(2 * stock_error, 2.0**-24 * math.sqrt(900)), (
            f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"
        )
    if reduction == "none":
        kept = target != options["ignore_index"]
        assert_bitwise(ours[0][kept], -vx.linear_logprobs(hidden[kept], weight, target[kept], backend=backend))
        assert (ours[0][~kept] == 0).all()


@BACKENDS
@DTYPES
@given(v=VOCABULARIES, tokens=st.integers(1, 7), seed=st.integers(0, 2**16))
def test_gradient_rows_of_the_loss_stand_alone(device, backend, dtype, v, tokens, seed):
    """Of the sum, whose gradient a token's neighbours have no part in, however many of its logits found a place."""
    hidden, weight, target, _ = make(tokens, v, 24, dtype, device, seed)
    module = importlib.import_module(f"vexact_ops.linear_cross_entropy.{backend}")

    def dhidden(hidden, row):
        hidden = hidden.clone().requires_grad_()
        loss = vx.linear_cross_entropy(hidden, weight, target[row], reduction="sum", backend=backend)
        return torch.autograd.grad(loss, hidden, torch.tensor(0.3, device=device))

    with pytest.MonkeyPatch.context() as patch:
        if backend == "cuda":
            patch.setattr(module, "CHUNK", 256)
            patch.setattr(module, "KEPT_BYTES", 4 * 2 * 256 * 2)  # two pieces of four tokens, four of two
        check_rows(dhidden, hidden, torch.arange(tokens, device=device), seed=seed)


def test_a_rounding_that_depends_on_memory_is_caught():
    """What was kept was rounded, what is made again was not: how many tokens there are decides for which logits."""
    hidden, weight, target, _ = make(8, 1300, 24, torch.float32, "cpu", 0)

    def batch_dependent(hidden, target):
        p = torch.softmax(hidden @ weight.t(), -1)
        kept = 2600 // len(hidden)
        p[:, :kept] = p[:, :kept].bfloat16().float()
        return (p - F.one_hot(target, 1300)) @ weight

    with pytest.raises(AssertionError, match="differ"):
        check_rows(batch_dependent, hidden, target, neighbours=())


@BACKENDS
@DTYPES
def test_the_gradient_of_a_sure_token_is_not_the_rounding_of_1(device, backend, dtype):
    """p - 1 of a p close to 1: were p rounded to bf16 before, half of it would be wrong."""
    weight = torch.tensor([[1.0, 0], [0, 1]], device=device).to(dtype)
    for logit in (3.0, 5.0, 7.0, 9.0):
        hidden = torch.tensor([[logit, 0]], device=device).to(dtype).requires_grad_()
        target = torch.zeros(1, dtype=torch.int64, device=device)
        dhidden = torch.autograd.grad(vx.linear_cross_entropy(hidden, weight, target, backend=backend), hidden)[0]
        expected = 1 / (1 + math.exp(logit))
        assert dhidden[0].tolist() == pytest.approx([-expected, expected], rel=0.01)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("width", [64, 1000, 4096])
@pytest.mark.parametrize(
    "tokens,vocabulary",
    [(1, 300), (129, 2500), (600, 9000), (50, 70000), (90, 70000)],  # of many columns each block has several tiles
    ids=str,
)
def test_fast_kernels_are_admitted_and_have_the_canonical_bytes(width, tokens, vocabulary):
    from vexact_ops.linear_cross_entropy import cuda

    hidden, weight, target, temperature = make(tokens, vocabulary, width, torch.bfloat16, "cuda", 3)
    up = tricky(2, tokens, seed=1, device="cuda")
    if torch.cuda.get_device_capability() == (9, 0):
        assert cuda._fast(hidden, weight)

    def everything(backend):
        results = []
        for t, softcap in ((1.0, None), (temperature, None), (0.7, 5.0)):
            kwargs = {
                "target": target,
                "temperature": t,
                "softcap": softcap,
                "return_entropy": True,
                "backend": backend,
            }
            results += gradients(functools.partial(vx.linear_logprobs, **kwargs), hidden, weight, *up)
        loss = functools.partial(vx.linear_cross_entropy, target=target, backend=backend)
        return *results, *gradients(loss, hidden, weight, up[0, 0])

    assert_bitwise(everything("cuda"), everything("triton"))


@BACKENDS
@DTYPES
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_ignored_tokens_take_no_part(device, backend, dtype, reduction, softcap):
    hidden, weight, target, _ = make(70, 600, 24, dtype, device, 0)
    target[::3] = target[40:60] = -100
    keep = target != -100
    up = torch.randn(70, generator=torch.Generator().manual_seed(2)).to(device)

    def loss(rows, up):
        options = {"reduction": reduction, "softcap": softcap, "backend": backend}
        return gradients(lambda h, w: vx.linear_cross_entropy(h, w, target[rows], **options), hidden[rows], weight, up)

    up_alone, up = (up[keep], up.clone()) if reduction == "none" else (up[0], up[0])
    alone = loss(keep, up_alone)
    hidden[~keep] = math.nan
    if reduction == "none":
        up[~keep] = math.nan
    value, dhidden, dweight = loss(torch.ones_like(keep), up)
    if reduction == "none":
        assert (value[~keep] == 0).all()
        value = value[keep]
    assert_bitwise((value, dhidden[keep], dweight), alone)
    assert (dhidden[~keep] == 0).all()


@BACKENDS
def test_a_target_outside_the_vocabulary_is_not_ignored(device, backend):
    hidden, weight, target, _ = make(9, 60, 24, torch.bfloat16, device, 0)
    target[0] = -100
    for bad in (60, -1, -(2**63), 2**63 - 1):
        target[4] = bad
        if device == "cpu":
            with pytest.raises(ValueError, match="linear_cross_entropy: target: got id"):
                vx.linear_cross_entropy(hidden, weight, target, backend=backend)
            continue
        each = vx.linear_cross_entropy(hidden, weight, target, reduction="none", backend=backend)
        assert each.isnan().tolist() == [i == 4 for i in range(9)] and each[0] == 0
        for grad in (False, True):
            loss = vx.linear_cross_entropy(hidden.clone().requires_grad_(grad), weight, target, backend=backend)
            assert loss.isnan()


@pytest.mark.parametrize("device,backend", room_backends("linear_cross_entropy", "cuda"))
def test_a_loss_that_is_only_looked_at_makes_no_gradient(device, backend, monkeypatch):
    from vexact_ops.linear_cross_entropy import cuda

    hidden, weight, target, _ = make(9, 60, 64, torch.bfloat16, device, 0)
    hidden.requires_grad_()
    expected = vx.linear_cross_entropy(hidden, weight, target, backend=backend).detach()

    def made(*args):
        raise AssertionError("gradients were made")

    monkeypatch.setattr(cuda, "loss_with_gradients", made)
    with torch.no_grad():
        assert_bitwise(vx.linear_cross_entropy(hidden, weight, target, backend=backend), expected)
    assert_bitwise(vx.linear_cross_entropy(hidden.detach(), weight, target, backend=backend), expected)
    with pytest.raises(AssertionError, match="gradients were made"):
        vx.linear_cross_entropy(hidden, weight, target, backend=backend)


@BACKENDS
def test_all_tokens_ignored_is_as_torch(device, backend):
    hidden, weight, target, _ = make(4, 60, 24, torch.float32, device, 0)
    target.fill_(-100)
    one = torch.tensor(1.0, device=device)
    for reduction in ("mean", "sum"):
        ours = gradients(
            lambda h, w, r=reduction: vx.linear_cross_entropy(h, w, target, reduction=r), hidden, weight, one
        )
        theirs = gradients(
            lambda h, w, r=reduction: F.cross_entropy(F.linear(h, w), target, reduction=r), hidden, weight, one
        )
        assert_bitwise(ours[0] + 0.0, theirs[0])  # -0 or 0
        assert all((g == 0).all() for g in ours[1:])


@BACKENDS
def test_one_gradient_alone_has_the_same_bits(device, backend):
    hidden, weight, target, _ = make(20, 700, 24, torch.float32, device, 0)

    def grads(need_hidden, need_weight):
        h, w = hidden.clone().requires_grad_(need_hidden), weight.clone().requires_grad_(need_weight)
        vx.linear_cross_entropy(h, w, target, backend=backend).backward()
        return h.grad, w.grad

    both = grads(True, True)
    assert_bitwise(grads(True, False), (both[0], None))
    assert_bitwise(grads(False, True), (None, both[1]))


@BACKENDS
def test_a_probability_of_one_has_no_entropy(device, backend):
    hidden = torch.tensor([[300.0], [0.0], [math.nan]], device=device, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], device=device)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    logprob, entropy = vx.linear_logprobs(hidden, weight, target, return_entropy=True, backend=backend)
    assert logprob[0] == 0 and entropy[0] == 0
    assert entropy[1].item() == pytest.approx(math.log(2), rel=1e-6)
    assert logprob[2].isnan() and entropy[2].isnan()
    dhidden = torch.autograd.grad(logprob[:2].sum() + entropy[:2].sum(), hidden)[0]
    assert dhidden[0].item() == 0 and dhidden[1].item() == pytest.approx(1.0)


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_leading_dimensions_and_strides_do_not_show(device, backend, dtype):
    hidden, weight, target, temperature = make(12, 600, 24, dtype, device, 0)
    target[5] = 599
    logprobs = functools.partial(vx.linear_logprobs, return_entropy=True, backend=backend)
    loss = functools.partial(vx.linear_cross_entropy, reduction="none", ignore_index=599, backend=backend)
    one = torch.ones(12, device=device)
    expected = logprobs(hidden, weight, target, temperature=temperature)
    losses = gradients(lambda h, w: loss(h, w, target), hidden, weight, one)
    shaped = logprobs(
        hidden.view(3, 4, 24),
        weight.t().contiguous().t(),
        target.view(3, 4).int(),
        temperature=temperature.view(3, 4),
    )
    assert_bitwise(shaped, tuple(e.view(3, 4) for e in expected))
    wide = torch.cat([weight, weight], 1)[:, :24]
    assert_bitwise(logprobs(hidden, wide, target, temperature=temperature), expected)
    every = torch.stack([target, target.flip(0)], 1)[:, 0]  # every other element
    apart = torch.stack([hidden, -hidden], 1)[:, 0]
    assert_bitwise(logprobs(apart, weight, every, temperature=temperature), expected)
    assert_bitwise(gradients(lambda h, w: loss(h, w, every), hidden, weight, one), losses)
    assert_bitwise(loss(apart, wide, every), losses[0])
    assert loss(hidden.view(3, 4, 24), weight, target.view(3, 4)).shape == (3, 4)


_PEAK = """
import torch, vexact_ops as vx
def status(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key))
def loss(*args):
    return vx.linear_cross_entropy(*args)
def logprobs(*args):
    return sum(vx.linear_logprobs(*args, return_entropy=True)).sum()
for dtype, fn in ((torch.float32, loss), (torch.bfloat16, logprobs)):
    def step(tokens):
        hidden = torch.randn(tokens, 16).to(dtype).requires_grad_()
        weight = torch.randn(32768, 16).to(dtype).requires_grad_()
        target = torch.randint(32768, (tokens,))
        open("/proc/self/clear_refs", "w").write("5")
        fn(hidden, weight, target).backward()
    step(16)
    base = status("VmRSS")
    step(2048)
    print(status("VmHWM") - base)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_training_never_holds_the_logits():
    done = subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True)
    for peak in done.stdout.split():
        assert int(peak) * 1024 < 0.1 * 2048 * 32768 * 4


@BACKENDS
def test_opcheck(device, backend):
    hidden, weight, target, temperature = make(4, 40, 8, torch.float32, device, 0)
    hidden.requires_grad_()
    weight.requires_grad_()
    target[1] = -100
    ops = torch.ops.vexact
    loss = hidden, weight, target, "mean", -100, 0.0, False, False, backend
    torch.library.opcheck(ops.linear_cross_entropy.default, loss)
    if backend == "cuda":  # gradients with the forward
        short = (t.detach().bfloat16().requires_grad_() for t in (hidden, weight))
        torch.library.opcheck(
            ops.linear_cross_entropy.default, (*short, target, "mean", -100, 0.0, True, True, backend)
        )
    logprobs = hidden, weight, target.clamp(min=0), temperature, 5.0, True, backend
    torch.library.opcheck(ops.linear_logprobs.default, logprobs)
    torch.library.opcheck(ops.softcap.default, (hidden, 5.0, backend))


def test_compiled_in_one_graph_it_has_the_same_bits():
    """With the rooms it is used with: no graph breaks, values are still checked where the graph runs."""
    hidden, weight, target, _ = make(6, 60, 8, torch.float32, "cpu", 0)

    def fn(hidden, weight, target):
        logits = vx.linear_logits(hidden, weight, softcap=5.0)
        ids, drawn, _ = vx.sample(logits, 1, torch.arange(6), temperature=0.7, top_k=5)
        logprob, entropy = vx.linear_logprobs(hidden, weight, target, temperature=0.7, return_entropy=True)
        loss = vx.linear_cross_entropy(hidden, weight, target) + logprob.sum() + entropy.sum()
        return loss + vx.mean(vx.log_softmax(logits), None), ids, drawn

    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    eager, traced = (
        gradients(lambda h, w, f=f: f(h, w, target)[0], hidden, weight, torch.tensor(1.0)) for f in (fn, compiled)
    )
    assert_bitwise(traced, eager)
    assert_bitwise(compiled(hidden, weight, target), fn(hidden, weight, target))
    target[0] = 60
    with pytest.raises(ValueError, match="target: got id 60"):
        compiled(hidden, weight, target)


@pytest.mark.parametrize("tokens", ["known", "dynamic", "of a mask"])
def test_it_is_traced_for_tokens_that_only_the_data_counts(tokens, monkeypatch):
    """On a GPU it may be made with its gradients, in a form that depends on the number of tokens: with none known, not.
    What is traced here never runs."""
    monkeypatch.setattr(op.ROOM, "resolve", lambda device, asked: "cuda")
    hidden, weight = (torch.zeros(n, 16).bfloat16().requires_grad_() for n in (40, 50))
    target, calls = torch.arange(40), []

    def loss(hidden, weight, target):
        at = (target % 3 != 0).nonzero()[:, 0] if tokens == "of a mask" else slice(None)
        return vx.linear_cross_entropy(hidden[at], weight, target[at])

    def traced(module, inputs):
        calls.extend(n.args for n in module.graph.nodes if "linear_cross_entropy" in str(n.target))
        return lambda *given: (torch.zeros(()),)

    compiled = torch.compile(loss, fullgraph=True, backend=traced, dynamic=tokens == "dynamic")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled(hidden, weight, target)
    (args,) = calls
    assert args[6:8] == ((False, False) if tokens == "of a mask" else (True, True))


def test_bad_arguments_are_named():
    hidden, weight, target, temperature = make(3, 40, 8, torch.float32, "cpu", 0)
    with pytest.raises(TypeError, match="linear_logits: hidden: got dtype float64"):
        vx.linear_logits(hidden.double(), weight)
    with pytest.raises(TypeError, match="linear_logprobs: hidden: got dtype float16, which a GPU serves"):
        vx.linear_logprobs(hidden.half(), weight.half(), target, backend="cpu")
    with pytest.raises(TypeError, match="linear_logits: weight: got dtype bfloat16"):
        vx.linear_logits(hidden, weight.bfloat16())
    with pytest.raises(ValueError, match="linear_logits: softcap: got 0"):
        vx.linear_logits(hidden, weight, softcap=0)
    with pytest.raises(ValueError, match=r"linear_logprobs: weight: got shape \(40, 7\), expected \(V, 8\)"):
        vx.linear_logprobs(hidden, weight[:, :7], target)
    with pytest.raises(ValueError, match=r"linear_logprobs: weight: got shape \(0, 8\)"):
        vx.linear_logprobs(hidden, weight[:0], target)
    with pytest.raises(ValueError, match=r"linear_logprobs: target: got shape \(2,\), expected \(3,\)"):
        vx.linear_logprobs(hidden, weight, target[:2])
    with pytest.raises(TypeError, match="linear_logprobs: target: got dtype float32"):
        vx.linear_logprobs(hidden, weight, target.float())
    for bad in (40, -1, -100):
        target[1] = bad
        with pytest.raises(ValueError, match=rf"linear_logprobs: target: got id {bad}, expected ids in \[0, 40\)"):
            vx.linear_logprobs(hidden, weight, target)
    with pytest.raises(ValueError, match="linear_cross_entropy: target: got id -100"):
        vx.linear_cross_entropy(hidden, weight, target, ignore_index=0)
    target[1] = 1
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="linear_logprobs: temperature: got"):
            vx.linear_logprobs(hidden, weight, target, temperature=bad)
        temperature[2] = bad
        with pytest.raises(ValueError, match="linear_logprobs: temperature: got"):
            vx.linear_logprobs(hidden, weight, target, temperature=temperature)
    with pytest.raises(ValueError, match="linear_cross_entropy: reduction: got 'max'"):
        vx.linear_cross_entropy(hidden, weight, target, reduction="max")
    with pytest.raises(TypeError, match="linear_cross_entropy: ignore_index: got float"):
        vx.linear_cross_entropy(hidden, weight, target, ignore_index=1.0)
    with pytest.raises(vx.BackendUnavailable, match="does not serve cpu"):
        vx.linear_logprobs(hidden, weight, target, backend="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_admission_ahead_of_time():
    from vexact_ops.linear_cross_entropy import cuda

    decision = cuda.admit(64, torch.device("cuda"))
    if torch.cuda.get_device_capability() == (9, 0):
        assert "H=64" in decision.key and [v.different for v in decision.verdicts] == [0]


def test_zero_tokens():
    hidden, weight = torch.empty(0, 8, requires_grad=True), torch.ones(40, 8, requires_grad=True)
    target = torch.empty(0, dtype=torch.int64)
    assert vx.linear_logits(hidden, weight, softcap=5.0).shape == (0, 40)
    logprob, entropy = vx.linear_logprobs(hidden, weight, target, return_entropy=True)
    assert logprob.shape == entropy.shape == (0,)
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros(40, 8))
    assert vx.linear_cross_entropy(hidden, weight, target).isnan()
    assert vx.linear_cross_entropy(hidden, weight, target, reduction="sum") == 0
    assert vx.linear_cross_entropy(hidden, weight, target, reduction="none").shape == (0,)
