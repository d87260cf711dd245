"""Prompts with images over stages and ranks: the bits of one process, pixels sent once."""

import copy
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_models import check_idle
from hypothesis import given
from hypothesis import strategies as st
from ranks import in_ranks
from test_images import CONFIG, PARAMS, PROMPTS, abort, check, filmed, same

import vexact_ops as vx
from vexact_engine import Engine
from vexact_engine.media.images import Image, Rows, Scene
from vexact_engine.parallel import scenes
from vexact_engine.runner import decoder
from vexact_engine.runner.forward import Trial, forward, patched_forward
from vexact_engine.runner.pictures import Gallery
from vexact_engine.weights.partial import Origin, skeleton
from vexact_ops.testing import assert_bitwise

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
import image_models

sys.path.pop(0)
MIXED = [PARAMS, replace(PARAMS, n=2, temperature=0.0), replace(PARAMS, prompt_logprobs=True, num_top_logprobs=2)]
MIXED += [replace(PARAMS, top_k=9, top_p=0.9), replace(PARAMS, seed=8)]


def asked(name):
    return [*PROMPTS, filmed(name)]


def outcome(completions):
    names = "prompt_ids", "token_ids", "logprobs", "raw_logprobs", "top_logprobs", "prompt_logprobs"
    return [[getattr(c, name) for name in names] for c in completions]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(name) -> a model's directory, what one process makes of it, and its numerics."""
    known = {}

    def of(name):
        if name not in known:
            path = tmp_path_factory.mktemp(name)
            model = image_models.tiny(name)
            model.save_pretrained(path)
            with Engine.from_pretrained(model, config=CONFIG) as engine:
                known[name] = path, outcome(engine.generate(asked(name), MIXED)), engine.numerics()
        return known[name]

    return of


def started(path, **sizes):
    config = replace(CONFIG, num_pages=24, reserve=0.0, max_num_batched_tokens=17, **sizes)
    return Engine.from_pretrained(path, device="cpu", config=config, tokenizer=False)


@pytest.fixture(scope="module")
def staged(saved):
    """Rows of images are added behind layers of the first stage and of the second; the third encodes nothing."""
    with started(saved("qwen3_vl")[0], pipeline_parallel_size=3) as engine:
        yield engine


@pytest.fixture
def sent(monkeypatch):
    """Digests of the images whose pixels go to stages, as they go."""
    found, whole = [], scenes.Scenes.message

    def message(self, scene, epoch):
        made = whole(self, scene, epoch)
        found.extend(picture.digest for picture in made.pictures if picture.pixels is not None)
        return made

    monkeypatch.setattr(scenes.Scenes, "message", message)
    return found


@given(st.integers(1, 9), st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True), max_size=9))
def test_what_stages_are_taken_to_have_encoded_they_have(capacity, steps):
    class Handle:
        def encode(self, pixels, grids):
            assert len(pixels) == 4 * sum(w // 2 for _, _, w in grids), "an image came without its pixels"
            return torch.zeros(len(pixels) // 4, 1), ()

    told, gallery = scenes.Scenes(capacity), Gallery(Handle(), torch.device("cpu"), capacity)
    for step in steps:
        images = [Image.of(torch.zeros(4 * n, 1), (1, 2, 2 * n), 2) for n in step]  # each of n tokens
        ends = list(itertools.accumulate(image.tokens for image in images))
        rows = [Rows(image, 0, image.tokens, end - image.tokens) for image, end in zip(images, ends)]
        message = told.message(Scene(np.zeros((3, ends[-1]), np.int64), rows), 0)
        found = gallery.of_step(scenes.scene_from(message, 2).rows, ends[-1])
        assert len(found.rows) == ends[-1]


@pytest.mark.process
def test_stages_have_the_bits_of_one_process(saved, staged, sent):
    _, one, numerics = saved("qwen3_vl")
    assert staged.path == "fused" and staged.numerics() == numerics and staged.images.deepstack == 2
    assert [list(layers) for layers in staged._worker.layers] == [[0], [1], [2]]
    prompts = asked("qwen3_vl")
    cold = staged.generate(prompts, MIXED)
    assert outcome(cold) == one
    images = len(set(sent))
    assert len(sent) == images > 4
    warm = staged.generate(prompts, MIXED)
    assert outcome(warm) == one and len(sent) == images  # encoded once, whoever asks
    assert staged.stats.prefix_tokens > 0
    alone = [done for prompt, params in zip(prompts, MIXED) for done in staged.generate([prompt], params)]
    assert outcome(alone) == one
    check_idle(staged)


@pytest.mark.process
@pytest.mark.parametrize(
    "name, sizes",
    [
        ("qwen3_vl", {"tensor_parallel_size": 2}),
        ("qwen2_5_vl", {"tensor_parallel_size": 2, "image_cache_tokens": 8, "enable_prefix_cache": False}),
        ("qwen3_5", {"pipeline_parallel_size": 2}),
    ],
    ids=["qwen3_vl-ranks", "qwen2_5_vl-ranks", "qwen3_5-stages"],
)
def test_ranks_and_stages_have_the_bits_of_one_process(name, sizes, saved, sent):
    path, one, numerics = saved(name)
    with started(path, **sizes) as engine:
        assert engine.path == "fused" and engine.numerics() == numerics
        for _ in range(2):
            assert outcome(engine.generate(asked(name), MIXED)) == one
        # Each is sent once, or again where a stage may not keep them all.
        assert len(sent) == len(set(sent)) if "image_cache_tokens" not in sizes else len(sent) > len(set(sent))
        check_idle(engine)


@pytest.mark.process
def test_preempted_and_aborted_requests_with_images(staged):
    long, before = replace(PARAMS, max_new_tokens=50), staged.stats.preemptions
    alone = [done for prompt in PROMPTS for done in staged.generate([prompt], long)]
    assert staged.stats.preemptions == before
    same(staged.generate(PROMPTS, long), alone)
    assert staged.stats.preemptions > before
    abort(staged, staged.generate(PROMPTS[:1], PARAMS))
    check_idle(staged)


@pytest.mark.process
def test_updates_and_sleep_of_stages_throw_encoded_images_away(staged, sent):
    model = image_models.tiny("qwen3_vl")
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    other = {name: w * 1.5 if ".visual." in name else w for name, w in weights.items()}
    expected = staged.generate([PROMPTS[0]], PARAMS)
    del sent[:]
    for level in (1, 1):
        staged.sleep(level)
        staged.wake_up()
        same(staged.generate([PROMPTS[0]], PARAMS), expected)
    assert len(sent) == 2
    trainer = copy.deepcopy(model)
    trainer.load_state_dict(other, strict=False)
    with vx.patch.hf(trainer) as handle:
        try:
            staged.update_weights(other, numerics=handle.numerics("cpu"))
            changed = staged.generate([PROMPTS[0]], PARAMS)
            assert len(sent) == 3 and changed[0].logprobs != expected[0].logprobs
            check(handle, changed)
        finally:
            staged.update_weights(weights, numerics=staged.numerics())
    same(staged.generate([PROMPTS[0]], PARAMS), expected)


@pytest.mark.process
def test_what_is_wrong_with_an_image_is_said_of_its_request_alone(staged):
    broken = {**PROMPTS[0], "pixel_values": PROMPTS[0]["pixel_values"][1:]}
    bad, good = staged.generate([broken, PROMPTS[0]], PARAMS)
    assert "pixel_values: got 23 patches, expected the 24 of the grids" in bad.error
    assert good.error is None and len(good.token_ids) == 9


@pytest.mark.process
def test_places_of_other_tokens_are_found(staged, monkeypatch):
    staged.reset_prefix_cache()
    expected = staged.generate([PROMPTS[0]], PARAMS)
    plain = scenes._axes_bytes
    monkeypatch.setattr(scenes, "_axes_bytes", lambda scene: plain(scene._replace(axes=scene.axes[[0, 2, 1]])))
    staged.reset_prefix_cache()
    assert staged.generate([PROMPTS[0]], PARAMS)[0].logprobs != expected[0].logprobs
    staged.reset_prefix_cache()


@pytest.mark.parametrize("name", list(image_models.FAMILIES))
def test_ranks_of_every_family_have_the_bits_of_its_own_python(name, monkeypatch):
    """On steps with images and without, as threads; and where a rank puts rows of images elsewhere, that is found."""
    model = image_models.tiny(name)
    with vx.patch.hf(model) as handle, torch.no_grad():
        described = handle.describe()
        layers, steps = (
            range(len(described.layers)),
            (([(0, 9), (0, 4), (3, 8)], False), ([(9, 10), (4, 6), (8, 9)], True)),
        )

        def outs(of, run):
            trial = Trial(model, described, layers, 64)
            return trial.run(run, trial.caches(of, steps), steps)

        expected = outs(described, patched_forward(model))
        found = in_ranks(model, described, 2, lambda run, own, head: outs(own.described, run))
        for rank in found:
            assert_bitwise(rank, expected)
        monkeypatch.setattr(decoder, "_put", lambda images, rows, x: x)
        found = in_ranks(model, described, 2, lambda run, own, head: outs(own.described, run))
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise(found[0], expected)


def test_a_fused_forward_that_leaves_rows_of_images_out_is_not_used(monkeypatch):
    with vx.patch.hf(image_models.tiny("qwen3_vl")) as handle:
        for layers in (None, range(1), range(1, 2), range(1, 3)):
            assert forward(handle, layers)[1] == "fused"
        monkeypatch.setattr(decoder, "_put", lambda images, rows, x: x)
        for layers in (None, range(1), range(1, 2), range(1, 3)):
            assert "its bits are not those" in forward(handle, layers)[1]
        assert forward(handle, range(2, 3))[1] == "fused"  # where none are added


def test_a_stage_holds_the_encoder_where_it_is_called(saved):
    path, *_ = saved("qwen3_vl")
    model = skeleton(Origin(str(path), torch.bfloat16))
    with vx.patch.hf(model, training=False) as handle:
        described = handle.describe()
        every = {n for n, _ in (*model.named_parameters(), *model.named_buffers())}
        spare = {n for n in every if n.endswith("original_inv_freq")}
        towers = [described.tower_names(range(i, i + 1)) for i in range(3)]
        assert towers[0] == towers[1] == {n for n in every if ".visual." in n} and not towers[2]
        assert every - spare == (described.names() | towers[0]) - spare
