"""Which of several kernels is the fastest on a GPU."""

import statistics
from collections.abc import Callable, Sequence

import torch

from .graph import CudaGraph, cuda_graph, cuda_stream


def race_on_gpu(
    calls: Sequence[Sequence[Callable]], rounds: int = 5, finalists: int = 4, final: int = 10
) -> list[float | Exception]:
    """Median microseconds of a call for each competitor: a list of calls each, in a CUDA graph, replayed turn about; or
    what a competitor raised when it was captured.

    The few fastest of the first rounds run the final ones too, so that the choice between them is not left to chance.
    """
    graphs: dict[int, CudaGraph] = {}
    failed: dict[int, Exception] = {}
    stream = cuda_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch.cuda.graph would hand all cached memory back to the driver first
        pool = torch.cuda.graph_pool_handle()  # of its own each of a hundred graphs would take 20 MiB and more
        for which, competitor in enumerate(calls):
            try:
                graphs[which] = _captured(competitor, pool)
            except torch.OutOfMemoryError:
                raise
            except Exception as failure:
                failed[which] = failure
                pool = torch.cuda.graph_pool_handle()  # what a broken capture has left of one serves no other
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replay(which: int) -> float:
            start.record()
            graphs[which]()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / len(calls[which])

        for which in graphs:
            replay(which)  # the first replay uploads the graph
        times = {which: [] for which in graphs}
        for _ in range(rounds):
            for which in graphs:
                times[which].append(replay(which))
        for which in sorted(graphs, key=lambda i: statistics.median(times[i]))[:finalists] * final:
            times[which].append(replay(which))
    torch.cuda.current_stream().wait_stream(stream)
    return [failed[which] if which in failed else statistics.median(times[which]) for which in range(len(calls))]


def _captured(calls: Sequence[Callable], pool: tuple[int, int]) -> CudaGraph:
    calls[0]()  # what loads or sets up on its first call does it now

    def run() -> None:
        for call in calls:
            call()

    return cuda_graph(run, pool=pool)
