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
    """Stands for a class of products: which kernel serves it, and what a step takes with each, call by call."""

    def __init__(self, **times):
        self.serving, self.tuned = "raced", False
        self._times = {name: iter(of) for name, of in times.items()}

    def use(self, name):
        self.serving, self.tuned = name, True

    def forget(self):
        self.tuned = False

    def seconds(self):
        took = next(self._times[self.serving])
        if took is None:
            raise RuntimeError("no capture")
        return took


@pytest.mark.parametrize(
    "times,expected",
    [
        ({"raced": [10.0], "other": [11.0], "third": [12.0]}, "raced"),
        ({"raced": [10.0, 10.0], "other": [11.0], "third": [9.0, 9.0]}, "third"),
        ({"raced": [10.0, 10.0], "other": [9.99, 9.99], "third": [12.0]}, "raced"),  # not worth it
        ({"raced": [10.0, 8.0], "other": [9.0, 9.1], "third": [12.0]}, "raced"),  # the clock had risen meanwhile
    ],
)
def test_the_fastest_of_the_whole_wins(times, expected):
    kernels = Kernels(**times)
    assert tune._fastest(kernels, NAMES, kernels.seconds) == expected


def test_what_cannot_be_timed_leaves_the_races_choice():
    kernels = Kernels(raced=[10.0], other=[None], third=[1.0])
    with pytest.raises(RuntimeError, match="no capture"):
        tune._fastest(kernels, NAMES, kernels.seconds)
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
    from vexact_ops.linear import cuda

    library, ours = ([f"{kind} {i}" for i in range(8)] for kind in ("cublaslt", "wgmma"))
    verdicts = [admit.Verdict(name, 0, 10.0 + 0.1 * i) for i, name in enumerate([*library, *ours])]
    verdicts += [admit.Verdict("wgmma slow", 0, 12.1), admit.Verdict("wgmma wrong", 3, 9.0)]
    verdicts += [admit.Verdict(cuda.TRITON, 0, 10.0), admit.Verdict("wgmma not timed", 0)]
    chosen = admit.Candidate("cublaslt 0", len)
    decision = admit.Decision("", chosen, "", tuple(verdicts))
    monkeypatch.setattr(cuda.Product, "decision", lambda product: decision)
    monkeypatch.setattr(cuda, "_tuned", {})
    x, w, out = (torch.empty(s, dtype=torch.bfloat16) for s in ((24, 2048), (1024, 2048), (24, 1024)))
    call = cuda.Noted(x, w, True, None, out, False)
    assert call.names() == ["cublaslt 0", *ours[: cuda.OURS], *library[1 : 1 + cuda.LIBRARY]]
    cuda._tuned[call._product] = "wgmma 1"
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
    monkeypatch.setattr(cuda, "_tuned", {})
    g = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(s, generator=g, device="cuda").bfloat16() for s in ((24, 2048), (2048, 2048)))
    before = vx.linear(x, w)

    def decision():
        return cuda.explain("linear", x, w, None, torch.bfloat16)[0][1]

    raced = decision().chosen.name
    tried = []

    def seconds():  # the slower a race has found a kernel, the faster it is here
        (name,) = cuda._tuned.values()
        tried.append(name)
        return -next(v.us for v in verdicts if v.candidate == name)

    verdicts = decision().verdicts
    (found,) = vx.tune(lambda: vx.linear(x, w), seconds, "a test")
    assert len(set(tried)) > 2 and tried[0] == raced == found.raced != found.chosen
    assert decision().chosen.name == found.chosen and "stands in a step" in decision().why
    assert_bitwise(vx.linear(x, w), before)
    assert vx.tune(lambda: vx.linear(x, w), seconds, "a test") == []  # once in a process

    def never():
        raise AssertionError

    cuda._tuned.clear()
    assert vx.tune(lambda: vx.linear(x, w), never, "a test") == [found]  # from disk
    cuda._tuned.clear()
    with pytest.raises(AssertionError):
        vx.tune(lambda: vx.linear(x, w), never, "another test")
    assert decision().chosen.name == raced
