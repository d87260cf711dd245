"""flash-attn-4's kernels in the order of csrc/attention/flash.cuh: the forward of training at full speed, its keys cut
into segments on request, and the repeatable backward.

The forward is flash-attn-4's own, with another loop over blocks of keys: the running maximum, sum and output begin anew
at each segment, and segments are joined from the last to the first inside the kernel. It also tells where an output is
NaN: a value that is not finite reaches rows that do not see it (0 times infinity), so such a call is made again by a
kernel that is careful. Compiled kernels are kept for the life of the process: a CUDA graph may hold one.
"""

import functools
import importlib.metadata
import operator
from functools import partial
from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op
from cutlass.pipeline import PipelineUserType
from flash_attn.cute import utils
from flash_attn.cute.cute_dsl_utils import to_cute_aux_tensor, to_cute_tensor
from flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90
from flash_attn.cute.interface import _flash_attn_bwd, _tile_size_fwd_sm90
from flash_attn.cute.pipeline import make_pipeline_state
from flash_attn.cute.softmax import Softmax
from flash_attn.cute.utils import AuxData
from quack import layout_utils, sm90_utils
from torch import Tensor

VERSION = "4.0.0b36"  # whose source this file was written against
KEYS = 128  # of a block
_LN_2 = 0.69314718
_SHARED_BYTES = 226 * 1024  # of a block
_DTYPES = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
_compiled: dict[tuple, object] = {}


@functools.cache
def unavailable() -> str | None:
    """Why this file's kernels cannot be used with what is installed, or None."""
    found = importlib.metadata.version("flash-attn-4")
    return None if found == VERSION else f"flash-attn-4 is {found}, and {VERSION} is what this was written for"


@functools.cache
def versions() -> str:
    """What a verdict on these kernels holds for."""
    names = "flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi"
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def _asm(text: str, *values):
    operands = [Float32(v).ir_value() for v in values]
    constraints = ",".join(["=f", *["f"] * len(operands)])
    dialect = llvm.AsmDialect.AD_ATT
    return Float32(
        llvm.inline_asm(
            T.f32(), operands, text, constraints, has_side_effects=False, is_align_stack=False, asm_dialect=dialect
        )
    )


# Spelled out, so that no compiler chooses what is fused.
@dsl_user_op
def _fma(a, b, c, *, loc=None, ip=None):
    return _asm("fma.rn.f32 $0, $1, $2, $3;", a, b, c)


@dsl_user_op
def _mul(a, b, *, loc=None, ip=None):
    return _asm("mul.rn.f32 $0, $1, $2;", a, b)


@dsl_user_op
def _add(a, b, *, loc=None, ip=None):
    return _asm("add.rn.f32 $0, $1, $2;", a, b)


class Forward(FlashAttentionForwardSm90):
    """The forward on packed sequences; segment_blocks: blocks of keys in a segment, None for one segment."""

    def __init__(self, *args, segment_blocks: int | None, **kwargs):
        super().__init__(*args, **kwargs)
        self.segment_blocks = segment_blocks
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
        self,
        tiled_mma_qk,
        tiled_mma_pv,
        mO,
        mLSE,
        sQ,
        sK,
        sVt,
        sP,
        sO,
        learnable_sink,
        pipeline_k,
        pipeline_v,
        pipeline_q,
        gmem_tiled_copy_O,
        tma_atom_O,
        tidx,
        softmax_scale_log2,
        softmax_scale,
        block_info,
        SeqlenInfoCls,
        AttentionMaskCls,
        TileSchedulerCls,
        blocksparse_tensors,
        aux_data=None,
        fastdiv_mods=None,
    ):
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
        one_block = partial(
            self.mma_one_n_block_intrawg_overlap,
            mma_qk_fn=scores,
            pipeline_k=pipeline_k,
            pipeline_v=pipeline_v,
            acc_O=acc,
            tOrP=tOrP,
            smem_copy_params=copies,
            check_inf=True,
            scores_scale=None,
            softmax=softmax,
        )

        tile_scheduler = TileSchedulerCls()
        work_tile = tile_scheduler.initial_work_tile_info()
        if work_tile.is_valid_tile:  # packed sequences: a block has one tile
            m_block, head_idx, batch_idx, _ = work_tile.tile_idx
            seqlen = SeqlenInfoCls(batch_idx)
            mask = AttentionMaskCls(seqlen)
            mask_fn = partial(
                mask.apply_mask,
                batch_idx=batch_idx,
                head_idx=head_idx,
                m_block=m_block,
                thr_mma=thr_mma_qk,
                mask_causal=self.is_causal,
                mask_local=self.is_local,
            )
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
                    n_block=end - 1,
                    mma_qk_fn=scores,
                    kv_consumer_state=kv_state,
                    pipeline_k=pipeline_k,
                    tOrP=tOrP,
                    smem_copy_params=copies,
                    softmax=softmax,
                    seqlen=seqlen,
                    scores_scale=None,
                    acc_O=acc,
                    mask_fn=mask_fn,
                    is_first_block=True,
                )
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
                    kv_consumer_state=kv_state,
                    pipeline_v=pipeline_v,
                    mma_pv_fn=product,
                    zero_init=not begun,
                    scores_scale=None,
                    softmax=softmax,
                    acc_O=acc,
                )
                end = low
                softmax.row_sum.store(utils.warp_reduce(softmax.row_sum.load(), operator.add, width=4))
                if const_expr(segmented):
                    before = cute.make_fragment_like(softmax.row_max, Float32)
                    after = cute.make_fragment_like(softmax.row_max, Float32)
                    for r in cutlass.range_constexpr(rows):
                        top = utils.fmax(high[r], softmax.row_max[r])
                        base = 0.0 if top == -Float32.inf else top
                        before[r] = cute.math.exp2(_mul(_add(high[r], -base), softmax_scale_log2), fastmath=True)
                        after[r] = cute.math.exp2(
                            _mul(_add(softmax.row_max[r], -base), softmax_scale_log2), fastmath=True
                        )
                        high[r] = top
                        total[r] = _fma(total[r], before[r], _mul(softmax.row_sum[r], after[r]))
                    for i in cutlass.range_constexpr(cute.size(acc)):
                        r = const_expr(row_of[i])
                        acc[i] = _fma(joined[i], before[r], _mul(acc[i], after[r]))
                        joined[i] = acc[i]
            pipeline_q.consumer_release_w_index(0)

            if const_expr(segmented):
                softmax.row_max.store(high.load())
                softmax.row_sum.store(total.load())
            acc_rows = layout_utils.reshape_acc_to_mn(acc)
            probe = Float32(0.0)
            for r in cutlass.range_constexpr(rows):
                norm = softmax.row_sum[r]
                none = norm == 0.0 or norm != norm
                factor = cute.arch.rcp_approx(norm if not none else 1.0)
                for c in cutlass.range_constexpr(cute.size(acc_rows, mode=[1])):
                    # + 0: whether a row met blocks that it does not see, which turn -0 into 0, must not show
                    acc_rows[r, c] = _mul(_add(acc_rows[r, c], 0.0), factor)
                    probe += acc_rows[r, c]
                log = cute.math.log2(norm, fastmath=True)
                lse = _mul(_fma(softmax_scale_log2, softmax.row_max[r], log), _LN_2)
                softmax.row_sum[r] = lse if not none else -Float32.inf
            if probe != probe:
                aux_data.tensors[0][0] = Int32(1)
            self.epilogue(
                acc,
                softmax.row_sum,
                mO,
                mLSE,
                sO,
                seqlen,
                gmem_tiled_copy_O,
                tma_atom_O,
                tiled_mma_pv,
                tidx,
                m_block,
                head_idx,
                batch_idx,
            )


def _reach(window: int | None) -> tuple[int | None, int | None]:
    """A window as the keys seen before a query's place and behind it."""
    return (None, None) if window is None else (min(window - 1, 1 << 30), 0)


def _compile(q: Tensor, k: Tensor, v: Tensor, offsets: tuple, out: Tensor, lse: Tensor, odd: Tensor, options: tuple):
    causal, window, segment = options
    heads, d, dv = q.shape[1], q.shape[2], v.shape[2]
    config = _tile_size_fwd_sm90(d, dv, causal and window is None, window is not None)
    if config.n_block_size != KEYS:
        raise RuntimeError(f"flash-attn-4 takes blocks of {config.n_block_size} keys here")
    kernel = Forward(
        _DTYPES[q.dtype],
        d,
        dv,
        heads // k.shape[1],
        is_causal=causal and window is None,
        is_local=window is not None,
        pack_gqa=heads > k.shape[1],
        tile_m=config.m_block_size,
        tile_n=config.n_block_size,
        num_stages=2,
        num_threads=384,
        Q_in_regs=False,
        intra_wg_overlap=config.intra_wg_overlap,
        mma_pv_is_rs=config.mma_pv_is_rs,
        has_aux_tensors=True,
        segment_blocks=None if segment is None else segment // KEYS,
    )
    tensors = [to_cute_tensor(t) for t in (q, k, v, out)]
    offsets = [to_cute_tensor(t, assumed_align=4, leading_dim=0) for t in offsets]
    reach = _reach(window)
    return cute.compile(
        kernel,
        *tensors,
        to_cute_tensor(lse, assumed_align=4),
        1.0,
        *offsets,
        None,
        None,
        None,
        *reach,
        None,
        None,
        AuxData((to_cute_aux_tensor(odd),), None),
        None,
        None,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
    segment: int | None,
    out: Tensor,
    lse: Tensor,
    odd: Tensor,
) -> None:
    """Writes out (T, Hq, Dv), lse (Hq, T) and, where some output is NaN, 1 into odd (1,) int32, which holds 0."""
    group = q.shape[1] // k.shape[1]
    key = (q.device, q.dtype, group, q.shape[2], v.shape[2], causal, window is None, segment)
    kernel = _compiled.get(key)
    if kernel is None:
        options = causal, window, segment
        kernel = _compiled[key] = _compile(q, k, v, (cu_seqlens, cu_seqlens_k), out, lse, odd, options)
    reach = _reach(window)
    offsets = cu_seqlens, cu_seqlens_k
    kernel(q, k, v, out, lse, scale, *offsets, None, None, None, *reach, None, None, AuxData((odd,), None), None, None)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; lse as `forward` writes it."""
    reach = _reach(window)
    return _flash_attn_bwd(
        q,
        k,
        v,
        out,
        dout,
        lse,
        softmax_scale=scale,
        causal=causal and window is None,
        window_size_left=reach[0],
        window_size_right=reach[1],
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=q.shape[0],
        max_seqlen_k=k.shape[0],
        deterministic=True,
    )
