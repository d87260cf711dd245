"""Prompts with images and videos, as callers give them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vexact_ops.patch.description import Images

from ..request import encoded, token_ids
from ..weights.processors import Processors
from .images import Image, Pictures, Video, opened_images, ready, ready_videos
from .videos import by_frames, opened_videos

_IMAGES = ("images", "pixel_values", "image_grid_thw")
_PATCHES = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")
_FIELDS = ("prompt", "prompt_token_ids", *_IMAGES, "videos", *_PATCHES)


class Taken(NamedTuple):
    """Of a prompt its text or token ids, its images and its videos, and when each part of these is seen, in seconds,
    where the text has to say so."""

    given: Any
    images: list[Image]
    videos: list[Video]
    stamps: list[list[float]]


def taken(prompt: Mapping[str, Any], described: Images | None, processors: Processors) -> Taken:
    """TypeError or ValueError naming what is wrong."""
    if unknown := sorted(set(map(str, prompt)) - set(_FIELDS)):
        raise ValueError(
            f"prompt: got a dict with {', '.join(unknown)}, expected a list of token ids, or of {', '.join(_FIELDS)}"
        )
    text = [prompt[name] for name in ("prompt", "prompt_token_ids") if prompt.get(name) is not None]
    if len(text) != 1:
        raise ValueError(f"prompt: got {len(text)} of prompt and prompt_token_ids, expected one of them")
    given = {name: prompt[name] for name in _FIELDS[2:] if prompt.get(name) is not None}
    for pixels, *others in (("pixel_values", "image_grid_thw"), _PATCHES):
        if pixels not in given and (other := next((name for name in others if name in given), None)):
            raise ValueError(f"{other}: got one without {pixels}, expected both")
    if not given:
        return Taken(text[0], [], [], [])
    if described is None:
        kind = "videos" if given.keys() <= {"videos", *_PATCHES} else "images"
        raise ValueError(f"{kind}: this engine's model takes none")
    return Taken(text[0], _images(given, described, processors.images), *_videos(given, described, processors.videos))


def _images(given: Mapping[str, Any], described: Images, processor: Any | None) -> list[Image]:
    images = given.get("images")
    if "pixel_values" in given:
        if images is not None or "image_grid_thw" not in given:
            raise ValueError("pixel_values: expected image_grid_thw with them, and no images")
        return ready("prompt", given["pixel_values"], given["image_grid_thw"], described)
    if images is None:
        return []
    return [
        image for i, one in _each("images", images) for image in _named(i, opened_images, [one], described, processor)
    ]


def _videos(
    given: Mapping[str, Any], described: Images, processor: Any | None
) -> tuple[list[Video], list[list[float]]]:
    videos = given.get("videos")
    if "pixel_values_videos" in given:
        if videos is not None or "video_grid_thw" not in given:
            raise ValueError("pixel_values_videos: expected video_grid_thw with them, and no videos")
        return ready_videos("prompt", *(given.get(name) for name in _PATCHES), described), []
    if videos is None:
        return [], []
    opened = [_named(name, opened_videos, [one], described, processor) for name, one in _each("videos", videos)]
    return [video for found, _ in opened for video in found], [stamps for _, found in opened for stamps in found]


def _each(name: str, given: Any) -> list[tuple[str, Any]]:
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise TypeError(f"{name}: got a {type(given).__name__}, expected a list")
    return [(f"{name}[{i}]", one) for i, one in enumerate(given)]


def _named(name: str, function, *args):
    try:
        return function(*args)
    except (TypeError, ValueError) as error:  # or a kind of them that is made of something else than a text
        raise (TypeError if isinstance(error, TypeError) else ValueError)(f"{name}: {error}") from error
    except Exception as error:  # of a processor's, or of a file that is decoded there
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error


def read_prompt(
    prompt: Any, text: Any, described: Images | None, processors: Processors
) -> tuple[list[int] | Any, Pictures | None]:
    """Token ids of a prompt as callers give it, and its images; ids of one without images are not looked at yet.
    TypeError or ValueError naming what is wrong."""
    if not isinstance(prompt, Mapping):
        return encoded(prompt, text), None
    given, images, videos, stamps = taken(prompt, described, processors)
    if stamps and isinstance(given, str) and text is not None:
        given = by_frames(given, described, stamps, text.tokenizer)
    ids = token_ids(encoded(given, text))
    if not images and not videos:
        return ids, None
    pictures = Pictures(ids, images, described, videos)
    return pictures.prompt_ids, pictures
