"""A stand-in for torch_memory_saver's library, and for what regions need of torch and of a GPU, on a CPU.

What is allocated in a region is known by its tag. Nothing of a CPU's memory can be unmapped: what is paused is filled
with 0xAB, and again when it is resumed, so that whoever relies on it has other bits. Where the real library ends the
process, this one raises.
"""

import contextlib
import itertools
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vexact_engine.runner import graphs, saver

_ids = itertools.count(1)


class Ended(BaseException):
    """The real library has written a line and called exit(1)."""


class Library:
    """The package's BinaryWrapper, after its constructor."""

    def __init__(self):
        self.tag, self.marked, self.backed = "default", False, False
        self.allocated: list[list] = []  # storage, tag, whether it is active; all kept, so that no address comes twice
        self.cdll = SimpleNamespace(
            tms_get_interesting_region=lambda: self.marked,
            tms_get_enable_cpu_backup=lambda: self.backed,
            tms_pause=lambda tag: self._turn(tag, True),
            tms_resume=lambda tag: self._turn(tag, False),
        )

    def set_config(self, *, tag: str, interesting_region: bool, enable_cpu_backup: bool) -> None:
        self.tag, self.marked, self.backed = tag, interesting_region, enable_cpu_backup

    def note(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() and not any(known._cdata == storage._cdata for known, *_ in self.allocated):
            self.allocated.append([storage, self.tag, True])

    def _turn(self, tag: bytes, active: bool) -> int:
        for entry in self.allocated:
            if entry[1] == tag.decode():
                if entry[2] is not active:
                    raise Ended(f"{'pause' if active else 'resume'}: {entry[1]} is not {active}")
                entry[0].fill_(0xAB)
                entry[2] = not active
        return 0

    def nbytes(self, active: bool = True) -> int:
        return sum(storage.nbytes() for storage, _, is_active in self.allocated if is_active is active)


class Cuda:
    """saver._Cuda of a CPU.

    room   bytes that the device has
    """

    def __init__(self, library: Library, room: int = 1 << 40):
        self.library, self.device, self.room = library, torch.device("cpu"), room
        self.pools: dict[tuple, list] = {}

    def pool(self):
        return SimpleNamespace(id=(0, next(_ids)))

    @contextlib.contextmanager
    def use(self, pool):
        library, mine = self.library, self.pools.setdefault(pool.id, [])

        class Noting(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
                out = function(*args, **(kwargs or {}))
                for tensor in tree_leaves(out):
                    if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                        assert library.marked, "memory of a pool without a tag"
                        library.note(tensor.untyped_storage())
                        mine.append(tensor.untyped_storage())
                return out

        with Noting():
            yield

    def nbytes(self, pool_id) -> int:
        return sum({s._cdata: s.nbytes() for s in self.pools.get(tuple(pool_id), ())}.values())

    def free(self) -> int:
        return self.room - self.library.nbytes()

    def wait(self) -> None:
        pass

    def trim(self) -> None:
        pass


class Recorder(graphs.HostRecorder):
    """As CudaRecorder: what a recording takes while it is made lies in the region, and nobody replays it asleep."""

    def __init__(self, device, region=None):
        self._region = region
        self._begin()

    def _begin(self) -> None:
        self._pool = self._region._saver.cuda.pool()
        self._region.start(self._pool.id)

    def record(self, run, if_settled=False):
        region = self._region
        recording = region.recording(lambda: torch.zeros(1000, dtype=torch.uint8))  # a capture computes nothing
        with region._saver.cuda.use(self._pool):
            recording()

        def replay():
            assert not region.paused, "a graph is replayed whose memory sleeps"
            run()

        return replay

    def release(self) -> None:
        self._begin()


def stand_in(patch) -> Library:
    """Engines that are made from here on use it; `patch` is a MonkeyPatch."""
    library = Library()
    cuda = Cuda(library)
    patch.setattr(saver, "choose", lambda asked, device: (saver.Saver(library, cuda), "memory_saver: a stand-in"))
    return library
