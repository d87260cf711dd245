"""Ranks on GPUs of one host put columns side by side by writing into each other's memory, without a collective; how
long both take, `python -m benchmarks gather` says."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import native

_MOST_RANKS = 8


class Peers:
    """What ranks write to each other through. All make it, gather and close it in the same order.

    rank, size  this process among `size`, 2 to 8
    device      its GPU, which the others' must be able to reach (NVLink or PCIe peer access)
    exchange    called once with some bytes; returns those of every rank, in their order
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
        self._limit_ms, self._opened, self._taken = int(1e3 * limit), [], 0
        self._bases = torch.zeros(size, dtype=torch.int64)
        self._missing = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        failure, handle = "", b""
        try:
            if not native.built_with_cuda():
                raise native.BackendUnavailable("Peers: the extension was built without its CUDA half")
            found = torch.zeros(9, dtype=torch.int64)
            native.ops().peers_take(found, size, device.index)
            self._taken, handle = int(found[0]), found[1:].numpy().tobytes()
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        handles = exchange(handle)
        if not failure and all(handles):
            failure = self._open(handles)
        failures = [text.decode() for text in exchange(failure.encode())]
        if any(failures):
            self.close()
            who = next(number for number, text in enumerate(failures) if text)
            raise RuntimeError(f"Peers: rank {who} cannot reach the others' memory: {failures[who]}")

    def _open(self, handles: Sequence[bytes]) -> str:
        for number, handle in enumerate(handles):
            if number == self.rank:
                self._bases[number] = self._taken
                continue
            try:
                words = torch.frombuffer(bytearray(handle), dtype=torch.int64)
                self._bases[number] = native.ops().peers_open(words, self.device.index)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            self._opened.append(int(self._bases[number]))
        return ""

    def gather(self, x: Tensor) -> Tensor:
        """(T, C) of each rank, alike in shape and dtype -> (T, size * C), the columns in the order of ranks. On the
        current stream, also in a CUDA graph."""
        x = x.contiguous()
        rows, columns = x.shape
        out = x.new_empty(rows, self.size * columns)
        if out.numel():
            parts = (t.view(torch.uint8) for t in (x, out))
            native.ops().peers_gather(*parts, self._bases, self.rank, self._limit_ms, self._missing)
        return out

    @property
    def missing(self) -> int | None:
        """The rank that a gather waited for in vain."""
        word = int(self._missing)
        return word - 1 if word else None

    def close(self) -> None:
        """Once all ranks' gathers are done. Again it does nothing."""
        opened, self._opened = self._opened, []
        for base in opened:
            native.ops().peers_close(base, False, self.device.index)
        taken, self._taken = self._taken, 0
        if taken:
            native.ops().peers_close(taken, True, self.device.index)
