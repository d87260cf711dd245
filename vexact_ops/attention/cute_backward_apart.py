"""The backward of wide heads in two kernels, with cute_backward.py's bits: one for dk and dv, one for dq.

Where heads are wide, blocks of keys are small, and a sum of dq in memory is passed through by one block of keys after
another, so often that memory takes longer than the products. Here dq's kernel keeps a block of queries and goes through
the keys, with the sum in registers: the product of each block of keys begins from zero and is added as memory adds it.
Scores and their gradients are computed twice for that. dk and dv are sums over queries, and the same in any block of
keys: theirs are larger here, for dq's sums leave room.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.pipeline import Agent, CooperativeGroup, PipelineUserType, make_pipeline_state
from cutlass.utils import LayoutEnum
from cutlass.utils.hopper_helpers import make_trivial_tiled_mma
from flash_attn.cute import pipeline, utils
from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.cute_dsl_utils import assume_tensor_aligned
from flash_attn.cute.mask import AttentionMask
from flash_attn.cute.seqlen_info import SeqlenInfoQK
from flash_attn.cute.tile_scheduler import SingleTileVarlenScheduler, TileSchedulerArguments
from quack import copy_utils, layout_utils, sm90_utils

from .cute_arithmetic import add_flushed

_LOG2_E = 1.4426950408889634
_WIDTH = 64  # columns of a product of dq: with the sum of all columns, two of these fit into registers
GROUPS = 2  # warp groups, of a block of queries each
_STAGES = 2
_FIRST_BARRIER = 1  # of a warp group


class QueryGradient:
    """dq. A warp group takes a block of queries of one head, and its thread block the next one too.

    group   heads that share keys
    rows    queries of a block; keys: keys of a block, which cut dq's sum
    """

    arch = 90

    def __init__(self, dtype, d: int, dv: int, *, group: int, causal: bool, rows: int, keys: int):
        self.dtype, self.d, self.dv = dtype, d, dv
        self.group, self.causal, self.rows, self.keys = group, causal, rows, keys
        if rows != 64 or d % _WIDTH or dv % _WIDTH:
            raise AssertionError("a case that the kernel below does not know")

    def _layouts(self):
        def staged(rows, width, stages):
            return sm90_utils.make_smem_layout(self.dtype, LayoutEnum.ROW_MAJOR, (rows, width), stages)

        self.q_layout, self.do_layout = staged(self.rows, self.d, GROUPS), staged(self.rows, self.dv, GROUPS)
        self.k_layout, self.v_layout = staged(self.keys, self.d, _STAGES), staged(self.keys, self.dv, _STAGES)
        self.bytes_of = {
            name: cute.size_in_bytes(self.dtype, cute.select(layout, mode=[0, 1]))
            for name, layout in (
                ("q", self.q_layout), ("do", self.do_layout), ("k", self.k_layout), ("v", self.v_layout),
            )
        }  # fmt: skip

    def _storage(self):
        def room(layout):
            return cute.struct.Align[cute.struct.MemRange[self.dtype, cute.cosize(layout)], 1024]

        @cute.struct
        class Storage:
            q_ready: cute.struct.MemRange[cutlass.Int64, GROUPS * 2]
            k_ready: cute.struct.MemRange[cutlass.Int64, _STAGES * 2]
            v_ready: cute.struct.MemRange[cutlass.Int64, _STAGES * 2]
            q: room(self.q_layout)
            do: room(self.do_layout)
            k: room(self.k_layout)
            v: room(self.v_layout)

        return Storage

    @cute.jit
    def __call__(self, mQ, mK, mV, mdO, mLSE, mdPsum, mdQ, scale, at, at_k, until, stream):
        mQ, mK, mV, mdO, mLSE, mdPsum, mdQ = [assume_tensor_aligned(t) for t in (mQ, mK, mV, mdO, mLSE, mdPsum, mdQ)]
        mQ, mK, mV, mdO, mdQ = [layout_utils.select(t, [0, 2, 1]) for t in (mQ, mK, mV, mdO, mdQ)]
        mLSE, mdPsum = [layout_utils.select(t, [1, 0]) for t in (mLSE, mdPsum)]
        self._layouts()
        operand = warpgroup.OperandMajorMode
        mma_s = make_trivial_tiled_mma(
            self.dtype, self.dtype, operand.K, operand.K, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(64, self.keys)
        )
        mma_dq = make_trivial_tiled_mma(
            self.dtype, self.dtype, operand.K, operand.MN, Float32, atom_layout_mnk=(1, 1, 1), tiler_mn=(64, _WIDTH),
            a_source=warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        fetch, put = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        ragged = copy_utils.create_ragged_tensor_for_tma(mdQ, ragged_dim=0, ptr_shift=True)
        copies = [
            cpasync.make_tiled_tma_atom(op, t, cute.select(layout, mode=[0, 1]), shape)
            for op, t, layout, shape in (
                (fetch, mQ, self.q_layout, (self.rows, self.d)),
                (fetch, mK, self.k_layout, (self.keys, self.d)),
                (fetch, mV, self.v_layout, (self.keys, self.dv)),
                (fetch, mdO, self.do_layout, (self.rows, self.dv)),
                (put, ragged, self.q_layout, (self.rows, self.d)),
            )
        ]
        queries, sequences = cute.size(mQ.shape[0]), cute.size(at.shape[0]) - 1
        tile = (self.rows * GROUPS, self.keys)
        tiling = TileSchedulerArguments(
            cute.ceil_div(queries, tile[0]), cute.size(mQ.shape[2]), sequences, 1, cute.size(mK.shape[0]), self.d,
            self.dv, total_q=queries, tile_shape_mn=tile, mCuSeqlensQ=at, mSeqUsedQ=None, qhead_per_kvhead_packgqa=1,
            element_size=2, is_persistent=False, lpt=self.causal, head_swizzle=False, cu_total_m_blocks_ptr=until,
        )  # fmt: skip
        params = SingleTileVarlenScheduler.to_underlying_arguments(tiling)
        self.kernel(
            *[tensor for _, tensor in copies], *[atom for atom, _ in copies], mLSE, mdPsum, at, at_k, self.q_layout,
            self.k_layout, self.v_layout, self.do_layout, mma_s, mma_dq, scale * _LOG2_E, scale, params,
            self._storage(),
        ).launch(
            grid=SingleTileVarlenScheduler.get_grid_shape(params), block=[(GROUPS + 1) * 128, 1, 1], stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, mQ, mK, mV, mdO, mdQ, copy_q, copy_k, copy_v, copy_do, copy_dq, mLSE, mdPsum, at, at_k, q_layout,
        k_layout, v_layout, do_layout, mma_s, mma_dq, scale_2, scale, params, Storage: cutlass.Constexpr,
    ):  # fmt: skip
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (copy_q, copy_k, copy_v, copy_do, copy_dq):
                cpasync.prefetch_descriptor(atom)
        storage = cutlass.utils.SmemAllocator().allocate(Storage)

        def pipe(barriers, stages, size, warps, last=False):
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=barriers.data_ptr(), num_stages=stages, producer_group=CooperativeGroup(Agent.Thread),
                consumer_group=CooperativeGroup(Agent.Thread, warps), tx_count=size, defer_sync=not last,
            )  # fmt: skip

        size = self.bytes_of
        pipe_q = pipe(storage.q_ready, GROUPS, size["q"] + size["do"], 4)
        pipe_k = pipe(storage.k_ready, _STAGES, size["k"], 4 * GROUPS)
        pipe_v = pipe(storage.v_ready, _STAGES, size["v"], 4 * GROUPS, last=True)
        sQ = storage.q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sdO = storage.do.get_tensor(do_layout.outer, swizzle=do_layout.inner)
        sK = storage.k.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        sV = storage.v.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        info = BlockInfo(self.rows, self.keys, self.causal, False, False, None, None, qhead_per_kvhead_packgqa=1)
        work_tile = SingleTileVarlenScheduler.create(params).initial_work_tile_info()
        if work_tile.is_valid_tile:
            pair, head, sequence, _ = work_tile.tile_idx
            seqlen = SeqlenInfoQK.create(
                sequence, mQ.shape[0], mK.shape[0], mCuSeqlensQ=at, mCuSeqlensK=at_k, tile_m=self.rows,
                tile_n=self.keys,
            )  # fmt: skip
            if warp < 4:
                cute.arch.setmaxregister_decrease(24)
                if warp == 0:
                    self.load(
                        pair, head, sequence, seqlen, info, (mQ, mK, mV, mdO), (sQ, sK, sV, sdO),
                        (copy_q, copy_k, copy_v, copy_do), (pipe_q, pipe_k, pipe_v),
                    )  # fmt: skip
            else:
                cute.arch.setmaxregister_increase(240)
                self.sums(
                    pair, head, sequence, seqlen, info, (mLSE, mdPsum, mdQ), (sQ, sK, sV, sdO), copy_dq,
                    (pipe_q, pipe_k, pipe_v), (mma_s, mma_dq), scale_2, scale,
                )  # fmt: skip

    @cute.jit
    def count(self, pair, seqlen, info):
        """The blocks of keys that some warp group goes through."""
        end = Int32(0)
        for group in cutlass.range_constexpr(GROUPS):
            end = cutlass.max(end, self.end(pair * GROUPS + group, seqlen, info))
        return end

    @cute.jit
    def end(self, block, seqlen, info):
        _, end = info.get_n_block_min_max(seqlen, block)
        if block * self.rows >= seqlen.seqlen_q:
            end = Int32(0)
        return cutlass.max(end, 0)

    @cute.jit
    def load(self, pair, head, sequence, seqlen, info, tensors, shared, atoms, pipes):
        mQ, mK, mV, mdO = tensors
        sQ, sK, sV, sdO = shared
        copy_q, copy_k, copy_v, copy_do = atoms
        pipe_q, pipe_k, pipe_v = pipes
        one, head_kv = cute.make_layout(1), head // self.group
        gQ = cute.local_tile(
            seqlen.offset_batch_Q(mQ, sequence, dim=3)[None, None, head], (self.rows, self.d), (None, 0)
        )
        gdO = cute.local_tile(
            seqlen.offset_batch_Q(mdO, sequence, dim=3)[None, None, head], (self.rows, self.dv), (None, 0)
        )
        gK = cute.local_tile(
            seqlen.offset_batch_K(mK, sequence, dim=3)[None, None, head_kv], (self.keys, self.d), (None, 0)
        )
        gV = cute.local_tile(
            seqlen.offset_batch_K(mV, sequence, dim=3)[None, None, head_kv], (self.keys, self.dv), (None, 0)
        )
        load_q, _, _ = copy_utils.tma_get_copy_fn(copy_q, 0, one, gQ, sQ)
        load_do, _, _ = copy_utils.tma_get_copy_fn(copy_do, 0, one, gdO, sdO)
        load_k, _, _ = copy_utils.tma_get_copy_fn(copy_k, 0, one, gK, sK)
        load_v, _, _ = copy_utils.tma_get_copy_fn(copy_v, 0, one, gV, sV)
        q_state = make_pipeline_state(PipelineUserType.Producer, GROUPS)
        state = make_pipeline_state(PipelineUserType.Producer, _STAGES)
        for group in cutlass.range_constexpr(GROUPS):
            pipe_q.producer_acquire(q_state)
            ready = pipe_q.producer_get_barrier(q_state)
            load_q(src_idx=pair * GROUPS + group, dst_idx=q_state.index, tma_bar_ptr=ready)
            load_do(src_idx=pair * GROUPS + group, dst_idx=q_state.index, tma_bar_ptr=ready)
            q_state.advance()
        for block in cutlass.range(self.count(pair, seqlen, info), unroll=1):
            pipe_k.producer_acquire(state)
            load_k(src_idx=block, dst_idx=state.index, tma_bar_ptr=pipe_k.producer_get_barrier(state))
            pipe_v.producer_acquire(state)
            load_v(src_idx=block, dst_idx=state.index, tma_bar_ptr=pipe_v.producer_get_barrier(state))
            state.advance()

    @cute.jit
    def sums(self, pair, head, sequence, seqlen, info, tensors, shared, copy_dq, pipes, products, scale_2, scale):
        mLSE, mdPsum, mdQ = tensors
        sQ, sK, sV, sdO = shared
        pipe_q, pipe_k, pipe_v = pipes
        mma_s, mma_dq = products
        thread = cute.arch.thread_idx()[0] - 128
        group = cute.arch.make_warp_uniform(thread // 128)
        thread = thread % 128
        block = pair * GROUPS + group
        count = self.count(pair, seqlen, info)
        end = self.end(block, seqlen, info)
        if const_expr(self.causal):
            whole = info.get_n_block_min_causal_local_mask(seqlen, block, Int32(0))
        else:
            whole = seqlen.seqlen_k // self.keys
        whole = cutlass.min(whole, end)

        leader = mma_s.get_slice(0)
        _, tSrQ, tSrK = sm90_utils.partition_fragment_ABC(leader, (self.rows, self.keys, self.d), sQ, sK)
        _, tPrO, tPrV = sm90_utils.partition_fragment_ABC(leader, (self.rows, self.keys, self.dv), sdO, sV)
        sKt = layout_utils.transpose_view(sK)
        of_dq = mma_dq.get_slice(0)
        parts = [
            of_dq.make_fragment_B(of_dq.partition_B(cute.local_tile(sKt, (_WIDTH, self.keys), (i, 0, None))))
            for i in range(self.d // _WIDTH)
        ]
        shape = self.rows, self.keys
        total = cute.make_rmem_tensor(mma_dq.partition_shape_C((self.rows, self.d)), Float32)
        total.fill(0.0)

        thr_s = mma_s.get_slice(thread)
        mask = AttentionMask(self.rows, self.keys, seqlen)
        # Of a thread's two rows.
        lse, dpsum = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, Float32)
        lse.fill(Float32.inf)
        dpsum.fill(0.0)
        if end > 0:
            row = block * self.rows + thread // 32 * 16 + thread % 32 // 4
            row_lse = seqlen.offset_batch_Q(mLSE, sequence, dim=2, padded=True)[None, head]
            row_dpsum = seqlen.offset_batch_Q(mdPsum, sequence, dim=2, padded=True)[None, head]
            for r in cutlass.range_constexpr(2):
                lse[r] = row_lse[row + 8 * r]
                dpsum[r] = row_dpsum[row + 8 * r]

        state = make_pipeline_state(PipelineUserType.Consumer, _STAGES)
        pipe_q.consumer_wait_w_index_phase(group, Int32(0))
        for masked in cutlass.range_constexpr(2):  # order: blocks of keys from the first to the last; masked ones last
            first = Int32(0) if const_expr(masked == 0) else whole
            last = whole if const_expr(masked == 0) else end
            for n in cutlass.range(first, last, unroll=1):
                pipe_k.consumer_wait(state, pipe_k.consumer_try_wait(state))
                s = sm90_utils.gemm_zero_init(mma_s, shape, tSrQ, tSrK, A_idx=group, B_idx=state.index, wg_wait=-1)
                pipe_v.consumer_wait(state, pipe_v.consumer_try_wait(state))
                dp = sm90_utils.gemm_zero_init(mma_s, shape, tPrO, tPrV, A_idx=group, B_idx=state.index, wg_wait=1)
                if const_expr(masked == 1):
                    mask.apply_mask(
                        s, sequence, head, block, n, thr_s, mask_seqlen=True, mask_causal=self.causal, mask_local=False
                    )
                p = layout_utils.reshape_acc_to_mn(s)
                for r in cutlass.range_constexpr(2):
                    for c in cutlass.range(cute.size(p, mode=[1]), unroll_full=True):
                        p[r, c] = cute.math.exp2(p[r, c] * scale_2 - lse[r], fastmath=True)
                warpgroup.wait_group(0)
                pipe_v.consumer_release(state)
                ds = layout_utils.reshape_acc_to_mn(dp)
                for r in cutlass.range_constexpr(2):
                    for c in cutlass.range(cute.size(ds, mode=[1]), unroll_full=True):
                        ds[r, c] = p[r, c] * (ds[r, c] - dpsum[r])
                rounded = utils.cvt_f16(layout_utils.reshape_acc_to_frgA(dp), self.dtype)
                for i in cutlass.range_constexpr(len(parts)):  # each beside the sums of the one before
                    made = sm90_utils.gemm_zero_init(
                        mma_dq, (self.rows, _WIDTH), rounded, parts[i], B_idx=state.index, wg_wait=0
                    )
                    if const_expr(i == len(parts) - 1):
                        pipe_k.consumer_release(state)
                    self.add(total, made, i)
                state.advance()
        for _ in cutlass.range(end, count, unroll=1):  # what the other warp group has yet to see
            pipe_k.consumer_wait(state)
            pipe_k.consumer_release(state)
            pipe_v.consumer_wait(state)
            pipe_v.consumer_release(state)
            state.advance()

        total.store(total.load() * scale)
        put, _, _ = copy_utils.get_smem_store_C(mma_dq, sQ, thread, position_independent=True)
        cute.arch.barrier(barrier_id=_FIRST_BARRIER + group, number_of_threads=128)
        put(total, dst_idx=group)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=_FIRST_BARRIER + group, number_of_threads=128)
        if block * self.rows < seqlen.seqlen_q and cute.arch.make_warp_uniform(thread // 32) == 0:
            rows = seqlen.offset_batch_Q(mdQ, sequence, dim=3, ragged=True)[None, None, head]
            gdQ = cute.local_tile(rows, (self.rows, self.d), (None, 0))
            store, _, _ = copy_utils.tma_get_copy_fn(copy_dq, 0, cute.make_layout(1), sQ, gdQ)
            store(src_idx=group, dst_idx=block)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def add(self, total, product, part: cutlass.Constexpr):
        for i in cutlass.range_constexpr(cute.size(product)):
            at = const_expr(part * cute.size(product) + i)
            total[at] = add_flushed(total[at], product[i])
