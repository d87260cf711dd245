"""Builds the native extension; everything else about the package is in pyproject.toml.

VEXACT_BUILD        auto (default: CUDA where nvcc is found) | cpu | cuda (fail without nvcc)
VEXACT_CUDA_ARCHS   comma-separated, default "80,90a,100a"

The extension uses torch's stable ABI (target 2.10) and no Python API: one binary serves every supported Python and
torch, and it is built from headers alone, so neither a GPU nor a CUDA build of torch is needed. Every
csrc/<room>/cpu_kernels.cpp is compiled once per instruction set; the fastest one is chosen at run time.
"""

import importlib.util
import json
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
STABLE_ABI_TARGET = "0x020a000000000000"  # torch 2.10
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
ISA_FLAGS = {
    "scalar": ["-mavx", "-mfma", "-mf16c", "-fno-tree-vectorize", "-fno-tree-slp-vectorize"],
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
if platform.machine() not in ("x86_64", "AMD64"):
    ISA_FLAGS = {"scalar": []}


NVCC_FLAGS = ["-O3", "-std=c++20", "--fmad=false"]


def sources(suffix):
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob(f"*{suffix}"))


def find_nvcc():
    home = os.environ.get("CUDA_HOME")
    return (
        shutil.which(f"{home}/bin/nvcc") if home else shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    )


def source_digests(nvcc):
    """What fixes the bits of the extension, for vexact_ops.numerics(): its sources and flags. On a CPU no compiler's
    version: fixed order and no contraction leave it nothing to choose; nvcc brings elementary functions of its own."""
    spec = importlib.util.spec_from_file_location("digest", ROOT / "vexact_ops" / "_core" / "digest.py")
    digest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digest)
    kinds = {"cpu": (".cpp", [CXX_FLAGS, ISA_FLAGS])}
    if nvcc:
        release = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()
        kinds["cuda"] = (".cu", [NVCC_FLAGS, release[-1]])
    return json.dumps(digest.of_csrc(ROOT / "csrc", kinds))


class BuildNative(build_ext):
    def build_extension(self, ext):
        mode = os.environ.get("VEXACT_BUILD", "auto")
        if mode not in ("auto", "cpu", "cuda"):
            raise SystemExit(f"VEXACT_BUILD={mode!r}: expected auto, cpu or cuda")
        nvcc = None if mode == "cpu" else find_nvcc()
        if mode == "cuda" and nvcc is None:
            raise SystemExit("VEXACT_BUILD=cuda, but no nvcc in CUDA_HOME/bin, on PATH or in /usr/local/cuda/bin")

        import torch  # only its location: torch.utils.cpp_extension would insist on a matching CUDA toolkit

        torch_dir = Path(torch.__file__).parent
        defines = [
            f"-DTORCH_TARGET_VERSION={STABLE_ABI_TARGET}",
            "-DVEXACT_ISAS=" + "".join(f"X({i})" for i in ISA_FLAGS),
        ]
        if nvcc:
            defines += ["-DUSE_CUDA", "-DVEXACT_WITH_CUDA"]
        includes = ["-I" + str(ROOT / "csrc"), "-isystem", str(torch_dir / "include")]
        build = Path(self.build_temp).resolve()
        cxx = os.environ.get("CXX", "c++")

        jobs = []  # (object, command)
        for source in sources(".cpp"):
            is_kernel = Path(source).name == "cpu_kernels.cpp"
            for isa in ISA_FLAGS if is_kernel else [None]:
                flags = [*ISA_FLAGS[isa], f"-DVEXACT_ISA={isa}", f"-DVEXACT_ISA_{isa.upper()}"] if isa else []
                out = build / (source.replace(os.sep, "_") + (f".{isa}.o" if isa else ".o"))
                if Path(source).name == "digests.cpp":
                    flags = ["-DVEXACT_SOURCE_DIGESTS=" + json.dumps(source_digests(nvcc))]  # JSON as a C string
                inc = includes[:1] if is_kernel else includes
                jobs.append((out, [cxx, *CXX_FLAGS, *flags, *defines, *inc, "-MMD", "-c", source, "-o", str(out)]))
        if nvcc:
            archs = os.environ.get("VEXACT_CUDA_ARCHS", "80,90a,100a").split(",")
            gencode = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
            host = "-fPIC,-fvisibility=hidden,-ffp-contract=off"
            for source in sources(".cu"):
                out = build / (source.replace(os.sep, "_") + ".o")
                command = [nvcc, *NVCC_FLAGS, *gencode, "-Xcompiler", host, "-lineinfo", *defines]
                jobs.append((out, [*command, *includes, "-MMD", "-c", source, "-o", str(out)]))

        build.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
            list(pool.map(lambda job: self.compile_if_stale(*job), jobs))

        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        linker = [nvcc, "-cudart", "static"] if nvcc else [cxx]  # nvcc knows where its own libraries are
        link = [
            *linker,
            "-shared",
            *(str(out) for out, _ in jobs),
            f"-L{torch_dir / 'lib'}",
            "-ltorch",
            "-ltorch_cpu",
            "-lc10",
        ]
        staged = target.with_suffix(".tmp")
        self.run_command_line([*link, "-o", str(staged)])
        staged.replace(target)  # a running process keeps the file that it has mapped

    def compile_if_stale(self, out, command):
        """An incremental build: the object is newer than all the headers that the compiler listed for it."""
        deps, stamp = out.with_suffix(".d"), out.with_suffix(".cmd")
        line = " ".join(command)
        if out.exists() and deps.exists() and stamp.exists() and stamp.read_text() == line:
            files = deps.read_text().replace("\\\n", " ").split(":", 1)[1].split()
            built = out.stat().st_mtime
            if all(os.path.exists(f) and os.path.getmtime(f) < built for f in files):
                return
        self.run_command_line(command)
        stamp.write_text(line)

    def run_command_line(self, command):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode or done.stderr.strip():
            self.announce(" ".join(command) + "\n" + done.stdout + done.stderr, level=4 if done.returncode else 3)
        if done.returncode:
            raise SystemExit(
                f"native build failed (exit {done.returncode}):\n{' '.join(command)}\n{done.stdout}{done.stderr}"
            )

    def get_ext_filename(self, name):
        return name.replace(".", os.sep) + ".abi3.so"


class Abi3Wheel(bdist_wheel):
    def finalize_options(self):
        self.py_limited_api = "cp310"
        super().finalize_options()


setup(
    ext_modules=[Extension("vexact_ops._native", sources=sources(".cpp"), py_limited_api=True)],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": Abi3Wheel},
)
