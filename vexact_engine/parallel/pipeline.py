"""A pipeline: the layers in stages, each in a process of its own with a device of its own; or in several, the ranks of
a stage, over which its weights are cut by their output rows (weights/cut.py). Ranks of one stage are a pipeline too.

The scheduler stays in the engine's process. Its plans go to all stages as differences by slot (core/step.py); hidden
states go from stage to stage, and drawn ids from the last to the first, over torch.distributed, without the host: so a
stage may have the next steps queued before the last one is through with this one. What was drawn comes back to the
scheduler from the last stage. To keep all of them busy a plan takes at most its share of the decodes, one for each
stage, and one plan more than there are stages is in flight.

A stage that dies takes the pipeline with it: the requests under way end with StageDied, and the stages are made anew,
from the weights that they were made of. Where those have been updated since, that is said, and an update heals it. One
that stands still is as good as dead once what it owes has not come for so long as that can take; requests are aborted
meanwhile, and an engine that is closed ends it.
"""

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import wait

import torch
from torch import Tensor

import vexact_ops as vx

from ..config import EngineConfig
from ..core.plan import Sampled, StepPlan
from ..core.step import Encoder, Step
from ..errors import EngineAsleep, HandoverFailed, StageDied, WeightsTorn
from ..handover.buffers import HOST, Buckets, Memories
from ..handover.messages import Bucket, Offer
from ..handover.packing import bucket_bytes, packed
from ..handover.session import READ, Reading
from ..media.images import scene_of
from ..progress import bar
from ..runner import memory as runner_memory
from ..runner.drafting import DraftModel
from ..runner.sleep import ASLEEP
from ..weights.cut import cut as cut_weights
from ..weights.cut import shapes
from ..weights.draft import Draft
from ..weights.load import Loaded
from ..weights.update import Fresh, Piece, Places, plan_update
from . import limits
from . import messages as m
from .balance import split
from .line import Line
from .member import LOOK, Member
from .placement import Placement
from .scenes import Scenes, places_alone
from .update import Staging, TakenOn, UpdateOfStages

log = logging.getLogger(__name__)

_BUCKET = 256 << 20  # bytes of new weights that go to the stages at once


class _Pending:
    """A plan that all stages have been told of."""

    what, drafts = "a step", False

    def __init__(self, pipeline: "PipelineWorker", number: int):
        self._pipeline, self._step = pipeline, (number, self.drafts)
        self._end = time.monotonic() + limits.STEP

    def ready(self) -> bool:
        pipeline = self._pipeline
        if self._step not in pipeline.drawn and not pipeline.dead:
            pipeline.listen(0)
        return self._step in pipeline.drawn or bool(pipeline.dead) or time.monotonic() > self._end

    def wait(self) -> Sampled:
        self._pipeline.listen_until(lambda: self._step in self._pipeline.drawn, self._end, self.what)
        return self._pipeline.drawn.pop(self._step)


class _Drafting(_Pending):
    """A step of what drafts. It is waited for in the midst of a plan: nobody's requests may end meanwhile."""

    what, drafts = "a draft", True

    def wait(self) -> Sampled:
        meanwhile, self._pipeline.meanwhile = self._pipeline.meanwhile, lambda: None
        try:
            return super().wait()
        finally:
            self._pipeline.meanwhile = meanwhile


class ReadingOfStages(Reading):
    """Of a bucket, by all stages: done once the last has what it holds of it. In the engine's thread."""

    def __init__(self, worker: "PipelineWorker", key: int, stages: Sequence[Member]):
        self._worker, self._key, self._stages = worker, key, stages

    @property
    def done(self) -> bool:
        return not self._worker.has(self._stages) or self._worker.heard(self._key)

    def wait(self) -> None:
        if not self._worker.has(self._stages):
            raise StageDied(self._worker.dead or "a stage died, and the stages were made anew")
        self._worker.await_answers(self._key)


class PipelineWorker:
    """What core/loop.py's Worker is, for a model in stages. All but `fence` is called in the engine's thread.

    config     as given, with num_pages filled in: what all stages have room for
    layers     of each stage
    images     what the model takes of images; None: it takes none
    sleep_backend   how they give memory back
    numerics   what fixes the bits; all stages have the same
    meanwhile  as core/loop.py has it
    dead       why the stages cannot be used, "" while they can
    drawn      what has come back and was not taken yet, by the number of its step, and whether that drafts
    follows         whether it takes plans behind drafts (core/behind.py)
    draft_model     what drafts in the last stage; None: nothing does
    verified   rows -> seconds of steps that verify drafts, in the slowest stage, as far as graphs of such have shown
    asleep     what of the stages' memory has been given back, and at which level; of one of them is enough
    """

    def __init__(self, loaded: Loaded, config: EngineConfig, backend: str | None = None, draft: Draft | None = None):
        self.model, self._origin, self._device, self._backend = loaded.model, loaded.origin, loaded.device, backend
        self.config, self.places = config, Places.of(loaded.model, draft, Fresh.of(config.adapter))
        self.meanwhile: Callable[[], None] = lambda: None
        self._placement = Placement(config, self._device, loaded.nodes, lambda: self.meanwhile())
        try:
            self.layers = split(self.model, config)
        except vx.patch.NotDescribed as reason:
            got = getattr(config, config.parallel)
            raise ValueError(f"EngineConfig: {config.parallel}: got {got}, expected 1: {reason}") from None
        with vx.patch.hf(self.model, **config.patch_options, training=False) as handle:
            self.images, self._scenes = handle.describe().images, Scenes(config.image_cache_tokens)
            self._encodes = [bool(handle.describe().tower_names(layers)) for layers in self.layers]
            self.chunk = runner_memory.chunk_of(handle.memories())
            self.reach = runner_memory.reach(handle.memories())
            self.numbers_alone = runner_memory.numbers_alone(handle.memories(), config)
            if config.tensor_parallel_size > 1:  # what does not fit is said here, before any process is there
                whole_experts = config.expert_parallel_size > 1
                cut_weights(handle.describe(), shapes(self.model), 0, config.tensor_parallel_size, whole_experts)
        self.depth, self.longest_first, self.follows = len(self.layers) + 1, False, False
        self._encoder = Encoder()
        self._stages: list[Member] = []
        self.drawn: dict[tuple[int, bool], Sampled] = {}
        self.dead, self._updated, self._lost = "", False, ""
        self.asleep: dict[str, int] = {}
        self._keys = itertools.count()
        self._buffers: Buckets | None = None  # that what comes from this process travels in
        self._here: Memories | None = None  # what weights come in, for stages that do not see it
        self._start()
        drafts = [stage.ready["drafts"] for stage in self._stages if stage.ready["drafts"]]
        self.draft_model = DraftModel(self._launch_draft, **drafts[0]) if drafts else None

    # Stages

    def _start(self) -> None:
        config, layers = self.config, [(each.start, each.stop) for each in self.layers]
        self.dead, self.drawn, self._stages = "", {}, []
        self._encoder = Encoder()
        self._scenes.clear()
        with bar(config.show_progress) as progress:
            try:
                progress("stages", 0, config.processes, "")
                self._placement.begin(self._stages)
                for rank, stage in enumerate(self._stages):
                    make = m.Make(
                        rank, config.tensor_parallel_size, layers, self._placement.device(rank),
                        m.as_dict(self._origin), m.as_dict(config), self._backend, self._placement.store, self.depth,
                    )  # fmt: skip
                    stage.send(m.encode([make]))
                end = time.monotonic() + limits.START
                for done, stage in enumerate(self._stages):
                    progress("stages", done, config.processes, "")
                    self.listen_until(lambda stage=stage: stage.ready is not None, end, stage.name)
            except BaseException as error:
                self._bury(self.dead or f"the stages could not be made: {error!r}")
                if isinstance(error, StageDied):
                    raise RuntimeError(f"Engine: pipeline: {error}") from None
                raise
        ready = [stage.ready for stage in self._stages]
        names = ("config", "path", "numerics", "held", "sleep_backend", "verified")
        configs, paths, numerics, held, sleeps, verified = ([facts[name] for facts in ready] for name in names)
        # A number may stand in a buffer that the first stage alone has: the model's are the same, of one config.
        for stage, other in zip(self._stages, numerics):
            differ = vx.numerics_difference({**other, "model": None}, {**numerics[0], "model": None})
            if differ:
                found = "; ".join(f"{where}: {got!r} against {first!r}" for where, (got, first) in differ.items())
                self._bury(f"{stage.name} has other numerics than {self._stages[0].name}: {found}")
                raise RuntimeError(f"Engine: pipeline: {self.dead}")
        self.config, self.numerics, self.held = EngineConfig(**configs[0]), numerics[0], tuple(held)
        self.path, self.sleep_backend = self._said(paths), self._said(sleeps)
        sizes = set.intersection(*map(set, verified))
        self.verified = {rows: max(seconds[rows] for seconds in verified) for rows in sizes}

    def _said(self, words: Sequence[str]) -> str:
        """By all stages."""
        if len(set(words)) == 1:
            return words[0]
        return "; ".join(f"{stage.name}: {said}" for stage, said in zip(self._stages, words))

    def _kill(self) -> None:
        for stage in self._stages:
            stage.interrupt()
        for stage in self._stages:
            stage.end(limits.END)
        self._stages = []
        self._placement.end()

    def listen(self, seconds: float) -> None:
        """Take in what stages have to say, for so long at most, or until one has said something."""
        sources, end = {stage.socket: stage for stage in self._stages}, time.monotonic() + seconds
        while not (said := wait(list(sources), max(0.0, min(end - time.monotonic(), LOOK)))):
            if time.monotonic() >= end:
                return
            self.meanwhile()
        for ours in said:
            stage = sources[ours]
            frames = stage.frames.read()
            if frames is None:
                self._bury(f"{stage.name} has died ({stage.how()})")
                return
            for message in (message for frame in frames for message in m.from_stage(frame)):
                if isinstance(message, m.Drawn):
                    self.drawn[message.number, message.drafts] = message.sampled
                elif isinstance(message, m.Answer):
                    stage.answers[message.key] = message
                elif isinstance(message, m.Ready):
                    stage.ready = message.facts
                else:
                    log.error("%s has failed:\n%s", stage.name, message.trace)
                    failed = f"{stage.name} has failed: {message.failure.kind}: {message.failure.text}"
                    self._bury(self._killed(stage) or failed)
                    return

    def _killed(self, failed: Member) -> str:
        """What has ended without a word, and may be why another one has failed; "" where nothing has."""
        others, end = (
            {stage.socket: stage for stage in self._stages if stage is not failed},
            time.monotonic() + limits.WHY,
        )
        while others and (said := wait(list(others), max(0.0, end - time.monotonic()))):
            for ours in said:
                frames = others[ours].frames.read()
                if frames is None:
                    return f"{others[ours].name} has died ({others[ours].how()})"
                if any(isinstance(message, m.Failed) for frame in frames for message in m.from_stage(frame)):
                    del others[ours]
        return ""

    def _bury(self, why: str) -> None:
        """One has died: the others wait for it, and for ever."""
        self.dead = why
        self._kill()

    def listen_until(self, ready: Callable[[], bool], end: float, what: str) -> None:
        """`listen` until it is so. StageDied where a stage dies, or the time is over: then they stand still."""
        while not ready():
            if self.dead:
                raise StageDied(self.dead)
            left = end - time.monotonic()
            self.listen(max(left, 0.0))
            if left <= 0 and not ready() and not self.dead:  # this process may have stood still meanwhile
                silent = self._silent()
                if not self.dead and not ready():
                    says = f"; nothing at all comes from {', '.join(silent)}" if silent else ""
                    self._bury(f"the stages stand still: {what} did not come in time{says}")

    def _silent(self) -> list[str]:
        """Those that do not even say that they are there: the others may wait for them."""
        key, end = next(self._keys), time.monotonic() + limits.PING
        for stage in self._stages:
            with contextlib.suppress(OSError):
                stage.send(m.encode([m.Ping(key)]))
        while (left := end - time.monotonic()) > 0 and not self.dead:
            if all(key in stage.answers for stage in self._stages):
                break
            self.listen(left)
        return [stage.name for stage in self._stages if stage.answers.pop(key, None) is None]

    # Steps

    def launch(self, plan: StepPlan) -> _Pending:
        if plan.failure is not None:
            raise plan.failure
        step = self._encoder.encode(plan)
        scene = None if self.images is None else scene_of(plan)
        data, epoch = bytearray(step.to_bytes()), plan.image_epoch
        if scene is None:
            self._send(m.Step(data, image_epoch=epoch))
        else:
            here = [self._encodes[i // self.config.tensor_parallel_size] for i in range(len(self._stages))]
            for encodes, made in ((True, self._scenes.message(scene, epoch)), (False, places_alone(scene))):
                among = [stage for stage, own in zip(self._stages, here) if own == encodes]
                self._send(m.Step(data, image_epoch=epoch, scene=made), among)
        return _Pending(self, step.number)

    def _launch_draft(self, step: Step) -> _Drafting:
        drafting = [stage for stage in self._stages if stage.ready["drafts"]]
        self._send(m.Step(bytearray(step.to_bytes()), drafts=True), drafting)
        return _Drafting(self, step.number)

    def _send(self, message: m.ToStage, among: Sequence[Member] | None = None) -> None:
        if self.dead:
            raise StageDied(self.dead)
        frame = m.encode([message])
        for stage in self._stages if among is None else among:
            try:
                stage.send(frame)
            except OSError:
                self.listen(0)  # it may have said why
                if not self.dead:
                    self._bury(f"{stage.name} has died ({stage.how()})")
                raise StageDied(self.dead) from None

    def changed(self) -> bool:
        """Nobody but the engine can change weights; but they are gone with a stage that has died."""
        if not self.dead:
            self.listen(0)
        return bool(self.dead or self._lost)

    def renew(self) -> bool:
        if self.dead:
            self._restart()
        if self._lost:
            raise WeightsTorn(self._lost)
        return False

    def _restart(self) -> None:
        log.error("pipeline: %s; the stages are made anew", self.dead)
        if self._updated:
            self._lost = f"Engine: {self.dead}, and with it weights that came by an update: update them again"
        self._start()
        asleep = self.asleep
        for level in set(asleep.values()):  # as those did that they take the place of
            tags = [tag for tag, at in asleep.items() if at == level]
            self._moved(self.ask("sleep", level=level, tags=tags))

    def fence(self) -> Callable[[], None]:
        return lambda: None

    # Weights

    def plan(self, named_tensors, whole: bool = False) -> list[tuple[str, Tensor]]:
        self._check_awake()
        pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
        plan_update(self.places.whole() if whole or self._lost else self.places, pairs)  # that they fit
        return pairs

    def apply(self, plan: list[tuple[str, Tensor]]) -> None:
        if self.dead:
            self._restart()
        self.touched()
        self.ask("begin", staged=False)
        self.write(plan)
        self.whole()

    takes_in_caller = False

    def begin(self, specs: Mapping | None, staging: Staging | None = None) -> UpdateOfStages:
        if staging is None:
            self._check_awake()
        if self.dead:
            self._restart()
        return UpdateOfStages(self, specs, staging, whole=bool(self._lost))

    def make_copy(self, device: torch.device | str | None) -> Staging:
        """A second copy of the weights' memory in each stage, of its own layers."""
        if self.dead:
            self._restart()
        made = Staging(None if device is None else str(device))
        self.ask("copy", device=made.device)
        return made

    def open(self, offer: Offer) -> None:
        """Memory of another process, in each stage. Where a machine's stages do not see that, the first of them has
        some of its own, which is filled from here."""
        self._ask(lambda key: m.Open(key, offer), among=[stage for stage in self._stages if stage.near])
        apart = self._placement.apart(self._stages)
        if not apart:
            return
        self._here = self._here or Memories(torch.device("cpu"))
        self._here.open(offer)
        hold = {"size": offer.size, "count": len(offer.handles)}
        held = self._ask(lambda key: m.Do(key, "hold", hold), among=[stages[0] for stages in apart])
        for stages, (kind, name, size, handles, gpu) in zip(apart, held):
            own = Offer(kind, name, size, handles, gpu)
            self._ask(lambda key, own=own: m.Open(key, own), among=stages)

    def take(self, update: UpdateOfStages, bucket, staged: bool) -> Reading:
        """Each stage takes what it holds of a bucket in that memory. Into a copy, while steps run: all of it now."""
        reading = update.take(bucket)
        if staged:
            reading.wait()
        return READ if staged else reading

    def commit(self, update: UpdateOfStages, tear: Callable[[], None]) -> None:
        self._check_awake()
        tear()
        self.touched()
        self.ask("commit")
        self.whole()

    def let_go(self) -> None:
        if not self.dead:
            self.ask("let_go")
        if self._here is not None:
            self._here.close()

    # Weights that a sender on each node brings: see coordinator.py

    def lines(self) -> list[tuple[str, str, Line]]:
        """Of each node Ray's id, what people call it, and the line to the first of its stages. Those that have died are
        made anew."""
        if any(stage.line is not None and stage.line.gone for stage in self._stages):
            self.why_dead("a stage has hung up")
        self.changed()
        if self.dead:
            self._restart()
        nodes = zip(self._placement.nodes, self._placement.by_node(self._stages))
        return [(name, where, stages[0].line) for (name, where), stages in nodes]

    def why_dead(self, otherwise: str, seconds: float = limits.WHY) -> str:
        """Something of a stage has ended, or does not answer: so all of them end. Why, as far as it is known soon."""
        end = time.monotonic() + seconds
        while not self.dead and (left := end - time.monotonic()) > 0:
            self.listen(left)
        if not self.dead:
            self._bury(otherwise)
        return self.dead

    def open_on(self, node: int, offer: Offer) -> None:
        self._ask(lambda key: m.Open(key, offer), among=self._on(node))

    def let_go_on(self, node: int) -> None:
        if not self.dead:
            self._ask(lambda key: m.Do(key, "let_go", {}), among=self._on(node))

    def take_each(self, update: UpdateOfStages, taken: Sequence[TakenOn]) -> None:
        """`take` of buckets in memory of several nodes, of each by that node's stages: by all of them at once. What is
        wrong with one is its `failure`."""
        asked = []
        for each in taken:
            try:
                update.note_bucket(each.bucket, each.node)
            except (ValueError, TypeError, HandoverFailed) as error:
                each.failure = error
                continue
            stages = self._on(each.node)
            asked.append((each, self._asked(lambda key, each=each: m.Take(key, each.bucket), stages), stages))
        end = time.monotonic() + limits.ANSWER
        for each, key, stages in asked:
            for answer in self._answers(key, end, stages):
                if answer.failure is not None:
                    each.failure = m.exception(answer.failure)
            each.done = True

    def _on(self, node: int) -> Sequence[Member]:
        if self.dead:
            raise StageDied(self.dead)
        return self._placement.by_node(self._stages)[node]

    def ask(self, what: str, **arguments) -> list:
        """What each stage answers to one of its `do_` methods; what the first that refuses raises."""
        return self._ask(lambda key: m.Do(key, what, arguments), limits.of(what, arguments))

    def _ask(
        self, make: Callable[[int], m.ToStage], seconds: float | None = None, among: Sequence[Member] | None = None
    ) -> list:
        end = time.monotonic() + (limits.ANSWER if seconds is None else seconds)
        answers = self._answers(self._asked(make, among), end, among)
        self._refusals(answers)
        return [answer.value for answer in answers]

    def _refusals(self, answers: Sequence[m.Answer]) -> None:
        for answer in answers:
            if answer.failure is not None:
                raise m.exception(answer.failure)

    def _asked(self, make: Callable[[int], m.ToStage], among: Sequence[Member] | None) -> int:
        key = next(self._keys)
        self._send(make(key), among)
        return key

    def _answers(self, key: int, end: float, among: Sequence[Member] | None) -> list[m.Answer]:
        answers = []
        for stage in self._stages if among is None else among:
            what = f"an answer of {stage.name}"
            self.listen_until(lambda stage=stage: key in stage.answers, end, what)
            answers.append(stage.answers.pop(key))
        return answers

    def take_bucket(self, bucket: Bucket) -> "ReadingOfStages":
        apart = [stages[0] for stages in self._placement.apart(self._stages)]
        if apart:
            payload = self._here.bytes(bucket)
            self._ask(lambda key: m.Fill(key, bucket.buffer, payload), among=apart)
        return ReadingOfStages(self, self._asked(lambda key: m.Take(key, bucket), None), self._stages)

    def has(self, stages: Sequence[Member]) -> bool:
        """Whether they live, and none has taken their place."""
        return stages is self._stages and not self.dead

    def heard(self, key: int) -> bool:
        """Whether all stages have answered, or have died; what they say meanwhile is heard."""
        self.listen(0.0)
        return bool(self.dead) or all(key in stage.answers for stage in self._stages)

    def await_answers(self, key: int) -> None:
        """Until they have; raises what the first that refuses raises."""
        self._refusals(self._answers(key, time.monotonic() + limits.ANSWER, None))

    def whole(self) -> None:
        """All has been written: these are the weights, whatever was lost before."""
        self._lost = ""

    def touched(self) -> None:
        """What the stages have is not any more what they were made of."""
        self._updated = True

    def write(self, pairs: Iterable[tuple[str, Tensor | Piece]]) -> None:
        """Each stage takes what it holds, of the update that it has begun, from memory of this process."""
        pairs = list(pairs)
        tensors = (value.values if isinstance(value, Piece) else value for _, value in pairs)
        buffers = self._buffers_of(bucket_bytes(((t.shape, t.dtype) for t in tensors), _BUCKET))
        self.open(buffers.offer())
        for space, _, parts in packed(pairs, itertools.repeat(buffers.space(0))):
            self.take_bucket(Bucket(space.number, parts)).wait()

    def _buffers_of(self, size: int) -> Buckets:
        """One bucket, kept for the next update."""
        if self._buffers is None or self._buffers.size < size:
            if self._buffers is not None:
                self._buffers.close()
                self.ask("let_go")
            self._buffers = Buckets(HOST, size, 1)
        return self._buffers

    def wait(self) -> None:
        """`write` has waited."""

    adopt = wait

    # Sleep. Stages that are made anew meanwhile sleep as the others did

    def sleep(self, level: int, tags: Iterable[str]) -> dict[str, int]:
        """Bytes given back, by tag, of all stages together."""
        if self.dead:
            self._restart()
        self._scenes.clear()
        return self._moved(self.ask("sleep", level=level, tags=list(tags)))

    def wake_up(self, tags: Iterable[str]) -> dict[str, int]:
        """Bytes taken again. MemoryError where a stage has no room: what it lacks sleeps on, and the others have it."""
        if self.dead:
            self._restart()
        return self._moved(self.ask("wake_up", tags=list(tags)))

    def _moved(self, answers: list[list]) -> dict[str, int]:
        total, self.asleep = {}, {}
        for moved, asleep, _ in answers:
            for tag, count in moved.items():
                total[tag] = total.get(tag, 0) + count
            for tag, level in asleep.items():
                self.asleep[tag] = max(level, self.asleep.get(tag, 0))
        for stage, (*_, why) in zip(self._stages, answers):
            if why is not None:
                raise MemoryError(f"{why} ({stage.name})")
        return total

    def _check_awake(self) -> None:
        if "weights" in self.asleep:
            raise EngineAsleep(ASLEEP)

    # The end

    def numbers(self) -> list[tuple[int, int, int]]:
        """Of each stage: its process, how many layers it has, and the bytes of their caches."""
        return [tuple(found) for found in self.ask("numbers")]

    def interrupt(self) -> None:
        for stage in list(self._stages):
            stage.interrupt()

    def close(self) -> None:
        end = time.monotonic() + limits.END
        for stage in self._stages:
            with contextlib.suppress(OSError):
                stage.send(m.encode([m.Close()]))
        for stage in self._stages:
            stage.end(max(0.0, end - time.monotonic()))
        self._stages, self.dead = [], self.dead or "the engine is closed"
        self._placement.close()
        for memory in (self._buffers, self._here):
            if memory is not None:
                memory.close()
