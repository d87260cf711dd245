"""Videos of prompts: frames of files, as many as the model's own video processor asks for, within bounds; or frames
that have been taken already.

PyAV decodes. Files come as bytes alone, in a few containers that are told by their first bytes and in a few codecs, so
that nothing in them (a playlist, a reference to another file) can have anything else opened.
"""

import io
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vexact_ops.patch.description import Images

from ..extras import pip_line
from .images import Video, read, ready_videos

MOST_BYTES = 256 << 20
MOST_PIXELS = 16 << 20  # of one frame before it is resized
MOST_SAMPLED = 1 << 30  # pixels of all frames that are taken
MOST_FRAMES = 1 << 17  # of a file, taken or not
MOST_SECONDS = 30.0  # for decoding one
TYPES = ("video/mp4", "video/quicktime", "video/webm", "video/x-matroska")
_CODECS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4", "mjpeg")


class Film(NamedTuple):
    """Frames that were taken of a video, (frames, rows, columns, 3) uint8, which ones they are, and of how many.

    given   where somebody else took them: their metadata, and the frames are as they came
    """

    frames: np.ndarray | Tensor
    indices: list[int]
    total: float
    fps: float
    given: Mapping[str, Any] | None = None

    def metadata(self) -> dict[str, Any]:
        """As transformers has it."""
        if self.given is not None:
            return {**self.given, "frames_indices": list(self.indices)}
        _, height, width, _ = self.frames.shape
        about = {"total_num_frames": self.total, "fps": self.fps, "duration": self.total / self.fps}
        return {
            **about,
            "height": height,
            "width": width,
            "frames_indices": list(self.indices),
            "video_backend": "pyav",
        }

    def stamps(self, together: int) -> list[float]:
        """Seconds of each so many frames: the mean of the first's and the last's, which is repeated at the end."""
        indices = self.indices + [self.indices[-1]] * (-len(self.indices) % together)
        return [
            (indices[i] / self.fps + indices[i + together - 1] / self.fps) / 2 for i in range(0, len(indices), together)
        ]

    @property
    def sampled_fps(self) -> float:
        return len(self.indices) / self.total * self.fps


def opened_videos(
    videos: Sequence[Any], described: Images, processor: Any | None
) -> tuple[list[Video], list[list[float]]]:
    """Of a list of paths, bytes or data: URIs, or of frames with their metadata (see `taken`); and the seconds of what
    has tokens of its own in each. TypeError or ValueError on what is no video, and where no processor makes patches of
    them."""
    if described.video is None:
        raise ValueError("got some, expected none: this model's videos are not covered")
    if processor is None:
        raise ValueError(
            "this engine has no video processor (video_preprocessor_config.json beside the weights and torchvision "
            "installed, or engine.video_processor): give pixel_values_videos and video_grid_thw"
        )
    made = [_made(video, described, processor) for video in videos]
    return [video for video, _ in made], [seconds for _, seconds in made]


def _made(video: Any, described: Images, processor: Any) -> tuple[Video, list[float]]:
    if isinstance(video, tuple):
        film = taken(video)
    else:
        data = read(video, TYPES, MOST_BYTES, "frames and their metadata, ")
        film = decoded(data, lambda about: processor.sample_frames(_Metadata(about)))
    given = {"video_metadata": [film.metadata()], "do_sample_frames": False, "return_tensors": "pt"}
    made, together = processor(videos=[film.frames], **given), processor.temporal_patch_size
    seconds = None if described.frames_apart else [together / film.sampled_fps]
    (video,) = ready_videos("processor", made["pixel_values_videos"], made["video_grid_thw"], seconds, described)
    return video, film.stamps(together)


def taken(video: tuple) -> Film:
    """Of frames, (frames, 3, rows, columns) or (frames, rows, columns, 3), and transformers' metadata of them:
    total_num_frames, fps, frames_indices. TypeError, ValueError."""
    frames, about = video if len(video) == 2 else (None, None)
    if not isinstance(frames, Tensor | np.ndarray) or not isinstance(about, Mapping):
        kinds = ", ".join(type(part).__name__ for part in video)
        raise TypeError(f"got a tuple of ({kinds}), expected frames (a tensor or an array) and their metadata (a dict)")
    shape = tuple(frames.shape)
    if len(shape) != 4 or not shape[0] or 3 not in (shape[1], shape[3]):
        raise ValueError(f"got frames of shape {shape}, expected (frames, 3, rows, columns) or (.., rows, columns, 3)")
    rows, columns = shape[2:] if shape[1] == 3 else shape[1:3]
    _check_pixels(columns, rows)
    _check_taken(len(frames), rows * columns)
    total, fps, indices = (about.get(name) for name in ("total_num_frames", "fps", "frames_indices"))
    for name, value in (("total_num_frames", total), ("fps", fps)):
        if not isinstance(value, numbers.Real) or not value > 0:
            raise ValueError(f"got metadata with {name} {value!r}, expected a number above 0")
    places = [] if indices is None else [int(i) for i in indices]
    # transformers' processor writes the last one again into the very list where frames are made up to a multiple
    if len(places) < len(frames) or any(place != places[len(frames) - 1] for place in places[len(frames) :]):
        raise ValueError(f"got metadata with {len(places)} frames_indices, expected those of {len(frames)} frames")
    return Film(frames, places[: len(frames)], total, float(fps), about)


def evenly(
    about: Mapping[str, Any], fps: float | None = None, count: int | None = None, least: int = 4, most: int = 768
) -> list[int]:
    """Which frames of a video to take, the first and the last among them: `count`, or so many a second, an even number
    of them where there are as many. ValueError on no number above 0."""
    for name, value in (("fps", fps), ("nframes", count), ("min_frames", least), ("max_frames", most)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}: got {value!r}, expected a number above 0")
    total = about["total_num_frames"]
    wanted = total / about["fps"] * fps if count is None else count
    wanted = int(min(max(wanted, least) if count is None else wanted, most, total))
    return np.linspace(0, total - 1, max(wanted - wanted % 2, 1)).round().astype(int).tolist()


class _Metadata:
    """What sample_frames reads, by its names."""

    def __init__(self, about: Mapping[str, Any]):
        self.__dict__.update(about)


def decoded(data: bytes, sample: Callable[[Mapping[str, Any]], Any]) -> Film:
    """Those frames that `sample` chooses, told how many there are and how fast they go. ValueError on what is no video
    that is known, on a broken one, and on more than is allowed."""
    try:
        import av
    except ImportError:
        line = pip_line("video")
        raise ValueError(f"PyAV is not installed, which opens videos: {line}; or give pixel_values_videos") from None
    kind, end = _container(data), time.monotonic() + MOST_SECONDS
    allowed = {"codec_whitelist": ",".join(_CODECS), "protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), format=kind, container_options=allowed, metadata_errors="ignore") as container:
            if not container.streams.video:
                raise ValueError("there is no video in the file")
            stream = container.streams.video[0]
            _check_codec(stream)
            total = _count(container, stream, end)
            container.seek(0)
            fps = float(stream.average_rate or stream.guessed_rate or 24)
            size = {"height": stream.codec_context.height, "width": stream.codec_context.width}
            _check_pixels(size["width"], size["height"])
            chosen = sample({"total_num_frames": total, "fps": fps, "duration": total / fps, **size})
            indices = [int(i) for i in chosen]
            _check_taken(len(set(indices)), size["height"] * size["width"])
            return Film(_frames(container, stream, indices, end), indices, total, fps)
    except av.FFmpegError as error:
        raise ValueError(f"a broken video: {error}") from None


def _container(data: bytes) -> str:
    if data[4:8] == b"ftyp":
        return "mov"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    raise ValueError(f"the {len(data)} bytes are no video that is known, expected MP4, QuickTime, WebM or Matroska")


def _check_pixels(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise ValueError(f"got frames of {width} x {height} pixels, expected at most {MOST_PIXELS}")


def _check_taken(count: int, pixels: int) -> None:
    if count * pixels > MOST_SAMPLED:
        raise ValueError(f"got {count} frames to take, expected at most {MOST_SAMPLED} pixels of them")


def _check_codec(stream: Any) -> None:
    context = stream.codec_context
    name = None if context is None else context.name
    if name not in _CODECS:
        raise ValueError(f"a video of codec {name}, expected one of {', '.join(_CODECS)}")


def _count(container: Any, stream: Any, end: float) -> int:
    """Frames of the stream, by its packets: what a header says need not be so. Of a film that was cut without being
    coded again those before its beginning are there to decode others, and are no frames."""
    total = 0
    for packet in container.demux(stream):
        total += bool(packet.size) and not packet.is_discard
        if total > MOST_FRAMES:
            raise ValueError(f"got more than {MOST_FRAMES} frames")
        _check_time(end)
    if not total:
        raise ValueError("there are no frames in it")
    return total


def _frames(container: Any, stream: Any, indices: Sequence[int], end: float) -> np.ndarray:
    wanted, found = set(indices), {}
    for number, frame in enumerate(container.decode(stream)):
        if number in wanted:
            _check_pixels(frame.width, frame.height)
            found[number] = frame.to_ndarray(format="rgb24")
        if len(found) == len(wanted):
            break
        _check_time(end)
    if missing := wanted - found.keys():
        raise ValueError(f"a broken video: frame {min(missing)} cannot be decoded")
    if len({frame.shape for frame in found.values()}) > 1:
        raise ValueError("its frames are of several sizes, expected one")
    return np.stack([found[i] for i in indices])


def _check_time(end: float) -> None:
    if time.monotonic() > end:
        raise ValueError(f"decoding took more than {MOST_SECONDS:g} s")


def by_frames(text: str, described: Images, stamps: Sequence[list[float]], tokenizer: Any) -> str:
    """Where the parts of videos have tokens of their own: a text with one token for each whole video (between marks, or
    alone) has one for each part instead, between marks and behind its seconds. Others are as they are."""
    names = (described.begin, described.video, described.end)
    if not described.frames_apart or None in names:
        return text
    begin, video, end = tokenizer.convert_ids_to_tokens(list(names))
    pieces = text.split(video)
    if len(pieces) != len(stamps) + 1:  # as Pictures says
        return text
    found = pieces[0]
    for seconds, behind in zip(stamps, pieces[1:]):
        if found.endswith(begin) and behind.startswith(end):
            found, behind = found.removesuffix(begin), behind.removeprefix(end)
        found += "".join(f"<{second:.1f} seconds>{begin}{video}{end}" for second in seconds) + behind
    return found
