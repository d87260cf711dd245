"""What tests start as forks is what subprocess.Popen would have started."""

import ast
import json
import multiprocessing
import os
import subprocess
import sys
import time

import forks
import pytest
import torch

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="no process is a fork where torch sees a GPU"
)
SAYS = """
import json, os, random, signal, sys
print(json.dumps({
    "parent": os.getppid(), "alone": os.getsid(0) == os.getpid(), "argv": sys.argv, "directory": os.getcwd(),
    "variable": os.environ.get("PYTEST_CURRENT_TEST"), "path": sys.path[:2],
    "threads": len(os.listdir("/proc/self/task")),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "random": random.random(),
    "given": os.read(int(sys.argv[1]), 99).decode(), "stdin": os.read(0, 1).decode(),
    "open": sorted(map(int, os.listdir("/proc/self/fd"))), "fork": "vexact_engine.engine" in sys.modules,
}), flush=True)
os._exit(7)
"""


def started(kind, session=False, **more):
    code = f"if 0: {kind})\n{SAYS}"
    reading, writing = os.pipe()
    os.write(writing, b"descriptors")
    os.close(writing)
    env = {**os.environ, "PYTEST_CURRENT_TEST": "another", "PYTHONPATH": "/tmp"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(reading)],
        pass_fds=[reading],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=session,
        **more,
    )
    os.close(reading)
    assert process.wait() == 7 and process.poll() == 7
    with process.stdout as out:
        return json.loads(out.read())


@pytest.mark.process
def test_a_fork_is_what_a_process_of_its_own_would_be(monkeypatch, tmp_path):
    kind = forks.KINDS[1]
    monkeypatch.setattr(forks.Forked.server, "begun", tmp_path)
    first, *others = [started(kind, session) for session in (False, False, True)]
    assert not first["fork"] and all(other["fork"] for other in others), "the first of a kind begins as for users"
    assert len({found.pop("random") for found in (first, *others)}) == 3
    assert [first["alone"], *(other.pop("alone") for other in others)] == [False, False, True]
    for other in others:
        same = {name: value for name, value in first.items() if name not in ("alone", "fork", "argv", "open")}
        assert {name: other[name] for name in same} == same and len(other["open"]) == len(first["open"])
    assert first["parent"] == os.getpid() and first["threads"] == 1 and first["given"] == "descriptors"
    elsewhere = started(kind, cwd=tmp_path)
    assert elsewhere["fork"] and elsewhere["directory"] == str(tmp_path) != first["directory"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        started(kind, cwd=tmp_path / "nowhere")


@pytest.mark.process
def test_a_test_s_own_program_is_a_fork_from_the_first_on(monkeypatch, tmp_path):
    monkeypatch.setattr(forks.Forked.server, "begun", tmp_path)
    code = f"{forks.OWN}import os, sys; print(os.getppid(), 'vexact_engine.engine' in sys.modules, sys.argv[1:])"
    command = [sys.executable, "-c", code, "a word"]
    for _ in range(2):
        said = subprocess.run(command, capture_output=True, text=True, env={**os.environ}).stdout
        assert said == f"{os.getpid()} True ['a word']\n"
    assert not list(tmp_path.iterdir())


ENDS = {
    "its end": "",
    "a code": "sys.exit(3)",
    "a code of more than a byte": "sys.exit(259)",
    "none": "sys.exit(None)",
    "a word": "sys.exit('why')",
    "an error": "raise ValueError('why')",
    "an interrupt": "raise KeyboardInterrupt",
}


@pytest.mark.process
@pytest.mark.parametrize("how", ENDS)
def test_a_fork_ends_as_a_process_of_its_own(how, monkeypatch, tmp_path):
    """With a thread that still runs, what is called at the end, and what has not been written yet."""
    monkeypatch.setattr(forks.Forked.server, "begun", tmp_path)
    code = f"""if 0: {forks.KINDS[0]})
import atexit, sys, threading, time, weakref
class Left:
    pass
left, ended = Left(), threading.Event()
weakref.finalize(left, print, "finalized")
atexit.register(lambda: print("at exit", ended.is_set()))
threading.Thread(target=lambda: (time.sleep(0.1), ended.set())).start()
print("unwritten", end="")
{ENDS[how]}
"""
    command = [sys.executable, "-c", code]
    process, fork = (subprocess.run(command, capture_output=True, text=True, env={**os.environ}) for _ in range(2))
    assert "at exit True" in process.stdout and "finalized" in process.stdout
    assert (fork.returncode, fork.stdout) == (process.returncode, process.stdout)
    assert fork.stderr.splitlines()[-1:] == process.stderr.splitlines()[-1:]


@pytest.mark.process
def test_the_end_of_a_fork_takes_no_modules_to_pieces():
    """Of the process that it is of, which are some hundred thousand objects."""
    code = f"if 0: {forks.KINDS[0]})\nimport torch\nclass Left:\n    __del__ = print\ntorch.left = Left()"
    forks.Forked.server.is_first(forks.KINDS[0])
    fork = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ})
    assert (fork.returncode, fork.stdout) == (0, "")


def _descriptors(pid):
    """Of a process that has ended there are none, whoever waits for it."""
    try:
        return os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []


@pytest.mark.process
def test_a_fork_starts_forks():
    """Which are its children, beside the one that forks; and none of them is left when it is killed."""
    for kind in forks.KINDS:
        forks.Forked.server.is_first(kind)
    inner = f"if 0: {forks.KINDS[1]})\nimport os, sys\nprint(os.getppid(), 'vexact_engine.engine' in sys.modules)"
    code = f"""if 0: {forks.KINDS[0]})
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.run([sys.executable, "-c", {inner!r}], capture_output=True, text=True, env={{**os.environ}})
children = Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
names = [Path("/proc", one, "comm").read_text().strip() for one in ("self", *children)]
print(child.stdout.split(), names, children, os.getpid(), sep="\\n", flush=True)
time.sleep(600)
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as fork:
        child, (name, *names), children, pid = (ast.literal_eval(fork.stdout.readline()) for _ in range(4))
        assert child == [str(fork.pid), "True"] and pid == fork.pid and name != forks.NAME and names == [forks.NAME]
        fork.kill()
        end = time.monotonic() + 60
        while (open_ := _descriptors(children[0])) and time.monotonic() < end:
            time.sleep(0.01)
        assert not open_


def _says(pipe):
    pipe.send((os.getppid(), "vexact_engine.parallel.stage" in sys.modules, multiprocessing.current_process().name))


@pytest.mark.process
def test_multiprocessing_has_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(forks.Forked.server, "begun", tmp_path)
    assert forks.Forked.server.is_first(forks.KINDS[2]) and not forks.Forked.server.is_first(forks.KINDS[2])
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_says, args=(theirs,), name="its name")
    process.start()
    assert ours.recv() == (os.getpid(), True, "its name")
    process.join()
    assert process.exitcode == 0


@pytest.mark.process
def test_a_command_is_what_python_m_runs(monkeypatch, tmp_path):
    """Its usage, its exit codes and where it says what; the first begins as for users."""
    monkeypatch.setattr(forks.Forked.server, "begun", tmp_path)
    asked = []
    monkeypatch.setattr(forks.Forked.server, "is_first", lambda kind: asked.append(kind) or len(asked) in (1, 3))
    for code, argv, said in (0, ["--help"], "usage: vexact"), (2, ["serve"], "vexact serve: the following arguments"):
        command = [sys.executable, "-m", "vexact_engine.cli", *argv]
        process, fork = (subprocess.run(command, capture_output=True, text=True, env={**os.environ}) for _ in range(2))
        assert (fork.returncode, fork.stdout, fork.stderr) == (process.returncode, process.stdout, process.stderr)
        assert process.returncode == code and said in process.stdout + process.stderr
    assert asked == [forks.KINDS[-1]] * 4


def test_what_a_fork_cannot_be_begins_as_for_users():
    command, kind, env = [sys.executable, "-c", f"{forks.KINDS[1]})"], forks.Forked.server.kind, dict(os.environ)
    assert kind(command, env) == kind([*command, "1"], {**env, "PYTHONPATH": "another"}) == forks.KINDS[1]
    assert kind(command, {**env, "VEXACT_CPU_ISA": "scalar"}) is None
    assert kind(command, {name: value for name, value in env.items() if name != "PATH"}) is None
    assert kind([sys.executable, "-W", "ignore", *command[1:]], env) is None
    assert kind([sys.executable, "-c", "print()"], env) is None
