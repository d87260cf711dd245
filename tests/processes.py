"""A pytest plugin: which tests start Python processes (the mark `process`), each of which imports torch and more: much
of what a run costs. `pytest -m "not process"` is the inner loop.

Marked are the files and tests below, and whatever has the mark itself. What starts a process without it is named at the
end of a run.
"""

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
    "test_triton_interpreted.py",
    "test_typing.py",
    "trainers",  # all in the folder
}
TESTS = {
    "test_hf_training.py": {"test_log_probabilities_are_the_engine_s"},
    "test_hf_wrapped.py": {"test_two_ranks"},
    "test_linear_cross_entropy.py": {"test_training_never_holds_the_logits"},
    "test_explain.py": {
        "test_a_failing_explanation_stops_no_run",
        "test_a_line_for_each_call",
        "test_another_level_is_refused",
        "test_where_it_is_off_nothing_is_in_the_way_of_a_call",
    },
}


def is_marked(item: pytest.Item) -> bool:
    if item.get_closest_marker("process"):
        return True
    path, name = Path(item.path), getattr(item, "originalname", item.name)
    return path.name in FILES or path.parent.name in FILES or name in TESTS.get(path.name, ())


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        if is_marked(item):
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
