"""A replica's side: an engine, and what its front asks of it.

The front's messages come in one thread (`handle`); what may take long is done in threads of its own, and all that an
update of the weights consists of in one, in its order. What goes to the front is gathered in an outbox, which one more
thread encodes and sends: the engine never waits for its front.
"""

import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

import torch

from ..engine import Engine
from ..errors import HandoverFailed
from ..handover.buffers import values
from ..handover.intake import EngineIntake
from ..handover.session import WeightUpdate
from ..outputs import Increment, Ticket
from ..request import OF_PICTURES, Completion
from . import messages as m

log = logging.getLogger(__name__)

_LOOK = 0.2  # seconds between two looks at how much there is to do
_ORDERED = {"begin_update", "check_update", "finish_update", "give_up_update", "make_intake", "manifest", "let_go"}


class Host:
    """Serves one engine until `stop`.

    send    gives a frame to the front
    ended   called once the engine has ended by a fault of its own
    """

    def __init__(self, engine: Engine, send: Callable[[bytes], None], ended: Callable[[], None]):
        self.engine, self._send, self._ended = engine, send, ended
        self._tickets: dict[int, Ticket] = {}
        self._outbox: deque[Callable[[], m.ToFront]] = deque()
        self._filled, self._stopping, self._stopped = threading.Event(), False, False
        self._update: WeightUpdate | None = None
        self._intakes: dict[tuple[str, str | None], EngineIntake] = {}
        self._taking: EngineIntake | None = None
        self._ordered: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._do_in_order, name="vexact-replica-update", daemon=True).start()
        self._writer = threading.Thread(target=self._write, name="vexact-replica-out", daemon=True)
        self._writer.start()
        self._post(lambda: m.Ready(facts(engine)))

    def handle(self, message: m.ToReplica) -> None:
        if isinstance(message, m.Add):
            self._add(message)
        elif isinstance(message, m.Abort):
            ticket = self._tickets.get(message.key)
            if ticket is not None:
                self.engine.withdraw(ticket)
        elif isinstance(message, m.Open):
            self._answer(message.key, lambda: self._under_way.open(message.offer), ordered=True)
        elif isinstance(message, m.Take):
            self._answer(message.key, lambda: self._take(message), ordered=True)
        elif isinstance(message, m.Do):
            do = functools.partial(getattr(self, f"do_{message.what}"), **message.arguments)
            self._answer(message.key, do, ordered=message.what in _ORDERED)

    def stop(self) -> None:
        """Ends all requests, and returns once the front has been told."""
        self._stopping = True
        self.engine.close()
        self._stopped = True
        self._filled.set()
        self._writer.join()

    # Requests

    def _add(self, add: m.Add) -> None:
        key, handed_over = add.key, threading.Event()  # the engine's thread may be faster than `submit` returns

        def listen(news: Increment | BaseException) -> None:
            if isinstance(news, BaseException):
                return  # `notify` comes next
            handed_over.wait()
            versions = self._tickets[key].request.sequences[news.index].weight_versions
            versions = versions[len(versions) - len(news.token_ids) :]
            if news.completion is not None:
                news.completion = _without_prompt(news.completion)
            self._post(lambda: m.Increments(key, news, versions))

        def notify() -> None:
            handed_over.wait()
            self._post(lambda: self._done(key, add.streams))

        try:
            made = self.engine.submit(
                add.prompt(),
                add.params,
                request_id=add.request_id,
                notify=notify,
                listen=listen if add.streams else None,
                earlier=add.earlier,
            )
        except Exception as error:
            failed = m.Done(key, failure=m.failure(error))
            self._post(lambda: failed)
            return
        if isinstance(made, Ticket):
            self._tickets[key] = made
            handed_over.set()
            self._filled.set()  # there is more to do now, which the front wants to know
        else:
            self._post(lambda: m.Done(key, made))

    def _done(self, key: int, streams: bool) -> m.Done:
        ticket = self._tickets.pop(key)
        if ticket.error is not None:
            return m.Done(key, failure=m.failure(ticket.error))
        return m.Done(key, None if streams else [_without_prompt(c) for c in ticket.completions])

    # What the front has done, by name

    def _answer(self, key: int, function: Callable[[], Any], ordered: bool = False) -> None:
        work = functools.partial(self._call, key, function)
        if ordered:
            self._ordered.put(work)
        else:
            threading.Thread(target=work, name="vexact-replica-call", daemon=True).start()

    def _do_in_order(self) -> None:
        while True:
            self._ordered.get()()

    def _call(self, key: int, function: Callable[[], Any]) -> None:
        try:
            answer = m.Answer(key, function())
        except Exception as error:
            answer = m.Answer(key, failure=m.failure(error))
        self._post(lambda: answer)

    def do_pause(self, mode: str) -> None:
        self.engine.pause(mode)

    def do_resume(self) -> None:
        self.engine.resume()

    def do_sleep(self, level: int, tags: list[str] | None, mode: str) -> dict[str, int]:
        return self.engine.sleep(level, tags, mode)

    def do_wake_up(self, tags: list[str] | None) -> dict[str, int]:
        return self.engine.wake_up(tags)

    def do_asleep(self) -> list[str]:
        return list(self.engine.asleep)

    def do_reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def do_pack_answers(self) -> bytes:
        return self.engine.pack_answers()

    def do_take_answers(self, data: bytes) -> None:
        self.engine.take_answers(data)

    def do_stats(self) -> dict[str, Any]:
        return m.as_dict(self.engine.stats)

    def do_begin_update(
        self,
        version: int,
        numerics: dict | None,
        specs: dict | None = None,
        keep_cache: bool = False,
        intake: dict | None = None,
    ) -> None:
        """A second one waits for the end of the first, as in any engine. With an intake, buckets come by Take."""
        if intake is not None:
            self._taking = self._intake_of(**intake)
            self._taking.begin(numerics, version)
            return
        checked = {name: (tuple(shape), getattr(torch, kind)) for name, (shape, kind) in specs.items()}
        self._update = self.engine.begin_update(
            specs=checked, numerics=numerics, keep_cache=keep_cache, version=version
        )

    def do_check_update(self) -> None:
        self._under_way.check()

    def do_finish_update(self) -> int:
        if self._taking is not None:
            version = self._taking.finish()
            self._taking = None
            return version
        update, self._update = self._update, None
        with update:
            return update.finish()

    def do_give_up_update(self) -> bool:
        """Whether what the engine had before is gone."""
        if self._taking is not None:
            taking, self._taking = self._taking, None
            return taking.abandon()
        update, self._update = self._update, None
        begun = update is not None and update.begun
        if update is not None:
            update.abandon()
        return begun

    # Weights from the memory of a trainer's process

    def _intake_of(self, mode: str, staging: str | None) -> EngineIntake:
        if (mode, staging) not in self._intakes:
            self._intakes[mode, staging] = self.engine.intake(mode, staging)
        return self._intakes[mode, staging]

    def do_make_intake(self, mode: str, staging: str | None) -> None:
        self._intake_of(mode, staging)

    def do_manifest(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return self._taking.manifest()

    def do_let_go(self) -> None:
        self._intake_of("in_place", None)  # an update without one has opened memory too
        for intake in self._intakes.values():
            intake.let_go()

    @property
    def _under_way(self) -> EngineIntake | WeightUpdate:
        found = self._taking or self._update
        if found is None:
            raise HandoverFailed("weights: no update is under way")
        return found

    def _take(self, message: m.Take) -> None:
        if message.payload is None:
            self._under_way.take(message.bucket).wait()
        else:
            memory = torch.frombuffer(bytearray(message.payload), dtype=torch.uint8)
            self._under_way.write(values(message.bucket, memory))

    # Out

    def _post(self, make: Callable[[], m.ToFront]) -> None:
        self._outbox.append(make)
        self._filled.set()

    def _write(self) -> None:
        load = None
        while True:
            self._filled.wait(_LOOK if self._tickets else None)
            self._filled.clear()
            stopped = self._stopped
            if self.engine.closed and not self._stopping:
                self._ended()  # what it says of its requests is not the end of them: others can do them
                return
            found = []
            while self._outbox:
                found.append(self._outbox.popleft()())
            current = self.engine.load()
            if current != load:
                found.append(m.State(current))
                load = current
            try:
                if found:
                    self._send(m.encode(found))
            except OSError:  # the front is gone, and this process will be soon
                return
            if stopped:
                return


def _without_prompt(completion: Completion) -> Completion:
    """The front has it, and its images."""
    return replace(completion, prompt_ids=[], **dict.fromkeys(OF_PICTURES))


def facts(engine: Engine) -> dict[str, Any]:
    """What a front has to know of an engine that is just made. ValueError of one that replicas do not serve."""
    if engine.labels is not None:
        raise ValueError(f"Replicas: {engine.name}: it scores sequences, expected one Engine for it")
    return {
        "pid": os.getpid(),
        "config": m.as_dict(engine.config),
        "vocab_size": engine.vocab_size,
        "numerics": engine.numerics(),
        "images": None if engine.images is None else m.as_dict(engine.images),
        "path": engine.path,
        "sleep_backend": engine.sleep_backend,
        "name": engine.name,
        "device": str(engine.device),
        "dtype": str(engine.dtype).removeprefix("torch."),
    }
