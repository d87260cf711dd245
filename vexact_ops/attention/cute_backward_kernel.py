"""flash-attn-4's backward in the order of cute_backward.py: what it and the kernels around it are compiled of, which
takes seconds to import. Where compiled ones are kept, nothing here is called (cute_objects.py).
"""

from dataclasses import dataclass, replace
from functools import partial

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import Agent, CooperativeGroup, NamedBarrier, PipelineUserType, make_pipeline_state
from flash_attn.cute import barrier, interface, pipeline, utils
from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.cu_blocks_kernel import CuSeqlensToBlocksKernel
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned, to_cute_tensor
from flash_attn.cute.flash_bwd_sm90 import FlashAttentionBackwardSm90
from flash_attn.cute.mask import AttentionMask
from flash_attn.cute.named_barrier import NamedBarrierBwd
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.tile_scheduler import SingleTileVarlenScheduler, TileSchedulerArguments
from flash_attn.cute.utils import AuxData
from quack import copy_utils, layout_utils, sm90_utils
from torch import Tensor

from .cute_arithmetic import moved

_LOG2_E = 1.4426950408889634
_HANDED = int(max(NamedBarrierBwd)) + 1  # the first barrier that flash-attn-4 leaves free
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

    adders = 3  # warps that add up dq: with that which loads, all of a warp group
    parts = 1  # in which a block's dq goes through shared memory

    def __init__(self, *args, group: int, **kwargs):
        super().__init__(*args, qhead_per_kvhead=1, deterministic=True, **kwargs)
        self.group = group

    def _setup_attributes(self):
        super()._setup_attributes()
        self.part_size = self.tile_m * self.tile_hdim // self.num_wg_dQ // self.parts
        self.sdQaccum_layout = cute.make_layout((self.part_size, self.num_wg_dQ))

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
        self.tma_copy_bytes["dQ"] = self.part_size * 4
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
        self.kernel(
            *[tensor for _, tensor in copies], [atom for atom, _ in copies], mLSE, mdPsum, mdQ, at, at_k, turns,
            (self.sQ_layout, self.sK_layout, self.sV_layout, self.sdO_layout, self.sPdS_layout, self.sdQaccum_layout),
            self.r2s_tiled_copy_dQaccum, (mma_s, mma_dk, mma_dv, mma_dq), scale * _LOG2_E, scale, params,
            self._get_shared_storage_cls(),
        ).launch(
            grid=SingleTileVarlenScheduler.get_grid_shape(params),
            block=[self.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mQ, mK, mV, mdO, mdK, mdV, atoms, mLSE, mdPsum, mdQ, at, at_k, turns, layouts, put_dq, products, scale_2,
        scale, params, Storage: cutlass.Constexpr,
    ):  # fmt: skip
        """flash-attn-4's, but that several warps add up dq."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        copy_q, copy_k, copy_v, copy_do, copy_dk, copy_dv = atoms
        storage = cutlass.utils.SmemAllocator().allocate(Storage)
        size, consumers = self.tma_copy_bytes, self.num_mma_threads // cute.arch.WARP_SIZE
        pipe = partial(
            pipeline.PipelineTmaAsync.create, producer_group=CooperativeGroup(Agent.Thread),
            consumer_group=CooperativeGroup(Agent.Thread, consumers),
        )  # fmt: skip
        pipe_q = pipe(
            barrier_storage=storage.mbar_ptr_Q.data_ptr(), num_stages=self.Q_stage, tx_count=size["Q"] + size["LSE"],
            defer_sync=True,
        )  # fmt: skip
        pipe_do = pipe(
            barrier_storage=storage.mbar_ptr_dO.data_ptr(), num_stages=self.dO_stage,
            tx_count=size["dO"] + size["dPsum"], defer_sync=False,
        )  # fmt: skip
        of_q, of_k, of_v, of_do, of_ds, of_dq = layouts
        sQ = storage.sQ.get_tensor(of_q.outer, swizzle=of_q.inner)
        sK = storage.sK.get_tensor(of_k.outer, swizzle=of_k.inner)
        sV = storage.sV.get_tensor(of_v.outer, swizzle=of_v.inner)
        sdO = storage.sdO.get_tensor(of_do.outer, swizzle=of_do.inner)
        sdS = storage.sdS.get_tensor(of_ds.outer, swizzle=of_ds.inner)
        sP = None
        if const_expr(not self.mma_dkv_is_rs):
            sP = storage.sP.get_tensor(of_ds.outer, swizzle=of_ds.inner)
        apart = cute.round_up(self.tile_m, 64)
        sLSE = storage.sLSE.get_tensor(cute.make_layout((self.tile_m, self.Q_stage), stride=(1, apart)))
        sdPsum = storage.sdPsum.get_tensor(cute.make_layout((self.tile_m, self.dO_stage), stride=(1, apart)))
        sdQ = storage.sdQaccum.get_tensor(of_dq)
        info = self.tile_m, self.tile_n, self.is_causal, False, False, None, None, 1
        seqlen = partial(
            SeqlenInfoQK.create, seqlen_q_static=mQ.shape[0], seqlen_k_static=mK.shape[0], mCuSeqlensQ=at,
            mCuSeqlensK=at_k, tile_m=self.tile_m, tile_n=self.tile_n,
        )  # fmt: skip
        schedule = partial(SingleTileVarlenScheduler.create, params)
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.num_producer_regs)
            if warp == 0:
                self.load(
                    mQ, mK, mV, mdO, mLSE, mdPsum, sQ, sK, sV, sdO, sLSE, sdPsum, copy_q, copy_k, copy_v, copy_do,
                    pipe_q, pipe_do, BlockInfo(*info), seqlen, schedule,
                )  # fmt: skip
            elif warp <= self.adders:
                self.add(warp - 1, mdQ, sdQ, BlockInfo(*info), schedule, seqlen, turns)
        else:
            mma = partial(
                self.mma, *products, mdK, mdV, None, None, mdQ, sQ, sK, sV, sdO, sP, sdS, sLSE, sdPsum, sdQ, pipe_q,
                pipe_do, cute.arch.thread_idx()[0] - 128, copy_dk, copy_dv, put_dq, scale_2, scale,
                _Rounds(*info, kernel=self), seqlen, partial(AttentionMask, *info[:2], swap_AB=self.SdP_swapAB),
                schedule, AuxData(), None,
            )  # fmt: skip
            if const_expr(self.num_wg_dQ == self.num_wg_mma):
                cute.arch.setmaxregister_increase(self.num_mma_regs_wg0)
                mma(is_dQ_wg=True)
            else:  # one of two
                if warp < 8:
                    cute.arch.setmaxregister_increase(self.num_mma_regs_wg0)
                    mma(is_dQ_wg=True)
                else:
                    cute.arch.setmaxregister_increase(self.num_mma_regs_wg1)
                    mma(is_dQ_wg=False)

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
    def add(self, which, mdQ, sdQ, block_info, TileSchedulerCls, SeqlenInfoCls, turns):
        """Every self.adders-th round's dq. A warp waits for its turn before the buffer is full, and for what it added
        to be in memory when the buffer is the next warp's already: a round takes as long as its products (2.7 us with
        flash-attn-4's tiles for wide heads, on an H200), not as all that one warp waits for (3.7 us)."""
        lane = cute.arch.thread_idx()[0] % cute.arch.WARP_SIZE
        threads = const_expr(self.num_threads_per_warp_group + cute.arch.WARP_SIZE)
        work_tile = TileSchedulerCls().initial_work_tile_info()
        if work_tile.is_valid_tile:
            n_block, head_kv, batch_idx, _ = work_tile.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            first = seqlen.padded_offset_q // self.tile_m
            share = cute.make_layout((self.part_size, self.parts * self.num_wg_dQ))
            low, end = block_info.get_m_block_min_max(seqlen, n_block)
            count = (end - low) * self.group
            if which == 0 and count > 0:
                for wg in cutlass.range_constexpr(self.num_wg_dQ):
                    self.emptied(wg)
            for i in cutlass.range(which, count, self.adders, unroll=1):
                m_block, one = self.place(i, end)
                head = head_kv * self.group + one
                gdQ = cute.local_tile(mdQ[None, head], (share,), (None,))
                turn = turns[(head, first + m_block, None)].iterator
                barrier.wait_eq(turn, lane, 0, n_block)  # order: blocks of keys from the first to the last
                if i > 0:
                    self.handed(which).arrive_and_wait()
                for part in cutlass.range_constexpr(self.parts):
                    for wg in cutlass.range_constexpr(self.num_wg_dQ):
                        full = int(NamedBarrierBwd.dQFullWG0) + wg
                        cute.arch.barrier(barrier_id=full, number_of_threads=threads)
                        with cute.arch.elect_one():
                            copy_utils.cpasync_reduce_bulk_add_f32(
                                sdQ[None, wg].iterator,
                                gdQ[(None, wg * self.parts + part), first + m_block].iterator,
                                self.tma_copy_bytes["dQ"],
                            )
                        cute.arch.cp_async_bulk_commit_group()
                    if const_expr(part < self.parts - 1):
                        self.emptied_once_read()
                if i + 1 < count:
                    self.handed((which + 1) % self.adders).arrive()
                    self.emptied_once_read()
                cute.arch.cp_async_bulk_wait_group(0, read=False)  # what has been added is the next block's to add to
                barrier.arrive_inc(turn, lane, 0, 1)

    def handed(self, which):
        """The buffer's next round is that warp's."""
        return NamedBarrier(barrier_id=_HANDED + which, num_threads=2 * cute.arch.WARP_SIZE)

    def emptied_once_read(self):
        for wg in range(self.num_wg_dQ):
            cute.arch.cp_async_bulk_wait_group(self.num_wg_dQ - 1 - wg, read=True)
            self.emptied(wg)

    def emptied(self, wg):
        cute.arch.barrier_arrive(
            barrier_id=int(NamedBarrierBwd.dQEmptyWG0) + wg,
            number_of_threads=self.num_threads_per_warp_group + cute.arch.WARP_SIZE,
        )


class Wide(Backward):
    """Of heads of 256, whose products are as fast as shared memory is. For each key, blocks of 64 move a quarter less
    through it than flash-attn-4's of 48; there is room for them, since dq goes through it in halves. And no product
    waits for what can be done beside it: dv's is begun before the gradients of scores are made, and a round's scores
    before the second half of the last round's dq is handed over. On an H200 the kernel takes 6.1 ms where
    flash-attn-4's takes 7.6 (16 heads, 4 of keys, 8 x 4,096 tokens)."""

    parts = 2

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if self.SdP_swapAB or self.dKV_swapAB or self.mma_dkv_is_rs or (self.PdS_stage, self.num_wg_dQ) != (1, 2):
            raise AssertionError("a case that the loop below does not know")

    @cute.jit
    def mma(
        self, mma_s, mma_dk, mma_dv, mma_dq, mdK, mdV, mdK_semaphore, mdV_semaphore, mdQ, sQ, sK, sV, sdO, sP, sdS,
        sLSE, sdPsum, sdQ, pipe_q, pipe_do, thread, copy_dk, copy_dv, put_dq, scale_2, scale, info, SeqlenInfoCls,
        MaskCls, TileSchedulerCls, aux_data=None, fastdiv_mods=None, is_dQ_wg=True,
    ):  # fmt: skip
        wg = cute.arch.make_warp_uniform(thread // self.num_threads_per_warp_group)
        leader = wg * self.num_threads_per_warp_group
        of_s, of_dk, of_dv = mma_s.get_slice(leader), mma_dk.get_slice(leader), mma_dv.get_slice(leader)
        m, n, d, dv = self.tile_m, self.tile_n, self.tile_hdim, self.tile_hdimv
        parts, transposed = sm90_utils.partition_fragment_ABC, layout_utils.transpose_view
        _, tSrQ, tSrK = parts(of_s, (m, n, d), sQ, sK)
        _, tPrO, tPrV = parts(of_s, (m, n, dv), sdO, sV)
        acc_dv, tVrP, tVrO = parts(of_dv, (n, dv, m), transposed(sP), transposed(sdO))
        acc_dk, tKrS, tKrQ = parts(of_dk, (n, d, m), transposed(sdS), transposed(sQ))
        _, tQrS, tQrK = parts(mma_dq.get_slice(leader), (m, d, n), sdS, transposed(sK))
        put = partial(
            copy_utils.get_smem_store_C, mma_s, tidx=thread, position_independent=True,
            major_mode_size=n // self.num_wg_mma,
        )  # fmt: skip
        put_p, _, _ = put(sP)
        put_ds, _, _ = put(sdS)
        column = partial(
            layout_utils.mma_partition_C_vec, thr_mma=mma_s.get_slice(thread), expand_shape=n, is_colvec=True
        )
        room = put_dq.get_slice(thread).partition_D(sdQ)
        work_tile = TileSchedulerCls().initial_work_tile_info()
        if work_tile.is_valid_tile:
            n_block, head_kv, batch_idx, _ = work_tile.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            _, count = info.get_m_block_min_max(seqlen, n_block)
            mask = partial(
                MaskCls(seqlen).apply_mask, batch_idx=batch_idx, head_idx=head_kv, n_block=n_block,
                thr_mma=mma_s.get_slice(thread), mask_seqlen=True, mask_causal=self.is_causal, mask_local=False,
            )  # fmt: skip
            of_q, of_do = column(sLSE), column(sdPsum)
            before = make_pipeline_state(PipelineUserType.Consumer, self.Q_stage)
            at_q = make_pipeline_state(PipelineUserType.Consumer, self.Q_stage)
            at_do = make_pipeline_state(PipelineUserType.Consumer, self.dO_stage)
            free = NamedBarrier(barrier_id=int(NamedBarrierBwd.PdS), num_threads=self.num_mma_threads)
            acc_dv.fill(0.0)
            acc_dk.fill(0.0)
            rest = cute.make_rmem_tensor(cute.make_layout(room.shape), Float32)  # the last round's second half of dq
            rest.fill(0.0)
            zero = n_block >> 31  # which the assembler does not know
            more = False
            for i in cutlass.range(count, unroll=1):
                pipe_q.consumer_wait(at_q, pipe_q.consumer_try_wait(at_q))
                s = sm90_utils.gemm_zero_init(mma_s, (m, n), tSrQ, tSrK, A_idx=at_q.index, wg_wait=-1)
                if i > 0:  # the last round's end, beside this one's scores
                    self.hand_over(rest, room, wg)
                    warpgroup.wait_group(1)
                    pipe_q.consumer_release(before)
                    before.advance()
                lse = copy_utils.load_s2r(of_q[None, at_q.index])
                pipe_do.consumer_wait(at_do, pipe_do.consumer_try_wait(at_do))
                dp = sm90_utils.gemm_zero_init(mma_s, (m, n), tPrO, tPrV, A_idx=at_do.index, wg_wait=1)
                mask(s, m_block=self.place(i, self.end)[0])
                p = layout_utils.reshape_acc_to_mn(s)
                rows, columns = const_expr(cute.size(p, mode=[0])), const_expr(cute.size(p, mode=[1]))
                for r in cutlass.range_constexpr(rows):
                    for c in cutlass.range(columns, unroll_full=True):
                        p[r, c] = cute.math.exp2(p[r, c] * scale_2 - lse[r], fastmath=True)
                dpsum = copy_utils.load_s2r(of_do[None, at_do.index])
                rounded = utils.cvt_f16(layout_utils.reshape_acc_to_frgA(s), self.dtype)
                free.arrive_and_wait()  # both warp groups are through with the last round's
                put_p(rounded, dst_idx=0)
                cute.arch.fence_view_async_shared()
                free.arrive_and_wait()
                sm90_utils.gemm_w_idx(mma_dv, acc_dv, tVrP, tVrO, not more, A_idx=0, B_idx=at_do.index, wg_wait=1)
                ds = layout_utils.reshape_acc_to_mn(dp)
                for r in cutlass.range_constexpr(rows):
                    for c in cutlass.range(columns, unroll_full=True):
                        ds[r, c] = p[r, c] * (ds[r, c] - dpsum[r])
                put_ds(utils.cvt_f16(layout_utils.reshape_acc_to_frgA(dp), self.dtype), dst_idx=0)
                cute.arch.fence_view_async_shared()
                free.arrive_and_wait()
                dq = sm90_utils.gemm_zero_init(mma_dq, (m, d), tQrS, tQrK, A_idx=0, wg_wait=1)
                pipe_do.consumer_release(at_do)
                sm90_utils.gemm_w_idx(mma_dk, acc_dk, tKrS, tKrQ, not more, A_idx=0, B_idx=at_q.index, wg_wait=1)
                self.hand_over(cute.make_tensor(dq.iterator, rest.layout), room, wg)
                for j in cutlass.range_constexpr(cute.size(rest)):
                    rest[j] = moved(dq[cute.size(rest) + j], zero)
                more = True
                at_q.advance()
                at_do.advance()
            if count > 0:
                self.hand_over(rest, room, wg)
            warpgroup.wait_group(0)
            acc_dk.store(acc_dk.load() * scale)
            self.epilogue_dKV(
                acc_dv, mdV, sV, acc_dk, mdK, sK, seqlen, copy_dk, copy_dv, mma_dk, mma_dv, thread, n_block, head_kv,
                batch_idx,
            )  # fmt: skip
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 4:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def hand_over(self, part, room, wg):
        threads = const_expr(self.num_threads_per_warp_group + cute.arch.WARP_SIZE)
        cute.arch.barrier(barrier_id=int(NamedBarrierBwd.dQEmptyWG0) + wg, number_of_threads=threads)
        cute.autovec_copy(part, room)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=int(NamedBarrierBwd.dQFullWG0) + wg, number_of_threads=threads)


def config(d: int, dv: int, causal: bool, known: tuple) -> interface.BwdConfig:
    """flash-attn-4's own, without a window, but for the blocks of wide heads.

    known   what its callers go by, cute_backward.Tiles and SEARCHED; RuntimeError where flash-attn-4 has other numbers
    """
    found = interface._tile_size_bwd_sm90(d, dv, causal, False)
    if known[0].wide:
        found = replace(found, n_block_size=64, dKV_swapAB=False)
    threads, multiple = 128 if found.dQ_single_wg else found.num_wg * 128, 64 if found.dKV_swapAB else 32
    tile = (
        found.m_block_size,
        found.n_block_size,
        threads,
        found.AtomLayoutMdQ,
        found.dQ_swapAB,
        multiple,
        known[0].wide,
    )
    if known != (tile, interface.BIN_BATCH_SEARCH_THRESH):
        own = tile, interface.BIN_BATCH_SEARCH_THRESH
        raise RuntimeError(f"flash-attn-4's backward has {own} for heads of {d}, {dv}: expected {known}")
    return found


def compiled(known: tuple, tensors: tuple, offsets: tuple, turns: Tensor, until: Tensor | None, causal: bool):
    q, k, v = tensors[:3]
    own = config(q.shape[2], v.shape[2], causal, known)
    make = Wide if known[0].wide else Backward
    kernel = make(
        _DTYPES[q.dtype], q.shape[2], v.shape[2], group=q.shape[1] // k.shape[1], is_causal=causal,
        tile_m=own.m_block_size, tile_n=own.n_block_size, Q_stage=own.num_stages_Q,
        dO_stage=own.num_stages_dO, PdS_stage=own.num_stages_PdS, SdP_swapAB=own.SdP_swapAB,
        dKV_swapAB=own.dKV_swapAB, dQ_swapAB=own.dQ_swapAB, AtomLayoutMSdP=own.AtomLayoutMSdP,
        AtomLayoutNdKV=own.AtomLayoutNdKV, AtomLayoutMdQ=own.AtomLayoutMdQ,
        num_threads=(own.num_wg + 1) * 128, dQ_single_wg=own.dQ_single_wg,
    )  # fmt: skip
    numbers = [None if t is None else to_cute_tensor(t, assumed_align=4) for t in (*offsets, turns, until)]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        kernel, *[to_cute_tensor(t) for t in tensors], 1.0, *numbers, stream, options="--enable-tvm-ffi"
    )


def compiled_before(dtype: torch.dtype, *how):
    return interface._compile_bwd_preprocess(_DTYPES[dtype], *how)


def compiled_after(dtype: torch.dtype, *how):
    return interface._compile_bwd_postprocess(_DTYPES[dtype], *how)


def compiled_blocks(until: Tensor, cu_seqlens: Tensor, rows: int):
    until, cu_seqlens = (to_cute_tensor(t, assumed_align=4, leading_dim=0) for t in (until, cu_seqlens))
    return cute.compile(
        CuSeqlensToBlocksKernel(tile=rows, seqlen_q_multiplier=1), until, None, cu_seqlens, None, None, None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi",
    )  # fmt: skip
