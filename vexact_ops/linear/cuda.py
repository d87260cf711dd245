"""The GPU's own class: the fastest kernel proven equal to the Triton one for a product, by its sizes.

A product is a layout, dtypes and three sizes, of which one varies from call to call: the rows, or the depth where the
gradient of a weight sums over them. It is known by its class (`class_of`): eight rows up to 1,024, where tiles of the
right height make most difference. On the first call of a class, outside of a CUDA graph, candidates (our own kernels,
and what cublasLt thinks fast at just these sizes) are verified against the Triton kernel at the class's ends, with one
row, and on rows and columns of special values, and timed; the choice is kept in C++, so that later calls pay one
look-up, and on disk. What no candidate serves (rows off 16-byte boundaries, other GPUs than SM90, a first call inside a
graph) takes the Triton kernel: the bits are the same, so the choice may look at the row count.

fp32 is multiplied by the plain arithmetic units, one product after the other (a router's logits, a model in fp32).
Tiles are from 8 x 8, where a sum's own chain of additions is all that takes time, to 128 x 128.
"""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .._core import digest, gpu, native, tune
from .._core.admit import Candidate, Decision, Proposal, admitted, canonical_by_rule, race_on_gpu
from .._core.graph import settles_nothing
from .._core.proof.inputs import special_rows
from .._core.triton import copy_rows
from . import tiles, triton
from .tiles import SMALL_M, CublasLt, Fma, Kernel, Resumed, Skinny, Tiled
from .triton import bmm, linear_dbias

__all__ = ["admit", "bmm", "explain", "linear_dbias", "linear_dweight", "linear_dx", "linear_fwd", "matmul", "route"]

LARGEST = 8192  # larger classes verify the choice of this one
TRITON = "triton"  # the canonical kernel
FMA = [Fma(size, size) for size in (8, 16, 32, 64, 128)]
RESUMED = [Resumed(group) for group in (4, 8, 16)]
SMALL = 100_000  # elements of a weight: below, no kernel is worth the time to verify it
DECODED = 1024  # rows that our kernels for few tiles take, and a step of decodes has
LARGE = 5e10  # multiplications from which on it pays to try more of cublasLt's kernels: some 150 us
LARGE_FP32 = 1e9  # and in fp32 to try cublasLt's at all
NEAR = 1.2  # times the best of a race: who is slower there does not win in a step
OURS, LIBRARY = 5, 2  # rivals that are tried there, of our kernels and of a library's, which are much alike
# what linear_matmul takes for a kernel, and what it returns
ASK, CANONICAL, UNKNOWN, DONE, BIAS_OFF_16 = -1, 0, -1, 1, 2


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
    if tune.noted is not None:
        tune.note(Noted(a, b, b_t, bias, out, resume))
    done = run(a, b, b_t, bias, out, resume, ASK)
    if done == BIAS_OFF_16:  # a copy of it begins where kernels expect it
        bias = bias.clone()
        done = run(a, b, b_t, bias, out, resume, ASK)
    if done == UNKNOWN and _settle(a, b, b_t, bias, out, resume):
        done = run(a, b, b_t, bias, out, resume, ASK)
    if done != DONE:
        triton.matmul(a, b.t() if b_t else b, out, bias, resume=resume)
    return out


def _settle(a: Tensor, b: Tensor, b_t: bool, bias: Tensor | None, out: Tensor, resume: bool) -> bool:
    """Choose the kernel for products of this class. False inside a graph, where nothing can be verified."""
    if settles_nothing(a.device):
        return False
    decision = route(Product.of(a, b, b_t, bias, out, resume))
    if decision.final:
        _choose(decision.chosen.name, a, b, b_t, bias, out, resume)
    return decision.final


_chosen: dict["Product", str] = {}  # what linear_matmul computes them by
_tuned: dict["Product", str] = {}  # what was chosen again where it stands


class Noted:
    """A product that was computed, as vx.tune wants to know it."""

    def __init__(self, *call):
        self._call, self._product = call, Product.of(*call)
        self.key, self.device = self._product.key, call[0].device
        self.layout = tuple((t.stride(), t.data_ptr() % 16) for t in (call[0], call[1], call[4]))

    def names(self) -> list[str]:
        decision = route(self._product)
        if self._product in _tuned or not decision.final:
            return []
        timed = sorted((v for v in decision.verdicts if v.admitted and v.us is not None), key=lambda v: v.us)
        chosen = decision.chosen.name
        names = [v.candidate for v in timed if v.us <= NEAR * timed[0].us and v.candidate not in (chosen, TRITON)]
        ours, library = ([n for n in names if isinstance(_kernels[n], CublasLt) is kind] for kind in (False, True))
        return [chosen, *_varied(ours, chosen)[:OURS], *library[:LIBRARY]]

    def source(self) -> str:
        return _source(cublaslt=True)

    def use(self, name: str) -> None:
        _choose(name, *self._call)
        _tuned[self._product] = name

    def forget(self) -> None:
        _tuned.pop(self._product, None)


def _varied(names: list[str], chosen: str) -> list[str]:
    """The first of each height of the weight's tiles that is not the chosen one's, then the others."""
    first: dict[tuple, str] = {}
    for name in names:
        first.setdefault(_height(name), name)
    first.pop(_height(chosen), None)
    return list(dict.fromkeys([*first.values(), *names]))


def _height(name: str) -> tuple:
    kernel = _kernels.get(name)
    return type(kernel), kernel.rows if isinstance(kernel, Skinny | Tiled | Fma) else name


def _choose(name: str, *call) -> None:
    _chosen[Product.of(*call)] = name
    _ops()[0].linear_choose(*call, CANONICAL if name == TRITON else _number(_kernels[name]))


@functools.lru_cache(maxsize=None, typed=True)
def _number(kernel: Kernel) -> int:
    """What linear_matmul takes for it."""
    ops = _ops()[0]
    if isinstance(kernel, CublasLt):
        return ops.linear_cublaslt(kernel.words)
    make = {Skinny: ops.linear_skinny, Tiled: ops.linear_tiled, Fma: ops.linear_fma, Resumed: ops.linear_resumed}
    return make[type(kernel)](*kernel)


def route(product: "Product") -> Decision:
    """Which kernel computes products of a class: dispatch takes it and keeps it in C++, `explain` shows it, `admit`
    asks for it ahead of time."""
    reason = gpu.not_sm90(product.device)
    if product.n * (product.k if product.a_k else product.m) < SMALL:
        reason = reason or "too small to be worth the time to verify other kernels"
    if reason:
        return canonical_by_rule(TRITON, reason)
    if product.top > LARGEST and not (largest := route(replace(product, top=LARGEST))).final:
        return largest  # what it verifies is not chosen yet
    decision = admitted(product.proposal(), product.device)
    if product not in _tuned:
        return decision
    why = "where it stands in a step the fastest of those that were the best in a race"
    return replace(decision, chosen=candidate(_kernels[_tuned[product]], product.resume), why=why)


def explain(op: str, **given) -> list[tuple[str, Decision]]:
    """Which kernel computes a call of one of this room's operators, of its arguments by name."""
    if op not in ("linear", "linear_dx", "linear_dweight"):
        return [(op, canonical_by_rule(TRITON, "it has one kernel"))]
    a, b = ("x", "weight") if op == "linear" else ("dy", "weight") if op == "linear_dx" else ("dy", "x")
    a, b = _rows(given[a]), _rows(given[b])
    bias, b_t, wide = given.get("bias"), op == "linear", b.shape[int(op != "linear")]
    if op == "linear_dweight":
        a = a.t()
    out = a.new_empty(a.shape[0], wide, dtype=given["out_dtype" if op == "linear" else "dtype"])
    if not _takes(a, b, b_t, bias, out):
        return [("product", canonical_by_rule(TRITON, "no other kernel takes these dtypes, strides or alignments"))]
    return [("product", route(Product.of(a, b, b_t, bias, out, False)))]


def _takes(a: Tensor, b: Tensor, b_t: bool, bias: Tensor | None, out: Tensor) -> bool:
    """Whether there is any kernel for these operands but the canonical one."""
    return _ops()[0].linear_choose(a, b, b_t, bias, out, False, ASK)


def _rows(x: Tensor) -> Tensor:
    x = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()


def class_of(size: int, rows: bool = True) -> int:
    """The largest number of rows, or the largest depth, that shares its kernel with `size`: as cuda.cu has it."""
    step = _step(size) if rows else max(8, 1 << (size - 1).bit_length())
    return -(-size // step) * step


def _step(rows: int) -> int:
    return 8 if rows <= 1024 else (1 << (rows - 1).bit_length()) // 8


@dataclass(frozen=True)
class Product:
    """One class of products: what its kernels are proposed for, verified and timed on.

    m, n, k      the sizes that are verified
    a_k, b_k     whether a and b are contiguous along k
    top          the largest of the varying size: m, or k where a is not contiguous along it
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
    top: int = 0

    def __post_init__(self):
        varying = "m" if self.a_k else "k"
        top = self.top or class_of(getattr(self, varying), self.a_k)
        object.__setattr__(self, "top", top)
        if top <= LARGEST:  # beyond, what is verified is the size that was seen
            object.__setattr__(self, varying, top)

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
        m, k = (f"M<={self.top}", f"K={self.k}") if self.a_k else (f"M={self.m}", f"K<={self.top}")
        layout = ("n" if self.a_k else "t") + ("t" if self.b_k else "n")
        options = [w for w, on in (("bias", self.bias), ("resume", self.resume), ("off16", not self.out_aligned)) if on]
        return " ".join(
            [f"linear {layout} {_short(self.dtype)}->{_short(self.out_dtype)}", *options, m, f"N={self.n}", k]
        )

    def proposal(self) -> Proposal:
        canonical = Candidate(TRITON, self.canonical, digest.canonical("linear"))
        kernels = self.kernels()
        found = [candidate(kernel, self.resume) for kernel in kernels]
        if kernels and not isinstance(kernels[-1], CublasLt):  # where no library competes, the canonical one may win
            found.append(canonical)
        return Proposal(self.key, found, canonical, self.cases, self.race)

    def kernels(self) -> list[Kernel]:
        """Those that are worth trying."""
        if self.top > LARGEST:
            best = route(replace(self, top=LARGEST)).chosen.name
            return [] if best == TRITON else [_kernels[best]]
        # a sum that is resumed, and a bias before an fp32 result, are not what cublasLt computes
        library = self.out_aligned and not self.resume and not (self.bias and self.out_dtype == torch.float32)
        if self.dtype == torch.float32:
            ours = FMA if self.a_k or not self.b_k else []
            large = self.m * self.n * self.k > LARGE_FP32
            return [*ours, *(self._proposed(self.m, 4) if library and large else ())]
        found: list[Kernel] = []
        if self.a_k and self.b_k and not self.resume and self.top <= DECODED:
            processors = gpu.multiprocessors(self.device)
            if self.top <= SMALL_M:
                found += tiles.skinny(self.top, self.n, self.k, processors)
            elif self.out_aligned and self.out_dtype == self.dtype:
                found += tiles.tiled(self.m, self.n, self.k, processors)
        if self.resume and (self.a_k or not self.b_k) and self.n % 2 == 0:
            found += RESUMED
        if library:
            found += self.algorithms(8)
        return found

    def algorithms(self, most: int) -> list[CublasLt]:
        """What cublasLt proposes at just this size, its favourite first; and at an odd size of the class, where it
        thinks of others: they come out up to 5 % faster, at either. Of a large product it is asked for parts of the
        rows too: a head over 535 rows is 9 % faster by what it proposes for 128."""
        found = self._proposed(self.m, most)
        if self.a_k and self.m == self.top <= 1024 and self.m > SMALL_M:
            found += self._proposed(self.m - 3, most - 2)
            if self.m * self.n * self.k > LARGE:
                parts = {-(-self.m // parts) for parts in range(2, 9)} | {self.m - 40, self.m + 48, 2 * self.m}
                for rows in sorted({128, 256, 384, 512, *parts}):
                    found += self._proposed(rows, 5) if rows > SMALL_M else []
        return list(dict.fromkeys(found))

    def _proposed(self, m: int, most: int) -> list[CublasLt]:
        if not cublaslt_version()[0]:
            return []
        numbers = _ops()[0].linear_cublaslt_algorithms(
            self.device.index or 0, self.dtype == torch.float32, self.dtype == torch.bfloat16,
            self.out_dtype == torch.float32, self.bias, self.a_k, self.b_k, m, self.n, self.k, most,
        )  # fmt: skip
        each = (numbers[at : at + 12] for at in range(0, len(numbers), 12))
        return [CublasLt(*of[:4], tuple(of[4:])) for of in each]

    def canonical(self, a, b, b_t, bias, out) -> Tensor:
        return triton.matmul(a, b.t() if b_t else b, _copy(out), bias, resume=self.resume)

    def tensors(self) -> tuple:
        """(a, b, b_t, bias, out) without meaningful values."""
        m, n, k = self.m, self.n, self.k
        make = functools.partial(torch.empty, dtype=self.dtype, device=self.device)
        a = make(m, k) if self.a_k else make(k, m).t()
        b = make(n, k) if self.b_k else make(k, n)
        out = torch.empty(m, n, dtype=self.out_dtype, device=self.device)
        if not self.out_aligned:
            out = torch.empty(m, n + 1, dtype=self.out_dtype, device=self.device)[:, 1:]
        return a, b, self.b_k, make(n) if self.bias else None, out

    def cases(self) -> list[tuple]:
        """One row; the smallest size of the class (an odd one) from strided memory, with every kind of special rows
        among the ordinary ones; and the largest."""
        a, b, b_t, bias, out = whole = self.filled()
        found = []
        if self.a_k:
            rows = max(7, self.top - _step(self.top) + 1)
            for first in range(0, KINDS, rows - 1) if rows < KINDS else (0,):
                wide = torch.full((rows, self.k + 8 + -self.k % 8), float("nan"), dtype=self.dtype, device=self.device)
                few = wide[:, 8 : 8 + self.k]
                few.copy_(a[:rows])
                few[:KINDS] = special_rows(few[:KINDS], seed=self.k, first=first)
                found.append((few, b, b_t, bias, out[:rows]))
            found.append((a[:1], b, b_t, bias, out[:1]))
        else:
            depth = max(1, self.k * 5 // 8 - 1) | 1
            special = a.clone()  # in the strides of a
            special[:KINDS] = special_rows(special[:KINDS], seed=self.k)
            found.append((special[:, :depth], b[:, :depth] if b_t else b[:depth], b_t, bias, out))
        return [*found, whole]

    def filled(self) -> tuple:
        """Operands that cancel along k to almost nothing, made on the device; some hundred different rows each. Columns
        of special values are among them."""
        a, b, b_t, bias, out = self.tensors()
        g = torch.Generator(self.device).manual_seed(self.k)
        rows, columns, half = min(self.m, 256), min(self.n, 2048), self.k // 2
        v = torch.randn(rows, half, generator=g, device=self.device, dtype=torch.float32)
        v *= torch.exp2(torch.randint(-12, 13, v.shape, generator=g, device=self.device).float())
        v = v.clamp(-64, 64) if self.dtype == torch.float16 else v  # 25 binades are more than fp16's results have
        u = torch.randn(half, columns, generator=g, device=self.device, dtype=torch.float32)
        order = torch.randperm(2 * half, generator=g, device=self.device)
        x, y = torch.cat([v, -v], 1)[:, order].to(self.dtype), torch.cat([u, u])[order].to(self.dtype)
        if self.k % 2:
            x, y = torch.cat([x, x.new_ones(rows, 1)], 1), torch.cat([y, y.new_ones(1, columns)])
        y = y.t().contiguous()
        y[-KINDS:] = special_rows(y[-KINDS:], seed=self.n)
        for to, values in ((a, x), (b if b_t else b.t(), y)):  # rows repeat
            whole = len(to) // len(values) * len(values)
            to[:whole].unflatten(0, (-1, len(values))).copy_(values.expand(whole // len(values), -1, -1))
            to[whole:].copy_(values[: len(to) - whole])
        if bias is not None:  # of the size of what is left of the sums: a larger one would hide them when it is rounded
            left = self.k * 2.0 ** (-23 if self.dtype == torch.float16 else -18)
            bias.copy_(torch.randn(self.n, generator=g, device=self.device, dtype=torch.float32) * left)
        if self.resume:
            out.copy_(torch.randn(self.n, generator=g, device=self.device, dtype=torch.float32) * 256)
        else:
            out.zero_()  # as any values are
        return a, b, b_t, bias, out

    def race(self, candidates: list[Candidate], case: tuple) -> list[float | Exception]:
        """As in a model, where the cache has forgotten a weight by the time it comes up again; and for long enough to
        show what kernels do to the next ones, which overlap them: as many rows as are decoded at once have a short
        kernel before each product, a norm's or an activation's, and the times are of both. Values are a model's too:
        what they cost in power decides the clock under large products, and with operands that cancel others win, by
        some per cent."""
        a, b, b_t, bias, out = case
        g = torch.Generator(self.device).manual_seed(0)
        a.normal_(generator=g)  # verified is what had to be
        b.normal_(std=self.k**-0.5, generator=g)
        size = sum(t.numel() * t.element_size() for t in (a, b, out))
        decodes = self.a_k and self.b_k and not self.resume and self.top <= DECODED
        others = min(63, 400e6 / size) if decodes else min(7, 60e6 / size)  # for decodes, more than the L2 cache keeps
        sets = [(a, b, out)] + [(a.clone(), b.clone(), _copy(out)) for _ in range(int(others))]
        rate = 4e13 if self.dtype == torch.float32 else 7e14
        least = max(size / 4e12, 2 * self.m * self.n * self.k / rate, 2e-6)  # seconds of a product
        sets *= max(1, math.ceil((3e-4 if decodes else 1.2e-4) / (least * len(sets))))
        run, calls, before = _ops()[1], [], functools.partial(copy_rows, a, torch.empty_like(a)) if decodes else None
        for one in candidates:
            if one.name == TRITON:
                turned = [(x, w.t() if b_t else w, y) for x, w, y in sets]
                calls.append([functools.partial(triton.matmul, *of, bias, resume=self.resume) for of in turned])
            else:
                number = _number(_kernels[one.name])
                calls.append([functools.partial(run, x, w, b_t, bias, y, self.resume, number) for x, w, y in sets])
        if before is not None:
            calls = [[functools.partial(_both, before, call) for call in competitor] for competitor in calls]
        return race_on_gpu(calls, rounds=3, finalists=5, final=9)


def _both(first: Callable, second: Callable) -> None:
    first()
    second()


KINDS = 24  # rows that hold every kind of special row, with ordinary ones between them


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_kernels: dict[str, Kernel] = {}  # by their names in verdicts, all that were candidates


def candidate(kernel: Kernel, resume: bool = False) -> Candidate:
    """A kernel as admission runs it: on (a, b, b_t, bias, out), into a copy of out."""
    name = str(kernel)
    _kernels[name] = kernel
    return Candidate(name, functools.partial(_run, kernel, resume), _source(isinstance(kernel, CublasLt)))


def _source(cublaslt: bool) -> str | None:
    library, ours = cublaslt_version()[0] if cublaslt else None, digest.of_extension("linear", "cuda")
    return digest.of_files(__file__, tiles.__file__, native=ours, cublaslt=library)


def _copy(out: Tensor) -> Tensor:
    """A copy of out, a part of memory of torch's, whose rows lie and begin as out's do."""
    before = out.storage_offset() % 8  # no address: kernels are compiled ahead on tensors without memory
    if out.is_contiguous() and before * out.element_size() % 16 == 0:
        return out.clone()
    wide = out.new_empty(out.shape[0], max(out.stride(0), before + out.shape[1]))
    copy = wide[:, before : before + out.shape[1]]
    copy.copy_(out)
    return copy


def _run(kernel: Kernel, resume: bool, a, b, b_t, bias, out) -> Tensor:
    out = _copy(out)
    if _ops()[1](a, b, b_t, bias, out, resume, _number(kernel)) != DONE:
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


def admit(
    n: int, k: int, rows: int, dtype: torch.dtype, out_dtype: torch.dtype | None = None, *, bias: bool = False,
    layout: str = "fwd", resume: bool = False, device: torch.device | str = "cuda",
) -> Decision:  # fmt: skip
    """Verify ahead of time what `rows` rows, and all others of their class, need with an (n, k) weight.

    layout  "fwd" x @ w.T, "dx" dy @ w or "dweight" dy.T @ x
    """
    m, n, k = {"fwd": (rows, n, k), "dx": (rows, k, n), "dweight": (n, k, rows)}[layout]
    product = Product(
        gpu.with_index(device), dtype, out_dtype or dtype, m, n, k,
        a_k=layout != "dweight", b_k=layout == "fwd", bias=bias, resume=resume,
    )  # fmt: skip
    return route(product)
