"""Everything that a measured engine generated, scored again by the training forward: how many log-probabilities have
other bits. And which experts the tokens of a step went to, which only a forward can say."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

import torch

import vexact_ops as vx
from vexact_engine.progress import quiet
from vexact_engine.proof.compare import Sample, Side
from vexact_engine.proof.verify import pack, rescore

from .roof import Sizes
from .timing import Run

PACK_TOKENS = {"cpu": 1024, "cuda": 4096}
PROBED = 8  # decode steps of a run whose experts are counted


@dataclass(frozen=True)
class Proof:
    """tokens, mismatched, max_abs_diff   log-probabilities compared, those whose bits differ, by how much at most
    touched      experts of a layer that a decode step reads, the mean over some steps and all layers; None: no mixture,
                 or its router was not seen"""

    tokens: int
    mismatched: int
    max_abs_diff: float
    touched: float | None
    seconds: float

    def figures(self) -> dict:
        """For a record."""
        found = {"verify_tokens": self.tokens, "verify_mismatched": self.mismatched}
        return found | {"verify_max_abs_diff": self.max_abs_diff, "verify_s": round(self.seconds, 2)}


def prove(model: torch.nn.Module, run: Run, config, size: Sizes, *, batch: int | None, seed: int = 0) -> Proof:
    """The model is unpatched, in nobody's hands; it is patched as a trainer's for the time.

    batch   steps of so many sequences are those whose experts are counted; None: all decode steps
    """
    began = time.perf_counter()
    device = next(model.parameters()).device
    samples = [
        Sample(
            source=c.request_id,
            prompt_text="",
            prompt_ids=c.prompt_ids,
            token_ids=c.token_ids,
            rollout=torch.tensor(c.logprobs, dtype=torch.float32),
            finish_reason=c.finish_reason,
        )
        for c in run.completions
    ]
    options = {"pack_tokens": PACK_TOKENS[device.type], "seed": seed}
    routes = _Routes(run.probed(PROBED, batch), pack(samples, **options), size) if size.experts else None
    with routes or contextlib.nullcontext():
        rescore(
            model,
            samples,
            options=config.patch_options,
            progress=routes.progress if routes else quiet,
            **options,
        )
    found = Side("aligned", "", samples).comparison
    if found.tokens != run.generated:
        raise RuntimeError(f"engine: {found.tokens} tokens were compared, expected all {run.generated} generated ones")
    seconds = time.perf_counter() - began
    touched = routes.touched() if routes else None
    return Proof(found.tokens, found.mismatched_tokens, found.max_abs_diff, touched, seconds)


class _Routes:
    """While entered, notes where moe_route sends the tokens of some steps.

    steps   for each step (request id, position) of its tokens
    """

    def __init__(self, steps: Sequence[Sequence[tuple[str, int]]], packs, size: Sizes):
        self.size, self.steps, self.calls, self.at, self.layer = size, len(steps), 0, None, 0
        wanted: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, tokens in enumerate(steps):
            for request, position in tokens:
                wanted[request].append((number, position))
        # of each pack: rows, and which step each belongs to
        self.rows: list[tuple[list[int], list[int]]] = []
        for one in packs:
            found = [(at + p, n) for sample, at in one.members for n, p in wanted[sample.source]]
            self.rows.append(([row for row, _ in found], [n for _, n in found]))
        self.lengths = [one.ids.shape[1] for one in packs]
        self.read: torch.Tensor | None = None  # (layers, steps, experts) bool

    def __enter__(self) -> "_Routes":
        route = vx.moe_route

        def noted(*args, **options):
            weights, ids = route(*args, **options)
            self._note(ids.detach())
            return weights, ids

        self._patch = mock.patch.object(vx, "moe_route", noted)
        self._patch.start()
        return self

    def __exit__(self, *exception) -> None:
        self._patch.stop()

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        """For rescore: a pack begins. What the router is called for before, patching tries."""
        self.at, self.layer = done, 0

    def _note(self, ids: torch.Tensor) -> None:
        if self.at is None:
            return
        layer, self.layer, self.calls = self.layer, self.layer + 1, self.calls + 1
        if self.at >= len(self.rows) or layer >= self.size.layers or ids.shape[0] != self.lengths[self.at]:
            self.calls = -1 << 40  # not the calls that were expected: nothing can be said
            return
        if self.read is None:
            shape = self.size.layers, self.steps, self.size.experts
            self.read = torch.zeros(shape, dtype=torch.bool, device=ids.device)
        rows, steps = (torch.tensor(values, dtype=torch.int64, device=ids.device) for values in self.rows[self.at])
        chosen = ids[rows].long()
        self.read[layer, steps[:, None].expand_as(chosen), chosen] = True

    def touched(self) -> float | None:
        if self.calls != len(self.rows) * self.size.layers or not self.steps:
            return None
        return self.read.sum(2).double().mean().item()
