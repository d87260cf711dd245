"""What flash-attn-4's backward is given beside its tensors: sums of rows, logarithms, where blocks begin; and which
kernel makes it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import cutlass.cute as cute
import torch
from flash_attn.cute.cu_blocks_kernel import CuSeqlensToBlocksKernel
from flash_attn.cute.cute_dsl_utils import to_cute_tensor
from flash_attn.cute.interface import BIN_BATCH_SEARCH_THRESH, _compile_bwd_preprocess, _tile_size_bwd_sm90
from torch import Tensor

from .._core import digest
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided, race_on_gpu
from .._core.proof.attention import offsets
from .._core.proof.inputs import SMALL, special_rows, tricky
from . import cute_objects, triton_prepare
from .cute_objects import DTYPES

THEIRS = "flash-attn-4"
OURS = {"triton": False, "triton, fused": True}  # the compiler of theirs may fuse a product with its sum, or not
_CALLER = Path(__file__).with_name("cute_backward.py")  # it compiles some of them too


def blocks_until(cu_seqlens: Tensor, rows: int) -> Tensor | None:
    """How many blocks of rows the sequences up to each have, where they are so many that a search pays."""
    if len(cu_seqlens) - 1 <= BIN_BATCH_SEARCH_THRESH:
        return None
    until = torch.empty_like(cu_seqlens)

    def make():
        tensors = [to_cute_tensor(t, assumed_align=4, leading_dim=0) for t in (until, cu_seqlens)]
        return cute.compile(
            CuSeqlensToBlocksKernel(tile=rows, seqlen_q_multiplier=1), tensors[0], None, tensors[1], None, None, None,
            cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi",
        )  # fmt: skip

    cute_objects.kernel("blocks", until.device, (rows,), make, stack)(until, None, cu_seqlens, None, None, None)
    return until


@cache
def stack() -> str:
    """Of flash-attn-4's own kernels, as they are compiled here: it would do that in every process anew."""
    return digest.of_files(__file__, str(_CALLER), **{name: digest.version(name) for name in cute_objects.STACK})


def prepare(
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
    make = partial(_compile_bwd_preprocess, DTYPES[out.dtype], *key[1:])
    kernel = cute_objects.kernel("backward, before", out.device, key, make, stack)
    kernel(out, dout, dpsum, lse, lse_2, sums, cu_seqlens, None, None, None, None, 1.0, until, None)


def rooms_of(rows: int, d: int, multiple: int, tokens: int, heads: int, sequences: int, device: torch.device):
    """Where `_prepare` writes: lse_2, dpsum and sums, and how many blocks of rows they have."""
    blocks = -(-(tokens + (sequences + 1) * rows) // rows)
    lse_2, dpsum = torch.empty(2, heads, blocks * rows, dtype=torch.float32, device=device)
    sums = torch.empty(heads, blocks * rows * (-(-d // multiple) * multiple), dtype=torch.float32, device=device)
    return (lse_2, dpsum, sums), blocks


def is_wide(d: int, dv: int) -> bool:
    """Whether heads are such that blocks of keys are larger than flash-attn-4's."""
    return d == dv == 256


def layout_of(d: int, dv: int, causal: bool):
    """Tiles, flash-attn-4's but for wide heads, rows of a block, and what a width of dq's sums is a multiple of."""
    config = _tile_size_bwd_sm90(d, dv, causal, False)
    if is_wide(d, dv):
        config = replace(config, n_block_size=64, dKV_swapAB=False)
    return config, config.m_block_size, 64 if config.dKV_swapAB else 32


def prepared_by(device: torch.device, dtype: torch.dtype, d: int, dv: int, causal: bool) -> Decision:
    rows = layout_of(d, dv, causal)[1]
    if dv not in triton_prepare.WIDTHS or rows & (rows - 1):
        return canonical_by_rule(THEIRS, "ours takes values of other widths, and blocks of a power of two rows")
    return _preparing(device, dtype, d, dv, causal)


@decided
def _preparing(device: torch.device, dtype: torch.dtype, d: int, dv: int, causal: bool) -> Proposal:
    _, rows, multiple = layout_of(d, dv, causal)

    def run(name: str) -> Callable:
        def call(out, dout, lse, cu):
            where, _ = rooms_of(rows, d, multiple, *out.shape[:2], len(cu) - 1, device)
            for t in where:
                t.fill_(3.0)  # what is not written is compared too
            prepare(name, out, dout, lse, cu, blocks_until(cu, rows), *where, rows, d, multiple)
            return where

        return call

    def race(candidates: Sequence[Candidate], case: tuple) -> list[float | Exception]:
        cu = case[-1]
        where, _ = rooms_of(rows, d, multiple, *case[0].shape[:2], len(cu) - 1, device)
        given = *case, blocks_until(cu, rows), *where, rows, d, multiple
        return race_on_gpu([[partial(prepare, one.name, *given)] * 4 for one in candidates])

    theirs = Candidate(THEIRS, run(THEIRS), stack())
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
