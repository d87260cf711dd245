"""Which images of prompts are encoded, as far as a scheduler knows, and how many more a step may have encoded."""

from collections import OrderedDict
from typing import Any, Protocol

from ..request import Request


class Image(Protocol):
    """An image of a prompt. digest: of its content; tokens: that it has there."""

    digest: bytes
    tokens: int


class Recent:
    """Digests of the images that were used last, no more than so many tokens of them in all."""

    def __init__(self, capacity: int):
        self.capacity, self.used = capacity, 0
        self.known: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, image: Any) -> bool:
        return image.digest in self.known

    def use(self, image: Any) -> list[bytes]:
        """What has to go for it: those used longest ago, but never itself."""
        if image.digest in self.known:
            self.known.move_to_end(image.digest)
            return []
        self.known[image.digest], gone = image.tokens, []
        self.used += image.tokens
        while self.used > self.capacity and len(self.known) > 1:
            digest, count = self.known.popitem(last=False)
            self.used -= count
            gone.append(digest)
        return gone

    def clear(self) -> None:
        self.known.clear()
        self.used = 0


class Encodings:
    """Of one scheduler. Where it knows less than the worker, or more, that costs time, never bits: the worker encodes
    what it has not.

    per_step   a plan takes in one more image to encode while those that it has come to fewer tokens
    capacity   tokens of images that the worker keeps
    epoch      changes with what they were encoded with
    """

    def __init__(self, per_step: int, capacity: int):
        self._per_step, self._left, self.epoch = per_step, per_step, 0
        self._recent = Recent(capacity)

    def begin(self) -> int:
        """Another plan; returns the epoch."""
        self._left = self._per_step
        return self.epoch

    def forget(self) -> None:
        self._recent.clear()
        self.epoch += 1

    def end_of(self, request: Request, start: int, end: int) -> int:
        """Where a chunk of a prompt has to end, for no more to be encoded than may be. What lies before counts as
        encoded."""
        for image, at in request.pictures.placed if request.pictures else ():
            if at < end and start < at + image.tokens:
                if image not in self._recent:
                    if self._left <= 0:
                        return max(at, start)
                    self._left -= image.tokens
                self._recent.use(image)
        return end

    def must_wait(self, request: Request, start: int) -> bool:
        """Whether that token belongs to an image that this plan may not have encoded any more."""
        placed = request.pictures.placed if request.pictures and self._left <= 0 else ()
        return any(at <= start < at + image.tokens and image not in self._recent for image, at in placed)
