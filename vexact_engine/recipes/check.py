"""What trusts the rollout, checked by sampling: the trainer scores a part of a step's answers once more, and has the
rollout's bytes.

Every log-probability is compared with the first training forward's anyway. This is another forward, without gradients,
in other batches, and before anything is trained on.
"""

import math
import random
from collections.abc import Iterable

import torch
from torch import Tensor

from ..proof.compare import differences
from .options import Options
from .trainer import Sample


class LogprobsDiffer(RuntimeError):
    """The trainer has other bytes than the rollout. The message names the step, the answer and the first such token."""


def places(options: Options, step: int, rank: int) -> list[int]:
    """Which of a step's answers, in the engine's order, a rank scores again; as many on every rank, none where the step
    is not one of the `check_every`-th. A function of seed and step, and for one rank of nothing else."""
    if not options.check_every or step % options.check_every:
        return []
    mine = options.share(range(options.prompts * options.samples), rank)
    count = math.ceil(options.check_share * len(mine))
    return [mine[i] for i in sorted(random.Random(f"{options.seed} {step}").sample(range(len(mine)), count))]


def expect_equal(options: Options, step: int, scored: Iterable[tuple[int, Sample, Tensor]]) -> None:
    """
    scored   (place in the engine's order, the answer, the trainer's log-probabilities of its tokens)
    raises   LogprobsDiffer where one of them has other bytes than the rollout's, or is NaN
    """
    scored = list(scored)
    wrong = [differences(sample.rollout, own)[1] for _, sample, own in scored]
    first = next((i for i, differs in enumerate(wrong) if differs.any()), None)
    if first is None:
        return
    place, sample, own = scored[first]
    token = int(wrong[first].nonzero()[0])
    prompt, answer = divmod(place, options.samples)
    count, differ = sum(map(len, wrong)), int(sum(differs.sum() for differs in wrong))
    raise LogprobsDiffer(
        f"recipe: step {step + 1}, prompt {prompt + 1} of {options.prompts}, answer {answer + 1} of {options.samples}, "
        f"token {token + 1} of {len(sample.token_ids)} (id {sample.token_ids[token]}): the rollout's log-probability "
        f"is {_shown(sample.rollout, token)}, the trainer's {_shown(own, token)}; of {count} that were scored again "
        f"{differ} differ"
    )


def _shown(values: Tensor, place: int) -> str:
    value = values[place : place + 1]
    return f"{value.item():.9g} ({value.view(torch.int32).item() & 0xFFFFFFFF:08x})"
