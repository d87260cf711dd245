"""What a run of main_ppo did, log-probability by log-probability: bits as integers, in files of VEXACT_RECORD.

`steps.jsonl` has, for each batch that was trained on, its samples with the log-probabilities of the rollout and those
that the trainer computed for it again, and `references.jsonl` those of a reference policy; `training.<pid>.jsonl` those
of the training forward itself, which the policy loss "recorded" sees (named by actor.policy_loss.loss_mode; for the
rest it is verl's vanilla); `updates.<pid>.jsonl` by what a rank has sent each of its updates, `adapters.<pid>.jsonl`
which of them were of adapters alone. None changes a thing.
A synchronous trainer looks ten times a second whether its samples are there, instead of every two seconds.

As a program it is verl's `python -m verl.trainer.main_ppo` with the former: python -m trainers.recorder OVERRIDES
"""

import functools
import json
import os
from pathlib import Path

import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn, register_policy_loss


def bits(values: torch.Tensor) -> list[int]:
    """As float32: every bfloat16, which verl's own actor gives, is one of those."""
    return values.detach().cpu().float().contiguous().view(torch.int32).tolist()


def write(name: str, record: dict) -> None:
    with open(Path(os.environ["VEXACT_RECORD"], name), "a") as file:
        file.write(json.dumps(record) + "\n")


@register_policy_loss("recorded")
def recorded(old_log_prob, log_prob, advantages, response_mask, *args, **kwargs):
    mask = response_mask.bool()
    record = {"training": bits(log_prob[mask]), "old": bits(old_log_prob[mask]), "dtype": str(log_prob.dtype)}
    record["advantages"] = bits(advantages[mask])
    write(f"training.{os.getpid()}.jsonl", record)
    return get_policy_loss_fn("vanilla")(old_log_prob, log_prob, advantages, response_mask, *args, **kwargs)


def record_updates() -> None:
    from vexact_engine.verl.adapter import ServerAdapter
    from vexact_engine.verl.handed import Weights

    update, alone = ServerAdapter.update_weights, Weights.adapters
    if hasattr(update, "__wrapped__"):
        return

    @functools.wraps(update)
    async def recording(self, *args, **options):
        await update(self, *args, **options)
        sent = {"rank": int(os.environ["RANK"]), "sender": type(self._sender).__name__}
        write(f"updates.{os.getpid()}.jsonl", sent)

    ServerAdapter.update_weights = recording

    @functools.wraps(alone)
    def recording_adapters(self):
        write(f"adapters.{os.getpid()}.jsonl", {"rank": int(os.environ["RANK"])})
        return alone(self)

    Weights.adapters = recording_adapters


FIELDS = "prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "rm_scores"


def samples_of(batch, *fields: str) -> list[dict]:
    """The samples of a batch, each with all that was written down for it, without those that only fill it up."""
    import transfer_queue

    fields = list(fields or FIELDS)
    data = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    rows = {name: data[name].unbind() for name in fields}
    samples = []
    for i, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
        if tag.get("is_padding"):
            continue
        sample = {"key": key, "first_version": tag["min_global_steps"], "last_version": tag["max_global_steps"]}
        for name in fields:
            row = rows[name][i]
            sample[name] = bits(row) if row.is_floating_point() else row.tolist()
        samples.append(sample)
    return samples


def record_steps() -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    compute = PPOTrainer._compute_old_log_prob

    @functools.wraps(compute)
    def recording(self, batch, metrics):
        batch = compute(self, batch, metrics)
        write("steps.jsonl", {"step": self.global_steps, "samples": samples_of(batch)})
        return batch

    PPOTrainer._compute_old_log_prob = recording
    refer = PPOTrainer._compute_ref_log_prob

    @functools.wraps(refer)
    def referring(self, batch, metrics):
        batch = refer(self, batch, metrics)
        write("references.jsonl", {"samples": samples_of(batch, "prompts", "responses", "ref_log_prob")})
        return batch

    PPOTrainer._compute_ref_log_prob = referring
    build = PPOTrainer._build_replay_buffer

    @functools.wraps(build)
    def impatient(self):
        buffer = build(self)
        if self.config.trainer.v1.trainer_mode == "sync":
            buffer.poll_interval = 0.1
        return buffer

    PPOTrainer._build_replay_buffer = impatient


record_updates()  # in every process that imports this as an external_lib


def main() -> None:
    import ray
    from verl.trainer import main_ppo

    from trainers import workers

    workers.without_autoscaler()

    class Runner(main_ppo.TaskRunnerV1.__ray_metadata__.modified_class):
        def run(self, config):
            from trainers import recorder

            recorder.record_steps()
            return super().run(config)

    main_ppo.TaskRunnerV1 = ray.remote(Runner)
    main_ppo.main()


if __name__ == "__main__":
    main()
