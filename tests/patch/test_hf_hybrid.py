"""Gated delta nets in patch.hf: sequences over several chunks in every form, gradients, and what is refused."""

import copy

import pytest
import torch
from conftest import devices
from families import FORMS, HYBRIDS, alone, check_forms, family, gradients, pack, packed, paged, sequences, tiny

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise

each_kind = pytest.mark.parametrize("kind", [family(kind) for kind in HYBRIDS])
each_device = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
LENGTHS = 70, 1, 64, 5


@each_kind
@each_device
def test_every_form_of_a_batch(kind, device, dtype):
    model, seqs = tiny(kind, dtype, device=device), sequences(LENGTHS, device=device)
    with vx.patch.hf(model), torch.no_grad():
        check_forms(model, seqs, {**FORMS, "paged": lambda m, s: paged(m, s, page_size=8)})


@each_kind
@each_device
def test_gradients_of_a_sequence_are_its_own(kind, device, dtype):
    """Of packed rows the embedding's gradient at one sequence's tokens, and the weights' again for the same batch."""
    model = tiny(kind, dtype, device=device).train()
    seqs = [torch.arange(3, 33, device=device).repeat(3)[:70], torch.arange(33, 60, device=device)]
    with vx.patch.hf(model):

        def run():
            rows = packed(model, seqs, "lengths")
            return gradients(model, rows[0].square().sum() + rows[1].abs().sum())

        first, again = run(), run()
        assert_bitwise(list(first.values()), list(again.values()))
        name = next(n for n in first if "embed_tokens" in n)
        alone_ = gradients(model, alone(model, seqs[:1])[0].square().sum())[name]
        assert_bitwise(first[name][3:33], alone_[3:33])


@each_kind
def test_gradient_checkpointing_and_use_cache(kind):
    model, (ids, cu, _) = tiny(kind).train(), pack(sequences(LENGTHS))
    with vx.patch.hf(model):

        def run():
            out = model(ids, cu_seq_lens_q=cu, labels=ids)
            return out.loss, gradients(model, out.loss)

        loss, grads = run()
        model.gradient_checkpointing_enable()
        other, others = run()
        assert_bitwise(loss, other)
        assert_bitwise(list(grads.values()), list(others.values()))


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accuracy(kind, dtype):
    """Errors against float64 over some models: at most the stock model's, with some slack for luck."""
    errors = {"stock": [], "ours": []}
    ids = sequences((30,))[0][None]
    for seed in range(5):
        model = tiny(kind, dtype, seed=seed)
        found = {}
        for name, one in (("exact", copy.deepcopy(model).double()), ("stock", model), ("ours", model)):
            with vx.patch.hf(one) if name == "ours" else torch.enable_grad():
                logits = one(ids, use_cache=False).logits
                grads = gradients(one, logits.double().logsumexp(-1).sum())
            found[name] = [logits.detach(), torch.cat([g.double().flatten() for g in grads.values()])]
        for name in errors:
            pairs = zip(found[name], found["exact"])
            errors[name].append([((a.double() - b).norm() / b.norm()).item() for a, b in pairs])
    stock, ours = (torch.tensor(e, dtype=torch.float64).log().mean(0).exp() for e in (errors["stock"], errors["ours"]))
    assert (ours <= 1.3 * stock).all(), f"{ours} above {stock}"


def test_generate_with_a_cache():
    """transformers' own generate, greedy, and beams, which reorder the states."""
    model, ids = tiny(HYBRIDS[0], torch.bfloat16), sequences((60,))[0][None].clamp(min=3)  # 0 is padding
    with vx.patch.hf(model), torch.no_grad():
        done = model.generate(ids, max_new_tokens=10, do_sample=False, eos_token_id=None)
        for at in range(60, 70):
            logits = model(done[:, :at], use_cache=False).logits[0, -1]
            assert done[0, at] == logits.argmax()
        options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None}
        beams = model.generate(ids, **options, use_cache=True)
        assert torch.equal(beams, model.generate(ids, **options, use_cache=False))


def test_caches_that_hold_no_states():
    from transformers import DynamicCache

    model, ids = tiny(HYBRIDS[0]), sequences((6,))[0][None]
    with torch.no_grad():
        begun = model(ids, use_cache=True)
    with vx.patch.hf(model), torch.no_grad():
        with pytest.raises(ValueError, match="keeps no states: expected one made for the model"):
            model(ids, past_key_values=DynamicCache(), use_cache=True)
        with pytest.raises(ValueError, match="begun without the patch"):
            model(ids, past_key_values=begun.past_key_values, use_cache=True)


def test_positions_of_several_axes():
    model, ids = tiny(HYBRIDS[0]), sequences((9,))[0][None]
    axes = torch.arange(9).expand(4, 1, 9).clone()
    with vx.patch.hf(model), torch.no_grad():
        assert_bitwise(model(ids, position_ids=axes, use_cache=False).logits[0], alone(model, ids)[0])
        axes[2, 0, 5] = 0
        with pytest.raises(ValueError, match="position_ids: got other positions on one axis"):
            model(ids, position_ids=axes, use_cache=False)


@pytest.mark.parametrize("change", ["no norm of keys", "another decay", "a bias"])
def test_another_delta_net_is_refused(change):
    """Nothing goes by names: the class's own forward on small tensors has to agree with the op."""
    import inspect
    import textwrap
    import types

    model = tiny(HYBRIDS[0])
    layer = model.model.layers[0].linear_attn
    if change == "a bias":
        layer.extra = torch.nn.Linear(2, 2)
    else:
        old, new = {
            "no norm of keys": ("use_qk_l2norm_in_kernel=True", "use_qk_l2norm_in_kernel=False"),
            "another decay": ("g = -self.A_log", "g = -2 * self.A_log"),
        }[change]
        original = inspect.unwrap(type(layer).forward)
        source = textwrap.dedent(inspect.getsource(original)).split("def forward", 1)[1]
        assert old in source
        scope = dict(original.__globals__)
        exec("def forward" + source.replace(old, new), scope)
        cls = type("Other", (type(layer),), {"forward": scope["forward"], "__module__": type(layer).__module__})
        assert isinstance(scope["forward"], types.FunctionType)
        layer.__class__ = cls
    with pytest.raises(vx.patch.UnsupportedModule, match=r"layers\.0\.linear_attn .*: a gated delta net"):
        vx.patch.hf(model)


def test_what_the_description_says():
    from vexact_ops.patch.description import Attention, GatedDelta, Mixture, Norm, State

    for kind in HYBRIDS:
        with vx.patch.hf(tiny(kind)) as handle:
            found = handle.describe()
        first, second, _ = (layer.blocks[0].part for layer in found.layers)
        assert isinstance(first, GatedDelta) and isinstance(second, Attention)
        own = kind == "olmo_hybrid"  # a projection each, eigenvalues down to -1, plain attention
        assert second.gated is not own and first.doubled is own and len(first.qkv) == (3 if own else 1)
        assert (first.key_heads, first.value_heads, first.k_dim, first.v_dim, first.taps) == (2, 4, 16, 24, 4)
        assert (first.z is None, first.a is None) == (kind == "qwen3_next",) * 2
        norm, eps = ("o_norm", 1e-5) if own else ("norm", 1e-6)
        assert first.norm == Norm(f"model.layers.0.linear_attn.{norm}.weight", eps, "gated", 24)
        assert isinstance(first.memory, State) and first.memory.chunk == 64
        parts = [layer.blocks[1].part for layer in found.layers]
        gates = [part.gate is not None for part in parts if isinstance(part, Mixture)]
        assert gates == [True] * {"qwen3_next": 1, "qwen3_5_moe_text": 3}.get(kind, 0)
