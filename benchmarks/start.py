"""How long an engine takes from nothing until it can compute: on a machine that knows nothing, where the library brings
what was chosen on such a GPU; where it does not; and again in another process.

python -m benchmarks start --shape qwen3-1.7b,qwen3-8b
python -m benchmarks start --shape qwen3-1.7b,qwen3-8b --record
python -m benchmarks start --shape gpt-oss-20b --layers 4 --log
python -m benchmarks start --recipe --shape qwen3-0.6b --record

--recipe: as shipped and warm, from the command of `vexact recipe grpo` to the end of its first step, in which trainer
and engine begin, answers are drawn, and a step is trained. Of the step's seconds `parts` says what they went to, one
after another in the trainer, and what the caches have got is counted: warm nothing is verified, timed or compiled.
--record writes what was chosen where all was timed (kernels by shapes, sizes of graphs by engines) to
vexact_ops/_core/chosen/<gpu>.json, beside what is there: data that other machines with this GPU start with. Bits are
no matter of it: a kernel that is named there is verified on each machine as ever. In a checkout. With --recipe it keeps
what a step of the recipe needs, and times what is not there yet.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from vexact_ops._core import choices

from .harness import ROOT, environment
from .output import Refused

ROWS, TRAINING_ROWS = 512, 8192
ANSWERS = {"cpu": (1, 2, 4), "cuda": (16, 16, 128)}  # of a step of the recipe: prompts, samples, tokens
LOG = "%(relativeCreated)7d ms %(name)s: %(message)s"

_CHILD = """
import json, logging, sys, time
begin = time.perf_counter()
import torch
import vexact_ops as vx
from vexact_engine import Engine, EngineConfig
from vexact_engine.weights.random import config_of, load_random
from vexact_ops._core import admit, choices
shape, device, rows, training, layers = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
if log := sys.argv[6]:
    logging.basicConfig(level=logging.INFO, format=log)
compiled = []
if device == "cuda":
    from triton import knobs
    knobs.compilation.listener = lambda *, times, cache_hit, **_: cache_hit or compiled.append(times.total / 1e6)
imported = time.perf_counter() - begin
spent = []
admit.watchers.append(lambda decision: spent.append(decision.seconds))
if rows:
    vx.admit(config_of(shape), rows=rows, training_rows=[training], progress=True)
begin = time.perf_counter()
loaded = load_random(shape, device=device, layers=layers or None)
if device == "cuda":
    torch.cuda.synchronize()
made = time.perf_counter() - begin
begin = time.perf_counter()
with Engine(loaded, EngineConfig(show_progress=False)) as engine:
    started = time.perf_counter() - begin
    engine.generate([[1, 2, 3]], None)
found = admit.decisions()
print(json.dumps({
    "import_s": round(imported, 2), "weights_s": round(made, 2), "ours": round(started, 2),
    "decisions": len(found), "kernels": sum(len(one.verdicts) for one in found),
    "verifying_s": round(sum(spent), 2), "compiled": len(compiled), "compilers_s": round(sum(compiled), 2),
    "recorded": choices.recorded(),
}))
"""


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("start")
    group.add_argument("--recipe", action="store_true", help="the first step of `vexact recipe grpo` (an engine)")
    group.add_argument("--caches", metavar="DIR", help="of --recipe: keep them there, and start warm there (nowhere)")
    group.add_argument("--record", action="store_true", help="keep what was chosen, as data of the library (measure)")


def run(args: argparse.Namespace) -> Iterator[dict]:
    """Three records per shape: `all timed` and `as shipped`, with caches of verdicts and kernels that are empty, and
    `warm`. With --record one, but of the recipe the last two as ever. compilers_s: of Triton's `compiled` kernels, each
    by itself: many compile at a time."""
    if args.caches and not args.recipe:
        raise Refused(f"--caches: got {args.caches}, expected --recipe beside it: others start with empty ones each")
    for shape in args.shape.split(","):
        if args.recipe:
            with _caches(args.caches) as caches, tempfile.TemporaryDirectory() as noted:
                for what in ("as shipped", "warm")[any(_kept(caches).values()) :]:
                    found = _first_step(args, shape, caches | {"VEXACT_RECORD": noted})
                    yield _record(args, f"recipe grpo, {shape}", what, found)
                if args.record:
                    _merge(choices.collected(noted), args.device)
            continue
        if args.record:
            with _caches() as caches:
                found = _child(args, shape, caches | {"VEXACT_CHOICES": "0"}, ROWS, TRAINING_ROWS)
            path = _merge(found.pop("recorded"), args.device)
            yield _record(args, shape, "recorded", found) | {"file": str(path.relative_to(ROOT))}
            continue
        with _caches() as caches:
            yield _record(args, shape, "all timed", _child(args, shape, caches | {"VEXACT_CHOICES": "0"}))
        with _caches() as caches:
            yield _record(args, shape, "as shipped", _child(args, shape, caches))
            yield _record(args, shape, "warm", _child(args, shape, caches))


@contextlib.contextmanager
def _caches(kept: str | None = None) -> Iterator[dict[str, str]]:
    """Variables by which a process finds caches that are empty; kept: those of this folder, which stays."""
    with contextlib.nullcontext(kept) if kept else tempfile.TemporaryDirectory() as folder:
        yield {"VEXACT_CACHE": f"{folder}/vexact", "TRITON_CACHE_DIR": f"{folder}/triton"}


def _child(args: argparse.Namespace, shape: str, variables: dict, rows: int = 0, training: int = 0) -> dict:
    rows = rows if args.device == "cuda" else 0  # there is nothing to verify for a CPU
    numbers = map(str, (rows, training, args.layers or 0))
    command = [sys.executable, "-c", _CHILD, shape, args.device, *numbers, LOG if args.log else ""]
    done = subprocess.run(command, env=os.environ | variables, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def _first_step(args: argparse.Namespace, shape: str, variables: dict) -> dict:
    """Seconds from the command to the record of its first step, and to that of the second.

    raises  RuntimeError where the run fails, which it does too where a log-probability has other bits
    """
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "run.jsonl"), Path(folder, "log.txt")
        sizes = zip(("--prompts", "--samples", "--max-new-tokens"), ANSWERS[args.device])
        given = ["--model", shape, "--device", args.device, "--steps", "2", "--record", str(file)]
        given += [word for name, value in sizes for word in (name, str(value))]
        given += ["--layers", str(args.layers)] if args.layers else []
        given += ["--debug"] if args.log else []
        command, seconds = [sys.executable, "-m", "vexact_engine.cli", "recipe", "grpo", *given], []
        before = _kept(variables)
        begin = time.perf_counter()
        with open(log, "w") as kept:
            said = sys.stderr if args.log else kept
            process = subprocess.Popen(command, env=os.environ | variables, stdout=said, stderr=said, cwd=ROOT)
            try:
                ended = None
                while ended is None:
                    ended = process.poll()  # ahead of the last look
                    steps = file.read_text().count('"kind": "step"') if file.exists() else 0
                    seconds += [time.perf_counter() - begin] * (steps - len(seconds))
                    time.sleep(0.05)
            finally:
                process.kill()
        if process.wait() or len(seconds) < 2:
            raise RuntimeError(f"start: recipe grpo: exit code {process.returncode}\n{log.read_text()[-2000:]}")
        parts = next(entry["seconds"] for line in file.open() if (entry := json.loads(line)).get("kind") == "start")
    kept = {name: count - before[name] for name, count in _kept(variables).items()}
    times = {"ours": round(seconds[0], 2), "second_s": round(seconds[1] - seconds[0], 2)}
    return times | kept | {"parts": {name: round(value, 2) for name, value in parts.items()}}


def _kept(variables: dict[str, str]) -> dict[str, int]:
    """What there is in caches: verdicts on kernels, and kernels, Triton's and flash-attn-4's."""
    ours, tritons = Path(variables["VEXACT_CACHE"]), Path(variables["TRITON_CACHE_DIR"])
    compiled = [*tritons.rglob("*.cubin"), *ours.glob("kernels/*.so"), *ours.glob("kernels/*.o")]
    return {"decisions": len([*ours.glob("admissions/*/*.json")]), "compiled": len(compiled)}


def _record(args: argparse.Namespace, shape: str, start: str, found: dict) -> dict:
    found.pop("recorded", None)
    own = {"room": "start", "case": f"{shape} {start}", "backend": "vexact", "unit": "s"}
    return {**own, **found, "device": args.device, **environment(args.device)}


def _merge(recorded: dict[str, dict], device: str, folder: Path = choices.FOLDER) -> Path:
    """Into the file of this machine's GPU."""
    import torch

    name = choices.name_of(torch.device("cuda", torch.cuda.current_device())) if device == "cuda" else "cpu"
    path = folder / f"{name}.json"
    there = json.loads(path.read_text()) if path.exists() else {}
    for kind, of in recorded.items():
        there[kind] = dict(sorted({**there.get(kind, {}), **of}.items()))
    made = environment(device)
    there["made"] = {key: made[key] for key in ("gpu", "torch", "triton", "commit", "date")}
    folder.mkdir(exist_ok=True)
    lines = (
        f"{json.dumps(kind)}: {{\n" + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in of.items()) + "\n}"
        for kind, of in sorted(there.items())
    )
    path.write_text("{" + ",\n".join(lines) + "}\n")  # a line for each choice, as differences are read
    return path
