"""Buckets that are filled with tensors, one behind the other, and told of once what fills them is there."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..weights.conversion import FLOATS
from ..weights.names import hint, passed_over
from ..weights.update import Piece
from . import messages as m
from .buffers import Buckets, BucketSpace, checksum
from .packing import Packer
from .threads import half_the_threads

_ROUNDED = frozenset(FLOATS.values())  # to each other; numbers of 8 bits mean nothing without their scales


class Expected:
    """What a receiver takes, each tensor once.

    manifest   (shape, dtype) by name, as a Welcome has it
    """

    def __init__(self, manifest: Mapping[str, tuple[Sequence[int], str]]):
        self._manifest = {n: (tuple(shape), m.dtype_of(d)) for n, (shape, d) in manifest.items()}
        self._passed = passed_over(self._manifest)
        self._came: set[str] = set()

    def passes(self, name: str) -> bool:
        """Whether it is none of the engine's, and no mistake either."""
        return name.startswith(self._passed)

    def dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """That it goes in; a tensor of several ranks counts as whole. ValueError, TypeError for what does not fit."""
        if name not in self._manifest:
            said = hint([name], self._manifest.keys())
            what = f"{name} is none of the engine's {len(self._manifest)} tensors"
            raise ValueError(f"weights: unknown: {what}" + (f" ({said})" if said else ""))
        shape, dtype = self._manifest[name]
        if name in self._came:
            raise ValueError(f"weights: repeated: {name} came before")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"weights: {name} is {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype != dtype and not {tensor.dtype, dtype} <= _ROUNDED:
            raise TypeError(f"weights: {name} is {tensor.dtype}, expected {dtype}")
        return dtype

    def note(self, name: str) -> None:
        self._came.add(name)


class Filling:
    """One set's way through some buckets.

    post     takes the message about a bucket that is filled
    freed    waits for one to be given back: its number
    waits    whether there is something to hear for `freed` already
    memory   what the receiver knows the buckets by, where it has opened others too
    """

    def __init__(
        self,
        buffers: Buckets,
        post: Callable[[m.Bucket], None],
        freed: Callable[[], int],
        waits: Callable[[], bool],
        *,
        checksums: bool = False,
        memory: str = "",
    ):
        self.buffers, self._post, self._freed, self._waits = buffers, post, freed, waits
        self._checksums, self._memory = checksums, memory
        self._free = deque(range(len(buffers.tensors)))
        self._filled: deque[tuple[m.Bucket, list[torch.cuda.Event]]] = deque()  # not posted yet: what fills them
        self._streams: dict[tuple[int, int], torch.cuda.Stream] = {}  # that fill the bucket: the caller's may change
        self._packer = Packer(self._spaces(), self._copy)

    def put(self, name: str, value: Tensor | Piece, dtype: torch.dtype) -> None:
        if self._filled:
            self.post_filled()
        for filled in self._packer.put(name, value, dtype):
            self._flush(*filled)

    def finish(self) -> None:
        """What is left of it is told of."""
        for filled in self._packer.flush():
            self._flush(*filled)
        self.post_filled(len(self._filled))

    def settle(self) -> None:
        """Until all are given back: a receiver that stalls may read one when this end has given up and freed it."""
        while len(self._free) < len(self.buffers.tensors):
            self._free.append(self._freed())

    def post_filled(self, wait: int = 0) -> bool:
        """What is in a bucket is there before the message about it. The next is filled meanwhile: so many of them are
        waited for. Whether one was told of."""
        told = False
        while self._filled and (wait > 0 or all(event.query() for event in self._filled[0][1])):
            bucket, events = self._filled.popleft()
            for event in events:
                event.synchronize()
            self._post(bucket)
            wait, told = wait - 1, True
        return told

    def _copy(self, into: Tensor, part: Tensor) -> None:
        if not (part.is_cuda or into.is_cuda):
            with half_the_threads():
                into.copy_(part)
            return
        into.copy_(part, non_blocking=part.is_cuda)
        for gpu in {tensor.device.index for tensor in (part, into) if tensor.is_cuda}:
            stream = gpu, torch._C._cuda_getCurrentRawStream(gpu)  # asked for each tensor, and cheap
            if stream not in self._streams:
                self._streams[stream] = torch.cuda.current_stream(gpu)

    def _spaces(self) -> Iterator[BucketSpace]:
        """Buckets that may be filled, as they are given back."""
        while True:
            while not self._free:
                if self._waits() or not self.post_filled(1):
                    self._free.append(self._freed())
            yield self.buffers.space(self._free.popleft())

    def _flush(self, space: BucketSpace, used: int, parts: list[m.Part]) -> None:
        events, total = [stream.record_event() for stream in self._streams.values()], None
        self._streams.clear()
        if self._checksums:
            for event in events:
                event.synchronize()
            total = checksum(self.buffers.tensors[space.number][:used])
        self._filled.append((m.Bucket(space.number, parts, total, self._memory), events))
        self.post_filled()
