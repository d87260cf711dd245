"""Model directories as users have them: every loader reads the tensors that transformers reads, or all refuse by name.

The one loader takes a whole model in this process; the other one is what stages do, each with some of the names.
"""

import json
import os
import resource
import shutil

import pytest
import torch
from directories import (
    FAMILIES,
    LOADERS,
    SMALL,
    adapter,
    contents,
    edit,
    from_transformers,
    other,
    outcome,
    rewrite,
    save,
    whole,
)
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.weights.load import load
from vexact_engine.weights.tokenizer import load_tokenizer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
WINDOWS |= {"layer_types": ["full_attention", "full_attention"]}

# What a hypothesis may do to the tensors, and to the files beside them. Each takes what it changes and a free number.


def one(state, number):
    return sorted(state)[number % len(state)]


def drop(state, number):
    del state[one(state, number)]


def drop_head(state, number):
    state.pop("lm_head.weight", None)


def equal_head(state, number):
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()


def another_head(state, number):
    state["lm_head.weight"] = other(state, "model.embed_tokens.weight")


def head_alone(state, number):
    state["lm_head.weight"] = state.pop("model.embed_tokens.weight")


def base_names(state, number):
    return {name.removeprefix("model."): value for name, value in state.items()}


def one_base_name(state, number):
    state[one(state, number).removeprefix("model.")] = state.pop(one(state, number))


def both_names(state, number):
    name = "model.norm.weight"
    state[name.removeprefix("model.")] = other(state, name)


def doubled(state, number):
    return {f"model.{name}": value for name, value in state.items()}


def compiled(state, number):
    return {f"_orig_mod.{name}": value for name, value in state.items()}


def extra(state, number):
    state["something.else"] = torch.ones(3)


def frequencies(state, number):
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)


def scale(state, number):
    state["model.layers.0.self_attn.q_proj.weight_scale"] = torch.ones(1)


def lora(state, number):
    state["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.ones(2, 16)


def other_dtype(state, number):
    kinds = torch.float32, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.float32
    state[one(state, number)] = state[one(state, number)].to(kinds[number % len(kinds)])


def misshapen(state, number):
    name = one(state, number)
    state[name] = state[name].flatten()[:-1].clone() if number % 2 else state[name][None].clone()


def legacy(state, number):
    return {name.replace("norm.weight", "norm.gamma"): value for name, value in state.items()}


def whole_dtype(state, number):
    """Saved in another one; or all but norms, or every second tensor, as a mixed checkpoint has it."""
    kind = (torch.float32, torch.float16, torch.float64)[number % 3]
    keeps = (lambda name, at: False, lambda name, at: "norm" in name, lambda name, at: at % 2)[number // 3 % 3]
    return {name: v if keeps(name, at) else v.to(kind) for at, (name, v) in enumerate(sorted(state.items()))}


def other_shapes_of_experts(state, number):
    name = next((n for n in sorted(state) if ".experts." in n or ".block_sparse_moe." in n), None)
    if name is not None:
        state[name] = state[name][:-1].clone()


CHANGES = [drop, drop_head, equal_head, another_head, head_alone, base_names, one_base_name, both_names, doubled]
CHANGES += [
    compiled,
    extra,
    frequencies,
    scale,
    lora,
    other_dtype,
    misshapen,
    legacy,
    other_shapes_of_experts,
    whole_dtype,
]


def pickled(path):
    (path / "pytorch_model.bin").write_bytes(b"x")


def variant(path):
    shutil.copy(path / "config.json", path / "model.fp16.safetensors")


def quantised(path):
    edit(path, quantization_config={"quant_method": "fp8"})


def named_weights(path):
    single = path / "model.safetensors"
    if single.exists():
        shutil.copy(single, path / "mine.safetensors")
        edit(path, transformers_weights="mine.safetensors")
        rewrite(path, lambda state: {"x": torch.ones(1)})


def tied(path):
    edit(path, tie_word_embeddings=True)


def old_index(path):
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def old_shards(path):
    old_index(path)
    save_file({"model.norm.weight": torch.ones(16)}, path / "model-00001-of-00001.safetensors")


def two_shards(path):
    """The single file's tensors in two, of alternating names, and their index."""
    state, places = load_file(path / "model.safetensors"), {}
    (path / "model.safetensors").unlink()
    for shard in range(2):
        file = f"model-0000{shard + 1}-of-00002.safetensors"
        names = sorted(state)[shard::2]
        save_file({name: state[name] for name in names}, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(names, file)
    write_index(path, places)


def write_index(path, places):
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def index_of(path):
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


def unlisted(path):
    """An index that lacks a tensor of a shard that it names."""
    two_shards(path)
    write_index(path, dict(list(index_of(path).items())[1:]))


def half_listed(path):
    """An index that knows one of two shards."""
    two_shards(path)
    write_index(path, {name: file for name, file in index_of(path).items() if "00001-of" in file})


def crossed(path):
    """An index that has a tensor in the other shard."""
    two_shards(path)
    places = index_of(path)
    a, *_, b = sorted(places)
    write_index(path, {**places, a: places[b]})


def half_written(path):
    two_shards(path)
    index = path / "model.safetensors.index.json"
    index.write_bytes(index.read_bytes()[:-40])


def half_a_file(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def as_a_hub_cache(path):
    """Files are links to blobs of another folder."""
    blobs = path.parent / f"{path.name}-blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(path.iterdir())):
        shutil.move(file, blobs / f"{number:040x}")
        file.symlink_to(os.path.relpath(blobs / f"{number:040x}", path))


def gguf(path):
    (path / "model.gguf").write_bytes(b"GGUF")


def stray(path):
    save_file({"model.norm.weight": torch.ones(16)}, path / "consolidated.safetensors")


def index_of_the_single_file(path):
    write_index(path, dict.fromkeys(load_file(path / "model.safetensors"), "model.safetensors"))


BESIDE = [adapter, pickled, variant, quantised, named_weights, tied, old_index, old_shards, two_shards, unlisted]
BESIDE += [half_listed, crossed, half_written, half_a_file, as_a_hub_cache, gguf, stray, index_of_the_single_file]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@example("Llama", False, [another_head], [tied], "bfloat16", 0)
@example("Llama", False, [], [old_shards], "bfloat16", 0)
@example("Llama", False, [base_names, drop_head], [tied], "float32", 0)
@example("Llama", False, [both_names], [], "bfloat16", 0)
@example("Mixtral", True, [], [], "bfloat16", 0)
@example("Qwen3Moe", False, [whole_dtype, another_head], [tied, two_shards, as_a_hub_cache], "float32", 3)
@example("Llama", False, [], [unlisted], "bfloat16", 0)
@example("Llama", False, [], [crossed], "bfloat16", 0)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.booleans(),
    st.lists(st.sampled_from(CHANGES), max_size=2),
    st.lists(st.sampled_from(BESIDE), max_size=3, unique=True),
    st.sampled_from(["bfloat16", "float32"]),
    st.integers(0, 60),
)
def test_every_loader_has_the_same_tensors_or_all_refuse(tmp_path_factory, family, shards, changes, beside, dtype, n):
    path = tmp_path_factory.mktemp("model")
    try:
        save(path, family, shards=shards and not changes)
        for change in changes:
            try:
                rewrite(path, lambda state, change=change: change(state, n))
            except KeyError:  # two changes that do not go together
                return
        for place in beside:
            try:
                place(path)
            except (FileNotFoundError, SafetensorError, ValueError):  # nor do these: it is no file, or no whole one
                return
        found = [outcome(loader, path, dtype) for loader in LOADERS]
        assert all(isinstance(f, str) for f in found) or found == [contents(from_transformers(path, dtype))] * 2
    finally:
        shutil.rmtree(path)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path)
    return tmp_path


def test_a_rotation_that_is_said_twice_alike(saved):
    """As files are that releases before 5 of transformers can read too."""
    edit(saved, rope_parameters={**YARN, "rope_theta": 3e4})
    expected = outcome(whole, saved)
    for more in ({"rope_theta": 3e4}, {"rope_theta": 3e4, "rope_scaling": YARN}, {"rope_scaling": {}}):
        edit(saved, rope_theta=None, rope_scaling=None)
        edit(saved, **more)
        assert outcome(whole, saved) == expected
    edit(saved, rope_theta=3e4, rope_scaling=YARN, rope_parameters=None)
    assert outcome(whole, saved) == expected


def test_what_a_class_writes_beside_a_rotation_is_nobodys_word(tmp_path):
    """Cohere2-MoE's configs have a rope_theta of their own, which only counts where rope_parameters names none."""
    transformers = pytest.importorskip("transformers.models.cohere2_moe")
    sizes = {**SMALL, "num_hidden_layers": 2, "num_experts": 4, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    rope = {"rope_type": "default", "rope_theta": 7e5}
    transformers.Cohere2MoeForCausalLM(transformers.Cohere2MoeConfig(**sizes, rope_parameters=rope)).save_pretrained(
        tmp_path
    )
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_theta"] == 1e4 != written["rope_parameters"]["rope_theta"]
    expected = contents(from_transformers(tmp_path))
    assert any("inv_freq" in name for name in expected[0])
    for loader in LOADERS:
        assert contents(loader(tmp_path)) == expected
    edit(tmp_path, rope_theta=5e4)
    for loader in LOADERS:
        assert "rope_theta: got 50000.0 beside rope_parameters" in outcome(loader, tmp_path)


def test_a_hypothesis_that_reads_other_tensors_is_noticed(saved):
    """The twin that must fail: a loader that reads the old shards beside the single file."""
    first = outcome(whole, saved)
    rewrite(saved, lambda state: {**state, "model.norm.weight": state["model.norm.weight"] + 1})
    assert outcome(whole, saved) != first and not isinstance(first, str)


# The reports


def test_an_older_save_in_shards_is_not_read(tmp_path, caplog):
    save(tmp_path, shards=True)
    shards = {file: file.read_bytes() for file in tmp_path.glob("model-*")}
    model = save(tmp_path, seed=1)
    assert (tmp_path / "model.safetensors.index.json").exists() or len(shards) > 2
    for with_shards in (False, True):
        for file, raw in shards.items() if with_shards else ():
            file.write_bytes(raw)
        for loader in LOADERS:
            assert contents(loader(tmp_path))[0]["model.norm.weight"] == contents(model)[0]["model.norm.weight"]
    assert "model.safetensors is read, as transformers does; not read: model-00001-of-" in caplog.text


def test_a_head_of_its_own_is_not_tied(tmp_path):
    save(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, lambda state: another_head(state, 0))
    params, done = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True), []
    for stages in (1, 2):
        config = EngineConfig(num_pages=24, page_size=4, show_progress=False, pipeline_parallel_size=stages)
        with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:
            (c,) = engine.generate([[5, 6, 7]], params)
            done.append((c.token_ids, c.logprobs))
            state = from_transformers(tmp_path).state_dict()
            engine.update_weights(state, numerics=engine.numerics())  # head and embedding are two
            (c,) = engine.generate([[5, 6, 7]], params)
            assert (c.token_ids, c.logprobs) == done[0]
    assert done[0] == done[1]


@pytest.mark.parametrize(
    "break_it, message",
    [
        (adapter, r"adapter_config.json: an adapter beside the weights: does it count\?"),
        (quantised, r"config.json: quantization_config: the weights are quantised"),
        (lambda p: edit(p, quantization_config={}), r"config.json: quantization_config: the weights are quantised"),
        (lambda p: edit(p, text_config={"dtype": "auto"}), r"config.json: text_config: dtype: got 'auto', expected a "),
        (lambda p: edit(p, fusion_config={"x": True}), r"config.json: fusion_config"),
        (lambda p: edit(p, transformers_weights="../x.safetensors"), r"config.json: transformers_weights: got '../x"),
        (lambda p: edit(p, transformers_weights="x.safetensors"), r"transformers_weights: got 'x.safetensors'"),
        (lambda p: edit(p, transformers_weights=7), r"transformers_weights: got 7, expected the name of a file"),
        (lambda p: (p / "shard-00001-model-00001-of-00002.safetensors").touch(), r"shard-00001.* distributed"),
        (lambda p: (p / "config.json").write_text("[]"), r"config.json: got a list, expected an object"),
        (lambda p: (p / "config.json").write_text("[" * 100_000), r"config.json is not JSON"),
        (lambda p: (p / "config.json").write_bytes(b"\xff{}"), r"config.json is not JSON"),
        (lambda p: edit(p, vocab_size=10**9), r"embed_tokens.weight is \(24, 16\), expected \(1000000000, 16\)"),
        (lambda p: edit(p, num_attention_heads=10**9, num_key_value_heads=10**9), r"number of attention heads"),
        (lambda p: edit(p, hidden_size=2**40), r"expected \(24, 1099511627776\)"),
        (lambda p: edit(p, hidden_size=2**62), r": "),
        (lambda p: edit(p, head_dim=-8), r": "),
        (lambda p: edit(p, num_hidden_layers=10**6), r"config.json: num_hidden_layers: got 1000000, but the"),
        (lambda p: edit(p, num_hidden_layers=10**18), r"config.json: num_hidden_layers: got 10{18}"),
        (lambda p: edit(p, num_hidden_layers="many"), r": "),
        (lambda p: edit(p, hidden_act="foo"), r"config.json: hidden_act: got 'foo', which transformers does not know"),
        (lambda p: edit(p, rope_parameters={"type": "su"}), r"json: rope_parameters: (rope_)?type: got 'su', which tr"),
        (lambda p: edit(p, rope_theta=5e4), r"config.json: rope_theta: got 50000.0 beside rope_par"),
        (lambda p: edit(p, rope_scaling=YARN), r"json: rope_scaling: .* with another rope_theta, rope_type"),
        (lambda p: edit(p, text_config={"rope_parameters": {"rope_theta": 1}, "rope_theta": 2}), r"text_config: rope"),
        (lambda p: edit(p, **WINDOWS), r"config.json: use_sliding_window: got True beside layer_types, which alone is"),
        (lambda p: edit(p, num_hidden_layers=3), r"missing keys: model.layers.2"),
        (lambda p: rewrite(p, lambda s: {k: v for k, v in s.items() if "layers.1" not in k}), r"missing keys"),
        (lambda p: rewrite(p, lambda s: compiled(s, 0)), r"names with '_orig_mod.' of torch.compile: strip that"),
        (lambda p: rewrite(p, lambda s: {f"module.{k}": v for k, v in s.items()}), r"'module.' of DistributedDataPar"),
        (lambda p: rewrite(p, lambda s: {f"base_model.model.{k}": v for k, v in s.items()}), r"'base_model.model.' "),
        (lambda p: rewrite(p, lambda s: scale(s, 0)), r"q_proj.weight_scale: scales or parts of other weights"),
        (lambda p: rewrite(p, lambda s: lora(s, 0)), r"lora_A.weight: scales or parts"),
        (lambda p: rewrite(p, lambda s: {**s, "model.norm.weight_g": s["model.norm.weight"] * 2}), r"weight_g: scales"),
        (lambda p: rewrite(p, lambda s: {**s, "x.k_proj.ia3_l.default": s["model.norm.weight"] * 2}), r"ia3_l.default"),
        (lambda p: rewrite(p, lambda s: {**s, "x.act_scale": s["model.norm.weight"] * 2}), r"x.act_scale: scales or"),
        (lambda p: rewrite(p, lambda s: both_names(s, 0)), r"are both model.norm.weight: which"),
    ],
)  # fmt: skip
def test_what_is_refused_by_name(saved, break_it, message):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    break_it(saved)
    for loader in LOADERS:
        with pytest.raises((ValueError, FileNotFoundError), match=message) as refusal:
            loader(saved)
        assert str(refusal.value).startswith(f"weights: {saved}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (1 << 20)  # kilobytes: nothing was made


@pytest.mark.parametrize(
    "places, message",
    [
        ({"model.norm.weight": 7}, r"index.json: weight_map: model.norm.weight: got 7"),
        ({"model.norm.weight": "/etc/passwd"}, r"got '/etc/passwd', expected a file of this directory"),
        ({"model.norm.weight": "../model.safetensors"}, r"got '../model.safetensors', expected a file of this"),
        ({"model.norm.weight": ""}, r"got '', expected the name of a file"),
        ({"model.norm.weight": "config.json"}, r"names config.json, expected files of safetensors"),
        ({"model.norm.weight": "gone.safetensors"}, r"gone.safetensors: the index names this file, and it is"),
        ({"no.such.name": "one.safetensors"}, r"one.safetensors lacks tensors that the index .*: no.such.name"),
        ([], r"is no index of safetensors files"),
        ({}, r"is no index of safetensors files"),
    ],
)  # fmt: skip
def test_a_broken_index(saved, places, message):
    (saved / "model.safetensors").rename(saved / "one.safetensors")
    index = saved / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for loader in LOADERS:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            loader(saved)


def test_a_tensor_in_two_shards(saved):
    (saved / "model.safetensors").rename(saved / "one.safetensors")
    shutil.copy(saved / "one.safetensors", saved / "two.safetensors")
    places = {"model.norm.weight": "one.safetensors", "model.embed_tokens.weight": "two.safetensors"}
    (saved / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    for loader in LOADERS:
        with pytest.raises(ValueError, match=r"two.safetensors: \S+ is in one.safetensors too"):
            loader(saved)


@pytest.mark.parametrize("name, message", [
    ("model.fp16.safetensors", "found model.fp16.safetensors: a variant has to be renamed"),
    ("model-00001-of-00002.safetensors", "shards need their index"),
    ("pytorch_model.bin", "found pytorch_model.bin: other formats are not read"),
])  # fmt: skip
def test_weights_of_another_name(saved, name, message):
    (saved / "model.safetensors").rename(saved / name)
    for loader in LOADERS:
        with pytest.raises(FileNotFoundError, match=f"no model.safetensors.*{message}"):
            loader(saved)


def test_links(saved, tmp_path_factory):
    """A cache's links are followed; one to nowhere is said to be one; so is a pointer of Git LFS."""
    elsewhere = tmp_path_factory.mktemp("blobs") / "abc"
    expected = outcome(whole, saved)
    (saved / "model.safetensors").rename(elsewhere)
    (saved / "model.safetensors").symlink_to(elsewhere)
    assert [outcome(loader, saved) for loader in LOADERS] == [expected] * 2
    elsewhere.unlink()
    for loader in LOADERS:
        with pytest.raises(FileNotFoundError, match=r"model.safetensors: a link to a file that is not there"):
            loader(saved)
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    for loader in LOADERS:
        with pytest.raises(ValueError, match=r"a pointer of Git LFS: git lfs pull fetches"):
            loader(saved)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json", "tokenizer.json"])
def test_a_pipe_in_place_of_a_file(saved, name):
    (saved / name).unlink(missing_ok=True)
    os.mkfifo(saved / name)
    for loader in LOADERS:
        with pytest.raises(ValueError, match=f"{name} is a pipe, a socket or a device, expected a file"):
            loader(saved)
    with pytest.raises(ValueError, match=f"{name} is a pipe"):
        load_tokenizer(saved)
    with pytest.raises(ValueError, match="a file that is not GGUF"):
        load(saved / name)
