"""verl's own FSDP2 and VeOmni engines under the vendor name vexact, on one rank, on two and on four: what they compute
of a rollout is what our engine computed, byte for byte, before and after they trained; and verl's stock engines do not.
VEXACT_TRAINERS=all has more on four ranks."""

import os
import subprocess
import sys

import pytest
import torch
from verl.workers.config import HFModelConfig
from verl.workers.config.model import MtpConfig

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.verl.lora import rollout_adapter
from vexact_ops.testing import assert_bitwise

from .actor_ranks import Job, run
from .environment import environment
from .handing import hand_over, scored
from .models import make_model

FAMILIES = {
    "qwen3": {},
    "qwen3-tied": {"tie_word_embeddings": True},
    "qwen3_moe": {},
    "deepseek_v3": {},
}
LENGTHS = (5, 9, 3, 12)
STEPS = 2
IN_BF16 = ("qwen3", "deepseek_v3")  # whose weights are held so: no masters in fp32
# What verl's settings may be without a bit of the log-probabilities changing, and (whether) of the trained weights.
SAME = {
    "again": ({}, True),
    "fused": ({"data": {"use_fused_kernels": True}}, True),
    "padded": ({"data": {"use_remove_padding": False}}, False),
    "padded-fused": ({"data": {"use_remove_padding": False, "use_fused_kernels": True}}, False),
    "dynamic": ({"data": {"use_dynamic_bsz": True, "max_token_len_per_gpu": 24}}, False),
    "checkpointed": ({"model_config": {"enable_gradient_checkpointing": True}}, True),
    "compile-left-on": ({"engine": {"use_torch_compile": True}}, True),
    "static-lengths": ({"engine": {"pad_to_length": True, "pad_to_length_bucket": 16}}, False),
    "synchronised-each-time": ({"engine": {"use_no_sync_for_gradient_accumulation": False}}, False),
    "kept-unsharded": ({"engine": {"reshard_after_forward": False}}, True),
    "offloaded": ({"engine": {"param_offload": True, "optimizer_offload": True}}, True),
    "chunked-entropy": ({"engine": {"entropy_from_logits_with_chunking": True}}, True),
}
VEOMNI_SAME = {
    "again": ({}, True),
    "padded": ({"data": {"use_remove_padding": False}}, False),
    "not-fused": ({"data": {"use_fused_kernels": False}}, True),
    "checkpointed": ({"model_config": {"enable_gradient_checkpointing": True}}, True),
}
REFUSED = {
    "ulysses": (
        {"engine": {"ulysses_sequence_parallel_size": 3}},
        "ulysses_sequence_parallel_size: got 3, expected a divisor of num_attention_heads, ",
    ),
    "lora-merged": (
        {"model_config": {"lora_rank": 8, "lora": {"merge": True}}},
        "lora.merge: got True, expected False",
    ),
    "lora-without-rank": (
        {"model_config": {"lora_adapter_path": "some/adapter"}},
        "lora_adapter_path: got some/adapter with lora_rank=0, where verl makes no adapter",
    ),
    "lora-of-experts": (
        {"model_config": {"lora_rank": 8, "target_parameters": ["mlp.experts.gate_up_proj"]}},
        "target_parameters: got ['mlp.experts.gate_up_proj'], expected null",
    ),
    "lora-of-the-output-layer": (
        {"model_config": {"lora_rank": 8, "target_modules": ["q_proj", "lm_head"]}},
        "model.target_modules: got ['q_proj', 'lm_head']: patch.hf: Qwen3ForCausalLM has modules whose bits could",
    ),
    "lora-of-megatron": ({"model_config": {"lora": {"rank": 8}}}, "lora.rank: got 8, expected 0"),
    "liger": ({"model_config": {"use_liger": True}}, "use_liger: got True"),
    "mtp": ({"model_config": {"mtp": MtpConfig(enable=True, enable_train=True)}}, "mtp.enable_train: got True"),
    "tiled": ({"model_config": {"tiled_mlp": {"enabled": True}}}, "tiled_mlp.enabled: got True, expected False"),
    "activations": ({"model_config": {"enable_activation_offload": True}}, "enable_activation_offload: got True"),
    "fsdp1": ({"backend": "fsdp"}, "strategy: got fsdp, but VERL_ENGINE_VENDOR=vexact serves fsdp2 and veomni"),
    "computed-in-fp32": (
        {"engine": {"mixed_precision": {"param_dtype": "fp32"}}, "handed_over": True},
        "vexact: actor.fsdp_config.mixed_precision.param_dtype: the trainer computes in float32, but rollout.dtype is "
        "bfloat16",
    ),
    "said-twice": (
        {"model_config": {"override_config": {"rope_theta": 1e6}}},
        "vexact: model.override_config: rope_theta: got 1000000.0 beside rope_parameters, where it is 10000.0",
    ),
    "another-reference": (
        {"reference": {"mixed_precision": {"param_dtype": "fp32"}}},
        "vexact: the reference policy: ref.fsdp_config.mixed_precision.param_dtype: the actor computes in bfloat16, it "
        "in float32",
    ),
    "another-epsilon": (
        {"model_config": {"override_config": {"rms_norm_eps": 1e-3}}, "handed_over": True},
        "weights: refused: numerics: model.layers.blocks.0.part.q_norm.eps: the trainer has 0.001, the engine 1e-06",
    ),
    "another-rotation": (
        {"set_in_code": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "handed_over": True},
        "weights: refused: numerics: model.rotary.0.inv_freq: the trainer has '1 to ",
    ),
    "sum-pi": ({"data": {"calculate_sum_pi_squared": True}}, "calculate_sum_pi_squared: it needs T x V logits"),
    "top-k": ({"data": {"distillation_use_topk": True}}, "distillation_use_topk: it needs T x V logits"),
    "option": (
        {"model_config": {"fused_kernel_options": {"vexact": {"segment": 64}}}},
        "model.fused_kernel_options.vexact: got segment",
    ),
}


ADAPTED = {
    "lora": ("qwen3", {"model_config": {"lora_rank": 4, "lora_alpha": 8}}),
    "lora-tied": ("qwen3-tied", {"model_config": {"lora_rank": 4, "exclude_modules": ".*(gate|up|down)_proj"}}),
    "lora-kept-unsharded": (
        "qwen3",
        {"model_config": {"lora_rank": 4, "lora_alpha": 8}, "engine": {"reshard_after_forward": False}},
    ),
    "lora-in-bf16": ("qwen3", {"model_config": {"lora_rank": 3}, "engine": {"model_dtype": "bf16"}}),
    "lora-of-attention": (
        "qwen3_moe",
        {"model_config": {"lora_rank": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}},
    ),
    "lora-continued": ("qwen3", {"model_config": {"lora_rank": 4}}),  # of an adapter that was trained elsewhere
}


class Rollout:
    """What our engine drew, and its log-probability of every token."""

    def __init__(self, path, temperatures=(1.0,), kv_segment=None, lengths=LENGTHS):
        g = torch.Generator().manual_seed(0)
        prompts = [torch.randint(0, 256, (n,), generator=g).tolist() for n in lengths]
        temperatures = [temperatures[i % len(temperatures)] for i in range(len(prompts))]
        params = [
            SamplingParams(max_new_tokens=9, temperature=t, seed=3 + i, prompt_logprobs=True, ignore_eos=True)
            for i, t in enumerate(temperatures)
        ]
        with Engine.from_pretrained(path, config=EngineConfig(num_pages=128, kv_segment=kv_segment)) as engine:
            self.done = engine.generate(prompts, params)
        self.rows = [(c.prompt_ids, c.token_ids) for c in self.done]

    def every(self) -> list[torch.Tensor]:
        """Of all tokens but the first, for rows drawn at temperature 1."""
        return [torch.tensor([*c.prompt_logprobs[1:], *c.logprobs]) for c in self.done]

    def drawn(self) -> list[torch.Tensor]:
        return [torch.tensor(c.logprobs) for c in self.done]


def checking(rollout, flipped=(), **options):
    """A job that checks what the rollout says, in which a bit of the fifth token of some rows is another one."""
    drawn = rollout.drawn()
    for row in flipped:
        drawn[row][4:5].view(torch.int32)[:] ^= 1
    given = {"fused_kernel_options": {"impl_backend": "torch", "vexact": options}}
    return {"model_config": given, "drawn": drawn, "handed_over": True}


SHARED = ("qwen3", "qwen3_moe", "deepseek_v3")  # whose rows several ranks share
ALL = os.environ.get("VEXACT_TRAINERS") == "all"
WHOLE = {
    "model_config": {"fused_kernel_options": {"impl_backend": "torch", "vexact": {"whole_gradients": True}}},
    "optimizer": {"clip_grad": 0.05},  # so that it cuts
    "digested": True,
}


def without_last(rows):
    """The last value of a row belongs to a token that is not there."""
    return [row[:-1] for row in rows]


def of_responses(rows, rollout):
    return [row[len(prompt) - 1 : -1] for row, (prompt, _) in zip(rows, rollout.rows)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {name: str(make_model(name.partition("-")[0], base / name, **kw)) for name, kw in FAMILIES.items()}


@pytest.fixture(scope="module")
def rollouts(folders):
    found = {name: Rollout(path) for name, path in folders.items()}
    found["cooler"] = Rollout(folders["qwen3"], (0.7,))
    found["mixed"] = Rollout(folders["qwen3"], (0.7, 1.3))
    found["segments"] = Rollout(folders["qwen3"], kv_segment=64, lengths=(150, 70, 3, 129))
    return found


@pytest.fixture(scope="module")
def adapter(folders, tmp_path_factory):
    """An adapter of qwen3 as PEFT saves one: of the queries alone, whose B is no longer 0. -> its folder"""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.bfloat16)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, use_rslora=True, target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return str(folder)


def adapted(name, adapter) -> dict:
    family, changes = ADAPTED[name]
    if name == "lora-continued":
        changes = {"model_config": {**changes["model_config"], "lora_adapter_path": adapter}}
    return {"family": family, **changes}


def job(name, folders, rollouts, family="qwen3", rollout=None, steps=STEPS, **changes) -> Job:
    return Job(name, folders[family], rollouts[rollout or family].rows, steps=steps, **changes)


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def fsdp2(request, folders, rollouts, adapter, tmp_path_factory):
    """Every job of FSDP2's, on this many ranks."""
    segments = {"fused_kernel_options": {"vexact": {"kv_segment": 64}}}
    jobs = [
        *(job(family, folders, rollouts, family) for family in FAMILIES),
        *(job(name, folders, rollouts, **changes) for name, (changes, _) in SAME.items()),
        job("reference", folders, rollouts, engine={"forward_only": True}),
        job("beside-a-reference", folders, rollouts, steps=0, reference={"model_dtype": "bf16"}),
        job("cooler", folders, rollouts, rollout="cooler", temperature=0.7),
        job("mixed", folders, rollouts, rollout="mixed", temperature=[0.7, 1.3, 0.7, 1.3]),
        job(
            "mixed-padded",
            folders,
            rollouts,
            rollout="mixed",
            temperature=[0.7, 1.3, 0.7, 1.3],
            data={"use_remove_padding": False},
        ),
        *(job(f"{family}-in-bf16", folders, rollouts, family, engine={"model_dtype": "bf16"}) for family in IN_BF16),
        job("saved", folders, rollouts, saved=str(tmp_path_factory.mktemp("saved"))),
        job("saved-tied", folders, rollouts, "qwen3-tied", saved=str(tmp_path_factory.mktemp("saved"))),
        job("segments", folders, rollouts, rollout="segments", steps=0, model_config=segments),
        *(job(name, folders, rollouts, **adapted(name, adapter)) for name in ADAPTED),
        job("lora-saved", folders, rollouts, saved=str(tmp_path_factory.mktemp("saved")), **adapted("lora", adapter)),
        *(job(name, folders, rollouts, refused=True, **changes) for name, (changes, _) in REFUSED.items()),
    ]
    drawn, wrong = rollouts["qwen3"], {"check_every": 3, "check_share": 1}
    jobs += [
        job("checked", folders, rollouts, **checking(drawn, check_every=3, check_share=0.5)),
        job("not-due", folders, rollouts, steps=1, **checking(drawn, flipped=range(4), check_every=4)),
        job("wrong", folders, rollouts, refused=True, **checking(drawn, flipped=(0, 2), **wrong)),
        job("no-drawn", folders, rollouts, refused=True, **(checking(drawn, check_every=1) | {"drawn": []})),
    ]
    if request.param == 1:
        jobs += [job(f"{family}-whole", folders, rollouts, family, **WHOLE) for family in SHARED]
    elif ALL:
        two = {"ulysses_sequence_parallel_size": 2}
        jobs += [job(f"{family}-shared", folders, rollouts, family, engine=two) for family in SHARED]
    return run(jobs, tmp_path_factory.mktemp("fsdp2") / "run", request.param)


@pytest.fixture(scope="module")
def four(folders, rollouts, tmp_path_factory):
    """Four ranks that share each row, of which some have no key head: FSDP2's, and VeOmni's with its ranks by twos."""

    def made(name, family, **changes):
        return job(name, folders, rollouts, family, **changes)

    shared = {"ulysses_sequence_parallel_size": 4}
    jobs = [made(f"{family}-whole", family, engine=shared, **WHOLE) for family in SHARED]
    jobs += [made("qwen3-shared", "qwen3", engine=shared, **{**WHOLE, "model_config": {}})]
    if ALL:
        veomni = {"backend": "veomni", "data": {"use_fused_kernels": True}}
        sizes = {"mixed_precision": True, "ulysses_parallel_size": 4}
        jobs += [made(f"{family}-veomni", family, engine=sizes, **veomni) for family in SHARED]
        for experts in 2, 4:
            for size in 2, 4:
                sizes = {"mixed_precision": True, "ulysses_parallel_size": size, "expert_parallel_size": experts}
                jobs += [made(f"veomni-{experts}x{size}", "qwen3_moe", engine=sizes, **veomni)]
    return run(jobs, tmp_path_factory.mktemp("four") / "run", 4)


@pytest.fixture(scope="module")
def veomni(folders, rollouts, tmp_path_factory):
    """VeOmni's, on two ranks: on one it has no FSDP."""

    def made(name, family="qwen3", **changes):
        engine = {"mixed_precision": True, **changes.pop("engine", {})}
        data = {"use_fused_kernels": True, **changes.pop("data", {})}
        return job(name, folders, rollouts, family, backend="veomni", engine=engine, data=data, **changes)

    jobs = [
        *(made(family, family) for family in FAMILIES),
        *(made(name, **changes) for name, (changes, _) in VEOMNI_SAME.items()),
        made("bf16-weights", engine={"mixed_precision": False}),
        made("cooler", rollout="cooler", temperature=0.7),
        made("experts-apart", "qwen3_moe", engine={"expert_parallel_size": 2}),
        *(made(f"{family}-shared", family, engine={"ulysses_parallel_size": 2}) for family in SHARED),
        made("experts-apart-shared", "qwen3_moe", engine={"ulysses_parallel_size": 2, "expert_parallel_size": 2}),
        made("ulysses", engine={"ulysses_parallel_size": 3}, refused=True),
        made("whole", engine={"ulysses_parallel_size": 2}, refused=True, model_config=WHOLE["model_config"]),
        made("override", refused=True, model_config={"override_config": {"rms_norm_eps": 1e-2}}),
        made("lora", refused=True, model_config={"lora_rank": 8}),
        made("quantised", refused=True, engine={"qat_implementation": "fp8_blockwise"}),
    ]
    return run(jobs, tmp_path_factory.mktemp("veomni") / "run", 2)


# ---- FSDP2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_log_probability_is_the_rollout_s(family, fsdp2, rollouts):
    assert_bitwise(without_last(fsdp2[family].logprobs), rollouts[family].every(), "old_log_probs")
    assert_bitwise(without_last(fsdp2[family].trained[0]), rollouts[family].every(), "the first training forward")


@pytest.mark.parametrize("family", FAMILIES)
def test_entropies_are_the_patched_model_s(family, fsdp2, rollouts, folders):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.bfloat16).eval()
    with vx.patch.hf(model) as handle, torch.no_grad():
        rows = [torch.tensor(prompt + response) for prompt, response in rollouts[family].rows]
        expected = [handle.logprobs(row, return_entropy=True)[1] for row in rows]
    assert_bitwise(without_last(fsdp2[family].entropy), without_last(expected))


def moved(path, weights, rows):
    """Our engine with what the trainer handed over, by our adapter: its log-probability of every token but the first,
    before and after."""
    every = [prompt + response for prompt, response in rows]
    with Engine.from_pretrained(path, config=EngineConfig(num_pages=128)) as engine:
        before = scored(engine, every)
        hand_over(engine, weights.items(), HFModelConfig(path=path))
        return before, scored(engine, every)


@pytest.mark.parametrize("family", FAMILIES)
def test_after_training_they_are_those_of_the_handed_over_weights(family, fsdp2, rollouts, folders):
    weights = fsdp2[family].weights
    before, after = moved(folders[family], weights, rollouts[family].rows)
    assert_bitwise(without_last(fsdp2[family].after), after)
    assert any(not torch.equal(b, a) for b, a in zip(before, after)), "nothing was learnt"
    others = {name for name, tensor in weights.items() if tensor.dtype != torch.bfloat16}
    assert all(name.endswith("e_score_correction_bias") for name in others), "as the trainer's forward has them"


def check_shared(found, family, rollouts, folders):
    """What two ranks compute that share each row."""
    rows = rollouts[family].rows
    assert_bitwise(without_last(found.logprobs), rollouts[family].every(), "old_log_probs")
    assert_bitwise(without_last(found.trained[0]), rollouts[family].every(), "the first training forward")
    before, after = moved(folders[family], found.weights, rows)
    assert_bitwise(without_last(found.after), after, "after training")
    assert any(not torch.equal(b, a) for b, a in zip(before, after)), "nothing was learnt"


@pytest.mark.parametrize("fsdp2", [1], ids=["1 rank"], indirect=True)
@pytest.mark.parametrize("family", SHARED)
def test_rows_that_four_ranks_share(family, fsdp2, four, rollouts, folders):
    """Ulysses, with whole_gradients: log-probabilities, entropies, gradients' norms and trained weights of one rank."""
    found, one = four[f"{family}-whole"], fsdp2[f"{family}-whole"]
    check_shared(found, family, rollouts, folders)
    assert_bitwise(without_last(found.entropy), without_last(one.entropy), "entropies")
    assert found.metrics == one.metrics and all(step["grad_norm"] > 0.05 for step in one.metrics)
    assert found.sha256 == one.sha256
    assert_bitwise(without_last(found.after), without_last(one.after), "after training")


@pytest.mark.parametrize("fsdp2", [1], ids=["1 rank"], indirect=True)
def test_without_whole_gradients_four_ranks_learn_something_else(fsdp2, four, rollouts, folders):
    found, one = four["qwen3-shared"], fsdp2["qwen3-whole"]
    check_shared(found, "qwen3", rollouts, folders)
    assert found.sha256 != one.sha256


@pytest.mark.skipif(not ALL, reason="VEXACT_TRAINERS=all: four ranks are of the same kind")
@pytest.mark.parametrize("fsdp2", [2], ids=["2 ranks"], indirect=True)
@pytest.mark.parametrize("family", SHARED)
def test_rows_that_two_ranks_share(family, fsdp2, rollouts, folders):
    found = fsdp2[f"{family}-shared"]
    check_shared(found, family, rollouts, folders)
    assert_bitwise(without_last(found.entropy), without_last(fsdp2[family].entropy), "entropies")


@pytest.mark.skipif(not ALL, reason="VEXACT_TRAINERS=all: two ranks are of the same kind")
@pytest.mark.parametrize(
    "name", [*(f"{family}-veomni" for family in SHARED), *(f"veomni-{e}x{s}" for e in (2, 4) for s in (2, 4))]
)
def test_veomni_rows_that_ranks_of_four_share(name, four, rollouts, folders):
    check_shared(four[name], next((f for f in SHARED if name == f"{f}-veomni"), "qwen3_moe"), rollouts, folders)


@pytest.mark.parametrize("family", IN_BF16)
def test_weights_in_bf16(family, fsdp2, rollouts, folders):
    """verl's fsdp_config.model_dtype: all of the model is cast, with its rotary frequencies and its routers."""
    found, rollout = fsdp2[f"{family}-in-bf16"], rollouts[family]
    assert {tensor.dtype for tensor in found.weights.values()} == {torch.bfloat16}
    assert_bitwise(without_last(found.logprobs), rollout.every(), "old_log_probs")
    assert_bitwise(without_last(found.trained[0]), rollout.every(), "the first training forward")
    _, after = moved(folders[family], found.weights, rollout.rows)
    assert_bitwise(without_last(found.after), after, "after training")


@pytest.mark.parametrize("name", SAME)
def test_settings_that_change_no_bit(name, fsdp2, rollouts):
    got, base = fsdp2[name], fsdp2["qwen3"]
    assert_bitwise(without_last(got.logprobs), rollouts["qwen3"].every(), "log-probabilities")
    assert_bitwise(without_last(got.entropy), without_last(base.entropy), "entropies")
    assert got.weights.keys() == base.weights.keys()
    if SAME[name][1]:
        assert got.metrics == base.metrics
        assert_bitwise(list(got.weights.values()), list(base.weights.values()), "trained weights")
        assert_bitwise(without_last(got.after), without_last(base.after), "log-probabilities after training")


def test_what_the_rollout_says_is_checked_before_the_first_update_of_a_step(fsdp2):
    """And changes nothing; a bit that differs is named, unless its step is not one of those that are checked."""
    got, base = fsdp2["checked"], fsdp2["qwen3"]
    assert [step["rollout_checked"] for step in got.metrics] == [[18.0], [0.0]]
    assert [step["rollout_checked"] for step in base.metrics] == [[0.0]] * STEPS
    assert_bitwise(list(got.weights.values()), list(base.weights.values()), "trained weights")
    assert [step["rollout_checked"] for step in fsdp2["not-due"].metrics] == [[0.0]]
    assert fsdp2["wrong"].error.startswith("vexact: step 7, answer 1 of "), fsdp2["wrong"].error
    assert ", token 5 of 9 (id " in fsdp2["wrong"].error
    assert fsdp2["no-drawn"].error.startswith("vexact: check_every: the batch has no rollout_log_probs")


@pytest.mark.parametrize("name", ["reference", "beside-a-reference"])
def test_a_reference_policy(name, fsdp2, rollouts):
    """By itself, and in one process with its actor, whose log-probabilities it has (actor_ranks)."""
    assert_bitwise(without_last(fsdp2[name].logprobs), rollouts["qwen3"].every())


@pytest.mark.parametrize("name,rollout", [("cooler", "cooler"), ("mixed", "mixed"), ("mixed-padded", "mixed")])
def test_other_temperatures(name, rollout, fsdp2, rollouts):
    drawn = rollouts[rollout].drawn()
    assert_bitwise(of_responses(fsdp2[name].logprobs, rollouts[rollout]), drawn, "old_log_probs")
    assert_bitwise(of_responses(fsdp2[name].trained[0], rollouts[rollout]), drawn, "the first training forward")


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_are_computed_as_the_rollout_computes_them(name, fsdp2, rollouts, folders, adapter):
    """Unmerged, in bf16: before training and after it; without them, for a reference policy, the base's bits."""
    given = adapted(name, adapter)
    family, found, continued = given["family"], fsdp2[name], name == "lora-continued"
    every = [prompt + response for prompt, response in rollouts[family].rows]
    config = adapter if continued else rollout_adapter(HFModelConfig(path=folders[family], **given["model_config"]))
    config = EngineConfig(num_pages=128, adapter=config, adapter_dtype="bfloat16")
    with Engine.from_pretrained(folders[family], config=config) as engine:
        before = scored(engine, every)
        engine.update_weights(found.weights, numerics=engine.numerics())
        after = scored(engine, every)
    assert_bitwise(without_last(found.logprobs), before, "old_log_probs")
    assert_bitwise(without_last(found.trained[0]), before, "the first training forward")
    assert_bitwise(without_last(found.after), after, "after training")
    for base in found.base:
        assert_bitwise(without_last(base), rollouts[family].every(), "without adapters")
    assert torch.equal(torch.cat(before), torch.cat(rollouts[family].every())) is not continued
    trained = {name: tensor for name, tensor in found.weights.items() if ".lora_" in name}
    assert {tensor.dtype for tensor in trained.values()} == {torch.bfloat16} and all(map(torch.any, trained.values()))
    assert all(step["grad_norm"] > 0.01 for step in found.metrics)


def test_settings_that_change_no_bit_of_adapters(fsdp2):
    """Of parameters that FSDP2 keeps gathered, adapters are trained on after the reference policy went without them."""
    got, base = fsdp2["lora-kept-unsharded"], fsdp2["lora"]
    assert got.metrics == base.metrics
    assert_bitwise(list(got.weights.values()), list(base.weights.values()), "trained weights")


@pytest.mark.parametrize("name,family", [("saved", "qwen3"), ("saved-tied", "qwen3-tied"), ("lora-saved", "lora")])
def test_checkpoints_are_read_back(name, family, fsdp2):
    assert_bitwise(without_last(fsdp2[name].after), without_last(fsdp2[family].after))
    assert_bitwise(without_last(fsdp2[name].restored), without_last(fsdp2[name].after))


def test_segments_of_keys_are_the_rollout_s(fsdp2, rollouts):
    assert_bitwise(without_last(fsdp2["segments"].logprobs), rollouts["segments"].every())


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named(name, fsdp2):
    assert fsdp2[name].error.startswith(REFUSED[name][1])


# ---- VeOmni


@pytest.mark.parametrize("family", FAMILIES)
def test_veomni_every_log_probability_is_the_rollout_s(family, veomni, rollouts, folders):
    assert_bitwise(without_last(veomni[family].logprobs), rollouts[family].every(), "old_log_probs")
    assert_bitwise(without_last(veomni[family].trained[0]), rollouts[family].every(), "the first training forward")
    _, after = moved(folders[family], veomni[family].weights, rollouts[family].rows)
    assert_bitwise(without_last(veomni[family].after), after, "after training")


@pytest.mark.parametrize("name", VEOMNI_SAME)
def test_veomni_settings_that_change_no_bit(name, veomni, rollouts):
    got, base = veomni[name], veomni["qwen3"]
    assert_bitwise(without_last(got.logprobs), rollouts["qwen3"].every(), "log-probabilities")
    if VEOMNI_SAME[name][1]:
        assert_bitwise(list(got.weights.values()), list(base.weights.values()), "trained weights")


def test_veomni_experts_on_two_ranks(veomni, rollouts, folders):
    got = veomni["experts-apart"]
    assert_bitwise(without_last(got.logprobs), rollouts["qwen3_moe"].every(), "old_log_probs")
    _, after = moved(folders["qwen3_moe"], got.weights, rollouts["qwen3_moe"].rows)
    assert_bitwise(without_last(got.after), after, "after training")


def test_veomni_weights_in_bf16_and_other_temperatures(veomni, rollouts):
    assert_bitwise(without_last(veomni["bf16-weights"].logprobs), rollouts["qwen3"].every())
    assert_bitwise(of_responses(veomni["cooler"].logprobs, rollouts["cooler"]), rollouts["cooler"].drawn())
    assert veomni["ulysses"].error.startswith("ulysses_parallel_size: got 3, expected a divisor of")
    assert veomni["override"].error.startswith("override_config.rms_norm_eps: got 0.01, but ")
    assert veomni["whole"].error.startswith("whole_gradients: got True with strategy=veomni, expected fsdp2")
    assert veomni["lora"].error.startswith("lora_rank: got 8 with strategy=veomni, expected 0: verl's VeOmni engine")
    assert veomni["quantised"].error.startswith("qat_implementation: got fp8_blockwise, expected none")


@pytest.mark.parametrize("name", [*(f"{family}-shared" for family in SHARED), "experts-apart-shared"])
def test_veomni_rows_that_two_ranks_share(name, veomni, rollouts, folders):
    check_shared(veomni[name], next((f for f in SHARED if name == f"{f}-shared"), "qwen3_moe"), rollouts, folders)


# ---- what must fail, and registering


def test_the_stock_engines_fail_it(folders, rollouts, tmp_path):
    jobs = [job(family, folders, rollouts, family, steps=0) for family in FAMILIES]
    found = run(jobs, tmp_path / "run", 2, vendor=None)
    for family in FAMILIES:
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise(without_last(found[family].logprobs), rollouts[family].every())


TWICE = """
import importlib
from verl.workers import engine as engines
from verl.workers.engine import EngineRegistry
stock = {(b, d): c for b, own in EngineRegistry._engines["language_model"].items() for d, c in own.items()}
import vexact_engine.verl.actor as actor
first = {(b, d): c for b, own in EngineRegistry._engines["language_model"].items() for d, c in own.items()}
actor.register()
again = {(b, d): c for b, own in EngineRegistry._engines["language_model"].items() for d, c in own.items()}
assert first == again and all(first[key] is cls for key, cls in stock.items())
assert {d for _, d in first.keys() - stock.keys()} == {("cuda", "vexact"), ("cpu", "vexact")}
assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is actor.AlignedFSDPEngine
served = actor.RefusedEngine if engines.VeOmniEngineWithLMHead is None else actor.AlignedEngine
assert issubclass(EngineRegistry.get_engine_cls("language_model", "veomni"), served)
for backend in actor.OTHERS:
    assert EngineRegistry.get_engine_cls("language_model", backend) is actor.RefusedEngine
print("registered")
"""


@pytest.mark.parametrize("vendor", ["vexact", None])
def test_importing_it_registers(vendor):
    env = {name: value for name, value in environment(vendor).items() if name != "VERL_USE_EXTERNAL_MODULES"}
    env = {**os.environ, **env, "VERL_USE_EXTERNAL_MODULES": "trainers.cpu_platform"}
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, env=env, timeout=300)
    if vendor:
        assert done.stdout.endswith("registered\n"), done.stderr
    else:
        assert "VERL_ENGINE_VENDOR: got None, expected vexact" in done.stderr
