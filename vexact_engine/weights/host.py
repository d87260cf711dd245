"""The memory of this machine."""

from pathlib import Path


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's where that has less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        available = min(available, max(int(limit.read_text()) - int(used.read_text()), 0))
    return available
