"""Owns the engine's torch state (model, patch, caches, stream): one thread creates, uses and frees it."""

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import vexact_ops as vx
from vexact_ops.patch import lora
from vexact_ops.patch.description import Images

from ..config import EngineConfig
from ..core.plan import StepPlan
from ..core.step import Encoder
from ..errors import EngineAsleep, HandoverFailed, ModelInUse, WeightsTorn
from ..handover.session import Reading
from ..handover.threads import half_the_threads
from ..media.images import scene_of
from ..weights.draft import Draft
from ..weights.update import Fresh, Places, Update, apply_update, plan_update
from ..weights.watch import Watch
from . import memory
from .ahead import importing
from .beside import runner_beside
from .drafting import DraftModel
from .follow import Follow
from .runner import Pending, Runner
from .sleep import ASLEEP, Both, Memory, memory_of

if TYPE_CHECKING:  # they need msgspec
    from ..handover.buffers import Memories
    from ..handover.messages import Bucket, Offer

log = logging.getLogger(__name__)

_LOCK = threading.Lock()
_OWNED: "weakref.WeakSet[torch.nn.Module]" = weakref.WeakSet()  # by an engine


@contextlib.contextmanager
def _owned(model: torch.nn.Module) -> Iterator[None]:
    with _LOCK:
        if model in _OWNED:
            raise ModelInUse(
                f"Engine: another engine runs this {type(model).__name__} and owns its weights: close that first, or "
                "give this one a copy"
            )
        _OWNED.add(model)
    try:
        yield
    finally:
        _OWNED.discard(model)


class Worker:
    """Owns a model from the constructor to `close`. All but `fence` is called in the engine's thread.

    config         as given, with num_pages filled in
    backend        the one that ops are computed with, whatever other threads or the process choose; None: the default
    depth          how many plans may be in flight
    follows        whether it takes plans behind drafts (core/behind.py)
    longest_first  whether attention wants the decodes of most keys first
    chunk          tokens of a chunk of the model's states; None: it has none
    draft_model    what drafts; None: nothing does
    verified       rows -> seconds of steps that verify drafts, as far as graphs of such have shown
    reach          keys before a query that its layers with a window may read; None: it has none
    numbers_alone  whether pages take memory where layers with a window have their own, not else
    numerics       what fixes the bits, from now on
    raises         ModelInUse where another engine has the model; what patch.hf raises
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: EngineConfig,
        backend: str | None = None,
        draft: Draft | None = None,
    ):
        self.model, self._draft = model, draft
        first = next(model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.meanwhile: Callable[[], None] = lambda: None  # it waits for no other process
        self._stack = contextlib.ExitStack()
        try:
            self._stack.enter_context(_owned(model))
            self._stack.enter_context(vx.use_backend(backend))
            self.stream = None
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
                vx.synchronize(self.device)  # whoever made the weights, on whichever stream
                self.stream = vx.cuda_stream(self.device)
                torch.cuda.set_stream(self.stream)
            begin = time.perf_counter()
            self._handle = vx.patch.hf(model, **config.patch_options, training=False)
            log.info("model patched in %.1f s", time.perf_counter() - begin)
            self._stack.callback(self._handle.undo)
            if draft is not None and draft.prefix:
                self._stack.enter_context(_owned(draft.module))
            beside = runner_beside(draft, self._handle, config, self.device, self._stack)
            with importing(self.device):
                self._runner = Runner(model, self._handle, config, self.device, beside)
            self.draft_model = None if beside is None else DraftModel(beside.launch, **beside.facts())
            self.config, self.path = self._runner.config, self._runner.path
            self.numerics = self._handle.numerics(self.device)
            self._memory: Memory | Both | None = memory_of(self._runner)
            self._memories: Memories | None = None  # of another process, that weights come in
            self._watch, self._missed = Watch(model), ""
            self._revision = self._handle.revision()
            self._fresh = Fresh.of(config.adapter)
            self._places = Places.of(model, draft, self._fresh)
            self._encoder = Encoder()
            self.longest_first, self.verified = self._runner.longest_first(), self._runner.graphs.verified
            self.chunk, self.reach = memory.chunk_of(self._runner.memories), memory.reach(self._runner.memories)
            self.numbers_alone, self.follows = self._runner.numbers_alone, self.images is None
            asked = config.async_scheduling
            self.depth = 2 if (self.device.type == "cuda" if asked is None else asked) else 1
        except BaseException:
            self._stack.close()
            raise

    @property
    def sleep_backend(self) -> str:
        return self._runner.sleep_backend

    @property
    def images(self) -> Images | None:
        """What the model takes of images; None: it takes none."""
        return self._runner.images

    def launch(self, plan: StepPlan) -> Pending:
        """Begin to compute a plan, behind those launched before. At once after `schedule`."""
        if plan.failure is not None:
            raise plan.failure
        step = self._encoder.encode(plan)
        if plan.follows:
            return self._runner.launch(step, follow=Follow(plan))
        if self.images is None:
            return self._runner.launch(step)
        return self._runner.launch(step, scene_of(plan), plan.image_epoch)

    def fence(self) -> Callable[[], None]:
        """In any thread: what it has given its device to do until now comes first. The function returned is for the
        engine's thread."""
        if self.stream is None:
            return lambda: None
        event = torch.cuda.current_stream(self.device).record_event()
        return lambda: self.stream.wait_event(event)

    # Weights

    def changed(self) -> bool:
        """Whether somebody else has changed the weights, or the model that they are in."""
        return bool(self._changed())

    def renew(self) -> bool:
        """What stands there now is the weights. What was replaced is made part of the forward again, as an engine that
        is made now would have it. For when nothing is in flight.

        raises   WeightsTorn where that cannot be computed with; UnsupportedModule where no aligned op covers the model
                 any more
        """
        what = self._changed()
        log.warning("weights: %s by somebody else: what was computed with the old ones is forgotten", what)
        if what == "replaced" or getattr(self._runner.forward, "outdated", False):
            self._rejoin()
        self._note()
        return True

    def _changed(self) -> str:
        found = self._watch.changed(), self._missed, "" if self._is_covered() else "replaced"
        return "replaced" if "replaced" in found else "written" if "written" in found else ""

    def _is_covered(self) -> bool:
        """Whether modules, and their numbers, are those that the forward was made of."""
        try:
            return self._handle.revision() == self._revision
        except vx.patch.UnsupportedModule:  # as the next forward says
            return False

    def _note(self) -> None:
        self._watch.note_written()
        self._missed = ""

    def _rejoin(self) -> None:
        self._handle.revision()  # it says what cannot be covered before other things are said of it
        wide = lora.in_fp32(self.model)
        for name, tensor in self.model.named_parameters():
            kinds = {self.dtype, torch.float32} if name in wide else {self.dtype}
            if tensor.device != self.device or tensor.dtype not in kinds:
                raise WeightsTorn(
                    f"Engine: {name} has been replaced by a tensor that is {tensor.dtype} on {tensor.device}, expected "
                    f"{self.dtype} on {self.device}"
                )
        found = memory.forgetting(self._handle.memories(), self.config), self._runner.memories
        windows = self.config.num_window_pages is not None
        kept, expected = (memory.text(memories, windows) for memories in found)
        if kept != expected:
            raise WeightsTorn(
                f"Engine: the model has been changed to one whose cache is {kept}, expected {expected}: put that back, "
                "or close the engine and make another"
            )
        revision = self._handle.revision(tensors=True)
        self._make_forward()
        self._revision = revision
        if not self.asleep:
            for runner in filter(None, (self._runner, self._runner.beside)):
                runner.graphs.capture()
        self._watch.note()  # modules may be others than those that it knows

    def _make_forward(self) -> None:
        self._runner.make_forward()
        self.path = self._runner.path
        self._places = Places.of(self.model, self._draft, self._fresh)

    def plan(self, named_tensors, whole: bool = False) -> list[tuple[Tensor, Tensor]]:
        """whole: nothing may be left out, for what is there is gone or torn"""
        self._make_ready()
        return plan_update(self._places.whole() if whole else self._places, named_tensors)

    def apply(self, plan: Iterable[tuple[Tensor, Tensor]]) -> None:
        apply_update(plan)
        self.adopt()

    takes_in_caller = True

    def make_copy(self, device: torch.device | str | None) -> Places:
        """A second copy of the weights' memory, which holds nothing yet."""
        return Places.of(self.model, self._draft, self._fresh).copy(self.device if device is None else device)

    def begin(self, specs: Mapping | None, staging: Places | None = None) -> Update:
        if staging is not None:
            return Update(staging, specs)
        self._make_ready()
        return Update(self._places, specs)

    def commit(self, update: Update, tear: Callable[[], None]) -> None:
        """What came into a copy is put in place: on a CPU the two exchange their memory. `tear` is called before
        anything is written."""
        self._make_ready()
        targets, came = self._places.targets, update.came()
        plan = {id(targets[name]): (targets[name], value) for name, value in came.items()}
        for target, value in plan.values():
            if (target.shape, target.dtype) != (value.shape, value.dtype):
                raise ValueError("update_weights: the model has other tensors than when its copy was made")
        tear()
        every = self._tensors()
        used = [t.data_ptr() for t in every], self._revision, self._runner.forward
        drafts = came.keys() & self._places.optional  # whose forward is not made anew
        if not drafts and self._places.exchange(update.places, came, every):
            where, revision, spare = update.places.spare.pop("forward", (None, None, None))
            same = (where, revision) == ([t.data_ptr() for t in every], self._revision)
            self._runner.rebind(spare if same and not getattr(spare, "outdated", False) else None)
            update.places.spare["forward"] = used  # of the memory that the copy has now
            self._watch.note_moved()
        else:
            apply_update(plan.values())

    def open(self, offer: "Offer") -> None:
        """Memory that `take` finds its buckets in; in any thread, and so are `take` and `let_go`."""
        from ..handover.buffers import Memories

        if self._memories is None:
            self._memories = Memories(self.device)
        self._memories.open(offer)

    def take(self, update: Update, bucket: "Bucket", staged: bool) -> Reading:
        """Begins to write what lies in a bucket: it may be filled again once that is done. Into a copy it is in the
        thread's own stream, beside the engine's."""
        if self._memories is None:
            raise HandoverFailed("weights: a bucket came before the memory that it lies in")
        beside = staged or self.stream is None
        with contextlib.nullcontext() if beside else torch.cuda.stream(self.stream):
            with half_the_threads():
                update.write(self._memories.values(bucket), foreign=True)
            return self._memories.fence()

    def let_go(self) -> None:
        if self._memories is not None:
            self._memories.close()

    def _tensors(self) -> list[Tensor]:
        """All of the model's, under each name that they have, whoever has registered them since."""
        stores = (s for module in self.model.modules() for s in (module._parameters, module._buffers))
        return [tensor for store in stores for tensor in store.values() if tensor is not None]

    def _make_ready(self) -> None:
        """To be written into."""
        if "weights" in self.asleep:
            raise EngineAsleep(ASLEEP)
        if self._changed() == "replaced":
            self._rejoin()
            self._note()

    def adopt(self) -> None:
        """What was written is the weights now, and whoever gave the sources may do with them as they please."""
        self.wait()
        self._note()

    def wait(self) -> None:
        """For what the device has been given to do."""
        if self.stream is not None:
            self.stream.synchronize()

    # Sleep

    @property
    def asleep(self) -> dict[str, int]:
        """What of the memory has been given back, and at which level."""
        return {} if self._memory is None else self._memory.asleep

    def sleep(self, level: int, tags: Iterable[str]) -> dict[str, int]:
        """Bytes given back, by tag. Nothing that was in the caches is there afterwards."""
        self.wait()
        self._runner.forget_images()

        def move() -> dict[str, int]:
            if self._memory.will_empty_weights(level, tags) and self._memory.unsettled():
                self._make_forward()  # views of weights, which it may have, show what these have left
            return self._memory.sleep(level, tags)

        return self._aside(move)

    def wake_up(self, tags: Iterable[str]) -> dict[str, int]:
        """Bytes taken again, by tag. Graphs are made again once nothing is asleep any more. MemoryError where there is
        no room."""
        return self._aside(lambda: self._memory.wake_up(tags))

    def _aside(self, move: Callable[[], dict[str, int]]) -> dict[str, int]:
        """Addresses change: that is nobody else's doing. What somebody else did before is not forgotten."""
        self._missed = self._changed()
        try:
            return move()
        finally:
            self._watch.note()

    def interrupt(self) -> None:
        """All is computed in this process: nobody can end it from outside."""

    def close(self) -> None:
        """Unpatch the model, let go of the caches. Weights that are asleep come back, and zeros where they were
        dropped: nobody who still has the model could touch it otherwise."""
        self.wait()
        try:
            self._aside(lambda: self._memory.wake_up(["weights"]))
        except MemoryError as error:
            log.warning("close: the model's weights stay without memory, and nobody may read them: %s", error)
        self._runner = self._memory = None
        self.let_go()
        if self.stream is not None:
            torch.cuda.empty_cache()  # what this stream has given back, no other one would find
        self._stack.close()
