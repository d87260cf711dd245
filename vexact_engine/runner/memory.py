"""What an engine keeps of its sequences, made from what each layer remembers, and how large it may be."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from vexact_ops.patch.description import Pages, State

from ..config import EngineConfig
from ..core.windows import least_pages
from ..weights.host import available_bytes

# On a CPU the cache shares memory with everything else that runs there, a trainer above all.
CPU_SHARE, CPU_MOST = 0.25, 8 << 30

_BLOCK = 128  # keys of a block of attention, at most


Memories = Sequence[Pages | State]  # of each layer


class Caches(NamedTuple):
    """Of each layer its keys and its values, (pages, page_size, heads, dim), or None where it has no pages; its slots'
    tensors, (slots, ...) in the order of State.slot(), or None where it has no state; and places for copies of what is
    kept over a chunk's end, (places, ...). No states: ()."""

    keys: Sequence[Tensor | None]
    values: Sequence[Tensor | None]
    states: Sequence[Sequence[Tensor] | None] = ()
    snapshots: Sequence[Sequence[Tensor] | None] = ()

    def tensors(self) -> Iterator[Tensor]:
        """Each once."""
        kept = itertools.chain(self.states, self.snapshots)
        slots = itertools.chain.from_iterable(state for state in kept if state is not None)
        every = (tensor for tensor in (*self.keys, *self.values, *slots) if tensor is not None)
        return iter({id(tensor): tensor for tensor in every}.values())

    def layers(self) -> Iterator[tuple]:
        """What each one's part is given: its keys and values, or its slots' tensors."""
        states = self.states or (None,) * len(self.keys)
        return ((k, v) if state is None else tuple(state) for k, v, state in zip(self.keys, self.values, states))


def make(
    memories: Memories,
    pages: int,
    page_size: int,
    slots: int,
    dtype: torch.dtype,
    device: torch.device,
    one: bool = False,
    snapshots: int = 0,
    window_pages: int | None = None,
) -> Caches:
    """New memory for these layers.

    one            layers that remember alike have the same: for what nothing is stored in
    window_pages   of layers with a window; None: as many as the others
    """
    # Nobody's bits depend on what has not been stored, and on a CPU untouched memory is never taken; on a GPU it is
    # zeroed, as attention is faster where what lies behind a sequence's last key is finite.
    new = torch.zeros if device.type == "cuda" else torch.empty

    def place(memory: Pages | State) -> tuple:
        if isinstance(memory, State):
            kept = memory.slot()
            return None, None, [new(slots, *k.shape, dtype=k.dtype or dtype, device=device) for k in kept]
        kind = {"dtype": memory.dtype or dtype, "device": device}
        count = pages if memory.window is None or window_pages is None else window_pages
        k = new(count, page_size, memory.heads, memory.k_dim, **kind)
        if memory.shared:
            return k, k[..., : memory.v_dim], None
        return k, new(count, page_size, memory.heads, memory.v_dim, **kind), None

    made = {memory: place(memory) for memory in memories} if one else {}
    keys, values, states = zip(*(made[memory] if one else place(memory) for memory in memories))
    if chunk_of(memories) is None:
        return Caches(keys, values)
    copies = [
        [new(snapshots, *k.shape, dtype=k.dtype or dtype, device=device) for k in memory.tensors]
        if isinstance(memory, State) and snapshots
        else None
        for memory in memories
    ]
    return Caches(keys, values, states, copies)


def forgetting(memories: Memories, config: EngineConfig) -> tuple[Pages | State, ...]:
    """As they are kept where drafts are verified: what a state is given of those that are not drawn is forgotten."""
    rows = 0 if config.speculation is None else config.speculation.max_draft_tokens
    return tuple(kept.forgetting(rows) if rows and isinstance(kept, State) else kept for kept in memories)


def chunk_of(memories: Memories) -> int | None:
    """Tokens of a chunk of the layers' states; None where none has one."""
    chunks = {memory.chunk for memory in memories if isinstance(memory, State)}
    if len(chunks) > 1:
        raise ValueError(
            f"Engine: model: its layers have states of chunks of {sorted(chunks)} tokens, expected one size"
        )
    return chunks.pop() if chunks else None


def bytes_per_token(memories: Memories, dtype: torch.dtype) -> int:
    """What a token takes in all these layers."""
    return sum(memory.bytes_per_token(dtype) for memory in memories)


def windowed(memories: Memories) -> Memories:
    """Those of layers with a window."""
    return tuple(memory for memory in memories if memory.window is not None)


def numbers_alone(memories: Memories, config: EngineConfig) -> bool:
    """Of a whole model: whether all layers that keep keys have a window, and nothing beside them drafts: pages take
    memory where those have their own, not else."""
    speculation = config.speculation
    drafts = speculation is not None and speculation.drafts_by_model  # beside one of the stages, if not here
    kept = [memory for memory in memories if isinstance(memory, Pages)]
    return not drafts and bool(kept) and all(memory.window is not None for memory in kept)


def reach(memories: Memories) -> int | None:
    """Keys before a query that layers with a window may read, which is all that stands in a block of keys with one
    that is seen; None where there are none."""
    windows = [memory.window for memory in windowed(memories)]
    return max(windows) - 1 + _BLOCK - 1 if windows else None


def window_pages(config: EngineConfig, reach: int) -> int:
    """Of layers with a window, as many as can be held at once by sequences between steps, and what a step adds."""
    slots, step = min(config.max_num_seqs, config.max_num_batched_tokens), config.max_num_batched_tokens
    return slots * (least_pages(reach, config.page_size) + 2) + -(-step // config.page_size)


def bytes_per_slot(memories: Memories, dtype: torch.dtype) -> int:
    """What a sequence takes whatever its length, in all these layers."""
    return sum(memory.bytes_per_slot(dtype) for memory in memories if isinstance(memory, State))


def bytes_per_snapshot(memories: Memories, dtype: torch.dtype) -> int:
    kept = (kept for memory in memories if isinstance(memory, State) for kept in memory.tensors)
    return sum(part.bytes(dtype) for part in kept)


def sizes(memories: Memories, config: EngineConfig, slots: int, dtype: torch.dtype) -> str:
    """How much of what is kept is pages, states and snapshots."""
    page = config.page_size * bytes_per_token(memories, dtype)
    parts = [("pages", config.num_pages, page)]
    if config.num_window_pages is not None:
        own = config.page_size * bytes_per_token(windowed(memories), dtype)
        parts = [("pages", config.num_pages, page - own), ("pages of windows", config.num_window_pages, own)]
    if chunk_of(memories) is not None:
        parts += [("sequences' states", slots, bytes_per_slot(memories, dtype))]
        parts += [("snapshots", config.num_snapshots, bytes_per_snapshot(memories, dtype))]
    return ", ".join(f"{count} {what} of {each >> 10} KiB ({count * each >> 20} MiB)" for what, count, each in parts)


def text(memories: Memories, windows: bool = False) -> str:
    """What is kept, in words. A window is none of it unless such layers have pages of their own."""
    plain = (replace(memory, window=None) if isinstance(memory, Pages) else memory for memory in memories)
    kept = memories if windows else plain
    return ", ".join(f"{len(list(alike))} x {memory}" for memory, alike in itertools.groupby(kept))


def default_num_pages(
    config: EngineConfig,
    bytes_per_token: int,
    max_model_len: int,
    device: torch.device,
    step_bytes: int = 0,
    state_bytes: int = 0,
    window_bytes: int = 0,
) -> int:
    """Pages for `num_pages=None`: what memory allows, but no more than `max_num_seqs` whole sequences need.

    On a GPU `gpu_memory_utilization` of its memory, less what is in use by anyone (the weights, other processes) and
    what the largest step takes on top, `step_bytes`; on a CPU a quarter of what is available, at most 8 GiB. Slots of
    states, `state_bytes` of them all, come first, and pages of layers with a window, `window_bytes`. ValueError where
    not even one page fits.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what torch keeps in reserve counts as in use
        free, total = torch.cuda.mem_get_info(device)
        room = int(total * config.gpu_memory_utilization) - (total - free) - step_bytes
        what = f"gpu_memory_utilization={config.gpu_memory_utilization} of {total >> 20} MiB"
    else:
        available = available_bytes()
        room = min(int(available * CPU_SHARE), CPU_MOST)
        what = f"a quarter of the {available >> 20} MiB available"
    page, left = bytes_per_token * config.page_size, room - window_bytes - state_bytes
    if window_bytes and left < page:
        raise ValueError(
            f"EngineConfig: num_window_pages: no room for {config.num_window_pages}: {what} leaves "
            f"{max(room, 0) >> 20} MiB, they take {window_bytes >> 20} MiB, states {state_bytes >> 20} MiB, a page of "
            f"the other layers {page >> 10} KiB: lower num_window_pages"
        )
    if state_bytes and left < page:
        slots = min(config.max_num_seqs, config.max_num_batched_tokens)
        each, most = state_bytes // slots, max((room - page) * slots // state_bytes, 0)
        raise ValueError(
            f"EngineConfig: max_num_seqs: no room for the states of {slots} sequences: {what} leaves "
            f"{max(room, 0) >> 20} MiB, a sequence's states take {each >> 10} KiB, those of all {state_bytes >> 20} "
            f"MiB, a page of the KV cache {page >> 10} KiB: lower max_num_seqs to {most} or less"
        )
    room = left
    if room < page:
        raise ValueError(
            f"EngineConfig: num_pages: no room for a KV cache: {what} leaves {max(room, 0)} bytes, a page takes {page}"
        )
    if not page:  # nothing but states: pages are numbers alone
        return config.max_num_seqs * -(-max_model_len // config.page_size)
    return min(room // page, config.max_num_seqs * -(-max_model_len // config.page_size))


def most_pages(config: EngineConfig, bytes_per_token: int, device: torch.device) -> int:
    """Of one sequence: no more than there is memory for, however long a text the model says that it was made for."""
    longest = -(-(config.max_model_len or 1 << 20) // config.page_size)
    if config.num_pages is not None:
        return min(longest, config.num_pages)
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else CPU_MOST
    return max(1, min(longest, total // max(1, bytes_per_token * config.page_size)))
