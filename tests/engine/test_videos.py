"""Videos of prompts that are files: frames are those that the processor asks for, log-probabilities are the trainer's,
and what is wrong with one is said of its request alone."""

import base64
import copy
import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_models import byte_tokenizer
from test_images import CONFIG, PARAMS, TEMPLATE, WIDTH, check, same

import vexact_ops as vx
from vexact_engine import Engine
from vexact_engine.media import videos
from vexact_ops.patch.description import Images

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
import image_models

sys.path.pop(0)
av = pytest.importorskip("av", reason="PyAV is not installed (extra video)")
FRAMES, FPS = 13, 5


def movie(kind="mp4", codec="mpeg4", width=24, height=16, frames=FRAMES, pixels="yuv420p", cut=0):
    """A file whose frames grow brighter. cut: so many at its beginning are not to be shown."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, pixels
        for i in range(frames):
            picture = np.full((height, width, 3), 20 * i % 256, np.uint8)
            for packet in (
                *stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")),
                *(stream.encode() if i == frames - 1 else ()),
            ):
                for time in ("pts", "dts"):
                    setattr(packet, time, getattr(packet, time) - round(cut / FPS / packet.time_base))
                container.mux(packet)
    return file.getvalue()


MOVIE = movie()
FRAMES_TAKEN = torch.zeros(4, 3, 16, 24, dtype=torch.uint8)
ABOUT = {"total_num_frames": FRAMES, "fps": FPS, "frames_indices": [0, 4, 8, 12]}


class Processor:
    """Cuts frames into patches as Qwen2-VL's does, without resizing: transformers' own wants torchvision."""

    temporal_patch_size = 2

    def sample_frames(self, metadata):
        return np.linspace(0, metadata.total_num_frames - 1, int(metadata.duration / 0.6)).round().astype(int)

    def __call__(self, videos, video_metadata, do_sample_frames, return_tensors):
        ((frames,), (about,)) = videos, video_metadata
        assert not do_sample_frames and about["frames_indices"] == [0, 4, 8, 12] and about["total_num_frames"] == FRAMES
        x = torch.as_tensor(frames.copy() if isinstance(frames, np.ndarray) else frames)
        x = (x if x.shape[1] == 3 else x.permute(0, 3, 1, 2)).float() / 255
        t, h, w = len(x) // 2, x.shape[2] // 4, x.shape[3] // 4
        cut = x.view(t, 2, 3, h // 2, 2, 4, w // 2, 2, 4).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        grid = torch.tensor([[t, h, w]])
        return {"pixel_values_videos": cut.reshape(t * h * w, WIDTH), "video_grid_thw": grid}


def with_names(name):
    """A model and a tokenizer that has a name for each of its tokens of images and videos."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<img>", "<vid>", "<vs>", "<ve>"]})
    return image_models.tiny(name, vocabulary=len(tokenizer)), tokenizer


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_engine_and_trainer_have_the_same_bits(name, tmp_path):
    model, tokenizer = with_names(name)
    path = tmp_path / "a.mp4"
    path.write_bytes(MOVIE)
    uri = "data:video/mp4;base64," + base64.b64encode(MOVIE).decode()
    with (
        vx.patch.hf(copy.deepcopy(model)) as handle,
        Engine.from_pretrained(model, config=CONFIG, tokenizer=tokenizer) as engine,
    ):
        engine.video_processor = Processor()
        text = "look: <vs><vid><ve> and say"
        prompts = [{"prompt": text, "videos": [given]} for given in (MOVIE, path, str(path), uri)]
        done = engine.generate(prompts, PARAMS)
        check(handle, done[:1])
        for other in done[1:]:
            same([other], done[:1])
        first = done[0]
        assert first.video_grid_thw.tolist() == [[2, 4, 6]]
        written = "".join(tokenizer.convert_ids_to_tokens(first.prompt_ids))
        if name == "qwen3_vl":  # a mark of time before each part
            frame = "<vs>" + "<vid>" * 6 + "<ve>"
            expected = f"look: <0.4 seconds>{frame}<2.0 seconds>{frame} and say"
        else:
            expected = "look: <vs>" + "<vid>" * 12 + "<ve> and say"
            assert first.second_per_grid_ts.tolist() == pytest.approx([2 / (4 / FRAMES * FPS)])
        assert first.prompt_ids == tokenizer(expected)["input_ids"], written
        ready = {key: getattr(first, key) for key in ("pixel_values_videos", "video_grid_thw")}
        if first.second_per_grid_ts is not None:
            ready["second_per_grid_ts"] = first.second_per_grid_ts
        same(engine.generate([{"prompt_token_ids": first.prompt_ids, **ready}], PARAMS), done[:1])


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_frames_that_others_took_are_the_same_video(name):
    """As verl hands them on: channels first, with transformers' metadata, and all tokens in the prompt."""
    model, tokenizer = with_names(name)
    with Engine.from_pretrained(model, config=CONFIG, tokenizer=tokenizer) as engine:
        engine.video_processor = Processor()
        (done,) = engine.generate([{"prompt": "<vs><vid><ve>", "videos": [MOVIE]}], PARAMS)
        film = videos.decoded(MOVIE, lambda about: [0, 4, 8, 12])
        first = torch.from_numpy(film.frames).permute(0, 3, 1, 2)
        padded = {**film.metadata(), "frames_indices": [*film.indices, film.indices[-1]]}  # as transformers leaves it
        for frames, about in ((first, film.metadata()), (film.frames, film.metadata()), (first, padded)):
            prompt = {"prompt_token_ids": done.prompt_ids, "videos": [(frames, about)]}
            same(engine.generate([prompt], PARAMS), [done])
        assert done.error is None and done.video_grid_thw.tolist() == [[2, 4, 6]]


def test_frames_evenly_taken():
    about = {"total_num_frames": 100, "fps": 10}
    assert videos.evenly(about, fps=0.9) == [0, 14, 28, 42, 57, 71, 85, 99]
    assert videos.evenly(about, fps=0.1) == [0, 33, 66, 99] == videos.evenly(about, count=5)
    assert videos.evenly(about, fps=50, most=6) == [0, 20, 40, 59, 79, 99]
    assert videos.evenly({**about, "total_num_frames": 1}, fps=2) == [0]
    for wrong in ({"fps": 0}, {"fps": 1, "least": -1}, {"count": 0}):
        with pytest.raises(ValueError, match="expected a number above 0"):
            videos.evenly(about, **wrong)


def test_frames_are_those_that_were_asked_for():
    for kind, codec in (("mp4", "mpeg4"), ("matroska", "mpeg4"), ("webm", "libvpx"), ("mp4", "libx264")):
        film = videos.decoded(movie(kind, codec), lambda about: [0, 3, 3, 12])
        assert film.frames.shape == (4, 16, 24, 3) and film.total == FRAMES and film.fps == FPS
        bright = film.frames.astype(int).mean((1, 2, 3))
        assert np.abs(bright - [0, 60, 60, 240]).max() < 12, (kind, codec, bright)
    assert film.stamps(2) == [0.3, 1.5] and film.stamps(3) == pytest.approx([0.3, 2.4])
    assert film.metadata()["duration"] == FRAMES / FPS


def test_a_film_that_was_cut_without_being_coded_again():
    film = videos.decoded(movie(codec="libx264", cut=4), lambda about: [0, about["total_num_frames"] - 1])
    assert film.total == FRAMES - 4 and np.abs(film.frames.astype(int).mean((1, 2, 3)) - [80, 240]).max() < 12


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"


def test_what_is_wrong_with_a_video_is_said_of_its_request_alone(monkeypatch):
    model, tokenizer = with_names("qwen3_vl")
    with Engine.from_pretrained(model, config=CONFIG, tokenizer=tokenizer) as engine:
        (none,) = engine.generate([{"prompt": "<vid>", "videos": [MOVIE]}], PARAMS)
        assert "videos[0]: this engine has no video processor" in none.error
        engine.video_processor = Processor()
        uri = "data:video/mp4;base64," + base64.b64encode(MOVIE).decode()
        wrong = [
            (PLAYLIST, "are no video that is known, expected MP4"),
            (b"", "the 0 bytes are no video that is known"),
            (MOVIE[:300], "a broken video"),
            (MOVIE[:40] + bytes(len(MOVIE) - 40), "a broken video"),
            (movie("matroska", "ffv1"), "a video of codec ffv1, expected one of h264"),
            (uri.replace("mp4", "x-flv", 1), "of type 'video/x-flv', expected one of video/mp4"),
            (uri[:60] + "?", "base64 is broken"),
            ("http://127.0.0.1/a.mp4", "nothing is fetched"),
            ("none.mp4", "is no file"),
            (3, "got a int, expected frames and their metadata, a path, bytes or a data: URI"),
            ((FRAMES_TAKEN,), "got a tuple of (Tensor), expected frames (a tensor or an array) and their metadata"),
            ((FRAMES_TAKEN, None), "got a tuple of (Tensor, NoneType), expected frames"),
            ((FRAMES_TAKEN[0], ABOUT), "got frames of shape (3, 16, 24), expected (frames, 3, rows, columns)"),
            ((FRAMES_TAKEN[:0], ABOUT), "got frames of shape (0, 3, 16, 24)"),
            ((FRAMES_TAKEN, {**ABOUT, "fps": 0}), "got metadata with fps 0, expected a number above 0"),
            ((FRAMES_TAKEN, {"fps": 2}), "got metadata with total_num_frames None, expected a number above 0"),
            ((FRAMES_TAKEN, {**ABOUT, "frames_indices": [0]}), "with 1 frames_indices, expected those of 4 frames"),
            ((FRAMES_TAKEN[:3], ABOUT), "with 4 frames_indices, expected those of 3 frames"),
        ]
        asked = [{"prompt": "<vid>", "videos": [given]} for given, _ in wrong]
        others = [
            ({"prompt": "<vid>", "videos": MOVIE}, "videos: got a bytes, expected a list"),
            ({"prompt": "a", "videos": [MOVIE]}, "videos: got 2, but the prompt has a place for 0"),
        ]
        done = engine.generate(asked + [prompt for prompt, _ in others] + ["sound"], PARAMS)
        for one, (_, said) in zip(done, wrong):
            assert one.error.startswith("videos[0]: ") and said in one.error, one.error
        for one, (_, said) in zip(done[len(wrong) :], others):
            assert said in one.error
        assert done[-1].error is None and len(done[-1].token_ids) == 9
        for name, most, said in (
            ("MOST_PIXELS", 24 * 16 - 1, "got frames of 24 x 16 pixels, expected at most 383"),
            ("MOST_SAMPLED", 3 * 24 * 16, "got 4 frames to take, expected at most 1152 pixels of them"),
            ("MOST_FRAMES", 12, "got more than 12 frames"),
            ("MOST_SECONDS", -1.0, "decoding took more than -1 s"),
            ("MOST_BYTES", 100, "bytes, expected at most 100"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(videos, name, most)
                (one,) = engine.generate([{"prompt": "<vid>", "videos": [MOVIE]}], PARAMS)
            assert said in one.error, one.error
        monkeypatch.setitem(sys.modules, "av", None)
        (one,) = engine.generate([{"prompt": "<vid>", "videos": [MOVIE]}], PARAMS)
        assert "PyAV is not installed" in one.error and "[video]" in one.error


def test_the_server_takes_videos_and_says_what_is_wrong_with_one(monkeypatch):
    openai = pytest.importorskip("openai", reason="openai is not installed (extra test)")
    import urllib.request

    import serving

    from vexact_engine.serve import remote

    model, tokenizer = with_names("qwen3_vl")
    tokenizer.chat_template = TEMPLATE.replace(
        "{% else %}{{ p", "{% elif p.type == 'video' %}<vs><vid><ve>{% else %}{{ p"
    )
    good = "data:video/mp4;base64," + base64.b64encode(MOVIE).decode()

    def messages(*urls):
        parts = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
        return [{"role": "user", "content": [{"type": "text", "text": "look: "}, *parts]}]

    with Engine.from_pretrained(model, config=CONFIG, tokenizer=tokenizer) as engine:
        engine.video_processor = Processor()
        prompt = {"prompt": "look: <vs><vid><ve><vs><vid><ve>", "videos": [MOVIE, MOVIE]}
        (expected,) = engine.generate([prompt], PARAMS)
        with (
            serving.serve(engine, allow_image_hosts=("films.test",)) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ):
            ask = {"model": "tiny", "max_tokens": 9, "seed": 5}
            extra = {"ignore_eos": True, "return_rollout": True, "return_token_ids": True}
            done = client.chat.completions.create(messages=messages(good, good), **ask, extra_body=extra)
            assert done.choices[0].prompt_token_ids == expected.prompt_ids
            assert done.choices[0].rollout["logprobs"] == expected.logprobs
            fetched = []
            monkeypatch.setattr(remote, "fetched", lambda *given: fetched.append(given) or MOVIE)
            url = "https://films.test/a.mp4"
            done = client.chat.completions.create(messages=messages(url, good), **ask, extra_body=extra)
            assert done.choices[0].rollout["logprobs"] == expected.logprobs
            assert fetched[0][0] == url and fetched[0][3:] == (videos.TYPES, videos.MOST_BYTES)
            for url, said in (
                ("http://127.0.0.1/a.mp4", "video_url.url: got a URL of '127.0.0.1', expected one of films.test"),
                (good.replace("mp4", "x-flv", 1), "of type 'video/x-flv'"),
                ("data:video/mp4;base64," + base64.b64encode(MOVIE[:300]).decode(), "content[2]: a broken video"),
                ("data:video/mp4;base64," + base64.b64encode(PLAYLIST).decode(), "are no video that is known"),
            ):
                with pytest.raises(openai.BadRequestError) as refused:
                    client.chat.completions.create(messages=messages(good, url), **ask)
                assert said in str(refused.value), refused.value
            with urllib.request.urlopen(f"{server.url}/metrics") as page:
                assert "vexact_videos_total 4.0" in page.read().decode()


def test_models_whose_videos_are_not_covered_take_none():
    with pytest.raises(ValueError, match="got some, expected none: this model's videos are not covered"):
        videos.opened_videos([MOVIE], Images(60, 2, WIDTH, 0), Processor())


def test_a_text_model_takes_no_videos():
    from engine_models import build

    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine:
        bad, good = engine.generate([{"prompt_token_ids": [1, 2], "videos": [MOVIE]}, [1, 2]], PARAMS)
    assert bad.error == "videos: this engine's model takes none" and good.error is None


def test_what_a_server_of_a_text_model_says_of_images_and_videos():
    from vexact_engine.serve.errors import APIError
    from vexact_engine.serve.tokens import Chat, Tokens

    tokens = Tokens(with_names("qwen3_vl")[1])
    tokens.text.tokenizer.chat_template = TEMPLATE
    for kind, chat in (("image", {}), ("video", {}), ("video", {"images": []})):
        name = f"{kind}_url"
        part = {"type": name, name: {"url": f"data:{kind}/x;base64,"}}
        with pytest.raises(APIError, match=f"got '{name}', expected a text: the model takes no {kind}s"):
            tokens.chat(Chat([{"role": "user", "content": [part]}], **chat), None)
