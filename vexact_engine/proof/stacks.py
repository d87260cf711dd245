"""Ways to run a model on some sequences, each forward with the place of every token in it: what `bisect` compares."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import vexact_ops as vx

from ..runner import memory
from ..runner.batch import plain
from ..runner.forward import patched_forward
from .ranks import Ranked

PAGE = 16
CACHES = ("cache", "past_key_values")


@dataclass
class Forward:
    """One forward.

    rows   (B, S) int64: which token each place holds, counted through all sequences; -1 is padding
    run    computes it; gives logits of shape (B, S, V) or (B * S, V)
    """

    rows: Tensor
    run: Callable[[], Tensor]


@dataclass(frozen=True)
class Stack:
    """A model and a way to run it.

    name      for people
    device    where it computes
    open      sequences -> a context in which (model, forwards) are ready; the model is as it was afterwards
    options   how it lays tokens out: batch, pad, chunk, kv_segment, ... ; `again` makes the same stack with others
    """

    name: str
    device: torch.device
    open: Callable[..., AbstractContextManager]
    options: dict
    kind: str

    def calls(
        self, sequences: Sequence[Sequence[int]]
    ) -> "AbstractContextManager[tuple[nn.Module, Iterator[Forward]]]":
        return self.open(sequences, **self.options)

    def again(self, **options: Any) -> "Stack":
        """The same with other options."""
        return replace(self, options=self.options | options)


def stock(
    model: nn.Module, *, batch: int | None = None, pad: str = "right", chunk: int | None = None, name: str | None = None
) -> Stack:
    """A Hugging Face causal model as it is.

    batch   sequences in a forward; None: all
    pad     "right" or "left": where shorter sequences of a batch are filled up
    chunk   so many tokens of each sequence at a time, into a cache, as generate does with 1; None: all at once
    """
    _check_layout(batch, pad, chunk)
    options = {"batch": batch, "pad": pad, "chunk": chunk}
    said = name or _named("stock", options, {"batch": None, "pad": "right", "chunk": None})
    return Stack(said, _device(model), functools.partial(_open_padded, model), options, "stock")


def own(model: nn.Module, name: str = "own", **options: Any) -> Stack:
    """A model of one's own, called as Hugging Face's are: model(input_ids=, attention_mask=, position_ids=, ...), with
    logits in what it returns or as what it returns. Options as in `stock`. TypeError where it is no torch.nn.Module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"stack: got {type(model).__name__}, expected a torch.nn.Module")
    return stock(model, name=_named(name, options, {}), **options)


def patched(
    model: nn.Module,
    *,
    pack: bool = True,
    batch: int | None = None,
    pad: str = "right",
    kv_segment: int | None = None,
    latent: bool = False,
    longrope: str | None = None,
) -> Stack:
    """vx.patch.hf(model), in training form: all sequences packed into one row, or, with pack=False, as in `stock`."""
    _check_layout(batch, pad, None)
    options = {"pack": pack, "batch": batch, "pad": pad, "kv_segment": kv_segment, "latent": latent}
    options |= {"longrope": longrope}
    defaults = {"pack": True, "batch": None, "pad": "right", "kv_segment": None, "latent": False, "longrope": None}
    opened = functools.partial(_open_patched, model)
    return Stack(_named("patched", options, defaults), _device(model), opened, options, "patched")


def engine(
    model: nn.Module,
    *,
    chunk: int | None = 16,
    kv_segment: int | None = None,
    latent: bool = False,
    longrope: str | None = None,
    tp: int = 1,
) -> Stack:
    """vx.patch.hf(model) on a paged cache, as the engine runs it: chunks of prompts, or decodes with chunk=1, of all
    sequences in each step. The forward is the patched model's own, whose bits the engine's faster one is proven to
    have on every model before it is used. With tp above 1 it is the engine's over so many ranks, each with its rows of
    the weights, of which layers, final norm and logits are seen."""
    _check_layout(None, "right", chunk)
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise ValueError(f"stack: tp: got {tp!r}, expected a whole number of 1 or more")
    options = {"chunk": chunk, "kv_segment": kv_segment, "latent": latent, "longrope": longrope, "tp": tp}
    defaults = {"chunk": 16, "kv_segment": None, "latent": False, "longrope": None, "tp": 1}
    opened = functools.partial(_open_engine, model)
    return Stack(_named("engine", options, defaults), _device(model), opened, options, "engine")


KINDS: dict[str, Callable[..., Stack]] = {"stock": stock, "patched": patched, "engine": engine}


def _check_layout(batch: int | None, pad: str, chunk: int | None) -> None:
    for name, value in (("batch", batch), ("chunk", chunk)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"stack: {name}: got {value!r}, expected a whole number of 1 or more")
    if pad not in ("left", "right"):
        raise ValueError(f"stack: pad: got {pad!r}, expected left or right")


def _named(kind: str, options: dict, defaults: dict) -> str:
    said = [f"{k}={v}" for k, v in options.items() if k not in defaults or v != defaults[k]]
    return f"{kind}:{','.join(said)}" if said else kind


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


@contextlib.contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextlib.contextmanager
def _open_padded(model, sequences, *, batch, pad, chunk) -> Iterator[tuple[nn.Module, Iterator[Forward]]]:
    with _evaluated(model):
        yield model, _padded(model, sequences, batch, pad, chunk)


def _padded(model, sequences, batch, pad, chunk) -> Iterator[Forward]:
    device, offset = _device(model), 0
    size = batch or len(sequences)
    for start in range(0, len(sequences), size):
        group = sequences[start : start + size]
        width = max(map(len, group))
        ids, mask = (torch.zeros(len(group), width, dtype=torch.int64) for _ in range(2))
        rows = torch.full((len(group), width), -1, dtype=torch.int64)
        for row, sequence in enumerate(group):
            place = slice(width - len(sequence), width) if pad == "left" else slice(0, len(sequence))
            ids[row, place], mask[row, place] = torch.tensor(sequence, dtype=torch.int64), 1
            rows[row, place] = torch.arange(offset, offset + len(sequence))
            offset += len(sequence)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        ids, mask, positions = (t.to(device) for t in (ids, mask, positions))
        whole = None if bool((mask == 1).all()) else mask
        cache: dict = {}
        for begin in range(0, width, chunk or width):
            end = min(width, begin + (chunk or width))
            part = functools.partial(_call, model, ids, whole, positions, begin, end, cache, chunk is not None)
            yield Forward(rows[:, begin:end], part)


def _call(model, ids, mask, positions, begin, end, cache, cached) -> Tensor:
    out = model(
        input_ids=ids[:, begin:end],
        attention_mask=None if mask is None else mask[:, :end],
        position_ids=positions[:, begin:end],
        use_cache=cached,
        **cache,
    )
    if cached:  # what comes out goes in, by the same name: transformers has had two
        found = [name for name in CACHES if getattr(out, name, None) is not None]
        if not found:
            raise ValueError(f"stack: chunk: {type(model).__name__} returned no cache ({' or '.join(CACHES)})")
        cache[found[0]] = getattr(out, found[0])
    return out if isinstance(out, Tensor) else out.logits


@contextlib.contextmanager
def _open_patched(model, sequences, *, pack, batch, pad, **options):
    with _evaluated(model), vx.patch.hf(model, **options) as handle:
        if not pack:
            yield handle.model, _padded(handle.model, sequences, batch, pad, None)
        else:
            yield handle.model, _packed(handle.model, sequences, batch)


def _packed(model, sequences, batch) -> Iterator[Forward]:
    device, offset = _device(model), 0
    for start in range(0, len(sequences), batch or len(sequences)):
        group = sequences[start : start + (batch or len(sequences))]
        ids = torch.tensor([[token for sequence in group for token in sequence]], dtype=torch.int64, device=device)
        ends = torch.tensor([0, *map(len, group)], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)
        rows = torch.arange(offset, offset + ids.shape[1])[None]
        offset += ids.shape[1]
        yield Forward(rows, lambda ids=ids, ends=ends: model(input_ids=ids, cu_seq_lens_q=ends, use_cache=False).logits)


@contextlib.contextmanager
def _open_engine(model, sequences, *, chunk, tp, **options):
    with _evaluated(model), vx.patch.hf(model, **options) as handle:
        if tp == 1:
            forward = patched_forward(handle.model)
            memories, logits = [handle.memories()], lambda batches: handle.logits(forward(*batches))
            yield handle.model, _paged(model, memories, logits, sequences, chunk)
        else:
            ranked = Ranked(handle, tp)
            yield ranked.model, _paged(model, ranked.memories, ranked.logits, sequences, chunk)


def _paged(model, memories, logits, sequences, chunk) -> Iterator[Forward]:
    """memories   of each rank; logits: of a batch that each has with its own"""
    first = next(model.parameters())
    tables, pages = [], 0
    for sequence in sequences:
        tables.append(range(pages, pages + -(-len(sequence) // PAGE)))
        pages = tables[-1].stop

    each = [memory.make(own, pages, PAGE, len(sequences), first.dtype, first.device) for own in memories]
    offsets = [sum(map(len, sequences[:i])) for i in range(len(sequences))]
    longest = max(map(len, sequences))
    step = chunk or longest
    for begin in range(0, longest, step):
        due = [i for i, sequence in enumerate(sequences) if len(sequence) > begin]
        spans = [(begin, min(begin + step, len(sequences[i]))) for i in due]
        ids = torch.tensor([t for i, (x, y) in zip(due, spans) for t in sequences[i][x:y]], dtype=torch.int64)
        rows = torch.cat([torch.arange(offsets[i] + x, offsets[i] + y) for i, (x, y) in zip(due, spans)])[None]
        batches = [plain(caches, [tables[i] for i in due], spans, ids, owners=due) for caches in each]
        yield Forward(rows, lambda batches=batches: logits(batches))
