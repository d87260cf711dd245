// Every native schema on one screen. A native op checks, takes pointers and launches on the current stream; it writes
// into the outputs it is given and allocates none. Python owns meaning, autograd and torch.compile (vexact::*).
#include "common/float_mode.h"
#include "common/isa.h"
#include "common/tensor.h"

STABLE_TORCH_LIBRARY(vexact_native, m) {
  // about this library
  m.def("cpu_isa(str? request=None) -> str");
  m.def("built_with_cuda() -> bool");
  m.def("source_digests() -> str");
  m.def("float_mode(int? request=None) -> int");

  // ranks on GPUs of one host (common/peers.cu)
  m.def("peers_take(Tensor(a!) found, int ranks, int device) -> ()");
  m.def("peers_land(Tensor(a!) found, int bytes, int device) -> ()");
  m.def("peers_open(Tensor handle, int device) -> int");
  m.def("peers_close(int base, bool own, int device) -> ()");
  m.def("peers_gather(Tensor x, Tensor(a!) out, Tensor bases, int rank, int limit_ms, Tensor missing) -> ()");
  m.def("peers_gather_packed(Tensor x, Tensor(a!) out, Tensor bases, int rank, int limit_ms, Tensor missing) -> ()");
  m.def("peers_meet(Tensor(a!) landing, Tensor bases, int rank, int limit_ms, Tensor missing) -> ()");
  m.def("peers_place(Tensor? x, Tensor(a!) out, int since, Tensor bases, int rank, int limit_ms, Tensor missing) -> ()");
  m.def("peers_norm(Tensor? x, Tensor weight, Tensor residual, Tensor(a!) y, Tensor(b!) added, float eps, bool gemma, bool settled, int since, Tensor bases, int rank, int limit_ms, Tensor missing) -> ()");
  m.def("peers_norm_packed(Tensor x, Tensor weight, Tensor residual, Tensor(a!) y, Tensor(b!) added, float eps, bool gemma, Tensor bases, int rank, int limit_ms, Tensor missing) -> ()");

  // linear
  m.def("linear_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out) -> ()");
  m.def("linear_dx(Tensor dy, Tensor weight, Tensor(a!) dx) -> ()");
  m.def("linear_dweight(Tensor dy, Tensor x, Tensor(a!) dweight) -> ()");
  m.def("linear_dbias(Tensor dy, Tensor(a!) dbias) -> ()");
  m.def("bmm(Tensor a, Tensor b, Tensor(a!) out) -> ()");
  // linear on a GPU: the numbers of its kernels, by what they are made with (vexact_ops/linear/tiles.py), the table of
  // those in use, and cublasLt's algorithms: tile, stages, cluster, swizzle and eight words of each
  m.def("linear_matmul(Tensor a, Tensor b, bool b_t, Tensor? bias, Tensor(a!) out, bool resume, int kernel) -> int");
  m.def("linear_send(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, int kernel, Tensor bases, int rank) -> int");
  m.def("linear_received(Tensor? x, Tensor weight, Tensor? bias, int m, int rows, int boxes, int ring, int ahead, int lead, int per_sm, int since, Tensor bases, int rank, int limit_ms, Tensor missing) -> ()");
  m.def("linear_skinny(int rows, int tokens, int boxes, int ring, int ahead, int lead, int per_sm) -> int");
  m.def("linear_tiled(int rows, int tokens, int cluster, int ring) -> int");
  m.def("linear_fma(int rows, int columns) -> int");
  m.def("linear_resumed(int group) -> int");
  m.def("linear_cublaslt(int[] words) -> int");
  m.def("linear_class(int size, bool rows) -> int");
  m.def("linear_choose(Tensor a, Tensor b, bool b_t, Tensor? bias, Tensor out, bool resume, int kernel) -> bool");
  m.def("linear_cublaslt_version(str paths) -> int");
  m.def("linear_cublaslt_algorithms(int device, bool is_f32, bool is_bf16, bool out_f32, bool bias, bool a_k, bool b_k, int m, int n, int k, int most) -> int[]");

  // grouped_linear: false, with nothing written, where offsets do not ascend from 0 to at most the number of rows
  m.def("grouped_linear_fwd(Tensor x, Tensor weight, Tensor offsets, Tensor(a!) out) -> bool");
  m.def("grouped_linear_dx(Tensor dy, Tensor weight, Tensor offsets, Tensor(a!) dx) -> bool");
  m.def("grouped_linear_dweight(Tensor dy, Tensor x, Tensor offsets, Tensor(a!) dweight) -> bool");
  // grouped_linear on SM90: offsets and order of any values touch no memory that is not the arguments'
  m.def("grouped_gather(Tensor x, Tensor offsets, Tensor order, int top_k, Tensor(a!) out) -> ()");
  m.def("grouped_bound(Tensor offsets, int rows, Tensor(a!) out) -> ()");
  m.def("grouped_product(Tensor x, Tensor weight, Tensor offsets, int mode, bool gelu, int units, int stages, Tensor(a!) out, Tensor(b!)? kept, Tensor? bases=None, int rank=0) -> ()");
  m.def("grouped_sums(Tensor dy, Tensor x, Tensor offsets, int units, int stages, Tensor(a!) out) -> ()");
  m.def("grouped_tail(Tensor offsets, Tensor(a!) out) -> ()");
  // few rows per expert on SM90: false, with nothing written, where it does not take these tensors; values of offsets and order are safe
  m.def("grouped_small_m(Tensor x, Tensor weight, Tensor offsets, Tensor? order, int top_k, int activation, int groups, int boxes, int blocks, int percent, int piece, Tensor(a!) out) -> bool");
  m.def("grouped_small_m_lent(Tensor on) -> int");

  // moe_route
  m.def("moe_route_fwd(Tensor logits, int top_k, bool sigmoid, bool normalize, int groups, int top_groups, Tensor? bias, float scale, Tensor(a!) weights, Tensor(b!) ids) -> ()");
  m.def("moe_route_bwd(Tensor dweights, Tensor logits, Tensor weights, Tensor ids, bool sigmoid, bool normalize, float scale, Tensor(a!) dlogits) -> ()");

  // fused_moe
  m.def("moe_plan(Tensor ids, Tensor(a!) offsets, Tensor(b!) order, Tensor(c!) position, Tensor(d!)? counts) -> ()");
  m.def("moe_plan_scratch(int slots) -> int");
  m.def("moe_gather(Tensor x, Tensor order, Tensor(a!) out) -> ()");
  m.def("moe_scatter(Tensor x, Tensor position, Tensor(a!) out) -> ()");
  m.def("moe_combine(Tensor y, Tensor position, Tensor? weights, Tensor(a!) out) -> ()");
  m.def("moe_gate_bwd(Tensor h, Tensor da, Tensor order, Tensor weights, Tensor offsets, bool gelu, Tensor(a!) dh, Tensor(b!) scaled, Tensor(c!) dweights) -> ()");
  m.def("moe_add_bias(Tensor(a!) y, Tensor bias, Tensor ids, Tensor order, Tensor offsets) -> ()");
  m.def("moe_swiglu_fwd(Tensor h, Tensor bias, Tensor ids, Tensor order, Tensor offsets, Tensor(a!) a) -> ()");
  m.def("moe_swiglu_bwd(Tensor h, Tensor bias, Tensor da, Tensor of_bias, Tensor ids, Tensor order, Tensor weights, Tensor offsets, Tensor(a!) dh, Tensor(b!) scaled, Tensor(c!) dweights) -> ()");

  // rmsnorm
  m.def("rmsnorm_fwd(Tensor x, Tensor weight, Tensor? residual, float eps, bool gemma, Tensor(a!) y, Tensor(b!)? new_residual, Tensor(c!) rstd) -> ()");
  m.def("rmsnorm_bwd(Tensor dy, Tensor? dnew_residual, Tensor x, Tensor weight, Tensor rstd, bool gemma, Tensor(a!) dx, Tensor(b!) dweight) -> ()");
  m.def("rmsnorm_gated_fwd(Tensor x, Tensor gate, Tensor weight, float eps, Tensor(a!) y, Tensor(b!) rstd) -> ()");
  m.def("rmsnorm_gated_bwd(Tensor dy, Tensor x, Tensor gate, Tensor weight, Tensor rstd, Tensor(a!) dx, Tensor(b!) dgate, Tensor(c!) dweight) -> ()");

  // layer_norm
  m.def("layer_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps, Tensor(a!) y, Tensor(b!)? new_residual, Tensor(c!) mean, Tensor(d!) rstd) -> ()");
  m.def("layer_norm_bwd(Tensor dy, Tensor? dnew_residual, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, Tensor(a!) dx, Tensor(b!)? dweight, Tensor(c!)? dbias) -> ()");

  // rope
  m.def("rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool transpose, Tensor(a!) q_out, Tensor(b!) k_out) -> ()");
  m.def("rope_cos_sin(Tensor positions, Tensor? axes, Tensor inv_freq, float scaling, Tensor(a!) cos, Tensor(b!) sin) -> ()");

  // silu_mul
  m.def("silu_mul_fwd(Tensor gate, Tensor up, bool gelu, Tensor(a!) y) -> ()");
  m.def("silu_mul_bwd(Tensor dy, Tensor gate, Tensor up, bool gelu, Tensor(a!) dgate, Tensor(b!) dup) -> ()");
  m.def("sigmoid_mul_fwd(Tensor x, Tensor gate, Tensor(a!) y) -> ()");
  m.def("sigmoid_mul_bwd(Tensor dy, Tensor x, Tensor gate, Tensor(a!) dx, Tensor(b!) dgate) -> ()");
  m.def("gelu_fwd(Tensor x, bool tanh, Tensor(a!) y) -> ()");
  m.def("gelu_bwd(Tensor dy, Tensor x, bool tanh, Tensor(a!) dx) -> ()");

  // log_softmax, mean
  m.def("log_softmax_fwd(Tensor x, Tensor(a!) y, Tensor(b!) lse) -> ()");
  m.def("log_softmax_bwd(Tensor dy, Tensor x, Tensor lse, Tensor(a!) dx) -> ()");
  m.def("mean_fwd(Tensor x, float divisor, Tensor(a!) y) -> ()");
  m.def("mean_bwd(Tensor dy, float divisor, Tensor(a!) dx) -> ()");

  // linear_cross_entropy
  m.def("linear_logprobs_fwd(Tensor hidden, Tensor weight, Tensor target, Tensor temperature, float softcap, Tensor(a!) workspace, Tensor(b!) logprob, Tensor(c!)? entropy, Tensor(d!) lse) -> ()");
  m.def("linear_logprobs_bwd(Tensor dlogprob, Tensor? dentropy, Tensor hidden, Tensor weight, Tensor target, Tensor temperature, float softcap, Tensor? entropy, Tensor lse, Tensor(a!) workspace, Tensor(b!)? sums, Tensor(c!)? dhidden, Tensor(d!)? dweight) -> ()");
  m.def("softcap_fwd(Tensor x, float cap, Tensor(a!) y) -> ()");
  m.def("softcap_bwd(Tensor dy, Tensor x, float cap, Tensor(a!) dx) -> ()");
  m.def("token_sum(Tensor x, Tensor(a!) out) -> ()");
  // on SM90: the sums of blocks of logits, or their gradients, and the products with those; (pieces, T, piece) bf16 hold them
  m.def("head_blocks(Tensor hidden, Tensor weight, Tensor target, Tensor temperature, float softcap, int first, int columns, Tensor? live, int live_from, Tensor(a!)? parts, Tensor(b!)? target_logit, Tensor(c!)? kept) -> ()");
  m.def("head_gradients(Tensor hidden, Tensor weight, Tensor target, Tensor temperature, float softcap, int first, int columns, Tensor? live, Tensor lse, Tensor dlogprob, Tensor? dentropy, Tensor? entropy, Tensor(a!) d) -> ()");
  m.def("head_unit_gradients(Tensor(a!) kept, Tensor parts, Tensor lse, Tensor logprob, Tensor target, Tensor? live, int first, int columns) -> ()");
  m.def("head_dhidden(Tensor d, Tensor weight, Tensor? start, Tensor? scale, Tensor? live, Tensor(a!) out) -> ()");
  m.def("head_dweight(Tensor d, Tensor hidden, Tensor? scale, Tensor? factor, Tensor? live, Tensor(a!) out) -> ()");

  // attention: false, with nothing written, where offsets, lengths or pages are out of range
  m.def("attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_seqlens_k, int max_seqlen, Tensor? sinks, float scale, float softcap, int window, int segment, bool causal, Tensor(a!) out, Tensor(b!) lse) -> bool");
  m.def("attention_paged_fwd(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens, Tensor cu_seqlens_q, int max_seqlen_q, Tensor? sinks, float scale, float softcap, int window, int segment, Tensor(a!) out) -> bool");
  m.def("attention_varlen_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens, Tensor cu_seqlens_k, Tensor? sinks, float scale, float softcap, int window, bool causal, Tensor(a!) delta, Tensor(b!) dq, Tensor(c!) dk, Tensor(d!) dv, Tensor(e!)? dsinks) -> ()");

  // attention in the order of csrc/attention/flash.cuh; values out of range touch no memory that is not the arguments'
  m.def("attention_flash_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_seqlens_k, Tensor? sinks, float scale, int window, int segment, bool causal, Tensor? wanted, Tensor(a!) out, Tensor(b!) lse) -> ()");
  m.def("attention_flash_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens, Tensor cu_seqlens_q, int max_seqlen_q, Tensor? sinks, float scale, int window, int segment, bool settled, Tensor? wanted, Tensor(a!)? partial, Tensor(b!) out) -> ()");
  m.def("attention_flash_few(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens, Tensor cu_seqlens_q, int max_seqlen_q, Tensor? sinks, float scale, int window, bool settled, int tiles, Tensor(a!) out) -> ()");
  m.def("attention_latent_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_seqlens_k, float scale, int window, int segment, bool causal, Tensor(a!)? joined, Tensor(b!) out, Tensor(c!) lse) -> ()");
  m.def("attention_latent_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens, Tensor cu_seqlens_q, float scale, int window, int segment, Tensor(a!)? joined, Tensor(b!)? partial, Tensor(c!) out) -> ()");
  m.def("attention_packed_plan(Tensor cu_seqlens, Tensor? cu_seqlens_k, int tokens, int keys, Tensor(a!) plan) -> ()");
  m.def("attention_paged_plan(Tensor cu_seqlens_q, Tensor context_lens, int tokens, int keys, Tensor(a!) plan) -> ()");

  // kv_cache: the index of the first token with a slot out of range, with nothing written, or -1
  m.def("kv_cache_store(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> int");

  // causal_conv: false, with nothing written, where offsets, slots or lengths are out of range
  m.def("causal_conv_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, bool silu, Tensor(a!) y) -> bool");
  m.def("causal_conv_paged_fwd(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) taps, Tensor slots, Tensor context_lens, Tensor cu_seqlens_q, bool silu, Tensor(b!) y) -> bool");
  m.def("causal_conv_bwd(Tensor dy, Tensor x, Tensor weight, Tensor? bias, Tensor cu_seqlens, bool silu, Tensor(a!) dpre, Tensor(b!) dx, Tensor(c!) dweight, Tensor(d!)? dbias) -> ()");

  // gated_delta: false, with nothing written, where offsets, slots, lengths, g or beta are out of range
  m.def("gated_delta_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm, Tensor(a!) out, Tensor(b!)? final_state) -> bool");
  m.def("gated_delta_paged_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor(b!) open_k, Tensor(c!) open_u, Tensor(d!) open_g, Tensor slots, Tensor context_lens, Tensor cu_seqlens_q, int max_seqlen_q, float scale, bool l2norm, Tensor(e!) out) -> bool");
  m.def("gated_delta_varlen_bwd(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm, Tensor(a!) parts_q, Tensor(b!) parts_k, Tensor(c!) dq, Tensor(d!) dk, Tensor(e!) dv, Tensor(f!) dg, Tensor(g!) dbeta, Tensor(h!)? dinitial_state) -> ()");
  m.def("delta_gates_fwd(Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor(a!) g, Tensor(b!) beta) -> ()");
  m.def("delta_gates_bwd(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor(a!) da, Tensor(b!) db, Tensor(c!) da_log, Tensor(d!) ddt_bias) -> ()");

  // gated_delta on SM90: sequences with one row in the call, also from a projection; all others, or whole ones
  m.def("gated_delta_decode(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor(b!) open_k, Tensor(c!) open_u, Tensor(d!) open_g, Tensor slots, Tensor context_lens, Tensor cu_seqlens_q, float scale, bool l2norm, int multiprocessors, bool small, bool early, Tensor(e!) out) -> ()");
  m.def("gated_delta_step(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) taps, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor(b!) state, Tensor(c!) open_k, Tensor(d!) open_u, Tensor(e!) open_g, Tensor slots, Tensor context_lens, Tensor cu_seqlens_q, float scale, bool l2norm, bool doubled, int multiprocessors, bool small, bool early, Tensor(f!) out) -> ()");
  m.def("gated_delta_chunks(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, Tensor(a!)? final_state, Tensor(b!)? states, Tensor(c!)? us, Tensor(d!)? state, Tensor? open_k, Tensor(e!)? open_u, Tensor? open_g, Tensor? slots, Tensor? context_lens, Tensor(g!)? prepared, float scale, bool l2norm, int columns, Tensor(f!)? out) -> ()");
  m.def("gated_delta_whole(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state, Tensor(a!)? final_state, Tensor(b!)? states, Tensor(c!)? us, Tensor(d!) prepared, float scale, bool l2norm, bool wide, Tensor(e!)? out) -> ()");
  m.def("gated_delta_backward(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor states, Tensor us, Tensor(i!) prepared, bool is_prepared, float scale, bool l2norm, bool wide, Tensor(a!) dstates, Tensor(b!) dus, Tensor(c!) dq, Tensor(d!) dk, Tensor(e!) dv, Tensor(f!) dg, Tensor(g!) dbeta, Tensor(h!)? dinitial_state) -> ()");

  // sampler
  m.def("sample(Tensor logits, Tensor seeds, Tensor positions, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor(a!) ids, Tensor(b!) logprobs, Tensor(c!) raw_logprobs) -> ()");

  // linear_silu_mul on SM90, of few rows and of more
  m.def("linear_silu_mul_few(Tensor x, Tensor weight, bool gelu, int rows, int tokens, int boxes, int stages, int ahead, int lead, int per_sm, Tensor(a!) out, Tensor? bases=None, int rank=0) -> ()");
  m.def("linear_silu_mul_wide(Tensor x, Tensor weight, bool gelu, int tokens, int width, int stages, Tensor(a!) out) -> ()");

  // linear_sample on SM90: what a row's draw needs of every block of its logits; many rows, and few by a kernel of these sizes; and
  // the draws that follow from it
  m.def("draw_overlapped(Tensor hidden, Tensor weight, Tensor seeds, Tensor positions, Tensor temperature, float softcap, int cluster, int boxes, Tensor(a!) parts, Tensor(b!) entries, Tensor(c!) tokens, Tensor(d!)? known) -> ()");
  m.def("draw_few(Tensor hidden, Tensor weight, Tensor seeds, Tensor positions, Tensor temperature, float softcap, int rows, int boxes, int stages, int ahead, int lead, int per_sm, Tensor(a!) parts, Tensor(b!) entries, Tensor(c!) tokens) -> ()");
  m.def("draw_join(Tensor parts, Tensor entries, Tensor tokens, Tensor temperature, Tensor(a!) ids, Tensor(b!) logprobs, Tensor(c!) raw_logprobs) -> ()");
}

namespace vx {

const char* source_digests();  // digests.cpp

namespace {

std::string cpu_isa(std::optional<std::string> request) {
  if (request)
    STD_TORCH_CHECK(set_isa(request->c_str()), "cpu_isa: '", *request, "' is not built, or this CPU cannot run it");
  return isa_name();
}

bool built_with_cuda() {
#ifdef VEXACT_WITH_CUDA
  return true;
#else
  return false;
#endif
}

std::string digests() { return source_digests(); }

// The calling thread's floating-point mode as it was, as a number whose only meaning is its processor's; 0 where there is
// none to be had. With `request`, that mode from here on.
int64_t float_mode(std::optional<int64_t> request) {
#ifdef VEXACT_HAS_MXCSR
  const unsigned found = _mm_getcsr();
  if (request) _mm_setcsr(unsigned(*request) & 0xffc0);
  return found & 0xffc0;  // without what has happened so far
#else
  return 0;
#endif
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&vx::cpu_isa));
  m.impl("built_with_cuda", TORCH_BOX(&vx::built_with_cuda));
  m.impl("source_digests", TORCH_BOX(&vx::digests));
  m.impl("float_mode", TORCH_BOX(&vx::float_mode));
}
