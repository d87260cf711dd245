"""The compiled extension takes no tensor for what it is not: whatever the dtype of an argument of a native op, either
it is one that the op computes in, or it raises before memory is touched. Python checks arguments too, for their
meaning; what a native op is called with by mistake (torch's default dtype, a caller of torch.ops) must not corrupt
memory."""

import re
from pathlib import Path

import pytest
import torch

from vexact_ops._core import native
from vexact_ops._core.backend import PROBES

ROOT = Path(__file__).parent.parent
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
I32, I64 = torch.int32, torch.int64
DTYPES = [F32, BF16, F16, F64, I32, I64, torch.int8]
CUDA = PROBES["cuda"]()
DEVICES = [
    pytest.param("cpu", marks=[pytest.mark.skipif(bool(PROBES["cpu"]()), reason=str(PROBES["cpu"]()))]),
    pytest.param("cuda", marks=[pytest.mark.skipif(bool(CUDA), reason=str(CUDA))]),
]


def new(*shape, dtype=F32, device="cpu"):
    """A contiguous tensor of ones with twice 64 bytes and eight times its own size behind it: what a wrong type would
    have written or read is still there to be written or read."""
    n = torch.Size(shape).numel()
    return torch.ones(9 * n + 128, dtype=dtype, device=device)[:n].view(shape)


def ints(*values, dtype=I32, device="cpu"):
    return new(len(values), dtype=dtype, device=device).copy_(torch.tensor(values, dtype=dtype))


def cases(t, device):
    """op -> (arguments, {position of an argument: dtypes that it may have besides its own}); t: the dtype of values."""

    def x(*shape, dtype=t):
        return new(*shape, dtype=dtype, device=device)

    def f(*shape):
        return x(*shape, dtype=F32)

    def i(*values, dtype=I32):
        return ints(*values, dtype=dtype, device=device)

    either = {F32, BF16}
    slots, order, ends = i(5, 0, 3, dtype=I64), i(0, 1, 2, 3, 4, 5), i(0, 2, 6)
    caches = x(2, 4, 2, 16), x(2, 4, 2, 16)
    found = {"kv_cache_store": ((x(3, 2, 16), x(3, 2, 16), *caches, slots), {})}
    moe = {
        "moe_plan": ((i(0, 1, 1, 0, 1, 1), i(0, 0, 0), i(*[0] * 6), i(*[0] * 6), None), {}),
        "moe_combine": ((x(6, 8), order, f(3, 2), x(3, 8)), {}),
        "moe_gate_bwd": ((x(6, 16), x(6, 8), order, f(3, 2), ends, False, x(6, 16), x(6, 8), f(3, 2)), {}),
    }
    if device == "cuda":
        if t != F32:
            heads, kv = (16, 2, 64), (16, 1, 64)
            cu = i(0, 7, 16)
            found |= {
                "attention_flash_varlen": (
                    (x(*heads), x(*kv), x(*kv), cu, cu.clone(), f(2), 0.1, 0, 0, True, None, x(*heads), f(2, 16)),
                    {},
                ),
                "attention_flash_paged": (
                    (
                        *(x(2, 2, 64), x(2, 8, 1, 64), x(2, 8, 1, 64), i(0, 1).view(2, 1), i(5, 8), i(0, 1, 2), 1),
                        *(f(2), 0.1, 0, 128, True, None, f(2 * 1 * 2 * 66), x(2, 2, 64)),
                    ),
                    {},
                ),
                "attention_flash_few": (
                    (
                        *(x(3, 2, 64), x(2, 8, 1, 64), x(2, 8, 1, 64), i(0, 1).view(2, 1), i(5, 8), i(0, 1, 3), 2),
                        *(f(2), 0.1, 0, True, 1, x(3, 2, 64)),
                    ),
                    {},
                ),
                "attention_packed_plan": ((cu, cu.clone(), 16, 16, i(*[0] * 10)), {}),
                "attention_paged_plan": ((i(0, 1, 2), i(5, 8), 2, 8, i(*[0] * 10)), {}),
            }
        if t == BF16:
            target, one, d = i(0, 7, 200, dtype=I64), f(1), x(1, 3, 256)
            head = x(3, 64), x(256, 64), target, one, 0.0, 0, 256
            live = i(3, dtype=I64)
            found |= {
                "head_blocks": ((*head, live, 0, f(3, 2, 2), f(3), x(1, 3, 256)), {}),
                "head_gradients": ((*head, live, f(3, 2), f(3), None, None, d), {}),
                "head_unit_gradients": ((d.clone(), f(3, 2, 2), f(3, 2), f(3), target, live, 0, 256), {}),
                "head_dhidden": ((d, x(256, 64), f(3, 64), f(1), live, f(3, 64)), {5: {BF16}}),
                "head_dweight": ((d, x(3, 64), f(1), f(1), live, x(256, 64)), {}),
            }
        return found | moe | {"moe_scatter": ((x(3, 8), order, x(6, 8)), {})}
    q, k, v, o = x(9, 4, 16), x(9, 2, 16), x(9, 2, 8), x(9, 4, 8)
    cu, sinks, lse = i(0, 4, 9), f(4), f(9, 4)
    varlen = {
        "attention_varlen_fwd": (
            (q, k, v, cu, cu.clone(), 5, sinks, 0.25, 0.0, 0, 0, True, o.clone(), lse.clone()),
            {},
        ),
        "attention_paged_fwd": (
            (
                *(x(2, 4, 16), x(2, 4, 2, 16), x(2, 4, 2, 8), i(0, 1).view(2, 1), i(3, 4), i(0, 1, 2), 1),
                *(sinks, 0.25, 0.0, 0, 0, x(2, 4, 8)),
            ),
            {},
        ),
        "attention_varlen_bwd": (
            (
                *(o, q, k, v, o.clone(), lse, cu, cu.clone(), sinks, 0.25, 0.0, 0, True),
                *(f(9, 4), f(9, 4, 16), x(9, 2, 16), x(9, 2, 8), f(4)),
            ),
            {},
        ),
    }
    a, b = x(4, 8), x(6, 8)
    linear = {
        "linear_fwd": ((a, b, x(6), x(4, 6)), dict.fromkeys(range(4), either)),
        "linear_dx": ((x(4, 6), b, x(4, 8)), dict.fromkeys(range(3), either)),
        "linear_dweight": ((x(4, 6), a, x(6, 8)), dict.fromkeys(range(3), either)),
        "linear_dbias": ((x(4, 6), x(6)), dict.fromkeys(range(2), either)),
        "bmm": ((x(2, 3, 8), x(2, 8, 5), x(2, 3, 5)), dict.fromkeys(range(3), either)),
        "grouped_linear_fwd": ((x(6, 8), x(2, 5, 8), ends, x(6, 5)), dict.fromkeys((0, 1, 3), either)),
        "grouped_linear_dx": ((x(6, 5), x(2, 5, 8), ends, x(6, 8)), dict.fromkeys((0, 1, 3), either)),
        "grouped_linear_dweight": ((x(6, 5), x(6, 8), ends, x(2, 5, 8)), dict.fromkeys((0, 1, 3), either)),
    }
    target, workspace = i(0, 7, 599, dtype=I64), f(2, 7)
    head = x(3, 8), x(600, 8), target, f(3), 0.0
    experts = i(0, 0, 1, 1, 1, 1)
    return {
        **(found | moe | varlen | linear),
        "moe_gather": ((x(3, 8), order, x(6, 8)), {}),
        "moe_add_bias": ((x(6, 8), x(2, 8), experts, order, ends), {}),
        "moe_swiglu_fwd": ((x(6, 16), x(2, 16), experts, order, ends, x(6, 8)), {}),
        "moe_swiglu_bwd": (
            (
                *(x(6, 16), x(2, 16), x(6, 8), x(6, 1), experts, order, f(3, 2), ends),
                *(x(6, 16), x(6, 8), f(3, 2)),
            ),
            {},
        ),
        "moe_route_fwd": ((x(3, 8), 2, False, True, 0, 0, f(8), 1.0, f(3, 2), i(*[0] * 6).view(3, 2)), {0: either}),
        "moe_route_bwd": ((f(3, 2), x(3, 8), f(3, 2), i(*[1] * 6).view(3, 2), False, True, 1.0, x(3, 8)), {}),
        "layer_norm_fwd": ((x(3, 8), x(8), x(8), x(3, 8), 1e-6, x(3, 8), x(3, 8), f(3), f(3)), {}),
        "layer_norm_bwd": ((x(3, 8), x(3, 8), x(3, 8), x(8), f(3), f(3), x(3, 8), x(8), x(8)), {}),
        "rmsnorm_fwd": ((x(3, 8), x(8), x(3, 8), 1e-6, False, x(3, 8), x(3, 8), f(3)), {}),
        "rmsnorm_bwd": ((x(3, 8), x(3, 8), x(3, 8), x(8), f(3), False, x(3, 8), x(8)), {}),
        "rmsnorm_gated_fwd": ((x(3, 8), x(3, 8), x(8), 1e-6, x(3, 8), f(3)), {}),
        "rmsnorm_gated_bwd": ((x(3, 8), x(3, 8), x(3, 8), x(8), f(3), x(3, 8), x(3, 8), x(8)), {}),
        "gelu_fwd": ((x(3, 8), False, x(3, 8)), {}),
        "gelu_bwd": ((x(3, 8), x(3, 8), False, x(3, 8)), {}),
        "sigmoid_mul_fwd": ((x(3, 8), x(3, 8), x(3, 8)), {}),
        "sigmoid_mul_bwd": ((x(3, 8), x(3, 8), x(3, 8), x(3, 8), x(3, 8)), {}),
        **_of_delta_nets(x, f, i),
        "rope": (
            (x(3, 2, 8), x(3, 1, 8), f(3, 8), f(3, 8), False, False, x(3, 2, 8), x(3, 1, 8)),
            {},
        ),
        "rope_cos_sin": ((i(0, 1, 2, dtype=I64).view(1, 3), None, f(4), 1.0, x(3, 8), x(3, 8)), {}),
        "silu_mul_fwd": ((x(3, 8), x(3, 8), False, x(3, 8)), {}),
        "silu_mul_bwd": ((x(3, 8), x(3, 8), x(3, 8), False, x(3, 8), x(3, 8)), {}),
        "log_softmax_fwd": ((x(3, 8), x(3, 8), f(3, 2)), {0: either, 1: either}),
        "log_softmax_bwd": ((x(3, 8), x(3, 8), f(3, 2), x(3, 8)), {0: either}),
        "mean_fwd": ((x(3, 8), 8.0, x(3)), {}),
        "mean_bwd": ((x(3), 8.0, x(3)), {}),
        "linear_logprobs_fwd": ((*head, workspace, f(3), f(3), f(3, 2)), {}),
        "linear_logprobs_bwd": (
            (f(3), f(3), *head, f(3), f(3, 2), f(2, 300), f(300, 8), f(3, 8), x(600, 8)),
            {},
        ),
        "softcap_fwd": ((f(3, 8), 5.0, f(3, 8)), {}),
        "softcap_bwd": ((f(3, 8), f(3, 8), 5.0, f(3, 8)), {}),
        "token_sum": ((f(3), new(1, dtype=F64)), {}),
        "sample": (
            (
                *(f(3, 8), i(1, 2, 3, dtype=I64), i(1, 2, 3, dtype=I64), f(3), i(1, 2, 3, dtype=I64), f(3), f(3)),
                *(i(0, 0, 0, dtype=I64), f(3), f(3)),
            ),
            {},
        ),
    }


def _of_delta_nets(x, f, i):
    cu, slots, lens = i(0, 2, 3), i(1, 0), i(2, 9)
    rows = x(3, 1, 16), x(3, 1, 16), x(3, 2, 16), f(3, 2).neg_(), f(3, 2).sigmoid_()
    initial, out = f(2, 2, 16, 16), x(3, 2, 16)
    memory = f(2, 2, 16, 16), x(2, 64, 1, 16), f(2, 64, 2, 16), f(2, 64, 2)
    grads = f(3, 2, 16), f(3, 2, 16), x(3, 1, 16), x(3, 1, 16), x(3, 2, 16), f(3, 2), f(3, 2), f(2, 2, 16, 16)
    taps = f(4, 8), f(8)
    gates = x(3, 8), x(3, 8), f(8), f(8)
    return {
        "causal_conv_fwd": ((x(3, 8), *taps, cu, True, x(3, 8)), {}),
        "causal_conv_paged_fwd": ((x(3, 8), *taps, x(2, 4, 8), slots, lens, cu, True, x(3, 8)), {}),
        "causal_conv_bwd": ((x(3, 8), x(3, 8), *taps, cu, True, f(3, 8), x(3, 8), f(4, 8), f(8)), {}),
        "gated_delta_varlen_fwd": ((*rows, cu, initial, 0.25, True, out, f(2, 2, 16, 16)), {}),
        "gated_delta_paged_fwd": ((*rows, *memory, slots, lens, cu, 2, 0.25, True, out), {}),
        "gated_delta_varlen_bwd": ((out, f(2, 2, 16, 16), *rows, cu, initial, 0.25, True, *grads), {}),
        "delta_gates_fwd": ((*gates, f(3, 8), x(3, 8)), {}),
        "delta_gates_bwd": ((f(3, 8), x(3, 8), *gates, x(3, 8), x(3, 8), f(8), f(8)), {}),
    }


# Native ops that other tests call with what they refuse, or that take no tensors.
ELSEWHERE = {"float_mode", "cpu_isa", "built_with_cuda", "source_digests", "moe_plan_scratch"}
ELSEWHERE |= {
    "linear_matmul",
    "linear_skinny",
    "linear_tiled",
    "linear_fma",
    "linear_resumed",
    "linear_cublaslt",
    "linear_choose",
    "linear_class",
    "linear_cublaslt_version",
    "linear_cublaslt_algorithms",
}
ELSEWHERE |= {
    "grouped_gather",
    "grouped_bound",
    "grouped_product",
    "grouped_sums",
    "grouped_tail",
    "grouped_small_m",
    "grouped_small_m_lent",
}
ELSEWHERE |= {"attention_latent_varlen", "attention_latent_paged"}
ELSEWHERE |= {"linear_silu_mul_few", "linear_silu_mul_wide"}
# which several processes call: test_peers.py
ELSEWHERE |= {"peers_take", "peers_open", "peers_close", "peers_gather", "peers_place", "peers_norm"}
ELSEWHERE |= {"peers_gather_packed", "peers_norm_packed", "peers_land", "peers_meet"}
ELSEWHERE |= {"linear_send", "linear_received"}


def other(tensor, dtype):
    """The same shape and values in another dtype, with as much behind them."""
    return new(*tensor.shape, dtype=dtype, device=tensor.device).copy_(tensor)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("device", DEVICES)
def test_no_native_op_takes_another_dtype(device, dtype):
    if (device, dtype) == ("cpu", F16):
        pytest.skip("fp16 is a GPU type here")
    ops, taken = native.ops(), []
    for name, (given, allowed) in cases(dtype, device).items():

        def args(changed=None, wrong=None, given=given):
            """Each time anew, as an op writes into some of them."""
            return [
                other(arg, wrong if at == changed else arg.dtype) if isinstance(arg, torch.Tensor) else arg
                for at, arg in enumerate(given)
            ]

        assert getattr(ops, name)(*args()) in (None, True, -1), f"{name} did not take what is right"
        for at, arg in enumerate(given):
            for wrong in DTYPES if isinstance(arg, torch.Tensor) else ():
                if wrong == arg.dtype or wrong in allowed.get(at, ()):
                    continue
                try:
                    getattr(ops, name)(*args(at, wrong))
                except RuntimeError:
                    continue
                taken.append(f"{name}: argument {at} of {arg.dtype} given as {wrong}")
    assert not taken, "\n".join(taken)


def test_every_native_op_is_here():
    declared = set(re.findall(r'm\.def\("(\w+)\(', (ROOT / "csrc" / "library.cpp").read_text()))
    on_gpu = {
        "head_blocks",
        "head_gradients",
        "head_unit_gradients",
        "head_dhidden",
        "head_dweight",
        "moe_scatter",
        "draw_few",
        "draw_join",
        "draw_overlapped",
    }
    on_gpu |= {
        "attention_flash_varlen",
        "attention_flash_paged",
        "attention_flash_few",
        "attention_packed_plan",
        "attention_paged_plan",
        "gated_delta_backward",
        "gated_delta_chunks",
        "gated_delta_decode",
        "gated_delta_step",
        "gated_delta_whole",
    }
    assert {*cases(BF16, "cpu")} | on_gpu | ELSEWHERE == declared


def test_a_pointer_is_cast_where_its_type_is_checked():
    bindings = [p for p in (ROOT / "csrc").rglob("*") if p.name in ("cpu.cpp", "binding.h")]
    assert len(bindings) > 10
    for path in bindings:
        if path.parent.name != "grouped_linear":  # which checks beside its one cast
            casts = re.findall(r"(?:static|reinterpret)_cast<[^;]*data\w*\(", path.read_text())
            assert not casts, f"{path.relative_to(ROOT)}: {casts}; csrc/common/values.h gives pointers"
