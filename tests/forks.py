"""A pytest plugin: replicas, stages, multiprocessing's processes and commands (`python -m vexact_engine.cli`) begin as
forks of one that has imported what they import, which takes each of them five seconds of a core.

The first of a kind in a run begins as for users. Those after it get their descriptors, environment and parent in
`become`, and run the line of code that `python -c` would. What they start themselves are forks too, of a child that
each has for that (`program`); and what is imported they do not take to pieces at their end (`whole`). Whatever is asked
for beyond that begins as for users too, and so does everything where torch sees a GPU, which no fork may use.

A test's own program that begins with OWN, after `python -c`, is no user's: it is a fork from the first on.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

FILES = {
    "test_adapter_stages.py",
    "test_admit.py",
    "test_benchmark_engine.py",
    "test_cli.py",
    "test_directory.py",
    "test_draft_model.py",
    "test_drafting_apart.py",
    "test_faults.py",
    "test_forks.py",
    "test_handed_over.py",
    "test_handover_fanout.py",
    "test_handover_killed.py",
    "test_handover_many.py",
    "test_handover_ranks.py",
    "test_handover_shards.py",
    "test_hf_training.py",
    "test_hf_wrapped.py",
    "test_hybrid.py",
    "test_images.py",
    "test_images_apart.py",
    "test_pipeline.py",
    "test_readme.py",
    "test_recipe.py",
    "test_recipe_check.py",
    "test_recipe_kept.py",
    "test_recipe_layouts.py",
    "test_recipe_ways.py",
    "test_replicas.py",
    "test_saver.py",
    "test_serve_process.py",
    "test_serve_strangers.py",
    "test_settings.py",
    "test_soak.py",
    "test_speculation.py",
    "test_stalled.py",
    "test_tensor_parallel.py",
    "test_ulysses.py",
    "test_windows.py",
}
# What a process runs, of each kind.
KINDS = (
    "from vexact_engine.parallel.process import main; main(",
    "from vexact_engine.parallel.stage import main; main(",
    "from multiprocessing.spawn import spawn_main; spawn_main(",
    "import runpy; runpy.run_module('vexact_engine.cli', run_name='__main__', alter_sys=True)",
)
OWN = "# of a test: it may be a fork\n"
STARTING = KINDS[0], KINDS[2], KINDS[3], OWN  # those that may start others themselves
NAME = "vexact-forks"  # of what forks for such a one, among its children
COMMAND = "-m", "vexact_engine.cli"  # `python -m` of it is the last kind
IMPORTED = (
    "vexact_engine.parallel.process",
    "vexact_engine.parallel.stage",
    "vexact_engine.parallel.host",
    "vexact_engine.engine",
    "vexact_engine.weights.load",
    "vexact_ops.patch.hf",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("auto", "llama", "qwen3", "qwen3_moe")),
    "transformers.convert_slow_tokenizer",
    "transformers.tokenization_utils_tokenizers",
    "safetensors.torch",
    "torch.distributed.fsdp",
    "vexact_engine.cli",
    "vexact_engine.serve.app",
    "uvicorn",
)
# Variables that are read late, if at all: those that differ otherwise make a process begin as for users.
LATE = {
    "GLOO_SOCKET_IFNAME",
    "NCCL_MAX_P2P_NCHANNELS",
    "PYTEST_CURRENT_TEST",
    "PYTHONPATH",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it
    "VEXACT_API_KEY",
    "VEXACT_CACHE",
    "XDG_RUNTIME_DIR",
}
MOST = 1 << 20  # bytes of a message
SECONDS = 300  # until the process that forks has answered: it may still import
_INTERRUPT: object = signal.default_int_handler  # as a process begins with it: ignored, where pytest was told to
_ADOPT = 36  # PR_SET_CHILD_SUBREAPER: whose parent has ended is ours


class Forks:
    """Puts `Forked` in the place of subprocess.Popen, and starts the process that forks."""

    def __init__(self):
        import torch

        self.here = sys.platform == "linux" and not torch.cuda.is_available()
        Forked.server = None

    def pytest_runtest_setup(self, item) -> None:
        wanted = self.here and Path(item.path).name in FILES
        if wanted and Forked.server is None:
            Forked.server = Server(_begun(item.config))
        subprocess.Popen = Forked if wanted else _Popen
        multiprocessing.util.spawnv_passfds = _spawn_forked if wanted else _spawn

    def pytest_sessionfinish(self) -> None:
        if Forked.server is not None:
            Forked.server.close()


# In the process of pytest


def _begun(config) -> Path:
    """A folder of this run, whichever of its processes asks."""
    base = config._tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(config, "workerinput") else base) / "begun"
    folder.mkdir(exist_ok=True)
    return folder


class Server:
    """The process that forks, as pytest's sees it.

    begun   a folder with a file for each kind that has begun as for users
    ours    its socket, where it is there already: in a fork
    """

    def __init__(self, begun: Path, ours: socket.socket | None = None):
        self.begun, self.environment, self._lock = begun, dict(os.environ), threading.Lock()
        theirs, self._socket = None, ours
        if ours is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(SECONDS)
        if theirs is None:
            return
        with theirs:
            command = [sys.executable, *_FLAGS, __file__, str(theirs.fileno()), json.dumps(sys.path)]
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a thread of its pool is not in a fork
            self._process = _Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment, cwd="/"
            )

    def fork(
        self, command: list[str], env: dict[str, str], descriptors: dict[int, int], session: bool, directory: str = ""
    ) -> int | None:
        """The id of a process whose parent is this one. None where it has to begin as for users.

        descriptors   its numbers there, and what they are here
        directory     "": this process's
        """
        if (*command[1:3],) == COMMAND:
            command = [command[0], "-c", KINDS[-1], *command[3:]]
        kind = self.kind(command, env)
        if kind is None or self.is_first(kind):
            return None
        order = {
            "argv": ["-c", *command[3:]],
            "code": command[2],
            "environment": dict(env),
            "directory": directory or os.getcwd(),
            "parent": os.getpid(),
            "session": session,
            "numbers": list(descriptors),
            "begun": str(self.begun),
            "starts": kind in STARTING,
        }
        libc = ctypes.CDLL(None)
        with self._lock:
            try:
                libc.prctl(_ADOPT, 1, 0, 0, 0)
                socket.send_fds(self._socket, [json.dumps(order).encode()], list(descriptors.values()))
                return int(self._socket.recv(MOST)) or None
            except (OSError, ValueError):
                return None
            finally:
                libc.prctl(_ADOPT, 0, 0, 0, 0)

    def kind(self, command: list[str], env: dict[str, str]) -> str | None:
        """What is asked for, where a fork can be that."""
        changed = {name for name in {*self.environment, *env} if self.environment.get(name) != env.get(name)}
        if [*command[:2]] != [sys.executable, "-c"] or changed - LATE:
            return None
        if command[2].startswith(OWN):
            return OWN
        return next((kind for kind in KINDS if kind in command[2]), None)

    def is_first(self, kind: str) -> bool:
        if kind is OWN:
            return False
        try:
            (self.begun / str(KINDS.index(kind))).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


_Popen, _spawn = subprocess.Popen, multiprocessing.util.spawnv_passfds
_FLAGS = multiprocessing.util._args_from_interpreter_flags()
_ARGUMENTS = [*inspect.signature(_Popen._execute_child).parameters][1:]


class Forked(_Popen):
    """subprocess.Popen, where a process may be a fork."""

    server: Server | None = None

    def _execute_child(self, *given):
        asked = dict(zip(_ARGUMENTS, given))
        args, env, pid = asked["args"], asked["env"], None
        if not isinstance(args, str) and env and not any(asked[name] for name in ("executable", "preexec_fn")):
            pipes = {0: asked["p2cread"], 1: asked["c2pwrite"], 2: asked["errwrite"]}
            descriptors = {number: number if mine == -1 else mine for number, mine in pipes.items()}
            descriptors |= {number: number for number in asked["pass_fds"]}
            directory = os.path.abspath(os.fsdecode(asked["cwd"] or ""))
            if os.path.isdir(directory):  # or it fails as users see it
                pid = self.server.fork(args, env, descriptors, asked["start_new_session"], directory)
        if pid is None:
            return super()._execute_child(*given)
        sys.audit("subprocess.Popen", args[0], args, None, env)
        self.pid, self._child_created = pid, True
        ours = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in ours))


def helper() -> int | None:
    """The id of the process that forks, which ends with pytest's."""
    return None if Forked.server is None else Forked.server.pid


def _spawn_forked(path, args, passfds) -> int:
    """multiprocessing.util's spawnv_passfds, where a process may be a fork."""
    command = [os.fsdecode(each) for each in args]
    if command[1 : 1 + len(_FLAGS)] == _FLAGS:
        del command[1 : 1 + len(_FLAGS)]
    descriptors = {number: number for number in (0, 1, 2, *passfds)}
    return Forked.server.fork(command, dict(os.environ), descriptors, False) or _spawn(path, args, passfds)


# In the process that forks


def serve(ours: socket.socket) -> dict:
    """Forks for every order that comes. Returns in the forks alone, with the order."""
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(ours, MOST, 16)
        except KeyboardInterrupt:
            continue
        if not data:
            os._exit(0)
        order = json.loads(data)
        with contextlib.ExitStack() as stack:
            for each in descriptors:
                stack.callback(os.close, each)
            if len(os.listdir("/proc/self/task")) > 1:
                ours.send(b"0")
                continue
            reading, writing = os.pipe()
            between = os.fork()
            if not between:
                found = os.fork()
                if found:
                    os.write(writing, str(found).encode())
                    os._exit(0)  # whose child is then the child of pytest's process
                stack.pop_all()
                ours.close(), os.close(reading), os.close(writing)
                become(order, descriptors)
                return order
            os.waitpid(between, 0)
            ours.send(os.read(reading, 64))
            os.close(reading), os.close(writing)


def program(order: dict) -> dict:
    """The order itself, in the process that it was for: which asks a child of its own for forks, if it starts any. In
    those it is theirs."""
    if not order["starts"]:
        return order
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for number in order["numbers"]:  # whoever waits for their end does not wait for this process
            os.dup2(null, number) if number < 3 else os.close(number)
        os.close(null)
        comm = Path("/proc/self/comm")
        before = comm.read_text()
        comm.write_text(NAME)
        found = serve(theirs)
        comm.write_text(before)
        return program(found)
    theirs.close()
    Forked.server = Server(Path(order["begun"]), ours)
    subprocess.Popen, multiprocessing.util.spawnv_passfds = Forked, _spawn_forked
    return order


def become(order: dict, descriptors: list[int]) -> None:
    """What a process of its own is from its start on."""
    end = time.monotonic() + SECONDS
    while os.getppid() != order["parent"]:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(0.001)
    above = max(*descriptors, *order["numbers"]) + 1
    apart = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(apart, order["numbers"]):
        os.dup2(each, number)
        os.close(each)
    os.chdir(order["directory"])
    if order["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, _INTERRUPT)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.path[:] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path]
    sys.argv[:] = order["argv"]
    random.seed()


def whole(program: Callable[[], object]) -> NoReturn:
    """Runs it as all that this process does, and ends as Python does but for the last: taking to pieces what the fork
    has of the process that it is of is three seconds of a core."""
    try:
        try:
            program()
        finally:
            threading._shutdown()  # waits for threads
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = error if isinstance(error, KeyboardInterrupt) else 1
    if not isinstance(code, int | KeyboardInterrupt | None):
        sys.stderr.write(f"{code}\n")
    atexit._run_exitfuncs()
    for stream in sys.stdout, sys.stderr:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a pipe that nobody reads, closed, none
            stream.flush()
    if isinstance(code, KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 255 if isinstance(code, int) else code is not None)


def preload(names: Iterable[str]) -> None:
    """Imports them, and leaves what there is then out of collections: they would copy the pages that forks share."""
    for name in names:
        importlib.import_module(name)
    for each in weakref.finalize._registry.values():  # of a fork's end they are no part
        each.atexit = False
    gc.collect()
    gc.freeze()


def main(descriptor: int, path: list[str]) -> dict:
    sys.path[:] = path
    global _INTERRUPT
    _INTERRUPT = signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: for pytest
    import vexact_ops
    from vexact_ops._core import native

    for name in vexact_ops.__all__:
        getattr(vexact_ops, name)  # imports its room
    native.unavailable()  # loads the extension
    preload(IMPORTED)
    return serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    _code = program(main(int(sys.argv[1]), json.loads(sys.argv[2])))["code"]
    whole(lambda: exec(_code, {"__name__": "__main__"}))
