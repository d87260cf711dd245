"""delta_gates: beta as it is stored; the rest is in test_gated_delta.py."""

import pytest
import torch
from test_gated_delta import BACKENDS, DTYPES, gate_inputs

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise


@BACKENDS
@DTYPES
@pytest.mark.parametrize("rows", [1, 70, 1030])
def test_a_wide_beta_is_a_rounded_one(device, backend, dtype, rows):
    """As .float() of it, and so are its gradients."""
    a, b, dg, dbeta, *weights = gate_inputs(rows, 5, dtype, device, 4)
    found = []
    for kind in (None, torch.float32):
        own = [x.clone().requires_grad_() for x in (a, b, *weights)]
        g, beta = vx.delta_gates(*own, beta_dtype=kind, backend=backend)
        assert beta.dtype == (kind or dtype) and beta.is_contiguous()
        slopes = torch.autograd.grad((g, beta.float()), own, (dg, dbeta.float()))
        found.append([g.detach(), beta.detach().float(), *slopes])
    assert_bitwise(*found)


def test_another_beta_is_refused():
    a, b, _, _, *weights = gate_inputs(3, 4, torch.float32, "cpu", 0)
    with pytest.raises(TypeError, match=r"^delta_gates: beta_dtype: got torch\.bfloat16, expected torch\.float32 or"):
        vx.delta_gates(a, b, *weights, beta_dtype=torch.bfloat16)
