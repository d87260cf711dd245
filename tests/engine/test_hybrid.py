"""Models of gated delta nets beside attention: states in slots, snapshots in the prefix cache, the trainer's bits."""

import asyncio
import functools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import toy
import transformers
from conftest import devices
from engine_models import bits, build, check_idle
from handovers import receiving
from hypothesis import example, given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams, WeightSender
from vexact_engine.core.snapshots import Snapshots
from vexact_engine.runner import memory
from vexact_engine.weights.experts import expert_views
from vexact_ops.testing import assert_bitwise

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
from families import family, tiny

sys.path.pop(0)
KINDS = "qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"
each_kind = pytest.mark.parametrize("kind", [family(kind) for kind in KINDS])
each_device = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
ROOMY = EngineConfig(num_pages=100, max_num_seqs=8, enable_prefix_cache=False, reserve=0.0, show_progress=False)


def ids(lengths, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = ids((5, 70, 130, 1, 64, 63))  # within a chunk of 64, over it, at its end
PARAMS = [SamplingParams(max_new_tokens=count, seed=i, ignore_eos=True) for i, count in enumerate((70, 20, 9, 5, 4, 6))]


def launch(kind: str, device, dtype, **options):
    return Engine.from_pretrained(tiny(kind, dtype, device=device), device=device, config=replace(ROOMY, **options))


@functools.cache
def alone(kind: str, device, dtype):
    with launch(kind, device, dtype) as engine:
        return [bits(engine.generate([prompt], params)[0]) for prompt, params in zip(PROMPTS, PARAMS)]


@pytest.mark.parametrize("kind", [family(kind) for kind in (*KINDS, "olmo_hybrid")])
@each_device
def test_the_trainer_has_the_engines_bits(kind, device, dtype):
    done = alone(kind, device, dtype)
    rows = [torch.tensor(prompt + one[0], device=device) for prompt, one in zip(PROMPTS, done)]
    ends = torch.tensor([0, *map(len, rows)], device=device).cumsum(0).to(torch.int32)
    with vx.patch.hf(tiny(kind, dtype, device=device)) as handle, torch.no_grad():
        packed = handle.logprobs(torch.cat(rows)[None], cu_seqlens=ends)[0]
        axes = torch.cat([torch.arange(len(row), device=device) for row in rows]).expand(4, 1, -1)
        assert_bitwise(handle.logprobs(torch.cat(rows)[None], position_ids=axes)[0], packed)
    for i, prompt in enumerate(PROMPTS):
        trained = packed[ends[i] + len(prompt) - 1 : ends[i + 1] - 1]
        assert trained.cpu().view(torch.int32).tolist() == done[i][1][1]  # raw: at temperature 1


@each_kind
@each_device
def test_batches_and_chunks_change_nothing(kind, device, dtype):
    options = {"num_pages": 20, "page_size": 8, "max_num_batched_tokens": 11, "max_num_seqs": 4}
    with launch(kind, device, dtype, **options) as engine:
        assert engine.path == "fused"
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == alone(kind, device, dtype)
        assert engine.stats.partial_prefills > 0
        check_idle(engine)


@each_kind
@each_device
def test_preemption_changes_nothing(kind, device, dtype):
    """All begin in one page, and no two can end: states of two chunks are computed anew."""
    prompts, params = ids((5, 6, 7)), [SamplingParams(max_new_tokens=70, seed=i, ignore_eos=True) for i in range(3)]
    with launch(kind, device, dtype) as engine:
        expected = [bits(c) for c in engine.generate(prompts, params)]
    with launch(kind, device, dtype, num_pages=14, page_size=8) as engine:
        assert [bits(c) for c in engine.generate(prompts, params)] == expected
        assert engine.stats.preemptions > 0
        check_idle(engine)


@each_device
def test_plans_in_flight_and_a_patched_forward(device, dtype, monkeypatch):
    from vexact_engine.runner import forward

    monkeypatch.setattr(forward, "fuse", lambda *args: (None, "for the test"))
    with launch(KINDS[0], device, dtype, async_scheduling=True, max_num_batched_tokens=19) as engine:
        assert engine.path.startswith("patched")
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == alone(KINDS[0], device, dtype)


@pytest.mark.parametrize("way", ["fused", "patched", "recorded"])
def test_ops_are_told_how_many_single_rows_come_first(way, monkeypatch):
    """Of each step as many as there are; in a graph none, for it serves steps with fewer too."""
    from vexact_engine.runner import forward, graphs

    kind, dtype, told = KINDS[0], torch.bfloat16, []
    expected = alone(kind, "cpu", dtype)
    if way == "patched":
        monkeypatch.setattr(forward, "fuse", lambda *args: (None, "for the test"))
    if way == "recorded":
        monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())

    def watched(op, offsets, *args, **options):
        told.append((options["singles"], args[offsets].diff().tolist()))
        return op(*args, **options)

    for name, offsets in (("causal_conv_paged", 6), ("gated_delta_paged", 11), ("conv_gated_delta_paged", 14)):
        monkeypatch.setattr(vx, name, functools.partial(watched, getattr(vx, name), offsets))
    with launch(kind, "cpu", dtype, max_num_batched_tokens=19) as engine:
        assert engine.path.startswith("fused" if way == "recorded" else way)
        told.clear()
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        assert engine.stats.mixed_steps > 0
    found = [(singles, _leading(rows)) for singles, rows in told]
    assert any(0 < ones < len(rows) for (_, ones), (_, rows) in zip(found, told))
    if way == "recorded":
        assert {singles for singles, ones in found if singles != ones} == {0}
    else:
        assert all(singles == ones for singles, ones in found)


def _leading(rows: list[int]) -> int:
    return next((i for i, count in enumerate(rows) if count != 1), len(rows))


# The prefix cache

WARM = {"enable_prefix_cache": True, "page_size": 8, "num_snapshots": 6}


def longer(kind, device, dtype) -> list[list[int]]:
    return [prompt + one[0] for prompt, one in zip(PROMPTS, alone(kind, device, dtype))]


@each_kind
@each_device
def test_warm_is_cold(kind, device, dtype):
    turns = longer(kind, device, dtype)
    with launch(kind, device, dtype) as engine:
        cold = [bits(c) for c in engine.generate(turns, PARAMS)]
    with launch(kind, device, dtype, **WARM) as engine:
        for _ in range(2):
            assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == alone(kind, device, dtype)
        before = engine.stats.prefix_tokens
        assert before >= 64 + 128
        assert [bits(c) for c in engine.generate(turns, PARAMS)] == cold
        assert engine.stats.prefix_tokens > before
        check_idle(engine)
        check_snapshots(engine)


def check_snapshots(engine) -> None:
    """When nothing is in flight every place is free or known."""
    snapshots = engine._scheduler._snapshots
    known = list(snapshots._at.values())
    assert sorted([*snapshots._free, *known]) == list(range(snapshots.count))


def test_a_snapshot_of_another_state_is_noticed():
    """The twin: what is restored is what counts."""
    kind, device, dtype = KINDS[0], "cpu", torch.bfloat16
    with launch(kind, device, dtype, **WARM) as engine:
        engine.generate(PROMPTS, PARAMS)
        for copies in engine._worker._runner.buffers.caches.snapshots:
            if copies is not None:
                copies[0].mul_(1.5)
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] != alone(kind, device, dtype)


def test_samples_of_a_prompt_go_on_from_its_snapshot():
    prompt, params = PROMPTS[2], SamplingParams(max_new_tokens=6, n=4, seed=3, ignore_eos=True)
    with launch(KINDS[0], "cpu", torch.bfloat16) as engine:
        expected = [bits(c) for c in engine.generate([prompt], params)]
        assert engine.stats.prefill_tokens == 4 * 130
    with launch(KINDS[0], "cpu", torch.bfloat16, **WARM) as engine:
        assert [bits(c) for c in engine.generate([prompt], params)] == expected
        assert engine.stats.prefix_tokens == 3 * 128


def test_few_snapshots_and_few_pages():
    """Places are given up and pages evicted all the time; bits stay."""
    kind, dtype = KINDS[0], torch.bfloat16
    options = {**WARM, "num_snapshots": 1, "num_pages": 40, "max_num_batched_tokens": 70}
    with launch(kind, "cpu", dtype, **options) as engine:
        for _ in range(3):
            assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == alone(kind, "cpu", dtype)
        check_idle(engine)
        check_snapshots(engine)


def test_no_snapshots_no_reuse():
    with launch(KINDS[0], "cpu", torch.bfloat16, **{**WARM, "num_snapshots": 0}) as engine:
        for _ in range(2):
            engine.generate(PROMPTS[1:2], PARAMS[1:2])
        assert engine.stats.prefix_tokens == 0


def test_snapshots_of_what_has_none_are_refused():
    with pytest.raises(ValueError, match="num_snapshots: got 3, expected None: no layer of the model has a state"):
        Engine.from_pretrained(build("Llama"), device="cpu", config=EngineConfig(num_pages=8, num_snapshots=3))
    with pytest.raises(ValueError, match="EngineConfig: num_snapshots is 3, expected None or 0 without enable_prefix"):
        EngineConfig(num_snapshots=3, enable_prefix_cache=False)


@example(1, 16, 1024, [1])
@given(st.integers(1, 24), st.sampled_from([16, 64]), st.integers(1, 4000), st.lists(st.integers(1, 700), min_size=1))
def test_where_chunks_are_cut(page_size, chunk, length, budgets):
    """Every cut makes progress, none is behind what was planned; a snapshot lies at the end of a page and a chunk."""
    snapshots, at, kept = Snapshots(2, page_size, chunk), 0, []
    steps = 0
    while at < length:
        budget = budgets[steps % len(budgets)]
        end, worth = snapshots.cut(at, min(length, at + budget), length)
        assert at < end <= min(length, at + budget)
        if worth:
            assert end % page_size == 0 and end % chunk == 0
            kept.append(end)
        at, steps = end, steps + 1
    last = (length - 1) // snapshots.stride * snapshots.stride
    assert not last or last in kept  # and, where it comes out so, one of all tokens behind it


# What else an engine does


@pytest.mark.parametrize("reuse", [True, False], ids=["snapshots", "no snapshots"])
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    budget=st.integers(4, 70),
    page_size=st.sampled_from([4, 6, 8]),
    lookahead=st.booleans(),
)
@example(lengths=[60, 60, 60, 60], budget=37, page_size=4, lookahead=False)
@example(lengths=[40], budget=5, page_size=8, lookahead=True)
@example(lengths=[17, 4], budget=4, page_size=4, lookahead=False)
def test_chunks_begin_where_a_states_chunk_does(reuse, lengths, budget, page_size, lookahead):
    """Unless a whole chunk of the state does not fit into a step beside decodes; and all are through at last."""
    chunk = 8
    prefix = {"num_snapshots": 9} if reuse else {"enable_prefix_cache": False}
    sizes = {"num_pages": 256, "page_size": page_size, "max_num_batched_tokens": budget}
    scheduler, model = toy.make(**sizes, chunk=chunk, **prefix)
    for seed, length in enumerate(lengths):
        scheduler.add(toy.request([seed % 7] * length, max_new_tokens=6, seed=seed))
    fits = budget - len(lengths) >= chunk
    for plan in toy.drain(scheduler, model, lookahead):
        # a last row alone is a decode to the scheduler
        prompts = [one for one in plan.chunks if one.start < one.sequence.num_prompt and one.length > 1]
        if fits:
            assert all(one.end % chunk == 0 or one.needs_sample for one in prompts)
            assert all(one.start % chunk == 0 for one in prompts)


@pytest.mark.parametrize("kind", [family(kind) for kind in ("qwen3_5_text", "qwen3_5_moe_text")])
def test_weights_by_the_names_of_a_model_with_vision(kind):
    """As a trainer of the whole model has them: its tower's and those of MTP are passed over, experts may come one by
    one."""
    device, dtype = "cpu", torch.bfloat16
    expected, other = alone(kind, device, dtype)[:2], tiny(kind, dtype, seed=1)
    model = tiny(kind, dtype)
    own, views = dict(model.named_parameters()), expert_views(model)
    stacked = {name for name, _ in views.values()}
    named = {name: p for name, p in own.items() if name not in stacked} | {n: view for n, (_, view) in views.items()}
    named = {name.replace("model.", "model.language_model.", 1): p for name, p in named.items()}
    named = {"model.visual.blocks.0.norm1.weight": torch.ones(3), **named, "mtp.fc.weight": torch.ones(2, 2)}
    specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
    with Engine.from_pretrained(tiny(kind, dtype, seed=1), device=device, config=ROOMY) as engine:
        numerics = engine.numerics()

        def hand_over():
            with receiving(engine) as (receiver, start), WeightSender(receiver.address, numerics=numerics) as sender:
                result = start()
                sender.send(named.items())
                result()

        def in_turn():
            with engine.begin_update(numerics=numerics) as update:
                update.write(named.items())
                update.finish()

        def announced():
            engine.update_weights(named, numerics=numerics, specs=specs)

        for way in (hand_over, in_turn, announced, lambda: engine.update_weights(named, numerics=numerics)):
            assert [bits(c) for c in engine.generate(PROMPTS[:2], PARAMS[:2])] != expected
            way()
            assert [bits(c) for c in engine.generate(PROMPTS[:2], PARAMS[:2])] == expected
            engine.update_weights(other.named_parameters(), numerics=numerics)
        with pytest.raises(ValueError, match=r"unknown: model\.other\.weight"):
            engine.update_weights({**named, "model.other.weight": torch.ones(3)}, numerics=numerics)


def test_a_model_of_text_alone_passes_over_nothing():
    with (
        launch("qwen3_next", "cpu", torch.bfloat16) as engine,
        pytest.raises(ValueError, match=r"unknown: model\.visual"),
    ):
        every = {name: p.clone() for name, p in engine.model.named_parameters()}
        engine.update_weights({**every, "model.visual.merger.bias": torch.ones(3)}, numerics=engine.numerics())


async def first_of(engine, prompt) -> None:
    """A request that is aborted after its first token."""
    stream = engine.stream(prompt, SamplingParams(max_new_tokens=60, ignore_eos=True))
    await anext(stream)
    await stream.aclose()


@each_device
def test_abort_sleep_and_new_weights(device, dtype):
    kind = KINDS[1]
    expected = alone(kind, device, dtype)
    other = tiny(kind, dtype, seed=1, device=device)
    with launch(kind, device, dtype, **WARM) as engine:
        asyncio.run(first_of(engine, PROMPTS[2]))
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        engine.sleep(1)
        engine.wake_up()
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        own = {name: value.clone() for name, value in engine.model.named_parameters()}
        engine.update_weights(other.named_parameters(), numerics=engine.numerics())
        changed = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
        assert changed != expected
        engine.update_weights(own.items(), numerics=engine.numerics())
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        check_idle(engine)


def test_nan_stays_in_its_sequence():
    """A slot whose state is no number is another sequence's next, and that begins with zeros."""
    kind, dtype = KINDS[0], torch.bfloat16
    model, lost = tiny(kind, dtype), 60
    with torch.no_grad():
        model.get_input_embeddings().weight[lost] = torch.nan
    prompts = [[token for token in prompt if token != lost] for prompt in PROMPTS]
    with Engine.from_pretrained(model, device="cpu", config=replace(ROOMY, max_num_seqs=2)) as engine:
        expected = [c.logprobs for c in engine.generate(prompts, PARAMS, raise_on_error=False)]
        poisoned = [[5, lost, *ids((80,))[0]], *prompts, [lost]]
        params = [PARAMS[0], *PARAMS, PARAMS[0]]
        got = [c.logprobs for c in engine.generate(poisoned, params, raise_on_error=False)]
        assert got[1:-1] == expected


def test_no_room_for_states():
    message = r"max_num_seqs: no room for the states of 200000 sequences: .* lower max_num_seqs to \d+ or less"
    with pytest.raises(ValueError, match=message):
        launch(KINDS[0], "cpu", torch.bfloat16, num_pages=None, max_num_seqs=200_000, max_num_batched_tokens=200_000)


def test_what_a_state_takes():
    with vx.patch.hf(tiny(KINDS[0], torch.bfloat16)) as handle:
        memories = handle.memories()
    state = 4 * (4 * 16 * 24) + 2 * 4 * (2 * 2 * 16 + 4 * 24)  # fp32 state, four rows of taps
    rows = 64 * (2 * 2 * 16 + 4 * 4 * 24 + 4 * 4)  # k, u, g
    assert memory.bytes_per_snapshot(memories, torch.bfloat16) == 2 * state
    assert memory.bytes_per_slot(memories, torch.bfloat16) == 2 * (state + rows)
    assert memory.bytes_per_token(memories, torch.bfloat16) == 2 * (2 * 16 + 2 * 16)


@pytest.mark.process
@each_kind
def test_stages_have_the_bits_of_one(kind, tmp_path):
    tiny(kind, torch.bfloat16).save_pretrained(tmp_path)
    config = replace(ROOMY, pipeline_parallel_size=2, max_num_batched_tokens=40, **WARM)
    with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:
        assert engine.path == "fused"
        for _ in range(2):
            assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == alone(kind, "cpu", torch.bfloat16)
        assert engine.stats.prefix_tokens > 0


@pytest.mark.process
@pytest.mark.skipif(not hasattr(transformers, "Qwen3_5Config"), reason="transformers has no qwen3_5")
def test_the_text_half_of_a_checkpoint_with_vision(tmp_path):
    """Names begin with model.language_model; the tower's weights and those of MTP are passed over."""
    from safetensors.torch import load_file, save_file

    text = tiny(KINDS[0], torch.bfloat16)
    vision = {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }  # fmt: skip
    config = transformers.Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision)
    whole = transformers.Qwen3_5ForConditionalGeneration(config).to(torch.bfloat16)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"mtp.fc.weight": torch.zeros(4, 4)}
    assert any(name.startswith("model.language_model.layers.0.") for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    for stages in (1, 2):
        config = replace(ROOMY, pipeline_parallel_size=stages)
        with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:
            assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == alone(KINDS[0], "cpu", torch.bfloat16)
