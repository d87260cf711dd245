"""What was chosen for its speed is not timed again: on this machine, or where the library brings it for such a GPU."""

import dataclasses
import json
import os

import pytest
import torch

import vexact_ops as vx
from vexact_ops._core import admit, choices
from vexact_ops._core.admit import Candidate, Proposal


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VEXACT_CACHE", str(tmp_path))
    for name in ("VEXACT_CHOICES", "VEXACT_ADMIT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(admit, "_decisions", {})
    monkeypatch.setattr(choices, "_noted", {})
    return tmp_path


@pytest.fixture
def shipped(monkeypatch):
    """What the library brings for the GPU that this machine stands for."""
    brought = {"kernels": {}, "graphs": {}}
    monkeypatch.setattr(choices, "shipped", lambda device: brought)
    return brought


def test_what_is_remembered_is_recalled_for_just_that(cache, monkeypatch):
    assert vx.recall("graphs", "an engine", "cpu") is None
    vx.remember("graphs", "an engine", "cpu", {"decodes": [1, 2]})
    assert vx.recall("graphs", "an engine", "cpu") == {"decodes": [1, 2]}
    assert vx.recall("graphs", "another", "cpu") is None and vx.recall("kernels", "an engine", "cpu") is None
    monkeypatch.setattr(choices.digest, "of_all_extensions", lambda: "another build")
    assert vx.recall("graphs", "an engine", "cpu") is None, "other kernels take other times"


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"chosen": [1]}', '{"about": "another", "chosen": [1]}'])
def test_a_file_that_is_damaged_is_as_none(cache, content):
    vx.remember("graphs", "an engine", "cpu", [1, 2])
    (path,) = cache.rglob("*.json")
    path.write_text(content)
    assert vx.recall("graphs", "an engine", "cpu") is None


def test_what_this_machine_has_chosen_comes_before_what_is_brought(cache, shipped, monkeypatch):
    shipped["graphs"]["an engine"] = [1, 8]
    assert vx.recall("graphs", "an engine", "cpu") == [1, 8]
    vx.remember("graphs", "an engine", "cpu", [1, 4])
    assert vx.recall("graphs", "an engine", "cpu") == [1, 4]
    monkeypatch.setenv("VEXACT_CHOICES", "0")
    assert vx.recall("graphs", "an engine", "cpu") is None


class Kernels:
    """A proposal of three candidates and the canonical kernel; what was run, and whether there was a race."""

    def __init__(self, wrong=()):
        self.ran, self.races = [], 0
        names = "slow", "fast", "wrong", "canonical"
        candidates = [Candidate(name, self.kernel(name, name in wrong), name) for name in names]
        x = torch.arange(4, dtype=torch.float32)
        self.proposal = Proposal("a product", candidates, candidates[-1], lambda: [(x,)], self.race, margin=0.01)

    def kernel(self, name, wrong):
        def run(x):
            self.ran.append(name)
            return x + 1 + int(wrong)

        return run

    def race(self, candidates, case):
        self.races += 1
        return [{"slow": 3.0, "fast": 1.0, "canonical": 4.0}.get(one.name, 2.0) for one in candidates]

    def decide(self):
        admit._decisions.clear()  # as in another process
        return admit.admitted(self.proposal, "cpu")


def test_a_kernel_that_is_named_is_verified_alone(cache, shipped):
    shipped["kernels"]["a product"] = "slow"
    kernels = Kernels()
    decision = kernels.decide()
    assert decision.chosen.name == "slow" and "where this kind of GPU was timed" in decision.why
    assert kernels.ran == ["canonical", "slow"] and kernels.races == 0
    assert [v.candidate for v in decision.verdicts] == ["slow"] and decision.verdicts[0].admitted
    assert kernels.decide().chosen.name == "slow" and len(kernels.ran) == 2, "the verdict is on disk"
    shipped["kernels"].clear()
    assert kernels.decide().chosen.name == "slow" and len(kernels.ran) == 2


@pytest.mark.parametrize("variable", ["VEXACT_CHOICES", "VEXACT_ADMIT"])
def test_a_switch_is_0_or_1(cache, shipped, monkeypatch, variable):
    monkeypatch.setenv(variable, "off")
    with pytest.raises(ValueError, match=f"{variable}: got 'off', expected 0"):
        Kernels().decide()
    monkeypatch.setenv(variable, "1")
    assert Kernels().decide().chosen.name == "fast"


def test_a_canonical_kernel_that_is_named_needs_no_verdict(cache, shipped):
    shipped["kernels"]["a product"] = "canonical"
    kernels = Kernels()
    assert kernels.decide().chosen.name == "canonical" and not kernels.ran and not kernels.races
    assert kernels.decide().chosen.name == "canonical" and not kernels.ran


@pytest.mark.parametrize("named,wrong", [("wrong", ("wrong",)), ("of another version", ()), (None, ()), (3, ())])
def test_one_that_is_refused_or_unknown_is_as_none(cache, shipped, named, wrong):
    """It was admitted where it was timed; here, with other versions, it may not be."""
    if named is not None:
        shipped["kernels"]["a product"] = named
    kernels = Kernels(wrong)
    decision = kernels.decide()
    assert decision.chosen.name == "fast" and kernels.races == 1 and len(decision.verdicts) == 4
    assert [v.candidate for v in decision.verdicts if not v.admitted] == list(wrong)


def test_beside_other_work_nothing_is_timed(cache, shipped):
    """What is named is verified; the rest is left to who asks next, and nothing of it is kept."""
    kernels = Kernels()
    with admit.without_races():
        decision = kernels.decide()
        assert decision.chosen.name == "canonical" and not decision.final and "timed" in decision.why
        assert not kernels.ran and not kernels.races and not admit._decisions and not [*cache.rglob("*.json")]
        shipped["kernels"]["a product"] = "slow"
        assert kernels.decide().chosen.name == "slow" and kernels.ran == ["canonical", "slow"]
    shipped["kernels"].clear()
    assert kernels.decide().chosen.name == "slow" and not kernels.races, "the verdict is on disk"
    other = Kernels()
    other.proposal = dataclasses.replace(other.proposal, key="another product")
    assert other.decide().chosen.name == "fast" and other.races == 1


def test_where_it_is_switched_off_all_are_timed(cache, shipped, monkeypatch):
    shipped["kernels"]["a product"] = "slow"
    monkeypatch.setattr(choices, "shipped", lambda device: pytest.fail("it was asked"))
    monkeypatch.setenv("VEXACT_CHOICES", "0")
    assert Kernels().decide().chosen.name == "fast"


def test_a_verdict_on_one_that_was_refused_is_not_read(cache, shipped):
    """A file that only tells of a kernel that differs leaves the choice to a race."""
    kernels = Kernels()
    shipped["kernels"]["a product"] = "slow"
    kernels.decide()
    (path,) = [p for p in cache.rglob("*.json") if "admissions" in p.parts]
    content = json.loads(path.read_text())
    content["verdicts"][0]["different"] = 3
    path.write_text(json.dumps(content))
    shipped["kernels"].clear()
    assert kernels.decide().chosen.name == "fast"


def test_what_was_chosen_is_recorded_as_it_is_shipped(cache, shipped):
    Kernels().decide()
    vx.remember("graphs", "an engine", "cpu", [1])
    choices.record("kernels", "another product", "tuned")
    recorded = choices.recorded()
    assert recorded == {"graphs": {"an engine": [1]}, "kernels": {"a product": "fast", "another product": "tuned"}}


def test_files_that_the_library_brings_can_be_read():
    for path in choices.FOLDER.glob("*.json"):
        found = choices._read(path.stem)
        assert found.keys() <= {"kernels", "graphs", "made"} and found.get("kernels")
        assert all(isinstance(name, str) for name in found["kernels"].values())


def test_a_file_is_named_by_its_gpu(monkeypatch):
    class Properties:
        name = "NVIDIA H100 80GB HBM3"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    choices.name_of.cache_clear()
    assert choices.name_of(torch.device("cuda", 0)) == "nvidia-h100-80gb-hbm3"
    choices.name_of.cache_clear()
    assert choices._read("no such GPU") == {} and choices.shipped(torch.device("cpu")) == {}


def test_what_is_recorded_comes_beside_what_is_there(tmp_path, monkeypatch):
    from benchmarks import start

    first = {"kernels": {"a product": "slow", "b product": "fast"}, "graphs": {"an engine": {"decodes": [1, 8]}}}
    path = start._merge(first, "cpu", tmp_path / "chosen")
    start._merge({"kernels": {"a product": "fast", "c product": "fast"}}, "cpu", tmp_path / "chosen")
    monkeypatch.setattr(choices, "FOLDER", path.parent)
    choices._read.cache_clear()
    found = choices._read(path.stem)
    choices._read.cache_clear()
    assert found["kernels"] == {"a product": "fast", "b product": "fast", "c product": "fast"}
    assert found["graphs"] == first["graphs"] and found["made"].keys() >= {"torch", "commit", "date"}
    assert '  "b product": "fast",\n' in path.read_text(), "a line for each"


def test_what_processes_record_is_collected(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "_noted", {})
    choices.record("kernels", "a product", "slow")
    monkeypatch.setenv("VEXACT_RECORD", str(tmp_path))
    assert choices.collected(tmp_path) == {}, "nothing of before"
    for pid, chosen in ((7, "slow"), (6, "fast")):
        monkeypatch.setattr(choices.os, "getpid", lambda pid=pid: pid)
        choices.record("kernels", "a product", chosen)
        os.utime(tmp_path / f"{pid}.jsonl", ns=(0, 10 - pid))
    choices.record("graphs", "an engine", {"decodes": [1, 8]})
    os.utime(tmp_path / "6.jsonl", ns=(0, 10))
    expected = {"kernels": {"a product": "fast"}, "graphs": {"an engine": {"decodes": [1, 8]}}}
    assert choices.collected(tmp_path) == expected == choices.recorded()
    monkeypatch.setenv("VEXACT_RECORD", str(tmp_path / "nowhere"))
    choices.record("kernels", "a product", "other")  # which is no obstacle
    assert choices.collected(tmp_path) == expected
