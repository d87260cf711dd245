"""Shared by all tests: the Hypothesis profile, and the backends that this machine can test."""

import os
import signal

import on_gpu
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

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
torch.set_num_threads(2)
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


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: needs a GPU; -m cuda runs these alone")
    config.pluginmanager.register(on_gpu.OnGpu())


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    """fp16 is a GPU type here: what pairs it with the C++ kernels is no case."""

    def is_case(item):
        params = getattr(item, "callspec", None) and item.callspec.params
        return not params or (params.get("backend"), params.get("dtype")) != ("cpu", torch.float16)

    items[:] = [item for item in items if is_case(item)]
    on_gpu.mark(items)
