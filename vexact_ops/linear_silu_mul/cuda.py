"""The GPU's own class on SM90: up to 1,024 rows in 16 bits by one kernel, which stores no product.

Up to 64 rows the weight is streamed as `linear` streams it for few rows (csrc/linear_silu_mul/sm90_gated.cuh), in sizes
that `linear` tries too; more rows are cut into wide tiles (sm90_wide.cuh). Both read gates and ups in turns, so that
both of an element end in one thread. Which of them, or the two ops one after the other, is raced between what precedes
and what follows in a model, and verified byte for byte against the Triton kernels (contract: verify, then trust).
Everything else (more rows, a bias, fp32, rows off 16-byte boundaries, other GPUs) is `linear`'s fastest kernel and
silu_mul's: same bits.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._core import digest, gpu, native
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided, race_on_gpu
from .._core.peers import Loopback, Peers, Sent
from .._core.proof.bitwise import same_bits
from ..linear import cuda as linear
from ..linear import cuda_send, tiles
from ..linear.tiles import SHARED_BYTES, SMALL_M, Skinny
from ..rmsnorm.triton import rmsnorm_fwd
from ..silu_mul.triton import silu_mul_fwd
from . import triton

UNFUSED = "linear, silu_mul"  # the canonical way
MOST = 1024  # rows
WIDE = [(tokens, width) for tokens in (64, 128, 192, 256) for width in (128, 192)]


def linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    chosen = route(Call.of(x, weight, bias)).chosen
    return _unfused(x, weight, bias, gelu) if chosen.name == UNFUSED else chosen.run(x, weight, gelu)


def linear_silu_mul_send(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool, peers: Peers) -> Tensor | Sent:
    """linear_silu_mul, or its columns on their way to every rank, where this product's kernel sends them."""
    call = Call.of(x, weight, bias)
    chosen = route(call).chosen
    if chosen.name == UNFUSED:
        return _unfused(x, weight, bias, gelu)
    tile, out = chosen.run.args[0], x.new_empty(x.shape[0], weight.shape[0] // 2)
    if isinstance(tile, Skinny) and cuda_send.sends(peers, out):
        tile = cuda_send.waiting(tile, call.n)
        key = call._replace(rows=class_of(call.rows)), tile
        if cuda_send.proved(_sending, key, functools.partial(_sends, *key)):
            _native()[0](x, weight, gelu, *tile, out, *peers.places)
            return Sent(*out.shape, out.dtype)
    return chosen.run(x, weight, gelu)


_sending: dict[tuple, bool] = {}


class Call(NamedTuple):
    """What decides which kernel computes a call.

    aligned  whether rows of x and of the weight begin on 16-byte boundaries
    """

    device: torch.device
    dtype: torch.dtype
    n: int
    k: int
    rows: int
    bias: bool = False
    aligned: bool = True

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, bias: Tensor | None) -> "Call":
        aligned = gpu.aligned_rows(x) and gpu.aligned_rows(weight)
        return cls(x.device, x.dtype, *weight.shape, x.shape[0], bias is not None, aligned)


def route(call: Call) -> Decision:
    """Which kernel computes a call: dispatch takes it, `explain` shows it, `admit` asks for it ahead of time."""
    rule = _rule(call)
    return canonical_by_rule(UNFUSED, rule) if rule else _decision(*call[:4], class_of(call.rows))


class Wide(NamedTuple):
    """A kernel for more rows: rows of x and of the weight in a tile, and stages. Its text is its name in verdicts."""

    tokens: int
    width: int
    ring: int

    def __str__(self) -> str:
        return f"wgmma wide {self.tokens}x{self.width} ring {self.ring}"


def _run(tile: Skinny | Wide, x: Tensor, weight: Tensor, gelu: bool) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    _native()[isinstance(tile, Wide)](x, weight, gelu, *tile, out)
    return out


def _unfused(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool) -> Tensor:
    h = linear.linear_fwd(x, weight, bias, x.dtype)
    y = h.new_empty(h.shape[0], h.shape[1] // 2)
    silu_mul_fwd(*h.chunk(2, 1), gelu, y)
    return y


@functools.cache
def _native():
    return native.ops().linear_silu_mul_few.default, native.ops().linear_silu_mul_wide.default


def class_of(rows: int) -> int:
    """The most rows that share their kernel with so many; 0: these kernels do not take them."""
    return linear.class_of(rows) if 0 < rows <= MOST else 0


# ---- admission


def _rule(call: Call) -> str | None:
    """Why these kernels do not take a call."""
    if not class_of(call.rows):
        return f"they take 1 to {MOST:,} rows"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return "they take bf16 and fp16"
    if call.bias:
        return "they add no bias"
    if call.n % 16 or call.k % 8 or not call.aligned:
        return "gates do not come in eights, or rows do not begin on 16-byte boundaries"
    if call.n * call.k < linear.SMALL:
        return "too small to be worth the time to verify other kernels"
    return gpu.not_sm90(call.device)


@decided
def _decision(device: torch.device, dtype: torch.dtype, n: int, k: int, top: int) -> Proposal:
    native_sources = " ".join(f"{digest.of_extension(room, 'cuda')}" for room in ("linear_silu_mul", "linear"))
    source = digest.of_files(__file__, tiles.__file__, native=native_sources)
    processors = gpu.multiprocessors(device)
    canonical = Candidate(UNFUSED, _canonical, digest.canonical("linear_silu_mul"))
    return Proposal(
        f"linear_silu_mul {str(dtype).removeprefix('torch.')} R<={top} N={n} K={k}",
        [*(candidate(tile, source) for tile in kernels(top, n, k, processors)), canonical],
        canonical,
        lambda: _cases(device, dtype, n, k, top),
        _race,
        margin=0.01 if top <= SMALL_M else 0.005,  # of a chain, or of it and a copy: less may be chance
    )


def _sends(call: Call, tile: Skinny) -> bool:
    loop = Loopback(2, call.device)
    for x, weight, gelu in _cases(call.device, call.dtype, call.n, call.k, call.rows):
        expected = _run(tile, x, weight, gelu)
        loop.begin()
        _native()[0](x, weight, gelu, *tile, torch.empty_like(expected), *loop.places)
        found = loop.sent(*expected.shape, expected.dtype)
        if found is None or not same_bits(found, expected):
            return False
    return True


def candidate(tile: Skinny | Wide, source: str) -> Candidate:
    return Candidate(str(tile), functools.partial(_run, tile), source)


def kernels(top: int, n: int, k: int, processors: int = 132) -> tuple[Skinny | Wide, ...]:
    """Our kernels for up to `top` rows of x and an (n, k) weight. More than SMALL_M rows are cut into tiles: those that
    should be the fastest, by what bounds them. A step of 64 along k takes as many clocks as wgmma needs, or as shared
    memory needs to be written and read by wgmma, 128 bytes a clock; the start and the end of a tile take some 8,000."""
    if top <= SMALL_M:
        found = [tile for tile in tiles.skinny(top, n, k, processors, unit=16) if _spreads(tile, n, processors)]
        found += _alone(top, n, processors)
        # blocks of the product that follows crowd where the first ones of this kernel end, unless it has ended
        return tuple(dict.fromkeys([*found, *(tile._replace(lead=0) for tile in found)]))
    timed = []
    for tokens, width in WIDE:
        down, across = -(-top // tokens), -(-n // width)
        if tokens == 64 or -(-top // (tokens - 64)) > down:
            step = max(tokens * width // 32, width // 64 * (64 + tokens) + tokens + width)
            waves = -(-down * across // processors)
            timed.append((waves * (step * -(-k // 64) + 8000), tokens, width))
    best = (of for _, *of in sorted(timed)[:4])
    rings = (((tokens, width), (SHARED_BYTES - 1024) // ((tokens + width) * 128)) for tokens, width in best)
    return tuple(Wide(*of, min(16, ring)) for of, ring in rings)


def _spreads(tile: Skinny, n: int, processors: int) -> bool:
    """Whether a kernel's tiles are more than a wave, or two of them have no room on one multiprocessor: else they may
    meet there while others have none, and it takes one time or another (1.7B at 24 rows: the chain 26 or 31 us)."""
    shared = tile.ring * tile.boxes * (tile.rows + max(8, tile.tokens)) * 128 + 2048
    return -(-n // tile.rows) > processors or 2 * shared > SHARED_BYTES


def _alone(top: int, n: int, processors: int) -> list[Skinny]:
    """Those whose tiles are one wave, with so much of the shared memory that two of a launch never meet on one
    multiprocessor while others have none: all of it, or just over half, which leaves room to the next kernel's."""
    tokens, rows = next(t for t in tiles.FEW if top <= t), -(-n // processors // 16) * 16
    found = []
    for boxes in (2, 4) if tokens < 64 else (2,):
        stage, other = boxes * (rows * 128 + max(1024, tokens * 128)), 1024 + -rows % 64 * 128
        whole = min(32, (SHARED_BYTES - other) // stage)
        half = (SHARED_BYTES // 2 + 1024 - other) // stage + 1
        for ring in sorted({half, whole}) if rows <= 128 and 3 <= half <= whole else ():
            for lead in (ring // 2, tiles.FROM_THE_START)[: 2 if boxes == 2 else 1]:
                found.append(Skinny(rows, tokens, boxes, ring, ring // 2, lead))
    return found


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
    """As in a model: a norm precedes, the product back to x's width follows, and the cache has forgotten a weight by
    the next time: not before some eight times what it holds has passed. A replay takes a millisecond, and the fastest
    have many: what is to be won is some per cent of all three.

    Products of many rows, one after the other, draw so much power that the clock falls by a fifth, which a step does
    not see: so what attention does meanwhile, waiting for memory, is there too."""
    x, weight, _ = case
    g = torch.Generator(x.device).manual_seed(0)
    x.normal_(generator=g)
    weight.normal_(std=x.shape[1] ** -0.5, generator=g)
    down = weight.new_empty(x.shape[1], weight.shape[0] // 2).normal_(std=weight.shape[0] ** -0.5, generator=g)
    size = (weight.numel() + down.numel()) * x.element_size()
    sets = [(weight, down)] + [(weight.clone(), down.clone()) for _ in range(int(min(7, 400e6 / size)))]
    least = max(size / 4e12, x.shape[0] * size / 7e14, 8e-6)  # seconds of the chain
    sets *= max(1, math.ceil(1e-3 / (least * len(sets))))
    ones, residual = x.new_ones(x.shape[1]), x.clone()
    rest = _copy_of(1.5 * least, x.device) if x.shape[0] > SMALL_M else None

    def call(one: Candidate, weight: Tensor, down: Tensor) -> None:
        if rest:
            rest()
        read = rmsnorm_fwd(x, ones, residual, 1e-6, False)[0]
        h = _unfused(read, weight, None, False) if one.name == UNFUSED else one.run(read, weight, False)
        linear.linear_fwd(h, down, None, x.dtype)

    calls = [[functools.partial(call, one, *of) for of in sets] for one in candidates]
    return race_on_gpu(calls, rounds=3, finalists=4, final=24)


def _copy_of(seconds: float, device: torch.device) -> Callable[[], None]:
    """A copy from memory to memory that takes about so long, in parts of at most 128 MiB."""
    there = seconds * 4e12 / 2
    parts = math.ceil(there / 2**27)
    part = math.ceil(there / parts / 4096) * 4096  # one that begins off a boundary takes four times as long
    source, target = torch.zeros(2, part, dtype=torch.uint8, device=device)

    def copy() -> None:
        for _ in range(parts):
            target.copy_(source)

    return copy


def explain(op: str, *, x: Tensor, weight: Tensor, bias: Tensor | None, **_) -> list[tuple[str, Decision]]:
    """Which kernels compute a call, of the operator's arguments by name."""
    x, weight = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (x, weight))
    decision = route(Call.of(x, weight, bias))
    found = [("gated product", decision)]
    if decision.chosen.name == UNFUSED:
        found += linear.explain("linear", x=x, weight=weight, bias=bias, out_dtype=x.dtype)
    return found


def admit(n: int, k: int, rows: int, dtype: torch.dtype, device: torch.device | str = "cuda") -> Decision:
    """Verify ahead of time what `rows` rows, and all others of their class, need with an (n, k) weight."""
    return route(Call(gpu.with_index(device), dtype, n, k, rows))
