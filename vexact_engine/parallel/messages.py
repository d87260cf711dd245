"""What replicas and their front, and stages and their engine, say to each other: msgpack by msgspec, checked against
these types when it is read.

A message is about a request or an answer, known by a number of its own (`key`) that is never used twice. Frames go in
order; one holds several messages.
"""

import struct
from collections.abc import Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any

import torch

from .. import errors
from ..config import SamplingParams
from ..core.plan import Sampled
from ..extras import pip_line
from ..handover import messages as weights
from ..outputs import Increment, Load
from ..request import Completion, PartialOutput

try:
    import msgspec
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(f"Replicas: not installed: msgspec. Run: {pip_line('engine')}") from missing

HEADER = struct.Struct("<Q")  # length of what follows


class Add(msgspec.Struct, tag=0, array_like=True):
    """Compute a request. Its increments are wanted if `streams`, otherwise its completions alone. pictures: its images
    and videos by the names that prompts have for them, patches as fp32 in bytes."""

    key: int
    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    streams: bool
    earlier: list[PartialOutput] | None = None
    pictures: dict[str, Any] | None = None

    def prompt(self) -> Any:
        """As an engine takes it."""
        if self.pictures is None:
            return self.prompt_ids
        made = {name: patches_of(value) if isinstance(value, bytes) else value for name, value in self.pictures.items()}
        return {"prompt_token_ids": self.prompt_ids, **made}


class Abort(msgspec.Struct, tag=1, array_like=True):
    key: int


class Do(msgspec.Struct, tag=2, array_like=True):
    """Call one of Host's, or Stage's, `do_` methods; an Answer comes."""

    key: int
    what: str
    arguments: dict[str, Any]


class Open(msgspec.Struct, tag=3, array_like=True):
    """Memory of another process, that the next Takes are about; an Answer comes."""

    key: int
    offer: weights.Offer


class Take(msgspec.Struct, tag=4, array_like=True):
    """Weights of the update that is under way, in the memory that was opened or here; an Answer comes once they are
    written."""

    key: int
    bucket: weights.Bucket
    payload: bytes | None = None


class Close(msgspec.Struct, tag=5, array_like=True):
    pass


class Make(msgspec.Struct, tag=6, array_like=True):
    """What a stage is made of; it is Ready then.

    rank, ranks     which of all processes, and how many of them a stage's weights are cut over
    layers          begin and end of every stage's; this one's are layers[rank // ranks]
    origin, config  fields of Origin and EngineConfig
    store           a file in which the stages find each other; "": they ask the engine's process
    ahead           how many steps are launched before the first of them is waited for
    """

    rank: int
    ranks: int
    layers: list[tuple[int, int]]
    device: str
    origin: dict[str, Any]
    config: dict[str, Any]
    backend: str | None
    store: str
    ahead: int


class Picture(msgspec.Struct, array_like=True):
    """An image of a step. pixels: its patches, fp32; None: the stage keeps it encoded."""

    digest: bytes
    grid: tuple[int, int, int]
    pixels: bytes | None


class Scene(msgspec.Struct, array_like=True):
    """media.images.Scene: axes int64; rows are (which picture, begin, end, at)."""

    axes: bytes
    pictures: list[Picture]
    rows: list[tuple[int, int, int, int]]


class Step(msgspec.Struct, tag=7, array_like=True):
    """Compute a step (core/step.py), whose arrays share this memory. The last stage says what was Drawn. Images that
    were encoded in another epoch are forgotten.

    drafts   it is one of what drafts, which is told of it alone
    """

    data: bytearray
    drafts: bool = False
    image_epoch: int = 0
    scene: Scene | None = None


class Ping(msgspec.Struct, tag=8, array_like=True):
    """Say at once that the process is there, whatever it waits for; an Answer comes."""

    key: int


class Fill(msgspec.Struct, tag=9, array_like=True):
    """Bytes for one of the buffers that a stage holds for its machine; an Answer comes once they are there."""

    key: int
    buffer: int
    payload: bytes


class Ready(msgspec.Struct, tag=10, array_like=True):
    """The engine, or the stage, is made."""

    facts: dict[str, Any]


class Failure(msgspec.Struct, array_like=True):
    """An exception: its class and what it says."""

    kind: str
    text: str


class Failed(msgspec.Struct, tag=11, array_like=True):
    """The engine or the stage could not be made, or has ended by a fault of its own."""

    failure: Failure
    trace: str = ""


class Increments(msgspec.Struct, tag=12, array_like=True):
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


class Drawn(msgspec.Struct, tag=16, array_like=True):
    """What a step drew, by its number among those of the model, or of what drafts."""

    number: int
    sampled: Sampled
    drafts: bool = False


def pictures(given: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """What an Add takes of `Pictures.given()`."""
    return {name: patch_bytes(t) if t.is_floating_point() and t.dim() == 2 else t.tolist() for name, t in given.items()}


def patch_bytes(patches: torch.Tensor) -> bytes:
    """Of (patches, width) fp32, for `patches_of`."""
    return patches.numpy().tobytes() + HEADER.pack(patches.shape[1])


def patches_of(data: bytes) -> torch.Tensor:
    (width,) = HEADER.unpack(data[-HEADER.size :])
    return torch.frombuffer(bytearray(data[: -HEADER.size]), dtype=torch.float32).view(-1, width)


ToReplica = Add | Abort | Do | Open | Take | Close
ToFront = Ready | Failed | Increments | Done | Answer | State
ToStage = Make | Step | Do | Open | Take | Fill | Close | Ping
FromStage = Ready | Failed | Answer | Drawn


def _plain(value: Any) -> str:
    """What msgpack has no type for."""
    if isinstance(value, torch.dtype):
        return weights.dtype_name(value)
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_to_replica = msgspec.msgpack.Decoder(list[ToReplica])
_to_front = msgspec.msgpack.Decoder(list[ToFront])
_to_stage = msgspec.msgpack.Decoder(list[ToStage])
_from_stage = msgspec.msgpack.Decoder(list[FromStage])
encode = _encoder.encode
decode_plain = msgspec.msgpack.decode  # of dictionaries and lists alone


def for_replica(frame: bytes) -> list[ToReplica]:
    return _to_replica.decode(frame)


def for_front(frame: bytes) -> list[ToFront]:
    return _to_front.decode(frame)


def for_stage(frame: bytes) -> list[ToStage]:
    return _to_stage.decode(frame)


def from_stage(frame: bytes) -> list[FromStage]:
    return _from_stage.decode(frame)


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


def name_of(rank: int, ranks: int) -> str:
    """A process of an engine's, in words: how many ranks a stage has is `ranks`."""
    return f"stage {rank}" if ranks == 1 else f"rank {rank}"


def as_dict(value: Any) -> dict[str, Any]:
    """A dataclass's fields, as they are."""
    return {field.name: getattr(value, field.name) for field in fields(value)}
