"""What an engine keeps of its sequences, made from what each layer remembers, and how large it may be."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vexact_ops.patch.description import Pages

from ..config import EngineConfig

# On a CPU the cache shares memory with everything else that runs there, a trainer above all.
CPU_SHARE, CPU_MOST = 0.25, 8 << 30


class Caches(NamedTuple):
    """Of each layer its keys and its values, (pages, page_size, heads, dim)."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def tensors(self) -> Iterator[Tensor]:
        """Each once."""
        return iter({id(tensor): tensor for tensor in itertools.chain(*self)}.values())


def make(
    memories: Sequence[Pages], pages: int, page_size: int, dtype: torch.dtype, device: torch.device, one: bool = False
) -> Caches:
    """New memory for these layers.

    one     layers that remember alike have the same: for what nothing is stored in
    """
    # Nobody's bits depend on what has not been stored, and on a CPU untouched memory is never taken; on a GPU it is
    # zeroed, as attention is faster where what lies behind a sequence's last key is finite.
    new = torch.zeros if device.type == "cuda" else torch.empty

    def pair(memory: Pages) -> tuple[Tensor, Tensor]:
        kind = {"dtype": memory.dtype or dtype, "device": device}
        k = new(pages, page_size, memory.heads, memory.k_dim, **kind)
        if memory.shared:
            return k, k[..., : memory.v_dim]
        return k, new(pages, page_size, memory.heads, memory.v_dim, **kind)

    made = {memory: pair(memory) for memory in memories} if one else {}
    pairs = [made[memory] if one else pair(memory) for memory in memories]
    return Caches([k for k, _ in pairs], [v for _, v in pairs])


def bytes_per_token(memories: Sequence[Pages], dtype: torch.dtype) -> int:
    """What a token takes in all these layers."""
    return sum(memory.bytes_per_token(dtype) for memory in memories)


def text(memories: Sequence[Pages]) -> str:
    """What is kept, in words; so a window, which `make` does not look at, is none of it."""
    kept = (replace(memory, window=None) for memory in memories)
    return ", ".join(f"{len(list(alike))} x {memory}" for memory, alike in itertools.groupby(kept))


def default_num_pages(
    config: EngineConfig, bytes_per_token: int, max_model_len: int, device: torch.device, step_bytes: int = 0
) -> int:
    """Pages for `num_pages=None`: what memory allows, but no more than `max_num_seqs` whole sequences need.

    On a GPU `gpu_memory_utilization` of its memory, less what is in use by anyone (the weights, other processes) and
    what the largest step takes on top, `step_bytes`; on a CPU a quarter of what is available, at most 8 GiB.
    ValueError where not even one page fits.
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
    page = bytes_per_token * config.page_size
    if room < page:
        raise ValueError(
            f"EngineConfig: num_pages: no room for a KV cache: {what} leaves {max(room, 0)} bytes, a page takes {page}"
        )
    return min(room // page, config.max_num_seqs * -(-max_model_len // config.page_size))


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's where that has less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, max(int(limit.read_text()) - int(used.read_text()), 0))
    return available
