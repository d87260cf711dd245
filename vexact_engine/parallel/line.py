"""Two of our processes that ask each other things, over one connection: each question has one answer, whatever else is
asked meanwhile."""

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import msgspec

from . import messages as m

# What is asked, and of those who ask the same one after the other the arguments -> the answers: values, exceptions, or
# futures of them.
Handle: TypeAlias = Callable[[str, Sequence[dict[str, Any]]], Sequence[Any]]
_decoder = msgspec.msgpack.Decoder(m.Do | m.Answer)


class Line:
    """One end. One thread reads; what is asked here is done in another one, in its order.

    owner    who serves it; None: nobody does, and what is asked waits
    gone     whether the other end is
    """

    def __init__(self, ours: socket.socket):
        self._socket, self._connection = ours, Connection(os.dup(ours.fileno()))
        self._lock, self._keys = threading.Lock(), itertools.count()
        self._waiting: dict[int, Future] = {}
        self._asked: SimpleQueue[m.Do | None] = SimpleQueue()
        self.owner: object | None = None
        self._handle: Handle | None = None
        self._ended: Callable[[], None] = lambda: None
        self.gone = False
        threading.Thread(target=self._read, name="vexact-line", daemon=True).start()

    def serve(self, owner: object | None, handle: Handle, ended: Callable[[], None] = lambda: None) -> None:
        """From here on by these; `ended` is called once the other end is gone, before those who wait for its answers
        get a ConnectionError."""
        is_first, self.owner, self._handle, self._ended = self._handle is None, owner, handle, ended
        if is_first:
            threading.Thread(target=self._answer_all, name="vexact-line-asked", daemon=True).start()

    def ask(self, what: str, **arguments: Any) -> Future:
        answer: Future = Future()
        with self._lock:
            key = next(self._keys)
            if not self.gone:
                self._waiting[key] = answer
                with contextlib.suppress(OSError):  # whoever reads is told
                    self._connection.send_bytes(m.encode(m.Do(key, what, arguments)))
                return answer
        answer.set_exception(ConnectionError(f"{what}: the other end is gone"))
        return answer

    def close(self) -> None:
        """The other end is told by the kernel. Again does nothing."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        with contextlib.suppress(OSError, EOFError, msgspec.MsgspecError):
            while True:
                said = _decoder.decode(self._connection.recv_bytes())
                if isinstance(said, m.Do):
                    self._asked.put(said)
                elif (answer := self._waiting.pop(said.key)) is not None:
                    if said.failure is None:
                        answer.set_result(said.value)
                    else:
                        answer.set_exception(m.exception(said.failure))
        self.gone = True
        self._asked.put(None)
        self._ended()
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            self._connection.close()
        for answer in waiting.values():
            answer.set_exception(ConnectionError("the other end is gone"))
        self._socket.close()

    def _answer_all(self) -> None:
        while not self.gone:
            asked = [self._asked.get()]
            with contextlib.suppress(Empty):
                while True:
                    asked.append(self._asked.get_nowait())
            for what, same in itertools.groupby(filter(None, asked), lambda each: each.what):
                group = list(same)
                try:
                    answers = self._handle(what, [each.arguments for each in group])
                except Exception as error:
                    answers = [error] * len(group)
                for each, answer in zip(group, answers):
                    self._answer(each.key, answer)

    def _answer(self, key: int, answer: Any) -> None:
        if isinstance(answer, Future):
            answer.add_done_callback(lambda done: self._answer(key, done.exception() or done.result()))
            return
        if isinstance(answer, BaseException):
            said = m.Answer(key, failure=m.failure(answer))
        else:
            said = m.Answer(key, answer)
        with self._lock, contextlib.suppress(OSError):
            self._connection.send_bytes(m.encode(said))
