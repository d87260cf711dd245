"""Tables and charts from records: what is in them, that they are those of the kept records, and that nothing is written
that was not asked for."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__, harness, output, report
from benchmarks.report import charts, compare, draw, readme, records

ROOT = Path(__file__).parent.parent


def pair(room, case, us, over=None, alone=True, **peers):
    """Our record of a case, and its peers'."""
    about = {"room": room, "case": case, "roof_us": 1.0, "gpu": "G", "cpu": None, "commit": "c", "rounds": 5}
    about |= {"stock_us": peers.get("torch"), "ratio_to_stock": us / peers["torch"] if "torch" in peers else None}
    ours = about | {"backend": "vexact", "us": us, "p10_us": us, "p90_us": 2 * us, "bits_equal": True}
    if over:
        ours["over"] = over
    return [ours, *({**about, "backend": p, "us": t, "bits_equal": alone, "version": "1"} for p, t in peers.items())]


def test_bars_are_means_over_cases_with_their_spread():
    some = pair("linear", "a M=1 bf16", 4.0, {"torch": [0.4, 0.5, 0.6], "quack": [2, 2, 2]}, torch=8.0, quack=2.0)
    some += pair("linear", "b M=1 bf16", 4.0, {"torch": [1.6, 2.0, 2.4]}, torch=2.0)
    some += pair("linear", "b M=8192 bf16", 3.0, {"torch": [1.0, 1.0, 1.0]}, torch=3.0)
    some += pair("linear", "old M=16 bf16", 3.0, None, torch=1.0)  # measured before spreads were
    (chart,) = (c for c in charts.of({"gpu": some}) if c.sort == "bars")
    assert chart.path == "gpu/linear.svg" and chart.title.endswith("G")
    bars = {(b["group"], b["peer"]): b for b in chart.data["bars"]}
    assert list(bars) == [("1 row", "torch"), ("1 row", "quack"), ("8,192 rows", "torch")]
    first = bars["1 row", "torch"]
    assert (first["p10"], first["ratio"], first["p90"]) == (0.8, 1.0, 1.2)
    assert (first["least"], first["most"], first["cases"]) == (0.5, 2.0, 2)
    assert bars["1 row", "quack"]["ratio"] == 2.0


def test_times_of_two_runs_are_not_compared():
    some = pair("linear", "a M=1 bf16", 4.0, {"torch": [0.4, 0.5, 0.6]}, torch=8.0, gone=2.0)
    assert set(records.by_case(some)["linear", "a M=1 bf16"]) == {"vexact", "torch"}
    assert "gone" in records.by_case(pair("linear", "a M=1 bf16", 4.0, gone=2.0))["linear", "a M=1 bf16"]


def test_a_bar_chart_of_a_long_sweep_shows_some_of_it():
    some = [r for n in range(12) for r in pair("mean", f"m R={1 << n} bf16", 1.0, {"torch": [1, 1, 1]}, torch=1.0)]
    (bars,) = (c.data["bars"] for c in charts.of({"gpu": some}) if c.sort == "bars")
    assert len(bars) == charts.GROUPS and (bars[0]["group"], bars[-1]["group"]) == ("1 row", "2,048 rows")


def test_cases_are_grouped_by_what_they_do():
    kinds = {
        "decode 64 x 4096 page 16 qwen3-8b bfloat16 kv_segment=2048": "decode",
        "decode of 64 S=4096 page 128 qwen3-8b bfloat16": "decode",
        "decode 64 x 4096 page 64 deepseek-v3 latent bfloat16": "decode latent",
        "prefill 8192 of 32768 page 128 qwen3-8b bfloat16": "prefill",
        "training fwd+bwd qwen3-8b 8 x 4096 bfloat16": "training fwd+bwd",
        "training fwd heads=2,kv_heads=1,head_dim=16 T=32 float32": "training fwd",
        "fwd from logits qwen3-30b-a3b T=64 bfloat16": "fwd from logits",
    }
    assert {case: records.kind(case) for case in kinds} == kinds
    assert records.axis("decode of 64 S=4096 x") == "keys" and records.axis("M=4") == "rows"
    assert records.axis("decode 64 x 4096") is None


def test_sweeps_are_lines_with_a_band_and_a_roof():
    some = [r for n in (1, 2, 4, 8) for r in pair("attention", f"decode of 2 S={n} m bf16", float(n), torch=2.0 * n)]
    some += [r for n in (1, 2, 4) for r in pair("mean", f"m R={n} bf16", float(n), torch=2.0 * n)]
    swept = [c for c in charts.of({"gpu": some}) if c.sort == "lines"]
    assert [c.path for c in swept] == ["gpu/attention-keys.svg"], "three points are no sweep"
    (panel,) = swept[0].data["panels"]
    assert panel["title"] == "decode of 2 m bf16" and panel["roof"] == [[n, 1.0] for n in (1, 2, 4, 8)]
    assert panel["lines"]["vexact"] == [[n, n, n, 2 * n] for n in (1, 2, 4, 8)]
    assert [point[1] for point in panel["lines"]["torch"]] == [2.0, 4.0, 8.0, 16.0]
    table = report.table(some).splitlines()
    assert (
        table[0] == "| room | case | 1 rows | 2 rows | 4 rows |"
        and "| room | case | 1 keys | 2 keys | 4 keys | 8 keys |" in table
    )


def test_the_same_numbers_are_the_same_bytes(tmp_path):
    some = pair("linear", "a M=1 bf16", 4.0, {"torch": [0.4, 0.5, 0.6]}, torch=8.0)
    (chart,) = charts.of({"gpu": some})
    (once,), (twice,) = (draw.draw([chart], tmp_path / name) for name in "ab")
    text = once.read_text()
    assert once.read_bytes() == twice.read_bytes() and len(text) < 40_000
    assert charts.digest_in(once) == chart.digest() and charts.digest_in(tmp_path / "none.svg") is None
    for said in ("1 row", "PyTorch", "below 1: vexact is faster", "0.50"):
        assert said in text, said
    some[0]["over"] = {"torch": [0.4, 0.51, 0.6]}
    assert charts.of({"gpu": some})[0].digest() != chart.digest()


def test_a_peer_has_one_colour():
    from benchmarks.peers import OURS, PEERS

    colors = [peer.color for name, peer in PEERS.items() if name not in ("transformers",)] + [OURS.color]
    assert len(set(colors)) == len(colors)


def test_the_charts_are_those_of_the_kept_records():
    assert charts.stale() == [], "vexact bench report --readme draws them anew"
    assert (charts.PLOTS / "summary.svg").exists()
    for name in ("h200", "cpu"):
        rooms = {r["room"] for r in records.kept()[name] if "us" in r}
        assert {path.stem for path in (charts.PLOTS / name).glob("*.svg")} >= rooms


def test_a_chart_of_other_numbers_is_noticed(tmp_path, monkeypatch):
    some = pair("linear", "a M=1 bf16", 4.0, torch=8.0)
    made = charts.of({"gpu": some})
    monkeypatch.setattr(charts, "PLOTS", tmp_path)
    monkeypatch.setattr(charts, "everything", lambda: charts.of({"gpu": some}))
    assert charts.stale() == ["gpu/linear.svg"]
    draw.draw(made, tmp_path)
    (tmp_path / "gpu" / "gone.svg").write_text("<svg/>")
    assert charts.stale() == ["gpu/gone.svg"]
    some[0]["us"] = 5.0
    assert charts.stale() == ["gpu/gone.svg", "gpu/linear.svg"]


def test_the_comparison_says_what_was_seen():
    over = {"torch": [0.4, 0.5, 0.6], "batch_invariant_ops": [0.2, 0.25, 0.3]}
    gpu = pair("linear", "a M=1 bf16", 4.0, over, torch=8.0, batch_invariant_ops=16.0)
    gpu += pair("linear", "a M=8 bf16", 4.0, alone=False, torch=8.0)
    steps = {"room": "engine", "model": "m", "batch": 1, "version": "9"}  # of a peer: none says "latent"
    engine = [steps | {"backend": b, "step_ms": t} for b, t in (("vllm", 2.0), ("vllm batch-invariant", 6.0))]
    engine.append(steps | {"backend": "vexact", "latent": False, "step_ms": 3.0, "verify_tokens": 5})
    lines = compare.table({"h200": gpu, "engine": engine}).splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in lines[2:]}
    assert cells["**vexact**"][3] == "**in 2 of 2**"
    assert cells["PyTorch 1"][2:4] == ["linear (2)", "in 1 of 2"] and cells["PyTorch 1"][5] == "linear 0.50"
    ours = next(c for name, c in cells.items() if "batch_invariant_ops" in name)
    assert ours[3:] == ["in 1 of 1", "linear 2.00", "linear 0.25"] and "forward of mm" in ours[1]
    mode = next(c for name, c in cells.items() if "batch-invariant mode" in name)
    assert mode[4:] == ["3.00 of vLLM's default mode", "steps 0.50"] and "apart from ours (1)" in mode[2]


def test_nothing_is_written_without_being_asked(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "README.md"
    copy.write_text(
        "<!-- summary -->\nold\n<!-- end -->\n<!-- libraries -->\n<!-- end -->\n<!-- charts soak -->\nx\n<!-- end -->"
    )
    monkeypatch.setattr(readme, "READMES", (copy,))
    monkeypatch.setattr(charts, "PLOTS", tmp_path / "plots")
    monkeypatch.setattr(report, "plot_kept", lambda folder: (folder / "new").mkdir(parents=True) or [])
    before = copy.read_text()
    assert __main__.main(["report"]) == 0
    done = capsys.readouterr()
    assert "| what | vexact | peers |" in done.out and "| library |" in done.out and "nothing was written" in done.err
    assert copy.read_text() == before and not (tmp_path / "plots").exists()
    assert __main__.main(["report", "--readme"]) == 0
    assert "log-probabilities that differ" in copy.read_text() and "| library |" in copy.read_text()
    assert (tmp_path / "plots" / "new").exists() and "old" not in copy.read_text()


def test_matplotlib_is_imported_where_a_chart_is_drawn_alone():
    code = "import benchmarks.__main__, sys; assert not [m for m in sys.modules if m.startswith('matplotlib')]"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_a_chart_without_matplotlib_is_refused_before_the_work(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for argv in (["mean", "--device", "cpu", "--plot"], ["report", "--readme"], ["report", "--plot"]):
        with pytest.raises(output.Refused, match=r"matplotlib, which is not installed. Run: pip install .*\[report\]"):
            __main__.main(argv)


def test_a_step_of_ours_stands_before_verls_own():
    parts = {"gen": 1.0, "old_log_prob": 0.5, "adv": 0.1, "update_actor": 2.0, "update_weights": 0.2, "other": 0.2}
    about = {"room": "rl_step", "case": "a 2 x 2", "tokens_per_s": 1234, "peak_gib": 70.25, "gpu": "G", "commit": "c"}
    theirs = about | {"backend": "verl with vllm", "vllm": "0.24.0", "seconds": 4.0, "parts": parts}
    ours = about | {"backend": "vexact", "seconds": 3.0, "parts": {**parts, "gen": 0.5, "old_log_prob": 0.0}}
    ((make, found),) = [(make, found) for make, found in readme._sorted_out([theirs, ours]) if found]
    lines = make(found).splitlines()[2:]
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] == [
        ["a 2 x 2", "vexact", "3.00", "0.50", "0.00", "2.00", "0.20", "0.30", "1,234", "70.25", "0.75 x"],
        ["a 2 x 2", "verl with vllm 0.24.0", "4.00", "1.00", "0.50", "2.00", "0.20", "0.30", "1,234", "70.25", ""],
    ]


def test_kernels_of_kept_records_name_a_commit():
    for name in ("h200", "engine", "verify"):
        for record in records.kept()[name]:
            assert record["commit"] or "measured apart" in record["note"]
            if "rounds" in record:  # since --save asks for one
                assert not record["commit"].endswith("+"), record["case"]


@pytest.mark.parametrize("us,text", [(0.5, "500 ns"), (1.0, "1 µs"), (1e4, "10 ms"), (2e6, "2 s")])
def test_units_are_plain(us, text):
    assert draw._time(us) == text and draw._count(8192) == "8,192"


def test_the_harness_and_the_report_agree_on_files():
    assert set(records.kept()) == {path.stem for path in harness.RESULTS.glob("*.jsonl")}
