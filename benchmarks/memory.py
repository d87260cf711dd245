"""Peak extra memory of one training step of the head, ours against stock; each in a process of its own."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

import torch

from .harness import environment
from .shapes import SHAPES

TOKENS = {"cpu": 4096, "cuda": 8192}
TASKS = {"loss": "linear_cross_entropy fwd+bwd", "logprobs": "linear_logprobs fwd+bwd"}

_CHILD = """
import json, sys, torch, torch.nn.functional as F
import vexact_ops as vx
who, task, device, dtype, *sizes = sys.argv[1:]
(T, H, V), dtype = map(int, sizes), getattr(torch, dtype)

def step(T):
    g = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(T, H, generator=g, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=g, device=device) * H**-0.5).to(dtype).requires_grad_()
    target = torch.randint(V, (T,), generator=g, device=device)
    reset()
    if who == "vexact":
        result = (vx.linear_cross_entropy if task == "loss" else vx.linear_logprobs)(hidden, weight, target)
    else:
        reduction = "mean" if task == "loss" else "none"
        result = F.cross_entropy(F.linear(hidden, weight).float(), target, reduction=reduction)
    result.sum().backward()
    return peak()

if device == "cuda":
    def reset():
        torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); reset.base = torch.cuda.memory_allocated()
    def peak():
        torch.cuda.synchronize(); return torch.cuda.max_memory_allocated() - reset.base
else:
    def status(key):
        return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
    def reset():
        open("/proc/self/clear_refs", "w").write("5")  # the high-water mark starts again at the present size
        reset.base = status("VmRSS")
    def peak():
        return status("VmHWM") - reset.base
step(64)
print(json.dumps(step(T)))
"""


def run(args: argparse.Namespace) -> Iterator[dict]:
    """One record per task, shape and dtype: MiB beyond the inputs, both gradients included for both."""
    tokens = TOKENS[args.device]
    for task, title in TASKS.items():
        for shape in (SHAPES[s] for s in args.shape.split(",")):
            for dtype in args.dtype.split(","):
                peaks = {}
                for who in ("vexact", "torch"):
                    sizes = str(tokens), str(shape.H), str(shape.V)
                    command = [sys.executable, "-c", _CHILD, who, task, args.device, dtype, *sizes]
                    done = subprocess.run(command, capture_output=True, text=True)
                    if done.returncode:
                        raise RuntimeError(f"memory: {who} {shape.name} {dtype} failed:\n{done.stderr}")
                    peaks[who] = json.loads(done.stdout) / 2**20
                gradients = (tokens + shape.V) * shape.H * getattr(torch, dtype).itemsize / 2**20
                yield {
                    "room": "memory",
                    "case": f"{title} {shape.name} T={tokens} V={shape.V} {dtype}",
                    "backend": "vexact",
                    "ours": round(peaks["vexact"], 1),
                    "stock": round(peaks["torch"], 1),
                    "gradients": round(gradients, 1),
                    "ratio": round(peaks["vexact"] / peaks["torch"], 4),
                    "unit": "MiB peak",
                    "device": args.device,
                    **environment(args.device),
                }
