"""verl's own engines of several ranks under the vendor name vexact, and a rollout of as many: each rank sends what it
holds, and the rollout has the bits of the tensors that verl makes whole. A rollout of fewer ranks gets those."""

from dataclasses import replace

import pytest
import torch
from verl.workers.config import HFModelConfig

from vexact_engine import Engine, EngineConfig
from vexact_ops.testing import assert_bitwise

from .actor_ranks import Job, run
from .handing import hand_over, scored
from .models import make_model

FAMILIES = {"qwen3": {}, "qwen3-tied": {"tie_word_embeddings": True}, "qwen3_moe": {}, "deepseek_v3": {}}
RANKS = {"rollout": {"tensor_parallel_size": 2}}
VEOMNI = {"backend": "veomni", "data": {"use_fused_kernels": True}, "engine": {"mixed_precision": True}}
SHARDED = {  # of two ranks, and a rollout of two
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}-ranks": (family, RANKS) for family in ("qwen3-tied", "qwen3_moe", "deepseek_v3")},
    "stages": ("qwen3", {"rollout": {"pipeline_parallel_size": 2}}),
    "bf16": ("qwen3_moe", {"engine": {"model_dtype": "bf16"}}),
    "offloaded": ("qwen3", {"engine": {"param_offload": True, "optimizer_offload": True}}),
    "kept-unsharded": ("qwen3", {"engine": {"reshard_after_forward": False}}),
    **{f"{family}-veomni": (family, VEOMNI) for family in ("qwen3-tied", "qwen3_moe", "deepseek_v3")},
}
EXPERTS = {**VEOMNI, "engine": {"mixed_precision": True, "expert_parallel_size": 2}}
WHOLE = {"one-each": ("qwen3", {"replica": 1}), "experts-apart": ("qwen3_moe", EXPERTS)}
KEPT = [False, True, True, True, False]  # another sender for another server
ANOTHER = {"engine": {"mixed_precision": {"param_dtype": "fp32"}}}


def job(name, folders, family="qwen3", changes=None, **more) -> Job:
    g = torch.Generator().manual_seed(0)
    rows = [(torch.randint(0, 256, (n,), generator=g).tolist(), [5, 6, 7]) for n in (5, 9, 3, 12, 7, 4, 8, 6)]
    return Job(name, folders[family], rows, **{"steps": 1, "replica": 2, **(changes or {}), **more})


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: str(make_model(name.partition("-")[0], base / name, **kw)) for name, kw in FAMILIES.items()}


@pytest.fixture(scope="module")
def two(folders, tmp_path_factory):
    jobs = [job(name, folders, *given) for name, given in (SHARDED | WHOLE).items()]
    return run([*jobs, job("another-dtype", folders, "qwen3", ANOTHER)], tmp_path_factory.mktemp("two") / "run", 2)


@pytest.fixture(scope="module")
def four(folders, tmp_path_factory):
    copies = {"engine": {"fsdp_size": 2}}
    jobs = [
        job("two-each", folders),
        job("copies", folders, "qwen3_moe", copies, replica=4),
        job("a-copy-each", folders, "deepseek_v3", copies),
    ]
    return run(jobs, tmp_path_factory.mktemp("four") / "run", 4)


def expected(path, weights, rows):
    """What an engine has, and its log-probabilities, that was given what verl made whole; the latter before it too."""
    every = [prompt + response for prompt, response in rows]
    with Engine.from_pretrained(path, config=EngineConfig(num_pages=64, show_progress=False)) as engine:
        before = scored(engine, every)
        hand_over(engine, weights.items(), HFModelConfig(path=path))
        return (
            {name: tensor.clone() for name, tensor in engine.model.state_dict().items()},
            scored(engine, every),
            before,
        )


def check(found, leader, path, rows):
    has, after, before = expected(path, found.weights, rows)
    assert_bitwise(leader["scored"], after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after)), "nothing was learnt"
    if "has" in leader:
        assert leader["has"].keys() == has.keys()
        for name, tensor in has.items():
            assert leader["has"][name].dtype == tensor.dtype
            assert_bitwise(leader["has"][name], tensor, name)


def of(seen, name):
    return [update[name] for update in seen]


def check_shards(found, path, rows):
    leader, *others = found.handed
    check(found, leader, path, rows)
    assert leader["steps"] == [(1, 1), (4, 2), (5, 3)]
    for rank in found.handed:
        seen = rank["seen"]
        assert of(seen, "taken") == of(seen, "gathers") == [0] * 5, "a collective that is not needed"
        assert of(seen, "sender") == ["ShardedWeightSender"] * 5 and of(seen, "kept") == KEPT
        errors = of(seen, "error")
        assert errors[0] == errors[3] == errors[4] == "" and "no more memory" in errors[1]
    errors = of(leader["seen"], "error")
    assert errors[1].startswith("HandoverFailed: rank ") and errors[2] == "RuntimeError: no server"
    assert "RuntimeError: no more memory" in [of(rank["seen"], "error")[1] for rank in others]
    told = "HandoverFailed: weights: rank 0 of the replica: RuntimeError: no server"
    assert {of(rank["seen"], "error")[2] for rank in others} == {told}


@pytest.mark.parametrize("name", SHARDED)
def test_each_rank_sends_what_it_holds(name, two, folders):
    family, _ = SHARDED[name]
    check_shards(two[name], folders[family], job(name, folders).rows)


def test_copies_of_a_model_that_is_cut(four, folders):
    check_shards(four["copies"], folders["qwen3_moe"], job("", folders).rows)


def test_a_replica_of_the_ranks_of_a_copy(four, folders):
    found, rows = four["a-copy-each"], job("", folders).rows
    for first in 0, 2:
        ranks = replace(found, handed=found.handed[first : first + 2])
        check_shards(ranks, folders["deepseek_v3"], rows)


def check_whole(found, size, path, rows):
    for number, rank in enumerate(found.handed):
        seen, leads = rank["seen"], number % size == 0
        assert len(set(of(seen, "taken"))) == 1 and seen[0]["taken"] > 20, "every rank takes every item"
        assert len(set(of(seen, "gathers"))) == 1 and seen[0]["gathers"] > 20
        assert of(seen, "sender") == ["WeightSender" if leads else "NoneType"] * 5
        assert of(seen, "error") == ["", "", "RuntimeError: no server" if leads else "", "", ""]
        if leads:
            assert of(seen, "kept") == KEPT
            assert rank["steps"] == [(1, 1), (2, 2), (4, 3), (5, 4)]
            check(found, rank, path, rows)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_where_ranks_do_not_hold_them_together(name, two, folders):
    family, changes = WHOLE[name]
    check_whole(two[name], changes.get("replica", 2), folders[family], job(name, folders).rows)


def test_replicas_of_some_of_the_ranks_get_whole_tensors(four, folders):
    check_whole(four["two-each"], 2, folders["qwen3"], job("", folders).rows)


def test_another_dtype_is_refused_on_every_rank(two):
    said = "ValueError: vexact: actor.fsdp_config.mixed_precision.param_dtype: the trainer computes in float32, but "
    for rank in two["another-dtype"].handed:
        assert of(rank["seen"], "taken") == [0] * 5 and of(rank["seen"], "sender") == ["NoneType"] * 5
        assert all(error.startswith(said) for error in of(rank["seen"], "error"))
