"""The socket between a trainer and an engine, and patience: a peer that has died is noticed at once, one that stalls in
time.
"""

import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

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


def wait(
    poller: zmq.Poller, peer: Peer | None, seconds: float, what: str, closed: Callable[[], bool] = lambda: False
) -> None:
    """Until something has come. PeerLost where the peer is dead, or nothing comes for so long; HandoverFailed where one
    is closed meanwhile."""
    end = time.monotonic() + seconds
    while not poller.poll(POLL):
        if closed():
            raise HandoverFailed("weights: the receiver is closed")
        name = "the peer" if peer is None else peer.name
        if peer is not None and not peer.alive:
            if poller.poll(0):  # its last words
                return
            raise PeerLost(f"weights: {name} has died while {what} was waited for")
        if time.monotonic() > end and not poller.poll(0):  # this process may have stood still meanwhile
            raise PeerLost(f"weights: {name}: {what} did not come within {seconds:g} s")


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


def new_address() -> str:
    """Of a socket that no other process has; what dead ones have left there is removed."""
    place = folder()
    for old in place.glob("weights-*.sock"):
        if not _listens(old):
            old.unlink(missing_ok=True)
    path = f"{place}/weights-{os.getpid()}-{secrets.token_hex(6)}.sock"
    if len(path) > zmq.IPC_PATH_MAX_LEN:
        raise ValueError(f"weights: {path} is longer than a socket's name may be ({zmq.IPC_PATH_MAX_LEN}): set TMPDIR")
    return f"ipc://{path}"


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True
