"""patch.hf on mixtures of experts and on latent attention: the promise, the right numbers, and what is refused."""

import inspect
import itertools

import pytest
import test_hf_wrapped as wrapped
import torch
import transformers
from conftest import devices
from families import FORMS, MIXTURES, alone, check_forms, family, sequences, tiny
from test_hf import check_accuracy
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

import vexact_ops as vx
from vexact_ops.patch import mixture
from vexact_ops.testing import assert_bitwise, check_repeatable

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
ALL = [family(n) for n in MIXTURES]
MOONLIGHT = {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446}


def with_bias(model, seed=4):
    """Correction biases are buffers, which `tiny` leaves at zero."""
    g = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=g).to(buffer.device) * 0.2)
    return model


def router_of(model, kept=False):
    """What becomes of its first router: (forward, options in words); of one whose block chooses, of both."""
    for module in model.modules():
        if mixture.is_router(module):
            return mixture.router_forward(module, kept)
        if mixture.chooses(module):
            return mixture.choice_forwards(module, kept)
    raise AssertionError("no router")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("device,dtype", devices())
def test_a_sequence_has_the_same_logits_in_every_form(name, device, dtype):
    model = with_bias(tiny(name, dtype, device=device))
    if dtype == torch.float16 and "input_layernorm" in (model._keep_in_fp32_modules or ()):  # beside fp16 alone
        with pytest.raises(vx.patch.UnsupportedModule, match=r"input_layernorm .*got dtype float32, expected float16"):
            vx.patch.hf(model)
        return
    with vx.patch.hf(model):
        check_forms(model, sequences(device=device))


@DTYPES
@pytest.mark.parametrize("interleave", [True, False])
def test_moonlights_configuration(dtype, interleave):
    model = with_bias(tiny("deepseek_v3", dtype, rope_interleave=interleave, **MOONLIGHT))
    if dtype == torch.float32:
        check_accuracy(model, sequences((9,)))
    with vx.patch.hf(model):
        check_forms(model, sequences((6, 1)), {n: FORMS[n] for n in ("left padded", "in chunks", "paged")})


SIGMOID = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    "name,changes",
    [
        ("flex_olmo", {"num_experts": 8}),
        pytest.param("glm4_moe", SIGMOID),
        pytest.param("dots1", SIGMOID),
    ],
)
def test_further_mixtures(name, changes):
    pytest.importorskip(f"transformers.models.{name}")
    model = with_bias(tiny(name, num_experts_per_tok=3, moe_intermediate_size=24, **changes))
    check_accuracy(model, sequences((9,)))
    with vx.patch.hf(model):
        check_forms(model, sequences((6, 1)), {n: FORMS[n] for n in ("left padded", "packed by positions", "paged")})


@pytest.mark.parametrize("name", ALL)
def test_accuracy_of_logits_and_of_every_gradient(name):
    check_accuracy(with_bias(tiny(name)).train(), sequences((11, 3)))


@pytest.mark.parametrize("name", ALL)
def test_repeatable_with_other_threads_and_instruction_sets(name):
    model = with_bias(tiny(name, torch.bfloat16))
    parameters = [p for p in model.parameters() if p.requires_grad]
    with vx.patch.hf(model) as handle:

        def run():
            logprobs = handle.logprobs(torch.cat(sequences()))
            return logprobs, *torch.autograd.grad(logprobs.sum(), parameters)

        check_repeatable(run, threads=(1, 2))


@pytest.mark.parametrize("broken", ["fused_moe", "moe_route"])
def test_an_op_that_sees_the_batch_is_caught(broken, monkeypatch):
    stock = getattr(vx, broken)

    def by_size(x, *args, **kwargs):
        out = stock(x, *args, **kwargs)
        if len(x) <= 12:
            return out
        return out * (1 + 2**-7) if broken == "fused_moe" else (out[0].roll(1, 1), out[1])

    monkeypatch.setattr(vx, broken, by_size)
    model = tiny("qwen3_moe", torch.bfloat16)
    with vx.patch.hf(model), pytest.raises(AssertionError, match="differ"):
        check_forms(model, sequences())


@pytest.mark.parametrize("name", ALL)
def test_undo_restores_the_stock_model(name):
    model, seqs = tiny(name), sequences()
    before = alone(model, seqs)
    with vx.patch.hf(model):
        pass
    assert_bitwise(alone(model, seqs), before)
    assert all("forward" not in m.__dict__ for m in model.modules())


# under what training wraps around a model


@pytest.mark.parametrize("name", [p for p in ALL if p.id in ("qwen3_moe", "deepseek_v3")])
@pytest.mark.parametrize("wrapping", ["aot_eager", "inductor", "checkpointing", "FSDP2"])
@pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
def test_wrappings_change_no_bit(name, wrapping, device, dtype, monkeypatch):
    if wrapping == "checkpointing":
        wrapped.test_gradient_checkpointing_has_the_same_bits(name, False, device, dtype, monkeypatch)
    elif wrapping == "FSDP2":
        wrapped.test_fully_shard_has_the_same_bits(name, device, dtype)
    elif (wrapping, device) == ("inductor", "cpu"):
        pytest.skip("on a CPU it takes a C++ compiler a minute")
    else:
        wrapped.test_torch_compile_has_the_same_bits(device, dtype, wrapping, name)


# latent attention


@pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
@pytest.mark.parametrize(
    "changes", [{}, MOONLIGHT, {"rope_interleave": False}], ids=["deepseek", "moonlight", "halves"]
)
def test_latent_attention_has_the_same_logits_in_every_form(device, dtype, changes):
    model = with_bias(tiny("deepseek_v3", dtype, device=device, **changes))
    with vx.patch.hf(model, latent=True) as handle:
        assert [row.note for row in handle.report() if row.cls == "DeepseekV3Attention"] == ["latent"] * 3
        check_forms(model, sequences(device=device))


@pytest.mark.parametrize("changes", [{}, MOONLIGHT], ids=["deepseek", "moonlight"])
def test_latent_attention_is_the_same_function(changes):
    model = with_bias(tiny("deepseek_v3", **changes)).train()
    check_accuracy(model, sequences((11, 3)), latent=True)
    with vx.patch.hf(model) as handle:
        expanded = handle.logprobs(torch.cat(sequences()))
    with vx.patch.hf(model, latent=True) as handle:
        kept = handle.logprobs(torch.cat(sequences()))
    torch.testing.assert_close(kept, expanded, rtol=0, atol=1e-4)
    assert (kept != expanded).any()  # an order of its own, to be declared


class Rescaled(deepseek.DeepseekV3Attention):
    def forward(self, hidden_states, position_embeddings, attention_mask, cache=None, past_key_values=None, **kwargs):
        cache = past_key_values if cache is None else cache
        interface = deepseek.ALL_ATTENTION_FUNCTIONS  # what an attention module is recognised by
        out, weights = super().forward(hidden_states, position_embeddings, attention_mask, cache, **kwargs)
        return out * 1.01, weights and interface


def test_latent_is_refused_where_attention_is_not():
    with pytest.raises(vx.patch.UnsupportedModule, match=r"LlamaAttention.*latent: its keys and values are not made"):
        vx.patch.hf(tiny("llama"), latent=True)
    with pytest.raises(TypeError, match="latent: got int"):
        vx.patch.hf(tiny("llama"), latent=1)
    model = tiny("deepseek_v3")
    Rescaled.__module__ = deepseek.__name__
    model.model.layers[1].self_attn.__class__ = Rescaled
    with pytest.raises(vx.patch.UnsupportedModule, match=r"model.layers.1.self_attn \(Rescaled\): its .*latent form"):
        vx.patch.hf(model, latent=True)
    model = tiny("deepseek_v3")
    with vx.patch.hf(model, latent=True), pytest.raises(ValueError, match=r"options: got .*'latent': False"):
        vx.patch.hf(model)


# what a router is recognised as


@pytest.mark.parametrize(
    "name,wide,rounded,options",
    [
        ("qwen3_moe", False, True, "top_k=3 score=softmax normalize=True scale=1.0"),
        ("mixtral", False, False, "top_k=3 score=softmax normalize=True scale=1.0"),
        ("olmoe", False, True, "top_k=3 score=softmax normalize=False scale=1.0"),
        ("deepseek_v3", True, False, "top_k=3 score=sigmoid normalize=True groups=4 top_k_groups=2 scale=2.5"),
    ],
)
def test_routers_round_where_their_own_code_rounds(name, wide, rounded, options):
    model = with_bias(tiny(name, torch.bfloat16))
    router = next(m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter"))
    forward, *_, label = router_of(model)
    assert label == options
    if hasattr(deepseek.DeepseekV3MoE, mixture.CHOICE) and name == "deepseek_v3":
        pytest.skip(f"transformers {transformers.__version__} keeps the choice in the block around this router")
    x = torch.randn(200, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, theirs, their_ids = router(x)
    got_logits, weights, ids = forward(router, x)
    if rounded and theirs.dtype != torch.bfloat16:
        pytest.skip(f"transformers {transformers.__version__} keeps these weights in fp32")
    assert got_logits.dtype == (torch.float32 if wide else torch.bfloat16)
    assert weights.dtype == theirs.dtype == (torch.bfloat16 if rounded else torch.float32)
    (ids, order), (their_ids, their_order) = ids.sort(1), their_ids.sort(1)
    same = (ids == their_ids).all(1)
    assert same.float().mean() > 0.95  # a logit may round the other way
    weights, theirs = weights.gather(1, order)[same], theirs.gather(1, their_order)[same]
    assert (weights == theirs).float().mean() > 0.9 if rounded else torch.allclose(weights, theirs, rtol=2e-2)


def test_rounding_to_a_dtype_and_back_is_one_operation():
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    dy = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    y = mixture._rounded(x, torch.bfloat16)
    assert_bitwise(y, x.bfloat16().float())
    assert_bitwise(torch.autograd.grad(y, x, dy)[0], dy.bfloat16().float())
    torch.library.opcheck(torch.ops.vexact.rounded.default, (x, torch.bfloat16))


class Louder(qwen3_moe.Qwen3MoeTopKRouter):
    def forward(self, x):
        logits, weights, ids = super().forward(x)
        return logits, weights * 1.001, ids


class Second(qwen3_moe.Qwen3MoeTopKRouter):
    def forward(self, x):  # leaves the best expert out
        logits = torch.nn.functional.linear(x, self.weight)
        weights, ids = logits.softmax(-1).topk(self.top_k + 1)
        return logits, weights[:, 1:] / weights[:, 1:].sum(1, keepdim=True), ids[:, 1:]


class LogitsAlone(qwen3_moe.Qwen3MoeTopKRouter):
    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize(
    "cls,reason",
    [
        (Louder, "scores or choice"),
        (Second, "scores or choice"),
        (LogitsAlone, "does not return logits, weights and ids"),
    ],
)
def test_routers_that_only_look_known_are_refused(cls, reason):
    model = tiny("qwen3_moe")
    cls.__module__ = qwen3_moe.__name__  # as a class of another version of transformers
    model.model.layers[1].mlp.gate.__class__ = cls
    with pytest.raises(vx.patch.UnsupportedModule, match=f"model.layers.1.mlp.gate .{cls.__name__}.*{reason}"):
        vx.patch.hf(model)


class UpFirst(qwen3_moe.Qwen3MoeExperts):
    def forward(self, x, ids, weights):
        out = torch.zeros_like(x)
        for e in range(self.num_experts):
            token, slot = (ids == e).nonzero(as_tuple=True)
            up, gate = nn.functional.linear(x[token], self.gate_up_proj[e]).chunk(2, -1)
            y = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[e]) * weights[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out


class Clipped(qwen3_moe.Qwen3MoeExperts):
    def forward(self, x, ids, weights):
        return super().forward(x, ids, weights).clamp(-1, 1)


@pytest.mark.parametrize("cls", [UpFirst, Clipped])
def test_experts_that_only_look_known_are_refused(cls):
    model = tiny("qwen3_moe")
    cls.__module__ = qwen3_moe.__name__
    model.model.layers[0].mlp.experts.__class__ = cls
    with pytest.raises(vx.patch.UnsupportedModule, match=f"model.layers.0.mlp.experts .{cls.__name__}"):
        vx.patch.hf(model)


@pytest.mark.parametrize(
    "name,changes,words",
    [
        ("mixtral", {"router_jitter_noise": 0.1}, ["model.layers.0.mlp (MixtralSparseMoeBlock)", "uniform"]),
        ("qwen3_moe", {"output_router_logits": True}, ["(root) (Qwen3MoeForCausalLM)", "load balancing loss"]),
        ("qwen3_moe", {"hidden_act": "relu"}, ["model.layers.0.mlp.experts (Qwen3MoeExperts)", "activation"]),
    ],
)
def test_what_is_not_covered_is_named(name, changes, words):
    with pytest.raises(vx.patch.UnsupportedModule) as error:
        vx.patch.hf(tiny(name, **changes))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("rows", [7, 9])
def test_a_router_of_other_experts_is_refused(rows):
    model = tiny("qwen3_moe")
    router = model.model.layers[1].mlp.gate
    router.weight = nn.Parameter(torch.randn(rows, 32))
    reason = rf"model.layers.1.mlp \(Qwen3MoeSparseMoeBlock\): its router chooses among {rows} experts, but it holds 8"
    with pytest.raises(vx.patch.UnsupportedModule, match=reason):
        vx.patch.hf(model)


@pytest.mark.parametrize(
    "name, change",
    [
        ("qwen3_moe", {"top_k": 1}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("deepseek_v3", {"routed_scaling_factor": 9.0}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
    ],
    ids=str,
)
def test_a_number_that_is_set_after_the_patch_is_noticed(name, change):
    """As it is where the model's own code reads it: it was taken at the time of the patch, for good."""
    ids = sequences()[0][None]

    def changed(model, numbers):
        holders = [model.config] if name == "gemma2" else [m for m in model.modules() if mixture.is_router(m)]
        before = {n: getattr(holders[0], n) for n in numbers}
        for holder in holders:
            for number, value in numbers.items():
                setattr(holder, number, value)
        return before

    first, other = with_bias(tiny(name)), with_bias(tiny(name))
    with vx.patch.hf(first), torch.no_grad():
        old = first(ids).logits
        before = changed(first, change)
        new = first(ids).logits
        changed(other, change)
        with vx.patch.hf(other):
            assert_bitwise(new, other(ids).logits)
        assert not vx.same_bits(new, old)
        changed(first, before)
        assert_bitwise(first(ids).logits, old)


def test_a_number_that_no_aligned_op_knows_is_refused_until_it_is_put_back():
    model, ids = tiny("llama"), sequences()[0][None]
    with vx.patch.hf(model):
        old = model(ids).logits
        model.config.final_logit_softcapping = 2.0
        for _ in range(2):
            with pytest.raises(ValueError, match=r"final_logit_softcapping 2[.]0, which its class does not read"):
                model(ids)
        del model.config.final_logit_softcapping
        assert_bitwise(model(ids).logits, old)


def test_the_load_balancing_loss_cannot_be_asked_for():
    model, ids = tiny("qwen3_moe"), torch.zeros(1, 3, dtype=torch.int64)
    with vx.patch.hf(model):
        with pytest.raises(ValueError, match="output_router_logits: got True"):
            model(ids, output_router_logits=True)
        model.config.output_router_logits = True
        with pytest.raises(vx.patch.UnsupportedModule, match="output_router_logits asks for a load balancing loss"):
            model(ids, labels=ids)


def test_noise_that_is_added_later_is_refused():
    model, ids = tiny("mixtral"), torch.zeros(1, 3, dtype=torch.int64)
    with vx.patch.hf(model):
        model.model.layers[0].mlp.jitter_noise = 0.1
        with pytest.raises(vx.patch.UnsupportedModule, match=r"aten\.uniform"):
            model(ids)


def test_a_layer_without_experts():
    model = tiny("qwen3_moe", mlp_only_layers=[1])
    with vx.patch.hf(model) as handle:
        rows = {row.path: row.replacement for row in handle.report()}
        assert rows["model.layers.1.mlp"] == "silu_mul" and rows["model.layers.0.mlp.experts"] == "fused_moe"
        check_forms(model, sequences((5, 2)), {n: FORMS[n] for n in ("left padded", "paged")})


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("experts", [2, 3, 4, 5, 16])
def test_what_a_router_rounds_is_no_matter_of_luck(name, experts):
    """A trial on few numbers: with few experts, not normalised, one rounding was mistaken for another."""
    count = {"mixtral": "num_local_experts", "deepseek_v3": "n_routed_experts"}.get(name, "num_experts")
    for hidden, top_k, normalize in itertools.product((32, 64), (1, 2, 3), (True, False)):
        sizes = {"hidden_size": hidden, "num_experts_per_tok": top_k, "norm_topk_prob": normalize, count: experts}
        if top_k > experts:
            continue
        groups = {"n_group": 1, "topk_group": 1} if name == "deepseek_v3" else {}
        model = with_bias(tiny(name, **sizes, **groups, num_hidden_layers=2))
        wide = inspect.getclosurevars(router_of(model)[0]).nonlocals["wide"]
        assert wide == (name == "deepseek_v3"), sizes


class OneExpert(nn.Module):
    """Whose weight is always 1."""

    def __init__(self, experts: int, wide: bool):
        super().__init__()
        self.weight, self.top_k, self.wide = nn.Parameter(torch.zeros(experts, 32)), 1, wide
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x):
        up = (lambda t: t if t.dtype == torch.float64 else t.float()) if self.wide else lambda t: t
        logits = torch.nn.functional.linear(up(x), up(self.weight))
        scores = logits.sigmoid() if logits.dtype == torch.float64 else logits.float().sigmoid()
        ids = (scores + self.e_score_correction_bias).argmax(-1, keepdim=True)
        weights = scores.gather(1, ids)
        return logits, weights / (weights + 1e-20), ids


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("experts", [2, 3, 4, 8, 64, 256])
def test_where_one_expert_has_all_the_choice_tells_what_is_rounded(experts, wide):
    forward, label = mixture.router_forward(OneExpert(experts, wide), False)
    assert label == "top_k=1 score=sigmoid normalize=True scale=1.0"
    assert inspect.getclosurevars(forward).nonlocals["wide"] == wide


def test_a_small_mixture_is_covered_end_to_end():
    small = {"hidden_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False}
    model, seqs = tiny("qwen3_moe", torch.bfloat16, **small), sequences((5, 3))
    with vx.patch.hf(model):
        check_forms(model, seqs, {n: FORMS[n] for n in ("left padded", "paged")})


@pytest.mark.parametrize("kept", [2, 6, 7])
def test_groups_are_seen_where_most_are_kept(kept):
    """The likeliest expert is in the least likely of eight groups, which a random token's hardly ever is."""
    model = tiny("deepseek_v3", n_routed_experts=64, n_group=8, topk_group=kept, num_experts_per_tok=2)
    block, x = model.model.layers[1].mlp, torch.eye(1, 32)[None]
    with torch.no_grad():
        block.gate.weight[:, 0] = torch.arange(64) / 640
        block.gate.weight[8:16, 0], block.gate.weight[9, 0] = -9, 3
        block.gate.e_score_correction_bias.zero_()
        stock = block(x)
        with vx.patch.hf(model) as handle:
            assert f"groups=8 top_k_groups={kept}" in str(handle.report())
            torch.testing.assert_close(block(x), stock, rtol=1e-4, atol=1e-5)
