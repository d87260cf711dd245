"""LoRA that a configuration names: of PEFT's files, or of a LoraConfig whose tensors updates bring, it has the bits of
the model that PEFT itself makes of them; whatever is not used, not there, or computed otherwise is refused by name."""

import json
import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch
from engine_models import bits, build, byte_tokenizer, prompts
from ranks import in_ranks
from safetensors.torch import load_file, save_file
from test_adapters import CONFIG, PARAMS, adapted, draw
from test_cli import run as command
from test_decoder import model_of, run, sequences

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, Speculation, WeightsMissing
from vexact_engine.proof import stock
from vexact_engine.runner.forward import forward
from vexact_engine.weights.load import load, load_in_stages
from vexact_engine.weights.update import plan_update
from vexact_ops.testing import assert_bitwise

peft = pytest.importorskip("peft")
NAMES = "qwen3", "qwen3_moe", "qwen3_5_text", "deepseek_v3"
OPTIONS = {name: getattr(CONFIG, name) for name in ("num_pages", "page_size", "max_num_batched_tokens")}
WEIGHTS, SAID = "adapter_model.safetensors", "adapter_config.json"


def config(adapter=None):
    return EngineConfig(**OPTIONS, adapter=adapter, show_progress=False)


def ask(engine):
    return [bits(c) for c in engine.generate(prompts(3, longest=20, vocabulary=50), PARAMS, raise_on_error=True)]


def started(source, adapter=None):
    return Engine.from_pretrained(source, device="cpu", tokenizer=False, config=config(adapter))


def answers(source, adapter=None):
    with started(source, adapter) as engine:
        assert engine.path == "fused"
        return ask(engine)


def save(name, path, **options):
    """A model's directory and one of its adapter's, which names it; the model that PEFT has put it on."""
    model = build(name, vocab_size=300) if name[0].isupper() else model_of(name)
    model.save_pretrained(path / "base")
    model = adapted(model, task_type="CAUSAL_LM", **options)
    model.save_pretrained(path / "adapter")
    say(path / "adapter", base_model_name_or_path=str(path / "base"))
    return model


def say(path, **changes):
    file = path / SAID
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def from_peft(path):
    """As a trainer has it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path / "base", dtype=torch.bfloat16)
    return peft.PeftModel.from_pretrained(model, path / "adapter").eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder, what a trainer of it has, and what is answered without the adapter."""
    path = tmp_path_factory.mktemp("saved")
    save("Qwen3", path)
    byte_tokenizer().save_pretrained(path / "base")
    return path, answers(from_peft(path)), answers(path / "base")


@pytest.fixture
def changed(saved, tmp_path):
    """A copy of the adapter's directory, to be spoilt."""
    for file in (saved[0] / "adapter").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_files_have_the_bits_of_what_peft_makes_of_them(name, tmp_path):
    save(name, tmp_path, use_rslora=name == "qwen3_moe")
    with started(from_peft(tmp_path)) as engine:
        expected, numerics = ask(engine), engine.numerics()
    with started(tmp_path / "base", tmp_path / "adapter") as engine:
        assert ask(engine) == expected and engine.numerics() == numerics and engine.path == "fused"
        assert numerics["model"]["adapters"]["q_proj" if name != "deepseek_v3" else "kv_b_proj"] in ("1.5", "3.0")


def test_a_directory_of_an_adapter_is_its_model_with_it(saved):
    path, expected, plain = saved
    assert answers(path / "adapter") == answers(path / "base", path / "adapter") == expected != plain


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_dtypes_are_those_that_peft_gives(kind, saved, changed):
    """Of a file of any, on a model of either."""
    state = load_file(changed / WEIGHTS)
    save_file({name: value.bfloat16() for name, value in state.items()}, changed / WEIGHTS, {"format": "pt"})
    model = load(saved[0] / "base", device="cpu", dtype=kind, adapter=changed).model
    own = peft.PeftModel.from_pretrained(load(saved[0] / "base", device="cpu", dtype=kind).model, changed)
    expected = own.get_base_model().state_dict()
    assert {n: (v.dtype, v.tolist()) for n, v in model.state_dict().items()} == {
        n: (v.dtype, v.tolist()) for n, v in expected.items()
    }
    assert {v.dtype for n, v in model.state_dict().items() if "lora_" in n} == {torch.float32}


def test_a_forward_that_casts_adapters_is_told_of(saved):
    """As FSDP2's mixed precision does, which PEFT's fp32 masters are cast by."""
    path, expected, _ = saved
    cast = from_peft(path)
    for name, parameter in cast.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.bfloat16()
    config = EngineConfig(**OPTIONS, adapter=path / "adapter", adapter_dtype="bfloat16", show_progress=False)
    with Engine.from_pretrained(path / "base", device="cpu", tokenizer=False, config=config) as engine:
        assert ask(engine) == answers(cast) != expected
    for source, given, message in (
        (path / "base", {"adapter_dtype": "bfloat16"}, "got 'bfloat16' and no adapter, expected None"),
        (path / "adapter", {"adapter_dtype": "float16"}, "got 'float16', expected one of bfloat16, float32 on a CPU"),
        (cast, {"adapter_dtype": "bfloat16"}, "got one for a loaded PeftModel"),
    ):
        for read in (load, load_in_stages) if source is not cast else (load,):
            with pytest.raises(ValueError, match=f"^EngineConfig: adapter_dtype: {message}"):
                read(source, device="cpu", **given)
    with pytest.raises(ValueError, match="EngineConfig: adapter_dtype is 'half', expected one of float32, bfloat16"):
        EngineConfig(adapter_dtype="half")


def test_tensors_come_by_updates_under_the_names_that_there_are(saved):
    path, expected, plain = saved
    model = from_peft(path)
    state, alone = model.state_dict(), load_file(path / "adapter" / WEIGHTS)
    base = {name: value for name, value in state.items() if "lora_" not in name}
    bare = {name.removeprefix("base_model.model.").replace(".base_layer", ""): value for name, value in base.items()}
    verl = {f"{n[:-7]}.base_layer.weight" if "_proj" in n else n: value for n, value in bare.items()}
    given = model.peft_config["default"].to_dict()
    with started(path / "base", given) as engine:
        numerics = engine.numerics()

        def update(tensors):
            engine.update_weights(tensors, numerics=numerics)

        assert ask(engine) == plain
        for names in base, bare, verl:  # nothing is mixed: no adapter has come
            update({name: value * 2 for name, value in names.items()})
            assert ask(engine) != plain
            update(names)
            assert ask(engine) == plain
        with pytest.raises(ValueError, match=r"missing: .*lora_B"):
            update({name: value for name, value in alone.items() if "lora_A" in name})
        update(alone)
        assert ask(engine) == expected
        with pytest.raises(ValueError, match=r"missing: .*lora_A"):
            update(bare)  # of another step than the adapters
        specs = {name: (value.shape, value.dtype) for name, value in bare.items()}
        with pytest.raises(ValueError, match=r"missing: .*lora_A"):
            engine.update_weights(bare, specs=specs, numerics=numerics)
        assert ask(engine) == expected
        zeros = {name.replace(".weight", ".default.weight"): value * 0 for name, value in alone.items()}
        update(zeros)
        assert ask(engine) == plain
        update(state)
        assert ask(engine) == expected
        other = numerics | {"model": numerics["model"] | {"adapters": {"q_proj": "2.0"}}}
        with pytest.raises(ValueError, match=r"model.adapters.q_proj: got '2.0', expected '1.5'"):
            engine.update_weights(state, numerics=other)
        update(bare | alone)
        assert ask(engine) == expected


def test_names_of_modules_that_have_no_adapters_are_verls_too():
    """It puts `.base_layer` into all names that end so."""
    model = adapted(build("Qwen3"), target_modules=["q_proj"]).get_base_model()
    state, put = model.state_dict(), re.compile(r"(_proj)(\.base_layer)?(\.weight)")
    named = {put.sub(r"\1.base_layer\3", name) if "lora_" not in name else name: v for name, v in state.items()}
    assert "model.layers.0.mlp.up_proj.base_layer.weight" in named and len(plan_update(model, named)) == len(state)


def test_what_is_gone_or_torn_is_not_left_out(saved):
    path, expected, _ = saved
    state, alone = from_peft(path).state_dict(), load_file(path / "adapter" / WEIGHTS)
    with started(path / "base", path / "adapter") as engine:
        numerics = engine.numerics()
        engine.sleep(1)
        engine.wake_up()
        assert ask(engine) == expected
        engine.sleep(2)
        engine.wake_up()
        specs = {name: (value.shape, value.dtype) for name, value in alone.items()}
        for announced in (None, specs):
            with pytest.raises(ValueError, match=r"missing: .*embed_tokens"):
                engine.update_weights(alone, specs=announced, numerics=numerics)
            with pytest.raises(WeightsMissing):
                ask(engine)
        engine.update_weights(state, numerics=numerics)
        assert ask(engine) == expected
        with engine.begin_update(numerics=numerics) as update:
            update.write([next(iter(state.items()))])
        with pytest.raises(ValueError, match=r"missing: .*embed_tokens"):
            engine.update_weights(alone, numerics=numerics)
        engine.update_weights(state, numerics=numerics)
        assert ask(engine) == expected


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("peft_type", "LOHA", r"peft_type: got 'LOHA', expected 'LORA'"),
        ("task_type", "SEQ_CLS", r"task_type: got 'SEQ_CLS', expected 'CAUSAL_LM'"),
        ("use_dora", True, r"use_dora: got True, expected none: plain LoRA"),
        ("bias", "all", r"bias: got 'all', expected 'none'"),
        ("lora_bias", True, r"lora_bias: got True"),
        ("modules_to_save", ["lm_head"], r"modules_to_save: got \['lm_head'\]"),
        ("trainable_token_indices", [1], r"trainable_token_indices: got \[1\]"),
        ("target_parameters", ["experts.gate_up_proj"], r"target_parameters: got"),
        ("init_lora_weights", "pissa", r"init_lora_weights: got 'pissa', expected one of True"),
        ("a_variant_of_tomorrow", {"x": 1}, r"a_variant_of_tomorrow: got"),
        ("r", 0, r"r: got 0, expected ranks of 1 or more"),
        ("r", True, r"r: got True, expected ranks"),
        ("lora_alpha", "6", r"lora_alpha: got '6', expected a number"),
        ("rank_pattern", {"q_proj": -1}, r"rank_pattern: got"),
        ("target_modules", 3, r"target_modules: got 3, expected names of modules"),
        ("target_modules", ["q_proj", "quary_proj"], r"target_modules: got quary_proj, expected modules of the Qwen3"),
        ("target_modules", "no_[a-z]+", r"PEFT cannot put it on a Qwen3ForCausalLM: .*no_"),
        ("target_modules", ["embed_tokens"], r"embed_tokens: LoRA on a Embedding: linear layers"),
    ],
)
def test_what_a_configuration_asks_for_beyond_that_is_refused_by_name(field, value, message, saved, changed):
    given = json.loads((changed / SAID).read_text()) | {field: value}
    say(changed, **{field: value})
    for adapter, where in ((changed, f"EngineConfig: adapter: {changed}"), (given, "EngineConfig: adapter")):
        with pytest.raises(ValueError, match=message) as refusal:
            load(saved[0] / "base", device="cpu", adapter=adapter)
        assert str(refusal.value).startswith(where)


def lacking(state):
    del state[min(state)]


def unknown(state):
    state["base_model.model.lm_head.weight"] = torch.zeros(1)


def misshapen(state):
    name = min(state)
    state[name] = state[name][:-1].clone()


def of_whole_numbers(state):
    name = min(state)
    state[name] = state[name].to(torch.int32)


def twice(state):
    name = min(state)
    state[name.replace(".weight", ".default.weight")] = state[name].clone()


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lacking, r"missing: model.layers.0.mlp.down_proj.lora_A.default.weight"),
        (unknown, r"no adapters of the model: base_model.model.lm_head.weight"),
        (misshapen, r"down_proj.lora_A.weight is \(3, \d+\), expected \(4, \d+\)"),
        (of_whole_numbers, r"down_proj.lora_A.weight is I32, expected one of F64"),
        (twice, r"down_proj.lora_A.default.weight and .*: which one counts\?"),
    ],
)
def test_every_tensor_is_used_and_there(spoil, message, saved, changed):
    state = load_file(changed / WEIGHTS)
    spoil(state)
    save_file(state, changed / WEIGHTS, {"format": "pt"})
    with pytest.raises(ValueError, match=message) as refusal:
        load(saved[0] / "base", device="cpu", adapter=changed)
    assert str(changed) in str(refusal.value)


def test_files_that_are_not_there_or_whole_are_refused_by_name(saved, changed, monkeypatch):
    base, whole = saved[0] / "base", (changed / WEIGHTS).read_bytes()

    def refused(error, message, source=base, adapter=changed, **options):
        with pytest.raises(error, match=message):
            load(source, device="cpu", adapter=adapter, **options)

    (changed / WEIGHTS).write_bytes(whole[:-3])
    refused(ValueError, r"^EngineConfig: adapter: .*adapter_model.safetensors is truncated or damaged")
    (changed / WEIGHTS).rename(changed / "adapter_model.bin")
    refused(FileNotFoundError, r"no adapter_model.safetensors; other formats are not read: adapter_model.bin")
    (changed / SAID).write_text("{")
    refused(ValueError, r"adapter_config.json is not JSON")
    (changed / SAID).unlink()
    refused(FileNotFoundError, r"no adapter_config.json, expected a directory of PEFT's")
    refused(FileNotFoundError, r"'no/such-path/here': no such file or directory", adapter="no/such-path/here")
    refused(ValueError, r"config.json: a file, expected a directory of PEFT's", adapter=base / "config.json")
    refused(ValueError, r"got one for a loaded LlamaForCausalLM, .* give the model that PEFT", source=build("Llama"))
    beside = r"got one beside .*, which is an adapter itself"
    refused(ValueError, beside, source=saved[0] / "adapter", adapter=saved[0] / "adapter")
    with pytest.raises(ValueError, match=r"EngineConfig: adapter: got one for .*, which was loaded without it"):
        Engine(load(base, device="cpu"), config(saved[0] / "adapter"))
    for wrong in (3, "", ["a"]):
        with pytest.raises(TypeError, match=r"EngineConfig: adapter is .*, expected a directory, a name on the Hub"):
            EngineConfig(adapter=wrong)
    with pytest.raises(TypeError, match=r"EngineConfig: adapter: r: got a Tensor, expected what JSON has"):
        EngineConfig(adapter={"r": torch.ones(1)})
    monkeypatch.setitem(sys.modules, "peft", None)
    refused(ModuleNotFoundError, r"not installed: peft. Run: pip install .*lora", adapter=saved[0] / "adapter")


def test_an_adapter_that_does_not_say_of_which_model_is_none(saved, changed):
    say(changed, base_model_name_or_path=None)
    with pytest.raises(ValueError, match=r"base_model_name_or_path: got None, expected the model that it is for"):
        load(changed, device="cpu")
    say(changed, base_model_name_or_path=str(saved[0] / "base"), revision="v2")
    with pytest.raises(ValueError, match=r"revision: got 'v2', expected none"):
        load(changed, device="cpu")


def test_a_name_on_the_hub_is_a_directory_like_any_other(saved, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--some--adapter"
    shutil.copytree(saved[0] / "adapter", place / "snapshots" / ("0" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    given = "some/adapter", saved[0] / "adapter"
    found, own = (load(saved[0] / "base", device="cpu", adapter=adapter).model for adapter in given)
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), own.parameters(), strict=True))
    with pytest.raises(FileNotFoundError, match=r"'some/other': no such file .*, nor is it in the Hub's cache"):
        load(saved[0] / "base", device="cpu", adapter="some/other")


def test_heads_that_draft_have_no_adapters(saved):
    path, *_ = saved
    with pytest.raises(ValueError, match=r"Speculation: mtp: .* has LoRA's adapters"):
        chosen = replace(config(path / "adapter"), speculation=Speculation(mtp=True))
        Engine.from_pretrained(path / "base", device="cpu", config=chosen)


def test_commands_take_it(saved, capsys, changed):
    """`verify` against the trainer's own forward of the same adapted model, and beside its stock one."""
    base, own = ["--model", saved[0] / "base"], ["--adapter", saved[0] / "adapter"]
    options = ["--num-prompts", 2, "--lengths", "4,6", "--max-new-tokens", 4, "--ignore-eos", "--stock"]
    code, out, err = command(capsys, "verify", *base, *own, *options)
    assert (code, err) == (0, "") and "0 of 8 log-probabilities differ" in out and "stock HF generate" in out
    said = ["--max-new-tokens", 5, "--no-stream", "--ignore-eos", "abc"]
    lora = load(saved[0] / "base", device="cpu", adapter=saved[0] / "adapter").model
    stock._cast(lora, torch.bfloat16)  # as PEFT has them whatever the model is in
    assert {p.dtype for name, p in lora.named_parameters() if "lora_" in name} == {torch.float32}
    texts = [command(capsys, "generate", *each, *said)[1] for each in ([*base, *own], ["--model", own[1]], base)]
    assert texts[0] == texts[1] != texts[2]
    code, _, err = command(capsys, "bisect", "--device", "cpu", *base, *own, "patched", "engine", "--num-prompts", 1)
    assert (code, err) == (0, "")
    say(changed, use_dora=True)
    code, _, err = command(capsys, "generate", *base, "--adapter", changed, "abc")
    assert code == 2 and err.startswith(f"vexact generate: --adapter: {changed / SAID}: use_dora: got True")
    code, _, err = command(capsys, "verify", "--config", "qwen3-0.6b", *own)
    assert code == 2 and "--adapter: not together with random weights" in err


@pytest.mark.parametrize("name", [*NAMES, "phi3"])
def test_ranks_have_the_bits_of_one(name):
    """As threads: each with its rows of what B gives, and all of A."""
    model, seqs = adapted(model_of(name)).get_base_model(), sequences((11, 3, 9))
    draw(model, 3)
    with vx.patch.hf(model) as handle:
        described = handle.describe()
        whole = range(len(described.layers))
        expected = run([(whole, forward(handle)[0])], described, torch.bfloat16, seqs)

        def function(decoder, own, head):
            ups = {n: s for n, s in own.shards.items() if "lora_B" in n}
            assert ups and not any("lora_A" in n for n in own.shards)
            return run([(whole, decoder)], own.described, torch.bfloat16, seqs)

        for found in in_ranks(model, described, 2, function):
            assert_bitwise(found, expected)
