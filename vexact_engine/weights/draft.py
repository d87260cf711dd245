"""A model that drafts for another: loaded, and known to speak of the same tokens before anything else is done."""

from dataclasses import dataclass
from typing import Any

import torch

from ..config import Speculation
from .load import Loaded, load
from .mtp import load_heads

PREFIX = "draft."


@dataclass(frozen=True)
class Draft:
    """A model that drafts.

    prefix   before its names, where an update of weights brings them; heads have the checkpoint's own
    """

    module: torch.nn.Module
    prefix: str


def load_draft(speculation: Speculation | None, loaded: Loaded) -> Draft | None:
    """What `Speculation.draft_model` names, on the device and in the dtype of the model that it drafts for, or with
    `Speculation.mtp` that model's own heads; None where neither is asked for.

    raises   as load; ValueError where its vocabulary is another one, it is that model itself, or there are no heads
    """
    if speculation is None or not speculation.drafts_by_model:
        return None
    if speculation.mtp:
        if loaded.path is None:
            raise ValueError(f"Speculation: mtp: got {loaded.name}, which holds no heads, expected a model directory")
        device = loaded.device or next(loaded.model.parameters()).device
        return Draft(load_heads(loaded.name, loaded.path, loaded.model, device), "")
    target, source = loaded.model, speculation.draft_model
    if source is target:
        raise ValueError("Speculation: draft_model: got the model that it is to draft for, expected another, or a copy")
    first = next(target.parameters())
    with torch.device("cpu"):  # not the caller's default device
        draft = load(source, device=loaded.device or first.device, dtype=first.dtype)
    own, expected = (model.get_input_embeddings().weight.shape[0] for model in (draft.model, target))
    if own != expected:
        raise ValueError(
            f"Speculation: draft_model: {draft.name} has a vocabulary of {own} tokens, expected {expected}, as "
            f"{loaded.name} has"
        )
    _check_words(draft, loaded)
    return Draft(draft.model, PREFIX)


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
