"""Messages on a socket between two of our processes: a length of four bytes, and so many of them."""

import socket

from . import messages as m

_MOST = 1 << 20  # bytes that are read at once


class Frames:
    """The frames of a socket, of whatever pieces they come in."""

    def __init__(self, ours: socket.socket):
        self._socket, self._buffer = ours, bytearray()

    def read(self) -> list[bytes] | None:
        """Those that have come. None at the end."""
        try:
            data = self._socket.recv(_MOST)
        except OSError:
            return None
        if not data:
            return None
        self._buffer += data
        found = []
        while len(self._buffer) >= m.HEADER.size:
            (length,) = m.HEADER.unpack_from(self._buffer)
            end = m.HEADER.size + length
            if len(self._buffer) < end:
                break
            found.append(bytes(memoryview(self._buffer)[m.HEADER.size : end]))
            del self._buffer[:end]
        return found


def framed(frame: bytes) -> bytes:
    return m.HEADER.pack(len(frame)) + frame


def write_frame(ours: socket.socket, frame: bytes) -> None:
    ours.sendall(framed(frame))
