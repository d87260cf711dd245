"""How long the imports take, beside torch's own: the best of several processes, each of which imports torch first."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

from .harness import ROOT, environment

_CHILD = """
import json, sys, time
begin = time.perf_counter()
import torch
torch_s = time.perf_counter() - begin
times = {}
def timed(name, run):
    begin = time.perf_counter()
    run()
    times[name] = time.perf_counter() - begin
timed("vexact_ops", lambda: __import__("vexact_ops"))
import vexact_ops as vx
timed("vexact_ops, all ops", lambda: [getattr(vx, n) for n in vx.__all__ if n not in ("admit", "patch", "testing")])
timed("vexact_engine", lambda: __import__("vexact_engine"))
print(json.dumps([torch_s, times]))
"""


def run(args: argparse.Namespace) -> Iterator[dict]:
    """A record for each import: milliseconds of ours, and of torch."""
    found = []
    for _ in range(args.repeats):
        done = subprocess.run([sys.executable, "-c", _CHILD], stdout=subprocess.PIPE, check=True, cwd=ROOT)
        found.append(json.loads(done.stdout))
    torch_s = min(seconds for seconds, _ in found)
    for name in found[0][1]:
        ours = min(times[name] for _, times in found)
        yield {
            "room": "imports",
            "case": f"{name}, after torch",
            "backend": "vexact",
            "ours": round(1e3 * ours, 2),
            "stock": round(1e3 * torch_s),
            "ratio": round(ours / torch_s, 4),
            "unit": "ms",
            "device": args.device,
            **environment(args.device),
        }
