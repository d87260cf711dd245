"""linear_sample: the bytes of sample(linear_logits(...)), whatever kernel draws, and what follows from that."""

import functools
import math

import pytest
import torch
from conftest import room_backends
from hypothesis import given, settings
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.linear_sample.reference import linear_sample_ref
from vexact_ops.testing import assert_bitwise, check_repeatable, check_rows, special_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("linear_sample"))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
SIZES = st.sampled_from([1, 2, 17, 127, 128, 129, 300, 1025])
TEMPERATURES = st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 1.7, 1e-3, 30.0])
CUTS = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 0, 1, 2, 5, 200]),
        "top_p": st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
        "min_p": st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    }
)


def make(rows, n, width, seed, dtype, device):
    """Hidden states of all sizes; a weight with rows that come twice, so that logits are tied; 64-bit seeds and
    positions."""
    g = torch.Generator().manual_seed(seed)
    hidden = tricky(rows, width, seed=seed) * (torch.rand(rows, 1, generator=g) * 0.3)
    weight = torch.randn(n, width, generator=g)
    weight = weight[torch.randint(0, n, (n,), generator=g)]
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    positions = torch.randint(0, 2**40, (rows,), generator=g)
    return hidden.to(device, dtype), weight.to(device, dtype), seeds.to(device), positions.to(device)


def composed(hidden, weight, seeds, positions, *, softcap=None, backend=None, **params):
    sampler = "triton" if backend == "cuda" else backend
    logits = vx.linear_logits(hidden, weight, softcap=softcap, backend=backend)
    return vx.sample(logits, seeds, positions, **params, backend=sampler)


@BACKENDS
@DTYPES
@given(
    n=SIZES,
    rows=st.sampled_from([1, 2, 7, 9, 17, 33, 65]),
    temperatures=st.lists(TEMPERATURES, min_size=3, max_size=3),
    softcap=st.sampled_from([None, None, 5.0]),
    seed=st.integers(0, 2**16),
)
def test_draws_are_those_of_sample_from_the_logits(device, backend, dtype, n, rows, temperatures, softcap, seed):
    inputs = make(rows, n, 64, seed, dtype, device)
    temperature = torch.tensor(temperatures, device=device)[torch.arange(rows, device=device) % 3]
    options = {"temperature": temperature, "softcap": softcap, "backend": backend}
    assert_bitwise(vx.linear_sample(*inputs, **options), composed(*inputs, **options))
    hidden, *others = inputs
    inputs = special_rows(hidden, seed=seed), *others
    assert_bitwise(vx.linear_sample(*inputs, **options), composed(*inputs, **options))


@functools.lru_cache(1)
def wide_weight(n, width, device):
    return make(1, n, width, 7, torch.bfloat16, device)[1]


@pytest.mark.parametrize("n,width", [(1025, 200), (38_659, 512)], ids=str)
@pytest.mark.parametrize("device,backend", room_backends("linear_sample", "cuda"))
@settings(max_examples=10 * settings().max_examples)  # few shapes, so that values are cheap
@given(
    rows=st.one_of(st.integers(1, 400), st.sampled_from([8, 9, 64, 65, 128, 129, 192, 193])),
    scale=st.sampled_from([0.01, 0.1, 1.0]),
    temperatures=st.lists(TEMPERATURES, min_size=1, max_size=5),
    softcap=st.sampled_from([None, None, 5.0]),
    special=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_many_values_at_few_shapes(device, backend, n, width, rows, scale, temperatures, softcap, special, seed):
    """Of every kernel that draws where logits are made: for up to 8 rows, up to 64, up to 128, up to 192, and more."""
    hidden, _, seeds, positions = make(rows, 1, width, seed, torch.bfloat16, device)
    hidden = special_rows(hidden * scale, seed=seed) if special else hidden * scale
    inputs = hidden, wide_weight(n, width, device), seeds, positions
    temperature = torch.tensor(temperatures, device=device)[torch.arange(rows, device=device) % len(temperatures)]
    options = {"temperature": temperature, "softcap": softcap}
    assert_bitwise(vx.linear_sample(*inputs, **options, backend=backend), composed(*inputs, **options, backend=backend))


@pytest.mark.parametrize("n", [262_145, 2_200_000])
@pytest.mark.parametrize("device,backend", room_backends("linear_sample", "cuda"))
def test_vocabularies_of_many_blocks(device, backend, n):
    """More blocks than are joined at once, and more than make one tree."""
    for rows in (1, 12, 100, 160):
        hidden, _, seeds, positions = make(rows, 1, 8, n + rows, torch.bfloat16, device)
        inputs = hidden, wide_weight(n, 8, device), seeds, positions
        temperature = torch.tensor([1.0, 0.7, 0.0], device=device)[torch.arange(rows, device=device) % 3]
        options = {"temperature": temperature, "backend": backend}
        assert_bitwise(vx.linear_sample(*inputs, **options), composed(*inputs, **options))


@BACKENDS
@DTYPES
@given(n=SIZES, rows=st.integers(1, 7), params=st.lists(CUTS, min_size=7, max_size=7), seed=st.integers(0, 2**16))
def test_rows_that_are_cut_are_those_of_sample(device, backend, dtype, n, rows, params, seed):
    inputs = make(rows, n, 64, seed, dtype, device)
    kinds = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    cuts = {k: torch.tensor([p[k] for p in params[:rows]], dtype=d, device=device) for k, d in kinds.items()}
    options = {"temperature": 0.8, **cuts, "backend": backend}
    assert_bitwise(vx.linear_sample(*inputs, **options), composed(*inputs, **options))
    options = {"temperature": 0.8, **params[0], "backend": backend}
    assert_bitwise(vx.linear_sample(*inputs, **options), composed(*inputs, **options))


@BACKENDS
@DTYPES
@given(n=SIZES, rows=st.integers(1, 7), temperature=TEMPERATURES, seed=st.integers(0, 2**16))
def test_rows_stand_alone(device, backend, dtype, n, rows, temperature, seed):
    hidden, weight, seeds, positions = make(rows, n, 64, seed, dtype, device)

    def run(hidden, row):
        return vx.linear_sample(hidden, weight, seeds[row], positions[row], temperature=temperature, backend=backend)

    check_rows(run, hidden, torch.arange(rows, device=device), seed=seed)


def test_draws_that_see_the_batch_slot_are_caught():
    hidden, weight, *_ = make(8, 300, 64, 0, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="differ"):
        check_rows(
            lambda hidden, row: vx.linear_sample(hidden, weight, torch.arange(len(row)), 0),
            hidden,
            torch.arange(8),
            neighbours=(),
        )


@BACKENDS
def test_rounded_logits_would_be_caught(device, backend):
    inputs = make(40, 1025, 64, 3, torch.bfloat16, device)
    ours = vx.linear_sample(*inputs, backend=backend)
    rounded = vx.linear(*inputs[:2], backend=backend).float()
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(ours, vx.sample(rounded, *inputs[2:]))


@BACKENDS
@DTYPES
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["plain", "softcap"])
def test_logprobs_are_the_trainer_s(device, backend, dtype, softcap):
    hidden, weight, seeds, positions = make(70, 1500, 64, 1, dtype, device)
    temperature = torch.tensor([1.0, 0.3, 1.7], device=device)[torch.arange(70, device=device) % 3]
    options = {"softcap": softcap, "backend": backend}
    ids, logprobs, raw = vx.linear_sample(hidden, weight, seeds, positions, temperature=temperature, **options)
    assert_bitwise(raw, vx.linear_logprobs(hidden, weight, ids, **options))
    assert_bitwise(logprobs, vx.linear_logprobs(hidden, weight, ids, temperature=temperature, **options))


@BACKENDS
def test_draws_are_the_reference_s(device, backend):
    hidden, weight, seeds, positions = make(9, 300, 64, 5, torch.float32, device)
    ours = vx.linear_sample(hidden, weight, seeds, positions, temperature=0.7, softcap=8.0, backend=backend)
    exact = hidden.double().cpu(), weight.double().cpu(), seeds.tolist(), positions.tolist()
    ids, *logprobs = linear_sample_ref(*exact, temperature=0.7, softcap=8.0)
    assert ours[0].tolist() == ids.tolist()
    for one, other in zip(ours[1:], logprobs):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=1e-5)


@BACKENDS
@DTYPES
def test_ties_go_to_the_lower_id(device, backend, dtype):
    weight = torch.ones(700, 64, device=device, dtype=dtype)
    weight[:5] = 0
    hidden = torch.ones(70, 64, device=device, dtype=dtype)
    assert vx.linear_sample(hidden, weight, 3, 1, temperature=0.0, backend=backend)[0].tolist() == [5] * 70


@BACKENDS
@DTYPES
def test_a_row_without_a_distribution_gives_minus_one_and_disturbs_no_other(device, backend, dtype):
    hidden, weight, seeds, positions = make(70, 700, 64, 1, dtype, device)
    for temperature in (0.0, 0.5, 1.0):
        options = {"temperature": temperature, "backend": backend}
        alone = vx.linear_sample(hidden, weight, seeds, positions, **options)
        poisoned = hidden.clone()
        poisoned[2, 60], poisoned[40] = math.nan, math.inf
        ids, logprobs, raw = vx.linear_sample(poisoned, weight, seeds, positions, **options)
        assert ids[[2, 40]].tolist() == [-1, -1] and logprobs[[2, 40]].isnan().all() and raw[[2, 40]].isnan().all()
        keep = [i for i in range(70) if i not in (2, 40)]
        assert_bitwise((ids[keep], logprobs[keep], raw[keep]), tuple(t[keep] for t in alone))


@BACKENDS
@DTYPES
def test_repeatable_and_empty(device, backend, dtype):
    inputs = make(33, 3001, 64, 0, dtype, device)
    check_repeatable(lambda: vx.linear_sample(*inputs, temperature=0.9, backend=backend))
    none = vx.linear_sample(inputs[0][:0], inputs[1], 0, 0, backend=backend)
    assert [t.shape[0] for t in none] == [0, 0, 0]


@BACKENDS
def test_strides_and_alignments_do_not_show(device, backend):
    hidden, weight, seeds, positions = make(20, 300, 64, 0, torch.bfloat16, device)
    expected = vx.linear_sample(hidden, weight, seeds, positions, backend=backend)
    for offset, apart in ((1, 65), (3, 80), (8, 72)):
        wide = torch.zeros(20 * apart + 8, dtype=hidden.dtype, device=device)
        strided = wide.as_strided((20, 64), (apart, 1), offset)
        strided.copy_(hidden)
        assert_bitwise(vx.linear_sample(strided, weight, seeds, positions, backend=backend), expected)
    across = weight.t().contiguous().t()
    assert_bitwise(vx.linear_sample(hidden, across, seeds, positions, backend=backend), expected)


@BACKENDS
def test_opcheck(device, backend):
    inputs = make(3, 40, 16, 0, torch.float32, device)
    t = torch.ones(3, device=device)
    op = torch.ops.vexact.linear_sample.default
    torch.library.opcheck(op, (*inputs, t, None, None, None, 0.0, backend))
    torch.library.opcheck(op, (*inputs, t, torch.ones_like(inputs[2]), t, t, 5.0, backend))


def test_bad_arguments_are_named():
    hidden, weight, seeds, positions = make(2, 8, 16, 0, torch.float32, "cpu")
    with pytest.raises(TypeError, match="linear_sample: weight: got dtype bfloat16"):
        vx.linear_sample(hidden, weight.bfloat16(), seeds, positions)
    with pytest.raises(ValueError, match=r"linear_sample: hidden: got shape \(16,\)"):
        vx.linear_sample(hidden[0], weight, seeds, positions)
    with pytest.raises(ValueError, match=r"linear_sample: weight: got shape \(8, 15\)"):
        vx.linear_sample(hidden, weight[:, :15], seeds, positions)
    with pytest.raises(ValueError, match=r"linear_sample: weight: got shape \(0, 16\)"):
        vx.linear_sample(hidden, weight[:0], seeds, positions)
    with pytest.raises(ValueError, match="linear_sample: softcap: got 0"):
        vx.linear_sample(hidden, weight, seeds, positions, softcap=0)
    with pytest.raises(ValueError, match=r"linear_sample: positions: got shape \(1,\), expected \(2,\)"):
        vx.linear_sample(hidden, weight, seeds, positions[:1])
    with pytest.raises(ValueError, match="linear_sample: temperature: got -1"):
        vx.linear_sample(hidden, weight, seeds, positions, temperature=-1.0)
    with pytest.raises(ValueError, match="linear_sample: top_p: got 0"):
        vx.linear_sample(hidden, weight, seeds, positions, top_p=torch.zeros(2))
    with pytest.raises(TypeError, match="linear_sample: top_k: got bool"):
        vx.linear_sample(hidden, weight, seeds, positions, top_k=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("width", [64, 1000, 4096])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 31, 64, 65, 128, 129, 192, 300])
def test_fast_kernels_are_admitted_and_have_the_canonical_bytes(width, rows):
    from vexact_ops.linear_sample import cuda

    hidden, weight, seeds, positions = make(rows, 151 * 256 + 3, width, rows, torch.bfloat16, "cuda")
    if torch.cuda.get_device_capability() == (9, 0):
        assert cuda.route(hidden, weight).chosen.name != cuda.TRITON
    for temperature in (1.0, 0.6, 0.0):
        options = {"temperature": temperature}
        ours, theirs = (
            vx.linear_sample(hidden, weight, seeds, positions, **options, backend=b) for b in ("cuda", "triton")
        )
        assert_bitwise(ours, theirs)
