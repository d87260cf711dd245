"""verl's data as vexact_engine.verl.data opens it: images and videos as they are, and at the start what is missing."""

import importlib.util
import io
import json

import pytest
import torch
from omegaconf import OmegaConf

from vexact_engine.verl.data import Media, check_data
from vexact_engine.weights.processors import why_no_processor

from . import pictures
from .models import make_model

TORCHVISION = importlib.util.find_spec("torchvision") is not None


def made(folder, model, trusted=True, **changes):
    from verl.utils import hf_processor, hf_tokenizer

    config = OmegaConf.create({"filter_overlong_prompts": False, "trust_remote_code": trusted, **changes})
    file = pictures.make_prompts(folder / "data", 5)
    config["cache_dir"] = str(folder / "cache")
    return Media(
        str(file), hf_tokenizer(str(model)), config, processor=hf_processor(str(model), trust_remote_code=trusted)
    )


def opened(dataset, index):
    messages = dataset[index]["raw_prompt"]
    return Media._process_multi_modal_info(messages, 4, dataset.config)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return pictures.make_model("qwen3_vl", tmp_path_factory.mktemp("model") / "qwen3_vl")


def test_images_and_videos_come_as_they_are(model, tmp_path):
    dataset = made(tmp_path, model)
    images, videos, audios = opened(dataset, 1)
    assert [image.mode for image in images] == ["RGB", "RGB"] and videos is None and audios is None
    assert opened(dataset, 2) == (None, None, None)
    images, ((frames, about),), _ = opened(dataset, 3)
    assert len(images) == 1 and frames.dtype == torch.uint8 and frames.shape[:2] == (4, 3)
    assert about["frames_indices"] == [0, 1, 2, 3] and about["total_num_frames"] == 4 and about["fps"] == 1.5
    processor = dataset.processor
    made_of = processor(text=["<|video_pad|>"], videos=[frames], video_metadata=[about], do_sample_frames=False)
    assert made_of["video_grid_thw"].tolist() == [[2, frames.shape[2] // 4, frames.shape[3] // 4]]
    kept = made(tmp_path / "short", model, filter_overlong_prompts=True, max_prompt_length=60)
    assert 0 < len(kept) < len(dataset) == 5  # by what they become, pictures and films too


def message(**part):
    return [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]


def test_what_is_wrong_with_one_is_said(tmp_path):
    config = OmegaConf.create({})
    for part, said in (
        ({"type": "image", "image": str(tmp_path / "none.png")}, "vexact: data: image: '.*none.png' is no file"),
        ({"type": "image", "image": "https://a.test/b.png"}, "vexact: data: image: got a URL"),
        ({"type": "image", "bytes": b"no"}, "vexact: data: image: the 2 bytes are no image"),
        ({"type": "image", "image": pictures.picture(1, 0), "max_pixels": 64}, "image: max_pixels: got 64"),
        ({"type": "video", "video": [pictures.picture(1, 0)], "video_start": 2}, "video: video_start: got 2"),
        ({"type": "video", "video": []}, "vexact: data: video: got a list without frames"),
        ({"type": "video", "video": [pictures.picture(1, 0), pictures.picture(4, 0)]}, "frames are of several sizes"),
        ({"type": "video", "video": "https://a.test/b.mp4"}, "vexact: data: video: got a URL"),
    ):
        with pytest.raises(ValueError, match=said):
            Media._process_multi_modal_info(message(**part), 4, config)
    for name in ("max_pixels", "video_end"):  # of a column in which others have one
        Media._process_multi_modal_info(message(type="image", image=pictures.picture(1, 0), **{name: None}), 4, config)


def test_files_of_videos(tmp_path):
    av, np = pytest.importorskip("av", reason="PyAV is not installed (extra video)"), pytest.importorskip("numpy")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
        for i in range(20):
            frame = av.VideoFrame.from_ndarray(np.full((16, 24, 3), 12 * i, np.uint8), format="rgb24")
            for packet in (*stream.encode(frame), *(stream.encode() if i == 19 else ())):
                container.mux(packet)
    path = tmp_path / "a.mp4"
    path.write_bytes(file.getvalue())
    for given, indices in (
        ({"video": f"file://{path}"}, [0, 3, 5, 8, 11, 14, 16, 19]),  # two a second
        ({"bytes": path.read_bytes(), "fps": 1}, [0, 6, 13, 19]),
        ({"video": str(path), "nframes": 2}, [0, 19]),
        ({"video": str(path), "fps": 5, "max_frames": 6}, [0, 4, 8, 11, 15, 19]),
    ):
        _, ((frames, about),), _ = Media._process_multi_modal_info(message(type="video", **given), 4, {})
        assert frames.shape == (len(indices), 3, 16, 24) and about["frames_indices"] == indices
        assert (about["total_num_frames"], about["fps"]) == (20, 5)
    with pytest.raises(ValueError, match="vexact: data: video: fps: got -1, expected a number above 0"):
        Media._process_multi_modal_info(message(type="video", video=str(path), fps=-1), 4, {})


@pytest.mark.skipif(TORCHVISION, reason="torchvision is installed: nothing is missing")
def test_without_torchvision_a_run_does_not_begin(model, tmp_path):
    """A folder as a hub has it, whose processor is transformers' own."""
    bare = tmp_path / "model"
    bare.mkdir()
    for file in model.iterdir():
        (bare / file.name).write_bytes(file.read_bytes())
    config = json.loads((bare / "preprocessor_config.json").read_text())
    del config["auto_map"]
    (bare / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(RuntimeError, match=r"vexact: data: it has images and videos, .*[Tt]orchvision") as refused:
        made(tmp_path, bare, trusted=False)
    assert "pip install torchvision" in str(refused.value) and str(bare) in str(refused.value)
    with pytest.raises(RuntimeError, match=r"vexact: data: it has images and videos: .*pip install torchvision"):
        check_data(whole(tmp_path / "data", bare))
    assert why_no_processor(str(model), trust_remote_code=True) is None
    assert "there is a tokenizer and no processor" in why_no_processor(str(make_model("qwen3", tmp_path / "text")))


def whole(folder, model, kinds=pictures.KINDS, **data):
    """verl's config, as far as it is read."""
    data["train_files"] = [str(pictures.make_prompts(folder, 5, kinds))]
    return OmegaConf.create(
        {"data": data, "actor_rollout_ref": {"model": {"path": str(model), "trust_remote_code": True}}}
    )


@pytest.mark.skipif(importlib.util.find_spec("qwen_vl_utils") is not None, reason="qwen-vl-utils is installed")
def test_without_qwen_vl_utils_a_run_does_not_begin(model, tmp_path):
    with pytest.raises(RuntimeError, match=r"it has images and videos: qwen-vl-utils, .*`pip install qwen-vl-utils`"):
        check_data(whole(tmp_path, model))
    with pytest.raises(RuntimeError, match="it has videos: qwen-vl-utils"):
        check_data(whole(tmp_path, model, [(0, 1), (0, 0)]))
    check_data(whole(tmp_path, model, [(0, 0)]))  # columns in which nothing stands
    check_data(whole(tmp_path, model, image_key="image", video_key="video"))
    check_data(whole(tmp_path, model, custom_cls={"path": "pkg://vexact_engine.verl.data", "name": "Media"}))
