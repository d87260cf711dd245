"""gated_delta on SM90: kernels of whole sequences and of the backward have the canonical bits at true sizes."""

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
@pytest.mark.parametrize("crowded", [False, True], ids=["few blocks", "more than run at once"])
@pytest.mark.parametrize("part", ["decode", "chunks", "whole", "backward"])
def test_every_kernel_has_the_canonical_bits(part, crowded):
    """Those too that a race leaves aside, on what admission tries them on."""
    from vexact_ops.gated_delta import cuda

    for case in cuda._cases(torch.device("cuda", 0), part, torch.bfloat16, 2, 4, 128, 128, True, crowded):
        expected = cuda._verified(part, "triton", *case)
        for tile in cuda.TILES[part]:
            assert_bitwise(cuda._verified(part, f"sm90 {part} {tile}", *case), expected)
