"""What a process does, and says, where a machine knows nothing yet: kernels are compiled before they are verified."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch

from vexact_engine import progress
from vexact_ops._core import admit
from vexact_ops._core.admit import Candidate, Proposal, admitted

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    monkeypatch.delenv("VEXACT_ADMIT", raising=False)
    monkeypatch.setattr(admit, "_decisions", {})
    monkeypatch.setattr(admit, "_compiled", set())


def double(x):
    return 2 * x


CANONICAL, SAME = Candidate("canonical", double, "v1"), Candidate("same", lambda x: x + x, "v1")


def propose(key="k", canonical=CANONICAL):
    return Proposal(key, [SAME], canonical, lambda: [(torch.ones(3),), (torch.ones(5),)])


def test_what_triton_compiles_is_compiled_before_anything_runs(monkeypatch):
    """Of the canonical kernel alone, on the cases; what goes wrong with it decides nothing."""
    said, core = [], pytest.importorskip("vexact_ops._core.triton", reason="needs Triton")

    def ahead(run, calls, device):
        said.append((run, len(calls), device.type))
        raise RuntimeError("no compiler")

    def run(x):
        said.append("ran")
        return double(x)

    monkeypatch.setattr(core, "compile_calls", ahead)
    for key in ("k N=8", "k N=16", "k N=8 bias"):  # what differs in numbers alone has mostly the same kernels
        verdicts, _ = admit._verify(propose(key, Candidate("canonical", run, "v1")), GPU)
        assert verdicts[0].admitted
    ran = ["ran"] * 2
    assert said == [(run, 2, "cuda"), *ran, *ran, (run, 2, "cuda"), *ran]


def test_what_is_not_triton_s_gets_no_tensors_without_memory(monkeypatch):
    from vexact_ops.attention import cuda

    core = pytest.importorskip("vexact_ops._core.triton", reason="needs Triton")
    monkeypatch.setattr(core, "compile_calls", lambda *call: pytest.fail("compiled ahead"))
    verdicts, _ = admit._verify(dataclasses.replace(propose(), ahead=False), GPU)
    assert verdicts[0].admitted
    monkeypatch.setattr(cuda, "_cute", lambda: SimpleNamespace(versions=lambda: "v1"))
    of = CPU, torch.bfloat16, cuda.Shape(2, 64, 64, "causal")
    made = cuda._forward.__wrapped__(*of, None), cuda._paged.__wrapped__(*of, None, 16), cuda._backward.__wrapped__(*of)
    assert not any(proposal.ahead for proposal in made)


def test_nothing_is_verified_while_kernels_are_compiled(monkeypatch, tmp_path):
    core = pytest.importorskip("vexact_ops._core.triton", reason="needs Triton")
    with monkeypatch.context() as patched:
        patched.setattr(core._collecting, "kernels", [])
        decision = admitted(propose(), CPU)
        assert decision.chosen is CANONICAL and not decision.final and not list(tmp_path.rglob("*.json"))
    assert admitted(propose(), CPU).chosen is SAME


def test_what_takes_long_to_verify_is_logged(monkeypatch, caplog):
    caplog.set_level("INFO")
    for long, count in ((60.0, 0), (0.0, 1)):
        monkeypatch.setattr(admit, "_LONG", long)
        admitted(propose(f"longer than {long}"), CPU)
        assert len(caplog.messages) == count
    assert caplog.messages[0].startswith("longer than 0.0: verified in ") and caplog.messages[0].endswith(": same")


def test_a_start_logs_how_far_it_is(monkeypatch, caplog):
    now, drawn = [100.0], []
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    told = progress.logged(lambda *step: drawn.append(step), logging.getLogger("vexact_engine"))
    caplog.set_level("INFO")
    for what, done, seconds in (("forward", 0, 3), ("graphs", 0, 6), ("graphs", 1, 6), ("graphs", 2, 6), ("end", 0, 0)):
        told(what, done, 9, f"{8 << done} rows")
        now[0] += seconds
    assert caplog.messages == [
        "forward: begun",
        "forward: done in 3.0 s",
        "graphs: begun",
        "graphs: 2 of 9, 32 rows, for 12 s now",
        "graphs: done in 18.0 s",
        "end: begun",
    ]
    assert [step[0] for step in drawn] == ["forward", "graphs", "graphs", "graphs", "end"] and drawn[2][1] == 1
