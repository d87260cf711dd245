"""What makes patches of images and videos: transformers' own of a model's directory."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from .config import explain, quiet


class Processors(NamedTuple):
    """None: there is none."""

    images: Any = None
    videos: Any = None


NONE = Processors()


def load_processors(path: Path, name: str) -> Processors:
    """Each of a file of its own, or of the one that transformers 5 saves both in. Of videos there is none without
    torchvision. ValueError where one cannot be made: the directory's own Python does not run."""
    from transformers import AutoImageProcessor
    from transformers.utils import is_torchvision_available

    images = AutoImageProcessor if _has(path, "preprocessor_config.json", "image_processor") else None
    videos = None
    if is_torchvision_available() and _has(path, "video_preprocessor_config.json", "video_processor"):
        from transformers import AutoVideoProcessor as videos
    with quiet():
        try:
            made = [kind and kind.from_pretrained(str(path), trust_remote_code=False) for kind in (images, videos)]
        except Exception as error:
            raise explain(name, error) from error
    return Processors(*made)


_MENDS = (
    "Processors of images and videos want Pillow, and torchvision of torch's own release and build: `pip install "
    "torchvision`, beside a torch for CPUs `pip install torchvision --index-url https://download.pytorch.org/whl/cpu`"
)


def why_no_processor(path: str, trust_remote_code: bool = False) -> str | None:
    """Of a directory of a model of images: what keeps transformers from making its whole processor, and what mends it;
    None where nothing does."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    with quiet():
        try:
            made = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:
            return f"{path}: {' '.join(str(error).split())[:300]}. {_MENDS}"
    if isinstance(made, PreTrainedTokenizerBase):
        return f"{path}: there is a tokenizer and no processor (preprocessor_config.json, processor_config.json)"
    return None


def _has(path: Path, own: str, part: str) -> bool:
    """Whether a directory has a processor: as a file, or as a part of that of all."""
    whole = path / "processor_config.json"
    if (path / own).is_file() or not whole.is_file():
        return (path / own).is_file()
    try:
        found = json.loads(whole.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"weights: {whole} is not JSON: {error}") from error
    return isinstance(found, dict) and part in found
