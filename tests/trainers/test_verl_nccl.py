"""Our checkpoint engine over NCCL, and verl's own managers with it, on two GPUs: each in processes that know no CPU
platform. Without GPUs the first runs over gloo."""

import os
import subprocess
import sys

import pytest
import torch

from .environment import environment

GPUS = torch.cuda.device_count()


def program(*arguments):
    device = "cuda" if GPUS else "cpu"
    kept = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "VERL_ENGINE_DEVICE")}
    command = [sys.executable, "-m", "trainers.gpu_updates", *map(str, arguments)]
    done = subprocess.run(
        command, env={**kept, **environment(device=device)}, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.mark.skipif(GPUS == 1, reason="one CUDA device")
def test_bytes_are_equal_at_the_receiver():
    said = program("ranks")
    assert "3 sets, bytes equal" in said and "its successor has a whole set" in said


@pytest.mark.skipif(GPUS < 2, reason="no two CUDA devices")
def test_hybrid_and_standalone_replicas(models):
    said = program("cluster", models("qwen3"))
    assert "three times" in said and "heals it" in said
