"""What verl's bypass_mode takes on trust, checked by sampling: before an update the actor scores a part of the answers
once more, in other batches and without gradients, and has the rollout's bytes.

    algorithm.rollout_correction.bypass_mode=true                             # old_log_probs are the rollout's
    +actor_rollout_ref.model.fused_kernel_options.vexact.check_every=10       # steps; 0, which it is by itself: never
    +actor_rollout_ref.model.fused_kernel_options.vexact.check_share=0.25     # of each rank's answers

Of a step the first update is checked, for which the weights are still the rollout's. Trainers that are ahead of their
rollout (trainer.v1.trainer_mode other than sync) have answers of older weights: there every check would fail.
"""

import math
import random
from collections.abc import Callable
from typing import Any

from verl.utils import tensordict_utils as tu

from ..proof.compare import expect_equal


class Check:
    """One actor's. `of(step)` says that the rollout has its weights, of that step; None: once more."""

    def __init__(self, every: int, share: float) -> None:
        self._every, self._share = every, share
        self._step, self._is_fresh = 0, False

    def of(self, step: int | None) -> None:
        self._step = self._step if step is None else step
        self._is_fresh = True

    def before(self, data: Any, infer: Callable[[Any], dict]) -> int:
        """Called before each update, on all ranks alike. Returns how many tokens were scored again.

        data     the mini-batch: response_mask, and rollout_log_probs of the same lengths
        infer    verl's infer_batch without a loss
        raises   LogprobsDiffer naming step, answer and token; ValueError where data has no rollout_log_probs
        """
        is_due = self._every > 0 and self._is_fresh and self._step % self._every == 0
        self._is_fresh = False
        if not is_due:
            return 0
        given = set(data.keys())
        if "rollout_log_probs" not in given:
            raise ValueError(
                "vexact: check_every: the batch has no rollout_log_probs: expected rollout.calculate_log_probs=true"
            )
        rows = self._rows(len(data), self._multiple(data))
        chosen = tu.index_select_tensor_dict(data, rows)
        tu.assign_non_tensor(chosen, calculate_entropy=False)
        found = infer(chosen)["model_output"]["log_probs"].unbind()
        names = ("responses", "response_mask", "rollout_log_probs")
        compared = []
        for row, own, ids, mask, rollout in zip(rows, found, *(chosen[name].unbind() for name in names)):
            kept = mask.bool().cpu()
            own = own[len(own) - len(ids) - 1 : len(own) - 1].float().cpu()  # the value at t is of token t + 1
            name = f"vexact: step {self._step + 1}, answer {row + 1} of {len(data)} of this rank's"
            if "uid" in given:
                name += f" (prompt {tu.get(data, 'uid')[row]})"
            compared.append((name, ids.cpu()[kept].tolist(), rollout.float().cpu()[kept], own[kept]))
        expect_equal(compared)
        return sum(len(ids) for _, ids, _, _ in compared)

    def _rows(self, count: int, multiple: int) -> list[int]:
        """A function of step and count alone: ranks that share rows have the same ones."""
        wanted = math.ceil(self._share * count / multiple) * multiple
        return sorted(random.Random(self._step).sample(range(count), min(wanted, count)))

    def _multiple(self, data: Any) -> int:
        """Answers of a micro-batch, where they are counted: verl cuts no batch that is not a multiple."""
        if tu.get_non_tensor_data(data=data, key="use_dynamic_bsz", default=True):
            return 1
        return int(tu.get_non_tensor_data(data=data, key="micro_batch_size_per_gpu", default=1))
