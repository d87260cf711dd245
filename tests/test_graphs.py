"""CUDA graphs: every op of a decode step can be captured; a replay on other inputs has the bits of an eager call."""

import pytest
import torch

import vexact_ops as vx
from vexact_ops._core import backend
from vexact_ops.testing import assert_bitwise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ROWS, HQ, HK, D, PAGE, PAGES, VOCABULARY, EXPERTS = 5, 8, 2, 64, 16, 12, 3000, 8


def random(seed, *shape, dtype=torch.bfloat16):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=g, device="cuda").to(dtype)


def whole(seed, high, *shape, dtype=torch.int64):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randint(high, shape, generator=g, device="cuda").to(dtype)


def slots(seed):
    g = torch.Generator("cuda").manual_seed(seed)
    return torch.randperm(PAGES * PAGE, generator=g, device="cuda")[:ROWS]


def spread(seed):
    """Offsets of ROWS rows over EXPERTS experts."""
    zero, inner = whole(seed, 1, 1), whole(seed, ROWS + 1, EXPERTS - 1).sort()[0]
    return torch.cat([zero, inner, zero + ROWS]).int()


def store(k, v, slot_mapping):
    caches = [torch.zeros(PAGES, PAGE, HK, D, dtype=k.dtype, device="cuda") for _ in range(2)]
    vx.kv_cache_store(k, v, *caches, slot_mapping)
    return tuple(caches)


def rope_store(q, k, v, cos, sin, slot_mapping):
    caches = [torch.zeros(PAGES, PAGE, HK, D, dtype=k.dtype, device="cuda") for _ in range(2)]
    return vx.rope_kv_store(q, k, v, cos, sin, *caches, slot_mapping), *caches


def sample(logits, seeds, positions, temperature, top_k, top_p):
    return vx.sample(logits, seeds, positions, temperature=temperature, top_k=top_k, top_p=top_p, min_p=0.01)


def attend(q, k_cache, v_cache, table, lens):
    cu = torch.arange(ROWS + 1, dtype=torch.int32, device="cuda")
    return vx.attention_paged(q, k_cache, v_cache, table, lens, cu, 1)


def ignoring(target):
    return torch.where(target % 3 == 0, -100, target)


def loss_step(hidden, weight, target):
    """As a training step has it: what is ignored, and how much of it, is in the values."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.enable_grad():
        loss = vx.linear_cross_entropy(hidden, weight, ignoring(target))
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def a_token_each(seed):
    """Slots and lengths of sequences that decode: in the first chunk, at chunks' ends, and behind them."""
    order = torch.randperm(8, generator=torch.Generator().manual_seed(seed))[:ROWS]
    lens = torch.tensor([1, 64, 65, 100, 128], dtype=torch.int32).roll(seed)
    return order.to(torch.int32).cuda(), lens.cuda()


def convolve(x, weight, taps, slots, lens):
    taps, cu = taps.clone(), torch.arange(ROWS + 1, dtype=torch.int32, device="cuda")
    return vx.causal_conv_paged(x, weight, None, taps, slots, lens, cu), taps


def delta_rows(seed):
    q, k, v = random(seed, ROWS, HK, 64), random(seed + 1, ROWS, HK, 64), random(seed + 2, ROWS, HQ, 64)
    return q, k, v, -random(seed + 3, ROWS, HQ).float().abs(), random(seed + 4, ROWS, HQ).sigmoid()


def delta_memory(seed):
    state, open_u = random(seed + 5, 8, HQ, 64, 64).float(), random(seed + 6, 8, 64, HQ, 64).float()
    return state, random(seed + 7, 8, 64, HK, 64), open_u, -random(seed + 8, 8, 64, HQ).float().abs()


def delta(q, k, v, g, beta, state, open_k, open_u, open_g, slots, lens):
    memory = [t.clone() for t in (state, open_k, open_u, open_g)]
    cu = torch.arange(ROWS + 1, dtype=torch.int32, device="cuda")
    return vx.gated_delta_paged(q, k, v, g, beta, *memory, slots, lens, cu, 1), *memory


def delta_step(x, weight, taps, a, b, a_log, dt_bias, state, open_k, open_u, open_g, slots, lens):
    memory = [t.clone() for t in (taps, state, open_k, open_u, open_g)]
    cu, gates = torch.arange(ROWS + 1, dtype=torch.int32, device="cuda"), (a, b, a_log, dt_bias)
    return vx.conv_gated_delta_paged(x, weight, None, memory[0], *gates, *memory[1:], slots, lens, cu, 1), *memory


def delta_inputs(seed):
    channels = 64 * (2 * HK + HQ)
    weights = random(seed + 20, channels, 4), random(seed + 21, 8, 4, channels)
    gates = *(random(seed + i, ROWS, HQ) for i in (22, 23)), *(random(seed + i, HQ).float() for i in (24, 25))
    return random(seed + 26, ROWS, channels), *weights, *gates, *delta_memory(seed), *a_token_each(seed)


# name -> (function, seed -> its inputs)
OPS = {
    "rmsnorm": (vx.rmsnorm, lambda s: (random(s, ROWS, 512), random(s + 1, 512))),
    "rmsnorm-residual": (
        lambda x, w, r: vx.rmsnorm(x, w, 1e-6, r),
        lambda s: (random(s, ROWS, 512), random(s + 1, 512), random(s + 2, ROWS, 512)),
    ),
    "rmsnorm_gated": (
        vx.rmsnorm_gated,
        lambda s: (random(s, ROWS, 128), random(s + 1, ROWS, 128), random(s + 2, 128)),
    ),
    "layer_norm": (vx.layer_norm, lambda s: (random(s, ROWS, 512), random(s + 1, 512), random(s + 2, 512))),
    "gelu": (vx.gelu, lambda s: (random(s, ROWS, 512),)),
    "sigmoid_mul": (vx.sigmoid_mul, lambda s: (random(s, ROWS, 512), random(s + 1, ROWS, 512))),
    "causal_conv": (
        lambda x, w: vx.causal_conv(x, w),
        lambda s: (random(s, ROWS, 512), random(s + 1, 512, 4)),
    ),
    "causal_conv_paged": (
        convolve,
        lambda s: (random(s, ROWS, 512), random(s + 1, 512, 4), random(s + 2, 8, 4, 512), *a_token_each(s)),
    ),
    "gated_delta_paged": (delta, lambda s: (*delta_rows(s), *delta_memory(s), *a_token_each(s))),
    "conv_gated_delta_paged": (delta_step, delta_inputs),
    "delta_gates": (
        vx.delta_gates,
        lambda s: (*(random(s + i, ROWS, HQ) for i in range(2)), *(random(s + i, HQ).float() for i in (2, 3))),
    ),
    "rope": (
        vx.rope,
        lambda s: (random(s, ROWS, HQ, D), random(s + 1, ROWS, HK, D), random(s + 2, ROWS, D), random(s + 3, ROWS, D)),
    ),
    "rope_cos_sin": (
        lambda p, f: vx.rope_cos_sin(p, f, dtype=torch.bfloat16),
        lambda s: (whole(s, 40000, ROWS), random(s, D // 2, dtype=torch.float32)),
    ),
    "rope_kv_store": (
        rope_store,
        lambda s: (
            *(random(s + i, ROWS, h, D) for i, h in enumerate((HQ, HK, HK))),
            *(random(s + i, ROWS, D) for i in (3, 4)),
            slots(s),
        ),
    ),
    "linear_silu_mul": (vx.linear_silu_mul, lambda s: (random(s, ROWS, 256), random(s + 1, 2 * 320, 256))),
    "silu_mul": (vx.silu_mul, lambda s: (random(s, ROWS, 2 * 768),)),
    "kv_cache_store": (store, lambda s: (random(s, ROWS, HK, D), random(s + 1, ROWS, HK, D), slots(s))),
    "log_softmax": (vx.log_softmax, lambda s: (random(s, ROWS, VOCABULARY, dtype=torch.float32),)),
    "mean": (vx.mean, lambda s: (random(s, ROWS, 9000),)),
    "linear": (vx.linear, lambda s: (random(s, ROWS, 256), random(s + 1, 320, 256), random(s + 2, 320))),
    "linear_logits": (vx.linear_logits, lambda s: (random(s, ROWS, 256), random(s + 1, VOCABULARY, 256))),
    "linear_logprobs": (
        vx.linear_logprobs,
        lambda s: (random(s, ROWS, 256), random(s + 1, VOCABULARY, 256), whole(s, VOCABULARY, ROWS)),
    ),
    "linear_cross_entropy": (
        lambda h, w, t: vx.linear_cross_entropy(h, w, ignoring(t), reduction="none"),
        lambda s: (random(s, ROWS, 256), random(s + 1, VOCABULARY, 256), whole(s, VOCABULARY, ROWS)),
    ),
    "linear_cross_entropy-step": (
        loss_step,
        lambda s: (random(s, 300, 256), random(s + 1, VOCABULARY, 256), whole(s, VOCABULARY, 300)),
    ),
    "sample": (
        sample,
        lambda s: (
            random(s, ROWS, VOCABULARY, dtype=torch.float32) * 3,
            whole(s + 1, 2**40, ROWS),
            whole(s + 2, 2**20, ROWS),
            torch.tensor([0.0, 0.7, 1.0, 1.3, 0.2], device="cuda").roll(s),
            torch.tensor([0, 40, 0, 3, 0], device="cuda").roll(s),
            torch.tensor([1.0, 0.9, 0.5, 1.0, 0.99], device="cuda").roll(s),
        ),
    ),
    "linear_sample": (
        lambda h, w, s, p, t: vx.linear_sample(h, w, s, p, temperature=t),
        lambda s: (
            *(
                random(s, ROWS, 256),
                random(s + 1, VOCABULARY, 256),
                whole(s + 1, 2**40, ROWS),
                whole(s + 2, 2**20, ROWS),
            ),
            torch.tensor([0.0, 0.7, 1.0, 1.3, 0.2], device="cuda").roll(s),
        ),
    ),
    "linear_sample-cut": (
        lambda h, w, s, p, k: vx.linear_sample(h, w, s, p, top_k=k),
        lambda s: (
            *(
                random(s, ROWS, 256),
                random(s + 1, VOCABULARY, 256),
                whole(s + 1, 2**40, ROWS),
                whole(s + 2, 2**20, ROWS),
            ),
            torch.tensor([0, 40, 0, 3, 0], device="cuda").roll(s),
        ),
    ),
    "moe_route": (lambda x: vx.moe_route(x, 3), lambda s: (random(s, ROWS, EXPERTS, dtype=torch.float32),)),
    "grouped_linear": (
        vx.grouped_linear,
        lambda s: (random(s, ROWS, 128), random(s + 1, EXPERTS, 64, 128), spread(s)),
    ),
    "fused_moe": (
        vx.fused_moe,
        lambda s: (
            random(s, ROWS, 128),
            random(s + 1, EXPERTS, 2 * 64, 128),
            random(s + 2, EXPERTS, 128, 64),
            *vx.moe_route(random(s + 3, ROWS, EXPERTS, dtype=torch.float32), 3),
        ),
    ),
    "attention_paged": (
        attend,
        lambda s: (
            random(s, ROWS, HQ, D),
            random(s + 1, PAGES, PAGE, HK, D),
            random(s + 2, PAGES, PAGE, HK, D),
            whole(s + 3, PAGES, ROWS, 4, dtype=torch.int32),
            1 + whole(s + 4, 4 * PAGE - 1, ROWS, dtype=torch.int32),
        ),
    ),
}


def outputs(value) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


@pytest.mark.parametrize("name", OPS)
def test_a_replay_on_other_inputs_has_the_bits_of_an_eager_call(name):
    run, make = OPS[name]
    held = [t.clone() for t in make(0)]
    with torch.no_grad():
        run(*held)  # compiles, and admits what has to be admitted
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = outputs(run(*held))
        for seed in (1, 2, 1):
            fresh = make(seed)
            for target, source in zip(held, fresh):
                target.copy_(source)
            graph.replay()
            assert_bitwise(captured, outputs(run(*fresh)), name)


@pytest.mark.parametrize("name", OPS)
def test_no_op_makes_the_host_wait(name):
    """Any look at a value on the device, and any copy from pageable memory, is an error in this mode."""
    run, make = OPS[name]
    inputs = make(0)
    with torch.no_grad():
        run(*inputs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(*inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_mode_catches_a_wait():
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(3, device="cuda").sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_bits_do_not_depend_on_the_stream():
    side = torch.cuda.Stream()
    for name, (run, make) in OPS.items():
        with torch.no_grad():
            expected = outputs(run(*make(3)))
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                got = outputs(run(*make(3)))
            side.synchronize()
        assert_bitwise(got, expected, name)


def test_every_room_that_decodes_is_here():
    covered = {"rmsnorm", "rope", "silu_mul", "kv_cache", "log_softmax", "mean", "linear", "linear_cross_entropy"}
    covered |= {"sampler", "linear_sample", "linear_silu_mul", "attention", "moe_route", "grouped_linear", "fused_moe"}
    covered |= {"causal_conv", "gated_delta", "layer_norm"}
    vx.numerics()
    assert covered == {name for name, room in backend.ROOMS.items() if room.cuda}
