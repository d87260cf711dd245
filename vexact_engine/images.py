"""Images of prompts: as callers give them, made into what a model's encoder takes, and where they stand."""

import base64
import binascii
import hashlib
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vexact_ops.patch.description import Images
from vexact_ops.patch.grids import Grid, axes_of, grids_of, patches, tokens

from .core.plan import Chunk, StepPlan

MOST_PIXELS = 64 << 20  # of one image before it is resized
MOST_BYTES = 64 << 20
TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
_FIELDS = ("prompt", "prompt_token_ids", "images", "pixel_values", "image_grid_thw")


@dataclass(frozen=True, eq=False)
class Image:
    """pixels (patches, width) fp32 on the host; digest of its content: pixels and grid."""

    pixels: Tensor
    grid: Grid
    tokens: int
    digest: bytes

    @classmethod
    def of(cls, pixels: Tensor, grid: Grid, merge: int) -> "Image":
        pixels = pixels.detach().to("cpu", torch.float32).contiguous()
        found = hashlib.sha256(repr(grid).encode())
        found.update(pixels.clone().numpy())  # the memory of a tensor that NumPy has seen can never be given back
        return cls(pixels, grid, tokens(grid, merge), found.digest())


class Placed(NamedTuple):
    """An image of a prompt, and its first token there."""

    image: Image
    start: int

    @property
    def end(self) -> int:
        return self.start + self.image.tokens


class Pictures:
    """The images of one prompt.

    prompt_ids   with as many image tokens for each as it has rows
    axes         (3, prompt) int64: every token's frame, row and column
    shift        what is added to the places of tokens behind the prompt
    keys         what the prefix cache knows tokens by: their ids, and of an image its content
    """

    def __init__(self, prompt_ids: list[int], images: Sequence[Image], described: Images):
        self.images, self.prompt_ids = tuple(images), _expanded(prompt_ids, images, described.token)
        grids = [image.grid for image in images]
        self.axes = axes_of(self.prompt_ids, described.token, grids, described.merge, "images")[0].numpy()
        self.shift = int(self.axes.max()) + 1 - len(self.prompt_ids)
        self.placed, self.keys, at = [], list(self.prompt_ids), 0
        for image in images:
            start = self.prompt_ids.index(described.token, at)
            self.placed.append(Placed(image, start))
            at = start + image.tokens
            self.keys[start:at] = [(image.digest, i) for i in range(image.tokens)]

    def for_trainers(self, count: int) -> dict[str, Tensor]:
        """What a trainer's forward takes with so many tokens of prompt and answer."""
        return {
            "pixel_values": torch.cat([image.pixels for image in self.images]),
            "image_grid_thw": torch.tensor([image.grid for image in self.images], dtype=torch.int64),
            "position_ids": torch.from_numpy(self.axes_until(count).copy()),
        }

    def axes_until(self, count: int) -> np.ndarray:
        """(3, count): behind the prompt a token has one place on all three."""
        behind = np.arange(self.axes.shape[1], count) + self.shift
        return np.concatenate((self.axes, np.broadcast_to(behind, (3, len(behind)))), 1)[:, :count]


def _expanded(ids: list[int], images: Sequence[Image], token: int) -> list[int]:
    """With as many tokens for each image as it has: one may stand for all."""
    found, left, at = [], list(images), 0
    while at < len(ids):
        if ids[at] != token:
            found.append(ids[at])
            at += 1
            continue
        if not left:
            raise ValueError(f"images: got {len(images)}, but the prompt has a place for one more at token {at}")
        count = left.pop(0).tokens
        run = next((n for n in range(count) if at + n == len(ids) or ids[at + n] != token), count)
        if run not in (1, count):
            raise ValueError(
                f"images: the prompt has {run} image tokens (id {token}) from token {at} on, expected 1 or the {count} "
                "of the image"
            )
        found += [token] * count
        at += run
    if left:
        raise ValueError(f"images: got {len(images)}, but the prompt has a place for {len(images) - len(left)}")
    return found


def ready(op: str, pixel_values: Tensor, image_grid_thw, described: Images) -> list[Image]:
    """Images of patches that are ready. TypeError, ValueError."""
    if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
        raise TypeError(f"{op}: pixel_values: got a {type(pixel_values).__name__}, expected a floating-point tensor")
    if pixel_values.dim() != 2 or pixel_values.shape[1] != described.width:
        got = tuple(pixel_values.shape)
        raise ValueError(f"{op}: pixel_values: got shape {got}, expected (patches, {described.width})")
    if isinstance(image_grid_thw, Tensor) and image_grid_thw.dim() == 1:
        image_grid_thw = image_grid_thw[None]
    grids = grids_of(op, image_grid_thw, described.merge)
    counts = list(map(patches, grids))
    if len(pixel_values) != sum(counts):
        raise ValueError(
            f"{op}: pixel_values: got {len(pixel_values)} patches, expected the {sum(counts)} of the grids"
        )
    return [Image.of(p, grid, described.merge) for p, grid in zip(pixel_values.split(counts), grids)]


class Rows(NamedTuple):
    """Rows begin .. end - 1 of an image stand at `at` and on among the tokens of a step."""

    image: Image
    begin: int
    end: int
    at: int


class Scene(NamedTuple):
    """What a step with tokens of prompts with images needs besides: (3, tokens) places, and whose rows stand where."""

    axes: np.ndarray
    rows: list[Rows]


def scene_of(plan: StepPlan) -> Scene | None:
    """None where all tokens have one place on all axes: those of decodes too, whose slots know the shift."""
    if not any(_is_placed(chunk) for chunk in plan.chunks):
        return None
    parts, rows, at = [], [], 0
    for chunk in plan.chunks:
        pictures = chunk.sequence.request.pictures
        if pictures is None:
            parts.append(np.broadcast_to(np.arange(chunk.start, chunk.end), (3, chunk.length)))
        else:
            parts.append(pictures.axes_until(chunk.end)[:, chunk.start :])
            for image, start in pictures.placed:
                begin, end = max(start, chunk.start), min(start + image.tokens, chunk.end)
                if begin < end:
                    rows.append(Rows(image, begin - start, end - start, at + begin - chunk.start))
        at += chunk.length
    return Scene(np.concatenate(parts, 1), rows)


def _is_placed(chunk: Chunk) -> bool:
    pictures = chunk.sequence.request.pictures
    return pictures is not None and chunk.start < len(pictures.prompt_ids)


# As callers give them


def taken(prompt: Mapping[str, Any], described: Images | None, processor: Any | None) -> tuple[Any, list[Image]]:
    """A prompt's text or token ids, and its images. TypeError or ValueError naming what is wrong."""
    if unknown := sorted(set(map(str, prompt)) - set(_FIELDS)):
        raise ValueError(
            f"prompt: got a dict with {', '.join(unknown)}, expected a list of token ids, or of {', '.join(_FIELDS)}"
        )
    given = [prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(given) != 1:
        raise ValueError(f"prompt: got {len(given)} of prompt and prompt_token_ids, expected one of them")
    images, pixels, grids = (prompt.get(name) for name in ("images", "pixel_values", "image_grid_thw"))
    if images is None and pixels is None:
        if grids is not None:
            raise ValueError("image_grid_thw: got one without pixel_values, expected both")
        return given[0], []
    if described is None:
        raise ValueError("images: this engine's model takes none, or runs in several processes")
    if pixels is not None:
        if images is not None or grids is None:
            raise ValueError("pixel_values: expected image_grid_thw with them, and no images")
        return given[0], ready("prompt", pixels, grids, described)
    if isinstance(images, str | bytes) or not isinstance(images, Sequence):
        raise TypeError(f"images: got a {type(images).__name__}, expected a list")
    found: list[Image] = []
    for i, image in enumerate(images):
        try:
            found += opened_images([image], described, processor)
        except (TypeError, ValueError) as error:
            raise type(error)(f"images[{i}]: {error}") from error
    return given[0], found


def opened_images(images: Sequence[Any], described: Images, processor: Any | None) -> list[Image]:
    """TypeError or ValueError on what is no image, and where no processor makes patches of them."""
    pictures = [opened(image) for image in images]
    if processor is None:
        raise ValueError(
            "this engine has no image processor (preprocessor_config.json beside the weights, or "
            "engine.image_processor): give pixel_values and image_grid_thw"
        )
    made = processor(images=pictures, return_tensors="pt")
    return ready("processor", made["pixel_values"], made["image_grid_thw"], described)


def opened(image: Any) -> Any:
    """An RGB image of PIL's, of one, a path, bytes, or a "data:" URI. TypeError or ValueError on what is none."""
    try:
        import PIL.Image
    except ImportError:
        raise ValueError("Pillow is not installed, which opens images: give pixel_values") from None
    if isinstance(image, PIL.Image.Image):
        return _checked(image)
    if isinstance(image, str) and image.startswith("data:"):
        image = _of_uri(image)
    elif isinstance(image, str | os.PathLike):
        if str(image).startswith(("http:", "https:")):
            raise ValueError("got a URL, expected a path, bytes or a data: URI: nothing is fetched")
        path = Path(image)
        if not path.is_file():
            raise ValueError(f"{str(image)[:80]!r} is no file")
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"got a file of {path.stat().st_size} bytes, expected at most {MOST_BYTES}")
        image = path.read_bytes()
    if not isinstance(image, bytes | bytearray):
        raise TypeError(f"got a {type(image).__name__}, expected a PIL image, a path, bytes or a data: URI")
    if len(image) > MOST_BYTES:
        raise ValueError(f"got {len(image)} bytes, expected at most {MOST_BYTES}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            return _checked(PIL.Image.open(io.BytesIO(image)))
    except PIL.UnidentifiedImageError:
        raise ValueError(f"the {len(image)} bytes are no image that is known") from None
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise ValueError(f"more pixels than allowed: {error}") from None
    except (OSError, SyntaxError) as error:  # as Pillow says of a broken file
        raise ValueError(f"a broken image: {error}") from None


def _checked(image: Any) -> Any:
    """Of no more pixels than allowed: looked at before they are decoded."""
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise ValueError(f"got {width} x {height} pixels, expected at most {MOST_PIXELS}")
    return image.convert("RGB")


def _of_uri(uri: str) -> bytes:
    head, comma, body = uri.partition(",")
    kind, *options = head.removeprefix("data:").split(";")
    if not comma or "base64" not in options:
        raise ValueError("got a data: URI that is not base64, expected data:image/png;base64,...")
    if kind.lower() not in TYPES:
        raise ValueError(f"got a data: URI of type {kind[:40]!r}, expected one of {', '.join(TYPES)}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"got a data: URI whose base64 is broken: {error}") from None
