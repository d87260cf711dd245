"""flash-attn-4's forward in the order of csrc/attention/flash.cuh: what it is compiled of, which takes seconds to
import. Where a compiled kernel is kept, nothing here is called (cute_objects.py).

The forward is flash-attn-4's own, with another loop over blocks of keys: the running maximum, sum and output begin anew
at each segment, and segments are joined from the last to the first inside the kernel. It also tells where an output is
NaN: a value that is not finite reaches rows that do not see it (0 times infinity), so such a call is made again by a
kernel that is careful.
"""

import operator
from functools import partial
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipelines
import torch
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import PipelineUserType
from flash_attn.cute import utils
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned, to_cute_aux_tensor, to_cute_tensor
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.interface import _tile_size_fwd_sm90
from flash_attn.cute.pack_gqa import make_packgqa_tiled_tma_atom, pack_gqa_layout
from flash_attn.cute.pipeline import make_pipeline_state
from flash_attn.cute.softmax import Softmax
from flash_attn.cute.tile_scheduler import SingleTileVarlenScheduler, TileSchedulerArguments
from flash_attn.cute.utils import AuxData
from quack import copy_utils, layout_utils, sm90_utils
from torch import Tensor

from .cute_arithmetic import add, come_after, fma, mul
from .op import flash_keys

WIDE = 256  # heads of which flash-attn-4 takes blocks of 80 keys, which no page divides, but for windows
_LN_2 = 0.69314718
_LOG2_E = 1.44269502
_SHARED_BYTES = 226 * 1024  # of a block
_DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}


class Forward(FlashAttentionForwardSm90):
    """The forward on packed sequences.

    segment_blocks  blocks of keys in a segment, None for one segment
    sinks           whether heads have some: the second of the aux tensors
    """

    def __init__(self, *args, segment_blocks: int | None, sinks: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.segment_blocks, self.sinks = segment_blocks, sinks
        self.beside = self.tile_n * 3 // 16 - 1  # of a row's probabilities in a thread: the last there before a wait
        if not self.intra_wg_overlap or self.score_mod is not None or self.mask_mod is not None:
            raise AssertionError("a case that the loop below does not know")
        # Segments that are done wait in shared memory where it holds them: registers would slow down every block.
        keys = self.tile_n * (self.tile_hdim + self.tile_hdimv) * self.num_stages
        scores = 0 if self.mma_pv_is_rs else self.tile_m * self.tile_n
        held = 2 * (keys + self.tile_m * self.tile_hdim + scores) + 4 * self.tile_m * self.tile_hdimv
        self.joined_in_shared = segment_blocks is not None and held <= _SHARED_BYTES

    def _get_shared_storage_cls(self):
        base = super()._get_shared_storage_cls()
        if not self.joined_in_shared:
            return base
        fields = dict(base._annotations)
        fields["joined"] = cute.struct.Align[cute.struct.MemRange[Float32, self.tile_m * self.tile_hdimv], 128]
        return cute.struct(type("SharedStorage", (), {"__annotations__": fields}))

    @cute.jit
    def mma_one_n_block_intrawg_overlap(
        self, smem_pipe_read, n_block, mma_qk_fn, mma_pv_fn, pipeline_k, pipeline_v, acc_O, tOrP, smem_copy_params,
        softmax, seqlen, scores_scale=None, score_mod_fn=None, mask_fn=None, check_inf=True,
    ):  # fmt: skip
        """flash-attn-4's, but that the exponentials run beside the product of the block before, not behind it."""
        before = smem_pipe_read.clone()
        smem_pipe_read.advance()
        pipeline_k.consumer_wait(smem_pipe_read, pipeline_k.consumer_try_wait(smem_pipe_read))
        self.warp_scheduler_barrier_sync()
        scores = mma_qk_fn(B_idx=smem_pipe_read.index, wg_wait=-1)
        if const_expr(self.rescale_O_before_gemm):
            softmax.rescale_O(acc_O, scores_scale)
        pipeline_v.consumer_wait(before, pipeline_v.consumer_try_wait(before))
        mma_pv_fn(B_idx=before.index, wg_wait=-1)
        self.warp_scheduler_barrier_arrive()
        warpgroup.wait_group(1)
        pipeline_k.consumer_release(smem_pipe_read)
        if const_expr(mask_fn is not None):
            mask_fn(acc_S=scores, n_block=n_block)
        kept = softmax.online_softmax(scores, check_inf=check_inf)
        rows = layout_utils.reshape_acc_to_mn(scores)
        come_after(rows[0, self.beside], rows[1, self.beside])
        warpgroup.wait_group(0)
        pipeline_v.consumer_release(before)
        wide = layout_utils.reshape_acc_to_frgA(scores)
        probabilities = tOrP if const_expr(self.mma_pv_is_rs) else cute.make_rmem_tensor_like(wide, self.dtype)
        utils.cvt_f16(wide, probabilities)
        if const_expr(not self.mma_pv_is_rs):
            copy = smem_copy_params.smem_thr_copy_P
            cute.copy(copy, copy.retile(probabilities), smem_copy_params.tPsP)
        if const_expr(self.rescale_O_before_gemm):  # beside the next block's scores
            scores_scale.store(kept.load())
        else:
            softmax.rescale_O(acc_O, kept)
        if const_expr(not self.mma_pv_is_rs):
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
        return smem_pipe_read

    @cute.jit
    def blocks(self, one_block, product, seqlen, mask_fn, kv_state, begun, end, low):
        """The blocks of keys from end - 1 down to low; begun: whether the output holds something already."""
        for i in cutlass.range(end - low, unroll=1):
            kv_state = one_block(
                kv_state,
                n_block=end - 1 - i,
                seqlen=seqlen,
                mma_pv_fn=partial(product, zero_init=not begun),
                mask_fn=mask_fn,
            )
            begun = Boolean(True)
        return kv_state, begun

    @cute.jit
    def mma(
        self, tiled_mma_qk, tiled_mma_pv, mO, mLSE, sQ, sK, sVt, sP, sO, learnable_sink, pipeline_k, pipeline_v,
        pipeline_q, gmem_tiled_copy_O, tma_atom_O, tidx, softmax_scale_log2, softmax_scale, block_info,
        SeqlenInfoCls, AttentionMaskCls, TileSchedulerCls, blocksparse_tensors, aux_data=None, fastdiv_mods=None,
    ):  # fmt: skip
        warps_of_four = cute.make_layout(self.num_wg_mma, stride=self.num_threads_per_warp_group)
        group = cute.arch.make_warp_uniform(tidx // self.num_threads_per_warp_group)
        thr_mma_qk = tiled_mma_qk.get_slice(tidx)
        _, tSrQ, tSrK = sm90_utils.partition_fragment_ABC(
            tiled_mma_qk.get_slice(warps_of_four(group)), (self.tile_m, self.tile_n, self.tile_hdim), sQ, sK
        )
        acc, tOrP, tOrVt = sm90_utils.partition_fragment_ABC(
            tiled_mma_pv.get_slice(warps_of_four(group)), (self.tile_m, self.tile_hdimv, self.tile_n), sP, sVt
        )
        scores = partial(sm90_utils.gemm_zero_init, tiled_mma_qk, (self.tile_m, self.tile_n), tSrQ, tSrK)
        product = partial(sm90_utils.gemm_w_idx, tiled_mma_pv, acc, tOrP, tOrVt)
        store_p = cute.make_tiled_copy_C(
            utils.get_smem_store_atom(self.arch.major * 10 + self.arch.minor, self.dtype), tiled_mma_qk
        ).get_slice(tidx)
        tPsP = store_p.partition_D(sP) if const_expr(sP is not None) else None
        copies = SimpleNamespace(smem_thr_copy_P=store_p, tPsP=tPsP)
        self.mma_init()

        kv_state = make_pipeline_state(PipelineUserType.Consumer, self.num_stages)
        softmax = Softmax.create(
            softmax_scale_log2, num_rows=acc.shape[0][0] * acc.shape[1], softmax_scale=softmax_scale
        )
        segmented = const_expr(self.segment_blocks is not None)
        rows = const_expr(cute.size(softmax.row_max))
        row_of = const_expr([i // 2 % 2 for i in range(cute.size(acc))])  # pairs of columns of a row and of the next
        if const_expr(segmented):  # what the segments that are done have come to
            high = cute.make_fragment_like(softmax.row_max, Float32)
            total = cute.make_fragment_like(softmax.row_max, Float32)
            if const_expr(self.joined_in_shared):  # it lies behind K, as its storage class has it
                behind = cute.recast_ptr(sK.iterator + self.tile_n * self.tile_hdim * self.num_stages, dtype=Float32)
                mine = cute.make_layout(cute.size(acc), stride=self.num_mma_threads)
                joined = cute.make_tensor(behind + tidx, mine)
            else:
                joined = cute.make_fragment_like(acc, Float32)
        scale = cute.make_rmem_tensor_like(softmax.row_max, Float32) if const_expr(self.rescale_O_before_gemm) else None
        one_block = partial(
            self.mma_one_n_block_intrawg_overlap, mma_qk_fn=scores, pipeline_k=pipeline_k, pipeline_v=pipeline_v,
            acc_O=acc, tOrP=tOrP, smem_copy_params=copies, check_inf=True, scores_scale=scale, softmax=softmax,
        )  # fmt: skip

        tile_scheduler = TileSchedulerCls()
        work_tile = tile_scheduler.initial_work_tile_info()
        if work_tile.is_valid_tile:  # packed sequences: a block has one tile
            m_block, head_idx, batch_idx, _ = work_tile.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            mask = AttentionMaskCls(seqlen)
            mask_fn = partial(
                mask.apply_mask, batch_idx=batch_idx, head_idx=head_idx, m_block=m_block, thr_mma=thr_mma_qk,
                mask_causal=self.is_causal, mask_local=self.is_local,
            )  # fmt: skip
            lowest, end = block_info.get_n_block_min_max(seqlen, m_block)
            causal_edge = lowest
            if const_expr(self.is_causal or self.is_local):
                causal_edge = block_info.get_n_block_min_causal_local_mask(seqlen, m_block, lowest)
            window_edge = block_info.get_n_block_min_before_local_mask(seqlen, m_block, lowest)
            pipeline_q.consumer_wait_w_index_phase(0, Int32(0))

            count = Int32(1)
            segment = Int32(0)
            if const_expr(segmented):
                high.fill(-Float32.inf)
                total.fill(0.0)
                for i in cutlass.range_constexpr(cute.size(acc)):
                    joined[i] = Float32(0.0)
                segment = (cutlass.max(end, 1) - 1) // self.segment_blocks
                count = cutlass.max(segment - lowest // self.segment_blocks + 1, 1)
            for _ in cutlass.range(count, unroll=1):  # order: segments from the last to the first
                low = lowest
                if const_expr(segmented):
                    low = cutlass.max(segment * self.segment_blocks, lowest)
                    segment -= 1
                # order: blocks of keys from the last to the first; masked ones first and last
                kv_state = self.first_half_block_overlap(
                    n_block=end - 1, mma_qk_fn=scores, kv_consumer_state=kv_state, pipeline_k=pipeline_k, tOrP=tOrP,
                    smem_copy_params=copies, softmax=softmax, seqlen=seqlen, scores_scale=scale, acc_O=acc,
                    mask_fn=mask_fn, is_first_block=True,
                )  # fmt: skip
                begun = Boolean(False)
                block = end - 1
                masked = partial(mask_fn, mask_seqlen=False)
                step = partial(self.blocks, one_block, product, seqlen)
                if const_expr(self.is_causal or self.is_local):
                    edge = cutlass.max(causal_edge, low)
                    kv_state, begun = step(masked, kv_state, begun, block, edge)
                    block = cutlass.min(block, edge)
                edge = cutlass.max(window_edge, low)
                kv_state, begun = step(None, kv_state, begun, block, edge)
                if const_expr(self.is_local and block_info.window_size_left is not None):
                    kv_state, begun = step(masked, kv_state, begun, cutlass.min(block, edge), low)
                kv_state = self.last_half_block_overlap(
                    kv_consumer_state=kv_state, pipeline_v=pipeline_v, mma_pv_fn=product, zero_init=not begun,
                    scores_scale=scale, softmax=softmax, acc_O=acc,
                )  # fmt: skip
                end = low
                softmax.row_sum.store(utils.warp_reduce(softmax.row_sum.load(), operator.add, width=4))
                if const_expr(segmented):
                    before = cute.make_fragment_like(softmax.row_max, Float32)
                    after = cute.make_fragment_like(softmax.row_max, Float32)
                    for r in cutlass.range_constexpr(rows):
                        top = utils.fmax(high[r], softmax.row_max[r])
                        base = 0.0 if top == -Float32.inf else top
                        before[r] = cute.math.exp2(mul(add(high[r], -base), softmax_scale_log2), fastmath=True)
                        after[r] = cute.math.exp2(
                            mul(add(softmax.row_max[r], -base), softmax_scale_log2), fastmath=True
                        )
                        high[r] = top
                        total[r] = fma(total[r], before[r], mul(softmax.row_sum[r], after[r]))
                    for i in cutlass.range_constexpr(cute.size(acc)):
                        r = const_expr(row_of[i])
                        acc[i] = fma(joined[i], before[r], mul(acc[i], after[r]))
                        joined[i] = acc[i]
            pipeline_q.consumer_release_w_index(0)

            if const_expr(segmented):
                softmax.row_max.store(high.load())
                softmax.row_sum.store(total.load())
            acc_rows = layout_utils.reshape_acc_to_mn(acc)
            if const_expr(self.sinks and self.pack_gqa):
                places = cute.make_identity_tensor((self.tile_m, self.tile_n))
                own_rows = layout_utils.reshape_acc_to_mn(thr_mma_qk.partition_C(places))
            probe = Float32(0.0)
            for r in cutlass.range_constexpr(rows):
                norm = softmax.row_sum[r]
                none = norm == 0.0 or norm != norm
                factor = cute.arch.rcp_approx(norm if not none else 1.0)
                log = cute.math.log2(norm, fastmath=True)
                lse = mul(fma(softmax_scale_log2, softmax.row_max[r], log), _LN_2)
                softmax.row_sum[r] = lse if not none else -Float32.inf
                if const_expr(self.sinks):  # order: the sink joins last
                    head = head_idx
                    if const_expr(self.pack_gqa):
                        row = m_block * self.tile_m + own_rows[r][0]
                        head = row % self.qhead_per_kvhead + head_idx * self.qhead_per_kvhead
                    sink = aux_data.tensors[1][head]
                    score, peak = mul(sink, _LOG2_E), mul(softmax_scale_log2, softmax.row_max[r])
                    top = utils.fmax(peak, score)
                    kept = cute.math.exp2(add(peak, -top), fastmath=True)
                    whole = fma(norm, kept, cute.math.exp2(add(score, -top), fastmath=True))
                    factor = mul(kept, cute.arch.rcp_approx(whole)) if not none else factor
                    joined_lse = mul(add(top, cute.math.log2(whole, fastmath=True)), _LN_2)
                    softmax.row_sum[r] = joined_lse if not none else sink if norm == 0.0 else -Float32.inf
                for c in cutlass.range_constexpr(cute.size(acc_rows, mode=[1])):
                    # + 0: whether a row met blocks that it does not see, which turn -0 into 0, must not show
                    acc_rows[r, c] = mul(add(acc_rows[r, c], 0.0), factor)
                    probe += acc_rows[r, c]
            if probe != probe:
                aux_data.tensors[0][0] = Int32(1)
            self.epilogue(
                acc, softmax.row_sum, mO, mLSE, sO, seqlen, gmem_tiled_copy_O, tma_atom_O, tiled_mma_pv, tidx,
                m_block, head_idx, batch_idx,
            )  # fmt: skip


class PagedForward(Forward):
    """The forward of the last queries of sequences whose keys lie in pages: a block of keys comes in as many boxes as
    have rows that lie together. Nothing of a page is read but by the copy engine, which gives zeros for pages that are
    not there."""

    def __init__(self, *args, page_size: int, **kwargs):
        super().__init__(*args, **kwargs)
        self.page_size, self.box = page_size, min(page_size, self.tile_n)

    @cute.jit
    def __call__(self, mQ, mK, mV, mO, scale, at, used_q, used_k, table, left, right, aux_data, stream):
        self.varlen_q = True
        mQ, mK, mV, mO = [assume_tensor_aligned(t) for t in (mQ, mK, mV, mO)]
        mQ, mO = [layout_utils.select(t, [0, 2, 1]) for t in (mQ, mO)]  # (T, D, Hq)
        mK, mV = [layout_utils.select(t, [1, 3, 2, 0]) for t in (mK, mV)]  # (page_size, D, Hk, pages)
        tiled_mma_qk, tiled_mma_pv = self._get_tiled_mma()
        self.num_mma_threads = tiled_mma_qk.size
        self.num_threads_per_warp_group = 128
        self.num_wg_mma = self.num_mma_threads // 128
        self.num_threads = 128 * (self.num_wg_mma + 1)
        self.num_producer_threads = 32
        self.num_Q_load_threads = 128
        self.num_epilogue_threads = self.num_mma_threads
        self.num_mma_regs, self.num_producer_regs = {1: (256, 56), 2: (240, 24), 3: (160, 32)}[self.num_wg_mma]
        self.use_block_sparsity = False
        self.use_scheduler_barrier = self.num_wg_mma >= 2 and self.tile_hdim <= 128
        self.use_tma_Q = self.use_tma_O = True
        self.rescale_O_before_gemm = self.tile_hdimv > 128
        self._setup_attributes()
        row_major = cutlass.utils.LayoutEnum.ROW_MAJOR
        k_shape, v_shape = (self.tile_n, self.tile_hdim), (self.tile_n, self.tile_hdimv)
        self.sQ_layout, self.sK_layout, self.sV_layout, self.sO_layout = [
            sm90_utils.make_smem_layout(t.element_type, row_major, shape, stages)
            for t, shape, stages in (
                (mQ, (self.tile_m, self.tile_hdim), None),
                (mK, k_shape, self.num_stages),
                (mV, v_shape, self.num_stages),
                (mO, (self.tile_m, self.tile_hdimv), None),
            )
        ]
        self.sP_layout = None
        if const_expr(not self.mma_pv_is_rs):
            self.sP_layout = sm90_utils.make_smem_layout(self.dtype, row_major, (self.tile_m, self.tile_n))
        self.tma_copy_bytes = {
            name: cute.size_in_bytes(self.dtype, cute.select(layout, mode=[0, 1]))
            for name, layout in (("Q", self.sQ_layout), ("K", self.sK_layout), ("V", self.sV_layout))
        }
        fetch, put = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        ragged = copy_utils.create_ragged_tensor_for_tma(mO, ragged_dim=0, ptr_shift=True)
        q_tile, o_tile = (self.tile_m, self.tile_hdim), (self.tile_m, self.tile_hdimv)
        mQ_rows, hk = mQ, mK.shape[2]
        if const_expr(self.pack_gqa):
            pack = partial(make_packgqa_tiled_tma_atom, qhead_per_kvhead=self.qhead_per_kvhead, head_idx=2)
            tma_q, mQ_tma = pack(fetch, mQ, self.sQ_layout, q_tile)
            tma_o, mO_tma = pack(put, ragged, self.sO_layout, o_tile)
            mQ_rows = pack_gqa_layout(mQ, self.qhead_per_kvhead, hk, head_idx=2)
        else:
            tma_q, mQ_tma = cpasync.make_tiled_tma_atom(fetch, mQ, self.sQ_layout, q_tile)
            tma_o, mO_tma = cpasync.make_tiled_tma_atom(put, ragged, self.sO_layout, o_tile)
        boxes = []
        for t, width in ((mK, self.tile_hdim), (mV, self.tile_hdimv)):
            layout = sm90_utils.make_smem_layout(self.dtype, row_major, (self.box, width))
            boxes.append(cpasync.make_tiled_tma_atom(fetch, t, layout, (self.box, width), 1))
        (tma_k, mK_tma), (tma_v, mV_tma) = boxes
        tiling = TileSchedulerArguments(
            cute.ceil_div(cute.size(mQ_rows.shape[0]), self.tile_m), cute.size(mQ_rows.shape[2]),
            cute.size(used_q.shape[0]), 1, self.page_size * table.shape[1], mQ.shape[1], mV.shape[1],
            total_q=cute.size(mQ_rows.shape[0]), tile_shape_mn=(self.tile_m, self.tile_n), mCuSeqlensQ=at,
            mSeqUsedQ=used_q, qhead_per_kvhead_packgqa=self.qhead_per_kvhead if const_expr(self.pack_gqa) else 1,
            element_size=2, is_persistent=False, lpt=True,
        )  # fmt: skip
        params = SingleTileVarlenScheduler.to_underlying_arguments(tiling)
        scale_2, scale = utils.compute_softmax_scale_log2(scale, None)
        left = Int32(left) if left is not None else None
        right = Int32(right) if right is not None else None
        tensors = mQ_tma, mK_tma, mV_tma, mO_tma, None, at, None, used_q, used_k, table
        layouts = self.sQ_layout, self.sK_layout, self.sV_layout, self.sO_layout, self.sP_layout
        copies = self.gmem_tiled_copy_Q, self.gmem_tiled_copy_K, self.gmem_tiled_copy_V, self.gmem_tiled_copy_O
        storage = self._get_shared_storage_cls()
        atoms, numbers = (tma_q, tma_k, tma_v, tma_o), (scale_2, scale, left, right, None, None)
        others = tiled_mma_qk, tiled_mma_pv, params, SingleTileVarlenScheduler, storage, aux_data, None
        self.kernel(*tensors, *atoms, *numbers, *layouts, *copies, *others).launch(
            grid=SingleTileVarlenScheduler.get_grid_shape(params),
            block=[self.num_threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.jit
    def load(
        self, mQ, mK, mV, sQ, sK, sV, tma_atom_Q, tma_atom_K, tma_atom_V, pipeline_k, pipeline_v, pipeline_q,
        gmem_tiled_copy_Q, mPageTable, blocksparse_tensors, block_info, SeqlenInfoCls, TileSchedulerCls,
    ):  # fmt: skip
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            state = pipelines.make_pipeline_state(PipelineUserType.Producer, self.num_stages)
            work_tile = TileSchedulerCls().initial_work_tile_info()
            if work_tile.is_valid_tile:
                m_block, head_idx, batch_idx, _ = work_tile.tile_idx
                seqlen = SeqlenInfoCls(batch_idx)
                head_kv = head_idx if const_expr(self.pack_gqa) else head_idx // self.qhead_per_kvhead
                rows = seqlen.offset_batch_Q(mQ, batch_idx, dim=3)[None, None, head_idx]
                gQ = cute.local_tile(rows, (self.tile_m, self.tile_hdim), (m_block, 0))
                load_q, _, _ = copy_utils.tma_get_copy_fn(tma_atom_Q, 0, cute.make_layout(1), gQ, sQ, single_stage=True)
                count = const_expr(self.tile_n // self.box)
                per_page = const_expr(self.page_size // self.box)
                load_k = self.boxes_of(mK, sK, tma_atom_K, head_kv, self.tile_hdim)
                load_v = self.boxes_of(mV, sV, tma_atom_V, head_kv, self.tile_hdimv)
                lowest, end = block_info.get_n_block_min_max(seqlen, m_block)
                last = cutlass.max(end - 1, 0)
                places = cute.make_rmem_tensor(count, Int32)
                self.look_up(mPageTable, batch_idx, last, places)
                part = last % per_page
                pipeline_k.producer_acquire(state)
                self.fetch(load_k, places, part, state, pipeline_k)
                pipeline_q.producer_acquire_w_index_phase(0, Int32(1))
                load_q(tma_bar_ptr=pipeline_q.sync_object_full.get_barrier(0))
                for i in cutlass.range(end - 1 - lowest, unroll=1):
                    block = end - 2 - i
                    next_places = cute.make_rmem_tensor(count, Int32)
                    self.look_up(mPageTable, batch_idx, block, next_places)
                    before = state.clone()
                    state.advance()
                    pipeline_k.producer_acquire(state)
                    self.fetch(load_k, next_places, block % per_page, state, pipeline_k)
                    pipeline_v.producer_acquire(before)
                    self.fetch(load_v, places, part, before, pipeline_v)
                    places.store(next_places.load())
                    part = block % per_page
                pipeline_v.producer_acquire(state)
                self.fetch(load_v, places, part, state, pipeline_v)
                state.advance()
            pipeline_v.producer_tail(state)

    def boxes_of(self, cache, shared, atom, head, width):
        """How to fetch each box of a block: box i of a stage, from (part of a page, page)."""
        boxes = cute.local_tile(cache[None, None, head, None], (self.box, width), (None, 0, None))
        boxes = cute.group_modes(boxes, 2, 4)
        found = []
        for i in range(self.tile_n // self.box):
            place = cute.local_tile(shared, (self.box, width), (i, 0, None))
            found.append(copy_utils.tma_get_copy_fn(atom, 0, cute.make_layout(1), boxes, place)[0])
        return found

    @cute.jit
    def look_up(self, table, sequence, block, places):
        """The pages of a block's boxes; a box beyond the table repeats its last, and is masked."""
        for i in cutlass.range_constexpr(cute.size(places)):
            if const_expr(self.box < self.tile_n):
                slot = block * cute.size(places) + i
            else:
                slot = block // (self.page_size // self.box)
            places[i] = table[sequence, cutlass.min(slot, table.shape[1] - 1)]

    @cute.jit
    def fetch(self, loads, places, part, state, pipeline):
        for i in cutlass.range_constexpr(cute.size(places)):
            loads[i](
                src_idx=(part, places[i]),
                dst_idx=state.index,
                tma_bar_ptr=pipeline.producer_get_barrier(state),
            )
        pipeline.producer_commit(state)


def _kernel(
    make, q: Tensor, heads_k: int, dv: int, causal: bool, window: int | None, segment: int | None, sinks: Tensor | None,
    **more,
):  # fmt: skip
    heads, d = q.shape[1], q.shape[2]
    config, keys = _tile_size_fwd_sm90(d, dv, causal and window is None, window is not None), flash_keys(d)
    if config.n_block_size != keys and d != WIDE:
        raise RuntimeError(f"flash-attn-4 takes blocks of {config.n_block_size} keys here")
    return make(
        _DTYPES[q.dtype], d, dv, heads // heads_k, is_causal=causal and window is None, is_local=window is not None,
        pack_gqa=heads > heads_k, tile_m=config.m_block_size, tile_n=keys, num_stages=2,
        num_threads=384, Q_in_regs=False, intra_wg_overlap=config.intra_wg_overlap, mma_pv_is_rs=config.mma_pv_is_rs,
        has_aux_tensors=True, segment_blocks=None if segment is None else segment // keys, sinks=sinks is not None,
        **more,
    )  # fmt: skip


def compiled(
    q: Tensor, k: Tensor, v: Tensor, offsets: tuple, out: Tensor, lse: Tensor, aux: tuple[Tensor, ...], options: tuple
):
    causal, window, segment, sinks, reach = options
    kernel = _kernel(Forward, q, k.shape[1], v.shape[2], causal, window, segment, sinks)
    tensors = [to_cute_tensor(t) for t in (q, k, v, out)]
    offsets = [to_cute_tensor(t, assumed_align=4, leading_dim=0) for t in offsets]
    return cute.compile(
        kernel, *tensors, to_cute_tensor(lse, assumed_align=4), 1.0, *offsets, None, None, None, *reach, None, None,
        AuxData(tuple(to_cute_aux_tensor(t) for t in aux), None), None, None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options="--enable-tvm-ffi",
    )  # fmt: skip


def compiled_paged(q: Tensor, k: Tensor, v: Tensor, step: tuple, out: Tensor, aux: tuple[Tensor, ...], options: tuple):
    window, segment, sinks, reach = options
    kernel = _kernel(PagedForward, q, k.shape[2], v.shape[3], True, window, segment, sinks, page_size=k.shape[1])
    at, used_q, used_k, table = step
    vectors = [to_cute_tensor(t, assumed_align=4, leading_dim=0) for t in (at, used_q, used_k)]
    return cute.compile(
        kernel, *[to_cute_tensor(t) for t in (q, k, v, out)], 1.0, *vectors,
        to_cute_tensor(table, assumed_align=4, leading_dim=1), *reach,
        AuxData(tuple(to_cute_aux_tensor(t) for t in aux), None),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )  # fmt: skip
