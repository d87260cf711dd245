"""verl's data with images and videos, opened without qwen-vl-utils.

    data.custom_cls.path=pkg://vexact_engine.verl.data
    data.custom_cls.name=Media

verl's own class resizes what it opens by qwen-vl-utils, which imports torchvision. This one leaves sizes to the model's
processor, opens images by Pillow and videos by PyAV (extra `video`) within the engine's bounds, fetches nothing, and
says at the start what is missing, as the manager of agents.py does of verl's own class. Columns, and what stands in
them, are verl's: of videos a path or bytes with `fps`, `nframes`, `min_frames` and `max_frames` beside it, or frames in
a list with their `sample_fps`. Sizes beside one, and the seconds where a video begins and ends, are refused.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from . import check_versions

check_versions()
import numpy as np
import torch
from verl.utils.dataset.rl_dataset import RLHFDataset

from ..media.images import opened, read
from ..media.videos import MOST_BYTES, TYPES, Film, decoded, evenly
from ..weights.processors import why_no_processor

FRAMES_PER_SECOND = 2.0  # where nothing is said beside a video, as qwen-vl-utils has it
_CHOICE = {"fps": "fps", "nframes": "count", "min_frames": "least", "max_frames": "most"}
_SIZES = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")  # qwen-vl-utils' own
_SECONDS = ("video_start", "video_end")


def without_qwen_vl_utils() -> str | None:
    """What to do where verl's own data cannot open images and videos; None where it can."""
    if find_spec("qwen_vl_utils") is not None:
        return None
    return (
        "qwen-vl-utils, by which verl's own data opens images and videos, is not installed: `pip install "
        "qwen-vl-utils`, or data.custom_cls.path=pkg://vexact_engine.verl.data data.custom_cls.name=Media"
    )


def check_data(config: Any) -> None:
    """Of verl's whole config, before any prompt is read: RuntimeError where its data has images or videos, as far as
    its parquet files are here, and verl would have no processor for them or could not open them."""
    data, model = config.data, config.actor_rollout_ref.model
    if (data.get("custom_cls") or {}).get("path"):
        return
    given = data.train_files
    files = [given] if isinstance(given, str) else list(given or ())
    keys = [data.get("image_key", "images"), data.get("video_key", "videos")]
    if not (kinds := [key for key in keys if any(_has(str(file), key) for file in files)]):
        return
    path = str(model.get("tokenizer_path") or model.path)
    trusted = bool(model.get("trust_remote_code", False))
    why = why_no_processor(path, trusted) if Path(path).is_dir() else None  # of a hub's model verl's log says it
    if why := why or without_qwen_vl_utils():
        raise RuntimeError(f"vexact: data: it has {' and '.join(kinds)}: {why}")


def _has(file: str, key: str) -> bool:
    """Whether anything stands in a column of a parquet file. What is not told by the file's statistics is read."""
    if not file.endswith(".parquet") or not Path(file).is_file():
        return False
    from pyarrow.parquet import ParquetFile

    parquet = ParquetFile(file)
    for group in range(parquet.num_row_groups):
        about = parquet.metadata.row_group(group)
        for leaf in map(about.column, range(about.num_columns)):
            if leaf.path_in_schema.split(".")[0] != key:
                continue
            told = leaf.statistics
            if told is not None and told.has_null_count:
                there = told.null_count < leaf.num_values
            else:
                there = any(parquet.read_row_group(group, columns=[key])[key].to_pylist())
            if there:
                return True
    return False


class Media(RLHFDataset):
    """raises RuntimeError, as it is made, where it has images or videos and there is no processor for them"""

    def maybe_filter_out_long_prompts(self, dataframe=None):
        if self.processor is None and (kinds := self._kinds(dataframe)):
            path, trusted = self.tokenizer.name_or_path, bool(self.config.get("trust_remote_code", False))
            why = why_no_processor(path, trusted) or "verl's log has the reason"
            raise RuntimeError(f"vexact: data: it has {' and '.join(kinds)}, but no processor for them: {why}")
        return super().maybe_filter_out_long_prompts(dataframe)

    def _kinds(self, dataframe) -> list[str]:
        keys = [key for key in (self.image_key, self.video_key) if key in dataframe.column_names]
        return [key for key in keys if any(value is not None and len(value) for value in dataframe[key])]

    @classmethod
    def _process_multi_modal_info(cls, messages, image_patch_size, config):
        contents = [message.get("content") for message in messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        images = [_named(image, part) for part in parts if part.get("type") == "image"]
        videos = [_named(video, part) for part in parts if part.get("type") == "video"]
        return images or None, videos or None, cls._extract_audio_info(messages)


def _named(function, part: Mapping[str, Any]):
    for names, mend in (
        (_SIZES, "sizes are the model's processor's to choose (preprocessor_config.json)"),
        (_SECONDS, "give the frames between them, or a file that is cut"),
    ):
        if given := next((name for name in names if part.get(name) is not None), None):
            raise ValueError(f"vexact: data: {part['type']}: {given}: got {part[given]!r}, expected none: {mend}")
    try:
        return function(part)
    except (TypeError, ValueError) as error:
        raise type(error)(f"vexact: data: {part['type']}: {error}") from error


def _local(given: Any) -> Any:
    """A path of a file: URI; else what it is."""
    if isinstance(given, str) and given.startswith("file:"):
        return unquote(urlsplit(given).path)
    return given


def image(part: Mapping[str, Any]) -> Any:
    """An RGB image of PIL's, of a part of a message."""
    given = next((part[name] for name in ("image", "bytes", "path") if part.get(name) is not None), None)
    return opened(_local(given))


def video(part: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """(frames, 3, rows, columns) uint8 as a tensor, and transformers' metadata of them, as verl hands both on."""
    given = next((part[name] for name in ("video", "bytes", "path") if part.get(name) is not None), None)
    if isinstance(given, Sequence) and not isinstance(given, str | bytes):
        film = _of_frames(given, part.get("sample_fps"))
    else:
        choice = {name: part[key] for key, name in _CHOICE.items() if part.get(key) is not None}
        if not choice.keys() & {"fps", "count"}:
            choice["fps"] = FRAMES_PER_SECOND
        film = decoded(read(_local(given), TYPES, MOST_BYTES), lambda about: evenly(about, **choice))
    return torch.from_numpy(film.frames).permute(0, 3, 1, 2).contiguous(), film.metadata()


def _of_frames(frames: Sequence[Any], fps: float | None) -> Film:
    if not frames:
        raise ValueError("got a list without frames, expected images")
    pictures = [np.asarray(opened(_local(frame))) for frame in frames]
    if len({picture.shape for picture in pictures}) > 1:
        raise ValueError("its frames are of several sizes, expected one")
    count = len(pictures)
    return Film(np.stack(pictures), list(range(count)), count, FRAMES_PER_SECOND if fps is None else float(fps))
