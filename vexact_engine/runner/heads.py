"""A checkpoint's own heads that draft (weights/mtp.py), run beside the decoder that they read."""

import dataclasses
import functools

import torch
from torch import Tensor

import vexact_ops as vx
from vexact_ops.patch import description as d
from vexact_ops.patch.description import Pages, State

from ..config import EngineConfig
from ..weights.cut import Cut
from ..weights.mtp import Heads
from .batch import Batch, rows_of
from .decoder import Block, StepParts, factor_of, norm_of
from .drafting import DraftRunner
from .forward import Forward
from .projections import Weights
from .ranks import Alone, RankedHead, Ranks, Tokens

_ALONE = Alone()


class HeadsRunner(DraftRunner):
    """Of a checkpoint's own heads (weights/mtp.py): a layer that reads what the decoder beside it has computed.

    The decoder's final hidden states of all tokens are kept in pages too, as another layer's keys and values. Where the
    decoder has not come yet, behind what was drafted, that of the head itself stands until it comes.

    cut, ranks   of `described` below, what this rank computes; each of them has all hidden states
    """

    model: Heads
    reads = True

    def __init__(
        self,
        model: Heads,
        handle,
        config: EngineConfig,
        device: torch.device,
        cut: Cut | None = None,
        ranks: Ranks = _ALONE,
    ):
        self._cut, self.ranks = cut, ranks
        super().__init__(model, handle, config, device)

    def _memories(self) -> tuple[Pages | State, ...]:
        self._described = described(self.handle, self.model) if self._cut is None else self._cut.described
        width = self._described.norm.size
        heads = width // 128 if width % 128 == 0 else 1
        first = width // heads // 2
        return self._described.layers[0].memory, Pages(heads, first, width // heads - first)

    def _forward(self) -> tuple[Forward, str]:
        share = 0 if self._cut is None else self._cut.vocabulary[1]
        return _HeadForward(self.model, self.handle, self._described, self.ranks, share), "fused"

    @functools.cached_property
    def head(self):
        if self._cut is None:
            return self.handle
        head = self._described.head
        return RankedHead(self.handle.model.get_parameter(head.weight), head, self.ranks, self._cut.vocabulary)

    def forward_changed(self) -> None:
        """The decoder's tensors may lie elsewhere."""
        self.make_forward()

    def keep(self, hidden: Tensor, slots: Tensor) -> None:
        _keep(hidden, self.buffers.caches.keys[1], self.buffers.caches.values[1], slots)


class _HeadForward:
    """Batch -> (T, H) normed states of the head, or (R, H) of its rows, which are its hidden states from there on."""

    def __init__(self, heads: Heads, handle, described: d.Decoder, ranks: Ranks, share: int):
        own, theirs, form = Weights(heads), Weights(handle.model), heads.form
        self._embedding, self._factor = heads.get_input_embeddings(), factor_of(theirs, described.embedding.factor)
        self._tokens = None if ranks.size == 1 else Tokens(theirs[described.embedding.weight], ranks, share)
        self._rotary = [(theirs.cast(r.inv_freq, torch.float32), r.scaling, r.dtype, r.axes) for r in described.rotary]
        self._blocks = tuple(Block(own, block, ranks, described.kv_segment) for block in described.layers[0].blocks)
        names = form.embedding_norm, form.hidden_norm, form.norm
        norms = (norm_of(own, dataclasses.replace(described.norm, weight=name)) for name in names)
        self._embedding_norm, self._hidden_norm, self._norm = norms
        self._fc, self._normed = own[form.fc], form.normed

    def __call__(self, batch: Batch) -> Tensor:
        paged, step, rows = batch.paged, StepParts(batch, self._rotary), batch.rows
        x = self._embedding.weight[batch.input_ids] if self._tokens is None else self._tokens(batch.input_ids)
        if self._factor is not None:
            x = x * self._factor
        x = vx.linear(torch.cat((self._embedding_norm(x), self._hidden_norm(_before(batch))), 1), self._fc)
        first, *others = self._blocks
        h, residual = first.read(x, None)
        residual = rows_of(residual, rows)
        x = first.then(first.part(h, step, paged.k_caches[0], paged.v_caches[0], rows=rows))
        for block in others:
            h, residual = block.read(x, residual)
            x = block.then(block.part(h))
        normed, stream = self._norm(x, residual)
        slots = rows_of(paged.slot_mapping, rows)
        _keep(normed if self._normed else stream, paged.k_caches[1], paged.v_caches[1], slots)
        return normed


def _before(batch: Batch) -> Tensor:
    """(T, H) hidden states of the tokens before; zeros before the first."""
    paged, positions = batch.paged, batch.positions
    tokens = torch.arange(len(positions), device=positions.device, dtype=paged.cu_seqlens_q.dtype)
    owners = torch.searchsorted(paged.cu_seqlens_q[1:], tokens, right=True).clamp_(max=len(paged.block_table) - 1)
    at, size = (positions - 1).clamp_(min=0), paged.k_caches[1].shape[1]
    places = paged.block_table[owners, at // size].long() * size + at % size
    parts = [cache.flatten(0, 1)[places] for cache in (paged.k_caches[1], paged.v_caches[1])]
    return torch.where((positions > 0)[:, None], torch.cat(parts, 2).flatten(1), 0.0)


def _keep(hidden: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    by_head = hidden.unflatten(1, (k_cache.shape[2], -1))
    vx.kv_cache_store(*by_head.split_with_sizes((k_cache.shape[3], v_cache.shape[3]), 2), k_cache, v_cache, slots)


def described(handle, heads: Heads) -> d.Decoder:
    """The decoder that a handle describes, with the head in place of all layers."""
    whole = handle.describe()
    return dataclasses.replace(whole, layers=(_renamed(_layer_like(whole, heads.like), heads.like, heads.form.layer),))


def _layer_like(described: d.Decoder, like: str) -> d.Layer:
    found = (layer for i, layer in enumerate(described.layers) if _begins(described.names(range(i, i + 1)), like))
    return next(found)


def _begins(names: set[str], like: str) -> bool:
    return any(name.startswith(like) for name in names)


def _renamed(part, old: str, new: str):
    """The same with names that begin otherwise."""
    if dataclasses.is_dataclass(part):
        changed = {}
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, str) and field.name in d.NAMES:
                changed[field.name] = new + value.removeprefix(old) if value.startswith(old) else value
            elif not isinstance(value, str):
                changed[field.name] = _renamed(value, old, new)
        return dataclasses.replace(part, **changed)
    return tuple(_renamed(each, old, new) for each in part) if isinstance(part, tuple) else part
