"""Models of images: the tower and the text around an image have the bits that each has alone."""

import copy
import itertools

import image_models
import pytest
import torch
from image_models import FAMILIES, IMAGE, PIXELS, ROWS, WIDTH, pixels, row
from torch import nn

import vexact_ops as vx
from vexact_ops.patch import grids as lattices
from vexact_ops.patch import vision
from vexact_ops.testing import assert_bitwise

NAMES = pytest.mark.parametrize("name", FAMILIES)


def test_the_list_names_the_families_that_are_tested():
    assert tuple(sorted(FAMILIES)) == vx.patch.WITH_IMAGES


@pytest.fixture(scope="module")
def models():
    known = {}

    def model(name, dtype=torch.bfloat16):
        if (name, dtype) not in known:
            known[name, dtype] = image_models.tiny(name, dtype)
        return known[name, dtype]

    return model


def alone(handle, index, **more):
    ids, grids = ROWS[index]
    given = {"pixel_values": PIXELS[index], "image_grid_thw": torch.tensor(grids)} if grids else {}
    return handle.logprobs(torch.tensor([ids]), **given, **more)[0]


def batch_of(order):
    """What a call takes of these rows' images, in this order."""
    with_images = [i for i in order if ROWS[i][1]]
    grids = torch.tensor([grid for i in with_images for grid in ROWS[i][1]])
    return {"pixel_values": torch.cat([PIXELS[i] for i in with_images]), "image_grid_thw": grids}


def padded(order, side):
    longest = max(len(ROWS[i][0]) for i in order)
    ids, mask = torch.zeros(2, len(order), longest, dtype=torch.int64)
    spans = []
    for b, i in enumerate(order):
        count = len(ROWS[i][0])
        spans.append(slice(0, count) if side == "right" else slice(longest - count, longest))
        ids[b, spans[-1]], mask[b, spans[-1]] = torch.tensor(ROWS[i][0]), 1
    return ids, mask, spans


def packed(order):
    ids = torch.tensor([[token for i in order for token in ROWS[i][0]]])
    return ids, torch.tensor([0, *itertools.accumulate(len(ROWS[i][0]) for i in order)])


@NAMES
def test_a_patched_model_of_images_computes_what_the_stock_one_does(name, models):
    """In fp32, to rounding: a row with two images, whose positions are on three axes."""
    model, (ids, grids) = models(name, torch.float32), ROWS[2]
    ids = torch.tensor([ids])
    given = {"input_ids": ids, "pixel_values": PIXELS[2], "image_grid_thw": torch.tensor(grids)}
    stock = dict(given, mm_token_type_ids=(ids == IMAGE).int())
    with torch.no_grad():
        expected, tower = model(**stock).logits, model.model.visual(PIXELS[2], grid_thw=given["image_grid_thw"])
        with vx.patch.hf(model) as handle:
            got, again = model(**given).logits, model(**stock).logits
            rows, stacks, _ = handle.encode(PIXELS[2], grids)
            without = model(input_ids=ids).logits
        assert_bitwise(model(**stock).logits, expected, "after undo")
    assert_bitwise(again, got)
    near = 5e-4 if name == "qwen3_5" else 2e-5  # a delta net's products are of tf32
    torch.testing.assert_close(got, expected, rtol=near, atol=near)
    torch.testing.assert_close(rows, tower.pooler_output, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(stacks, getattr(tower, "deepstack_features", ()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (without - got).abs().max() > 0.01


@NAMES
def test_a_row_with_images_has_the_same_bits_in_any_batch(name, models):
    order = [2, 0, 1, 3]
    with vx.patch.hf(models(name)) as handle, torch.no_grad():
        expected = [alone(handle, i) for i in range(len(ROWS))]
        ids, cu = packed(order)
        whole = handle.logprobs(ids, cu_seqlens=cu, **batch_of(order))[0]
        for i, part in zip(order, whole.split(cu.diff().tolist())):
            assert_bitwise(part, expected[i], f"row {i} packed")
        for side in ("left", "right"):
            ids, mask, spans = padded(order, side)
            whole = handle.logprobs(ids, attention_mask=mask, **batch_of(order))
            for b, i in enumerate(order):
                assert_bitwise(whole[b, spans[b]], expected[i], f"row {i} padded on the {side}")
        poisoned = batch_of(order)
        poisoned["pixel_values"][: len(PIXELS[2])] = float("nan")  # the first row's images
        ids, cu = packed(order)
        whole = handle.logprobs(ids, cu_seqlens=cu, **poisoned)[0]
        for i, part in list(zip(order, whole.split(cu.diff().tolist())))[1:]:
            assert_bitwise(part, expected[i], f"row {i} beside NaN")
        # positions that somebody else has counted
        vis = handle._patch.vision
        places = lattices.axes_of(ROWS[2][0], waiting(ROWS[2][1]), vis.merge, "test")
        for axes in (places[:, None], torch.cat((torch.arange(places.shape[1])[None], places))[:, None]):
            assert_bitwise(alone(handle, 2, position_ids=axes), expected[2], f"{len(axes)} axes")


def waiting(grids):
    return {IMAGE: lattices.Waiting("image", [lattices.Clip(grid) for grid in grids])}


def check_rows(handle):
    grids = [(1, 4, 6), (1, 2, 2), (1, 6, 10), (2, 2, 4)]
    given = [pixels([grid], seed) for seed, grid in enumerate(grids)]
    with torch.no_grad():
        expected = [handle.encode(x, [grid]) for x, grid in zip(given, grids)]
        for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
            rows, stacks, _ = handle.encode(torch.cat([given[i] for i in order]), [grids[i] for i in order])
            sizes = [len(expected[i].rows) for i in order]
            for stack in range(len(stacks) + 1):
                parts = (stacks[stack - 1] if stack else rows).split(sizes)
                for i, part in zip(order, parts):
                    one = expected[i].deepstack[stack - 1] if stack else expected[i].rows
                    assert_bitwise(part, one, f"image {i}, rows {stack}")


@NAMES
def test_rows_of_an_image_are_its_own(name, models):
    with vx.patch.hf(models(name)) as handle:
        check_rows(handle)


def test_rows_of_an_image_are_its_own_can_fail(monkeypatch, models):
    """A tower whose table of positions follows the batch is seen, and refused where it is patched."""
    plain = vision.interpolated
    with vx.patch.hf(models("qwen3_vl")) as handle:
        monkeypatch.setattr(vision, "interpolated", lambda *args: plain(*args) * (1 + (len(args[1]) > 24) / 64))
        with pytest.raises(AssertionError, match="differ"):
            check_rows(handle)
    with pytest.raises(vx.patch.UnsupportedModule, match="an image encoder that lays out or mixes its patches"):
        vx.patch.hf(models("qwen3_vl"))


@NAMES
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_gradients_go_through_the_tower(name, frozen, models):
    """Those of pixels are an image's own; those of weights are near the stock model's, and repeatable."""
    model = copy.deepcopy(models(name, torch.float32))
    for p in model.model.visual.parameters():
        p.requires_grad_(not frozen)
    order = [2, 0, 1, 3]

    def gradients(ids, given, **more):
        model.zero_grad(set_to_none=True)
        x = given["pixel_values"].clone().requires_grad_(not frozen)
        handle.logprobs(ids, **{**given, "pixel_values": x}, **more).sum().backward()
        return x.grad, {path: p.grad for path, p in model.named_parameters() if p.grad is not None}

    with vx.patch.hf(model) as handle:
        ids, cu = packed(order)
        dx, weights = gradients(ids, batch_of(order), cu_seqlens=cu)
        again, same = gradients(ids, batch_of(order), cu_seqlens=cu)
        single = gradients(torch.tensor([ROWS[2][0]]), batch_of([2]))
    assert weights.keys() == same.keys() and bool(weights)
    for path in weights:
        assert_bitwise(same[path], weights[path], path)
    tower = [path for path in weights if ".visual." in path]
    assert not tower if frozen else len(tower) == len(list(model.model.visual.parameters()))
    if not frozen:
        assert_bitwise(again, dx)
        assert_bitwise(dx[: len(PIXELS[2])], single[0], "the first row's pixels")
        ids = torch.tensor([ROWS[2][0]])
        model.zero_grad(set_to_none=True)
        out = model(input_ids=ids, **batch_of([2]), mm_token_type_ids=(ids == IMAGE).int())
        out.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).sum().backward()
        for path, p in model.named_parameters():
            if p.grad is not None:
                error = (single[1][path] - p.grad).norm() / p.grad.norm()
                assert error < (0.02 if name == "qwen3_5" else 1e-4), path  # a delta net's products are of tf32


@NAMES
def test_the_report_and_the_numbers_cover_the_tower(name, models):
    model = models(name)
    with vx.patch.hf(model) as handle:
        rows = {r.path: r for r in handle.report()}
        numbers, described = handle.numerics(), handle.describe()
        assert handle.revision() == 1
    assert rows["model.visual.patch_embed"].replacement == "linear"
    assert rows["model.visual.blocks.0.attn"].replacement == "attention_varlen, rope"
    assert rows["model.visual.rotary_pos_emb"].replacement == "rope_cos_sin"
    paths = {path for path, m in model.named_modules() if path and not isinstance(m, nn.Identity)}
    assert paths <= set(rows) and not any("NOT COVERED" in r.note for r in rows.values())
    deepstack = 2 if name in ("qwen3_vl", "qwen3_vl_moe") else 0
    assert (described.images.token, described.images.merge, described.images.width) == (IMAGE, 2, WIDTH)
    assert described.images.deepstack == deepstack and set(described.rotary[0].axes) == {0, 1, 2}
    assert numbers["model"]["images"]["dtype"] == "bfloat16"
    other = copy.deepcopy(model)
    for module in other.model.visual.modules():
        for attribute in ("eps", "variance_epsilon"):
            if hasattr(module, attribute):
                setattr(module, attribute, 1e-3)
    with vx.patch.hf(other) as handle:
        changed = handle.numerics()["model"]
    assert changed["images"] != numbers["model"]["images"]
    assert changed | {"images": 0} == numbers["model"] | {"images": 0}


def test_on_the_meta_device_it_is_the_same(models):
    with torch.device("meta"):
        from transformers import AutoModelForImageTextToText

        bare = AutoModelForImageTextToText.from_config(image_models.config_of("qwen3_vl"))
    with vx.patch.hf(bare) as handle, vx.patch.hf(models("qwen3_vl", torch.float32)) as known:
        assert handle.describe() == known.describe()


def test_patches_may_lie_where_a_processor_has_made_them():
    with torch.device("meta"):
        from transformers import AutoModelForImageTextToText

        bare = AutoModelForImageTextToText.from_config(image_models.config_of("qwen3_vl"))
    seen = []
    with vx.patch.hf(bare) as handle:
        handle.tower.register_forward_pre_hook(lambda _, given: seen.append(given[0].device.type))
        with pytest.raises(vx.BackendUnavailable, match="meta"):
            handle.encode(PIXELS[0], ROWS[0][1])
    assert seen == ["meta"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
@NAMES
def test_patches_and_grids_may_lie_on_the_host(name, models):
    """As VeOmni's engine on one rank hands them on, which brings tokens to the GPU."""
    model, (ids, grids) = copy.deepcopy(models(name)).cuda(), ROWS[0]
    ids = torch.tensor([ids], device="cuda")
    with vx.patch.hf(model) as handle:
        given = {"pixel_values": PIXELS[0], "image_grid_thw": torch.tensor(grids)}
        there = handle.logprobs(ids, **{key: value.cuda() for key, value in given.items()})
        assert_bitwise(handle.logprobs(ids, **given), there)


@pytest.mark.parametrize("merge,side,window", [(2, 48, None), (2, None, 4), (3, 7, 2)])
def test_the_host_lays_out_images_as_transformers_does(merge, side, window):
    """Bit for bit what its release 5.24 computes on the device."""
    utils = pytest.importorskip("transformers.vision_utils")
    if not hasattr(utils, "get_vision_interpolation_indices_and_weights"):
        pytest.skip("an older transformers, whose weights differ in the last bit")
    grids = ((1, 4 * merge, 7 * merge), (2, merge, 10 * merge), (1, merge, merge), (1, 33 * merge, 5 * merge))
    grid = torch.tensor(grids)
    found = lattices.lattice(grids, merge, side, window)
    assert_bitwise(found.places, utils.get_vision_position_ids(grid, merge).t())
    assert_bitwise(found.cu_seqlens, utils.get_vision_cu_seqlens(grid))
    if side is not None:
        options = {"mode": "bilinear", "align_corners": True, "spatial_merge_size": merge}
        taps, weights = utils.get_vision_interpolation_indices_and_weights(grid, side, **options)
        assert_bitwise((found.taps, found.weights), (taps, weights))
        for dtype in (torch.float32, torch.bfloat16):
            table = torch.randn(side**2, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
            stock = (nn.functional.embedding(taps, table) * weights[:, :, None]).sum(1)
            got = vision.interpolated(lambda ids, table=table: nn.functional.embedding(ids, table), taps, weights)
            assert_bitwise(got, stock)
    if window is not None:
        index, cu = utils.get_vision_window_index(grid, merge, window * merge * 14, 14)
        assert_bitwise((found.windows.order, found.windows.cu_seqlens), (index, cu))


def videos_of(name):
    """Two rows with videos beside images, and what a forward takes of each."""
    (first, one), (second, two) = image_models.video(name, (2, 4, 6), 1), image_models.video(name, (3, 2, 4), 2)
    ids, picture = ROWS[0][0], {"pixel_values": PIXELS[0], "image_grid_thw": torch.tensor(ROWS[0][1])}
    return [([5, *first, *ids, *second], {**picture, **joined([one, two])}), ([7, *second, 9], two)]


def joined(given):
    return {name: torch.cat([each[name] for each in given if name in each]) for name in {n for g in given for n in g}}


@NAMES
def test_videos_among_images_are_those_of_the_stock_model(name, models):
    """In fp32, to rounding; positions are those that the model counts."""
    model = models(name, torch.float32)
    for ids, given in videos_of(name):
        ids = torch.tensor([ids])
        kinds = (ids == IMAGE).int() + 2 * (ids == IMAGE + 1).int()
        with torch.no_grad():
            expected = model(input_ids=ids, mm_token_type_ids=kinds, **given).logits
            with vx.patch.hf(model):
                got = model(input_ids=ids, **given).logits
        near = 5e-4 if name == "qwen3_5" else 2e-5
        torch.testing.assert_close(got, expected, rtol=near, atol=near)


@NAMES
def test_a_row_with_videos_has_the_same_bits_in_any_batch(name, models):
    rows = [
        *videos_of(name),
        (ROWS[1][0], {}),
        (ROWS[3][0], {"pixel_values": PIXELS[3], "image_grid_thw": torch.tensor(ROWS[3][1])}),
    ]
    with vx.patch.hf(models(name)) as handle, torch.no_grad():
        expected = [handle.logprobs(torch.tensor([ids]), **given)[0] for ids, given in rows]
        for order in ([0, 1, 2, 3], [3, 1, 2, 0]):
            ids = torch.tensor([[token for i in order for token in rows[i][0]]])
            lengths = [len(rows[i][0]) for i in order]
            cu = torch.tensor([0, *itertools.accumulate(lengths)])
            whole = handle.logprobs(ids, cu_seqlens=cu, **joined([rows[i][1] for i in order]))[0]
            for i, part in zip(order, whole.split(lengths)):
                assert_bitwise(part, expected[i], f"row {i}")


def test_gradients_reach_the_tower_from_videos_too(models):
    ids, given = videos_of("qwen3_vl")[0]
    model = copy.deepcopy(models("qwen3_vl")).train()
    weights = list(model.model.visual.parameters())
    with vx.patch.hf(model) as handle:
        grads = []
        for half in (1.0, 0.5):
            given["pixel_values_videos"] = given["pixel_values_videos"] * half
            loss = handle.logprobs(torch.tensor([ids]), **given).sum()
            grads.append(torch.autograd.grad(loss, weights))
    assert all(bool(g.isfinite().all()) for g in grads[0])
    assert any(not torch.equal(a, b) for a, b in zip(*grads))


@NAMES
def test_positions_are_counted_as_the_model_counts_them(name, models):
    model = models(name)
    for ids, grids in [*ROWS, row(2, (1, 4, 8), (1, 8, 4), 3, (1, 2, 2), seed=9)]:
        given = torch.tensor([ids])
        kinds, grid = (given == IMAGE).int(), torch.tensor(grids or [(1, 2, 2)])
        expected = model.model.get_rope_index(given, mm_token_type_ids=kinds, image_grid_thw=grid)[0]
        queue = waiting(grids)
        assert_bitwise(lattices.axes_of(ids, queue, 2, "test"), expected[:, 0])
        assert not queue[IMAGE].clips


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_generation_with_a_cache_has_the_bits_of_a_forward(name, models):
    model, (ids, grids) = models(name), ROWS[2]
    ids = torch.tensor([ids])
    given = {"pixel_values": PIXELS[2], "image_grid_thw": torch.tensor(grids)}
    with vx.patch.hf(model) as handle, torch.no_grad():
        more = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        out = model.generate(ids, mm_token_type_ids=(ids == IMAGE).int(), **given, **more, eos_token_id=-1)
        drawn = out.sequences[:, ids.shape[1] :]
        assert drawn.shape[1] == 5 and not bool((drawn == IMAGE).any())
        logprobs = torch.stack([vx.log_softmax(x.float())[0, t] for x, t in zip(out.logits, drawn[0])])
        assert_bitwise(logprobs, handle.logprobs(out.sequences, **given)[0, -6:-1])


def test_what_does_not_fit_is_named(models):
    (ids, grids), text = ROWS[0], ROWS[1][0]
    x, ids, text = PIXELS[0], torch.tensor([ids]), torch.tensor([text])
    grid = torch.tensor(grids)
    model = models("qwen3_vl")
    with vx.patch.hf(model) as handle, torch.no_grad():
        for given, message in (
            ({"pixel_values": x}, "image_grid_thw: got None with pixel_values"),
            ({"pixel_values": x[1:], "image_grid_thw": grid}, r"pixel_values: got shape \(23, 96\), expected the 24"),
            ({"pixel_values": x[:, 1:], "image_grid_thw": grid}, r"got shape \(24, 95\), expected \(patches, 96\)"),
            ({"pixel_values": x, "image_grid_thw": grid[0]}, r"image_grid_thw: got shape \(3,\)"),
            ({"pixel_values": x, "image_grid_thw": grid + 1}, r"got \(2, 5, 7\), expected \(t, h, w\)"),
            ({"pixel_values": x[:16], "image_grid_thw": grid - torch.tensor([0, 0, 2])}, "for 6 image tokens"),
            (
                {"pixel_values": x, "image_grid_thw": grid, "position_ids": torch.arange(ids.shape[1])[None]},
                "position_ids: got text's alone with images",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                handle.logprobs(ids, **given)
        with pytest.raises(ValueError, match=r"got images of 6 tokens for 0 image tokens \(id 60\)"):
            handle.logprobs(text, pixel_values=x, image_grid_thw=grid)
        with pytest.raises(TypeError, match="pixel_values: got dtype int64"):
            handle.logprobs(ids, pixel_values=x.long(), image_grid_thw=grid)
        with pytest.raises(ValueError, match="video_grid_thw: got None with pixel_values_videos"):
            model(input_ids=ids, pixel_values_videos=x)
        with pytest.raises(ValueError, match=r"got videos of 6 tokens for 0 video tokens \(id 61\)"):
            handle.logprobs(ids, pixel_values_videos=x, video_grid_thw=grid)
        with pytest.raises(ValueError, match="second_per_grid_ts: got some, expected none"):
            clip, frames = image_models.video("qwen3_vl", (1, 4, 6))
            handle.logprobs(torch.tensor([[1, *clip]]), **frames, second_per_grid_ts=[1.0])
        with pytest.raises(ValueError, match="mm_encoder_outputs: got some"):
            model(input_ids=ids, mm_encoder_outputs={"image": x})
        with pytest.raises(ValueError, match="pixel_values: got None with image_grid_thw"):
            model(input_ids=ids, image_grid_thw=grid)
        with pytest.raises(ValueError, match="input_ids: got None with images"):
            model(inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.bfloat16), pixel_values=x, image_grid_thw=grid)
        apart = ids.clone()
        apart[0, [3, 5]] = apart[0, [5, 3]]  # an image token among the text
        with pytest.raises(ValueError, match="got 2 image tokens from token 3 on, expected the 6"):
            handle.logprobs(apart, pixel_values=x, image_grid_thw=grid)


def test_another_tower_is_refused(models):
    model = copy.deepcopy(models("qwen3_vl"))
    plain = type(model.model.visual)

    class Other(plain):
        def forward(self, hidden_states, grid_thw, **kwargs):
            out = plain.forward(self, hidden_states, grid_thw, **kwargs)
            out.pooler_output = out.pooler_output * 2
            return out

    model.model.visual.__class__ = Other
    with pytest.raises(vx.patch.UnsupportedModule, match=r"model\.visual|no module of transformers"):
        vx.patch.hf(model)


def test_ranks_that_share_a_row_are_refused(monkeypatch):
    from vexact_ops.patch import ulysses

    monkeypatch.setattr(ulysses.dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(ulysses.dist, "get_rank", lambda group: 0)
    model = image_models.tiny("qwen3_vl")
    with pytest.raises(ValueError, match=r"sequence_parallel: got ranks for a Qwen3VL\w+, whose rows may have images"):
        vx.patch.hf(model, sequence_parallel=object())
    vx.patch.hf(model).undo()
