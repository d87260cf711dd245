"""verl's sampler, in an order that is the same in every run.

    trainer.v1.sampler.custom_sampler.path=pkg://vexact_engine.verl.sampler
    trainer.v1.sampler.custom_sampler.name=Ordered

verl 0.9.1 names prompts at random and takes them in the order of a set of these names: so which answers share a
micro-batch is another in each run, and with it the order in which a weight's gradient is summed. Under this sampler a
batch's rows are in the order of their tokens. With rollout.full_determinism, under which a prompt has the same answers
in every run, a run in one layout then ends with the same weights, one that goes on from a checkpoint too. verl gives no
sampler but its own algorithm.filter_groups: do not set both.
"""

from . import check_versions

check_versions()
import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Ordered(ReplayBuffer):
    """verl's own for trainers in step with their rollout (trainer_mode=sync)."""

    def _materialize_batch(self, partition_id, *args):
        batch = super()._materialize_batch(partition_id, *args)
        names = ["prompts", "responses"]
        data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=names)
        rows = [*zip(*([row.tolist() for row in data[name].unbind()] for name in names))]
        batch.reorder(sorted(range(len(rows)), key=rows.__getitem__))
        return batch
