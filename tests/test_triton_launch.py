"""Kernels that are launched together: in their order, compiled side by side once for each kind, and with no less where
that fails."""

import contextlib
import importlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton")
core = importlib.import_module("vexact_ops._core.triton")
GPU = torch.device("cuda", 0)


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
    monkeypatch.setattr(core, "compile_ahead", lambda run, device: compiled.append(len(said)))
    device, asked = torch.device("cuda", 0), launches(said)
    expected = [(name, (i + 1,), (i,), {"WIDTH": 2 * i}) for i, name in enumerate("abc")]
    for kind in (1, 1, 2):
        core.launch(asked, device, kind)
    assert said == 3 * expected
    assert compiled == [0, 6]  # before the first launch of a kind, and not again


@pytest.mark.parametrize("where", ["cpu", "captured", "interpreted", "compiling"])
def test_nothing_is_compiled_ahead_where_that_would_be_wrong(said, monkeypatch, where):
    monkeypatch.setattr(core, "compile_ahead", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: where == "captured")
    if where == "interpreted":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    if where == "compiling":
        monkeypatch.setattr(core._collecting, "kernels", [])
    core.launch(launches(said), torch.device("cpu") if where == "cpu" else torch.device("cuda", 0), 1)
    assert [name for name, *_ in said] == ["a", "b", "c"]


def test_what_fails_ahead_is_left_to_the_launch(said, monkeypatch):
    def fail(*_):
        raise RuntimeError("ptxas is not there")

    monkeypatch.setattr(core, "compile_ahead", fail)
    core.launch(launches(said), torch.device("cuda", 0), 1)
    assert len(said) == 3


# --- compiled ahead


class Driver:
    """Of a GPU that is not there: what is compiled for it is never launched."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


class Compiled:
    """In the place of a compiled kernel: it says what it was launched with."""

    function, packed_metadata, launched = 0, (), 0

    def launch_metadata(self, *_):
        return None

    def run(self, *_):
        type(self).launched += 1


def scale(x, y, n, pair, BLOCK: triton.language.constexpr):
    pass


@pytest.fixture
def jit(monkeypatch):
    """triton.JITFunction, but for its compiler: `keys` of a kernel are what it was compiled for."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(Compiled, "launched", 0)

    def compiled(self, key, signature, device, *_):
        self.keys = [*getattr(self, "keys", []), key]
        self.device_caches[device][0][key] = found = Compiled()
        return found

    monkeypatch.setattr(triton.JITFunction, "_do_compile", compiled)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    return triton.JITFunction


@pytest.fixture
def kernel(jit):
    return jit(scale)


class Pair(NamedTuple):
    a: torch.Tensor
    b: int


def called(kernel, x, y, n):
    kernel[(1,)](x, y, n, Pair(x, n), BLOCK=64)


def test_calls_are_compiled_for_as_where_they_are_launched(kernel):
    """Nothing is launched, and of operands nothing is there but what a kernel is specialized on."""
    room = torch.arange(4096, dtype=torch.float32)
    calls = [(room[i:], room[64 * j :].half(), n) for i in (0, 1, 4) for j in (0, 3) for n in (1, 16, 17)]
    core.compile_calls(lambda *call: called(kernel, *call), calls, GPU)
    ahead = kernel.keys
    assert Compiled.launched == 0 and len({*ahead}) == 6
    for call in calls:
        called(kernel, *call)
    assert kernel.keys == ahead and Compiled.launched == len(calls)


def test_a_call_that_looks_at_values_is_compiled_for_as_far_as_it_comes(kernel):
    def run(x):
        called(kernel, x, x, 5)
        if x.sum().item() > 0:
            pytest.fail("it has values")

    core.compile_calls(run, [(torch.ones(8),), (torch.ones(9, dtype=torch.int64),)], GPU)
    assert len(kernel.keys) == 2 and Compiled.launched == 0 and not core.compiling()


def test_other_threads_go_on(kernel):
    x = torch.ones(8)

    def run(*call):
        called(kernel, *call)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(called, kernel, x, x, 7).result()
        assert core.compiling() and core.compile_calls(pytest.fail, [()], GPU) == 0

    before = triton.JITFunction.run
    assert core.compile_calls(run, [(x, x, 7)], GPU) == 1
    assert Compiled.launched == 1 and triton.JITFunction.run is before


def test_what_raises_leaves_nothing_behind(kernel):
    before = triton.JITFunction.run
    with pytest.raises(ValueError, match="mine"):
        core.compile_ahead(lambda: (_ for _ in ()).throw(ValueError("mine")), GPU)
    assert triton.JITFunction.run is before and not core.compiling()
    called(kernel, torch.ones(8), torch.ones(8), 7)
    assert Compiled.launched == 1


def test_attention_is_compiled_once_for_any_number_of_sequences(jit, monkeypatch):
    """With a window and without one, and again for what is not finite: each is seconds of an engine's start."""
    room = importlib.import_module("vexact_ops.attention.triton")
    kernel = jit(room._fwd_kernel.fn, None, room.PER_CACHE, room.INDICES)
    monkeypatch.setattr(room, "_fwd_kernel", kernel)
    q, cache = torch.zeros(600, 4, 64, dtype=torch.bfloat16), torch.zeros(9, 16, 2, 64, dtype=torch.bfloat16)
    for sequences, longest, window in itertools.product((1, 33, 64, 65, 257, 600), (1, 5), (None, 128, 200)):
        table, lens, cu = (torch.zeros(sequences + i, dtype=torch.int32) for i in (0, 0, 1))
        pages = cache, cache, table[:, None].expand(-1, 16).contiguous()
        room.paged_fwd(q, *pages, lens, cu, longest, torch.zeros(4), 0.1, window, None, None, None)
    assert len(kernel.keys) == 4


def test_launchers_are_loaded_in_turn_and_made_side_by_side():
    """Of Triton up to 3.6, whose launchers are modules of one name: here of two threads that load at once."""
    shared = ModuleType("__triton_launcher")

    def load(name, path):
        shared.launch = path
        with contextlib.suppress(threading.BrokenBarrierError):
            loading.wait()
        return shared

    def made(build, path, both):
        with contextlib.suppress(threading.BrokenBarrierError):
            making.wait()  # as a C compiler does, outside of the turn
        both[path] = build._load_module_from_path("__triton_launcher", path).launch

    def by_two(build):
        both = {}
        threads = [threading.Thread(target=made, args=(build, path, both)) for path in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return both

    build = SimpleNamespace(_load_module_from_path=load)
    making, loading = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    assert by_two(build) != {"a": "a", "b": "b"}  # what would be: both have loaded before either reads
    core.load_in_turn(build)
    making, loading = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=0.05)
    assert by_two(build) == {"a": "a", "b": "b"} and not making.broken
    assert build._load_module_from_path("cuda_utils", "c") is shared  # others are as they were


def test_tritons_own_launchers_are():
    if not hasattr(importlib.import_module("triton.backends.nvidia.driver"), "make_launcher"):
        pytest.skip("this Triton's launchers are no modules")
    assert hasattr(importlib.import_module("triton.runtime.build")._load_module_from_path, "__wrapped__")
