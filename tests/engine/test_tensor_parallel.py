"""Ranks as processes: the bits of one rank, each with its rows alone, new weights by their rows, and nothing left."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from children import is_alive
from engine_models import build, check_idle, held, prompts
from handovers import MODES, other, receiving, sender
from safetensors.torch import load_file
from test_pipeline import CONFIG, MIXED, PROMPTS, outcome, pids
from test_stalled import stopped

from vexact_engine import Engine, HandoverFailed, SamplingParams, Speculation, StageDied, WeightsTorn
from vexact_engine.parallel import limits, member
from vexact_engine.runner.sleep import TAGS
from vexact_engine.weights.experts import per_expert

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
from families import HYBRIDS, tiny

sys.path.pop(0)
pytestmark = pytest.mark.process
RANKED = replace(CONFIG, tensor_parallel_size=2)
HYBRID = prompts(5, longest=70, vocabulary=61)


def ask(engine, asked=PROMPTS, params=MIXED):
    return [outcome(c) for c in engine.generate(asked, params)]


def save(name: str, path) -> None:
    (tiny(name, torch.bfloat16) if name in HYBRIDS else build(name)).save_pretrained(path)


@pytest.mark.parametrize(
    "name, tensor, stages, experts, latent",
    [
        ("Qwen3", 2, 2, 1, False),
        ("Llama", 4, 1, 1, False),  # key-value heads on two ranks each; head and embedding are one
        ("DeepseekV3", 2, 1, 1, False),
        ("DeepseekV3", 2, 1, 2, True),
        ("GptOss", 2, 1, 1, False),
        ("GptOss", 2, 1, 2, False),
        ("qwen3_next", 2, 1, 1, False),
        ("olmo_hybrid", 2, 1, 1, False),
    ],
)
def test_ranks_have_the_bits_of_one(name, tensor, stages, experts, latent, tmp_path):
    save(name, tmp_path)
    asked, params, config = PROMPTS, MIXED, replace(CONFIG, latent_attention=latent)
    if name in HYBRIDS:
        asked, params = HYBRID, [replace(one, max_new_tokens=9) for one in MIXED[: len(HYBRID)]]
        config = replace(CONFIG, num_pages=100, num_snapshots=6)
    with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:
        one, numerics = ask(engine, asked, params), engine.numerics()
    sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "expert_parallel_size": experts}
    config = replace(config, **sizes, speculation=Speculation(max_draft_tokens=3, always=True, draft_model=tmp_path))
    with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:  # which verifies drafts, its own too
        assert engine.path == "fused" and engine.numerics() == numerics
        for _ in range(2):  # cold and warm
            assert ask(engine, asked, params) == one
        assert engine.stats.prefix_tokens > 0 and len(pids(engine)) == tensor * stages
        assert engine.stats.accepted_tokens > 0
        check_idle(engine)


# One engine for what is done to its weights


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model's directory, and what one process makes of it."""
    path = tmp_path_factory.mktemp("model")
    save("Qwen3Moe", path)
    with Engine.from_pretrained(path, device="cpu", config=CONFIG) as engine:
        return path, ask(engine)


@pytest.fixture(scope="module")
def ranked(saved):
    with Engine.from_pretrained(saved[0], device="cpu", config=RANKED) as engine:
        yield engine


@pytest.fixture(scope="module")
def renewed():
    """Other weights, as a trainer holds them, and what one process makes of them."""
    new = other(build("Qwen3Moe"))
    model = build("Qwen3Moe")
    model.load_state_dict(new.state_dict())  # rounds
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        return new, state, ask(engine)


def state_of(path):
    return load_file(path / "model.safetensors")


def test_each_rank_has_its_rows_alone(saved, ranked):
    for _ in range(2):
        assert ask(ranked) == saved[1]
    assert ranked.stats.preemptions > 0 and ranked.stats.prefix_tokens > 0
    numbers, worker, shape = ranked._worker.numbers(), ranked._worker, ranked.model.config
    assert [layers for _, layers, _ in numbers] == [shape.num_hidden_layers] * 2 and os.getpid() not in pids(ranked)
    page = 2 * 2 * 4 * shape.num_key_value_heads * shape.head_dim
    assert [held for *_, held in numbers] == [40 * page * shape.num_hidden_layers // 2] * 2
    every = sum(p.nbytes for p in ranked.model.parameters())
    assert all(p.is_meta for p in ranked.model.parameters()) and max(worker.held) < 0.6 * every
    check_idle(ranked)


def test_new_weights_by_their_rows(saved, ranked, renewed):
    _, state, new = renewed
    first = {name: value.clone() for name, value in build("Qwen3Moe").state_dict().items()}
    version = ranked.weight_version
    assert ranked.update_weights(state, numerics=ranked.numerics()) == version + 1
    assert ask(ranked) == new != saved[1]
    with pytest.raises(ValueError, match="missing: "):
        ranked.update_weights(dict(list(first.items())[1:]), numerics=ranked.numerics())
    assert ask(ranked) == new
    specs = {name: (tuple(value.shape), value.dtype) for name, value in first.items()}
    ranked.update_weights(iter(first.items()), numerics=ranked.numerics(), specs=specs)
    assert ask(ranked) == saved[1]
    check_idle(ranked)


@MODES
def test_a_sender_hands_over_to_ranks(saved, ranked, renewed, mode, sockets):
    """Runs of elements that end in the midst of rows; stacked experts, and one by one; complete or refused."""
    new, _, wanted = renewed
    with receiving(ranked, mode) as (receiver, start), sender(receiver, bucket_bytes=4096, checksum=True) as out:
        for give in (new.named_parameters, lambda: per_expert(new), build("Qwen3Moe").state_dict):
            result = start()
            assert out.send(give()) == result() == ranked.weight_version
            assert ask(ranked) == (
                saved[1] if give is not new.named_parameters and isinstance(give(), dict) else wanted
            )
        items = list(new.state_dict().items())
        result = start()
        with pytest.raises((HandoverFailed, ValueError), match="missing"):
            out.send([items[0], *items[2:]])
        with pytest.raises(HandoverFailed, match="missing"):
            result()
        if mode == "staged":
            assert ask(ranked) == saved[1]
        else:
            with pytest.raises(WeightsTorn):
                ask(ranked)
        result = start()
        assert out.send(build("Qwen3Moe").state_dict()) == result()
        assert ask(ranked) == saved[1]


def test_ranks_give_their_memory_back_and_nothing_changes(saved, ranked):
    cache = sum(held for *_, held in ranked._worker.numbers())
    assert ranked.sleep() == {"weights": 0, "kv_cache": cache, "graphs": 0} and ranked.asleep == TAGS
    assert ranked.wake_up()["kv_cache"] == cache
    assert ask(ranked) == saved[1]
    ranked.sleep(level=2)
    ranked.wake_up()
    ranked.update_weights(state_of(saved[0]), numerics=ranked.numerics())
    assert ask(ranked) == saved[1]
    check_idle(ranked)


def test_a_rank_that_dies_is_named_and_all_are_made_anew(saved, ranked):
    ranked.update_weights(state_of(saved[0]), numerics=ranked.numerics())
    long = SamplingParams(max_new_tokens=110, seed=1, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool, held(ranked, 8) as (reached, go):
        running = pool.submit(ranked.generate, PROMPTS[:2], long)
        assert reached.wait(120)
        before = pids(ranked)
        os.kill(before[1], signal.SIGKILL)
        go.set()
        with pytest.raises(StageDied, match=r"rank \d has died \(signal 9\)|rank \d has failed"):
            running.result(300)
    with pytest.raises(WeightsTorn, match="weights that came by an update: update them again"):
        ranked.generate(PROMPTS[:1], long)
    ranked.update_weights(state_of(saved[0]), numerics=ranked.numerics())
    assert ask(ranked) == saved[1] and not any(map(is_alive, before))
    check_idle(ranked)


def test_a_rank_that_stands_still_is_named_within_the_limit(saved, ranked, monkeypatch):
    assert ask(ranked) == saved[1]
    with monkeypatch.context() as patch, stopped(pids(ranked)[1]):
        patch.setattr(limits, "STEP", 1.0)
        with pytest.raises(StageDied, match=r"a step did not come in time; nothing at all comes from rank 1$"):
            ranked.generate(PROMPTS[:1], MIXED[0])


# What cannot be


def test_sizes_that_do_not_divide_are_refused_before_anything_is_started(saved):
    with pytest.raises(ValueError, match=r"tensor_parallel_size: got 3, which does not fit 4 attention heads.*1, 2, 4"):
        Engine.from_pretrained(saved[0], device="cpu", config=replace(CONFIG, tensor_parallel_size=3))
    with pytest.raises(ValueError, match=r"tensor_parallel_size: got a loaded Qwen3\w+, expected a model directory"):
        Engine.from_pretrained(build("Qwen3"), config=RANKED)


def test_an_output_layer_with_a_bias_is_refused_before_anything_is_started(tmp_path):
    """Its bias is a column, of which no rank would have the rows."""
    pytest.importorskip("transformers.models.ernie4_5_moe")
    from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8}
    config = Ernie4_5_MoeConfig(vocab_size=24, use_bias=True, pad_token_id=0, eos_token_id=1, bos_token_id=2, **sizes)
    Ernie4_5_MoeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got 2, which does not fit an output layer with a bias: expected one of 1$"):
        Engine.from_pretrained(tmp_path, device="cpu", config=replace(CONFIG, tensor_parallel_size=2))


def test_ranks_whose_bits_are_others_are_refused_at_the_start(saved):
    """The columns of one are put in another's place."""
    twin = """
import torch
from vexact_engine.runner import ranks
gather = ranks.Group.gather
def swapped(self, x):
    return gather(self, x if x.dtype == torch.int64 else x.flip(1))
ranks.Group.gather = swapped
"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "CODE", twin + member.CODE)
        with pytest.raises(RuntimeError, match="layer 0 of the Qwen3MoeForCausalLM has other bits than in one rank"):
            Engine.from_pretrained(saved[0], device="cpu", config=RANKED)
