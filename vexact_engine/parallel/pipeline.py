"""A pipeline: the layers in stages, each in a process of its own with a device of its own.

The scheduler stays in the engine's process. Its plans go to all stages as differences by slot (core/step.py); hidden
states go from stage to stage, and drawn ids from the last to the first, over torch.distributed, without the host: so a
stage may have the next steps queued before the last one is through with this one. What was drawn comes back to the
scheduler from the last stage. To keep all of them busy a plan takes at most its share of the decodes, one for each
stage, and one plan more than there are stages is in flight.

A stage that dies takes the pipeline with it: the requests under way end with StageDied, and the stages are made anew,
from the weights that they were made of. Where those have been updated since, that is said, and an update heals it.
"""

import contextlib
import itertools
import logging
import math
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import torch
from torch import Tensor

import vexact_ops as vx

from ..config import EngineConfig
from ..core.scheduler import Sampled, StepPlan
from ..core.step import Encoder
from ..errors import EngineAsleep, HandoverFailed, StageDied, WeightsTorn
from ..handover.session import READ, Reading
from ..progress import bar
from ..runner import memory, saver
from ..runner.sleep import ASLEEP
from ..weights.load import Loaded
from ..weights.update import Piece, Spec, Update, plan_update
from .stage import Assignment

log = logging.getLogger(__name__)

_BUCKET = 256 << 20  # bytes of new weights that go to the stages at once
_END_SECONDS = 5.0  # for a stage to end by itself
_CONTEXT = 1024  # tokens of a sequence that stages are balanced for


def cut(costs: Sequence[int], head: int, stages: int) -> tuple[range, ...]:
    """Layers in consecutive ranges, such that the most that a stage costs is least; of equal ones, the first.

    costs   of each layer; `head` is the last stage's on top
    raises  ValueError for more stages than layers
    """
    if stages > len(costs):
        raise ValueError(
            f"EngineConfig: pipeline_parallel_size: got {stages}, expected at most {len(costs)}, one a layer"
        )
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i]: the first i layers in so many stages: the most that one costs, and where the last of them begins
    best: list[tuple[int, tuple[int, ...]]] = [(sums[i], (0,)) if i else (0, ()) for i in range(len(sums))]
    for count in range(2, stages + 1):
        last = head if count == stages else 0
        best = [
            min(
                (max(best[j][0], sums[i] - sums[j] + last), (*best[j][1], j))
                for j in range(count - 1, i)
            )
            if i >= count
            else (sums[-1] + head, ())
            for i in range(len(sums))
        ]  # fmt: skip
    begins = (*best[-1][1], len(costs))
    return tuple(range(a, b) for a, b in itertools.pairwise(begins))


def split(model: torch.nn.Module, config: EngineConfig) -> tuple[range, ...]:
    """The layers of each stage, by what a plan of decodes reads there, which is the time that it takes: weights, and
    keys of a context that is usual. The embedding is looked up, a row a token: it takes memory and no time."""
    stages, context = config.pipeline_parallel_size, min(_CONTEXT, config.max_model_len or _CONTEXT)
    with vx.patch.hf(model, kv_segment=config.kv_segment, latent=config.latent_attention) as handle:
        described = handle.describe()
        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))

        def size(names: Iterable[str]) -> int:
            return sum(tensors[name].nbytes for name in names)

        every = range(len(described.layers))
        shared = set.intersection(*(described.names(range(i, i + 1)) for i in every)) if len(every) > 1 else set()
        head = {described.head.weight, described.norm.weight} if described.head else {described.norm.weight}
        beside = shared | head | {described.embedding.weight}
        rows, dtype = -(-config.max_num_seqs // stages), next(model.parameters()).dtype
        costs = []
        for i, layer in zip(every, described.layers):
            keys = min(context, layer.memory.window or context) * layer.memory.bytes_per_token(dtype)
            costs.append(size(described.names(range(i, i + 1)) - beside) + rows * keys)
        return cut(costs, size(head), stages)


class _Pending:
    """A plan that all stages have been told of."""

    def __init__(self, pipeline: "PipelineWorker", number: int):
        self._pipeline, self._number = pipeline, number

    def ready(self) -> bool:
        pipeline = self._pipeline
        if self._number not in pipeline.drawn and not pipeline.dead:
            pipeline.listen(0)
        return self._number in pipeline.drawn or bool(pipeline.dead)

    def wait(self) -> Sampled:
        pipeline = self._pipeline
        while self._number not in pipeline.drawn:
            if pipeline.dead:
                raise StageDied(pipeline.dead)
            pipeline.listen(None)
        return pipeline.drawn.pop(self._number)


class _Stage:
    """A stage's process, as the engine sees it."""

    def __init__(self, rank: int, variables: Mapping[str, str]):
        self.rank, self.answers = rank, []
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours.detach())
        environment = {**os.environ, **variables}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all of them are on this machine
        environment.setdefault("NCCL_MAX_P2P_NCHANNELS", "4")  # hidden states are small; the SMs are wanted elsewhere
        code = "from vexact_engine.parallel.stage import main; main()"
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the engine's process, which then ends this one
            )

    def send(self, message: bytes) -> None:
        self.connection.send_bytes(message)

    def end(self, seconds: float) -> None:
        with contextlib.suppress(OSError):
            self.send(pickle.dumps(("close",)))
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.connection.close()


class PipelineWorker:
    """What core/loop.py's Worker is, for a model in stages. All but `fence` is called in the engine's thread.

    config     as given, with num_pages filled in: what all stages have room for
    layers     of each stage
    sleep_backend   how they give memory back
    numerics   what fixes the bits; all stages have the same
    dead       why the stages cannot be used, "" while they can
    drawn      what has come back and was not taken yet, by the number of its step
    asleep     what of the stages' memory has been given back, and at which level; of one of them is enough
    """

    def __init__(self, loaded: Loaded, config: EngineConfig, backend: str | None = None):
        self.model, self._origin, self._device, self._backend = loaded.model, loaded.origin, loaded.device, backend
        count = config.pipeline_parallel_size
        if self._device.type == "cuda" and torch.cuda.device_count() < count + (self._device.index or 0):
            raise ValueError(
                f"EngineConfig: pipeline_parallel_size: got {count}, expected at most "
                f"{torch.cuda.device_count() - (self._device.index or 0)}: a stage has a GPU of its own"
            )
        self.config = config
        self.layers = split(self.model, config)
        with vx.patch.hf(self.model, kv_segment=config.kv_segment, latent=config.latent_attention) as handle:
            self.chunk = memory.chunk_of(handle.memories())
        self.depth, self.longest_first = count + 1, False
        self._encoder = Encoder()
        self._stages: list[_Stage] = []
        self.drawn: dict[int, Sampled] = {}
        self.dead, self._updated, self._lost = "", False, ""
        self.asleep: dict[str, int] = {}
        self._start()

    # Stages

    def _start(self) -> None:
        count = len(self.layers)
        self.dead, self.drawn, self._stages = "", {}, []
        self._encoder = Encoder()
        with tempfile.TemporaryDirectory(prefix="vexact-") as folder, bar(self.config.show_progress) as progress:
            try:
                for rank in range(count):
                    device = self._device.type
                    if device == "cuda":
                        device = f"cuda:{(self._device.index or 0) + rank}"
                    stage = _Stage(rank, saver.environment(self.config.sleep_backend, self._device.type))
                    self._stages.append(stage)
                    assignment = Assignment(
                        rank, self.layers, device, self._origin, self.config, self._backend,
                        os.path.join(folder, "store"), self.depth,
                    )  # fmt: skip
                    stage.send(pickle.dumps(("assignment", assignment)))
                ready: list = []
                for stage in self._stages:
                    progress("stages", len(ready), count, "")
                    ready.append(self._answer(stage))
            except BaseException as error:
                self._bury(self.dead or f"the stages could not be made: {error!r}")
                if isinstance(error, StageDied):
                    raise RuntimeError(f"Engine: pipeline: {error}") from None
                raise
        configs, paths, numerics, held, sleeps = zip(*(answer[1:] for answer in ready))
        if any(other != numerics[0] for other in numerics):
            self._bury("the stages' numerics differ: their bits could, too")
            raise RuntimeError(f"Engine: pipeline: {self.dead}")
        self.config, self.numerics, self.held = configs[0], numerics[0], held
        self.path, self.sleep_backend = _said(paths), _said(sleeps)

    def _kill(self) -> None:
        for stage in self._stages:
            stage.process.kill()
        for stage in self._stages:
            stage.process.wait()
            stage.connection.close()
        self._stages = []

    def listen(self, seconds: float | None) -> None:
        """Take in what stages have to say, for so long at most, or until one has said something."""
        sources = {stage.connection: stage for stage in self._stages}
        for connection in wait(list(sources), seconds):
            stage = sources[connection]
            try:
                answer = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                self._bury(f"stage {stage.rank} has died ({_how(stage.process)})")
                return
            if answer[0] == "drawn":
                self.drawn[answer[1]] = answer[2]
            elif answer[0] == "failed":
                log.error("stage %d has failed:\n%s", stage.rank, answer[2])
                self._bury(f"stage {stage.rank} has failed: {answer[1]}")
                return
            else:
                stage.answers.append(answer)

    def _bury(self, why: str) -> None:
        """One has died: the others wait for it, and for ever."""
        self.dead = why
        self._kill()

    def _answer(self, stage: _Stage) -> tuple:
        while not stage.answers:
            if self.dead:
                raise StageDied(self.dead)
            self.listen(None)
        return stage.answers.pop(0)

    # Steps

    def launch(self, plan: StepPlan) -> _Pending:
        step = self._encoder.encode(plan)
        message = pickle.dumps(("step", step.to_bytes()), protocol=5)
        self._send(self._stages, message)
        return _Pending(self, step.number)

    def _send(self, stages: Iterable[_Stage], message: bytes) -> None:
        if self.dead:
            raise StageDied(self.dead)
        for stage in stages:
            try:
                stage.send(message)
            except OSError:
                self.listen(0)  # it may have said why
                if not self.dead:
                    self._bury(f"stage {stage.rank} has died ({_how(stage.process)})")
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
            self._moved(self.ask("sleep", level, [tag for tag, at in asleep.items() if at == level]))

    def fence(self) -> Callable[[], None]:
        return lambda: None

    # Weights

    def plan(self, named_tensors) -> list[tuple[str, Tensor]]:
        self._check_awake()
        pairs = list(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
        plan_update(self.model, pairs)  # that they fit
        return pairs

    def apply(self, plan: list[tuple[str, Tensor]]) -> None:
        self.write(plan)
        self.whole()

    takes_aside = False

    def begin(self, specs: Mapping | None, staging: "_Staging | None" = None) -> "_UpdateOfStages":
        if staging is None:
            self._check_awake()
        if self.dead:
            self._restart()
        return _UpdateOfStages(self, specs, staging)

    def stage(self, device: torch.device | str | None) -> "_Staging":
        """A second copy of the weights' memory in each stage, of its own layers."""
        made = _Staging(None if device is None else str(device))
        self.ask("stage", made.device)
        return made

    def open(self, offer) -> None:
        """Memory of another process, in each stage."""
        self.ask("open", offer)

    def take(self, update: "_UpdateOfStages", bucket, staged: bool) -> Reading:
        """Each stage takes what it holds of a bucket in that memory."""
        update.take(bucket)
        return READ

    def commit(self, update: "_UpdateOfStages", tear: Callable[[], None]) -> None:
        self._check_awake()
        tear()
        self.touched()
        self.ask("commit")
        self.whole()

    def let_go(self) -> None:
        if not self.dead:
            self.ask("let_go")

    def ask(self, *message) -> list[tuple]:
        """What each stage answers; HandoverFailed with the first that refuses."""
        self._send(self._stages, pickle.dumps(message, protocol=5))
        answers = [self._answer(stage) for stage in self._stages]
        refusals = (answer[1] for answer in answers if answer[0] == "refused")
        if (why := next(refusals, None)) is not None:
            raise HandoverFailed(why)
        return answers

    def whole(self) -> None:
        """All has been written: these are the weights, whatever was lost before."""
        self._lost = ""

    def touched(self) -> None:
        """What the stages have is not any more what they were made of."""
        self._updated = True

    def write(self, pairs: Iterable[tuple[str, Tensor | Piece]]) -> None:
        """Each stage takes what it holds."""
        if self.dead:
            self._restart()
        self.touched()
        bucket, size = [], 0

        def flush() -> None:
            self._send(self._stages, pickle.dumps(("write", bucket), protocol=5))
            for stage in self._stages:
                self._answer(stage)

        for name, value in pairs:
            start, tensor = value if isinstance(value, Piece) else (None, value)
            bucket.append((name, start, tensor.detach().cpu().contiguous()))
            size += tensor.nbytes
            if size >= _BUCKET:
                flush()
                bucket, size = [], 0
        if bucket:
            flush()

    def wait(self) -> None:
        """`write` has waited."""

    settle = wait

    # Sleep. Stages that are made anew meanwhile sleep as the others did

    def sleep(self, level: int, tags: Iterable[str]) -> dict[str, int]:
        """Bytes given back, by tag, of all stages together."""
        if self.dead:
            self._restart()
        return self._moved(self.ask("sleep", level, list(tags)))

    def wake_up(self, tags: Iterable[str]) -> dict[str, int]:
        """Bytes taken again. MemoryError where a stage has no room: what it lacks sleeps on, and the others have it."""
        if self.dead:
            self._restart()
        return self._moved(self.ask("wake_up", list(tags)))

    def _moved(self, answers: list[tuple]) -> dict[str, int]:
        total, self.asleep = {}, {}
        for _, moved, asleep, _ in answers:
            for tag, count in moved.items():
                total[tag] = total.get(tag, 0) + count
            for tag, level in asleep.items():
                self.asleep[tag] = max(level, self.asleep.get(tag, 0))
        for rank, (*_, why) in enumerate(answers):
            if why is not None:
                raise MemoryError(f"{why} (stage {rank})")
        return total

    def _check_awake(self) -> None:
        if "weights" in self.asleep:
            raise EngineAsleep(ASLEEP)

    # The end

    def numbers(self) -> list[tuple[int, int, int]]:
        """Of each stage: its process, how many layers it has, and the bytes of their caches."""
        self._send(self._stages, pickle.dumps(("numbers",)))
        return [self._answer(stage)[1:] for stage in self._stages]

    def close(self) -> None:
        end = time.monotonic() + _END_SECONDS
        for stage in self._stages:
            with contextlib.suppress(OSError):
                stage.send(pickle.dumps(("close",)))
        for stage in self._stages:
            stage.end(max(0.0, end - time.monotonic()))
        self._stages, self.dead = [], self.dead or "the engine is closed"


class _Staging(NamedTuple):
    """A second copy of the weights' memory, in the stages: where it lies, None for their own devices."""

    device: str | None


class _UpdateOfStages(Update):
    """All is checked here, against a model without weights, and written there."""

    def __init__(self, worker: PipelineWorker, specs: Mapping | None, staging: _Staging | None):
        super().__init__(worker.model, specs)
        self._worker, self._staged = worker, staging is not None
        if staging is not None:
            worker.ask("stage", staging.device)  # some may have been made anew
        worker.ask("begin", self._staged)

    def take(self, bucket) -> None:
        from ..handover.messages import dtype_of  # it needs msgspec

        for part in bucket.parts:
            dtype = dtype_of(part.dtype)
            whole = part.start == 0 and part.count == math.prod(part.shape)
            self.note(part.name, Spec(part.shape, dtype) if whole else Piece(part.start, Spec((part.count,), dtype)))
        if not self._staged:
            self._worker.touched()
        self._worker.ask("take", bucket)

    def write(self, bucket: Iterable[tuple[str, Tensor | Piece]], foreign: bool = False) -> None:
        bucket = list(bucket)
        for given, _ in bucket:
            name = self.places.old.get(given, given)
            first = self._written.get(id(self._targets.get(name)), name)
            if first != name:  # no stage could compare them
                raise ValueError(f"update_weights: {first} and {name} are tied, expected one of them")
        super().write(bucket, foreign)
        if self._staged:
            self._worker.ask("put", bucket)
        else:
            self._worker.write(bucket)

    def finish(self) -> None:
        super().finish()
        if not self._staged:
            self._worker.whole()


def _said(words: Sequence[str]) -> str:
    """By all stages."""
    return words[0] if len(set(words)) == 1 else "; ".join(f"stage {i}: {said}" for i, said in enumerate(words))


def _how(process: subprocess.Popen) -> str:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    code = process.returncode
    return "it still runs" if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
