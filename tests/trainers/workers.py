"""A run's program and Ray's workers begin as forks of one process that has imported what they import, which takes each
of them five seconds of a core, and a run has a dozen of them one after another.

    with forking(env) as executable: ...   # in the place of python

`executable -m trainers.recorder ...` and the workers that Ray starts by this name are processes that ask for a fork,
give it their arguments, environment and descriptors, and end as it ends, or where it is ended. Where nobody forks, and
where no fork can be it, they become what they were asked for themselves. Runs under the same settings share the process
that forks, which ends with this one.
"""

import argparse
import atexit
import contextlib
import functools
import json
import os
import select
import shlex
import signal
import socket
import sys
import threading

MOST = 1 << 20  # bytes of an order
WORKER, SETUP = "default_worker.py", "setup_worker.py"  # Ray's: the latter becomes the former in a runtime_env
PROGRAM = "-m", "trainers.recorder"
OF_A_RUN = {"VEXACT_RECORD", "VERL_FILE_LOGGER_PATH", "PYTEST_CURRENT_TEST"}  # nothing that is imported reads them
# What verl imports before a worker does anything. Nothing of Ray's: that reads the environment when it is imported.
IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "tensordict",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.glm4v.configuration_glm4v",
    "transformers.tokenization_utils_base",
    "transformers.convert_slow_tokenizer",
    "datasets",
    "hydra",
    "omegaconf",
    "peft",
    "pydantic",
    "aiohttp",
    "fastapi",
    "uvicorn",
    "vexact_ops.patch.hf",
    "vexact_engine.engine",
)


_beginning = threading.Lock()
_servers: dict[tuple, tuple] = {}  # of this process's, by their environments


@contextlib.contextmanager
def forking(env):
    """A name to start programs by, with this environment or one that differs from it in OF_A_RUN."""
    key = tuple(sorted((name, value) for name, value in env.items() if name not in OF_A_RUN))
    with _beginning:
        if key not in _servers or _servers[key][0].poll() is not None:
            _servers[key] = _begin(env)
    yield f"{_servers[key][1]}/python"


def _begin(env):
    """Starts the process that forks. -> it, and a folder of a short name with its socket and what asks it"""
    import subprocess
    import tempfile

    folder = tempfile.mkdtemp(prefix="vx-", dir="/tmp")
    asks = shlex.join([sys.executable, "-I", "-S", __file__, f"{folder}/forks"])
    with open(os.open(f"{folder}/python", os.O_CREAT | os.O_WRONLY, 0o700), "w") as script:
        script.write(f'#!/bin/sh\nexec {asks} "$@"\n')
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{folder}/forks")
        listener.listen(64)
        fd = listener.fileno()
        command = [sys.executable, "-W", "ignore", "-m", "trainers.workers", str(fd)]
        env = {**env, "OPENBLAS_NUM_THREADS": "1"}  # a thread of its pool is not in a fork
        server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, cwd="/", pass_fds=[fd])
    atexit.register(_end, server, folder)
    return server, folder


def _end(server, folder):
    import shutil

    with server:  # which ends with its stdin
        pass
    shutil.rmtree(folder, ignore_errors=True)


def without_autoscaler():
    """Clusters that this process begins have no monitor that would add nodes: nobody does, and it takes a second of a
    core. Runs that begin as for users have theirs."""
    from ray._private.parameter import RayParams

    made = RayParams.__init__
    if hasattr(made, "__wrapped__"):
        return

    @functools.wraps(made)
    def without(self, *args, **options):
        made(self, *args, **{**options, "no_monitor": True})

    RayParams.__init__ = without


@contextlib.contextmanager
def of_ray():
    """(a folder, a runtime_env for workers) of a cluster that this process begins, and that ends with the block."""
    import shutil
    import tempfile

    import ray

    from .environment import environment

    without_autoscaler()
    before, python = dict(os.environ), sys.executable
    folder = tempfile.mkdtemp(prefix="vx-", dir="/tmp")  # short: Ray's sockets are in it
    os.environ.update(environment())
    try:
        with forking(os.environ) as executable:
            sys.executable = executable
            yield folder, {"env_vars": environment()}
            ray.shutdown()
    finally:
        sys.executable = python
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


# What is started


def program(argv: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]] | None:
    """The arguments and the environment of a fork that can be it; of SETUP those of what it becomes."""
    given = argv[2:] if argv[:2] == ["-W", "ignore"] else argv  # as the process that forks is told itself
    script = os.path.basename(given[0]) if given else ""
    if (*given[:2],) == PROGRAM or script == WORKER:
        return given, environment
    if script != SETUP:
        return None
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    known, rest = parser.parse_known_args(given[1:])
    context = json.loads(known.serialized_runtime_env_context)
    changed = context.pop("env_vars", None) or {}
    others = [value for value in context.values() if value and value != sys.executable]
    plain = not others and not any("$" in value for value in changed.values())
    if known.language != "PYTHON" or not plain or os.path.basename(rest[0]) != WORKER:
        return None
    return rest, {**environment, **changed}


def ask(path: str, argv: list[str]) -> None:
    asked = program(argv, dict(os.environ))
    if asked is None:
        os.execv(sys.executable, [sys.executable, *argv])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
        try:
            ours.connect(path)
            order = {"argv": asked[0], "environment": asked[1], "directory": os.getcwd(), "numbers": [0, 1, 2]}
            order["executable"] = f"{os.path.dirname(path)}/python"
            socket.send_fds(ours, [json.dumps(order).encode()], [0, 1, 2])
            forked = ours.recv(64)
        except OSError:
            forked = b""
        if not forked:
            os.execv(sys.executable, [sys.executable, *argv])
        os._exit(int(ours.recv(64) or 1))  # when it has ended


# The process that forks


def serve(listener: socket.socket) -> dict:
    """Forks for every order that comes, until stdin ends. Returns in the forks alone, with the order."""
    import forks

    awake, waker = os.pipe()
    for end in (awake, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    running: dict[int, socket.socket] = {}
    with listener:
        forks.preload(IMPORTED)
        while True:
            ready, _, _ = select.select([0, awake, listener, *running.values()], [], [])
            for pid in [pid for pid, client in running.items() if client in ready]:  # who asked was killed
                os.kill(pid, signal.SIGKILL)
            if awake in ready:
                os.read(awake, 4096)
                while (ended := _ended())[0]:
                    _answer(running.pop(ended[0]), ended[1]).close()
            if listener in ready:
                client, _ = listener.accept()
                data, descriptors, _, _ = socket.recv_fds(client, MOST, 3)
                pid = os.fork() if data else None
                if pid == 0:
                    break
                if pid:
                    running[pid] = _answer(client, pid)
                for each in descriptors:
                    os.close(each)
            if 0 in ready:
                os._exit(0)
    client.close(), os.close(awake)
    signal.set_wakeup_fd(-1)
    os.close(waker)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in running.values():
        other.close()
    order = {**json.loads(data), "parent": os.getppid(), "session": False}
    forks.become(order, descriptors)
    sys.executable = order["executable"]
    return order


def run(argv: list[str]) -> None:
    import runpy

    if argv[0] == "-m":
        sys.argv[:] = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(argv[0])
        runpy.run_path(argv[0], run_name="__main__")


def _answer(client: socket.socket, number: int) -> socket.socket:
    with contextlib.suppress(OSError):
        client.send(str(number).encode())
    return client


def _ended() -> tuple[int, int]:
    """A fork that has ended and its code; (0, 0) where none has."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0
    return pid, os.waitstatus_to_exitcode(status) % 256


if __name__ == "__main__":
    if len(sys.argv) > 2:
        ask(sys.argv[1], sys.argv[2:])
    else:
        _order = serve(socket.socket(fileno=int(sys.argv[1])))
        import forks

        forks.whole(lambda: run(_order["argv"]))
