"""Admission: what differs in one bit is never used, verdicts persist, the fastest proven kernel wins."""

import json

import pytest
import torch

from vexact_ops._core.admit import Admissions, Candidate, race_on_gpu
from vexact_ops.testing import cancelling


def product(x, w):
    acc = torch.zeros(x.shape[0], w.shape[0])
    for k in range(x.shape[1]):
        acc += x[:, k, None].float() * w[None, :, k].float()
    return acc


def split(x, w):
    half = x.shape[1] // 2
    return product(x[:, :half], w[:, :half]) + product(x[:, half:], w[:, half:])


def broken(x, w):
    raise RuntimeError("no kernel image is available\nfor this device")


def cases():
    return [cancelling(rows, 64, 8, seed=rows) for rows in (1, 5)]


SAME, SPLIT, BROKEN = Candidate("same", product), Candidate("split", split), Candidate("broken", broken)


def test_only_equal_bytes_are_admitted(tmp_path):
    admissions = Admissions("test", tmp_path / "a.json")
    assert admissions.choose("k", [SPLIT, BROKEN, SAME], product, cases) is SAME
    split_verdict, broken_verdict, same_verdict = admissions.report()["k"]
    assert split_verdict.different > 0 and not split_verdict.admitted
    assert broken_verdict.error == "no kernel image is available" and not broken_verdict.admitted
    assert same_verdict.admitted


def test_without_an_admitted_candidate_the_canonical_kernel_serves(tmp_path):
    assert Admissions("test", tmp_path / "a.json").choose("k", [SPLIT, BROKEN], product, cases) is None


def test_the_fastest_admitted_wins_and_a_refused_one_is_not_timed(tmp_path):
    times, timed = {"slow": 9.0, "fast": 2.0}, []
    slow, fast = Candidate("slow", lambda x, w: product(x, w)), Candidate("fast", lambda x, w: product(x, w))

    def clock(run, args):
        name = next(c.name for c in (slow, fast, SPLIT) if c.run is run)
        timed.append(name)
        return times[name]

    admissions = Admissions("test", tmp_path / "a.json")
    assert admissions.choose("k", [SPLIT, slow, fast], product, cases, clock) is fast
    assert timed == ["slow", "fast"]


def test_verdicts_persist_and_new_candidates_are_verified(tmp_path):
    path = tmp_path / "a.json"
    Admissions("test", path).choose("k", [SPLIT, SAME], product, cases)

    def never():
        pytest.fail("verified again")

    assert Admissions("test", path).choose("k", [SPLIT, SAME], product, never) is SAME
    other = Candidate("other", product)
    assert Admissions("test", path).choose("k", [other], product, cases) is other
    assert {v["candidate"] for v in json.loads(path.read_text())["k"]} == {"other"}


def test_two_processes_keep_each_others_verdicts(tmp_path):
    path = tmp_path / "a.json"
    one, two = Admissions("test", path), Admissions("test", path)
    one.report(), two.report()
    one.choose("a", [SAME], product, cases)
    two.choose("b", [SAME], product, cases)
    assert set(json.loads(path.read_text())) == {"a", "b"}


@pytest.mark.parametrize("content", ["", "{", '{"k": 3}', "[1]", '{"k": [{"name": 1}]}'])
def test_a_damaged_file_is_verified_anew(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert Admissions("test", path).choose("k", [SAME], product, cases) is SAME


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    assert Admissions("test", tmp_path / "file" / "a.json").choose("k", [SAME], product, cases) is SAME


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_a_race_that_runs_out_of_memory_leaves_no_capture_behind():
    def hungry():
        return torch.empty(1 << 44, dtype=torch.uint8, device="cuda")

    warm = []

    def hungry_once_captured():
        if torch.cuda.is_current_stream_capturing():
            hungry()
        warm.append(torch.ones(3, device="cuda"))

    with pytest.raises(torch.OutOfMemoryError):
        race_on_gpu([[hungry_once_captured]])
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.arange(5).to("cuda").sum().item() == 10  # a copy from pageable memory: forbidden in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        later = warm[0] + 1
    graph.replay()
    assert later.tolist() == [2, 2, 2]
