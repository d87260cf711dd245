"""gated_delta on SM90: kernels of whole sequences and of the backward have the canonical bits at true sizes."""

import functools
import itertools

import pytest
import torch
from test_gated_delta import rows_of, train

from vexact_ops.testing import assert_bitwise


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("batch", [1, 40], ids=["few blocks", "more than run at once"])
def test_kernels_of_whole_sequences_have_the_canonical_bits(dtype, batch):
    """Outputs, states and gradients of 128 x 128 heads: of chunks that are whole and that are not, of none."""
    lengths = [1, 64, 200, 0, 63, 129] * batch
    rows = rows_of(sum(lengths), (2, 4), (128, 128), dtype, "cuda", 15)
    draw = torch.Generator().manual_seed(1)
    initial, dfinal = (torch.randn(len(lengths), 4, 128, 128, generator=draw).cuda() for _ in range(2))
    dout = torch.randn(rows[2].shape, generator=draw).to("cuda", dtype)

    def run(backend):
        leaves = [x.clone().requires_grad_() for x in (*rows, initial)]
        out = train(leaves[:5], lengths, backend, initial_state=leaves[5])
        return *out, *torch.autograd.grad(out, leaves, (dout, dfinal))

    assert_bitwise(run("cuda"), run("triton"))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
)
@pytest.mark.parametrize("blocks", ["few", "crowded", "sparse"])
@pytest.mark.parametrize("part", ["decode", "step", "chunks", "whole", "backward"])
def test_every_kernel_has_the_canonical_bits(part, blocks):
    """Those too that a race leaves aside, on what admission tries them on."""
    from vexact_ops.gated_delta import cuda

    how = blocks != "few", blocks == "sparse"
    for case in cuda._cases(torch.device("cuda", 0), part, torch.bfloat16, 2, 4, 128, 128, True, *how):
        expected = cuda._verified(part, "triton", *case)
        for tile in cuda.TILES[part]:
            assert_bitwise(cuda._verified(part, f"sm90 {part} {tile}", *case), expected)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
)
@pytest.mark.parametrize("few", [1, 2, 4])
@pytest.mark.parametrize("part", ["decode", "step"])
def test_every_kernel_of_few_rows_has_the_canonical_bits(part, few):
    """On what admission tries them on, and at each place in a chunk."""
    from vexact_ops.gated_delta import cuda

    device, names = torch.device("cuda", 0), [f"sm90 {part} {tile}" for tile in cuda.TILES[part]]
    for case in cuda._cases(device, part, torch.float16, 2, 4, 128, 128, True, False, False, few):
        expected = cuda._verified(part, "triton", *case)
        for name in names:
            assert_bitwise(cuda._verified(part, name, *case), expected)
    rows, memory, (slots, _, offsets, _), *rest = case
    for place in range(64):
        step = slots, torch.full_like(slots, 65 + place), offsets, 0
        expected = cuda._verified(part, "triton", rows, memory, step, *rest)
        for name in names:
            assert_bitwise(cuda._verified(part, name, rows, memory, step, *rest), expected, f"{place}")


def test_chunks_beside_many_single_rows_are_raced_apart(monkeypatch):
    from vexact_ops.gated_delta import cuda

    seen = []
    monkeypatch.setattr(cuda, "_decision", lambda *of: seen.append(of[-2:]))
    monkeypatch.setattr(cuda.gpu, "not_sm90", lambda device: None)
    monkeypatch.setattr(cuda.gpu, "multiprocessors", lambda device: 132)
    for part, rows, sequences in [("chunks", 2048, 256), ("chunks", 2048, 64), ("chunks", 9, 2), ("whole", 512, 256)]:
        q, v = torch.zeros(rows, 16, 128, dtype=torch.bfloat16), torch.zeros(rows, 32, 128, dtype=torch.bfloat16)
        cuda.route(cuda.Call.of(part, q, q, v, True, sequences))
    assert seen == [(True, True), (True, False), (False, False), (True, False)]
    cuda.admit(16, 32, 128, 128, torch.bfloat16, "cpu")
    assert (True, True) in seen


def test_a_name_says_which_way_sequences_go():
    from vexact_ops.gated_delta import cuda

    for part in cuda.CHUNKS, cuda.WHOLE, cuda.BACKWARD:
        assert [tile for tile in cuda.TILES[part] if cuda._wide(f"sm90 {part} {tile}")] == ["32 wide"]


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an SM90 GPU"
)
@pytest.mark.parametrize("before", [0, 64, 128, 40])
@pytest.mark.parametrize("lengths", [(64,), (1, 0, 2), (63, 64, 65, 0, 300), (700,), (1, 1, 1, 200, 1, 64)], ids=str)
def test_prefills_by_whole_sequences_have_the_bits_of_chunks(lengths, before):
    """From a chunk's start with a state or without one, within a chunk, without a slot; single rows, which are left."""
    from vexact_ops.gated_delta import cuda

    hk, hv, d, count, tokens = 2, 4, 128, len(lengths), sum(lengths)
    new = functools.partial(torch.randn, generator=torch.Generator("cuda").manual_seed(count), device="cuda")
    q, k, v = (new(tokens, heads, d).bfloat16() for heads in (hk, hk, hv))
    g, beta = -0.1 * new(tokens, hv).abs(), new(tokens, hv).sigmoid().bfloat16()
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    slots = torch.arange(count, 0, -1, dtype=torch.int32, device="cuda")
    if before == 128:
        slots[-1] = -1
    held = new(count + 1, hv, d, d), new(count + 1, 64, hk, d).bfloat16(), new(count + 1, 64, hv, d)
    memory = *held, -new(count + 1, 64, hv).abs()

    def run(name, singles=0):
        out, memory_of_it = torch.zeros_like(v), [t.clone() for t in memory]
        step = slots, offsets.diff() + before, offsets, singles
        cuda._paged("chunks", name, q, k, v, g, beta, memory_of_it, step, 0.3, True, out)
        return out, *memory_of_it

    expected = run("sm90 chunks 32")
    for singles in range(next(i for i, length in enumerate(lengths) if length != 1) + 1):
        assert_bitwise(run("sm90 chunks 32 wide", singles), expected)
        assert_bitwise(run("sm90 chunks 32", singles), expected)
