"""LoRA: a model that PEFT has put adapters on is fused, with the bits of the trainer that has the same, and an update
may bring the adapters alone."""

import threading

import pytest
import torch
from engine_models import bits, build, prompts
from test_decoder import model_of, remembered, run, sequences, trained

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams, WeightReceiver, WeightSender
from vexact_engine.runner.forward import forward, patched_forward
from vexact_ops.testing import assert_bitwise

peft = pytest.importorskip("peft")
CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
DEVICES = [pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else ["cpu"]
PARAMS = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)
DENSE = "llama", "qwen3", "phi3", "gemma2", "olmo2", "qwen3_5_text"
MIXTURES = "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe"  # PEFT takes projections of experts' names for experts


def adapted(model, seed=0, **options):
    """With an adapter on all linear layers but the head; of mixtures on attention's."""
    linears = [name for name, m in model.named_modules() if type(m) is torch.nn.Linear and "lm_head" not in name]
    mixture = getattr(model.config, "num_experts", None) or hasattr(model.config, "num_local_experts")
    wanted = [name for name in linears if not mixture or "self_attn" in name]
    given = {"r": 4, "lora_alpha": 6, "target_modules": wanted} | options
    wide = given.pop("autocast_adapter_dtype", True)
    model = peft.get_peft_model(model, peft.LoraConfig(**given), autocast_adapter_dtype=wide)
    draw(model, seed)
    return model.eval()


@torch.no_grad()
def draw(model, seed):
    g = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.2)


def ask(engine):
    return [bits(c) for c in engine.generate(prompts(3, longest=20), PARAMS, raise_on_error=True)]


def asked(model):
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert engine.path == "fused"
        return ask(engine)


@pytest.mark.parametrize("wide", [True, False], ids=["adapters-of-fp32", "all-of-bf16"])
@pytest.mark.parametrize("name", DENSE + MIXTURES)
def test_the_fused_forward_has_the_bits_of_the_training_forward(name, wide):
    model, seqs = adapted(model_of(name), autocast_adapter_dtype=wide), sequences((11, 3, 9))
    with vx.patch.hf(model) as handle:
        computed, how = forward(handle)
        assert how == "fused"
        described = remembered(handle)
        whole = range(len(described.layers))
        got = run([(whole, computed)], described, torch.bfloat16, seqs)
        base = model.get_base_model()
        assert_bitwise(got, run([(whole, patched_forward(base))], described, torch.bfloat16, seqs), "patched")
        assert_bitwise(got, trained(base, seqs), "trained")
        with model.disable_adapter():
            assert not all(map(vx.same_bits, got, trained(base, seqs)))


def test_of_several_adapters_those_that_are_active_are_added_in_their_order():
    model = adapted(build("Llama"), target_modules=["q_proj", "down_proj"])
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=1, target_modules=["q_proj", "up_proj"]))
    draw(model, 1)
    found = [asked(model)]
    for active in ["other"], ["default", "other"], ["other", "default"]:
        model.base_model.set_adapter(active)
        found.append(asked(model))
        with vx.patch.hf(model) as handle:
            of = handle.describe().layers[0].blocks[0].part.q.adapters
        assert [each.down.split(".")[-2] for each in of] == active
    assert found[0] != found[1] != found[2] != found[0]


def test_a_wrapped_model_is_taken_as_it_is():
    model = adapted(build("Llama"))
    assert asked(model) == asked(model.get_base_model())
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match=r"weights: source: got a PeftModelForCausalLM with PROMPT_TUNING"):
        Engine.from_pretrained(peft.get_peft_model(build("Llama"), prompt), config=CONFIG)
    halves = adapted(build("Llama"), autocast_adapter_dtype=False)
    for name, parameter in halves.named_parameters():
        if "lora_A" in name:
            parameter.data = parameter.data.half()
    with pytest.raises(TypeError, match=r"weights: dtype: .* has torch.bfloat16 and torch.float16"):
        Engine.from_pretrained(halves, config=CONFIG)


@pytest.mark.parametrize("device", DEVICES)
def test_an_update_brings_the_adapters_alone_or_all(device):
    model, other = (adapted(build("Qwen3", seed=1, device=device)) for _ in range(2))
    draw(other, 5)
    new, names = asked(other), [n for n, _ in other.get_base_model().named_parameters() if "lora_" in n]
    state = other.get_base_model().state_dict()
    adapters = {name: state[name] for name in names}
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        old, numerics = ask(engine), engine.numerics()
        for given, missing in (
            ({name: state[name] for name in names[1:]}, "missing: "),
            (adapters | {"model.norm.weight": state["model.norm.weight"]}, "missing: "),
        ):
            with pytest.raises(ValueError, match=missing):
                engine.update_weights(given, numerics=numerics)
            assert ask(engine) == old != new
        assert engine.update_weights(adapters, numerics=numerics) == 1
        assert ask(engine) == new
        draw(model, 0)  # by whoever holds it too
        assert ask(engine) == old
        assert engine.update_weights(state, numerics=numerics) > 1
        assert ask(engine) == new and engine.path == "fused"


@pytest.mark.parametrize("mode", ["in_place", "staged"])
def test_adapters_are_handed_over_alone(mode):
    model, other = (adapted(build("Qwen3", seed=1)) for _ in range(2))
    draw(other, 5)
    new, of = asked(other), other.get_base_model()
    adapters = {name: value for name, value in of.state_dict().items() if "lora_" in name}

    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert ask(engine) != new
        with vx.patch.hf(other) as handle:
            numerics = handle.numerics(engine.device)
        with WeightReceiver(engine, mode=mode) as receiver:
            taking = threading.Thread(target=receiver.receive)
            taking.start()
            with WeightSender(receiver.address, numerics=numerics) as sender:
                assert sender.send(adapters) == 1
                taking.join()
        assert ask(engine) == new
