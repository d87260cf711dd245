"""What trusts the rollout, checked by sampling: the trainer scores a part of a step's answers once more, and has the
rollout's bytes.

Every log-probability is compared with the first training forward's anyway. This is another forward, without gradients,
in other batches, and before anything is trained on.
"""

import math
import random
from collections.abc import Mapping, Sequence

from torch import Tensor

from ..proof import compare
from .options import Options
from .trainer import Sample


def places(options: Options, step: int, rank: int) -> list[int]:
    """Which of a step's answers, in the engine's order, a rank scores again; as many on every rank, none where the step
    is not one of the `check_every`-th. A function of seed and step, and for one rank of nothing else."""
    if not options.check_every or step % options.check_every:
        return []
    mine = options.share(range(options.prompts * options.samples), rank)
    count = math.ceil(options.check_share * len(mine))
    return [mine[i] for i in sorted(random.Random(f"{options.seed} {step}").sample(range(len(mine)), count))]


def expect_equal(options: Options, step: int, samples: Sequence[Sample], scored: Mapping[int, Tensor]) -> None:
    """
    scored   place among the step's samples -> the trainer's log-probabilities of its tokens
    raises   LogprobsDiffer naming step, prompt, answer and the first token with other bytes than the rollout's
    """

    def name(place: int) -> str:
        prompt, answer = (n + 1 for n in divmod(place, options.samples))
        return f"recipe: step {step + 1}, prompt {prompt} of {options.prompts}, answer {answer} of {options.samples}"

    compare.expect_equal((name(i), samples[i].token_ids, samples[i].rollout, own) for i, own in scored.items())
