"""Model directories as users have them: every loader reads the tensors that transformers reads, or all refuse by name.

The one loader takes a whole model in this process; the other one is what stages do, each with some of the names.
"""

import builtins
import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from engine_models import build, byte_tokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vexact_engine import Engine, EngineConfig, SamplingParams, cli
from vexact_engine.weights.load import load, load_in_stages
from vexact_engine.weights.partial import fill, skeleton
from vexact_engine.weights.tokenizer import load_tokenizer

SMALL = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 1}
EXPERTS = {"num_experts": 3, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
FAMILIES = {"Llama": {}, "Qwen3Moe": EXPERTS, "Mixtral": {"num_local_experts": 3, "num_experts_per_tok": 2}}
CONFIG = EngineConfig(num_pages=24, page_size=4, show_progress=False)


def whole(path, dtype="bfloat16"):
    return load(path, device="cpu", dtype=dtype).model


def in_stages(path, dtype="bfloat16"):
    """What two stages would have, of which each has read its own names alone; together they are the model."""
    loaded = load_in_stages(path, device="cpu", dtype=dtype)
    names = sorted(dict(tensors(loaded.model)))
    assert all(t.is_meta or "rotary" in n for n, t in tensors(loaded.model))
    model = skeleton(loaded.origin)
    for part in (names[::2], names[1::2]):
        fill(model, part, loaded.origin, torch.device("cpu"))
    return model


def from_transformers(path, dtype="bfloat16"):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))


def tensors(model):
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def contents(model):
    """Dtypes and bytes of all tensors, and which names are one tensor."""
    found = {name: (t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).tolist()) for name, t in tensors(model)}
    tied = {frozenset(n for n, o in tensors(model) if o is t) for _, t in tensors(model)}
    return found, tied


LOADERS = (whole, in_stages)


def outcome(loader, path, dtype="bfloat16"):
    try:
        return contents(loader(path, dtype))
    except (ValueError, FileNotFoundError) as error:
        assert str(error).startswith("weights: ") and str(path) in str(error), error
        return str(error)


def save(path, family="Llama", seed=0, shards=False, **options):
    model = build(family, seed=seed, **{**SMALL, **FAMILIES[family], **options})
    model.save_pretrained(path, max_shard_size="2KB" if shards else "5GB")
    return model


def edit(path, file="config.json", **changes):
    config = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({k: v for k, v in {**config, **changes}.items() if v is not None}))


def rewrite(path, change):
    """The single file's tensors, changed."""
    state = load_file(path / "model.safetensors")
    save_file(change(state) or state, path / "model.safetensors", metadata={"format": "pt"})


def other(state, name):
    """Another tensor of that one's shape and dtype."""
    return (torch.arange(state[name].numel(), dtype=torch.float32) * 0.01).view(state[name].shape).to(state[name].dtype)


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


def other_shapes_of_experts(state, number):
    name = next((n for n in sorted(state) if ".experts." in n or ".block_sparse_moe." in n), None)
    if name is not None:
        state[name] = state[name][:-1].clone()


CHANGES = [drop, drop_head, equal_head, another_head, head_alone, base_names, one_base_name, both_names, doubled]
CHANGES += [compiled, extra, frequencies, scale, lora, other_dtype, misshapen, legacy, other_shapes_of_experts]


def adapter(path):
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))


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


BESIDE = [adapter, pickled, variant, quantised, named_weights, tied, old_index, old_shards]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@example("Llama", False, [another_head], [tied], "bfloat16", 0)
@example("Llama", False, [], [old_shards], "bfloat16", 0)
@example("Llama", False, [base_names, drop_head], [tied], "float32", 0)
@example("Llama", False, [both_names], [], "bfloat16", 0)
@example("Mixtral", True, [], [], "bfloat16", 0)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.booleans(),
    st.lists(st.sampled_from(CHANGES), max_size=2),
    st.lists(st.sampled_from(BESIDE), max_size=2),
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
            place(path)
        found = [outcome(loader, path, dtype) for loader in LOADERS]
        assert all(isinstance(f, str) for f in found) or found == [contents(from_transformers(path, dtype))] * 2
    finally:
        shutil.rmtree(path)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path)
    return tmp_path


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
        (adapter, r"adapter_config.json: a directory beside the weights; adapters are not read: merge it"),
        (quantised, r"config.json: quantization_config: the weights are quantised"),
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
        (lambda p: edit(p, num_hidden_layers=3), r"missing keys: model.layers.2"),
        (lambda p: rewrite(p, lambda s: {k: v for k, v in s.items() if "layers.1" not in k}), r"missing keys"),
        (lambda p: rewrite(p, lambda s: compiled(s, 0)), r"names with '_orig_mod.' of torch.compile: strip that"),
        (lambda p: rewrite(p, lambda s: {f"module.{k}": v for k, v in s.items()}), r"'module.' of DistributedDataPar"),
        (lambda p: rewrite(p, lambda s: {f"base_model.model.{k}": v for k, v in s.items()}), r"'base_model.model.' "),
        (lambda p: rewrite(p, lambda s: scale(s, 0)), r"q_proj.weight_scale: scales or parts of other weights"),
        (lambda p: rewrite(p, lambda s: lora(s, 0)), r"lora_A.weight: scales or parts"),
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


# Tokenizers

OWN = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import PreTrainedTokenizer
class Mine(PreTrainedTokenizer):
    vocab_size = 24
    def get_vocab(self): return {chr(i + 97): i for i in range(24)}
    def _tokenize(self, text): return list(text)
    def _convert_token_to_id(self, token): return ord(token) - 97
    def _convert_id_to_token(self, i): return chr(i + 97)
"""


@pytest.fixture
def own(saved, monkeypatch, tmp_path_factory):
    """A directory with Python of its own in every place that transformers knows; and nobody who answers."""

    def ask(*_):
        raise AssertionError("somebody was asked on the terminal")

    monkeypatch.setattr(builtins, "input", ask)
    made = {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (saved / "tokenizer_config.json").write_text(json.dumps(made))
    mark = tmp_path_factory.mktemp("mark") / "ran"
    (saved / "mine.py").write_text(OWN.replace('Path(__file__).with_name("ran")', f"Path({str(mark)!r})"))
    edit(saved, auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})
    (saved / "custom_generate").mkdir()
    shutil.copy(saved / "mine.py", saved / "custom_generate" / "generate.py")
    return saved, mark


def test_a_directory_s_own_python_runs_where_it_is_asked_for_alone(own, caplog):
    path, mark = own
    for read in (load, load_in_stages):
        assert read(path, device="cpu").tokenizer is None
    assert "its tokenizer is Python of its own (mine.Mine)" in caplog.text and "--trust-remote-code" in caplog.text
    with Engine.from_pretrained(path, device="cpu", config=CONFIG) as engine:
        assert len(engine.generate([[5, 6]], SamplingParams(max_new_tokens=3, ignore_eos=True))[0].token_ids) == 3
        (refused,) = engine.generate(["text"], SamplingParams(max_new_tokens=3))
        assert refused.finish_reason == "error" and "tokenizer" in refused.error
    assert not mark.exists()
    with Engine.from_pretrained(path, device="cpu", config=CONFIG, trust_remote_code=True) as engine:
        assert engine.generate(["bcd"], SamplingParams(max_new_tokens=1))[0].prompt_ids == [1, 2, 3]
    assert mark.exists()


def test_a_model_that_only_python_of_its_own_could_make(own):
    path, mark = own
    edit(path, model_type="mine")
    for trust in (False, True):
        with pytest.raises(ValueError, match=f"weights: {path}"):
            load(path, device="cpu", trust_remote_code=trust)
    assert not mark.exists()


def test_a_class_of_transformers_is_taken_whatever_else_is_named(saved):
    byte_tokenizer().save_pretrained(saved)
    edit(saved, "tokenizer_config.json", auto_map={"AutoTokenizer": ["mine.Mine", None]})
    assert load_tokenizer(saved)("ab").input_ids == byte_tokenizer()("ab").input_ids


def test_another_tokenizer_or_none(saved, tmp_path_factory):
    there = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(there)
    (saved / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer: .*tokenizer= \(--tokenizer\) takes another one, or none"):
        load(saved, device="cpu")
    for read in (load, load_in_stages):
        assert read(saved, device="cpu", tokenizer=False).tokenizer is None
        assert read(saved, device="cpu", tokenizer=there).tokenizer("a").input_ids == byte_tokenizer()("a").input_ids
        mine = byte_tokenizer()
        assert read(saved, device="cpu", tokenizer=mine).tokenizer is mine
    model = build("Llama")
    assert load(model, tokenizer=str(there)).tokenizer is not None and load(model, tokenizer=False).tokenizer is None
    (empty := tmp_path_factory.mktemp("empty")).mkdir(exist_ok=True)
    with pytest.raises(FileNotFoundError, match=f"tokenizer: {empty}: found none there"):
        load(saved, device="cpu", tokenizer=empty)


@pytest.mark.parametrize("named", ["flash_attention_2", "some/kernels", "some/kernels@main:function"])
def test_an_attention_that_a_file_names_is_not_fetched_or_looked_for(saved, named):
    expected = outcome(whole, saved)
    edit(saved, attn_implementation=named, _attn_implementation=named)
    assert [outcome(loader, saved) for loader in LOADERS] == [expected] * 2


def test_commands_take_another_tokenizer(tmp_path_factory, own, capsys):
    path, mark = own
    edit(path, vocab_size=None)
    save(path, vocab_size=300)
    there = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(there)
    command = ["generate", "--quiet", "--device", "cpu", "--model", str(path), "--max-new-tokens", "2", "abc"]
    for options, code in (([], 2), (["--tokenizer", "none"], 2), (["--tokenizer", str(there)], 0)):
        assert cli.main([*command, *options]) == code
        assert code == 0 or "tokenizer" in capsys.readouterr().err
    assert not mark.exists()
    assert cli.main([*command, "--trust-remote-code"]) == 0 and mark.exists()


def test_a_text_ends_where_the_tokenizer_says_too(saved, caplog):
    byte_tokenizer().save_pretrained(saved)  # its end is 2
    edit(saved, "generation_config.json", eos_token_id=[7, 9])
    assert load(saved, device="cpu").eos_token_ids == (2, 7, 9) == load_in_stages(saved, device="cpu").eos_token_ids
    assert caplog.text.count("a text ends with 7, 9, as the configuration says, and with 2, the tokenizer's own") == 2
    caplog.clear()
    edit(saved, "generation_config.json", eos_token_id=2)
    assert load(saved, device="cpu").eos_token_ids == (2,) and not caplog.text


# The Hub


def test_a_name_on_the_hub_is_a_directory_like_any_other(tmp_path, monkeypatch):
    import huggingface_hub as hub

    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    save(place, shards=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    found = load("some/model", device="cpu")
    assert found.name == "some/model" and contents(found.model) == contents(whole(place))
    staged = load_in_stages("some/model", device="cpu")
    assert staged.name == "some/model" and Path(staged.origin.source).resolve() == place.resolve()
    adapter(place)
    with pytest.raises(ValueError, match="adapters are not read"):
        load("some/model", device="cpu")
    with pytest.raises(FileNotFoundError, match=r"'some/other': no such file .*, nor is it in the Hub's cache"):
        load("some/other", device="cpu")


# How long a text may be


@pytest.mark.parametrize("rope, length", [
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ({"type": "yarn", "factor": 2.5}, 160),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 64),
    ({"rope_type": "default"}, 64),
])  # fmt: skip
def test_yarn_stretches_what_was_there_before_it(tmp_path, rope, length):
    save(tmp_path, max_position_embeddings=64)
    edit(tmp_path, rope_parameters=None, rope_theta=1e4, rope_scaling=rope)
    config = EngineConfig(num_pages=80, page_size=4, show_progress=False)
    with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:
        assert engine.config.max_model_len == length
        long = list(range(3, 23)) * 3
        (c,) = engine.generate([long], SamplingParams(max_new_tokens=length - 60, ignore_eos=True))
        assert len(c.token_ids) == length - 60
    with pytest.raises(ValueError, match=f"max_model_len is {length + 1}, expected at most {length}"):
        Engine.from_pretrained(tmp_path, device="cpu", config=EngineConfig(max_model_len=length + 1))


def test_a_length_without_end_takes_no_memory(saved):
    edit(saved, max_position_embeddings=10**12)
    config = EngineConfig(page_size=4096, show_progress=False)
    with Engine.from_pretrained(saved, device="cpu", config=config) as engine:
        assert engine.config.max_model_len == 10**12
        (c,) = engine.generate([[5, 6]], SamplingParams(max_new_tokens=3, ignore_eos=True))
        assert len(c.token_ids) == 3


# Models and tensors that are wrapped


def test_a_model_that_is_wrapped_or_has_no_head():
    peft = pytest.importorskip("peft")
    from transformers import AutoModel

    model = build("Llama")
    with pytest.raises(TypeError, match=r"got a OptimizedModule, expected the model itself: .* model._orig_mod"):
        load(torch.compile(model))
    with pytest.raises(TypeError, match=r"got a DataParallel, expected the model itself: .* model.module"):
        load(torch.nn.DataParallel(model))
    with pytest.raises(TypeError, match=r"got a LlamaModel, which has no output layer"):
        load(AutoModel.from_config(model.config, dtype=torch.bfloat16))
    wrapped = peft.get_peft_model(build("Llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(TypeError, match=r"got a PeftModel, .*: peft's is model.merge_and_unload"):
        load(wrapped)


@pytest.mark.parametrize("rename, message", [
    (lambda n: f"_orig_mod.{n}", r"names with '_orig_mod.' of torch.compile: strip that"),
    (lambda n: f"module.{n}", r"names with 'module.' of DistributedDataParallel: strip that"),
    (lambda n: f"base_model.model.{n}", r"names with 'base_model.model.' of peft: strip that"),
    (lambda n: n.replace("layers.0.", "layers.0._checkpoint_wrapped_module."), r"'_checkpoint_wrapped_module.' of act"),
    (lambda n: n.removeprefix("model."), r"names of the model without its head: put 'model.' before them"),
    (lambda n: n.replace("q_proj.", "q_proj.base_layer."), r"names of peft's adapters: merge them first"),
])  # fmt: skip
def test_an_update_by_names_of_a_wrapper(rename, message):
    model, other_one = build("Llama"), build("Llama", seed=1)
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        given = {rename(name): value for name, value in other_one.state_dict().items()}
        specs = {name: (tuple(value.shape), value.dtype) for name, value in given.items()}
        for more in ({}, {"specs": specs}):
            with pytest.raises(ValueError, match=rf"unknown: .*{message}"):
                engine.update_weights(given, numerics=engine.numerics(), **more)
        assert engine.weight_version == 0


def test_an_update_by_shards_of_a_parallel_trainer(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trainer = build("Llama", seed=1)
        fully_shard(trainer, mesh=dist.init_device_mesh("cpu", (1,)))
        with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
            numerics = engine.numerics()
            with pytest.raises(TypeError, match=r"is a DTensor, .*: give its full_tensor\(\), which every rank"):
                engine.update_weights(trainer.named_parameters(), numerics=numerics)
            with engine.begin_update(numerics=numerics) as update, pytest.raises(TypeError, match="full_tensor"):
                update.write(list(trainer.named_parameters())[:1])
            assert engine.weight_version == 0
            whole_ones = ((name, value.full_tensor()) for name, value in trainer.named_parameters())
            engine.update_weights(whole_ones, numerics=numerics)
        with pytest.raises(TypeError, match=r"shards of a parallel \w+ \(DTensor\), expected whole tensors"):
            load(trainer)
    finally:
        dist.destroy_process_group()
