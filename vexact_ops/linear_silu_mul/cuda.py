"""The GPU's own class on SM90: up to 64 rows in 16 bits by one kernel, which stores no product.

It streams the weight as `linear` does for few rows, gates and ups in turns, so that both of an element end in one
thread (csrc/linear_silu_mul/sm90_gated.cuh). Its sizes are among those that `linear` tries; which, or the two ops one
after the other, is raced with the product that follows in a model, and verified byte for byte against the Triton
kernels (contract: verify, then trust). Everything else (more rows, a bias, fp32, rows off 16-byte boundaries, other
GPUs) is `linear`'s fastest kernel and silu_mul's: same bits.
"""

import functools
import math
import re

import torch
from torch import Tensor

from .._core import digest, native
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided, race_on_gpu
from ..linear import cuda as linear
from ..silu_mul.triton import silu_mul_fwd
from . import triton

APART = "linear, silu_mul"  # the canonical way
FEW = 8, 16, 32, 64  # classes of rows, by the most of each


def linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    if _rule(x, weight, bias) is None:
        name = _decision(x.device, x.dtype, weight.shape[0], x.shape[1], class_of(x.shape[0])).chosen.name
        if name != APART:
            return _run(name, x, weight, gelu)
    return _apart(x, weight, bias, gelu)


def _run(name: str, x: Tensor, weight: Tensor, gelu: bool) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _native()(x, weight, gelu, *_sizes(name), out)
    return out


def _apart(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    h = linear.linear_fwd(x, weight, bias, x.dtype)
    y = h.new_empty(h.shape[0], h.shape[1] // 2)
    silu_mul_fwd(*h.chunk(2, 1), gelu, y)
    return y


@functools.cache
def _native():
    return native.ops().linear_silu_mul_few.default


@functools.cache
def _sizes(name: str) -> tuple[int, ...]:
    """rows, tokens, boxes, stages, ahead, lead and blocks of a multiprocessor."""
    rows, tokens, depth, *ring, per_sm = [*map(int, re.findall(r"\d+", name)), 0][:7]
    return rows, tokens, depth // 64, *ring, per_sm


def class_of(rows: int) -> int:
    """The most rows that share their kernel with so many; 0: these kernels do not take them."""
    return next((most for most in FEW if 0 < rows <= most), 0)


# ---- admission


def _rule(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Why these kernels do not take the operands."""
    if not class_of(x.shape[0]):
        return f"they take 1 to {FEW[-1]} rows"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "they take bf16 and fp16"
    if bias is not None:
        return "they add no bias"
    if weight.shape[0] % 16 or x.shape[1] % 8 or not (_aligned(x) and _aligned(weight)):
        return "gates do not come in eights, or rows do not begin on 16-byte boundaries"
    return _rule_of_sizes(x.device, *weight.shape)


@functools.cache
def _rule_of_sizes(device: torch.device, n: int, k: int) -> str | None:
    if n * k < linear.SMALL:
        return "too small to be worth the time to verify other kernels"
    return None if torch.cuda.get_device_capability(device) == (9, 0) else "they are for SM90"


def _aligned(t: Tensor) -> bool:
    """Rows begin on 16-byte boundaries, as the copy engine needs."""
    rows = t.shape[0] <= 1 or (t.stride(0) % 8 == 0 and t.stride(0) >= t.shape[1])
    return rows and t.data_ptr() % 16 == 0


@decided
def _decision(device: torch.device, dtype: torch.dtype, n: int, k: int, top: int) -> Proposal:
    native_sources = " ".join(f"{digest.of_extension(room, 'cuda')}" for room in ("linear_silu_mul", "linear"))
    source = digest.of_files(__file__, linear.__file__, native=native_sources)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    names = linear.skinny_names(top, n, k, processors, unit=16)
    canonical = Candidate(APART, _canonical, digest.canonical("linear_silu_mul"))
    return Proposal(
        f"linear_silu_mul {str(dtype).removeprefix('torch.')} R<={top} N={n} K={k}",
        [*(Candidate(name, functools.partial(_run, name), source) for name in names), canonical],
        canonical,
        lambda: _cases(device, dtype, n, k, top),
        _race,
    )


def _canonical(x: Tensor, weight: Tensor, gelu: bool) -> Tensor:
    return triton.linear_silu_mul(x, weight, None, gelu)


def _cases(device: torch.device, dtype: torch.dtype, n: int, k: int, top: int) -> list[tuple]:
    """Those of linear, by either activation. There all sums cancel, and a gate times an up is next to nothing: so there
    is a weight too where of each such pair one alone cancels, the ups of its second half among them."""
    product = linear.Product(device, dtype, dtype, top, n, k)
    found = [(x, weight, gelu) for x, weight, *_ in product.cases() for gelu in (False, True)]
    x, weight, _ = found[-1]
    mixed, middle, g = weight.clone(), n // 4, torch.Generator(device).manual_seed(n)
    gates, ups = mixed.chunk(2)
    for plain in (gates[middle:], ups[:middle]):
        plain.normal_(std=k**-0.5, generator=g)
    return [*found, (x, mixed, True), (x, mixed, False)]


def _race(candidates: list[Candidate], case: tuple) -> list[float | Exception]:
    """As in a model: the product back to x's width follows, and the cache has forgotten a weight by the next time."""
    x, weight, _ = case
    g = torch.Generator(x.device).manual_seed(0)
    x.normal_(generator=g)
    weight.normal_(std=x.shape[1] ** -0.5, generator=g)
    down = weight.new_empty(x.shape[1], weight.shape[0] // 2).normal_(std=weight.shape[0] ** -0.5, generator=g)
    size = (weight.numel() + down.numel()) * x.element_size()
    sets = [(weight, down)] + [(weight.clone(), down.clone()) for _ in range(int(min(7, 60e6 / size)))]
    sets *= max(1, math.ceil(1.2e-4 / (max(size / 4e12, 4e-6) * len(sets))))

    def call(name: str, weight: Tensor, down: Tensor) -> None:
        h = _apart(x, weight, None, False) if name == APART else _run(name, x, weight, False)
        linear.linear_fwd(h, down, None, x.dtype)

    calls = [[functools.partial(call, one.name, *of) for of in sets] for one in candidates]
    return race_on_gpu(calls, rounds=3, finalists=5, final=9)


def explain(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> list[tuple[str, Decision]]:
    """Which kernels compute a call."""
    x, weight = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (x, weight))
    rule = _rule(x, weight, bias)
    if rule:
        decision = canonical_by_rule(APART, rule)
    else:
        decision = _decision(x.device, x.dtype, weight.shape[0], x.shape[1], class_of(x.shape[0]))
    found = [("gated product", decision)]
    return found + linear.explain("linear", x, weight, bias, x.dtype) if decision.chosen.name == APART else found


def admit(n: int, k: int, rows: int, dtype: torch.dtype, device: torch.device | str = "cuda") -> Decision:
    """Verify ahead of time what `rows` rows, and all others of their class, need with an (n, k) weight."""
    device = torch.device(device)
    device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
    rule = "they take few rows, and gates in eights" if not class_of(rows) or n % 16 or k % 8 else None
    rule = rule or _rule_of_sizes(device, n, k)
    return canonical_by_rule(APART, rule) if rule else _decision(device, dtype, n, k, class_of(rows))
