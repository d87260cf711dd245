"""What each room verifies its kernels on has power: kernels that treat one kind of value, or one row, otherwise are
refused. On a CPU: the rooms' own proposals, with PyTorch's operations in the place of their canonical kernels."""

import dataclasses
import itertools

import pytest
import torch

from vexact_ops._core import admit
from vexact_ops._core.admit import Candidate, admitted
from vexact_ops._core.backend import PROBES

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(bool(PROBES["cpu"]()), reason="the compiled extension is missing")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    monkeypatch.delenv("VEXACT_ADMIT", raising=False)
    monkeypatch.setattr(admit, "_decisions", {})


# --- what a candidate may change


@pytest.mark.parametrize(
    "operand",
    [
        torch.ones(3, 8).bfloat16(),
        torch.ones(3, 5).half(),
        torch.ones(3, 9)[:, 1:8],
        torch.ones(5, 3).t(),
        torch.ones(()),
        torch.ones(7, dtype=torch.uint8),
        torch.ones(4100, 4097).bfloat16(),
    ],
    ids=lambda x: f"{x.dtype} {tuple(x.shape)}",
)
def test_a_change_of_any_element_is_seen(operand):
    before = admit._sums([(operand, [operand])])
    assert len(before) == 1
    for place in {0, operand.numel() // 2, operand.numel() - 1}:
        changed = operand.clone()
        changed[tuple(torch.unravel_index(torch.tensor(place), operand.shape))] = 2
        assert admit._sums([(changed,)]) != before
    assert admit._sums([(operand.clone(),)]) == before


# --- the canonical kernels' places


def combine(y, position, weights, tokens):
    acc = torch.zeros(tokens, y.shape[1])
    for slot, at in enumerate(position.view(tokens, -1).long().t()):
        v = y[at.clamp(min=0)].float()
        more = acc + v
        if weights is not None:
            more = (weights[:, slot, None].double() * v.double() + acc.double()).float()
        acc = torch.where(at[:, None] >= 0, more, acc)
    return acc.to(y.dtype)


def gate_bwd(h, da, order, weights, offsets, gelu):
    from vexact_ops.fused_moe import cuda

    gate, up = h.float().chunk(2, 1)
    w, d, s = weights.flatten()[order.long()][:, None], da.float(), gate.sigmoid()
    value = (gate * s * up).to(h.dtype).float()
    dh = torch.cat([w * d * up * (s + gate * s * (1 - s)), w * d * gate * s], 1).to(h.dtype)
    dweights, live = torch.zeros_like(weights), int(offsets[-1])
    dweights.view(-1)[order[:live].long()] = (d * value).sum(1)[:live]
    return cuda._live(dh, (w * value).to(h.dtype), dweights, offsets)


def logprobs(hidden, weight, target, temperature, softcap, want_entropy, live=None):
    z = hidden.float() @ weight.float().t()
    z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature[:, None]
    lse = z.logsumexp(1)
    entropy = lse - (z.softmax(1) * z).sum(1) if want_entropy else None
    return z.gather(1, target.clamp(min=0)[:, None])[:, 0] - lse, entropy, torch.stack([z.amax(1), lse], 1)


def logprobs_bwd(dlogprob, dentropy, hidden, weight, target, temperature, softcap, entropy, lse, *_):
    with torch.enable_grad():
        h, w = (x.float().requires_grad_() for x in (hidden, weight))
        logprob, entropy, _ = logprobs(h, w, target, temperature, softcap, dentropy is not None)
        outputs = (logprob,) if dentropy is None else (logprob, entropy)
        grads = torch.autograd.grad(outputs, (h, w), (dlogprob,) if dentropy is None else (dlogprob, dentropy))
    return tuple(g.to(hidden.dtype) for g in grads)


def loss(hidden, weight, target, scale, need_dhidden, need_dweight, live, keep=False):
    """`keep` or not: here the gradient of weight can wait as it is."""
    one, up = torch.ones(1), torch.ones(hidden.shape[0]) * scale
    logprob, _, lse = logprobs(hidden, weight, target, one, 0.0, False)
    return logprob, lse, *logprobs_bwd(up, None, hidden, weight, target, one, 0.0, None, lse)


def head(*case):
    from vexact_ops.linear_cross_entropy import cuda

    return cuda._everything(logprobs, logprobs_bwd, loss, from_kept, False, *case)


def from_kept(dweight, hidden, weight, scale, factor, live):
    return (dweight.float() * factor).to(dweight.dtype)


def attention(q, k, v, cu, sinks, finite):
    ends, out, lse = cu.tolist(), [], []
    for a, b in itertools.pairwise(ends):
        scores = torch.einsum("qhd,khd->hqk", q[a:b].float(), k[a:b].float().repeat_interleave(3, 1)) / 8
        scores = scores.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -torch.inf)
        seen = torch.ones(b - a, b - a).tril()
        values = v[a:b].float().repeat_interleave(3, 1)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, b - a, 1)], 2)
        p = scores.softmax(2)
        out.append(
            torch.stack(
                [(p[:, i, : i + 1, None] * values[: i + 1].transpose(0, 1)).sum(1) for i in range(len(seen))]
            ).to(q.dtype)
        )
        lse.append(scores.logsumexp(2))
    return torch.cat(out), torch.cat(lse, 1)


def gated(x, weight, gelu):
    gate, up = (x.float() @ weight.float().t()).to(x.dtype).float().chunk(2, 1)
    z = 1.5957691216 * (gate + 0.044715 * gate**3) if gelu else gate
    return (gate * z.sigmoid() * up).to(x.dtype)


def norm(dy, dnew_residual, x, weight, scale, flipped=None):
    """flipped: the dimension along which sums go backwards."""

    def summed(terms, dim):
        return (terms.flip(dim) if dim == flipped else terms).cumsum(dim).select(dim, -1)

    normed, g = x.float() * scale[:, None], dy.float() * weight.float()
    dx = scale[:, None] * (g - normed * summed(g * normed, 1)[:, None] / x.shape[1])
    dx = dx if dnew_residual is None else dx + dnew_residual.float()
    return dx.to(x.dtype), summed(dy.float() * normed.to(x.dtype).float(), 0).to(x.dtype)


def norm_proposal(residual=False):
    """Without a batch to time, and the order of candidates that are raced."""
    from vexact_ops.rmsnorm import triton as norm_room

    candidate = Candidate("a", norm, "")
    return admit.Proposal("norm", [candidate], candidate, lambda: norm_room._cases(CPU, torch.bfloat16, 40, residual))


def proposals():
    """name -> (proposal, canonical run, whether a case is of one row or token)"""
    from vexact_ops.attention import cuda as attention_room
    from vexact_ops.fused_moe import cuda as moe
    from vexact_ops.linear_cross_entropy import cuda as head_room
    from vexact_ops.linear_silu_mul import cuda as gated_room

    def of(decide, *arguments):
        return decide.__wrapped__(CPU, *arguments)

    yield "plan", of(moe._planning, 5), moe._routed, lambda ids, *_: ids.numel() == 1
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype)[6:]
        yield f"rows {name}", of(moe._rows, dtype, 40, 3), moe._gathered, lambda x, *_: x.shape[0] == 1
        yield f"combine {name}", of(moe._combining, dtype, 40, 3), combine, lambda *case: case[3] == 1
        yield f"gate_bwd {name}", of(moe._gating, dtype, 40, False), gate_bwd, lambda *case: case[3].shape[0] == 1
    for residual in (False, True):
        name = "norm and residual" if residual else "norm"
        yield name, norm_proposal(residual), norm, lambda dy, *_: dy.shape[0] == 1
    yield "head", head_proposal(head_room), head, lambda hidden, *_: hidden.shape[0] == 1
    yield "gated", gated_proposal(gated_room), gated, lambda x, *_: x.shape[0] == 1
    shape = attention_room.Shape(3, 64, 64, "causal")
    yield "attention", attention_proposal(attention_room, shape), attention, lambda q, k, v, cu, sinks, finite: False
    shape = attention_room.Shape(3, 64, 64, "causal", sinks=True)
    yield "sinks", attention_proposal(attention_room, shape), attention, lambda q, k, v, cu, sinks, finite: False


def head_proposal(room):
    proposal = room._heads.__wrapped__(CPU, 40)
    return dataclasses.replace(proposal, cases=lambda: room._cases(CPU, 40))


def gated_proposal(room):
    """Without a GPU, whose multiprocessors are a part of the proposal."""
    candidate = Candidate("a", gated, "")
    return admit.Proposal("gated", [candidate], candidate, lambda: room._cases(CPU, torch.bfloat16, 96, 40, 8))


def attention_proposal(room, shape):
    """Without flash-attn-4, whose versions are a part of the proposal."""
    return admit.Proposal(
        "attention", [Candidate("a", attention, "")], Candidate("c", attention, ""),
        lambda: [c for c in room._forward_cases(CPU, torch.bfloat16, shape, None) if len(c[0]) < 500],
    )  # fmt: skip


def floats(change):
    def through(value):
        if isinstance(value, torch.Tensor):
            return change(value) if value.is_floating_point() else value
        return type(value)(through(v) for v in value) if isinstance(value, tuple | list) else value

    return through


flush = floats(lambda x: torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, 0, x))
no_nan = floats(lambda x: x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf))
positive_zero = floats(lambda x: x + 0.0)
finite = floats(lambda x: torch.where(x.isinf(), x.sign() * torch.finfo(x.dtype).max, x))
next_up = floats(lambda x: torch.nextafter(x, torch.full_like(x, torch.inf)))

FAKES = {
    "nothing": lambda run, one: run,
    "flushes subnormal operands": lambda run, one: lambda *case: run(*flush(case)),
    "flushes subnormal results": lambda run, one: lambda *case: flush(run(*case)),
    "turns NaN into 0": lambda run, one: lambda *case: no_nan(run(*case)),
    "turns infinities into the largest": lambda run, one: lambda *case: finite(run(*case)),
    "loses -0": lambda run, one: lambda *case: positive_zero(run(*case)),
    "is wrong for one row": lambda run, one: lambda *case: next_up(run(*case)) if one(*case) else run(*case),
}
ROOMS = [name for name, *_ in proposals()]


@pytest.mark.parametrize("fake", FAKES)
@pytest.mark.parametrize("room", ROOMS)
def test_a_room_tells_a_kernel_that_treats_special_values_otherwise(room, fake):
    _, proposal, run, one = next(p for p in proposals() if p[0] == room)
    if room == "plan" and fake != "nothing":
        pytest.skip("whole numbers")
    if room in ("attention", "sinks") and fake == "is wrong for one row":
        pytest.skip("it takes no call of one row")
    if room == "head" and fake == "flushes subnormal operands":
        pytest.skip("no result shows them: logits that small are as good as 0")
    canonical = Candidate("canonical", run, "1")
    wrong = Candidate("fake", lambda *case: FAKES[fake](run, one)(*case), "1")
    decision = admitted(dataclasses.replace(proposal, candidates=[wrong], canonical=canonical, race=None), CPU)
    (verdict,) = decision.verdicts
    assert verdict.error is None
    assert verdict.admitted == (fake == "nothing"), verdict


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_norm_s_gradients_in_another_order_are_refused(dim, residual):
    backwards = Candidate("fake", lambda *case: norm(*case, flipped=dim), "1")
    decision = admitted(dataclasses.replace(norm_proposal(residual), candidates=[backwards]), CPU)
    assert decision.verdicts[0].different, decision


PLANS = {
    "counts what is no expert": lambda ids, experts, run: run(ids.clamp(min=0), experts),
    "later slots first": lambda ids, experts, run: (run(ids, experts)[0], *(x.flip(0) for x in run(ids, experts)[1:])),
    "the last expert begins too late": lambda ids, experts, run: (
        torch.cat([run(ids, experts)[0][:-1] + 0, run(ids, experts)[0][-1:] - 1]),
        *run(ids, experts)[1:],
    ),
    "one slot": lambda ids, experts, run: tuple(x + (ids.numel() == 1) for x in run(ids, experts)),
}


@pytest.mark.parametrize("fake", PLANS)
def test_a_plan_that_is_wrong_somewhere_is_refused(fake):
    from vexact_ops.fused_moe import cuda

    proposal = cuda._planning.__wrapped__(CPU, 5)
    wrong = Candidate("fake", lambda ids, experts: PLANS[fake](ids, experts, cuda._routed), "1")
    canonical = Candidate("canonical", cuda._routed, "1")
    verdicts = admitted(dataclasses.replace(proposal, candidates=[wrong], canonical=canonical), CPU).verdicts
    assert not verdicts[0].admitted


def test_the_sources_of_a_proposal_name_the_files_and_the_extension(monkeypatch):
    from vexact_ops._core import digest
    from vexact_ops.fused_moe import cuda

    before = cuda._combining.__wrapped__(CPU, torch.bfloat16, 40, 3)
    monkeypatch.setattr(digest, "of_extension", lambda room, kind: "another build")
    after = cuda._combining.__wrapped__(CPU, torch.bfloat16, 40, 3)
    assert before.candidates[0].source != after.candidates[0].source
    monkeypatch.setattr(digest, "canonical", lambda room, backend="triton": "another Triton")
    assert cuda._combining.__wrapped__(CPU, torch.bfloat16, 40, 3).canonical.source != before.canonical.source


def test_gradients_whose_kernel_could_not_be_verified_are_no_other_kernels_in_silence(monkeypatch):
    """Forwards take the canonical kernel meanwhile: the same bits. The Triton kernels' gradients have others."""
    from vexact_ops._core.admit import Decision, Verdict
    from vexact_ops.attention import cuda

    call = cuda.Call("backward", CPU, torch.bfloat16, True, False, cuda.Shape(2, 64, 64, "causal"))
    theirs, triton = Candidate(cuda.FLASH_ATTN, None), Candidate(cuda.TRITON, None)
    monkeypatch.setattr(cuda, "_cute", lambda: "installed")

    def decision(chosen, *verdicts):
        monkeypatch.setattr(cuda, "_backward", lambda *of: Decision("k", chosen, "no memory", verdicts))

    decision(theirs, Verdict(theirs.name, 0))
    assert cuda._fast_backward(call)
    decision(triton, Verdict(theirs.name, 3))
    assert not cuda._fast_backward(call), "refused for good: the Triton kernels' it is, everywhere"
    decision(triton)
    with pytest.raises(RuntimeError, match=r"this backward has not been verified yet \(no memory\)"):
        cuda._fast_backward(call)
    monkeypatch.setenv("VEXACT_ADMIT", "0")
    assert not cuda._fast_backward(call), "as was asked for"


def test_a_large_product_waits_for_the_choice_that_it_verifies(monkeypatch):
    """Without candidates the canonical kernel would be its own for good."""
    from vexact_ops._core.admit import Decision
    from vexact_ops.linear import cuda

    monkeypatch.setattr(cuda.gpu, "not_sm90", lambda device: None)
    monkeypatch.setattr(cuda.Product, "algorithms", lambda self, most: [])
    large = cuda.Product(CPU, torch.bfloat16, torch.bfloat16, 11000, 1024, 1024, b_k=False)
    assert large.top == 12288 and large.m == 11000

    def settled(final):
        asked = []

        def decide(proposal, device):
            asked.append(proposal.key.split()[3])
            return Decision(proposal.key, proposal.canonical, "it is to be timed", final=final or len(asked) > 1)

        monkeypatch.setattr(cuda, "admitted", decide)
        return cuda.route(large).final, [m for m in asked if m != "M<=8192"]

    assert settled(final=False) == (False, [])
    assert settled(final=True) == (True, ["M<=12288"])
