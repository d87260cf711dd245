"""What an encoder has made of images, kept by content."""

import torch

import vexact_ops as vx

from ..core.images import Recent
from ..media.images import Image, Rows


class Gallery:
    """Encoded images on the device, those used last.

    capacity   tokens of images that are kept. A step's own are there whatever it is
    epoch      of the weights that made them
    """

    def __init__(self, handle, device: torch.device, capacity: int):
        self._handle, self._device = handle, device
        self._recent, self._encoded = Recent(capacity), dict[bytes, vx.patch.Encoded]()
        self.epoch, self.encodings = 0, 0

    def clear(self) -> None:
        self._recent.clear()
        self._encoded.clear()

    def of_step(self, rows: list[Rows], count: int) -> vx.patch.Encoded | None:
        """What stands among so many tokens; images that are not there are encoded together."""
        if not rows:
            return None
        images = {row.image.digest: row.image for row in rows}
        self._encode([image for digest, image in images.items() if digest not in self._encoded])
        found = [self._encoded[row.image.digest] for row in rows]
        where = torch.zeros(1, count, dtype=torch.bool)
        for row in rows:
            where[0, row.at : row.at + row.end - row.begin] = True
        parts = [torch.cat([e.rows[r.begin : r.end] for e, r in zip(found, rows)])]
        for i in range(len(found[0].deepstack)):
            parts.append(torch.cat([e.deepstack[i][r.begin : r.end] for e, r in zip(found, rows)]))
        gone = {digest for image in images.values() for digest in self._recent.use(image)}
        for digest in gone - self._recent.known.keys():  # one may have gone for another of this step, and come back
            del self._encoded[digest]
        return vx.patch.Encoded(parts[0], tuple(parts[1:]), where.to(self._device))

    def _encode(self, images: list[Image]) -> None:
        if not images:
            return
        self.encodings += len(images)
        pixels = torch.cat([image.pixels for image in images]).to(self._device)
        rows, deepstack = self._handle.encode(pixels, [image.grid for image in images])[:2]
        counts = [image.tokens for image in images]
        for image, *parts in zip(images, rows.split(counts), *(stack.split(counts) for stack in deepstack)):
            first, *others = (part.clone() for part in parts)  # of a split none would let go of the memory of all
            self._encoded[image.digest] = vx.patch.Encoded(first, tuple(others))
