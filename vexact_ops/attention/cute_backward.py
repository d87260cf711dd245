"""flash-attn-4's backward on packed sequences, in an order of our own, which is repeatable and costs nothing.

A thread block takes 128 keys of one head of keys and goes through the blocks of queries that see them, from the last to
the first, each for all the heads that share these keys. So dk and dv are sums in registers (order: blocks of queries
descending, heads ascending), written once; nothing is added up in memory, zeroed before or converted behind. dq is
added up in memory, a block of queries of a head at a time (order: blocks of keys ascending): whose turn it is is
counted. Blocks of the first keys, which most queries see, begin first and are ahead of those that wait for them, since
all take the queries at the same pace.

Wide heads may have a kernel of its own for dq, with the same bits, where that is faster (cute_backward_apart.py).

What its rows are given beside comes from flash-attn-4's own kernel before it, or from one of ours with that one's bytes
(triton_prepare.py), whichever is faster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import PipelineUserType, make_pipeline_state
from flash_attn.cute import barrier, utils
from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned, to_cute_tensor
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.interface import _compile_bwd_postprocess
from flash_attn.cute.named_barrier import NamedBarrierBwd
from flash_attn.cute.tile_scheduler import SingleTileVarlenScheduler, TileSchedulerArguments
from flash_attn.cute.utils import AuxData
from quack import copy_utils, layout_utils
from torch import Tensor

from .._core import digest
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided, race_on_gpu
from .._core.proof.attention import offsets
from .._core.proof.inputs import SMALL, special_rows
from . import cute_backward_apart, cute_objects, cute_prepare
from .cute_backward_apart import GROUPS, QueryGradient
from .cute_objects import DTYPES
from .cute_prepare import THEIRS, blocks_until, layout_of, prepare, prepared_by, rooms_of, stack

_LOG2_E = 1.4426950408889634
WIDE = 256  # heads of which flash-attn-4 takes blocks of 48 keys: two kernels may be faster than one
ONE = "one kernel"


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
            if count > 0:
                for wg in cutlass.range_constexpr(self.num_wg_dQ):
                    self.emptied(wg)
            for i in cutlass.range(count, unroll=1):
                m_block, one = self.place(i, end)
                head = head_kv * self.group + one
                gdQ = cute.local_tile(mdQaccum[None, head], (share,), (None,))
                turn = mdQ_semaphore[(head, first + m_block, None)].iterator
                for wg in cutlass.range_constexpr(self.num_wg_dQ):
                    barrier.wait_eq(turn, lane, wg, n_block)  # order: blocks of keys from the first to the last
                    full = int(NamedBarrierBwd.dQFullWG0) + wg
                    cute.arch.barrier(barrier_id=full, number_of_threads=threads)
                    with cute.arch.elect_one():
                        copy_utils.cpasync_reduce_bulk_add_f32(
                            sdQaccum[None, wg].iterator,
                            gdQ[(None, wg), first + m_block].iterator,
                            self.tma_copy_bytes["dQ"],
                        )
                    cute.arch.cp_async_bulk_commit_group()
                for wg in cutlass.range_constexpr(self.num_wg_dQ):  # what has been read may be written
                    cute.arch.cp_async_bulk_wait_group(self.num_wg_dQ - 1 - wg, read=True)
                    if i + 1 < count:
                        self.emptied(wg)
                for wg in cutlass.range_constexpr(self.num_wg_dQ):  # what has been added is the next block's to add to
                    cute.arch.cp_async_bulk_wait_group(self.num_wg_dQ - 1 - wg, read=False)
                    barrier.arrive_inc(turn, lane, wg, 1)

    def emptied(self, wg):
        cute.arch.barrier_arrive(
            barrier_id=int(NamedBarrierBwd.dQEmptyWG0) + wg,
            number_of_threads=self.num_threads_per_warp_group + cute.arch.WARP_SIZE,
        )


class KeyGradients(Backward):
    """dk and dv alone: cute_backward_apart.py has dq's kernel."""

    ahead = False  # whether a round begins before the product of the one before is through

    def _setup_attributes(self):
        super()._setup_attributes()
        self.sdQaccum_layout = cute.make_layout((32, self.num_wg_dQ))  # there is none
        stages = self.Q_stage, self.dO_stage, self.PdS_stage
        if self.mma_dkv_is_rs or self.shuffle_LSE or self.shuffle_dPsum or (self.ahead and stages != (2, 2, 2)):
            raise AssertionError("a case that the loop below does not know")

    def mma(self, *args, is_dQ_wg=True):
        if self.ahead:
            self.scale = args[25]
            self.qhead_per_kvhead = 2  # then flash-attn-4's loop does not scale dk, which is not there yet
        super().mma(*args, is_dQ_wg=False)

    @cute.jit
    def epilogue_dKV(self, acc_dV, mdV, sV, acc_dK, *rest):
        if const_expr(self.ahead):
            self.qhead_per_kvhead = 1
            warpgroup.wait_group(0)
            acc_dK.store(acc_dK.load() * self.scale)
        Backward.epilogue_dKV(self, acc_dV, mdV, sV, acc_dK, *rest)
        if const_expr(self.ahead):  # it is asked for in two places
            self.qhead_per_kvhead = 2

    def dQaccum_store(self, *args):
        pass

    @cute.jit
    def mma_one_m_block(
        self, m_block, q_state, do_state, warp_group_idx, mma_qk_fn, mma_dov_fn, mma_pdo_fn, mma_dsq_fn, mma_dsk_fn,
        copy_P_r2s, copy_dS_r2s, pipeline_Q, pipeline_dO, tLSEsLSE, tLSEsdPsum, tdQsdQaccum, softmax_scale_log2,
        PdS_barrier, is_dQ_wg=False, mask_fn=None, score_mod_fn=None, score_mod_bwd_fn=None, dKV_accumulate=True,
    ):  # fmt: skip
        """flash-attn-4's, but that dv's product is there before the gradients of scores, which are made beside it."""
        m_block, _ = self.place(m_block, self.end)
        do_now = q_state if const_expr(self.Q_stage == self.dO_stage) else do_state
        at_q = q_state.index
        at_do = do_now.index if const_expr(self.dO_stage > 1) else 0
        at_ds = at_q if const_expr(self.PdS_stage > 1) else 0
        pipeline_Q.consumer_wait(q_state, pipeline_Q.consumer_try_wait(q_state))
        scores = mma_qk_fn(A_idx=at_q, wg_wait=1 if self.ahead else -1)
        if const_expr(self.ahead):
            self.release_before(pipeline_Q, at_q, dKV_accumulate)
        lse = copy_utils.load_s2r(tLSEsLSE[None, at_q])
        pipeline_dO.consumer_wait(do_now, pipeline_dO.consumer_try_wait(do_now))
        dp = mma_dov_fn(A_idx=at_do, wg_wait=1)
        mask_fn(scores, m_block=m_block)
        p = layout_utils.reshape_acc_to_mn(scores, transpose=self.SdP_swapAB)
        rows, columns = const_expr(cute.size(p, mode=[0])), const_expr(cute.size(p, mode=[1]))
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range(columns, unroll_full=True):
                p[r, c] = cute.math.exp2(p[r, c] * softmax_scale_log2 - lse[r], fastmath=True)
        dpsum = copy_utils.load_s2r(tLSEsdPsum[None, at_do])
        rounded = utils.cvt_f16(layout_utils.reshape_acc_to_frgA(scores), self.dtype)
        if const_expr(self.PdS_stage == 1):  # both warp groups are through with what lies there
            PdS_barrier.arrive_and_wait()
        copy_P_r2s(rounded, dst_idx=at_ds)
        cute.arch.fence_view_async_shared()
        PdS_barrier.arrive_and_wait()
        mma_pdo_fn(A_idx=at_ds, B_idx=at_do, zero_init=not dKV_accumulate, wg_wait=1)
        ds = layout_utils.reshape_acc_to_mn(dp, transpose=self.SdP_swapAB)
        for r in cutlass.range_constexpr(rows):
            for c in cutlass.range(columns, unroll_full=True):
                ds[r, c] = p[r, c] * (ds[r, c] - dpsum[r])
        copy_dS_r2s(utils.cvt_f16(layout_utils.reshape_acc_to_frgA(dp), self.dtype), dst_idx=at_ds)
        cute.arch.fence_view_async_shared()
        PdS_barrier.arrive_and_wait()
        mma_dsq_fn(A_idx=at_ds, B_idx=at_q, zero_init=not dKV_accumulate, wg_wait=1)
        pipeline_dO.consumer_release(do_now)
        if const_expr(not self.ahead):
            warpgroup.wait_group(0)
            pipeline_Q.consumer_release(q_state)
        q_state.advance()
        do_state.advance()
        return q_state, do_state

    @cute.jit
    def release_before(self, pipeline_Q, at_q, there_is_one):
        if there_is_one:
            pipeline_Q.consumer_release_w_index(1 - at_q)


class KeyGradientsAhead(KeyGradients):
    ahead = True


_KEYS_64 = {"n_block_size": 64, "num_stages_dO": 2, "num_stages_PdS": 2, "dKV_swapAB": False}
_KEYS_80 = {"n_block_size": 80, "num_stages_dO": 1, "num_stages_PdS": 1, "dKV_swapAB": True}
APART = {  # dk's and dv's kernel and its tiles, where dq has another
    "dq apart, 64 keys ahead": (KeyGradientsAhead, _KEYS_64),
    "dq apart, 64 keys": (KeyGradients, _KEYS_64),
    "dq apart, 80 keys": (KeyGradients, _KEYS_80),
}


def _compile(
    config, tensors: tuple, offsets: tuple, turns: Tensor, until: Tensor | None, causal: bool, make=Backward
):  # fmt: skip
    q, k, v = tensors[:3]
    kernel = make(
        DTYPES[q.dtype], q.shape[2], v.shape[2], group=q.shape[1] // k.shape[1], is_causal=causal,
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


def _convert(
    sums: Tensor, dq: Tensor, scale: float, cu_seqlens: Tensor, until: Tensor | None, rows: int, multiple: int, config
) -> None:  # fmt: skip
    """dq = sums * scale, rounded."""
    threads = 128 if config.dQ_single_wg else config.num_wg * 128
    how = dq.shape[2], rows, threads, config.AtomLayoutMdQ, config.dQ_swapAB, True, False, False, 1, 90
    key = dq.dtype, *how, until is not None, None, multiple, None
    make = partial(_compile_bwd_postprocess, DTYPES[dq.dtype], *key[1:])
    kernel = cute_objects.kernel("backward, after", dq.device, key, make, stack)
    kernel(sums, dq, scale, cu_seqlens, None, None, until)


def _one_kernel(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    cu_seqlens_k: Tensor, scale: float, causal: bool, versions: Callable[[], str],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (tokens, heads, d), dv_width, device = q.shape, v.shape[2], q.device
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    config, rows, multiple = layout_of(d, dv_width, causal)
    where, blocks = rooms_of(rows, d, multiple, tokens, heads, len(cu_seqlens) - 1, device)
    lse_2, dpsum, sums = where
    parts = 1 if config.dQ_single_wg else config.num_wg
    turns = torch.zeros(heads, blocks, parts, dtype=torch.int32, device=device)
    until, until_k = blocks_until(cu_seqlens, rows), blocks_until(cu_seqlens_k, config.n_block_size)
    name = prepared_by(device, q.dtype, d, dv_width, causal).chosen.name
    prepare(name, out, dout, lse, cu_seqlens, until, *where, rows, d, multiple)
    tensors, ends = (q, k, v, dout, lse_2, dpsum, sums, dk, dv), (cu_seqlens, cu_seqlens_k)
    key = q.dtype, heads // k.shape[1], d, dv_width, causal, until_k is None
    make = partial(_compile, config, tensors, ends, turns, until_k, causal)
    kernel = cute_objects.kernel("backward", device, key, make, versions)
    kernel(*tensors, scale, *ends, turns, until_k)
    _convert(sums, dq, scale, cu_seqlens, until, rows, multiple, config)
    return dq, dk, dv


def _apart(
    name: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    cu_seqlens_k: Tensor, scale: float, causal: bool, versions: Callable[[], str],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A kernel for dk and dv, with tiles of its own, and one for dq."""
    (tokens, heads, d), dv_width, device = q.shape, v.shape[2], q.device
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    config, rows, multiple = layout_of(d, dv_width, causal)
    (lse_2, dpsum, _), _ = rooms_of(rows, 0, multiple, tokens, heads, len(cu_seqlens) - 1, device)
    until = blocks_until(cu_seqlens, rows)
    prepare(THEIRS, out, dout, lse, cu_seqlens, until, lse_2, dpsum, None, rows, d, multiple)
    ends, of = (cu_seqlens, cu_seqlens_k), (q.dtype, heads // k.shape[1], d, dv_width, causal)

    kind, tiles = APART[name]
    own = replace(config, **tiles)
    until_k = blocks_until(cu_seqlens_k, own.n_block_size)
    turns = torch.empty(1, 1, 1, dtype=torch.int32, device=device)  # nobody waits
    tensors = q, k, v, dout, lse_2, dpsum, lse_2, dk, dv
    make = partial(_compile, own, tensors, ends, turns, until_k, causal, kind)
    kernel = cute_objects.kernel("backward, keys", device, (*of, until_k is None, name), make, versions)
    kernel(*tensors, scale, *ends, turns, until_k)

    until = blocks_until(cu_seqlens, rows * GROUPS)
    tensors = q, k, v, dout, lse_2, dpsum, dq
    make = partial(_compile_query_gradient, config, tensors, ends, until, causal)
    kernel = cute_objects.kernel("backward, queries", device, (*of, until is None), make, versions)
    kernel(*tensors, scale, *ends, until)
    return dq, dk, dv


def _compile_query_gradient(config, tensors: tuple, offsets: tuple, until: Tensor | None, causal: bool):
    q, k, v = tensors[:3]
    kernel = QueryGradient(
        DTYPES[q.dtype], q.shape[2], v.shape[2], group=q.shape[1] // k.shape[1], causal=causal,
        rows=config.m_block_size, keys=config.n_block_size,
    )  # fmt: skip
    numbers = [None if t is None else to_cute_tensor(t, assumed_align=4) for t in (*offsets, until)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, *[to_cute_tensor(t) for t in tensors], 1.0, *numbers, stream, options="--enable-tvm-ffi"
    )


def kernels_for(
    device: torch.device, dtype: torch.dtype, group: int, d: int, dv: int, causal: bool, versions: Callable[[], str]
) -> Decision:  # fmt: skip
    if (d, dv) != (WIDE, WIDE):
        return canonical_by_rule(ONE, "heads are narrow, and blocks of keys large")
    return _kernels(device, dtype, group, causal, versions)


@decided
def _kernels(
    device: torch.device, dtype: torch.dtype, group: int, causal: bool, versions: Callable[[], str]
) -> Proposal:  # fmt: skip
    def run(f: Callable) -> Callable:
        return lambda *case: f(*case, WIDE**-0.5, causal, versions)

    source = f"{versions()} {digest.of_files(__file__, cute_backward_apart.__file__, cute_prepare.__file__)}"
    one = Candidate(ONE, run(_one_kernel), source)

    def race(candidates: Sequence[Candidate], case: tuple) -> list[float | Exception]:
        return race_on_gpu([[partial(candidate.run, *case)] for candidate in candidates])

    return Proposal(
        f"attention_bwd_kernels {str(dtype).removeprefix('torch.')} Hq/Hk={group} D={WIDE} "
        f"{'causal' if causal else 'full'}",
        [*(Candidate(name, run(partial(_apart, name)), source) for name in APART), one],
        one,
        lambda: _kernels_cases(device, dtype, group),
        race,
        ahead=False,
    )


def _kernels_cases(device: torch.device, dtype: torch.dtype, group: int) -> list[tuple]:
    """Blocks that are not full, and blocks of one kernel that end inside another's; sequences of no or few queries or
    keys; sums that are subnormal; rows that see nothing, or have no share. All finite: how far a value that is not
    spreads depends on blocks. The last one is as a batch is."""

    def case(lengths: list[int], lengths_k: list[int], small: bool = False) -> tuple:
        seed, rows, keys = len(lengths), sum(lengths), sum(lengths_k)
        g = torch.Generator(device).manual_seed(seed)
        shapes = (rows, 2 * group), (keys, 2), (keys, 2), (rows, 2 * group), (rows, 2 * group)
        tensors = [torch.randn(*s, WIDE, dtype=torch.float32, generator=g, device=device).to(dtype) for s in shapes]
        q, k, v, out, dout = tensors
        if small:
            q, k, v, dout = (special_rows(x, first=i, kinds=SMALL) for i, x in enumerate((q, k, v, dout)))
            dout = (
                dout.float() * torch.linspace(0, -110, rows, dtype=torch.float32, device=device).exp2()[:, None, None]
            ).to(dtype)
        lse = torch.full((2 * group, rows), 5.0, dtype=torch.float32, device=device)
        lse[:, 3::11], lse[:, 5::13] = float("inf"), 9.0
        return dout, q, k, v, out, lse, offsets(lengths, device), offsets(lengths_k, device)

    packed, other = [700, 1, 130, 1300, 64, 47, 49], [100, 7, 0, 64, 300, 129]
    return [
        case(packed, packed),
        case(other, [300, 500, 64, 0, 100, 129]),
        case([1, 333, 200], [1, 333, 200], small=True),
        case([4096, 2048], [4096, 2048]),
    ]


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    cu_seqlens_k: Tensor, scale: float, causal: bool, versions: Callable[[], str],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv; lse (Hq, T), in natural logarithms. The offsets are in order and inside their tensors."""
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group = q.shape[1] // k.shape[1]
    name = kernels_for(q.device, q.dtype, group, q.shape[2], v.shape[2], causal, versions).chosen.name
    run = _one_kernel if name == ONE else partial(_apart, name)
    return run(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, scale, causal, versions)
