"""The fused decoder: of every family that patch.hf covers, whole and in stages, with the patched forward's bits."""

import contextlib
import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.runner import memory
from vexact_engine.runner.batch import plain
from vexact_engine.runner.decoder import Decoder
from vexact_engine.runner.forward import _same_bits, forward, patched_forward
from vexact_engine.runner.memory import Caches
from vexact_engine.runner.projections import Weights
from vexact_ops.patch import COVERED
from vexact_ops.testing import assert_bitwise

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
from families import FAMILIES, NOT_DESCRIBED, family, sequences, settings, tiny
from test_covered import small

sys.path.pop(0)
LATENT = ["axk1", "deepseek_v3", "glm4_moe_lite", "minicpm3", "sarvam_mla", "youtu"]
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def model_of(name: str, dtype=torch.bfloat16):
    return tiny(name, dtype) if name in FAMILIES else small(name).to(dtype)


def prepared(described, dtype, pages: int, page: int = 4, slots: int = 1) -> Caches:
    """NaN where nothing has been stored."""
    made = memory.make([layer.memory for layer in described.layers], pages, page, slots, dtype, torch.device("cpu"))
    for tensor in made.tensors():
        tensor.fill_(torch.nan)
    return made


def steps(seqs, page: int = 4):
    """A prompt and the first chunk of another sequence; then a chunk beside single tokens, until all are through."""
    need = [-(-len(s) // page) for s in seqs]
    tables = [range(sum(need[:i]), sum(need[: i + 1])) for i in range(len(seqs))]
    done, sizes = [0] * len(seqs), ([5, 1, 3], [1, 1, 4], [1, 1, 1])
    while any(at < len(s) for at, s in zip(done, seqs)):
        wanted = sizes[min(sum(done) and 1 + (sum(done) > 12), 2)]
        work = [(i, done[i], min(len(s), done[i] + wanted[i])) for i, s in enumerate(seqs) if done[i] < len(s)]
        for i, _, end in work:
            done[i] = end
        yield work, [tables[i] for i, _, _ in work], torch.cat([seqs[i][a:b] for i, a, b in work])


def run(stages, described, dtype, seqs):
    """Hidden states of every token of each sequence, through stages that pass on what they are given."""
    caches = prepared(described, dtype, sum(-(-len(s) // 4) for s in seqs), slots=len(seqs))
    out = [[] for _ in seqs]
    with torch.no_grad():
        for work, tables, ids in steps(seqs):
            spans, state = [(a, b) for _, a, b in work], ()
            for layers, stage in stages:
                own = Caches(*(part[layers.start : layers.stop] for part in caches))
                batch = plain(own, tables, spans, ids, owners=[i for i, _, _ in work])
                state = stage(batch, *state)
            for (i, _, _), rows in zip(work, state.split([b - a for a, b in spans])):
                out[i].append(rows)
    return [torch.cat(rows) for rows in out]


def trained(model, seqs):
    return [model.base_model(s[None], use_cache=False).last_hidden_state[0].detach() for s in seqs]


def remembered(handle):
    """The description, or in its place what the layers of a model without one remember."""
    try:
        return handle.describe()
    except vx.patch.NotDescribed:
        memories = handle.model._vexact.memories()
        return SimpleNamespace(layers=[SimpleNamespace(memory=memory) for memory in memories])


@each_dtype
@pytest.mark.parametrize("name", [family(name) for name in COVERED])
def test_every_covered_family_is_fused_with_the_bits_of_the_patched_and_the_training_forward(name, dtype):
    if dtype == torch.float32 and name not in FAMILIES:
        pytest.skip("what it is composed of is tried in fp32 by a family with tests of its own")
    model, seqs = model_of(name, dtype), sequences((11, 3, 9))
    for latent in (False, True)[: 1 + (name in LATENT)]:
        with vx.patch.hf(model, latent=latent) as handle:
            computed, how = forward(handle)
            if name in NOT_DESCRIBED:
                assert how.startswith("patched: ") and NOT_DESCRIBED[name] in how
            else:
                assert how == "fused"
            described = remembered(handle)
            whole = range(len(described.layers))
            got = run([(whole, computed)], described, dtype, seqs)
            assert_bitwise(got, run([(whole, patched_forward(model))], described, dtype, seqs), "patched")
            assert_bitwise(got, trained(model, seqs), "trained")


def test_all_families_that_are_latent_are_tried_latent():
    for name in COVERED:
        model = None if name in LATENT else model_of(name)
        if model is None or not any("kv_b_proj" in path for path, _ in model.named_modules()):  # latent.py asks for it
            continue
        with pytest.raises(ValueError, match="latent"), vx.patch.hf(model, latent=True):
            pass


# Stages


@each_dtype
@pytest.mark.parametrize("latent", [False, True], ids=["", "latent"])
@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2", "olmo2", "granite", "mixtral", "deepseek_v3")])
def test_stages_one_after_another_are_the_whole(name, latent, dtype, monkeypatch):
    if latent and name not in LATENT:
        pytest.skip("its attention is not latent")
    model, seqs = model_of(name, dtype), sequences((11, 3, 9))
    with vx.patch.hf(model, latent=latent) as handle:
        described = handle.describe()
        count = len(described.layers)
        expected = run([(range(count), forward(handle)[0])], described, dtype, seqs)
        for cuts in ([0, 1, count], [0, *range(1, count), count]):
            ranges = [range(a, b) for a, b in itertools.pairwise(cuts)]
            made = [forward(handle, layers) for layers in ranges]
            assert [how for _, how in made] == ["fused"] * len(made)
            assert_bitwise(run(list(zip(ranges, [f for f, _ in made])), described, dtype, seqs), expected)
        monkeypatch.setattr("vexact_engine.runner.forward.fuse", lambda *args: (None, "for this test"))
        made = [forward(handle, layers) for layers in ranges]
        assert [how for _, how in made] == ["patched: for this test"] * len(made)
        assert_bitwise(run(list(zip(ranges, [f for f, _ in made])), described, dtype, seqs), expected)


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2", "granite", "deepseek_v3")])
def test_a_stage_needs_its_own_weights_alone(name):
    """The rest of the model lies on meta; the description says what is to be loaded."""
    whole, seqs = model_of(name), sequences((11, 3, 9))
    with vx.patch.hf(whole) as handle:
        described = handle.describe()
        count = len(described.layers)
        expected = run([(range(count), forward(handle)[0])], described, torch.bfloat16, seqs)
    tensors = dict(whole.named_parameters()) | dict(whole.named_buffers())
    stages = []
    for layers in (range(1), range(1, count)):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(whole.config, dtype=torch.bfloat16, attn_implementation="eager")
        for name in described.names(layers):
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            if leaf in module._buffers:
                module._buffers[leaf] = tensors[name].clone()
            else:
                module._parameters[leaf] = torch.nn.Parameter(tensors[name].detach().clone(), requires_grad=False)
        model.tie_weights()
        handle = vx.patch.hf(model)
        assert any(p.is_meta for p in model.parameters())
        stage, how = forward(handle, layers)
        assert how == "fused"
        stages.append((layers, stage))
    assert_bitwise(run(stages, described, torch.bfloat16, seqs), expected)
    logits = handle.logits(expected[0])
    with vx.patch.hf(whole) as handle:
        assert_bitwise(logits, handle.logits(expected[0]))


def test_ranges_that_are_none():
    with vx.patch.hf(model_of("llama")) as handle:
        for layers in (range(0), range(1, 3), range(-1, 1), range(0, 2, 2), range(1, 0, -1)):
            with pytest.raises(ValueError, match=r"stage: layers: got range.*range\(0, 2\)"):
                forward(handle, layers)


# Weights


def joined(model, names) -> bool:
    return len({model.get_parameter(name).untyped_storage().data_ptr() for name in names}) == 1


def test_what_reads_the_same_states_is_one_product_under_its_own_names():
    model = model_of("deepseek_v3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    size = sum(p.untyped_storage().nbytes() for p in model.parameters())
    with vx.patch.hf(model) as handle:
        forward(handle)
    assert {name: p.shape for name, p in model.state_dict().items()} == {n: v.shape for n, v in before.items()}
    assert_bitwise(list(model.state_dict().values()), list(before.values()))
    for i, part in enumerate(("mlp", "mlp.shared_experts", "mlp.shared_experts")):
        path = f"model.layers.{i}"
        assert joined(model, [f"{path}.self_attn.{n}.weight" for n in ("q_a_proj", "kv_a_proj_with_mqa")])
        assert joined(model, [f"{path}.{part}.{n}.weight" for n in ("gate_proj", "up_proj")])
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == size


@pytest.mark.parametrize("name", [family(n) for n in ("llama", "phi3", "deepseek_v3", "granitemoe")])
def test_written_in_place_is_computed_with_and_made_again_nothing_moves(name):
    model, seqs = model_of(name), sequences((11, 3, 9))
    with vx.patch.hf(model) as handle:
        fused, _ = forward(handle)
        places = [p.data_ptr() for p in model.parameters()]
        with torch.no_grad():
            for i, parameter in enumerate(model.parameters()):
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.05)
        described = handle.describe()
        whole = range(len(described.layers))
        assert_bitwise(run([(whole, fused)], described, torch.bfloat16, seqs), trained(model, seqs))
        forward(handle)
        assert [p.data_ptr() for p in model.parameters()] == places


def test_weights_that_two_layers_share_are_not_moved_from_under_one():
    model, seqs = model_of("llama"), sequences((11, 3, 9))
    one, other = model.model.layers
    other.self_attn.q_proj.weight = one.self_attn.q_proj.weight
    with vx.patch.hf(model) as handle:
        fused, how = forward(handle)
        assert how == "fused"
        with torch.no_grad():
            one.self_attn.q_proj.weight.mul_(-0.5)
        whole = range(2)
        assert_bitwise(run([(whole, fused)], handle.describe(), torch.bfloat16, seqs), trained(model, seqs))


@pytest.mark.parametrize("tied", ["weights", "biases"])
def test_projections_that_share_a_parameter_are_products_of_their_own(tied):
    """One parameter cannot lie in two places of a joined weight."""
    model, seqs = model_of("qwen2"), sequences((11, 3, 9))
    for layer in model.model.layers:
        if tied == "weights":
            layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
        else:
            layer.self_attn.k_proj.bias = layer.self_attn.v_proj.bias
    with vx.patch.hf(model) as handle:
        fused, how = forward(handle)
        assert how == "fused"
        with torch.no_grad():
            model.model.layers[0].mlp.gate_proj.weight.mul_(-0.5)
            model.model.layers[0].self_attn.v_proj.bias.add_(0.5)
        assert_bitwise(run([(range(2), fused)], handle.describe(), torch.bfloat16, seqs), trained(model, seqs))


def test_keys_are_promised_settled_where_each_sequence_has_few_tokens(monkeypatch):
    """But not where tokens of one stand as sequences of their own, which see each other's keys."""
    model, told, ours = model_of("qwen3"), [], vx.attention_paged

    def attention(q, k_cache, v_cache, *step, settled, **options):
        told.append((step[3], settled))
        return ours(q, k_cache, v_cache, *step, settled=settled, **options)

    with vx.patch.hf(model) as handle:
        fused, described = forward(handle)[0], handle.describe()
        monkeypatch.setattr(vx, "attention_paged", attention)
        monkeypatch.setattr("vexact_engine.runner.decoder._FEW", 2)
        run([(range(len(described.layers)), fused)], described, torch.bfloat16, sequences((11, 3, 9)))
    assert {longest > 2 for longest, _ in told} == {False, True}, "steps of both kinds"
    assert all(settled == (longest <= 2) for longest, settled in told)


@each_dtype
@pytest.mark.parametrize("latent", [False, True], ids=["", "latent"])
@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2", "olmo2", "granite", "mixtral", "deepseek_v3")])
def test_of_the_rows_alone_that_are_wanted_the_last_layer_computes_what_follows_attention(
    name, latent, dtype, monkeypatch
):
    """With the bits that they have among all, and all keys and values stored; as one and in stages."""
    if latent and name not in LATENT:
        pytest.skip("its attention is not latent")
    model, ids, seen = model_of(name, dtype), sequences((17,))[0], []
    spans, tables = [(0, 9), (0, 7), (0, 1)], [range(3), range(3, 6), range(6, 7)]
    ours = vx.rmsnorm
    with vx.patch.hf(model, latent=latent) as handle, torch.no_grad():
        described = handle.describe()
        count = len(described.layers)

        def states(forwards, rows):
            caches, state = prepared(described, dtype, 7, slots=3), ()
            for layers, stage in forwards:
                own = Caches(*(part[layers.start : layers.stop] for part in caches))
                batch = plain(own, tables, spans, ids)
                batch.rows = rows
                state = stage(batch, *state)
            return state, torch.cat([x.flatten() for x in (*caches.keys, *caches.values)])

        fused, patched = forward(handle)[0], patched_forward(model)
        stages = [(range(a, b), forward(handle, range(a, b))[0]) for a, b in ((0, 1), (1, count))]
        expected, stored = states([(range(count), fused)], None)
        for rows in ([8, 15, 16], [3], [16, 0, 16]):
            wanted = torch.tensor(rows)
            for forwards in ([(range(count), fused)], [(range(count), patched)], stages):
                got, cached = states(forwards, wanted)
                assert_bitwise(got, expected[wanted])
                assert_bitwise(cached, stored)
        monkeypatch.setattr(vx, "rmsnorm", lambda x, *a, **k: seen.append(len(x)) or ours(x, *a, **k))
        states([(range(count), fused)], wanted)
        few = seen.index(len(wanted))
        assert set(seen[few:]) == {len(wanted)} and set(seen[:few]) == {17}
        assert 2 <= len(seen) - few <= 4, "the last layer's behind attention, and the final one"


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2", "arcee")])
def test_gates_and_ups_are_one_op(name, monkeypatch):
    """Where a feed-forward has both. That it has the training forward's bits is tested above."""
    model, calls, ours = model_of(name), [], vx.linear_silu_mul
    with vx.patch.hf(model) as handle:
        fused, described = forward(handle)[0], handle.describe()
        monkeypatch.setattr(vx, "linear_silu_mul", lambda *a, **k: calls.append(k) or ours(*a, **k))
        run([(range(len(described.layers)), fused)], described, torch.bfloat16, sequences((1,)))
    assert len(calls) == (0 if name == "arcee" else len(described.layers))  # which has no gates


def test_projections_that_differ_in_kind_are_products_of_their_own():
    model, seqs = model_of("llama"), sequences((11, 3, 9))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias = None
    with vx.patch.hf(model) as handle:
        fused, how = forward(handle)
        assert how == "fused" and fused.layers[0][0].part.qkv.joined is None
        assert_bitwise(run([(range(2), fused)], handle.describe(), torch.bfloat16, seqs), trained(model, seqs))


# The comparison


def names_of_changes(part):
    """One wrong reading of each kind that a part has."""
    kinds = {
        "scale": lambda v: v * 1.5,
        "window": lambda v: 13 if v is None else None,
        "softcap": lambda v: 9.0 if v is None else None,
        "rope": lambda v: None,
        "q_norm": lambda v: None,
        "k_norm": lambda v: None,
        "activation": lambda v: {"silu": "gelu_tanh", "gelu_tanh": "silu"}.get(v, "silu"),
        "shared": lambda v: None,
        "sinks": lambda v: None,
        "v_factor": lambda v: None,
        "out_norm": lambda v: None,
        "norm": lambda v: None,
    }
    for name, change in kinds.items():
        if hasattr(part, name) and change(getattr(part, name)) != getattr(part, name):
            yield name, change(getattr(part, name))


@pytest.mark.parametrize(
    "name", [family(n) for n in ("qwen3", "gemma2", "mistral", "bitnet", "deepseek_v3", "smollm3")]
)
def test_every_wrong_reading_is_noticed(name):
    """The twin of all the above: what is misread in one layer shows in the comparison that admits."""
    model = model_of(name)
    with vx.patch.hf(model) as handle:
        found, patched = handle.describe(), patched_forward(model)
        whole = range(len(found.layers))
        weights = Weights(model)
        assert _same_bits(handle, found, whole, Decoder(weights, found, whole), patched)
        tried = 0
        for i, layer in enumerate(found.layers):
            for at, block in enumerate(layer.blocks):
                wrong = [replace(block, part=replace(block.part, **{n: v})) for n, v in names_of_changes(block.part)]
                wrong += [replace(block, **{n: None}) for n in ("before", "after", "factor") if getattr(block, n)]
                for other in wrong:
                    if name == "deepseek_v3" and getattr(other.part, "rope", 1) is None:
                        continue
                    layers = list(found.layers)
                    layers[i] = replace(layer, blocks=(*layer.blocks[:at], other, *layer.blocks[at + 1 :]))
                    misread = Decoder(Weights(model), replace(found, layers=tuple(layers)), whole)
                    assert not _same_bits(handle, found, whole, misread, patched), other
                    tried += 1
        assert tried > 4


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3", "gemma3_text", "qwen3_5_text"])
def test_one_layer_of_each_kind(name):
    """For whoever wants kernels to be met: every kind of part between the first layer and the last one is run once, and
    afterwards all of them are."""
    model = model_of(name)
    with vx.patch.hf(model, training=False) as handle:
        described = handle.describe()
        many = replace(described, layers=described.layers * 3)
        decoder, caches = Decoder(Weights(model), many, range(len(many.layers))), prepared(many, torch.bfloat16, 2)
        kinds = [(layer.memory, *(type(block.part) for block in layer.blocks)) for layer in many.layers]
        batch, counts = plain(caches, [range(2)], [(0, 5)], torch.arange(1, 6), owners=[0]), []
        for block in (contextlib.nullcontext(), decoder.one_of_each(), contextlib.nullcontext()):
            seen = []
            with torch.no_grad(), block:
                decoder(batch, seen=lambda x, seen=seen: seen.append(x))
            counts.append(len(seen) - 1)
        assert counts == [len(kinds), 2 + len(set(kinds[1:-1])), len(kinds)]
        assert counts[1] < counts[0]


@each_dtype
@pytest.mark.parametrize(
    "name,changes",
    [
        ("granitemoe", {"logits_scaling": 6.0}),  # of Granite 3.0 1B-A400M
        ("cohere", {"logit_scale": 5 / 6}),
        ("minicpm3", {"dim_model_base": 12, "num_key_value_heads": 4}),  # 2560 / 256 of MiniCPM3-4B
    ],
    ids=["granitemoe", "cohere", "minicpm3"],
)
def test_logits_are_divided_by_any_number(name, changes, dtype):
    """In the hidden states, which are rounded once more where it is no power of two: in rollout and trainer alike."""
    check_trained(name, changes, dtype, atol=1e-4 if dtype == torch.float32 else 0.05)


@each_dtype
@pytest.mark.parametrize("name,changes,described", settings())
def test_settings_that_no_family_has_by_itself(name, changes, described, dtype):
    atol = 1e-4 if dtype == torch.float32 else 1.0  # whose accuracy is tested against the stock model's of that dtype
    path = check_trained(name, changes, dtype, atol)
    assert path == "fused" if described else path.startswith("patched: ")


def check_trained(name, changes, dtype, atol: float) -> str:
    """The trainer has an engine's log-probabilities, which are near those of stock transformers in fp32. Returns how
    the engine computed them."""
    model, prompt = tiny(name, dtype, **changes), sequences((11,))[0].tolist()
    config = EngineConfig(num_pages=16, show_progress=False)
    with Engine.from_pretrained(model, device="cpu", dtype=dtype, config=config) as engine:
        (done,) = engine.generate([prompt], SamplingParams(max_new_tokens=9, seed=3, ignore_eos=True))
        path = engine.path
    ids = torch.tensor([prompt + list(done.token_ids)])
    with vx.patch.hf(model) as handle, torch.no_grad():
        trained = handle.logprobs(ids)[0, len(prompt) - 1 : -1]
    assert_bitwise(trained, torch.tensor(done.raw_logprobs, dtype=torch.float32))
    stock = tiny(name, torch.float32, **changes)
    stock.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    with torch.no_grad():
        wide = stock(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
    torch.testing.assert_close(trained, wide, rtol=0, atol=atol)
    return path
