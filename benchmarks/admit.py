"""How long `vx.admit` takes for a whole model, by its config alone: on a machine that knows nothing yet, and again in
another process, from what the first has left on disk."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from .harness import environment

TRAINING_ROWS = 8192

_CHILD = """
import json, sys, time
begin = time.perf_counter()
import torch
import vexact_ops as vx
from vexact_engine.weights.random import config_of
torch.cuda.init()
shape, dtype, training = sys.argv[1:]
config, imported = config_of(shape), time.perf_counter() - begin
rows = {"training_rows": [int(training)]} if int(training) else {}
found = vx.admit(config, dtype=getattr(torch, dtype), **rows)
slowest = sorted(found, key=lambda d: -d.seconds)[:5]
print(json.dumps({
    "seconds": round(found.seconds, 2), "import_s": round(imported, 2), "calls": len(found),
    "kernels": sum(len(d.verdicts) for d in found), "refused": len(found.refused),
    "slowest": [[d.key, round(d.seconds, 2)] for d in slowest],
}))
"""


def run(args: argparse.Namespace) -> Iterator[dict]:
    """Two records per shape, dtype and use: `cold`, with caches of verdicts and kernels that are empty, and `warm`."""
    if args.device != "cuda":
        raise ValueError("admit: --device cpu: expected cuda: there is nothing to verify for a CPU")
    for use, training in (("rollout", 0), ("rollout and training", TRAINING_ROWS)):
        for shape in args.shape.split(","):
            for dtype in args.dtype.split(","):
                with tempfile.TemporaryDirectory() as folder:
                    caches = {"VEXACT_CACHE": f"{folder}/vexact", "TRITON_CACHE_DIR": f"{folder}/triton"}
                    for start in ("cold", "warm"):
                        command = [sys.executable, "-c", _CHILD, shape, dtype, str(training)]
                        done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, check=True)
                        yield {
                            "room": "admit",
                            "case": f"{shape} {use} {start} {dtype}",
                            "backend": "vexact",
                            **json.loads(done.stdout.splitlines()[-1]),
                            "device": args.device,
                            **environment(args.device),
                        }
