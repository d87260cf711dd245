"""What a trainer and an engine say to each other while weights change hands.

    sender                          receiver
    Hello (version, fingerprint) ->
                                 <- Welcome (manifest, weight_version), or Refused (why, with both values)
    Offer (memory to open)       ->
                                 <- Opened, or Unopened (why): the next kind of memory is offered
    Bucket (what lies in it)     ->      four under way
                                 <- Ack (may be filled again)
    Check                        ->      once all are acknowledged, of a sender to several
                                 <- Whole, or Failed: something is missing
    Finish                       ->      likewise
                                 <- Done (weight_version), or Failed (why, and what the engine has now)

Either may end it with Cancel or Failed. Bye and Gone are the end of a sender. All is msgpack: nothing that is received
can run code.

A set is taken after Finish and never before, so the receiver always knows whether it was, and a sender that gives up
before Finish knows that it will not be. From Finish to Done the sender cannot know: its PeerLost says so (`in_doubt`),
and it can send all of it again under the same weight_version, after which both know. At Finish the receiver has read
all that lies in the sender's memory, which may be gone when one that has stalled goes on.
"""

import os
from pathlib import Path
from typing import Annotated

import torch

from ..errors import HandoverFailed
from ..extras import pip_line

try:
    import msgspec
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"weights: not installed: {error.name}. Run: {pip_line('handover')}") from error

VERSION = 8
LARGEST_VERSION = 2**53 - 1  # of weights: see session.check_version

# What is read is checked against these; nothing else comes out of `decode`.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Place = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
WeightVersion = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_VERSION)]
Handles = Annotated[list[bytes], msgspec.Meta(min_length=1, max_length=64)]
Name = Annotated[str, msgspec.Meta(max_length=1000)]


class Peer(msgspec.Struct, frozen=True):
    """A process of this host. Numbers of processes are used again, so its start belongs to it."""

    pid: Count
    started: Place
    name: Name

    @classmethod
    def self(cls, role: str) -> "Peer":
        return cls(os.getpid(), _status(os.getpid())[1], f"{role} (process {os.getpid()})")

    @property
    def alive(self) -> bool:
        state, started = _status(self.pid)
        return state not in ("", "Z", "X") and started == self.started


def _status(pid: int) -> tuple[str, int]:
    """Its state, and when it began in ticks; "" where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return fields[0], int(fields[19])


class Part(msgspec.Struct, array_like=True, frozen=True):
    """Elements of a tensor that lie in a bucket: `count` from the tensor's `start`-th on, at byte `offset`."""

    name: str
    shape: tuple[Place, ...]
    dtype: str
    start: Place
    count: Count
    offset: Place


class Hello(msgspec.Struct, tag=True):
    """version: of this protocol; weight_version: that the set will be; None: one more than it is."""

    version: int
    peer: Peer
    numerics: dict
    weight_version: WeightVersion | None = None


class Welcome(msgspec.Struct, tag=True):
    """manifest: name -> (shape, dtype), single experts among them; device: "cpu" or "cuda"; gpu: see buffers.py;
    weight_version: the engine's before this set."""

    peer: Peer
    manifest: dict[str, tuple[tuple[int, ...], str]]
    mode: str
    device: str
    gpu: str
    weight_version: int


class Refused(msgspec.Struct, tag=True):
    reason: str


class Offer(msgspec.Struct, tag=True):
    """Buffers of `size` bytes each, and how to open them: see buffers.py. One that was opened before is named alone."""

    kind: Name
    name: Name
    size: Count
    handles: Handles
    gpu: Name


class Opened(msgspec.Struct, tag=True):
    pass


class Unopened(msgspec.Struct, tag=True):
    reason: str


class Bucket(msgspec.Struct, tag=True):
    """memory: the offer's name that it lies in; "": the last one's."""

    buffer: int
    parts: list[Part]
    checksum: int | None = None
    memory: str = ""


class Ack(msgspec.Struct, tag=True):
    buffer: int


class Check(msgspec.Struct, tag=True):
    """All has been sent. It is not to be taken before Finish."""


class Whole(msgspec.Struct, tag=True):
    """All has come."""


class Finish(msgspec.Struct, tag=True):
    pass


class Done(msgspec.Struct, tag=True):
    weight_version: int


class Cancel(msgspec.Struct, tag=True):
    """welcomed: whether the sender had its Welcome; where not, it has sent nothing of the set."""

    reason: str
    welcomed: bool = True


class Failed(msgspec.Struct, tag=True):
    reason: str


class Bye(msgspec.Struct, tag=True):
    """The sender ends: the receiver lets go of its memory."""

    peer: Peer


class Gone(msgspec.Struct, tag=True):
    """The receiver has let go of the sender's memory."""


# --- among a trainer's ranks of which each sends its own shards: see shards.py ---------------------------------------


class Here(msgspec.Struct, tag=True):
    """A rank has begun a set."""

    rank: Count


class Begin(msgspec.Struct, tag=True):
    """What the receiver said of itself, and in which kind of memory the ranks' buckets are to be."""

    welcome: Welcome
    kind: Name


class Ended(msgspec.Struct, tag=True):
    """All of a rank's shards lie in buckets that it has told of. digest: of what it was given, in order."""

    digest: str


class Rest(msgspec.Struct, tag=True):
    """So it is with every rank: what no shard of is sent is to be made whole, by all of them."""


Offers = Offer | Opened | Unopened
Ends = Check | Whole | Finish | Done | Cancel | Failed | Bye | Gone
Message = Hello | Welcome | Refused | Offers | Bucket | Ack | Ends
OfRanks = Here | Begin | Offers | Bucket | Ack | Ended | Rest | Done | Failed
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Message)
_of_ranks = msgspec.msgpack.Decoder(OfRanks)


def encode(message: Message | OfRanks) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes, peer: str) -> Message:
    """HandoverFailed for what is no message."""
    try:
        return _decoder.decode(data)
    except Exception as error:  # text that is no UTF-8 and nesting without an end raise other kinds than msgspec's
        raise HandoverFailed(f"weights: {peer} sent what is no message of version {VERSION}: {error}") from error


def decode_of_ranks(data: bytes) -> OfRanks:
    """HandoverFailed for what is no message."""
    try:
        return _of_ranks.decode(data)
    except Exception as error:
        raise HandoverFailed(f"weights: a rank sent what is no message of version {VERSION}: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise HandoverFailed(f"weights: {name!r} is no dtype")
    return dtype
