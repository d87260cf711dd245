"""Every op on a GPU that is not the current one: the bits of the first GPU, on the operands' own device. Sizes that
third parties' and other fast kernels serve are among them."""

import pytest
import torch
from op_cases import CASES, FP32, INT32, Inputs, run

from vexact_ops.testing import assert_bitwise

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")


def paged(i, tokens, **options):
    ends = [0, tokens, 2 * tokens]
    return (
        (
            *(i.new(2 * tokens, 8, 128), i.new(16, 64, 2, 128), i.new(16, 64, 2, 128)),
            torch.arange(15, -1, -1, dtype=INT32, device=i.device).view(2, 8),
            *(i.ints(500, 130, dtype=INT32), i.ints(*ends, dtype=INT32), tokens),
        ),
        options,
    )


LARGE = {
    **{
        f"linear.{rows}": ("linear", lambda i, rows=rows: ((i.new(rows, 1024), i.new(512, 1024), i.new(512)), {}))
        for rows in (1, 16, 40, 200)
    },
    **{
        f"grouped_linear.{rows}": (
            "grouped_linear",
            lambda i, rows=rows: (
                (i.new(rows, 512), i.new(4, 520, 512), i.ints(0, rows // 3, rows // 3, rows - 1, rows, dtype=INT32)),
                {},
            ),
        )
        for rows in (3, 40, 700)
    },
    **{
        f"fused_moe.{tokens}": (
            "fused_moe",
            lambda i, tokens=tokens: (
                (
                    *(i.new(tokens, 512), i.new(8, 1024, 512), i.new(8, 512, 512)),
                    i.new(tokens, 2, dtype=FP32, least=0.1),
                    torch.arange(2 * tokens, dtype=INT32, device=i.device).view(tokens, 2) % 7,
                ),
                {},
            ),
        )
        for tokens in (2, 300)
    },
    "linear_logprobs.large": (
        "linear_cross_entropy",
        lambda i: (
            (i.new(70, 1024), i.new(4096, 1024), torch.arange(70, device=i.device) * 58),
            {"return_entropy": True},
        ),
    ),
    "linear_cross_entropy.large": (
        "linear_cross_entropy",
        lambda i: ((i.new(70, 1024), i.new(4096, 1024), torch.arange(70, device=i.device) * 58), {}),
    ),
    "rmsnorm.large": ("rmsnorm", lambda i: ((i.new(70, 4096), i.new(4096)), {})),
    "linear_silu_mul.few": (
        "linear_silu_mul",
        lambda i: ((i.new(5, 1024).detach(), i.new(1024, 1024).detach()), {}),
    ),
    "silu_mul.large": ("silu_mul", lambda i: ((i.new(70, 4096),), {})),
    **{
        f"attention_varlen.{dim}": (
            "attention",
            lambda i, dim=dim: (
                (i.new(300, 8, dim), i.new(300, 2, dim), i.new(300, 2, dim), i.ints(0, 100, 300, dtype=INT32), 200),
                {},
            ),
        )
        for dim in (64, 128, 256)
    },
    "attention_paged.decode": ("attention", lambda i: paged(i, 1)),
    "attention_paged.segments": ("attention", lambda i: paged(i, 1, kv_segment=128)),
    "attention_paged.chunk": ("attention", lambda i: paged(i, 60)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_another_gpu_than_the_current_one(name, dtype, monkeypatch):
    if name in LARGE:
        monkeypatch.setitem(CASES, name, LARGE[name])
    results = []
    with torch.cuda.device(0):
        for device in ("cuda:1", "cuda:0"):  # the one that is not current first: nothing was compiled or chosen yet
            found = run(name, Inputs(dtype, device), None)
            assert all(x.device == torch.device(device) for x in found if x.is_cuda)
            assert torch.cuda.current_device() == 0
            results.append([x.cpu() for x in found])
        for index in range(2):
            torch.cuda.synchronize(index)
    assert len(results[0]) == len(results[1]) > 0
    for ours, expected in zip(*results):
        assert_bitwise(ours, expected, name)


@pytest.mark.parametrize("rows", [16, 200])
def test_a_graph_on_another_gpu(rows):
    import vexact_ops as vx

    x, w = (torch.randn(n, 1024, device="cuda:1").bfloat16() for n in (rows, 512))
    experts, offsets = w.view(4, 128, 1024), torch.tensor([0, 3, 3, 9, rows], dtype=INT32, device="cuda:1")

    def both():
        return vx.linear(x, w), vx.grouped_linear(x, experts, offsets)

    with torch.cuda.device(1):
        expected = both()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = both()
    with torch.cuda.device(0):
        graph.replay()
        torch.cuda.synchronize(1)
    assert_bitwise(found[0], expected[0])
    assert_bitwise(found[1], expected[1])
