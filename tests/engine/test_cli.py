"""The command line: results, exit codes, and one clear line where something is wrong."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_models import build, byte_tokenizer

from vexact_engine import cli
from vexact_engine.config import EngineConfig
from vexact_engine.proof import demo, doctor, machine, verify
from vexact_engine.proof.prompts import encode, read_prompts
from vexact_engine.weights import random
from vexact_engine.weights.random import load_random

ROOT = Path(__file__).parents[2]
WORDS = 300  # the byte tokenizer has 259
TIGHT = ["--page-size", "4", "--num-pages", "24", "--max-num-seqs", "3", "--max-num-batched-tokens", "8"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build("Llama", vocab_size=WORDS).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(capsys, command, *argv):
    """Without progress, so that standard error holds errors alone; on the CPU, unless a test says where."""
    here = ["--device", "cpu"] if command in ("demo", "verify", "generate", "chat") and "--device" not in argv else []
    code = cli.main([command, "--quiet", *here, *(str(a) for a in argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_verify_says_equal_and_writes_its_files(capsys, model, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "hello there, this one is long"}\n{"messages": [{"role": "user", "content": "hi"}]}\n'
    )
    files = ["--json", tmp_path / "v.json", "--html", tmp_path / "v.html", "--plot", tmp_path / "v.svg"]
    options = ["--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 9, "--samples", 2, "--ignore-eos", "--stock"]
    code, out, err = run(capsys, "verify", "--model", model, *options, *TIGHT, *files)
    assert (code, err) == (0, "")
    assert "0 of 36 log-probabilities differ (max |diff| 0.0, KL 0.0)" in out.splitlines()
    record = json.loads((tmp_path / "v.json").read_text())
    assert record["aligned"] == {"tokens": 36, "mismatched_tokens": 0, "max_abs_diff": 0.0, "k3_kl": 0.0}
    assert record["stock"]["tokens"] > 0 and record["prompts"] == 2 and record["equal"] is True
    assert "0 of 36 log-probabilities differ" in (tmp_path / "v.html").read_text()
    assert "<svg" in (tmp_path / "v.svg").read_text()
    assert (record["schema"], record["schema_version"]) == ("vexact.verify", machine.SCHEMA)
    assert record["command"].startswith("vexact verify --quiet --device cpu --model ") and record["date"].startswith(
        "20"
    )
    assert record["commit"] == record["environment"]["commit"] and record["failures"] == []


def test_verify_exits_1_where_something_differs(capsys, model, monkeypatch):
    """The twin that must fail: the trainer scores at a temperature that the rollout did not have."""
    honest = verify.rescore
    monkeypatch.setattr(verify, "rescore", lambda *a, **k: honest(*a, **{**k, "temperature": 0.9}))
    options = ["--num-prompts", 2, "--lengths", "4,6", "--max-new-tokens", 4, "--ignore-eos"]
    code, out, _ = run(capsys, "verify", "--model", model, *options)
    assert code == 1 and "8 of 8 log-probabilities differ (max |diff| " in out


def test_verify_on_random_weights_needs_a_config_alone(capsys, tmp_path):
    build("Qwen3").config.save_pretrained(tmp_path)
    options = ["--num-prompts", 3, "--lengths", "5", "--max-new-tokens", 4, "--ignore-eos", "--dtype", "fp32"]
    code, out, _ = run(capsys, "verify", "--model", tmp_path, "--random-weights", *options)
    assert code == 0 and "0 of 12 log-probabilities differ" in out
    a, b, c = (load_random(str(tmp_path), seed=s).model.state_dict() for s in (0, 0, 1))
    assert all(torch.equal(a[k], b[k]) for k in a) and not any(torch.equal(a[k], c[k]) for k in a if a[k].dim())
    assert all(v.float().std() > 0 for v in a.values()), "norm weights too"


@pytest.mark.process
def test_verify_rolls_out_in_ranks(capsys, tmp_path):
    """Random weights, of which each rank makes its rows, and the trainer all."""
    build("Qwen3").config.save_pretrained(tmp_path)
    options = ["--num-prompts", 2, "--lengths", "5", "--max-new-tokens", 4, "--ignore-eos", "--dtype", "fp32"]
    options += ["--model", tmp_path, "--random-weights", "--tensor-parallel-size", 2]
    code, out, _ = run(capsys, "verify", *options)
    assert code == 0 and "0 of 8 log-probabilities differ" in out
    code, _, err = run(capsys, "verify", *options, "--share-weights")
    assert code == 2 and "--share-weights: not together with --tensor-parallel-size" in err


def test_verify_on_a_known_model_s_sizes(capsys, monkeypatch):
    small = {"vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16}
    monkeypatch.setitem(random.CONFIGS, "qwen3-small", random.CONFIGS["qwen3-0.6b"] | small)
    options = ["--num-prompts", 5, "--lengths", "5,9", "--max-new-tokens", 4, "--ignore-eos", "--batch-sizes", "1,3,8"]
    code, out, _ = run(capsys, "verify", "--config", "qwen3-small", *options)
    assert code == 0 and "0 of 20 log-probabilities differ" in out
    for size in (1, 3, 8):
        assert f"engine: 5 prompts again, {size} at a time: 0 of 20 tokens differ" in out
    more = ["--layers", 1, "--warm", "--share-weights", "--lengths", "40", *options[:2]]
    code, out, _ = run(capsys, "verify", "--config", "qwen3-small", *more)
    assert code == 0 and re.search(r"5 prompts again, 160 of their tokens from the prefix cache: 0 of \d+ tokens", out)
    code, _, err = run(capsys, "verify", "--config", "qwen3-small", "--layers", 3)
    assert code == 2 and err == "vexact verify: --layers: got 3, expected 1 to 2\n"
    code, _, err = run(capsys, "verify", "--model", ".", "--layers", 3)
    assert code == 2 and "--layers: expected --config or --random-weights with it" in err
    code, _, err = run(capsys, "verify", "--config", "qwen9")
    assert code == 2 and err.startswith(
        "vexact verify: --config: got 'qwen9', expected one of smollm2-135m, qwen3-0.6b"
    )


def test_known_sizes_are_those_of_the_benchmarks():
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.shapes import SHAPES
    finally:
        sys.path.remove(str(ROOT))
    assert random.CONFIGS.keys() == SHAPES.keys()
    names = {"H": "hidden_size", "I": "intermediate_size", "V": "vocab_size", "layers": "num_hidden_layers"}
    names |= {"Hq": "num_attention_heads", "Hk": "num_key_value_heads", "D": "head_dim"}
    for name, shape in SHAPES.items():
        config = random.CONFIGS[name]
        latent = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0)
        config = {"head_dim": latent or config["hidden_size"] // config["num_attention_heads"], **config}
        config.setdefault(
            "intermediate_size", config.get("shared_expert_intermediate_size")
        )  # no layer has an MLP alone
        assert {k: getattr(shape, k) for k in names} == {k: config[v] for k, v in names.items()}, name
        counts = (config.get(name) for name in ("num_experts", "n_routed_experts", "num_local_experts"))
        experts = next((count for count in counts if count), 0)
        assert (shape.E, shape.top_k) == (experts, config.get("num_experts_per_tok", 0)), name


def test_verify_reports_a_long_prompt_and_goes_on(capsys, model, tmp_path):
    (tmp_path / "p.txt").write_text("short\n" + "long " * 100 + "\n")
    code, out, err = run(
        capsys, "verify", "--model", model, "--prompts", tmp_path / "p.txt", "--max-new-tokens", 3, "--ignore-eos"
    )
    assert code == 1 and "NOT VERIFIED: 1 of 2 prompts was not verified: " in out and "0 of 3 log" in out
    assert err.startswith(f"vexact verify: {tmp_path / 'p.txt'}:2: ") and "499 tokens" in err and err.count("\n") == 1


# Lines whose model nothing can load: what is wrong beside it is said before anybody tries.
UNREAD = [
    ["verify", "--model", "EMPTYDIR"],
    ["verify", "--config", "qwen3-8b"],
    ["chat", "EMPTYDIR"],
    ["serve", "EMPTYDIR"],
]


@pytest.mark.parametrize(
    "argv,message",
    [
        (["verify", "--model", "/nowhere/at/all"], "--model: '/nowhere/at/all': no such file or directory"),
        (["verify", "--model", "MODEL", "--prompts", "missing.txt"], "missing.txt: No such file"),
        (["verify", "--model", "MODEL", "--prompts", "BAD"], "bad.jsonl:2: not JSON"),
        (["verify", "--model", "MODEL", "--prompts", "EMPTY"], "empty.txt: no prompt in it"),
        (["verify", "--model", "MODEL", "--temperature", "nan"], "--temperature: got nan, expected 0 (greedy)"),
        (["verify", "--model", "MODEL", "--temperature", "-1"], "--temperature: got -1.0, expected"),
        (["verify", "--model", "MODEL", "--top-p", "0"], "--top-p: got 0.0, expected"),
        (["verify", "--model", "MODEL", "--device", "gpu"], "--device: got 'gpu'"),
        (["verify", "--model", "MODEL", "--json", "/nowhere/v.json"], "/nowhere/v.json: cannot be written"),
        (["verify", "--model", "EMPTYDIR", "--random-weights"], "empty"),
        (
            ["verify", "--model", "MODEL", "--samples", "5000"],
            "--samples: got 5000, expected an integer from 1 to 4096",
        ),
        *(([*line, "--kv-segment", "7"], "--kv-segment: got 7, expected None or a multiple of 64") for line in UNREAD),
        (
            ["verify", "--model", "MODEL", "--dtype", "fp16", "--device", "cpu"],
            "--dtype: got 'float16', expected one of bfloat16, float32 on a CPU",
        ),
        *(
            ([*line, "--warm", "--no-prefix-cache"], "--warm: got True, but the configuration has no")
            for line in UNREAD[:2]
        ),
        *(([*line, "--warm", "--lengths", "3,16"], "--warm: no prompt fills a page") for line in UNREAD[:2]),
        (
            ["verify", "--model", "MODEL", "--prompts", "SHORT", "--warm"],
            "--warm: no prompt fills a page that the prefix cache could keep: the longest has 5 tokens",
        ),
        (["verify", "--model", "MODEL", "--draft-sources", "text"], "--draft-sources: expected --speculation with it"),
        (["verify", "--model", "MODEL", "--mtp"], "--mtp: expected --speculation with it"),
        (["verify", "--model", "MODEL", "--speculation", "4", "--draft-model", ""], "--draft-model: got '', expected"),
        (
            ["verify", "--model", "MODEL", "--speculation", "65"],
            "--speculation: got 65, expected an integer from 1 to 64",
        ),
        (
            ["verify", "--model", "MODEL", "--speculation", "4", "--draft-sources", "text,mtp"],
            "--draft-sources: got ['text', 'mtp'], expected some of given, answers, samples, text",
        ),
        (["verify", "--model", "MODEL", "--stock-prompts", "1"], "--stock-prompts: expected --stock with it"),
        (["verify", "--model", "MODEL", "--limit", "1"], "--limit: expected --prompts with it"),
        (["verify", "--model", "MODEL", "--no-chat"], "--chat: expected --prompts with it"),
        (
            ["verify", "--model", "MODEL", "--prompts", "BAD", "--lengths", "3"],
            "--lengths: not together with --prompts",
        ),
        (["verify", "--model", "MODEL", "--prompts", "BAD", "--num-prompts", "8"], "--num-prompts: not together"),
        (
            ["verify", "--model", "MODEL", "--device", "cpu", "--gpu-memory-utilization", "0.5"],
            "--gpu-memory-utilization: expected a GPU with it",
        ),
        (["serve", "MODEL", "--max-restarts", "1"], "--max-restarts: expected --replicas with it"),
        (["serve", "MODEL", "--ray"], "--ray: expected --replicas with it"),
        (
            ["verify", "--model", "MODEL", "--nodes", "2"],
            "--nodes: got 2, expected a divisor of pipeline",
        ),
        (["serve", "MODEL", "--port", "70000"], "--port: got 70000, expected a number from 0"),
        (["demo", "--plot", "/nowhere/d.svg"], "/nowhere/d.svg: cannot be written"),
        (["chat", "/nowhere"], "MODEL: '/nowhere': no such file or directory"),
        (["chat", "--model", "/nowhere"], "MODEL: '/nowhere': no such file or directory"),  # as other commands take it
        (["serve", "--model=/nowhere", "--port", "0"], "MODEL: '/nowhere': no such file or directory"),
        (["recipe", "report", "/nowhere.jsonl"], "recipe: /nowhere.jsonl: No such file or directory"),
        (["doctor", "--rows", "8"], "--rows: expected --admit with it"),
        (["doctor", "--admit", "--shapes", "8x8", "--device", "cpu"], "--device: not together with --admit"),
        (["generate", "--model", "MODEL", "--json", "/nowhere/g.json", "x"], "/nowhere/g.json: cannot be written"),
        (["generate", "--model", "MODEL"], "expected either PROMPT"),
        (["generate", "--model", "MODEL", "  "], "the prompt is empty"),
        (["generate", "--model", "MODEL", "--prompts", "BAD"], "bad.jsonl:2"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, model, tmp_path, argv, message):
    (tmp_path / "bad.jsonl").write_text('"ok"\n{"prompt": \n')
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "short.txt").write_text("hello\n")
    (tmp_path / "empty").mkdir()
    names = {"MODEL": model, "BAD": "bad.jsonl", "EMPTY": "empty.txt", "SHORT": "short.txt", "EMPTYDIR": "empty"}
    argv = [str(tmp_path / names[a]) if a in names and a != "MODEL" else names.get(a, a) for a in argv]
    code, out, err = run(capsys, *argv)
    assert code == 2 and message in err and err.startswith(f"vexact {argv[0]}: ") and err.count("\n") == 1, err
    assert not err.startswith(f"vexact {argv[0]}: {argv[0]}: ")
    assert out == ""


def test_a_failure_beside_equal_log_probabilities_is_the_verdict(capsys, model, monkeypatch, tmp_path):
    """The twin that must fail in each way there is: terminal, JSON, HTML and exit code say the same."""
    honest, rescored = verify._in_batches, verify.rescore

    def other_batches(*args):
        found = honest(*args)
        return dataclasses.replace(found, mismatched_tokens=5) if args[-1] == 2 or breaks == "warm" else found

    def broken(*args, **kwargs):
        return dataclasses.replace(rescored(*args, **kwargs), nonfinite=("lm_head.weight",))

    options = ["--num-prompts", 2, "--lengths", "40,41", "--max-new-tokens", 4, "--ignore-eos"]
    files = ["--json", tmp_path / "v.json", "--html", tmp_path / "v.html"]
    for breaks, extra, said in (
        ("batches", ["--batch-sizes", "1,2"], "rollout with 2 prompts at a time: 5 of 8 tokens differ"),
        ("warm", ["--warm"], "warm cache: 5 of 8 tokens differ"),
        ("gradients", [], "gradients: NOT FINITE: lm_head.weight"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(verify, "rescore", broken) if breaks == "gradients" else None
            patch.setattr(verify, "_in_batches", other_batches) if breaks != "gradients" else None
            code, out, _ = run(capsys, "verify", "--model", model, *options, *extra, *files)
        record, page = json.loads((tmp_path / "v.json").read_text()), (tmp_path / "v.html").read_text()
        assert code == 1 and f"NOT EQUAL: {said}" in out.splitlines(), breaks
        assert "0 of 8 log-probabilities differ" not in out
        assert (record["equal"], record["failures"], record["verdict"]) == (False, [said], f"NOT EQUAL: {said}")
        assert record["aligned"]["mismatched_tokens"] == 0
        assert 'class="card verdict differ"' in page and said in page and 'verdict equal"' not in page


def test_a_warm_cache_that_kept_nothing_is_a_failure_and_not_the_loss_of_the_run(capsys, model):
    options = ["--num-prompts", 12, "--lengths", "40", "--max-new-tokens", 4, "--ignore-eos", "--warm"]
    few = ["--num-pages", 4, "--page-size", 16, "--max-num-seqs", 1]
    code, out, _ = run(capsys, "verify", "--model", model, *options, *few)
    assert code == 1 and "NOT EQUAL: warm cache: none of the prompts was in it any more" in out
    assert "vexact engine -> patched HF, packed" in out


def test_prompts_that_were_refused_do_not_pass(capsys, model, tmp_path):
    """Equal bits of the others say nothing of them: the exit code, the verdict, the JSON and the page do."""
    (tmp_path / "p.jsonl").write_text('{"prompt": "hello"}\n' + json.dumps({"prompt": "x" * 400}) + "\n")
    files = ["--json", tmp_path / "v.json", "--html", tmp_path / "v.html"]
    options = ["--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 4, "--ignore-eos"]
    code, out, err = run(capsys, "verify", "--model", model, *options, *files)
    record, page = json.loads((tmp_path / "v.json").read_text()), (tmp_path / "v.html").read_text()
    (error,) = record["errors"]
    said = f"1 of 2 prompts was not verified: {error}"
    verdict = f"NOT VERIFIED: {said}. Of the others, 0 of 4 log-probabilities differ (max |diff| 0.0, KL 0.0)"
    assert code == 1 and verdict in out.splitlines() and err == f"vexact verify: {error}\n"
    assert (record["equal"], record["failures"], record["verdict"]) == (False, [said], verdict)
    assert (record["prompts"], record["unverified"], record["aligned"]["mismatched_tokens"]) == (2, 1, 0)
    assert 'class="card verdict differ"' in page and 'verdict equal"' not in page and "1 of 2 prompts was not" in page
    assert '<td>every prompt is verified</td><td class="bad">FAILS</td>' in page
    code, out, err = run(capsys, "verify", "--model", model, *options, "--limit", 1, *files)
    record, page = json.loads((tmp_path / "v.json").read_text()), (tmp_path / "v.html").read_text()
    assert (code, err, record["equal"], record["unverified"]) == (0, "", True, 0) and 'verdict equal"' in page


def test_the_demo_refuses_a_dtype_before_it_fetches_anything(capsys, monkeypatch):
    monkeypatch.setattr(demo, "fetch_smollm2", lambda: pytest.fail("fetched"))
    code, _, err = run(capsys, "demo", "--dtype", "fp16", "--device", "cpu")
    assert code == 2 and err.startswith("vexact demo: --dtype: got 'float16', expected one of")


@pytest.mark.parametrize("found,said", [("5.24.1", "5.24.1"), ("5.25.0", "5.25.0: transformers 5.25.0 is newer than")])
def test_doctor_says_that_no_test_has_seen_this_transformers(monkeypatch, found, said):
    monkeypatch.setattr(doctor, "PACKAGES", ("transformers",))
    monkeypatch.setattr(doctor.metadata, "version", lambda name: found)
    assert doctor.describe()["transformers"][: len(said) + 1].rstrip() == said


def test_doctor_without_the_gpu_it_was_to_check_says_nothing_else(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = run(capsys, "doctor", "--device", "cuda")
    assert (code, out) == (2, "") and err == "vexact doctor: --device: got 'cuda', but torch sees 0 CUDA devices\n"
    code, out, err = run(capsys, "doctor", "--admit", "--shapes", "8x8")
    assert (code, out) == (2, "") and err.startswith("vexact doctor: --admit: kernels are verified on the GPU that")


def test_a_mistyped_path_is_answered_at_once(capsys, monkeypatch, tmp_path):
    """No port listens there; the loader itself would ask five times, and sleep in between for half a minute."""
    commands = ["verify", "--model"], ["verify", "--random-weights", "--model"], ["generate", "x", "--model"]
    code = (
        "import sys, time; from vexact_engine import cli; import torch, transformers, huggingface_hub\n"
        f"for argv in {commands}:\n"
        "    slept = []; time.sleep = slept.append; code = cli.main([*argv, 'mdoels/mine']); print(code, sum(slept))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    env |= {"HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=600, cwd=tmp_path
    )
    found = [line.split() for line in done.stdout.splitlines()]
    assert len(found) == len(commands), done.stdout + done.stderr
    assert all(exit_code == "2" and float(seconds) < 3 for exit_code, seconds in found), done.stdout + done.stderr
    told = "--model: 'mdoels/mine': no such file or directory, and the Hub cannot be asked"
    assert sum(told in line for line in done.stderr.splitlines()) == len(commands), done.stderr


def test_progress_is_plain_lines_without_a_terminal(capsys, model):
    code = cli.main(["verify", "--model", model, "--device", "cpu", "--num-prompts", "2", "--max-new-tokens", "3"])
    out, err = capsys.readouterr()
    lines = [re.sub(r"^\[ *[\d.]+ s\] ", "", line) for line in err.splitlines()]
    assert code == 0 and lines == ["load", "rollout", "re-score"]
    assert "load" not in out


def test_the_device_is_the_gpu_where_there_is_one(monkeypatch):
    for seen in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda seen=seen: seen)
        assert cli.options.device("auto").type == ("cuda" if seen else "cpu")
    _, commands = cli._parser()
    for name in ("demo", "verify", "bisect", "generate", "chat", "serve", "recipe"):
        (action,) = (a for a in commands.choices[name]._actions if a.dest == "device")
        assert action.default == "auto", name


def test_json_to_standard_output_is_alone_there(capsys, model):
    options = ["--model", model, "--num-prompts", 2, "--max-new-tokens", 3, "--json", "-"]
    code, out, err = run(capsys, "verify", *options)
    assert code == 0 and json.loads(out)["schema"] == "vexact.verify" and "log-probabilities differ" in err
    code, out, _ = run(capsys, "doctor", "--device", "cpu", "--json", "-")
    assert code == 0 and json.loads(out)["schema"] == "vexact.doctor"


def every_option():
    _, commands = cli._parser()
    for name, command in commands.choices.items():
        for action in command._actions:
            yield pytest.param(name, action, id=f"{name}-{action.dest}")


@pytest.mark.parametrize("name,action", list(every_option()))
def test_every_option_says_what_it_is_and_its_default(name, action):
    assert action.help and (action.option_strings or action.metavar)
    if action.option_strings and action.nargs != 0 and action.dest != "help" and not action.required:
        default = action.default
        shown = [] if isinstance(default, list) and default else [default]
        words = {None: "(", "auto": "auto (default)", "bfloat16": "bf16 (default)"}
        for value in shown if default != [] else [None]:
            word = words.get(value, str(value)) if not isinstance(value, bool) else ""
            assert word in action.help or action.dest in ("json", "html", "model", "config", "prompts"), action.help


def test_every_command_has_examples_that_it_takes():
    _, commands = cli._parser()
    for name, command in commands.choices.items():
        lines = command.format_help().split("examples:\n")[1].splitlines()
        assert lines, name
        for line in lines:
            words = shlex.split(re.sub(r" [<>] \S+", "", line.strip().removeprefix("VEXACT_API_KEY=... ")))
            assert words[:2] == ["vexact", name]
            parser, _ = cli._parser()
            assert parser.parse_args(cli._words(words[1:])).command == name


def test_debug_shows_where(model):
    with pytest.raises(ValueError, match="No such file"):
        cli.main(["verify", "--model", model, "--prompts", "missing.txt", "--debug"])


def test_what_can_be_written_is_asked_of_a_file_that_is_there(monkeypatch, tmp_path):
    """Nobody but root may make files in /dev, and everybody writes to those there."""
    closed, kept = tmp_path / "closed", tmp_path / "closed" / "kept.json"
    closed.mkdir()
    kept.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(closed))
    cli.options.check_writable(str(kept), None, "-", os.devnull)
    with pytest.raises(OSError, match=r"new\.json: cannot be written"):
        cli.options.check_writable(str(closed / "new.json"))
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(kept))
    cli.options.check_writable(str(closed / "new.json"))
    with pytest.raises(OSError, match=r"kept\.json: cannot be written"):
        cli.options.check_writable(str(kept))


def test_ctrl_c_is_130_without_a_traceback(capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo", interrupted)
    code, out, err = run(capsys, "demo")
    assert (code, out, err) == (130, "", "vexact demo: interrupted\n")


def test_sigterm_ends_what_a_command_has_begun(capsys, monkeypatch):
    ended = []

    def working(*args, **kwargs):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            pytest.fail("it went on")
        finally:
            ended.append(True)

    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        monkeypatch.setattr(demo, "demo", working)
        with pytest.raises(SystemExit) as exited:
            run(capsys, "demo")
        assert (exited.value.code, ended, signal.getsignal(signal.SIGTERM)) == (143, [True], signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_generate_streams_the_text_that_the_engine_gives(capsys, model):
    options = ["--model", model, "--max-new-tokens", 12, "--seed", 3]
    code, streamed, _ = run(capsys, "generate", *options, "hello")
    assert code == 0
    code, whole, _ = run(capsys, "generate", *options, "--no-stream", "hello")
    assert code == 0 and streamed.strip() == whole.strip() != ""


def test_an_answer_of_no_text_is_an_empty_line(capsys, model):
    options = ["--model", model, "--max-new-tokens", 1, "--temperature", 0, "--no-chat", "--no-stream"]
    _, out, _ = run(capsys, "generate", *options, "--json", "-", "hello")
    (record,) = json.loads(out)["completions"]
    code, out, _ = run(capsys, "generate", *options, "--stop", record["text"], "hello")
    assert (code, out) == (0, "\n"), "its token's number is no text"


def test_generate_writes_json(capsys, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO("hi"))
    options = ["--model", model, "--max-new-tokens", 5, "--json", "-", "--samples", 2, "--temperature", 0.7]
    options += ["--ignore-eos"]
    code, out, _ = run(capsys, "generate", *options, "-")
    document = json.loads(out)
    records = document["completions"]
    assert document["schema"] == "vexact.generate" and document["model"] == model
    assert code == 0 and [r["index"] for r in records] == [0, 1]
    wrapped = byte_tokenizer()("[hi]")["input_ids"]
    for r in records:
        assert r["prompt_token_ids"] == wrapped, "the template is applied where there is one"
        assert len(r["token_ids"]) == len(r["logprobs"]) == len(r["raw_logprobs"]) == 5
        assert r["logprobs"] != r["raw_logprobs"] and max(r["logprobs"]) < 0
    code, out, _ = run(capsys, "generate", *options, "--no-chat", "hi")
    assert json.loads(out)["completions"][0]["prompt_token_ids"] == byte_tokenizer()("hi")["input_ids"]


def test_generate_does_not_let_one_bad_prompt_stop_the_others(capsys, model, tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps([WORDS + 5]) + "\n[5, 6]\n")
    code, out, err = run(capsys, "generate", "--model", model, "--prompts", tmp_path / "p.jsonl", "--max-new-tokens", 3)
    assert code == 2 and "p.jsonl:1" in err and "p.jsonl:2" in out


def test_the_demo_is_the_main_job_on_another_model(capsys, model, monkeypatch, tmp_path):
    """All of the demo but the download, at a tiny size: its exit code, its verdict, its keys."""
    monkeypatch.setattr(demo, "fetch_smollm2", lambda: model)
    texts = [("x" * (5 + 9 * (i % 4)), 10) for i in range(8)]
    monkeypatch.setattr(demo, "PROMPTS", tuple((f"one beginning {text}", n) for text, n in texts))
    tight = EngineConfig(page_size=4, num_pages=18, max_num_seqs=4, max_num_batched_tokens=12, reserve=0.0)
    monkeypatch.setattr(demo, "CONFIG", tight)
    monkeypatch.setattr(demo, "SHOWN", (1, 5))
    code, out, _ = run(capsys, "demo", "--json", tmp_path / "d.json")
    record = json.loads((tmp_path / "d.json").read_text())
    tokens = record["aligned"]["tokens"]
    assert code == 0 and f"0 of {tokens} log-probabilities differ (max |diff| 0.0, KL 0.0)" in out.splitlines()
    assert set(record["stock_by_dtype"]) == {"bfloat16", "float32"} and tokens > 20
    assert record["statistics"]["preemptions"] > 0 and record["prompts"] == 8
    assert "its weights come from a 4-bit GGUF file" in out and "8 prompts at temperature 1" in out
    assert len(record["shown_samples"]) == 2 and record["shown"]["mismatched_tokens"] == 0 < record["shown"]["tokens"]
    assert out.count("\n> one beginning ") == 2 and record["settings"]["sampling"]["temperature"] == 1.0
    monkeypatch.setattr(demo, "CONFIG", EngineConfig(num_pages=400))
    code, _, err = run(capsys, "demo", "--no-stock")
    assert code == 2 and "preemptions" in err, "a run under no pressure proves less, and says so"


def test_the_demo_prompts_are_what_they_are_said_to_be():
    assert len(demo.PROMPTS) >= 16 and len(set(demo.PROMPTS)) == len(demo.PROMPTS)
    assert demo.CONFIG.max_num_seqs < len(demo.PROMPTS) and max(demo.SHOWN) < len(demo.PROMPTS)
    words = sorted(len(text.split()) for text, _ in demo.PROMPTS)
    assert words[0] < 5 and words[-1] > demo.CONFIG.max_num_batched_tokens, "the longest does not fit into one step"


def test_doctor_checks_what_is_here(capsys, tmp_path):
    code, out, _ = run(capsys, "doctor", "--device", "cpu", "--json", tmp_path / "d.json")
    record = json.loads((tmp_path / "d.json").read_text())
    assert code == 0 and "checks hold" in out and "instruction sets" in out
    assert f"  commit              {machine.commit() or 'unknown: not a git checkout'}\n" in out
    rooms = {name for check in record["checks"] for name in check["room"].split(" + ")}
    assert rooms == {*record["numerics"]["cpu"]["rooms"], "ranks"}, "a check for every room and for ranks, and no other"


def test_doctor_exits_1_where_a_check_fails(capsys, monkeypatch):
    def batch_dependent(device, dtype):  # the twin that must fail: a mean over the batch in every row
        x = torch.randn(5, 8, dtype=dtype)
        doctor.check_rows(lambda x: x + x.mean(0), x)

    monkeypatch.setattr(doctor, "CHECKS", (("toy", "a row alone", batch_dependent), doctor.CHECKS[0]))
    code, out, _ = run(capsys, "doctor", "--device", "cpu")
    assert code == 1 and "FAILED  toy" in out and "AssertionError: a row alone" in out and "2 of 4 checks" in out


def test_doctor_admits_what_a_model_needs(capsys, monkeypatch, model, tmp_path):
    import vexact_ops as vx
    from vexact_ops._core.admit import Candidate, Decision, Verdict
    from vexact_ops.patch.admit import Admitted, Matrix

    verdicts = (
        Verdict("fast", 0, 2.0),
        Verdict("slow", 0, 3.0),
        Verdict("split", 7),
        Verdict("none", None, error="no"),
    )
    asked = []

    def admit(needs, **options):
        asked.append((needs, options))
        found = Admitted()
        found.append(Decision("linear N=8", Candidate("fast", None), "the fastest of 2", verdicts, seconds=0.5))
        found.seconds = 0.75
        return found

    monkeypatch.setattr(vx, "admit", admit)
    monkeypatch.setattr(cli.options, "visible_device", lambda name: None)
    options = ["--model", model, "--shapes", "6144x4096", "--rows", 16, "--training", "--json", tmp_path / "a.json"]
    code, out, _ = run(capsys, "doctor", "--admit", *options)
    assert code == 0 and out.splitlines() == [
        "linear N=8: fast  (0.50 s)",
        "refused for linear N=8: split: 7 elements differ",
        "refused for linear N=8: none: no",
        "",
        "1 kinds of calls, 4 kernels verified, 2 refused (0.8 s)",
    ]
    ((needs, given),) = asked
    config = json.loads((Path(model) / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    assert {Matrix(6144, 4096), Matrix(2 * inner, hidden, gated=True), Matrix(hidden, inner)} <= set(needs.matrices)
    assert Matrix(config["vocab_size"], hidden, wide=True, head=True) in needs.matrices and needs.hidden == hidden
    assert needs.attention[0].heads == config["num_attention_heads"]
    assert (given["rows"], given["training_rows"], given["dtype"]) == (16, [8192], torch.bfloat16)
    assert given["progress"] is False  # --quiet
    record = json.loads((tmp_path / "a.json").read_text())["admissions"]
    assert record[0]["chosen"] == "fast" and record[0]["why"] == "the fastest of 2"
    assert record[0]["verdicts"][2] == {"candidate": "split", "different": 7, "us": None, "error": None}
    code, _, err = run(capsys, "doctor", "--admit")
    assert code == 2 and "--model DIR or --shapes" in err
    code, _, err = run(capsys, "doctor", "--shapes", "8x8")
    assert code == 2 and "--admit" in err


def test_help_needs_no_torch_and_a_closed_pipe_no_traceback(model):
    code = "import sys; from vexact_engine import cli\ntry: cli.main(['verify', '--help'])\nexcept SystemExit: pass\n"
    code += "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0 and "--kv-segment" in done.stdout, done.stderr


def test_prompt_files_reach_the_model_as_they_are(model, tmp_path):
    (tmp_path / "p.txt").write_text("héllo\n")
    ids = encode(read_prompts(tmp_path / "p.txt"), byte_tokenizer())
    assert byte_tokenizer().decode(ids[0]) == "héllo"
