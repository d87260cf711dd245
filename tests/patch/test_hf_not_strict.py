"""patch.hf(strict=False): what is not covered stays stock, and computes what it did."""

import pytest
import torch
from families import alone, pad, sequences, tiny
from torch import nn

import vexact_ops as vx
from vexact_ops.patch import UnsupportedModule
from vexact_ops.testing import assert_bitwise


def test_not_strict_leaves_what_is_not_covered_and_says_so():
    model, seqs = tiny("llama"), sequences()
    model.model.norm = nn.PReLU()
    stock = alone(model, seqs)
    with vx.patch.hf(model, strict=False) as handle:
        notes = {r.path: r.note for r in handle.report()}
        assert notes["model.norm"].startswith("NOT COVERED: no module of transformers")
        torch.testing.assert_close(alone(model, seqs), stock, rtol=1e-4, atol=1e-4)
        with pytest.raises(UnsupportedModule, match=r"model\.norm \(PReLU\)"):
            vx.patch.hf(model)
    assert_bitwise(alone(model, seqs), stock)


def _drops(model):
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1


def _of_its_own(model):
    kind = type(model.model.layers[0].self_attn)
    own = type("Own", (kind,), {"forward": lambda self, *args, **kwargs: kind.forward(self, *args, **kwargs)})
    model.model.layers[0].self_attn.__class__ = own


def _windows(model):
    model.config.sliding_window = 3


def _both_ways(model):
    model.config.use_bidirectional_attention = True


@pytest.mark.parametrize(
    "family, change",
    [
        ("llama", _drops),
        ("llama", _of_its_own),
        ("qwen3_moe", _windows),
        ("gemma3_text", _both_ways),
        ("deepseek_v3", _drops),
        ("qwen3_5_text", _drops),
    ],
)
def test_attention_that_stays_stock_has_the_models_own_masks(family, change):
    """It was given none, or what stood in the memory of one: every key was seen, those that follow too."""
    model, seqs = tiny(family), sequences((7, 4, 9))
    change(model)
    ids, mask = pad(seqs, "left")
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    stock = alone(model, seqs)
    batch = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
    with vx.patch.hf(model, strict=False) as handle:
        assert "NOT COVERED" in str(handle.report())
        torch.testing.assert_close(alone(model, seqs), stock, rtol=1e-3, atol=2e-4)
        got = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[mask.bool()]
        torch.testing.assert_close(got, batch, rtol=1e-3, atol=2e-4)
        expected = stock[2].log_softmax(-1)[:-1].gather(1, seqs[2][1:, None])[:, 0]
        torch.testing.assert_close(handle.logprobs(seqs[2])[:-1], expected, rtol=1e-3, atol=2e-4)
        with pytest.raises(ValueError, match="vexact_paged: got a batch that attention does not know which is not"):
            model(ids[:1], position_ids=positions[:1], vexact_paged=object(), use_cache=False)
    assert_bitwise(alone(model, seqs), stock)


class Squashed(nn.Linear):
    """An output layer that no op covers."""

    def forward(self, x):
        return super().forward(x).tanh()


def test_an_output_layer_that_stays_stock_forms_no_log_probabilities():
    model, seqs = tiny("llama", tie_word_embeddings=False), sequences()
    model.lm_head.__class__ = Squashed
    stock, loss = alone(model, seqs), model(seqs[0][None], labels=seqs[0][None]).loss
    with vx.patch.hf(model, strict=False) as handle:
        torch.testing.assert_close(alone(model, seqs), stock, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(seqs[0][None], labels=seqs[0][None]).loss, loss, rtol=1e-4, atol=1e-4)
        with pytest.raises(ValueError, match="logprobs: LlamaForCausalLM keeps its output layer, or the forward"):
            handle.logprobs(seqs[0])
    assert_bitwise(alone(model, seqs), stock)


def test_an_output_layer_that_stays_stock_hides_nothing_else():
    """Called in our way it ended the run that shows what attention asks for: its window was left out."""
    model, seqs = tiny("qwen3_moe", tie_word_embeddings=False), sequences((9, 4))
    model.lm_head.__class__, model.config.sliding_window = Squashed, 3
    stock = alone(model, seqs)
    with vx.patch.hf(model, strict=False) as handle:
        assert "its mask has a window of 3" in str(handle.report())
        torch.testing.assert_close(alone(model, seqs), stock, rtol=1e-3, atol=2e-4)


def test_what_cannot_stay_stock_among_the_others_is_refused_all_the_same():
    """Tables in our layout, and a router's choice."""
    model = tiny("cohere2")
    _drops(model)
    with pytest.raises(UnsupportedModule, match=r"attention_dropout is 0\.1"):
        vx.patch.hf(model, strict=False)
    model = tiny("qwen3_moe")
    model.model.layers[0].mlp.experts.act_fn = nn.Softmax(-1)
    with pytest.raises(UnsupportedModule, match=r"mlp\.experts"):
        vx.patch.hf(model, strict=False)
