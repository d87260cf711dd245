"""What TRL asks of an engine that generates for it, asked of ours."""

from collections.abc import Iterator, Sequence, Set
from typing import Any

from torch import Tensor, nn

from vexact_ops.patch import lora
from vexact_ops.patch.facts import compute_dtypes

from ..config import SamplingParams
from ..engine import Engine
from ..request import derive_seed


class Generation:
    """TRL's `VLLMGeneration` in the two calls that its trainers make: weights in, answers out.

    handle   of the trainer's patched model, whose numbers the engine's are compared with at every hand-over
    fields   of SamplingParams, one set for all answers
    seed     of this rank: a draw is a function of it, of how many answers were asked for before, and of its place
    sleeps   the engine gives its memory back between rollouts
    names    of the engine's tensors; None: all that the trainer has
    """

    def __init__(
        self,
        engine: Engine,
        handle: Any,
        fields: dict[str, Any],
        seed: int,
        sleeps: bool,
        names: Set[str] | None = None,
    ):
        self.engine, self._handle, self._fields, self._seed, self._sleeps = engine, handle, fields, seed, sleeps
        self._names, self._asked, self._has_all = names, 0, False

    def sync_weights(self) -> None:
        """The trainer's weights, as its forward has them, go to the engine."""
        if self.engine.asleep:
            self.engine.wake_up()
        self.engine.update_weights(self._weights(), numerics=self._handle.numerics(self.engine.device))
        self._has_all = True

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        model: nn.Module = self._handle.model
        kinds, adapters = compute_dtypes(model), lora.adapters(model)
        alone = adapters and self._has_all and not any(p.requires_grad for p in _others(model, adapters))
        unknown = set() if self._names is None else adapters - self._names  # TRL's reference is an adapter of its own
        for name, value in model.state_dict().items():
            if name in unknown or (alone and name not in adapters):
                continue
            tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
            yield name, tensor.to(kinds.get(name, tensor.dtype))

    def generate(
        self, prompts: Sequence[list[int]], images: Sequence | None, num_generations: int, profiler: Any = None
    ) -> tuple[None, list[list[int]], list[list[list[float]]], None]:
        """One answer to each entry: TRL repeats a prompt `num_generations` times. Returns (_, token ids, of each token
        a list of its log-probability alone, _)."""
        if images is not None and any(images):
            raise ValueError("vexact_engine.trl: images: the engine takes token ids alone")
        seeds = [derive_seed(self._seed, self._asked + i) % 2**64 for i in range(len(prompts))]
        self._asked += len(prompts)
        params = [SamplingParams(**self._fields, seed=seed) for seed in seeds]
        if self.engine.asleep:
            self.engine.wake_up()
        done = self.engine.generate(list(prompts), params, raise_on_error=True)
        if self._sleeps:
            self.engine.sleep()
        return None, [c.token_ids for c in done], [[[value] for value in c.logprobs] for c in done], None


def _others(model: nn.Module, adapters: set[str]) -> Iterator[nn.Parameter]:
    return (parameter for name, parameter in model.named_parameters() if name not in adapters)
