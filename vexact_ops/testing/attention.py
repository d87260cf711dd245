"""The promise of attention as executable properties, for any varlen and paged implementation with our signatures."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._core.proof.attention import Pages, attention_inputs, offsets
from .._core.proof.bitwise import assert_bitwise


def _cut(x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    return list(x.split(list(lengths)))


def _foreign(dtype: torch.dtype) -> tuple[float, ...]:
    """What must not reach a row that does not see it. A product of 0 with the finite ones is 0, and still their
    exponent may not move the sum that it joins."""
    huge = torch.finfo(dtype).max * 0.9
    return float("nan"), float("inf"), huge, -huge


def check_packing(
    varlen: Callable[..., object],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    seed: int = 0,
    neighbours: Sequence[float] | None = None,
) -> None:
    """A sequence has the same bits alone, packed in another order, and beside neighbours turned into NaN, Inf or the
    largest finite values.

    varlen(q, k, v, cu_seqlens, max_seqlen) returns one tensor or several, each with q's or k's rows (an output, or
    gradients). Raises AssertionError naming the first property that fails.
    """

    def run(parts: list[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, ...]]:
        sizes = [len(p[0]) for p in parts]
        result = varlen(*(torch.cat(x) for x in zip(*parts)), offsets(sizes, q.device), max(sizes))
        result = result if isinstance(result, tuple | list) else (result,)
        return list(zip(*(_cut(x, sizes) for x in result)))

    parts = list(zip(*(_cut(x, lengths) for x in (q, k, v))))
    expected = run(parts)
    g = torch.Generator().manual_seed(seed)
    for index, part in enumerate(parts):
        assert_bitwise(run([part])[0], expected[index], f"sequence {index} alone")
    order = torch.randperm(len(parts), generator=g).tolist()
    for index, result in zip(order, run([parts[i] for i in order])):
        assert_bitwise(result, expected[index], f"sequence {index} in another order")
    neighbours = _foreign(q.dtype) if neighbours is None else neighbours
    for value in neighbours if len(parts) > 1 else ():
        keep = int(torch.randint(len(parts), (1,), generator=g))
        poisoned = [p if i == keep else tuple(torch.full_like(x, value) for x in p) for i, p in enumerate(parts)]
        assert_bitwise(run(poisoned)[keep], expected[keep], f"sequence {keep} with {value} next door")


def check_unseen(
    varlen: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    window: int | None = None,
    paged: Callable[..., Tensor] | None = None,
    page_size: int = 16,
    seed: int = 0,
    values: Sequence[float] | None = None,
) -> None:
    """Later tokens, and keys that have left the window, may turn into NaN, Inf or the largest finite values: earlier
    rows keep their bits, and so does, with `paged`, each of them decoded alone from a cache that holds such values.

    varlen and paged as check_paging takes them; window is what both apply.
    """
    g = torch.Generator().manual_seed(seed)
    cu = offsets(lengths, q.device)
    expected = varlen(q, k, v, cu, max(lengths))
    for value in _foreign(q.dtype) if values is None else values:
        q2, k2, v2 = q.clone(), k.clone(), v.clone()
        kept, rows, seen = [], [], []
        for row, (begin, length) in enumerate(zip(cu.tolist(), lengths)):
            if not length:
                continue
            now = begin + int(torch.randint(length, (1,), generator=g))
            kept.append(now)
            rows.append(row)
            seen.append(now + 1 - begin)
            for x in (q2, k2, v2):
                x[now + 1 : begin + length] = value
            if window is not None:
                k2[begin : max(begin, now - window + 1)] = v2[begin : max(begin, now - window + 1)] = value
        assert_bitwise(varlen(q2, k2, v2, cu, max(lengths))[kept], expected[kept], f"rows before {value}")
        if paged is None:
            continue
        pages = Pages.of(k2, v2, lengths, page_size, seed).put(k2, v2)
        caches = pages.k_cache, pages.v_cache, pages.block_table[rows]
        lens = torch.tensor(seen, dtype=torch.int32, device=q.device)
        for most in (1, 2):  # a bound, which may be above the longest
            out = paged(q2[kept], *caches, lens, offsets([1] * len(rows), q.device), most)
            assert_bitwise(out, expected[kept], f"decode where what is not seen is {value}, max_seqlen_q {most}")


def check_paging(
    varlen: Callable[..., Tensor],
    paged: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    page_sizes: Sequence[int] = (1, 16, 64),
    chunk: int = 50,
    seed: int = 0,
) -> None:
    """Whole prefill, chunks of any size, chunks mixed with single tokens, and decode one token at a time have the bits
    of the training forward, for every page size, with shuffled pages and NaN in every slot not yet written.

    varlen(q, k, v, cu_seqlens, max_seqlen); paged(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q,
    max_seqlen_q). Raises AssertionError naming the first property that fails.
    """
    g = torch.Generator().manual_seed(seed)
    cu = offsets(lengths, q.device)
    expected = varlen(q, k, v, cu, max(lengths))
    starts = cu.tolist()

    def step(pages: Pages, done: list[int], counts: list[int], label: str) -> None:
        """Store the next counts[b] tokens of every sequence, after done[b] earlier ones, and check their rows."""
        rows = [b for b, count in enumerate(counts) if count]
        if not rows:
            return
        index = torch.cat([torch.arange(starts[b] + done[b], starts[b] + done[b] + counts[b]) for b in rows])
        index = index.to(q.device)
        pages.put(k, v, index)
        lens = torch.tensor([done[b] + counts[b] for b in rows], dtype=torch.int32, device=q.device)
        cu_q = offsets([counts[b] for b in rows], q.device)
        out = paged(q[index], pages.k_cache, pages.v_cache, pages.block_table[rows], lens, cu_q, max(counts))
        assert_bitwise(out, expected[index], label)

    def empty() -> Pages:
        return Pages.of(k, v, lengths, page_size, seed)

    none = [0] * len(lengths)
    for page_size in page_sizes:
        step(empty(), none, list(lengths), f"whole prefill, pages of {page_size}")
        pages, done = empty(), none
        while any(d < n for d, n in zip(done, lengths)):
            counts = []
            for d, n in zip(done, lengths):
                single = bool(torch.randint(3, (1,), generator=g) == 0)
                size = 1 if single else int(torch.randint(chunk + 1, (1,), generator=g))
                counts.append(min(size, n - d))
            step(pages, done, counts, f"chunks of {counts} after {done}, pages of {page_size}")
            done = [d + c for d, c in zip(done, counts)]
        pages = empty()
        for place in range(max(lengths)):  # every sequence decodes its token at this place, together
            counts = [int(place < n) for n in lengths]
            step(pages, [min(place, n) for n in lengths], counts, f"decode at {place}, pages of {page_size}")


def check_attention(
    varlen: Callable[..., Tensor],
    paged: Callable[..., Tensor] | None,
    lengths: Sequence[int],
    hq: int,
    hk: int,
    d: int,
    dv: int,
    *,
    window: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    page_sizes: Sequence[int] = (1, 16, 64),
) -> None:
    """check_packing, check_unseen and check_paging on inputs that cancel. window is what the two functions apply."""
    q, k, v = attention_inputs(lengths, hq, hk, d, dv, seed=seed, dtype=dtype, device=device)
    check_packing(varlen, q, k, v, lengths, seed=seed)
    check_unseen(varlen, q, k, v, lengths, window=window, paged=paged, seed=seed)
    if paged is not None:
        check_paging(varlen, paged, q, k, v, lengths, page_sizes=page_sizes, seed=seed)
