"""What Ray starts as forks is what it would have started."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time

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
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    env = {**os.environ, **environment()}

    def begin(command):
        own = {**env, "OF_ONE": "another"}
        return subprocess.Popen(
            [*command, str(script), "given"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=own, cwd=tmp_path
        )

    with tempfile.TemporaryDirectory(dir="/tmp") as folder, workers.forking(env, folder) as executable:
        command = shlex.split(executable)
        nobody = [*command[:-1], f"{folder}/nobody"]
        begun = [begin(each) for each in ([sys.executable], command, command, nobody, command)]
        said = [json.loads(process.stdout.readline()) for process in begun]
        killed = begun.pop()
        os.kill(killed.pid, signal.SIGKILL)
        assert [process.communicate()[0] for process in begun] == [b""] * 4
        assert [process.returncode for process in begun] == [7] * 4
        last = said.pop()["id"]
        assert killed.wait() == -signal.SIGKILL
        end = time.monotonic() + 60
        while psutil.pid_exists(last) and time.monotonic() < end:
            time.sleep(0.01)
        assert not psutil.pid_exists(last), "who asked was killed"
    assert [one.pop("fork") for one in said] == [False, True, True, False]
    assert len({one.pop("random") for one in said}) == len({one.pop("id") for one in said}) == 4
    assert all(one == said[0] for one in said)
