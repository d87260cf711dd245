"""Admission: what differs in one bit, or fails in any way, is never used; verdicts persist for as long as they hold."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forks
import pytest
import torch

from vexact_ops._core import admit
from vexact_ops._core.admit import Candidate, Proposal, admitted, decided, race_on_gpu
from vexact_ops._core.proof.inputs import SPECIAL, special_rows
from vexact_ops.testing import cancelling

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of its own for every test, and a process that knows nothing yet; call it to know nothing again."""
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VEXACT_ADMIT", raising=False)
    monkeypatch.setattr(admit, "_decisions", {})

    def forget():
        admit._decisions.clear()
        return sorted((tmp_path / "cache").rglob("*.json"))

    return forget


def product(x, w):
    acc = torch.zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):
        acc += x[:, k, None].float() * w[None, :, k].float()
    return acc


def split(x, w):
    half = x.shape[1] // 2
    return product(x[:, :half], w[:, :half]) + product(x[:, half:], w[:, half:])


def raising(error):
    def run(x, w):
        raise error

    return run


def cases():
    return [cancelling(rows, 64, 8, seed=rows) for rows in (1, 5)]


CANONICAL = Candidate("canonical", product, "v1")
SAME, SPLIT = Candidate("same", lambda x, w: product(x, w), "v1"), Candidate("split", split, "v1")


def propose(*candidates, key="k", canonical=CANONICAL, cases=cases, race=None):
    return Proposal(key, candidates, canonical, cases, race)


def never():
    pytest.fail("verified again")


def test_only_equal_bytes_are_admitted():
    decision = admitted(propose(SPLIT, SAME), CPU)
    split_verdict, same_verdict = decision.verdicts
    assert decision.chosen is SAME and decision.final and decision.seconds > 0
    assert split_verdict.different > 0 and not split_verdict.admitted and same_verdict.admitted


FAULTS = {
    "runtime": (raising(RuntimeError("no such kernel\nfor this device")), "no such kernel"),
    "type": (raising(TypeError("gemm() got an unexpected keyword")), "TypeError: gemm() got an unexpected keyword"),
    "import": (raising(ImportError("cannot import name 'gemm'")), "ImportError: cannot import name 'gemm'"),
    "attribute": (raising(AttributeError("no attribute")), "AttributeError: no attribute"),
    "assertion": (raising(AssertionError()), "AssertionError"),
    "shape": (lambda x, w: product(x, w)[:, :-1], "differ in kind: torch.float32 (1, 7) against torch.float32 (1, 8)"),
    "dtype": (lambda x, w: product(x, w).double(), "differ in kind"),
    "tuple": (lambda x, w: (product(x, w), None), "differs in kind"),
    "nothing": (lambda x, w: None, "differs in kind"),
    "number": (lambda x, w: 3.0, "differs in kind"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_a_candidate_does_it_is_refused_with_the_reason(fault):
    run, reason = FAULTS[fault]
    decision = admitted(propose(Candidate("broken", run, "v1")), CPU)
    assert decision.chosen is CANONICAL
    (verdict,) = decision.verdicts
    assert not verdict.admitted and reason in verdict.error
    assert reason in decision.why and "\n" not in decision.why
    assert torch.equal(decision.chosen.run(*cases()[1]), product(*cases()[1]))
    both = admitted(propose(Candidate("broken", run, "v1"), SAME), CPU)
    assert both.chosen is SAME


def test_a_candidate_that_changes_its_operands_is_refused_and_spoils_nothing_for_the_others():
    def greedy(x, w):
        result = product(x, w)
        x.zero_()
        return result

    decision = admitted(propose(Candidate("greedy", greedy, "v1"), SPLIT, SAME), CPU)
    greedy_verdict, split_verdict, _ = decision.verdicts
    assert greedy_verdict.error == "it changes its operands" and split_verdict.different > 0
    assert decision.chosen is SAME


def test_results_of_several_tensors_are_compared_one_by_one():
    def pair(x, w):
        return product(x, w), None, [x.sum(1)]

    def other(x, w):
        return product(x, w), None, [x.sum(1) + 1]

    canonical = Candidate("canonical", pair, "v1")
    proposal = propose(
        Candidate("other", other, "v1"), Candidate("same", lambda *c: pair(*c), "v1"), canonical=canonical
    )
    assert admitted(proposal, CPU).chosen.name == "same"


# --- the values that decide bits in practice


def flushing(x, w):
    return product(torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, 0, x), w)


def flushing_results(x, w):
    y = product(x, w)
    return torch.where(y.abs() < torch.finfo(torch.bfloat16).smallest_normal, 0, y)


FAKES = {
    "flushes subnormal operands": flushing,
    "flushes subnormal results": flushing_results,
    "turns NaN into 0": lambda x, w: product(x, w).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf),
    "turns infinities into the largest": lambda x, w: product(x, w).clamp(-3e38, 3e38),
    "loses -0": lambda x, w: product(x, w).bfloat16() + 0.0,
    "is wrong for one row": lambda x, w: product(x, w) if len(x) > 1 else split(x, w),
    "lets NaN into the next row": lambda x, w: product(x, w) + 0 * product(x, w).roll(1, 0),
}


def rounded(run):
    return lambda x, w: run(x, w).bfloat16()


@pytest.mark.parametrize("fake", FAKES)
def test_special_rows_tell_a_kernel_that_treats_them_otherwise(fake):
    def special():
        x, w = cancelling(29, 64, 8, seed=3)
        return [cancelling(1, 64, 8, seed=1), (special_rows(x), w), (special_rows(x)[1::2], w)]

    canonical = Candidate("canonical", rounded(product), "v1")
    wrong = Candidate("wrong", rounded(FAKES[fake]), "v1")
    assert not admitted(propose(wrong, canonical=canonical, cases=special), CPU).verdicts[0].admitted

    def ordinary():
        return [cancelling(rows, 64, 8, seed=rows) for rows in (5, 8)]

    plain = admitted(propose(wrong, canonical=canonical, cases=ordinary, key="ordinary rows alone"), CPU)
    assert plain.verdicts[0].admitted, "what special rows are for: ordinary ones do not tell it"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_special_rows_are_what_they_say(dtype):
    x = torch.randn(60, 40).to(dtype)
    y, tiny, largest = special_rows(x), torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    assert torch.equal(y[::2], x[::2])
    rows = dict(zip(SPECIAL, y[1::2]))
    assert rows["one nan"].isnan().sum() == 1 and rows["all nan"].isnan().all()
    assert (rows["one inf"] == torch.inf).sum() == 1 == (rows["one -inf"] == -torch.inf).sum()
    assert {float(v) for v in rows["inf and -inf"] if v.isinf()} == {torch.inf, -torch.inf}
    assert rows["all inf"].isinf().all() and not rows["0"].any() and not rows["-0"].any()
    assert rows["-0"].signbit().all() and not rows["0"].signbit().any()
    bits = rows["subnormals"].view(torch.int32 if dtype == torch.float32 else torch.int16)
    assert (bits != 0).all() and len(bits.unique()) > 10 and {bool(s) for s in bits < 0} == {True, False}
    assert (rows["subnormals"].double().abs() < tiny).all() and (rows["subnormals"].double() != 0).all()
    assert (rows["one subnormal"].double() != 0).sum() == 1
    assert set(rows["largest"].tolist()) == {largest, -largest} and (rows["one largest"] == largest).sum() == 1
    for index, kind in enumerate(SPECIAL):
        one = special_rows(x[:1], first=2 * index + 1)
        assert one.shape == (1, 40) and not torch.equal(one, x[:1]), kind
    assert torch.equal(special_rows(x[:1]), x[:1]) and special_rows(x[:0]).shape == (0, 40)


# --- what is kept, and for how long


def test_verdicts_persist_and_new_candidates_are_verified(cache):
    admitted(propose(SPLIT, SAME), CPU)
    assert len(cache()) == 1
    again = admitted(propose(SPLIT, SAME, cases=never), CPU)
    assert again.chosen is SAME and again.seconds == 0 and [v.candidate for v in again.verdicts] == ["split", "same"]
    other = Candidate("other", product, "v1")
    assert admitted(propose(other), CPU).chosen is other
    cache()
    assert admitted(propose(SPLIT, SAME, cases=never), CPU).chosen is SAME, "another set does not displace it"


@pytest.mark.parametrize("changed", ["canonical", "candidate", "key", "machine"])
def test_a_verdict_holds_for_these_sources_on_this_machine(cache, monkeypatch, changed):
    """A canonical kernel that changed left its old candidates admitted."""
    assert admitted(propose(SAME), CPU).chosen is SAME
    cache()
    other = Candidate("canonical", lambda x, w: product(x, w) * 2, "v2")
    if changed == "canonical":
        decision = admitted(propose(SAME, canonical=other), CPU)
        assert decision.chosen is other and decision.verdicts[0].different
    elif changed == "candidate":
        worse = Candidate("same", split, "v2")
        assert admitted(propose(worse), CPU).chosen is CANONICAL
    elif changed == "key":
        assert admitted(propose(SAME, key="another"), CPU).seconds > 0
    else:
        monkeypatch.setattr(admit, "machine", lambda device: "another driver")
        assert admitted(propose(SAME), CPU).seconds > 0


def test_names_that_are_unknown_here_are_no_error(cache):
    """Verdicts that were made where a library is installed gave a KeyError where it is not."""
    quack = Candidate("quack", product, "quack 1")
    assert admitted(propose(quack, SAME), CPU).chosen is quack
    cache()
    assert admitted(propose(SAME), CPU).chosen is SAME
    for path in cache():  # whatever happened to a file
        path.write_text(json.dumps({"key": "k", "verdicts": [{"candidate": "quack", "different": 0}]}))
    assert admitted(propose(SAME), CPU).chosen is SAME


def test_what_has_no_digest_or_no_name_of_its_own_is_our_own_mistake():
    with pytest.raises(ValueError, match="'loose' comes without a digest"):
        admitted(propose(Candidate("loose", product)), CPU)
    with pytest.raises(ValueError, match="one name"):
        admitted(propose(SAME, SAME), CPU)
    with pytest.raises(ValueError, match="one name"):
        admitted(propose(Candidate("canonical", split, "v1")), CPU)


TRANSIENT = {
    "cuda": RuntimeError("CUDA error: unspecified launch failure"),
    "cublas": RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "disk": OSError("[Errno 28] No space left on device"),
    "host memory": MemoryError(),
    "import": ImportError("cannot import name 'gemm'"),
}


@pytest.mark.parametrize("kind", TRANSIENT)
def test_a_failure_of_the_moment_is_not_kept_on_disk(cache, kind):
    sick = Candidate("kernel", raising(TRANSIENT[kind]), "v1")
    assert admitted(propose(sick), CPU).chosen is CANONICAL
    assert admitted(propose(sick, cases=never), CPU).chosen is CANONICAL, "but it is in this process"
    assert cache() == []
    healthy = Candidate("kernel", product, "v1")
    assert admitted(propose(healthy), CPU).chosen is healthy


def test_out_of_memory_is_no_verdict_and_no_crash(cache):
    def hungry(x, w):
        raise torch.OutOfMemoryError("CUDA out of memory")

    for proposal in (
        propose(Candidate("hungry", hungry, "v1"), SAME),
        propose(SAME, key="k2", canonical=Candidate("canonical", hungry, "v1")),
        propose(SAME, key="k3", cases=lambda: hungry(1, 2)),
        propose(SPLIT, SAME, Candidate("third", product, "v1"), key="k4", race=hungry),
    ):
        with pytest.warns(UserWarning, match="no memory to verify faster kernels"):
            decision = admitted(proposal, CPU)
        assert decision.chosen is proposal.canonical and decision.verdicts == ()
        assert admitted(proposal, CPU).final, "said once"
    assert cache() == []


NO_MEMORY = {
    "torch": torch.OutOfMemoryError("CUDA out of memory"),
    "another library": RuntimeError("cuBLAS: Out of memory"),
    "the host": MemoryError(),
}


@pytest.mark.parametrize("what", ["candidate", "canonical", "cases", "race", "capture"])
@pytest.mark.parametrize("kind", NO_MEMORY)
def test_who_must_know_is_told_that_memory_is_short(cache, kind, what):
    """Whatever comes first: a start that says so, or an op that warns."""
    full = True

    def hungry(*given):
        if full:
            raise NO_MEMORY[kind]
        return product(*given)

    def race(_, case):
        return [NO_MEMORY[kind], 1.0] if full else [1.0, 2.0]

    proposal = {
        "candidate": propose(Candidate("hungry", hungry, "v1")),
        "canonical": propose(SAME, canonical=Candidate("canonical", hungry, "v1")),
        "cases": propose(SAME, cases=lambda: (hungry(*cases()[0]), cases())[1]),
        "race": propose(SAME, Candidate("third", product, "v1"), race=lambda *_: (hungry(*cases()[0]), [1.0, 2.0])[1]),
        "capture": propose(SAME, Candidate("third", product, "v1"), race=race),
    }[what]
    decide = decided(lambda device: proposal)
    said = "k: no memory to verify faster kernels than the canonical one .*doctor --admit.*VEXACT_ADMIT=0"
    for _ in range(2):
        with admit.must_admit(), pytest.raises(torch.OutOfMemoryError, match=said):
            decide(CPU)
    assert cache() == []
    if kind == "torch" and what != "capture":
        with pytest.warns(UserWarning, match="and may take ten times as long"):
            assert decide(CPU).short
        with warnings.catch_warnings(action="error"):
            assert decide(CPU).chosen is proposal.canonical, "said once"
        with admit.must_admit(), pytest.raises(torch.OutOfMemoryError, match=said):
            decide(CPU)
    full = False
    with admit.must_admit():
        chosen = decide(CPU).chosen
    assert chosen is proposal.candidates[0] and decide(CPU).chosen is chosen and len(cache()) == 1


def test_no_other_thread_must_know(cache):
    proposal = propose(Candidate("hungry", raising(torch.OutOfMemoryError("full")), "v1"))
    with admit.must_admit(), ThreadPoolExecutor() as pool, pytest.warns(UserWarning, match="no memory to verify"):
        assert pool.submit(admitted, proposal, CPU).result().short


def test_cases_that_cannot_be_made_leave_the_canonical_kernel(cache):
    with pytest.warns(UserWarning, match="k: its cases could not be made: no such generator: the canonical kernel"):
        assert admitted(propose(SAME, cases=lambda: raising(RuntimeError("no such generator"))(1, 2)), CPU).chosen is (
            CANONICAL
        )
    assert cache() == []


def test_a_context_that_is_gone_is_said_clearly(monkeypatch):
    def synchronize(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(admit.ContextLost, match=r"kernel 'same' broke the context of cuda:0.*VEXACT_ADMIT=0"):
        admit._survived(propose(SAME), SAME, torch.device("cuda", 0), RuntimeError("x"))
    monkeypatch.setattr(admit, "_survived", lambda *a: (_ for _ in ()).throw(admit.ContextLost("gone")))
    with pytest.raises(admit.ContextLost, match="gone"):
        admitted(propose(Candidate("bad", raising(RuntimeError("x")), "v1")), CPU)
    assert not admit._in_progress


WRITER = f"""{forks.OWN}import sys, torch
from vexact_ops._core.admit import Candidate, Proposal, admitted
run = lambda x: x + 1
for i in range(100):
    key = f"writer {{sys.argv[1]}} key {{i}}"
    proposal = Proposal(key, [Candidate("a", run, "1")], Candidate("c", run, "1"), lambda: [(torch.zeros(2),)])
    admitted(proposal, "cpu")
"""


def test_four_processes_that_write_at_once_keep_each_others_verdicts(cache):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen([sys.executable, "-c", WRITER, str(i)], env=env) for i in range(4)]
    assert [process.wait(300) for process in running] == [0] * 4
    kept = {json.loads(path.read_text())["key"] for path in cache()}
    assert kept == {f"writer {w} key {i}" for w in range(4) for i in range(100)}
    left = [p for p in Path(os.environ["VEXACT_CACHE"]).rglob("*") if p.is_file() and p.suffix != ".json"]
    assert left == []


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "[1]", "null", "3", '{"k": 3}', '{"key": "k", "verdicts": 3}',
        '{"key": "k", "verdicts": [{"name": 1}]}',
        '{"key": "k", "verdicts": [{"candidate": "same", "different": "0"}]}',
        '{"key": "k", "verdicts": [{"candidate": "same", "different": 0, "us": NaN}]}',
        '{"key": "other", "verdicts": [{"candidate": "same", "different": 3}]}', "\udcff",
    ],
)  # fmt: skip
def test_a_damaged_file_is_verified_anew(cache, content):
    admitted(propose(SAME), CPU)
    (path,) = cache()
    path.write_bytes(content.encode(errors="surrogateescape"))
    decision = admitted(propose(SAME), CPU)
    assert decision.chosen is SAME and decision.seconds > 0
    cache()
    assert admitted(propose(SAME, cases=never), CPU).chosen is SAME, "and it was mended"


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, monkeypatch, cache):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path / "file"))
    assert admitted(propose(SAME), CPU).chosen is SAME
    assert admitted(propose(SAME, cases=never), CPU).chosen is SAME, "kept in memory"


def test_a_user_without_a_home_is_no_obstacle(monkeypatch):
    for name in ("VEXACT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    assert admit.folder() is None
    assert admitted(propose(SAME), CPU).chosen is SAME
    assert admitted(propose(SAME, cases=never), CPU).chosen is SAME


# --- what surrounds a call


@pytest.mark.parametrize("where", ["inference", "autocast", "bf16", "float64", "device", "grad"])
def test_what_the_caller_has_switched_on_does_not_reach_the_kernels(where):
    seen = []

    def run(x):
        made = torch.zeros(1)
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")))
        seen.append((made.dtype, made.device.type, made.is_inference()))
        return x * 2

    contexts = {
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", torch.bfloat16),
        "device": torch.device("meta"),
        "grad": torch.enable_grad(),
    }
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype({"bf16": torch.bfloat16, "float64": torch.float64}.get(where, torch.float32))
        outside = torch.get_default_dtype()
        with contexts.get(where, contextlib.nullcontext()):
            proposal = Proposal(
                "k", [Candidate("a", lambda x: run(x), "1")], Candidate("c", run, "1"), lambda: [(torch.ones(2),)]
            )
            assert admitted(proposal, CPU).chosen.name == "a"
        assert torch.get_default_dtype() == outside
    finally:
        torch.set_default_dtype(before)
    assert set(seen) == {(False, False, False), (torch.float32, "cpu", False)}


def test_nothing_is_verified_or_remembered_inside_a_graph(monkeypatch):
    monkeypatch.setattr(admit, "_capturing", lambda device: True)
    decision = admitted(propose(SAME, cases=never), CPU)
    assert decision.chosen is CANONICAL and not decision.final and "CUDA graph" in decision.why
    monkeypatch.setattr(admit, "_capturing", lambda device: False)
    assert admitted(propose(SAME), CPU).chosen is SAME
    monkeypatch.setattr(admit, "_capturing", lambda device: True)
    assert admitted(propose(SAME, cases=never), CPU).chosen is SAME, "what is known serves there too"


def test_a_proposal_that_needs_itself_takes_the_canonical_kernel():
    inner = []

    def recursive(x, w):
        inner.append(admitted(propose(Candidate("recursive", recursive, "v1")), CPU))
        return product(x, w)

    assert admitted(propose(Candidate("recursive", recursive, "v1")), CPU).chosen.name == "recursive"
    assert inner[0].chosen is CANONICAL and not inner[0].final


def test_threads_verify_once():
    count, found = [], []

    def counted():
        count.append(1)
        return cases()

    threads = [
        threading.Thread(target=lambda: found.append(admitted(propose(SAME, cases=counted), CPU))) for _ in range(4)
    ]
    [t.start() for t in threads], [t.join() for t in threads]
    assert len(count) == 1 and [d.chosen for d in found] == [SAME] * 4


def test_decisions_are_asked_for_once_and_known_ones_keep_nothing_alive():
    asked = []

    @decided
    def choice(device, n):
        asked.append(n)
        return propose(SAME, key=f"n={n}")

    assert [choice(CPU, n).chosen for n in (1, 1, 2)] == [SAME] * 3 and asked == [1, 2]
    with pytest.raises(RuntimeError, match="names a kernel"):
        admit.decisions()[0].chosen.run(1)


def test_admission_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("VEXACT_ADMIT", "0")
    decision = admitted(propose(SAME, cases=never), CPU)
    assert decision.chosen is CANONICAL and "VEXACT_ADMIT=0" in decision.why


# --- speed


def test_the_fastest_admitted_wins_and_a_refused_one_is_not_timed(cache):
    times, raced = {"slow": 9.0, "fast": 2.0, "canonical": 3.0}, []

    def race(candidates, case):
        assert case[0].shape[0] == 5, "the last case"
        raced.append([c.name for c in candidates])
        return [times[c.name] for c in candidates]

    slow, fast = (Candidate(name, lambda x, w: product(x, w), "v1") for name in ("slow", "fast"))
    proposal = propose(SPLIT, slow, fast, CANONICAL, race=race)
    assert admitted(proposal, CPU).chosen is fast and raced == [["slow", "fast", "canonical"]]
    times["canonical"] = 1.0
    decision = admitted(propose(SPLIT, slow, fast, CANONICAL, race=race, key="k2"), CPU)
    assert decision.chosen is CANONICAL and "fastest of 3" in decision.why
    cache()
    assert admitted(propose(SPLIT, slow, fast, CANONICAL, race=never, cases=never), CPU).verdicts[2].us == 2.0


@pytest.mark.parametrize("us,wins", [(2.96, False), (2.98, False), (3.5, False), (2.9, True)])
def test_a_margin_is_the_canonical_kernels(cache, us, wins):
    fast = Candidate("fast", lambda x, w: product(x, w), "v1")
    proposal = propose(fast, CANONICAL, race=lambda candidates, case: [us, 3.0], key=f"margin {us}")
    decision = admitted(dataclasses.replace(proposal, margin=0.02), CPU)
    assert decision.chosen is (fast if wins else CANONICAL)
    assert ("more than 2%" in decision.why) == (2.9 < us < 3.0), decision.why
    cache()
    assert admitted(dataclasses.replace(proposal, margin=0.02), CPU).chosen is decision.chosen
    cache()
    assert admitted(proposal, CPU).chosen is (fast if us < 3.0 else CANONICAL), "without one"


def test_a_candidate_that_cannot_be_captured_is_refused():
    first = Candidate("first", lambda x, w: product(x, w), "v1")

    def race(candidates, case):
        return [RuntimeError("operation not permitted when stream is capturing"), 7.0]

    decision = admitted(propose(first, SAME, race=race), CPU)
    assert decision.chosen is SAME
    assert decision.verdicts[0].error == "in a CUDA graph: operation not permitted when stream is capturing"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_a_race_that_runs_out_of_memory_leaves_no_capture_behind():
    def hungry():
        return torch.empty(1 << 44, dtype=torch.uint8, device="cuda")

    warm = []

    def hungry_once_captured():
        if torch.cuda.is_current_stream_capturing():
            hungry()
        warm.append(torch.ones(3, device="cuda"))

    with pytest.raises(torch.OutOfMemoryError):
        race_on_gpu([[hungry_once_captured]])
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.arange(5).to("cuda").sum().item() == 10  # a copy from pageable memory: forbidden in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        later = warm[0] + 1
    graph.replay()
    assert later.tolist() == [2, 2, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_a_competitor_that_cannot_be_captured_does_not_stop_the_race():
    x = torch.ones(3, device="cuda")
    times = race_on_gpu([[lambda: x.sum().item()], [lambda: x + 1]])
    assert isinstance(times[0], Exception) and times[1] > 0
    assert torch.arange(5).to("cuda").sum().item() == 10


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_a_graph_that_is_captured_takes_what_is_known_and_verifies_nothing():
    x = torch.ones(8, device="cuda")
    proposal = Proposal(
        "k", [Candidate("a", lambda x: x + 1, "1")], Candidate("c", lambda x: x + 1, "1"), lambda: [(x,)]
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = admitted(proposal, "cuda")
        x + 1
    assert inside.chosen.name == "c" and not inside.final
    assert admitted(proposal, "cuda").chosen.name == "a"
