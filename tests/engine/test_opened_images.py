"""Images of files, before anything is computed: how they stand, what is refused, and where their processor is."""

import base64
import io
import json
import struct
import zlib

import pytest

from vexact_engine.media import images as opening
from vexact_engine.weights.processors import load_processors


def png(width: int, height: int) -> bytes:
    """A file that says to be so large, and holds nothing."""
    found = b"\x89PNG\r\n\x1a\n"
    for name, data in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b""),
    ):  # fmt: skip
        found += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return found


def test_bombs_are_refused_before_they_are_decoded():
    pytest.importorskip("PIL.Image")
    for side, said in (
        (9_000, "got 9000 x 9000 pixels, expected 1 to 67108864"),
        (20_000, "more pixels than allowed"),
    ):
        with pytest.raises(ValueError, match=said):
            opening.opened(png(side, side))
    with pytest.raises(ValueError, match="a broken image"):
        opening.opened(png(60, 60))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_photograph_stands_as_its_camera_was_held(kind):
    """As transformers' load_image turns it, which opens a trainer's. Who gives one of PIL's has turned it, or not."""
    image_of = pytest.importorskip("PIL.Image")
    from transformers.image_utils import load_image

    picture = image_of.frombytes("RGB", (24, 16), bytes(i * 7 % 256 for i in range(24 * 16 * 3)))
    (exif := image_of.Exif())[0x0112] = 6  # Orientation: by a quarter
    picture.save(memory := io.BytesIO(), kind, exif=exif)
    found, raw = opening.opened(memory.getvalue()), memory.getvalue()
    assert found.size == (16, 24) and found.tobytes() == load_image(base64.b64encode(raw).decode()).tobytes()
    assert opening.opened(image_of.open(memory)).size == (24, 16)
    if kind == "WEBP":  # of the others Pillow passes it over
        with pytest.raises(ValueError, match="a broken image: not a TIFF file"):
            opening.opened(raw.replace(b"MM\0*", b"MM\0?"))


def test_a_processor_is_found_where_transformers_saves_it(tmp_path):
    """Its version 5 saves a whole processor as one file, older ones each part in its own."""
    pytest.importorskip("PIL")
    part = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 5}
    whole, own = tmp_path / "processor_config.json", tmp_path / "preprocessor_config.json"
    for file, said in ((whole, {"image_processor": part}), (own, part)):
        file.write_text(json.dumps(said))
        assert load_processors(tmp_path, "here").images.patch_size == 5
        file.unlink()
    assert load_processors(tmp_path, "here").images is None
    whole.write_text("{}")
    assert load_processors(tmp_path, "here").images is None
    whole.write_text("{")
    with pytest.raises(ValueError, match=r"^weights: .*/processor_config.json is not JSON"):
        load_processors(tmp_path, "here")
