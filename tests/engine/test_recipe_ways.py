"""The recipe's parameters after fifty steps, by their SHA-256: the same ones however the run was had."""

import argparse

import pytest
from engine_models import build

pytest.importorskip("zmq", reason="pyzmq is not installed")

from benchmarks import repeats


@pytest.mark.process
def test_fifty_steps_end_with_the_same_parameters_whatever_way_they_are_run(tmp_path):
    build("Qwen3").save_pretrained(tmp_path / "model")
    sizes = {"steps": 50, "prompts": 2, "samples": 2, "answer": 6}
    args = argparse.Namespace(shape=str(tmp_path / "model"), layers=None, device="cpu", **sizes)
    import time

    t = time.perf_counter()
    for found in repeats.run(args):
        print(
            found["case"],
            found["ours"],
            found["sha256"],
            found["differ"],
            found["tokens"],
            time.perf_counter() - t,
            flush=True,
        )
