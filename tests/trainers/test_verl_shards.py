"""verl's own engines of several ranks under the vendor name vexact, and a rollout of as many: each rank sends what it
holds, and the rollout has the bits of the tensors that verl makes whole. So have several rollouts of one node's ranks,
where that is asked for. Where ranks of one node do not hold all together, rollouts get whole tensors."""

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
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
ADAPTED = {"adapter": LORA, "adapter_dtype": "bfloat16"}
TRAINED = {"model_config": {"lora_rank": 4, "lora_alpha": 8}}
VEOMNI = {"backend": "veomni", "data": {"use_fused_kernels": True}, "engine": {"mixed_precision": True}}
SHARDED = {  # of two ranks, and a rollout of two
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}-ranks": (family, RANKS) for family in ("qwen3-tied", "qwen3_moe", "deepseek_v3")},
    "stages": ("qwen3", {"rollout": {"pipeline_parallel_size": 2}}),
    "lora-ranks": ("qwen3", {**TRAINED, "rollout": {**ADAPTED, "tensor_parallel_size": 2}}),
    "bf16": ("qwen3_moe", {"engine": {"model_dtype": "bf16"}}),
    "offloaded": ("qwen3", {"engine": {"param_offload": True, "optimizer_offload": True}}),
    "kept-unsharded": ("qwen3", {"engine": {"reshard_after_forward": False}}),
    **{f"{family}-veomni": (family, VEOMNI) for family in ("qwen3-tied", "qwen3_moe", "deepseek_v3")},
}
SEVERAL = {"shards": "replicas"}
SHARDED["one-each"] = "qwen3", {"replica": 1, "group": 2, **SEVERAL}
EXPERTS = {**VEOMNI, "engine": {"mixed_precision": True, "expert_parallel_size": 2}}
WHOLE = {
    "experts-apart": ("qwen3_moe", EXPERTS),
    "experts-apart-one-each": ("qwen3_moe", {**EXPERTS, "replica": 1, **SEVERAL}),
    "all-on-each": ("qwen3", {"replica": 1, "engine": {"fsdp_size": 1}, **SEVERAL}),
    "a-node-each": ("qwen3", {"replica": 1, "node": 1, **SEVERAL}),
    "one-each-unasked": ("qwen3", {"replica": 1}),
}
COPIES = {"engine": {"fsdp_size": 2}}
SHARDED_OF_FOUR = {
    "two-each": ("qwen3_moe", {"group": 4, **RANKS, **SEVERAL}),
    "one-each": ("qwen3", {"replica": 1, "group": 4, **SEVERAL}),
    "one-each-veomni": ("qwen3_moe", {"replica": 1, "group": 4, **VEOMNI, **SEVERAL}),
    "copies": ("qwen3_moe", {**COPIES, "replica": 4}),
    "a-copy-each": ("deepseek_v3", COPIES),
    "a-copy-for-two": ("qwen3", {**COPIES, "replica": 1, "group": 2, **SEVERAL}),
    "a-copy-on-each-node": ("qwen3", {**COPIES, "replica": 1, "group": 2, "node": 2, **SEVERAL}),
}
WHOLE_OF_FOUR = {"nodes": ("qwen3", {"node": 2, **SEVERAL}), "two-each-unasked": ("qwen3", {})}
KEPT = [False, True, True, True, False, True, True]  # another sender for another server
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
    jobs += [job("another-dtype", folders, "qwen3", ANOTHER)]
    other = {"model_config": {"lora_rank": 4, "lora_alpha": 12}, "rollout": ADAPTED}
    jobs += [job("another-scale", folders, "qwen3", other)]
    return run(jobs, tmp_path_factory.mktemp("two") / "run", 2)


@pytest.fixture(scope="module")
def four(folders, tmp_path_factory):
    jobs = [job(name, folders, *given) for name, given in (SHARDED_OF_FOUR | WHOLE_OF_FOUR).items()]
    return run(jobs, tmp_path_factory.mktemp("four") / "run", 4)


def expected(path, weights, rows, **options):
    """What an engine has, and its log-probabilities, that was given what verl made whole; the latter before it too."""
    every = [prompt + response for prompt, response in rows]
    with Engine.from_pretrained(path, config=EngineConfig(num_pages=64, show_progress=False, **options)) as engine:
        before = scored(engine, every)
        if options:
            engine.update_weights(weights, numerics=engine.numerics())
        else:
            hand_over(engine, weights.items(), HFModelConfig(path=path))
        return (
            {name: tensor.clone() for name, tensor in engine.model.state_dict().items()},
            scored(engine, every),
            before,
        )


def check(found, leader, path, rows, **options):
    has, after, before = expected(path, found.weights, rows, **options)
    assert_bitwise(leader["scored"], after)
    assert any(not torch.equal(a, b) for a, b in zip(before, after)), "nothing was learnt"
    if "has" in leader:
        assert leader["has"].keys() == has.keys()
        for name, tensor in has.items():
            assert leader["has"][name].dtype == tensor.dtype
            assert_bitwise(leader["has"][name], tensor, name)


def of(seen, name):
    return [update[name] for update in seen]


def check_shards(found, path, wanted):
    """Of all groups of ranks that send together."""
    size = wanted.group or wanted.replica
    for first in range(0, len(found.handed), size):
        check_group(replace(found, handed=found.handed[first : first + size]), first, path, wanted)


def check_group(found, first, path, wanted):
    replicas = len(found.handed) // wanted.replica
    for leader in found.handed[:: wanted.replica]:
        check(found, leader, path, wanted.rows, **(ADAPTED if wanted.model_config else {}))
        assert leader["steps"] == [(1, 1), (4, 2), (5, 3), (7, 4)]
    seen = [rank["seen"] for rank in found.handed]
    for each in seen:
        assert of(each, "taken") == of(each, "gathers") == [0] * 7, "a collective that is not needed"
        assert of(each, "sender") == ["ShardedWeightSender"] * 7 and of(each, "kept") == KEPT
        assert of(each, "alone") == [False] * 6 + [bool(wanted.model_config)], "adapters without their base"
    errors = [list(step) for step in zip(*(of(each, "error") for each in seen))]
    assert [any(step) for step in errors] == [False, True, True, False, False, True, False]
    faulty, last = len(seen) - 1, (replicas - 1) * wanted.replica
    assert errors[1].pop(faulty) == "RuntimeError: no more memory"
    assert errors[1].pop(0) == f"HandoverFailed: rank {faulty}: no more memory"
    assert errors[1] == [f"HandoverFailed: rank 0: rank {faulty}: no more memory"] * len(errors[1])
    assert errors[2].pop(last) == "RuntimeError: no server"
    told = f"HandoverFailed: weights: rank {first + last} of the trainer: RuntimeError: no server"
    assert errors[2] == [told] * len(errors[2])
    refused = f"HandoverFailed: weights: receiver {replicas} of {replicas}" if replicas > 1 else "HandoverFailed: "
    said = errors[5].pop(0)
    assert said.startswith(refused) and said.endswith("refused: so")
    assert set(errors[5]) == {f"HandoverFailed: rank 0: {said.removeprefix('HandoverFailed: ')}"}


@pytest.mark.parametrize("name", SHARDED)
def test_each_rank_sends_what_it_holds(name, two, folders):
    family, _ = SHARDED[name]
    check_shards(two[name], folders[family], job(name, folders, *SHARDED[name]))


@pytest.mark.parametrize("name", SHARDED_OF_FOUR)
def test_each_of_four_ranks_sends_what_it_holds(name, four, folders):
    family, _ = SHARDED_OF_FOUR[name]
    check_shards(four[name], folders[family], job(name, folders, *SHARDED_OF_FOUR[name]))


def check_whole(found, path, wanted):
    for number, rank in enumerate(found.handed):
        seen, leads = rank["seen"], number % wanted.replica == 0
        assert len(set(of(seen, "taken"))) == 1 and seen[0]["taken"] > 20, "every rank takes every item"
        assert len(set(of(seen, "gathers"))) == 1 and seen[0]["gathers"] > 20
        assert of(seen, "sender") == ["WeightSender" if leads else "NoneType"] * 7
        refused = "HandoverFailed: weights: refused: so" if leads else ""
        assert of(seen, "error") == ["", "", "RuntimeError: no server" if leads else "", "", "", refused, ""]
        if leads:
            assert of(seen, "kept") == KEPT
            assert rank["steps"] == [(1, 1), (2, 2), (4, 3), (5, 4), (7, 5)]
            check(found, rank, path, wanted.rows)


@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_where_ranks_do_not_hold_them_together(name, two, folders):
    family, _ = WHOLE[name]
    check_whole(two[name], folders[family], job(name, folders, *WHOLE[name]))


@pytest.mark.parametrize("name", WHOLE_OF_FOUR)
def test_whole_tensors_where_who_holds_them_is_on_several_nodes_or_nobody_asks(name, four, folders):
    family, _ = WHOLE_OF_FOUR[name]
    check_whole(four[name], folders[family], job(name, folders, *WHOLE_OF_FOUR[name]))


def test_another_scale_is_refused_on_every_rank(two):
    said = "model.adapters.q_proj: the trainer has '3.0', the engine '2.0'"
    for rank in two["another-scale"].handed:
        errors = of(rank["seen"], "error")
        assert errors[0].startswith("HandoverFailed: ") and said in errors[0]


def test_another_dtype_is_refused_on_every_rank(two):
    said = "ValueError: vexact: actor.fsdp_config.mixed_precision.param_dtype: the trainer computes in float32, but "
    for rank in two["another-dtype"].handed:
        assert of(rank["seen"], "taken") == [0] * 7 and of(rank["seen"], "sender") == ["NoneType"] * 7
        assert all(error.startswith(said) for error in of(rank["seen"], "error"))
