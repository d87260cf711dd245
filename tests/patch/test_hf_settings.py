"""Settings of covered families: the same logits in every form of a batch, gradients, accuracy, and what is refused."""

import contextlib
import copy
import functools

import pytest
import test_hf_wrapped as wrapped
import torch
from conftest import devices
from families import FORMS, alone, check_forms, gradients, packed, sequences, settings, tiny
from test_hf import logits_and_gradients
from torch import nn

import vexact_ops as vx
from vexact_ops.patch import pieces
from vexact_ops.patch.pieces import NotCovered
from vexact_ops.testing import assert_bitwise

each_setting = pytest.mark.parametrize("name,changes,described", settings())


@each_setting
@pytest.mark.parametrize("device,dtype", devices(torch.float32, torch.bfloat16))
def test_a_sequence_has_the_same_logits_in_every_form(name, changes, described, device, dtype):
    model = tiny(name, dtype, device=device, **changes)
    with vx.patch.hf(model), torch.no_grad():
        forms = {key: FORMS[key] for key in ("left padded", "packed by positions", "paged")}
        check_forms(model, sequences((50, 1, 6), device=device), forms)


@each_setting
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accuracy_of_logits_and_gradients(name, changes, described, dtype):
    """Errors against float64 over some models: at most the stock model's, with some slack for luck."""
    ratios, dys = [], [torch.randn(9, 61, generator=torch.Generator().manual_seed(3))]
    for seed in range(5):
        model, seqs, errors = tiny(name, dtype, seed=seed, **changes).train(), sequences((9,), seed=seed), {}
        exact = logits_and_gradients(copy.deepcopy(model).double(), seqs, dys)
        for who in ("stock", "ours"):
            with vx.patch.hf(model) if who == "ours" else contextlib.nullcontext():
                found = logits_and_gradients(model, seqs, dys)
            grads = [torch.cat([g.double().flatten() for g in each.values()]) for each in (found[1], exact[1])]
            together = [(found[0], exact[0]), grads]
            errors[who] = [((got.double() - want).norm() / want.norm()).item() for got, want in together]
        ratios.append([ours / stock for ours, stock in zip(errors["ours"], errors["stock"])])
    assert (torch.tensor(ratios).log().mean(0).exp() <= 1.4).all(), ratios


@each_setting
def test_gradients_of_a_batch_are_repeatable_and_of_the_sequences_alone(name, changes, described):
    model = tiny(name, torch.bfloat16, tie_word_embeddings=False, **changes).train()
    seqs = [torch.arange(3, 33).repeat(2)[:50], torch.arange(33, 60)]
    with vx.patch.hf(model):

        def run():
            rows = packed(model, seqs, "lengths")
            return gradients(model, rows[0].square().sum() + rows[1].abs().sum())

        first, again = run(), run()
        assert_bitwise(list(first.values()), list(again.values()))
        embedding = next(n for n, p in model.named_parameters() if p is model.get_input_embeddings().weight)
        of_one = gradients(model, alone(model, seqs[:1])[0].square().sum())[embedding]
        assert_bitwise(first[embedding][3:33], of_one[3:33])


def with_a_bias(dtype, device="cpu", **changes):
    model = tiny("llama", dtype, device=device, tie_word_embeddings=False, **changes)
    model.lm_head.bias = nn.Parameter(torch.linspace(-3, 3, 61, device=device).to(dtype))
    return model


WRAPPED = [
    pytest.param("llama", None, True, id="bias"),
    *settings("norms-of-heads", "silu-without-a-gate", "fp32-routers"),
]


@pytest.mark.parametrize("name,changes,described", WRAPPED)
@pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
def test_wrappings_change_no_bit(name, changes, described, device, dtype, monkeypatch):
    """Of an output layer with a bias, too."""
    setting = with_a_bias if changes is None else functools.partial(tiny, name, **changes)
    monkeypatch.setattr(wrapped, "tiny", lambda name, dtype, device="cpu", **_: setting(dtype, device=device))
    wrapped.test_torch_compile_has_the_same_bits(device, dtype, "aot_eager", name)
    wrapped.test_gradient_checkpointing_has_the_same_bits(name, False, device, dtype, monkeypatch)
    if name in ("llama", "arcee"):  # units are told by a norm that Cohere's layers do not have
        wrapped.test_fully_shard_has_the_same_bits(name, device, dtype)


# an output layer with a bias


@pytest.mark.parametrize("hidden_size", [32, 36])
def test_a_bias_of_the_output_layer_is_added_last_in_fp32(hidden_size):
    model, ids = with_a_bias(torch.bfloat16, hidden_size=hidden_size), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    weight, bias = model.lm_head.weight, model.lm_head.bias
    with vx.patch.hf(model) as handle, torch.no_grad():
        assert handle.describe().names(range(1, 2)) >= {"lm_head.weight", "lm_head.bias"}
        hidden = model.model(ids, use_cache=False).last_hidden_state[0]
        without = vx.linear_logits(hidden, weight)
        expected = without + bias.float()
        logits = model(ids, use_cache=False).logits[0]
        assert_bitwise(logits, expected)
        assert_bitwise(handle.logits(hidden), expected)
        logprobs = vx.log_softmax(expected)[:-1].gather(1, ids[0, 1:, None])[:, 0]
        assert_bitwise(handle.logprobs(ids)[0, :-1], logprobs)
        drawn = handle.sample(hidden, 5, 7, temperature=0.7)
        assert_bitwise(drawn, vx.sample(expected, 5, 7, temperature=0.7))
        assert not vx.same_bits(logits, without)


def test_gradients_of_a_bias_of_the_output_layer():
    """Each is the sum of a column of the gradients of logits, and the others are those of the layer without one."""
    ids, grads = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), []
    for with_bias in (True, False):
        model = with_a_bias(torch.float32)
        if not with_bias:
            model.lm_head.bias = None
        with vx.patch.hf(model):
            logits = model(ids, use_cache=False).logits[0]
            grads.append(gradients(model, logits, [torch.arange(8 * 61, dtype=torch.float32).view(8, 61).cos()]))
    given = torch.arange(8 * 61, dtype=torch.float32).view(8, 61).cos()
    torch.testing.assert_close(grads[0].pop("lm_head.bias"), given.sum(0))
    assert_bitwise(list(grads[0].values()), list(grads[1].values()))
    model = with_a_bias(torch.float32)
    with vx.patch.hf(model):
        loss = model(ids, labels=ids, skip_logits=True).loss
        (of_loss,) = torch.autograd.grad(loss, [model.lm_head.bias])
    stock = with_a_bias(torch.float32)
    (expected,) = torch.autograd.grad(stock(ids, labels=ids).loss, [stock.lm_head.bias])
    torch.testing.assert_close(of_loss, expected, rtol=1e-4, atol=1e-6)


# norms of heads


class Norm(nn.Module):
    """What Cohere's computes, with something of it done otherwise."""

    def __init__(self, how: str = ""):
        super().__init__()
        self.weight, self.eps, self.how = nn.Parameter(torch.ones(4, 16)), 1e-5, how

    def forward(self, hidden_states):
        x = hidden_states.float() if hidden_states.dtype != torch.float64 else hidden_states
        x = x if self.how == "no mean" else x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean((-1, -2) if self.how == "across" else -1, keepdim=True) + self.eps)
        if self.how == "rounded":
            return x.to(hidden_states.dtype) * self.weight
        return ((1 + self.weight if self.how == "plus" else self.weight).to(x.dtype) * x).to(hidden_states.dtype)


def test_norms_of_heads_that_only_look_known_are_refused():
    assert pieces.head_norm_forward(Norm())[1] == "a weight for each head"
    for how in ("no mean", "across", "plus"):
        with pytest.raises(NotCovered, match="not a layer norm of heads"):
            pieces.head_norm_forward(Norm(how))
    with pytest.raises(NotCovered, match="rounds before it multiplies"):
        pieces.head_norm_forward(Norm("rounded"))


def test_a_norm_of_heads_is_the_op_of_each_head():
    norm, x = Norm().bfloat16(), torch.randn(3, 5, 4, 16).bfloat16()
    norm.weight.data.normal_()
    got = pieces.head_norm_forward(norm)[0](norm, x)
    for head in range(4):
        assert_bitwise(got[:, :, head], vx.layer_norm(x[:, :, head], norm.weight[head], None, 1e-5))
    assert (got == norm(x)).double().mean() > 0.99


# what is left to be refused


def test_a_silu_beside_what_was_put_into_its_block_is_no_reason_to_cover_it():
    """Its product would be rounded in another place than that of the block without it."""
    model = tiny("llama")
    model.model.layers[0].mlp.extra = nn.Identity()
    with pytest.raises(
        vx.patch.UnsupportedModule, match=r"layers\.0\.mlp\.extra \(Identity\): the forward of LlamaMLP"
    ):
        vx.patch.hf(model)


@pytest.mark.parametrize(
    "name,changes,words",
    [
        (
            "mixtral",
            {"hidden_act": "gelu"},
            r"activation \(GELUActivation\) .*: expected silu",
        ),
        ("qwen3_5_text", {"hidden_act": "gelu"}, r"its activation is 'gelu', expected 'silu' \(hidden_act\)"),
        ("deepseek_v3", {"topk_group": 1}, r"it chooses 3 of 8 experts, but among 2 alone: those of 1 of 4 groups"),
        ("llama", {"hidden_act": "mish"}, r"a feed-forward block whose activation \(MishActivation\) or form"),
    ],
)
def test_a_refusal_says_which_setting_it_is(name, changes, words):
    with pytest.raises(vx.patch.UnsupportedModule, match=words):
        vx.patch.hf(tiny(name, **changes))
