"""The engine: requests in, completions out, from a function call, from asyncio, or token by token.

What is here runs in the callers' threads and only hands over and collects: the engine's one thread (core/loop.py) owns
all that computes.
"""

import asyncio
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import vexact_ops as vx
from vexact_ops.patch.description import Images
from vexact_ops.patch.hf import check_kv_segment

from .classify import check_kind, labels_of, without_padding
from .config import EngineConfig, SamplingParams
from .core.answers import Answers
from .core.loop import Loop, check_pause, drop
from .core.plan import Stats
from .frontend import Frontend, Prompt
from .handover.session import TORN, WeightUpdate, check_numerics, check_version, with_model
from .outputs import Increment, Load, Submission, Ticket
from .parallel.assembly import assemble, complete
from .request import Completion, PartialOutput, Request, check_name, check_params, refused
from .runner import shapes
from .runner.ahead import verifying
from .runner.sleep import TAGS, check_level, named_tags
from .text import Text
from .weights.draft import load_draft
from .weights.load import Loaded, default_device, load, load_in_stages
from .weights.update import Places, grouped, pairs_of

if TYPE_CHECKING:  # it needs msgspec
    from .handover.intake import EngineIntake

_WORTH_IT = 16  # requests: to make fewer takes no longer than to wait for a launch
_DROPPED = "sleep(level=2) has dropped the weights: update them first"


class Engine(Frontend):
    """Generates with one model. A context manager; close() frees the caches and unpatches the model.

    All methods may be called from any thread; one thread of the engine's own computes, with torch state, stream and
    numerics of its own: autocast, modes, default types and backends of the callers take no part in it. One that is
    dropped without close() closes itself, and so does one that the end of the process finds at work. A fork of the
    process has no engine: EngineForked.

    The engine owns the weights. Change them by `update_weights`. What others write into them in place
    (`optimizer.step()`), or put in their place, is noticed before the next step and counts as an update: old pages are
    forgotten. A write through `.data` is not noticed; call reset_prefix_cache() after one, while nothing runs.

    config, tokenizer, model   as they are in use: num_pages and max_model_len are filled in; the tokenizer is a copy
    image_processor            transformers' own, of the model's directory; None: there is none, and images come as
                               ready pixel_values. May be set; video_processor likewise
    labels                     what a model that scores sequences calls their classes: `classify` is for it, and nothing
                               is generated; None of others
    stats                      counts since the start, live: steps, tokens, preemptions, ...
    weight_version             0, and one more after every update
    path                       how hidden states are computed: "fused", or "patched: " and why; never a matter of bits
    sleep_backend              how memory is given back: "memory_saver: " and the version, or "storages", with the
                               reason where EngineConfig.sleep_backend did not ask for that
    """

    def __init__(self, loaded: Loaded, config: EngineConfig | None = None) -> None:
        if not isinstance(loaded, Loaded):
            got = repr(loaded) if isinstance(loaded, str | os.PathLike) else f"a {type(loaded).__name__}"
            raise TypeError(
                f"Engine: loaded: got {got}, expected what weights.load.load returns; for a path, a name on the "
                "Hub or a Hugging Face model: Engine.from_pretrained(...)"
            )
        config = config or EngineConfig()
        if not isinstance(config, EngineConfig):
            raise TypeError(f"Engine: config: got a {type(config).__name__}, expected an EngineConfig")
        if (config.processes > 1) != (loaded.origin is not None):
            raise ValueError(
                f"Engine: {config.parallel}: got {getattr(config, config.parallel)} and a model that is "
                f"{'loaded, expected a path' if loaded.origin is None else 'in stages, expected more than 1'}"
            )
        if config.adapter is not None and loaded.adapter is None:
            raise ValueError(
                f"EngineConfig: adapter: got one for {loaded.name}, which was loaded without it, expected None: "
                "weights.load.load(adapter=...) and Engine.from_pretrained put one on a model"
            )
        self.model, self.name = loaded.model, loaded.name
        self._text = None if loaded.tokenizer is None else Text(loaded.tokenizer)
        self.tokenizer = None if self._text is None else self._text.tokenizer
        first = next(self.model.parameters())
        self.device, self.dtype = loaded.device or first.device, first.dtype
        self.vocab_size = shapes.vocab_size(self.model)
        self.labels = labels_of(self.model)
        self.image_processor, self.video_processor = loaded.processors
        config = complete(config, loaded)
        backend = vx.current_backend()  # of here and now, for good
        self._draft = load_draft(config.speculation, loaded)
        has_text = self._text is not None
        made = functools.partial(assemble, loaded, config, self.vocab_size, has_text, backend, self._draft)
        self._loop = Loop(made)
        self._scheduler, self._worker = self._loop.scheduler, self._loop.worker
        self.config = self._worker.config
        self._sleep_backend = self._worker.sleep_backend
        self._updates = threading.Lock()  # held by whoever updates the weights
        self._end = weakref.finalize(self, drop, self._loop)
        self._end.atexit = False  # the loop sees to that itself

    @classmethod
    def from_pretrained(
        cls,
        path_or_model: "str | os.PathLike | torch.nn.Module",
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
        trust_remote_code: bool = False,
        images: bool = True,
        nodes: Sequence[Any] | None = None,
    ) -> "Engine":
        """An engine for a model directory, a GGUF file, a model on the Hub, a directory of a LoRA adapter, which names
        its model, or a loaded Hugging Face model.

        path_or_model   see weights.load.load. A loaded model is taken over: patched, run in place, and its weights
                        owned until close(); a second engine on it is refused. With pipeline_parallel_size or
                        tensor_parallel_size above 1 a model directory alone: each stage or rank, a process of its own,
                        reads its layers or rows from it, onto the devices from `device` on, and `engine.model` has no
                        weights
        device, dtype   where and in what; None: where a loaded model is, else on the GPU if there is one; in bfloat16,
                        or what a loaded model has
        tokenizer       None: the one beside the weights; a path or a name on the Hub: the one there; False: none, and
                        prompts are token ids; or the tokenizer itself
        trust_remote_code  run the Python that a directory brings for its tokenizer; a model's is never run. Unasked
                        such a model has no tokenizer, and the log says so
        images          False: of a directory that transformers has a class of text alone for (Qwen3.5) that one, as
                        for a trainer that trains it
        nodes           with EngineConfig.nodes above 1, a Ray actor of parallel.nodes.Node on each machine, in the
                        order of stages; None: Ray places them, as many GPUs on each as its stages have ranks
        raises          FileNotFoundError, ValueError, TypeError: what cannot be loaded and why; UnsupportedModule (a
                        ValueError) naming the modules whose bits could depend on the batch; ModelInUse
        """
        if config is not None:  # before minutes of loading
            check_kv_segment(config.kv_segment, default_device(path_or_model) if device is None else device)
        ahead = functools.partial(verifying, config=config or EngineConfig())
        read: Callable[..., Loaded] = functools.partial(load, meanwhile=ahead, images=images)
        if config is not None and config.processes > 1:
            read = functools.partial(load_in_stages, asked=config.parallel, images=images)
        with torch.device("cpu"):  # not the caller's default device
            options = {"tokenizer": tokenizer, "trust_remote_code": trust_remote_code}
            if config is not None:
                options |= {"adapter": config.adapter, "adapter_dtype": config.adapter_dtype}
            loaded = read(path_or_model, device=device, dtype=dtype, **options)
        return cls(loaded if nodes is None else replace(loaded, nodes=nodes), config)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.state}, {self.path.split(':')[0]}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"<Engine of {self.name}: {dtype} on {self.device}, {state}, weight_version {self.weight_version}>"

    # Requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        notify: Callable[[], None],
        listen: Callable[[Increment | BaseException], None] | None = None,
        earlier: Sequence[PartialOutput] | None = None,
    ) -> Ticket | list[Completion]:
        """For servers: hand one request over and return at once.

        notify    called in the engine's thread once the request is done
        listen    called there with each Increment, and with an exception that ends the request instead. Neither may
                  wait for anything
        earlier   for each sample what it got elsewhere: it goes on from there
        returns   its Ticket, whose `result()` are the completions once it is done (of samples that were `done`
                  elsewhere None); or, where the request is itself at fault, the completions that say so, and nobody
                  is called
        raises    EngineClosed
        """
        call = Submission(notify)
        self.check_open()
        params = SamplingParams() if params is None else params
        made = self._job(prompt, params, request_id, call, listen, earlier)
        if isinstance(made, Ticket):
            self._submit([made])
        return made

    def withdraw(self, ticket: Ticket) -> None:
        """abort() for a Ticket."""
        self._loop.abort([ticket])

    def abort(self, request_id: str) -> None:
        """End a request, from any thread: before the next step its samples get finish_reason "abort" and keep what they
        have. Nothing happens if it is unknown or done."""
        check_name("abort", request_id)
        self._loop.abort_named(request_id)

    def pause(self, mode: str = "wait") -> None:
        """Compute nothing from here on, until resume(); returns once that is so. Requests that come meanwhile wait.

        mode   "abort": end all requests; "wait": let those that are in finish first; "keep": let them stand where
               they are, with their keys and values
        """
        check_pause("pause", mode)
        self._loop.pause(mode)

    def resume(self) -> None:
        """Go on after pause(). Nothing happens if there was none."""
        self._loop.resume()

    # Sleep

    def sleep(self, level: int = 1, tags: Iterable[str] | None = None, mode: str = "keep") -> dict[str, int]:
        """Give memory back, and compute nothing until all of it is there again; returns once it is given back.

        level    1: the weights wait in host memory (those of a CPU stay where they are); 2: they are dropped, and come
                 by update_weights. Buffers are kept
        tags     "weights", "kv_cache", "graphs", or None for all. CUDA graphs have addresses in them: where these
                 change (see `sleep_backend`) they go with either of the others, and are made again
        mode     what becomes of requests under way, as in pause(). With "keep" those whose keys and values are gone
                 are computed anew from their tokens: not a bit of them is another one
        returns  bytes given back, by tag: on a GPU the memory that this process (or those of all its stages) holds less
                 than before, the host's for a CPU. torch's allocator gives back whole segments: one that tensors of two
                 tags share counts with the tag that sleeps last. What is asleep already gives nothing
        raises   RuntimeError or MemoryError where the host has no memory for what level 1 keeps: the weights stay, what
                 fell asleep before them is in `asleep`, and wake_up() goes on

        Requests that come meanwhile wait. Nobody may touch `engine.model` while its weights are asleep: their tensors
        are there, their memory is not, and reading them ends the process. close() gives weights back that were kept,
        and zeros for those that were dropped.
        """
        check_level(level)
        check_pause("sleep", mode)
        named, loop, worker = named_tags("sleep", tags), self._loop, self._worker

        def fall_asleep() -> dict[str, int]:
            loop.asleep = True
            try:
                given = worker.sleep(level, named)
            finally:
                asleep = worker.asleep
                loop.asleep = bool(asleep)
                if asleep.get("weights") == 2:
                    loop.missing = _DROPPED
                if "kv_cache" in asleep:
                    self._scheduler.reset_cache()
            return given

        with self._updates:
            loop.check_open()
            return loop.between(mode, fall_asleep)

    def wake_up(self, tags: Iterable[str] | None = None) -> dict[str, int]:
        """Take memory back. Requests go on once nothing is asleep any more; CUDA graphs come with the last of weights
        and caches.

        tags     as in sleep(); what is not asleep is left out
        returns  bytes taken, by tag
        raises   MemoryError where there is no room: that tag sleeps on, and wake_up can be called again

        After level 2 requests that were there wait for the update; those that come between the last wake_up and it end
        with WeightsMissing. So the order that loses nobody: wake_up(["weights"]), update_weights, wake_up().
        """
        named, loop, worker = named_tags("wake_up", tags), self._loop, self._worker

        def awake() -> dict[str, int]:
            try:
                return worker.wake_up(named)
            finally:
                loop.asleep = bool(worker.asleep)

        with self._updates:
            loop.check_open()
            return loop.call(awake)

    @property
    def state(self) -> str:
        """ "asleep" while memory is given back, "paused" between pause() and resume(), or "running"."""
        return self._loop.state

    @property
    def asleep(self) -> tuple[str, ...]:
        """The tags of what is asleep."""
        asleep = self._worker.asleep
        return tuple(tag for tag in TAGS if tag in asleep)

    # Weights

    def update_weights(
        self,
        named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        numerics: Mapping[str, object] | None = None,
        specs: Mapping[str, tuple[Sequence[int], torch.dtype]] | None = None,
        keep_cache: bool = False,
    ) -> int:
        """New weights, between two steps. Without `specs` all of them, or none.

        named_tensors   all of the model's state_dict() under Hugging Face names (of tied ones, one is enough), in the
                        model's shape and dtype, on any device: buffers that named_parameters() leaves out too, for a
                        trainer may have changed them. With LoRA under PEFT's names or the base model's; the adapters
                        may come alone, and the base alone where EngineConfig.adapter is a configuration of which none
                        has come yet: nothing is mixed from two steps. Those of a model that drafts, with "draft."
                        before their names, or of the checkpoint's own heads come too, all or none. Without `specs` an
                        iterator is read to its end first, so that all tensors lie in memory at once
        numerics        of the trainer's patch, handle.numerics(): refused, field by field, where it differs from this
                        engine's, for then log-probabilities may. Of a trainer without one vexact_ops.numerics(), with
                        its options; weights of a model patched in this process bring its numbers with them. Of
                        weights that no trainer computes with, a checkpoint's say, engine.numerics()
        specs           name -> (shape, dtype) of every tensor, checked before anything is written: then the tensors are
                        read and written one bucket after the other, and the iterator may make each as it is asked for.
                        It runs in this thread, and nothing is computed from its first tensor to its last. Where it
                        breaks off the weights are torn: requests end with WeightsTorn until the next whole update
        keep_cache      your declaration that requests under way may go on with keys and values of the old weights
                        (their log-probabilities are then no single weights'); by default they are computed anew
        returns         the new weight_version. Running requests go on from their tokens; their completions say which
                        version drew each. Frequent updates wait for the first request in line to get a token in
                        between, unless the engine is paused: nobody starves
        raises          ValueError: missing, unknown, repeated or misshapen, or other numerics; TypeError: no numerics,
                        no tensor, or another dtype: nothing has changed then. EngineAsleep while the weights sleep
                        (the caches may). EngineClosed
        """
        loop, worker = self._loop, self._worker
        numerics, pairs = with_model(numerics, pairs_of(named_tensors))
        if specs is not None:
            with self.begin_update(numerics=numerics, specs=specs, keep_cache=keep_cache) as pieces:
                for bucket in grouped(pairs):
                    pieces.write(bucket)
                return pieces.finish()
        loop.check_open()
        self._check_numerics(numerics)
        with self._updates:
            pairs = list(pairs)
            ready = worker.fence()

            def update() -> int:
                ready()
                plan = worker.plan(pairs, whole=loop.torn is not None or loop.missing is not None)
                loop.torn = TORN
                worker.apply(plan)
                return self._renewed(keep_cache)

            return loop.call(update, when=loop.may_change_weights)

    def begin_update(
        self,
        *,
        numerics: Mapping[str, object] | None = None,
        specs: Mapping[str, tuple[Sequence[int], torch.dtype]] | None = None,
        keep_cache: bool = False,
        version: int | None = None,
        staging: Any = None,
    ) -> WeightUpdate:
        """An update whose tensors are written one bucket after the other, for who receives them from elsewhere.

        numerics, specs, keep_cache   as update_weights takes them; without specs each tensor is checked as it comes,
                  and `finish` raises where one is missing
        version   the weight_version that they will be; None: one more than now
        staging   the copy that an intake has: all is written there first, while steps run, and put in place at the end
        returns   a WeightUpdate: write(bucket), finish() -> weight_version, abandon(). Another update that is begun
                  meanwhile waits for its end
        """
        self._loop.check_open()
        check_version("begin_update", version)
        self._check_numerics(numerics)
        renewed = functools.partial(self._renewed, keep_cache, version)
        return WeightUpdate(self._loop, self._worker, self._updates, renewed, specs, staging)

    def intake(self, mode: str = "in_place", staging: torch.device | str | None = None) -> "EngineIntake":
        """Where a WeightReceiver puts what comes; mode and staging as it has them."""
        from .handover.intake import EngineIntake

        self._loop.check_open()
        places = Places.of(self.model, self._draft)
        return EngineIntake(self._loop, self._worker, self.begin_update, places, self.device, mode, staging)

    def manifest(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(shape, dtype) of every tensor that update_weights takes, by name; experts are stacked (one by one they may
        come too), and tied names are all there."""
        places = Places.of(self.model, self._draft)
        return {name: (tuple(t.shape), t.dtype) for name, t in places.targets.items()}

    def _renewed(self, keep_cache: bool, version: int | None = None) -> int:
        self._loop.torn = self._loop.missing = None
        version = self._scheduler.weight_version + 1 if version is None else version
        self._scheduler.reset_cache(version, keep_running=keep_cache)
        return version

    def reset_prefix_cache(self) -> None:
        """Forget all keys and values, between two steps: what comes, and what runs, is computed anew. That changes no
        bit, unless the weights were changed behind the engine's back."""
        self._loop.call(self._scheduler.reset_cache)

    # Answers that drafts come from

    def save_answers(self, path: str | os.PathLike) -> None:
        """Into a file what was answered to prompts, by seed: for an engine of the same vocabulary to draft from.

        raises   ValueError where EngineConfig.speculation keeps none; OSError
        """
        self._loop.call(lambda: self._answers("save_answers").save(path))

    def load_answers(self, path: str | os.PathLike) -> None:
        """Take those of a file beside what is kept.

        raises   ValueError where that is no such file, has ids beyond the vocabulary, or none are kept; OSError. Then
                 nothing of it is taken
        """
        self._loop.call(lambda: self._answers("load_answers").load(path))

    def pack_answers(self) -> bytes:
        """What save_answers writes."""
        return self._loop.call(lambda: self._answers("pack_answers").pack())

    def take_answers(self, data: bytes) -> None:
        """load_answers, of what pack_answers has given."""
        self._loop.call(lambda: self._answers("take_answers").take(data))

    def _answers(self, method: str) -> Answers:
        drafter = self._scheduler.drafter
        if drafter is None or drafter.answers is None:
            raise ValueError(f'{method}: this engine keeps none: "answers" is no source of EngineConfig.speculation')
        return drafter.answers

    @property
    def weight_version(self) -> int:
        return self._scheduler.weight_version

    @property
    def stats(self) -> Stats:
        return self._scheduler.stats

    @property
    def images(self) -> Images | None:
        """What the model takes of images; None: it takes none here."""
        return getattr(self._worker, "images", None)

    @property
    def path(self) -> str:
        return self._worker.path

    @property
    def sleep_backend(self) -> str:
        return self._sleep_backend

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests: after close(), or where its thread has ended by a fault of its own."""
        return self._loop.closed

    def load(self) -> Load:
        """How much there is to do, from any thread and without waiting: the counts of one moment, or of two."""
        scheduler = self._scheduler
        pool, windows = scheduler.pool, scheduler.windows
        pages = pool.num_pages - pool.num_available, pool.num_pages
        beside = (0, 0) if windows is None else (windows.count - windows.num_available, windows.count)
        if windows is not None and self._worker.numbers_alone:
            pages, beside = beside, (0, 0)
        return Load(len(scheduler.running), len(scheduler.waiting), *pages, self._loop.paused, *beside)

    def numerics(self) -> dict:
        """What fixes this engine's bits since it was made; a trainer with an equal dictionary computes the same."""
        return dict(self._worker.numerics)

    def _check_numerics(self, given: Mapping[str, object] | None) -> None:
        check_numerics(given, self.numerics(), self.device.type)

    # The end

    def close(self) -> None:
        """Abort what runs, end the thread, free the caches, unpatch the model. Again does nothing.

        raises   RuntimeError, once, where something else has replaced a patched forward meanwhile
        """
        self._loop.close()
        self._end.detach()
        error, self._loop.close_error = self._loop.close_error, None
        if error is not None:
            raise error

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # Requests and tickets

    def check_open(self) -> None:
        self._loop.check_open()

    def _submit(self, tickets: Sequence[Ticket]) -> None:
        self._loop.submit(tickets, self._worker.fence())

    def _withdraw(self, tickets: Iterable[Ticket]) -> None:
        self._loop.abort(list(tickets))

    @property
    def _call_in(self) -> Callable[[asyncio.AbstractEventLoop, Callable, Any], None]:
        return self._loop.call_in

    @property
    def _at_once(self) -> int:
        return self.config.max_num_seqs

    def _handed_over(
        self, each: list[tuple], call: Submission, may_wait: bool = True
    ) -> Iterator[tuple[int, Ticket | list[Completion]]]:
        """The engine has those that fill all the steps that may be in flight, and computes while the others are made;
        each time as many again as before, in all. Prompts that are one after another the same fill no more than one
        does. The thread waits until their first step is launched, for neither is to wait until the other lets go of the
        interpreter; where it must not wait all are made first."""
        config = self._worker.config
        most_tokens, most_samples = self._worker.depth * config.max_num_batched_tokens, config.max_num_seqs
        tickets, tokens, samples, last = [], 0, 0, []
        for number, (index, made) in enumerate(self._jobs(each, call), 1):
            if isinstance(made, Ticket):
                tickets.append(made)
                if made.request.prompt_ids != last:
                    last = made.request.prompt_ids
                    tokens += len(last)
                samples += len(made.samples)
                enough = tokens >= most_tokens or samples >= most_samples
                if may_wait and enough and len(each) - number >= _WORTH_IT:
                    launched = threading.Event()
                    self._hand_over(call, tickets, launched.set)
                    launched.wait()
                    tickets, tokens, samples = [], 0, 0
                    most_tokens, most_samples = 2 * most_tokens, 2 * most_samples
            yield index, made
        if tickets and not may_wait:
            call.one_done()  # so that the last word is the engine's thread's, which sends it on
        if tickets:
            self._hand_over(call, tickets)
        if may_wait:
            call.one_done()

    def _hand_over(self, call: Submission, tickets: list[Ticket], launched: Callable[[], None] | None = None) -> None:
        """Unless the last of those before has come to nothing: a step that fails ends all."""
        before = len(call.tickets) - len(tickets) - 1
        if before >= 0 and call.tickets[before].error is not None:
            raise call.tickets[before].error
        self._loop.submit(tickets, self._worker.fence(), launched)

    def _job(self, prompt, params, name, call, listen, earlier=None) -> Ticket | list[Completion]:
        ids: list[int] = []
        try:
            check_params(params, self.vocab_size)
            check_kind(params, self.labels, self.name)
            if params.stop and self._text is not None:
                params = self._text.with_stop_ids(params)
                check_params(params, self.vocab_size)
            given, pictures = self._read_prompt(prompt, self.images)
            if self.labels is not None:
                given = without_padding(given, self.model)
            request = Request(given, params, name, earlier, pictures)
            ids = request.prompt_ids
        except Exception as error:
            return refused(ids, params, name, error, self.weight_version)
        return Ticket(request, self._text, call, listen, earlier)

    def _progress(self, tickets: Sequence[Ticket]) -> tuple[int, int, int]:
        samples = [sample for ticket in tickets for sample in ticket.request.sequences]
        return sum(s.finished for s in samples), len(samples), sum(len(s.logprobs) for s in samples)
