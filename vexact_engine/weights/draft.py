"""A model that drafts for another: loaded, and known to speak of the same tokens before anything else is done."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config import Speculation
from .load import Loaded, load
from .mtp import load_heads
from .partial import Origin

PREFIX = "draft."


@dataclass(frozen=True)
class Draft:
    """A model that drafts.

    prefix   before its names, where an update of weights brings them; heads have the checkpoint's own: ""
    """

    module: torch.nn.Module
    prefix: str


def load_draft(speculation: Speculation | None, loaded: Loaded) -> Draft | None:
    """What `Speculation.draft_model` names, on the device and in the dtype of the model that it drafts for, or with
    `Speculation.mtp` that model's own heads; None where neither is asked for. Of a model in stages or ranks, where it
    is loaded by one of them (`load_draft_of_stage`), its names alone: on meta.

    raises   as load; ValueError where its vocabulary is another one, it is that model itself, or there are no heads
    """
    if speculation is None or not speculation.drafts_by_model:
        return None
    target, source, origin = loaded.model, speculation.draft_model, loaded.origin
    first = next(target.parameters())
    device = torch.device("meta") if origin is not None else loaded.device or first.device
    if speculation.mtp:
        path = loaded.path if origin is None else _directory(origin)
        if path is None:
            raise ValueError(f"Speculation: mtp: got {loaded.name}, which holds no heads, expected a model directory")
        return Draft(load_heads(loaded.name, path, target, device), "")
    if source is target:
        raise ValueError("Speculation: draft_model: got the model that it is to draft for, expected another, or a copy")
    with torch.device("cpu"):  # not the caller's default device
        draft = load(
            source, device=device, dtype=first.dtype, tokenizer=None if loaded.tokenizer is not None else False
        )
    own, expected = (model.get_input_embeddings().weight.shape[0] for model in (draft.model, target))
    if own != expected:
        raise ValueError(
            f"Speculation: draft_model: {draft.name} has a vocabulary of {own} tokens, expected {expected}, as "
            f"{loaded.name} has"
        )
    _check_words(draft, loaded)
    return Draft(draft.model, PREFIX)


def load_draft_of_stage(
    speculation: Speculation | None, origin: Origin, model: torch.nn.Module, device: torch.device, first: bool
) -> Draft | None:
    """Where draws are made of a model in stages, whose weights are read from there: on the first of several ranks a
    model, on each of them whole heads."""
    if speculation is None or not (speculation.mtp or first):
        return None
    return load_draft(speculation, Loaded(model, None, (), origin.source, device=device, path=_directory(origin)))


def _directory(origin: Origin) -> Path | None:
    return None if origin.seed is not None else Path(origin.source)


def _check_words(draft: Loaded, loaded: Loaded) -> None:
    """Where both have a tokenizer: an id is the same word to both, if it is one to both."""
    if draft.tokenizer is None or loaded.tokenizer is None:
        return
    ours, theirs = (_words(each.tokenizer) for each in (loaded, draft))
    other = sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
    if other:
        i = other[0]
        raise ValueError(
            f"Speculation: draft_model: {draft.name} has another vocabulary than {loaded.name}: {len(other)} ids are "
            f"other words, {i} is {theirs[i]!r}, expected {ours[i]!r}"
        )


def _words(tokenizer: Any) -> dict[int, str]:
    return {i: word for word, i in tokenizer.get_vocab().items()}
