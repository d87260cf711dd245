"""torch.set_default_dtype, which frameworks move while they build models, shows in no op: forward and backward have the
bytes that they have under float32."""

import contextlib
import math

import pytest
import torch
from conftest import SLOW
from op_cases import CASES, NOT_OPS, PARAMS, Inputs, run

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise

DEFAULTS = [torch.bfloat16] if SLOW else [torch.bfloat16, torch.float16, torch.float64]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_every_op_is_here():
    assert {name.split(".")[0] for name in CASES} == {*vx.__all__, "sum"} - NOT_OPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name,device,backend", PARAMS)
def test_the_default_dtype_does_not_show(name, device, backend, dtype):
    expected = run(name, Inputs(dtype, device), backend)
    assert (expected and not all(math.prod(x.shape) == 0 for x in expected)) or name == "mean.empty"
    for default in DEFAULTS:
        inputs = Inputs(dtype, device)
        with default_dtype(default):
            got = run(name, inputs, backend)
        assert_bitwise(got, expected, f"{name} under {default}")


def test_the_default_dtype_comes_back():
    assert torch.get_default_dtype() == torch.float32
