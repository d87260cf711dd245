"""TCP between an engine and its processes on other machines: at one address of the engine's machine, for those alone
who know a secret of this start. Both sides prove that by multiprocessing's own challenge (an HMAC), before anything is
read.

What follows is neither signed nor encrypted, and torch.distributed's own traffic is not either: the network is the
cluster's.
"""

import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from fcntl import ioctl
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from . import limits

log = logging.getLogger(__name__)

_AT_ONCE = 64  # who may be at the door; others wait
_SIOCGIFADDR = 0x8915


Purpose: TypeAlias = Literal["told", "ask", "weights"]


class Caller(msgspec.Struct, forbid_unknown_fields=True):
    """Who comes in: which process, and what for: to be "told" what to do; to have something to "ask" (store.Board); or
    for its node's "weights" (line.Line)."""

    rank: int
    what: Purpose


_callers = msgspec.msgpack.Decoder(Caller)


class Door:
    """Lets in so many processes, twice each, and shuts behind the last of them.

    serve    has the connection of each by which it asks, in a thread of its own, until that ends
    firsts   of those, who comes a third time, for its node's weights
    raises   OSError where `host` is no address of this machine
    """

    def __init__(self, host: str, count: int, serve: Callable[[Connection], None], firsts: Iterable[int] = ()):
        self.secret, self._serve = secrets.token_bytes(32), serve
        self._expected: set[tuple[int, Purpose]] = {(rank, "told") for rank in range(count)}
        self._expected |= {(rank, "ask") for rank in range(count)} | {(rank, "weights") for rank in firsts}
        self._arrived: dict[tuple[int, Purpose], socket.socket] = {}
        self._asking: list[socket.socket] = []
        self._lock, self._slots = threading.Lock(), threading.Semaphore(_AT_ONCE)
        six = ipaddress.ip_address(host).version == 6
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if six else socket.AF_INET)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        threading.Thread(target=self._accept, name="vexact-door", daemon=True).start()

    def take(self, rank: int, what: Purpose = "told") -> socket.socket | None:
        """What a process has come in by for that, once it is there."""
        with self._lock:
            return self._arrived.pop((rank, what), None)

    def close(self) -> None:
        """Nobody comes in any more, and nobody who asks is answered."""
        _end(self._socket)
        with self._lock:
            for each in (*self._arrived.values(), *self._asking):
                _end(each)
            self._expected, self._arrived, self._asking = set(), {}, []

    def _accept(self) -> None:
        while True:
            self._slots.acquire()
            try:
                came, peer = self._socket.accept()
            except OSError:  # it is shut
                return
            threading.Thread(target=self._admit, args=(came, peer[0]), name="vexact-caller", daemon=True).start()

    def _admit(self, came: socket.socket, peer: str) -> None:
        try:
            with _handshake(came, limits.HANDSHAKE) as connection:
                deliver_challenge(connection, self.secret)
                answer_challenge(connection, self.secret)
                caller = _callers.decode(connection.recv_bytes(256))
            with self._lock:
                if (caller.rank, caller.what) not in self._expected:
                    raise AuthenticationError(f"process {caller.rank} is not expected")
                self._expected.remove((caller.rank, caller.what))
                if caller.what == "ask":
                    self._asking.append(came)
                else:
                    self._arrived[caller.rank, caller.what] = came
                if not self._expected:
                    _end(self._socket)
        except (OSError, EOFError, AuthenticationError, msgspec.MsgspecError) as error:
            log.warning("a stranger at %s is not let in: %s: %s", peer, type(error).__name__, error)
            came.close()
            return
        finally:
            self._slots.release()
        if caller.what == "ask":
            self._serve(Connection(os.dup(came.fileno())))


def call(address: tuple[str, int], secret: bytes, caller: Caller) -> socket.socket:
    """Go to that door. OSError where nobody is there, AuthenticationError where that is somebody else."""
    ours = socket.create_connection(address, limits.ANSWER)  # behind strangers, too
    ours.settimeout(None)
    with _handshake(ours, limits.ANSWER) as connection:
        answer_challenge(connection, secret)
        deliver_challenge(connection, secret)
        connection.send_bytes(msgspec.msgpack.encode(caller))
    return ours


@contextlib.contextmanager
def _handshake(ours: socket.socket, seconds: float) -> Iterator[Connection]:
    """As multiprocessing has connections. All of it has so many seconds: whoever sends nothing stays for no longer."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),  # a machine that has lost its power ends no connection
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, limits.SILENT // 4),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, limits.SILENT // 4),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * limits.SILENT),
    ):
        ours.setsockopt(level, option, value)
    late = threading.Timer(seconds, _hang_up, (ours,))
    late.daemon = True
    late.start()
    try:
        with Connection(os.dup(ours.fileno())) as connection:
            yield connection
    finally:
        late.cancel()


def _hang_up(ours: socket.socket) -> None:
    """Whoever waits at it in another thread is told."""
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)


def _end(ours: socket.socket) -> None:
    _hang_up(ours)
    ours.close()


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has the address; None where none has."""
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if int(digits, 16) == int(wanted):
                    return name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                found = ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if found[20:24] == wanted.packed:
                    return name
    return None
