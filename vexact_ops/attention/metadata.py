"""Says what is wrong with offsets, lengths and block tables. Kernels on the CPU notice it while they plan their work,
and write nothing; only then does this look at the values one by one: a good call pays nothing for the message."""

import itertools

from torch import Tensor


def _offsets(op: str, arg: str, offsets: Tensor, rows: int, what: str, longest: int | None = None) -> list[int]:
    values = offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{op}: {arg}: got {values[0]} as its first value, expected 0")
    for i, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            raise ValueError(f"{op}: {arg}: got {end} after {begin} at index {i + 1}, expected ascending offsets")
    if values[-1] != rows:
        raise ValueError(f"{op}: {arg}: got {values[-1]} as its last value, expected {rows}, the rows of {what}")
    for begin, end in itertools.pairwise(values):
        if longest is not None and end - begin > longest:
            name = "max_seqlen" + arg.removeprefix("cu_seqlens")
            raise ValueError(f"{op}: {name}: got {longest}, expected at least {end - begin}, the longest sequence")
    return values


def explain_varlen(tokens: int, keys: int, cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, max_seqlen: int) -> None:
    op = "attention_varlen"
    _offsets(op, "cu_seqlens", cu_seqlens, tokens, "q", max_seqlen)
    if cu_seqlens_k is not None:
        _offsets(op, "cu_seqlens_k", cu_seqlens_k, keys, "k")
    raise AssertionError(f"{op}: the kernel refused offsets that are in order")


def explain_paged(
    tokens: int,
    pages: int,
    page_size: int,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
) -> None:
    op = "attention_paged"
    at = _offsets(op, "cu_seqlens_q", cu_seqlens_q, tokens, "q", max_seqlen_q)
    capacity = block_table.shape[1] * page_size
    for i, length in enumerate(context_lens.tolist()):
        queries = at[i + 1] - at[i]
        if length < queries:
            expected = f"at least {queries}, the sequence's queries in this call"
            raise ValueError(f"{op}: context_lens[{i}]: got {length}, expected {expected}")
        if length > capacity:
            expected = f"at most {capacity}: {block_table.shape[1]} pages of {page_size}"
            raise ValueError(f"{op}: context_lens[{i}]: got {length}, expected {expected}")
        for j, page in enumerate(block_table[i, : -(-length // page_size)].tolist()):
            if not 0 <= page < pages:
                raise ValueError(f"{op}: block_table[{i}, {j}]: got page {page}, expected one of {pages} pages")
    raise AssertionError(f"{op}: the kernel refused offsets, lengths and pages that are in order")
