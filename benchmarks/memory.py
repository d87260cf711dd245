"""Peak extra memory of one training step of the head, and of a mixture's layer, ours against stock and Liger; each in a
process of its own. --rows sweeps over the tokens of the step.

Extra is what lies beyond the inputs; the gradients are part of it for both. The layer's `activations` are what its
forward must leave for its backward in any implementation that does not compute it anew: the tokens (T, H) and the gates
(Tk, 2I). `of_activations` is the peak without the results (output and gradients), as a multiple of those.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator

import torch

from .harness import ROOT, environment
from .peers import say_once
from .shapes import SHAPES, Shape

TOKENS = {"cpu": 4096, "cuda": 8192}
TASKS = {"loss": "linear_cross_entropy fwd+bwd", "logprobs": "linear_logprobs fwd+bwd", "mixture": "fused_moe fwd+bwd"}

_CHILD = """
import json, sys, torch, torch.nn.functional as F
import vexact_ops as vx
who, task, device, dtype, tokens, *sizes = sys.argv[1:]
tokens, (H, V, E, K, I), dtype = json.loads(tokens), map(int, sizes), getattr(torch, dtype)

def head(T, random):
    hidden, weight = random(T, H), random(V, H, scale=H**-0.5)
    target = torch.randint(V, (T,), device=device)
    reset()
    if who == "liger":
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
        result = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, target)[0]
    elif who == "vexact":
        result = (vx.linear_cross_entropy if task == "loss" else vx.linear_logprobs)(hidden, weight, target)
    else:
        reduction = "mean" if task == "loss" else "none"
        result = F.cross_entropy(F.linear(hidden, weight).float(), target, reduction=reduction)
    result.sum().backward()
    return peak()

def mixture(T, random):
    x, gate_up, down = random(T, H), random(E, 2 * I, H, scale=H**-0.5), random(E, H, I, scale=I**-0.5)
    dy = random(T, H).detach()
    weights, ids = vx.moe_route(torch.randn(T, E, device=device), K)
    weights.requires_grad_()
    if who == "vexact":
        layer = vx.fused_moe
    else:
        from benchmarks.ops.fused_moe import loop, torch_grouped
        layer = torch_grouped if device == "cuda" else loop
    reset()
    layer(x, gate_up, down, weights, ids).backward(dy)
    return peak()

def step(T):
    g = torch.Generator(device).manual_seed(0)
    def random(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, device=device) * scale).to(dtype).requires_grad_()
    return (mixture if task == "mixture" else head)(T, random)

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
def measured(T):
    step(64 if task != "mixture" else T)  # what is compiled, and verified for a number of rows, does so now
    return step(T)
print(json.dumps([measured(T) for T in tokens]))
"""


def _gradients(task: str, shape: Shape, tokens: int) -> int:
    """Elements of the results that both have: gradients, and the layer's output."""
    if task == "mixture":
        return 2 * tokens * shape.H + 3 * shape.E * shape.H * shape.expert_I
    return (tokens + shape.V) * shape.H


def run(args: argparse.Namespace) -> Iterator[dict]:
    """One record per task, shape, dtype and number of tokens: MiB beyond the inputs, the gradients included for all."""
    tokens = args.rows if args.rows_given else [TOKENS[args.device]]
    for task in TASKS:
        for shape in (SHAPES[s] for s in args.shape.split(",")):
            if task == "mixture" and not shape.E:
                continue
            for dtype in args.dtype.split(","):
                peaks = {who: _peaks(who, task, shape, dtype, tokens, args.device) for who in _whom(args, task, dtype)}
                for place, count in enumerate(tokens):
                    found = {who: values[place] / 2**20 for who, values in peaks.items() if values is not None}
                    yield _record(args, task, shape, dtype, count, found)


def _whom(args: argparse.Namespace, task: str, dtype: str) -> list[str]:
    liger = args.device == "cuda" and task == "loss" and dtype != "float32" and importlib.util.find_spec("liger_kernel")
    return ["vexact", "torch", *(["liger"] if liger else [])]


def _peaks(who: str, task: str, shape: Shape, dtype: str, tokens: list[int], device: str) -> list[int] | None:
    """Bytes for each number of tokens: on a CPU in a process each, since what one has freed another would find there.
    None of a peer that fails, which is said."""
    if device == "cpu" and len(tokens) > 1:
        return [_peaks(who, task, shape, dtype, [count], device)[0] for count in tokens]
    sizes = (shape.H, shape.V, shape.E, shape.top_k, shape.expert_I)
    command = [sys.executable, "-c", _CHILD, who, task, device, dtype, json.dumps(tokens), *map(str, sizes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    if who in ("vexact", "torch"):
        raise RuntimeError(f"memory: {who} {shape.name} {dtype} failed:\n{done.stderr}")
    say_once(f"memory: peer {who}: {(done.stderr.strip().splitlines() or ['no message'])[-1][:200]}")
    return None


def _record(args, task: str, shape: Shape, dtype: str, tokens: int, peaks: dict[str, float]) -> dict:
    size = getattr(torch, dtype).itemsize / 2**20
    gradients, layer = _gradients(task, shape, tokens) * size, {}
    if task == "mixture":
        activations = tokens * (shape.H + shape.top_k * 2 * shape.expert_I) * size
        multiple = (peaks["vexact"] - gradients) / activations
        layer = {"activations": round(activations, 1), "of_activations": round(multiple, 3)}
    return {
        "room": "memory",
        "case": f"{TASKS[task]} {shape.name} T={tokens} {'' if layer else f'V={shape.V} '}{dtype}",
        "backend": "vexact",
        "ours": round(peaks["vexact"], 1),
        "stock": round(peaks["torch"], 1),
        "peaks": {who: round(peak, 1) for who, peak in peaks.items()},
        "gradients": round(gradients, 1),
        "ratio": round(peaks["vexact"] / peaks["torch"], 4),
        **layer,
        "unit": "MiB peak",
        "device": args.device,
        **environment(args.device),
    }
