"""What flash-attn-4's backward is given beside its tensors: our kernel's sums are in the order that it says, in the
places that flash-attn-4 has for them, and nothing else is touched."""

import itertools

import pytest
import torch
from conftest import room_backends

from vexact_ops.testing import assert_bitwise, offsets, tricky

KERNELS = pytest.mark.parametrize("device,backend", room_backends("attention", "triton"))
LEFT = 3.0  # what stands where nothing is written


def prepared(out, dout, lse, cu, rows, fused, width):
    from vexact_ops.attention.triton_prepare import prepare

    blocks, heads = -(-(out.shape[0] + len(cu) * rows) // rows), out.shape[1]
    lse_2, dpsum = torch.full((2, heads, blocks * rows), LEFT, device=out.device)
    sums = torch.full((heads, blocks * rows * width), LEFT, device=out.device)
    prepare(out, dout, lse, cu, lse_2, dpsum, sums, rows, fused)
    return lse_2, dpsum, sums


def expected(out, dout, lse, ends, rows, fused, width):
    blocks, heads = -(-(out.shape[0] + len(ends) * rows) // rows), out.shape[1]
    lse_2, dpsum = torch.full((2, heads, blocks * rows), LEFT)
    sums = torch.full((heads, blocks * rows, width), LEFT)
    pieces = (x.float().unflatten(-1, (-1, 8)) for x in (out, dout))
    a, b = pieces
    total = torch.zeros(a.shape[:-1])
    for i in range(8):
        if fused:  # the product of 16-bit values is exact in float64, and their sum here
            total = (total.double() + a[..., i].double() * b[..., i].double()).float()
        else:
            total = total + a[..., i] * b[..., i]
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    binary = torch.where(lse == -torch.inf, 0.0, lse * 1.4426950408889634)
    for i, (low, end) in enumerate(itertools.pairwise(ends)):
        at = (low + i * rows) // rows * rows
        whole = slice(at, at - (low - end) // rows * rows)
        dpsum[:, whole], lse_2[:, whole], sums[:, whole] = 0.0, torch.inf, 0.0
        dpsum[:, at : at + end - low], lse_2[:, at : at + end - low] = total[low:end, :, 0].t(), binary[:, low:end]
    return lse_2, dpsum, sums.flatten(1)


@KERNELS
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("dv, rows", [(128, 64), (64, 128)])
def test_rows_are_summed_alone_and_stand_where_their_sequence_begins(device, backend, dv, rows, fused, monkeypatch):
    from vexact_ops.attention import triton_prepare

    lengths = [rows + 1, 0, 1, 2 * rows, 30]
    monkeypatch.setattr(triton_prepare, "SEARCH", 2 if fused else 64)  # fewer than there are, and more
    heads, tokens = 2, sum(lengths)
    out = tricky(heads, tokens, dv, seed=1, dtype=torch.bfloat16).transpose(0, 1)  # heads apart, as a caller may have
    dout = tricky(tokens, heads, dv, seed=2, dtype=torch.bfloat16)
    dout[:, :, dv // 2 :], out[:, :, dv // 2 :] = -dout[:, :, : dv // 2].flip(2), out[:, :, : dv // 2].flip(2)
    largest = torch.finfo(torch.bfloat16).max  # products of 16-bit values are exact, but for what fp32 cannot hold
    out[3, 0, :2], dout[3, 0, :2] = largest, torch.tensor([-largest, largest])
    lse = tricky(heads, tokens, seed=3)
    lse[0, 5], lse[1, 2] = -torch.inf, torch.nan
    cu = offsets(lengths, device)
    got = prepared(*(x.to(device) for x in (out, dout, lse)), cu, rows, fused, dv)
    want = expected(out, dout, lse, cu.tolist(), rows, fused, dv)
    assert_bitwise([x.cpu() for x in got], list(want))
    other = expected(out, dout, lse, cu.tolist(), rows, not fused, dv)
    assert torch.isnan(other[1]).sum() != torch.isnan(want[1]).sum(), "these rows do not tell fused from plain"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_gradients_are_the_same_whichever_kernel_is_before_them(monkeypatch):
    cute = pytest.importorskip("vexact_ops.attention.cute")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("flash-attn-4's kernels here are for SM90")
    from vexact_ops._core.admit import canonical_by_rule
    from vexact_ops.testing import attention_inputs

    q, k, v = attention_inputs([700, 1, 64], 4, 2, 128, 128, seed=3, dtype=torch.bfloat16, device="cuda")
    out, dout = (tricky(*q.shape, seed=i, dtype=torch.bfloat16, device="cuda") for i in (1, 2))
    lse, cu = torch.full((4, len(q)), 9.0, device="cuda"), offsets([700, 1, 64], "cuda")
    before = cute.cute_backward
    decision = before.prepared_by(q.device, q.dtype, 128, 128, True)
    found = []
    for name in [v.candidate for v in decision.verdicts if v.admitted]:
        monkeypatch.setattr(before, "prepared_by", lambda *_, name=name: canonical_by_rule(name, "it is asked for"))
        found.append(cute.backward(dout, q, k, v, out, lse, cu, cu, 0.1, True, None))
    for one in found[1:]:
        assert_bitwise(one, found[0])
