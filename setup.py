"""Builds the native extension; everything else about the package is in pyproject.toml.

VEXACT_BUILD        auto (default: CUDA where nvcc is found) | cpu | cuda (fail without nvcc)
VEXACT_CUDA_ARCHS   comma-separated, default "80,90a,100a"
VEXACT_OBJECTS      where objects are kept, default build/objects
VEXACT_SANITIZE     1: the CPU half reports each access beyond a tensor, and undefined behaviour (tests/README.md)
MAX_JOBS            compilers at a time, default one a core

The extension uses torch's stable ABI (target 2.10) and no Python API: one binary serves every supported Python and
torch, and it is built from headers alone, so neither a GPU nor a CUDA build of torch is needed. Every
csrc/<room>/cpu_kernels.cpp is compiled once per instruction set; the fastest one is chosen at run time. A .cu whose
first line is `// archs: 90a` has kernels for that GPU alone, and is compiled for no other that was asked for.

An object's name is a digest of all that it is made from: its source, every header of ours and of torch's that it can
reach, the flags, the compilers' versions. So it serves every later build, in whatever temporary environment, until one
of these changes. `pip install -v` shows what is compiled, for what, and about how long it takes.
"""

import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
STABLE_ABI_TARGET = "0x020a000000000000"  # torch 2.10
# What is fetched to build against where the environment that is installed into has no torch of its own: what CI tests.
TORCH = "torch>=2.10,<2.14"
OLDEST_TORCH = (2, 10)
# No -ffast-math and no contraction: a fused multiply-add happens where the source says fma, and nowhere else.
CXX_FLAGS = [
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wno-unknown-pragmas",
]
NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off"]
ISA_FLAGS = {
    # For CPUs with FMA and no AVX2, which are few: -O1 compiles in a quarter of the time.
    "scalar": ["-mavx", "-mfma", "-mf16c", "-O1", "-fno-tree-vectorize", "-fno-tree-slp-vectorize"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512dq",
        "-mavx512vl",
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mprefer-vector-width=512",
    ],
}
# After the others, so that -O1 holds. Bits stay, and so do the digests of what fixes them. What is left out of
# "undefined" the address sanitizer sees too; with it and variables' places some files take ten times as long.
SANITIZE_FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fno-var-tracking", "-fsanitize=address,undefined"]
SANITIZE_FLAGS += ["-fno-sanitize=bounds,null,object-size"]
if platform.machine() not in ("x86_64", "AMD64"):
    ISA_FLAGS = {"scalar": []}
# About how long one compilation takes on a core of its own (a .cu: for one GPU), for the order and the forecast alone.
SECONDS = {
    ".cpp": 5,
    ".cu": 10,
    "csrc/attention/cuda.cu": 110,
    "csrc/attention/few.cu": 60,
    "csrc/attention/latent.cu": 55,
    "csrc/gated_delta/cpu_kernels.cpp": 25,
    "csrc/grouped_linear/cuda.cu": 40,
    "csrc/grouped_linear/small_m.cu": 25,
    "csrc/linear/cuda.cu": 30,
    "csrc/linear/tiled.cu": 20,
    "csrc/linear_cross_entropy/cuda.cu": 40,
    "csrc/linear_silu_mul/cuda.cu": 30,
    "csrc/linear_silu_mul/wide.cu": 20,
}
KEPT_DAYS = 30  # an object that no build has used for so long goes


def sources(suffix):
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").rglob(f"*{suffix}"))


def sanitized():
    asked = os.environ.get("VEXACT_SANITIZE") or "0"
    if asked not in ("0", "1"):
        raise SystemExit(f"VEXACT_SANITIZE: got {asked!r}, expected 0 or 1")
    return asked == "1"


def find_nvcc():
    home = os.environ.get("CUDA_HOME")
    return (
        shutil.which(f"{home}/bin/nvcc") if home else shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    )


@functools.cache
def find_torch():
    """The folder of a torch to build against, or None: the one that this interpreter would import, else, in an isolated
    build, the one of the environment that is built for. Nothing is imported: only headers and libraries are wanted."""
    spec = importlib.util.find_spec("torch")
    found = [Path(spec.origin).parent] if spec and spec.origin else []
    found += [Path(sysconfig.get_path(name)) / "torch" for name in ("purelib", "platlib")]
    for folder in found:
        version = folder / "version.py"
        number = re.search(r"__version__ = '(\d+)\.(\d+)", version.read_text()) if version.exists() else None
        if number and tuple(map(int, number.groups())) >= OLDEST_TORCH and (folder / "include").is_dir():
            return folder
    return None


def archs_of(source):
    """The GPUs to compile a .cu for: those asked for that it has kernels for. Where that is none, its host code is
    still needed: it is compiled for the first one asked for, on which a launch of its kernels fails with a message."""
    asked = [arch.strip() for arch in os.environ.get("VEXACT_CUDA_ARCHS", "80,90a,100a").split(",")]
    for arch in asked:
        if not re.fullmatch(r"\d{2,3}[af]?", arch):
            raise SystemExit(
                f"VEXACT_CUDA_ARCHS: got {arch!r}, expected names such as 80, 90a or 100a, with commas between"
            )
    with open(ROOT / source) as file:
        declared = re.match(r"// archs: (\w+(?:, \w+)*)\n", file.readline())
    own = declared[1].split(", ") if declared else asked
    return [arch for arch in asked if arch in own] or asked[:1]


def source_digests(nvcc):
    """What fixes the bits of the extension, for vexact_ops.numerics(): its sources and flags. On a CPU no compiler's
    version: fixed order and no contraction leave it nothing to choose; nvcc brings elementary functions of its own."""
    spec = importlib.util.spec_from_file_location("digest", ROOT / "vexact_ops" / "_core" / "digest.py")
    digest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digest)
    kinds = {"cpu": (".cpp", [CXX_FLAGS, ISA_FLAGS])}
    if nvcc:
        kinds["cuda"] = (".cu", [NVCC_FLAGS, run([nvcc, "--version"]).splitlines()[-1]])
    return json.dumps(digest.of_csrc(ROOT / "csrc", kinds))


def defines(source, nvcc):
    """The -D flags of a source: macros that hold for all, then those of its own."""
    flags = ["-DVEXACT_ISAS=" + "".join(f"X({isa})" for isa in ISA_FLAGS)]
    if Path(source).name == "cpu_kernels.cpp":
        return flags
    if Path(source).name == "digests.cpp":
        return ["-DVEXACT_SOURCE_DIGESTS=" + json.dumps(source_digests(nvcc))]  # JSON as a C string
    flags.append(f"-DTORCH_TARGET_VERSION={STABLE_ABI_TARGET}")
    return flags + (["-DUSE_CUDA", "-DVEXACT_WITH_CUDA"] if nvcc else [])


@dataclass(frozen=True)
class Job:
    """One compilation. Its command is compiler, flags, where headers lie, source; `flags` name no folder."""

    source: str
    compiler: str
    flags: tuple[str, ...]
    label: str  # what it is compiled for

    @property
    def seconds(self):
        once = SECONDS.get(self.source) or SECONDS[Path(self.source).suffix]
        return once * max(1, sum(flag.startswith("-gencode") for flag in self.flags))


def plan(cxx, nvcc):
    """Every compilation of a build."""
    jobs = []
    extra = SANITIZE_FLAGS if sanitized() else []
    for source in sources(".cpp"):
        common = [*CXX_FLAGS, *defines(source, nvcc)]
        if Path(source).name != "cpu_kernels.cpp":
            jobs.append(Job(source, cxx, (*common, *extra), "the host"))
            continue
        for isa, flags in ISA_FLAGS.items():
            own = [*common, *flags, f"-DVEXACT_ISA={isa}", f"-DVEXACT_ISA_{isa.upper()}"]
            if isa == "avx512":  # gcc 12 warns of its own headers, thousands of times
                own += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
            jobs.append(Job(source, cxx, (*own, *extra), isa))
    for source in sources(".cu") if nvcc else []:
        archs = archs_of(source)
        gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        flags = [*NVCC_FLAGS, "-lineinfo", *gencode, *defines(source, nvcc)]
        jobs.append(Job(source, nvcc, tuple(flags), ", ".join(f"sm_{arch}" for arch in archs)))
    return jobs


class Objects:
    """The kept objects, and what each one's name is made of."""

    def __init__(self, folder, torch_dir):
        self.folder, self.torch_include = Path(folder), torch_dir / "include"
        self._read = {}

    def _includes(self, path):
        """(digest, included files of ours and of torch's) of one file. All others belong to a compiler's version."""
        if path not in self._read:
            data, found = path.read_bytes(), []
            for mark, name in re.findall(rb'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', data, re.MULTILINE):
                folders = [path.parent, ROOT / "csrc"] if mark == b'"' else []
                here = [folder / name.decode() for folder in [*folders, self.torch_include]]
                found += [Path(os.path.normpath(file)) for file in here if file.is_file()][:1]
            self._read[path] = hashlib.sha256(data).hexdigest(), found
        return self._read[path]

    def reached(self, source):
        """{file: digest} of a source and of every header that it can reach, conditions aside."""
        found, queue = {}, [ROOT / source]
        while queue:
            path = queue.pop()
            if path not in found:
                found[path], more = self._includes(path)
                queue += more
        return found

    def named(self, path):
        """A name that is the same wherever this tree and torch lie."""
        return path.relative_to(self.torch_include if path.is_relative_to(self.torch_include) else ROOT).as_posix()

    def path(self, job):
        parts = [job.source, *job.flags, compiler_version(job.compiler)]
        parts += sorted(f"{self.named(path)} {digest}" for path, digest in self.reached(job.source).items())
        return self.folder / (hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32] + ".o")

    def compile(self, job):
        """Several builds may do so at once: an object appears whole, or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="making-") as making:
            made, listed = Path(making) / "made.o", Path(making) / "made.d"
            headers = ["-Icsrc"]
            if Path(job.source).name != "cpu_kernels.cpp":
                headers += ["-isystem", str(self.torch_include)]
            run([job.compiler, *job.flags, *headers, "-MMD", "-MF", str(listed), "-c", job.source, "-o", str(made)])
            self._check(job, listed.read_text())
            made.replace(self.path(job))

    def _check(self, job, listed):
        """The compiler's list of headers holds none of ours or of torch's that `reached` has not seen."""
        seen = self.reached(job.source)
        for name in listed.replace("\\\n", " ").split(":", 1)[1].split():
            path = Path(os.path.normpath(ROOT / name))
            ours = path.is_relative_to(ROOT / "csrc") or path.is_relative_to(self.torch_include)
            if ours and path not in seen:
                raise SystemExit(f"{job.source} includes {path} in a way that setup.py's reached() does not see")

    def forget_old(self):
        for path in self.folder.iterdir():
            try:
                if time.time() - path.stat().st_mtime > KEPT_DAYS * 86400:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            except FileNotFoundError:  # another build was quicker
                continue


@functools.cache
def compiler_version(compiler):
    """Of nvcc also the host's compiler, which it calls."""
    said = run([compiler, "--version"])
    return said + run(["c++", "--version"]) if Path(compiler).name == "nvcc" else said


def run(command):
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        what = "a C++20 compiler (on Debian and Ubuntu: apt install g++), or set CXX"
        raise SystemExit(f"no compiler {command[0]!r} here: install {what}") from None
    line = " ".join(command)
    if done.returncode:
        raise SystemExit(f"native build failed (exit {done.returncode}):\n{line}\n{done.stdout}{done.stderr}")
    if done.stderr.strip():
        say(f"{line}\n{done.stderr}")
    return done.stdout


def say(text):
    print(f"vexact: {text}", flush=True)  # noqa: T201  a build backend's output: pip shows it with -v


def compilers_at_a_time():
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    if not jobs.isdecimal() or int(jobs) < 1:
        raise SystemExit(f"MAX_JOBS: got {jobs!r}, expected a whole number of 1 or more")
    return int(jobs)


def minutes(seconds):
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


class BuildPython(build_py):
    """The benchmarks go along for `vexact bench`, inside our own package: at the top level they would take a name that
    is not ours to take. A source tree that is installed as it stands has them already."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for source in sorted((ROOT / "benchmarks").rglob("*.py")):
                target = Path(self.build_lib) / "vexact_engine" / "_bench" / source.relative_to(ROOT)
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


class BuildNative(build_ext):
    def build_extension(self, ext):
        mode = os.environ.get("VEXACT_BUILD", "auto")
        if mode not in ("auto", "cpu", "cuda"):
            raise SystemExit(f"VEXACT_BUILD={mode!r}: expected auto, cpu or cuda")
        if mode == "cuda" and sanitized():
            raise SystemExit("VEXACT_SANITIZE=1 is for CPUs alone: got VEXACT_BUILD=cuda, expected auto or cpu")
        nvcc = None if mode == "cpu" or sanitized() else find_nvcc()
        if mode == "cuda" and nvcc is None:
            raise SystemExit("VEXACT_BUILD=cuda, but no nvcc in CUDA_HOME/bin, on PATH or in /usr/local/cuda/bin")
        torch_dir = find_torch()
        if torch_dir is None:
            raise SystemExit(f"no torch to build against: expected {TORCH} in this environment")
        cxx = os.environ.get("CXX", "c++")

        objects = Objects(os.environ.get("VEXACT_OBJECTS", ROOT / "build" / "objects"), torch_dir)
        jobs = plan(cxx, nvcc)
        paths = [objects.path(job) for job in jobs]
        missing = [job for job, path in zip(jobs, paths) if not path.exists()]
        self.compile_all(objects, missing, len(jobs) - len(missing), nvcc)
        for path in paths:
            os.utime(path)
        objects.forget_old()

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        linker = [nvcc, "-cudart", "static"] if nvcc else [cxx]  # nvcc knows where its own libraries are
        linker += SANITIZE_FLAGS if sanitized() else []
        libraries = [f"-L{torch_dir / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".linking-") as linking:
            staged = Path(linking) / target.name
            run([*linker, "-shared", *map(str, paths), *libraries, "-o", str(staged)])
            staged.replace(target)  # a running process keeps the file that it has mapped
        say(f"linked {target.name}")

    def compile_all(self, objects, jobs, kept, nvcc):
        workers = compilers_at_a_time()
        half = "with its CUDA half" if nvcc else "for CPUs alone (no nvcc, or VEXACT_BUILD=cpu)"
        forecast = max([sum(job.seconds for job in jobs) / workers, *(job.seconds for job in jobs)])
        say(f"the extension {half}: {kept} objects are kept in {objects.folder}, {len(jobs)} are to be compiled")
        if jobs:
            say(f"compiling, {workers} at a time: about {minutes(forecast)}")
        lock, done, begin = threading.Lock(), 0, time.perf_counter()

        def compile_one(job):
            nonlocal done
            started = time.perf_counter()
            objects.compile(job)
            with lock:
                done += 1
                seconds = time.perf_counter() - started
                say(f"[{done}/{len(jobs)}] {job.source} for {job.label}: {seconds:.0f} s")

        with ThreadPoolExecutor(workers) as pool:  # the long ones first: none of them is left for the end
            list(pool.map(compile_one, sorted(jobs, key=lambda job: -job.seconds)))
        if jobs:
            say(f"compiled in {minutes(time.perf_counter() - begin)}")

    def get_source_files(self):
        """For the source archive: all that is needed to build and to test, headers and CUDA sources too."""
        suffixes = (".py", ".cpp", ".cu", ".cuh", ".h", ".md", ".json", ".jsonl", ".gz", ".svg", ".png", ".typed")
        folders = ("csrc", "vexact_ops", "vexact_engine", "benchmarks", "tests")
        files = sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes)
        return [path.relative_to(ROOT).as_posix() for path in files]

    def get_ext_filename(self, name):
        return name.replace(".", os.sep) + ".abi3.so"


class Abi3Wheel(bdist_wheel):
    def finalize_options(self):
        self.py_limited_api = "cp310"
        super().finalize_options()


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("vexact_ops._native", sources=sources(".cpp"), py_limited_api=True)],
        cmdclass={"build_py": BuildPython, "build_ext": BuildNative, "bdist_wheel": Abi3Wheel},
        setup_requires=[] if find_torch() else [TORCH],
    )
