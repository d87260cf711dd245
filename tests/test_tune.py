"""vx.tune: products' kernels chosen by the time of a whole step. Times are made up, so that the choice is known."""

import json

import pytest
import torch

import vexact_ops as vx
from vexact_ops._core import admit, tune
from vexact_ops.testing import assert_bitwise

ON_SM90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no SM90 device"
)
NAMES = ["raced", "other", "third"]


class Kernels:
    """Stands for a class of products: which kernel serves it, and what a step takes with each.

    drift   what a replay takes more than the one before it, whosever that was, as a share of what the first one took
    times   seconds, or a function that gives them from how often it was replayed; None where it cannot be captured
    turns   who was replayed, in that order, but for the first replay of each, whose time nobody may look at
    """

    def __init__(self, times, drift=0.0):
        self.serving, self.tuned, self.turns, self.spent = "raced", False, [], 0.0
        self._times, self._drift = times, drift

    def use(self, name):
        self.serving, self.tuned = name, True

    def forget(self):
        self.tuned = False

    def capture(self):
        name, uploaded = self.serving, False
        if self._times[name] is None:
            raise RuntimeError("no capture")

        def replay():
            nonlocal uploaded
            if not uploaded:
                uploaded = True
                return None
            self.turns.append(name)
            time = self._times[name]
            took = time(self.turns.count(name)) if callable(time) else time
            took *= 1 + self._drift * len(self.turns)
            self.spent += took
            return took

        return replay


def lucky(turn):
    """As long as all are timed, and no more when it comes to the two last."""
    return 9.0 if turn <= 2 * tune.LEAST else 10.01


def hiccup(turn):
    """Once among all, and once among the two last."""
    return 100.0 if turn in (2, 2 * tune.LEAST + 2) else 10.0


@pytest.mark.parametrize("drift", [0.0, 0.05, -0.001])
@pytest.mark.parametrize(
    "times,expected",
    [
        ({"raced": 10.0, "other": 11.0, "third": 12.0}, "raced"),
        ({"raced": 10.0, "other": 11.0, "third": 9.0}, "third"),
        ({"raced": 10.0, "other": 9.97, "third": 9.98}, "other"),  # what any drift here hides who is timed alone
        ({"raced": 10.0, "other": 10.03, "third": 9.985}, "raced"),  # not worth it
        ({"raced": 10.0, "other": lucky, "third": 12.0}, "raced"),
        ({"raced": hiccup, "other": 9.99, "third": 10.0}, "raced"),
        ({"raced": 10.0, "other": hiccup, "third": hiccup}, "raced"),
    ],
)
def test_the_fastest_of_the_whole_wins(times, expected, drift):
    kernels = Kernels(times, drift)
    assert tune._fastest(kernels, NAMES, kernels.capture) == expected


def test_turns_are_there_and_back_and_nobody_follows_one_neighbour():
    kernels = Kernels(dict.fromkeys(NAMES, 1e-4))
    assert tune._fastest(kernels, NAMES, kernels.capture) == "raced"
    assert len(kernels.turns) == tune.MOST * 6  # never more, however short a step is
    rounds = [kernels.turns[i : i + 6] for i in range(0, len(kernels.turns), 6)]
    assert all(turns == turns[::-1] and set(turns) == set(NAMES) for turns in rounds)
    assert len({tuple(turns) for turns in rounds}) == 6


@pytest.mark.parametrize("step", [1.0, 3e-2, 3e-3])
def test_the_shorter_a_step_the_more_rounds(step):
    kernels = Kernels({"raced": step, "other": 0.9 * step, "third": step})
    assert tune._fastest(kernels, NAMES, kernels.capture) == "other"
    third = kernels.turns.count("third")
    all_, last = third // 2, (kernels.turns.count("other") - third) // 2
    assert all_ == max(tune.LEAST, -(-tune.ALL // (5.8 * step)))
    assert last == max(tune.LEAST, -(-tune.LAST // (3.8 * step)))
    assert (all_, last) == {1.0: (3, 3), 3e-2: (3, 3), 3e-3: (6, 27)}[step]


@pytest.mark.parametrize("fails", ["capture", "replay"])
def test_what_cannot_be_timed_leaves_the_races_choice(fails):
    def broken(turn):
        raise RuntimeError("no replay")

    kernels = Kernels({"raced": 10.0, "other": None if fails == "capture" else broken, "third": 1.0})
    with pytest.raises(RuntimeError, match=f"no {fails}"):
        tune._fastest(kernels, NAMES, kernels.capture)
    assert kernels.serving == "raced" and not kernels.tuned


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"chosen": {}}', '{"chosen": {"p": "unknown"}}', '{"chosen": {"p": []}}']
)
def test_a_file_that_is_damaged_is_as_none(tmp_path, content):
    path = tmp_path / "choices.json"
    assert tune._read(path, {"p": NAMES}) is None and tune._read(None, {"p": NAMES}) is None
    path.write_text(content)
    assert tune._read(path, {"p": NAMES}) is None
    admit.store(path, json.dumps({"chosen": {"p": "third"}}))
    assert tune._read(path, {"p": NAMES}) == {"p": "third"}


def test_choices_are_kept_under_all_that_decides_them(tmp_path, monkeypatch):
    class Call:
        device = "cuda:0"

        def __init__(self, source):
            self.source = lambda: source

    def path(source="source", names=NAMES, about="a step"):
        return tune._path({"p": ([Call(source)], names)}, about)

    monkeypatch.setattr(admit, "folder", lambda kind: tmp_path / kind)
    monkeypatch.setattr(admit, "machine", lambda device: f"machine of {device}")
    found = path()
    assert found == path(names=NAMES[::-1]) and found.parent == tmp_path / "tuned" / "machine of cuda:0"
    others = [path("another"), path(names=NAMES[:2]), path(about="another")]
    monkeypatch.setattr(tune, "METHOD", "another")  # what it kept was chosen otherwise
    assert len({found, path(), *others}) == 5


def test_of_calls_that_are_alike_one_is_kept():
    class Call:
        def __init__(self, key, layout):
            self.key, self.device, self.layout = key, "cuda:0", layout

    made = [Call("a", 1), Call("a", 1), Call("a", 2), Call("b", 1)]
    with tune.noting() as found:
        for call in made:
            tune.note(call)
        with tune.noting() as inner:
            pass
        tune.note(made[0])
    assert list(found.values()) == [made[0], made[2], made[3]] and not inner and tune.noted is None


def test_the_rivals_are_the_best_of_both_kinds(monkeypatch):
    """Kernels of a library are much alike in a step: however many a race puts first, ours are tried too."""
    from vexact_ops.linear import cuda, tiles

    def named(*kernels):
        return [cuda.candidate(kernel).name for kernel in kernels]

    monkeypatch.setattr(cuda, "_kernels", {})
    monkeypatch.setattr(cuda, "_source", lambda cublaslt: "")
    library = named(*(tiles.CublasLt(i, 0, 0, 0, (i,) * 8) for i in range(8)))
    ours = named(*(tiles.Tiled(64, 64 + 16 * i, 1, 4) for i in range(8)))
    slow, wrong, not_timed = named(*(tiles.Tiled(192, 64, 1, ring) for ring in (2, 3, 4)))
    verdicts = [admit.Verdict(name, 0, 10.0 + 0.1 * i) for i, name in enumerate([*library, *ours])]
    verdicts += [admit.Verdict(slow, 0, 12.1), admit.Verdict(wrong, 3, 9.0)]
    verdicts += [admit.Verdict(cuda.TRITON, 0, 10.0), admit.Verdict(not_timed, 0)]
    chosen = admit.Candidate(library[0], len)
    decision = admit.Decision("", chosen, "", tuple(verdicts))
    monkeypatch.setattr(cuda, "route", lambda product: decision)
    monkeypatch.setattr(cuda, "_tuned", {})
    x, w, out = (torch.empty(s, dtype=torch.bfloat16) for s in ((24, 2048), (1024, 2048), (24, 1024)))
    call = cuda.Noted(x, w, True, None, out, False)
    assert call.names() == [library[0], *ours[: cuda.OURS], *library[1 : 1 + cuda.LIBRARY]]
    heights = (16, 4), (16, 8), (24, 4), (24, 8), (32, 4)
    tall = named(*(tiles.Skinny(rows, 24, 2, ring, 1, 1) for rows, ring in heights))
    verdicts[:] = [admit.Verdict(name, 0, 10.0 + 0.1 * i) for i, name in enumerate(tall)]
    decision = admit.Decision("", admit.Candidate(tall[0], len), "", tuple(verdicts))
    assert call.names() == [tall[0], tall[2], tall[4], tall[1], tall[3]], "of each height one first"
    cuda._tuned[call._product] = ours[1]
    assert call.names() == [], "once"
    call.forget()
    decision = admit.Decision("", chosen, "", tuple(verdicts), final=False)
    assert call.names() == [], "inside a graph nothing is known"


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is no GPU")
def test_nothing_is_done_where_there_is_one_kernel():
    def never():
        raise AssertionError

    assert vx.tune(never, never) == []


@ON_SM90
def test_products_take_what_is_fastest_in_the_step_and_keep_their_bits(tmp_path, monkeypatch):
    from vexact_ops.linear import cuda

    monkeypatch.setattr(admit, "folder", lambda kind="admissions": tmp_path / kind)
    monkeypatch.setattr(admit, "_decisions", {})
    monkeypatch.setattr(cuda, "_tuned", {})
    monkeypatch.setenv("VEXACT_CHOICES", "0")  # what is shipped for this GPU is not raced
    g = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(s, generator=g, device="cuda").bfloat16() for s in ((24, 2048), (2048, 2048)))
    before = vx.linear(x, w)

    def decision():
        return cuda.explain("linear", x=x, weight=w, bias=None, out_dtype=torch.bfloat16)[0][1]

    raced = decision().chosen.name
    tried = []

    def capture():  # the slower a race has found a kernel, the faster it is here
        (name,) = cuda._tuned.values()
        tried.append(name)
        return lambda: 1 / next(v.us for v in verdicts if v.candidate == name) ** 2

    verdicts = decision().verdicts
    (found,) = vx.tune(lambda: vx.linear(x, w), capture, "a test")
    assert len(set(tried)) > 2 and tried[0] == raced == found.raced != found.chosen
    assert decision().chosen.name == found.chosen and "stands in a step" in decision().why
    assert_bitwise(vx.linear(x, w), before)
    assert vx.tune(lambda: vx.linear(x, w), capture, "a test") == []  # once in a process

    def never():
        raise AssertionError

    cuda._tuned.clear()
    assert vx.tune(lambda: vx.linear(x, w), never, "a test") == [found]  # from disk
    cuda._tuned.clear()
    with pytest.raises(AssertionError):
        vx.tune(lambda: vx.linear(x, w), never, "another test")
    assert decision().chosen.name == raced
