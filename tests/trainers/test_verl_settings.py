"""Settings of verl's rollout: refused by name where they would have no effect, or another one than elsewhere."""

import json

import pytest
import torch
from verl.workers.config import HFModelConfig

from vexact_engine import WeightsMissing
from vexact_engine.verl.lora import refuse_adapters
from vexact_engine.verl.server import engine_options
from vexact_ops.patch.lora import scales

from .rollout_trainer import rollout_config
from .test_verl_rollout import PROMPT, VERLS, Running, configs

ORDERED = ("path=pkg://vexact_engine.verl.sampler", "name=Ordered")


@pytest.fixture(scope="module")
def path(models):
    return models("qwen3")


@pytest.mark.parametrize(
    "override, said",
    [
        ("rollout.data_parallel_size=2", "data_parallel_size: got 2, expected 1"),
        ("+rollout.repetition_penalty=1.1", "repetition_penalty: got 1.1, expected 1.0"),
        ("++rollout.quantization=fp8", "quantization: got 'fp8'"),
        ("++rollout.enable_rollout_routing_replay=true", "enable_rollout_routing_replay: got True"),
        ("+rollout.engine_kwargs.vexact.num_page=3", "unknown: num_page; there is: .*num_pages"),
        ("+rollout.engine_kwargs.vexact.kv_segment=-1", "EngineConfig: kv_segment is -1"),
        ("+rollout.engine_kwargs.vexact.pipeline_parallel_size=2", "unknown: pipeline_parallel_size"),
        (
            "+rollout.engine_kwargs.vexact.speculation.depth=2",
            "EngineConfig: speculation has depth, expected max_draft",
        ),
        ("+rollout.engine_kwargs.vexact.shards=all", "shards: got 'all', expected replica or replicas"),
        ("+rollout.engine_kwargs.vexact.seeds=epoch", "seeds: got 'epoch', expected step or prompt"),
        ("+rollout.engine_kwargs.vexact.seeds=prompt", "seeds: got 'prompt' without rollout.full_determinism"),
        ("+rollout.engine_kwargs.vexact.adapter=some/adapter", "unknown: adapter; there is: "),
        ("rollout.max_num_seqs=0", "EngineConfig: max_num_seqs is 0"),
        ("++rollout.do_sample=false", "do_sample: got False, expected True: rollout.temperature=0"),
        ("++rollout.logprobs_mode=raw_logprobs", "logprobs_mode: got 'raw_logprobs', expected 'processed_logprobs'"),
        ("++rollout.over_sample_rate=0.1", "over_sample_rate: got 0.1, expected 0"),
        ("++rollout.scheduling_policy=priority", "scheduling_policy: got 'priority', expected 'fcfs'"),
        ("rollout.enable_chunked_prefill=false", "enable_chunked_prefill: got False, expected True"),
        ("++rollout.cudagraph_capture_sizes=[1,2]", r"cudagraph_capture_sizes: got \[1, 2\], expected None"),
        ("++rollout.enable_sleep_mode=false", "enable_sleep_mode: got False, expected True: rollout.free_cache_engine"),
        ("++rollout.limit_images=0", "rollout.limit_images: got 0, expected 1 or more"),
        ("++rollout.qat={enable:true}", "rollout.qat.enable: got True, expected False"),
        ("+rollout.engine_kwargs.vexat.num_pages=3", "rollout.engine_kwargs: got vexat, expected vexact"),
        ("++rollout.quantization_config_file=x.json", "quantization_config_file: got 'x.json', expected None"),
        ("++rollout.mtp={_target_:verl.workers.config.MtpConfig,enable:true,enable_rollout:true}", "enable_rollout"),
        ("++rollout.top_p=0", "vexact: rollout: SamplingParams: top_p is 0"),
        ("++rollout.val_kwargs.temperature=-1", "vexact: rollout.val_kwargs: SamplingParams: temperature is -1"),
    ],
)
def test_options_that_are_refused(path, override, said):
    from verl.utils.config import omega_conf_to_dataclass

    rollout, _ = configs(path, override.replace("rollout.", "actor_rollout_ref.rollout.", 1))
    with pytest.raises(ValueError, match=said):
        engine_options(omega_conf_to_dataclass(rollout))


def test_a_trainer_s_answers_are_drawn(path):
    """It divides logits by the temperature: said before anything starts, and not of answers that nobody trains on."""
    from verl.utils.config import omega_conf_to_dataclass

    from vexact_engine.verl.adapter import ServerAdapter

    likeliest = "++actor_rollout_ref.rollout.temperature=0", "++actor_rollout_ref.rollout.val_kwargs.temperature=0"
    rollout, model = configs(path, *likeliest)
    rollout = omega_conf_to_dataclass(rollout)
    engine_options(rollout)
    with pytest.raises(
        ValueError, match=r"vexact: rollout\.temperature: got 0.*, expected a number above 0: the trainer"
    ):
        ServerAdapter(rollout, model, None, replica_rank=0)


def test_more_images_than_the_limit_and_a_served_name(path):
    where = "++actor_rollout_ref.rollout"
    with Running(path, f"{where}.limit_images=1", f"{where}.prometheus.served_model_name=my/policy") as found:
        with pytest.raises(ValueError, match="image_data: got 2 images, expected at most 1: "):
            found.call(found.server.generate(PROMPT, VERLS, "r", image_data=[object(), object()]))
        with pytest.raises(ValueError, match="this engine's model takes none"):
            found.call(found.server.generate(PROMPT, VERLS, "r", image_data=[object()]))
        assert found.server.http.settings.max_images == 1
        assert {str(path), "my/policy", "policy"} <= set(found.server.http.settings.model_names)


def test_temperatures_that_the_trainer_does_not_know(path, caplog):
    """An agent loop's own, once each; a reward model's answers are not trained on."""
    where = "++actor_rollout_ref.rollout"
    with Running(path, f"{where}.temperature=0.7", f"{where}.val_kwargs.temperature=0.5") as found:
        for temperature in (0.7, 0.5, 1.25, 1.25):
            found.generate(temperature=temperature)
        found.generate(temperature=2.0, logprobs=False)
    said = "temperature: got 1.25, but the trainer divides logits by rollout.temperature, 0.7: it has other"
    assert [said in line for line in caplog.messages if "the trainer divides" in line] == [True]
    caplog.clear()
    with Running(path, f"{where}.temperature=0.7", mode="COLOCATED") as found:
        found.generate(temperature=1.25)
    assert "the trainer divides" not in caplog.text


@pytest.mark.parametrize(
    "sampled, temperature, said",
    [
        (False, 0.6, "do_sample: got False, but its temperature is what counts: validation draws at 0.6"),
        (True, 0, "do_sample: got True, but its temperature is what counts: validation takes the likeliest"),
        (False, 0, None),
        (True, 0.6, None),
    ],
)
def test_how_validation_draws(sampled, temperature, said, caplog):
    from verl.workers.config.rollout import SamplingConfig

    from vexact_engine.verl.server import say_how_validation_draws

    say_how_validation_draws(SamplingConfig(do_sample=sampled, temperature=temperature))
    assert said in caplog.text if said else not caplog.text


@pytest.mark.parametrize(
    "asked, said",
    [
        ({"rope_theta": 1e6}, "override_config: rope_theta: got 1000000.0 beside rope_parameters, where it is 10000.0"),
        (
            {"model_config": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}},
            "override_config: use_sliding_window: got True beside layer_types",
        ),
    ],
)
def test_overrides_that_say_it_twice(path, asked, said):
    """transformers reads the other one of the two."""
    given = [f"+actor_rollout_ref.model.override_config={asked}".replace("'", "")]
    with pytest.raises(ValueError, match=said), Running(path, *given, load_format="dummy"):
        pass


def test_overrides_that_nobody_reads(path):
    from verl.workers.config import HFModelConfig

    from vexact_engine.verl import check_overrides

    asked = {"rms_norm_epsilon": 1e-2, "rms_norm_eps": 1e-2, "sliding_window": None, "attn_implementation": "sdpa"}
    assert check_overrides(HFModelConfig(path=str(path), override_config=asked)) == ["rms_norm_epsilon"]
    assert check_overrides(HFModelConfig(path=str(path))) == []


@pytest.mark.parametrize(
    "override, said",
    [
        (None, None),
        ("++algorithm.filter_groups={enable:true,metric:reward}", "filter_groups.enable: got True, expected False"),
        ("++trainer.v1.sampler.sync_refill_failed_groups=true", "sync_refill_failed_groups: got True, expected False"),
        ("trainer.v1.trainer_mode=colocate_async", "trainer_mode: got colocate_async, expected sync"),
    ],
)
def test_what_the_ordered_sampler_would_leave_out(path, override, said):
    """Made as verl's trainer makes it, which hands a custom sampler none of these."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    ours = [f"trainer.v1.sampler.custom_sampler.{option}" for option in ORDERED]
    trainer = PPOTrainerSync.__new__(PPOTrainerSync)
    trainer.config = rollout_config(path, *ours, *([override] if override else []))
    trainer.trainer_mode = trainer.config.trainer.v1.trainer_mode
    if said is None:
        assert type(trainer._build_replay_buffer()).__name__ == "Ordered"
    else:
        with pytest.raises(ValueError, match=said):
            trainer._build_replay_buffer()


LORA = "++actor_rollout_ref.model.lora_rank=4", "++actor_rollout_ref.model.lora_alpha=8"


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_rollout_of_adapters(path, load_format):
    """As verl's settings have them, in the dtype of the rollout. Until they come they are of no effect, or the base is
    missing with them; then all comes at once."""
    with Running(path) as found:
        base = found.generate(seed=3)
    apart = "++actor_rollout_ref.model.exclude_modules='.*(gate|up|down)_proj'"
    with Running(path, *LORA, apart, load_format=load_format) as found:
        engine = found.server.engine
        each = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qkvo"]
        assert {name for name, m in engine.model.named_modules() if hasattr(m, "lora_A")} == {*each}
        assert scales(engine.model) == {f"{part}_proj": "2.0" for part in "koqv"}
        tensors = dict(engine.model.named_parameters())
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        if load_format == "auto":
            assert found.generate(seed=3).log_probs == base.log_probs
            return
        with pytest.raises(WeightsMissing):
            found.generate(seed=3)
        with pytest.raises(ValueError, match="missing"):
            base = {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}
            engine.update_weights(base, numerics=engine.numerics())


@pytest.mark.parametrize(
    "override, said",
    [
        ("++actor_rollout_ref.model.target_modules=[q_proj,qproj]", "target_modules: got qproj, expected modules of"),
        ("++actor_rollout_ref.model.target_modules=[lm_head]", "LoRA of the output layer"),
    ],
)
def test_adapters_that_a_rollout_refuses(path, override, said):
    with pytest.raises(ValueError, match=said), Running(path, *LORA, override, load_format="dummy"):
        pass


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("peft_type", "LOHA", "peft_type: got LOHA, expected LORA"),
        ("lora_dropout", 0.1, "lora_dropout: got 0.1, expected 0: the training forward would drop"),
        ("modules_to_save", ["lm_head"], r"modules_to_save: got \['lm_head'\], expected null"),
    ],
)
def test_adapters_that_no_training_goes_on_with(path, tmp_path, name, value, said):
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, name: value}))
    model = HFModelConfig(path=str(path), lora_rank=4, lora_adapter_path=str(tmp_path))
    with pytest.raises(NotImplementedError, match=f"lora_adapter_path: {tmp_path}/adapter_config.json: {said}"):
        refuse_adapters(model, "fsdp2")
