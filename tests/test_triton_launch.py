"""Kernels that are launched together: in their order, compiled side by side once for each kind, and with no less where
that fails."""

import contextlib
import importlib
import threading

import pytest
import torch

core = pytest.importorskip("vexact_ops._core.triton", reason="needs Triton")


class Kernel:
    def __init__(self, name, said):
        self.name, self.said = name, said

    def __getitem__(self, grid):
        return lambda *args, **options: self.said.append((self.name, grid, args, options))


@pytest.fixture
def said(monkeypatch):
    monkeypatch.setattr(core, "_launched", set())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return []


def launches(said):
    return [core.Launch(Kernel(name, said), (i + 1,), (i,), {"WIDTH": 2 * i}) for i, name in enumerate("abc")]


def test_they_are_compiled_once_for_each_kind_and_launched_in_order(said, monkeypatch):
    compiled = []
    monkeypatch.setattr(core, "_compile", lambda given, device: compiled.append((len(given), len(said))))
    device, asked = torch.device("cuda", 0), launches(said)
    expected = [(name, (i + 1,), (i,), {"WIDTH": 2 * i}) for i, name in enumerate("abc")]
    for kind in (1, 1, 2):
        core.launch(asked, device, kind)
    assert said == 3 * expected
    assert compiled == [(3, 0), (3, 6)]  # before the first launch of a kind, and not again


@pytest.mark.parametrize("where", ["cpu", "captured", "interpreted"])
def test_nothing_is_compiled_ahead_where_that_would_be_wrong(said, monkeypatch, where):
    monkeypatch.setattr(core, "_compile", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: where == "captured")
    if where == "interpreted":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    core.launch(launches(said), torch.device("cpu") if where == "cpu" else torch.device("cuda", 0), 1)
    assert [name for name, *_ in said] == ["a", "b", "c"]


def test_what_fails_ahead_is_left_to_the_launch(said, monkeypatch):
    def fail(*_):
        raise RuntimeError("ptxas is not there")

    monkeypatch.setattr(core, "_compile", fail)
    core.launch(launches(said), torch.device("cuda", 0), 1)
    assert len(said) == 3


def test_launchers_are_made_in_turn():
    """Of Triton up to 3.6, whose launchers are modules of one name: here of two threads that load at once."""
    loaded = {}

    class Launcher:
        def __init__(self, name, met):
            loaded["__triton_launcher"] = name
            with contextlib.suppress(threading.BrokenBarrierError):
                met.wait()
            self.launch = loaded["__triton_launcher"]

    def made(seconds):
        both, met = {}, threading.Barrier(2, timeout=seconds)
        threads = [threading.Thread(target=lambda n=n: both.update({n: Launcher(n, met).launch})) for n in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return both

    assert made(60) != {"a": "a", "b": "b"}  # what would be: both have loaded before either reads
    core.load_in_turn(Launcher)
    assert made(0.05) == {"a": "a", "b": "b"}  # nobody comes while one is at it


def test_tritons_own_launchers_are():
    driver = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "make_launcher"):
        pytest.skip("this Triton's launchers are no modules")
    assert hasattr(driver.CudaLauncher.__init__, "__wrapped__")
