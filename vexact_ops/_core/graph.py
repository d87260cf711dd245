"""CUDA graphs in a process whose other threads use the GPU too: a trainer beside an engine, two engines.

CUDA forbids to wait for a whole device while any thread captures on it: who waits gets an error, and the capture is
lost. So what of this library waits for a device, or captures, does it one after another (`alone`). A capture that a
stranger has broken is cleaned up and tried again; torch would otherwise take its generator for capturing for ever, and
every later graph and random number of the process would fail.
"""

import collections
import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import overload

import torch

alone = threading.RLock()  # held where the whole device is waited for, and from the begin to the end of a capture

_TRIES = 8
_idle_streams: dict[int, list[int]] = collections.defaultdict(list)  # of `cuda_stream`, by the number of the GPU
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_FREE_ON_LAUNCH = 1  # CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, as torch's own


class CudaGraph:
    """A recording. Called, it does the same again on the current stream of its device, on what the same memory then
    holds. Unlike torch's replay it may be called while another thread captures; random numbers it does not know."""

    def __init__(self, graph: torch.cuda.CUDAGraph, device: torch.device):
        self._graph, self._device = graph, device  # torch's graph holds the memory
        self._exec = ctypes.c_void_p()
        raw = ctypes.c_void_p(graph.raw_cuda_graph())
        _call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), raw, ctypes.c_ulonglong(_FREE_ON_LAUNCH))
        weakref.finalize(self, _destroy, self._exec, graph).atexit = False

    def __call__(self) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _call("cuGraphLaunch", self._exec, ctypes.c_void_p(stream))


@overload
def cuda_graph(run: Callable[[], object], *, pool: tuple[int, int] | None = None) -> CudaGraph: ...
@overload
def cuda_graph(
    run: Callable[[], object], *, pool: tuple[int, int] | None = None, if_settled: bool
) -> CudaGraph | None: ...
def cuda_graph(
    run: Callable[[], object], *, pool: tuple[int, int] | None = None, if_settled: bool = False
) -> CudaGraph | None:
    """Record what `run` launches on the current stream into a CUDA graph.

    run      called once or, where another thread has broken the capture by waiting for the whole device, again. It may
             neither wait for the device nor draw random numbers of torch, and all it calls has been called before, so
             that nothing is compiled, verified or allocated for good meanwhile
    pool     torch.cuda.graph_pool_handle(), which graphs that are launched one after another may share; None: its own
    if_settled  None is returned where an op would have verified kernels if it had not been in a graph: canonical ones,
             which may take ten times as long, would be in it for good

    returns  a function without arguments that launches it
    raises   ValueError on the default stream; what `run` raises; RuntimeError where the capture was broken 8 times
    """
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        raise ValueError("cuda_graph: the current stream is the default one, which CUDA cannot capture: enter another")
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    for left in reversed(range(_TRIES)):
        try:
            with alone, _settled() as settled:
                graph = _capture(run, pool, stream.device)
            return graph if settled() or not if_settled else None
        except _Broken as broken:
            if not left:
                raise RuntimeError(
                    f"cuda_graph: {_TRIES} captures were broken: another thread of this process waits for the whole "
                    "device all the time (torch.cuda.synchronize), which CUDA forbids meanwhile"
                ) from broken.__cause__
    raise AssertionError


def cuda_stream(device: torch.device | str | None = None) -> torch.cuda.Stream:
    """A stream of a GPU, the current one by default, that nobody else has until this object is gone.

    torch.cuda.Stream() gives out 32 streams in turn: two of a process may be one. Where one thread captures on it, what
    another launches fails or, worse, is recorded and not done.
    """
    device = torch.device("cuda" if device is None else device)
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    with torch.cuda.device(device), alone:
        if not _idle_streams[device.index]:
            torch.cuda.current_stream().query()  # the context is there, and current
            made = ctypes.c_void_p()
            _call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(_NON_BLOCKING))
            _idle_streams[device.index].append(made.value)
        pointer = _idle_streams[device.index].pop()
    return _Stream(pointer, device)


class _Stream(torch.cuda.ExternalStream):
    """Goes back when it is gone, and is never destroyed: torch's allocator knows memory by the stream that took it. No
    weak references: torch 2.11 frees a stream without a word to them."""

    def __del__(self, idle=_idle_streams) -> None:  # at the end of a process the module's own name is gone before
        idle[self.device_index].append(self.cuda_stream)


def synchronize(device: torch.device | None = None) -> None:
    """Wait for all work of a GPU, the current one by default, but not while another thread of the process captures
    with `cuda_graph`: torch.cuda.synchronize raises then, and breaks the capture."""
    with alone:
        torch.cuda.synchronize(device)


class _Asked(threading.local):
    in_vain = 0


_asked = _Asked()


def settles_nothing(device: torch.device) -> bool:
    """Whether nothing can be verified now, for it would be inside a graph: asked where something is to be."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    _asked.in_vain += capturing
    return capturing


@contextlib.contextmanager
def _settled() -> Iterator[Callable[[], bool]]:
    """Whether in this block, of this thread, nothing was to be verified."""
    before = _asked.in_vain
    yield lambda: _asked.in_vain == before


def _capture(run: Callable[[], object], pool: tuple[int, int], device: torch.device) -> CudaGraph:
    graph, began = torch.cuda.CUDAGraph(keep_graph=True), False
    try:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        began = True
        run()
        graph.capture_end()
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # it says again that the capture has failed
            graph.capture_end()
        _clean_up(pool, device)
        if isinstance(error, RuntimeError) and (not began or _invalidated(error)):
            raise _Broken from error
        raise
    return CudaGraph(graph, device)


class _Broken(Exception):
    """A capture, by another thread."""


def _invalidated(error: RuntimeError) -> bool:
    """A call that is forbidden in a capture says so where it is made. Afterwards, or where another thread has made it,
    the capture is invalid."""
    return "previous error during capture" in str(error) or "StreamCaptureInvalidated" in str(error)


def _clean_up(pool: tuple[int, int], device: torch.device) -> None:
    """What torch leaves behind where a capture cannot be ended: an allocator that takes the pool's memory, and a
    generator that takes itself for capturing until a capture ends well."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if end is not None:
        with contextlib.suppress(RuntimeError):  # it says that nothing takes from the pool any more
            for _ in range(_TRIES):  # torch 2.11 notes a pool twice
                end(device.index, pool)
    one = torch.empty(1, dtype=torch.float32, device=device)
    for _ in range(_TRIES):
        graph = torch.cuda.CUDAGraph()
        with contextlib.suppress(RuntimeError):
            graph.capture_begin(capture_error_mode="thread_local")
            with contextlib.suppress(RuntimeError):
                one.zero_()
            graph.capture_end()
            return


def _destroy(executable: ctypes.c_void_p, graph: torch.cuda.CUDAGraph) -> None:
    """Before its memory is given back, so it takes the graph along."""
    _driver().cuGraphExecDestroy(executable)
    del graph


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *args) -> None:
    code = getattr(_driver(), function)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{function}: {(text.value or b'unknown error').decode()} ({code})")
