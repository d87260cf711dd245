"""Routers whose weights stay in fp32 beside a model's 16 bits, as transformers keeps DeepSeek-V3's from 5.24 on."""

import pytest
import test_hf_wrapped as wrapped
import torch
from conftest import devices
from families import FORMS, alone, check_forms, family, routers, sequences, settings, tiny, with_fp32_routers, world
from test_hf_mixtures import SIGMOID, with_bias
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM
from two_ranks import shard, trained, trained_sharded

import vexact_ops as vx
from vexact_ops.patch import UnsupportedModule, kept_in_fp32, mixture
from vexact_ops.testing import assert_bitwise

MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1}
KINDS = [("deepseek_v3", {}), ("deepseek_v3", MOONLIGHT), ("glm4_moe", SIGMOID), ("dots1", SIGMOID)]
each_kind = pytest.mark.parametrize(
    "name,changes", [(*family(n).values, c) for n, c in KINDS], ids=["deepseek_v3", "moonlight", "glm4_moe", "dots1"]
)
each_device = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))


def made(name="deepseek_v3", dtype=torch.bfloat16, device="cpu", **changes):
    if "n_routed_experts" in changes:
        changes |= {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
    model = with_fp32_routers(with_bias(tiny(name, dtype, device=device, **changes)))
    assert {p.dtype for p in model.parameters()} == {torch.float32, dtype} and len(routers(model)) > 0
    return model


@each_kind
@pytest.mark.parametrize("latent", [False, True], ids=["expanded", "latent"])
@each_device
def test_a_sequence_has_the_same_logits_in_every_form(name, changes, latent, device, dtype):
    if latent and name != "deepseek_v3":
        pytest.skip("its attention is not latent")
    model = made(name, dtype, device, **changes)
    with vx.patch.hf(model, latent=latent):
        check_forms(model, sequences(device=device), FORMS)


@each_device
def test_logits_are_the_fp32_product_that_the_stock_router_forms(device, dtype):
    """Of a hidden row of 16 bits and fp32 weights: no rounding but those of the sum."""
    model, x = made(device=device, dtype=dtype), torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    x, path = x.to(device, dtype), next(iter(routers(model))).removesuffix(".weight")
    router = model.get_submodule(path)
    stock = router(x)
    with vx.patch.hf(model) as handle:
        assert sum(row.note.endswith(" fp32 weights") for row in handle.report()) == len(routers(model))
        ours = router(x)
    logits, theirs = (found[0] if isinstance(found, tuple) else found for found in (ours, stock))
    assert logits.dtype == theirs.dtype == torch.float32
    exact = x.double() @ router.weight.double().t()
    room = 0.4 * 32**0.5 * 2**-24 * (x.double().abs() @ router.weight.double().abs().t())
    assert ((logits - exact).abs() <= room).all()
    rounded = x.double() @ router.weight.to(dtype).double().t()
    assert ((rounded - exact).abs() > room).double().mean() > 0.9  # what rounded weights would give is far off
    assert_bitwise(logits, vx.linear(x.float(), router.weight))
    if isinstance(stock, tuple):
        (ids, order), (their_ids, their_order) = ours[2].sort(1), stock[2].sort(1)
        assert torch.equal(ids, their_ids.to(ids.dtype))
        torch.testing.assert_close(ours[1].gather(1, order), stock[1].gather(1, their_order), rtol=1e-5, atol=1e-6)


@each_device
def test_what_holds_the_weights_is_no_matter(device, dtype):
    """Equal values give equal bits, in fp32 and in 16 bits, into which FSDP2 and `.to(...)` round them."""
    model, seqs = made(device=device, dtype=dtype), sequences(device=device)
    with vx.patch.hf(model), torch.no_grad():
        for parameter in routers(model).values():
            parameter.data = parameter.data.to(dtype).float()
        wide = alone(model, seqs)
        for parameter in routers(model).values():
            parameter.data = parameter.data.to(dtype)
        assert_bitwise(alone(model, seqs), wide)


@each_device
def test_mixed_precision_of_fsdp2_has_the_bits_of_rounded_routers(device, dtype, caplog):
    mixture._say_rounded.cache_clear()
    master, model = made(device=device, dtype=dtype).float().train(), made(device=device, dtype=dtype).train()
    for parameter in routers(model).values():
        parameter.data = parameter.data.to(dtype).float()
    for rotary in (master.model.rotary_emb, model.model.rotary_emb):
        assert rotary.inv_freq.dtype == torch.float32
    with vx.patch.hf(model) as handle:
        values, _ = trained(model, handle, device)
    assert not caplog.records
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    with vx.patch.hf(master) as handle, world(device) as mesh:
        shard(master, mesh, mp_policy=policy)
        got, _ = trained_sharded(master, handle, device)
    assert_bitwise(got, values, "log-probabilities")
    assert [r.getMessage()[:58] for r in caplog.records] == [
        "patch.hf: routers that transformers keeps in fp32 are torc"
    ]


@each_device
def test_routers_in_units_of_their_own_stay_in_fp32(device, dtype):
    master, model = made(device=device, dtype=dtype).float().train(), made(device=device, dtype=dtype).train()
    with vx.patch.hf(model) as handle:
        values, _ = trained(model, handle, device)
    with vx.patch.hf(master) as handle, world(device) as mesh:
        for name in routers(master):
            policy = MixedPrecisionPolicy(param_dtype=torch.float32)
            fully_shard(master.get_submodule(name.removesuffix(".weight")), mesh=mesh, mp_policy=policy)
        shard(master, mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
        got, _ = trained_sharded(master, handle, device)
    assert_bitwise(got, values, "log-probabilities")


@each_device
def test_wrappings_change_no_bit(device, dtype, monkeypatch):
    monkeypatch.setattr(
        wrapped, "tiny", lambda name, dtype, device="cpu", **changes: made(name, dtype, device, **changes)
    )
    wrapped.test_torch_compile_has_the_same_bits(device, dtype, "aot_eager", "deepseek_v3")
    wrapped.test_fully_shard_has_the_same_bits("deepseek_v3", device, dtype)
    wrapped.test_gradient_checkpointing_has_the_same_bits("deepseek_v3", False, device, dtype, monkeypatch)


def test_described_they_are_cast_and_their_logits_wide():
    model = made()
    with vx.patch.hf(model) as handle:
        found = handle.describe()
    parts = [layer.blocks[1].part for layer in found.layers]
    (router, *_) = [part.router for part in parts if hasattr(part, "router")]
    assert (router.wide, router.cast, router.linear.weight) == (True, True, next(iter(routers(model))))


def test_rounded_logits_of_weights_that_are_kept_are_refused():
    model = tiny("qwen3_moe", torch.bfloat16)
    model._keep_in_fp32_modules_strict = {"mlp.gate.weight"}
    with pytest.raises(
        UnsupportedModule, match="a router whose weights are kept in fp32, but whose logits are rounded"
    ):
        vx.patch.hf(model)


def test_names_of_what_is_kept():
    model = tiny("llama")
    assert kept_in_fp32(model) == set()
    model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules = {"layers.*.q_proj"}, ["norm"]
    queries = {name for name, _ in model.named_parameters() if ".q_proj." in name}
    assert kept_in_fp32(model) == kept_in_fp32(model, torch.bfloat16) == queries
    assert kept_in_fp32(model, torch.float32) == set()
    assert kept_in_fp32(model, torch.float16) > {"model.norm.weight", *queries} > queries > set()


each_hunyuan = pytest.mark.parametrize("name,changes,described", settings("fp32-routers"))


@each_hunyuan
def test_a_router_that_computes_by_the_dtype_of_its_weights_is_kept(name, changes, described, tmp_path):
    tiny(name, torch.bfloat16, **changes).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    names = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert names == {f"model.layers.{i}.mlp.gate.wg.weight" for i in (0, 1)} == kept_in_fp32(model)
    assert kept_in_fp32(model, torch.float32) == set()
    gate, x = model.model.layers[0].mlp.gate, torch.randn(40, 32).bfloat16()
    with vx.patch.hf(model) as handle:
        assert_bitwise(gate(x)[0], vx.linear(x.float(), gate.wg.weight))
        router = handle.describe().layers[0].blocks[1].part.router
        assert (router.wide, router.cast, router.rounded) == (True, True, None)
    model.to(torch.bfloat16)  # which makes it round
    assert kept_in_fp32(model) == set()
    with vx.patch.hf(model):
        assert_bitwise(gate(x)[0], vx.linear(x, gate.wg.weight))


@each_hunyuan
def test_a_matrix_that_is_a_unit_of_its_own_would_stay_sharded(name, changes, described):
    model = tiny(name, torch.bfloat16, **changes)
    with vx.patch.hf(model) as handle, world("cpu") as mesh:
        fully_shard(model.model.layers[0].mlp.gate.wg, mesh=mesh)
        with pytest.raises(UnsupportedModule, match=r"gate\.wg \(FSDPLinear\): it has a hook that would not run"):
            handle.logprobs(torch.tensor([3, 1, 4]))
