"""The README's two commands as a stranger has them: in a clean clone of this commit, a new environment and an empty
cache, so that what they need is downloaded and compiled. How long each takes, and what it says at its end.

python -m benchmarks commands --lines benchmarks/results/commands.jsonl && python tests/readme.py write
python -m benchmarks commands --case demo

Half an hour on two cores, most of it tests. The README shows the newest records, and says so where other processes were
at work: `others` is how many cores they had on average while a command and what installs it ran.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from vexact_engine.weights.fetch import SMOLLM2

from .harness import ROOT
from .output import Refused

# As the README has them: what installs, what follows. The second finds the first one's environment and objects.
COMMANDS = {
    "demo": ('pip install -e ".[demo]"', "vexact demo"),
    "tests": ('pip install -e ".[test]"', "pytest"),
}
_ABOUT = """
import json, platform
from benchmarks.harness import environment
print(json.dumps({**environment("cpu"), "python": platform.python_version()}))
"""


def run(args: argparse.Namespace) -> Iterator[dict]:
    """A record for each command."""
    if not (ROOT / ".git").exists():
        raise Refused("commands: expected a checkout: a clean clone of its commit is made")
    with tempfile.TemporaryDirectory(prefix="vexact-") as folder:
        clone, own = Path(folder) / "clone", Path(folder) / "environment"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        subprocess.run([sys.executable, "-m", "venv", str(own)], check=True)
        env = clean(os.environ, own, Path(folder) / "cache")
        for name, lines in COMMANDS.items():
            if args.case is None or args.case in name:
                yield measure(name, lines, clone, env) | {"device": args.device}


def clean(env: dict[str, str], own: Path, cache: Path) -> dict[str, str]:
    """Variables without what an environment, a checkout or our options have added."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PIP_CACHE_DIR", "TRITON_CACHE_DIR")
    kept = {name: value for name, value in env.items() if name not in ours and not name.startswith("VEXACT_")}
    return kept | {
        "PATH": f"{own / 'bin'}{os.pathsep}{env.get('PATH', '')}",
        "XDG_CACHE_HOME": str(cache),
    }


def measure(name: str, lines: tuple[str, str], clone: Path, env: dict[str, str]) -> dict:
    before = cpu_seconds()
    install_s, told = timed(lines[0], clone, env | {"PIP_VERBOSE": "1"})  # it says what is compiled
    seconds, said = timed(lines[1], clone, env)
    everyone, ours = (after - then for after, then in zip(cpu_seconds(), before))
    about = subprocess.run(["python", "-c", _ABOUT], cwd=clone, env=env, check=True, capture_output=True, text=True)
    return {
        "room": "commands",
        "case": name,
        "backend": "vexact",
        "command": " && ".join(lines),
        "install_s": round(install_s, 1),
        **compiled(told),
        "seconds": round(seconds, 1),
        **(printed(said) if name == "demo" else passed(said)),
        "others": round(max(0.0, everyone - ours) / (install_s + seconds), 2),
        "cores": len(os.sched_getaffinity(0)),
        "nvcc": nvcc(env),
        **json.loads(about.stdout),
    }


def cpu_seconds() -> tuple[float, float]:
    """Processor time so far: of all processes of this machine (and of others that it shares a processor with), and of
    ours that have ended."""
    with open("/proc/stat") as lines:
        user, nice, system, _idle, _waiting, *more = map(int, lines.readline().split()[1:9])
    of_children = os.times()
    everyone = (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")
    return everyone, of_children.children_user + of_children.children_system


def timed(line: str, folder: Path, env: dict[str, str]) -> tuple[float, list[tuple[float, str]]]:
    """Seconds, and what was said when. A command that fails measures nothing."""
    begin, said = time.perf_counter(), []
    argv = shlex.split(line)
    with subprocess.Popen(
        argv, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for text in process.stdout:
            said.append((time.perf_counter() - begin, text.rstrip("\n")))
    if process.returncode:
        end = "\n".join(text for _, text in said[-30:])
        raise RuntimeError(f"{line}: exit code {process.returncode}\n{end}")
    return time.perf_counter() - begin, said


def compiled(said: list[tuple[float, str]]) -> dict:
    """How many objects were compiled, in how many seconds, and whether kernels of a GPU were among them."""
    found = {"compiled": None, "compile_s": 0.0, "cuda": None}
    begin = 0.0
    for at, text in said:
        if match := re.search(r"vexact: the extension (with its CUDA half)?.*, (\d+) are to be compiled", text):
            begin, found["cuda"], found["compiled"] = at, match[1] is not None, int(match[2])
        elif "vexact: compiled in " in text:
            found["compile_s"] = round(at - begin, 1)
    if found["compiled"] is None:
        raise ValueError("commands: the build did not say how much it compiled")
    return found


def printed(said: list[tuple[float, str]]) -> dict:
    """The demo's table and verdict, and the bytes that it fetched."""
    lines = [text for _, text in said]
    begin = next(i for i, text in enumerate(lines) if text.startswith("rollout -> trainer"))
    end = next(i for i, text in enumerate(lines) if re.match(r"\d+ s in all", text))
    return {"fetched": SMOLLM2.wheel_bytes, "printed": lines[begin:end]}


def passed(said: list[tuple[float, str]]) -> dict:
    """How many tests passed and were skipped."""
    last = next(text for _, text in reversed(said) if " passed" in text)
    count = {word: int(number) for number, word in re.findall(r"(\d+) (passed|skipped)", last)}
    return {"passed": count["passed"], "skipped": count.get("skipped", 0)}


def nvcc(env: dict[str, str]) -> str | None:
    """The version of the compiler of CUDA that the build finds; None: the CPU half alone was built."""
    code = "import setup; print(setup.find_nvcc() or '')"
    found = subprocess.run(["python", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True).stdout.strip()
    if not found:
        return None
    told = subprocess.run([found, "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"release ([\d.]+)", told)[1]
