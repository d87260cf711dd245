"""fp32 masters of one process are FSDP2's on one rank: the same bits after steps of AdamW, clipped and not."""

import copy
import os

import pytest
import torch
import torch.distributed as dist
from engine_models import build
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import vexact_ops as vx
from vexact_engine.recipes.digests import sha256
from vexact_engine.recipes.masters import Masters

IDS = torch.arange(24).view(2, 12) % 7


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def under_fsdp2(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def trained(model, weights, follow, max_norm):
    """Three steps of two micro-batches."""
    optimizer, norms = torch.optim.AdamW(weights.parameters(), lr=1e-2, weight_decay=0.1), []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            model(input_ids=IDS + step + micro, use_cache=False).logits.float().logsumexp(-1).mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(list(weights.parameters()), max_norm)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        optimizer.step()
        follow()
    names, state = get_state_dict(weights, optimizer)
    return sha256(weights.named_parameters()), norms, set(names), set(state["state"])


@pytest.mark.parametrize("max_norm", [1e-2, 1e3], ids=["clipped", "whole"])
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_masters_are_those_of_fsdp2(family, max_norm, mesh):
    model = build(family).float().train()
    model.lm_head.weight = model.model.embed_tokens.weight  # tied: two names
    sharded = under_fsdp2(copy.deepcopy(model), mesh)
    masters = Masters(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    found = trained(model, masters, masters.round, max_norm)
    assert found == trained(sharded, sharded, lambda: None, max_norm)
    assert all(p.grad is None for p in model.parameters())
    rounded = zip(model.state_dict().values(), masters.state_dict().values())
    assert all(vx.same_bits(mine, master.to(mine.dtype)) for mine, master in rounded)


def test_a_model_that_does_not_follow_is_found(mesh):
    """The twin that must fail."""
    model = build("Qwen3").float().train()
    sharded = under_fsdp2(copy.deepcopy(model), mesh)
    masters = Masters(model, torch.bfloat16)
    assert trained(model, masters, lambda: None, 1e3)[0] != trained(sharded, sharded, lambda: None, 1e3)[0]


def test_in_fp32_the_model_has_the_masters():
    model = build("Qwen3").float()
    masters = Masters(model, torch.float32)
    assert {id(p) for p in masters.parameters()} == {id(p) for p in model.parameters()}
    assert masters.round() is None and not masters.counts


def test_what_the_model_computes_with_is_said_in_the_masters_order():
    model = build("Qwen3").float().train()
    masters = Masters(model, torch.bfloat16)
    assert [id(p) for p in masters.rounded()] == [id(p) for p in model.parameters()]
    assert all(torch.equal(r, m.bfloat16()) for r, m in zip(masters.rounded(), masters.parameters()))


def test_those_that_have_moved_are_counted():
    model = build("Qwen3").float().train()
    masters = Masters(model, torch.bfloat16)
    assert masters.counts and masters.round() == 0
    first, second = list(masters.parameters())[:2]
    with torch.no_grad():
        first.view(-1)[3:7].add_(1.0)
        first.view(-1)[9].mul_(1 + 2**-20)  # and is the same number to the model
        second.zero_()
        other = int((second.new_zeros(()) != masters.rounded()[1]).sum())
    assert masters.round() == 4 + other
    assert all(torch.equal(r, m.bfloat16()) for r, m in zip(masters.rounded(), masters.parameters()))


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WHERE = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1"), id="cpu-triton"),
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"), id="cuda-triton"
    ),
]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 8192, 20000])
def test_the_gpus_passes_have_torchs_floats(size, dtype, device):
    triton = pytest.importorskip("vexact_engine.recipes.triton", reason="triton is not installed")
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randint(-(1 << 31), 1 << 31, (2, size), generator=generator).to(torch.int32).view(torch.float32)
    x, y = (n.nan_to_num(0.5, 1.0, -1.0).to(device) for n in numbers)  # of all exponents, halfway cases among them
    x.view(torch.int32)[::3] &= -(1 << 15)
    rounded = torch.where(torch.arange(size, device=device) % 2 == 0, x, y).to(dtype)
    before = rounded.clone()
    moved = triton.round_into(rounded, x)
    assert vx.same_bits(rounded, x.to(dtype))
    assert moved == (before != rounded).sum() and moved.dtype == torch.int64
    total, expected = y.clone(), y.clone()
    triton.add_into(total, before)
    assert vx.same_bits(total, expected.add_(before))
