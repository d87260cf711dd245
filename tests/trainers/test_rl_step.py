"""benchmarks rl_step: our side of it runs, the other is what verl accepts, and its attention is the model's."""

import json
import os

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import rl_step

from .conftest import SECONDS

SIZES = ("--question=40", "--answer-tokens=12", "--prompts=2", "--samples=2", "--steps=3", "--micro-tokens=128")


def arguments(*more: str):
    args = bench.parse(["rl_step", "--device=cpu", "--sides=vexact", *SIZES, *more])
    for name, value in rl_step.DEFAULTS.items():
        if name not in args.given:
            setattr(args, name, value)
    return args


def test_our_side_runs(models, tmp_path):
    file, kept = tmp_path / "records.jsonl", tmp_path / "runs"
    given = [*SIZES, f"--model={models('qwen3')}", f"--lines={file}", f"--keep={kept}", f"--limit={SECONDS:.0f}"]
    assert bench.main(["rl_step", "--device=cpu", "--sides=vexact", *given]) == 0
    (record,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert record["room"] == "rl_step" and record["backend"] == "vexact" and record["ended"] == "all steps"
    assert record["case"] == "model 2 x 2 of 40 + 12 tokens" and record["ppo_kl"] == 0
    assert len(record["seconds_of_steps"]) == 3 and record["seconds"] == record["seconds_of_steps"][2]
    assert record["tokens_per_s"] == pytest.approx(4 * (40 + 12) / record["seconds"], rel=0.02)
    assert {"gen", "old_log_prob", "update_actor", "update_weights", "other"} <= record["parts"].keys()
    assert sum(record["parts"].values()) == pytest.approx(record["seconds"], abs=0.01)
    assert record["verl"] == "0.9.1" and "commit" in record and record["gpu"] is None


@pytest.mark.parametrize("name", rl_step.SIDES)
def test_both_sides_are_what_verl_accepts(name, models, tmp_path):
    from hydra import compose, initialize_config_module
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    args, model = arguments(), models("qwen3")
    prompts = rl_step._prompts(args, model, tmp_path / "prompts")
    given = rl_step.overrides(args, rl_step.Side(name, tmp_path / name), model, prompts)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [option for option in given if not option.startswith("hydra.")])
    assert not need_reference_policy(config) and not need_critic(config)
    validate_config(config, False, False)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.name == name and rollout.ignore_eos and rollout.max_model_len == 52
    assert config.algorithm.rollout_correction.bypass_mode == (name == "vexact")


def test_their_processes_import_none_of_ours(tmp_path):
    theirs = rl_step.variables(arguments("--vllm-path=/a:/b"), rl_step.Side("vllm", tmp_path))
    tests, root = str(rl_step.ROOT / "tests"), str(rl_step.ROOT)
    assert theirs["PYTHONPATH"].split(os.pathsep) == ["/a", "/b", tests, root]
    assert theirs["VERL_USE_EXTERNAL_MODULES"] == "" and theirs["VERL_USE_EXTERNAL_PLUGINS"] == "none"
    ours = rl_step.variables(arguments("--vllm-path=/a:/b"), rl_step.Side("vexact", tmp_path))
    assert "/a" not in ours["PYTHONPATH"].split(os.pathsep)
    assert "vexact_engine.verl.register" in ours["VERL_USE_EXTERNAL_MODULES"]


def step(seconds: float, answer: int = 12, kl: float = 0.0) -> dict:
    timing = {f"timing_s/{name}": seconds / 4 for name in ("gen", "update_actor", "update_weights")}
    lengths = {f"response_length/{what}": answer for what in ("min", "max")}
    memory = {"actor/perf/max_memory_allocated_gb": 1.5}
    return {"timing_s/step": seconds, "perf/total_num_tokens": 208, "actor/ppo_kl": kl, **timing, **lengths, **memory}


def test_a_run_that_was_cut_off_tells_of_the_steps_that_it_made(tmp_path):
    ended = {"ended": "not done after 9 s", "peak": 3 << 30}
    side = rl_step.Side("vexact", tmp_path, [step(9), step(8), step(2), step(4)], **ended)
    record = rl_step._record(arguments(), "qwen3-1.7b", side)
    assert record["seconds"] == 3 and record["tokens_per_s"] == 69 and record["peak_gib"] == 3
    assert record["trainer_gib"] == 1.5
    assert record["actor"] == "vexact" and record["overrides"] == []
    assert record["parts"] == {"gen": 0.75, "update_actor": 0.75, "update_weights": 0.75, "other": 0.75}
    assert record["ended"] == "not done after 9 s" and record["seconds_of_steps"] == [9, 8, 2, 4]


def test_what_verls_own_actor_goes_without_is_said(tmp_path):
    folder = tmp_path / "flash_attn" / "ops" / "triton"
    folder.mkdir(parents=True)
    found = []
    for _ in range(2):
        args, side = arguments(f"--vllm-path={tmp_path}"), rl_step.Side("vllm", tmp_path, [step(1, kl=0.1)] * 3)
        found.append(rl_step._record(args, "qwen3-1.7b", side)["actor"])
        (folder / "cross_entropy.py").touch()
    assert found == [
        f"flash attention 2, {by}" for by in ("log_softmax of one token at a time", "flash-attn's cross entropy")
    ]


@pytest.mark.parametrize(
    "steps,what",
    [
        ([step(9), step(8)], "2 steps, expected more than 2"),
        ([step(9), step(8), step(2, answer=11)], r"answers of \[11, 11\] tokens, expected 12"),
        ([step(9, kl=1e-7), step(8), step(2)], "actor/ppo_kl is 1e-07"),
    ],
)
def test_what_is_no_measurement_is_refused(steps, what, tmp_path):
    with pytest.raises(AssertionError, match=what):
        rl_step._record(arguments(), "qwen3-1.7b", rl_step.Side("vexact", tmp_path, steps))


def test_the_stock_actors_attention_is_the_models(models, monkeypatch):
    """A packed row under it and each sequence by itself; on a CPU with another kernel of the same arguments."""
    from transformers import AutoModelForCausalLM

    from benchmarks.rl import stock

    kernel = stock.kernel

    def watched(query, key, value, ends, longest, scale):
        assert ends.dtype == torch.int32 and longest == 23
        return kernel(query, key, value, ends, longest, scale)

    monkeypatch.setattr(stock, "kernel", watched)
    packed, alone = (
        AutoModelForCausalLM.from_pretrained(models("qwen3"), dtype=torch.float32, attn_implementation=name).eval()
        for name in (stock.NAME, "eager")
    )
    for lengths in ([5, 1, 23], [23, 4]):
        rows = [torch.randint(3, 250, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
        with torch.no_grad():
            got = packed(input_ids=torch.cat(rows, 1), attention_mask=None, position_ids=positions, use_cache=False)
            want = torch.cat([alone(input_ids=row).logits for row in rows], 1)
        assert torch.allclose(got.logits, want, atol=1e-4)  # other kernels: equal but for rounding
    with pytest.raises(ValueError, match="expected packed rows"):
        stock.attention(None, *[torch.zeros(1, 2, 3, 4)] * 3, None)


def test_memory_is_looked_at_of_the_gpus_that_a_run_may_use(monkeypatch):
    for said, found in (("2,0", [2, 0]), ("GPU-1f,GPU-2a", [0, 1, 2]), ("", [0, 1, 2])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", said)
        assert rl_step._visible(3) == found
