"""The GPU's own class on SM90: the fastest kernel proven equal to the Triton ones for a product, by its sizes.

A product is a kind (below), the experts' number and matrix, whether rows are read through `order`, and the number of
rows, known by its half octave (its bucket). On the first call of a kind, outside of a CUDA graph, candidates are
verified against the Triton kernels on rows that cancel and rows of special values, spread evenly, at random and most of
them to one expert, and on one row alone, and timed; the choice is kept in memory and on disk. What no candidate serves
(fp32, odd sizes or strides, other GPUs, a first call inside a graph, no rows) takes the Triton kernels: same bits. All
candidates take bf16, those for few rows fp16 too.

Candidates: kernels of our own by name, torch._grouped_mm and quack's gemm. The last two read rows side by side, so rows
that come through `order` are copied first, and rows behind the last expert are filled with zeros for them.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .._core import check, digest, gpu, native
from .._core.admit import Candidate, Decision, Proposal, admitted, canonical_by_rule, race_on_gpu
from .._core.graph import settles_nothing
from .._core.peers import Landing
from .._core.proof.inputs import special_rows
from .._core.triton import on
from ..silu_mul import triton as silu_mul
from . import cute, triton

__all__ = [
    "admit",
    "explain",
    "gather_rows",
    "grouped_gate_up",
    "grouped_gate_up_send",
    "grouped_linear_dweight",
    "grouped_linear_dx",
    "grouped_linear_fwd",
    "route",
]

LARGEST = 1 << 17  # rows; larger buckets take the choice of this one
KINDS = 24  # rows that hold every kind of special row, with ordinary ones between them
MANY = 64  # rows for each expert: kernels for few take no more
SMALL = 100_000  # elements of a matrix: below, no kernel is worth the time to verify it
TRITON = "triton"  # the canonical kernels
_chosen: dict[tuple, Callable] = {}


def grouped_linear_fwd(
    x: Tensor, weight: Tensor, offsets: Tensor, order: Tensor | None = None, top_k: int = 1
) -> Tensor:
    return _kernel("fwd", x, weight, offsets, order, top_k)(x, weight, offsets, order, top_k)


def grouped_linear_dx(
    dy: Tensor, weight: Tensor, offsets: Tensor, order: Tensor | None = None, top_k: int = 1
) -> Tensor:
    return _kernel("dx", dy, weight, offsets, order, top_k)(dy, weight, offsets, order, top_k)


def grouped_linear_dweight(
    dy: Tensor, x: Tensor, offsets: Tensor, order: Tensor | None = None, top_k: int = 1, *, gathered: str = ""
) -> Tensor:
    """gathered: "dy" or "x" is read through order."""
    kind = f"dweight {gathered}".strip()
    return _kernel(kind, dy, x, offsets, order, top_k)(dy, x, offsets, order, top_k, gathered=gathered)


def grouped_gate_up(
    x: Tensor, gate_up: Tensor, offsets: Tensor, order: Tensor | None, top_k: int, gelu: bool, keep: bool
) -> tuple[Tensor | None, Tensor]:
    """h = grouped_linear_fwd(x, gate_up, ...), a = silu_mul(h), or gelu_tanh's: (h or None, a); h is only there to
    `keep`."""
    kind = f"gate_up{' gelu' * gelu}{' keep' * keep}"
    return _kernel(kind, x, gate_up, offsets, order, top_k)(x, gate_up, offsets, order, top_k, gelu, keep)


def grouped_gate_up_send(
    x: Tensor, gate_up: Tensor, offsets: Tensor, order: Tensor | None, top_k: int, gelu: bool, landing: Landing
) -> Tensor:
    """landing's gather of grouped_gate_up's a, by a kernel that writes each rank's columns into all ranks' landings."""
    rows = gather_rows(x, offsets, order, top_k)
    return send_by(_ring_that_sends(rows, gate_up, offsets, gelu), rows, gate_up, offsets, gelu, landing)


def send_by(
    ring: tuple[int, int], rows: Tensor, gate_up: Tensor, offsets: Tensor, gelu: bool, landing: Landing
) -> Tensor:
    # Nothing of this may go otherwise on one of the ranks: operands that its kernel does not take are copied.
    rows, gate_up = (t if _plain(t) else t.clone(memory_format=torch.contiguous_format) for t in (rows, gate_up))
    a = landing.view(rows.shape[0], gate_up.shape[1] // 2, rows.dtype)
    native.ops().grouped_product(rows, gate_up, offsets, GATE_UP, gelu, *ring, a, None, *landing.places)
    landing.meet()
    return a


def _ring_that_sends(rows: Tensor, gate_up: Tensor, offsets: Tensor, gelu: bool) -> tuple[int, int]:
    """That of the product which does not send, or the fastest that was raced with it, where none reads the rows through
    an order: each has the same bits, so that ranks may differ in it."""
    kind = f"gate_up{' gelu' * gelu}"
    key = kind, rows.device.index, offsets.shape[0], gate_up.shape, bucket_of(rows.shape[0])
    if key in _rings:
        return _rings[key]
    most = 2.5 * rows.shape[0] / gate_up.shape[0]  # of an expert, about, where they are spread at random
    fitting = min((ring for ring in OWN if 16 * ring[0] >= most), default=OWN[0])
    if bucket_of(rows.shape[0]) <= MANY * gate_up.shape[0] or settles_nothing(rows.device):
        return fitting
    decision = route(Product.of(kind, rows, gate_up, offsets))
    named = {_ring_name(ring): ring for ring in OWN}
    verdicts = [verdict for verdict in decision.verdicts if verdict.candidate in named]
    sound = [verdict for verdict in verdicts if verdict.admitted]
    if verdicts and not sound:
        raise RuntimeError(f"{decision.key}: ranks send what no kernel that sends has the bits of: {verdicts[0]}")
    if decision.chosen.name in named:
        ring = named[decision.chosen.name]
    elif timed := [verdict for verdict in sound if verdict.us is not None]:
        ring = named[min(timed, key=lambda verdict: verdict.us).candidate]
    else:
        ring = named[sound[0].candidate] if sound else fitting
    if decision.final:
        _rings[key] = ring
    return ring


_rings: dict[tuple, tuple[int, int]] = {}


def gather_rows(x: Tensor, offsets: Tensor, order: Tensor | None, top_k: int) -> Tensor:
    """x[order[i] // top_k] for the rows i below offsets[E]; what is behind is left as it is. x itself without order."""
    if order is None:
        return x
    if x.dtype != torch.bfloat16 or x.shape[1] % 8 or not _plain(x):
        return x[order.long() // top_k]
    rows = x.new_empty(order.shape[0], x.shape[1])
    native.ops().grouped_gather(x, offsets, order, top_k, rows)
    return rows


# ---- the canonical kernels, and those of others


def _triton_gate_up(x, gate_up, offsets, order, top_k, gelu, keep, product=triton.grouped_linear_fwd):
    h = product(x, gate_up, offsets, order, top_k)
    a = h.new_empty(h.shape[0], h.shape[1] // 2)
    silu_mul.silu_mul_fwd(*h.chunk(2, 1), gelu, a)
    return (h if keep else None), a


CANONICAL = {
    "fwd": triton.grouped_linear_fwd,
    "dx": triton.grouped_linear_dx,
    "dweight": triton.grouped_linear_dweight,
    "gate_up": _triton_gate_up,
}


def _of_others(product: Callable) -> Callable:
    """product(rows, weight, offsets), whose rows lie side by side, as a function that takes what ours take. It is given
    offsets that ascend within the rows, whatever they were, and runs with their device as the current one: other
    libraries trust both."""

    def run(x, weight, offsets, order=None, top_k=1):
        rows = gather_rows(x, offsets, order, top_k)
        with on(rows):
            y = product(rows, weight, _bounded(offsets, rows.shape[0]))
        native.ops().grouped_tail(offsets, y)  # behind the last expert they leave what was there
        return y

    return run


def _bounded(offsets: Tensor, rows: int) -> Tensor:
    bounded = torch.empty_like(offsets)
    native.ops().grouped_bound(offsets, rows, bounded)
    return bounded


@_of_others
def _torch_fwd(rows, weight, offsets):
    return torch._grouped_mm(rows, weight.transpose(1, 2), offs=offsets[1:])


@_of_others
def _torch_dx(rows, weight, offsets):
    return torch._grouped_mm(rows, weight, offs=offsets[1:])


def _torch_dweight(dy, x, offsets, order=None, top_k=1, *, gathered=""):
    dy = gather_rows(dy, offsets, order, top_k) if gathered == "dy" else dy
    x = gather_rows(x, offsets, order, top_k) if gathered == "x" else x
    with on(dy):
        return torch._grouped_mm(dy.t(), x, offs=_bounded(offsets, dy.shape[0])[1:])


@_of_others
def _quack_fwd(rows, weight, offsets):
    return cute.product(rows, weight.transpose(1, 2), offsets)


@_of_others
def _quack_dx(rows, weight, offsets):
    return cute.product(rows, weight, offsets)


# (units of 16 rows that a tile has at most, depth of the ring)
OWN = ((16, 3), (12, 4), (11, 4), (10, 5), (8, 6), (4, 8))
OWN_DWEIGHT = ((16, 3), (12, 4))
FORWARD, ACROSS, GATE_UP = range(3)


def _own(mode: int, ring: tuple[int, int], x, weight, offsets, order=None, top_k=1):
    rows = gather_rows(x, offsets, order, top_k)
    out = rows.new_empty(rows.shape[0], weight.shape[2 if mode == ACROSS else 1])
    native.ops().grouped_product(rows, weight, offsets, mode, False, *ring, out, None)
    return out


def _own_gate_up(ring: tuple[int, int], x, gate_up, offsets, order, top_k, gelu, keep):
    rows = gather_rows(x, offsets, order, top_k)
    a = rows.new_empty(rows.shape[0], gate_up.shape[1] // 2)
    h = rows.new_empty(rows.shape[0], gate_up.shape[1]) if keep else None
    native.ops().grouped_product(rows, gate_up, offsets, GATE_UP, gelu, *ring, a, h)
    return h, a


def _own_dweight(ring: tuple[int, int], dy, x, offsets, order=None, top_k=1, *, gathered=""):
    dy = gather_rows(dy, offsets, order, top_k) if gathered == "dy" else dy
    x = gather_rows(x, offsets, order, top_k) if gathered == "x" else x
    dweight = dy.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    native.ops().grouped_sums(dy, x, offsets, *ring, dweight)
    return dweight


# Kernels for few rows per expert: multiplying warpgroups, boxes of 64 k in a stage, blocks on a multiprocessor, per
# cent of the pieces in equal shares, units of 32 rows of a weight in a piece. Equal shares alone are for a token or
# two: with more to do, how fast they are depends on where the weights lie.
SMALL_M = ((2, 2, 1, 50, 4), (1, 2, 2, 50, 2), (4, 2, 1, 50, 4))
SMALLEST_M = ((1, 2, 2, 100, 2), (2, 2, 1, 100, 4))


def _small_m(shape: tuple, x, weight, offsets, order=None, top_k=1, *, activation: int = -1):
    rows, n = x.shape[0] if order is None else order.shape[0], weight.shape[1]
    out = x.new_empty(rows, n if activation < 0 else n // 2)
    if not native.ops().grouped_small_m(x, weight, offsets, order, top_k, activation, *shape, out):
        raise RuntimeError("does not take this product")
    return out


def _small_m_gate_up(shape: tuple, x, gate_up, offsets, order, top_k, gelu, keep):
    if keep:
        return _triton_gate_up(x, gate_up, offsets, order, top_k, gelu, keep, functools.partial(_small_m, shape))
    return None, _small_m(shape, x, gate_up, offsets, order, top_k, activation=int(gelu))


def _names(kind: str) -> dict[str, Callable]:
    """The candidates for a kind of product, by name: they take what the Triton function of that kind takes."""
    found: dict[str, Callable] = {}
    if kind in ("fwd", "gate_up"):
        found["torch._grouped_mm"] = _torch_fwd
        if cute.INSTALLED:
            found["quack"] = _quack_fwd
    elif kind == "dx":
        found["torch._grouped_mm"] = _torch_dx
        if cute.INSTALLED:
            found["quack"] = _quack_dx
    elif kind == "dweight":
        found["torch._grouped_mm"] = _torch_dweight
    if kind == "gate_up":
        found = {name: functools.partial(_triton_gate_up, product=run) for name, run in found.items()}
    for ring in OWN_DWEIGHT if kind == "dweight" else OWN:
        run = {"fwd": functools.partial(_own, FORWARD), "dx": functools.partial(_own, ACROSS)}.get(kind)
        run = run or {"gate_up": _own_gate_up, "dweight": _own_dweight}[kind]
        found[_ring_name(ring)] = functools.partial(run, ring)
    return found


def _ring_name(ring: tuple[int, int]) -> str:
    return f"wgmma 128x{16 * ring[0]}x64 ring {ring[1]}"


def _small_m_names(kind: str, rows: int) -> dict[str, Callable]:
    """The candidates for few rows per expert, which take fp16 too."""
    run = {"fwd": _small_m, "gate_up": _small_m_gate_up}.get(kind)
    shapes = () if run is None else SMALLEST_M + SMALL_M if rows <= 16 else SMALL_M
    return {
        f"wgmma {64 * groups}x64x{64 * pieces} few rows, blocks {blocks}, shares {share} %, pieces {piece}":
        functools.partial(run, (groups, pieces, blocks, share, piece))
        for groups, pieces, blocks, share, piece in shapes
    }  # fmt: skip


def _source(name: str) -> str:
    """A digest of all that computes a candidate."""
    files, facts = [__file__, silu_mul.__file__], {"native": digest.of_extension("grouped_linear", "cuda")}
    if name.startswith("torch"):
        facts["torch"] = torch.__version__
    elif name == "quack":
        files.append(cute.__file__)
        facts |= {one: digest.version(one) for one in ("quack-kernels", "nvidia-cutlass-dsl", "torch")}
    return digest.of_files(*files, **facts)


# ---- the choice


def _kernel(kind: str, a: Tensor, b: Tensor, offsets: Tensor, order: Tensor | None, top_k: int) -> Callable:
    rows = a.shape[0] if order is None else order.shape[0]
    which = rows and bucket_of(rows), _plain(a) and _plain(b)
    key = kind, a.device.index, a.dtype, offsets.shape[0], b.shape, which, order is None, top_k
    if kind[0] == "d" and kind[1] == "w":  # b has as many rows as there happen to be
        key = (*key[:4], (a.shape[1], b.shape[1]), *key[5:])
    run = _chosen.get(key)
    return _settle(key, kind, a, b, offsets, order, top_k) if run is None else run


def bucket_of(rows: int) -> int:
    """The half octave that holds so many rows: what holds for its largest number holds for all of them."""
    if rows <= 8:
        return 8
    octave = 1 << (rows - 1).bit_length()
    return min(LARGEST, octave if rows > octave // 4 * 3 else octave // 4 * 3)


def _plain(t: Tensor) -> bool:
    """Rows begin on 16-byte boundaries, matrices lie side by side."""
    return t.data_ptr() % 16 == 0 and (
        t.is_contiguous() or (t.dim() == 2 and t.stride(1) == 1 and t.stride(0) % 8 == 0)
    )


def _settle(key: tuple, kind: str, a, b, offsets, order, top_k) -> Callable:
    canonical = CANONICAL[kind.split()[0]]
    if settles_nothing(a.device):
        return canonical
    product = Product.of(kind, a, b, offsets, order, top_k)
    decision = route(product)
    run = canonical if decision.chosen.name == TRITON else product.known()[decision.chosen.name]
    if decision.final:
        _chosen[key] = run
    return run


def route(product: "Product") -> Decision:
    """Which kernel computes a product: dispatch takes it, `explain` shows it, `admit` asks for it ahead of time."""
    reason = None
    if product.rows == 0:
        reason = "there are no rows"  # empty results, and sums of nothing
    elif not product.aligned:
        reason = "no other kernel takes operands off 16-byte boundaries, or their strides"
    elif product.dtype not in (torch.bfloat16, torch.float16):
        reason = f"other kernels take 16-bit inputs, not {str(product.dtype)[6:]}"
    elif product.n % 8 or product.k % 8:
        reason = "other kernels take sizes that are multiples of 8"
    elif product.n * product.k < SMALL:
        reason = "too small to be worth the time to verify other kernels"
    reason = reason or gpu.not_sm90(product.device)
    return canonical_by_rule(TRITON, reason) if reason else admitted(product.proposal(), product.device)


def explain(op: str, *, offsets: Tensor, **given) -> list[tuple[str, Decision]]:
    """Which kernel computes a call of one of this room's operators, of its arguments by name."""
    kind = {"grouped_linear": "fwd", "grouped_linear_dx": "dx", "grouped_linear_dweight": "dweight"}[op]
    a = check.rows(given["x" if kind == "fwd" else "dy"])
    b = check.rows(given["x"]) if kind == "dweight" else check.matrices(given["weight"])
    return [("product", route(Product.of(kind, a, b, offsets)))]


@dataclass(frozen=True)
class Product:
    """One kind of product: what its kernels are verified and timed on.

    kind     "fwd", "dx", "dweight" (then, after a blank, what is read through order), "gate_up" (then its options)
    n, k     of an expert's matrix, as it is stored
    rows     the number that was seen; what counts is its bucket
    top_k    of the order through which rows are read; 0: none
    aligned  whether rows begin on 16-byte boundaries, and matrices lie side by side
    """

    kind: str
    device: torch.device
    experts: int
    n: int
    k: int
    rows: int
    top_k: int = 0
    dtype: torch.dtype = torch.bfloat16
    aligned: bool = True

    @classmethod
    def of(
        cls, kind: str, a: Tensor, b: Tensor, offsets: Tensor, order: Tensor | None = None, top_k: int = 1
    ) -> "Product":
        rows = a.shape[0] if order is None else order.shape[0]
        n, k = (a.shape[1], b.shape[1]) if kind.startswith("dweight") else b.shape[1:]
        through = 0 if order is None else top_k
        return cls(kind, a.device, offsets.shape[0] - 1, n, k, rows, through, a.dtype, _plain(a) and _plain(b))

    @property
    def bucket(self) -> int:
        return bucket_of(self.rows)

    @property
    def fewest(self) -> int:
        """The fewest rows of the bucket, and an odd number."""
        return next(rows for rows in range(self.bucket // 2 + 1, self.bucket + 1, 2) if bucket_of(rows) == self.bucket)

    @property
    def what(self) -> str:
        return self.kind.split()[0]

    @property
    def key(self) -> str:
        through = f" order/{self.top_k}" if self.top_k else ""
        sizes = f"E={self.experts} N={self.n} K={self.k} R<={self.bucket}"
        return f"grouped_linear {self.kind} {str(self.dtype)[6:]}{through} {sizes}"

    def known(self) -> dict[str, Callable]:
        """The kernels that are proposed, by name."""
        found = _names(self.what) if self.dtype == torch.bfloat16 else {}
        return found | _small_m_names(self.what, self.bucket) if self.bucket <= MANY * self.experts else found

    def proposal(self) -> Proposal:
        source = digest.canonical("grouped_linear")
        if self.what == "gate_up":  # what is composed here
            source += f" {digest.canonical('silu_mul')} {digest.of_files(__file__)}"
        canonical = Candidate(TRITON, self.canonical, source)
        found = [Candidate(name, functools.partial(self.run, run), _source(name)) for name, run in self.known().items()]
        return Proposal(self.key, [*found, canonical] if found else [], canonical, self.cases, self.race)

    def canonical(self, *case) -> Tensor:
        return self.run(CANONICAL[self.what], *case)

    def call(self, run: Callable, *case):
        options = self.kind.split()[1:]
        if self.what == "gate_up":
            return run(*case, "gelu" in options, "keep" in options)
        if self.what == "dweight":
            return run(*case, gathered=options[0] if options else "")
        return run(*case)

    def run(self, run: Callable, *case) -> Tensor:
        """One tensor of all results."""
        results = self.call(run, *case)
        if self.what != "gate_up":
            return results
        h, a = results
        return a if h is None else torch.cat((h, a), 1)

    def spread(self, rows: int, way: int) -> Tensor:
        """Offsets of about `rows` rows: at random, a few nobody's; most of them one expert's; a multiple of three each
        for every other expert."""
        g = torch.Generator().manual_seed(rows + way)
        experts, counts = self.experts, torch.zeros(self.experts, dtype=torch.int64)
        if way == 0:
            counts = torch.bincount(torch.randint(experts, (rows,), generator=g), minlength=experts)
        elif way == 1:
            counts = torch.bincount(torch.randint(experts, (rows // 8,), generator=g), minlength=experts)
            counts[int(torch.randint(experts, (1,), generator=g))] += rows - rows // 8
        else:
            counts[::2] = rows // (3 * counts[::2].numel()) * 3
        ends = counts.cumsum(0)
        if way == 0:
            ends = ends.clamp(max=max(1, rows - rows // 50))
        return torch.cat((counts.new_zeros(1), ends)).to(self.device, torch.int32)

    def cases(self) -> list[tuple]:
        """Operands that cancel along the reduction to almost nothing: one row; the fewest of the bucket, of every kind
        of special rows too; and the most, spread at random."""
        fewest = self.fewest
        rows = [(1, 1), (fewest, 1), (fewest, 2), (self.bucket, 0)]
        if self.what == "dweight":
            dy, *others = self.sums(fewest, self.spread(fewest, 1))
            dy.t()[:KINDS] = special_rows(dy.t()[:KINDS], seed=self.n)
            return [(dy, *others), *(self.sums(count, self.spread(count, way)) for count, way in rows)]
        x, weight = self.operands(self.bucket)
        found = []
        for first in range(0, KINDS, fewest):
            rounds = -(-KINDS // x.shape[0])
            special = special_rows(x.repeat(rounds, 1)[:KINDS], seed=self.n)
            which = torch.arange(first, first + fewest, device=self.device) % KINDS
            x_rows = (special, weight, self.spread(fewest, 1))
            if self.top_k:
                found.append((*x_rows, (which * self.top_k).to(torch.int32), self.top_k))
            else:
                found.append((special[which], *x_rows[1:], None, 1))
        for count, way in rows:
            offsets = self.spread(count, way)
            if not self.top_k:
                found.append((x[:count], weight, offsets, None, 1))
                continue
            g = torch.Generator(self.device).manual_seed(count)
            tokens = -(-count // self.top_k)
            order = torch.randperm(tokens * self.top_k, generator=g, device=self.device)[:count].to(torch.int32)
            found.append((x[:tokens], weight, offsets, order, self.top_k))
        return found

    def normal(self, g: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=self.device, dtype=self.dtype)

    def scaled(self, g: torch.Generator, *shape: int) -> Tensor:
        v = self.normal(g, *shape)
        return v * torch.exp2(torch.randint(-12, 13, v.shape, generator=g, device=self.device).to(v.dtype))

    def operands(self, rows: int) -> tuple[Tensor, Tensor]:
        across = self.what == "dx"
        depth = self.n if across else self.k
        g = torch.Generator(self.device).manual_seed(depth)
        tokens = -(-rows // self.top_k) if self.top_k else rows
        v = self.scaled(g, min(tokens, 4096), depth // 2)
        mix = torch.randperm(depth, generator=g, device=self.device)
        x = torch.cat((v, -v), 1)[:, mix]
        x = x.repeat(-(-tokens // x.shape[0]), 1)[:tokens].contiguous()
        weight = torch.empty(self.experts, self.n, self.k, dtype=self.dtype, device=self.device)
        for matrix in weight:
            if across:
                u = self.normal(g, depth // 2, self.k)
                matrix.copy_(torch.cat((u, u))[mix])
            else:
                u = self.normal(g, self.n, depth // 2)
                matrix.copy_(torch.cat((u, u), 1)[:, mix])
        outputs = weight[0].t() if across else weight[0]  # of one expert, some see special values
        outputs[-KINDS:] = special_rows(outputs[-KINDS:], seed=depth)
        return x, weight

    def sums(self, rows: int, offsets: Tensor) -> tuple:
        """For the gradient of the weight: rows of one expert cancel each other; what is gathered comes shuffled."""
        g = torch.Generator(self.device).manual_seed(rows)
        dy, x = self.scaled(g, rows, self.n), self.normal(g, rows, self.k)
        ends = offsets.tolist()
        for begin, end in itertools.pairwise(ends):
            half = (end - begin) // 2
            mix = begin + torch.randperm(end - begin, generator=g, device=self.device)
            dy[mix[:half]] = -dy[mix[half : 2 * half]]
            x[mix[:half]] = x[mix[half : 2 * half]]
        if not self.top_k:
            return dy, x, offsets, None, 1
        # through order, token order[i] // top_k is read: a token for each row, the order its first slot
        mix = torch.randperm(rows, generator=g, device=self.device)
        if self.kind.endswith(" dy"):
            dy = dy[mix.argsort()]
        else:
            x = x[mix.argsort()]
        return dy, x, offsets, (mix * self.top_k).to(torch.int32), self.top_k

    def race(self, candidates: list[Candidate], case: tuple) -> list[float | Exception]:
        """The last case is of the bucket's size, spread at random."""
        size = case[1].numel() * 2
        b = [case[1], *(case[1].clone() for _ in range(int(min(8, 120e6 // size))))]
        runs = {**self.known(), TRITON: CANONICAL[self.what]}
        return race_on_gpu(
            [[functools.partial(self.call, runs[one.name], case[0], w, *case[2:]) for w in b] for one in candidates],
            rounds=3,
            finalists=3,
            final=5,
        )


def admit(
    kind: str,
    experts: int,
    n: int,
    k: int,
    rows: int,
    *,
    top_k: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cuda",
) -> Decision:
    """Verify ahead of time what `rows` rows, and all others of their bucket, need; kind, n, k and top_k as in
    Product."""
    return route(Product(kind, gpu.with_index(device), experts, n, k, rows, top_k, dtype))
