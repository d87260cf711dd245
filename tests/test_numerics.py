"""The fingerprint follows content, and nothing else; the backend that it names is the one of this thread."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import vexact_ops as vx
from vexact_ops._core import backend, digest, native, numerics
from vexact_ops._core.backend import ROOMS, Room

ROOT = Path(__file__).parent.parent
needs_extension = pytest.mark.skipif(native.unavailable() is not None, reason="needs the extension")


def of_process(root=ROOT, **env):
    """vx.numerics("cpu") of another process, which runs the package below `root`."""
    code = "import json, vexact_ops as vx; print(json.dumps(vx.numerics('cpu')))"
    env = {**os.environ, "PYTHONPATH": str(root), **env}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=root, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rooms_that_differ(a, b):
    found = vx.numerics_difference(a, b)
    assert all(key.startswith("rooms.") for key in found), found
    return {key.removeprefix("rooms.") for key in found}


# --- what is in it


def leaves(value):
    return [leaf for one in value.values() for leaf in leaves(one)] if isinstance(value, dict) else [value]


def test_it_is_made_of_plain_values_which_every_encoder_takes():
    """torch's version, which is in that of a GPU, is a class of its own."""
    plain = {str, int, float, bool, type(None)}
    libraries = numerics._libraries(torch.device("cuda"), {"triton"})
    assert libraries["torch"] == torch.__version__
    assert {type(leaf) for leaf in leaves(libraries) + leaves(vx.numerics())} <= plain


def test_it_goes_through_json_and_has_a_digest_for_every_room():
    found = vx.numerics("cpu", kv_segment=2048, latent_attention=None)
    assert json.loads(json.dumps(found)) == found
    assert found["class"] == "cpu" and found["options"] == {"kv_segment": 2048}
    assert set(found["rooms"]) == {path.parent.name for path in (ROOT / "vexact_ops").glob("*/op.py")}
    assert len(set(found["rooms"].values())) == len(found["rooms"])
    with pytest.raises(TypeError, match="kv_segment: got list"):
        vx.numerics("cpu", kv_segment=[1])
    with pytest.raises(ValueError, match="meta"):
        vx.numerics("meta")


@needs_extension
def test_it_is_the_same_on_every_instruction_set_and_with_any_number_of_threads():
    assert of_process(VEXACT_CPU_ISA="scalar") == of_process(OMP_NUM_THREADS="3") == vx.numerics("cpu")


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A copy of the package, and its numerics."""
    root = tmp_path_factory.mktemp("elsewhere")
    shutil.copytree(ROOT / "vexact_ops", root / "vexact_ops", ignore=shutil.ignore_patterns("__pycache__"))
    return root, of_process(root)


def test_where_the_package_lies_does_not_count(elsewhere):
    assert elsewhere[1] == vx.numerics("cpu")


@pytest.mark.parametrize(
    "file, rooms",
    [
        ("linear/cpu.py", {"linear", "linear_cross_entropy", "linear_sample", "linear_silu_mul"}),
        ("rmsnorm/op.py", {"rmsnorm", "rope"}),
        ("rmsnorm/triton.py", set()),  # not in use on a CPU
        ("_core/backend.py", set()),
    ],
)
def test_one_byte_of_a_canonical_source_changes_it(elsewhere, file, rooms):
    root, before = elsewhere
    path = root / "vexact_ops" / file
    source = path.read_bytes()
    try:
        path.write_bytes(source + b"#")
        assert rooms_that_differ(before, of_process(root)) == rooms
    finally:
        path.write_bytes(source)


@needs_extension
def test_an_extension_from_other_sources_changes_it(monkeypatch):
    before, stored = vx.numerics("cpu"), digest._stored()
    if not stored:
        pytest.skip("the extension was built by other means than setup.py")
    other = {**stored, "cpu": {**stored["cpu"], "silu_mul": "of another kernel"}}
    monkeypatch.setattr(digest, "_stored", lambda: other)
    digest._sources.cache_clear()
    try:
        assert rooms_that_differ(before, vx.numerics("cpu")) == {"silu_mul", "fused_moe", "linear_silu_mul"}
        monkeypatch.setattr(digest, "_stored", lambda: None)  # none at all: Triton alone
        digest._sources.cache_clear()
        assert rooms_that_differ(before, vx.numerics("cpu")) == set(before["rooms"])
    finally:
        digest._sources.cache_clear()


def test_without_an_extension_there_still_is_one(tmp_path):
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "vexact_ops", tmp_path / "vexact_ops", ignore=ignore)
    assert set(of_process(tmp_path)["rooms"]) == set(vx.numerics("cpu")["rooms"])


@needs_extension
def test_it_says_when_this_thread_flushes_subnormals():
    before, mode = vx.numerics("cpu"), native.float_mode()
    try:
        assert torch.set_flush_denormal(True)
        found = vx.numerics("cpu")
    finally:
        native.ops().float_mode(mode)
    assert vx.numerics_difference(before, found) == {
        "float_mode": ("subnormals kept, rounding to nearest", "subnormals flushed, rounding to nearest")
    }
    assert vx.numerics("cpu") == before


@pytest.fixture
def sm90(monkeypatch):
    """A process that believes to have an H200 with everything installed."""
    vx.numerics("cpu")  # imports every room
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(digest, "driver", lambda: "580.65.06")
    versions = {"triton": "3.6.0", "flash-attn-4": "4.0.0b36", "quack-kernels": "0.6.5", "nvidia-cutlass-dsl": None}
    monkeypatch.setattr(digest, "version", versions.get)
    for name in backend.PROBES:
        monkeypatch.setitem(backend.PROBES, name, lambda: None)
    for room in ROOMS.values():
        monkeypatch.setattr(room, "_defaults", {})
    return versions


def test_on_a_gpu_it_names_what_lowers_and_what_serves(sm90, monkeypatch):
    found = vx.numerics("cuda")
    assert found["class"] == "sm90" and found["backends"] == {"attention": "cuda"}
    served = {"torch": torch.__version__, "cuda": "13.0", "driver": "580.65.06", "triton": sm90["triton"]}
    assert found["libraries"] == served
    assert found["gradients"] == {package: version for package, version in sm90.items() if package != "triton"}
    monkeypatch.setitem(sm90, "flash-attn-4", None)
    other = vx.numerics("cuda")
    assert vx.numerics_difference(found, other) == {"gradients.flash-attn-4": ("4.0.0b36", None)}
    assert vx.numerics_difference(found, other, forward=True) == {}
    monkeypatch.setitem(sm90, "triton", "another")
    other = vx.numerics("cuda")
    assert vx.numerics_difference(found, other).keys() == {"libraries.triton", "gradients.flash-attn-4"}
    assert vx.numerics_difference(found, other, forward=True) == {"libraries.triton": ("3.6.0", "another")}
    monkeypatch.setattr(digest, "driver", lambda: "580.159.04")
    assert vx.numerics_difference(found, vx.numerics("cuda"))["libraries.driver"] == ("580.65.06", "580.159.04")


def test_where_backends_are_equal_the_setting_does_not_count(sm90):
    with vx.use_backend("triton"):
        found = vx.numerics("cuda")
    different = set(vx.numerics_difference(vx.numerics("cuda"), found, forward=True))
    assert {d for d in different if not d.startswith("libraries.")} == {"backends.attention", "rooms.attention"}


def test_differences_are_named():
    a = {"contract": 1, "rooms": {"linear": "x", "mean": "y"}, "options": {}}
    assert vx.numerics_difference(a, json.loads(json.dumps(a))) == {}
    b = {"contract": 2, "rooms": {"linear": "x"}, "options": {"kv_segment": 128}}
    assert vx.numerics_difference(a, b) == {
        "contract": (1, 2),
        "rooms.mean": ("y", None),
        "options.kv_segment": (None, 128),
    }
    assert vx.numerics_difference(a, {}).keys() == {"contract", "rooms.linear", "rooms.mean"}
    either = {**a, "contract": [1, 2]}
    assert vx.numerics_difference(a, either) == vx.numerics_difference(either, {**a, "contract": 2}) == {}
    assert vx.numerics_difference(either, {**a, "contract": 3}) == {"contract": ([1, 2], 3)}
    assert vx.numerics_difference(either, {**a, "contract": [2, 1]}) == {"contract": ([1, 2], [2, 1])}
    with pytest.raises(TypeError, match="b: got list"):
        vx.numerics_difference(a, [])


# --- set_backend, use_backend


@pytest.fixture
def room(monkeypatch):
    """A room with two backends that both can run here, and nothing behind them."""
    made = Room("of_a_test", cpu=("cpu", "triton"))
    made._modules.update(cpu=json, triton=json)
    monkeypatch.setattr(backend, "_setting", None)
    yield made
    del ROOMS["of_a_test"]
    assert backend._open == ()


CPU = torch.device("cpu")


def in_thread(fn):
    found = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


def test_a_block_is_of_its_thread_and_ends(room):
    def resolve():
        return room.resolve(CPU, None)

    assert resolve() == "cpu"
    with vx.use_backend("triton"):
        assert resolve() == "triton" and in_thread(resolve) == "cpu"
        assert room.resolve(CPU, "cpu") == "cpu", "an argument comes first"
        with vx.use_backend("cpu"):
            assert resolve() == "cpu"
        with pytest.raises(KeyError), vx.use_backend(None):
            assert resolve() == "cpu"
            raise KeyError
        assert resolve() == "triton"
    assert resolve() == "cpu"


def test_two_blocks_that_overlap_in_two_threads_leave_nothing_behind(room):
    inside, leave = threading.Event(), threading.Event()
    found = []

    def other():
        with vx.use_backend("triton"):
            found.append(room.resolve(CPU, None))
            inside.set()
            leave.wait(60)
            found.append(room.resolve(CPU, None))

    thread = threading.Thread(target=other)
    with vx.use_backend("cpu"):
        thread.start()
        assert inside.wait(60)
        found.append(room.resolve(CPU, None))
    found.append(room.resolve(CPU, None))
    leave.set()
    thread.join()
    assert found == ["triton", "cpu", "cpu", "triton"] and room.resolve(CPU, None) == "cpu"


def test_tasks_of_one_thread_have_blocks_of_their_own(room):
    async def task(name):
        with vx.use_backend(name):
            await asyncio.sleep(0)
            return room.resolve(CPU, None)

    async def all_of_them():
        return await asyncio.gather(task("triton"), task("cpu"), task(None))

    assert asyncio.run(all_of_them()) == ["triton", "cpu", "cpu"]


def test_the_setting_is_the_process_s(room):
    vx.set_backend("triton")
    try:
        assert room.resolve(CPU, None) == in_thread(lambda: room.resolve(CPU, None)) == "triton"
        with vx.use_backend(None):
            assert room.resolve(CPU, None) == "cpu" and in_thread(lambda: room.resolve(CPU, None)) == "triton"
        with vx.use_backend("cpu"):
            vx.set_backend("triton")
            assert room.resolve(CPU, None) == "cpu", "a block comes before the setting"
    finally:
        vx.set_backend(None)
    assert room.resolve(CPU, None) == "cpu"
    for set_one in (vx.set_backend, lambda name: vx.use_backend(name).__enter__()):
        with pytest.raises(ValueError, match="name: got 'gpu'"):
            set_one("gpu")


def test_what_is_compiled_takes_the_backend_of_its_block(room):
    def fn(x):
        return x + len(room.resolve(x.device, None))  # "cpu" 3, "triton" 6

    compiled, x = torch.compile(fn, backend="eager", fullgraph=True), torch.zeros((), dtype=torch.float64)
    assert compiled(x) == 3
    with vx.use_backend("triton"):
        assert compiled(x) == 6
        with vx.use_backend("cpu"):
            assert compiled(x) == 3
    assert compiled(x) == 3
    vx.set_backend("triton")
    try:
        assert compiled(x) == 6
    finally:
        vx.set_backend(None)
    assert compiled(x) == 3


@needs_extension
def test_a_backward_pass_runs_on_the_backend_of_its_forward(monkeypatch):
    from vexact_ops.rmsnorm.op import ROOM

    x, used = torch.ones(2, 8, requires_grad=True), []
    module = ROOM.module

    def noting(name):
        used.append(name)
        return module(name)

    with vx.use_backend("cpu"):
        y = vx.rmsnorm(x, torch.ones(8))
    monkeypatch.setattr(ROOM, "module", noting)
    vx.set_backend("triton")
    try:
        y.backward(torch.ones_like(y))
    finally:
        vx.set_backend(None)
    assert used == ["cpu"] and x.grad is not None
