"""One small case of every op, forward and backward, for tests that hold for all of them."""

import pytest
import torch
from conftest import room_backends

import vexact_ops as vx

NOT_OPS = {
    "admit",
    "must_admit",
    "without_races",
    "different",
    "same_bits",
    "explain",
    "current_backend",
    "numerics",
    "numerics_difference",
    "backends",
    "set_backend",
    "use_backend",
    "cuda_graph",
    "cuda_stream",
    "synchronize",
    "tune",
    "recall",
    "remember",
}
NOT_OPS |= {"BackendUnavailable", "Peers", "patch", "testing"}
# Between ranks: products and norms of ops that are here, which take memory of peers (tests/test_peers.py).
NOT_OPS |= {"Sent", "linear_awaited", "linear_gather_send", "linear_send", "linear_silu_mul_send", "rmsnorm_gather"}
NOT_OPS |= {"fused_moe_send"}


class Inputs:
    """Tensors of one case: of the case's dtype, or of the one that an argument is documented to have."""

    def __init__(self, dtype, device):
        self.dtype, self.device, self.generator = dtype, device, torch.Generator().manual_seed(0)

    def new(self, *shape, dtype=None, least=None):
        x = torch.randn(shape, generator=self.generator, dtype=torch.float32)
        x = x if least is None else x.abs() + least
        return x.to(dtype or self.dtype).to(self.device).requires_grad_()

    def ints(self, *values, dtype=torch.int64):
        return torch.tensor(values, dtype=dtype, device=self.device)


FP32 = torch.float32
INT32 = torch.int32


def delta_rows(i, rows):
    """q, k, v, g, beta of gated_delta."""
    g = -0.1 * i.new(rows, 2, dtype=FP32, least=0.1).detach()
    beta = torch.sigmoid(i.new(rows, 2).detach().float()).to(i.dtype)
    return i.new(rows, 1, 16), i.new(rows, 1, 16), i.new(rows, 2, 16), g.requires_grad_(), beta.requires_grad_()


# op -> (room, what makes (arguments, options) of it); an op's name may go on after a dot
CASES = {
    "linear": ("linear", lambda i: ((i.new(5, 40), i.new(24, 40), i.new(24)), {})),
    "bmm": ("linear", lambda i: ((i.new(2, 3, 40), i.new(2, 40, 8)), {})),
    "grouped_linear": (
        "grouped_linear",
        lambda i: ((i.new(6, 24), i.new(3, 16, 24), i.ints(0, 2, 2, 6, dtype=INT32)), {}),
    ),
    "moe_route": ("moe_route", lambda i: ((i.new(5, 8), 3), {})),
    "moe_route.sigmoid": (
        "moe_route",
        lambda i: (
            (i.new(5, 8), 3),
            {"score": "sigmoid", "groups": 4, "top_k_groups": 2, "bias": i.new(8, dtype=FP32).detach(), "scale": 2.5},
        ),
    ),
    "fused_moe": (
        "fused_moe",
        lambda i: (
            (
                *(i.new(5, 16), i.new(4, 24, 16), i.new(4, 16, 12), i.new(5, 2, dtype=FP32, least=0.1)),
                torch.arange(10, dtype=INT32, device=i.device).view(5, 2) % 4,
            ),
            {},
        ),
    ),
    "fused_moe.swigluoai": (
        "fused_moe",
        lambda i: (
            (
                *(i.new(5, 16), i.new(4, 24, 16), i.new(4, 16, 12), i.new(5, 2, dtype=FP32, least=0.1)),
                torch.arange(10, dtype=INT32, device=i.device).view(5, 2) % 4,
            ),
            {"activation": "swigluoai", "gate_up_bias": i.new(4, 24), "down_bias": i.new(4, 16)},
        ),
    ),
    "rmsnorm": ("rmsnorm", lambda i: ((i.new(5, 70), i.new(70)), {})),
    "rmsnorm.residual": ("rmsnorm", lambda i: ((i.new(5, 70), i.new(70)), {"residual": i.new(5, 70)})),
    "rmsnorm_gated": ("rmsnorm", lambda i: ((i.new(5, 70), i.new(5, 70), i.new(70)), {})),
    "layer_norm": ("layer_norm", lambda i: ((i.new(5, 70), i.new(70), i.new(70)), {})),
    "layer_norm.residual": ("layer_norm", lambda i: ((i.new(5, 70), i.new(70)), {"residual": i.new(5, 70)})),
    "layer_norm.plain": ("layer_norm", lambda i: ((i.new(5, 70),), {})),
    "rope": ("rope", lambda i: ((i.new(5, 3, 16), i.new(5, 1, 16), i.new(5, 16).detach(), i.new(5, 16).detach()), {})),
    "rope_cos_sin": (
        "rope",
        lambda i: ((i.ints(0, 1, 77, 9999), i.new(8, dtype=FP32, least=0.0).detach()), {"dtype": i.dtype}),
    ),
    "rope_cos_sin.axes": (
        "rope",
        lambda i: (
            (i.ints(0, 1, 77, 9999).view(2, 2), i.new(8, dtype=FP32, least=0.0).detach()),
            {"axes": [0, 1] * 4, "dtype": i.dtype},
        ),
    ),
    "rope_kv_store": (
        "rope",
        lambda i: (
            (
                *(i.new(3, 3, 16), i.new(3, 2, 16), i.new(3, 2, 16), i.new(3, 16).detach(), i.new(3, 16).detach()),
                *(i.new(2, 4, 2, 16), i.new(2, 4, 2, 16), i.ints(5, -1, 0)),
            ),
            {},
        ),
    ),
    "linear_silu_mul": ("linear_silu_mul", lambda i: ((i.new(5, 40), i.new(48, 40), i.new(48)), {})),
    "linear_silu_mul.one": ("linear_silu_mul", lambda i: ((i.new(5, 640).detach(), i.new(320, 640).detach()), {})),
    "silu_mul": ("silu_mul", lambda i: ((i.new(5, 40),), {})),
    "sigmoid_mul": ("silu_mul", lambda i: ((i.new(5, 40), i.new(5, 40)), {})),
    "sigmoid_mul.row": ("silu_mul", lambda i: ((i.new(5, 40), i.new(5, 1)), {})),
    "gelu": ("silu_mul", lambda i: ((i.new(5, 40),), {})),
    "gelu.tanh": ("silu_mul", lambda i: ((i.new(5, 40),), {"approximate": "tanh"})),
    "log_softmax": ("log_softmax", lambda i: ((i.new(5, 600),), {})),
    "log_softmax.fp32": ("log_softmax", lambda i: ((i.new(4, 600),), {"out_dtype": FP32})),
    "mean": ("mean", lambda i: ((i.new(5, 600), -1), {})),
    "sum": ("mean", lambda i: ((i.new(5, 600), -1), {})),
    "mean.empty": ("mean", lambda i: ((i.new(3, 0), -1), {})),
    "linear_logits": ("linear_cross_entropy", lambda i: ((i.new(5, 24), i.new(300, 24)), {"softcap": 5.0})),
    "linear_logprobs": (
        "linear_cross_entropy",
        lambda i: ((i.new(4, 24), i.new(300, 24), i.ints(0, 7, 299, 3)), {"temperature": 0.7, "return_entropy": True}),
    ),
    "linear_logprobs.temperatures": (
        "linear_cross_entropy",
        lambda i: (
            (i.new(4, 24), i.new(300, 24), i.ints(0, 7, 299, 3)),
            {"temperature": i.new(4, dtype=FP32, least=0.2).detach(), "softcap": 3.0},
        ),
    ),
    **{
        f"linear_cross_entropy.{reduction}": (
            "linear_cross_entropy",
            lambda i, reduction=reduction: (
                (i.new(4, 24), i.new(300, 24), i.ints(0, -100, 299, 3)),
                {"reduction": reduction},
            ),
        )
        for reduction in ("mean", "sum", "none")
    },
    "attention_varlen": (
        "attention",
        lambda i: ((i.new(9, 4, 16), i.new(9, 2, 16), i.new(9, 2, 16), i.ints(0, 6, 9, dtype=INT32), 6), {}),
    ),
    "attention_varlen.options": (
        "attention",
        lambda i: (
            (i.new(9, 4, 16), i.new(9, 2, 16), i.new(9, 2, 16), i.ints(0, 6, 9, dtype=INT32), 6),
            {"window": 4, "softcap": 8.0, "sinks": i.new(4, dtype=FP32)},
        ),
    ),
    "attention_paged": (
        "attention",
        lambda i: (
            (
                *(i.new(3, 4, 16), i.new(4, 4, 2, 16), i.new(4, 4, 2, 16), i.ints(1, 2, 0, 3, dtype=INT32).view(2, 2)),
                *(i.ints(7, 3, dtype=INT32), i.ints(0, 1, 3, dtype=INT32), 2),
            ),
            {"window": 5},
        ),
    ),
    "causal_conv": (
        "causal_conv",
        lambda i: ((i.new(7, 24), i.new(24, 4), i.new(24)), {"cu_seqlens": i.ints(0, 3, 7, dtype=INT32)}),
    ),
    "causal_conv_paged": (
        "causal_conv",
        lambda i: (
            (
                *(i.new(4, 24), i.new(24, 4), None, i.new(3, 4, 24), i.ints(2, 0, dtype=INT32)),
                *(i.ints(3, 6, dtype=INT32), i.ints(0, 3, 4, dtype=INT32)),
            ),
            {},
        ),
    ),
    "causal_conv_paged.singles": (
        "causal_conv",
        lambda i: (
            (
                *(i.new(5, 24), i.new(24, 4), None, i.new(3, 4, 24), i.ints(2, 0, 1, dtype=INT32)),
                *(i.ints(3, 6, 3, dtype=INT32), i.ints(0, 1, 2, 5, dtype=INT32)),
            ),
            {"singles": 2},
        ),
    ),
    "gated_delta_varlen": (
        "gated_delta",
        lambda i: ((*delta_rows(i, 9), i.ints(0, 6, 9, dtype=INT32)), {"return_final_state": True}),
    ),
    **{
        f"gated_delta_paged{name}": (
            "gated_delta",
            lambda i, options=options: (
                (
                    *(x.detach() for x in delta_rows(i, 3)),
                    *(i.new(3, 2, 16, 16, dtype=FP32), i.new(3, 64, 1, 16), i.new(3, 64, 2, 16, dtype=FP32)),
                    *(i.new(3, 64, 2, dtype=FP32), i.ints(2, 0, dtype=INT32), i.ints(67, 2, dtype=INT32)),
                    *(i.ints(0, 1, 3, dtype=INT32), 2),
                ),
                options,
            ),
        )
        for name, options in (("", {}), (".singles", {"singles": 1}))
    },
    **{
        f"conv_gated_delta_paged{name}": (
            "gated_delta",
            lambda i, rows=rows, options=options: (
                (
                    *(i.new(rows, 64).detach(), i.new(64, 4).detach(), None, i.new(3, 4, 64).detach()),
                    *(i.new(rows, 2).detach(), i.new(rows, 2).detach(), i.new(2, dtype=FP32), i.new(2, dtype=FP32)),
                    *(i.new(3, 2, 16, 16, dtype=FP32), i.new(3, 64, 1, 16), i.new(3, 64, 2, 16, dtype=FP32)),
                    *(i.new(3, 64, 2, dtype=FP32), i.ints(2, 0, dtype=INT32), i.ints(67, 2, dtype=INT32)),
                    *(i.ints(0, 1, rows, dtype=INT32), rows - 1),
                ),
                options,
            ),
        )
        for name, rows, options in (("", 2, {}), (".singles", 3, {"singles": 1}))
    },
    "delta_gates": (
        "gated_delta",
        lambda i: ((i.new(5, 4), i.new(5, 4), i.new(4, dtype=FP32), i.new(4, dtype=FP32)), {}),
    ),
    "delta_gates.wide": (
        "gated_delta",
        lambda i: (
            (i.new(5, 4), i.new(5, 4), i.new(4, dtype=FP32), i.new(4, dtype=FP32)),
            {"beta_dtype": FP32},
        ),
    ),
    "kv_cache_store": (
        "kv_cache",
        lambda i: (
            (i.new(3, 2, 16), i.new(3, 2, 8), i.new(2, 4, 2, 16), i.new(2, 4, 2, 8), i.ints(5, -1, 0)),
            {},
        ),
    ),
    "sample": (
        "sampler",
        lambda i: (
            (i.new(4, 300, dtype=FP32).detach(), i.ints(1, 2, 3, 4), i.ints(5, 6, 7, 8)),
            {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
        ),
    ),
    "sample.greedy": (
        "sampler",
        lambda i: ((i.new(4, 300, dtype=FP32).detach(), i.ints(1, 2, 3, 4), i.ints(5, 6, 7, 8)), {"temperature": 0.0}),
    ),
    **{
        f"linear_sample.{name}": (
            "linear_sample",
            lambda i, options=options: (
                (i.new(4, 24).detach(), i.new(300, 24).detach(), i.ints(1, 2, 3, 4), i.ints(5, 6, 7, 8)),
                options,
            ),
        )
        for name, options in (("plain", {"temperature": 0.8, "softcap": 5.0}), ("cut", {"top_k": 50, "top_p": 0.9}))
    },
}
NO_GRADIENT = {
    "attention_paged",
    "causal_conv_paged",
    "conv_gated_delta_paged",
    "gated_delta_paged",
    "kv_cache_store",
    "rope_kv_store",
    "sample",
    "linear_sample",
    "rope_cos_sin",
}
NO_GRADIENT |= {"linear_silu_mul.one", "linear_silu_mul.few"}  # where none is asked for it may be one kernel
PARAMS = [
    pytest.param(name, *param.values, id=f"{name}-{param.id}", marks=param.marks)
    for name, (room, _) in CASES.items()
    for param in room_backends(room)
]


def run(name, inputs, backend):
    """Outputs, the gradients of all that takes one, and what was written in place."""
    op = name.split(".")[0]
    args, options = CASES[name][1](inputs)
    tensors = [a for a in (*args, *options.values()) if isinstance(a, torch.Tensor)]
    if not NO_GRADIENT.isdisjoint((op, name)):
        with torch.no_grad():
            out = getattr(vx, op)(*args, **options, backend=backend)
        out = out if isinstance(out, tuple) else (out,)
        return [x for x in out if x is not None] + [t.detach() for t in tensors]
    out = getattr(vx, op)(*args, **options, backend=backend)
    out = out if isinstance(out, tuple) else (out,)
    out = [x for x in out if x.requires_grad]
    upstream = [torch.cos(torch.arange(x.numel(), dtype=FP32)).view(x.shape).to(x) for x in out]
    grads = torch.autograd.grad(out, [t for t in tensors if t.requires_grad], upstream, allow_unused=True)
    return [x.detach() for x in out] + [g for g in grads if g is not None]
