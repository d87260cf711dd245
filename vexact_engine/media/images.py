"""Images of prompts: as callers give them, made into what a model's encoder takes, and where they stand."""

import base64
import binascii
import hashlib
import io
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vexact_ops.patch.description import Images
from vexact_ops.patch.grids import Clip, Grid, Waiting, axes_of, grids_of, patches, tokens
from vexact_ops.patch.images import check_pixels, clips_of

from ..core.plan import Chunk, StepPlan

MOST_PIXELS = 64 << 20  # of one image before it is resized
MOST_BYTES = 64 << 20
TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # as Pillow calls them: others may start programs, or raise anything
_TEXT = -1  # for a token that stands for nothing
_FURTHEST = (1 << 24) - 1  # place that fp32 has exactly, and angles are computed of


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


@dataclass(frozen=True, eq=False)
class Video:
    """parts: each with tokens of its own in the prompt, its frames or itself; clips: how far those lie apart in time;
    seconds: what was given of that."""

    grid: Grid
    parts: tuple[Image, ...]
    clips: tuple[Clip, ...]
    seconds: float | None


class Placed(NamedTuple):
    """An image of a prompt, or a part of a video, and its first token there."""

    image: Image
    start: int

    @property
    def end(self) -> int:
        return self.start + self.image.tokens


class Pictures:
    """The images and videos of one prompt.

    prompt_ids   with as many tokens for each as it has rows
    axes         (3, prompt) int64: every token's frame, row and column
    shift        what is added to the places of tokens behind the prompt
    keys         what the prefix cache knows tokens by: their ids, and of an image its content and its pace
    """

    def __init__(self, prompt_ids: list[int], images: Sequence[Image], described: Images, videos: Sequence[Video] = ()):
        self.images, self.videos, merge = tuple(images), tuple(videos), described.merge
        clips = [(part, clip) for video in videos for part, clip in zip(video.parts, video.clips)]
        queues = {described.token: ("image", [(image, Clip(image.grid)) for image in images])}
        if described.video is not None:
            queues[described.video] = "video", clips
        self.prompt_ids, self.placed, paces = _expanded(prompt_ids, queues)
        waiting = {token: Waiting(kind, [clip for _, clip in queue]) for token, (kind, queue) in queues.items()}
        # A text behind the prompt goes on as a trainer counts it, who sees both as one: behind a video whose frames lie
        # far apart that is not behind the largest position, where transformers' generate goes on.
        axes = axes_of([*self.prompt_ids, _TEXT], waiting, merge, "images").numpy()
        if axes.min() < -_FURTHEST or axes.max() > _FURTHEST:
            places = f"places from {axes.min()} to {axes.max()}, expected at most 2^24 - 1 in magnitude"
            raise ValueError(f"videos: their frames lie so far apart (second_per_grid_ts) that tokens have {places}")
        self.axes, self.shift = axes[:, :-1], int(axes[0, -1]) - len(self.prompt_ids)
        self.keys = list(self.prompt_ids)
        for (image, start), pace in zip(self.placed, paces):
            self.keys[start : start + image.tokens] = [(image.digest, pace, i) for i in range(image.tokens)]

    def for_trainers(self, count: int) -> dict[str, Tensor]:
        """What a trainer's forward takes with so many tokens of prompt and answer."""
        return {**self.given(), "position_ids": torch.from_numpy(self.axes_until(count).copy())}

    def given(self) -> dict[str, Tensor]:
        """As a prompt may give them."""
        found = {}
        if self.images:
            found["pixel_values"] = torch.cat([image.pixels for image in self.images])
            found["image_grid_thw"] = torch.tensor([image.grid for image in self.images], dtype=torch.int64)
        if self.videos:
            found["pixel_values_videos"] = torch.cat([part.pixels for video in self.videos for part in video.parts])
            found["video_grid_thw"] = torch.tensor([video.grid for video in self.videos], dtype=torch.int64)
            if self.videos[0].seconds is not None:
                found["second_per_grid_ts"] = torch.tensor(
                    [video.seconds for video in self.videos], dtype=torch.float32
                )
        return found

    def axes_until(self, count: int) -> np.ndarray:
        """(3, count): behind the prompt a token has one place on all three."""
        behind = np.arange(self.axes.shape[1], count) + self.shift
        return np.concatenate((self.axes, np.broadcast_to(behind, (3, len(behind)))), 1)[:, :count]


def _expanded(
    ids: list[int], queues: Mapping[int, tuple[str, list[tuple[Image, Clip]]]]
) -> tuple[list[int], list[Placed], list[float]]:
    """With as many tokens for each image as it has (one may stand for all), where they stand, and their pace."""
    left = {token: list(queue) for token, (_, queue) in queues.items()}
    found: list[int] = []
    placed: list[Placed] = []
    paces, at = [], 0
    while at < len(ids):
        token = ids[at]
        if token not in queues:
            found.append(token)
            at += 1
            continue
        kind, queue = queues[token]
        if not left[token]:
            raise ValueError(f"{kind}s: got {len(queue)}, but the prompt has a place for one more at token {at}")
        image, clip = left[token].pop(0)
        run = next((n for n in range(image.tokens) if at + n == len(ids) or ids[at + n] != token), image.tokens)
        if run not in (1, image.tokens):
            what = f"the prompt has {run} {kind} tokens (id {token}) from token {at} on"
            raise ValueError(f"{kind}s: {what}, expected 1 or the {image.tokens} of the {kind}")
        placed.append(Placed(image, len(found)))
        paces.append(clip.interval)
        found += [token] * image.tokens
        at += run
    for token, (kind, queue) in queues.items():
        if left[token]:
            there = len(queue) - len(left[token])
            raise ValueError(f"{kind}s: got {len(queue)}, but the prompt has a place for {there}")
    return found, placed, paces


def ready(op: str, pixel_values: Tensor, grid_thw, described: Images, kind: str = "image") -> list[Image]:
    """Images, or whole videos, of patches that are ready. TypeError, ValueError."""
    name = "pixel_values" if kind == "image" else "pixel_values_videos"
    check_pixels(op, pixel_values, described.width, name)
    if isinstance(grid_thw, Tensor) and grid_thw.dim() == 1:
        grid_thw = grid_thw[None]
    grids = grids_of(op, grid_thw, described.merge, kind)
    counts = list(map(patches, grids))
    if len(pixel_values) != sum(counts):
        raise ValueError(f"{op}: {name}: got {len(pixel_values)} patches, expected the {sum(counts)} of the grids")
    return [Image.of(p, grid, described.merge) for p, grid in zip(pixel_values.split(counts), grids)]


def ready_videos(op: str, pixel_values: Tensor, grid_thw, seconds: Any, described: Images) -> list[Video]:
    """As `ready`, and cut into what has tokens of its own."""
    if described.video is None:
        raise ValueError(f"{op}: pixel_values_videos: got some, expected none: this model's videos are not covered")
    whole = ready(op, pixel_values, grid_thw, described, "video")
    paces = [None] * len(whole) if seconds is None else [float(second) for second in seconds]
    clips = clips_of(described, op, [video.grid for video in whole], seconds)
    found = []
    for video, pace in zip(whole, paces):
        (t, h, w), parts = video.grid, (video,)
        if described.frames_apart:
            parts = tuple(Image.of(frame, (1, h, w), described.merge) for frame in video.pixels.split(h * w))
        own, clips = clips[: len(parts)], clips[len(parts) :]
        found.append(Video((t, h, w), parts, tuple(own), pace))
    return found


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


def opened_images(images: Sequence[Any], described: Images, processor: Any | None) -> list[Image]:
    """TypeError or ValueError on what is no image, and where no processor makes patches of them. One of PIL's goes to
    the processor in its own mode: what becomes of transparency, a trainer's processor decides too."""
    pictures = [_bounded(image) if is_of_pil(image) else opened(image) for image in images]
    if processor is None:
        raise ValueError(
            "this engine has no image processor (preprocessor_config.json, or one in processor_config.json, beside the "
            "weights; or engine.image_processor): give pixel_values and image_grid_thw"
        )
    made = processor(images=pictures, return_tensors="pt")
    return ready("processor", made["pixel_values"], made["image_grid_thw"], described)


def opened(image: Any) -> Any:
    """An RGB image of PIL's, of one, a path, bytes, or a "data:" URI; a file's is turned as its EXIF says, as
    transformers' load_image has it. TypeError or ValueError on what is none."""
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError:
        raise ValueError("Pillow is not installed, which opens images: give pixel_values") from None
    if isinstance(image, PIL.Image.Image):
        return _bounded(image).convert("RGB")
    image = read(image, TYPES, MOST_BYTES, "a PIL image, ")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            found = _bounded(PIL.Image.open(io.BytesIO(image), formats=_FORMATS))
            return PIL.ImageOps.exif_transpose(found).convert("RGB")
    except PIL.UnidentifiedImageError:
        raise ValueError(
            f"the {len(image)} bytes are no image that is known, expected {', '.join(_FORMATS)}, or an image of PIL's"
        ) from None
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise ValueError(f"more pixels than allowed: {error}") from None
    except (OSError, SyntaxError) as error:  # as Pillow says of a broken file
        raise ValueError(f"a broken image: {error}") from None


def is_of_pil(image: Any) -> bool:
    """Whether it is an image of Pillow's, which need not be installed."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(image, pil.Image)


def _bounded(image: Any) -> Any:
    """Of some pixels, and no more than allowed: looked at before they are decoded."""
    width, height = image.size
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"got {width} x {height} pixels, expected 1 to {MOST_PIXELS}")
    return image


def read(given: Any, types: Sequence[str], most: int, otherwise: str = "") -> bytes:
    """The bytes of a path, of bytes, or of a data: URI of one of these types, no more than so many. TypeError or
    ValueError on what is none of these.

    otherwise   what else the caller takes, for messages
    """
    if isinstance(given, str) and given.startswith("data:"):
        given = _of_uri(given, types)
    elif isinstance(given, str | os.PathLike):
        if str(given).startswith(("http:", "https:")):
            raise ValueError("got a URL, expected a path, bytes or a data: URI: nothing is fetched")
        path = Path(given)
        if not _is_file(path):
            raise ValueError(f"{str(given)[:80]!r} is no file")
        if path.stat().st_size > most:
            raise ValueError(f"got a file of {path.stat().st_size} bytes, expected at most {most}")
        given = path.read_bytes()
    if not isinstance(given, bytes | bytearray):
        raise TypeError(f"got a {type(given).__name__}, expected {otherwise}a path, bytes or a data: URI")
    if len(given) > most:
        raise ValueError(f"got {len(given)} bytes, expected at most {most}")
    return bytes(given)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name of one: base64 without "data:", say
        return False


def _of_uri(uri: str, types: Sequence[str]) -> bytes:
    """What a data: URI of one of these types holds. ValueError."""
    head, comma, body = uri.partition(",")
    kind, *options = head.removeprefix("data:").split(";")
    if not comma or "base64" not in options:
        raise ValueError(f"got a data: URI that is not base64, expected data:{types[0]};base64,...")
    if kind.lower() not in types:
        raise ValueError(f"got a data: URI of type {kind[:40]!r}, expected one of {', '.join(types)}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"got a data: URI whose base64 is broken: {error}") from None
