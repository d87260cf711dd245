"""A run on disk, to go on from: FOLDER/aligned/step-00000010 has what the trainers held after ten steps."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
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
        first rank's rollout it has the answers that are drafted from."""
        path = self._path(side, step)
        part = path.with_suffix(".part")
        first = dist.get_rank() == 0
        if first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        dist.barrier()
        dcp.save(_state(trainer), checkpoint_id=part)
        if first:
            (part / STATE).write_text(json.dumps(facts), encoding="utf-8")
            rollout.save_answers(part / ANSWERS)
            shutil.rmtree(path, ignore_errors=True)
            os.replace(part, path)
            for old in sorted(path.parent.glob("step-????????"))[: -self.keep]:
                shutil.rmtree(old)
        dist.barrier()

    def load(self, side: str, step: int, trainer: Trainer, rollout: Rollout | Generate | None) -> dict[str, Any]:
        """All ranks call; the trainer then holds what `save` was called with. Returns its facts."""
        path, state = self._path(side, step), _state(trainer)
        if rollout is not None:
            rollout.load_answers(path / ANSWERS)
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            trainer.weights,
            trainer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        trainer.round_masters()
        torch.set_rng_state(state[_generators()]["cpu"])
        if trainer.device.type == "cuda":
            torch.cuda.set_rng_state(state[_generators()]["cuda"], trainer.device)
        return json.loads((path / STATE).read_text(encoding="utf-8"))


def _generators() -> str:
    return f"generators of rank {dist.get_rank()}"


def _state(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(trainer.weights, trainer.optimizer)
    generators = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(trainer.device)
    return {"model": model, "optimizer": optimizer, _generators(): generators}
