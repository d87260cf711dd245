"""Steps with tokens of images, on their way to stages: pixels go to those alone that encode, and once for each image
that these are to keep."""

import numpy as np
import torch

from vexact_ops.patch.grids import tokens

from ..core.images import Recent
from ..media.images import Image, Rows, Scene
from . import messages as m

_NOTHING = torch.empty(0, dtype=torch.float32)


class Scenes:
    """What the stages that encode have: they keep images as this one counts them, by the same steps.

    capacity   tokens of images that each keeps
    """

    def __init__(self, capacity: int):
        self._recent, self._epoch = Recent(capacity), 0

    def clear(self) -> None:
        """They have forgotten all."""
        self._recent.clear()

    def message(self, scene: Scene, epoch: int) -> m.Scene:
        """Of a scene that is sent at once."""
        if epoch != self._epoch:
            self._recent.clear()
            self._epoch = epoch
        images = {row.image.digest: row.image for row in scene.rows}
        pictures = [
            m.Picture(digest, image.grid, None if image in self._recent else m.patch_bytes(image.pixels))
            for digest, image in images.items()
        ]
        for image in images.values():  # as Gallery does
            self._recent.use(image)
        places = {digest: i for i, digest in enumerate(images)}
        rows = [(places[row.image.digest], row.begin, row.end, row.at) for row in scene.rows]
        return m.Scene(_axes_bytes(scene), pictures, rows)


def places_alone(scene: Scene) -> m.Scene:
    """For a stage that encodes nothing."""
    return m.Scene(_axes_bytes(scene), [], [])


def scene_from(message: m.Scene, merge: int) -> Scene:
    """As a runner takes it. Of an image that it has, its digest alone counts."""
    images = [
        Image(_NOTHING if p.pixels is None else m.patches_of(p.pixels), p.grid, tokens(p.grid, merge), p.digest)
        for p in message.pictures
    ]
    axes = np.frombuffer(message.axes, np.int64).reshape(3, -1)
    return Scene(axes.copy(), [Rows(images[i], begin, end, at) for i, begin, end, at in message.rows])


def _axes_bytes(scene: Scene) -> bytes:
    return np.ascontiguousarray(scene.axes, np.int64).tobytes()
