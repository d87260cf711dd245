"""What replicas and their front say to each other: msgpack by msgspec, checked against these types when it is read.

A message is about a request or an answer of the front's, known by a number of its own (`key`) that is never used twice.
Frames go in order; one holds several messages.
"""

import struct
from dataclasses import fields
from typing import Any

from .. import errors
from ..config import SamplingParams
from ..extras import pip_line
from ..handover import messages as weights
from ..outputs import Increment, Load
from ..request import Begun, Completion

try:
    import msgspec
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"Replicas: not installed: msgspec. Run: {pip_line('engine')}") from missing

HEADER = struct.Struct("<QB")  # length and kind of what follows
FRAME, DESCRIPTOR = 0, 1  # messages; one byte that brings a file descriptor with it


class Add(msgspec.Struct, tag=0, array_like=True):
    """Compute a request. Its increments are wanted if `streams`, otherwise its completions alone."""

    key: int
    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    streams: bool
    begun: list[Begun] | None = None


class Abort(msgspec.Struct, tag=1, array_like=True):
    key: int


class Do(msgspec.Struct, tag=2, array_like=True):
    """Call one of Host's `do_` methods; an Answer comes."""

    key: int
    what: str
    arguments: dict[str, Any]


class Memory(msgspec.Struct, tag=3, array_like=True):
    """The file descriptor that came before this is memory that buckets of weights lie in."""

    key: int
    size: int


class Bucket(msgspec.Struct, tag=4, array_like=True):
    """Weights of the update that is under way; an Answer comes once they are written. They lie in a Memory, or here."""

    key: int
    parts: list[weights.Part]
    memory: int | None = None
    payload: bytes | None = None


class Open(msgspec.Struct, tag=6, array_like=True):
    """A sender's memory, that the next Takes are about; an Answer comes."""

    key: int
    offer: weights.Offer


class Take(msgspec.Struct, tag=7, array_like=True):
    """A sender's bucket, in the memory that was opened or here; an Answer comes once it is written."""

    key: int
    bucket: weights.Bucket
    payload: bytes | None = None


class Close(msgspec.Struct, tag=5, array_like=True):
    pass


class Ready(msgspec.Struct, tag=10, array_like=True):
    """The engine is made."""

    facts: dict[str, Any]


class Failure(msgspec.Struct, array_like=True):
    """An exception: its class and what it says."""

    kind: str
    text: str


class Failed(msgspec.Struct, tag=11, array_like=True):
    """The engine could not be made, or has ended by a fault of its own."""

    failure: Failure


class News(msgspec.Struct, tag=12, array_like=True):
    """An increment of a request, with the versions of the weights that gave its tokens."""

    key: int
    increment: Increment
    weight_versions: list[int]


class Done(msgspec.Struct, tag=13, array_like=True):
    """The end of a request: its completions where it does not stream, or what ended it."""

    key: int
    completions: list[Completion] | None = None
    failure: Failure | None = None


class Answer(msgspec.Struct, tag=14, array_like=True):
    key: int
    value: Any = None
    failure: Failure | None = None


class State(msgspec.Struct, tag=15, array_like=True):
    """How much there is to do."""

    load: Load


ToReplica = Add | Abort | Do | Memory | Bucket | Open | Take | Close
ToFront = Ready | Failed | News | Done | Answer | State

_encoder = msgspec.msgpack.Encoder()
_to_replica = msgspec.msgpack.Decoder(list[ToReplica])
_to_front = msgspec.msgpack.Decoder(list[ToFront])
encode = _encoder.encode
decode_plain = msgspec.msgpack.decode  # of dictionaries and lists alone


def for_replica(frame: bytes) -> list[ToReplica]:
    return _to_replica.decode(frame)


def for_front(frame: bytes) -> list[ToFront]:
    return _to_front.decode(frame)


_KINDS = {
    kind.__name__: kind
    for kind in (ValueError, TypeError, RuntimeError, MemoryError, FileNotFoundError, NotImplementedError)
} | {name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}


def failure(error: BaseException) -> Failure:
    return Failure(type(error).__name__, str(error))


def exception(of: Failure) -> Exception:
    """The same class again where it is one of ours or of Python's own, RuntimeError with its name otherwise."""
    kind = _KINDS.get(of.kind)
    if kind is None or kind is errors.RequestError:
        return RuntimeError(f"{of.kind}: {of.text}")
    return kind(of.text)


def as_dict(value: Any) -> dict[str, Any]:
    """A dataclass's fields, as they are."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
