"""Prompts with images: the engine's log-probabilities are the trainer's, whatever else runs and whatever is kept."""

import base64
import copy
import io
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from engine_models import until

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, Replicas, SamplingParams
from vexact_engine.core.images import Recent
from vexact_engine.media import images as opening
from vexact_ops.patch.description import Images, NotDescribed
from vexact_ops.patch.hf import Handle
from vexact_ops.testing import assert_bitwise

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
import image_models
from image_models import IMAGE, PIXELS, ROWS, WIDTH, pixels, row

sys.path.pop(0)

CONFIG = EngineConfig(
    page_size=4, num_pages=128, max_num_seqs=8, max_num_batched_tokens=11, show_progress=False, image_tokens_per_step=4
)
PARAMS = SamplingParams(max_new_tokens=9, seed=5, ignore_eos=True)
OF_IMAGES = "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"


def prompt_of(index):
    (ids, grids), given = ROWS[index], PIXELS[index]
    if not grids:
        return ids
    return {"prompt_token_ids": ids, "pixel_values": given, "image_grid_thw": torch.tensor(grids)}


PROMPTS = [prompt_of(i) for i in range(len(ROWS))]


def check(handle, completions, counted=True):
    """Byte for byte what the trainer's forward says of the very images that the completion has."""
    for c in completions:
        assert c.error is None and IMAGE not in c.token_ids, c
        ids, given = torch.tensor([c.prompt_ids + c.token_ids]), {}
        for name in OF_IMAGES:
            if getattr(c, name) is not None:
                given[name] = getattr(c, name)
        places = {} if c.position_ids is None else {"position_ids": c.position_ids[:, None]}
        with torch.no_grad():
            expected = handle.logprobs(ids, **given, **places)[0, len(c.prompt_ids) - 1 : -1]
            assert_bitwise(torch.tensor(c.logprobs), expected, c.request_id)
            if counted:
                assert_bitwise(handle.logprobs(ids, **given)[0, len(c.prompt_ids) - 1 : -1], expected, "counted places")


def same(a, b):
    assert [(c.prompt_ids, c.token_ids, c.logprobs) for c in a] == [(c.prompt_ids, c.token_ids, c.logprobs) for c in b]


@pytest.fixture(scope="module")
def pair():
    """An engine, and its trainer's handle."""
    model = image_models.tiny("qwen3_vl")
    with vx.patch.hf(copy.deepcopy(model)) as handle, Engine.from_pretrained(model, config=CONFIG) as engine:
        yield engine, handle


def gallery(engine):
    return engine._worker._runner.gallery


def test_engine_and_trainer_have_the_same_bits(pair):
    engine, handle = pair
    engine.reset_prefix_cache()
    before = gallery(engine).encodings
    cold = engine.generate(PROMPTS, PARAMS)
    check(handle, cold)
    assert gallery(engine).encodings == before + 4
    assert engine.path == "fused"
    warm = engine.generate(PROMPTS, PARAMS)
    same(warm, cold)
    assert [c.metrics.cached_tokens for c in cold] == [0] * 4
    assert all(c.metrics.cached_tokens > 0 for c in warm)
    for index, one in enumerate(cold):
        alone = engine.generate([PROMPTS[index]], PARAMS)
        same(alone, [one])
    assert gallery(engine).encodings == before + 4  # an image is encoded once
    assert cold[1].pixel_values is None and cold[1].position_ids is None
    assert cold[2].image_grid_thw.tolist() == [list(grid) for grid in ROWS[2][1]]
    assert_bitwise(cold[2].pixel_values, PIXELS[2])
    sampled = engine.generate(PROMPTS, SamplingParams(max_new_tokens=4, seed=1, n=2, temperature=0.0, ignore_eos=True))
    check(handle, sampled, counted=False)


def filmed(name, seed=0, grid=(2, 4, 6)):
    """A prompt with a video before an image, another behind it, and text."""
    (first, one), (second, two) = image_models.video(name, grid, seed), image_models.video(name, (3, 2, 4), seed + 1)
    videos = {key: torch.cat([each[key] for each in (one, two)]) for key in one}
    ids, grids = ROWS[0]
    picture = {"pixel_values": PIXELS[0], "image_grid_thw": torch.tensor(grids)}
    return {"prompt_token_ids": [5, *first, *ids, *second, 7], **picture, **videos}


def check_videos(engine, handle, name):
    prompts = [filmed(name), PROMPTS[0], PROMPTS[1], filmed(name, 4)]
    engine.reset_prefix_cache()
    cold = engine.generate(prompts, PARAMS)
    check(handle, cold)
    warm = engine.generate(prompts, PARAMS)
    same(warm, cold)
    assert warm[0].metrics.cached_tokens > len(prompts[0]["prompt_token_ids"]) // 2
    for index in (0, 3):
        same(engine.generate([prompts[index]], PARAMS), [cold[index]])
        for key in OF_IMAGES:
            if key in prompts[index]:
                assert_bitwise(getattr(cold[index], key), prompts[index][key], key)
    assert cold[1].pixel_values_videos is None and cold[0].logprobs != cold[3].logprobs
    return prompts


def test_videos_have_the_trainers_bits(pair):
    engine, handle = pair
    prompt = check_videos(engine, handle, "qwen3_vl")[0]
    short = [
        t
        for i, t in enumerate(prompt["prompt_token_ids"])
        if t != IMAGE + 1 or prompt["prompt_token_ids"][i - 1] != IMAGE + 1
    ]
    same(engine.generate([{**prompt, "prompt_token_ids": short}], PARAMS), engine.generate([prompt], PARAMS))
    seconds = {"second_per_grid_ts": [1.0, 1.0]}
    wrong = [
        ({**prompt, **seconds}, "second_per_grid_ts: got some, expected none"),
        ({**prompt, "video_grid_thw": None}, "pixel_values_videos: expected video_grid_thw"),
        ({**prompt, "pixel_values_videos": None}, "video_grid_thw: got one without pixel_values_videos"),
        ({**prompt, "pixel_values_videos": prompt["pixel_values_videos"][1:]}, "pixel_values_videos: got 71 patches"),
        (
            {**prompt, "prompt_token_ids": prompt["prompt_token_ids"][:-5]},
            "videos: got 5, but the prompt has a place for 4",
        ),
    ]
    done = engine.generate([one for one, _ in wrong], PARAMS)
    assert all(message in c.error for c, (_, message) in zip(done, wrong)), [c.error for c in done]


def test_videos_whose_positions_count_seconds():
    """One run of tokens a video; the same pixels at another pace are another prompt to the prefix cache."""
    model = image_models.tiny("qwen2_5_vl")
    with vx.patch.hf(copy.deepcopy(model)) as handle, Engine.from_pretrained(model, config=CONFIG) as engine:
        prompt = check_videos(engine, handle, "qwen2_5_vl")[0]
        slow = {**prompt, "second_per_grid_ts": prompt["second_per_grid_ts"] * 4}
        done = engine.generate([slow], PARAMS)
        check(handle, done)
        assert done[0].metrics.cached_tokens < 4 and done[0].logprobs != engine.generate([prompt], PARAMS)[0].logprobs
        paces = [torch.tensor([pace, 1.0]) for pace in (float("nan"), float("inf"), 1e9, -1e30)]
        done = engine.generate([PROMPTS[1], *({**prompt, "second_per_grid_ts": pace} for pace in paces)], PARAMS)
        said = [None, *["second_per_grid_ts: got"] * 2, *["frames lie so far apart"] * 2]
        assert [said and said in c.error for c, said in zip(done, said)] == [None, True, True, True, True]


def test_the_prefix_cache_knows_images_by_their_content(pair):
    """The same tokens with other pixels are another prompt, and so is another shape of as many tokens."""
    engine, handle = pair
    engine.reset_prefix_cache()
    (ids, grids), given = ROWS[0], PIXELS[0]
    first = engine.generate([PROMPTS[0]], PARAMS)
    for other in (
        {"pixel_values": given + 0.5, "image_grid_thw": torch.tensor(grids)},
        {"pixel_values": given, "image_grid_thw": torch.tensor([[1, 6, 4]])},
    ):
        done = engine.generate([{"prompt_token_ids": ids, **other}], PARAMS)
        check(handle, done)
        assert done[0].metrics.cached_tokens < 5  # what lies before the image
        assert done[0].logprobs != first[0].logprobs


def test_one_image_token_stands_for_all_of_an_image(pair):
    engine, _ = pair
    short = [t for i, t in enumerate(ROWS[2][0]) if t != IMAGE or ROWS[2][0][i - 1] != IMAGE]
    done = engine.generate([{**PROMPTS[2], "prompt_token_ids": short}, PROMPTS[2]], PARAMS)
    same(done[:1], done[1:])
    assert done[0].prompt_ids == ROWS[2][0]


def test_preempted_and_aborted_requests_with_images(pair):
    engine, _ = pair
    expected = engine.generate(PROMPTS, PARAMS)
    scheduler, taken, again = engine._scheduler, [], engine._scheduler.schedule

    def schedule(*args, **options):
        running = [s for s in scheduler.running if not s.in_flight]
        if running and len(taken) < 40:
            taken.append(len(running))
            if len(taken) % 3 == 0:  # in the midst of prompts too
                scheduler.preempt(running[-1])
        return again(*args, **options)

    engine.reset_prefix_cache()
    scheduler.schedule = schedule
    try:
        done = engine.generate(PROMPTS, PARAMS)
    finally:
        del scheduler.schedule
    same(done, expected)
    assert sum(c.metrics.preemptions for c in done) > 2
    abort(engine, expected)


def abort(engine, expected):
    """In the midst of a prompt with images. expected: of the first prompt."""
    scheduler, again = engine._scheduler, engine._scheduler.schedule
    long = SamplingParams(max_new_tokens=100, seed=1, ignore_eos=True)

    def schedule(*args, **options):
        if "gone" in {r.id for r in scheduler.requests}:
            engine.abort("gone")
        return again(*args, **options)

    engine.reset_prefix_cache()
    scheduler.schedule = schedule
    try:
        done = engine.generate([PROMPTS[2], PROMPTS[0]], [long, PARAMS], request_ids=["gone", "stays"])
    finally:
        del scheduler.schedule
    assert done[0].finish_reason == "abort" and len(done[0].token_ids) < 100
    same(done[1:], expected[:1])


def test_updates_and_sleep_throw_encoded_images_away(pair):
    engine, handle = pair
    model = engine.model
    before, expected = gallery(engine).encodings, engine.generate([PROMPTS[0]], PARAMS)
    engine.sleep(1)
    assert not gallery(engine)._encoded
    engine.wake_up()
    same(engine.generate([PROMPTS[0]], PARAMS), expected)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    other = {name: w * 1.5 if ".visual." in name else w for name, w in weights.items()}
    trainer = handle.model
    try:
        engine.update_weights(other, numerics=handle.numerics())
        count = gallery(engine).encodings
        changed = engine.generate([PROMPTS[0]], PARAMS)
        assert gallery(engine).encodings == count + 1 and changed[0].logprobs != expected[0].logprobs
        trainer.load_state_dict(other, strict=False)
        check(handle, changed)
    finally:
        engine.update_weights(weights, numerics=handle.numerics())
        trainer.load_state_dict(weights, strict=False)
    same(engine.generate([PROMPTS[0]], PARAMS), expected)
    assert gallery(engine).encodings > before


def test_a_step_encodes_no_more_than_its_budget_and_keeps_what_it_may(pair, monkeypatch):
    engine, handle = pair
    grids = [(1, 4, 4)] * 5
    many = [
        {"prompt_token_ids": row(2, grid, 1)[0], "pixel_values": pixels([grid], 50 + i), "image_grid_thw": [grid]}
        for i, grid in enumerate(grids)
    ]
    seen, store = [], gallery(engine)
    plain = store._encode
    monkeypatch.setattr(store, "_encode", lambda images: (seen.append(sum(i.tokens for i in images)), plain(images)))
    monkeypatch.setattr(store, "_recent", Recent(8))
    engine.reset_prefix_cache()
    check(handle, engine.generate(many, PARAMS))
    assert sum(seen) == 20 and max(seen) == 4
    assert len(store._encoded) == 2 and store._recent.used == 8
    store.clear()


def test_a_pad_is_never_drawn_and_counts_all_the_same():
    """A policy that wants nothing else than an image's pad."""
    model = image_models.tiny("qwen3_vl")
    with torch.no_grad():
        weight = model.lm_head.weight
        weight[IMAGE] = 0
        weight[IMAGE, :] = 4 * weight[[5, 7]].sum(0)
    trainer = copy.deepcopy(model)
    with vx.patch.hf(trainer) as handle, Engine.from_pretrained(model, config=CONFIG) as engine:
        done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True))
        check(handle, done)
        assert sum(len(c.token_ids) for c in done) == 80
        greedy = engine.generate(PROMPTS[:2], SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True))
        check(handle, greedy)
        engine._worker._runner.undrawn = None  # and without that it would be
        free = engine.generate(PROMPTS, SamplingParams(max_new_tokens=20, seed=3, ignore_eos=True))
        assert any(IMAGE in c.token_ids for c in free)


def test_what_is_wrong_with_a_request_is_said_of_it_alone(pair):
    engine, _ = pair
    (ids, grids), given = ROWS[0], PIXELS[0]
    grid = torch.tensor(grids)
    sound = {"prompt_token_ids": ids, "pixel_values": given, "image_grid_thw": grid}
    wrong = [
        ({**sound, "prompt_token_ids": ROWS[1][0]}, "images: got 1, but the prompt has a place for 0"),
        ({**sound, "prompt_token_ids": ids[:-6]}, "expected 1 or the 6 of the image"),
        ({**sound, "prompt_token_ids": ids + ids}, "has a place for one more at token"),
        ({**sound, "pixel_values": given[1:]}, "pixel_values: got 23 patches, expected the 24 of the grids"),
        ({**sound, "pixel_values": given[:, 1:]}, r"got shape (24, 95), expected (patches, 96)"),
        ({**sound, "pixel_values": given.long()}, "pixel_values: got dtype int64, expected a floating-point tensor"),
        ({**sound, "image_grid_thw": grid + 1}, "expected (t, h, w) of at least 1"),
        ({"prompt_token_ids": ids, "image_grid_thw": grid}, "image_grid_thw: got one without pixel_values"),
        (
            {"prompt_token_ids": ids, "pixel_values": given, "image_grid_thw": [[1.7, 4, 6]]},
            "got [[1.7, 4, 6]], expected",
        ),
        ({**sound, "image_grid_thw": 24}, "image_grid_thw: got 24, expected"),
        ({"prompt_token_ids": ids, "pixel_values": given}, "expected image_grid_thw with them"),
        (
            {**sound, "sounds": []},
            "prompt: got a dict with sounds, expected a list of token ids, or of prompt, prompt_token_ids",
        ),
        ({"pixel_values": given, "image_grid_thw": grid}, "got 0 of prompt and prompt_token_ids"),
        ({"prompt_token_ids": ids, "images": [given]}, "images[0]: got a Tensor, expected a PIL image"),
        ({"prompt_token_ids": ids, "images": "cat.png"}, "images: got a str, expected a list"),
        ({"prompt": "a text", "pixel_values": given, "image_grid_thw": grid}, "there is no tokenizer"),
    ]
    done = engine.generate([prompt for prompt, _ in wrong] + [sound], PARAMS)
    for completion, (_, message) in zip(done, wrong):
        assert completion.finish_reason == "error" and message in completion.error, (message, completion.error)
    assert done[-1].error is None and len(done[-1].token_ids) == 9


def test_a_text_model_takes_no_images():
    from engine_models import build

    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine:
        (bad,) = engine.generate([{**PROMPTS[0], "prompt_token_ids": [1, 2]}], PARAMS)
        (good,) = engine.generate([{"prompt_token_ids": [1, 2]}], PARAMS)
    assert "images: this engine's model takes none" in bad.error
    assert good.error is None and good.pixel_values is None


def test_a_model_that_has_no_description_says_why_it_takes_no_images(monkeypatch, caplog):
    def undescribed(handle):  # no family that takes images is such; one may come
        raise NotDescribed("model.layers.0.mlp: 'erf' has no words in a description")

    monkeypatch.setattr(Handle, "describe", undescribed)
    with Engine.from_pretrained(image_models.tiny("qwen3_vl"), config=CONFIG) as engine:
        (bad,) = engine.generate([PROMPTS[0]], PARAMS)
    assert "images: this engine's model takes none" in bad.error
    assert "images are not taken, text alone is: " in caplog.text and "has no words" in caplog.text


class Processor:
    """Cuts an image into patches as Qwen2-VL's does, without resizing."""

    def __call__(self, images, return_tensors):
        (image,) = images
        x = torch.tensor(list(image.tobytes()), dtype=torch.float32).view(image.height, image.width, 3) / 255
        h, w = image.height // 4, image.width // 4
        cut = x.permute(2, 0, 1).reshape(3, h // 2, 2, 4, w // 2, 2, 4).permute(1, 4, 2, 5, 0, 3, 6)
        cut = cut.reshape(h * w, 3, 1, 16).expand(-1, -1, 2, -1).reshape(h * w, WIDTH)
        return {"pixel_values": cut, "image_grid_thw": torch.tensor([[1, h, w]])}


def test_images_are_opened_from_what_callers_have(pair, tmp_path):
    image_of = pytest.importorskip("PIL.Image")
    engine, handle = pair
    picture = image_of.frombytes("RGB", (24, 16), bytes(i * 7 % 256 for i in range(24 * 16 * 3)))
    file, memory = tmp_path / "a.png", io.BytesIO()
    picture.save(file)
    picture.save(memory, "PNG")
    picture.save(eps := io.BytesIO(), "EPS")  # which Pillow has Ghostscript open
    raw = memory.getvalue()
    uri = "data:image/png;base64," + base64.b64encode(raw).decode()
    ids = ROWS[0][0]
    engine.image_processor = Processor()
    try:
        done = engine.generate(
            [{"prompt_token_ids": ids, "images": [x]} for x in (picture, str(file), raw, uri)], PARAMS
        )
        check(handle, done[:1])
        for other in done[1:]:
            same([other], done[:1])
        bad = [
            b"not an image", raw[: len(raw) // 2], uri.replace("png", "svg+xml"), uri[:40] + "?",
            "data:image/png,abc", "http://127.0.0.1/a.png", str(tmp_path / "none.png"), 3, eps.getvalue(),
            image_of.new("RGB", (0, 5)), uri.partition(",")[2] * 9, "\ud800.png",
            image_of.open(io.BytesIO(raw[: len(raw) // 2])),
        ]  # fmt: skip
        said = [
            "are no image that is known", "a broken image", "of type 'image/svg+xml'", "base64 is broken",
            "not base64", "nothing is fetched", "is no file", "got a int", "expected PNG, JPEG", "got 0 x 5 pixels",
            "is no file", "is no file", "images[0]: OSError: image file is truncated",
        ]  # fmt: skip
        found = engine.generate([{"prompt_token_ids": ids, "images": [x]} for x in bad], PARAMS)
        for one, words in zip(found, said, strict=True):
            assert one.error.startswith("images[0]: ") and words in one.error, one.error
        opening_most = opening.MOST_PIXELS
        opening.MOST_PIXELS = 100
        try:
            (huge,) = engine.generate([{"prompt_token_ids": ids, "images": [raw]}], PARAMS)
        finally:
            opening.MOST_PIXELS = opening_most
        assert "got 24 x 16 pixels, expected 1 to 100" in huge.error
    finally:
        engine.image_processor = None
    (none,) = engine.generate([{"prompt_token_ids": ids, "images": [raw]}], PARAMS)
    assert "no image processor" in none.error


def test_a_model_with_states_takes_images():
    model = image_models.tiny("qwen3_5")
    with vx.patch.hf(copy.deepcopy(model)) as handle, Engine.from_pretrained(model, config=CONFIG) as engine:
        cold = engine.generate(PROMPTS, PARAMS)
        check(handle, cold)
        same(engine.generate(PROMPTS, PARAMS), cold)


def test_a_directory_is_loaded_without_its_encoder_where_that_is_wanted(tmp_path):
    image_models.tiny("qwen3_5").save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG, tokenizer=False, images=False) as engine:
        assert engine.images is None and not any("visual" in name for name, _ in engine.model.named_parameters())
        with_images, text = engine.generate([PROMPTS[0], PROMPTS[1]], PARAMS)
        assert "this engine's model takes none" in with_images.error and len(text.token_ids) == 9


def test_an_image_of_pils_goes_to_the_processor_in_its_own_mode(pair):
    """What becomes of transparency is the processor's, as where a trainer's makes patches of the same image."""
    image_of, seen = pytest.importorskip("PIL.Image"), []

    class Watched(Processor):
        def __call__(self, images, return_tensors):
            seen.extend(image.mode for image in images)
            return super().__call__([image.convert("RGB") for image in images], return_tensors)

    picture = image_of.frombytes("RGBA", (24, 16), bytes(i * 7 % 256 for i in range(24 * 16 * 4)))
    picture.save(memory := io.BytesIO(), "PNG")
    for one in picture, picture.convert("L"), memory.getvalue():
        opening.opened_images([one], pair[0].images, Watched())
    assert seen == ["RGBA", "L", "RGB"]


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen2_5_vl", "qwen3_5"])
def test_a_directory_is_loaded_with_its_encoder(name, tmp_path):
    model, pictures = image_models.tiny(name), pytest.importorskip("PIL.Image")
    model.save_pretrained(tmp_path)
    sizes = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    kind = {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**sizes, **kind}))
    with Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG, tokenizer=False) as engine:
        from transformers import AutoModelForImageTextToText

        trainer = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
        with vx.patch.hf(trainer) as handle:
            check(handle, engine.generate(PROMPTS, PARAMS))
            assert engine.numerics()["model"] == handle.numerics()["model"]
            picture = pictures.new("RGB", (24, 16), (3, 50, 200))
            (done,) = engine.generate([{"prompt_token_ids": [3, IMAGE, 7], "images": [picture]}], PARAMS)
            check(handle, [done])
            assert done.image_grid_thw.tolist() == [[1, 4, 6]] and done.prompt_ids == [3, *[IMAGE] * 6, 7]


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<vs><img><ve>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def test_the_server_takes_images_and_says_what_is_wrong_with_one(monkeypatch):
    openai = pytest.importorskip("openai", reason="openai is not installed (extra test)")
    pictures = pytest.importorskip("PIL.Image")
    import serving
    from engine_models import byte_tokenizer

    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<img>", "<vid>", "<vs>", "<ve>"]})
    tokenizer.chat_template = TEMPLATE
    model = image_models.tiny("qwen3_vl", vocabulary=len(tokenizer))
    raw = io.BytesIO()
    picture = pictures.frombytes("RGB", (24, 16), bytes(i * 7 % 256 for i in range(24 * 16 * 3)))
    picture.save(raw, "PNG")
    good = "data:image/png;base64," + base64.b64encode(raw.getvalue()).decode()

    def messages(*urls):
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        return [{"role": "user", "content": [{"type": "text", "text": "look: "}, *parts]}]

    with Engine.from_pretrained(model, config=CONFIG, tokenizer=tokenizer) as engine:
        engine.image_processor = Processor()
        params = SamplingParams(max_new_tokens=6, seed=5, ignore_eos=True)
        text = "look: <vs><img><ve><vs><img><ve>"
        (expected,) = engine.generate([{"prompt": text, "images": [picture, picture]}], params)
        with (
            serving.serve(engine, allow_image_hosts=("pictures.test",)) as server,
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        ):
            ask = {"model": "tiny", "max_tokens": 6, "seed": 5}
            extra = {"ignore_eos": True, "return_rollout": True, "return_token_ids": True}
            done = client.chat.completions.create(messages=messages(good, good), **ask, extra_body=extra)
            assert done.choices[0].rollout["logprobs"] == expected.logprobs
            assert done.choices[0].prompt_token_ids == expected.prompt_ids
            stream = client.chat.completions.create(messages=messages(good, good), **ask, extra_body=extra, stream=True)
            assert "".join(piece.choices[0].delta.content or "" for piece in stream) == expected.text
            for url, said in (
                ("http://127.0.0.1/a.png", "got a URL of '127.0.0.1', expected one of pictures.test"),
                (good.replace("png", "svg+xml"), "of type 'image/svg+xml'"),
                (good[:60] + "?", "base64 is broken"),
                (good[: len(good) // 2 // 4 * 4 + 2], "messages[0].content[2]: "),
            ):
                with pytest.raises(openai.BadRequestError) as refused:
                    client.chat.completions.create(messages=messages(good, url), **ask)
                assert said in str(refused.value), refused.value
            with (
                serving.serve(engine, max_images=1) as other,
                openai.OpenAI(base_url=f"{other.url}/v1", api_key="none", max_retries=0) as few,
            ):
                few.chat.completions.create(messages=messages(good), **ask)
                with pytest.raises(openai.BadRequestError) as refused:
                    few.chat.completions.create(messages=messages(good, good), **ask)
            assert "messages[0].content[2]: got image 2, expected at most 1 in one prompt" in str(refused.value)
            import urllib.request

            from vexact_engine.serve import remote

            monkeypatch.setattr(remote, "fetched", lambda url, hosts, end, types, most: raw.getvalue())
            done = client.chat.completions.create(
                messages=messages("https://pictures.test/a.png", good), **ask, extra_body=extra
            )
            assert done.choices[0].rollout["logprobs"] == expected.logprobs
            with urllib.request.urlopen(f"{server.url}/metrics") as page:
                counts = page.read().decode()
            assert "vexact_images_total 6.0" in counts
            assert f"vexact_prompt_tokens_total {3.0 * len(expected.prompt_ids)}" in counts


def test_recent_images_are_kept_within_a_bound():
    described = Images(IMAGE, 2, WIDTH, 0)
    images = opening.ready("test", pixels([(1, 4, 4)] * 3), torch.tensor([[1, 4, 4]] * 3), described)
    recent = Recent(8)
    assert [recent.use(image) for image in images] == [[], [], [images[0].digest]]
    assert recent.use(images[1]) == [] and recent.use(images[0]) == [images[2].digest]
    assert images[1] in recent and images[2] not in recent and recent.used == 8
    alone = Recent(1)
    assert alone.use(images[0]) == [] and alone.used == 4  # a step's own is there whatever the bound is


@pytest.mark.process
def test_replicas_have_the_bits_of_one(pair, tmp_path):
    """Whoever computes, and whoever dies: completions have the images, which do not travel back."""
    engine, handle = pair
    model = image_models.tiny("qwen3_vl")
    model.save_pretrained(tmp_path)
    prompts = [*PROMPTS, filmed("qwen3_vl")]
    engine.reset_prefix_cache()
    expected = engine.generate(prompts, PARAMS)
    with Replicas.from_pretrained(tmp_path, replicas=2, config=CONFIG) as replicas:
        assert replicas.images == engine.images and replicas.image_processor is None
        done = replicas.generate(prompts, PARAMS)
        same(done, expected)
        check(handle, done)
        same(replicas.generate(prompts, PARAMS), expected)  # warm
        long = SamplingParams(max_new_tokens=90, seed=3, ignore_eos=True)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(replicas.generate, prompts * 4, long)
            until(lambda: replicas.replicas[0].requests > 2)
            os.kill(replicas.replicas[0].pid, signal.SIGKILL)
            moved = running.result()
        same(moved, engine.generate(prompts * 4, long))
        check(handle, moved[: len(prompts)], counted=False)
        assert not replicas.replicas[0].alive
        broken = {**PROMPTS[0], "pixel_values": PIXELS[0][1:]}
        assert "pixel_values: got 23 patches" in replicas.generate([broken], PARAMS)[0].error
