"""What Ray starts as forks is what it would have started."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from . import workers
from .environment import environment

SAYS = """
import json, os, random, signal, sys
print(json.dumps({
    "argv": sys.argv, "name": __name__, "directory": os.getcwd(), "variable": os.environ["OF_ONE"], "path": sys.path[0],
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "random": random.random(),
    "child": signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL, "fork": "torch" in sys.modules, "id": os.getpid(),
}), flush=True)
sys.stdin.read()
sys.exit(7)
"""


def test_a_fork_is_what_a_process_of_its_own_would_be(tmp_path):
    script, other = tmp_path / workers.WORKER, tmp_path / "other.py"
    for each in (script, other):
        each.write_text(SAYS)
    env = {**os.environ, **environment()}

    def begin(command, *argv, **variables):
        own = {**env, "OF_ONE": "another", **variables}
        return subprocess.Popen([*command, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own, cwd=tmp_path)

    given, context = (str(script), "given"), json.dumps({"env_vars": {"OF_ONE": "another"}})
    setup = (workers.SETUP, *given, f"--serialized-runtime-env-context={context}", "--language=PYTHON")
    with workers.forking(env) as executable, workers.forking({**env, "VEXACT_RECORD": "a run's"}) as same:
        assert executable == same and executable != sys.executable
        nobody = tmp_path / "nobody"
        nobody.write_text(Path(executable).read_text().replace("/forks", "/nobody"))
        commands = ([sys.executable], [executable], [executable], ["sh", nobody], [executable])
        begun = [begin(each, *given) for each in commands]
        begun.insert(4, begin([executable], *setup, OF_ONE="of Ray"))
        said = [json.loads(process.stdout.readline()) for process in begun]
        killed = begun.pop()
        os.kill(killed.pid, signal.SIGKILL)
        with begin([executable], str(other), "given") as another:
            assert not json.loads(another.stdout.readline())["fork"]
            another.kill()
        assert [process.communicate()[0] for process in begun] == [b""] * 5
        assert [process.returncode for process in begun] == [7] * 5
        last = said.pop()["id"]
        assert killed.wait() == -signal.SIGKILL
        end = time.monotonic() + 60
        while psutil.pid_exists(last) and time.monotonic() < end:
            time.sleep(0.01)
        assert not psutil.pid_exists(last), "who asked was killed"
    assert [one.pop("fork") for one in said] == [False, True, True, False, True]
    assert len({one.pop("random") for one in said}) == len({one.pop("id") for one in said}) == 5
    assert all(one == said[0] for one in said)


def test_what_ray_would_have_set_up_otherwise_it_sets_up():
    def program(language="PYTHON", worker=workers.WORKER, **context):
        told = (f"--serialized-runtime-env-context={json.dumps(context)}", f"--language={language}")
        return workers.program([f"ray/{workers.SETUP}", f"ray/{worker}", "--node=1", *told], {"A": "1", "B": "2"})

    plain = {"command_prefix": [], "py_executable": sys.executable, "java_jars": []}
    assert program(**plain, env_vars={"B": "3"}) == ([f"ray/{workers.WORKER}", "--node=1"], {"A": "1", "B": "3"})
    assert program(env_vars={"B": "$A"}) is program(command_prefix=["cd"]) is program(py_executable="conda") is None
    assert program("JAVA") is program(worker="other.py") is None
    assert workers.program(["-m", "trainers.other"], {}) is workers.program([], {}) is None
    assert workers.program(["-W", "ignore", "-m", "trainers.recorder", "a=1"], {})[0] == [*workers.PROGRAM, "a=1"]
