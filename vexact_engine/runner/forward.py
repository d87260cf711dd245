"""How a model is run on a Batch: through its patched Hugging Face forward, or as a flat loop with the same bits."""

import itertools
import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import vexact_ops as vx

from . import memory
from .batch import Batch, plain, rows_of
from .decoder import Decoder
from .projections import Weights
from .shapes import max_positions

log = logging.getLogger(__name__)

Forward = Callable[..., Tensor]
# Of each, spans of all sequences (a first position, the one behind the last), and whether last tokens alone are wanted
Steps = Sequence[tuple[Sequence[tuple[int, int]], bool]]


def forward(handle, layers: range | None = None) -> tuple[Forward, str]:
    """What computes hidden states for the model of a patch, and how: "fused", or "patched: " and why it is not fused.
    Both have the same bits: the fused one is compared with the other byte for byte before it is given out.

    layers   None: the whole decoder, a function batch -> (T, H) final hidden states, or (R, H) of the batch's rows.
             A range: a stage of a pipeline, (batch, hidden=None, residual=None) -> (hidden, residual), two tensors
             (T, H) that the next stage is called with; the first stage goes without, the last one gives final hidden
             states (of the rows). A batch's caches are those of the stage's layers. Of the model, what
             `handle.describe().names(layers)` names has to be materialised; the rest may be on meta
    raises   NotDescribed for a stage of a model that a description has no words for
    """
    if layers is None:
        patched = patched_forward(handle.model)
    else:
        patched = patched_stage(handle.stage(layers), len(handle.describe().layers))
    fused, reason = fuse(handle, layers, patched)
    return (patched, f"patched: {reason}") if fused is None else (fused, "fused")


def fuse(handle, layers: range | None, patched: Forward) -> tuple[Forward | None, str]:
    """The fused forward and "", or None and the reason why this model keeps `patched`."""
    try:
        described = handle.describe()
    except vx.patch.NotDescribed as reason:
        return None, str(reason)
    if not described.layers:
        raise ValueError(f"Engine: model: the {type(handle.model).__name__} has no layers, expected at least one")
    layers = range(len(described.layers)) if layers is None else layers
    fused = Decoder(Weights(handle.model), described, layers)
    if not _same_bits(handle, described, layers, fused, patched):
        reason = f"its bits are not those of the patched {type(handle.model).__name__}"
        log.warning("fused forward: not used: %s", reason)
        return None, reason
    return fused, ""


def patched_forward(model: torch.nn.Module) -> Forward:
    """The decoder's own Python, on aligned ops: any family that vexact_ops.patch.hf covers."""
    base = model.base_model

    def run(batch: Batch) -> Tensor:
        places, given = batch.positions[None], {}
        if batch.axes is not None:
            places, given = torch.cat((places, batch.axes))[:, None], {"vexact_images": batch.images}
        out = base(
            input_ids=batch.input_ids[None],
            position_ids=places,
            use_cache=False,
            return_dict=True,
            vexact_paged=batch.paged,
            **given,
        )
        return rows_of(out.last_hidden_state[0], batch.rows)

    return run


def patched_stage(stage, count: int) -> Forward:
    """A stage's own Python in the form of a fused one: what it gives on is the sum, next to nothing."""

    def run(batch: Batch, hidden: Tensor | None = None, residual: Tensor | None = None):
        stream = hidden if residual is None else hidden + residual
        out = stage(batch.input_ids, batch.positions, batch.paged, stream, batch.axes, batch.images)
        if stage.layers.stop == count:
            return rows_of(out, batch.rows)
        return out, torch.full_like(out, -0.0)  # x + -0.0 is x, -0.0 too

    return run


@torch.no_grad()
def _same_bits(handle, described, layers: range, fused: Forward, patched: Forward) -> bool:
    """Both forwards on steps of several sequences: single tokens, the first of a sequence among them, a prompt, a chunk
    that ends behind every window, then of these the last tokens alone, then single tokens alone, in caches of noise
    that layers of one kind share; of a model of images each step with some, too. Of stages, the sum of what they give
    on."""
    trial = Trial(handle.model, described, layers, handle.model.get_input_embeddings().weight.shape[0])
    limit = trial.limit
    mixed = [(limit - 1, limit), (0, 1), (0, min(5, limit)), (limit - min(3, limit), limit)]
    single = [(end - 1, end) for _, end in mixed]
    steps = (mixed, False), (mixed, True), (single, False)
    noisy = trial.caches(described, steps, one=True)
    for tensor in noisy.tensors():
        tensor.copy_(trial.noise(*tensor.shape))

    def run(run: Forward) -> list[Tensor]:
        caches = trial.caches(described, steps, one=True)
        for tensor, start in zip(caches.tensors(), noisy.tensors()):
            tensor.copy_(start)
        return [*caches.tensors(), *trial.run(run, caches, steps)]

    return all(vx.same_bits(a, b) for a, b in zip(run(patched), run(fused)))


class Trial:
    """Steps of several sequences, on which two forwards of some layers are compared.

    vocabulary   tokens that the embedding has
    limit        a place behind every window, or the last one that the model was made for
    """

    page = 16

    def __init__(self, model: torch.nn.Module, described, layers: range, vocabulary: int):
        self._described, self._layers = described, layers
        chosen = [described.layers[i] for i in layers]
        weight = model.get_parameter(chosen[0].blocks[0].part.o.weight)
        self._device, self._dtype, self._width = weight.device, weight.dtype, described.norm.size
        far = max(layer.memory.window or 0 for layer in chosen) + 70
        self.limit = min(far, max_positions(model) or far)
        self._generator = torch.Generator().manual_seed(0)
        self._tokens = 4 * self.limit  # of a step, at most
        self._ids = torch.randint(vocabulary, (self._tokens,), generator=self._generator)
        self._states = [self.noise(self._tokens, self._width) for _ in range(2)] if layers.start else []
        if described.images is not None:
            self._axes = torch.randint(self.limit, (3, self._tokens), generator=self._generator).to(self._device)
            self._where = torch.randint(2, (1, self._tokens), generator=self._generator).bool().to(self._device)
            self._added = [self.noise(self._tokens, self._width) for _ in range(1 + described.images.deepstack)]

    def noise(self, *shape: int) -> Tensor:
        made = torch.randn(*shape, dtype=torch.float32, generator=self._generator)
        return made.to(self._device, self._dtype)

    def _tables(self, steps: Steps) -> list[range]:
        """Pages of each sequence."""
        longest = (max(spans[i][1] for spans, _ in steps) for i in range(len(steps[0][0])))
        ends = [0, *itertools.accumulate(-(-end // self.page) for end in longest)]
        return [range(a, b) for a, b in itertools.pairwise(ends)]

    def caches(self, described, steps: Steps, one: bool = False) -> memory.Caches:
        """Empty ones, with pages for all sequences."""
        memories, tables = [described.layers[i].memory for i in self._layers], self._tables(steps)
        made = memory.make(memories, tables[-1].stop, self.page, len(tables), self._dtype, self._device, one=one)
        for tensor in made.tensors():
            tensor.zero_()
        return made

    def run(self, run: Forward, caches: memory.Caches, steps: Steps) -> list[Tensor]:
        """What a forward gives for them."""
        outs, tables = [], self._tables(steps)
        for spans, drawn in steps:
            ends = list(itertools.accumulate(end - start for start, end in spans))
            batch = plain(caches, tables, spans, self._ids[: ends[-1]])
            if drawn and self._layers.stop == len(self._described.layers):
                batch.rows = torch.tensor(ends, dtype=torch.int64, device=self._device) - 1
            for pictured in (False, True)[: 1 + (self._described.images is not None)]:
                if pictured:
                    self._picture(batch, ends[-1])
                out = run(batch, *(state[: ends[-1]] for state in self._states))
                outs.append(out if isinstance(out, Tensor) else out[0] + out[1])
        return outs

    def _picture(self, batch: Batch, count: int) -> None:
        batch.axes, where = self._axes[:, :count], self._where[:, :count]
        if self._described.tower_names(self._layers):
            rows, *stacks = (part[: int(where.sum())] for part in self._added)
            batch.images = vx.patch.Encoded(rows, tuple(stacks), where)
