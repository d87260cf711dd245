"""flash-attn-4's backward in an order of our own: what its gradients depend on, and what not."""

import shutil

import pytest
import torch

from vexact_ops.testing import assert_bitwise, attention_inputs, offsets, same_bits, tricky

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]
LENGTHS = [700, 1, 64, 333]


@pytest.fixture
def gradients(monkeypatch, tmp_path):
    """Makes them with kernels compiled anew."""
    cute = pytest.importorskip("vexact_ops.attention.cute")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("flash-attn-4's kernels here are for SM90")
    from vexact_ops.attention import cute_objects

    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))  # what a test compiles is not for others

    def make(d, causal):
        monkeypatch.setattr(cute_objects, "_kernels", {})
        shutil.rmtree(tmp_path / "kernels", ignore_errors=True)
        q, k, v = attention_inputs(LENGTHS, 4, 2, d, d, seed=3, dtype=torch.bfloat16, device="cuda")
        out, dout = (tricky(*q.shape, seed=i, dtype=torch.bfloat16, device="cuda") for i in (1, 2))
        lse, cu = torch.full((4, len(q)), 9.0, dtype=torch.float32, device="cuda"), offsets(LENGTHS, "cuda")
        return cute.backward(dout, q, k, v, out, lse, cu, cu, 0.1, causal, None)

    return make


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_any_number_of_warps_adds_up_the_same_dq(gradients, d, causal, monkeypatch):
    from vexact_ops.attention.cute_backward_kernel import Backward

    expected = gradients(d, causal)
    monkeypatch.setattr(Backward, "adders", Backward.adders - 1)
    assert_bitwise(gradients(d, causal), expected)


def test_blocks_of_keys_cut_the_sums_of_dq_and_no_other(gradients, monkeypatch):
    from vexact_ops.attention import cute_backward

    dq, *others = gradients(256, True)
    monkeypatch.setattr(cute_backward, "WIDE", None)  # flash-attn-4's own tiles, of 48 keys, and its loop
    dq_2, *others_2 = gradients(256, True)
    assert_bitwise(others_2, others)
    assert not same_bits(dq_2, dq), "these inputs do not tell orders apart"
