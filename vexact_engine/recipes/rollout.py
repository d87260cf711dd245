"""The engine in a process of its own: answers come from there, weights go there."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
from torch import Tensor

from ..config import SamplingParams
from ..engine import Engine
from ..errors import EngineClosed, PeerLost
from ..request import Completion
from ..weights.receiver import WeightReceiver
from ..weights.sender import WeightSender
from .options import Options

_START_SECONDS, _END_SECONDS = 1800.0, 30.0  # until it has loaded its model; until it has closed


class ProcessDied(RuntimeError):
    """An engine's or a trainer's process has ended before its time."""


class Rollout:
    """Starts the engine's process and talks to it; it loads while the trainer does. A context manager: close() ends it,
    whatever it does.

    raises     from every method: RuntimeError with the engine's own words where it cannot be made or fails;
               ProcessDied once the process is gone
    """

    def __init__(self, options: Options, device: torch.device):
        context = multiprocessing.get_context("spawn")  # a fork would share this process's threads and GPU
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, options, str(device)), name="vexact-rollout")
        self._ready: tuple[str, dict] | None = None
        self._sender: WeightSender | None = None
        self._process.start()
        theirs.close()

    @property
    def numerics(self) -> dict:
        """What fixes the engine's bits."""
        return self._made()[1]

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        """As Engine.generate; a request that is itself at fault is an error of the whole."""
        self._order("generate", prompts, params)
        return self._answer()

    def update(self, named_tensors: Iterable[tuple[str, Tensor]], numerics: dict) -> int:
        """Hands all weights over, by CUDA IPC on a GPU and by shared memory on a CPU. Returns their version."""
        if self._sender is None:
            self._sender = WeightSender(self._made()[0], numerics=numerics)
        self._order("update")
        self._answer()  # it listens: it is alive, and the sender will know its process from here on
        try:
            version = self._sender.send(named_tensors)
        except PeerLost as error:
            raise self._died() from error
        self._answer()
        return version

    def close(self) -> None:
        """Again does nothing."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        self._process.join(_END_SECONDS if self._ready else 0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        if self._ready is not None:  # the socket of one that was killed
            Path(self._ready[0].removeprefix("ipc://")).unlink(missing_ok=True)

    def __enter__(self) -> "Rollout":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _made(self) -> tuple[str, dict]:
        if self._ready is None:
            self._ready = self._answer(_START_SECONDS)
        return self._ready

    def _order(self, *order) -> None:
        self._made()
        try:
            self._connection.send(order)
        except OSError:
            raise self._died() from None

    def _answer(self, seconds: float | None = None):
        wait([self._connection, self._process.sentinel], seconds)
        try:
            if not self._connection.poll():
                raise EOFError
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(answer, _Failure):
            raise RuntimeError(f"the engine's process: {answer.text}")
        return answer

    def _died(self) -> Exception:
        self._process.join(1)
        if self._process.is_alive():
            return ProcessDied(f"the engine's process ({self._process.pid}) says nothing")
        return ProcessDied(f"the engine's process ({self._process.pid}) {how(self._process.exitcode)}")


def how(code: int) -> str:
    """A process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {signal.Signals(-code).name}"


# In the engine's process


class _Failure:
    def __init__(self, text: str):
        self.text = text


def _serve(connection: Connection, options: Options, device: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, to all processes: the trainer's
    engine, finished = None, threading.Event()

    def watch() -> None:
        """A trainer that has died needs no answers."""
        wait([multiprocessing.parent_process().sentinel])
        if engine is not None:
            engine.close()
            finished.wait(_END_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        place = torch.device(device)
        engine = Engine(options.load(options.dtype, place), options.engine_config())
        with engine, WeightReceiver(engine) as receiver:
            connection.send((receiver.address, engine.numerics()))
            while (order := connection.recv()) is not None:
                if order[0] == "generate":
                    connection.send(engine.generate(*order[1:], raise_on_error=True))
                else:
                    connection.send("listening")
                    connection.send(receiver.receive())
    except (EOFError, BrokenPipeError, EngineClosed):  # the trainer is gone
        pass
    except BaseException as error:
        with contextlib.suppress(OSError):
            connection.send(_Failure(f"{type(error).__name__}: {error}"))
    finally:
        finished.set()
