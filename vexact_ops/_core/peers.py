"""Ranks on GPUs of one host put columns side by side by writing into each other's memory, without a collective; how
long both take, `python -m benchmarks gather` says."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import native
from .race import race_on_gpu

_MOST_RANKS = 8
_LINE, _LINES, _NUMBERS = 8, 1 << 17, 128  # as in csrc/common/sent.cuh: bytes of columns in a line, lines, counters
_COMPUTED = 64  # rows that kernels send as they compute them
_ON_LINKS = 1 << 20  # bytes: lines are twice as many, from so many on slower than what gather does
_UNIT, _UNITS = 16, 15  # as in csrc/common/packed.cuh: bytes; units that share a line with their last bytes
_CHUNK_LINES, _CHUNKS = 2 * 16 * 32, 1152  # in both turns
_ROW_UNITS, _ROW_LINES, _ROWS, _WIDEST = 512, 552, 1024, 8192  # the last: columns of all ranks
_RACED = range(15, 24)  # classes, by bytes of a rank, of gathers: the last stands for all above


class Sent(NamedTuple):
    """Columns of this rank that are on their way to all: what linear_send gives where there is no tensor.

    since  rounds that were sent before this one since one was counted (csrc/common/sent.cuh)
    """

    rows: int
    columns: int
    dtype: torch.dtype
    since: int = 0


class Shared:
    """Memory that each rank takes, and the others open.

    bases    where that of each rank lies, in this process
    take     called with 1 + 8 int64, writes where it lies and the handle by which it is opened
    raises   RuntimeError on every rank where one of them cannot
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        take: Callable[[Tensor], object],
        exchange: Callable[[bytes], Sequence[bytes]],
    ) -> None:
        self._rank, self._device, self._opened, self._taken = rank, device, [], 0
        failure, handle = "", b""
        try:
            if not native.built_with_cuda():
                raise native.BackendUnavailable("Peers: the extension was built without its CUDA half")
            found = torch.zeros(9, dtype=torch.int64)
            take(found)
            self._taken, handle = int(found[0]), found[1:].numpy().tobytes()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        handles = exchange(handle)
        self.bases = torch.zeros(len(handles), dtype=torch.int64)
        if not failure and all(handles):
            failure = self._open(handles)
        failures = [text.decode() for text in exchange(failure.encode())]
        if any(failures):
            self.close()
            who = next(number for number, text in enumerate(failures) if text)
            raise RuntimeError(f"Peers: rank {who} cannot reach the others' memory: {failures[who]}")

    def _open(self, handles: Sequence[bytes]) -> str:
        for number, handle in enumerate(handles):
            if number == self._rank:
                self.bases[number] = self._taken
                continue
            try:
                words = torch.frombuffer(bytearray(handle), dtype=torch.int64)
                self.bases[number] = native.ops().peers_open(words, self._device.index)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            self._opened.append(int(self.bases[number]))
        return ""

    def close(self) -> None:
        """Again it does nothing."""
        opened, self._opened = self._opened, []
        for base in opened:
            native.ops().peers_close(base, False, self._device.index)
        taken, self._taken = self._taken, 0
        if taken:
            native.ops().peers_close(taken, True, self._device.index)


class Peers:
    """What ranks write to each other through. All make it, gather and close it in the same order.

    rank, size  this process among `size`, 2 to 8
    device      its GPU, which the others' must be able to reach (NVLink or PCIe peer access)
    exchange    called with some bytes; returns those of every rank, in their order
    limit       seconds that a gather waits for a rank. After that the process's CUDA context is lost, and `missing`
                says which rank did not come

    bits        bytes are moved
    raises      ValueError on size; RuntimeError where a GPU or a process cannot reach another's memory, on every rank;
                BackendUnavailable where the extension has no CUDA half
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        exchange: Callable[[bytes], Sequence[bytes]],
        *,
        limit: float = 600.0,
    ) -> None:
        if not (2 <= size <= _MOST_RANKS and 0 <= rank < size):
            raise ValueError(f"Peers: got rank {rank} of {size}, expected one of 2 to {_MOST_RANKS}")
        self.rank, self.size, self.device = rank, size, device
        self._limit_ms, self._exchange = int(1e3 * limit), exchange
        self._shared: list[Shared] = []
        self._missing = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._bases = self._share(lambda found: native.ops().peers_take(found, size, device.index))

    def _share(self, take: Callable[[Tensor], object]) -> Tensor:
        made = Shared(self.rank, self.device, take, self._exchange)
        self._shared.append(made)
        return made.bases

    def sends(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether so many rows and columns of each rank may be sent by the kernel that computes them, and received by
        the one that needs them: the same on every rank."""
        size = columns * dtype.itemsize
        few = rows * size * (self.size - 1) <= _ON_LINKS and not self.packs(rows, size)
        few |= rows <= _COMPUTED
        return few and rows > 0 and columns > 0 and size % _LINE == 0 and rows * size <= _LINE * _LINES

    @property
    def places(self) -> tuple[Tensor, int]:
        """Where each rank's memory lies, in this process, and which rank this is: for kernels that send."""
        return self._bases, self.rank

    def receive(self, x: Tensor | Sent) -> Tensor:
        """gather, of what may be `Sent` on any of the ranks: by lines where there is room for them. What was sent is
        received before anything else is."""
        if not self.sends(*kind_of(x)):
            return self.gather(x)
        rows, columns, dtype = kind_of(x)
        out = torch.empty(rows, self.size * columns, dtype=dtype, device=self.device)
        own = None if isinstance(x, Sent) else on_8(x).view(torch.uint8)
        native.ops().peers_place(own, out.view(torch.uint8), since_of(x), *self.waiting)
        return out

    @property
    def waiting(self) -> tuple[Tensor, int, int, Tensor]:
        """places, for how many milliseconds a kernel that receives waits, and where it says for whom in vain."""
        return *self.places, self._limit_ms, self._missing

    def gather(self, x: Tensor, *, packed: bool | None = None) -> Tensor:
        """(T, C) of each rank, alike in shape and dtype -> (T, size * C), the columns in the order of ranks. On the
        current stream, also in a CUDA graph.

        packed  by lines that are nearly all columns (csrc/common/packed.cuh), or not; None: by what `race` has found
        raises  ValueError where such lines are asked for, and rows are no multiples of 16 bytes
        """
        x = x.contiguous()
        rows, columns = x.shape
        row = columns * x.element_size()
        if packed and row % _UNIT:
            raise ValueError(f"Peers.gather: got rows of {row} bytes, expected multiples of {_UNIT} for packed lines")
        if packed is None:
            packed = self.packs(rows, row)
        if packed and x.data_ptr() % _UNIT:
            x = x.clone()
        out = x.new_empty(rows, self.size * columns)
        if out.numel():
            parts = (t.view(torch.uint8) for t in (x, out))
            by = native.ops().peers_gather_packed if packed else native.ops().peers_gather
            by(*parts, self._bases, self.rank, self._limit_ms, self._missing)
        return out

    def norm_packed(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor, gemma: bool
    ) -> tuple[Tensor, Tensor]:
        """rmsnorm of gather(x) with a residual, and their sum, by one kernel that rmsnorm_gather verifies."""
        self._normed = x.shape[1] * x.element_size()
        y, added = torch.empty_like(residual), torch.empty_like(residual)
        x = x.contiguous() if x.data_ptr() % _UNIT == 0 else x.clone(memory_format=torch.contiguous_format)
        native.ops().peers_norm_packed(
            x, weight, residual, y, added, eps, gemma, *self.places, self._limit_ms, self._missing
        )
        return y, added

    def norms(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether rows of so many columns of each rank may be normed where packed lines of them come: rows that no
        kernel sends as it computes them, all of one width, for a flag counts the times of a whole row. The same on
        every rank."""
        row = columns * dtype.itemsize
        fits = dtype.itemsize == 2 and row <= _UNIT * _ROW_UNITS and columns * self.size <= _WIDEST
        fits &= _COMPUTED < rows <= _ROWS // self.size
        return fits and self._normed in (0, row) and self.packs(rows, row)

    _normed = 0  # bytes of a row of each rank
    _packed: frozenset[int] = frozenset()  # classes of bytes

    def packs(self, rows: int, row: int) -> bool:
        """Whether so many rows of so many bytes on each rank are gathered by packed lines: the same on every rank."""
        size = min((rows * row).bit_length(), _RACED[-1])
        return size in self._packed and row % _UNIT == 0

    def race(self, rounds: int = 7) -> dict[int, tuple[float, float]]:
        """From now on each gather takes the kernel that is faster for so many bytes. By all ranks, outside of graphs.

        returns  by the least bytes of a class, microseconds without packed lines and with them, the slowest rank's
        """
        took = []
        for size in _RACED:
            x = torch.zeros(16, 1 << size - 5, dtype=torch.uint8, device=self.device)
            calls = min(48, max(4, (1 << 25) >> size))
            rivals = [[lambda x=x, by=by: self.gather(x, packed=by)] * calls for by in (False, True)]
            for time in race_on_gpu(rivals, rounds, finalists=0):  # finals would not be alike on all ranks
                if isinstance(time, Exception):
                    raise time
                took.append(time)
        own = torch.tensor(took, dtype=torch.float64).numpy().tobytes()
        every = [torch.frombuffer(bytearray(data), dtype=torch.float64) for data in self._exchange(own)]
        slowest = torch.stack(every).amax(0).view(-1, 2).tolist()
        self._packed = frozenset(size for size, (plain, packed) in zip(_RACED, slowest) if packed < plain)
        return {1 << size - 1: (plain, packed) for size, (plain, packed) in zip(_RACED, slowest)}

    def norm(
        self, x: Tensor | Sent, weight: Tensor, eps: float, residual: Tensor, gemma: bool, settled: bool
    ) -> tuple[Tensor, Tensor]:
        """rmsnorm of receive(x) with a residual, and their sum, by one kernel that rmsnorm_gather verifies."""
        y, added = torch.empty_like(residual), torch.empty_like(residual)
        own = None if isinstance(x, Sent) else on_8(x)
        native.ops().peers_norm(own, weight, residual, y, added, eps, gemma, settled, since_of(x), *self.waiting)
        return y, added

    @property
    def missing(self) -> int | None:
        """The rank that a gather waited for in vain."""
        word = int(self._missing)
        return word - 1 if word else None

    def landing(self, size: int) -> "Landing":
        """So many bytes of each rank, for fused_moe to send to. As with Peers: made by all, RuntimeError on every rank
        where one of them cannot; closed with it."""
        bases = self._share(lambda found: native.ops().peers_land(found, size, self.device.index))
        own = _Interface(int(bases[self.rank]), size)
        return Landing(self, bases, torch.as_tensor(own, dtype=torch.uint8, device=self.device))

    def close(self) -> None:
        """Once all ranks' gathers are done. Again it does nothing."""
        shared, self._shared = self._shared, []
        for one in shared:
            one.close()


class Landing:
    """Memory of each rank in which kernels of all ranks put columns while they compute them, in place of a gather: what
    Peers.landing makes. All ranks send, as many columns each, and do the same in the same order. What is written is
    read once all have met; the next may be written once all have read it, which a gather of what they made of it says.

    bases   where that of each rank lies, in this process
    memory  this rank's bytes; the others have as many
    called  a gather of `peers`: fused_moe's `between`, for what is not sent
    """

    def __init__(self, peers: Peers, bases: Tensor, memory: Tensor) -> None:
        self.peers, self.memory = peers, memory
        self._bases, self._kinds = bases, set[tuple]()

    def __call__(self, x: Tensor) -> Tensor:
        return self.peers.gather(x)

    def admit(self, kind: tuple, failure: str) -> str:
        """agree; from now on what is of that kind is sent, where no rank has a failure."""
        said = self.agree(failure)
        if not said:
            self._kinds.add(kind)
        return said

    def agree(self, failure: str) -> str:
        """The failure of the first rank that has one, or "". By all ranks."""
        said = [text.decode() for text in self.peers._exchange(failure.encode())]
        return next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "")

    def takes(self, kind: tuple, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether so many rows and columns of each rank are sent: the same on every rank."""
        return kind in self._kinds and rows * columns * self.peers.size * dtype.itemsize <= len(self.memory)

    def view(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        """(rows, size * columns) from where this rank's memory begins."""
        wide = columns * self.peers.size
        return self.memory[: rows * wide * dtype.itemsize].view(dtype).view(rows, wide)

    @property
    def places(self) -> tuple[Tensor, int]:
        """Where each rank's memory lies, in this process, and which rank this is: for kernels that send."""
        return self._bases, self.peers.rank

    def meet(self) -> None:
        """What was sent before, by any rank, may be read after this. On the current stream, also in a CUDA graph."""
        bases, rank, *waiting = self.peers.waiting
        native.ops().peers_meet(self.memory, bases, rank, *waiting)


class _Interface:
    """For torch.as_tensor, which keeps no hold of the memory."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class Loopback(Peers):
    """Memory of one rank in place of all: where a kernel that sends, or one that receives, is verified."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.rank, self.size, self.device = 0, size, device
        self._limit_ms, self._shared = 10_000, []
        self._lay_out(size, device)
        self._bases = torch.full((size,), self._memory.data_ptr(), dtype=torch.int64)
        self._missing = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def _lay_out(self, size: int, device: torch.device) -> None:
        self._lines_end = _NUMBERS + 2 * size * _LINES * 4
        self._rows_begin = self._lines_end + _CHUNKS + _ROWS + size * (_CHUNKS // size) * _CHUNK_LINES * 4
        words = self._rows_begin + 2 * size * (_ROWS // size) * _ROW_LINES * 4
        self._memory = torch.zeros(words, dtype=torch.int32, device=device)

    def _lines(self, rank: int, count: int, turn: int) -> Tensor:
        return self._memory[_NUMBERS : self._lines_end].view(2, self.size, _LINES, 4)[turn, rank, :count]

    def begin(self, others: Sequence[Tensor] = ()) -> None:
        """Nothing was ever sent, but by the last ranks `others` what the first round receives."""
        self._memory.zero_()
        for number, x in enumerate(others, self.size - len(others)):
            words = x.contiguous().view(-1).view(torch.int32).view(-1, 2)
            lines = self._lines(number, len(words), 1)
            lines[:, ::2], lines[:, 1::2] = words, 1

    def sent(self, rows: int, columns: int, dtype: torch.dtype, turn: int = 1) -> Tensor | None:
        """What this rank has sent in the first round or, in turn 0, the second; None where lines are missing."""
        lines = self._lines(0, rows * columns * dtype.itemsize // _LINE, turn)
        if not (lines[:, 1::2] == (1 if turn else 2)).all():
            return None
        return lines[:, ::2].contiguous().view(-1).view(dtype).view(rows, columns)

    def _rows(self, rank: int, count: int) -> Tensor:
        """(T, _ROW_LINES, 16) bytes of the first time."""
        bytes_of_all = self._memory[self._rows_begin :].view(torch.uint8)
        return bytes_of_all.view(2, self.size, _ROWS // self.size, _ROW_LINES, _UNIT)[1, rank, :count]

    def begin_packed(self, others: Sequence[Tensor]) -> None:
        """Nothing was ever sent, but rows by the last ranks `others` as packed lines of the first time."""
        self._memory.zero_()
        for number, x in enumerate(others, self.size - len(others)):
            units, last = packed_rows(x)
            rows = self._rows(number, len(x))
            rows[:, : units.shape[1]], rows[:, _ROW_UNITS : _ROW_UNITS + last.shape[1]] = units, last

    def has_sent(self, x: Tensor) -> bool:
        """Whether this rank has sent these rows as packed lines of the first time, and nothing else."""
        units, last = packed_rows(x)
        rows, count = self._rows(0, _ROWS // self.size).clone(), len(x)
        parts = (slice(0, units.shape[1]), units), (slice(_ROW_UNITS, _ROW_UNITS + last.shape[1]), last)
        for where, lines in parts:
            if not torch.equal(rows[:count, where], lines):
                return False
            rows[:count, where] = 0
        return not rows.any()


def packed_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lines of csrc/common/packed.cuh: with the units of rows, and with their last bytes, of the first time."""
    units = x.contiguous().view(torch.uint8).view(len(x), -1, _UNIT).clone()
    count = -(-units.shape[1] // _UNITS)
    last = units.new_zeros(len(x), count * _UNITS)
    last[:, : units.shape[1]] = units[..., _UNITS]
    units[..., _UNITS] = 1
    flags = units.new_ones(len(x), count, 1)
    return units, torch.cat([last.view(len(x), count, _UNITS), flags], 2)


def kind_of(x: Tensor | Sent) -> tuple[int, int, torch.dtype]:
    return x[:3] if isinstance(x, Sent) else (*x.shape, x.dtype)


def since_of(x: Tensor | Sent) -> int:
    return x.since if isinstance(x, Sent) else 0


def on_8(x: Tensor) -> Tensor:
    """Contiguous, from an 8-byte boundary."""
    return x.contiguous() if x.data_ptr() % _LINE == 0 else x.clone(memory_format=torch.contiguous_format)
