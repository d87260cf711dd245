"""Two lists of log-probabilities of the same tokens, compared: bits first, then how far apart."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from vexact_ops import different


@dataclass(frozen=True)
class Comparison:
    """How a rollout's log-probabilities and the trainer's differ.

    tokens              log-probabilities compared
    mismatched_tokens   of them, those whose bits differ; a NaN on either side counts, for it is never right
    max_abs_diff        largest |trainer - rollout|
    k3_kl               mean(exp(d) - 1 - d), d = trainer - rollout: the estimate of KL(rollout || trainer) from the
                        rollout's own samples that is never negative (Schulman, "Approximating KL divergence", 2020)
    """

    tokens: int
    mismatched_tokens: int
    max_abs_diff: float
    k3_kl: float

    @property
    def equal(self) -> bool:
        return self.tokens > 0 and self.mismatched_tokens == 0

    def verdict(self) -> str:
        """The line that says it: "0 of 812 log-probabilities differ (max |diff| 0.0, KL 0.0)"."""
        worst, kl = _figure(self.max_abs_diff), _figure(self.k3_kl)
        return f"{self.mismatched_tokens} of {self.tokens} log-probabilities differ (max |diff| {worst}, KL {kl})"

    def to_json(self) -> dict:
        return asdict(self)


def _figure(value: float) -> str:
    return "0.0" if value == 0 else f"{value:.3g}"


def differences(rollout: Tensor, trainer: Tensor) -> tuple[Tensor, Tensor]:
    """Per token: trainer - rollout in float64, exactly 0 where the bits are equal; and whether the bits differ.

    rollout, trainer   (T,) fp32
    raises             TypeError on dtype, ValueError where the shapes differ
    """
    for name, value in (("rollout", rollout), ("trainer", trainer)):
        if value.dtype != torch.float32:
            raise TypeError(f"differences: {name}: got {value.dtype}, expected torch.float32")
    if rollout.shape != trainer.shape:
        raise ValueError(f"differences: trainer: got shape {tuple(trainer.shape)}, expected {tuple(rollout.shape)}")
    rollout, trainer = rollout.detach().cpu().contiguous(), trainer.detach().cpu().contiguous()
    differs = different(rollout, trainer)
    difference = torch.where(differs, trainer.double() - rollout.double(), 0.0)  # -inf - -inf is no difference
    broken = rollout.isnan() | trainer.isnan()
    return torch.where(broken, torch.nan, difference), differs | broken


def compare(rollout: Tensor, trainer: Tensor) -> Comparison:
    """The figures for (T,) fp32 log-probabilities of the same tokens."""
    d, differs = differences(rollout, trainer)
    if not d.numel():
        return Comparison(0, 0, 0.0, 0.0)
    k3 = (torch.expm1(d) - d).mean().item()
    worst = float("nan") if d.isnan().any() else d.abs().max().item()
    return Comparison(d.numel(), int(differs.sum()), worst, k3)


class LogprobsDiffer(RuntimeError):
    """A trainer has other bytes than the rollout. The message names the first token that has."""


def expect_equal(rows: Iterable[tuple[str, Sequence[int], Tensor, Tensor]]) -> None:
    """
    rows     of some answers: what to call one, its tokens, and (tokens,) fp32 log-probabilities of rollout and trainer
    raises   LogprobsDiffer where one of them has other bytes than the rollout's, or is NaN
    """
    rows = list(rows)
    wrong = [differences(rollout, trainer)[1] for _, _, rollout, trainer in rows]
    first = next((i for i, differs in enumerate(wrong) if differs.any()), None)
    if first is None:
        return
    name, token_ids, *both = rows[first]
    place = int(wrong[first].nonzero()[0])
    rollout, trainer = (_exact(values.detach().cpu()[place : place + 1]) for values in both)
    count, differ = sum(map(len, wrong)), int(sum(differs.sum() for differs in wrong))
    raise LogprobsDiffer(
        f"{name}, token {place + 1} of {len(token_ids)} (id {token_ids[place]}): the rollout's log-probability is "
        f"{rollout}, the trainer's {trainer}; of {count} that were scored again {differ} differ"
    )


def _exact(value: Tensor) -> str:
    return f"{value.item():.9g} ({value.view(torch.int32).item() & 0xFFFFFFFF:08x})"


@dataclass
class Sample:
    """One rolled-out answer and its two scores.

    source, prompt_text       where the prompt came from, and what to show of it
    prompt_ids, token_ids     what went in and what came out
    rollout, trainer          (len(token_ids),) fp32 log-probabilities at the sampling temperature, on the CPU
    text, finish_reason       of the answer
    pieces                    the text of each generated token on its own; none without a tokenizer
    error                     why there is none, where something was wrong with this prompt alone
    """

    source: str
    prompt_text: str
    prompt_ids: list[int]
    token_ids: list[int]
    rollout: Tensor
    trainer: Tensor | None = None
    text: str = ""
    finish_reason: str = "length"
    error: str | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def mismatched_tokens(self) -> int:
        """Of its log-probabilities, those whose bits differ; 0 where the trainer has none."""
        return 0 if self.trainer is None else int(differences(self.rollout, self.trainer)[1].sum())

    def to_json(self) -> dict:
        """Everything, with the log-probabilities as numbers that read back as the same floats."""
        return {
            "source": self.source,
            "prompt": self.prompt_text,
            "prompt_tokens": len(self.prompt_ids),
            "token_ids": self.token_ids,
            "rollout_logprobs": finite(self.rollout.tolist()),
            "trainer_logprobs": None if self.trainer is None else finite(self.trainer.tolist()),
            "text": self.text,
            "finish_reason": self.finish_reason,
            "error": self.error,
        }


@dataclass
class Side:
    """One stack's rollout against its own recomputation: the aligned one, or stock in one dtype.

    seconds   {"rollout": ..., "rescore": ...}
    """

    name: str
    dtype: str
    samples: list[Sample]
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def comparison(self) -> Comparison:
        return compare(*self.logprobs())

    def logprobs(self) -> tuple[Tensor, Tensor]:
        """(T,) fp32 twice, rollout and trainer, over all samples in order."""
        scored = [sample for sample in self.samples if sample.trainer is not None]
        empty = [torch.empty(0, dtype=torch.float32)]
        return torch.cat([s.rollout for s in scored] or empty), torch.cat([s.trainer for s in scored] or empty)


def finite(value):
    """`value` with every NaN and infinity, in lists and dictionaries too, as text: JSON has no number for them."""
    if isinstance(value, float):
        return value if abs(value) < float("inf") else str(value)
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value
