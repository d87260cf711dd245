"""vx.explain and VEXACT_LOG: which kernels compute a call and why, without computing it, and at no cost when off."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from op_cases import CASES, NO_GRADIENT, PARAMS, Inputs

import vexact_ops as vx
from vexact_ops._core import admit, gpu
from vexact_ops._core import explain as explaining
from vexact_ops._core.admit import Candidate, Decision, Verdict
from vexact_ops._core.backend import PROBES, ROOMS
from vexact_ops._core.registry import OPERATORS

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


def calls_of(make, device, **options):
    """The calls of operators behind a case, forward and backward, of none of which anything is computed."""
    with explaining._Recording() as recorded:
        op, args, more = make
        found = getattr(vx, op)(*args, **more, **options)
        outputs = [t for t in admit.tensors_of(found) if t.requires_grad]
        inputs = [t for t in admit.tensors_of([list(args), list(more.values())]) if t.requires_grad]
        if outputs and inputs:
            torch.autograd.grad(outputs, inputs, [torch.empty_like(t) for t in outputs], allow_unused=True)
    return recorded.calls


def without_gradients(name, args, options):
    """The arguments, without gradients where the op has none."""
    if NO_GRADIENT.isdisjoint((name, name.split(".")[0])):
        return args, options
    kept = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    return kept, {key: o.detach() if isinstance(o, torch.Tensor) else o for key, o in options.items()}


@pytest.mark.parametrize("name,device,backend", PARAMS)
def test_every_case_is_explained(name, device, backend):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    args, options = without_gradients(name, *CASES[name][1](Inputs(dtype, device)))
    found = vx.explain(getattr(vx, name.split(".")[0]), *args, **options, backend=backend)
    assert all(call.parts for call in found if call.backend != "torch") and str(found)


# What the small cases of op_cases.py leave out: operands wide enough for kernels that are chosen by their sizes.
WIDE = {
    "linear": lambda i: ((i.new(5, 640), i.new(320, 640)), {}),
    "linear_silu_mul": lambda i: ((i.new(5, 640).detach(), i.new(320, 640).detach()), {}),
    "grouped_linear": lambda i: ((i.new(6, 512), i.new(3, 256, 512), i.ints(0, 2, 2, 6, dtype=torch.int32)), {}),
    "linear_sample": lambda i: (
        (i.new(4, 64).detach(), i.new(300, 64).detach(), i.ints(1, 2, 3, 4), i.ints(5, 6, 7, 8)),
        {},
    ),
    "linear_logprobs": lambda i: ((i.new(4, 64), i.new(300, 64), i.ints(0, 7, 299, 3)), {}),
    "fused_moe": lambda i: (
        (
            *(i.new(5, 512), i.new(4, 512, 512), i.new(4, 512, 256), i.new(5, 2, dtype=torch.float32, least=0.1)),
            torch.arange(10, dtype=torch.int32, device=i.device).view(5, 2) % 4,
        ),
        {},
    ),
    "attention_varlen": lambda i: (
        (*(i.new(1200, heads, 64) for heads in (4, 2, 2)), i.ints(0, 1200, dtype=torch.int32), 1200),
        {},
    ),
    "attention_varlen.latent": lambda i: (
        (i.new(9, 2, 576), i.new(9, 1, 576), i.new(9, 1, 512), i.ints(0, 9, dtype=torch.int32), 9),
        {},
    ),
    "attention_paged.decode": lambda i: (paged(i, 1), {"settled": True}),
    "attention_paged": lambda i: (paged(i, 1200), {}),
    "attention_paged.few": lambda i: (paged(i, 9), {"settled": True}),
}


def paged(i, queries):
    caches = (i.new(80, 16, 2, 64).detach() for _ in range(2))
    table = torch.arange(80, dtype=torch.int32, device=i.device).view(1, 80)
    ends = i.ints(0, queries, dtype=torch.int32)
    return (i.new(queries, 4, 64).detach(), *caches, table, i.ints(1200, dtype=torch.int32), ends, queries)


@pytest.fixture
def as_on_an_sm90(monkeypatch):
    """Rooms route as they do on such a GPU: only what it is and what is verified on it are made up."""
    rooms = {name: importlib.import_module(f"vexact_ops.{name}.cuda") for name in WITH_ROUTES}
    asked = []

    def decided(name):
        def decide(device, *of):
            asked.append(name)
            return Decision(f"{name} {of}", Candidate("verified", None), "it was verified")

        return decide

    def admitted(proposal, device):
        asked.append("product")
        return Decision(proposal.key, Candidate("verified", None), "it was verified")

    monkeypatch.setattr(gpu, "_capability", lambda device: (9, 0))
    for room in ("linear", "grouped_linear"):
        monkeypatch.setattr(rooms[room], "admitted", admitted)
        monkeypatch.setattr(rooms[room].Product, "proposal", lambda self: SimpleNamespace(key=self.key))
    monkeypatch.setattr(rooms["linear"], "_takes", lambda a, b, b_t, bias, out: a.shape[1] % 8 == 0)
    monkeypatch.setattr(rooms["attention"], "_cute", lambda: "installed")
    for room, names in WITH_ROUTES.items():
        for name in names:
            monkeypatch.setattr(rooms[room], name, decided(name))
    return asked


WITH_ROUTES = {
    "attention": ("_forward", "_paged", "_few", "_backward"),
    "linear": (),
    "grouped_linear": (),
    "linear_silu_mul": ("_decision",),
    "linear_sample": ("_draws",),
    "linear_cross_entropy": ("_heads",),
    "fused_moe": ("_planning", "_rows", "_combining", "_gating"),
    "gated_delta": ("_decision",),
}


@pytest.mark.parametrize("name", [*CASES, *(f"{name} wide" for name in WIDE)])
def test_every_case_is_explained_as_on_a_gpu(name, as_on_an_sm90):
    """Which kernels each GPU backend of its room would take, from just what the operators are given."""
    name, _, wide = name.partition(" ")
    op, make = name.split(".")[0], WIDE[name] if wide else CASES[name][1]
    for dtype in (torch.bfloat16, torch.float32):
        args, options = without_gradients(name, *make(Inputs(dtype, "cpu")))
        calls = calls_of((op, args, options), "cpu", backend="cpu")
        assert calls
        for operator, given in calls:
            if not OPERATORS[operator].has_backend:
                continue
            for backend in ROOMS[OPERATORS[operator].room].cuda:
                if backend == "cute":
                    continue  # its module imports what is not here
                call = explaining.described(operator, (*given[:-1], backend))
                assert call.parts and all(decision.chosen.name and decision.why for _, decision in call.parts), call
    if wide and op != "attention_varlen":
        assert as_on_an_sm90 or "decode" in name, "no kernel was chosen by its sizes: this case is too small for that"


def test_what_dispatch_asks_for_is_what_is_explained(as_on_an_sm90):
    """A decode of one query takes our kernel, a chunk of it flash-attn-4's, and latent attention its own."""

    def kernels(name):
        args, options = WIDE[name](Inputs(torch.bfloat16, "cpu"))
        args = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
        ((operator, given),) = calls_of((name.split(".")[0], args, options), "cpu", backend="cpu")
        return explaining.described(operator, (*given[:-1], "cuda")).kernels

    assert kernels("attention_paged.decode") == "flash" and kernels("attention_varlen.latent") == "flash, latent"
    assert kernels("attention_paged") == kernels("attention_paged.few") == kernels("attention_varlen") == "verified"


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
from vexact_ops._core.registry import OPERATORS
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
    broken = "from vexact_ops.linear import cpu as c\n"
    broken += "def explain(*a, **k):\n  raise KeyError('x')\nc.explain = explain\n"
    done = logged(broken + CALLS, "1")
    assert done.returncode == 0 and "vexact linear: it could not be explained (KeyError: 'x')" in done.stderr


def test_another_level_is_refused():
    done = logged("import vexact_ops as vx; vx.linear", "loud")
    assert done.returncode and "VEXACT_LOG: got 'loud', expected 0 (nothing), 1" in done.stderr
