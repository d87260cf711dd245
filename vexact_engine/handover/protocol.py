"""The socket between a trainer and an engine, and patience: a peer that has died is noticed at once, one that stalls in
time.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from ..errors import HandoverFailed, PeerLost
from ..extras import pip_line
from .messages import Peer

try:
    import zmq
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"weights: not installed: {error.name}. Run: {pip_line('handover')}") from error

_LONGEST = 60  # characters of the folder's name, that a socket's stays under 107
_LOOK = 5e-5  # seconds between two looks at what no socket tells
POLL = 100  # milliseconds between two looks at whether the peer lives
_BEHIND = 1000  # messages of others that are heard once a peer's time is over
_LONGEST_MESSAGE = 64 << 20  # bytes: of a hundred thousand tensors


class Peers(Protocol):
    """Several, of which each has to say something: messages.Peer's for them all."""

    @property
    def name(self) -> str: ...
    @property
    def alive(self) -> bool: ...


class Wait:
    """For one thing that a peer has to say, whoever else talks meanwhile.

    peer      None: not known yet; several count as one, that is dead where one of them is
    ended     why the receiver that waits is to end; "" where it is not
    """

    def __init__(
        self, peer: "Peer | Peers | None", seconds: float, what: str, ended: Callable[[], str] = lambda: ""
    ) -> None:
        self.peer, self.seconds, self.what, self._ended = peer, seconds, what, ended
        self._end = time.monotonic() + seconds
        self._look, self._dead, self._late = 0.0, False, 0

    def until_heard(self, poller: zmq.Poller) -> None:
        """Until something has come. PeerLost where the peer is dead, or nothing comes for so long; HandoverFailed where
        the receiver is to end meanwhile."""
        while not poller.poll(POLL):
            self._check_open()
            if self.peer is not None and not self.peer.alive:
                if poller.poll(0):  # its last words
                    return
                self._lost()
            if time.monotonic() > self._end and not poller.poll(0):  # this process may have stood still meanwhile
                self._late_by()

    def heard_another(self, poller: zmq.Poller) -> None:
        """What has come was somebody else's. What this peer has said until it died, or its time was over, may stand
        behind that."""
        self._check_open()
        now = time.monotonic()
        if now > self._look:
            self._look, self._dead = now + POLL / 1000, self.peer is not None and not self.peer.alive
        if self._dead or now > self._end:
            self._late += 1
            if self._late > _BEHIND or not poller.poll(0):
                self._lost() if self._dead else self._late_by()

    def _check_open(self) -> None:
        if why := self._ended():
            raise HandoverFailed(why)

    @property
    def _name(self) -> str:
        return "the peer" if self.peer is None else self.peer.name

    def _lost(self) -> None:
        raise PeerLost(f"weights: {self._name} has died while {self.what} was waited for")

    def _late_by(self) -> None:
        raise PeerLost(f"weights: {self._name}: {self.what} did not come within {self.seconds:g} s")


def until(ready: Callable[[], bool], seconds: float, what: str) -> None:
    """Until it is. PeerLost where that takes longer."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise PeerLost(f"weights: {what} did not come within {seconds:g} s")
        time.sleep(_LOOK)


# --- sockets: files in a folder that nobody else may enter -----------------------------------------------------------


def folder() -> Path:
    """Of this user alone; made where it is missing. OSError where it is somebody else's, or open to others."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    path = Path(tempfile.gettempdir()) / f"vexact-{os.getuid()}"
    if base and os.access(base, os.W_OK) and len(base) < _LONGEST:
        path = Path(base) / "vexact"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"weights: {path} must be a folder of this user's that nobody else may enter (mode 700)")
    return path


class Listener:
    """Where senders find a receiver.

    address   None: a new one, in a folder of this user's alone; what dead processes have left there is removed
    socket    ZeroMQ's, that takes their messages
    raises    FileExistsError, and the file stays, where one is there that is no socket; OSError (EADDRINUSE) where
              somebody listens there, if only one that has stalled; ValueError for what is no address
    """

    def __init__(self, address: str | None = None) -> None:
        if address is not None and not isinstance(address, str):
            raise TypeError(f"WeightReceiver: address: got a {type(address).__name__}, expected a text, or None")
        self.socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.socket.linger = 1000
        self.socket.maxmsgsize = _LONGEST_MESSAGE
        self._file: tuple[Path, tuple[int, int]] | None = None  # where, and which
        try:
            if address is None:
                address = new_address()
            if address.startswith("ipc://") and address[6:7] not in ("", "@", "*"):
                self._bind_file(Path(address[6:]))
            self._bind(address)
        except BaseException:
            self.close()
            raise
        self.address = address if self._file is not None else self.socket.last_endpoint.decode().rstrip("\0")

    def _bind_file(self, path: Path) -> None:
        """By hand: ZeroMQ would remove whatever is there, and at its end whatever is there then."""
        if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
            most = zmq.IPC_PATH_MAX_LEN
            raise ValueError(f"WeightReceiver: address: {path} is longer than a socket's name may be ({most})")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as ours, _locked(path.parent):
            found = path.lstat() if os.path.lexists(path) else None
            if found is not None and not stat.S_ISSOCK(found.st_mode):
                raise FileExistsError(f"WeightReceiver: address: {path} is a file, expected none, or a socket")
            if found is not None and _listens(path):
                raise OSError(errno.EADDRINUSE, f"WeightReceiver: address: somebody listens at {path}")
            if found is not None:
                path.unlink()
            ours.bind(str(path))
            made = path.lstat()
            self._file = path, (made.st_dev, made.st_ino)
            ours.listen(128)
            self.socket.setsockopt(zmq.USE_FD, ours.detach())

    def _bind(self, address: str) -> None:
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            text = f"WeightReceiver: address: got {address!r}: {error.strerror}"
            wrong = (errno.EINVAL, errno.EPROTONOSUPPORT, zmq.ENOCOMPATPROTO)
            raise ValueError(text) if error.errno in wrong else OSError(error.errno, text) from error

    def close(self) -> None:
        """Its own file goes with it, and no other one that is there by now."""
        self.socket.close()
        if self._file is None:
            return
        (path, mine), self._file = self._file, None
        with contextlib.suppress(OSError), _locked(path.parent):
            found = path.lstat()
            if (found.st_dev, found.st_ino) == mine:
                path.unlink()


def new_address() -> str:
    """Of a socket that no other process has; what dead ones have left there is removed."""
    place = folder()
    with _locked(place):
        for old in place.glob("weights-*.sock"):
            if not _listens(old):
                old.unlink(missing_ok=True)
    path = f"{place}/weights-{os.getpid()}-{secrets.token_hex(6)}.sock"
    if len(path) > zmq.IPC_PATH_MAX_LEN:
        raise ValueError(f"weights: {path} is longer than a socket's name may be ({zmq.IPC_PATH_MAX_LEN}): set TMPDIR")
    return f"ipc://{path}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """While no other receiver is made in it, or ended: from its bind to its listen a socket looks like a dead one's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # who has stalled may have no room for one more, and listens all the same
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
