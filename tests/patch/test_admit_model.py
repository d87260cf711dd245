"""vx.admit: everything that a model asks for on a GPU is found, and asked of the rooms. On a CPU, with rooms that note
what they are asked."""

import types

import pytest
import torch
from families import config_of
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma2Config, Qwen3Config, Qwen3MoeConfig

import vexact_ops as vx
from vexact_ops._core import admit as policy
from vexact_ops._core.admit import Candidate, Decision, Verdict
from vexact_ops.attention.op import ROOM as ATTENTION
from vexact_ops.patch import admit as module
from vexact_ops.patch.admit import Heads, Matrix, Mixture, needs_of

SMALL = {"num_hidden_layers": 2, "vocab_size": 96}
QWEN3 = Qwen3Config(
    hidden_size=64, intermediate_size=160, num_attention_heads=4, num_key_value_heads=2, head_dim=32, **SMALL
)
QWEN3_MOE = Qwen3MoeConfig(
    hidden_size=64, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, **SMALL,
)  # fmt: skip

BY_RULE = Decision("", Candidate("triton", None), "by rule")


def test_the_matrices_of_a_decoder_alone_and_joined():
    assert set(needs_of(QWEN3, joined=True).matrices) == {
        Matrix(96, 64, wide=True, head=True), Matrix(256, 64), Matrix(64, 128), Matrix(320, 64, gated=True),
        Matrix(64, 160),
    }  # fmt: skip
    needs = needs_of(QWEN3)
    assert set(needs.matrices) == {
        Matrix(96, 64, wide=True, head=True),
        Matrix(128, 64), Matrix(64, 64), Matrix(256, 64),  # q; k and v; all three
        Matrix(64, 128), Matrix(160, 64), Matrix(320, 64, gated=True), Matrix(64, 160),
    }  # fmt: skip
    assert (needs.mixtures, needs.attention, needs.hidden) == ((), (Heads(4, 2, 32, 32),), 64)


def test_a_mixture_with_its_router():
    needs = needs_of(QWEN3_MOE)
    assert needs.mixtures == (Mixture(experts=8, hidden=64, inner=48, top_k=3),)
    assert Matrix(8, 64) in needs.matrices


def test_windows_and_latent_heads():
    gemma = Gemma2Config(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        sliding_window=40, **SMALL,
    )  # fmt: skip
    assert needs_of(gemma).attention == (Heads(4, 2, 16, 16, (None, 40)),)
    (sinks,) = needs_of(config_of("gpt_oss")).attention
    assert sinks.sinks and None in sinks.windows and len(sinks.windows) == 2
    latent = DeepseekV3Config(
        hidden_size=64, intermediate_size=96, moe_intermediate_size=48, n_routed_experts=8, num_experts_per_tok=2,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=12, n_group=2, topk_group=1, first_k_dense_replace=1, **SMALL,
    )  # fmt: skip
    needs = needs_of(latent)
    assert needs.attention == (Heads(4, 4, 24, 12),)
    assert needs.mixtures == (Mixture(8, 64, 48, 2),)


def test_what_an_engine_joins_is_said_by_the_description():
    """By no name: the first projections of latent attention, gates and ups that one weight holds already; of a model
    that a description has no words for nothing is joined."""
    latent, phi, stable = (needs_of(config_of(name), joined=True) for name in ("deepseek_v3", "phi3", "stablelm"))
    assert Matrix(20 + 24 + 8, 32) in latent.matrices, "queries and keys and values, compressed"
    assert Matrix(96, 32, gated=True) in phi.matrices and Matrix(96, 32) not in phi.matrices
    assert Matrix(96, 32) in needs_of(config_of("phi3")).matrices, "a trainer computes it by itself"
    assert {Matrix(32, 32), Matrix(16, 32), Matrix(48, 32)} <= set(stable.matrices)
    assert stable.attention == (Heads(4, 2, 8, 8),)
    assert {Matrix(20, 32), Matrix(32, 32)} <= set(needs_of(config_of("deepseek_v3")).matrices) - set(latent.matrices)


def test_what_patching_would_want_to_know_or_refuse_is_not_asked():
    """Factors of rotary frequencies, which change no shape; a dropout, an activation that has no aligned form."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 2, "long_factor": [2.0] * 2}
    sizes = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
    of_long = needs_of(config_of("phi3", rope_parameters=rope, head_dim=8, **sizes))
    assert of_long == needs_of(config_of("phi3", head_dim=8))
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert needs_of(config_of("llama", rope_parameters=dynamic)) == needs_of(config_of("llama"))
    dropped = config_of("llama")
    dropped.attention_dropout = 0.5
    assert needs_of(dropped) == needs_of(config_of("llama"))
    odd = needs_of(config_of("llama", hidden_act="tanh"))
    assert {Matrix(32, 48), Matrix(48, 32)} <= set(odd.matrices) and odd.attention == (Heads(4, 2, 16, 16),)


def test_a_loaded_model_and_a_patched_one_need_what_the_config_says():
    model = AutoModelForCausalLM.from_config(QWEN3)
    assert needs_of(model) == needs_of(QWEN3)
    with vx.patch.hf(model):
        assert needs_of(model) == needs_of(QWEN3)


@pytest.fixture
def asked(monkeypatch):
    calls = []

    def decision(key):
        verdicts = Verdict("fast", 0, 2.0), Verdict("split", 7)
        return Decision(key, Candidate("fast", None), "the fastest of 1", verdicts, seconds=0.25)

    def note(room):
        def admit(*args, **options):
            calls.append((room, args, options))
            found = decision(f"{room} {args} {options}")
            return [found] if room in ("attention", "moe") else found

        return admit

    rooms = {
        "LINEAR": types.SimpleNamespace(class_of=lambda rows: -(-rows // 8) * 8, admit=note("linear")),
        "GATED": types.SimpleNamespace(class_of=lambda rows: 8 if rows <= 8 else 0, admit=note("gated")),
        "NORM": types.SimpleNamespace(admit=note("norm")),
        "HEAD": types.SimpleNamespace(admit=note("head")),
        "SAMPLE": types.SimpleNamespace(class_of=lambda rows: -(-rows // 16), admit=note("draw")),
        "FUSED_MOE": types.SimpleNamespace(
            grouped=types.SimpleNamespace(bucket_of=lambda rows: -(-rows // 8)), admit=note("moe")
        ),
        "ATTENTION": types.SimpleNamespace(admit=note("attention")),
    }
    for name, fake in rooms.items():
        room = types.SimpleNamespace(module=lambda backend, fake=fake: fake, resolve=lambda device, backend: backend)
        monkeypatch.setattr(module, name, room)
    return calls


def test_decode_and_training_are_asked_for(asked, capsys):
    found = vx.admit(QWEN3_MOE, rows=20, training_rows=100, kv_segment=256)
    linear = [
        (args[:3], options.get("layout", "fwd"), options["out_dtype"])
        for room, args, options in asked
        if room == "linear"
    ]
    assert {((96, 64, rows), "fwd", torch.float32) for rows in (8, 16, 24)} <= set(linear)  # the head of a decode step
    assert {((128, 64, rows), "fwd", None) for rows in (8, 16, 24)} <= set(linear)  # q, k and v
    assert {((64, 64, 100), layout, None) for layout in ("fwd", "dx", "dweight")} <= set(linear)
    assert not [key for key in linear if key[0] == (96, 64, 100)], "a trainer's head is not a linear"
    norms = {args for room, args, _ in asked if room == "norm"}  # of hidden states, and of heads
    assert norms == {(n, torch.bfloat16, torch.device("cuda"), False, False) for n in (64, 16)}
    assert ("head", (64, torch.device("cuda")), {}) in asked
    drawn = [args for room, args, _ in asked if room == "draw"]
    assert drawn == [(64, rows, torch.device("cuda")) for rows in (16, 20)], "one number of rows for each class"
    (attention,) = [(args, options) for room, args, options in asked if room == "attention"]
    assert attention[0] == (4, 2, 16, 16, torch.bfloat16, torch.device("cuda"))
    assert attention[1] == {"windows": (None,), "segment": 256, "page": 16, "training": True, "sinks": False}
    mixtures = [(args[:5], options["training"]) for room, args, options in asked if room == "moe"]
    shape = (8, 64, 48, 3)
    assert ((*shape, 100), True) in mixtures and {args[4] for args, training in mixtures if not training} == {
        2, 5, 8, 10, 13, 16, 18, 20,  # one number of tokens for each bucket
    }  # fmt: skip
    assert len(found) == len({str(call) for call in asked}) == len(found.refused), "each kind of call once"
    assert "refused for" in str(found) and f"{len(found)} kinds of calls, {2 * len(found)} kernels verified" in str(
        found
    )
    assert capsys.readouterr().err == "", "no bar where there is no terminal"


def test_progress_is_lines_where_there_is_no_terminal(asked, capsys):
    found = vx.admit(QWEN3, rows=[8], progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(asked) and lines[0] == f"[1/{len(asked)}] attention (4, 2, 32, 32)"
    assert len(found) == len(asked) and not [room for room, *_ in asked if room == "norm"], "gradients of nobody"
    vx.admit(QWEN3, rows=[8], progress=False)
    assert capsys.readouterr().err == ""


def test_it_ends_where_it_is_told_to_and_times_nothing_unless_it_may(asked, monkeypatch):
    races = []
    vx.admit(QWEN3, rows=[8], until=lambda: bool(asked))
    assert [room for room, _, _ in asked] == ["attention"]
    monkeypatch.setattr(module.HEAD.module("cuda"), "admit", lambda *_: races.append(policy._races.get()) or BY_RULE)
    vx.admit(QWEN3, rows=[8], timed=False)
    vx.admit(QWEN3, rows=[8])
    assert races == [False, True]


def test_what_has_one_kernel_is_not_listed(asked, monkeypatch):
    monkeypatch.setattr(module.LINEAR.module("cuda"), "admit", lambda *a, **k: BY_RULE)
    found = vx.admit(QWEN3, rows=[8])
    assert [d.key.split(" ")[0] for d in found] == ["attention", "head", "draw", "gated"]


def test_bad_arguments(asked):
    for wrong in ("Qwen/Qwen3-0.6B", nn.Linear(8, 8)):
        with pytest.raises(TypeError, match=f"admit: model: got {type(wrong).__name__}, expected a transformers model"):
            vx.admit(wrong)
    with pytest.raises(TypeError, match=r"dtype: got torch.float32, expected torch.bfloat16"):
        vx.admit(QWEN3, dtype=torch.float32)
    for name in ("rows", "training_rows"):
        for wrong in (0, -3, [4, 0]):
            with pytest.raises(ValueError, match=f"admit: {name}: got -?[03], expected whole numbers of 1 or more"):
                vx.admit(QWEN3, **{name: wrong})
    with pytest.raises(ValueError, match="admit: kv_segment: got 64, expected None or a multiple of 128"):
        vx.admit(QWEN3, kv_segment=64)
    assert not asked


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(ATTENTION, "_modules", {})  # another test of this process may have loaded what needs none
    with pytest.raises(vx.BackendUnavailable, match="attention: backend 'cuda'"):
        vx.admit(nn.Linear(8, 8))
