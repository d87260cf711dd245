"""vx.patch.veomni in one process: the names in VeOmni's registries, what is refused, and that all of it is undone."""

import copy
import importlib.metadata
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import vexact_ops as vx
from vexact_ops.patch.veomni import FIELDS
from vexact_ops.testing import assert_bitwise

from .veomni_ranks import config_of

EAGER = dict.fromkeys(FIELDS, "eager") | {"attn_implementation": "sdpa"}
OF_DELTA_NETS = [f"{name}_implementation" for name in ("causal_conv1d", "chunk_gated_delta_rule")]
IDS = torch.arange(3, 33)[None] % 29
CU = torch.tensor([0, 11, 30], dtype=torch.int32)
PACKED = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 19, "max_length_k": 19, "use_cache": False}
NEXT = IDS.roll(-1, 1)


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A world of one rank, and VeOmni's globals as they were."""
    from transformers.loss.loss_utils import LOSS_MAPPING
    from veomni.distributed.parallel_state import clear_parallel_state, init_parallel_state

    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    losses = dict(LOSS_MAPPING)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        init_parallel_state(dp_size=1, dp_mode="fsdp2")
        yield
    finally:
        dist.destroy_process_group()
        clear_parallel_state()
        LOSS_MAPPING.update(losses)


def build(name="qwen3", dtype="bfloat16", **fields):
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from veomni.arguments import OpsImplementationConfig
    from veomni.models.auto import build_foundation_model

    config = config_of(name)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    ops = OpsImplementationConfig(**{**FIELDS, **fields}, load_balancing_loss_implementation="eager")
    torch.manual_seed(0)
    model = build_foundation_model(config, None, dtype, init_device="cpu", ops_implementation=ops)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.15)
    return model


def scored(model, **more):
    options = {"labels": IDS, "shift_labels": NEXT, "return_log_probs": True, "temperature": 0.7, **more}
    return model(input_ids=IDS, **PACKED, **options).fused_linear_aux


def state() -> dict:
    """All that the patch may change for the process, as it is now."""
    from transformers.loss.loss_utils import LOSS_MAPPING
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from veomni.models.transformers.deepseek_v3 import device_patch
    from veomni.ops.config.singleton import get_ops_config
    from veomni.ops.kernel_registry import KERNEL_REGISTRY
    from veomni.ops.kernels import cross_entropy, moe

    slots = {
        f"{name}.{key}": (value._impl_name, value._kernel)
        for name, module in sys.modules.items()
        if name.startswith("veomni.models.transformers.")
        for key, value in vars(module).items()
        if type(value).__name__ == "OpSlot"
    }
    return {
        "kernels": {key: set(bucket) for key, bucket in KERNEL_REGISTRY._specs.items()},
        "attention": dict(ALL_ATTENTION_FUNCTIONS._global_mapping),
        "losses": dict(LOSS_MAPPING),
        "moe": (moe.apply_veomni_fused_moe_patch, moe._fused_moe_forward),
        "loss": cross_entropy.install_loss_mapping,
        "device": device_patch.apply_per_model_patches,
        "config": copy.copy(get_ops_config()),
        "slots": slots,
    }


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "moonlight"])
def test_undo_restores_everything(name):
    model = build(name, **EAGER)  # the module of its class is imported, and its slots are bound to nothing
    with torch.no_grad():
        stock = scored(model).log_probs
    before = state()
    veomni = vx.patch.veomni()
    covered = build(name)
    handle = veomni.cover(covered)
    with torch.no_grad():
        aligned = scored(covered).log_probs
    assert state() != before
    veomni.undo()
    veomni.undo()  # once only
    after = state()
    for slot, (bound, _) in before["slots"].items():  # those that held eager code are empty: it runs
        assert after["slots"][slot] in ((bound, None), (None, None)), slot
    del before["slots"], after["slots"]
    assert after == before
    assert not any("forward" in module.__dict__ for module in covered.modules())
    with torch.no_grad():
        assert_bitwise(scored(model).log_probs, stock)
    assert not torch.equal(aligned, stock)
    with pytest.raises(RuntimeError, match="undone"):
        handle.logprobs(IDS)
    with pytest.raises(RuntimeError, match="undone"):
        veomni.cover(covered)


def test_the_last_of_several_undoes():
    first, second = vx.patch.veomni(), vx.patch.veomni()
    first.undo()
    with second:
        second.cover(build())
    with pytest.raises((KeyError, ValueError), match="vexact"):
        build()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "qwen3_moe"])
def test_the_kernels_by_name_alone(name):
    """A model that is not covered runs the slots' kernels and packed attention: near to the covered one, whose linear
    layers are aligned too."""
    with vx.patch.veomni() as veomni:
        model = build(name)
        with torch.no_grad():
            named = scored(model)
            veomni.cover(model)
            covered = scored(model)
    torch.testing.assert_close(named.log_probs, covered.log_probs, atol=0.2, rtol=0)
    torch.testing.assert_close(named.entropy, covered.entropy, atol=0.1, rtol=0)


def test_experts_of_deepseek_by_name_alone():
    with vx.patch.veomni() as veomni:
        model = build("moonlight")
        with torch.no_grad():
            named = scored(model).log_probs
            veomni.cover(model)
            torch.testing.assert_close(named, scored(model).log_probs, atol=0.2, rtol=0)


@pytest.mark.parametrize("field", [field for field, name in FIELDS.items() if name == "vexact"])
def test_what_is_left_eager_is_refused(field):
    with vx.patch.veomni() as veomni:
        model = build("qwen3_5" if field in OF_DELTA_NETS else "qwen3", **{field: EAGER[field]})
        with pytest.raises(ValueError, match=rf"{field}: got {EAGER[field]}, expected vexact"):
            veomni.cover(model)
        assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("name", ["qwen3_moe", "moonlight"])
def test_experts_that_are_left_eager_are_refused(name):
    with vx.patch.veomni() as veomni:
        model = build(name, moe_implementation="eager")
        with pytest.raises(ValueError, match="moe_implementation: got eager, expected fused_vexact"):
            veomni.cover(model)


def test_models_that_veomni_did_not_build_are_refused():
    from transformers import AutoModelForCausalLM

    with vx.patch.veomni() as veomni, pytest.raises(TypeError, match=r"transformers\.models\.qwen3.*generated classes"):
        veomni.cover(AutoModelForCausalLM.from_config(config_of("qwen3")))


@pytest.mark.parametrize("found", [None, "0.1.11"])
def test_another_version_is_one_clear_error(found, monkeypatch):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(importlib.metadata, "version", version)
    before = state()
    with pytest.raises(RuntimeError, match=r"expected 0\.1\.12: pip install --no-deps veomni==0\.1\.12"):
        vx.patch.veomni()
    assert state() == before


def test_importing_the_ops_imports_nothing_of_veomni():
    code = "import sys, vexact_ops as vx; vx.patch.veomni; assert not {'veomni', 'transformers'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_report_says_what_the_process_has():
    with vx.patch.veomni() as veomni:
        said = str(veomni.report())
    for what in ("rms_norm/standard", "ALL_ATTENTION_FUNCTIONS", "LOSS_MAPPING", "apply_veomni_fused_moe_patch"):
        assert what in said


def test_attention_by_name_wants_packed_sequences():
    with vx.patch.veomni():
        model = build()
        with pytest.raises(ValueError, match="cover the model"):
            model(input_ids=IDS)


def test_router_replay_is_refused():
    from veomni.utils.moe_router_replay import set_active_replay

    with vx.patch.veomni() as veomni:
        model = build("qwen3_moe")
        veomni.cover(model)
        set_active_replay(object())
        try:
            with pytest.raises(ValueError, match="router replay"):
                scored(model)
        finally:
            set_active_replay(None)


@pytest.mark.parametrize(
    "more,error",
    [
        ({"teacher_topk_ids": IDS}, (ValueError, "top k is not covered")),
        ({"temperature": torch.tensor(0.7, dtype=torch.bfloat16)}, (TypeError, "expected a number or float32")),
        ({"output_router_logits": True}, (ValueError, "load balancing loss")),
    ],
    ids=["teacher", "temperature", "load balancing"],
)
def test_what_the_loss_does_not_know(more, error):
    with vx.patch.veomni() as veomni:
        model = build("qwen3_moe")
        veomni.cover(model)
        with pytest.raises(error[0], match=error[1]):
            scored(model, **more)


def test_ignored_labels_and_a_temperature_for_each_token():
    with vx.patch.veomni() as veomni:
        model = build()
        handle = veomni.cover(model)
        temperature = torch.linspace(0.3, 2, IDS.numel()).view(IDS.shape)
        target = NEXT.clone()
        target[0, [4, 10, 29]] = -100
        got = scored(model, shift_labels=target, temperature=temperature)
        expected = handle.logprobs(IDS, cu_seqlens=CU, temperature=temperature, return_entropy=True)
        ignored = target[0] == -100
        for value, of in ((got.log_probs, expected[0]), (got.entropy, expected[1])):
            assert_bitwise(value[0, ~ignored].detach(), of[0, ~ignored].detach())
            assert not value[0, ignored].any()
        got.log_probs.sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())


def test_labels_are_shifted_as_veomni_shifts_them():
    """Without shift_labels: log-probabilities and the loss of the next of `labels`, the last one none."""
    with vx.patch.veomni() as veomni:
        model = build()
        veomni.cover(model)
        with torch.no_grad():
            got = scored(model, shift_labels=None).log_probs
            assert_bitwise(got[:, :-1], scored(model).log_probs[:, :-1])
            assert got[0, -1] == 0
            loss = model(input_ids=IDS, labels=IDS, **PACKED).loss
            half = model(input_ids=IDS, labels=IDS, **PACKED, num_items_in_batch=58).loss
        at_1 = scored(model, shift_labels=None, temperature=1.0).log_probs[0, :-1]
        torch.testing.assert_close(loss, -at_1.double().mean().float().detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(half, loss / 2, rtol=1e-6, atol=0)


def test_one_rank_has_no_fsdp():
    """World size 1: VeOmni refuses meta models; a model in bf16 works, one in fp32 under autocast says what to do."""
    from veomni.arguments import MixedPrecisionConfig
    from veomni.distributed.torch_parallelize import build_parallelize_model

    with vx.patch.veomni() as veomni:
        model = build()
        handle = veomni.cover(model)
        model = build_parallelize_model(model, init_device="cuda", mixed_precision=MixedPrecisionConfig(enable=False))
        model.train()
        with torch.autocast("cpu", torch.bfloat16):
            got = scored(model).log_probs
        got.sum().backward()
        expected = handle.logprobs(IDS, cu_seqlens=CU, temperature=0.7).detach()
        inside = expected[0] != 0
        assert_bitwise(got[0, inside].detach(), expected[0, inside])
        wide = build(dtype="float32")
        veomni.cover(wide)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="autocast"):
            scored(wide)
