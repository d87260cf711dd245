"""Scores of sequences (reward models, classifiers) by the same steps that generate: a request of one draw, of which the
scores are kept instead of what is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vexact_ops.patch import score_head

from .config import SamplingParams
from .request import Completion


@dataclass
class Classification:
    """Of one prompt.

    prompt_ids      what was scored
    scores          fp32, one for each of the engine's `labels`: the model's own logits, before any softmax or sigmoid
    label           of the highest one
    weight_version  of the weights that gave them
    cached_tokens   how many of the prompt's the prefix cache had
    aborted, error  why there are no scores
    """

    prompt_ids: list[int]
    scores: list[float]
    label: str | None
    weight_version: int
    request_id: str | None = None
    cached_tokens: int = 0
    aborted: bool = False
    error: str | None = None


class _Scored(SamplingParams):
    """Of a request whose scores are wanted."""


def labels_of(model: torch.nn.Module) -> tuple[str, ...] | None:
    """What a model that scores sequences calls its classes; None of one that generates."""
    head = score_head(model) if model.get_output_embeddings() is None else None
    if head is None:
        return None
    names = getattr(model.config, "id2label", None) or {}
    return tuple(str(names.get(i, f"LABEL_{i}")) for i in range(head.weight.shape[0]))


def asking(engine: Any) -> SamplingParams:
    """For `generate`. ValueError of an engine that has no scores."""
    if engine.labels is None:
        raise ValueError(
            f"classify: {getattr(engine, 'name', 'the model')} generates, expected a model that scores sequences "
            "(architectures: ...ForSequenceClassification)"
        )
    return _Scored(max_new_tokens=1, temperature=0.0, num_top_logprobs=len(engine.labels), ignore_eos=True)


def check_kind(params: SamplingParams, labels: Sequence[str] | None, name: str) -> None:
    if labels is not None and not isinstance(params, _Scored):
        raise ValueError(f"{name} scores sequences, and generates nothing: call classify, or POST /classify")


def without_padding(prompt: Any, model: torch.nn.Module) -> Any:
    """Token ids up to the last one that is no padding, which is the one that is scored; the first of padding alone."""
    pad = model.config.get_text_config().pad_token_id
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if pad is None or not isinstance(ids, list | tuple) or not ids:
        return prompt
    end = len(ids)
    while end > 1 and ids[end - 1] == pad:
        end -= 1
    return ids[:end]


def classified(done: Sequence[Completion], engine: Any) -> list[Classification]:
    return [_classified(one, engine.labels) for one in done]


def _classified(done: Completion, labels: Sequence[str]) -> Classification:
    cached = 0 if done.metrics is None else done.metrics.cached_tokens
    scores, label = [], None
    if done.finish_reason not in ("abort", "error") and done.top_logprobs:
        (found,) = done.top_logprobs
        scores = [found[i] for i in range(len(labels))]
        label = labels[max(range(len(labels)), key=scores.__getitem__)]
    return Classification(
        done.prompt_ids, scores, label, done.weight_version, done.request_id, cached,
        done.finish_reason == "abort", done.error,
    )  # fmt: skip
