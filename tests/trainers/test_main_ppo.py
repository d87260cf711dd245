"""verl's main_ppo, with our rollout and our actor: a log-probability is the same float wherever it is computed.

Three steps each, with a learning rate that moves the weights. Compared as bits: what the rollout reported for a token,
what the trainer computed for it again (old_log_probs), and what the training forward made of it. CI runs what is in
`IN_CI`; VEXACT_TRAINERS=all runs every combination.
"""

import contextlib
import copy
import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise

from . import rewards
from .models import FAMILIES, HYBRIDS, WITH_VISION
from .ppo import Case, Run, check, check_samples, check_training, compared, lines, run, weights_after

TWO_RANKS = [Case(family, engine) for engine in ("fsdp2", "veomni") for family in FAMILIES]
# VeOmni has no FSDP for one rank. verl gives all requests one id then: the samples of a prompt differ nevertheless
DETERMINISTIC = ("actor_rollout_ref.rollout.full_determinism=True",)
ONE_RANK = [Case(family, ranks=1, overrides=DETERMINISTIC) for family in FAMILIES]
# The same in every run, and kept after steps 2 and 3.
ORDERED = ("path=pkg://vexact_engine.verl.sampler", "name=Ordered")
REPEATED = (*DETERMINISTIC, *(f"trainer.v1.sampler.custom_sampler.{option}" for option in ORDERED))
# and its rewards are of a model, whose scores are there again too
KEPT = Case("deepseek_v3", ranks=1, rewards="apart", overrides=(*REPEATED, "trainer.save_freq=2"))
KEPT_LORA = Case("qwen3", ranks=1, lora=4, overrides=(*REPEATED, "trainer.save_freq=2"))
# One rollout of both ranks, instead of one of each; and of each, to which both send what they hold.
TOGETHER = Case("qwen3_5_moe", replica=2)
SHARED = ("+actor_rollout_ref.rollout.engine_kwargs.vexact.shards=replicas",)
# Adapters, of which each rank sends what it holds, alone where rollouts keep their base; each step's are kept.
AWAKE = ("actor_rollout_ref.rollout.free_cache_engine=False",)
LORA = Case("qwen3", lora=4, overrides=(*SHARED, *AWAKE, "trainer.save_freq=1"))
# Each engine with experts, and latent attention once each way: test_verl_actor and test_verl_families have every family
# under both, and a README's command (test_recipes) runs the dense one.
IN_CI = [
    TOGETHER,  # a hybrid with experts, and a tower that no image asks for
    Case("qwen3_5_moe", "veomni", overrides=SHARED),
    Case("deepseek_v3", "veomni", rewards="colocated"),
    KEPT,
    LORA,
]
REWARDED = [case for case in IN_CI if case.rewards]
OF_IMAGES = [Case(family, engine) for engine in ("fsdp2", "veomni") for family in WITH_VISION]  # and text alone
OF_IMAGES[OF_IMAGES.index(Case("qwen3_5_moe"))] = TOGETHER
OF_IMAGES[OF_IMAGES.index(Case("qwen3_5_moe", "veomni"))] = IN_CI[1]
EVERY = [*TWO_RANKS, *ONE_RANK, KEPT, LORA, *(Case(family) for family in HYBRIDS), *OF_IMAGES]
STOCK = Case("qwen3", ranks=1, vendor=None)
# Requests are aborted and go on with newer weights, so that a token's weights are not always the trainer's. The
# checkpoints that verl writes after each step say what each version would have said.
SAVED = (
    "trainer.save_freq=1",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
    # long requests, one at a time, and many: some are under way, others wait, when a batch is full and all are aborted
    "trainer.v1.colocate_async.num_warmup_batches=3",
    "trainer.v1.separate_async.num_warmup_batches=3",
    "data.max_response_length=180",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.max_num_seqs=1",
)
ASYNC_IN_CI = [
    Case("qwen3_moe", mode="colocate_async", overrides=SAVED),
    Case("qwen3", mode="separate_async", overrides=SAVED),
]
ASYNC = [
    Case(family, mode=mode, overrides=SAVED) for mode in ("colocate_async", "separate_async") for family in FAMILIES
]
CORES_PER_RUN = 1
ALL = os.environ.get("VEXACT_TRAINERS") == "all"


@pytest.mark.parametrize("case", EVERY if ALL else IN_CI, ids=str)
def test_every_log_probability_is_the_same_float(case, trained):
    check(trained(case))


@pytest.mark.parametrize("case", IN_CI[:1], ids=str)
def test_one_other_bit_is_noticed(case, trained):
    ran = copy.deepcopy(trained(case))
    check(ran)
    ran.steps[1]["samples"][3]["rollout_log_probs"][2] ^= 1
    with pytest.raises(AssertionError, match="rollout and trainer differ in 1 of"):
        check(ran)
    ran = copy.deepcopy(trained(case))
    ran.training[2]["training"][0] ^= 1
    with pytest.raises(AssertionError, match="the training forward and old_log_probs differ in 1 tokens"):
        check(ran)
    ran = copy.deepcopy(trained(case))
    ran.steps[0]["samples"][0]["rollout_log_probs"].pop()
    with pytest.raises(AssertionError, match=r"rollout_log_probs: \d+ of \d+ tokens"):
        check(ran)


@pytest.mark.parametrize("case", IN_CI[:3], ids=str)
def test_what_a_rank_has_handed_over(case, trained):
    """What it holds, to a rollout of all ranks, and where asked to one of each; else whole tensors to its own."""
    ran = trained(case)
    updates = [line for path in ran.folder.glob("updates.*.jsonl") for line in lines(path)]
    sender = "WeightSender" if case is IN_CI[2] else "ShardedWeightSender"
    expected = [{"rank": rank, "sender": sender} for rank in range(2) for _ in range(case.steps + 1)]
    assert sorted(updates, key=str) == sorted(expected, key=str)


def bits(values) -> list[int]:
    return torch.as_tensor(values, dtype=torch.float32).reshape(-1).view(torch.int32).tolist()


@pytest.mark.parametrize("case", REWARDED, ids=str)
def test_rewards_are_the_reward_model_s_scores(case, trained, models):
    """Those of every answer, what is logged of them, and the advantages that are trained with."""
    import pandas
    from transformers import AutoTokenizer
    from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

    ran, words = trained(case), AutoTokenizer.from_pretrained(models(case.family))
    asked = [list(chat) for chat in pandas.read_parquet(ran.folder / "data" / "prompts.parquet")["prompt"]]
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    known = {tuple(words.apply_chat_template(chat, **options)): chat for chat in asked}
    advantages = []
    for metrics, step in zip(ran.metrics, ran.steps, strict=True):
        samples, chats = step["samples"], []
        for sample in samples:
            text = words.decode(sample["responses"]).replace(words.eos_token, "")
            chats.append([*known[tuple(sample["prompts"])], {"role": "assistant", "content": text}])
        scores = rewards.scores(ran.folder / "reward_model", chats)
        assert len(set(scores)) > len(samples) / 2
        for sample, score in zip(samples, scores, strict=True):
            assert sample["rm_scores"] == [*[0] * (len(sample["responses"]) - 1), *bits(score)]
        for kind in ("critic/score", "critic/rewards"):
            assert (metrics[f"{kind}/max"], metrics[f"{kind}/min"]) == (max(scores), min(scores))
        groups, mask = [sample["key"].rsplit("_", 2)[0] for sample in samples], torch.ones(len(samples), 1)
        each, _ = compute_grpo_outcome_advantage(torch.tensor(scores)[:, None], mask, index=groups)
        advantages += [value for sample, one in zip(samples, each) for value in bits(one) * len(sample["responses"])]
    assert sorted(advantages) == sorted(value for record in ran.training for value in record["advantages"])


def last_step(ran: Run) -> tuple[list[dict], list[int], float, dict[str, torch.Tensor]]:
    """What verl calls a sample and its prompt is new in each run. -> samples, bits of the training forward in order,
    the gradient's norm, and the trained weights."""
    samples = [{k: v for k, v in s.items() if k != "key"} for s in ran.steps[-1]["samples"]]
    count = sum(len(s["responses"]) for s in samples)
    forward = [bits for record in ran.training for bits in record["training"]][-count:]
    file = ran.folder / "checkpoints" / "global_step_3" / "actor" / "model_world_size_1_rank_0.pt"
    state = torch.load(file, map_location="cpu", weights_only=False)
    weights = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in state.items()}
    return sorted(samples, key=str), sorted(forward), ran.metrics[-1]["actor/grad_norm"], weights


@pytest.mark.parametrize("case", [KEPT, KEPT_LORA] if ALL else [KEPT], ids=str)
def test_a_run_that_goes_on_from_verls_checkpoint_is_the_whole_run(case, trained, models, tmp_path):
    whole = trained(case)
    kept = whole.folder / "checkpoints" / "global_step_2"
    more = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={kept}")
    resumed = run(dataclasses.replace(case, overrides=(*case.overrides, *more)), models(case.family), tmp_path / "run")
    assert [step["step"] for step in resumed.steps] == [3]
    (*expected, weights), (*got, trained_weights) = last_step(whole), last_step(resumed)
    before = last_step(dataclasses.replace(whole, steps=whole.steps[:2]))
    assert got == expected and len(got[0]) == 8 and got[0] != before[0]
    assert trained_weights.keys() == weights.keys()
    assert_bitwise([trained_weights[name] for name in weights], [*weights.values()], "weights after step 3")


@pytest.mark.parametrize("case", [LORA], ids=str)
def test_adapters_alone_are_trained_and_the_reference_is_the_model_without_them(case, trained, models):
    from transformers import AutoModelForCausalLM

    ran, model = trained(case), AutoModelForCausalLM.from_pretrained(models(case.family), dtype=torch.bfloat16)
    before, steps = dict(model.named_parameters()), [dict(weights_after(ran, step)) for step in (1, 2, 3)]
    assert len(steps[0]) == len(before) + 2 * 7 * model.config.num_hidden_layers
    for number, step in enumerate(steps):
        for name, tensor in step.items():
            if ".lora_" not in name:
                own = before[name.removeprefix("base_model.model.").replace(".base_layer", "")]
                assert_bitwise(tensor, own.float(), f"{name} after step {number + 1}")
            elif ".lora_B." in name:
                assert tensor.any(), f"{name} after step {number + 1}"
                assert not number or not torch.equal(tensor, steps[number - 1][name])
    alone = [line["rank"] for path in ran.folder.glob("adapters.*.jsonl") for line in lines(path)]
    assert sorted(alone) == [0] * case.steps + [1] * case.steps, "all but the first of each rank's updates"
    losses = [metrics["actor/kl_loss"] for metrics in ran.metrics]
    assert losses[0] == 0.0 and all(loss > 0 for loss in losses[1:])
    references = lines(ran.folder / "references.jsonl")
    assert len(references) == case.steps
    with torch.no_grad(), vx.patch.hf(model) as handle:
        for sample in (sample for step in references for sample in step["samples"]):
            ids = torch.tensor([sample["prompts"] + sample["responses"]])
            row = handle.logprobs(ids)[0, len(sample["prompts"]) - 1 : -1]
            assert sample["ref_log_prob"] == bits(row), "the reference policy's log-probabilities"


@pytest.mark.parametrize("case", [STOCK], ids=str)
def test_verls_own_actor_fails_that(case, trained):
    """The same run with the stock actor: rollout and trainer differ, in verl's metrics and in nearly every token."""
    ran = trained(case)
    assert len(ran.metrics) == ran.case.steps
    with pytest.raises(AssertionError):
        check(ran)
    for metrics, step in zip(ran.metrics, ran.steps):
        assert metrics["training/rollout_probs_diff_max"] > 1e-4 and metrics["rollout_corr/k3_kl"] > 0
        tokens, mismatched = compared(step["samples"])
        assert mismatched > tokens / 2


def log_probs_by_version(ran: Run, model) -> list[list[list[int]]]:
    """[version][sample] -> bits for each response token under that version's checkpoint, by the patched stock model."""
    from transformers import AutoModelForCausalLM

    folders = [model]
    for step in range(1, ran.case.steps):
        folders.append(ran.folder / "checkpoints" / f"global_step_{step}" / "actor" / "huggingface")
    samples = [sample for step in ran.steps for sample in step["samples"]]
    versions = []
    for folder in folders:
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad(), vx.patch.hf(loaded) as handle:
            scores = []
            for sample in samples:
                ids = torch.tensor([sample["prompts"] + sample["responses"]])
                row = handle.logprobs(ids)[0, len(sample["prompts"]) - 1 : -1]
                scores.append(row.contiguous().view(torch.int32).tolist())
        versions.append(scores)
    return versions


def follows(bits: list[int], versions: list[list[int]], first: int, last: int) -> bool:
    """Each token of a sample has the bits of a version from first to last, a later one none of an earlier version's."""
    at = first
    for i, value in enumerate(bits):
        while at <= last and versions[at][i] != value:
            at += 1
        if at > last:
            return False
    return True


@pytest.mark.parametrize("case", ASYNC if ALL else ASYNC_IN_CI, ids=str)
def test_every_token_has_the_bits_of_the_weights_that_drew_it(case, trained, models):
    ran = trained(case)
    assert len(ran.metrics) == len(ran.steps) == case.steps
    check_training(ran)
    versions = log_probs_by_version(ran, models(case.family))
    number, spanning, current = 0, 0, 0
    for step in ran.steps:
        for sample in step["samples"]:
            length, at_version = len(sample["responses"]), [scores[number] for scores in versions]
            assert {len(sample[name]) for name in ("rollout_log_probs", "old_log_probs")} == {length}
            first, last = sample["first_version"], sample["last_version"]
            assert 0 <= first <= last < step["step"]
            assert sample["old_log_probs"] == at_version[step["step"] - 1], "the trainer's own weights"
            assert follows(sample["rollout_log_probs"], at_version, first, last), f"{sample['key']}: {first} to {last}"
            spanning += first != last
            current += first == last == step["step"] - 1
            number += 1
    moved = [sum(a != b for x, y in zip(versions[i], versions[i + 1]) for a, b in zip(x, y)) for i in range(2)]
    assert min(moved) > 0  # by other weights the bits are others: so that the versions can be told apart
    if case.mode == "colocate_async":
        assert spanning, "no request was aborted in flight and went on with newer weights"
    assert spanning or current


WATCHED = ("+actor_rollout_ref.rollout.agent.agent_loop_manager_class=vexact_engine.verl.agents.Manager",)


def test_a_run_ends_when_an_agent_loop_worker_has_died(models, tmp_path):
    """verl's own manager waits for its samples without a limit."""
    folder = tmp_path / "run"
    case = Case("qwen3", ranks=1, steps=200, overrides=WATCHED)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run, case, models("qwen3"), folder, 400)
        metrics = folder / "metrics.jsonl"
        while not metrics.exists() or "\n" not in metrics.read_text():
            assert not running.done(), running.exception()
            time.sleep(0.2)
        killed = 0
        for process in psutil.process_iter(["cmdline"]):
            with contextlib.suppress(psutil.NoSuchProcess):  # another run's, which ends meanwhile
                named = "AgentLoopWorker" in " ".join(process.info["cmdline"] or ())
                if named and process.cwd() == str(folder):  # of this run; the environment may be another's, of a fork
                    process.kill()
                    killed += 1
        assert killed
        with pytest.raises(AssertionError, match="vexact: an agent-loop worker has died"):
            running.result()


@pytest.mark.parametrize("logprob, faulty", [(-5.0, True), (-0.01, False)], ids=["of many", "the likeliest"])
def test_two_equal_answers_are_a_fault_where_they_were_unlikely(logprob, faulty):
    bits = torch.full((8,), logprob, dtype=torch.float32).view(torch.int32).tolist()
    same = {"prompts": [1], "responses": [2] * 8, "response_mask": [1] * 8, "rollout_log_probs": bits}
    check_samples([same, same | {"responses": [3] * 8}])
    with pytest.raises(AssertionError, match="are one") if faulty else contextlib.nullcontext():
        check_samples([same, same])
