"""The benchmarks: bits come before times, records hold what a figure needs, tables and plots are made from them."""

import json
import math

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from benchmarks import __main__, harness, report
from benchmarks.shapes import SHAPES

FIELDS = {"room", "case", "backend", "us", "gbps", "tflops", "roof_us", "stock_us", "ratio_to_stock", "bits_equal"}
FIELDS |= {"gpu", "torch", "triton", "commit", "date"}


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch):
    monkeypatch.setattr(harness, "ceilings", lambda device: (1e10, 1e11))


def run(*args: str) -> int:
    return __main__.main(["mean", "--device", "cpu", "--rows", "1,4", "--dtype", "float32", "--repeats", "2", *args])


def test_records_hold_what_a_figure_needs(tmp_path, capsys):
    assert run("--json", str(tmp_path / "r.jsonl"), "--plot", str(tmp_path)) == 0
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {(r["case"].split()[1], r["backend"]) for r in records} == {
        (count, who) for count in ("R=1", "R=4") for who in ("vexact", "torch")
    }
    for r in records:
        assert set(r) >= FIELDS
        assert r["us"] > 0 and r["roof_us"] > 0
        assert r["bits_equal"] is (True if r["backend"] == "vexact" else None)
        ratio, rounding = r["us"] / r["stock_us"], 5e-4  # of all three figures
        most = rounding * (1.01 + ratio / r["us"] + ratio / r["stock_us"])
        assert r["ratio_to_stock"] == pytest.approx(ratio, rel=0, abs=most)
    assert (tmp_path / "mean.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "equal" in capsys.readouterr().out


def test_json_on_stdout_is_nothing_else(capsys):
    assert run("--json") == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 4


def test_a_case_whose_bits_differ_is_not_timed(monkeypatch, tmp_path, capsys):
    from benchmarks.ops import mean

    real = mean.cases

    def broken(*args):
        for case in real(*args):
            case.bits = lambda x: (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]))
            yield case

    monkeypatch.setattr(mean, "cases", broken)
    assert run("--json", str(tmp_path / "r.jsonl")) == 1
    assert not (tmp_path / "r.jsonl").exists()
    assert "1 elements differ; nothing was timed" in capsys.readouterr().err


def test_peers(capsys):
    assert run("--peers", "torch") == 0
    assert run("--peers", "nobody") == 1
    assert "--peers: nobody: in none of these cases" in capsys.readouterr().err
    assert list(harness.peers(gone=lambda: __import__("no_such_library"), here=lambda: max)) == ["here"]
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


def test_row_counts_drawn_at_random(tmp_path, monkeypatch, capsys):
    assert __main__.drawn("random:64") == __main__.drawn("random:64:0") != __main__.drawn("random:64:1")
    counts = __main__.drawn("random:500:3")
    assert len(counts) == 500 and counts == sorted(counts) and counts[0] >= 1 and counts[-1] <= 1024
    monkeypatch.setattr(harness, "results_file", lambda device: tmp_path / "saved.jsonl")
    monkeypatch.setattr(__main__, "drawn", lambda text: [3, 5])
    shapes = ["--shape", "smollm2-135m,qwen3-0.6b"]
    assert run("--rows", "random:2", "--save", "--json", str(tmp_path / "all.jsonl"), *shapes) == 0
    assert "mean all shapes rows random:2: time / stock over 4 cases: geometric mean" in capsys.readouterr().out
    saved = report.load(tmp_path / "saved.jsonl")
    assert [r["case"] for r in saved] == [f"{s} rows random:2" for s in (*shapes[1].split(","), "all shapes")]
    every = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    ratios = [r["ratio_to_stock"] for r in every if r.get("us") and r["backend"] == "vexact"]
    assert len(ratios) == saved[-1]["cases"] == 4
    assert saved[-1]["geomean_to_stock"] == pytest.approx(math.prod(ratios) ** 0.25, abs=1e-3)
    assert saved[-1]["p95_to_stock"] == saved[-1]["worst"][0][2] == max(ratios)
    assert report.percentile([float(i) for i in range(1, 101)], 0.95) == 95.0
    assert len(report.spread_table(saved).splitlines()) == 5


@pytest.mark.parametrize(
    "args",
    [["--rows", "0"], ["--rows", "random:many"], ["--rows", "random:0"], ["--shape", "gpt-9"], ["--dtype", "int3"]],
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
    assert __main__.main(["verify", *args, "--json", str(where)]) == 0
    (found,) = report.load(where)
    assert found["case"] == "moonlight-16b-a3b 3 layers latent bfloat16"
    assert (found["layers"], found["latent"], found["weights"]) == (3, True, "random")
    assert found["tokens"] == found["warm_tokens"] == 8 * 16 and found["batch_tokens"] == 2 * 8 * 16
    assert found["mismatched"] == found["warm_mismatched"] == found["batch_mismatched"] == 0
    assert found["warm_prefix_tokens"] == 4 * 32 and found["gradients_finite"]
    line = report.verify_table([found]).splitlines()[2]
    assert line.startswith(
        "| moonlight-16b-a3b 3 layers latent bfloat16 | random | 128 | 0 | 0 | 1, 8 | 0 of 256 | 0 of 128 |"
    )
    heads = report.verify_table([found]).splitlines()[0]
    assert heads.count("|") == line.count("|")
