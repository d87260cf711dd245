"""Writes a step's keys and values into the paged cache that attention_paged reads."""

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("kv_cache", cpu=("cpu",), cuda=("cuda",))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INT64 = (torch.int64,)


def kv_cache_store(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, backend: str | None = None
) -> None:
    """k_cache[page, offset] = k[t] and v_cache[page, offset] = v[t] where slot_mapping[t] = page * page_size + offset.

    k, v          (T, Hk, D), (T, Hk, Dv) bf16 | fp16 | fp32, last dimension contiguous
    k_cache       (pages, page_size, Hk, D) in k.dtype, last dimension contiguous; written in place
    v_cache       (pages, page_size, Hk, Dv) likewise
    slot_mapping  (T,) int64 contiguous; -1 skips the token. Slots of one call differ; where one is repeated, the CPU
                  keeps its last token and CUDA either
    returns       None
    bits          a copy
    grad          none: a RuntimeError where k or v requires one in grad mode
    raises        TypeError on dtype, ValueError on shape, strides or device, BackendUnavailable. A slot outside the
                  cache: on CPU a ValueError before anything is written; on CUDA, where looking would stall the
                  stream, that token is skipped
    example
    >>> k_cache, v_cache = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)  # two pages of four tokens
    >>> vx.kv_cache_store(torch.ones(2, 1, 8), torch.ones(2, 1, 8), k_cache, v_cache, torch.tensor([6, -1]))
    >>> k_cache[:, :, 0, 0].tolist()  # slot 6 is page 1, place 2; -1 is skipped
    [[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]
    """
    op = "kv_cache_store"
    check_store(op, k, v, k_cache, v_cache, slot_mapping)
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise RuntimeError(f"{op}: k or v requires a gradient, and this op has none: call it under torch.no_grad()")
    _kv_cache_store(k, v, k_cache, v_cache, slot_mapping, ROOM.resolve(k.device, backend))


def check_store(op: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Raises what kv_cache_store raises for these arguments, in the name of op."""
    if not _fits(k, v, k_cache, v_cache, slot_mapping):
        _check(op, k, v, k_cache, v_cache, slot_mapping)


def _fits(k, v, k_cache, v_cache, slot_mapping) -> bool:
    """Whether _check would find nothing, without its messages: the engine asks at every layer of every step."""
    for x in (k, v, k_cache, v_cache, slot_mapping):
        if not isinstance(x, Tensor):
            return False
    if not (k.dim() == v.dim() == 3 and k_cache.dim() == v_cache.dim() == 4 and slot_mapping.dim() == 1):
        return False
    device, dtype = k.device, k.dtype
    tokens, heads, d = k.shape
    v_tokens, v_heads, dv = v.shape
    *pages, k_heads, k_d = k_cache.shape
    *v_pages, cache_v_heads, v_d = v_cache.shape
    return (
        dtype in DTYPES
        and v.dtype == k_cache.dtype == v_cache.dtype == dtype
        and slot_mapping.dtype == torch.int64
        and len(slot_mapping) == tokens == v_tokens
        and heads == v_heads == k_heads == cache_v_heads
        and d == k_d
        and dv == v_d
        and pages == v_pages
        and pages[1] > 0
        and k.stride(2) == v.stride(2) == k_cache.stride(3) == v_cache.stride(3) == slot_mapping.stride(0) == 1
        and v.device == k_cache.device == v_cache.device == slot_mapping.device == device
    )


def _check(op: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    for arg, x, cache_arg, cache in (("k", k, "k_cache", k_cache), ("v", v, "v_cache", v_cache)):
        check.tensor(op, arg, x, DTYPES, 3)
        check.tensor(op, cache_arg, cache, ndim=4)
        check.same_dtype(op, cache_arg, cache, arg, x)
        check.contiguous_last(op, arg, x)
        check.contiguous_last(op, cache_arg, cache)
    check.same_dtype(op, "v", v, "k", k)
    check.shape(op, "v", v, (*k.shape[:2], "Dv"))
    pages, page_size = k_cache.shape[:2]
    check.shape(op, "k_cache", k_cache, (pages, page_size, *k.shape[1:]))
    check.shape(op, "v_cache", v_cache, (pages, page_size, *v.shape[1:]))
    if page_size == 0:
        raise ValueError(f"{op}: k_cache: got shape {tuple(k_cache.shape)}, expected a page_size of at least 1")
    check.tensor(op, "slot_mapping", slot_mapping, _INT64)
    check.shape(op, "slot_mapping", slot_mapping, k.shape[:1])
    check.contiguous_last(op, "slot_mapping", slot_mapping)
    check.same_device(op, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)


def _store(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, backend: str) -> None:
    ROOM.module(backend).store(k, v, k_cache, v_cache, slot_mapping)


_kv_cache_store = Operator(
    "kv_cache_store(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, str backend)"
    " -> ()",
    _store,
    lambda *args: None,
)
