"""Peak extra memory of one training step of the loss, ours against stock; each in a process of its own."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator

from .harness import environment
from .shapes import SHAPES

TOKENS = 4096

_CHILD = """
import json, sys, torch, torch.nn.functional as F
import vexact_ops as vx
who, T, H, V, dtype, device = sys.argv[1], *map(int, sys.argv[2:5]), getattr(torch, sys.argv[5]), sys.argv[6]

def step(T):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=g).to(device, dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=g) * H**-0.5).to(device, dtype).requires_grad_()
    target = torch.randint(V, (T,), generator=g).to(device)
    reset()
    if who == "vexact":
        loss = vx.linear_cross_entropy(hidden, weight, target)
    else:
        loss = F.cross_entropy(F.linear(hidden, weight).float(), target)
    loss.backward()
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
    """One record per shape and dtype: MiB beyond the inputs, weight gradient included for both."""
    for shape in (SHAPES[s] for s in args.shape.split(",")):
        for dtype in args.dtype.split(","):
            peaks = {}
            for who in ("vexact", "torch"):
                command = [
                    sys.executable,
                    "-c",
                    _CHILD,
                    who,
                    str(TOKENS),
                    str(shape.H),
                    str(shape.V),
                    dtype,
                    args.device,
                ]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise RuntimeError(f"memory: {who} {shape.name} {dtype} failed:\n{done.stderr}")
                peaks[who] = json.loads(done.stdout) / 2**20
            yield {
                "room": "memory",
                "case": f"linear_cross_entropy fwd+bwd {shape.name} T={TOKENS} V={shape.V} {dtype}",
                "backend": "vexact",
                "ours": round(peaks["vexact"], 1),
                "stock": round(peaks["torch"], 1),
                "ratio": round(peaks["vexact"] / peaks["torch"], 4),
                "unit": "MiB peak",
                "device": args.device,
                **environment(args.device),
            }
