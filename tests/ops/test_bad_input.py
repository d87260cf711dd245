"""Bad arguments that only a device can meet: tensors of two devices, odd strides, and values that a GPU cannot look at
without making the host wait. None reaches memory that is not its own, and what is right beside them keeps its bits."""

import pytest
import torch

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="no CUDA device is visible to torch")
DEVICES = [("cuda", "cpu")] if GPU else [("cpu", "meta")]  # where an op runs, and where its odd argument is


def bf16(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


# q, k, v, g, beta of gated_delta
DELTA = [bf16(3, 1, 16), bf16(3, 1, 16), bf16(3, 2, 16), -torch.rand(3, 2), torch.rand(3, 2)]
# op -> (tensors, what else it takes)
CASES = {
    "linear": ([bf16(3, 16), bf16(8, 16), bf16(8)], {}),
    "bmm": ([bf16(2, 3, 16), bf16(2, 16, 8)], {}),
    "rmsnorm": ([bf16(3, 16), bf16(16)], {}),
    "rmsnorm_gated": ([bf16(3, 16), bf16(3, 16), bf16(16)], {}),
    "layer_norm": ([bf16(3, 16), bf16(16), bf16(16)], {}),
    "rope": ([bf16(3, 2, 16), bf16(3, 1, 16), bf16(3, 16), bf16(3, 16)], {}),
    "rope_kv_store": (
        [
            *(bf16(2, 2, 16), bf16(2, 1, 16), bf16(2, 1, 16), bf16(2, 16), bf16(2, 16)),
            *(bf16(4, 4, 1, 16), bf16(4, 4, 1, 16), ints(3, 9, dtype=torch.int64)),
        ],
        {},
    ),
    "rope_cos_sin": ([ints(0, 1, dtype=torch.int64), torch.rand(8)], {"dtype": torch.bfloat16}),
    "linear_silu_mul": ([bf16(3, 16), bf16(8, 16), bf16(8)], {}),
    "silu_mul": ([bf16(3, 16), bf16(3, 16)], {}),
    "gelu": ([bf16(3, 16)], {}),
    "sigmoid_mul": ([bf16(3, 16), bf16(3, 16)], {}),
    "causal_conv": ([bf16(3, 16), bf16(16, 4), bf16(16)], {}),
    "causal_conv_paged": (
        [bf16(3, 16), bf16(16, 4), bf16(16), bf16(2, 4, 16), ints(1, 0), ints(2, 9), ints(0, 2, 3)],
        {},
    ),
    "gated_delta_varlen": ([*DELTA, ints(0, 2, 3)], {}),
    "gated_delta_paged": (
        [
            *(*DELTA, torch.zeros(2, 2, 16, 16), bf16(2, 64, 1, 16), torch.zeros(2, 64, 2, 16), torch.zeros(2, 64, 2)),
            *(ints(1, 0), ints(2, 70), ints(0, 2, 3)),
        ],
        {"max_seqlen_q": 2},
    ),
    "delta_gates": ([bf16(3, 4), bf16(3, 4), torch.zeros(4), torch.ones(4)], {}),
    "linear_logits": ([bf16(3, 16), bf16(8, 16)], {}),
    "linear_logprobs": ([bf16(3, 16), bf16(8, 16), ints(0, 1, 2, dtype=torch.int64)], {}),
    "linear_cross_entropy": ([bf16(3, 16), bf16(8, 16), ints(0, 1, 2, dtype=torch.int64)], {}),
    "attention_varlen": ([bf16(3, 2, 16), bf16(3, 1, 16), bf16(3, 1, 16), ints(0, 3)], {"max_seqlen": 3}),
    "attention_paged": (
        [bf16(1, 2, 16), bf16(4, 4, 1, 16), bf16(4, 4, 1, 16), ints(1, 2)[None], ints(5), ints(0, 1)],
        {"max_seqlen_q": 1},
    ),
    "kv_cache_store": (
        [bf16(2, 1, 16), bf16(2, 1, 16), bf16(4, 4, 1, 16), bf16(4, 4, 1, 16), ints(3, 9, dtype=torch.int64)],
        {},
    ),
    "moe_route": ([bf16(3, 8)], {"top_k": 2}),
    "grouped_linear": ([bf16(3, 16), bf16(4, 8, 16), ints(0, 1, 1, 3, 3)], {}),
    "fused_moe": (
        [bf16(3, 16), bf16(4, 16, 16), bf16(4, 16, 8), torch.rand(3, 2), ints(0, 3, 1, 2, 2, 3).view(3, 2)],
        {},
    ),
    "linear_sample": (
        [bf16(3, 16), bf16(8, 16), ints(1, 2, 3, dtype=torch.int64), ints(5, 6, 7, dtype=torch.int64)],
        {},
    ),
    "sample": ([torch.randn(2, 50), ints(1, 2, dtype=torch.int64), ints(5, 6, dtype=torch.int64)], {}),
}


@pytest.mark.parametrize("device,other", DEVICES)
@pytest.mark.parametrize("op", CASES)
def test_a_tensor_on_another_device_is_named(op, device, other):
    tensors, options = CASES[op]
    run = getattr(vx, op)
    run(*(t.to(device) for t in tensors), **options)
    for odd in range(1, len(tensors)):
        mixed = [t.to(other if i == odd else device) for i, t in enumerate(tensors)]
        with pytest.raises(ValueError, match=rf"^{op}: \w+: got device {other}, expected {device}"):
            run(*mixed, **options)


@pytest.mark.parametrize("device", ["cuda" if GPU else "cpu"])
@pytest.mark.parametrize("op", [name for name in CASES if "paged" not in name and "kv" not in name])
def test_strides_do_not_show(op, device):
    """Rows in a wider tensor, columns that lie one after another, every other element: the same bits, or ValueError."""
    tensors, options = CASES[op]
    tensors = [t.to(device) for t in tensors]
    run = getattr(vx, op)

    def outputs(*args):
        out = run(*args, **options)
        return out if isinstance(out, tuple) else (out,)

    expected = outputs(*tensors)
    layouts = {
        "a wider row": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        "columns": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
        "every other element": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
        "an odd beginning": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    }
    for name, layout in layouts.items():
        for odd, tensor in enumerate(tensors):
            args = [layout(t) if i == odd else t for i, t in enumerate(tensors)]
            assert torch.equal(args[odd], tensor)
            try:
                got = outputs(*args)
            except ValueError as error:
                assert str(error).startswith(f"{op}: "), error
                continue
            assert_bitwise(got, expected, f"{op}: argument {odd}: {name}")


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
@pytest.mark.parametrize("op", CASES)
def test_an_op_runs_on_its_tensors_device_whatever_the_current_one_is(op):
    tensors, options = CASES[op]
    outs = []
    for index in (0, 1):
        args = [t.to(f"cuda:{index}") for t in tensors]
        assert torch.cuda.current_device() == 0
        out = getattr(vx, op)(*args, **options)
        outs.append(args[2:4] if out is None else out if isinstance(out, tuple) else (out,))
        assert all(t.device.index == index for t in outs[-1])
    assert_bitwise(tuple(t.cpu() for t in outs[1]), tuple(t.cpu() for t in outs[0]))
