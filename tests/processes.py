"""A pytest plugin: which tests start Python processes (the mark `process`), each of which imports torch and more: much
of what a run costs. `pytest -m "not process"` is the inner loop.

Marked are the files below, tests that start one in their own file, and whatever has the mark itself. What starts a
process without it is named at the end of a run.
"""

import ast
import functools
import os
import sys
from pathlib import Path

import pytest

FILES = {
    "test_benchmark_commands.py",
    "test_build.py",
    "test_handover_killed.py",
    "test_handover_many.py",
    "test_import.py",
    "test_package.py",
    "test_pipeline.py",
    "test_pipeline_costs.py",
    "test_pipeline_gpu.py",
    "test_recipe.py",
    "test_replicas.py",
    "test_serve_process.py",
    "test_soak.py",
    "test_stalled.py",
    "test_triton_interpreted.py",
    "test_typing.py",
    "trainers",  # all in the folder
}
START = {"subprocess", "Popen", "multiprocessing", "ProcessPoolExecutor"}
PYTHON = {"executable", "multiprocessing", "ProcessPoolExecutor"}  # not git or nvidia-smi


@functools.cache
def tests_of(path: Path) -> set[str]:
    """The tests of a file that start one, in functions and fixtures of the same file too."""
    text = path.read_text()
    if not any(word in text for word in START):
        return set()
    tree = ast.parse(text)
    uses = {node.name: _names(node) for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    found = {name for name, used in uses.items() if _any(used, START) and _any(used, PYTHON)}
    while more := {name for name, used in uses.items() if used & found} - found:
        found |= more
    return {name for name in found if name.startswith("test_")}


def _any(used: set[str], names: set[str]) -> bool:
    return any(name.lstrip(".") in names for name in used)


def _names(node: ast.AST) -> set[str]:
    """All that is named in a function, its arguments (fixtures) among it."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            found.add(inner.id)
        elif isinstance(inner, ast.arg):
            found.add(inner.arg)
        elif isinstance(inner, ast.Attribute):
            found.add(f".{inner.attr}")  # subprocess.run is no function of the file that is called run
    return found


def is_whole(path: Path) -> bool:
    """Whether a file's tests are marked by where they are."""
    return path.name in FILES or path.parent.name in FILES


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        path, name = Path(item.path), getattr(item, "originalname", None) or item.name
        if is_whole(path) or name in tests_of(path):
            item.add_marker(pytest.mark.process)


class Processes:
    """Notes in a test's report that it has started a Python process, and names those without the mark."""

    def __init__(self):
        self._started = 0
        sys.addaudithook(self._audit)

    def _audit(self, event: str, args: tuple) -> None:
        if event in ("subprocess.Popen", "os.posix_spawn", "os.exec"):
            self._started += "python" in Path(os.fsdecode(args[0])).name
        elif event in ("os.fork", "os.forkpty"):
            self._started += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = self._started
        try:
            return (yield)
        finally:
            if self._started > before and not item.get_closest_marker("process"):
                item.user_properties.append(("started_a_process", True))

    def pytest_terminal_summary(self, terminalreporter):
        reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ()) if r.when == "call"]
        for name in sorted(r.nodeid for r in reports if "started_a_process" in dict(r.user_properties)):
            terminalreporter.write_line(f"starts a process, without the mark `process`: {name}", yellow=True)
