"""What it takes ranks to put columns side by side: in a CUDA graph, by writing into each other's memory and by NCCL.

python -m benchmarks gather --ranks 2 --rows 1,16,64,256

Of 4,096 and 12,288 columns in bf16, as many of them on each rank, a process with a GPU of its own. Bytes are compared
first. A time is that of one gather among as many as a decode step has, the slowest rank's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch

from .harness import ROOT, environment

COLUMNS, IN_A_GRAPH, REPLAYS = (4096, 12288), 144, 20

_CHILD = """
import json, sys
import torch
import torch.distributed as dist
import vexact_ops as vx
from vexact_engine.runner.ranks import Group
rank, size, store, rows, columns, count, replays = *map(int, sys.argv[1:3]), sys.argv[3], *map(json.loads, sys.argv[4:])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
ours, nccl = Group(dist.group.WORLD, device), Group(dist.group.WORLD, device)
nccl._peers = None
stream = vx.cuda_stream(device)
torch.cuda.set_stream(stream)

def timed(gather, x):
    gather(x)
    graph = vx.cuda_graph(lambda: [gather(x) for _ in range(count)] and None)
    times = []
    for _ in range(replays):
        nccl.gather(x)  # all are there
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(); graph(); end.record(); end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    took = torch.tensor([[sorted(times)[replays // 2]]], dtype=torch.float64, device=device)
    return float(nccl.gather(took).max())

for width in columns:
    for number in rows:
        x = torch.randn(number, width // size, dtype=torch.float32, device=device).bfloat16()
        differ = int((ours.gather(x).view(torch.int16) != nccl.gather(x).view(torch.int16)).sum())
        took = [timed(group.gather, x) for group in (ours, nccl)]
        if not rank:
            print(json.dumps({"columns": width, "rows": number, "by": ours.by, "differ": differ, "took": took}))
dist.destroy_process_group()
"""


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("gather")
    group.add_argument("--ranks", type=int, default=2, metavar="N", help="GPUs (2)")


def run(args: argparse.Namespace) -> Iterator[dict]:
    """A record for each number of columns and rows, in microseconds; `stock` is NCCL.

    raises   RuntimeError where there are fewer GPUs, or a rank fails
    """
    if torch.cuda.device_count() < args.ranks:
        raise RuntimeError(f"gather: torch sees {torch.cuda.device_count()} GPUs, expected {args.ranks} or more")
    rows = list(args.rows) if args.rows_given else [1, 16, 64, 256]
    with tempfile.TemporaryDirectory() as folder:
        given = map(json.dumps, (rows, COLUMNS, IN_A_GRAPH, REPLAYS))
        common = [str(args.ranks), f"{folder}/store", *given]
        started = [
            subprocess.Popen([sys.executable, "-c", _CHILD, str(rank), *common], cwd=ROOT, stdout=subprocess.PIPE)
            for rank in range(args.ranks)
        ]
        outputs = [process.communicate()[0] for process in started]
    if failed := [rank for rank, process in enumerate(started) if process.returncode]:
        raise RuntimeError(f"gather: rank {failed[0]} has failed")
    for line in outputs[0].splitlines():
        if not line.startswith(b"{"):  # what NCCL says
            continue
        found = json.loads(line)
        case = f"{found['columns']} columns bf16, {found['rows']} rows, {args.ranks} ranks"
        own = {"room": "gather", "case": case, "unit": "us", "by": found["by"], "differ": found["differ"]}
        ours, nccl = (round(took, 2) for took in found["took"])
        own |= {"backend": "vexact", "ours": ours, "stock": nccl, "ratio": round(ours / nccl, 2)}
        yield {**own, "device": "cuda", **environment("cuda")}
