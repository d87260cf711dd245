"""The trainers' processes: one is this process; of several, each has its own, and this one watches."""

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import HandoverFailed, ReplicaDied
from ..parallel.process import how_ended
from ..proof.compare import LogprobsDiffer
from ..weights.fetch import fetch_smollm2
from . import tasks
from .checkpoint import Saving
from .grpo import ALIGNED, Report, Run, run
from .options import SMOLLM2, Options
from .trainer import Diverged


class ProcessDied(RuntimeError):
    """A trainer's process has ended before its time."""


_KNOWN = (ValueError, TypeError, OSError, ModuleNotFoundError, ReplicaDied, HandoverFailed, LogprobsDiffer, Diverged)
_KNOWN = {known.__name__: known for known in _KNOWN}
_LAST_WORDS = 3.0  # seconds in which one who has failed for another's end may be told from that one


def launch(
    options: Options,
    *,
    sides: Sequence[str] = (ALIGNED,),
    report: Report = lambda *_: None,
    saving: Saving | None = None,
    watch: bool = False,
    begun: float | None = None,
) -> dict[str, Run]:
    """Train on all ranks, from the weights of `options.model`, one side of grpo.SIDES after another.

    report    see grpo.Report; what it raises ends the run
    saving    keep the run in a folder, or go on from there
    watch     report digests of parameters too
    begun     time.perf_counter() where the command began, for the first step's parts
    returns   side -> its Run. In a process that torchrun has started as another rank than 0 they are empty
    raises    LogprobsDiffer where the aligned side's trainer has other bytes than the rollout, see check.py
              ModuleNotFoundError without reasoning-gym, where the task is of it
              ProcessDied, ReplicaDied where a trainer, or the engine, has ended before its time; what one of them has
              raised. All others are ended then
              FileExistsError, ValueError: a run that `saving` must not write over, or cannot go on from
    """
    how = {"saving": saving, "watch": watch, "begun": begun}
    task = options.task or (tasks.DEFAULT if options.model == SMOLLM2 else tasks.EVENS)
    if task != tasks.EVENS:
        tasks.reasoning_gym(task)  # before a model is fetched and loaded for it
    options, elastic = placed(options), dist.is_torchelastic_launched()
    if saving is not None and not (elastic and int(os.environ["RANK"])):
        saving.begin(options)
    if options.model == SMOLLM2:
        fetch_smollm2()  # once, before every process asks for it
    if elastic:
        with _group(options, None) as device:
            return run(options, sides, device, report, **how)
    if options.ranks == 1:
        with _group(options, (dist.HashStore(), 0)) as device:
            return run(options, sides, device, report, **how)
    return _supervise(options, sides, report, how)


def placed(options: Options) -> Options:
    """With as many ranks as torchrun has started, where it has."""
    return replace(options, ranks=int(os.environ["WORLD_SIZE"])) if dist.is_torchelastic_launched() else options


@contextlib.contextmanager
def _group(options: Options, where: tuple[dist.Store, int] | None) -> Iterator[torch.device]:
    """A process group, by gloo, and on GPUs by NCCL too; yields this rank's device."""
    gpus = torch.device(options.device).type == "cuda"
    if where is None:
        local = dist.get_node_local_rank(fallback_rank=0)
        meeting = {}
    else:
        meeting = {"store": where[0], "rank": where[1], "world_size": options.ranks}
        local = where[1]
    device = torch.device(options.device)
    if gpus:
        device = torch.device("cuda", (device.index or 0) + local)
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"recipe: ranks: rank {local} wants {device}, but torch sees {torch.cuda.device_count()} GPUs"
            )
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", **meeting)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _supervise(options: Options, sides: Sequence[str], report: Report, how: dict[str, Any]) -> dict[str, Run]:
    context = multiprocessing.get_context("spawn")
    processes, ends = [], []
    with tempfile.TemporaryDirectory(prefix="vexact-") as folder:
        try:
            for number in range(options.ranks):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, options, sides, number, str(Path(folder) / "store"), how)
                process = context.Process(target=_work, args=arguments, name=f"vexact-trainer-{number}")
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(ours)
            return _watch(processes, ends, report)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for end in ends:
                end.close()


def _watch(processes: list, ends: list[Connection], report: Report) -> dict[str, Run]:
    """Until all have ended well. What went wrong first is not always heard first: where one is killed, its peers say
    that their connections broke."""
    result, failed, until = {}, [], None
    listening = dict(enumerate(ends))
    while listening and (until is None or time.monotonic() < until):
        for ready in wait(list(listening.values()), None if until is None else _LAST_WORDS):
            number = next(n for n, end in listening.items() if end is ready)
            try:
                kind, *values = ready.recv()
            except (EOFError, OSError):
                del listening[number]
                processes[number].join()
                if code := processes[number].exitcode:
                    ended = f"trainer {number} (process {processes[number].pid}) {how_ended(code)}"
                    raise ProcessDied(ended) from None
                continue
            if kind == "failed":
                failed.append(values)
                until = until or time.monotonic() + _LAST_WORDS
            elif kind == "done":
                result = values[0]
            else:
                report(kind, *values)
    if failed:
        _, name, text = min(failed)
        raise _KNOWN.get(name, RuntimeError)(text)
    return result


# In a trainer's process


def _work(
    connection: Connection, options: Options, sides: Sequence[str], number: int, path: str, how: dict[str, Any]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, to all: the one that watches ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, torch.get_num_threads() // options.ranks))
    try:
        with _group(options, (dist.FileStore(path, options.ranks), number)) as device:
            runs = run(options, sides, device, lambda *event: connection.send(event), **how)
        if number == 0:
            connection.send(("done", runs))
    except BaseException as error:
        name, text = type(error).__name__, str(error)
        connection.send(
            ("failed", time.monotonic(), name, text if name in _KNOWN else f"trainer {number}: {name}: {text}")
        )


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
