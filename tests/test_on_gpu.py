"""The tests' own infrastructure: what is for a GPU, what used it, and Ctrl-C where it is ignored."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import on_gpu
import pytest
import torch
from on_gpu import spread, take_turns

TESTS = Path(__file__).parent


def run_toy(tmp_path, body, *options, **how):
    """pytest on one file with our conftest; what it printed."""
    (tmp_path / "test_toy.py").write_text(body)
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command += ["-p", "conftest", "-W", "ignore", *options, str(tmp_path / "test_toy.py")]
    env = {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "PATH": "", "HOME": str(tmp_path)}
    return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, **how).stdout


TOY = """
import pytest

on_gpu = pytest.mark.skipif(True, reason="no CUDA device is visible to torch")

@on_gpu
def test_by_its_reason(): pass

@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_by_its_parameter(device): pass

@pytest.mark.cuda
def test_by_its_mark(): pass

def test_cuda_in_its_name_alone(): pass

@pytest.mark.skipif(True, reason="triton is not installed")
def test_skipped_for_another_reason(): pass
"""


def test_what_is_for_a_gpu(tmp_path):
    said = run_toy(tmp_path, TOY, "-m", "cuda", "--collect-only", "-q")
    found = [line.partition("::")[2] for line in said.splitlines() if "::" in line]
    assert found == ["test_by_its_reason", "test_by_its_parameter[cuda]", "test_by_its_mark"]


@pytest.mark.parametrize(
    "before,gpus,then",
    [
        ({"PYTEST_XDIST_WORKER": "gw0"}, 2, "0,1"),
        ({"PYTEST_XDIST_WORKER": "gw3"}, 2, "1,0"),
        ({"PYTEST_XDIST_WORKER": "gw5", "CUDA_VISIBLE_DEVICES": "4, GPU-7,6"}, 3, "6,4,GPU-7"),
        ({"PYTEST_XDIST_WORKER": "gw1"}, 1, None),
        ({"PYTEST_XDIST_WORKER": "master"}, 2, None),
        ({}, 2, None),
    ],
)
def test_processes_take_gpus_by_turns(before, gpus, then):
    environment = dict(before)
    take_turns(environment, gpus)
    assert environment.get("CUDA_VISIBLE_DEVICES") == then


def test_ctrl_c_where_it_is_ignored(tmp_path):
    body = """
import signal, pytest

def test_ours(ctrl_c):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

def test_ignored_again():
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
"""
    ignored = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    assert "2 passed" in run_toy(tmp_path, body, preexec_fn=ignored)


def test_tests_that_raise_sigint_handle_it_themselves():
    found = 0
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and path.name != "test_on_gpu.py":
                used = {ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                # os.kill with SIGKILL is for another process, and so is kill of a process's own object; nobody ignores
                # SIGTERM, or SIGALRM, for which a test has a handler of its own
                raises = bool(used & {"signal.raise_signal", "os.kill"})
                raises &= not used & {"signal.SIGKILL", "signal.SIGTERM", "signal.SIGALRM"}
                found += raises
                assert not raises or "ctrl_c" in [a.arg for a in node.args.args], f"{path.name}: {node.name}"
    assert found


@pytest.mark.parametrize(
    "cores, gib, gpus, count",
    [
        (2, None, 0, 3),
        (16, None, 0, 8),
        (64, None, 0, 8),
        (16, 139, 1, 16),
        (128, 139, 1, 17),
        (128, 139, 2, 34),
        (32, 139, 2, 32),
        (4, 16, 1, 2),
    ],
)
def test_how_many_processes(monkeypatch, cores, gib, gpus, count):
    monkeypatch.setattr(on_gpu.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gib is not None)
    properties = type("Properties", (), {"total_memory": (gib or 0) << 30})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert on_gpu.processes() == count


@pytest.mark.parametrize("count, processes", [(40, 16), (100, 7), (5, 8), (3, 1)])
def test_long_ones_are_the_first_of_each_process(count, processes):
    class Item:
        def __init__(self, number):
            self.number, self.long = number, number % 9 == 8

        def get_closest_marker(self, name):
            return self.long and name == "long"

    items = [Item(number) for number in range(count)]
    spread(items, processes)
    assert sorted(item.number for item in items) == list(range(count))
    others = [item.number for item in items if not item.long]
    assert others == sorted(others)
    place = 0
    for process in range(processes):  # as --dist=worksteal cuts the list
        part = items[place : place + (count - place) // (processes - process)]
        place += len(part)
        found = [item.long for item in part]
        assert found == sorted(found, reverse=True)
    if count == 40:  # four of them: four processes begin one at once
        assert sum(item.long for item in items[0:8:2]) == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_what_used_the_gpu_is_counted(tmp_path):
    body = """
import torch, pytest

@pytest.mark.cuda
def test_marked(): torch.zeros(1 << 20, device="cuda")

def test_unmarked(): torch.zeros(1, device="cuda")

@pytest.mark.cuda
def test_marked_alone(): pass
"""
    said = run_toy(tmp_path, body, "-n", "2")
    assert "2 tests ran on" in said and "0 failed, 0 for a GPU were skipped" in said
    assert [line for line in said.splitlines() if "without the mark" in line and "test_unmarked" in line]


def test_what_could_not_be_made_once_is_not_tried_again(tmp_path):
    body = """
import pytest
from conftest import made_once

tries = []

def make(folder):
    tries.append(folder)
    raise OSError("the first reason")

@pytest.mark.parametrize("i", range(2))
def test_made(tmp_path_factory, i):
    made_once(tmp_path_factory, "thing", make)

def test_once(): assert len(tries) == 1
"""
    out = run_toy(tmp_path, body, "-n0", "--tb=short")
    assert "2 failed, 1 passed" in out, out
    assert "could not be made by another process" in out and out.count("the first reason") >= 2, out


def test_what_starts_a_process_is_marked(tmp_path):
    """By itself, by what it calls, or by a fixture of its file; other commands than Python are no matter."""
    import processes

    file = tmp_path / "test_toy.py"
    file.write_text("""
import subprocess, sys
def run():
    return subprocess.run([sys.executable, "-c", ""])
@pytest.fixture
def served():
    return run()
def test_itself(): subprocess.run([sys.executable])
def test_by_a_call(): run()
def test_by_a_fixture(served): pass
def test_git(): subprocess.run(["git", "log"])
def test_none(): pass
""")
    assert processes.tests_of(file) == {"test_itself", "test_by_a_call", "test_by_a_fixture"}
    assert "test_training_never_holds_the_logits" in processes.tests_of(TESTS / "ops/test_linear_cross_entropy.py")
    assert "test_two_ranks" in processes.tests_of(TESTS / "patch/test_hf_wrapped.py")
    for name in processes.FILES - {"trainers"}:
        assert list(TESTS.rglob(name)), f"tests/processes.py: there is no {name}"
