"""Columns that go through memory of each other's GPUs: bytes are moved, whatever the shapes; who does not come, or
cannot be reached, is named. On one GPU two processes share it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vexact_ops as vx

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def run(folder: Path, size: int, what: str) -> list[subprocess.CompletedProcess]:
    (folder / "end").mkdir()
    count = max(1, torch.cuda.device_count())
    command = [sys.executable, str(Path(__file__).with_name("peers.py"))]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    about = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    started = [
        subprocess.Popen(
            [*command, *map(str, (rank, size, rank % count, folder, what))], text=True, stdout=-1, stderr=-1, env=about
        )
        for rank in range(size)
    ]
    return [
        subprocess.CompletedProcess(process.args, process.wait(), *texts)
        for process, texts in [(process, process.communicate(timeout=240)) for process in started]
    ]


@GPU
@pytest.mark.process
@pytest.mark.parametrize("size", [2, 3])
def test_columns_of_every_rank_in_their_order(size, tmp_path):
    for done in run(tmp_path, size, "gathers"):
        assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@GPU
@pytest.mark.process
def test_a_rank_that_does_not_come_is_named(tmp_path):
    assert [done.stdout for done in run(tmp_path, 2, "late")] == ["", "missing: 0\n"]


@GPU
@pytest.mark.process
def test_memory_that_cannot_be_reached_is_refused_on_every_rank(tmp_path):
    for done in run(tmp_path, 2, "unreachable"):
        assert done.returncode == 1 and "Peers: rank 1 cannot reach the others' memory: " in done.stderr


def test_sizes_are_refused():
    for rank, size in ((0, 1), (0, 9), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"Peers: got rank {rank} of {size}, expected one of 2 to 8"):
            vx.Peers(rank, size, torch.device("cuda", 0), lambda data: [data])
