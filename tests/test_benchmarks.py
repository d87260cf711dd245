"""The benchmarks: bits come before times, records hold what a figure needs, tables and plots are made from them."""

import csv
import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
import types

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from benchmarks import __main__, checks, harness, options, output, peers, report
from benchmarks.shapes import SHAPES

FIELDS = {"room", "case", "backend", "us", "gbps", "tflops", "roof_us", "stock_us", "ratio_to_stock", "bits_equal"}
FIELDS |= {"gpu", "torch", "triton", "commit", "date", "p10_us", "p90_us", "rounds", "rows_alone", "command"}


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    monkeypatch.setattr(harness, "ceilings", lambda device: (1e10, 1e11))


def run(*args: str) -> int:
    return __main__.main(["mean", "--device", "cpu", "--rows", "1,4", "--dtype", "float32", "--repeats", "2", *args])


def test_records_hold_what_a_figure_needs(tmp_path, capsys):
    assert run("--lines", str(tmp_path / "r.jsonl"), "--plot", str(tmp_path)) == 0
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {(r["case"].split()[1], r["backend"]) for r in records} == {
        (count, who) for count in ("R=1", "R=4") for who in ("vexact", "torch")
    }
    for r in records:
        assert set(r) >= FIELDS
        assert r["us"] > 0 and r["roof_us"] > 0
        assert r["p10_us"] <= r["us"] <= r["p90_us"] and r["rounds"] == 2
        many = "R=4" in r["case"]  # a row that is alone has no neighbours
        assert r["rows_alone"] == ({"differ": 0, "of": 3} if many else None)
        assert r["bits_equal"] is (True if r["backend"] == "vexact" or many else None)
        assert ("over" in r) == (r["backend"] == "vexact")
        ratio, rounding = r["us"] / r["stock_us"], 5e-4  # of all three figures
        most = rounding * (1.01 + ratio / r["us"] + ratio / r["stock_us"])
        assert r["ratio_to_stock"] == pytest.approx(ratio, rel=0, abs=most)
    assert (tmp_path / "mean.svg").read_text().startswith("<?xml")
    assert "equal" in capsys.readouterr().out


def test_json_is_one_document_of_the_kind_that_every_command_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VEXACT_COMMIT", "abc1234")
    assert run("--json", "-") == 0
    on_stdout = json.loads(capsys.readouterr().out)
    assert run("--json", str(tmp_path / "r.json")) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    for document in (found, on_stdout):
        assert (document["schema"], document["schema_version"]) == ("vexact.bench", 1)
        assert document["date"].startswith("20") and document["commit"] == "abc1234" and document["failures"] == []
        assert len(document["records"]) == 4
    assert found["command"].startswith("vexact bench mean --device cpu --rows 1,4 --dtype float32 --repeats 2 --json ")


def test_a_document_is_written_of_a_run_that_ends_early(tmp_path, monkeypatch):
    real, seen = harness.measure, []

    def measure(*args, **options):
        if seen:
            raise KeyboardInterrupt
        seen.append(1)
        return real(*args, **options)

    monkeypatch.setattr(harness, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run("--json", str(tmp_path / "r.json"))
    assert len(json.loads((tmp_path / "r.json").read_text())["records"]) == 2


def test_csv_has_a_column_for_every_field(tmp_path):
    assert run("--csv", str(tmp_path / "r.csv"), "--lines", str(tmp_path / "r.jsonl")) == 0
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert [float(row["us"]) for row in rows] == [r["us"] for r in records]
    assert json.loads(rows[0]["over.torch"]) == records[0]["over"]["torch"]
    assert rows[2]["rows_alone.differ"] == "0" and rows[0]["rows_alone.of"] == ""
    plain = {name for r in records for name, value in r.items() if not isinstance(value, dict)}
    assert plain <= set(rows[0])


def test_the_command_of_a_record_measures_that_case_again(tmp_path):
    assert run("--lines", str(tmp_path / "r.jsonl"), "--peers", "torch") == 0
    last = json.loads((tmp_path / "r.jsonl").read_text().splitlines()[-1])
    words = shlex.split(last["command"])
    assert words[:3] == ["vexact", "bench", "mean"]
    assert __main__.main([*words[2:], "--lines", str(tmp_path / "again.jsonl")]) == 0
    again = [json.loads(line) for line in (tmp_path / "again.jsonl").read_text().splitlines()]
    assert {r["case"] for r in again} == {last["case"]} and again[-1]["command"] == last["command"]
    assert run("--case", "no such case") == 1


def test_what_is_saved_is_of_a_commit(tmp_path, monkeypatch):
    saved = tmp_path / "saved.jsonl"
    monkeypatch.setattr(harness, "results_file", lambda device: saved)
    for commit, what in (("abc1234+", "files that were changed since"), (None, "no commit")):
        monkeypatch.setattr(output, "commit", lambda commit=commit: commit)
        with pytest.raises(ValueError, match=f"--save: this tree has {what}"):
            run("--save")
    assert not saved.exists()
    monkeypatch.setattr(output, "commit", lambda: "abc1234")
    assert run("--save") == 0 and len(report.load(saved)) == 4


def test_a_case_whose_bits_differ_is_not_timed(monkeypatch, tmp_path, capsys):
    from benchmarks.ops import mean

    real = mean.cases

    def broken(*args):
        for case in real(*args):
            case.bits = lambda x: (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]))
            yield case

    monkeypatch.setattr(mean, "cases", broken)
    assert run("--lines", str(tmp_path / "r.jsonl"), "--json", str(tmp_path / "r.json")) == 1
    assert not (tmp_path / "r.jsonl").exists()
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["records"] == [] and len(document["failures"]) == 2
    assert "1 elements differ; nothing was timed" in capsys.readouterr().err


def test_peers(capsys):
    assert run("--peers", "torch") == 0
    assert run("--peers", "nobody") == 1
    assert "--peers: nobody: in none of these cases" in capsys.readouterr().err
    assert list(peers.installed(gone=lambda: __import__("no_such_library"), here=lambda: max)) == ["here"]
    assert "peer gone is left out: ModuleNotFoundError" in capsys.readouterr().err


def test_a_peer_that_raises_is_left_out_and_ours_is_not():
    def fail(x):
        raise RuntimeError("cannot")

    case = next(iter(__import__("benchmarks.ops.mean", fromlist=["cases"]).cases(*_mean())))
    case.providers["peer"] = fail
    assert {r["backend"] for r in harness.measure(case, "cpu", repeats=1)} == {"vexact", "torch"}
    case.providers["vexact"] = fail
    with pytest.raises(RuntimeError, match="cannot"):
        harness.measure(case, "cpu", repeats=1)


def _mean():
    return SHAPES["smollm2-135m"], [2], torch.float32, "cpu"


def alike(**providers):
    """A case of eight rows of four numbers; ours and torch double them."""
    double = {"vexact": lambda x: 2 * x, "torch": lambda x: 2 * x}
    return harness.Case(
        "mean",
        "thing R=8 float32",
        lambda: (harness.random(8, 4, dtype=torch.float32, device="cpu"),),
        double | providers,
        lambda x: (x, x),
        bytes=128,
        alone=checks.row_alone(0),
        reference=lambda x: 2 * x,
    )


def test_rows_of_a_peer_that_depend_on_their_neighbours_are_noticed():
    def in_place(x):
        return x.mul_(2)

    def neighbours(x):
        return 2 * x + (x.shape[0] - 1) * 1e-3

    found = {r["backend"]: r for r in harness.measure(alike(good=in_place, bad=neighbours), "cpu", repeats=1)}
    assert found["good"]["rows_alone"] == {"differ": 0, "of": 12} and found["good"]["bits_equal"]
    assert found["bad"]["rows_alone"] == {"differ": 12, "of": 12} and found["bad"]["bits_equal"] is False
    assert harness.line(found["bad"]).endswith("differ") and set(found["vexact"]["over"]) == {"torch", "good", "bad"}
    with pytest.raises(AssertionError, match="12 elements differ; nothing was timed"):
        harness.measure(alike(vexact=neighbours), "cpu", repeats=1)


def test_a_peer_that_gives_something_else_is_timed_and_not_compared(capsys):
    strange = {"none": lambda x: (2 * x, None), "short": lambda x: 2 * x[:, :1], "fails": lambda x: 1 / 0}
    found = {r["backend"]: r for r in harness.measure(alike(**strange), "cpu", repeats=1, refcheck=True)}
    assert set(found) == {"vexact", "torch", "none", "short"}
    assert found["none"]["bits_equal"] and found["none"]["error"]["rms"] == 0
    assert "error" not in found["short"]
    assert "error" in found["vexact"] and found["vexact"]["us"] > 0
    said = capsys.readouterr().err
    assert "mean: peer fails: ZeroDivisionError" in said
    assert "mean: peer short: ValueError: gives (8, 1), expected (8, 4)" in said


def test_refcheck_compares_with_float64(monkeypatch, tmp_path, capsys):
    exact, wrong = (
        harness.measure(alike(**p), "cpu", repeats=1, refcheck=True) for p in ({}, {"torch": lambda x: 2.5 * x})
    )
    assert exact[0]["error"] == {"rms": 0.0, "max": 0.0, "most": pytest.approx(0.0, abs=1e-7), "accurate": True}
    assert wrong[1]["error"]["rms"] == pytest.approx(0.25) and wrong[1]["error"]["max"] == pytest.approx(0.25)
    from benchmarks.ops import mean

    monkeypatch.setattr(mean, "cases", lambda *args: iter([alike(vexact=lambda x: 2.001 * x)]))
    assert run("--refcheck", "--json", str(tmp_path / "r.json")) == 1
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["records"][0]["error"]["rms"] == pytest.approx(5e-4, rel=1e-3)
    assert document["failures"] == ["mean thing R=8 float32: vexact is farther from float64 than it may be"]
    assert "EXPECTED AT MOST" in capsys.readouterr().out
    assert run() == 0 and "float64" not in capsys.readouterr().out


def test_spread_is_of_the_rounds():
    times = {"vexact": [1.0, 2.0, 3.0, 4.0, 5.0], "torch": [2.0, 2.0, 3.0, 2.0, 2.0], "vexact-two": [1.0] * 5}
    assert harness.over(times["vexact"], times) == {"torch": [0.7, 1.0, 2.3]}
    assert [harness.quantile([5.0, 1.0, 3.0], share) for share in (0.0, 0.25, 0.5, 1.0)] == [1.0, 2.0, 3.0, 5.0]


@pytest.mark.parametrize(
    "room,sizes",
    [
        ("linear", "--n 24 --k 40"),
        ("grouped_linear", "--n 24 --k 40 --experts 4 --top-k 2"),
        ("fused_moe", "--n 24 --k 40 --experts 4 --top-k 2"),
        ("linear_cross_entropy", "--n 50 --k 40"),
        ("attention", "--heads 2 --kv-heads 1 --head-dim 16"),
        ("rope", "--heads 2 --kv-heads 1 --head-dim 16"),
    ],
    ids=lambda text: text.split()[0],
)
def test_free_shapes_beside_float64(room, sizes, tmp_path):
    where = tmp_path / "r.json"
    common = ["--device", "cpu", "--rows", "3", "--dtype", "float32", "--repeats", "1", "--refcheck"]
    assert __main__.main([room, *sizes.split(), *common, "--json", str(where)]) == 0
    records = json.loads(where.read_text())["records"]
    name = ",".join(f"{k.strip('-').replace('-', '_')}={v}" for k, v in zip(*[iter(sizes.split())] * 2))
    assert records and all(name in r["case"] and sizes in r["command"] for r in records)
    if room != "attention":  # whose decode has no reference here: its bits are those of training
        assert any(r.get("error", {}).get("accurate") for r in records)


def test_every_room_takes_a_free_shape():
    fields = {field.name for field in dataclasses.fields(SHAPES["qwen3-8b"])}
    for room in options.ROOMS:
        free = options.module(room).FREE
        assert free and set(free) <= set(options.FREE) and set(free.values()) <= fields, room


@pytest.mark.parametrize(
    "text,said",
    [
        ("mean --n 8 --k 4", "--k: mean takes --n"),
        ("linear --n 8", "--k: linear of a free shape needs it"),
        ("linear --n 8 --k 0", "--k: got '0', expected a whole number of 1 or more"),
        ("linear --repeats 0", "--repeats: got '0', expected a whole number of 1 or more"),
        ("linear --prompt 3", "--prompt: linear does not read it"),
        ("linear --eager --device cpu", "--eager: expected a GPU with it"),
        ("all --latent", "--latent: all does not read it"),
        ("all --n 8", "--n: expected one room"),
        ("engine --refcheck", "--refcheck: engine does not read it"),
        ("engine --rate 3", "--rate: --workload fixed does not read it"),
        ("engine --workload mix --batch 3", "--batch: --workload mix does not read it"),
        ("memory --peers torch", "--peers: memory does not read it"),
        ("memory --rows random:3", "--rows: got 'random:3', expected numbers of tokens"),
        ("handover --dtype float32", "--dtype: handover does not read it"),
        ("rollout --layers 2", "--layers: rollout without --weights does not read it"),
        ("report --rows 3", "--rows: report does not read it"),
        ("linear --n 8 --k 8 --shape qwen3-8b", "--shape says all sizes already"),
        ("memory --n 8", "--n: memory does not read it"),
        ("linear --lengths 8", "--lengths: expected attention"),
        ("attention --lengths 8..4", "--lengths: got '8..4'"),
        ("mean --readme", "--readme: expected 'report'"),
        ("report --json out.json", "--json: expected a run: report measures nothing"),
        ("report --save", "--save: expected a run"),
        ("mean --json - --csv -", "--csv: standard output takes one document"),
        ("mean --peer-path nowhere", "--peer-path: got 'nowhere'"),
    ],
    ids=lambda text: text.split(":")[0],
)
def test_options_that_do_not_go_together_are_named(text, said, capsys):
    with pytest.raises(SystemExit):
        __main__.main(text.split())
    assert said in capsys.readouterr().err


def test_what_the_command_line_says_is_read_is_read():
    """No name of an option that is not there; and every one has a text with its default, unless it is a switch."""
    parser, reads = options.parser_of("vexact bench", __main__.__doc__)
    names = {action.dest for action in parser._actions}
    assert set().union(*reads.values(), options.OF_A_ROOM, options.OF_ALL) == names - {"help"}
    for action in parser._actions:
        assert action.help, action.dest
        if action.nargs != 0 and action.option_strings and action.dest not in ("json", "csv", "lines"):
            assert re.search(r"\(.+\)", action.help) and (action.metavar or action.choices), action.dest


def test_without_the_command_what_is_refused_is_a_line_too(tmp_path):
    line = [sys.executable, "-m", "benchmarks", "mean", "--device", "cpu", "--json", str(tmp_path / "no" / "r.json")]
    done = subprocess.run(line, capture_output=True, text=True, cwd=harness.ROOT, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("python -m benchmarks: --json: got ") and done.stderr.count("\n") == 1, done.stderr


def test_a_sweep_over_lengths(tmp_path):
    where = tmp_path / "r.jsonl"
    sizes = ["--heads", "2", "--kv-heads", "1", "--head-dim", "16"]
    args = ["attention", "--device", "cpu", *sizes, "--rows", "1,2", "--lengths", "16..128", "--dtype", "float32"]
    assert __main__.main([*args, "--repeats", "1", "--lines", str(where), "--plot", str(tmp_path)]) == 0
    found = report.load(where)
    assert {report.series(r["case"])[1] for r in found} == {16, 32, 64, 128}
    assert {r["case"].split(" page")[0] for r in found if "decode" in r["case"]} == {
        f"decode of {count} S={length}" for count in (1, 2) for length in (16, 32, 64, 128)
    }
    assert "time over keys" in (tmp_path / "attention-keys.svg").read_text()
    assert "time over rows" in (tmp_path / "attention-rows.svg").read_text()


def test_a_module_without_a_package_is_found_on_a_path(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "batch_invariant_ops", raising=False)
    monkeypatch.setenv(peers.PATH, "")  # and so what add_paths sets is gone afterwards
    monkeypatch.delenv(peers.PATH)
    (tmp_path / "batch_invariant_ops").mkdir()
    (tmp_path / "batch_invariant_ops" / "__init__.py").write_text("def matmul_persistent(a, b):\n    return a @ b\n")
    from benchmarks.ops import linear

    before = linear._others()
    peers.add_paths(str(tmp_path))
    after = linear._others()
    assert "batch_invariant_ops" not in before and "fixed-tile" in before
    assert "batch_invariant_ops" in after and "fixed-tile" not in after
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    assert after["batch_invariant_ops"](x, w).shape == (2, 4)
    assert "our stand-in" in peers.about("fixed-tile").label
    monkeypatch.delitem(sys.modules, "batch_invariant_ops")


@pytest.fixture
def flashinfer(monkeypatch):
    """Its own package is not here: a stand-in with the calls that are used, by the names and in the order of 0.7.2."""
    planned = []

    class Wrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
            assert kv_layout == "NHD" and not use_cuda_graph
            assert float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
            self.told = [use_tensor_cores]

        def run(self, q, paged_kv_cache, *, out=None):
            k_cache, v_cache = paged_kv_cache
            assert out.shape == q.shape and k_cache.shape == v_cache.shape
            return out.fill_(len(planned))

    class Decode(Wrapper):
        def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **dtypes):
            assert {t.dtype for t in (indptr, indices, last_page_len)} == {torch.int32}
            sizes = num_qo_heads, num_kv_heads, head_dim, page_size
            planned.append([*self.told, indptr.tolist(), indices.tolist(), last_page_len.tolist(), sizes, dtypes])

    class Prefill(Decode):
        def plan(self, qo_indptr, *of_decode, causal=False, **dtypes):
            self.told = [causal, qo_indptr.tolist()]
            super().plan(*of_decode, **dtypes)

    sampling = types.SimpleNamespace(
        softmax=lambda logits, temperature: torch.softmax(logits / temperature, -1),
        sampling_from_probs=lambda probs, *, seed, offset: (probs.argmax(-1), seed, offset),
        top_p_sampling_from_probs=lambda probs, top_p, *, seed, offset: (top_p, seed, offset),
        top_k_top_p_sampling_from_logits=lambda logits, top_k, top_p, *, seed, offset: ((top_k, top_p), seed, offset),
    )
    package = types.ModuleType("flashinfer")
    package.BatchDecodeWithPagedKVCacheWrapper = Decode
    package.BatchPrefillWithPagedKVCacheWrapper = Prefill
    package.sampling = sampling
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    return planned


def test_flashinfer_s_attention_is_planned_once(flashinfer):
    table, lens = torch.tensor([[3, 1, 9], [4, 2, 0]], dtype=torch.int32), torch.tensor([16, 17], dtype=torch.int32)
    cache, rows = torch.zeros(5, 8, 2, 16), torch.tensor([0, 1, 4], dtype=torch.int32)
    dtypes = {"q_data_type": torch.float32, "kv_data_type": torch.float32}
    pages = [[0, 2, 5], [3, 1, 4, 2, 0], [8, 1], (4, 2, 16, 8), dtypes]
    decode, prefill = peers.flashinfer_paged(), peers.flashinfer_paged(prefill=True)
    for count, fn in ((2, decode), (2, decode), (4, prefill), (4, prefill)):
        q = torch.zeros(count, 4, 16)
        out = fn(q, cache, cache, table, lens, rows)
        assert out is not q and out.unique().tolist() == [1 if fn is decode else 2]
    assert flashinfer == [[True, *pages], [True, [0, 1, 4], *pages]]
    decode(torch.zeros(2, 2, 16), cache, cache, table, lens, rows)
    assert flashinfer[-1][0] is False, "a key head for each query head: no tensor cores"


def test_flashinfer_s_draw_takes_its_seeds_from_tensors(flashinfer):
    logits, seeds, positions = torch.eye(3), torch.arange(3), torch.arange(3) + 7
    ids, *at = peers.flashinfer_sample(0.7)(logits, seeds, positions)
    assert ids.tolist() == [0, 1, 2]
    for nucleus, told in (({"top_p": 0.9}, 0.9), ({"top_k": 5, "top_p": 0.9}, (5, 0.9))):
        got, *also = peers.flashinfer_sample(0.7, **nucleus)(logits, seeds, positions)
        assert got == told and all(a is b for a, b in zip(at + also, 2 * [seeds, positions]))


def test_flashinfer_is_beside_ours_where_keys_and_values_are_of_one_size(flashinfer, monkeypatch):
    from benchmarks.ops import attention

    found = {}
    for name in ("qwen3-8b", "deepseek-v3"):
        # Cases of a GPU are made here, not run
        found |= {c.name: set(c.providers) for c in attention.cases(SHAPES[name], [1], torch.bfloat16, "cuda")}
    for case in ("1 x 512", "16 x 1000", "64 x 4096", "256 x 4096"):
        assert "flashinfer" in found[f"decode {case} page 16 qwen3-8b bfloat16"]
    assert all("flashinfer" in who for case, who in found.items() if case.startswith("prefill"))
    assert not any("flashinfer" in who for case, who in found.items() if "kv_segment" in case or "deepseek" in case)


@pytest.mark.process
def test_memory_sweeps_over_tokens(monkeypatch, tmp_path):
    from benchmarks import memory

    (real,) = memory._peaks("vexact", "loss", SHAPES["smollm2-135m"], "bfloat16", [64], "cpu")
    assert real > 64 * 49152
    monkeypatch.setattr(memory, "_whom", lambda *args: ["vexact", "torch", "liger"])
    sizes = {"vexact": 1 << 20, "torch": 8 << 20, "liger": None}
    monkeypatch.setattr(
        memory, "_peaks", lambda who, t, s, d, tokens, dev: sizes[who] and [n * sizes[who] for n in tokens]
    )
    args = ["memory", "--device", "cpu", "--dtype", "bfloat16", "--rows", "64..512", "--plot", str(tmp_path)]
    assert __main__.main([*args, "--lines", str(tmp_path / "r.jsonl")]) == 0
    found = report.load(tmp_path / "r.jsonl")
    assert len(found) == 2 * 4 and found[0]["peaks"] == {"vexact": 64.0, "torch": 512.0} and found[0]["ratio"] == 0.125
    assert "T=64 " in found[0]["case"] and "MiB" in (tmp_path / "memory.svg").read_text()


def test_row_counts_drawn_at_random(tmp_path, monkeypatch, capsys):
    assert options.drawn("random:64") == options.drawn("random:64:0") != options.drawn("random:64:1")
    counts = options.drawn("random:500:3")
    assert len(counts) == 500 and counts == sorted(counts) and counts[0] >= 1 and counts[-1] <= 1024
    monkeypatch.setattr(harness, "results_file", lambda device: tmp_path / "saved.jsonl")
    monkeypatch.setattr(output, "commit", lambda: "abc1234")
    monkeypatch.setattr(options, "drawn", lambda text: [3, 5])
    shapes = ["--shape", "smollm2-135m,qwen3-0.6b"]
    assert run("--rows", "random:2", "--save", "--lines", str(tmp_path / "all.jsonl"), *shapes) == 0
    assert "mean 2 shapes rows random:2: time / stock over 4 cases: geometric mean" in capsys.readouterr().out
    saved = report.load(tmp_path / "saved.jsonl")
    assert [r["case"] for r in saved] == [f"{s} rows random:2" for s in (*shapes[1].split(","), "2 shapes")]
    every = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    ratios = [r["ratio_to_stock"] for r in every if r.get("us") and r["backend"] == "vexact"]
    assert len(ratios) == saved[-1]["cases"] == 4
    assert saved[-1]["geomean_to_stock"] == pytest.approx(math.prod(ratios) ** 0.25, abs=1e-3)
    assert saved[-1]["p95_to_stock"] == saved[-1]["worst"][0][2] == max(ratios)
    assert report.percentile([float(i) for i in range(1, 101)], 0.95) == 95.0
    assert len(report.spread_table(saved).splitlines()) == 5
    together = report.over_shapes(saved, "mean")  # of runs of some shapes each, too
    assert together["case"] == saved[-1]["case"] and together["cases"] == 4
    assert together["geomean_to_stock"] == pytest.approx(saved[-1]["geomean_to_stock"], abs=1e-3)
    assert together["p95_to_stock"] == together["worst_to_stock"] == saved[-1]["p95_to_stock"]


@pytest.mark.parametrize(
    "args",
    [
        ["--rows", "0"],
        ["--rows", "random:many"],
        ["--rows", "9..8"],
        ["--rows", "1..x"],
        ["--rows", "random:0"],
        ["--shape", "gpt-9"],
        ["--dtype", "int3"],
    ],
    ids=str,
)
def test_bad_options_are_named(args, capsys):
    with pytest.raises(SystemExit):
        run(*args)
    assert f"{args[0]}: got " in capsys.readouterr().err


def record(case, backend, us, stock=10.0):
    about = {"room": "linear", "roof_us": 2.0, "stock_us": stock, "ratio_to_stock": us / stock, "gpu": "G", "cpu": None}
    return {"case": case, "backend": backend, "us": us, **about}


def test_tables():
    assert report.series("qwen3-8b qkv M=16 bfloat16") == ("qwen3-8b qkv bfloat16", 16)
    assert report.series("decode 64 x 512") == ("decode 64 x 512", None)
    records = [
        record("a M=1 bf16", "vexact", 4.0),
        record("a M=1 bf16", "torch", 10.0),
        record("b M=1 bf16", "vexact", 16.0),
        record("b M=1 bf16", "torch", 10.0),
        record("b M=8 bf16", "vexact", 5.0),
        record("b M=8 bf16", "quack", 4.0),
    ]
    lines = report.table(records).splitlines()
    assert lines[0] == "| room | case | 1 rows | 8 rows |"
    assert lines[2:] == ["| linear | a bf16 | 4 (0.40) |  |", "| linear | b bf16 | 16 (1.60) | 5 (0.50) |"]
    lines = report.summary(records).splitlines()
    assert lines[0] == "| room | rows | cases | of roof | ours / torch | ours / quack |"
    share, ratio = math.sqrt(2 / 4 * 2 / 16), math.sqrt(0.4 * 1.6)
    assert lines[2] == f"| linear | 1 | 2 | {100 * share:.0f} % | {ratio:.2f} |  |"
    assert lines[3] == "| linear | 8 | 1 | 40 % |  | 1.25 |"


def test_a_results_file_gives_the_newest_record_of_a_case(tmp_path):
    path = tmp_path / "r.jsonl"
    harness.append([record("a", "vexact", 4.0), record("a", "torch", 9.0)], path)
    harness.append([record("a", "vexact", 3.0)], path)
    assert {r["backend"]: r["us"] for r in report.load(path)} == {"vexact": 3.0, "torch": 9.0}
    path.write_text(path.read_text() + "not json\n")
    with pytest.raises(ValueError, match=r"r\.jsonl:4: not a benchmark record"):
        report.load(path)


@pytest.mark.skipif(
    hasattr(deepseek.DeepseekV3MoE, "route_tokens_to_experts"), reason="this transformers routes in the block"
)
def test_verify_records_a_mixture_with_latent_attention_and_a_warm_cache(monkeypatch, tmp_path, capsys):
    from benchmarks import verify
    from vexact_engine.weights import random

    small = {"vocab_size": 160, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "head_dim": 8}
    small |= {"num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    small |= {"kv_lora_rank": 24, "n_routed_experts": 8, "moe_intermediate_size": 24, "max_position_embeddings": 256}
    small |= {"bos_token_id": 1, "eos_token_id": 2}
    monkeypatch.setitem(random.CONFIGS, "moonlight-16b-a3b", random.CONFIGS["moonlight-16b-a3b"] | small)
    monkeypatch.setattr(verify, "LENGTHS", [5, 33])
    where = tmp_path / "verify.jsonl"
    args = ["--device", "cpu", "--shape", "moonlight-16b-a3b", "--layers", "3", "--latent", "--dtype", "bfloat16"]
    assert __main__.main(["verify", *args, "--lines", str(where)]) == 0
    (found,) = report.load(where)
    assert found["case"] == "moonlight-16b-a3b 3 layers latent bfloat16"
    assert (found["layers"], found["latent"], found["weights"]) == (3, True, "random")
    assert found["tokens"] == found["warm_tokens"] == 8 * 16 and found["batch_tokens"] == 2 * 8 * 16
    assert found["mismatched"] == found["warm_mismatched"] == found["batch_mismatched"] == 0
    assert found["warm_prefix_tokens"] == 4 * 32 and found["gradients_finite"]
    assert found["failures"] == []
    line = report.verify_table([found]).splitlines()[2]
    assert line.startswith(
        "| moonlight-16b-a3b 3 layers latent bfloat16 | random | 128 | 0 | 0 | 1, 8 | 0 of 256 | 0 of 128 |"
    )
    heads = report.verify_table([found]).splitlines()[0]
    assert heads.count("|") == line.count("|")


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"differ": "recipe: step 3: reward: got 1, expected 2"}, "differ: recipe: step 3: reward: got 1, expected 2"),
        ({"verify_tokens": 9, "verify_mismatched": 2}, "verify_mismatched: 2"),
        ({"numbers": 9, "differ": 0, "again_differ": 1}, "again_differ: 1"),
        ({"failures": ["warm cache: 1 of 9 tokens differ"]}, "warm cache: 1 of 9 tokens differ"),
        ({"sleep": [{"level": 2}, {"level": 1, "differ": 4}]}, "after a sleep: differ: 4"),
        ({"differ": None, "verify_mismatched": 0, "failures": [], "sleep": [{"level": 1, "differ": 0}]}, None),
        ({"backend": "vllm", "differ": 5}, None),
    ],
)
def test_a_program_that_found_other_bits_ends_in_exit_code_1(monkeypatch, tmp_path, capsys, figures, said):
    from benchmarks import imports

    record = {"room": "imports", "case": "a case", "backend": "vexact", **figures}
    monkeypatch.setattr(imports, "run", lambda args: iter([record]))
    code = __main__.main(["imports", "--device", "cpu", "--json", str(tmp_path / "r.json")])
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["records"] == [record]
    assert (code, found["failures"]) == ((0, []) if said is None else (1, [f"imports a case: {said}"]))
    assert capsys.readouterr().err.strip() == "".join(found["failures"])


def test_what_needs_an_extra_is_imported_where_it_is_asked_for():
    """Kernels are measured, and an engine alone, where nothing of hand-over, server or charts is installed."""
    absent = ["msgspec", "zmq", "fastapi", "uvicorn", "matplotlib", "verl", "veomni", "ray"]
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import benchmarks.options, benchmarks.__main__"
    done = subprocess.run([sys.executable, "-c", code], cwd=harness.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
