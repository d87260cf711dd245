"""Digests follow what fixes bits, all of it and nothing else. Everything here runs on copies of the sources."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vexact_ops._core import digest

ROOT = Path(__file__).parent.parent
ROOMS = sorted(path.parent.name for path in (ROOT / "vexact_ops").glob("*/op.py"))
COMPILED = {path.parent.name for path in (ROOT / "csrc").glob("*/cpu.cpp")}  # with CPU kernels of their own
# made of linear's
PRODUCTS = {"linear", "grouped_linear", "fused_moe", "linear_cross_entropy", "linear_sample", "linear_silu_mul"}
KINDS = {"cpu": (".cpp", "flags"), "cuda": (".cu", "flags")}


def copy_of(tmp_path, name="copy"):
    """digest.py of a copy of the package, with an extension that is the same in all copies."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    package = shutil.copytree(ROOT / "vexact_ops", tmp_path / name, ignore=ignore)
    spec = importlib.util.spec_from_file_location(name, package / "_core" / "digest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._stored = lambda: {kind: dict.fromkeys(ROOMS, "same") for kind in KINDS}
    return module


def touch(path: Path, old=b"\n", new=b"\n \n"):
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """A copy that nobody changes: what it says of a room it says once."""
    return copy_of(tmp_path_factory.mktemp("digests"), "before")


def changed(before, tmp_path, file, backends, of=lambda d, room, backends: d.sources(room, backends)):
    """The rooms whose digest another byte in one file changes."""
    after = copy_of(tmp_path, "after")
    touch(after.PACKAGE / file)
    return {room for room in ROOMS if of(before, room, backends) != of(after, room, backends)}


def test_the_same_sources_have_the_same_digest_wherever_they_lie(tmp_path):
    one, other = copy_of(tmp_path, "one"), copy_of(tmp_path, "other")
    for path in other.PACKAGE.rglob("*.py"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))  # as a checkout on Windows has them
    for room in ROOMS:
        for backends in (["cpu"], ["triton"], ["cuda", "triton"]):
            assert one.sources(room, backends) == other.sources(room, backends)
        assert one.sources(room, ["cpu"]) != one.sources(room, ["cuda", "triton"])
        assert one.sources(room, ["cuda", "triton"]) == one.sources(room, ("triton", "cuda"))


@pytest.mark.parametrize(
    "file, backends, rooms",
    [
        ("linear/triton.py", ["triton"], PRODUCTS),
        ("linear/cpu.py", ["cpu"], {"linear", "linear_cross_entropy", "linear_sample", "linear_silu_mul"}),
        ("linear/bmm.py", ["cpu"], {"linear"}),
        ("linear/triton.py", ["cpu"], set()),
        ("log_softmax/triton.py", ["triton"], {"log_softmax", "linear_cross_entropy", "sampler", "linear_sample"}),
        ("attention/cute.py", ["cuda"], {"attention"}),
        ("attention/cute.py", ["triton"], set()),
        ("attention/cute_backward.py", ["cuda"], {"attention"}),
        ("attention/cute_backward.py", ["triton"], set()),
        ("attention/metadata.py", ["cpu"], {"attention"}),
        ("kv_cache/cpu.py", ["cpu"], {"kv_cache", "rope"}),
        ("attention/triton_prepare.py", ["cuda"], {"attention"}),
        ("attention/triton_prepare.py", ["triton"], set()),
        ("rmsnorm/triton_backward.py", ["triton"], {"rmsnorm", "rope"}),
        ("rmsnorm/op.py", ["cpu"], {"rmsnorm", "rope"}),
        ("rmsnorm/gated.py", ["cpu"], {"rmsnorm"}),
        ("rmsnorm/reference.py", ["cpu"], set()),
        ("gated_delta/gates.py", ["cpu"], {"gated_delta"}),
        ("gated_delta/triton_backward.py", ["triton"], {"gated_delta"}),
        ("gated_delta/triton_gates.py", ["cpu"], set()),
        ("causal_conv/op.py", ["cpu"], {"causal_conv", "gated_delta"}),
        ("_core/sequences.py", ["cpu", "triton"], set()),
        ("_core/backend.py", ["cpu"], set()),
        ("_core/proof/inputs.py", ["cuda", "triton"], set()),
    ],
)
def test_a_byte_of_a_source_changes_the_rooms_made_of_it(before, tmp_path, file, backends, rooms):
    assert changed(before, tmp_path, file, backends) == rooms


def test_what_the_triton_kernels_share_is_in_all_of_them(before, tmp_path):
    others = {"kv_cache"}  # which has no Triton kernel
    assert changed(before, tmp_path, "_core/triton.py", ["triton"]) == set(ROOMS) - others


def test_a_new_shared_file_counts_without_being_named_anywhere(tmp_path):
    before, after = copy_of(tmp_path, "one"), copy_of(tmp_path, "other")
    for module, value in ((before, "1.0"), (after, "2.0")):
        (module.PACKAGE / "_core" / "constants.py").write_text(f"X = {value}\n")
        touch(
            module.PACKAGE / "mean" / "triton.py",
            b"from .._core.triton",
            b"from .._core import constants\nfrom .._core.triton",
        )
    assert before.sources("mean", ["triton"]) != after.sources("mean", ["triton"])
    assert before.sources("rmsnorm", ["triton"]) == after.sources("rmsnorm", ["triton"])


def test_the_canonical_kernel_is_known_by_its_file_and_what_it_is_composed_of(before, tmp_path):
    def of(module, room, backends):
        return module.canonical(room) if (module.PACKAGE / room / "triton.py").exists() else None

    assert changed(before, tmp_path, "linear/triton.py", None, of) == PRODUCTS
    shutil.rmtree(tmp_path / "after")
    assert changed(before, tmp_path, "linear/cuda.py", None, of) == set(), "a candidate's file"


def test_the_native_part_counts_where_a_file_calls_it(tmp_path):
    module = copy_of(tmp_path)
    found = {backends: module.sources("linear", backends) for backends in (("cpu",), ("cuda", "triton"), ("triton",))}
    module = copy_of(tmp_path, "other")
    module._stored = lambda: {kind: {**dict.fromkeys(ROOMS, "same"), "linear": "new"} for kind in KINDS}
    assert {b: module.sources("linear", b) == d for b, d in found.items()} == {
        ("cpu",): False,
        ("cuda", "triton"): False,
        ("triton",): True,
    }
    assert module.sources("linear_cross_entropy", ["cpu"]) != copy_of(tmp_path, "third").sources(
        "linear_cross_entropy", ["cpu"]
    ), "linear is in it"
    module = copy_of(tmp_path, "missing")
    module._stored = lambda: None
    assert module.sources("linear", ["cpu"]) != found["cpu",]
    assert module.sources("linear", ["triton"]) == found["triton",]


def test_files_and_facts(tmp_path):
    a, b = tmp_path / "a.py", tmp_path / "sub" / "a.py"
    b.parent.mkdir()
    a.write_bytes(b"x\n")
    b.write_bytes(b"x\r\n")
    assert (
        digest.of_files(a) == digest.of_files(str(b)) != digest.of_files(a, quack="1") != digest.of_files(a, quack="2")
    )
    assert digest.of_files(a) != digest.of_files(a, a)
    assert digest.version("torch") and digest.version("no-such-distribution") is None


def csrc_changed(tmp_path, file, kinds=KINDS):
    csrc = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    before = digest.of_csrc(csrc, KINDS)
    if file:
        touch(csrc / file)
    after = digest.of_csrc(csrc, kinds)
    assert before["cpu"].keys() == COMPILED
    return {kind: {r for r in before[kind] if before[kind][r] != after[kind].get(r)} for kind in before}


def test_native_sources(tmp_path):
    expected = {
        "linear/cpu_kernels.cpp": ({"linear", "grouped_linear", "linear_cross_entropy"}, set()),
        "linear/sm90_gemm.cuh": (set(), PRODUCTS - {"fused_moe"}),
        "rmsnorm/cpu_kernels.cpp": ({"rmsnorm"}, set()),
        "common/runtime.cpp": (COMPILED, set()),
        "library.cpp": (set(), set()),
    }
    for number, (file, (cpu, cuda)) in enumerate(expected.items()):
        found = csrc_changed(tmp_path / str(number), file)
        assert found["cpu"] == cpu and found["cuda"] == cuda, file


def test_flags_and_line_endings_of_native_sources(tmp_path):
    found = csrc_changed(tmp_path / "a", None, {**KINDS, "cpu": (".cpp", "other flags")})
    assert found == {"cpu": COMPILED, "cuda": set()}
    csrc = shutil.copytree(ROOT / "csrc", tmp_path / "b")
    before = digest.of_csrc(csrc, KINDS)
    for path in csrc.rglob("*.[hc]*"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert digest.of_csrc(csrc, KINDS) == before
    assert before["cuda"].keys() == {path.parent.name for path in csrc.glob("*/*.cu")} - {"common"}


def test_the_extension_was_built_from_these_sources(tmp_path):
    stored = digest._stored()
    if stored is None:
        pytest.skip("no extension")
    if not stored:
        assert not os.environ.get("CI"), "an extension that was built by setup.py names what it was built from"
        pytest.skip("the extension was built by other means than setup.py")
    # in a process of its own: setuptools does not like to come after a distutils that is imported already
    code = f"""
namespace = {{"__file__": {str(ROOT / "setup.py")!r}}}
text = open(namespace["__file__"]).read()
exec(compile(text.partition("class BuildNative")[0], "setup.py", "exec"), namespace)
print(namespace["source_digests"](namespace["find_nvcc"]() if {"cuda" in stored} else None))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    now = json.loads(done.stdout)
    stale = {kind: [room for room in now[kind] if now[kind][room] != stored[kind].get(room)] for kind in now}
    assert not any(stale.values()), f"built from other sources: {stale}; build it again"


def test_a_build_for_cpus_alone_has_no_kernels_of_another_kind(monkeypatch):
    """Its verdicts, and the tests of them, are those of a machine without nvcc: nothing is missing there."""
    monkeypatch.setattr(digest, "_stored", lambda: {"cpu": {"linear": "built from these"}})
    assert digest.of_extension("linear", "cpu") == "built from these"
    assert digest.of_extension("linear", "cuda") is None
