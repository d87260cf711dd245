"""Several engines of one model, each in a process of its own, behind the front of one."""

import asyncio
import functools
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vexact_ops.patch.description import Images

from ..config import EngineConfig
from ..core.answers import Answers
from ..core.loop import check_pause
from ..core.plan import Stats
from ..errors import ReplicaDied
from ..frontend import Frontend
from ..handover.buffers import HOST, Buckets, BucketSpace
from ..handover.messages import Bucket, dtype_name
from ..handover.packing import bucket_bytes, check_whole, packed
from ..handover.session import with_model
from ..outputs import Load, Submission
from ..request import Completion, check_ids, check_name, check_params, fresh, refused, token_ids
from ..runner import saver
from ..runner.sleep import TAGS, check_level, named_tags
from ..text import Text
from ..weights.directory import base_of, is_adapter
from ..weights.hub import snapshot
from ..weights.load import as_dtype
from ..weights.processors import load_processors
from ..weights.tokenizer import load_tokenizer
from ..weights.update import check_specs, pairs_of
from . import messages as m
from . import nodes
from .fleet import FleetUpdate
from .front import Front
from .jobs import Channel, Job, add_counts
from .process import ProcessChannel
from .ray import RayChannel

if TYPE_CHECKING:
    from .intake import FleetIntake

_MAKE = "vexact_engine.parallel.process:from_pretrained"
_BUCKET = 256 << 20  # bytes of new weights that travel at once
_MOST_STEPS = 16  # of every replica, whose requests are handed over at once


@dataclass(frozen=True)
class ReplicaInfo:
    """What is known of one replica.

    alive, fresh   whether it takes requests: its engine is there, and it has the weights that the others have
    reason         why it is not alive
    requests       that it has now
    starts         how many processes have had its place
    """

    index: int
    pid: int | None
    alive: bool
    fresh: bool
    reason: str
    requests: int
    load: Load
    starts: int


class Replicas(Frontend):
    """N engines behind the methods of one. A context manager; close() ends the processes.

    A request goes to the replica that has most of its prompt in its prefix cache, unless that has much more to do than
    others. Its seed is drawn here, so that any replica gives it the same tokens. Where a replica dies its requests go
    on at the others: to the byte what they would have been, and no stream repeats a token. A request that three have
    died with is given up (ReplicaDied), and so is everything once none is left.

    A replica ends with the process that made it, however that ends. One that is started again (`max_restarts`) has
    its first weights: after an update it takes no requests before the next one. One that stands still (its process is
    stopped, its device hangs) holds nobody up that has a limit: an aborted request ends after a second with what is
    known of it here, an update leaves it out after a minute (UpdateIncomplete), and close() kills it. What else waits
    for it raises TimeoutError; new requests go to others, or wait until it goes on.

    What is not said here is as in Engine. Errors of an engine come with their class where that is Python's or ours.
    """

    def __init__(
        self,
        make: str,
        arguments: Sequence[Mapping[str, Any]],
        *,
        environments: Sequence[Mapping[str, str]] | None = None,
        ray_options: Sequence[Mapping[str, Any]] | None = None,
        tokenizer: Any = None,
        max_restarts: int = 0,
        start_timeout: float = 1800.0,
        wait: bool = True,
    ) -> None:
        """
        make           "module:function" that makes a replica's Engine, called in its process; see from_pretrained
        arguments      for each replica what it is called with: by name, values of JSON
        environments   for each replica variables beside this process's
        ray_options    for each replica Ray's options for an actor; None: no Ray, but a process of this machine
        tokenizer      for prompts that are texts; each replica has one of its own for what it generates
        max_restarts   how often a replica that has died is started again, all of them together
        start_timeout  seconds that a replica may take to make its engine
        wait           False: for nothing. Until `wait_until_ready` has returned nothing else may be called but `close`
        raises         what making an engine raises, with the replica's name; ReplicaDied, TimeoutError
        """
        if not arguments:
            raise ValueError("Replicas: arguments: got none, expected those of one replica or more")
        environments = [{}] * len(arguments) if environments is None else environments
        for what, given in (("environments", environments), ("ray_options", ray_options)):
            if given is not None and len(given) != len(arguments):
                raise ValueError(f"Replicas: {what}: got {len(given)}, expected {len(arguments)}")
        if ray_options is not None:
            nodes.imported("Replicas: ray=True")
        self._text = None if tokenizer is None else Text(tokenizer)
        self.tokenizer = None if self._text is None else self._text.tokenizer

        def start(index: int) -> Channel:
            if ray_options is not None:
                variables = {"env_vars": dict(environments[index])} if environments[index] else {}
                options = {"runtime_env": variables, **ray_options[index]} if variables else ray_options[index]
                return RayChannel(make, arguments[index], options)
            return ProcessChannel(make, arguments[index], environments[index])

        self._front = Front(start, len(arguments), max_restarts, start_timeout)
        self._end = weakref.finalize(self, self._front.close)
        self._buffers: Buckets | None = None
        self._updates = threading.Lock()
        self._sleeping: set[str] = set()
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Each replica has made its engine. Raises what the constructor does."""
        self._front.wait_until_ready()
        facts = self._front.replicas[0].facts
        self.config, self.name = EngineConfig(**facts["config"]), facts["name"]
        self.vocab_size, self.path = facts["vocab_size"], facts["path"]
        self.sleep_backend = facts["sleep_backend"]  # of the first
        self.device, self.dtype = torch.device(facts["device"]), getattr(torch, facts["dtype"])
        self._numerics = facts["numerics"]
        self.images = None if facts["images"] is None else Images(**facts["images"])
        self.image_processor: Any = None  # as Engine has it
        self.video_processor: Any = None

    @classmethod
    def from_pretrained(
        cls,
        path: "str | os.PathLike",
        *,
        replicas: int,
        device: str = "cpu",
        dtype: str | torch.dtype | None = None,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
        trust_remote_code: bool = False,
        ray: bool = False,
        max_restarts: int = 0,
        start_timeout: float = 1800.0,
    ) -> "Replicas":
        """Replicas of what Engine.from_pretrained takes, but for a loaded model.

        device   "cpu", whose cores they share; or "cuda": each has a GPU of its own, or one for each of its stages and
                 ranks, of those that this process sees, or that Ray has
        tokenizer, trust_remote_code  as Engine.from_pretrained has them; one that is no path is this process's alone,
                 and replicas have the one beside the weights
        ray      as actors, on whichever machines of Ray's cluster, each with its stages and ranks on one, or on
                 EngineConfig.nodes; `path` must be there too. ValueError where the cluster is too small
        """
        if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
            raise ValueError(f"Replicas: replicas: got {replicas!r}, expected 1 or more")
        if isinstance(path, torch.nn.Module):
            raise TypeError(f"Replicas: path: got a {type(path).__name__}, expected a path or a name on the Hub")
        drafts = None if config is None or config.speculation is None else config.speculation.draft_model
        if isinstance(drafts, torch.nn.Module):
            got = type(drafts).__name__
            raise TypeError(
                f"Replicas: config: speculation.draft_model: got a {got}, expected a path or a name on the Hub"
            )
        stages = 1 if config is None else config.processes
        if config is not None and config.nodes > 1 and not ray:
            raise ValueError(f"EngineConfig: nodes: got {config.nodes}, expected 1, or Replicas with ray=True")
        environments, threads = ([{}] * replicas, None) if ray else places(device, replicas, stages)
        preload = saver.environment(EngineConfig().sleep_backend if config is None else config.sleep_backend, device)
        environments = [variables | preload for variables in environments]
        if ray and device not in ("cpu", "cuda"):
            raise ValueError(f'Replicas: device: got {device!r}, expected "cpu" or "cuda"')
        ray_options = None
        if ray:
            ray_options = [_ray_options(replicas, EngineConfig() if config is None else config, device)] * replicas
        arguments = {
            "path": os.fspath(path),
            "device": device,
            "dtype": None if dtype is None else dtype_name(as_dtype(dtype, device)),
            "config": None if config is None else m.as_dict(config) | {"show_progress": False},
            "threads": threads,
            "tokenizer": os.fspath(tokenizer) if isinstance(tokenizer, str | os.PathLike) else None,
            "trust_remote_code": trust_remote_code,
        }
        if tokenizer is False:
            arguments["tokenizer"] = False
        made = cls(
            _MAKE,
            [arguments] * replicas,
            environments=environments,
            ray_options=ray_options,
            tokenizer=load_tokenizer(path, tokenizer, trust_remote_code=trust_remote_code),
            max_restarts=max_restarts,
            start_timeout=start_timeout,
        )
        if made.images is not None:
            name = os.fspath(path)
            name = base_of(Path(name)) if is_adapter(Path(name)) else name
            folder = Path(name) if os.path.isdir(name) else snapshot(name)
            made.image_processor, made.video_processor = load_processors(folder, name)
        made.config = replace(made.config, show_progress=None if config is None else config.show_progress)
        return made

    # Requests

    def abort(self, request_id: str) -> None:
        """End a request, from any thread: its samples get finish_reason "abort" and keep what they have. Nothing
        happens if it is unknown or done."""
        check_name("abort", request_id)
        self._front.abort(request_id)

    # For a while

    def pause(self, mode: str = "wait") -> None:
        """As Engine.pause, of all."""
        check_pause("pause", mode)
        self._front.paused = True
        self._all("pause", mode=mode)

    def resume(self) -> None:
        self._front.paused = False
        self._all("resume")

    def sleep(self, level: int = 1, tags: Iterable[str] | None = None, mode: str = "keep") -> dict[str, int]:
        """As Engine.sleep, of all: bytes given back, by tag, all together."""
        check_level(level)
        check_pause("sleep", mode)
        named = named_tags("sleep", tags)
        with self._updates:
            self._front.asleep = True
            try:
                answers = self._all("sleep", level=level, tags=named, mode=mode)
            finally:
                self._note_sleep()
            if "kv_cache" in named:
                self._front.forget_pages()
        return _sums(answers)

    def wake_up(self, tags: Iterable[str] | None = None) -> dict[str, int]:
        """As Engine.wake_up, of all. Replicas that died meanwhile are started again once nothing is asleep."""
        named = named_tags("wake_up", tags)
        with self._updates:
            try:
                answers = self._all("wake_up", tags=named)
            finally:
                self._note_sleep()
            if not self._sleeping:
                self._front.restart_missing()
        return _sums(answers)

    def _note_sleep(self) -> None:
        found = self._front.ask("asleep").values()
        self._sleeping = {tag for tags in found if not isinstance(tags, BaseException) for tag in tags}
        self._front.asleep = bool(self._sleeping)

    @property
    def state(self) -> str:
        """ "asleep", "paused" or "running", as Engine.state."""
        return "asleep" if self._sleeping else "paused" if self._front.paused else "running"

    @property
    def asleep(self) -> tuple[str, ...]:
        return tuple(tag for tag in TAGS if tag in self._sleeping)

    def reset_prefix_cache(self) -> None:
        self._all("reset_prefix_cache")
        self._front.forget_pages()

    def save_answers(self, path: "str | os.PathLike") -> None:
        """As Engine has it: those of all replicas, in one file."""
        speculation = self.config.speculation
        kept = Answers(sys.maxsize if speculation is None else len(self.replicas) * speculation.answer_tokens)
        for data in self._all("pack_answers").values():
            kept.take(data)
        kept.save(path)

    def load_answers(self, path: "str | os.PathLike") -> None:
        """Each replica takes all of them, for any may be asked."""
        self._all("take_answers", data=Path(path).read_bytes())

    # Weights

    def update_weights(
        self,
        named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        numerics: Mapping[str, object] | None = None,
        specs: Mapping[str, tuple[Sequence[int], torch.dtype]] | None = None,
        keep_cache: bool = False,
    ) -> int:
        """New weights on all replicas, as Engine.update_weights has them.

        Names, shapes, dtypes and numerics are checked by all before any is written: if one refuses, nothing has changed
        anywhere. Then the tensors go bucket by bucket through memory that all of them share.

        returns   the new weight_version
        raises    as Engine.update_weights. UpdateIncomplete where some have the new weights and others failed on the
                  way: those get no requests until the next update, and what they had goes on at the others. What breaks
                  off for all (the iterator raises) leaves all torn: requests end with WeightsTorn until the next one
        """
        numerics, pairs = with_model(numerics, pairs_of(named_tensors))
        if specs is None:
            pairs = list(pairs)
            for name, tensor in pairs:
                check_whole(name, tensor, "update_weights")
            specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in pairs}
            if len(specs) != len(pairs):
                names = [name for name, _ in pairs]
                twice = sorted({name for name in names if names.count(name) > 1})
                raise ValueError(f"update_weights: repeated: {', '.join(twice)}")
        check_specs(specs)
        specs = {name: _spec(name, spec) for name, spec in specs.items()}
        with self._updates:
            self._front.check_open()
            self._front.updating(True)
            try:
                return self._update(pairs, specs, numerics, keep_cache)
            finally:
                self._front.updating(False)

    def _update(self, pairs, specs, numerics, keep_cache: bool) -> int:
        said = {name: (list(shape), dtype_name(dtype)) for name, (shape, dtype) in specs.items()}
        numerics = dict(numerics) if isinstance(numerics, Mapping) else None
        update = FleetUpdate(self._front, specs=said, numerics=numerics, keep_cache=keep_cache)
        waiting: list[dict] = [{}, {}]  # for each bucket, what replicas will answer of it

        def spaces() -> Iterator[BucketSpace]:
            for at in itertools.cycle(range(len(waiting))):
                update.wait_for(waiting[at])
                yield buffers.space(at)

        left = dict(specs)
        try:
            buffers = self._buffers_of(bucket_bytes(specs.values(), _BUCKET), len(waiting))
            update.open(buffers.offer())
            for space, used, parts in packed(_checked(pairs, specs, left), spaces()):
                bytes_of = functools.partial(_bytes, buffers.tensors[space.number], used)
                waiting[space.number] = update.send_bucket(Bucket(space.number, parts), bytes_of)
            for answers in waiting:
                update.wait_for(answers)
            if left:
                raise ValueError(f"update_weights: announced, but did not come: {', '.join(sorted(left)[:6])}")
        except BaseException:
            update.give_up()
            raise
        return update.finish()

    def intake(self, mode: str = "in_place", staging: str | None = None) -> "FleetIntake":
        """Where a WeightReceiver puts what comes, as Engine.intake: each replica takes it from the sender's memory."""
        from .intake import FleetIntake

        self._front.check_open()
        return FleetIntake(self._front, self._updates, self._numerics, self.device.type, mode, staging)

    def _buffers_of(self, size: int, count: int) -> Buckets:
        """Several, so that one is filled while another is read; kept for the next update."""
        if self._buffers is None or self._buffers.size < size:
            if self._buffers is not None:
                self._buffers.close()
                self._front.ask("let_go")
            self._buffers = Buckets(HOST, size, count)
        return self._buffers

    # What there is to know

    @property
    def weight_version(self) -> int:
        return self._front.weight_version

    @property
    def stats(self) -> Stats:
        """Sums of what all have counted; those that have died or stand still as far as they were heard of."""
        front = self._front
        if not front.closed:
            front.note_stats()
        total: dict[str, Any] = {}
        for one in front.replicas:
            total = add_counts(add_counts(total, one.past), one.stats)
        return Stats(**total)

    @property
    def replicas(self) -> list[ReplicaInfo]:
        """Each of them, as it is known here at this moment."""
        found = []
        for one in self._front.replicas:
            jobs = len(one.jobs)
            pid = None if one.channel is None else one.pid
            found.append(ReplicaInfo(one.index, pid, one.ready, one.fresh, one.reason, jobs, one.load, one.starts))
        return found

    def load(self) -> Load:
        """As Engine.load, of all together and as last heard of."""
        loads = [one.load for one in self._front.replicas]
        names = ("running", "waiting", "pages_used", "pages", "window_pages_used", "window_pages")
        return Load(**{name: sum(getattr(one, name) for one in loads) for name in names}, paused=self._front.paused)

    @property
    def closed(self) -> bool:
        return self._front.closed

    def numerics(self) -> dict:
        return dict(self._numerics)

    # The end

    def close(self) -> None:
        """Abort what runs and end the processes. Again does nothing."""
        self._end()
        if self._buffers is not None:
            self._buffers.close()
        self._buffers = None

    def __enter__(self) -> "Replicas":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # Helpers

    def _all(self, what: str, **arguments: Any) -> dict[int, Any]:
        """The answers of all that are alive; the error of the first that has one. Those that die meanwhile are named in
        the log and left out, unless none is left."""
        answers = self._front.ask(what, **arguments)
        for index, answer in answers.items():
            if isinstance(answer, BaseException) and not isinstance(answer, ReplicaDied):
                answer.args = (f"replica {index}: {answer}",)
                raise answer
        answers = {index: answer for index, answer in answers.items() if not isinstance(answer, ReplicaDied)}
        if not answers:
            raise self._front.no_replica()
        return answers

    def check_open(self) -> None:
        self._front.check_open()

    def _submit(self, tickets: Sequence[Job]) -> None:
        self._front.submit(tickets)

    def _withdraw(self, tickets: Iterable[Job]) -> None:
        self._front.withdraw(tickets)

    @property
    def _call_in(self) -> Callable[[asyncio.AbstractEventLoop, Callable, Any], None]:
        return self._front.call_in

    @property
    def _at_once(self) -> int:
        return self.config.max_num_seqs * len(self._front.replicas)

    def _handed_over(
        self, each: list[tuple], call: Submission, may_wait: bool = True
    ) -> Iterator[tuple[int, Job | list[Completion]]]:
        """The first once they fill a step of every replica, which compute these while the others are made; then of more
        and more steps, so few that what replicas say need not wait for long."""
        mine, tokens, samples, share = [], 0, 0, len(self._front.replicas)
        most = _MOST_STEPS * share
        for index, made in self._jobs(each, call):
            if isinstance(made, Job):
                mine.append(made)
                tokens, samples = tokens + len(made.prompt_ids), samples + made.params.n
                if tokens >= share * self.config.max_num_batched_tokens or samples >= share * self.config.max_num_seqs:
                    self._front.submit(mine)
                    mine, tokens, samples, share = [], 0, 0, min(2 * share, most)
            yield index, made
        self._front.submit(mine)
        self._front.whole(call)

    def _job(self, prompt, params, name, call, listen) -> "Job | list[Completion]":
        try:
            check_params(params, self.vocab_size)
            given, pictures = self._read_prompt(prompt, self.images)
            ids = token_ids(given)
            check_ids(ids, self.vocab_size)
        except Exception as error:
            return refused([], params, name, error, self.weight_version)
        name = f"request-{fresh():016x}" if name is None else name
        if params.seed is None:
            params = replace(params, seed=fresh())
        return Job(ids, params, name, call, listen, pictures)

    def _progress(self, tickets: Sequence[Job]) -> tuple[int, int, int]:
        finished = [done for job in tickets for done in job.completions if done is not None]
        return len(finished), sum(job.params.n for job in tickets), sum(len(done.token_ids) for done in finished)


def places(device: str, count: int, stages: int) -> tuple[list[dict[str, str]], int | None]:
    """Variables for each replica, and how many threads it may use."""
    if device == "cpu":
        return [{} for _ in range(count)], max(1, torch.get_num_threads() // count)
    if device != "cuda":
        raise ValueError(f'Replicas: device: got {device!r}, expected "cpu" or "cuda": each replica has its own GPU')
    seen = torch.cuda.device_count()
    if seen < count * stages:
        each = "" if stages == 1 else f", and each takes {stages}"
        raise ValueError(
            f"Replicas: replicas: got {count}, expected at most {seen // stages}: there are {seen} GPUs{each}"
        )
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(i) for i in range(seen)]
    every = range(0, count * stages, stages)
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[i : i + stages])} for i in every], None


def _ray_options(replicas: int, config: EngineConfig, device: str) -> dict[str, Any]:
    """Of each one's actor, once there is room for all. On several machines it is the actors there that have GPUs."""
    ray = nodes.imported("Replicas: ray=True")
    if not ray.is_initialized():
        ray.init()
    bundle = nodes.demand(config.processes // config.nodes, device)
    nodes.check_room("Replicas: replicas", replicas, [bundle] * config.nodes)
    if config.nodes > 1:
        return {"num_cpus": 0, "num_gpus": 0}
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0)}


def _spec(name: str, given) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(given, tuple) and len(given) == 2:
        return tuple(given[0]), given[1]
    if hasattr(given, "shape") and hasattr(given, "dtype"):
        return tuple(given.shape), given.dtype
    raise TypeError(f"update_weights: specs: {name} is a {type(given).__name__}, expected (shape, dtype)")


def _checked(pairs, specs, left: dict) -> Iterator[tuple[str, Tensor]]:
    """As they were announced, each once; what has not come stays in `left`."""
    for name, tensor in pairs:
        if left.pop(name, None) is None:
            raise ValueError(f"update_weights: {name} was not announced, or came before")
        check_whole(name, tensor, "update_weights")
        if (tuple(tensor.shape), tensor.dtype) != specs[name]:
            got = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"update_weights: {name} is {got}, expected {specs[name][1]} {specs[name][0]}")
        yield name, tensor


def _bytes(memory: Tensor, used: int) -> bytes:
    return memory[:used].numpy().tobytes()


def _sums(answers: Mapping[int, Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for answer in answers.values():
        total = add_counts(total, answer)
    return total
