"""sample: rows stand alone, draws follow the distribution and the truncations, log-probabilities are log_softmax's."""

import math

import pytest
import torch
from conftest import room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.sampler.reference import allowed_ref, philox_ref, sample_ref
from vexact_ops.testing import assert_bitwise, check_repeatable, check_rows

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("sampler"))
SIZES = st.sampled_from([1, 2, 17, 127, 128, 129, 300, 1025])
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 200]),
        "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    }
)


def make(rows, n, seed, device="cpu", spread=3.0):
    """Logits with many ties and some -inf; 64-bit seeds and positions."""
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, n, generator=g) * spread * 4).round() / 4
    logits[:, 1:][torch.rand(rows, n - 1, generator=g) < 0.1] = -math.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 2**40, (rows,), generator=g)
    return logits.to(device), seeds.to(device), positions.to(device)


def columns(params: list[dict], device) -> dict:
    """One parameter set per row, as tensors."""
    kinds = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    return {k: torch.tensor([p[k] for p in params], dtype=d, device=device) for k, d in kinds.items()}


def pvalue(counts, expected) -> float:
    """Of a chi-square test; cells that expect less than 5 are merged."""
    small = expected < 5
    counts = torch.cat([counts[~small], counts[small].sum()[None]]).double()
    expected = torch.cat([expected[~small], expected[small].sum()[None]]).double()
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0).double(), statistic / 2).item()


@BACKENDS
@given(n=SIZES, rows=st.integers(1, 7), params=st.lists(PARAMS, min_size=7, max_size=7), seed=st.integers(0, 2**16))
def test_rows_stand_alone(device, backend, n, rows, params, seed):
    logits, seeds, positions = make(rows, n, seed, device)
    per_row = columns(params[:rows], device)

    def run(logits, row):
        return vx.sample(logits, seeds[row], positions[row], **{k: v[row] for k, v in per_row.items()}, backend=backend)

    check_rows(run, logits, torch.arange(rows, device=device), seed=seed)


def test_draws_that_see_the_batch_slot_are_caught():
    logits, seeds, _ = make(8, 300, 0)

    def by_slot(logits, row):
        return vx.sample(logits, torch.arange(len(row)), 0)

    def by_shared_generator(logits, row):
        return torch.multinomial(logits.nan_to_num().softmax(-1), 1, generator=torch.Generator().manual_seed(0))

    for draw in (by_slot, by_shared_generator):
        with pytest.raises(AssertionError, match="differ"):
            check_rows(draw, logits, torch.arange(8), neighbours=())
    check_rows(lambda logits, row: vx.sample(logits, seeds[row], 0), logits, torch.arange(8))


@BACKENDS
def test_repeatable(device, backend):
    params = [
        {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
        for t in (0.0, 0.7, 1.0)
        for k, p, m in [(0, 1.0, 0.0), (40, 1.0, 0.0), (3, 0.9, 0.0), (0, 0.6, 0.0), (0, 0.97, 0.01)]
    ]
    logits, seeds, positions = make(len(params), 3001, 0, device)
    check_repeatable(lambda: vx.sample(logits, seeds, positions, **columns(params, device), backend=backend))


def test_the_random_words_are_philox():
    """The known answers published with the generator."""
    digits = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    assert philox_ref([0] * 4, [0] * 2) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_ref([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert philox_ref(*digits) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@BACKENDS
@given(n=SIZES, params=PARAMS, spread=st.sampled_from([0.1, 1.0, 4.0]), seed=st.integers(0, 2**16))
def test_draws_are_the_reference_s(device, backend, n, params, spread, seed):
    logits, seeds, positions = make(3, n, seed, device, spread)
    got = vx.sample(logits, seeds, positions, **params, backend=backend)
    want = sample_ref(logits.cpu(), seeds.tolist(), positions.tolist(), **params)
    assert got[0].tolist() == want[0].tolist()
    for ours, exact in zip(got[1:], want[1:]):
        torch.testing.assert_close(ours.cpu().double(), exact, rtol=1e-5, atol=1e-5)


@BACKENDS
@pytest.mark.parametrize("spread", [0.02, 0.5, 3.0])
def test_draws_from_many_blocks_are_the_reference_s(device, backend, spread):
    """157 blocks, of which the random words come 64 at a time."""
    logits, seeds, positions = make(8, 20000, 1, device, spread)
    for params in ({}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 3000}, {"temperature": 1.7, "min_p": 0.01}):
        ids = vx.sample(logits, seeds, positions, **params, backend=backend)[0]
        assert ids.tolist() == sample_ref(logits.cpu(), seeds.tolist(), positions.tolist(), **params)[0].tolist()


@BACKENDS
def test_what_is_added_to_all_logits_does_not_show(device, backend):
    """Blocks are compared as real numbers: where logits are large, fp32 would forget the random part of the sum."""
    logits, seeds, positions = make(64, 1025, 4, device)
    for params in ({}, {"top_k": 9}, {"top_p": 0.9}):
        expected = vx.sample(logits, seeds, positions, **params, backend=backend)[0]
        for added in (4096.0, 2.0**20, -(2.0**20)):
            assert_bitwise(vx.sample(logits + added, seeds, positions, **params, backend=backend)[0], expected)
    for row in (torch.zeros(1, 1025, device=device), allowed_alone(1025, {127: 0.0, 900: 0.0}, device)):
        expected = vx.sample(row.expand_as(logits), seeds, positions, backend=backend)[0]
        assert len(set((expected // 128).tolist())) > 1
        for value in (1e-30, 1e9, 1e30, -1e30):
            same = (row + value).expand_as(logits)
            assert_bitwise(vx.sample(same, seeds, positions, backend=backend)[0], expected)


@pytest.mark.parametrize("device,backend", room_backends("sampler", "triton"))
@given(n=SIZES, params=st.lists(PARAMS, min_size=5, max_size=5), spread=st.sampled_from([0.1, 3.0]), seed=st.integers())
def test_a_gpu_draws_the_tokens_of_a_cpu(device, backend, n, params, spread, seed):
    """All of them in the interpreter. A GPU's exponentials differ in the last bits, so that a draw that falls close to
    a boundary may be its neighbour: none is expected among these few, two would be a fault."""
    times = 40 if device == "cuda" else 1
    logits, seeds, positions = make(5 * times, n, seed % 2**32, spread=spread)
    theirs = vx.sample(logits, seeds, positions, **columns(params * times, "cpu"), backend="cpu")
    inputs = (t.to(device) for t in (logits, seeds, positions))
    ours = vx.sample(*inputs, **columns(params * times, device), backend=backend)
    same = ours[0].cpu() == theirs[0]
    assert int((~same).sum()) <= (1 if device == "cuda" else 0)
    for a, b in zip(ours[1:], theirs[1:]):
        torch.testing.assert_close(a.cpu()[same], b[same], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device,backend", room_backends("sampler", "triton"))
@given(
    params=st.lists(PARAMS, min_size=3, max_size=3),
    spread=st.sampled_from([0.02, 0.5, 3.0]),
    seed=st.integers(0, 2**16),
)
def test_how_many_programs_look_for_a_cut_does_not_show(device, backend, params, spread, seed):
    from vexact_ops.sampler import triton

    logits, seeds, positions = (t.to(device) for t in make(3, 4700, seed, spread=spread))
    params = columns(params, device)
    expected = vx.sample(logits, seeds, positions, **params, backend=backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "PROGRAMS", 1)
        assert_bitwise(vx.sample(logits, seeds, positions, **params, backend=backend), expected)


@BACKENDS
def test_draws_never_change(device, backend):
    """Recorded: other numbers mean another contract, for every seed that anyone has kept."""
    logits = torch.sin(torch.arange(1000.0).double() ** 1.5).float().expand(6, 1000) * 3
    seeds = torch.tensor([0, 1, 2, -1, 2**62, 12345])
    ids = vx.sample(logits.to(device), seeds.to(device), 7, temperature=1.25, top_p=0.9, backend=backend)[0]
    assert ids.tolist() == [448, 179, 321, 302, 137, 513]


@BACKENDS
@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 1.3])
def test_logprobs_are_those_of_log_softmax(device, backend, temperature):
    logits, seeds, positions = make(5, 1500, 3, device)
    ids, logprobs, raw = vx.sample(logits, seeds, positions, temperature=temperature, top_p=0.9, backend=backend)
    scaled = logits / torch.tensor(temperature or 1.0, device=device)  # by a number, CUDA multiplies by the reciprocal
    assert_bitwise(raw, vx.log_softmax(logits, backend=backend).gather(1, ids[:, None])[:, 0])
    assert_bitwise(logprobs, vx.log_softmax(scaled, backend=backend).gather(1, ids[:, None])[:, 0])


def histogram(logits, draws, backend, **params):
    """Counts of `draws` ids from one row, one position each."""
    ids = []
    for positions in torch.arange(draws, device=logits.device).split(20000):
        ids.append(vx.sample(logits.expand(len(positions), -1), 11, positions, **params, backend=backend)[0].cpu())
    ids = torch.cat(ids)
    return torch.bincount(ids, minlength=logits.shape[-1]), ids


def allowed_alone(size: int, logits: dict[int, float], device) -> torch.Tensor:
    """A row of -inf, but for these."""
    row = torch.full((1, size), -math.inf, device=device)
    row[0, list(logits)] = torch.tensor(list(logits.values()), device=device)
    return row


CUTS = [{}, {"temperature": 0.5}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 90, "top_p": 0.9}]


@BACKENDS
@pytest.mark.parametrize("params", CUTS, ids=str)
@pytest.mark.parametrize("size", [70, 300])
def test_draws_follow_the_distribution(device, backend, size, params):
    logits = make(1, size, 5, spread=1.5)[0]
    allowed = allowed_ref(logits[0], **{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **params})
    assert allowed[:128].any() and (size <= 128 or allowed[128:].any())
    p = torch.softmax(logits[0].double() / params.get("temperature", 1.0), -1) * allowed
    draws = 40000
    counts, _ = histogram(logits.to(device), draws, backend, **params)
    assert counts[~allowed].sum() == 0
    assert pvalue(counts, p / p.sum() * draws) > 1e-4
    other = torch.softmax(logits[0].double() / params.get("temperature", 1.0) * 1.5, -1) * allowed
    assert pvalue(counts, other / other.sum() * draws) < 1e-4  # the test would see another temperature


@BACKENDS
def test_the_block_that_wins_says_nothing_of_its_token(device, backend):
    """Four tokens in each of four blocks; blocks and tokens are about as likely as each other."""
    tokens = [128 * block + at for block in range(4) for at in (0, 40, 90, 127)]
    logits = allowed_alone(512, {token: 0.1 * (token % 7) for token in tokens}, device)
    draws = 100_000
    counts, _ = histogram(logits, draws, backend)
    joint = counts[tokens].view(4, 4).double()
    assert joint.sum() == draws
    p = torch.softmax(logits[0, tokens].cpu().double(), -1).view(4, 4)
    assert pvalue(joint.flatten(), (p * draws).flatten()) > 1e-4
    of_block, of_token = joint.sum(1, keepdim=True), p / p.sum(1, keepdim=True)
    for block in range(4):
        assert pvalue(joint[block], of_token[block] * of_block[block]) > 1e-4
    assert pvalue(of_block.flatten(), p.sum(1) * draws) > 1e-4


@BACKENDS
def test_rare_tokens_are_drawn_as_often_as_they_should(device, backend):
    """Behind a token that nearly always comes: in its own block, before it and after it, and in another one."""
    rare = {3: 1e-4, 126: 4e-4, 130: 1e-4, 255: 1e-3}
    logits = allowed_alone(
        300, {77: math.log(1 - sum(rare.values())), **{t: math.log(p) for t, p in rare.items()}}, device
    )
    draws = 300_000
    counts, _ = histogram(logits, draws, backend)
    p = torch.softmax(logits[0].cpu().double(), -1)
    assert pvalue(counts, p * draws) > 1e-4
    for gone in rare:
        assert pvalue(counts, p.index_fill(0, torch.tensor(gone), 1e-6) * draws) < 1e-4


@BACKENDS
def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should(device, backend):
    logits = torch.zeros(1, 40000, device=device)
    logits[0, 20000:] = 1.0
    logits[0, 7] = math.log(40000)
    counts, _ = histogram(logits, 4000, backend)
    p = torch.softmax(logits[0].cpu().double(), -1)
    split = [7, 1, 4992, 5000, 10000, 10000, 10000]  # ids by ranges, token 7 alone
    assert pvalue(*(torch.stack([part.sum() for part in t.split(split)]) for t in (counts, p * 4000))) > 1e-4


@BACKENDS
def test_seeds_and_positions_are_independent(device, backend):
    """Neighbouring positions of a request, and neighbouring requests at one position, know nothing of each other: which
    block wins, and which of its tokens."""
    tokens, draws = [0, 100, 130, 255], 20000
    logits = allowed_alone(256, dict(zip(tokens, [0.0, 0.5, 1.0, -0.5])), device)
    p = torch.softmax(logits[0, tokens].cpu().double(), -1)
    joint = (p[:, None] * p).flatten() * (draws - 1)
    rows, number = logits.expand(draws, -1), torch.arange(draws, device=device)
    along = {
        "positions": vx.sample(rows, 3, number, backend=backend)[0],
        "seeds": vx.sample(rows, number, 3, backend=backend)[0],
        "both": vx.sample(rows, number, number, backend=backend)[0],
    }
    for name, ids in along.items():
        number = torch.searchsorted(torch.tensor(tokens, device=device), ids)
        pairs = torch.bincount((number[:-1] * 4 + number[1:]).cpu(), minlength=16)
        assert pvalue(pairs, joint) > 1e-4, name
    agree = (along["positions"] == along["seeds"]).double().mean().item()
    assert abs(agree - (p * p).sum().item()) < 0.02


@BACKENDS
def test_ties_go_to_the_lower_ids(device, backend):
    logits = torch.zeros(1, 1200, device=device)
    logits[0, ::2] = 1.0
    for k in (1, 3, 100, 600, 700):
        ids = set(histogram(logits, 4000, backend, top_k=k, temperature=8.0)[1].tolist())
        expected = set([*range(0, 1200, 2), *range(1, 1200, 2)][:k])
        assert ids <= expected and (k > 100 or ids == expected)
    assert vx.sample(logits, 0, 0, temperature=0, backend=backend)[0].item() == 0
    ids = set(histogram(torch.zeros(1, 10, device=device), 2000, backend, top_p=0.35)[1].tolist())
    assert ids == {0, 1, 2, 3}
    assert set(histogram(torch.zeros(1, 10, device=device), 2000, backend, top_p=0.35, top_k=5)[1].tolist()) == {0, 1}
    signed = torch.tensor([[-0.0, 0.0, -0.0, 0.0]], device=device)
    assert set(histogram(signed, 500, backend, top_k=2)[1].tolist()) == {0, 1}


@BACKENDS
def test_tied_blocks_go_to_the_lower_one(device, backend):
    """At these positions blocks 0 and 1 have random words that fp32 does not tell apart."""
    positions = [41401268, 74173312, 140417847]
    for position in positions:
        words = torch.tensor([philox_ref([position, 0, block, 0], [0, 0])[0] for block in (0, 1)])
        uniform = ((words.double() + 0.5) / 2**32).float()
        assert words[0] != words[1] and uniform[0] == uniform[1]
    logits, positions = torch.zeros(3, 256, device=device), torch.tensor(positions, device=device)
    assert (vx.sample(logits, 0, positions, backend=backend)[0] < 128).all()
    for least in (2.0**-30, 1e-30):  # as real numbers, these sums differ
        logits[:, 128:] = least
        assert (vx.sample(logits, 0, positions, backend=backend)[0] >= 128).all()


@BACKENDS
def test_a_row_without_a_distribution_gives_minus_one(device, backend):
    logits, seeds, positions = make(5, 700, 1, device)
    alone = vx.sample(logits, seeds, positions, top_p=0.9, backend=backend)
    for bad in (math.nan, math.inf):
        poisoned = logits.clone()
        poisoned[2, 600] = bad
        poisoned[4] = -math.inf
        for temperature in (0.0, 0.5, 1.0):
            ids, logprobs, raw = vx.sample(poisoned, seeds, positions, temperature=temperature, backend=backend)
            assert ids[[2, 4]].tolist() == [-1, -1]
            assert (logprobs[[2, 4]].isnan() & raw[[2, 4]].isnan()).all()
            assert (ids[[0, 1, 3]] >= 0).all()
        keep = torch.tensor([0, 1, 3], device=device)
        others = vx.sample(poisoned, seeds, positions, top_p=0.9, backend=backend)
        assert_bitwise(tuple(t[keep] for t in others), tuple(t[keep] for t in alone))


@BACKENDS
def test_scalars_and_tensors_mean_the_same(device, backend):
    logits, seeds, positions = make(4, 300, 2, device)
    scalars = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    expected = vx.sample(logits, seeds, positions, **scalars, backend=backend)
    assert_bitwise(vx.sample(logits, seeds, positions, **columns([scalars] * 4, device), backend=backend), expected)
    same = torch.full((4,), -5, device=device)
    assert_bitwise(vx.sample(logits, 2**64 - 5, 9, backend=backend), vx.sample(logits, same, torch.full_like(same, 9)))


@BACKENDS
def test_opcheck(device, backend):
    logits, seeds, positions = make(3, 40, 0, device)
    row = columns([{"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.0}] * 3, device)
    torch.library.opcheck(torch.ops.vexact.sample.default, (logits, seeds, positions, *row.values(), backend))


BAD_VALUES = [
    ("temperature", -0.5),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", 1e-38),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("min_p", math.nan),
]


@pytest.mark.parametrize("name,value", BAD_VALUES, ids=str)
def test_bad_parameters_are_named(name, value):
    logits, seeds, positions = make(2, 8, 0)
    good = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    with pytest.raises(ValueError, match=f"sample: {name}: got "):
        vx.sample(logits, seeds, positions, **{name: value})
    with pytest.raises(ValueError, match=f"sample: {name}: got "):
        vx.sample(logits, seeds, positions, **columns([good, {**good, name: value}], "cpu"))


def test_bad_arguments_are_named():
    logits, seeds, positions = make(2, 8, 0)
    with pytest.raises(TypeError, match="sample: logits: got dtype bfloat16"):
        vx.sample(logits.bfloat16(), seeds, positions)
    with pytest.raises(ValueError, match=r"sample: logits: got shape \(8,\)"):
        vx.sample(logits[0], seeds, positions)
    with pytest.raises(ValueError, match=r"sample: logits: got shape \(2, 0\)"):
        vx.sample(logits[:, :0], seeds, positions)
    with pytest.raises(TypeError, match="sample: seeds: got dtype float32"):
        vx.sample(logits, seeds.float(), positions)
    with pytest.raises(ValueError, match=r"sample: positions: got shape \(1,\), expected \(2,\)"):
        vx.sample(logits, seeds, positions[:1])
    with pytest.raises(ValueError, match=r"sample: seeds: got .* expected an integer of 64 bits"):
        vx.sample(logits, 2**64, positions)
    with pytest.raises(TypeError, match="sample: temperature: got dtype float64"):
        vx.sample(logits, seeds, positions, temperature=torch.ones(2).double())
    with pytest.raises(TypeError, match="sample: top_k: got float"):
        vx.sample(logits, seeds, positions, top_k=5.0)
    with pytest.raises(TypeError, match="sample: top_p: got list"):
        vx.sample(logits, seeds, positions, top_p=[0.5, 0.5])
    with pytest.raises(vx.BackendUnavailable, match="does not serve cpu"):
        vx.sample(logits, seeds, positions, backend="cuda")


def test_zero_rows_give_zero_rows():
    empty = torch.empty(0, dtype=torch.int64)
    outputs = vx.sample(torch.empty(0, 8), empty, empty, top_p=0.5)
    assert [(t.shape, t.dtype) for t in outputs] == [((0,), d) for d in (torch.int64, torch.float32, torch.float32)]
