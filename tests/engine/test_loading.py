"""What is loaded beside weights, and what is given in place of a directory: tokenizers, names on the Hub, lengths,
models and tensors that are wrapped."""

import builtins
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from directories import CONFIG, LOADERS, adapter, contents, edit, from_transformers, outcome, save, whole
from engine_models import build, byte_tokenizer

from vexact_engine import Engine, EngineConfig, SamplingParams, cli
from vexact_engine.weights.load import load, load_in_stages
from vexact_engine.weights.tokenizer import load_tokenizer


@pytest.fixture
def saved(tmp_path):
    save(tmp_path)
    return tmp_path


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


def test_the_dtype_that_is_asked_for_is_all_that_counts(saved):
    """As from_pretrained has it, where it is told one."""
    expected = outcome(whole, saved)
    for named in ("auto", "bfloat16"):
        edit(saved, dtype=named)
        assert [outcome(loader, saved) for loader in LOADERS] == [expected] * 2
    assert outcome(from_transformers, saved) == expected


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


def test_an_end_that_no_token_is_is_said(saved, caplog):
    edit(saved, "generation_config.json", eos_token_id=[7, 9000])
    for read in (load, load_in_stages):
        read(saved, device="cpu")
    assert caplog.text.count("eos_token_id: 9000: no text ends with that: the model has ") == 2


# The Hub


def test_what_generate_would_take_from_a_file_is_named(saved, caplog):
    neutral = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    edit(saved, "generation_config.json", **neutral, num_beams=1, suppress_tokens=[], max_new_tokens=5)
    for read in (load, load_in_stages):
        read(saved, device="cpu")
    assert not caplog.text
    edit(saved, "generation_config.json", temperature=0.6, top_k=20)
    load(saved, device="cpu")
    said = "generation_config.json: not taken over: temperature 0.6, top_k 20: a request says how it is sampled"
    assert caplog.text.count(f"weights: {saved}: {said} (SamplingParams)\n") == 1
    edit(saved, "generation_config.json", repetition_penalty=1.1, suppress_tokens=list(range(99)))
    load_in_stages(saved, device="cpu")
    assert caplog.text.count("; nothing here does repetition_penalty, suppress_tokens\n") == 1
    assert "suppress_tokens [0, 1, 2" in caplog.text and len(caplog.records[-1].getMessage()) < 400
    edit(saved, "generation_config.json", dola_layers="high", presence_penalty=1.5)
    load(saved, device="cpu")
    assert "nothing here does dola_layers, presence_penalty, repetition_penalty, suppress_tokens\n" in caplog.text


def test_a_template_that_is_not_read_is_named(tmp_path, caplog):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path)
    for same in ("{{ messages[0]['content'] }}\n", None, ""):
        edit(tmp_path, "tokenizer_config.json", chat_template=same)
        load_tokenizer(tmp_path)
        assert not caplog.text
    edit(tmp_path, "tokenizer_config.json", chat_template="another")
    assert load_tokenizer(tmp_path).chat_template == tokenizer.chat_template
    assert "chat_template: that of chat_template.jinja is read, as transformers does, and not tok" in caplog.text


def test_a_length_that_no_text_has(saved):
    edit(saved, max_position_embeddings=1)
    with pytest.raises(ValueError, match="max_position_embeddings is 1 in its config, expected 2 or more"):
        Engine.from_pretrained(saved, device="cpu", config=CONFIG)


def test_a_name_on_the_hub_is_a_directory_like_any_other(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    save(place, shards=True)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("0" * 40)
    found = load("some/model", device="cpu")
    assert found.name == "some/model" and contents(found.model) == contents(whole(place))
    staged = load_in_stages("some/model", device="cpu")
    assert staged.name == "some/model" and Path(staged.origin.source).resolve() == place.resolve()
    adapter(place)
    with pytest.raises(ValueError, match="an adapter beside the weights"):
        load("some/model", device="cpu")
    with pytest.raises(FileNotFoundError, match=r"'some/other': no such file .*, nor is it in the Hub's cache"):
        load("some/other", device="cpu")


class Hub(http.server.BaseHTTPRequestHandler):
    """One repository, some/model, of the files in `place`; `asked` are those that were fetched."""

    place: Path
    asked: set[str]

    def log_message(self, *_): ...

    def do_GET(self):
        path, headers = self.path.split("?")[0], {"X-Repo-Commit": "a" * 40}
        body = b""
        if path.startswith("/api/models/some/model/tree"):
            files = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0"} for f in self.place.iterdir()
            ]
            body = json.dumps(files).encode()
        elif path.startswith("/api/models/some/model"):
            files = [{"rfilename": file.name} for file in self.place.iterdir()]
            body = json.dumps({"id": "some/model", "sha": "a" * 40, "siblings": files}).encode()
        elif (file := self.place / path.rpartition("/")[2]).is_file():
            body = file.read_bytes()
            headers["ETag"] = hashlib.sha256(body).hexdigest()
            if self.command == "GET":
                self.asked.add(file.name)
        else:
            headers["X-Error-Code"] = "EntryNotFound"
        self.send_response(200 if body else 404)
        for key, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    do_HEAD = do_GET


@pytest.mark.parametrize("shards", [False, True])
def test_of_a_name_on_the_hub_come_the_files_that_are_read(tmp_path, shards):
    save(tmp_path / "model", shards=shards)
    wanted = {file.name for file in (tmp_path / "model").iterdir()}
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.fp16.safetensors"):
        (tmp_path / "model" / name).write_bytes(b"x")
    handler = type("Handler", (Hub,), {"place": tmp_path / "model", "asked": set()})
    code = "from vexact_engine.weights.load import load; print(load('some/model', device='cpu').name)"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        where = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}
        env = {**os.environ, **where, "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
        server.shutdown()
    assert done.stdout == "some/model\n" and handler.asked == wanted, done.stderr


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
    mixed = peft.get_peft_model(build("Llama"), peft.LoraConfig(target_modules=["q_proj"]), mixed=True)
    with pytest.raises(TypeError, match=r"got a PeftMixedModel, .*: peft's is model.merge_and_unload"):
        load(mixed)


def test_a_loaded_model_that_no_token_could_be_drawn_of_is_refused():
    """Not in the middle of a step, where a token without a row would end every request there is."""
    model = build("Llama", torch.bfloat16, tie_word_embeddings=False)
    model.lm_head = torch.nn.Linear(48, 40, bias=False, dtype=torch.bfloat16)
    assert load(model).model is model  # fewer are some that are never drawn
    model.lm_head = torch.nn.Linear(48, 400, bias=False, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"output layer of the given LlamaForCausalLM has 400 rows, its embedding 160"):
        load(model)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no weights there yet \(device meta\)"):
        load(model.to("meta"))


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
