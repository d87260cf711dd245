"""The engine: requests in, completions out, from a loop, from asyncio, or token by token.

Whoever holds the turn may change the scheduler, the weights and the pages; everything between two turns is a whole
state. `generate` takes turns in the caller's thread until its own requests are done. The asynchronous front starts a
thread that takes turns as long as there is work. Both may be in use at once: a step computes whatever is scheduled,
whoever drives it, and results find their way through tickets.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import vexact_ops as vx

from .config import EngineConfig, SamplingParams
from .core.scheduler import Scheduler, Stats
from .interrupt import HeldInterrupts
from .outputs import Increment, Ticket
from .progress import bar, quiet
from .request import Completion, Request
from .request import Sequence as Sample
from .runner import shapes
from .runner.runner import Runner
from .weights.load import Loaded, load
from .weights.update import apply_update, plan_update

log = logging.getLogger(__name__)


async def _arrival(future: Future) -> None:
    """Until it is done, without asyncio.wrap_future: giving up waiting must not cancel what others compute."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(arrived.set)

    future.add_done_callback(tell)
    await arrived.wait()


Prompt = str | Sequence[int]


class Engine:
    """Generates with one model. A context manager; close() frees the caches and unpatches the model.

    config, tokenizer, model   as they are in use: num_pages and max_model_len are filled in
    stats                      counts since the start: steps, tokens, preemptions, ...
    weight_version             0, and one more after every update
    path                       how hidden states are computed: "fused", or "patched: " and why; never a matter of bits
    """

    def __init__(self, loaded: Loaded, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if config.pipeline_parallel_size != 1:
            raise ValueError(
                f"Engine: pipeline_parallel_size: got {config.pipeline_parallel_size}, expected 1: this version does "
                "not cut the layers into stages"
            )
        self.model, self.tokenizer, self.name = loaded.model, loaded.tokenizer, loaded.name
        first = next(self.model.parameters())
        self.device, self.dtype = first.device, first.dtype
        self.vocab_size = shapes.vocab_size(self.model)
        self.config = self._complete(config)
        self._handle = vx.patch.hf(self.model, kv_segment=config.kv_segment, latent=config.latent_attention)
        try:
            self._runner = Runner(self.model, self._handle, self.config, self.device)
            self.config = self._runner.config
        except BaseException:
            self._handle.undo()
            raise
        self._scheduler = Scheduler(
            self.config,
            eos_token_ids=loaded.eos_token_ids,
            vocab_size=self.vocab_size,
            text_tail=None if self.tokenizer is None else lambda sample: self._tickets[sample.request.id].tail(sample),
        )
        self._tickets: dict[str, Ticket] = {}  # of requests that are not done
        self._inbox: deque[Ticket | str] = deque()  # requests to add, and ids of requests to abort
        self._next, self._lock = threading.Lock(), threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._torn: str | None = None  # why the weights are in no defined state

    @classmethod
    def from_pretrained(
        cls,
        path_or_model: "str | os.PathLike | torch.nn.Module",
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
    ) -> "Engine":
        """An engine for a model directory, a GGUF file, a model on the Hub, or a loaded Hugging Face model.

        path_or_model   see weights.load.load. A loaded model is taken over: patched, and run in place, until close()
        device, dtype   where and in what; dtype None is bfloat16, or what a loaded model has
        tokenizer       to use instead of the one beside the weights; without any, prompts are token ids, and no text
        raises          FileNotFoundError, ValueError, TypeError: what cannot be loaded and why; UnsupportedModule (a
                        ValueError) naming the modules whose bits could depend on the batch
        """
        return cls(load(path_or_model, device=device, dtype=dtype, tokenizer=tokenizer), config)

    def _complete(self, config: EngineConfig) -> EngineConfig:
        made_for, wanted = shapes.max_positions(self.model), config.max_model_len
        if made_for is not None and wanted is not None and wanted > made_for:
            raise ValueError(f"EngineConfig: max_model_len is {wanted}, expected at most {made_for}: {self.name}'s own")
        return replace(config, max_model_len=wanted if wanted is not None else made_for)

    # Fronts

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> list[Completion]:
        """Complete every prompt; returns when all are done.

        prompts       texts or lists of token ids; a text is taken as it stands (apply a chat template first)
        params        one for all, or one for each
        request_ids   names for `abort`, one for each prompt
        returns       the completions in the order of the prompts, n of each. A request that is itself at fault gets
                      finish_reason "error" and says why; the others run on. One that another thread aborts has
                      finish_reason "abort" and what it had
        raises        TypeError or ValueError on the call's own arguments, RuntimeError once closed. On Ctrl-C the
                      requests of this call are aborted and the engine can be used again
        """
        jobs = self._jobs(prompts, params, request_ids)
        tickets = [job for job in jobs if isinstance(job, Ticket)]
        try:
            self._inbox.extend(tickets)
            with self._progress(tickets) as show:
                while not all(ticket.done for ticket in tickets):
                    with self._turn() as held:
                        self._step(held)
                    show()
        except BaseException:
            self._drop(tickets)
            raise
        return [done for job in jobs for done in (job.future.result() if isinstance(job, Ticket) else job)]

    async def agenerate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
    ) -> list[Completion]:
        """`generate` for asyncio. Cancelling it aborts its requests."""
        jobs = self._jobs(prompts, params, request_ids)
        tickets = [job for job in jobs if isinstance(job, Ticket)]
        try:
            self._submit(tickets)
            for ticket in tickets:
                await _arrival(ticket.future)
        finally:
            self._drop(tickets)
        return [done for job in jobs for done in (job.future.result() if isinstance(job, Ticket) else job)]

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> AsyncIterator[Increment]:
        """The tokens of one request as they come, of all its samples in turn. Leaving the loop early aborts it."""
        loop = asyncio.get_running_loop()
        news: asyncio.Queue[Increment | BaseException] = asyncio.Queue()

        def tell(item: Increment | BaseException) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(news.put_nowait, item)

        names = None if request_id is None else [request_id]
        (job,) = self._jobs([prompt], params, names, on_news=tell)
        if not isinstance(job, Ticket):
            for done in job:
                yield Increment(done.request_id, done.index, [], [], [], "", done)
            return
        job.future.add_done_callback(lambda future: future.exception() and tell(future.exception()))
        left = len(job.completions)
        try:
            self._submit([job])
            while left:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                left -= item.completion is not None
                yield item
        finally:
            self._drop([job])

    def abort(self, request_id: str) -> None:
        """End a request, from any thread: before the next step its samples get finish_reason "abort" and keep what they
        have. Nothing happens if it is unknown or done."""
        self._inbox.append(request_id)
        self._nudge()

    # Weights

    def update_weights(
        self,
        named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        numerics: Mapping[str, object] | None = None,
    ) -> int:
        """New weights, between two steps: all of them, or none.

        named_tensors   every tensor of the model under its Hugging Face name (of tied ones, one is enough), in the
                        model's shape and dtype, on any device
        numerics        the trainer's vexact_ops.numerics(), with its kv_segment and latent_attention where it has such:
                        refused where it differs from this engine's, for then its log-probabilities may be other
                        ones. A trainer in this process asks for its own all the same: its options may differ. For
                        weights that no trainer computes with, a checkpoint's say, engine.numerics()
        returns         the new weight_version. Running requests go on from their tokens, computed anew with the new
                        weights; their completions say which version drew each token
        raises          ValueError: missing, unknown, repeated or misshapen, or other numerics; TypeError: no numerics,
                        no tensor, or another dtype. Nothing has changed then
        """
        with self._turn():
            self._check_numerics(numerics)
            plan = plan_update(self.model, named_tensors)
            version = self.weight_version + 1
            self._torn = "an update of the weights broke off in the middle: update them again"
            apply_update(plan)
            self._torn = None
            self._scheduler.reset_cache(version)
            return version

    def reset_prefix_cache(self) -> None:
        """Forget every known prompt, between two steps: what comes is computed anew. No bit changes by it."""
        with self._turn():
            self._scheduler.reset_cache()

    @property
    def weight_version(self) -> int:
        return self._scheduler.weight_version

    @property
    def stats(self) -> Stats:
        return self._scheduler.stats

    @property
    def path(self) -> str:
        return self._runner.path

    def numerics(self) -> dict:
        """What fixes this engine's bits; a trainer with an equal dictionary computes the same ones."""
        latent = self.config.latent_attention or None
        return vx.numerics(self.device, kv_segment=self.config.kv_segment, latent_attention=latent)

    def _check_numerics(self, given: Mapping[str, object] | None) -> None:
        if not isinstance(given, Mapping):
            own = {name: value for name, value in self.numerics()["options"].items()}
            call = ", ".join([f'"{self.device.type}"', *(f"{name}={value}" for name, value in own.items())])
            got = "none" if given is None else type(given).__name__
            raise TypeError(
                f"update_weights: numerics: got {got}, expected what fixes the trainer's bits: "
                f"numerics=vexact_ops.numerics({call}), called in its process with its options; for weights that no "
                "trainer computes with, numerics=engine.numerics()"
            )
        differ = vx.numerics_difference(given, self.numerics())
        if differ:
            found = "; ".join(f"{where}: got {got!r}, expected {own!r}" for where, (got, own) in differ.items())
            raise ValueError(
                f"update_weights: numerics: the trainer's are not this engine's, whose bits may be others. {found}"
            )

    # The end

    def close(self) -> None:
        """Abort what runs, stop the thread, free the caches, unpatch the model. Again does nothing."""
        if self._closed:
            return
        with self._turn():
            self._closed = True
            self._end([ticket.request.id for ticket in self._tickets.values()])
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._handle.undo()
        self._runner = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # Requests and tickets

    def _jobs(self, prompts, params, request_ids, on_news=None) -> list[Ticket | list[Completion]]:
        """For each prompt a ticket, or the completions that say what is wrong with it."""
        if self._closed:
            raise RuntimeError("Engine: it is closed")
        if isinstance(prompts, str):
            prompts = [prompts]
        prompts = list(prompts)
        if prompts and all(isinstance(prompt, int) for prompt in prompts):
            raise TypeError("generate: prompts: got one list of token ids, expected a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        for name, values in (("params", params), ("request_ids", request_ids)):
            if values is not None and (isinstance(values, str | dict) or not isinstance(values, Sequence)):
                raise TypeError(
                    f"generate: {name}: got a {type(values).__name__}, expected a list, one for each prompt"
                )
            if values is not None and len(values) != len(prompts):
                raise ValueError(f"generate: {name}: got {len(values)}, expected {len(prompts)}, one for each prompt")
        names = request_ids or [None] * len(prompts)
        return [self._job(*each, on_news) for each in zip(prompts, params, names)]

    def _job(self, prompt, params, name, on_news) -> Ticket | list[Completion]:
        ids: list[int] = []
        try:
            if not isinstance(params, SamplingParams):
                raise TypeError(f"params is a {type(params).__name__}, expected SamplingParams")
            if params.num_top_logprobs > self.vocab_size:
                raise ValueError(f"num_top_logprobs is {params.num_top_logprobs}, expected at most {self.vocab_size}")
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise ValueError("prompt is a text, expected token ids: there is no tokenizer")
                prompt = self.tokenizer(prompt)["input_ids"]
            request = Request(prompt, params, name)
            ids = request.prompt_ids
        except Exception as error:
            return self._refused(ids, params, name, error)
        return Ticket(request, self.tokenizer, on_news)

    def _refused(self, ids, params, name, error) -> list[Completion]:
        count = params.n if isinstance(params, SamplingParams) else 1
        return [
            Completion(ids, [], [], [], "error", "", self.weight_version, error=str(error), request_id=name, index=i)
            for i in range(count)
        ]

    def _submit(self, tickets: list[Ticket]) -> None:
        """Hand over to the background thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="vexact-engine", daemon=True)
            self._thread.start()
        self._inbox.extend(tickets)
        self._wake.set()

    def _drop(self, tickets: list[Ticket]) -> None:
        """Nobody waits for these any more."""
        self._inbox.extend(ticket.request.id for ticket in tickets if not ticket.done)
        self._nudge()

    # Turns

    @contextlib.contextmanager
    def _turn(self) -> Iterator[HeldInterrupts]:
        """The right to change anything. Ctrl-C waits until it is given back.

        Two locks make it fair: whoever waits holds `_next`, so the one that gives a turn back cannot take the next one.
        """
        with HeldInterrupts() as held:
            with self._next:
                self._lock.acquire()
            try:
                if self._closed:
                    raise RuntimeError("Engine: it is closed")
                self._drain()
                yield held
            finally:
                self._lock.release()
                self._nudge()

    def _nudge(self) -> None:
        """See to the inbox if nobody has the turn; whoever has it does so when giving it back."""
        while self._inbox and self._lock.acquire(blocking=False):
            try:
                with HeldInterrupts():
                    self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, str):
                self._end([item])
            elif not self._closed:
                self._add(item)
            else:
                item.fail(RuntimeError("Engine: it is closed"))

    def _add(self, ticket: Ticket) -> None:
        request = ticket.request
        try:
            self._scheduler.add(request)
        except ValueError as error:
            for sample in request.sequences:
                sample.finish("error", error=str(error))
                self._tell(ticket, sample)
        else:
            self._tickets[request.id] = ticket

    def _end(self, request_ids: list[str]) -> None:
        for name in request_ids:
            for sample in self._scheduler.abort(name):
                self._deliver(sample)

    # A step

    def _step(self, held: HeldInterrupts) -> None:
        """Schedule, compute, commit, deliver. A failure of the computation itself ends every request, for nobody can
        say whose fault it is; the engine can be used again."""
        scheduler = self._scheduler
        if self._torn:
            self._fail_all(RuntimeError(f"Engine: {self._torn}"))
            return
        plan = scheduler.schedule()
        if not plan:
            return
        try:
            held.open()
            sampled = self._runner.run(plan)
            held.shut()
        except BaseException as error:
            held.shut()
            scheduler.cancel(plan)
            if isinstance(error, Exception):
                self._fail_all(error)
            raise
        for chunk, token in zip(plan.sampled_chunks, sampled.token_ids) if -1 in sampled.token_ids else ():
            if token == -1:
                where = f"after {len(chunk.sequence.tokens)} tokens"
                message = f"the model's logits {where} are not finite numbers (NaN or infinite weights or activations?)"
                for sample in scheduler.fail(chunk.sequence.request.id, message):
                    self._deliver(sample)
        for sample in scheduler.commit(plan, sampled):
            self._deliver(sample)

    def _deliver(self, sample: Sample) -> None:
        name = sample.request.id
        ticket = self._tickets.get(name)
        if ticket is not None:
            self._tell(ticket, sample)
            if ticket.done:
                self._tickets.pop(name, None)

    def _tell(self, ticket: Ticket, sample: Sample) -> None:
        try:
            ticket.news(sample, self.weight_version)
        except Exception as error:  # of a listener that is gone, or of a tokenizer: this request's trouble alone
            ticket.fail(error)
            self._tickets.pop(sample.request.id, None)
            self._scheduler.fail(sample.request.id, repr(error))

    def _fail_all(self, error: Exception) -> None:
        for name, ticket in list(self._tickets.items()):
            self._scheduler.fail(name, str(error))
            ticket.fail(error)
        self._tickets.clear()

    def _serve(self) -> None:
        """The background thread: turns while there is work, sleep while there is none."""
        while True:
            self._wake.wait()
            self._wake.clear()
            while not self._closed and (self._inbox or self._scheduler.has_unfinished):
                try:
                    with self._turn() as held:
                        self._step(held)
                except Exception:
                    if not self._closed:
                        log.exception("a step failed; its requests have been told")
            if self._closed:
                return

    @contextlib.contextmanager
    def _progress(self, tickets: list[Ticket]) -> Iterator:
        """A function to call now and then, which draws where that is wanted."""
        samples = [sample for ticket in tickets for sample in ticket.request.sequences]
        begin = last = time.perf_counter()
        with bar(self.config.show_progress if tickets else False) as draw:

            def show() -> None:
                nonlocal last
                now = time.perf_counter()
                if now - last > 0.1:
                    last = now
                    tokens = sum(len(sample.logprobs) for sample in samples)
                    done = sum(sample.finished for sample in samples)
                    draw("generating", done, len(samples), f"{tokens / (now - begin):.0f} tokens/s")

            draw("generating", 0, len(samples))
            yield show if draw is not quiet else lambda: None
