"""The soak itself: a short one passes, and what it looks for it finds."""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import forks
import growth
import pytest
import soak
import torch
from engine_models import byte_tokenizer

from benchmarks import report
from vexact_engine import Engine, EngineConfig, SamplingParams


def short(tmp_path, minutes=0.15):
    return ["--minutes", str(minutes), "--round", "3", "--seed", "7", "--json", str(tmp_path / "soak.jsonl")]


WHAT = {"updates", "sleeps", "streams", "pauses", "abort", "preemptions"}


@pytest.mark.long
def test_a_short_soak(tmp_path, capsys, monkeypatch):
    def enough(self):
        return self.counts["checked"] > 500 and len(self.growth.rounds) >= 2 and set(self.counts) >= WHAT

    monkeypatch.setattr(soak.Soak, "has_seen_enough", enough)
    assert soak.main(short(tmp_path, minutes=3)) == 0, capsys.readouterr().out
    found = json.loads((tmp_path / "soak.jsonl").read_text())
    assert found == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["checked"] > 500 and found["rounds"] >= 2 and set(found["counts"]) >= WHAT
    assert found["differ"] == found["leaked_pages"] == found["leaked_slots"] == 0
    table = report.soak_table(report.load(tmp_path / "soak.jsonl")).splitlines()
    assert len(table) == 3 and table[0].count("|") == table[2].count("|") and "| 0 | 0, 0 |" in table[2]


def test_what_is_lost_is_found(tmp_path, monkeypatch, capsys):
    from vexact_engine.core.scheduler import Scheduler

    real, lost = Scheduler._stop_running, []

    def careless(self, sequence):
        pages = list(sequence.pages)
        real(self, sequence)
        if pages and not lost:
            lost.append(pages[0])
            self.pool.hold(lost)

    monkeypatch.setattr(Scheduler, "_stop_running", careless)
    assert soak.main(short(tmp_path)) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["leaked_pages"] > 0 and "pages are held though nothing runs" in "".join(found["failures"])


def test_one_bit_is_found():
    oracle = soak.Oracle("Llama", torch.bfloat16, "cpu", 0)
    params = SamplingParams(max_new_tokens=6, seed=4, top_k=20, num_top_logprobs=2, ignore_eos=True)
    model = soak.model_of("Llama", torch.bfloat16, "cpu", 0)
    config = EngineConfig(num_pages=16, show_progress=False)
    with Engine.from_pretrained(model, config=config, tokenizer=byte_tokenizer()) as engine:
        (done,) = engine.generate(["hello"], params)
    assert oracle.differ([(done, params, list(range(6)))]) == 0
    assert soak.Oracle("Llama", torch.bfloat16, "cpu", 1).differ([(done, params, list(range(6)))]) == 6
    one_bit = (torch.tensor(done.logprobs[3], dtype=torch.float32).view(torch.int32) + 1).view(torch.float32).item()
    for column, value in (
        ("logprobs", one_bit),
        ("raw_logprobs", one_bit),
        ("token_ids", 7),
        ("top_logprobs", {1: one_bit}),
    ):
        values, kept = getattr(done, column), getattr(done, column)[3]
        values[3] = value
        chosen = [3] if column == "token_ids" else list(range(6))  # what comes after another token differs too
        assert oracle.differ([(done, params, chosen)]) == 1, column
        values[3] = kept


class Rounds(growth.Growth):
    def __init__(self, **columns):
        super().__init__("cpu")
        self.rounds = [{"decisions": 7} | dict(zip(columns, values)) for values in zip(*columns.values())]
        self._judged_from = 0


def test_what_goes_on_growing_is_found_and_what_is_met_late_is_not():
    steady = [400.0] * 24
    for each, every in ((0.3, 1), (1.0, 1), (1.0, 3)):  # MiB, in so many rounds
        (said,) = Rounds(rss_mib=[400 + each * (i // every) for i in range(24)], objects=steady).failures()
        assert said.startswith("rss_mib grows by")
    (said,) = Rounds(rss_mib=steady, objects=[100 * i for i in range(24)]).failures()
    assert said.startswith(
        "objects grows by 100 a round, 2300 in 23 rounds that decided nothing new, expected at most 50"
    )
    assert Rounds(cuda_mib=[0.1 * i for i in range(24)]).failures()
    assert Rounds(rss_mib=[400 + 0.2 * i for i in range(60)]).failures()  # little a round, much in the end
    assert not Rounds(rss_mib=[400 + 30 * (i > 3) + 5 * (i > 20) for i in range(24)], objects=steady).failures()
    deciding = [i // 2 for i in range(24)]  # each second round, and what that costs
    assert not Rounds(rss_mib=[400 + 16 * i for i in deciding], objects=steady, decisions=deciding).failures()
    assert Rounds(rss_mib=[400 + 16 * n + i for i, n in enumerate(deciding)], decisions=deciding).failures()
    few = Rounds(rss_mib=[400 + 50 * i for i in range(growth.FEWEST)])
    assert few.failures() == [] and few.total() == few.per_round() == {}  # nothing is claimed of them


KEPT: list = []


@pytest.mark.long
@pytest.mark.process
def test_what_an_engine_leaves_behind_is_found():
    """In a process of its own: what other tests have left in a heap may move."""
    torch.multiprocessing.spawn(leaving, nprocs=1)


def leaving(_) -> None:
    """1 MiB and 100 objects of each, in a soak of engines that have nothing to do."""
    made = soak.Soak(argparse.Namespace(device="cpu", seed=0, minutes=1, round=1, json=None))
    made.oracles["Llama", torch.bfloat16] = None
    family, dtype, _, config = made.kind()
    close, model = Engine.close, soak.model_of(family, dtype, "cpu", 0)

    def careless(self):
        close(self)
        KEPT.append(bytearray(os.urandom(leaves["bytes"])))
        KEPT.extend([i] for i in range(leaves["lists"]))

    Engine.close = careless
    for mebibytes, lists, found in ((0, 0, set()), (1, 100, {"rss_mib", "objects"})):
        leaves, made.growth = {"bytes": mebibytes << 20, "lists": lists}, growth.Growth("cpu")
        for i in range(3 + growth.FEWEST):
            Engine.from_pretrained(model, config=config, tokenizer=byte_tokenizer()).close()
            made.look(judged=i >= 2)
        assert not made.failures and {said.split()[0] for said in made.growth.failures()} == found
        assert made.growth.what()["types"].get("list", 0) == lists * growth.FEWEST
        KEPT.clear()


@pytest.fixture
def seen():
    """Collections see all that there is, as where a soak runs by itself."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


def test_where_growth_is_is_said(seen):
    made = growth.Growth("cpu")
    made.look(judged=True)
    KEPT.extend([i] for i in range(1000))
    made.look(judged=True)
    assert made.what()["containers"]["test_soak.KEPT"] == 1000 and made.rounds[-1]["new"]["list"] >= 1000
    KEPT.clear()


def test_growth_fails_a_soak(monkeypatch):
    made = soak.Soak(argparse.Namespace(device="cpu", seed=0, minutes=0, round=1, json=None))
    assert made.run()["failures"] == ["nothing was checked"]
    made.growth = Rounds(rss_mib=[400 + 20 * i for i in range(8)])
    assert "rss_mib grows by 20 a round, 140 in 7 rounds" in made.run()["failures"][1]


def test_configurations_hold_the_longest_request():
    rng = random.Random(0)
    drawn = [soak.configuration(rng, device) for device in ("cpu", "cuda") for _ in range(200)]
    assert min(c.num_pages * c.page_size for c in drawn) >= soak.LONGEST_PROMPT + soak.MOST_NEW
    assert len(Counter(c.max_num_batched_tokens for c in drawn)) == 5


def test_a_hang_is_found():
    """In a process of its own: it ends there."""
    program = f"""{forks.OWN}
import sys, threading, soak
soak.HANG = 2
soak.Client.stream = lambda self: threading.Event().wait()
soak.main(["--minutes", "0.1", "--round", "3"])
"""
    root = Path(__file__).parent.parent
    env = os.environ | {"PYTHONPATH": f"{root}:{root / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 1, done.stderr
    assert "waits for ever" in json.loads(done.stdout.splitlines()[-1])["failures"][0]
    assert "Thread 0x" in done.stderr
