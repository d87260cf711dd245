"""A run on disk, to go on from: FOLDER/aligned/step-00000010 has what the trainers held after ten steps."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .options import Options
from .rollout import Generate, Rollout
from .trainer import Trainer

OPTIONS, STATE, ANSWERS = "options.json", "state.json", "answers"


@dataclass(frozen=True)
class Saving:
    """Where a run is kept, and how often.

    folder   made where it is not there
    every    steps between two that are kept; the last one always is
    keep     the newest so many are left
    resume   go on from the newest in `folder`; where there is none, begin
    """

    folder: str
    every: int = 10
    keep: int = 2
    resume: bool = False

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"Saving: {name} is {value}, expected an integer of 1 or more")

    def begin(self, options: Options) -> None:
        """Once, before any process trains: what stands in the folder belongs to this run, or it is empty.

        raises   FileExistsError: a run is kept there, and resume was not asked for. ValueError: one of other options
        """
        path = Path(self.folder) / OPTIONS
        if path.exists():
            if not self.resume:
                raise FileExistsError(f"{self.folder}: a run is kept here: expected --resume, or another folder")
            options.check_same(json.loads(path.read_text(encoding="utf-8")), f"the run in {self.folder}")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if any(path.parent.iterdir()):
            raise FileExistsError(f"{self.folder}: has files, and no run: expected an empty or a new folder")
        path.write_text(json.dumps(options.to_json()), encoding="utf-8")

    def newest(self, side: str) -> int:
        """The last step of a side that is kept; 0: none."""
        return max((int(path.name[5:]) for path in Path(self.folder, side).glob("step-????????")), default=0)

    def is_due(self, step: int, steps: int) -> bool:
        return step == steps or step % self.every == 0

    def _path(self, side: str, step: int) -> Path:
        return Path(self.folder, side, f"step-{step:08d}")

    def save(
        self, side: str, step: int, trainer: Trainer, facts: dict[str, Any], rollout: Rollout | Generate | None
    ) -> None:
        """All ranks call. A folder has its name once it is whole: a run that is killed here has the last one. Of the
        first rank's rollout it has the answers that are drafted from. OSError names the folder and what failed."""
        path = self._path(side, step)
        part = path.with_suffix(".part")
        first = dist.get_rank() == 0
        if first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        with _named(part, "written"):
            dcp.save(_state(trainer), checkpoint_id=part)
            if first:
                (part / STATE).write_text(json.dumps(facts), encoding="utf-8")
                rollout.save_answers(part / ANSWERS)
        if first:
            shutil.rmtree(path, ignore_errors=True)
            os.replace(part, path)
            for old in sorted(path.parent.glob("step-????????"))[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier()

    def load(self, side: str, step: int, trainer: Trainer, rollout: Rollout | Generate | None) -> dict[str, Any]:
        """All ranks call; the trainer then holds what `save` was called with, on as many ranks or others. Returns its
        facts. OSError names the folder and what failed."""
        path, state = self._path(side, step), _state(trainer)
        if rollout is not None:
            rollout.load_answers(path / ANSWERS)
        with _named(path, "read"):
            known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            if f"{_generators()}.cpu" not in known:  # a rank more than there were: it goes on with its own
                del state[_generators()]
            dcp.load(state, checkpoint_id=path)
        set_state_dict(
            trainer.weights,
            trainer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        trainer.round_masters()
        if (generators := state.get(_generators())) is not None:
            torch.set_rng_state(generators["cpu"])
            if trainer.device.type == "cuda":
                torch.cuda.set_rng_state(generators["cuda"], trainer.device)
        return json.loads((path / STATE).read_text(encoding="utf-8"))


@contextlib.contextmanager
def _named(path: Path, done: str) -> Iterator[None]:
    """torch's CheckpointException is no Exception, and its message is the tracebacks of all ranks."""
    try:
        yield
    except (CheckpointException, OSError) as error:
        cause = min(error.failures.items())[1][0] if isinstance(error, CheckpointException) else error
        text = " ".join(str(cause).split())
        raise OSError(f"{path}: could not be {done}: {type(cause).__name__}: {text}") from error


def _generators() -> str:
    return f"generators of rank {dist.get_rank()}"


def _state(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.weights, trainer.optimizer)
    generators = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(trainer.device)
    return {"model": model, "optimizer": optimizer, _generators(): generators}
