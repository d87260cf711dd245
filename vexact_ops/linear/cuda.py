"""The GPU's own class: the fastest kernel proven equal to the Triton one for a product, by its sizes.

A product is a layout, dtypes and three sizes, of which one varies from call to call: the rows, or the depth where the
gradient of a weight sums over them. It is known by its power of two (its bucket). On the first call of a kind, outside
of a CUDA graph, candidates are verified against the Triton kernel at the bucket's size and at an odd size within it,
and timed; the choice is kept in C++, so that later calls pay one look-up, and on disk. What no candidate serves (fp32,
rows off 16-byte boundaries, other GPUs than SM90, a first call inside a graph) takes the Triton kernel: the bits are
the same, so the choice may look at the row count.
"""

import functools
import math
import sys
import threading
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .._core import native
from .._core.admit import Candidate, Verdict, admissions, fastest, race_on_gpu
from . import triton
from .triton import bmm, linear_dbias

__all__ = ["admit", "bmm", "linear_dbias", "linear_dweight", "linear_dx", "linear_fwd", "matmul"]

REVISION = 3  # of what is proposed and how it is verified: verdicts of other revisions are not looked at
LARGEST = 8192  # larger buckets verify the choice of this one
TRITON = "triton"  # the canonical kernel's name among verdicts
RESUMED = [f"wgmma 128x256x64 resumed group {group}" for group in (4, 8, 16)]
SMALL = 100_000  # elements of a weight: below, no kernel is worth the time to verify it
SHARED_BYTES = 226 * 1024  # of one SM90 multiprocessor, for one or several blocks
FROM_THE_START = 1000  # stages left to load when the next kernel may start: more than there are
ASK, CANONICAL, UNKNOWN, DONE = -1, 0, -1, 1  # what linear_matmul takes for a kernel, and what it returns
_settling = threading.RLock()


def matmul(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, *, resume: bool = False) -> Tensor:
    """out (M, N) = a (M, K) @ b (K, N) + bias, with the bits of `triton.matmul`.

    a, b    any strides; fast where one stride is 1 and the other a multiple of 8, from 16-byte boundaries
    out     rows contiguous, any distance apart; the inputs' dtype or fp32
    resume  start from the fp32 values in out instead of +0: a product cut along K has the bits of the whole one
    """
    return _matmul(a, b, False, bias, out, resume)


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    x = _flat(x)
    return _matmul(x, weight, True, bias, x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype), False)


def linear_dx(dy: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    dy = _flat(dy)
    return _matmul(dy, weight, False, None, dy.new_empty(dy.shape[0], weight.shape[1], dtype=dtype), False)


def linear_dweight(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    dy, x = _flat(dy), _flat(x)
    return _matmul(dy.t(), x, False, None, dy.new_empty(dy.shape[1], x.shape[1], dtype=dtype), False)


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.view(math.prod(x.shape[:-1]), x.shape[-1])


@functools.cache
def _ops():
    ops = native.ops()
    return ops, ops.linear_matmul.default


def _matmul(a: Tensor, b: Tensor, b_t: bool, bias: Tensor | None, out: Tensor, resume: bool) -> Tensor:
    run = _ops()[1]
    done = run(a, b, b_t, bias, out, resume, ASK)
    if done == UNKNOWN and _settle(a, b, b_t, bias, out, resume):
        done = run(a, b, b_t, bias, out, resume, ASK)
    if done != DONE:
        triton.matmul(a, b.t() if b_t else b, out, bias, resume=resume)
    return out


def _settle(a: Tensor, b: Tensor, b_t: bool, bias: Tensor | None, out: Tensor, resume: bool) -> bool:
    """Choose the kernel for products of this kind. False inside a graph, where nothing can be verified."""
    if torch.cuda.is_current_stream_capturing():
        return False
    with _settling, torch.cuda.device(a.device), torch.no_grad():
        product = Product.of(a, b, b_t, bias, out, resume)
        try:
            name = fastest(product.verdicts())
        except torch.OutOfMemoryError:
            warnings.warn(
                f"linear: no memory to verify faster kernels for {product.key}: the Triton kernel serves it in this "
                "process (`vexact doctor --admit` verifies ahead of time)",
                stacklevel=2,
            )
            name = None
        number = CANONICAL if name in (None, TRITON) else _ops()[0].linear_kernel(name)
        _ops()[0].linear_choose(a, b, b_t, bias, out, resume, number)
    return True


@dataclass(frozen=True)
class Product:
    """One kind of product: what its kernels are proposed for, verified and timed on.

    m, n, k      the sizes that are verified
    a_k, b_k     whether a and b are contiguous along k
    bucket       the power of two that holds the varying size: m, or k where a is not contiguous along it
    out_aligned  whether out's rows begin on 16-byte boundaries
    """

    device: torch.device
    dtype: torch.dtype
    out_dtype: torch.dtype
    m: int
    n: int
    k: int
    a_k: bool = True
    b_k: bool = True
    bias: bool = False
    resume: bool = False
    out_aligned: bool = True
    bucket: int = 0

    def __post_init__(self):
        varying = "m" if self.a_k else "k"
        bucket = self.bucket or max(8, 1 << (getattr(self, varying) - 1).bit_length())
        object.__setattr__(self, "bucket", bucket)
        if bucket <= LARGEST:  # beyond, what is verified is the size that was seen
            object.__setattr__(self, varying, bucket)

    @classmethod
    def of(cls, a: Tensor, b: Tensor, b_t: bool, bias: Tensor | None, out: Tensor, resume: bool) -> "Product":
        (m, k), n = a.shape, out.shape[1]
        apart = out.stride(0) * out.element_size() if m > 1 else 0
        return cls(
            a.device, a.dtype, out.dtype, m, n, k,
            a_k=k == 1 or a.stride(1) == 1, b_k=k == 1 or b.stride(int(b_t)) == 1,
            bias=bias is not None, resume=resume, out_aligned=(out.data_ptr() | apart) % 16 == 0,
        )  # fmt: skip

    @property
    def key(self) -> str:
        m, k = (f"M<={self.bucket}", f"K={self.k}") if self.a_k else (f"M={self.m}", f"K<={self.bucket}")
        layout = ("n" if self.a_k else "t") + ("t" if self.b_k else "n")
        options = [w for w, on in (("bias", self.bias), ("resume", self.resume), ("off16", not self.out_aligned)) if on]
        kind = f"linear r{REVISION} {layout} {_short(self.dtype)}->{_short(self.out_dtype)}"
        return " ".join([kind, *options, m, f"N={self.n}", k, f"cublaslt {cublaslt_version()[0]}"])

    def verdicts(self) -> list[Verdict]:
        if torch.cuda.get_device_capability(self.device) != (9, 0) or self.n * (self.k if self.a_k else self.m) < SMALL:
            return []
        known = admissions(self.device.index)
        verdicts = known.verdicts(self.key)
        if verdicts is None:
            known.choose(self.key, self.candidates(), self.canonical, self.cases, race=self.race)
            verdicts = known.verdicts(self.key)
        return verdicts

    def candidates(self) -> list[Candidate]:
        if self.bucket > LARGEST:
            name = fastest(replace(self, bucket=LARGEST).verdicts())
            return [] if name in (None, TRITON) else [candidate(name, self.resume)]
        names = []
        if self.a_k and self.b_k and not self.resume and self.bucket <= 64:
            processors = torch.cuda.get_device_properties(self.device).multi_processor_count
            names += skinny_names(self.bucket, self.n, self.k, processors)
        if self.resume and (self.a_k or not self.b_k) and self.n % 2 == 0:
            names += RESUMED
        # a sum that is resumed, and a bias before an fp32 result, are not what cublasLt computes
        if self.out_aligned and not self.resume and not (self.bias and self.out_dtype == torch.float32):
            names += self.cublaslt_names(8 if self.bucket > 64 else 4)
        found = [candidate(name, self.resume) for name in names]
        if names and not names[-1].startswith("cublaslt"):  # where no library competes, the canonical kernel may win
            found.append(Candidate(TRITON, self.canonical))
        return found

    def cublaslt_names(self, most: int) -> list[str]:
        if not cublaslt_version()[0]:
            return []
        return _ops()[0].linear_cublaslt_algorithms(*self.tensors(self.m, self.k), self.resume, most).split("\n")[:-1]

    def canonical(self, a, b, b_t, bias, out) -> Tensor:
        return triton.matmul(a, b.t() if b_t else b, out.clone(), bias, resume=self.resume)

    def tensors(self, m: int, k: int) -> tuple:
        """(a, b, b_t, bias, out) without meaningful values."""
        make = functools.partial(torch.empty, dtype=self.dtype, device=self.device)
        a = make(m, k) if self.a_k else make(k, m).t()
        b = make(self.n, k) if self.b_k else make(k, self.n)
        out = torch.empty(m, self.n, dtype=self.out_dtype, device=self.device)
        if not self.out_aligned:
            out = torch.empty(m, self.n + 1, dtype=self.out_dtype, device=self.device)[:, 1:]
        return a, b, self.b_k, make(self.n) if self.bias else None, out

    def cases(self) -> list[tuple]:
        """At the bucket's size, and at an odd size within it, from strided memory."""
        odd_m, odd_k = (
            (max(1, self.m * 5 // 8 - 1) | 1, self.k) if self.a_k else (self.m, max(1, self.k * 5 // 8 - 1) | 1)
        )
        a, b, b_t, bias, out = whole = self.filled()
        if self.a_k:
            wide = torch.full((odd_m, odd_k + 8 + -odd_k % 8), float("nan"), dtype=self.dtype, device=self.device)
            few = wide[:, 8 : 8 + odd_k]
            few.copy_(a[:odd_m])
        else:
            few = a[:, :odd_k]
        b = b if self.a_k else b[:, :odd_k] if b_t else b[:odd_k]
        out = out[:odd_m]
        return [(few, b, b_t, bias, out), whole]

    def filled(self) -> tuple:
        """Operands that cancel along k to almost nothing, made on the device; some hundred different rows each."""
        a, b, b_t, bias, out = self.tensors(self.m, self.k)
        g = torch.Generator(self.device).manual_seed(self.k)
        rows, columns, half = min(self.m, 256), min(self.n, 2048), self.k // 2
        v = torch.randn(rows, half, dtype=torch.float32, generator=g, device=self.device)
        v *= torch.exp2(torch.randint(-12, 13, v.shape, generator=g, device=self.device).float())
        v = v.clamp(-64, 64) if self.dtype == torch.float16 else v  # 25 binades are more than fp16's results have
        u = torch.randn(half, columns, dtype=torch.float32, generator=g, device=self.device)
        order = torch.randperm(2 * half, generator=g, device=self.device)
        x, y = torch.cat([v, -v], 1)[:, order].to(self.dtype), torch.cat([u, u])[order].to(self.dtype)
        if self.k % 2:
            x, y = torch.cat([x, x.new_ones(rows, 1)], 1), torch.cat([y, y.new_ones(1, columns)])
        for to, values in ((a, x), (b if b_t else b.t(), y.t())):  # rows repeat
            whole = len(to) // len(values) * len(values)
            to[:whole].unflatten(0, (-1, len(values))).copy_(values.expand(whole // len(values), -1, -1))
            to[whole:].copy_(values[: len(to) - whole])
        if bias is not None:  # of the size of what is left of the sums: a larger one would hide them when it is rounded
            left = self.k * 2.0 ** (-23 if self.dtype == torch.float16 else -18)
            bias.copy_(torch.randn(self.n, dtype=torch.float32, generator=g, device=self.device) * left)
        if self.resume:
            out.copy_(torch.randn(self.n, dtype=torch.float32, generator=g, device=self.device) * 256)
        return a, b, b_t, bias, out

    def race(self, candidates: list[Candidate], case: tuple) -> list[float]:
        """As in a model, where the cache has forgotten a weight by the time it comes up again; and for long enough to
        show what kernels do to the next ones, which overlap them."""
        a, b, b_t, bias, out = case
        most = min(40, 1e-3 * 600e12 / (2 * self.m * self.n * self.k))  # a millisecond of work says enough
        copies = [b, *(b.clone() for _ in range(int(min(most, 120e6 / (b.numel() * b.element_size())))))]
        copies *= max(1, int(min(most, 24, 1e9 / (b.numel() * b.element_size())) / len(copies)))
        run, calls = _ops()[1], []
        for one in candidates:
            if one.name == TRITON:
                views = [w.t() if b_t else w for w in copies]
                calls.append([functools.partial(triton.matmul, a, w, out, bias, resume=self.resume) for w in views])
            else:
                number = _ops()[0].linear_kernel(one.name)
                calls.append([functools.partial(run, a, w, b_t, bias, out, self.resume, number) for w in copies])
        return race_on_gpu(calls)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def candidate(name: str, resume: bool = False) -> Candidate:
    """A kernel by its name, as admission runs it: on (a, b, b_t, bias, out), into a copy of out."""
    return Candidate(name, functools.partial(_run, _ops()[0].linear_kernel(name), resume))


def _run(number: int, resume: bool, a, b, b_t, bias, out) -> Tensor:
    out = out.clone()
    if _ops()[1](a, b, b_t, bias, out, resume, number) != DONE:
        raise RuntimeError("does not take this product")
    return out


@functools.cache
def cublaslt_version() -> tuple[int, str | None]:
    """(version, None), or (0, why there is none)."""
    paths = [
        str(path)
        for entry in sys.path
        for pattern in ("nvidia/cu13/lib/libcublasLt.so.1?", "nvidia/cublas/lib/libcublasLt.so.1?")
        for path in sorted(Path(entry or ".").glob(pattern))
    ]
    try:
        return native.ops().linear_cublaslt_version(":".join(paths)), None
    except RuntimeError as error:
        return 0, str(error).splitlines()[0]


@functools.cache
def skinny_names(bucket: int, n: int, k: int, processors: int = 132) -> tuple[str, ...]:
    """Our kernels for up to `bucket` rows of x and an (n, k) weight.

    A name says how many rows of the weight, rows of x and k a stage of the ring holds, and how many stages there are;
    how many of them are asked for before the kernel before has ended; how many are left to load when the kernel after
    may start; and how many persistent blocks a multiprocessor gets, where it is not one block per tile.
    """
    found = {}
    for tokens in (32, 64) if bucket == 64 else (bucket,):
        for rows in _heights(n, 64 if tokens <= 16 else 128, processors):
            for boxes in (2,) if tokens == 64 or rows > 64 else (4, 8) if rows <= 24 and tokens <= 16 else (2, 4):
                for blocks in (1, 2, 3, 4):  # how many blocks share a multiprocessor
                    room = SHARED_BYTES // blocks - 1024 - -rows % 64 * 128
                    ring = min(32, room // (boxes * (rows * 128 + max(1024, tokens * 128))))
                    persistent = blocks == 1 and rows * processors < n
                    if ring < 3 or (blocks == 1 and not persistent and tokens < 64):
                        continue
                    if k <= 1024:
                        chains = (ring, ring), (ring // 2, ring // 2)
                    elif n * k < 45e6:
                        chains = (ring // 2, ring // 2), (ring // 2, ring), (ring // 2, FROM_THE_START)
                    else:
                        chains = (ring // 2, FROM_THE_START), (0, ring)
                    for ahead, lead in chains:
                        name = f"wgmma {rows}x{tokens}x{64 * boxes} ring {ring} ahead {ahead} lead {lead}"
                        found[name + " persistent 1" * persistent] = None
    return tuple(found)


def _heights(n: int, most: int, processors: int) -> list[int]:
    """Rows of a weight's tile, at most so many, that give all multiprocessors nearly the same number of tiles."""

    def height(waves: int) -> int:
        return max(8, -(-n // (processors * waves) // 8) * 8)

    waves = next(w for w in range(1, n + 1) if height(w) <= most)
    found = [height(waves)]
    if waves > 1:
        found.append(height(waves + 1))
    if n >= 4096:
        found.append(64)
    return sorted(set(found))


def buckets(most: int = LARGEST) -> tuple[int, ...]:
    """The buckets of rows up to `most`: 8, 16, ..."""
    return tuple(8 << i for i in range(max(0, (most - 1).bit_length() - 3) + 1))


def admit(
    n: int, k: int, rows: int, dtype: torch.dtype, out_dtype: torch.dtype | None = None, *, bias: bool = False,
    layout: str = "fwd", resume: bool = False, device: torch.device | str = "cuda",
) -> tuple[str, list[Verdict]]:  # fmt: skip
    """Verify ahead of time what `rows` rows through an (n, k) weight need; returns (key, verdicts).

    layout  "fwd" x @ w.T, "dx" dy @ w or "dweight" dy.T @ x
    """
    device = torch.device(device)
    device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
    m, n, k = {"fwd": (rows, n, k), "dx": (rows, k, n), "dweight": (n, k, rows)}[layout]
    product = Product(
        device, dtype, out_dtype or dtype, m, n, k,
        a_k=layout != "dweight", b_k=layout == "fwd", bias=bias, resume=resume,
    )  # fmt: skip
    with _settling, torch.cuda.device(device), torch.no_grad():
        return product.key, product.verdicts()
