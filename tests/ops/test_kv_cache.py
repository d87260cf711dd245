"""kv_cache: every token lands in its slot, skipped and foreign slots stay, bad slots are refused before a write."""

import pytest
import torch
from conftest import room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.kv_cache.reference import kv_cache_store_ref
from vexact_ops.testing import assert_bitwise, check_repeatable

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("kv_cache"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def make(tokens, heads, d, dv, pages, page_size, dtype, device, seed, skip=0.2):
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(tokens, heads, d, generator=g), torch.randn(tokens, heads, dv, generator=g)
    k_cache = torch.randn(pages, page_size, heads, d, generator=g)
    v_cache = torch.randn(pages, page_size, heads, dv, generator=g)
    slots = torch.randperm(pages * page_size, generator=g)[:tokens]
    slots[torch.rand(tokens, generator=g) < skip] = -1
    return *(x.to(dtype).to(device) for x in (k, v, k_cache, v_cache)), slots.to(device)


@BACKENDS
@DTYPES
@given(
    st.integers(0, 40),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([(64, 64), (192, 128), (5, 7), (8, 3)]),
    st.sampled_from([1, 4, 16]),
    st.integers(0, 2**16),
)
def test_every_token_lands_in_its_slot(device, backend, dtype, tokens, heads, dims, page_size, seed):
    k, v, k_cache, v_cache, slots = make(tokens, heads, *dims, 44, page_size, dtype, device, seed)
    expected = kv_cache_store_ref(k, v, k_cache, v_cache, slots)
    assert vx.kv_cache_store(k, v, k_cache, v_cache, slots, backend=backend) is None
    assert_bitwise((k_cache, v_cache), expected)


@BACKENDS
@DTYPES
def test_strided_rows_and_caches(device, backend, dtype):
    k, v, k_cache, v_cache, slots = make(9, 3, 6, 6, 5, 4, dtype, device, 0)
    expected = kv_cache_store_ref(k, v, k_cache, v_cache, slots)
    both = torch.stack([k_cache, v_cache], dim=1)  # (pages, 2, page_size, Hk, D), the two caches in one allocation
    fused = torch.cat([k, v], dim=-1)  # rows of another tensor, not aligned to 16 bytes
    vx.kv_cache_store(fused[..., :6], fused[..., 6:], both[:, 0], both[:, 1], slots, backend=backend)
    assert_bitwise((both[:, 0], both[:, 1]), expected)


@BACKENDS
def test_repeatable(device, backend):
    k, v, k_cache, v_cache, slots = make(300, 4, 64, 64, 30, 16, torch.bfloat16, device, 1)

    def run():
        caches = k_cache.clone(), v_cache.clone()
        vx.kv_cache_store(k, v, *caches, slots, backend=backend)
        return caches

    check_repeatable(run)


def test_a_repeated_slot_keeps_its_last_token_on_the_cpu():
    k, v, k_cache, v_cache, _ = make(16, 4, 8, 8, 4, 4, torch.float32, "cpu", 2)
    k, v, slots = k.repeat(20, 1, 1), v.repeat(20, 1, 1) * torch.arange(320).view(-1, 1, 1), torch.arange(320) % 16
    vx.kv_cache_store(k, v, k_cache, v_cache, slots)
    last = torch.arange(304, 320)
    assert_bitwise((k_cache.flatten(0, 1), v_cache.flatten(0, 1)), (k[last], v[last]))


@pytest.mark.parametrize("bad", [20, 2**40, -2], ids=["behind", "far", "negative"])
def test_a_bad_slot_is_named_before_anything_is_written(bad):
    k, v, k_cache, v_cache, slots = make(9, 3, 8, 8, 5, 4, torch.float32, "cpu", 3)
    slots[7] = bad
    before = k_cache.clone(), v_cache.clone()
    with pytest.raises(
        ValueError, match=rf"kv_cache_store: slot_mapping\[7\]: got slot {bad}, expected -1 \(skip\) or"
    ):
        vx.kv_cache_store(k, v, k_cache, v_cache, slots)
    assert_bitwise((k_cache, v_cache), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_on_cuda_bad_slots_are_skipped_and_a_graph_replays():
    k, v, k_cache, v_cache, slots = make(9, 3, 64, 64, 5, 4, torch.bfloat16, "cuda", 3, skip=0)
    slots[2], slots[5], slots[7] = 20, 2**40, -2
    kept = torch.tensor([t for t in range(9) if t not in (2, 5, 7)], device="cuda")
    expected = kv_cache_store_ref(k[kept], v[kept], k_cache, v_cache, slots[kept])
    start = k_cache.clone(), v_cache.clone()
    vx.kv_cache_store(k, v, k_cache, v_cache, slots)
    assert_bitwise((k_cache, v_cache), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vx.kv_cache_store(k, v, k_cache, v_cache, slots)
    k_cache.copy_(start[0])
    v_cache.copy_(start[1])
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise((k_cache, v_cache), expected, "a graph")
    other = torch.cuda.Stream()
    k_cache.copy_(start[0])
    v_cache.copy_(start[1])
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        vx.kv_cache_store(k, v, k_cache, v_cache, slots)
    other.synchronize()
    assert_bitwise((k_cache, v_cache), expected, "another stream")


@BACKENDS
def test_opcheck(device, backend):
    args = make(4, 2, 8, 8, 3, 4, torch.float32, device, 0)
    torch.library.opcheck(torch.ops.vexact.kv_cache_store.default, (*args, backend))


def test_bad_arguments_are_named():
    k, v, k_cache, v_cache, slots = make(4, 2, 8, 8, 3, 4, torch.float32, "cpu", 0)
    with pytest.raises(TypeError, match="kv_cache_store: k: got dtype float64"):
        vx.kv_cache_store(k.double(), v, k_cache, v_cache, slots)
    with pytest.raises(TypeError, match="kv_cache_store: v_cache: got dtype bfloat16, expected float32"):
        vx.kv_cache_store(k, v, k_cache, v_cache.bfloat16(), slots)
    with pytest.raises(TypeError, match="kv_cache_store: v: got dtype bfloat16, expected float32"):
        vx.kv_cache_store(k, v.bfloat16(), k_cache, v_cache.bfloat16(), slots)
    with pytest.raises(TypeError, match="kv_cache_store: slot_mapping: got dtype int32, expected int64"):
        vx.kv_cache_store(k, v, k_cache, v_cache, slots.int())
    with pytest.raises(ValueError, match=r"kv_cache_store: slot_mapping: got shape \(3,\), expected \(4,\)"):
        vx.kv_cache_store(k, v, k_cache, v_cache, slots[:3])
    with pytest.raises(ValueError, match=r"kv_cache_store: v: got shape \(3, 2, 8\)"):
        vx.kv_cache_store(k, v[:3], k_cache, v_cache, slots)
    with pytest.raises(ValueError, match=r"kv_cache_store: k_cache: got shape \(3, 4, 1, 8\), expected \(3, 4, 2, 8\)"):
        vx.kv_cache_store(k, v, k_cache[:, :, :1], v_cache, slots)
    with pytest.raises(ValueError, match="kv_cache_store: k: got strides"):
        vx.kv_cache_store(k.transpose(0, 2).contiguous().transpose(0, 2), v, k_cache, v_cache, slots)
    with pytest.raises(RuntimeError, match="kv_cache_store: k or v requires a gradient"):
        vx.kv_cache_store(k.requires_grad_(), v, k_cache, v_cache, slots)
