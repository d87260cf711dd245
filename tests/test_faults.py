"""The attack on the processes around an engine: a short share of it passes, and what it looks for it finds."""

import json

import faults
import pytest

from vexact_engine.parallel import limits


def attack(capsys, *options):
    code = faults.main(["--minutes", "6", *options])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("target, rounds", [("handover", 3), ("replicas", 2), ("stages", 2)])
def test_a_short_share(target, rounds, capsys, monkeypatch):
    monkeypatch.setattr(faults, "SLACK", 300.0)  # beside other tests
    before = dict(vars(limits))
    code, found = attack(capsys, target, "--rounds", str(rounds), "--seed", "3")
    (one,) = found["targets"]
    assert (code, one["failures"]) == (0, [])
    assert one["rounds"] == rounds and one["counts"]["checked"] >= 4 * rounds
    assert not any(one["left"].values()) and not one["counts"].get("differ") and not one["counts"].get("late")
    assert dict(vars(limits)) == before


def test_what_differs_or_is_left_is_found(capsys, monkeypatch):
    monkeypatch.setattr(faults.Handover, "phases", ("raise at the begin",))
    monkeypatch.setattr(faults, "bits", lambda c, real=faults.bits: (real(c), id(c)))
    monkeypatch.setattr(faults, "buckets", lambda: 2)
    code, found = attack(capsys, "handover", "--rounds", "1")
    said = "\n".join(found["targets"][0]["failures"])
    assert code == 1 and "other bits" in said and "2 buckets are left" in said


def test_what_comes_too_late_is_found():
    counts, said = faults.Counter(), []
    target = faults.Target(faults.random.Random(0), counts, [], said.append)
    with target.within("a set", -faults.SLACK):
        pass
    assert counts["late"] == 1 and "a set took 0.0 s" in said[0]


def test_a_target_that_there_is_none_of(capsys):
    with pytest.raises(SystemExit):
        faults.main(["pigeons"])
    assert "TARGET: got pigeons, expected of handover, replicas, stages" in capsys.readouterr().err
