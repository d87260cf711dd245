"""Models with layers of true dimensions for runs on GPUs, made while those begin."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .environment import environment
from .ppo import Case, gpus
from .warm import ENGINE, RESPONSE

SETTINGS = (
    f"data.max_response_length={RESPONSE}",
    "actor_rollout_ref.rollout.ignore_eos=True",
    *(f"+actor_rollout_ref.rollout.engine_kwargs.vexact.{name}={value}" for name, value in ENGINE.items()),
)


@contextlib.contextmanager
def true_models(cases: Sequence[Case], folder: Path) -> Iterator[Callable[[str], Path]]:
    """model(family) -> its folder, as soon as it is there; the kernels that it needs are compiled and verified then,
    beside the run.

    raises  AssertionError with the end of what was said, where that failed
    """
    begun = {}

    def said(family: str) -> str:
        return f"{family}: {(folder / f'{family}.txt').read_text()[-4000:]}"

    def model(family: str) -> Path:
        while not (folder / family).exists():
            assert begun[family].poll() is None, said(family)
            time.sleep(0.1)
        return folder / family

    with contextlib.ExitStack() as stack:
        for number, family in enumerate(dict.fromkeys(case.family for case in cases)):
            command = [sys.executable, "-W", "ignore", "-m", "trainers.warm", folder / family]
            device = {"CUDA_VISIBLE_DEVICES": gpus()[number % len(gpus())]}
            log = stack.enter_context(open(folder / f"{family}.txt", "w"))
            env = {**os.environ, **environment(device="cuda"), **device}
            begun[family] = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log, env=env))
            stack.callback(begun[family].kill)
        yield model
        for family, process in begun.items():
            assert process.poll() in (None, 0), said(family)
