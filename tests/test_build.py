"""The build keeps objects by what they are made of, compiles what there is, and its source archive is whole."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CUDA_SOURCES = sorted((ROOT / "csrc").rglob("*.cu"))


def script(folder: Path):
    """setup.py of a tree, as a module: nothing is built."""
    spec = importlib.util.spec_from_file_location("vexact_setup", folder / "setup.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ours():
    return script(ROOT)


@pytest.fixture
def tree(tmp_path):
    """A copy of what a build reads."""
    for name in ("csrc", "vexact_ops/_core"):
        shutil.copytree(ROOT / name, tmp_path / "tree" / name, ignore=shutil.ignore_patterns("__pycache__"))
    return Path(shutil.copy(ROOT / "setup.py", tmp_path / "tree")).parent


def names(build, torch_dir=None):
    """{(source, what for): name of its object}"""
    objects = build.Objects("objects", torch_dir or build.find_torch())
    return {(job.source, job.label): objects.path(job).name for job in build.plan("c++", None)}


# --- names of objects -------------------------------------------------------------------------------------------------


def test_a_name_does_not_depend_on_where_the_tree_and_torch_lie(ours, tree, tmp_path):
    (tmp_path / "elsewhere").symlink_to(ours.find_torch())
    found = names(ours)
    assert names(script(tree), tmp_path / "elsewhere") == found
    assert len(set(found.values())) == len(found)


@pytest.mark.parametrize(
    "header, changed",
    [
        ("linear/kernels.h", {"csrc/linear/cpu.cpp", "csrc/linear/cpu_kernels.cpp", "csrc/digests.cpp"}),
        ("common/tensor.h", None),  # everything that binds tensors, no kernel
    ],
)
def test_a_changed_header_renames_what_reaches_it(ours, tree, header, changed):
    before = names(ours)
    with open(tree / "csrc" / header, "a") as file:
        file.write("\n")
    after = names(script(tree))
    found = {key[0] for key in before if before[key] != after[key]}
    kernels = {source for source, _ in before if source.endswith("cpu_kernels.cpp")}
    if changed is None:
        assert "csrc/rmsnorm/cpu.cpp" in found and not found & kernels
    else:
        assert found >= changed and "csrc/rmsnorm/cpu.cpp" not in found


def test_a_changed_header_of_torch_renames_what_reaches_it(ours, tmp_path):
    torch_dir = ours.find_torch()
    job = next(job for job in ours.plan("c++", None) if job.source == "csrc/library.cpp")
    objects = ours.Objects("objects", torch_dir)
    theirs = [path for path in objects.reached(job.source) if path.is_relative_to(torch_dir)]
    assert any(path.name == "library.h" for path in theirs)
    for path in theirs:
        copy = tmp_path / "torch" / path.relative_to(torch_dir)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    other = ours.Objects("objects", tmp_path / "torch")
    assert other.path(job) == objects.path(job)
    next((tmp_path / "torch").rglob("library.h")).write_text("// another version\n")
    assert ours.Objects("objects", tmp_path / "torch").path(job) != objects.path(job)


def test_flags_and_compilers_are_in_the_name(ours, monkeypatch):
    before = names(ours)
    monkeypatch.setattr(ours, "CXX_FLAGS", [*ours.CXX_FLAGS, "-g"])
    assert not set(names(ours).values()) & set(before.values())
    monkeypatch.undo()
    monkeypatch.setattr(ours, "compiler_version", lambda compiler: "another")
    assert not set(names(ours).values()) & set(before.values())


def test_a_sanitized_build_has_objects_of_its_own_and_says_that_it_computes_the_same(ours, monkeypatch):
    before, digests = names(ours), ours.source_digests(None)
    monkeypatch.setenv("VEXACT_SANITIZE", "1")
    assert not set(names(ours).values()) & set(before.values())
    assert ours.source_digests(None) == digests
    monkeypatch.setenv("VEXACT_SANITIZE", "0")
    assert names(ours) == before


# --- compiling --------------------------------------------------------------------------------------------------------


def test_an_object_is_made_once_and_whole_by_builds_at_the_same_time(ours, tmp_path):
    code = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('b', 'setup.py')\n"
        "b = sys.modules['b'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(b)\n"
        "job = next(j for j in b.plan('c++', None) if j.source == 'csrc/digests.cpp')\n"
        "objects = b.Objects(sys.argv[1], b.find_torch()); objects.compile(job)\n"
        "print(objects.path(job).stat().st_size)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "objects")]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in running]
    assert said[0] == said[1] and int(said[0]) > 0
    assert len(list((tmp_path / "objects").iterdir())) == 1  # nothing half made is left


def test_a_header_that_the_search_cannot_see_fails_the_build(tree):
    build = script(tree)
    (tree / "csrc" / "hidden.h").write_text("\n")
    with open(tree / "csrc" / "digests.cpp", "a") as file:
        file.write('#define HEADER "hidden.h"\n#include HEADER\n')
    job = next(job for job in build.plan("c++", None) if job.source == "csrc/digests.cpp")
    with pytest.raises(SystemExit, match=r"includes .*hidden\.h"):
        build.Objects(tree / "objects", build.find_torch()).compile(job)


def test_old_objects_go(ours, tmp_path):
    for name, age in (("old.o", ours.KEPT_DAYS + 1), ("new.o", ours.KEPT_DAYS - 1)):
        (tmp_path / name).touch()
        then = (tmp_path / name).stat().st_mtime - age * 86400
        os.utime(tmp_path / name, (then, then))
    ours.Objects(tmp_path, ours.find_torch()).forget_old()
    assert [path.name for path in tmp_path.iterdir()] == ["new.o"]


def test_the_torch_of_the_environment_is_built_against_where_there_is_one(ours, tmp_path, monkeypatch):
    """An isolated build imports nothing of the environment that it builds for, but it may use its headers."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    found = ours.find_torch.__wrapped__
    assert found() is None
    (tmp_path / "torch" / "include").mkdir(parents=True)
    for version, usable in (("2.9.1", False), ("2.10.0+cpu", True), ("2.15.0", True), ("3.0.0", True)):
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '{version}'\n")
        assert found() == (tmp_path / "torch" if usable else None), version


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("CXX", "no-such-compiler", "no compiler 'no-such-compiler' here: install a C"),
        ("MAX_JOBS", "two", "MAX_JOBS: got 'two', expected a whole number of 1 or more"),
        ("MAX_JOBS", "0", "MAX_JOBS: got '0'"),
        ("VEXACT_CUDA_ARCHS", "90a,9.0", "VEXACT_CUDA_ARCHS: got '9.0', expected names such as 80, 90a"),
        ("VEXACT_CUDA_ARCHS", "", "VEXACT_CUDA_ARCHS: got ''"),
        ("VEXACT_SANITIZE", "yes", "VEXACT_SANITIZE: got 'yes', expected 0 or 1"),
    ],
)
def test_what_was_mistyped_or_is_not_there_is_said_in_a_line(ours, monkeypatch, name, value, said):
    monkeypatch.setenv(name, value)
    asks = {
        "CXX": lambda: ours.compiler_version.__wrapped__(value),
        "MAX_JOBS": ours.compilers_at_a_time,
        "VEXACT_CUDA_ARCHS": lambda: ours.archs_of("csrc/kv_cache/cuda.cu"),
        "VEXACT_SANITIZE": ours.sanitized,
    }
    with pytest.raises(SystemExit, match=f"^{said}"):
        asks[name]()


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_a_source_is_compiled_for_the_gpus_that_it_has_kernels_for(ours, monkeypatch):
    def archs(asked):
        monkeypatch.setenv("VEXACT_CUDA_ARCHS", asked)
        return {name: ours.archs_of(f"csrc/{name}/cuda.cu") for name in ("attention", "kv_cache")}

    assert archs("80,90a,100a") == {"attention": ["90a"], "kv_cache": ["80", "90a", "100a"]}
    assert archs("90a") == {"attention": ["90a"], "kv_cache": ["90a"]}
    assert archs("80, 86") == {"attention": ["80"], "kv_cache": ["80", "86"]}  # its host code is needed anywhere
    monkeypatch.setattr(ours, "source_digests", lambda nvcc: "")  # which asks nvcc for its version
    flags = [job.flags for job in ours.plan("c++", "nvcc") if job.source == "csrc/kv_cache/cuda.cu"]
    assert "-gencode=arch=compute_86,code=sm_86" in flags[0]


@pytest.mark.parametrize("source", CUDA_SOURCES, ids=lambda p: p.relative_to(ROOT / "csrc").as_posix())
def test_what_is_for_sm90_alone_is_declared_so(ours, source):
    reached = ours.Objects("objects", ours.find_torch()).reached(source.relative_to(ROOT).as_posix())
    for_sm90 = any("__CUDA_ARCH_FEAT_SM90_ALL" in path.read_text() for path in reached if path.is_relative_to(ROOT))
    assert source.read_text().startswith("// archs: 90a\n") == for_sm90


def test_no_launch_goes_unchecked():
    """Where a kernel was not compiled for the GPU at hand, its launch says so: it must be asked."""
    for path in (ROOT / "csrc").rglob("*.cu*"):
        text = path.read_text()
        for found in re.finditer(r"<<<", text):
            after = text[found.end() : found.end() + 700].split(">>>", 1)[1]
            statement, rest = after.split(";", 1)
            assert re.match(r"\s*(VX_CUDA_CHECK\(|return )cudaGetLastError\(\)", rest), f"{path.name}: {statement}"
        for found in re.finditer(r"launch_(?:chained|following)\((?!void)", text):
            before = text[: found.start()].rstrip().removesuffix("sm90::").rstrip()
            assert re.search(r"(VX_CUDA_CHECK\(|return|\(void\)|cudaError_t|=|\?|:)$", before), f"{path.name}"


# --- what is shipped --------------------------------------------------------------------------------------------------


def setup_py(folder, *commands):
    """Run commands of setup.py that leave nothing in this tree."""
    line = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(folder), *commands]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_source_archive_holds_every_file(tmp_path):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    setup_py(tmp_path, "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        held = {name.split("/", 1)[1] for name in opened.getnames() if "/" in name}
    wanted = {name for name in tracked.stdout.splitlines() if not name.startswith(".") and (ROOT / name).exists()}
    assert wanted - held == set()
    top = {name.split("/")[0] for name in held} - {name.split("/")[0] for name in wanted}
    assert top <= {"PKG-INFO", "setup.cfg", "vexact.egg-info"}
    assert not [name for name in held if name.endswith((".so", ".pyc", ".o"))]


def test_type_checkers_may_use_what_is_installed(tmp_path):
    setup_py(tmp_path, "build_py", "--build-lib", str(tmp_path))
    assert (tmp_path / "vexact_ops" / "py.typed").exists() and (tmp_path / "vexact_engine" / "py.typed").exists()


def test_the_benchmarks_go_along_inside_our_own_package(tmp_path):
    """As installed: `vexact bench` from a folder without a source tree, on what build_py has put together."""
    setup_py(tmp_path, "build_py", "--build-lib", str(tmp_path / "lib"))
    assert not (tmp_path / "lib" / "benchmarks").exists(), "a name at the top level that is not ours to take"
    for native in (ROOT / "vexact_ops").glob("_native*"):
        (tmp_path / "lib" / "vexact_ops" / native.name).symlink_to(native)
    measure = [
        "mean",
        "--device",
        "cpu",
        "--shape",
        "smollm2-135m",
        "--rows",
        "1",
        "--repeats",
        "1",
        "--peers",
        "torch",
    ]
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "lib")}

    def bench(*argv):
        command = [sys.executable, "-m", "vexact_engine.cli", "bench", *argv]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    done = bench(*measure, "--json", "found.json")
    assert done.returncode == 0 and "smollm2-135m" in done.stdout, done.stderr
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["schema"] == "vexact.bench" and document["command"].startswith("vexact bench mean ")
    assert document["records"][0]["room"] == "mean" and document["records"][0]["bits_equal"] is True
    # of one process, which takes three seconds to begin: a refusal, then the help, which ends it
    refused = ["bench", *measure, "--save"]
    code = f"from vexact_engine import cli; print(cli.main({refused})); cli.main(['bench', '--help'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "expected one: --lines FILE" in done.stderr
    assert done.stdout.startswith("2\nusage: vexact bench") and "examples:" in done.stdout
