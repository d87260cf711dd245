"""flash-attn-4's backward on packed sequences, in an order of our own, which is repeatable and costs nothing.

A thread block takes 128 keys of one head of keys (64 where heads are wide) and goes through the blocks of queries that
see them, from the last to the first, each for all the heads that share these keys. So dk and dv are sums in registers
(order: blocks of queries descending, heads ascending), written once; nothing is added up in memory, zeroed before or
converted behind. dq is added up in memory, a block of queries of a head at a time (order: blocks of keys ascending):
whose turn it is is counted. Blocks of the first keys, which most queries see, begin first and are ahead of those that
wait for them, since all take the queries at the same pace. To see that it is one's turn, and that what was added is in
memory before the next one's, may take longer than the products of a block: several warps do it, of a block each.

What its rows are given beside comes from flash-attn-4's own kernel before it, or from one of ours with that one's bytes
(triton_prepare.py), whichever is faster.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .._core import digest
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided, race_on_gpu
from .._core.proof.attention import offsets
from .._core.proof.inputs import SMALL, special_rows, tricky
from . import cute_objects, triton_prepare

THEIRS = "flash-attn-4"
OURS = {"triton": False, "triton, fused": True}  # the compiler of theirs may fuse a product with its sum, or not
WIDE = 256  # heads of which flash-attn-4 takes blocks of 48 keys
SEARCHED = 256  # sequences from which on flash-attn-4 is told of each where its blocks begin: more than these


class Tiles(NamedTuple):
    """Of flash-attn-4's backward what has to be known to call it. Where it is compiled, it is compared with what that
    has itself (cute_backward_kernel.py), which takes seconds to import.

    rows, keys      of a block
    threads         that convert dq
    atoms, swapped  of the product that dq is
    multiple        what a width of dq's sums is a multiple of
    wide            whether blocks of keys and the loop over queries are not flash-attn-4's
    """

    rows: int
    keys: int
    threads: int
    atoms: int
    swapped: bool
    multiple: int
    wide: bool = False


def tiles(d: int, dv: int, causal: bool) -> Tiles:
    """For heads of these widths without a window."""
    if d == dv == WIDE:
        return Tiles(64, 64, 256, 1, False, 32, wide=True)
    if d <= 64:
        return Tiles(128, 128, 256, 2, False, 32)
    if d <= 96:
        return Tiles(64, 128, 128, 1, False, 32)
    if d <= 128:
        return Tiles(64, 128, 256, 1, False, 32) if causal else Tiles(80, 128, 256, 1, True, 32)
    return Tiles(64, 96 if d <= 192 else 48, 256, 1, False, 64)


def _blocks_until(cu_seqlens: Tensor, rows: int) -> Tensor | None:
    """How many blocks of rows the sequences up to each have, where they are so many that a search pays."""
    if len(cu_seqlens) - 1 <= SEARCHED:
        return None
    until = torch.empty_like(cu_seqlens)

    def make():
        from .cute_backward_kernel import compiled_blocks

        return compiled_blocks(until, cu_seqlens, rows)

    cute_objects.kernel("blocks", until.device, (rows,), make, _versions)(until, None, cu_seqlens, None, None, None)
    return until


@cache
def _versions() -> str:
    """Of flash-attn-4's own kernels, as they are compiled here: it would do that in every process anew."""
    files = __file__, Path(__file__).with_name("cute_backward_kernel.py")
    return digest.of_files(*files, **{name: digest.version(name) for name in cute_objects.STACK})


def _prepare(
    name: str, out: Tensor, dout: Tensor, lse: Tensor, cu_seqlens: Tensor, until: Tensor | None, lse_2: Tensor,
    dpsum: Tensor, sums: Tensor, rows: int, d: int, multiple: int,
) -> None:  # fmt: skip
    """Of each block of rows: out * dout summed over a row, lse in binary logarithms, and zeros where dq is summed."""
    if name != THEIRS:
        triton_prepare.prepare(out, dout, lse, cu_seqlens, lse_2, dpsum, sums, rows, OURS[name])
        return
    # sequences by their offsets; with dq's sums and binary logarithms; offsets padded; no heads packed
    how = d, out.shape[2], rows, True, False, False, True, False, True, True, False, False, 1, 1
    key = out.dtype, *how, until is not None, multiple, False

    def make():
        from .cute_backward_kernel import compiled_before

        return compiled_before(*key)

    kernel = cute_objects.kernel("backward, before", out.device, key, make, _versions)
    kernel(out, dout, dpsum, lse, lse_2, sums, cu_seqlens, None, None, None, None, 1.0, until, None)


def _convert(
    sums: Tensor, dq: Tensor, scale: float, cu_seqlens: Tensor, until: Tensor | None, tile: Tiles
) -> None:  # fmt: skip
    """dq = sums * scale, rounded."""
    how = dq.shape[2], tile.rows, tile.threads, tile.atoms, tile.swapped, True, False, False, 1, 90
    key = dq.dtype, *how, until is not None, None, tile.multiple, None

    def make():
        from .cute_backward_kernel import compiled_after

        return compiled_after(*key)

    kernel = cute_objects.kernel("backward, after", dq.device, key, make, _versions)
    kernel(sums, dq, scale, cu_seqlens, None, None, until)


def _rooms(rows: int, d: int, multiple: int, tokens: int, heads: int, sequences: int, device: torch.device):
    """Where `_prepare` writes: lse_2, dpsum and sums, and how many blocks of rows they have."""
    blocks = -(-(tokens + (sequences + 1) * rows) // rows)
    lse_2, dpsum = torch.empty(2, heads, blocks * rows, dtype=torch.float32, device=device)
    sums = torch.empty(heads, blocks * rows * (-(-d // multiple) * multiple), dtype=torch.float32, device=device)
    return (lse_2, dpsum, sums), blocks


def prepared_by(device: torch.device, dtype: torch.dtype, d: int, dv: int, causal: bool) -> Decision:
    rows = tiles(d, dv, causal).rows
    if dv not in triton_prepare.WIDTHS or rows & (rows - 1):
        return canonical_by_rule(THEIRS, "ours takes values of other widths, and blocks of a power of two rows")
    return _preparing(device, dtype, d, dv, causal)


@decided
def _preparing(device: torch.device, dtype: torch.dtype, d: int, dv: int, causal: bool) -> Proposal:
    rows, multiple = (tile := tiles(d, dv, causal)).rows, tile.multiple

    def run(name: str) -> Callable:
        def call(out, dout, lse, cu):
            where, _ = _rooms(rows, d, multiple, *out.shape[:2], len(cu) - 1, device)
            for t in where:
                t.fill_(3.0)  # what is not written is compared too
            _prepare(name, out, dout, lse, cu, _blocks_until(cu, rows), *where, rows, d, multiple)
            return where

        return call

    def race(candidates: Sequence[Candidate], case: tuple) -> list[float | Exception]:
        cu = case[-1]
        where, _ = _rooms(rows, d, multiple, *case[0].shape[:2], len(cu) - 1, device)
        given = *case, _blocks_until(cu, rows), *where, rows, d, multiple
        return race_on_gpu([[partial(_prepare, one.name, *given)] * 4 for one in candidates])

    theirs = Candidate(THEIRS, run(THEIRS), _versions())
    source = digest.of_files(__file__, triton_prepare.__file__, triton=digest.version("triton"))
    return Proposal(
        f"attention_bwd_prepare {str(dtype).removeprefix('torch.')} D={d},{dv} {rows} rows",
        [*(Candidate(name, run(name), source) for name in OURS), theirs],
        theirs,
        lambda: _preparing_cases(device, dtype, dv),
        race,
        ahead=False,
    )


def _preparing_cases(device: torch.device, dtype: torch.dtype, dv: int) -> list[tuple]:
    """Rows whose products cancel; sequences of one token, of none, and so many that they are searched; special rows of
    either factor; logarithms of all kinds. The last one is as a batch is."""

    def case(lengths: list[int], special: Sequence[str] = (), heads: int = 3) -> tuple:
        shape, seed = (sum(lengths), heads, dv), len(lengths)
        out, dout = (tricky(*shape, seed=seed + i, dtype=torch.float32, device=device) for i in range(2))
        order = torch.randperm(dv, generator=torch.Generator().manual_seed(seed)).to(device)
        out[..., dv // 2 :], dout[..., dv // 2 :] = out[..., : dv // 2], -dout[..., : dv // 2]
        out, dout = (x[..., order].to(dtype).contiguous() for x in (out, dout))
        lse = tricky(heads, sum(lengths), seed=seed + 2, device=device)
        if special:
            out, dout = special_rows(out, kinds=special), special_rows(dout, first=1, seed=1, kinds=special)
            for start, value in enumerate((float("-inf"), float("inf"), float("nan"))):
                lse[:, start::7] = value
        return out, dout, lse, offsets(lengths, device)

    every = "one nan", "one inf", "inf and -inf", "largest", "one largest", *SMALL
    few = [case([700, 1, 0, 130, 64, 63]), case([1]), case([33, 200, 5], SMALL), case([90, 129], every)]
    out = torch.randn(8192, 16, dv, dtype=torch.float32, device=device).to(dtype)
    timed = out, out.flip(0), out[..., 0].t().float().contiguous(), offsets([1024] * 8, device)
    return [*few, case([i % 5 for i in range(300)], heads=1), timed]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    cu_seqlens_k: Tensor, scale: float, causal: bool, versions: Callable[[], str],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv; lse (Hq, T), in natural logarithms. The offsets are in order and inside their tensors."""
    (tokens, heads, d), dv_width, device = q.shape, v.shape[2], q.device
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel() == 0 or k.numel() == 0:
        return dq.zero_(), dk.zero_(), dv.zero_()
    tile = tiles(d, dv_width, causal)
    rows, multiple = tile.rows, tile.multiple
    where, blocks = _rooms(rows, d, multiple, tokens, heads, len(cu_seqlens) - 1, device)
    lse_2, dpsum, sums = where
    turns = torch.zeros(heads, blocks, 1, dtype=torch.int32, device=device)
    until, until_k = _blocks_until(cu_seqlens, rows), _blocks_until(cu_seqlens_k, tile.keys)
    name = prepared_by(device, q.dtype, d, dv_width, causal).chosen.name
    _prepare(name, out, dout, lse, cu_seqlens, until, *where, rows, d, multiple)
    tensors, ends = (q, k, v, dout, lse_2, dpsum, sums, dk, dv), (cu_seqlens, cu_seqlens_k)
    key = q.dtype, heads // k.shape[1], d, dv_width, causal, until_k is None

    def make():
        from .cute_backward_kernel import compiled

        return compiled((tile, SEARCHED), tensors, ends, turns, until_k, causal)

    kernel = cute_objects.kernel("backward", device, key, make, versions)
    kernel(*tensors, scale, *ends, turns, until_k)
    _convert(sums, dq, scale, cu_seqlens, until, tile)
    return dq, dk, dv
