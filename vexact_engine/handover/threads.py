"""How many threads a copy takes on the host."""

import contextlib
import ctypes
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def half_the_threads() -> Iterator[None]:
    """What this thread computes meanwhile takes half of its threads: a process at the other end copies at the same
    time, and OpenMP's threads wait for each other. On two cores with four of them that was 8 ms for each copy.

    Of this thread alone, as torch.set_num_threads is not. Nothing happens where torch computes without OpenMP.
    """
    threads = torch.get_num_threads()
    if threads == 1 or (choose := _omp_set_num_threads()) is None:
        yield
        return
    try:
        choose(threads // 2)
        yield
    finally:
        choose(threads)


def _omp_set_num_threads() -> Callable[[int], None] | None:
    return getattr(_PROCESS, "omp_set_num_threads", None)


_PROCESS = ctypes.CDLL(None)  # torch loads its OpenMP for all to see
