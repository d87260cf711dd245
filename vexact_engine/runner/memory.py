"""How large the KV cache may be."""

from pathlib import Path

import torch

from ..config import EngineConfig

# On a CPU the cache shares memory with everything else that runs there, a trainer above all.
CPU_SHARE, CPU_MOST = 0.25, 8 << 30


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


def most_pages(config: EngineConfig, bytes_per_token: int, device: torch.device) -> int:
    """Pages that no sequence can have more of, however long a text the model says that it was made for."""
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else CPU_MOST
    return max(1, total // (bytes_per_token * config.page_size))


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's where that has less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, max(int(limit.read_text()) - int(used.read_text()), 0))
    return available
