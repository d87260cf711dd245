"""Memory of a GPU that is given back while its addresses stay: torch_memory_saver, where it is installed and in place.

Its library stands in front of CUDA's cudaMalloc, which takes an LD_PRELOAD before the process starts. What a thread
allocates under a tag may be paused and resumed by that tag: the physical memory goes and comes, and the addresses of
tensors and of CUDA graphs do not change, so graphs need not be recorded again. Here each engine has tags of its own.
Contents are not kept: what is to outlive a pause is copied to the host by whoever pauses (sleep.py), which can say no.

The library ends the process where it is used wrongly (paused twice, resumed without room), so all of that is looked at
before. Its other way, an allocator of torch's, needs no LD_PRELOAD, but ends the process where memory is short or where
any thread frees memory outside of a region: that one is not used.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vexact_ops as vx

from ..extras import pip_line

PACKAGE = "torch_memory_saver"
_LEAST = (0, 0, 10)  # may free memory that is paused, which ended the process before
_CALLS = ("tms_pause", "tms_resume", "tms_set_current_tag", "tms_set_interesting_region", "tms_set_enable_cpu_backup")
_PROBE = 32 << 20
_SPARE = 16 << 20  # bytes that CUDA may want for itself where memory is mapped
_AT_ONCE = 1 << 30  # bytes of old memory that may wait to be given back while tensors move
_numbers = itertools.count()


def choose(asked: str, device: torch.device) -> "tuple[Saver | None, str]":
    """What `EngineConfig.sleep_backend` comes to here, and the words that say it: "memory_saver: " and the version, or
    "storages", with the reason where that was not asked for.

    raises   BackendUnavailable with the reason where the memory saver is asked for and cannot be used
    """
    if asked == "storages":
        return None, "storages"
    why, saver = unusable(device), None
    if not why:
        saver = Saver(_library(), _Cuda(device))
        why = saver.probe()
    if not why:
        return saver, f"memory_saver: {PACKAGE} {_version() or 'of no known version'}"
    if asked == "memory_saver":
        raise vx.BackendUnavailable(f"EngineConfig: sleep_backend: got 'memory_saver': {why}")
    return None, f"storages: {why}"


def unusable(device: torch.device) -> str:
    """Why the memory saver cannot be used in this process, "" where it can."""
    if device.type != "cuda":
        return "it is for GPUs"
    if find_spec(PACKAGE) is None:
        return f"{PACKAGE} is not installed. Run: {pip_line('sleep')}"
    version = _version()
    if version and _numbers_of(version) < _LEAST:
        return f"{PACKAGE} is {version}, expected {'.'.join(map(str, _LEAST))} or later"
    try:
        expected = str(_path())
    except RuntimeError as error:
        return " ".join(str(error).split())
    if not _in_place():
        return (
            f"the process was started without its library. Start it with LD_PRELOAD={_preload(expected)} in its "
            "environment"
        )
    found = [path for path in os.environ.get("LD_PRELOAD", "").split(":") if PACKAGE in path]
    if [os.path.realpath(path) for path in found] != [os.path.realpath(expected)]:
        return f"LD_PRELOAD names {' and '.join(found) or 'none of its libraries'}, expected {expected} alone"
    absent = [name for name in _CALLS if not hasattr(_everything(), name)]
    if absent:
        return f"{PACKAGE} {version}: its library lacks {', '.join(absent)}"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if re.search(r"expandable_segments\s*:\s*True", os.environ.get(name, "")):
            return f"{name} has expandable_segments:True, which takes memory past it"
    return ""


def environment(asked: str, device: str) -> dict[str, str]:
    """Variables that a process has to be started with, so that an engine there can use the memory saver. None where
    that is not wanted or not installed: the engine will say so."""
    if asked == "storages" or device != "cuda" or find_spec(PACKAGE) is None:
        return {}
    before = os.environ.get("LD_PRELOAD", "")
    if any(PACKAGE in path for path in before.split(":")):
        return {}
    try:
        preload = ":".join(filter(None, (_preload(str(_path())), before)))
    except RuntimeError:
        return {}
    return {"LD_PRELOAD": preload} if _starts(preload) else {}


def _version() -> str:
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return ""


def _numbers_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _path() -> Path:
    """Of the library for torch's CUDA."""
    from torch_memory_saver.utils import get_binary_path_from_package

    return get_binary_path_from_package(f"{PACKAGE}_hook_mode_preload")


def _preload(path: str) -> str:
    """With the CUDA runtime that it needs, which no loader finds inside torch's wheels."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    runtimes = sorted({line.split()[-1] for line in lines if "/libcudart.so" in line})
    return ":".join([path, *runtimes[:1]])


@functools.cache
def _starts(preload: str) -> bool:
    """Whether processes start with these: where something that they need is not found, none does."""
    with contextlib.suppress(OSError):
        variables = {**os.environ, "LD_PRELOAD": preload}
        done = subprocess.run([sys.executable, "-S", "-c", ""], env=variables, capture_output=True)
        return done.returncode == 0 and not done.stderr
    return False


def _everything() -> ctypes.CDLL:
    """What the loader has in this process for everybody. A library that was loaded later by its path is not in it."""
    return ctypes.CDLL(None)


def _in_place() -> bool:
    return hasattr(_everything(), _CALLS[0])


def _library() -> Any:
    from torch_memory_saver.binary_wrapper import BinaryWrapper

    return BinaryWrapper(str(_path()))


class _Cuda:
    """What regions need of torch and of the device."""

    def __init__(self, device: torch.device):
        self.device = device

    def pool(self) -> Any:
        with torch.cuda.device(self.device):
            return torch.cuda.MemPool()

    def use(self, pool: Any) -> contextlib.AbstractContextManager:
        """What this thread allocates comes from there."""
        return torch.cuda.use_mem_pool(pool, self.device)

    def nbytes(self, pool_id: tuple[int, int]) -> int:
        """Bytes that torch has taken for the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool_id))

    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def wait(self) -> None:
        vx.synchronize(self.device)

    def trim(self) -> None:
        torch.cuda.empty_cache()


class Saver:
    """The library of this process, for one engine. Used in the engine's thread, as are its regions.

    library   the package's BinaryWrapper
    """

    def __init__(self, library: Any, cuda: _Cuda):
        self.library, self.cuda = library, cuda

    def region(self, name: str) -> "Region":
        return Region(self, name)

    @contextlib.contextmanager
    def marked(self, tag: str) -> Iterator[None]:
        """What this thread takes of CUDA has this tag."""
        library = self.library
        was_on, backed = library.cdll.tms_get_interesting_region(), library.cdll.tms_get_enable_cpu_backup()
        library.set_config(tag=tag, interesting_region=True, enable_cpu_backup=False)
        try:
            yield
        finally:
            library.set_config(tag="default", interesting_region=was_on, enable_cpu_backup=backed)

    def probe(self) -> str:
        """Why it does not work, "" where it does: a region is paused, its memory is free, and it comes back."""
        region = self.region("probe")
        with region.allocating():
            data = torch.ones(_PROBE, dtype=torch.uint8, device=self.cuda.device)
        address, gained = data.data_ptr(), 0
        for _ in range(3):  # others may take memory in that moment
            before = self.cuda.free()
            region.pause()
            gained = max(gained, self.cuda.free() - before)
            try:
                region.resume()
            except torch.OutOfMemoryError as error:
                return f"others took its memory while it was tried: {error}"
        data.fill_(2)
        if gained < _PROBE // 2:
            return f"a region of {_PROBE >> 20} MiB was paused, and {gained >> 20} MiB of the device were free for it"
        if data.data_ptr() != address or int(data[-1]) != 2:
            return "a region that was paused and resumed does not hold what is written into it"
        return ""


class Region:
    """Memory of an engine that is paused and resumed as one.

    paused   whether it is: nobody may touch it then
    """

    def __init__(self, saver: Saver, name: str):
        self._saver, self._name = saver, name
        self._pool: Any = None
        self._places: dict[int, int] = {}  # storages that were moved here: address -> bytes
        self.start(None)

    def start(self, pool_id: tuple[int, int] | None) -> None:
        """Anew, with a tag that nothing has yet: for a pool of somebody else's, who has let go of the one before."""
        self._tag, self._pool_id, self.paused = f"vexact-{next(_numbers)}-{self._name}", pool_id, False

    @property
    def nbytes(self) -> int:
        """Of the device, while it is not paused."""
        pool_id = self._pool_id if self._pool is None else self._pool.id
        return 0 if pool_id is None else self._saver.cuda.nbytes(pool_id)

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """What this thread allocates lies here."""
        self._check()
        if self._pool is None:
            self._pool = self._saver.cuda.pool()
        with self._saver.cuda.use(self._pool), self._saver.marked(self._tag):
            yield

    def recording(self, run: Callable[[], object]) -> Callable[[], object]:
        """The same function, for a capture into the pool that the region was started with: it is that pool's memory
        that it takes. Only while it runs: what torch itself needs at the begin of a capture is other memory."""

        def marked() -> object:
            self._check()
            with self._saver.marked(self._tag):
                return run()

        return marked

    def pause(self) -> None:
        """Give the memory back; what it holds is lost. Nothing if it is paused."""
        if self.paused:
            return
        self._saver.cuda.wait()
        self._saver.library.cdll.tms_pause(self._tag.encode())
        self.paused = True

    def resume(self) -> None:
        """Have memory again, which holds anything. torch.OutOfMemoryError where there is no room: it stays paused."""
        if not self.paused:
            return
        wanted, free = self.nbytes, self._saver.cuda.free()
        if free < wanted + _SPARE:
            self._saver.cuda.trim()
            free = self._saver.cuda.free()
        if free < wanted + _SPARE:
            raise torch.OutOfMemoryError(f"{wanted >> 20} MiB are wanted, {free >> 20} MiB of the device are free")
        self._saver.library.cdll.tms_resume(self._tag.encode())
        self.paused = False

    def misplaced(self, tensors: Iterable[Tensor]) -> list[list[Tensor]]:
        """Those whose memory is elsewhere, by storage."""
        found: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and self._places.get(storage.data_ptr()) != storage.nbytes():
                found.setdefault(storage._cdata, []).append(tensor)
        return list(found.values())

    @torch.no_grad()
    def take_in(self, tensors: Iterable[Tensor]) -> bool:
        """Move the misplaced among them here, one storage after another; whether there were any. Tensors that share a
        storage share one afterwards; views that are not given still show the old one."""
        misplaced, waiting = self.misplaced(tensors), 0
        found = bool(misplaced)
        while misplaced:
            group = misplaced.pop()
            old = group[0].untyped_storage()
            with self.allocating():
                new = torch.empty(old.nbytes(), dtype=torch.uint8, device=old.device).untyped_storage()
            new.copy_(old)
            self._places[new.data_ptr()] = new.nbytes()
            for tensor in group:
                there = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                tensor.data = there.set_(new, tensor.storage_offset(), tensor.shape, tensor.stride())
            self._saver.cuda.wait()  # before the old one is gone: it may be another stream's
            del group, old
            waiting += new.nbytes()
            if waiting >= _AT_ONCE or not misplaced:
                self._saver.cuda.trim()
                waiting = 0
        return found

    def _check(self) -> None:
        if self.paused:
            raise RuntimeError(f"{self._name}: memory is wanted while the region sleeps")
