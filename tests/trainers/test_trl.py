"""TRL's GRPOTrainer with rollouts of this engine: the bytes of its loss, and what is refused by name."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM

import vexact_ops as vx
from benchmarks.trl_steps import watched
from vexact_engine import Engine, EngineConfig
from vexact_engine.trl import GRPOTrainer
from vexact_engine.trl.generation import Generation

README = Path(__file__).parents[2] / "vexact_engine" / "recipes" / "README.md"
SMALL = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "max_steps": 3}
SMALL |= {"learning_rate": 1e-3, "report_to": [], "logging_steps": 1, "use_cpu": True, "save_strategy": "no"}
KWARGS = {"generation_kwargs": {"stop": ["no such word"], "stop_token_ids": [3], "min_tokens": 2}}


def evens(completion_ids, **_):
    """A reward that every token has a part in."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def config(folder, **changes):
    return trl.GRPOConfig(str(folder), **{**SMALL, **changes})


def data(count=32):
    return Dataset.from_dict({"prompt": ["say " + "more " * (i % 5) + str(i) for i in range(count)]})


Watched = watched(GRPOTrainer)


def test_buffers_that_a_trainer_has_changed_reach_the_engine(models):
    trainer, other = (AutoModelForCausalLM.from_pretrained(models("deepseek_v3"), dtype=torch.float32) for _ in "ab")
    biases = {name: buffer.uniform_(-9, 9) for name, buffer in trainer.named_buffers() if name.endswith("bias")}
    with vx.patch.hf(trainer) as handle, Engine.from_pretrained(other, config=EngineConfig(num_pages=8)) as engine:
        Generation(engine, handle, {}, seed=0, sleeps=False).sync_weights()
        assert biases and all(torch.equal(other.get_buffer(name), value) for name, value in biases.items())


def train(model, folder, trainer=Watched, engine=None, **changes):
    given = {"train_dataset": data(), "engine_config": engine}
    made = trainer(model=model, reward_funcs=evens, args=config(folder, **changes), **given)
    made.train()
    return made


@pytest.mark.parametrize(
    "family,changes",
    [
        ("qwen3", {"beta": 0.1, "temperature": 0.7}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.0, "gradient_accumulation_steps": 2, "top_k": 40, **KWARGS}),
    ],
    ids=["qwen3, a reference", "mixture, two batches a step"],
)
def test_the_rollouts_log_probabilities_are_those_of_the_loss(family, changes, models, tmp_path):
    trainer = train(str(models(family)), tmp_path, **changes)
    differ, count = trainer.differ()
    assert differ == 0 and count > 60
    logs = [log for log in trainer.state.log_history if "sampling/importance_sampling_ratio/min" in log]
    assert len(logs) == 3
    for log in logs:
        ratios = [log[f"sampling/importance_sampling_ratio/{which}"] for which in ("min", "mean", "max")]
        assert ratios == [1.0] * 3 and log["sampling/sampling_logp_difference/max"] == 0 and log["grad_norm"] > 0
    if "beta" in changes:
        assert logs[0]["kl"] == 0 < logs[-1]["kl"]  # before anything has moved: exactly 0
    assert trainer.engine.weight_version == 3
    trainer.close()


def test_a_loaded_model_and_answers_without_a_correction(models, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(models("qwen3"), dtype=torch.float32)
    trainer = train(model, tmp_path, vllm_importance_sampling_correction=False, bf16=False, vllm_enable_sleep_mode=True)
    differ, count = trainer.differ()
    assert (differ, trainer.engine.dtype) == (0, torch.float32) and count > 60 and trainer.engine.asleep
    assert not any("sampling/importance_sampling_ratio/min" in log for log in trainer.state.log_history)


def test_the_trainer_has_the_numerics_of_the_engines_config(models, tmp_path):
    options = EngineConfig(num_pages=64, kv_segment=64, show_progress=False)
    trainer = train(str(models("qwen3")), tmp_path, engine=options, beta=0.1, max_steps=2)
    differ, count = trainer.differ()
    assert differ == 0 and count > 40 and trainer.state.log_history[0]["kl"] == 0
    trainer.close()


def test_an_engine_with_other_weights_differs(models, tmp_path, monkeypatch):
    """The twin that must fail: weights stay as they were."""
    monkeypatch.setattr(Generation, "sync_weights", lambda self: None)
    differ, count = train(str(models("qwen3")), tmp_path).differ()
    assert 0 < differ < count


def test_readmes_lines(models, tmp_path, monkeypatch):
    """As they stand, but for the model, a CPU, and fewer steps and tokens."""
    (code,) = re.findall(r"```python needs=trl\n(.*?)```", README.read_text(), re.S)
    assert len(code.splitlines()) <= 10
    code = code.replace("Qwen/Qwen3-0.6B", str(models("qwen3")))
    monkeypatch.chdir(tmp_path)
    small = {**SMALL, "max_steps": 2}
    whole = trl.GRPOConfig
    monkeypatch.setattr(trl, "GRPOConfig", lambda **given: whole("out", **{**given, **small}))
    found = {}
    exec(code, found)
    assert found["trainer"].state.log_history[0]["sampling/sampling_logp_difference/max"] == 0


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"use_vllm": True}, "use_vllm: got True, expected False"),
        ({"repetition_penalty": 1.1}, "repetition_penalty: got 1.1, expected 1.0"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: got 5.0, expected None"),
        ({"temperature": 0.0}, "temperature: got 0.0, expected a number above 0"),
        (
            {"generation_kwargs": {"min_p": 0.1, "temperature": 0.5}},
            "generation_kwargs: got .*, expected some of ignore_",
        ),
        ({"generation_kwargs": {"seed": 5}}, "generation_kwargs: got .*, and all else where GRPOConfig has it"),
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32: got True, expected False"),
        ({"cache_implementation": "quantized"}, "cache_implementation: got 'quantized', expected None"),
        ({"fp16": True, "bf16": False}, "fp16: got True, expected False"),
        ({"bf16_full_eval": True}, "bf16_full_eval: got True, expected False"),
        ({"fp16_full_eval": True}, "fp16_full_eval: got True, expected False"),
        ({"vllm_tensor_parallel_size": 2}, "vllm_tensor_parallel_size: got 2, expected 1"),
    ],
)
def test_what_would_have_other_bits_is_refused_before_anything_is_loaded(changes, said, tmp_path):
    with pytest.raises(ValueError, match=rf"vexact_engine\.trl: {said}"):
        GRPOTrainer("/nowhere", evens, config(tmp_path, **changes), train_dataset=data())


def test_quantised_weights_are_refused(tmp_path):
    from transformers import BitsAndBytesConfig

    given = {"train_dataset": data(), "quantization_config": BitsAndBytesConfig(load_in_8bit=True)}
    with pytest.raises(ValueError, match=r"(?s)vexact_engine\.trl: quantization_config: got .*, expected None"):
        GRPOTrainer("/nowhere", evens, config(tmp_path), **given)


@pytest.mark.parametrize(
    "changes,kind,said",
    [
        ({"generation_kwargs": {"stop_token_ids": 5}}, TypeError, "stop_token_ids is 5"),
        ({"generation_kwargs": {"min_tokens": 7}}, ValueError, "min_new_tokens is 7, expected at most"),
        ({"top_p": 2.0}, ValueError, "top_p is 2.0"),
        ({"max_completion_length": None}, TypeError, "max_new_tokens is None"),
    ],
)
def test_a_wrong_value_of_sampling_is_refused_when_the_trainer_is_made(changes, kind, said, models, tmp_path):
    with pytest.raises(kind, match=f"SamplingParams: {said}"):
        GRPOTrainer(str(models("qwen3")), evens, config(tmp_path, **changes), train_dataset=data())


def test_a_compiler_that_leaves_out_roundings_is_refused(models, tmp_path, monkeypatch):
    from torch._inductor import config as inductor

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # whatever transformers makes of it goes with this test
    path = str(models("qwen3"))
    with pytest.raises(ValueError, match=r"vexact_engine\.trl: torch_compile: got the backend inductor"):
        GRPOTrainer(path, evens, config(tmp_path, torch_compile=True), train_dataset=data())
    monkeypatch.setattr(inductor, "emulate_precision_casts", True)
    GRPOTrainer(path, evens, config(tmp_path, torch_compile=True), train_dataset=data()).close()
    monkeypatch.setattr(inductor, "emulate_precision_casts", False)
    trainer = train(path, tmp_path, max_steps=1, torch_compile=True, torch_compile_backend="aot_eager")
    differ, count = trainer.differ()
    assert differ == 0 and count > 20
    trainer.close()


def test_an_answer_goes_on_behind_the_end_of_sequence_where_that_is_asked_for(models, tmp_path):
    """Every token is an end-of-sequence id: stock ones end at the first, and with ignore_eos none does."""
    for ignored, length in (False, 1), (True, 6):
        model = AutoModelForCausalLM.from_pretrained(models("qwen3"), dtype=torch.bfloat16)
        model.generation_config.eos_token_id = list(range(model.config.vocab_size))
        given = {"generation_kwargs": {"ignore_eos": ignored}}
        trainer = GRPOTrainer(model, evens, config(tmp_path, **given), train_dataset=data())
        trainer.vllm_generation.sync_weights()
        _, ids, _, _ = trainer.vllm_generation.generate([[1, 2, 3]] * 4, None, 4)
        assert [len(each) for each in ids] == [length] * 4
        trainer.close()


def test_the_reference_and_the_tokenizer_are_of_what_model_init_kwargs_name(models, tmp_path, monkeypatch):
    """A directory that has another model in a subfolder: the policy is of that one, and so is its reference."""
    from transformers import AutoProcessor

    root, asked = tmp_path / "root", []
    shutil.copytree(models("qwen3"), root)
    model = AutoModelForCausalLM.from_pretrained(root)
    for parameter in model.parameters():
        parameter.data.mul_(0.5)
    model.save_pretrained(root / "other")
    made = AutoProcessor.from_pretrained
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda *a, **b: asked.append(b) or made(*a, **b))
    given = {"model_init_kwargs": {"subfolder": "other", "revision": "v2"}, "trust_remote_code": True}
    trainer = train(str(root), tmp_path / "out", beta=0.1, max_steps=1, **given)
    assert trainer.state.log_history[0]["kl"] == 0
    assert [(each["revision"], each["trust_remote_code"]) for each in asked] == [("v2", True)]
    trainer.close()


LORA = {"r": 4, "target_modules": ["q_proj", "o_proj", "down_proj"], "init_lora_weights": False}


@pytest.mark.parametrize("given", ["a config", "an adapted model"])
@pytest.mark.parametrize("changes", [{"beta": 0.1}, {"bf16": False}], ids=["a reference", "no autocast"])
def test_adapters_are_trained_and_drawn_from_alike(given, changes, models, tmp_path, monkeypatch):
    from peft import LoraConfig, get_peft_model

    model, sent = AutoModelForCausalLM.from_pretrained(models("qwen3"), dtype=torch.bfloat16), []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if given == "an adapted model":
        model, more = get_peft_model(model, LoraConfig(**LORA)), {}
    else:
        more = {"peft_config": LoraConfig(**LORA)}
    weights = Generation._weights
    monkeypatch.setattr(Generation, "_weights", lambda self: sent.append(found := list(weights(self))) or found)
    trainer = Watched(model, evens, config(tmp_path, **changes), train_dataset=data(), **more)
    trainer.train()
    differ, count = trainer.differ()
    assert differ == 0 and count > 60 and trainer.engine.path == "fused"
    logs = [log for log in trainer.state.log_history if "sampling/importance_sampling_ratio/min" in log]
    assert len(logs) == 3
    for log in logs:
        assert log["sampling/importance_sampling_ratio/min"] == log["sampling/importance_sampling_ratio/max"] == 1.0
        assert log["sampling/sampling_logp_difference/max"] == 0 and log["grad_norm"] > 0
    assert [all("lora_" in name for name, _ in found) for found in sent] == [False, True, True]
    now = trainer.accelerator.unwrap_model(trainer.model).get_base_model().state_dict()
    assert all(
        torch.equal(
            now[
                name.replace("_proj.w", "_proj.base_layer.w")
                if name.replace("_proj.w", "_proj.base_layer.w") in now
                else name
            ],
            tensor,
        )
        for name, tensor in before.items()
    )
    trainer.close()


def test_other_adapters_and_load_balancing_losses_are_refused(models, tmp_path):
    from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model

    for refused in IA3Config(), LoraConfig(lora_dropout=0.1):
        with pytest.raises(ValueError, match=r"vexact_engine\.trl: peft_config: got .*, expected a LoraConfig without"):
            GRPOTrainer("/nowhere", evens, config(tmp_path), train_dataset=data(), peft_config=refused)
    model = AutoModelForCausalLM.from_pretrained(models("qwen3"))
    prompted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match=r"vexact_engine\.trl: model: got a PeftModelForCausalLM with PROMPT_TUNING"):
        GRPOTrainer(prompted, evens, config(tmp_path), train_dataset=data())
    dropping = get_peft_model(AutoModelForCausalLM.from_pretrained(models("qwen3")), LoraConfig(lora_dropout=0.1))
    with pytest.raises(ValueError, match=r"vexact_engine\.trl: model: its adapters have lora_dropout"):
        GRPOTrainer(dropping, evens, config(tmp_path), train_dataset=data())
    with pytest.raises(TypeError, match=r"vexact_engine\.trl: model: got Linear, expected a name"):
        GRPOTrainer(torch.nn.Linear(2, 2), evens, config(tmp_path), train_dataset=data())
    with pytest.raises(ValueError, match=r"vexact_engine\.trl: router_aux_loss_coef: expected 0\.0"):
        GRPOTrainer(str(models("qwen3_moe")), evens, config(tmp_path), train_dataset=data())


def test_the_benchmark_counts_what_differs(models, tmp_path, monkeypatch):
    from benchmarks import __main__ as bench

    file = tmp_path / "lines.jsonl"
    sizes = ["--steps=3", "--prompts=2", "--samples=4", "--new=6"]
    given = ["trl_steps", "--device=cpu", f"--model={models('qwen3')}", f"--lines={file}", *sizes]
    assert bench.main(given) == 0
    (record,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert record["case"] == "qwen3, 2 x 4 answers of 6 tokens" and record["steps"] == record["weight_version"] == 3
    assert 60 < record["logprobs"] <= 3 * 8 * 6 and record["differ"] == 0 and record["ratios"] == [1.0, 1.0]
    assert record["logp_difference_max"] == 0 and record["trl"].startswith("1.16") and record["step_s"] > 0
    monkeypatch.setattr(Generation, "sync_weights", lambda self: None)  # then all but the first step's differ
    with pytest.raises(AssertionError, match=r"trl_steps: qwen3: [1-9]\d* of \d+ log-probabilities differ"):
        bench.main(given)
