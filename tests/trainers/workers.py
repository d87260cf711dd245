"""Ray's workers begin as forks of one process that has imported what they import, which takes each of them four seconds
of a core, and a run has ten of them one after another.

    with forking(env, folder) as executable: ...   # for a runtime_env's py_executable

Ray starts `executable default_worker.py ...`: a process that asks for a fork, gives it its arguments, environment and
descriptors, and ends as it ends, or where it is ended. Where nobody forks it becomes what it was asked for itself.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys

MOST = 1 << 20  # bytes of an order
# What verl imports before a worker does anything. Nothing of Ray's: that reads the environment when it is imported.
IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "tensordict",
    "transformers.generation",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_base",
    "datasets",
    "hydra",
    "omegaconf",
    "peft",
    "pydantic",
)


@contextlib.contextmanager
def forking(env, folder):
    """Starts the process that forks, with a run's environment; folder: of a short name, for its socket."""
    import subprocess

    path, env = f"{folder}/forks", {**env, "OPENBLAS_NUM_THREADS": "1"}  # a thread of its pool is not in a fork
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(64)
        fd = listener.fileno()
        command = [sys.executable, "-m", "trainers.workers", str(fd)]
        server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, cwd="/", pass_fds=[fd])
    with server:  # which ends with its stdin
        yield f"{sys.executable} -I -S {__file__} {path}"


@contextlib.contextmanager
def of_ray():
    """(a folder, a runtime_env for workers) of a cluster that this process begins, and that ends with the block."""
    import shutil
    import tempfile

    import ray

    from .environment import environment

    before, folder = dict(os.environ), tempfile.mkdtemp(prefix="vx-", dir="/tmp")  # short: Ray's sockets are in it
    os.environ.update(environment())
    try:
        with forking(os.environ, folder) as executable:
            yield folder, {"env_vars": environment(), "py_executable": executable}
            ray.shutdown()
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(folder, ignore_errors=True)


# What Ray starts


def ask(path: str, argv: list[str]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ours:
        try:
            ours.connect(path)
            order = {"argv": argv, "environment": dict(os.environ), "directory": os.getcwd(), "numbers": [0, 1, 2]}
            socket.send_fds(ours, [json.dumps(order).encode()], [0, 1, 2])
            forked = ours.recv(64)
        except OSError:
            forked = b""
        if not forked:
            os.execv(sys.executable, [sys.executable, *argv])
        os._exit(int(ours.recv(64) or 1))  # when it has ended


# The process that forks


def serve(listener: socket.socket) -> dict | None:
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
                return None
    client.close(), os.close(awake)
    signal.set_wakeup_fd(-1)
    os.close(waker)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for other in running.values():
        other.close()
    order = {**json.loads(data), "parent": os.getppid(), "session": False}
    forks.become(order, descriptors)
    return order


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
    elif _order := serve(socket.socket(fileno=int(sys.argv[1]))):
        import runpy

        sys.path[0] = os.path.dirname(_order["argv"][0])
        runpy.run_path(_order["argv"][0], run_name="__main__")
