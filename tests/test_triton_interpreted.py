"""The Triton kernels on a machine without a GPU: a few small cases of every room, and the engine's, in the interpreter.

It needs processes of its own, since Triton reads TRITON_INTERPRET where a kernel is defined. `TRITON_INTERPRET=1 pytest
tests/ops -k cpu-triton` runs all that the rooms' tests say of these kernels; on a GPU they run compiled, without it.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

TESTS = Path(__file__).parent
FEW = (
    "cpu-triton and (alone or gpu or tile) and not fp16 and not (gradients_of_a_sequence and fp32)"
    " and not (test_tokens_stand_alone and (gelu_tanh or fp32))"
    " and not (test_gated_delta and not"
    " (a_slot_is or gates or no_slot or without_rows or (any_split or come_first) and bf16"
    " or against_float64 and no-norm))"
    " or cpu-triton and default_dtype_does_not_show and bf16"
    " or cpu-triton and (test_step_kernels or test_masters)"
    " or cpu-triton and (reads_its_own_axis or own_image and 72 and bf16)"
    " or cpu-triton and (steps_along or several_trees and 2049 or left_the_window and sinks and d80 and bf16)"
)
# Three items that take about as long: a process takes five seconds to begin, and as many run side by side on two cores.
FEW_ROOMS = {
    "with attention": ("attention", "fused_moe", "limits", "linear_cross_entropy"),
    "with the engine": ("causal_conv", "gated_delta"),
}
ROOMS = {path.stem.removeprefix("test_") for path in (TESTS / "ops").glob("test_*.py")}
FILES = {what: [f"ops/test_{room}.py" for room in rooms] for what, rooms in FEW_ROOMS.items()}
FILES["with the engine"] += ["test_default_dtype.py", "engine/test_step_kernels.py", "engine/test_masters.py"]
FILES["others"] = [f"ops/test_{room}.py" for room in sorted(ROOMS.difference(*FEW_ROOMS.values()))]


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreted run")
@pytest.mark.parametrize("rooms", FILES)
def test_the_triton_kernels_in_the_interpreter(rooms):
    env = {**os.environ, "TRITON_INTERPRET": "1", "VEXACT_EXAMPLES": "2", "CI": "1"}
    paths = [str(TESTS / name) for name in FILES[rooms]]
    command = [sys.executable, "-m", "pytest", *paths, "-n", "0", "-x", "-k", FEW]
    done = subprocess.run(command, cwd=TESTS.parent, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " failed" not in done.stdout, done.stdout[-6000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name, a, b", [("add", 2**31 - 1, 1), ("sub", -(2**31), 1), ("mul", 1 << 16, 1 << 15)])
def test_an_integer_that_leaves_its_type_is_found(name, a, b):
    import interpreter
    import numpy as np
    import triton.language as tl

    def tensor(value):
        return tl.tensor(interpreter.TensorHandle(np.array([value], dtype=np.int32), tl.int32), tl.int32)

    check = interpreter._binary_op_sanitize_overflow_impl
    operation = SimpleNamespace(__name__=name)
    check(None, tensor(a), tensor(0), operation)
    with pytest.raises(AssertionError, match="int32 overflow"):
        check(None, tensor(a), tensor(b), operation)


def test_every_room_is_among_them():
    found = [name for names in FILES.values() for name in names if name.startswith("ops/")]
    assert sorted(found) == sorted(f"ops/{path.name}" for path in (TESTS / "ops").glob("test_*.py"))
