"""flash-attn-4's backward on packed sequences, in an order of our own, which is repeatable and costs nothing.

A thread block takes 128 keys of one head of keys and goes through the blocks of queries that see them, from the last to
the first, each for all the heads that share these keys. So dk and dv are sums in registers (order: blocks of queries
descending, heads ascending), written once; nothing is added up in memory, zeroed before or converted behind. dq is
added up in memory, a block of queries of a head at a time (order: blocks of keys ascending): whose turn it is is
counted. Blocks of the first keys, which most queries see, begin first and are ahead of those that wait for them, since
all take the queries at the same pace.

What its rows are given beside comes from flash-attn-4's own kernel before it, or from one of ours with that one's bytes
(triton_prepare.py), whichever is faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.pipeline import PipelineUserType, make_pipeline_state
from flash_attn.cute import barrier
from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.cu_blocks_kernel import CuSeqlensToBlocksKernel
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned, to_cute_tensor
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.interface import (
    BIN_BATCH_SEARCH_THRESH,
    _compile_bwd_postprocess,
    _compile_bwd_preprocess,
    _tile_size_bwd_sm90,
)
from flash_attn.cute.named_barrier import NamedBarrierBwd
from flash_attn.cute.tile_scheduler import SingleTileVarlenScheduler, TileSchedulerArguments
from flash_attn.cute.utils import AuxData
from quack import copy_utils, layout_utils
from torch import Tensor

from .._core import digest
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided, race_on_gpu
from .._core.proof.attention import offsets
from .._core.proof.inputs import SMALL, special_rows, tricky
from . import cute_objects, triton_prepare

_LOG2_E = 1.4426950408889634
THEIRS = "flash-attn-4"
OURS = {"triton": False, "triton, fused": True}  # the compiler of theirs may fuse a product with its sum, or not
_DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


@dataclass(frozen=True)
class _Rounds(BlockInfo):
    """What a thread block goes through, as the loop of flash-attn-4 asks for it: numbers from 0 on, each a block of
    queries and a head of the kernel's. The kernel is told where the blocks end."""

    kernel: cutlass.Constexpr = None

    def get_m_block_min_max(self, seqlen, n_block):
        low, self.kernel.end = BlockInfo.get_m_block_min_max(self, seqlen, n_block)
        return Int32(0), (self.kernel.end - low) * self.kernel.group


class Backward(FlashAttentionBackwardSm90):
    """group: heads that share keys."""

    def __init__(self, *args, group: int, **kwargs):
        super().__init__(*args, qhead_per_kvhead=1, deterministic=True, **kwargs)
        self.group = group

    @cute.jit
    def __call__(self, mQ, mK, mV, mdO, mLSE, mdPsum, mdQ, mdK, mdV, scale, at, at_k, turns, until, stream):
        self.varlen_k = self.is_varlen_q = True
        self.use_block_sparsity = False
        mQ, mK, mV, mdO, mLSE, mdPsum, mdQ, mdK, mdV = [
            assume_tensor_aligned(t) for t in (mQ, mK, mV, mdO, mLSE, mdPsum, mdQ, mdK, mdV)
        ]
        mQ, mK, mV, mdO, mdK, mdV = [layout_utils.select(t, [0, 2, 1]) for t in (mQ, mK, mV, mdO, mdK, mdV)]
        mLSE, mdPsum, mdQ = [layout_utils.select(t, [1, 0]) for t in (mLSE, mdPsum, mdQ)]
        mma_s, mma_dk, mma_dv, mma_dq = self._get_tiled_mma()
        self.num_mma_threads = mma_s.size
        self.num_threads_per_warp_group = 128
        self.num_producer_threads = 32
        self.num_mma_regs_wg0 = 256 if self.num_wg_dQ < self.num_wg_mma else 240
        self.num_mma_regs_wg1 = 224 if self.num_wg_dQ < self.num_wg_mma else 240
        self.num_mma_regs = self.num_mma_regs_wg0
        self.num_producer_regs = 24
        self._setup_attributes()
        self.tma_copy_bytes = {
            name: cute.size_in_bytes(t.element_type, cute.select(layout, mode=[0, 1]))
            for name, t, layout in (
                ("Q", mQ, self.sQ_layout),
                ("K", mK, self.sK_layout),
                ("V", mV, self.sV_layout),
                ("dO", mdO, self.sdO_layout),
            )
        }
        self.tma_copy_bytes["LSE"] = self.tma_copy_bytes["dPsum"] = self.tile_m * 4
        self.tma_copy_bytes["dQ"] = self.tile_m * self.tile_hdim * 4 // self.num_wg_dQ
        fetch, put = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        ragged = partial(copy_utils.create_ragged_tensor_for_tma, ragged_dim=0, ptr_shift=True)
        copies = [
            cpasync.make_tiled_tma_atom(op, t, cute.select(layout, mode=[0, 1]), shape)
            for op, t, layout, shape in (
                (fetch, mQ, self.sQ_layout, (self.tile_m, self.tile_hdim)),
                (fetch, mK, self.sK_layout, (self.tile_n, self.tile_hdim)),
                (fetch, mV, self.sV_layout, (self.tile_n, self.tile_hdimv)),
                (fetch, mdO, self.sdO_layout, (self.tile_m, self.tile_hdimv)),
                (put, ragged(mdK), self.sK_layout, (self.tile_n, self.tile_hdim)),
                (put, ragged(mdV), self.sV_layout, (self.tile_n, self.tile_hdimv)),
            )
        ]
        keys, sequences = cute.size(mK.shape[0]), cute.size(at_k.shape[0]) - 1
        tiling = TileSchedulerArguments(
            cute.ceil_div(keys, self.tile_n), cute.size(mK.shape[2]), sequences, 1, cute.size(mQ.shape[0]), mQ.shape[1],
            mV.shape[1], total_q=keys, tile_shape_mn=(self.tile_n, self.tile_m), mCuSeqlensQ=at_k, mSeqUsedQ=None,
            qhead_per_kvhead_packgqa=1, element_size=2, is_persistent=False, lpt=False, head_swizzle=True,
            cu_total_m_blocks_ptr=until,
        )  # fmt: skip
        params = SingleTileVarlenScheduler.to_underlying_arguments(tiling)
        tensors = [tensor for _, tensor in copies] + [atom for atom, _ in copies]
        numbers = mLSE, mdPsum, mdQ, at, at_k, None, None
        layouts = (
            self.sQ_layout, self.sK_layout, self.sV_layout, self.sPdS_layout, self.sdO_layout, self.sdQaccum_layout,
            self.r2s_tiled_copy_dQaccum,
        )  # fmt: skip
        products = mma_s, mma_dk, mma_dv, mma_dq, scale * _LOG2_E, scale
        schedule = params, SingleTileVarlenScheduler, self._get_shared_storage_cls()
        others = AuxData(), None, None, None, turns, None, None, None, None
        self.kernel(*tensors, *numbers, *layouts, *products, *schedule, *others).launch(
            grid=SingleTileVarlenScheduler.get_grid_shape(params),
            block=[self.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    def mma(self, *args, is_dQ_wg=True):
        rounds = [_Rounds(**vars(x), kernel=self) if isinstance(x, BlockInfo) else x for x in args]
        FlashAttentionBackwardSm90.mma(self, *rounds, is_dQ_wg=is_dQ_wg)

    def mma_one_m_block(self, m_block, *args, **kwargs):
        m_block, _ = self.place(m_block, self.end)
        return FlashAttentionBackwardSm90.mma_one_m_block(self, m_block, *args, **kwargs)

    def place(self, i, end):
        """The block of queries of a round, and which of the heads."""
        return end - 1 - i // self.group, i % self.group  # order: blocks from the last to the first; heads ascending

    @cute.jit
    def load(
        self, mQ, mK, mV, mdO, mLSE, mdPsum, sQ, sK, sV, sdO, sLSE, sdPsum, tma_atom_Q, tma_atom_K, tma_atom_V,
        tma_atom_dO, pipeline_Q, pipeline_dO, block_info, SeqlenInfoCls, TileSchedulerCls, blocksparse_tensors=None,
        qhead_per_kvhead_divmod=None,
    ):  # fmt: skip
        q_state = make_pipeline_state(PipelineUserType.Producer, self.Q_stage)
        do_state = make_pipeline_state(PipelineUserType.Producer, self.dO_stage)
        work_tile = TileSchedulerCls().initial_work_tile_info()
        if work_tile.is_valid_tile:  # packed sequences: a block has one tile
            n_block, head_kv, batch_idx, _ = work_tile.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            one = cute.make_layout(1)
            k_shape, v_shape = (self.tile_n, self.tile_hdim), (self.tile_n, self.tile_hdimv)
            gK = cute.local_tile(
                seqlen.offset_batch_K(mK, batch_idx, dim=3)[None, None, head_kv], k_shape, (n_block, 0)
            )
            gV = cute.local_tile(
                seqlen.offset_batch_K(mV, batch_idx, dim=3)[None, None, head_kv], v_shape, (n_block, 0)
            )
            load_k, _, _ = copy_utils.tma_get_copy_fn(tma_atom_K, 0, one, gK, sK, single_stage=True)
            load_v, _, _ = copy_utils.tma_get_copy_fn(tma_atom_V, 0, one, gV, sV, single_stage=True)
            q_shape, do_shape = (self.tile_m, self.tile_hdim), (self.tile_m, self.tile_hdimv)
            gQ = cute.local_tile(seqlen.offset_batch_Q(mQ, batch_idx, dim=3), q_shape, (None, 0, None))
            gdO = cute.local_tile(seqlen.offset_batch_Q(mdO, batch_idx, dim=3), do_shape, (None, 0, None))
            load_q, _, _ = copy_utils.tma_get_copy_fn(tma_atom_Q, 0, one, cute.group_modes(gQ, 2, 4), sQ)
            load_do, _, _ = copy_utils.tma_get_copy_fn(tma_atom_dO, 0, one, cute.group_modes(gdO, 2, 4), sdO)
            lse = seqlen.offset_batch_Q(mLSE, batch_idx, dim=2, padded=True)
            dpsum = seqlen.offset_batch_Q(mdPsum, batch_idx, dim=2, padded=True)
            low, end = block_info.get_m_block_min_max(seqlen, n_block)
            count = (end - low) * self.group
            fetch = partial(
                self.fetch, end=end, head_kv=head_kv, lse=lse, dpsum=dpsum, sLSE=sLSE, sdPsum=sdPsum,
                loads=(load_k, load_v, load_q, load_do), pipelines=(pipeline_Q, pipeline_dO),
            )  # fmt: skip
            if count > 0:
                fetch(Int32(0), q_state, do_state if const_expr(self.Q_stage != self.dO_stage) else q_state, first=True)
                q_state.advance()
                do_state.advance()
                for i in cutlass.range(1, count, unroll=1):
                    fetch(i, q_state, do_state if const_expr(self.Q_stage != self.dO_stage) else q_state, first=False)
                    q_state.advance()
                    do_state.advance()

    @cute.jit
    def fetch(
        self, i, q_state, do_state, first: cutlass.Constexpr, end, head_kv, lse, dpsum, sLSE, sdPsum, loads, pipelines
    ):
        load_k, load_v, load_q, load_do = loads
        pipeline_q, pipeline_do = pipelines
        m_block, one = self.place(i, end)
        head = head_kv * self.group + one
        gLSE = cute.local_tile(lse[None, head], (self.tile_m,), (None,))
        gdPsum = cute.local_tile(dpsum[None, head], (self.tile_m,), (None,))
        load_lse = copy_utils.cpasync_bulk_get_copy_fn(gLSE, sLSE)
        load_dpsum = copy_utils.cpasync_bulk_get_copy_fn(gdPsum, sdPsum)
        pipeline_q.producer_acquire(q_state, extra_tx_count=self.tma_copy_bytes["K"] if const_expr(first) else 0)
        bar = pipeline_q.producer_get_barrier(q_state)
        if const_expr(first):
            load_k(tma_bar_ptr=bar)
        load_q(src_idx=(m_block, head), dst_idx=q_state.index, tma_bar_ptr=bar)
        if const_expr(first):  # what is made of out and dout comes from the kernel before
            cute.arch.griddepcontrol_wait()
        load_lse(src_idx=m_block, dst_idx=q_state.index, tma_bar_ptr=bar)
        pipeline_do.producer_acquire(do_state, extra_tx_count=self.tma_copy_bytes["V"] if const_expr(first) else 0)
        bar = pipeline_do.producer_get_barrier(do_state)
        if const_expr(first):
            load_v(tma_bar_ptr=bar)
        load_do(src_idx=(m_block, head), dst_idx=do_state.index, tma_bar_ptr=bar)
        load_dpsum(src_idx=m_block, dst_idx=do_state.index, tma_bar_ptr=bar)

    @cute.jit
    def dQaccum_store(
        self, mdQaccum, sdQaccum, block_info, TileSchedulerCls, SeqlenInfoCls, blocksparse_tensors=None,
        mdQ_semaphore=None,
    ):  # fmt: skip
        lane = cute.arch.thread_idx()[0] % cute.arch.WARP_SIZE
        threads = const_expr(self.num_threads_per_warp_group + cute.arch.WARP_SIZE)
        work_tile = TileSchedulerCls().initial_work_tile_info()
        if work_tile.is_valid_tile:
            n_block, head_kv, batch_idx, _ = work_tile.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            first = seqlen.padded_offset_q // self.tile_m
            share = cute.make_layout((self.tile_m * self.tile_hdim // self.num_wg_dQ, self.num_wg_dQ))
            low, end = block_info.get_m_block_min_max(seqlen, n_block)
            count = (end - low) * self.group
            for i in cutlass.range(count, unroll=1):
                m_block, one = self.place(i, end)
                head = head_kv * self.group + one
                gdQ = cute.local_tile(mdQaccum[None, head], (share,), (None,))
                turn = mdQ_semaphore[(head, first + m_block, None)].iterator
                for wg in cutlass.range_constexpr(self.num_wg_dQ):
                    empty = int(NamedBarrierBwd.dQEmptyWG0) + wg
                    cute.arch.barrier_arrive(barrier_id=empty, number_of_threads=threads)
                barrier.wait_eq(turn, lane, 0, n_block)  # order: blocks of keys from the first to the last
                for wg in cutlass.range_constexpr(self.num_wg_dQ):
                    full = int(NamedBarrierBwd.dQFullWG0) + wg
                    cute.arch.barrier(barrier_id=full, number_of_threads=threads)
                    with cute.arch.elect_one():
                        copy_utils.cpasync_reduce_bulk_add_f32(
                            sdQaccum[None, wg].iterator,
                            gdQ[(None, wg), first + m_block].iterator,
                            self.tma_copy_bytes["dQ"],
                        )
                    cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                barrier.arrive_inc(turn, lane, 0, 1)


def _compile(config, tensors: tuple, offsets: tuple, turns: Tensor, until: Tensor | None, causal: bool):
    q, k, v = tensors[:3]
    kernel = Backward(
        _DTYPES[q.dtype], q.shape[2], v.shape[2], group=q.shape[1] // k.shape[1], is_causal=causal,
        tile_m=config.m_block_size, tile_n=config.n_block_size, Q_stage=config.num_stages_Q,
        dO_stage=config.num_stages_dO, PdS_stage=config.num_stages_PdS, SdP_swapAB=config.SdP_swapAB,
        dKV_swapAB=config.dKV_swapAB, dQ_swapAB=config.dQ_swapAB, AtomLayoutMSdP=config.AtomLayoutMSdP,
        AtomLayoutNdKV=config.AtomLayoutNdKV, AtomLayoutMdQ=config.AtomLayoutMdQ,
        num_threads=(config.num_wg + 1) * 128, dQ_single_wg=config.dQ_single_wg,
    )  # fmt: skip
    numbers = [None if t is None else to_cute_tensor(t, assumed_align=4) for t in (*offsets, turns, until)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, *[to_cute_tensor(t) for t in tensors], 1.0, *numbers, stream, options="--enable-tvm-ffi"
    )


def _blocks_until(cu_seqlens: Tensor, rows: int) -> Tensor | None:
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

    cute_objects.kernel("blocks", until.device, (rows,), make, _versions)(until, None, cu_seqlens, None, None, None)
    return until


@cache
def _versions() -> str:
    """Of flash-attn-4's own kernels, as they are compiled here: it would do that in every process anew."""
    return digest.of_files(__file__, **{name: digest.version(name) for name in cute_objects.STACK})


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
    make = partial(_compile_bwd_preprocess, _DTYPES[out.dtype], *key[1:])
    kernel = cute_objects.kernel("backward, before", out.device, key, make, _versions)
    kernel(out, dout, dpsum, lse, lse_2, sums, cu_seqlens, None, None, None, None, 1.0, until, None)


def _convert(
    sums: Tensor, dq: Tensor, scale: float, cu_seqlens: Tensor, until: Tensor | None, rows: int, multiple: int, config
) -> None:  # fmt: skip
    """dq = sums * scale, rounded."""
    threads = 128 if config.dQ_single_wg else config.num_wg * 128
    how = dq.shape[2], rows, threads, config.AtomLayoutMdQ, config.dQ_swapAB, True, False, False, 1, 90
    key = dq.dtype, *how, until is not None, None, multiple, None
    make = partial(_compile_bwd_postprocess, _DTYPES[dq.dtype], *key[1:])
    kernel = cute_objects.kernel("backward, after", dq.device, key, make, _versions)
    kernel(sums, dq, scale, cu_seqlens, None, None, until)


def _rooms(rows: int, d: int, multiple: int, tokens: int, heads: int, sequences: int, device: torch.device):
    """Where `_prepare` writes: lse_2, dpsum and sums, and how many blocks of rows they have."""
    blocks = -(-(tokens + (sequences + 1) * rows) // rows)
    lse_2, dpsum = torch.empty(2, heads, blocks * rows, dtype=torch.float32, device=device)
    sums = torch.empty(heads, blocks * rows * (-(-d // multiple) * multiple), dtype=torch.float32, device=device)
    return (lse_2, dpsum, sums), blocks


def _layout(d: int, dv: int, causal: bool):
    """flash-attn-4's tiles, rows of a block, and what a width of dq's sums is a multiple of."""
    config = _tile_size_bwd_sm90(d, dv, causal, False)
    return config, config.m_block_size, 64 if config.dKV_swapAB else 32


def prepared_by(device: torch.device, dtype: torch.dtype, d: int, dv: int, causal: bool) -> Decision:
    rows = _layout(d, dv, causal)[1]
    if dv not in triton_prepare.WIDTHS or rows & (rows - 1):
        return canonical_by_rule(THEIRS, "ours takes values of other widths, and blocks of a power of two rows")
    return _preparing(device, dtype, d, dv, causal)


@decided
def _preparing(device: torch.device, dtype: torch.dtype, d: int, dv: int, causal: bool) -> Proposal:
    _, rows, multiple = _layout(d, dv, causal)

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
    config, rows, multiple = _layout(d, dv_width, causal)
    where, blocks = _rooms(rows, d, multiple, tokens, heads, len(cu_seqlens) - 1, device)
    lse_2, dpsum, sums = where
    turns = torch.zeros(heads, blocks, 1, dtype=torch.int32, device=device)
    until, until_k = _blocks_until(cu_seqlens, rows), _blocks_until(cu_seqlens_k, config.n_block_size)
    name = prepared_by(device, q.dtype, d, dv_width, causal).chosen.name
    _prepare(name, out, dout, lse, cu_seqlens, until, *where, rows, d, multiple)
    tensors, ends = (q, k, v, dout, lse_2, dpsum, sums, dk, dv), (cu_seqlens, cu_seqlens_k)
    key = q.dtype, heads // k.shape[1], d, dv_width, causal, until_k is None
    make = partial(_compile, config, tensors, ends, turns, until_k, causal)
    kernel = cute_objects.kernel("backward", device, key, make, versions)
    kernel(*tensors, scale, *ends, turns, until_k)
    _convert(sums, dq, scale, cu_seqlens, until, rows, multiple, config)
    return dq, dk, dv
