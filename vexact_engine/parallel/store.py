"""Where processes that join a torch.distributed group leave word for each other: kept by the engine, asked over
connections that wire.Door has let in. torch's own TCPStore listens on all interfaces and asks nobody who they are."""

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from . import messages as m

_SLICE = 1.0  # seconds that one question waits at most: other threads of the asker have some, too


class Board:
    """What has been left, by key. `serve` answers one process, in a thread of its own, until that is gone."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def serve(self, connection: Connection) -> None:
        with connection:
            try:
                while True:
                    what, *arguments = m.decode_plain(connection.recv_bytes())
                    connection.send_bytes(m.encode(self._do(what, arguments)))
            except (OSError, EOFError):
                return

    def _do(self, what: str, arguments: list) -> Any:
        with self._changed:
            if what == "get":
                (keys,) = arguments
                self._changed.wait_for(lambda: self._values.keys() >= set(keys), _SLICE)
                return [self._values[key] for key in keys] if self._values.keys() >= set(keys) else None
            if what == "check":
                return self._values.keys() >= set(arguments[0])
            if what == "count":
                return len(self._values)
            found = self._change(what, *arguments)
            self._changed.notify_all()
            return found

    def _change(self, what: str, key: str, *given: Any) -> Any:
        if what == "set":
            self._values[key] = given[0]
        elif what == "add":
            total = int(self._values.get(key, b"0")) + given[0]
            self._values[key] = str(total).encode()
            return total
        elif what == "delete":
            return self._values.pop(key, None) is not None
        elif what == "replace":  # where it is what was expected; b"" where there is nothing
            expected, wanted = given
            if self._values.get(key, b"") == expected:
                self._values[key] = wanted
            return self._values.get(key, expected)
        return None


class BoardStore(dist.Store):
    """torch's word for it, in a process of the group."""

    def __init__(self, connection: Connection):
        super().__init__()
        self._connection, self._lock = connection, threading.Lock()

    def _ask(self, *question: Any) -> Any:
        with self._lock:
            self._connection.send_bytes(m.encode(question))
            return m.decode_plain(self._connection.recv_bytes())

    def _wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        end = time.monotonic() + (self.timeout if timeout is None else timeout).total_seconds()
        while (found := self._ask("get", keys)) is None:
            if time.monotonic() > end:
                raise dist.DistStoreError(f"wait timeout: {', '.join(keys)} did not come in time")
        return found

    def get(self, key: str) -> bytes:
        return self._wait([key])[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._wait(keys, timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, value.encode() if isinstance(value, str) else bytes(value))

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        old, new = (value.encode() if isinstance(value, str) else bytes(value) for value in (expected, desired))
        return self._ask("replace", key, old, new)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete", key)

    def num_keys(self) -> int:
        return self._ask("count")
