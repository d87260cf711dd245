"""vx.explain and VEXACT_LOG: which kernels compute a call and why, without computing it, and at no cost when off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vexact_ops as vx
from vexact_ops._core import admit
from vexact_ops._core.admit import Candidate, Decision, Verdict
from vexact_ops._core.backend import PROBES
from vexact_ops._core.operator import OPERATORS

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(bool(PROBES["cpu"]()), reason="the compiled extension is missing")


def operands(requires_grad=False):
    x, w = torch.randn(3, 64, dtype=torch.bfloat16), torch.randn(10, 64, dtype=torch.bfloat16)
    return x.requires_grad_(requires_grad), w


def test_a_call_is_named_with_its_backend_and_its_kernel():
    (call,) = vx.explain(vx.linear, *operands())
    assert (call.operator, call.backend) == ("linear", "cpu")
    assert call.tensors == ("bfloat16(3, 64)", "bfloat16(10, 64)")
    assert call.kernels == "linear/cpu.py"


def test_a_backward_pass_is_a_part_of_it():
    x, w = operands(requires_grad=True)
    assert [call.operator for call in vx.explain(vx.linear, x, w)] == ["linear", "linear_dx"]
    assert x.grad is None
    w.requires_grad_()
    found = vx.explain(vx.linear_logprobs, x, w, torch.tensor([1, 2, 3]))
    assert [call.operator for call in found] == ["linear_logprobs", "linear_logprobs_bwd"]


def test_nothing_is_computed_and_nothing_is_written(monkeypatch):
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    caches = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
    vx.explain(vx.kv_cache_store, k, v, *caches, torch.tensor([1, 2, 3]))
    assert not caches[0].any() and not caches[1].any()
    monkeypatch.setattr(OPERATORS["linear"], "impl", lambda *a: pytest.fail("it was computed"))
    vx.explain(vx.linear, *operands())


def test_what_a_room_decides_is_shown_with_every_verdict(monkeypatch):
    from vexact_ops.linear import cpu as module

    def hook(op, x, weight, bias, out_dtype):
        assert op == "linear" and x.shape == (3, 64) and bias is None and out_dtype == torch.bfloat16
        verdicts = (
            Verdict("slow", 0, 9.0),
            Verdict("split", 7),
            Verdict("fast", 0, 2.0),
            Verdict("none", None, error="no"),
        )
        return [("product", Decision("M<=8", Candidate("fast", None), "the fastest of 2", verdicts))]

    monkeypatch.setattr(module, "explain", hook, raising=False)
    found = vx.explain(vx.linear, *operands())
    assert found.kernels == ["fast"]
    assert repr(found).splitlines() == [
        "linear, backend cpu: bfloat16(3, 64), bfloat16(10, 64)",
        "  product: fast",
        "    because the fastest of 2",
        "    key M<=8",
        "    equal   fast, 2.0 us",
        "    equal   slow, 9.0 us",
        "    refused split: 7 elements differ",
        "    refused none: no",
    ]
    assert str(found) == repr(found)


def test_what_cannot_be_explained_says_so():
    with pytest.raises(ValueError, match="'sin' called none of vexact's operators"):
        vx.explain(torch.sin, torch.ones(3))
    with pytest.raises(TypeError, match="explain: op: got str, expected a function"):
        vx.explain("linear", *operands())
    with pytest.raises(ValueError, match="linear: weight: got shape"):
        vx.explain(vx.linear, torch.ones(3, 4), torch.ones(3, 5))


def test_every_operator_belongs_to_a_room():
    vx.numerics("cpu")  # imports them all
    for operator in OPERATORS.values():
        assert operator.room in {p.parent.name for p in (ROOT / "vexact_ops").glob("*/op.py")} | {"patch"}
        assert operator.has_backend or operator.room == "patch"


def test_a_decision_that_was_just_made_is_told_to_whoever_watches(monkeypatch, tmp_path):
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    monkeypatch.setattr(admit, "_decisions", {})
    seen = []
    monkeypatch.setattr(admit, "watchers", [seen.append])
    run = Candidate("c", lambda x: x + 1, "1")
    proposal = admit.Proposal("k", [Candidate("a", lambda x: x + 1, "1")], run, lambda: [(torch.ones(2),)])
    for _ in range(2):
        admit.admitted(proposal, "cpu")
    assert [d.chosen.name for d in seen] == ["a"]


CALLS = """
import torch
import vexact_ops as vx
from vexact_ops._core.operator import OPERATORS
x = torch.ones(3, 64, dtype=torch.bfloat16, requires_grad=True)
w = torch.ones(10, 64, dtype=torch.bfloat16)
vx.linear(x, w).sum().backward()
vx.rmsnorm(x.detach(), w[0])
print([hasattr(o.impl, "__wrapped__") for o in OPERATORS.values()].count(True))
"""


def logged(code, level, **more):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **more}
    env.pop("VEXACT_LOG", None)
    if level is not None:
        env["VEXACT_LOG"] = level
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=600)


def test_a_line_for_each_call():
    done = logged(CALLS, "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "vexact linear cpu [linear/cpu.py] bfloat16(3, 64) bfloat16(10, 64)",
        "vexact linear_dx cpu [linear/cpu.py] bfloat16(3, 10) bfloat16(10, 64)",
        "vexact rmsnorm cpu [rmsnorm/cpu.py] bfloat16(3, 64) bfloat16(64,)",
    ]
    more = logged(CALLS, "2").stderr.splitlines()
    assert len(more) == 3 and "strides and bytes off 16: (64, 1)+" in more[0] and "one kernel" in more[0]


@pytest.mark.parametrize("level", [None, "", "0"])
def test_where_it_is_off_nothing_is_in_the_way_of_a_call(level):
    done = logged(CALLS, level)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


def test_a_failing_explanation_stops_no_run():
    broken = "from vexact_ops.linear import cpu as c\ndef explain(*a):\n  raise KeyError('x')\nc.explain = explain\n"
    done = logged(broken + CALLS, "1")
    assert done.returncode == 0 and "vexact linear: it could not be explained (KeyError: 'x')" in done.stderr


def test_another_level_is_refused():
    done = logged("import vexact_ops as vx; vx.linear", "loud")
    assert done.returncode and "VEXACT_LOG: got 'loud', expected 0 (nothing), 1" in done.stderr
