"""Threads for what a tokenizer does: it is not made for several at once, and none of it may hold the event loop."""

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Lane:
    """One thread, which does what is the least work first. What is cancelled before it is begun is left out."""

    def __init__(self, name: str):
        self._jobs: list[tuple[int, int, Future, Callable[[], Any]]] = []
        self._number = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def do(self, size: int, function: Callable, *given: Any) -> Any:
        """What `function` returns or raises, called in the thread. size: how much work it is, next to the others."""
        done: Future = Future()
        with self._changed:
            heapq.heappush(self._jobs, (size, next(self._number), done, lambda: function(*given)))
            self._changed.notify()
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """What is not begun is never done."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._jobs or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                *_, done, work = heapq.heappop(self._jobs)
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(work())
                except BaseException as error:
                    done.set_exception(error)
            del done, work  # not until the next one comes
