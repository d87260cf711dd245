"""Bad arguments that only a device can meet: tensors of two devices, odd strides, and values that a GPU cannot look at
without making the host wait. None reaches memory that is not its own, and what is right beside them keeps its bits."""

import itertools

import pytest
import torch
from op_cases import CASES, Inputs

import vexact_ops as vx
from vexact_ops._core import check
from vexact_ops.testing import assert_bitwise

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device is visible to torch")
DEVICES = [("cuda", "cpu")] if GPU else [("cpu", "meta")]  # where an op runs, and where its odd argument is


def bf16(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


# The first of each op's cases
NAMES = list({name.split(".")[0]: name for name in reversed(CASES)}.values())[::-1]


def called(name, device):
    """An op, its arguments, the places of tensors among them, and its options."""
    args, options = CASES[name][1](Inputs(torch.bfloat16, device))
    args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    return getattr(vx, name.split(".")[0]), args, tensors, options


@pytest.mark.parametrize("device,other", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_on_another_device_is_named(name, device, other):
    run, args, tensors, options = called(name, device)
    run(*args, **options)
    for odd in tensors[1:]:
        mixed = [a.to(other) if i == odd else a for i, a in enumerate(args)]
        with pytest.raises(ValueError, match=rf"^{run.__name__}: \w+: got device {other}, expected {device}"):
            run(*mixed, **options)


QUICK = ("rmsnorm", "rmsnorm_gated", "delta_gates", "causal_conv_paged", "gated_delta_paged", "linear_silu_mul")
QUICK += ("rope", "rope_kv_store", "conv_gated_delta_paged")


def changes(x):
    """What somebody may give in a tensor's place; of each dimension, the last one first."""
    yield from (None, 3, x.tolist(), x[0], x[None], x.to("meta"), x.as_subclass(Plain))
    yield from (x.to(dtype) for dtype in (torch.float32, torch.float16, torch.float64, torch.bfloat16, torch.int64))
    for d, size in reversed(list(enumerate(x.shape))):
        yield from (x.narrow(d, 0, size - 1), x.narrow(d, 0, 0), torch.cat([x, x], d), x.unflatten(d, (1, size)))
        yield torch.stack([x, x], d + 1).select(d + 1, 0)  # further apart
        if d:
            yield x.transpose(d - 1, d)
            yield x.transpose(d - 1, d).contiguous().transpose(d - 1, d)


class Plain(torch.Tensor):
    """A tensor all the same."""


@pytest.mark.parametrize("name", [name for name in CASES if name.split(".")[0] in QUICK])
def test_a_quick_check_lets_nothing_through(name, monkeypatch):
    """What is asked at length only where something may be wrong: an error that comes then comes in any case. Of one
    argument, of two and three that are changed alike, and of all that have one dtype."""
    run, args, tensors, options = called(name, "cpu")
    changed = {i: list(changes(args[i])) for i in tensors}
    for arg in [arg for arg, value in options.items() if isinstance(value, torch.Tensor)]:
        args, tensors = [*args, arg], [*tensors, len(args)]
        changed[tensors[-1]] = list(changes(options[arg].detach()))
    named, count = range(len(args)), sum(not isinstance(a, str) for a in args)

    def outcome(given):
        own = {i: a.clone() if isinstance(a, torch.Tensor) else a for i, a in given.items()}
        try:
            with torch.no_grad():
                return run(*(own[i] for i in named[:count]), **{**options, **{args[i]: own[i] for i in named[count:]}})
        except Exception as error:
            return type(error), str(error)

    whole = {i: options[a].detach() if i >= count else a for i, a in enumerate(args)}
    ways, raised = [way for n in (1, 2, 3) for way in itertools.combinations(tensors, n)], 0
    ways += [tuple(i for i in tensors if whole[i].dtype == dtype) for dtype in {whole[i].dtype for i in tensors}]
    for way in ways:
        for others in zip(*(changed[i] for i in way)):
            given, found = whole | dict(zip(way, others)), []
            for quick in (True, False):
                with monkeypatch.context() as patch:
                    if not quick:
                        patch.setattr(check, "alike", lambda *_: False)
                    found.append(outcome(given))
            failed = [isinstance(x, tuple) and isinstance(x[0], type) for x in found]
            assert failed[0] == failed[1] and (not failed[0] or found[0] == found[1]), (way, others, found)
            raised += failed[0]
    assert raised > len(ways)


@pytest.mark.parametrize("device", ["cuda" if GPU else "cpu"])
@pytest.mark.parametrize("name", [name for name in NAMES if "paged" not in name and "kv" not in name])
def test_strides_do_not_show(name, device):
    """Rows in a wider tensor, columns that lie one after another, every other element: the same bits, or ValueError."""
    run, own, tensors, options = called(name, device)

    def outputs(*args):
        out = run(*args, **options)
        return out if isinstance(out, tuple) else (out,)

    expected = outputs(*own)
    layouts = {
        "a wider row": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        "columns": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
        "every other element": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
        "an odd beginning": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    }
    for kind, layout in layouts.items():
        for odd in tensors:
            args = [layout(a) if i == odd else a for i, a in enumerate(own)]
            assert torch.equal(args[odd], own[odd])
            try:
                got = outputs(*args)
            except ValueError as error:
                assert str(error).startswith(f"{run.__name__}: "), error
                continue
            assert_bitwise(got, expected, f"{name}: argument {odd}: {kind}")


# Values on a GPU


@needs_gpu
def test_slots_out_of_range_are_skipped():
    k, v = bf16(6, 2, 16).cuda(), bf16(6, 2, 16, seed=1).cuda()
    caches = [torch.zeros(4, 4, 2, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    slots = torch.tensor([3, 16, 2**40, -1, -(2**50), 15], device="cuda")
    vx.kv_cache_store(k, v, *caches, slots)
    torch.cuda.synchronize()
    for x, cache in zip((k, v), caches):
        expected = torch.zeros(16, 2, 16, dtype=torch.bfloat16, device="cuda")
        expected[3], expected[15] = x[0], x[5]
        assert_bitwise(cache.view(16, 2, 16), expected)


def paged(tables, contexts, offsets, q, caches):
    device = q.device
    args = (torch.tensor(t, dtype=torch.int32, device=device) for t in (tables, contexts, offsets))
    out = vx.attention_paged(q, *caches, *args, 4)
    torch.cuda.synchronize()
    return out


@needs_gpu
@pytest.mark.parametrize(
    "table, context, end",
    [
        ([1, 7, 2**30, -5], 14, 6),  # pages that are not there
        ([1, 2, 0, 3], 17, 6),  # more keys than the table has places
        ([1, 2, 0, 3], 2**31 - 1, 6),
        ([1, 2, 0, 3], -3, 6),
        ([1, 2, 0, 3], 14, 2**31 - 1),  # more queries than there are
        ([1, 2, 0, 3], 14, -4),  # offsets that descend
    ],
)
def test_a_sequence_whose_numbers_are_wrong_does_not_touch_its_neighbours(table, context, end):
    q = bf16(6, 4, 64).cuda()
    caches = bf16(4, 4, 2, 64, seed=1).cuda(), bf16(4, 4, 2, 64, seed=2).cuda()
    good = paged([[3, 2, 1, 0], [1, 2, 0, 3]], [13, 14], [0, 3, 6], q, caches)
    bad = paged([[3, 2, 1, 0], table], [13, context], [0, 3, end], q, caches)
    assert_bitwise(bad[:3], good[:3])
    assert_bitwise(paged([[3, 2, 1, 0], [1, 2, 0, 3]], [13, 14], [0, 3, 6], q, caches), good)


@needs_gpu
def test_offsets_out_of_range_in_training():
    q, k, v = (bf16(6, 2, 64, seed=i).cuda().requires_grad_() for i in range(3))
    for offsets in ([0, 3, 2**31 - 1], [0, 3, -7], [-9, 3, 6], [0, 99, 6]):
        out = vx.attention_varlen(q, k, v, torch.tensor(offsets, dtype=torch.int32, device="cuda"), 6)
        torch.autograd.grad(out.float().sum(), (q, k, v))
        torch.cuda.synchronize()
    good = vx.attention_varlen(q, k, v, torch.tensor([0, 6], dtype=torch.int32, device="cuda"), 6)
    assert good.isfinite().all()


# few rows go to kernels of few rows, many to whatever was admitted for many
SPREADS = pytest.mark.parametrize("rows", [12, 2048], ids=["few", "many"])


@needs_gpu
@SPREADS
@pytest.mark.parametrize("wrong", [2**31 - 1, -(2**31), -1, 10**6], ids=str)
def test_offsets_of_experts_out_of_range(rows, wrong):
    x, w = bf16(rows, 512).cuda().requires_grad_(), bf16(4, 256, 512, seed=1).cuda().requires_grad_()
    right = torch.tensor([0, rows // 4, rows // 4, rows // 2, rows], dtype=torch.int32, device="cuda")
    expected = vx.grouped_linear(x, w, right)
    for place in range(5):
        offsets = right.clone()
        offsets[place] = wrong
        out = vx.grouped_linear(x, w, offsets)
        assert out.shape == expected.shape
        torch.autograd.grad(out.float().sum(), (x, w))
        torch.cuda.synchronize()
    assert_bitwise(vx.grouped_linear(x, w, right), expected)


@needs_gpu
@SPREADS
def test_ids_of_no_expert_are_empty_slots_and_no_token_notices(rows):
    x, gate_up, down = bf16(rows, 512).cuda(), bf16(4, 512, 512, seed=1).cuda(), bf16(4, 512, 256, seed=2).cuda()
    weights = torch.rand(rows, 3, generator=torch.Generator().manual_seed(3)).cuda()
    ids = torch.randint(4, (rows, 3), generator=torch.Generator().manual_seed(4), dtype=torch.int32).cuda()
    args = x, gate_up, down, weights
    expected = vx.fused_moe(*args, ids)
    lost = torch.tensor([1, 5, rows - 1], device="cuda")
    wild = ids.clone()
    wild[lost] = torch.tensor([2**31 - 1, -(2**31), 4], dtype=torch.int32, device="cuda")
    leaves = [t.detach().clone().requires_grad_() for t in args]
    got = vx.fused_moe(*leaves, wild)
    torch.autograd.grad(got.float().sum(), leaves)
    torch.cuda.synchronize()
    others = torch.ones(rows, dtype=torch.bool, device="cuda").index_fill(0, lost, False)
    assert_bitwise(got[others], expected[others])
    assert not got[lost].any()


@needs_gpu
def test_a_target_outside_the_vocabulary_gives_nan_and_no_other_token_notices():
    hidden, weight = bf16(5, 64).cuda(), bf16(300, 64, seed=1).cuda()
    target = torch.tensor([0, 300, 299, -1, 2**40], device="cuda")
    got = vx.linear_logprobs(hidden, weight, target)
    expected = vx.linear_logprobs(hidden, weight, target.clamp(0, 299))
    assert got.isnan().tolist() == [False, True, False, True, True]
    assert_bitwise(got[[0, 2]], expected[[0, 2]])


@needs_gpu
def test_a_parameter_that_leaves_no_token_fails_its_row_alone():
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0)).cuda()
    seeds = positions = torch.arange(4, device="cuda")
    good = vx.sample(logits, seeds, positions)
    min_p = torch.tensor([0.0, 7.0, float("nan"), 0.0], device="cuda")
    ids, logprobs, raw = vx.sample(logits, seeds, positions, min_p=min_p)
    assert_bitwise((ids[[0, 3]], logprobs[[0, 3]], raw[[0, 3]]), tuple(g[[0, 3]] for g in good))
    assert ids[1] == -1 and logprobs[1].isnan()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs 2 GPUs, torch sees {torch.cuda.device_count()}")
@pytest.mark.parametrize("name", NAMES)
def test_an_op_runs_on_its_tensors_device_whatever_the_current_one_is(name):
    outs = []
    for index in (0, 1):
        run, args, _, options = called(name, f"cuda:{index}")
        assert torch.cuda.current_device() == 0
        out = run(*args, **options)
        outs.append(args[2:4] if out is None else out if isinstance(out, tuple) else (out,))
        assert all(t.device.index == index for t in outs[-1])
    assert_bitwise(tuple(t.cpu() for t in outs[1]), tuple(t.cpu() for t in outs[0]))
