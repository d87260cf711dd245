"""A decoder layer in one node: the bits of its modules, outputs and gradients, and who stands in its way is heard."""

from dataclasses import replace

import pytest
import torch
from conftest import devices
from families import sequences, tiny
from torch import nn

import vexact_ops as vx
from vexact_ops.patch import layer, state
from vexact_ops.testing import assert_bitwise

DEVICES = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
ONE_NODE = {
    "llama": 2, "qwen2": 2, "qwen3": 2, "mistral": 2, "cwm": 2, "ernie4_5": 2, "gemma": 2, "helium": 2, "seed_oss": 2,
    "smollm3": 1, "vaultgemma": 2,
}  # fmt: skip
BEFORE_ANOTHER = {"qwen3_moe": 2, "mixtral": 2}  # whose node ends before a mixture
BY_MODULES = "gemma2", "exaone4", "granite", "phi3", "qwen3_5_text", "deepseek_v3"
LENGTHS = 7, 1, 11


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch):
    monkeypatch.setattr(state, "FUSE_ON_CPUS", True)


@pytest.fixture
def nodes(monkeypatch) -> list:
    """The layers that were computed in one node, forwards that a checkpoint computes again among them."""
    seen, apply = [], layer._Node.apply
    monkeypatch.setattr(layer._Node, "apply", lambda *args: (seen.append(args[4]), apply(*args))[1])
    return seen


def packed(device) -> dict:
    rows = torch.cat(sequences(LENGTHS, 3)).to(device)
    cu = torch.tensor([0, 7, 8, 19], dtype=torch.int32, device=device)
    places = torch.cat([torch.arange(n) for n in LENGTHS])[None].to(device)
    longest = {"max_length_q": 11, "max_length_k": 11, "use_cache": False}
    return {"input_ids": rows[None], "position_ids": places, "cu_seq_lens_q": cu, "cu_seq_lens_k": cu, **longest}


def step(model: nn.Module, **arguments) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of all that has some."""
    model.zero_grad()
    logits = model(**arguments).logits
    (logits * torch.linspace(-1, 1, logits.shape[-1], device=logits.device)).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **found}


def by_modules(model: nn.Module, monkeypatch, **arguments) -> dict[str, torch.Tensor]:
    with monkeypatch.context() as patched:
        patched.setattr(layer.Fused, "takes", lambda *_: False)
        return step(model, **arguments)


def assert_same(got: dict, expected: dict) -> None:
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert_bitwise(value, expected[name], name)


@DEVICES
@pytest.mark.parametrize("family", [*ONE_NODE, *BEFORE_ANOTHER, *BY_MODULES])
def test_outputs_and_gradients_are_those_of_the_modules(family, device, dtype, nodes, monkeypatch):
    model = tiny(family, dtype, device=device).train()
    vx.patch.hf(model)
    for arguments in (packed(device), {"input_ids": torch.stack(sequences((9, 9), 5)).to(device), "use_cache": False}):
        nodes.clear()
        got = step(model, **arguments)
        assert len(nodes) == {**ONE_NODE, **BEFORE_ANOTHER}.get(family, 0)
        assert_same(got, by_modules(model, monkeypatch, **arguments))
    halves = [each.__dict__["forward"].vexact_fused.rest is not None for each in model._vexact.fused]
    assert sum(halves) == BEFORE_ANOTHER.get(family, 0)


def test_a_hook_in_a_mixture_is_called_once(nodes, monkeypatch):
    model = tiny("qwen3_moe", torch.bfloat16).train()
    vx.patch.hf(model)
    expected, seen = by_modules(model, monkeypatch, **packed("cpu")), []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
    model.model.layers[1].mlp.gate.register_full_backward_hook(lambda *_: seen.append(2))
    assert_same(step(model, **packed("cpu")), expected)
    assert not nodes and sorted(seen) == [1, 2]


def test_other_bits_of_a_node_are_noticed_at_once(nodes, monkeypatch):
    model = tiny("qwen3", torch.bfloat16).train()
    vx.patch.hf(model)
    shape = layer._shape
    monkeypatch.setattr(layer, "_shape", lambda *a: replace(shape(*a), eps=(1e-6, 1e-6, 1e-6, 1e-3)))
    got = step(model, **packed("cpu"))
    assert len(model._vexact.fused) == 2 and not nodes
    assert_same(got, by_modules(model, monkeypatch, **packed("cpu")))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_under_checkpointing(family, reentrant, nodes, monkeypatch):
    model = tiny(family, torch.bfloat16).train()
    vx.patch.hf(model)
    expected = by_modules(model, monkeypatch, **packed("cpu"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(step(model, **packed("cpu")), expected)
    assert len(nodes) == 4  # each in the forward and again in the backward


def test_frozen_weights_and_embeddings(nodes, monkeypatch):
    model = tiny("qwen2", torch.bfloat16).train()
    vx.patch.hf(model)
    for name, p in model.named_parameters():
        p.requires_grad_("q_proj" in name or "down" in name or "layernorm" in name)
    got = step(model, **packed("cpu"))
    assert len(nodes) == 2
    assert_same(got, by_modules(model, monkeypatch, **packed("cpu")))
    for p in model.parameters():
        p.requires_grad_(False)
    with torch.no_grad():
        assert_bitwise(model(**packed("cpu")).logits, got["logits"])


def _hook(model):
    seen = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    return lambda: len(seen) == 1


def _backward_hook(model):
    seen = []
    model.model.layers[0].self_attn.register_full_backward_hook(lambda *_: seen.append(1))
    return lambda: len(seen) == 1


def _own_forward(model):
    norm, seen = model.model.layers[0].post_attention_layernorm, []
    before = norm.forward
    norm.forward = lambda x: (seen.append(1), before(x))[1]
    return lambda: len(seen) == 1


def _class_forward(model):
    cls, seen = type(model.model.layers[0]), []
    before = cls.forward

    def forward(self, *args, **kwargs):
        seen.append(1)
        return before(self, *args, **kwargs)

    model.model.layers[0].__class__ = type(cls.__name__, (cls,), {"forward": forward})
    return lambda: len(seen) == 1


@pytest.mark.parametrize("disturb", [_class_forward, _hook, _backward_hook, _own_forward])
def test_what_else_runs_in_a_layer_is_called(disturb, nodes):
    model = tiny("qwen3", torch.bfloat16).train()
    vx.patch.hf(model)
    expected = step(model, **packed("cpu"))
    nodes.clear()
    heard = disturb(model)
    assert_same(step(model, **packed("cpu")), expected)
    assert heard() and len(nodes) == 1  # the other layer's


def test_a_layer_with_a_dropout_set_later_says_so():
    model = tiny("qwen3", torch.bfloat16).train()
    vx.patch.hf(model)
    step(model, **packed("cpu"))
    model.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(ValueError, match="dropout"):
        step(model, **packed("cpu"))


def test_padding_caches_and_generation_go_by_modules(nodes):
    model = tiny("qwen3", torch.bfloat16).train()
    vx.patch.hf(model)
    ids = torch.stack(sequences((6, 6), 1))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    step(model, input_ids=ids, attention_mask=mask)
    step(model, input_ids=ids, use_cache=True)
    assert not nodes
    model.generate(ids, max_new_tokens=2, do_sample=False)
    assert not nodes


def test_it_is_taken_out_with_the_patch_and_found_again(nodes):
    model = tiny("qwen3", torch.bfloat16).train()
    handle = vx.patch.hf(model)
    step(model, **packed("cpu"))
    assert all("forward" in each.__dict__ for each in model.model.layers)
    model.model.layers[0].self_attn.q_norm.variance_epsilon = 1e-3  # a number that was read: covered anew
    before, one = len(nodes), step(model, **packed("cpu"))
    assert len(nodes) == before + 2
    handle.undo()
    assert not any("forward" in each.__dict__ for each in model.model.layers)
    again = vx.patch.hf(model)
    assert_same(step(model, **packed("cpu")), one)
    again.undo()


def test_hidden_states_are_those_of_the_modules(nodes, monkeypatch):
    model = tiny("qwen3", torch.bfloat16).train()
    vx.patch.hf(model)
    got = model(**packed("cpu"), output_hidden_states=True).hidden_states
    with monkeypatch.context() as patched:
        patched.setattr(layer.Fused, "takes", lambda *_: False)
        expected = model(**packed("cpu"), output_hidden_states=True).hidden_states
    assert len(got) == 3
    assert_bitwise([h.detach() for h in got], [h.detach() for h in expected])


def test_it_is_differentiable_once():
    model = tiny("qwen3", torch.bfloat16).train()
    handle = vx.patch.hf(model)
    ids = torch.cat(sequences((5,), 0))
    values = handle.logprobs(ids)
    (found,) = torch.autograd.grad(values.sum(), [model.model.layers[0].mlp.up_proj.weight], create_graph=True)
    with pytest.raises(RuntimeError):
        found.float().pow(2).sum().backward()


def test_a_model_that_cannot_be_looked_at_is_computed_by_its_modules(nodes, monkeypatch, caplog):
    model = tiny("qwen3", torch.bfloat16).train()
    vx.patch.hf(model)
    expected = by_modules(model, monkeypatch, **packed("cpu"))
    model._vexact.renew()

    def described(self):
        raise KeyError("what nobody thought of")

    monkeypatch.setattr(state.Patch, "described_in_fp32", described)
    with caplog.at_level("INFO"):
        assert_same(step(model, **packed("cpu")), expected)
    assert not nodes and model._vexact.fused == [] and "what nobody thought of" in caplog.text


def test_under_torch_compile_modules_are_traced(nodes, monkeypatch):
    model = tiny("qwen3", torch.float32).train()
    vx.patch.hf(model)
    got = step(model, **packed("cpu"))
    assert len(nodes) == 2
    logits = torch.compile(model, backend="eager")(**packed("cpu")).logits
    assert len(nodes) == 2
    assert_bitwise(logits.detach(), got["logits"])


def test_hooks_on_all_modules_are_called_inside_a_layer(nodes):
    model, seen = tiny("qwen3", torch.bfloat16).train(), set()
    vx.patch.hf(model)
    expected = step(model, **packed("cpu"))
    nodes.clear()
    hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.add(id(module)))
    try:
        assert_same(step(model, **packed("cpu")), expected)
    finally:
        hook.remove()
    assert not nodes and id(model.model.layers[1].mlp.up_proj) in seen
