"""verl's FSDP2 engine on models of images and videos, and the rollout's server: log-probabilities of the engine's, byte
for byte, before and after they trained; micro-batches without an image beside those with some."""

import asyncio
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_ops.testing import assert_bitwise

from . import pictures
from .actor_ranks import Job, run
from .models import make_model, tokenizer
from .rollout_trainer import rollout_config
from .test_verl_rollout import VERLS, Running

sys.path.append(str(Path(__file__).parents[1] / "patch"))
import image_models

sys.path.pop()
VOCABULARY = 288
IMAGE = VOCABULARY - 4
GRIDS = [[(1, 4, 6)], [], [(1, 2, 2), (1, 4, 4)], [], [], []]  # of each row; the second rank's have none
FILM, SECONDS = (2, 2, 4), 1.37  # of two rows; of qwen2_5_vl so many from frame to frame
FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen2_5_vl")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    words = tokenizer("qwen3", VOCABULARY)
    for name in FAMILIES:
        image_models.tiny(name, torch.bfloat16, VOCABULARY).save_pretrained(base / name)
        words.save_pretrained(base / name)
        sizes = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
        kind = {"image_processor_type": "Qwen2VLImageProcessor", "temporal_patch_size": 2}
        (base / name / "preprocessor_config.json").write_text(json.dumps({**sizes, **kind}))
    return {name: str(base / name) for name in FAMILIES}


def prompts(name):
    found = []
    for i, grids in enumerate(GRIDS):
        ids = torch.randint(0, 256, (5 + i,), generator=torch.Generator().manual_seed(i)).tolist()
        for t, h, w in grids:
            ids += [IMAGE + 2, *[IMAGE] * (t * h * w // 4), IMAGE + 3, 7]
        given = {"pixel_values": image_models.pixels(grids, i), "image_grid_thw": torch.tensor(grids)} if grids else {}
        found.append({"prompt_token_ids": ids, **given})
    frame = [IMAGE + 1] * 2
    parts = [[IMAGE + 2, *frame * 2, IMAGE + 3]] if name == "qwen2_5_vl" else [[IMAGE + 2, *frame, IMAGE + 3]] * 2
    for film in found[1:3]:  # one has images too: the encoder runs as often as on the rank whose rows have nothing
        film["prompt_token_ids"] += [token for part in parts for token in (9, *part)]
        film |= {"pixel_values_videos": image_models.pixels([FILM], 7), "video_grid_thw": torch.tensor([FILM])}
        if name == "qwen2_5_vl":
            film["second_per_grid_ts"] = torch.tensor([SECONDS])
    return found


class Rollout:
    """What our engine drew, with what the completions have for a trainer."""

    def __init__(self, path, weights=None):
        name = Path(path).name
        params = SamplingParams(max_new_tokens=6, seed=3, prompt_logprobs=True, ignore_eos=True)
        with Engine.from_pretrained(path, config=EngineConfig(num_pages=128)) as engine:
            if weights is not None:
                engine.update_weights(weights, numerics=engine.numerics())
            self.done = engine.generate(prompts(name), params)
        self.rows = [(c.prompt_ids, c.token_ids) for c in self.done]
        self.pictures = []
        for c in self.done:
            count = len(c.prompt_ids) + len(c.token_ids)
            text = torch.arange(count)[None]
            axes = text.expand(3, -1) if c.position_ids is None else c.position_ids
            given = {"position_ids": torch.cat((text, axes))}
            if c.pixel_values is not None:
                frames = c.image_grid_thw[:, 1] * c.image_grid_thw[:, 2]
                given |= {"pixel_values": c.pixel_values, "image_grid_thw": c.image_grid_thw, "images_seqlens": frames}
            if c.pixel_values_videos is not None:
                given |= {"pixel_values_videos": c.pixel_values_videos, "video_grid_thw": c.video_grid_thw}
            if c.second_per_grid_ts is not None:  # of which verl's own positions know nothing
                given |= {"second_per_grid_ts": c.second_per_grid_ts, "position_ids": text.expand(4, -1)}
            self.pictures.append(given)

    def every(self):
        return [torch.tensor([*c.prompt_logprobs[1:], *c.logprobs]) for c in self.done]


class Conversations:
    """verl's tool agent with our server, four of them: what the engine said of each turn, and what verl makes of it all
    for a trainer."""

    def __init__(self, folder):
        from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

        self.path = str(pictures.make_model("qwen3_vl", folder / "model"))
        prompts = pictures.make_prompts(folder / "data", 2, [(1, 0), (0, 0)])
        lengths = (f"actor_rollout_ref.rollout.{part}_length=128" for part in ("prompt", "response"))
        told = (*pictures.options(prompts, media=True), *pictures.with_tools(), *lengths)
        config = rollout_config(self.path, *told)
        self.turns = {}  # the completions of each conversation
        with Running(self.path, *told) as running:
            self.server = running.server
            run = self.server._run

            async def watched(prompts, params, request_id):
                found = await run(prompts, params, request_id)
                self.turns.setdefault(request_id, []).extend(found)
                return found

            self.server._run = watched
            worker = AgentLoopWorker(config, self)
            data = worker.dataset_cls(str(prompts), worker.tokenizer, config.data, worker.processor)
            asked = [data[i % 2]["raw_prompt"] for i in range(4)]
            found = [running.call(self.held(worker, i, messages)) for i, messages in enumerate(asked)]
        self.found, self.rows, self.own, self.drawn, self.pictures = found, [], [], [], []
        for one in found:
            there, length = one.attention_mask[0].bool(), one.prompt_ids.shape[1]
            ids, behind = one.input_ids[0], there[length:]
            self.rows.append((ids[:length][there[:length]].tolist(), ids[length:][behind].tolist()))
            self.own.append(one.response_mask[0][behind].bool())
            self.drawn.append(one.response_logprobs[0][behind])
            self.pictures.append({"position_ids": one.position_ids[0][:, there], **one.multi_modal_inputs})

    async def held(self, worker, index, messages):
        trajectory = {"step": 0, "sample_index": index, "rollout_n": 0, "validate": False}
        asked = {**VERLS, "ignore_eos": False, "seed": index}
        return await worker._run_agent_loop(
            asked, trajectory, agent_name="tool_agent", trace=False, raw_prompt=messages, tools_kwargs={}
        )

    async def generate(self, request_id, *, mm_processor_output=None, **asked):
        """As verl's client calls a server."""
        return await self.server.generate(request_id=request_id, **asked)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    return Conversations(tmp_path_factory.mktemp("turns"))


@pytest.fixture(scope="module")
def trained(folders, conversations, tmp_path_factory):
    rollouts = {name: Rollout(path) for name, path in folders.items()}
    jobs = [
        Job(name, folders[name], rollout.rows, pictures=rollout.pictures, steps=2, data={"micro_batch_size_per_gpu": 1})
        for name, rollout in rollouts.items()
    ]
    freezes = {"actor": {"freeze_vision_tower": True}, "steps": 1, "data": {"micro_batch_size_per_gpu": 1}}
    first = rollouts["qwen3_vl"]
    jobs.append(Job("frozen", folders["qwen3_vl"], first.rows, pictures=first.pictures, **freezes))
    text = make_model("qwen3", tmp_path_factory.mktemp("text"))
    jobs.append(Job("text", str(text), [([1, 2], [3]), ([4], [5, 6])], refused=True, **freezes))
    told = {"pictures": conversations.pictures, "data": {"micro_batch_size_per_gpu": 1}}
    jobs.append(Job("turns", conversations.path, conversations.rows, **told))
    return rollouts, run(jobs, tmp_path_factory.mktemp("images") / "run", 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_actor_has_the_rollouts_bits(trained, name):
    rollouts, results = trained
    result = results[name]
    for row, expected in zip(result.logprobs, rollouts[name].every()):
        assert_bitwise(row[:-1].cpu(), expected)
    for i, step in enumerate(result.trained):
        if i == 0:
            found = {tuple(row.tolist()) for row in step}
            assert found == {tuple(row.tolist()) for row in result.logprobs}
    assert any(not torch.equal(a, b) for a, b in zip(result.after, result.logprobs))


def test_what_tools_show_reaches_the_trainer_as_the_engine_saw_it(conversations):
    """Of every turn the pixels, grids and places, and no others behind them."""
    shown, kinds = 0, set()
    for turns, given in zip(conversations.turns.values(), conversations.pictures, strict=True):
        seen = [0 if turn.pixel_values is None else len(turn.image_grid_thw) for turn in turns]
        assert seen == sorted(seen)
        for turn, count in zip(turns, seen):
            if count:
                assert_bitwise(given["image_grid_thw"][:count], turn.image_grid_thw)
                assert_bitwise(given["pixel_values"][: len(turn.pixel_values)], turn.pixel_values)
            length = min(len(turn.prompt_ids) + len(turn.token_ids), given["position_ids"].shape[1])
            assert_bitwise(given["position_ids"][0], torch.arange(given["position_ids"].shape[1]))
            places = torch.arange(length).expand(3, -1) if turn.position_ids is None else turn.position_ids[:, :length]
            assert_bitwise(given["position_ids"][1:, :length], places)
        assert len(given.get("image_grid_thw", ())) == seen[-1]
        shown += seen[-1] - seen[0]
        kinds |= {after - before for before, after in itertools.pairwise(seen)}
    assert kinds == {0, 1, 2} and shown > 4 and max(map(len, conversations.turns.values())) > 2
    for one, (_, response), own in zip(conversations.found, conversations.rows, conversations.own, strict=True):
        pads = torch.tensor(response) == pictures.VOCABULARY - len(pictures.TOKENS)
        assert not (pads & own).any() and own.any() and not own.all(), one


def test_the_actor_has_the_bits_of_every_turn(trained, conversations):
    _, results = trained
    rows = zip(results["turns"].logprobs, conversations.rows, conversations.own, conversations.drawn, strict=True)
    for row, (_, response), own, drawn in rows:
        assert_bitwise(row[-len(response) - 1 : -1].cpu()[own], drawn[own])
        assert not drawn[~own].any() and own.sum() > 4


@pytest.mark.parametrize("name", FAMILIES)
def test_trained_weights_and_their_tower_reach_a_rollout(trained, folders, name):
    _, results = trained
    weights = {key: value.to(torch.bfloat16) for key, value in results[name].weights.items()}
    assert any(".visual." in key for key in weights)
    again = Rollout(folders[name], weights)
    first = trained[0][name]
    with Engine.from_pretrained(folders[name], config=EngineConfig(num_pages=128)) as engine:
        own = dict(engine.model.named_parameters())
        moved = [key for key, value in weights.items() if ".visual." in key and not torch.equal(own[key], value)]
    assert moved and [c.token_ids for c in again.done] != [c.token_ids for c in first.done]


def test_a_frozen_tower_stays_as_it_is(trained, folders):
    _, results = trained
    with Engine.from_pretrained(folders["qwen3_vl"], config=EngineConfig(num_pages=128)) as engine:
        own = {name: p.detach().clone() for name, p in engine.model.named_parameters()}

    def moved(name):
        weights = results[name].weights
        return {key for key in own if not torch.equal(own[key], weights[key].to(torch.bfloat16))}

    assert moved("frozen") and not any(".visual." in key for key in moved("frozen"))
    assert any(".visual." in key for key in moved("qwen3_vl"))
    for row, other in zip(results["frozen"].logprobs, results["qwen3_vl"].logprobs, strict=True):
        assert_bitwise(row, other)
    assert results["frozen"].metrics[0]["grad_norm"] < results["qwen3_vl"].metrics[0]["grad_norm"]
    assert "actor.freeze_vision_tower: got True, but qwen3 has no image encoder" in results["text"].error


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_server_takes_images(folders, load_format):
    """verl's agent loop gives PIL images and ids that have all pads already; one of them for each place."""
    pictures = pytest.importorskip("PIL.Image")
    path = folders["qwen3_vl"]
    picture = pictures.frombytes("RGB", (24, 16), bytes(i * 7 % 256 for i in range(24 * 16 * 3)))
    ids = [5, IMAGE + 2, *[IMAGE] * 6, IMAGE + 3, 7]
    asked = {**VERLS, "seed": 3, "max_tokens": 5}
    with Engine.from_pretrained(path, config=EngineConfig(num_pages=64)) as engine:
        (expected,) = engine.generate(
            [{"prompt_token_ids": ids, "images": [picture]}], SamplingParams(max_new_tokens=5, seed=3, ignore_eos=True)
        )
        weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    with Running(path, mode="STANDALONE" if load_format == "auto" else "HYBRID", load_format=load_format) as running:
        server = running.server
        if load_format == "dummy":
            server.engine.update_weights(weights, numerics=server.engine.numerics())
        done = running.call(server.generate(ids, asked, "r", image_data=[picture]))
        assert done.token_ids == expected.token_ids and done.log_probs == expected.logprobs
        for given, said in (
            ({"image_data": [picture, picture]}, "images: got 2, but the prompt has a place for 1"),
            ({"image_data": [picture], "audio_data": [3]}, "audio_data: got some"),
            ({"image_data": [picture], "video_data": [3]}, r"videos\[0\]: this engine has no video processor"),
            ({"image_data": [3]}, r"image_data\[0\]: got a int, expected an image of PIL's"),
            ({"mm_processor_kwargs": {"max_pixels": 4}}, "mm_processor_kwargs: got max_pixels"),
        ):
            with pytest.raises((ValueError, TypeError), match=said):
                running.call(server.generate(ids, asked, "r", **given))


def test_videos_are_told_apart_by_every_frame_and_by_what_is_said_of_them():
    from vexact_engine.verl.server import _content

    frames, about = torch.zeros(40, 3, 8, 8, dtype=torch.uint8), {"fps": 2.0, "frames_indices": torch.arange(2000)}
    another, later = frames.clone(), {**about, "frames_indices": torch.arange(2000).index_fill(0, torch.tensor(999), 0)}
    another[20, 1, 4, 4] = 1  # in the middle, where a tensor's text leaves values out
    given = [(frames, about), (another, about), (frames, later), (frames, {**about, "fps": 4.0})]
    assert len({_content(video) for video in given}) == 4
    assert _content((frames.clone(), {k: v for k, v in about.items()})) == _content(given[0])


def test_full_determinism_tells_images_apart(folders):
    """Prompts of one text and several images: each has the same answers, in whichever order their calls come."""
    pictures = pytest.importorskip("PIL.Image")
    shown = [pictures.new("RGB", (24, 16), (90 * i, 50, 200)) for i in range(2)]
    ids = [5, IMAGE + 2, *[IMAGE] * 6, IMAGE + 3, 7]
    found = []
    with Running(folders["qwen3_vl"], "actor_rollout_ref.rollout.full_determinism=true") as running:
        for order in ([0, 1, 0, 1], [1, 1, 0, 0]):
            running.server._calls_of.clear()  # as in another run

            async def go(order=order):
                asked = {**VERLS, "max_tokens": 5}
                calls = [running.server.generate(ids, dict(asked), "r", image_data=[shown[i]]) for i in order]
                return [(i, call.token_ids) for i, call in zip(order, await asyncio.gather(*calls))]

            found.append(sorted(running.call(go())))
    assert found[0] == found[1] and len(set(map(str, found[0]))) == 4
