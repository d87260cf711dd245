"""What drafts, made beside the runner whose drafts they are (drafting.py, heads.py)."""

import contextlib

import torch

import vexact_ops as vx
from vexact_ops.patch.rotary import goes_by_length

from ..config import EngineConfig
from ..weights.cut import Cut
from ..weights.draft import Draft
from ..weights.mtp import Heads
from .drafting import DraftRunner
from .heads import HeadsRunner
from .ranks import Alone, Ranks

_ALONE = Alone()


def runner_beside(
    draft: Draft | None,
    handle,
    config: EngineConfig,
    device: torch.device,
    stack: contextlib.ExitStack,
    cut: Cut | None = None,
    ranks: Ranks = _ALONE,
) -> DraftRunner | None:
    """
    handle      the patch of the model that it drafts for
    stack       what it leaves when that is closed: a model is unpatched
    cut, ranks  of heads, where ranks have rows of them
    """
    if draft is None:
        return None
    if isinstance(draft.module, Heads):
        return HeadsRunner(draft.module, handle, config, device, cut, ranks)
    # It needs no trainer's numerics: nobody sees a number of it.
    longrope = config.longrope if any(map(goes_by_length, draft.module.modules())) else None
    patched = vx.patch.hf(draft.module, longrope=longrope, training=False)
    stack.callback(patched.undo)
    return DraftRunner(draft.module, patched, config, device)
