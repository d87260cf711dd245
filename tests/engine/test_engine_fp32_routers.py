"""A model of 16 bits whose routers stay in fp32, as transformers 5.24 loads DeepSeek-V3: engine, updates, stages."""

import copy

import pytest
import torch
from conftest import devices
from engine_models import build
from test_engine_bits import PROMPTS, launch

import vexact_ops as vx
from vexact_engine import SamplingParams
from vexact_engine.proof import stacks
from vexact_engine.proof.stock import run_stock
from vexact_engine.runner.forward import forward
from vexact_engine.weights.load import load
from vexact_engine.weights.update import Spec, Update
from vexact_ops.testing import assert_bitwise

PARAMS = SamplingParams(max_new_tokens=9, temperature=0.7, seed=11, ignore_eos=True)
each_device = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
each_attention = pytest.mark.parametrize("latent", [False, True], ids=["expanded", "latent"])


def made(device="cpu", dtype=torch.bfloat16, seed=0):
    model = build("DeepseekV3", dtype, seed=seed, device=device)
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "mlp.gate.weight"}
    g = torch.Generator().manual_seed(seed)
    for parameter in routers(model).values():
        parameter.data = (torch.randn(parameter.shape, generator=g) * 0.3).to(device)
    return model


def routers(model):
    return {name: p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")}


def trained(model, completions, latent=False):
    with vx.patch.hf(model, latent=latent) as handle, torch.no_grad():
        for c in completions:
            ids = torch.tensor([c.prompt_ids + c.token_ids], device=model.device)
            yield (
                handle.logprobs(ids, temperature=PARAMS.temperature)[0, len(c.prompt_ids) - 1 : -1].tolist(),
                c.logprobs,
            )


@each_attention
@each_device
def test_the_trainer_computes_the_same_logprobs(device, dtype, latent):
    trainer = made(device, dtype)
    with launch(device, model=copy.deepcopy(trainer), latent_attention=latent) as engine:
        assert engine.path == "fused" and engine.dtype == dtype
        found = engine.generate(PROMPTS, PARAMS)
    assert all(theirs == ours for theirs, ours in trained(trainer, found, latent))
    for parameter in routers(trainer).values():  # and it shows what the routers' weights are
        parameter.data = parameter.data.to(dtype).float()
    assert any(theirs != ours for theirs, ours in trained(trainer, found, latent))


@each_attention
@each_device
def test_stages_have_the_bits_of_the_whole(device, dtype, latent):
    model = made(device, dtype)
    with vx.patch.hf(model, latent=latent) as handle:
        for layers in (range(0, 2), range(2, 3)):
            assert forward(handle, layers)[1] == "fused"
        assert set(routers(model)) <= handle.describe().names()


def test_fp32_routers_are_taken_and_no_other_mixture():
    model = made()
    assert load(model).model is model and load(model, dtype="bfloat16").model is model
    for parameter in routers(model).values():
        parameter.data = parameter.data.bfloat16()
    assert load(model).model is model  # all of one dtype, as before
    for parameter in routers(model).values():
        parameter.data = parameter.data.half()
    with pytest.raises(TypeError, match=r"has torch.bfloat16 and torch.float16, expected torch.bfloat16 or .* alone"):
        load(model)
    model = made()
    model.lm_head.float()
    with pytest.raises(TypeError, match=r"has torch.bfloat16 and torch.float32, expected torch.bfloat16 or .* alone"):
        load(model)
    with pytest.raises(TypeError, match=r"has torch.bfloat16, expected torch.float32: convert"):
        load(made(), dtype="float32")


def test_an_update_brings_each_tensor_in_its_own_dtype():
    new = made(seed=1)
    given, names = new.state_dict(), list(routers(new))
    with launch("cpu", model=made()) as engine:
        assert {engine.manifest()[name][1] for name in names} == {torch.float32}
        rounded = given | {name: given[name].bfloat16() for name in names}
        with pytest.raises(TypeError, match=r"mlp.gate.weight is torch.bfloat16, expected torch.float32"):
            engine.update_weights(rounded, numerics=engine.numerics())
        wider = given | {"lm_head.weight": given["lm_head.weight"].float()}
        with pytest.raises(TypeError, match=r"lm_head.weight is torch.float32, expected torch.bfloat16"):
            engine.update_weights(wider, numerics=engine.numerics())
        with pytest.raises(TypeError, match=r"mlp.gate.weight is torch.bfloat16, expected torch.float32"):
            specs = {name: (tensor.shape, tensor.dtype) for name, tensor in rounded.items()}
            engine.update_weights(rounded.items(), numerics=engine.numerics(), specs=specs)
        assert engine.weight_version == 0
        before = engine.generate(PROMPTS[:2], PARAMS)
        engine.update_weights(given, numerics=engine.numerics())
        after = engine.generate(PROMPTS[:2], PARAMS)
        assert [c.logprobs for c in before] != [c.logprobs for c in after]
    assert all(theirs == ours for theirs, ours in trained(new, after))


def test_an_update_piece_by_piece_is_held_to_each_dtype():
    model = made()
    name = next(iter(routers(model)))
    update = Update(model)
    with pytest.raises(TypeError, match=r"mlp.gate.weight is torch.bfloat16, expected torch.float32"):
        update.note(name, Spec(tuple(model.get_parameter(name).shape), torch.bfloat16))
    update.note(name, Spec(tuple(model.get_parameter(name).shape), torch.float32))


def test_the_stock_side_leaves_them_in_fp32_and_gives_all_back():
    model = made()
    before = {name: p.clone() for name, p in model.named_parameters()}
    for dtype in ("bfloat16", "float32"):
        run_stock(model, [[3, 4, 5]], dtype=dtype, max_new_tokens=2)
        for name, parameter in model.named_parameters():
            assert_bitwise(parameter.detach(), before[name], name)


@pytest.mark.parametrize("family", ["Llama", "DeepseekV3"])
def test_a_stock_stack_in_chunks_uses_the_cache_that_comes_out(family):
    """By its name in this release; a model that gives none back is refused, not run as if it had."""
    model, ids = build(family, torch.float32), [5, 9, 3, 7, 11, 2, 8]

    def run(**options):
        with torch.no_grad(), stacks.stock(model, **options).calls([ids]) as (_, calls):
            return torch.cat([call.run()[0] for call in calls])

    torch.testing.assert_close(run(chunk=2), run(), rtol=1e-4, atol=1e-4)

    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, **kwargs):
            return self.model(input_ids, use_cache=False)

    with stacks.own(Alone(), chunk=2).calls([ids]) as (_, calls), pytest.raises(ValueError, match="returned no cache"):
        [call.run() for call in calls]
