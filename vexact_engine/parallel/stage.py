"""The process of one stage: it holds some layers, runs the steps that it is told of, and ends with its engine.

It is told everything over one connection, whose other end the engine's process alone has: when that ends, however it
ends, the kernel closes it, and the stage is gone a moment later.
"""

import contextlib
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import vexact_ops as vx

from ..config import EngineConfig
from ..core import garbage
from ..core.step import Step
from ..errors import HandoverFailed
from ..handover.threads import half_the_threads
from ..runner.sleep import Memory
from ..weights.partial import Origin, fill, skeleton
from ..weights.update import Places, Update

if TYPE_CHECKING:  # it needs msgspec
    from ..handover.buffers import Memories


@dataclass(frozen=True)
class Assignment:
    """What a stage is made of.

    layers   of every stage; this one's are layers[rank]
    store    a file in which the stages find each other
    ahead    how many steps are launched before the first of them is waited for
    """

    rank: int
    layers: tuple[range, ...]
    device: str
    origin: Origin
    config: EngineConfig
    backend: str | None
    store: str
    ahead: int


class Stage:
    """All that the process has. `serve` is its main thread; one reads what comes, and one reports what was drawn."""

    def __init__(self, connection: Connection):
        self._connection, self._lock = connection, threading.Lock()
        self._inbox: SimpleQueue = SimpleQueue()
        self._pending: SimpleQueue = SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)  # nobody is there any more, whatever the other threads wait for

    def send(self, kind: str, *values) -> None:
        with self._lock:
            self._connection.send_bytes(pickle.dumps((kind, *values), protocol=5))

    def serve(self) -> None:
        _, assignment = pickle.loads(self._inbox.get())
        with contextlib.ExitStack() as stack:
            self._make(assignment, stack)
            threading.Thread(target=self._report, daemon=True).start()
            garbage.freeze()
            while True:
                kind, *values = pickle.loads(self._inbox.get())
                if kind == "close":
                    return
                getattr(self, f"_do_{kind}")(*values)

    def _make(self, a: Assignment, stack: contextlib.ExitStack) -> None:
        from ..runner.stages import Link, StageRunner

        device = torch.device(a.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self.stream = vx.cuda_stream(device)
            torch.cuda.set_stream(self.stream)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{a.store}", rank=a.rank, world_size=len(a.layers))
        stack.enter_context(vx.use_backend(a.backend))
        link = Link(device)
        self.model, config, layers = skeleton(a.origin), a.config, a.layers[a.rank]
        options = {"kv_segment": config.kv_segment, "latent": config.latent_attention}
        handle = vx.patch.hf(self.model, **options)
        names = handle.describe().names(layers)
        handle.undo()
        fill(self.model, names, a.origin, device)
        self.handle = vx.patch.hf(self.model, **options)
        self.runner = StageRunner(self.model, self.handle, config, device, layers, link, a.ahead)
        numerics = vx.numerics(device, kv_segment=config.kv_segment, latent_attention=config.latent_attention or None)
        self.rank, self.last, self.device = a.rank, self.runner.draws, device
        self._places = places = Places.of(self.model).present()
        self._targets = places.targets | {name: view for name, (_, view) in places.views.items()}
        held = sum(t.nbytes for t in {id(t): t for t in places.targets.values()}.values())
        self._copy: tuple[str | None, Places] | None = None  # of the weights' memory, and where that lies
        self._update: Update | None = None
        self._memories: Memories | None = None
        self._memory = Memory(self.runner)
        self.send("ready", self.runner.config, self.runner.path, numerics, held, self.runner.sleep_backend)

    def _report(self) -> None:
        while True:
            number, pending = self._pending.get()
            try:
                sampled = pending.wait()
            except BaseException as error:
                self._fail(error)
            if self.last:
                self.send("drawn", number, sampled)

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            self.send("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        os._exit(1)

    # What it is told

    def _do_step(self, data: bytes) -> None:
        step = Step.from_bytes(data)
        self._pending.put((step.number, self.runner.launch(step)))

    def _do_write(self, bucket: list) -> None:
        """New values, between two steps."""
        with torch.no_grad():
            for name, start, value in bucket:
                target = self._targets.get(self._places.old.get(name, name))
                if target is None:
                    continue
                if start is not None:
                    target = target.view(-1)[start : start + value.numel()]
                target.copy_(value)
        if self.device.type == "cuda":
            vx.synchronize(self.device)
        self.send("done")

    # Weights from another process. What is wrong with them is said, and the stage goes on

    def _do_stage(self, device: str | None) -> None:
        if self._copy is None or self._copy[0] != device:
            self._copy = None
            self._copy = device, self._places.copy(device or self.device)
        self.send("done")

    def _do_begin(self, staged: bool) -> None:
        self._update = Update(self._copy[1] if staged else self._places)
        self.send("done")

    def _do_open(self, offer) -> None:
        from ..handover.buffers import Memories

        self._memories = self._memories or Memories(self.device)
        self._try(lambda: self._memories.open(offer))

    def _do_take(self, bucket) -> None:
        def take() -> None:
            with half_the_threads():
                self._put(self._memories.values(bucket))
            self._memories.fence().wait()

        self._try(take)

    def _do_put(self, pairs: list) -> None:
        self._try(lambda: self._put(pairs))

    def _put(self, pairs: list) -> None:
        self._update.write(pair for pair in pairs if self._update.knows(pair[0]))

    def _do_commit(self) -> None:
        with torch.no_grad():
            for name, value in self._update.came().items():
                self._places.targets[name].copy_(value)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.send("done")

    def _do_let_go(self) -> None:
        if self._memories is not None:
            self._memories.close()
        self.send("done")

    # Sleep

    def _do_sleep(self, level: int, tags: list[str]) -> None:
        self.runner.settle()
        self._move(lambda: self._memory.sleep(level, tags))

    def _do_wake_up(self, tags: list[str]) -> None:
        self._move(lambda: self._memory.wake_up(tags))

    def _move(self, move: Callable[[], dict[str, int]]) -> None:
        """Where there is no room, here or on the host, what was moved before that is."""
        moved, why = {}, None
        try:
            moved = move()
        except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
            why = str(error)
        self.send("done", moved, self._memory.asleep, why)

    def _try(self, function: Callable[[], None]) -> None:
        try:
            function()
        except (HandoverFailed, ValueError, TypeError) as error:
            self.send("refused", f"{error} (stage {self.rank})")
        else:
            self.send("done")

    def _do_numbers(self) -> None:
        """For whoever wants to know what a stage holds."""
        caches = (cache.untyped_storage() for cache in self.runner.buffers.caches.tensors())
        held = {storage._cdata: storage.nbytes() for storage in caches}
        self.send("done", os.getpid(), len(self.runner.layers), sum(held.values()))


def main() -> None:
    stage = Stage(Connection(int(sys.argv[1])))
    try:
        stage.serve()
    except BaseException as error:
        stage._fail(error)
    os._exit(0)  # what the device and the other stages are still at is nobody's any more
