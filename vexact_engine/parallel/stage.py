"""The process of one stage: it holds some layers, runs the steps that it is told of, and ends with its engine.

It is told everything over one socket, whose other end the engine's process alone has: when that ends, however it ends,
the kernel closes it, and the stage is gone a moment later.
"""

import contextlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import msgspec
import torch
import torch.distributed as dist

import vexact_ops as vx
from vexact_ops.patch.description import names_of

from ..config import EngineConfig
from ..core import garbage
from ..core.step import Step
from ..errors import HandoverFailed
from ..handover.buffers import HOST, Buckets, Memories
from ..handover.messages import Bucket, Offer, dtype_of
from ..handover.threads import half_the_threads
from ..runner.sleep import memory_of
from ..weights.cut import cut, shapes
from ..weights.draft import load_draft_of_stage
from ..weights.mtp import Heads, keep_rows
from ..weights.partial import Origin, fill, skeleton
from ..weights.rows import Rows
from ..weights.update import Places, Update
from . import messages as m
from .frames import Frames, write_frame
from .line import Line
from .nodes import Start
from .participant import Participant
from .scenes import scene_from
from .store import BoardStore
from .wire import Caller, Purpose, call

_LOOK = 1.0  # seconds between two looks at who the parent is
_OF_WEIGHTS = HandoverFailed, ValueError, TypeError  # what is wrong with them: the stage goes on


class Stage:
    """All that the process has. `serve` is its main thread; one reads what comes, and one reports what the device
    has done."""

    def __init__(self, ours: socket.socket, store: dist.Store | None = None, line: Line | None = None):
        self._socket, self._frames, self._lock, self._store = ours, Frames(ours), threading.Lock(), store
        self._inbox: SimpleQueue[m.ToStage] = SimpleQueue()
        self._pending: SimpleQueue = SimpleQueue()
        self._participant: Participant | None = None
        if line is not None:
            self._participant = Participant(line)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        while (frames := self._frames.read()) is not None:
            for frame in frames:
                for message in m.for_stage(frame):
                    if isinstance(message, m.Ping):
                        self.send(m.Answer(message.key))
                    else:
                        self._inbox.put(message)
        os._exit(1)  # nobody is there any more, whatever the other threads wait for

    def send(self, message: m.FromStage) -> None:
        with self._lock:
            write_frame(self._socket, m.encode([message]))

    def serve(self) -> None:
        with contextlib.ExitStack() as stack:
            self._make(self._inbox.get(), stack)
            threading.Thread(target=self._report, daemon=True).start()
            garbage.freeze()
            while not isinstance(message := self._inbox.get(), m.Close):
                self._handle(message)
        if self._participant is not None:
            self._participant.close()

    def _handle(self, message: m.ToStage) -> None:
        if isinstance(message, m.Step):
            step = Step.from_bytes(message.data)
            if message.drafts:
                launched = self.runner.beside.launch(step)
            else:
                scene = None if message.scene is None else scene_from(message.scene, self.runner.images.merge)
                launched = self.runner.launch(step, scene, message.image_epoch)
            self._pending.put((launched, lambda sampled: self._drawn(step.number, message.drafts, sampled)))
        elif isinstance(message, m.Open):
            self._answer(message.key, lambda: self._open(message.offer))
        elif isinstance(message, m.Take):
            self._take(message.key, message.bucket)
        elif isinstance(message, m.Fill):
            self._answer(message.key, lambda: self._fill(message.buffer, message.payload))
        elif isinstance(message, m.Do):
            self._answer(message.key, lambda: getattr(self, f"do_{message.what}")(**message.arguments))

    def _answer(self, key: int, function: Callable[[], Any]) -> None:
        """What is wrong with weights is said, and the stage goes on."""
        try:
            answer = m.Answer(key, function())
        except _OF_WEIGHTS as error:
            answer = self._refusal(key, error)
        self.send(answer)

    def _refusal(self, key: int, error: Exception) -> m.Answer:
        return m.Answer(key, failure=m.Failure(type(error).__name__, f"{error} ({self.name})"))

    def _make(self, a: m.Make, stack: contextlib.ExitStack) -> None:
        from ..runner.beside import runner_beside
        from ..runner.heads import described as described_heads
        from ..runner.ranks import landing_bytes
        from ..runner.stages import Link, StageRunner

        device = torch.device(a.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self.stream = vx.cuda_stream(device)
            torch.cuda.set_stream(self.stream)
        backend = "nccl" if device.type == "cuda" else "gloo"
        world = len(a.layers) * a.ranks
        where = {"init_method": f"file://{a.store}"} if a.store else {"store": self._store}
        dist.init_process_group(backend, rank=a.rank, world_size=world, **where)
        stack.enter_context(vx.use_backend(a.backend))
        link = Link(device, a.ranks)
        origin = Origin(**{**a.origin, "dtype": dtype_of(a.origin["dtype"])})
        self.model, config, layers = skeleton(origin), EngineConfig(**a.config), range(*a.layers[link.stage])
        options = {**config.patch_options, "training": False}
        handle = vx.patch.hf(self.model, **options)
        described, draft = handle.describe(), None
        names = described.names(layers) | described.tower_names(layers)
        if link.stage == link.stages - 1:
            draft = load_draft_of_stage(config.speculation, origin, self.model, device, not link.ranks.rank)
        heads = draft.module if draft is not None and isinstance(draft.module, Heads) else None
        if heads is not None:
            names |= set(names_of(described.embedding))
        handle.undo()
        whole = shapes(self.model)
        experts = config.expert_parallel_size > 1
        cuts = [cut(described, whole, rank, a.ranks, experts) for rank in range(a.ranks)] if a.ranks > 1 else []
        own = cuts[link.ranks.rank].shards if cuts else {}
        shards = {name: own[name] for name in names & own.keys()}
        fill(self.model, names - shards.keys(), origin, device)
        self.handle = vx.patch.hf(self.model, **options)
        numerics = self.handle.numerics(device)  # of the whole weights' shapes
        self.handle.describe()  # of these too, and kept
        heads_cut = None
        if heads is not None and cuts:
            sizes = whole | shapes(heads)
            heads_cut = cut(described_heads(self.handle, heads), sizes, link.ranks.rank, a.ranks, experts)
        rows_of_heads = {} if heads_cut is None else {n: s for n, s in heads_cut.shards.items() if n not in whole}
        self._rows = Rows(Places.of(self.model, draft), shards | rows_of_heads)
        if shards:
            fill(self.model, shards, origin, device, shards)
        if heads is not None:
            keep_rows(heads, rows_of_heads)
        if cuts and not experts:
            link.ranks.land(landing_bytes(described, layers, whole, config.max_num_batched_tokens, origin.dtype))
        beside = runner_beside(draft, self.handle, config, device, stack, heads_cut, link.ranks)
        self.runner = StageRunner(self.model, self.handle, config, device, layers, link, a.ahead, cuts, whole, beside)
        self.last, self.device = self.runner.draws and link.ranks.rank == 0, device
        self._profile: torch.profiler.profile | None = None
        self.name = m.name_of(a.rank, a.ranks)
        self._places = places = Places.of(self.model, draft).present()
        held = sum(t.nbytes for t in {id(t): t for t in places.targets.values()}.values())
        self._copy: tuple[str | None, Places] | None = None  # of the weights' memory, and where that lies
        self._update: Update | None = None
        self._memories: Memories | None = None
        self._held: Buckets | None = None
        self._memory = memory_of(self.runner)
        facts = {
            "config": m.as_dict(self.runner.config), "path": self.runner.path, "numerics": numerics, "held": held,
            "sleep_backend": self.runner.sleep_backend, "verified": self.runner.graphs.verified,
            "drafts": None if beside is None else beside.facts(),
        }  # fmt: skip
        self.send(m.Ready(facts))

    def _report(self) -> None:
        """What the device has been given is said once it is done, in the order that it was given."""
        while True:
            pending, say = self._pending.get()
            try:
                found = pending.wait()
            except BaseException as error:
                why = self.runner.ranks.why()
                self._fail(RuntimeError(f"{why} ({error})") if why else error)
            say(found)

    def _drawn(self, number: int, drafts: bool, sampled: Any) -> None:
        if self.last:
            self.send(m.Drawn(number, sampled, drafts))

    def _fail(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):
            self.send(m.Failed(m.failure(error), traceback.format_exc()))
        os._exit(1)

    # Weights from another process

    def do_copy(self, device: str | None) -> None:
        """A second copy of the weights' memory."""
        if self._copy is None or self._copy[0] != device:
            self._copy = None
            self._copy = device, self._places.copy(device or self.device)

    def do_begin(self, staged: bool) -> None:
        self._update = Update(self._copy[1] if staged else self._places)

    def _open(self, offer: Offer) -> None:
        self._memories = self._memories or Memories(self.device)
        self._memories.open(offer)

    def _take(self, key: int, bucket: Bucket) -> None:
        """What this stage holds of it. The next bucket's copies are given to the device while it does this one's."""
        try:
            with half_the_threads():
                pairs = self._memories.values(bucket)
                own = (pair for pair in self._rows.of(pairs) if self._update.knows(pair[0]))
                self._update.write(own, foreign=True)
            reading = self._memories.fence()
        except _OF_WEIGHTS as error:
            self.send(self._refusal(key, error))
        else:
            self._pending.put((reading, lambda _: self.send(m.Answer(key))))

    def do_commit(self) -> None:
        with torch.no_grad():
            for name, value in self._update.came().items():
                self._places.targets[name].copy_(value)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def do_hold(self, size: int, count: int) -> tuple[str, str, int, list[bytes], str]:
        """Buffers that all of its machine's stages see, for bytes from another machine."""
        if self._held is None or (self._held.size, len(self._held.tensors)) != (size, count):
            self._let_go_of_held()
            self._held = Buckets(HOST, size, count, self.device)
        offer = self._held.offer()
        return offer.kind, offer.name, offer.size, offer.handles, offer.gpu

    def _fill(self, buffer: int, payload: bytes) -> None:
        self._held.tensors[buffer][: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def _let_go_of_held(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def do_let_go(self) -> None:
        if self._memories is not None:
            self._memories.close()
        self._let_go_of_held()

    # Sleep

    def do_sleep(self, level: int, tags: list[str]) -> tuple[dict[str, int], dict[str, int], str | None]:
        self.runner.drain()
        self.runner.forget_images()
        return self._move(lambda: self._memory.sleep(level, tags))

    def do_wake_up(self, tags: list[str]) -> tuple[dict[str, int], dict[str, int], str | None]:
        return self._move(lambda: self._memory.wake_up(tags))

    def _move(self, move: Callable[[], dict[str, int]]) -> tuple[dict[str, int], dict[str, int], str | None]:
        """What was moved, what is asleep, and why no more was: where there is no room, here or on the host, what was
        moved before that is."""
        moved, why = {}, None
        try:
            moved = move()
        except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
            why = str(error)
        return moved, self._memory.asleep, why

    # For whoever wants to know where a step goes

    def do_trace(self) -> None:
        """From now on, until `do_traced`, note what this process does, on the host and on its device."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=kinds)
        self._profile.start()

    def do_traced(self, path: str | None) -> None:
        """What was noted, as a Chrome trace; None: to be forgotten."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        profile, self._profile = self._profile, None
        profile.stop()
        if path is not None:
            profile.export_chrome_trace(f"{path}.{self.name.replace(' ', '-')}.json.gz")

    def do_numbers(self) -> tuple[int, int, int]:
        """For whoever wants to know what a stage holds."""
        caches = (cache.untyped_storage() for cache in self.runner.buffers.caches.tensors())
        held = {storage._cdata: storage.nbytes() for storage in caches}
        return os.getpid(), len(self.runner.layers), sum(held.values())


def main() -> None:
    """Told by the descriptor of a socket that its engine has the other end of; or, on another machine than that, by a
    Start on the standard input."""
    if len(sys.argv) > 1:
        stage = Stage(socket.socket(fileno=int(sys.argv[1])))
    else:
        stage = _called()
    try:
        stage.serve()
    except BaseException as error:
        stage._fail(error)
    os._exit(0)  # what the device and the other stages are still at is nobody's any more


def _called() -> Stage:
    start = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Start)

    def watch() -> None:
        while os.getppid() == start.parent:
            time.sleep(_LOOK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

    def come(what: Purpose) -> socket.socket:
        return call(start.address, start.secret, Caller(start.rank, what))

    ours, asks = come("told"), come("ask")
    line = Line(come("weights")) if start.is_first else None
    return Stage(ours, BoardStore(Connection(asks.detach())), line)
