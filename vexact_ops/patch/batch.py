"""How a batch lies in memory: which of its rows are tokens, where each sequence begins, and attention over that."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import vexact_ops as vx

from .description import Pages, State
from .ulysses import Ulysses


@dataclass
class PagedBatch:
    """One step of a paged engine: the tokens of all its sequences in one row of shape (1, T).

    k_caches, v_caches  one (pages, page_size, Hk, D | Dv) tensor per layer, in the order that layers are called in
    slot_mapping        (T,) int64: where each token's key and value go; -1 stores nothing
    block_table         (B, P) int32, the pages of each sequence in order
    context_lens        (B,) int32: keys of each sequence, this step's included
    cu_seqlens_q        (B + 1,) int32: sequence b has the tokens cu_seqlens_q[b] to cu_seqlens_q[b + 1]
    max_seqlen_q        at least the most tokens of a sequence in this step
    states              of each layer that has a state its slots' tensors, in the order of State.slot(), else None;
                        k_caches and v_caches have None there
    state_slots         (B,) int32: each sequence's slot in them; -1: none (padding)
    windowed            slot_mapping and block_table of layers with a window, where those have pages of their own. Pages
                        that no query's window reaches back to may be any
    singles             the first so many sequences have one token each in this step; no effect on bits
    """

    k_caches: Sequence[Tensor | None]
    v_caches: Sequence[Tensor | None]
    slot_mapping: Tensor
    block_table: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    states: Sequence[Sequence[Tensor] | None] = ()
    state_slots: Tensor | None = None
    windowed: tuple[Tensor, Tensor] | None = None
    singles: int = 0

    def places(self, window: int | None) -> tuple[Tensor, Tensor]:
        """slot_mapping and block_table of a layer with this window."""
        return (self.slot_mapping, self.block_table) if window is None or self.windowed is None else self.windowed

    def check(self) -> None:
        """Look at every number in it, which makes the host wait for a GPU: for whoever builds batches and wants an
        error where the ops, which do not look, would skip a token or give zeros.

        raises  ValueError naming the field, the sequence or token, what it is and what was expected
        """
        pages, size = max(cache.shape[:2] for cache in self.k_caches if cache is not None)
        table, slots = self.block_table.tolist(), self.slot_mapping.tolist()
        context, offsets = self.context_lens.tolist(), self.cu_seqlens_q.tolist()
        if not len(table) == len(context) == len(offsets) - 1:
            found = f"{len(table)} rows, {len(context)} lengths and {len(offsets)} offsets"
            raise ValueError(f"PagedBatch: got {found}, expected B, B and B + 1")
        if offsets[0] != 0 or offsets[-1] != len(slots):
            raise ValueError(f"PagedBatch: cu_seqlens_q: got {offsets}, expected from 0 to the {len(slots)} tokens")
        if not 0 <= self.singles < len(offsets):
            raise ValueError(f"PagedBatch: singles: got {self.singles}, expected 0 to {len(table)}, the sequences")
        for b, (pages_of, keys) in enumerate(zip(table, context)):
            queries = offsets[b + 1] - offsets[b]
            most = min(self.max_seqlen_q, keys)
            if not 0 <= queries <= most:
                raise ValueError(
                    f"PagedBatch: cu_seqlens_q: got {queries} tokens of sequence {b}, expected 0 to {most}"
                )
            if b < self.singles and queries != 1:
                raise ValueError(f"PagedBatch: singles: got {self.singles}, but sequence {b} has {queries} tokens")
            if keys > len(pages_of) * size:
                place = f"{len(pages_of)} pages of {size}"
                raise ValueError(f"PagedBatch: context_lens: got {keys} for sequence {b}, expected at most {place}")
            wrong = [page for page in pages_of[: -(-keys // size)] if not 0 <= page < pages]
            if wrong:
                message = f"got page {wrong[0]} for sequence {b}, expected 0 to {pages - 1}"
                raise ValueError(f"PagedBatch: block_table: {message}")
        stored = [slot for slot in slots if slot != -1]
        for slot in stored:
            if not 0 <= slot < pages * size:
                raise ValueError(f"PagedBatch: slot_mapping: got {slot}, expected -1 or 0 to {pages * size - 1}")
        if len(set(stored)) != len(stored):
            raise ValueError("PagedBatch: slot_mapping: got one slot for two tokens, expected a slot for each")


class Score:
    """What a trainer wants of a forward instead of logits: `model(..., vexact_score=Score(...))` returns the tuple of
    (R,) fp32 log-probabilities and, if asked for, entropies. No T x V logits are held, and whatever wraps the model
    (FSDP2, PEFT, autocast) stays around the call.

    target          (R,) int64: of each row, the token whose log-probability is wanted
    rows            (R,) int64, rows of the flattened (B * S) batch; None: all of them, R is B * S
    temperature     above 0: a number, or (R,) fp32
    return_entropy  also the entropy of each row's distribution
    tokens          with whole_gradients: of the row that ranks share, how many tokens at its beginning are no filling,
                    and count in gradients of weights; None: all of them
    kept            the caller reads `values` after the forward where it is no longer None: what was returned, before
                    FSDP2 rounded it (output_dtype of its MixedPrecisionPolicy). Without, such a forward raises
    """

    # No dataclass: FSDP2 looks into those, and would round temperatures to the dtype that it casts inputs to.
    __slots__ = "counted", "kept", "made", "return_entropy", "rows", "target", "temperature", "tokens", "values"

    def __init__(
        self,
        target: Tensor,
        rows: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        return_entropy: bool = False,
        tokens: int | None = None,
        kept: bool = False,
    ) -> None:
        self.target, self.rows = target, rows
        self.temperature, self.return_entropy, self.tokens = temperature, return_entropy, tokens
        self.kept, self.values = kept, None
        self.counted = False  # whether the caller has looked at where positions count from
        self.made: tuple[int, ...] = ()  # the ids of what the forward has returned, before hooks on the whole model

    def checked(self) -> "Score":
        """By a caller who has looked at where positions count from."""
        self.counted = True
        return self


class Values(tuple):
    """What is returned for a Score where hooks are on the whole model that nobody has judged. Those that ask whether it
    is an output with logits are told that it is, and one that asks for its logits then is refused: what it makes of
    them would be left out of the log-probabilities.

    FSDP2 and torch's trees look into it as into any named tuple."""

    __slots__ = ()
    _fields = ()

    def __new__(cls, *values):
        return tuple.__new__(cls, values)

    @classmethod
    def _make(cls, values) -> "Values":
        return cls(*values)

    def _asdict(self) -> dict:
        return {}

    @property
    def __class__(self) -> type:
        from transformers.modeling_outputs import CausalLMOutputWithPast

        return CausalLMOutputWithPast

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"patch.hf: a hook on the whole model asks for {name} of what it returns, which is here no logits but "
            "log-probabilities of them: take it off, or have it pass tuples by"
        )

    def __getitem__(self, place):
        return tuple.__getitem__(self, place) if not isinstance(place, str) else getattr(self, place)

    def __contains__(self, value) -> bool:
        return tuple.__contains__(self, value) if not isinstance(value, str) else getattr(self, value)


class Asked(NamedTuple):
    """What a module that remembers asks attention for, and what has to be kept for it."""

    module: nn.Module
    kwargs: dict
    memory: Pages | State


@dataclass(frozen=True)
class Layout:
    """Which rows of a (B, S) batch are tokens, and of which sequence; computed once for all layers."""

    cu_q: Tensor  # (N + 1,) int32
    max_q: int
    cu_k: Tensor | None  # the same for keys, where a cache holds earlier ones
    keys: int  # columns of keys in a row of the batch, those of the cache included
    q_index: Tensor | None  # rows of the flattened (B * S) that are tokens; None: all of them
    k_index: Tensor | None  # rows of the flattened (B * keys) that are
    paged: PagedBatch | None = None
    kv_segment: int | None = None
    seen: list[Asked] | None = None  # the audit's record of what each module that remembers asks for
    autocast: bool = False  # the forward was called under autocast, which is off inside
    ulysses: Ulysses | None = None  # the rows are one rank's share; cu_q is of all of them
    turns: Iterator[int] | None = None  # of a paged batch: the place of each module that remembers, as they are called


def plain(batch: int, length: int, past: int, device, **options) -> Layout:
    def every(step: int) -> Tensor:
        return torch.arange(0, batch * step + 1, step, dtype=torch.int32, device=device)

    cu_k = every(past + length) if past else None
    return Layout(every(length), length, cu_k, past + length, None, None, **options)


def padded(mask: Tensor, length: int, position_ids: Tensor | None, **options) -> tuple[Layout, Tensor]:
    """From a (B, past + length) mask with one run of tokens per row. Positions count a row's tokens from 0."""
    batch, keys = mask.shape
    past = keys - length
    if past < 0:
        raise ValueError(f"attention_mask: got {keys} columns for {length} new tokens, expected at least as many")
    given, mask = mask, mask != 0
    place = mask.cumsum(1)
    new, before = mask[:, past:], mask[:, :past]
    if bool((mask[:, 1:] & ~mask[:, :-1] & (place[:, :-1] > 0)).any()):
        raise ValueError("attention_mask: a row has a hole, expected padding on the left or on the right alone")
    positions = (place - 1).clamp(min=0)[:, past:]
    if bool((mask & (given != 1)).any()):
        raise ValueError(
            "attention_mask: got numbers besides 0 and 1, expected 1 at tokens and 0 at padding: not what is added to "
            "scores, and sequences that are packed are told apart by cu_seqlens or position_ids"
        )
    if bool(mask.all()):
        layout = plain(batch, length, past, mask.device, **options)
    else:
        counts = new.sum(1)
        cu_q, cu_k = _ends(counts), _ends(before.sum(1) + counts) if past else None
        q_index, k_index = new.flatten().nonzero()[:, 0], mask.flatten().nonzero()[:, 0]
        layout = Layout(cu_q, max(int(counts.max()), 1), cu_k, keys, q_index, k_index, **options)
    if position_ids is None:
        return layout, positions
    own = position_ids.expand(batch, length)
    if bool(((own.diff(dim=1) != 1) & new[:, 1:] & new[:, :-1]).any()):
        raise ValueError(
            "position_ids: they jump inside a row of attention_mask; packed rows go without attention_mask"
        )
    return layout, position_ids


def packed(cu_seqlens: Tensor, length: int, max_seqlen: int | None, **options) -> Layout:
    """From cumulative lengths over the flattened batch, whose rows have this length."""
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seq_lens_q: got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}, expected (N + 1,) int32 or int64"
        )
    cu = cu_seqlens.to(torch.int32)
    if max_seqlen is None:
        max_seqlen = max(int(cu.diff().max()), 1) if cu.numel() > 1 else 1
    return Layout(cu, int(max_seqlen), None, length, None, None, **options)


def shared(
    ulysses: Ulysses, cu_seqlens: Tensor | None, position_ids: Tensor | None, length: int, longest: int | None,
    device: torch.device, **options,
) -> tuple[Layout, Tensor]:  # fmt: skip
    """Of a row of which each rank has so many tokens. Where sequences begin is said for all of them, or seen in the
    positions, which ranks tell one another."""
    tokens = ulysses.size * length
    if cu_seqlens is None and position_ids is not None:
        cu_seqlens = restarts(ulysses.gather(position_ids), 1, tokens)
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    check_cu("cu_seq_lens_q", cu_seqlens, tokens, look=False)
    if position_ids is None:
        position_ids = positions_of(cu_seqlens, tokens)[:, ulysses.rank * length :][:, :length]
    return packed(cu_seqlens, length, longest, ulysses=ulysses, **options), position_ids


def check_cu(name: str, cu_seqlens: Tensor, tokens: int, look: bool = True) -> None:
    """Check that these are the offsets of a row's sequences: from 0, ascending, to its number of tokens.

    look   False: values on a GPU are not read, for that would wait for it
    """
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name}: got a {type(cu_seqlens).__name__}, expected a tensor")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = f"{tuple(cu_seqlens.shape)} {cu_seqlens.dtype}"
        raise ValueError(f"{name}: got {got}, expected (N + 1,) int32 or int64")
    here = type(cu_seqlens) is Tensor and cu_seqlens.device.type == "cpu" and not torch.compiler.is_compiling()
    if not look and not here:
        return
    ends = cu_seqlens.tolist()
    if ends[0] != 0 or ends[-1] != tokens or ends != sorted(ends):
        got = ends if len(ends) <= 8 else f"[{', '.join(map(str, ends[:4]))}, ..., {ends[-1]}]"
        raise ValueError(f"{name}: got {got}, expected an ascent from 0 to the {tokens} tokens of the row")


def sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device: a GPU is not waited for."""
    if device.type != "cuda":
        return x.to(device)
    return (x.pin_memory() if x.device.type == "cpu" else x).to(device, non_blocking=True)


def positions_of(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """(1, tokens): each sequence counts from 0. Whatever the numbers are, no memory but theirs is touched: of a GPU's
    nobody has looked at them (repeat_interleave trusts them)."""
    place = torch.arange(tokens, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    # A tensor made here is searched, and the whole of it: given a view, what Inductor before torch 2.13 compiles for a
    # GPU searches from the beginning of the memory that the view is of.
    begins = cu_seqlens.clamp(0, tokens)
    owner = torch.searchsorted(begins, place, right=True) - 1  # -1, the last one, where the first begins late
    return (place - begins[owner])[None].long()


def one_axis(position_ids: Tensor | None) -> Tensor | None:
    """Positions of text that come on several axes (A, B, S), as models of images have them, are (B, S) ones."""
    found, check = axis_and_check(position_ids)
    check()
    return found


def axis_and_check(position_ids: Tensor | None) -> tuple[Tensor | None, Callable[[], None]]:
    """`one_axis`, and what says whether they are those of text: called later, it does not wait for a GPU now."""
    if position_ids is None or position_ids.dim() != 3:
        return position_ids, lambda: None
    return position_ids[0], raise_later(
        (position_ids != position_ids[:1]).any(),
        "position_ids: got other positions on one axis than on another, expected those of text, which are equal",
    )


def text_axis(position_ids: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Of positions of a model of images: text's (B, S), which say where sequences begin, and those on three axes
    (3, B, S). Of (4, B, S) the first axis is text's; of three equal ones any is."""
    if position_ids is None or position_ids.dim() != 3:
        return position_ids, None
    if position_ids.shape[0] == 4:
        return position_ids[0], position_ids[1:]
    if position_ids.shape[0] == 3 and not bool((position_ids == position_ids[:1]).all()):
        return None, position_ids
    return one_axis(position_ids), None


def raise_later(wrong: Tensor, message: str) -> Callable[[], None]:
    """To be called once the device has been given what does not wait for the answer: it waits until the device has come
    up to here, and raises where this is true."""
    if wrong.device.type != "cuda":
        answer, wait = wrong, lambda: None
    else:
        answer = torch.empty((), dtype=wrong.dtype, pin_memory=True).copy_(wrong, non_blocking=True)
        wait = torch.cuda.current_stream(wrong.device).record_event().synchronize

    def check() -> None:
        wait()
        if bool(answer):
            raise ValueError(message)

    return check


def check_beside(op: str, ids: Tensor, mask: Tensor | None, position_ids: Tensor | None) -> Tensor | None:
    """Types and shapes of what comes beside (B, S) ids. Positions, those of one row, (S,), as (1, S)."""
    for name, given in {"attention_mask": mask, "position_ids": position_ids}.items():
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"{op}: {name}: got a {type(given).__name__}, expected a tensor")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"{op}: attention_mask: got shape {tuple(mask.shape)}, expected {tuple(ids.shape)}")
    if position_ids is None:
        return None
    rows, tokens = ids.shape
    places = position_ids[None] if position_ids.dim() == 1 else position_ids
    if places.dim() not in (2, 3) or places.shape[-2] not in (1, rows) or places.shape[-1] != tokens:
        got, beside = tuple(position_ids.shape), tuple(ids.shape)
        raise ValueError(f"{op}: position_ids: got shape {got}, expected (B or 1, {tokens}) for tokens of {beside}")
    return places


def check_begins(op: str, position_ids: Tensor, ids: Tensor, mask: Tensor | None) -> None:
    """Each sequence counts from 0, as an engine counts it: from elsewhere its bits are others, in the last places."""
    place = position_ids.expand(ids.shape)
    first = torch.ones_like(place, dtype=torch.bool)
    first[:, 1:] = place.diff(dim=1) != 1
    if mask is not None:
        tokens = mask.to(place.device) != 0
        first = tokens & (tokens.cumsum(1) == 1)
    if bool((place[first] != 0).any()):
        raise ValueError(
            f"{op}: position_ids: got a sequence that begins at {int(place[first].max())}, expected 0, from where "
            "an engine counts"
        )


def check_counts(op: str, position_ids: Tensor, cu_seqlens: Tensor, tokens: int) -> Callable[[], None]:
    """The same of sequences whose bounds are known, to be called later. Zeros beyond are what padding may have."""
    place = position_ids.expand(1, tokens)
    expected = positions_of(cu_seqlens, tokens)
    return raise_later(
        ((place != expected) & (place != 0)).any(),
        f"{op}: position_ids: got others than 0, 1, 2, ... in each of the sequences of cu_seqlens, expected those, as "
        "an engine counts them, or None",
    )


def restarts(position_ids: Tensor, batch: int, length: int) -> Tensor | None:
    """Cumulative lengths of the sequences in a batch whose positions restart inside a row, or None where none do."""
    new = position_ids.expand(batch, length).diff(dim=1) != 1
    if not bool(new.any()):
        return None
    first = torch.ones(batch, 1, dtype=torch.bool, device=new.device)
    starts = torch.cat((first, new), 1).flatten().nonzero()[:, 0]
    return torch.cat((starts, starts.new_tensor([batch * length]))).to(torch.int32)


def _ends(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)


def give(mask: Tensor, layout: Layout) -> None:
    """To modules whose layers hand on no arguments but those that they know: a mask is one, or offsets. It is no
    floating-point number then, for FSDP2 makes others of those."""
    mask.__dict__["_vexact_layout"] = layout


def given(mask) -> Layout | None:
    return getattr(mask, "_vexact_layout", None)


def _given(module: nn.Module, mask) -> Layout | None:
    layout = given(mask)
    if layout is not None and layout.seen is not None:
        module._vexact.by_mask = True
    return layout


def heads_last(x: Tensor) -> Tensor:
    """(B, heads, S, D) as (B * S, heads, D), a view where the strides allow."""
    return x.transpose(1, 2).flatten(0, 1)


def attend(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask=None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    vexact_layout: Layout | None = None,
    **kwargs,
):
    """Attention in the form that Hugging Face's modules call: (B, H, S, D) in, (B, S, Hq, Dv) out.

    Padding rows give zeros. The mask has been turned into `vexact_layout` by the patched model's forward.
    """
    layout = vexact_layout if vexact_layout is not None else _given(module, attention_mask)
    if layout is None:
        raise RuntimeError("vexact attention: call the patched model, not its layers: its forward describes the batch")
    if layout.autocast and query.dtype == torch.float32:
        raise RuntimeError(
            "autocast: a patched model computes in the dtype of its weights, and they are float32 here: cast the "
            "model, or let FSDP2's mixed precision do so"
        )
    if layout.seen is not None:
        begins = [(t.untyped_storage()._cdata, t.storage_offset()) for t in (key, value)]
        shared = begins[0] == begins[1]
        memory = Pages(key.shape[1], key.shape[3], value.shape[3], shared, window=sliding_window)
        asked = {name: value for name, value in kwargs.items() if given(value) is not layout}
        layout.seen.append(Asked(module, {**asked, "dropout": dropout or None}, memory))
    elif dropout:
        raise ValueError(f"vexact attention: dropout: got {dropout}, expected 0: a dropped key is not aligned")
    batch, heads, length, _ = query.shape
    options = {
        "scale": scaling,
        "window": sliding_window,
        "softcap": softcap,
        "sinks": s_aux,
        "kv_segment": layout.kv_segment,
    }
    q, k, v = heads_last(query), heads_last(key), heads_last(value)
    if layout.paged is not None:
        out = _attend_paged(layout, q, k, v, options)
        return out.view(batch, length, heads, -1), None
    missing = layout.keys - key.shape[2]
    if missing < 0:
        raise ValueError(
            f"cache: a layer returned {key.shape[2]} keys for {layout.keys} tokens: caches of a fixed size are not "
            "covered, use a DynamicCache"
        )
    seen = layout.keys if sliding_window is None else min(layout.keys, sliding_window - 1 + length)
    if key.shape[2] < seen:
        raise RuntimeError(
            f"vexact attention: got {key.shape[2]} keys for {layout.keys} tokens, expected {seen} at least: the cache "
            "that the model was called with did not reach this layer, or holds less than it says"
        )
    if missing:  # a window's cache has dropped its oldest keys: put their places back, as blocks are cut from the start
        k, v = (heads_last(torch.nn.functional.pad(x, (0, 0, missing, 0))) for x in (key, value))
    if layout.ulysses is not None:
        return _attend_shared(layout, q, k, v, options).view(batch, length, heads, -1), None
    if layout.q_index is not None:
        q, k, v = q[layout.q_index], k[layout.k_index], v[layout.k_index]
    out = vx.attention_varlen(q, k, v, layout.cu_q, layout.max_q, cu_seqlens_k=layout.cu_k, **options)
    if layout.q_index is not None:
        full = out.new_zeros(batch * length, *out.shape[1:])
        out = full.index_copy(0, layout.q_index, out)
    return out.view(batch, length, heads, -1), None


def _attend_shared(layout: Layout, q: Tensor, k: Tensor, v: Tensor, options: dict) -> Tensor:
    """Of this rank's rows: whole sequences of its heads, for other ranks' rows too."""
    ulysses, heads, key_heads = layout.ulysses, q.shape[1], k.shape[1]
    q, k, v = ulysses.to_heads(key_heads, q, k, v)
    if options["sinks"] is not None:
        options["sinks"] = options["sinks"][ulysses.own(heads, key_heads)]
    if k.shape[1]:
        out = vx.attention_varlen(q, k, v, layout.cu_q, layout.max_q, **options)
    else:  # no head is left for it; its backward takes part in the exchange all the same
        out = torch.cat((v, q, k), -1)[..., : v.shape[-1]]
    return ulysses.to_rows(key_heads, heads, out)


def _attend_paged(layout: Layout, q: Tensor, k: Tensor, v: Tensor, options: dict) -> Tensor:
    paged, place = layout.paged, next(layout.turns)
    if k.shape[0] != q.shape[0]:
        raise ValueError("vexact_paged: the cache holds keys too, expected the pages alone")
    k_cache, v_cache = paged.k_caches[place], paged.v_caches[place]
    slots, pages = paged.places(options["window"])
    vx.kv_cache_store(k, v, k_cache, v_cache, slots)
    table = pages, paged.context_lens, paged.cu_seqlens_q, paged.max_seqlen_q
    return vx.attention_paged(q, k_cache, v_cache, *table, **options)
