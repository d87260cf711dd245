"""A checkpoint's own heads draft: what they say is what their layer says, and no byte of a completion is another."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import build, check_idle, prompts
from safetensors.torch import load_file, save_file
from test_speculation import ALWAYS, ROOMY, outcome

from vexact_engine import Engine, SamplingParams, Speculation
from vexact_engine.runner import graphs
from vexact_engine.weights.experts import per_expert

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
import image_models
from families import tiny
from image_models import PIXELS, ROWS

sys.path.pop(0)
KINDS = "qwen3_5_text", "qwen3_5_moe_text", "DeepseekV3", "glm4_moe"
GLM = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
BY_HEADS = Speculation(max_draft_tokens=4, always=True, sources=(), mtp=True)
HEADS = replace(ROOMY, speculation=BY_HEADS)


def model(kind):
    if kind == "DeepseekV3":
        return build(kind)
    return tiny(kind, torch.bfloat16, **(GLM if kind == "glm4_moe" else {}))


def heads_of(model, seed=5):
    """Names and tensors of random heads, the layer that they are like, and the names of fc, norms of both, and norm."""
    config, generator = model.config.get_text_config(), torch.Generator().manual_seed(seed)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    like = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
    to, names = "mtp.layers.0.", ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    if not config.model_type.startswith("qwen3_5"):
        to = f"model.layers.{config.num_hidden_layers}."
        names = tuple(to + name for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))

    def new(value):
        noise = torch.randn(value.shape, generator=generator)
        return (noise * 1.5 / value.shape[-1] ** 0.5 if value.dim() > 1 else value + 0.1 * noise).to(value.dtype)

    path = "model.language_model" if hasattr(model.model, "language_model") else "model"
    own = f"{path}.layers.{like}."
    found = {to + n.removeprefix(own): new(v) for n, v in per_expert(model) if n.startswith(own)}
    norm = model.get_parameter(f"{path}.norm.weight").detach()
    found |= {f"{name}.weight": new(norm) for name in names[1:]}
    width = len(norm)
    found[f"{names[0]}.weight"] = new(norm.new_empty(width, 2 * width))
    return found, like, [f"{name}.weight" for name in names]


def saved(model, path, heads):
    model.save_pretrained(path)
    file = path / "model.safetensors"
    save_file({**load_file(file), **{n: v.contiguous() for n, v in heads.items()}}, file, metadata={"format": "pt"})
    return path


def asked(vocabulary):
    params = [SamplingParams(max_new_tokens=20, seed=i, ignore_eos=True, n=1 + i % 2) for i in range(4)]
    params[2] = replace(params[2], num_top_logprobs=2, temperature=0.7, top_k=20)
    params[3] = replace(params[3], prompt_logprobs=True, temperature=0.0)
    return prompts(4, longest=60, vocabulary=vocabulary), params


def outcomes(engine):
    return [outcome(c)[:-1] for c in engine.generate(*asked(engine.vocab_size))]  # of whatever version


@pytest.mark.parametrize("kind", KINDS[:3])
def test_no_byte_is_another(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())
    own = model(kind)
    heads, _, _ = heads_of(own)
    path = saved(own, tmp_path, heads)
    with Engine.from_pretrained(own, config=replace(ROOMY, enforce_eager=True)) as engine:
        expected = outcomes(engine)
    tight = {"num_pages": 70, "max_num_batched_tokens": 16, "max_num_seqs": 3, "reserve": 0.0}
    config = replace(HEADS, enable_prefix_cache=True, async_scheduling=True, **tight)
    with Engine.from_pretrained(path, device="cpu", config=config) as engine:
        assert engine._worker._runner.beside.graphs.captured
        for _ in range(2):  # the second from warm pages
            assert outcomes(engine) == expected
        assert engine.stats.drafted_tokens > 50
        check_idle(engine)
        state = {name: value.clone() for name, value in engine.model.state_dict().items()}
        numerics, other = engine.numerics(), heads_of(own, seed=6)[0]
        other = {name: value.to(engine.manifest().get(name, ((), value.dtype))[1]) for name, value in other.items()}
        assert engine.update_weights({**state, **other}, numerics=numerics) == 1 and outcomes(engine) == expected
        assert engine.update_weights(state, numerics=numerics) == 2 and outcomes(engine) == expected
        name = next(iter(other))
        with pytest.raises(ValueError, match=r"update_weights: missing: (mtp|model.layers)"):
            engine.update_weights({**state, name: other[name]}, numerics=numerics)
        engine.sleep(2)
        engine.wake_up(["weights"])
        engine.update_weights(state, numerics=numerics)
        engine.wake_up()
        assert outcomes(engine) == expected


@pytest.mark.parametrize("kind", [KINDS[0], *KINDS[2:]])
def test_heads_say_what_their_layer_says(kind, tmp_path, monkeypatch):
    """Of transformers' own modules: hidden states, the layer on all tokens at once, the output head."""
    monkeypatch.setattr("vexact_engine.core.drafts._SELDOM", -1.0)  # nobody rests
    own = model(kind)
    heads, like, names = heads_of(own)
    path = saved(own, tmp_path, heads)
    said = []
    with Engine.from_pretrained(path, device="cpu", config=HEADS) as engine:
        drafting = engine._worker.draft_model
        draft = drafting.draft

        def listened(chains):
            found = draft(chains)
            said.extend((list(c.chunk.sequence.tokens), tokens[0]) for c, tokens in zip(chains, found) if tokens)
            return found

        drafting.draft = listened
        greedy = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True)
        engine.generate(prompts(3, longest=40, vocabulary=engine.vocab_size), greedy)
    assert len(said) > 20
    right = sum(token == by_hand(own, heads, like, names, tokens) for tokens, token in said)
    assert right >= 0.8 * len(said), f"{right} of {len(said)}"  # roundings are others, and so may be experts


@torch.no_grad()
def by_hand(model, heads, like, names, tokens):
    import copy

    decoder, ids = model.model, torch.tensor([tokens])
    embedded, hidden = model.get_input_embeddings()(ids), decoder(ids).last_hidden_state
    before = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), 1)
    fc, *norms = (heads[name] for name in names)

    def norm(x, weight):
        made = copy.deepcopy(decoder.norm)
        made.weight.data = weight
        return made(x)

    x = torch.cat((norm(embedded, norms[0]), norm(before, norms[1])), 2) @ fc.T
    layer, at = copy.deepcopy(decoder.layers[like]), f"model.layers.{like}."
    begin = names[0].removesuffix("eh_proj.weight") if "eh_proj" in names[0] else "mtp.layers.0."
    views = dict(per_expert_of(layer, model, at))
    for name, value in heads.items():
        if name.startswith(begin) and at + name.removeprefix(begin) in views:
            views[at + name.removeprefix(begin)].copy_(value)
    positions = torch.arange(len(tokens))[None]
    rotary = decoder.rotary_emb(x, positions)
    mask = torch.full((len(tokens),) * 2, float("-inf"), dtype=x.dtype).triu(1)[None, None]
    out = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
    out = out[0] if isinstance(out, tuple) else out
    return int(model.lm_head(norm(out, norms[2]))[0, -1].argmax())


def per_expert_of(layer, model, at):
    """The layer's tensors by names of checkpoints, views of it."""
    for name, value in layer.state_dict().items():
        yield at + name, value
    if hasattr(layer.mlp, "experts"):
        experts = layer.mlp.experts
        for i, (both, down) in enumerate(zip(experts.gate_up_proj.data, experts.down_proj.data)):
            for name, view in zip(("gate_proj", "up_proj", "down_proj"), (*both.chunk(2), down)):
                yield f"{at}mlp.experts.{i}.{name}.weight", view


def test_prompts_with_images(tmp_path):
    """Heads, a model of text and one that takes images itself draft behind them, too."""
    own = image_models.tiny("qwen3_5")
    path = saved(own, tmp_path, heads_of(own)[0])
    params = SamplingParams(max_new_tokens=16, seed=3, ignore_eos=True)
    said = []
    text = build("Qwen3", vocab_size=own.config.text_config.vocab_size)
    for how in ({}, {"mtp": True}, {"draft_model": text}, {"draft_model": own}):
        speculation = Speculation(max_draft_tokens=4, always=True, sources=(), **how) if how else None
        config = replace(ROOMY, enable_prefix_cache=True, speculation=speculation)
        with Engine.from_pretrained(path, device="cpu", config=config) as engine:
            for _ in range(2):
                done = engine.generate([image_prompt(i) for i in range(len(ROWS))], params)
                said.append([(*outcome(c), c.prompt_ids) for c in done])
            assert not how or engine.stats.drafted_tokens > 30
            for c in engine.generate([[5, 6, 7]], params) if how.get("draft_model") is own else ():
                assert c.metrics.accepted_tokens == c.metrics.drafted_tokens == 12
    assert all(one == said[0] for one in said)


def image_prompt(index):
    (ids, grids), given = ROWS[index], PIXELS[index]
    if not grids:
        return ids
    return {"prompt_token_ids": ids, "pixel_values": given, "image_grid_thw": torch.tensor(grids)}


def test_what_holds_no_heads_is_refused(tmp_path):
    own = model("qwen3_5_text")
    heads, _, _ = heads_of(own)

    def said(source, words):
        with pytest.raises(ValueError, match=words):
            Engine.from_pretrained(source, device="cpu", config=HEADS)

    said(own, "Speculation: mtp: got Qwen3_5ForCausalLM, which holds no heads, expected a model directory")
    own.save_pretrained(tmp_path / "none")
    said(
        tmp_path / "none", r"none holds no heads: expected mtp.fc.weight \(Qwen3.5\), or model.layers.3.eh_proj.weight"
    )
    lost = {name: value for name, value in heads.items() if "q_proj" not in name}
    said(saved(own, tmp_path / "lost", lost), r"lost: missing: mtp.layers.0.self_attn.q_proj.weight, as model.layers.1")
    wide = {**heads, "mtp.norm.weight": torch.zeros(33, dtype=torch.bfloat16)}
    said(saved(own, tmp_path / "wide", wide), r"mtp.norm.weight is \(33,\), expected \(32,\)")
    for fields, error in (({"mtp": 1}, TypeError), ({"mtp": True, "draft_model": "there"}, ValueError)):
        with pytest.raises(error, match="Speculation: mtp"):
            Speculation(**fields)
    assert ALWAYS.drafts_by_model is False and BY_HEADS.drafts_by_model is True
