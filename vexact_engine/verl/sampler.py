"""verl's sampler, in an order that is the same in every run.

    trainer.v1.sampler.custom_sampler.path=pkg://vexact_engine.verl.sampler
    trainer.v1.sampler.custom_sampler.name=Ordered

verl 0.9.1 names prompts at random and takes them in the order of a set of these names: so which answers share a
micro-batch is another in each run, and with it the order in which a weight's gradient is summed. Under this sampler a
batch's rows are in the order of their tokens. With rollout.full_determinism, under which a prompt has the same answers
in every run, a run in one layout then ends with the same weights, one that goes on from a checkpoint too. verl gives no
sampler but its own algorithm.filter_groups and sync_refill_failed_groups, and would leave them out: refused with it, as
is trainer_mode other than sync.
"""

from typing import Any

from . import check_versions

check_versions()
import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Ordered(ReplayBuffer):
    """verl's own for trainers in step with their rollout (trainer_mode=sync).

    raises  ValueError where that is not the one, or something is asked of it that verl does not hand on
    """

    def __init__(self, *, trainer_mode: str, refill_fn=None, **given: Any) -> None:
        refused = {"trainer.v1.trainer_mode": (trainer_mode, "sync")}
        trainer = getattr(refill_fn, "__self__", None)  # whoever is asked for more prompts
        if trainer is not None:
            groups = trainer.config.algorithm.get("filter_groups") or {}
            refused["algorithm.filter_groups.enable"] = bool(groups.get("enable")), False
            failed = "sync_refill_failed_groups"
            refused[f"trainer.v1.sampler.{failed}"] = bool(trainer.config.trainer.v1.sampler.get(failed)), False
        for name, (got, expected) in refused.items():
            if got != expected:
                said = f"got {got}, expected {expected} with vexact_engine.verl.sampler, which is not handed it"
                raise ValueError(f"vexact: {name}: {said}")
        super().__init__(trainer_mode=trainer_mode, refill_fn=refill_fn, **given)

    def _materialize_batch(self, partition_id, *args):
        batch = super()._materialize_batch(partition_id, *args)
        names = ["prompts", "responses"]
        data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=names)
        rows = [*zip(*([row.tolist() for row in data[name].unbind()] for name in names))]
        batch.reorder(sorted(range(len(rows)), key=rows.__getitem__))
        return batch
