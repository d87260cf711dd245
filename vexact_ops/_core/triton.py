"""What the Triton kernels share: sums in one spelled-out order, and elementary functions with the CPU kernels' bits.

Where a compiler chooses the order of a sum (tl.sum over more than two values), the order follows the layout, and the
layout follows what the launch happens to see: the alignment of a pointer, a stride divisible by 16. So every sum of
more than two fp32 values is written out as pairwise additions: its bits are then a function of the source alone, of no
block of rows, warp count, alignment or Triton version, and plain PyTorch can repeat it (`tree_sum_ref`).

Multiplications and additions are fused where the source says tl.fma and nowhere else (OPTIONS); division and square
root are the correctly rounded ones. One function has other bits than a CPU's: exp_term.
"""

import concurrent.futures
import contextlib
import functools
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .graph import settles_nothing

OPTIONS = {"enable_fp_fusion": False}
_LOG = logging.getLogger(__name__)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_HERE = contextlib.nullcontext()


def on(tensor: Tensor):
    """The context in which kernels for this tensor are launched: its own device."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(tensor.device)


_LOADING = threading.Lock()
_LAUNCHER = "__triton_launcher"


def load_in_turn(build: ModuleType) -> None:
    """Has what a kernel is launched by loaded by one thread at a time. C compilers make it side by side.

    Up to Triton 3.6 it is a C module for each signature, and all bear one name: Python fills the module that bears it
    anew where one of them is loaded again. A thread that has loaded a launcher and not yet read it could so be given
    that of another thread's kernel, which takes other arguments, or as many of other kinds: so it is given a copy.

    build  triton.runtime.build
    """
    load = build._load_module_from_path

    @functools.wraps(load)
    def in_turn(name: str, path: str) -> ModuleType:
        if name != _LAUNCHER:
            return load(name, path)
        copy = ModuleType(name)
        with _LOADING:
            copy.__dict__.update(vars(load(name, path)))
        return copy

    build._load_module_from_path = in_turn


if not INTERPRETED and hasattr(importlib.import_module("triton.backends.nvidia.driver"), "make_launcher"):
    load_in_turn(importlib.import_module("triton.runtime.build"))


class Launch(NamedTuple):
    """A Triton kernel with what it is launched with."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple
    options: dict


_launched: set[Hashable] = set()


def launch(launches: Sequence[Launch], device: torch.device, kind: Hashable) -> None:
    """Launch kernels one after the other. Where none of this kind were launched before, they are compiled side by side
    first: most of that time is an assembler's, in processes of its own. What fails there is met again by the launch,
    which says why.

    kind  what they are compiled for, such as sizes that they are specialized on
    """

    def run() -> None:
        for one in launches:
            one.kernel[one.grid](*one.args, **one.options)

    if (device, kind) not in _launched and not compiling():
        if _compiles(device) and not settles_nothing(device):
            with contextlib.suppress(Exception):
                compile_ahead(run, device)
        _launched.add((device, kind))
    run()


# --- compiled ahead -------------------------------------------------------------------------------------------------

_PATCHING = threading.Lock()  # held while JITFunction.run is another
_MOST = 32  # kernels that are compiled at a time


class _Collecting(threading.local):
    kernels: list | None = None  # of this thread, while its launches compile


_collecting = _Collecting()


def compiling() -> bool:
    """Whether what this thread launches is compiled alone (`compile_ahead`)."""
    return _collecting.kernels is not None


def _compiles(device: torch.device) -> bool:
    return device.type == "cuda" and os.environ.get("TRITON_INTERPRET") != "1"


def compile_ahead(run: Callable[[], object], device: torch.device) -> int:
    """Compile, side by side, the Triton kernels that `run` launches in this thread; none of them is launched, so what
    they would write stays as it is. Other threads go on as ever. Returns how many launches there were.

    What a kernel is compiled for is Triton's to say, as where it is launched: dtypes, alignments, sizes. A kernel that
    does not compile is no error: its launch will say why. What `run` raises is passed on, once what it had launched
    before is compiled.
    """
    found, begin = [], time.perf_counter()

    def loaded(kernel) -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device):
            _ = kernel.result().run if isinstance(kernel, triton.FutureKernel) else kernel.run

    with concurrent.futures.ThreadPoolExecutor(min(_MOST, os.cpu_count() or 1)) as pool:
        try:
            with triton.AsyncCompileMode(pool, ignore_errors=True), _collected(found):
                run()
        finally:
            list(pool.map(loaded, {id(kernel): kernel for kernel in found if kernel is not None}.values()))
    if (seconds := time.perf_counter() - begin) >= 1:
        _LOG.info("%d launches of Triton's kernels compiled for side by side, in %.1f s", len(found), seconds)
    return len(found)


@contextlib.contextmanager
def _collected(found: list) -> Iterator[None]:
    """In a with block this thread's launches of Triton's kernels compile, and are added to `found`."""
    mine = threading.get_ident()
    with _PATCHING:
        launched = triton.JITFunction.run

        def run(kernel, *args, grid, warmup, **options):
            if threading.get_ident() != mine:
                return launched(kernel, *args, grid=grid, warmup=warmup, **options)
            made = launched(kernel, *map(_stand_in, args), grid=grid, warmup=True, **options)
            found.append(made)
            return made

        triton.JITFunction.run, _collecting.kernels = run, found
        try:
            yield
        finally:
            triton.JITFunction.run, _collecting.kernels = launched, None


def compile_calls(run: Callable[..., object], calls: Iterable[tuple], device: torch.device) -> int:
    """compile_ahead of run(*call) for each of the calls, on tensors without memory: nothing is computed, and nothing
    allocated on the device. Tuples and lists in a call are looked into. A call that asks for a tensor's values, or for
    another kernel than Triton's, is compiled for as far as it comes. Returns how many launches there were."""
    if not _compiles(device) or compiling():
        return 0
    from torch._subclasses.fake_tensor import FakeTensorMode

    def on_fakes() -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            for call in calls:
                with contextlib.suppress(Exception):
                    run(*_without_memory(call))

    return compile_ahead(on_fakes, device)


def _without_memory(value):
    """Its tensors as ones that begin as far from a 16-byte boundary, made where fake tensors are."""
    if isinstance(value, Tensor):
        first = value.data_ptr() % 16 // value.element_size()
        span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride())) if value.numel() else 0
        room = torch.empty(first + span, dtype=value.dtype, device=value.device)
        return room.as_strided(value.shape, value.stride(), first)
    return _in_tuples(_without_memory, value)


def _in_tuples(change: Callable, value):
    if isinstance(value, tuple | list):
        made = map(change, value)
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    return value


class _Placed:
    """What Triton asks of a tensor, of one without memory."""

    def __init__(self, of: Tensor):
        self.dtype, self._place = of.dtype, of.storage_offset() * of.element_size()

    def data_ptr(self) -> int:
        return self._place


def _stand_in(value):
    if isinstance(value, Tensor):
        return _Placed(value) if type(value).__name__ == "FakeTensor" else value
    return _in_tuples(_stand_in, value)


@functools.cache
def _early(index: int | None) -> dict:
    if index is None or os.environ.get("TRITON_INTERPRET") == "1" or torch.cuda.get_device_capability(index) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def early(tensor: Tensor) -> dict:
    """Launch options of a kernel that begins with `begin`: where the GPU can, it is brought up while the one before it
    in the stream comes to its end, which saves a small kernel about half a microsecond."""
    return _early(tensor.device.index)


@triton.jit
def begin(PDL: tl.constexpr):
    """Before any access to memory: waits until all that came before in the stream is done and can be seen. What comes
    after may then be brought up, to wait in turn."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def begin_beside(PDL: tl.constexpr):
    """begin, but what comes after is brought up at once, while what came before still runs: for a short kernel, behind
    which the next one would be brought up too late to gain anything. Until that has waited in its turn, it may read
    nothing that this kernel writes, nor what those before write that may still run: several such can follow each other.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["n"])
def _copy_kernel(x, y, n, x_stride, y_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_beside(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_stride + column, mask=column < n)
    tl.store(y + row * y_stride + column, value, mask=column < n)


def copy_rows(x: Tensor, y: Tensor) -> None:
    """x (R, N) to y, rows contiguous: as short a kernel as stands before a product of a model, for races to have it
    there too."""
    rows, n = x.shape
    with on(x):
        _copy_kernel[rows, cdiv(n, 2048)](x, y, n, x.stride(0), y.stride(0), BLOCK=2048, **OPTIONS, **early(x))


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own, which serves kernels too, takes the host as long as half a launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n; 1 for n of 0."""
    return 1 << max(n - 1, 0).bit_length()


def block(n: int, what: str, *, least: int = 16, most: int = 1 << 14) -> int:
    """The power of two that holds n, at least `least`: what a program takes at once, a function of a static size.
    Beyond `most` a kernel that does not loop would leave the rest out, so that is an error; what: "op: size"."""
    if n > most:
        raise ValueError(f"{what}: got {n}, expected at most {most}: the Triton kernel takes no more of it at once")
    return max(next_power_of_2(n), least)


def chunk(n: int, most: int, *, least: int = 16) -> int:
    """The power of two that holds n, or `most` (a power of two too) where n is more: for kernels that loop."""
    return min(max(next_power_of_2(n), least), most)


def tree_sum_ref(x: Tensor, width: int) -> Tensor:
    """The order of a row's sum in plain PyTorch: (..., N) -> (...), chunks of `width` added lane by lane, ascending,
    from +0; then neighbours pairwise. What is missing in the last chunk is +0."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % width)).unflatten(-1, (-1, width))
    lanes = torch.zeros_like(x[..., 0, :])
    for chunk in range(x.shape[-2]):
        lanes = lanes + x[..., chunk, :]
    while lanes.shape[-1] > 1:
        lanes = lanes[..., ::2] + lanes[..., 1::2]
    return lanes[..., 0]


@triton.jit
def tree_sum(x):
    """(R, N) fp32 -> (R, 1), N a power of two."""
    # order: neighbours are added pairwise, log2(N) times. A sum of two has one order.
    for _ in tl.static_range(20):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)
    return x


@triton.jit
def fold_sum(x):
    """(R, N) fp32 -> (R,), N a power of two: cheap where a thread holds pieces of a row that lie far apart."""
    # order: the upper half is added to the lower one, log2(N) times
    for _ in tl.static_range(20):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def _exp_parts(c):
    """e^c as 2^n p: n + 64 + 1.5 2^23, n and p."""
    shifted = c * 1.44269504 + 12582976.0
    n = shifted - 12582976.0
    r = tl.fma(n, -0.693359375, c)
    r = tl.fma(n, 2.12194440e-4, r)
    p = tl.fma(r, 1.0 / 5040, 1.0 / 720)
    p = tl.fma(p, r, 1.0 / 120)
    p = tl.fma(p, r, 1.0 / 24)
    p = tl.fma(p, r, 1.0 / 6)
    p = tl.fma(p, r, 0.5)
    p = tl.fma(p, r, 1.0)
    p = tl.fma(p, r, 1.0)
    return shifted, n, p


@triton.jit
def exp(x):
    """e^x as in vec.h, operation for operation."""
    c = tl.where(x > -104.0, x, -104.0)
    _, n, p = _exp_parts(tl.where(c < 89.0, c, 89.0))
    i = n.to(tl.int32)
    half = i >> 1
    s = ((half + 127) << 23).to(tl.float32, bitcast=True)
    t = ((i - half + 127) << 23).to(tl.float32, bitcast=True)
    y = (p * s) * t
    y = tl.where(x < -103.972, 0.0, y)
    y = tl.where(x > 88.7228390, float("inf"), y)
    return tl.where(x != x, x, y)


@triton.jit
def exp_of_number(x):
    """exp_down, but for NaN, of which it is 0: for who has NaN by other ways."""
    shifted, _, p = _exp_parts(tl.where(x >= -103.972, x, -104.0))  # e^-104 rounds to 0
    # n + 64 stands in the low bits of shifted; 2^(n + 64) p is a normal number, so that one product rounds
    y = p.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return y.to(tl.float32, bitcast=True) * 5.421010862427522e-20


@triton.jit
def exp_down(x):
    """exp(x) for x of at most 0 (or NaN): the same bits for half the instructions."""
    return tl.where(x != x, x, exp_of_number(x))


@triton.jit
def exp_term(x):
    """A term of a sum of exponentials, e^x for x of at most 0 (or NaN). On a GPU what its unit for special functions
    gives (ex2.approx.ftz.f32), to 2^-22 of it, and 0 below the normal numbers: a fifth of exp_down's instructions,
    where they are what takes the time. The interpreter has no such unit, and NumPy's bits could depend on an
    element's place."""
    if INTERPRETED:
        y = exp_down(x)
    else:
        y = tl.exp2(x * 1.44269504)
    return y


@triton.jit
def log(x):
    """ln x as in vec.h, operation for operation."""
    tiny = x < 1.17549435e-38
    y = tl.where(tiny, x * 8388608.0, x)
    shifted = y.to(tl.int32, bitcast=True) - 0x3F3504F3
    e = (shifted >> 23).to(tl.float32) - tl.where(tiny, 23.0, 0.0)
    f = ((shifted & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1.0
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    p = tl.fma(z, 2.0 / 11, 2.0 / 9)
    p = tl.fma(p, z, 2.0 / 7)
    p = tl.fma(p, z, 2.0 / 5)
    p = tl.fma(p, z, 2.0 / 3)
    h = f * f * 0.5
    low = tl.fma(s, tl.fma(z, p, h), e * -2.12194440e-4)
    r = tl.fma(e, 0.693359375, f - (h - low))
    r = tl.where(x < 0.0, float("nan"), r)
    r = tl.where(tl.abs(x) > 0.0, r, float("-inf"))
    r = tl.where(x > 3.40282347e38, x, r)
    return tl.where(x != x, x, r)


@triton.jit
def tanh(x):
    """Hyperbolic tangent as in vec.h, operation for operation."""
    a = tl.abs(x)
    z = x * x
    up = tl.fma(z + 105.0, z, 945.0)
    down = tl.fma(tl.fma(z, 15.0, 420.0), z, 945.0)
    near = x * tl.div_rn(up, down)
    far = 1.0 - tl.div_rn(2.0, exp(a + a) + 1.0)
    sign = x.to(tl.int32, bitcast=True) & -2147483648
    far = ((far.to(tl.int32, bitcast=True) & 2147483647) | sign).to(tl.float32, bitcast=True)
    return tl.where(x != x, x, tl.where(a < 0.55, near, far))


@triton.jit(do_not_specialize=["rows"])
def _sum_rows_kernel(x, y, rows, n, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = part * ROWS + tl.arange(0, ROWS)
    inside = (column < n)[:, None] & (row < rows)[None, :]
    v = tl.load(x + row[None, :] * stride + column[:, None], mask=inside, other=0.0).to(tl.float32)
    total = tl.reshape(tree_sum(v), [COLUMNS])
    tl.store(y + part * n + column, total.to(y.dtype.element_ty), mask=column < n)


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(R, N) -> (N,), summed in fp32 and rounded once to dtype; repeatable for a fixed R: blocks of 64 rows in a tree
    each, the sums of the blocks likewise until one is left."""
    rows, n = x.shape
    if rows == 0 or n == 0:
        return torch.zeros(n, dtype=dtype, device=x.device)
    with on(x):
        while True:
            parts = cdiv(rows, 64)
            y = torch.empty(parts, n, dtype=torch.float32 if parts > 1 else dtype, device=x.device)
            _sum_rows_kernel[(parts, cdiv(n, 64))](
                x, y, rows, n, x.stride(0), ROWS=64, COLUMNS=64, num_warps=4, **OPTIONS
            )
            if parts == 1:
                return y[0]
            x, rows = y, parts
