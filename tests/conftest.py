"""Shared by all tests: the Hypothesis profile, and the backends that this machine can test."""

import contextlib
import fcntl
import gc
import os
import random
import signal
import tempfile
import traceback
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

# One thread a process, in processes that tests start too: as many of them as cores run side by side. Tests of threads
# say how many they have; those that wait for each other sleep. The runtime reads both when torch loads it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import forks
import on_gpu
import processes
import proofs
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

on_gpu.take_turns(os.environ, torch.cuda.device_count())  # which asks the driver's library, and starts no CUDA

# Triton's interpreter is too slow to look for the smallest failing example.
SLOW = os.environ.get("TRITON_INTERPRET") == "1"
settings.register_profile(
    "vexact",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    max_examples=int(os.environ.get("VEXACT_EXAMPLES", "12")),
    phases=[phase for phase in Phase if not (SLOW and phase in (Phase.shrink, Phase.explain))],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# pytest --hypothesis-profile=thorough tests/ops -k alone: each example compares ten to twenty ways to compute a row
settings.register_profile("thorough", parent=settings.get_profile("vexact"), derandomize=False, max_examples=100)
settings.load_profile("vexact")
if SLOW:
    import interpreter

    interpreter.install()


def room_backends(room: str, only: str | None = None) -> list:
    """pytest params (device, backend) for every backend of a room, skipped with the reason where it cannot run here.

    Use as @pytest.mark.parametrize("device,backend", room_backends("rmsnorm")).
    """
    import importlib

    from vexact_ops._core.backend import PROBES, ROOMS

    importlib.import_module(f"vexact_ops.{room}.op")
    params = []
    for device in ("cpu", "cuda"):
        for backend in ROOMS[room].backends(device):
            if only not in (None, backend):
                continue
            reason = PROBES[backend]() or (device == "cuda" and not torch.cuda.is_available() and "no CUDA device")
            marks = [pytest.mark.skip(reason=f"{backend}: {reason}")] if reason else []
            params.append(pytest.param(device, backend, id=f"{device}-{backend}", marks=marks))
    return params


def interpreted(device: str, backend: str) -> bool:
    """Whether Triton's interpreter computes: a program takes it milliseconds, so a property is shown on few of them."""
    return (device, backend) == ("cpu", "triton")


def devices(*dtypes: torch.dtype) -> list:
    """pytest params (device, dtype) for what whole models are tested in: by default fp32 and bf16 on the CPU, bf16 and
    fp16 on a GPU; skipped with the reason where there is none.

    Use as @pytest.mark.parametrize("device,dtype", devices()).
    """
    named = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    served = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16, torch.float16)}
    gpu = [] if torch.cuda.is_available() else [pytest.mark.skip(reason="no CUDA device is visible to torch")]
    return [
        pytest.param(device, dtype, id=f"{device}-{named[dtype]}", marks=gpu if device == "cuda" else [])
        for device, own in served.items()
        for dtype in (dtypes or own)
        if (device, dtype) != ("cpu", torch.float16)
    ]


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills in one of the processes that run tests; the others that ask for it wait, and fail with
    its error where it fails, rather than try again in what is left of it."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / name
    folder.mkdir(exist_ok=True)
    with open(base / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "failed").exists():
            why = (folder / "failed").read_text()
            pytest.fail(f"{name} could not be made by another process:\n{why}", pytrace=False)
        if not (folder / "made").exists():
            try:
                make(folder)
            except Exception:
                (folder / "failed").write_text(traceback.format_exc())
                raise
            (folder / "made").touch()
    return folder


class Kinds:
    """What kernels are compiled for, as Hypothesis draws it: anything in the product of these choices on a CPU. On a
    GPU, where each kind takes seconds to compile, one of `few` for a dtype, the same ones in all tests of a file; what
    the kinds of one dtype leave out of a choice comes first in those of the next. VEXACT_KINDS=1, 2, ... takes others.

    Use as @given(kind=KINDS.drawn, ...) with KINDS.at(kind, device, dtype) in the test.
    """

    drawn = st.integers(0, 2**16)
    _DTYPES = torch.bfloat16, torch.float32, torch.float16

    def __init__(self, few: int, seed: int, **choices: Sequence):
        self.few, self.choices = few, choices
        source = random.Random(os.environ.get("VEXACT_KINDS", str(seed)))
        self._values = {name: source.sample(list(values), len(values)) for name, values in choices.items()}
        self._order = {name: source.sample(range(few), few) for name in choices}  # or two choices would go together

    def at(self, number: int, device: str, dtype: torch.dtype) -> SimpleNamespace:
        if device != "cuda":
            source = random.Random(number)
            return SimpleNamespace(**{name: source.choice(list(values)) for name, values in self.choices.items()})
        first, kind = self.few * self._DTYPES.index(dtype), {}
        for name, values in self._values.items():
            kind[name] = values[(first + self._order[name][number % self.few]) % len(values)]
        return SimpleNamespace(**kind)

    def of(self, dtype: torch.dtype) -> list[SimpleNamespace]:
        """Those that a GPU sees."""
        return [self.at(number, "cuda", dtype) for number in range(self.few)]


@pytest.fixture
def ctrl_c():
    """SIGINT raises KeyboardInterrupt, as it does in a terminal's foreground: a background job, or one under nohup, is
    started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    return on_gpu.processes()


pytest_addoption = proofs.pytest_addoption


def pytest_configure(config):
    from vexact_ops._core import disk

    config.addinivalue_line("markers", "cuda: needs a GPU; -m cuda runs these alone")
    config.addinivalue_line("markers", "long: takes a minute and more, or does on a GPU; among the first of a process")
    config.addinivalue_line("markers", 'process: starts a Python process; -m "not process" leaves these out')
    config.pluginmanager.register(on_gpu.OnGpu())
    config.pluginmanager.register(processes.Processes())
    config.pluginmanager.register(forks.Forks())
    config.pluginmanager.register(proofs.Proofs(config, disk.folder("proofs"), disk.store))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """fp16 is a GPU type here: what pairs it with the C++ kernels is no case."""

    def is_case(item):
        params = getattr(item, "callspec", None) and item.callspec.params
        return not params or (params.get("backend"), params.get("dtype")) != ("cpu", torch.float16)

    items[:] = [item for item in items if is_case(item)]
    on_gpu.mark(items)
    processes.mark(items)


def _seed(name: str) -> None:
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    torch.default_generator.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """What is drawn from a global generator is the same whatever this process has run before."""
    _seed(f"{fixturedef.baseid} {fixturedef.argname} {request.param_index}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    _seed(item.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """What is imported by now stays: left out of collections, of which each would take half a second for it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture
def sockets(monkeypatch):
    """The folder of a hand-over's sockets: one of their own, that is empty again at the end; and no bucket is mapped
    or open then that was not before."""
    before = _buckets()
    with tempfile.TemporaryDirectory() as folder:  # a short name: sockets have at most 107 characters
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "vexact"
        assert not list(Path(folder, "vexact").glob("*")), "a socket was left behind"
    if _buckets() > before:
        gc.collect()  # an exception that was expected may hold a view of one
    assert _buckets() <= before, "shared memory of a hand-over was left behind"


def _buckets() -> int:
    """Mappings and open files of buckets that this process has."""
    files = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed by now
            files += "vexact-weights" in os.readlink(file)
    return files + Path("/proc/self/maps").read_text().count("vexact-weights")
