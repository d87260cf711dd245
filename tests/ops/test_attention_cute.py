"""flash-attn-4's kernels without flash-attn-4: what calls them imports nothing of what compiles them, and keeps what is
compiled as libraries that load by themselves. The stack is stood in for: none of it need be installed here."""

import ctypes
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from vexact_ops.attention import cute_objects

ROOT = Path(__file__).parent.parent.parent
COMPILERS = ("cutlass", "quack", "flash_attn", "sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes")

PROBE = """
import sys
from vexact_ops.attention import cute
assert cute.cute_backward.tiles(128, 128, True).rows == 64
cute.unavailable()
print([name for name in {names} if name in sys.modules])
"""


def test_calls_import_nothing_of_what_compiles_them():
    pytest.importorskip("triton")
    code = PROBE.format(names=COMPILERS)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


class Made:
    """As a kernel that was just compiled: its object file has a function that is 7 away from its argument."""

    source = "int vexact(int x) { return x + 7; }"
    exported = 0

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        assert function_name == "vexact"
        Made.exported += 1
        source = Path(object_file_path).with_suffix(".c")
        source.write_text(self.source)
        subprocess.run(["cc", "-c", "-fPIC", "-o", object_file_path, str(source)], check=True)


@pytest.fixture
def stack(tmp_path, monkeypatch):
    """A folder of kernels, and a stack that loads what a C compiler makes; yields the names of what was loaded."""
    import shutil

    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    loaded = []

    def load(path, **how):
        if Path(path).parent == tmp_path / "kernels":  # not where it is tried before it is kept
            loaded.append(Path(path).suffix)
        return ctypes.CDLL(path)

    cutlass, runtime, tvm = (types.ModuleType(name) for name in ("cutlass", "cutlass.runtime", "tvm_ffi"))
    runtime.find_runtime_libraries = lambda enable_tvm_ffi: []
    tvm.load_module = load
    for module in (cutlass, runtime, tvm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    monkeypatch.setattr(cute_objects, "_kernels", {})
    monkeypatch.setattr(cute_objects, "_modules", [])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(Made, "exported", 0)
    return loaded


def ask(key=(1,), versions="v1"):
    """The kernel as a process has it that begins now; and whether it was compiled."""
    cute_objects._kernels.clear()
    made = []
    found = cute_objects.kernel(
        "k", torch.device("cuda"), key, lambda: made.append(Made()) or made[0], lambda: versions
    )
    return found, bool(made)


def test_what_was_compiled_is_a_library_that_is_loaded_without_the_compiler(stack, tmp_path):
    assert not cute_objects.kept("v1")
    assert ask()[1] and Made.exported == 1 and stack == []
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".so"]  # nothing else is left there
    assert cute_objects.kept("v1") and not cute_objects.kept("v2")
    del sys.modules["cutlass"], sys.modules["cutlass.runtime"]
    found, compiled = ask()
    assert not compiled and stack == [".so"] and found(1) == 8
    assert "cutlass" not in sys.modules
    sys.modules["cutlass"] = None  # monkeypatch puts it back


def test_compilers_are_imported_ahead_where_nothing_is_kept_alone(stack, monkeypatch):
    pytest.importorskip("triton")
    from vexact_ops.attention import cute

    monkeypatch.setattr(cute, "unavailable", lambda: None)
    monkeypatch.setattr(cute, "versions", lambda: "v1")
    asked = []
    monkeypatch.setattr(cute.importlib, "import_module", lambda name, package: asked.append(name))
    cute.import_ahead()
    assert asked == ["tvm_ffi", ".cute_forward_kernel", ".cute_backward_kernel"]
    asked.clear()
    ask()
    cute.import_ahead()
    assert asked == ["tvm_ffi"]


@pytest.mark.parametrize("key, versions", [((2,), "v1"), ((1,), "v2")])
def test_another_kernel_or_version_is_compiled(key, versions, stack):
    assert ask()[1] and ask(key, versions)[1] and not ask()[1] and not ask(key, versions)[1]


@pytest.mark.parametrize(
    "damage", [lambda b: b[:1000], lambda b: b[:-1], lambda b: b[:64] + b"x" + b[65:], lambda b: b""]
)
def test_a_library_that_is_not_whole_is_never_loaded(damage, stack, tmp_path):
    ask()
    (path,) = (tmp_path / "kernels").glob("*.so")
    path.write_bytes(damage(path.read_bytes()))
    assert ask()[1] and stack == [] and Made.exported == 2
    assert not ask()[1] and stack == [".so"]


@pytest.mark.parametrize("what", ["no linker", "a folder that programs are not loaded from"])
def test_where_no_library_is_had_the_object_is_kept(what, stack, tmp_path, monkeypatch):
    cutlass, runtime = types.ModuleType("cutlass.cute"), types.ModuleType("cutlass.cute.runtime")
    asked = []
    runtime.load_module = lambda path, enable_tvm_ffi: asked.append(path) or types.SimpleNamespace(vexact=lambda x: x)
    cutlass.runtime = runtime
    monkeypatch.setitem(sys.modules, "cutlass.cute", cutlass)
    monkeypatch.setitem(sys.modules, "cutlass.cute.runtime", runtime)
    if what == "no linker":
        monkeypatch.setattr(cute_objects.shutil, "which", lambda name: None)
    else:
        monkeypatch.setattr(sys.modules["tvm_ffi"], "load_module", lambda path: ctypes.CDLL("/nowhere"))
    assert ask()[1]
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".o"]
    assert not ask()[1] and len(asked) == 1 and not cute_objects.kept("v1")


def test_the_tiles_are_those_that_kernels_are_compiled_of():
    pytest.importorskip("flash_attn.cute.interface")
    from vexact_ops.attention import cute_backward, cute_backward_kernel

    for d, dv in ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256)):
        for causal in (True, False):
            cute_backward_kernel.config(d, dv, causal, (cute_backward.tiles(d, dv, causal), cute_backward.SEARCHED))
