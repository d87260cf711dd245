"""What a runner keeps on its device from step to step, and how a step gets there: in one copy, from pinned memory.

There is one buffer, `words`, at a fixed address:

    last token of each slot | ..... columns of the draw | columns of the forward | facts .....
                                                        ^ `middle`

The columns of the forward begin at `middle`, and those of the draw end there: so where a column lies follows from its
own part's sizes, a CUDA graph of either part finds its columns in place, and what a step needs is one piece. Facts are
of a step behind drafts (follow.py). All that can be computed from numbers on the host is computed there, by NumPy for
all tokens at once; a token that is known on the device alone is gathered from the last tokens, and pages from the page
table, which lies beside the buffer.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import vexact_ops as vx
from vexact_ops.patch.batch import sent

from ..core.step import COPY, Rows, Step
from .batch import Batch, leading_singles
from .follow import FACTS, Follow, most_words, settle
from .memory import Caches

_LINE = 16  # bytes: columns begin at multiples, always, for Triton compiles a kernel anew for pointers that do not
_MOST_PAGES = 4096  # new ones of a step that its copy has room for; there may be more, in a copy of their own
_WIDTH = 16  # the page table is handed out in widths that are multiples of this, where no graph fixes them


def _lines(size: int) -> int:
    return -(-size // _LINE) * _LINE


@dataclass(frozen=True)
class Body:
    """The sizes of a forward, which is all that its graph depends on.

    tokens     T
    sequences  B: those of the step, and sequences that consist of padding
    draws      rows whose hidden states are handed on
    longest    at least the most tokens of a sequence
    padding    at most so many padded tokens make a sequence
    width      pages of a sequence, at most
    all_drawn  after every token something is drawn; or padding
    apart      each token is a sequence to attention, with the pages of its own: it has the bits that it has in a chunk
    singles    the first so many sequences have one token each; 0 of a graph, which serves steps with fewer of them
    """

    tokens: int
    sequences: int
    draws: int
    longest: int
    padding: int
    width: int
    all_drawn: bool = False
    apart: bool = False
    singles: int = 0

    def columns(self) -> Iterator[tuple[str, type, int]]:
        yield "ids", np.int64, self.tokens
        yield "sources", np.int64, self.tokens  # where in `words` each token's id is
        yield "positions", np.int64, self.tokens
        yield "places", np.int64, self.tokens  # where in the cache keys and values go; -1 stores nothing
        yield "rows", np.int64, 0 if self.all_drawn else self.draws  # the tokens that are drawn after
        yield "slots", np.int64, self.sequences
        yield "states", np.int32, self.sequences  # the same, and -1 for padding
        yield "starts", np.int32, self.sequences + 1
        yield "context", np.int32, self.sequences


@dataclass(frozen=True)
class Head:
    """The sizes of a draw.

    plain   no row has a top_k, top_p or min_p, and nobody wants to look at hidden states behind it
    """

    draws: int
    plain: bool

    def columns(self) -> Iterator[tuple[str, type, int]]:
        for name in ("slots", "seeds", "positions", "top_k"):
            yield name, np.int64, self.draws
        for name in ("temperature", "top_p", "min_p"):
            yield name, np.float32, self.draws
        yield "address", np.int64, 1  # of the host's memory that is told what was drawn


@dataclass(frozen=True)
class Work:
    """What a step asks for, in numbers: `Runner` finds the Body and the Head that it fits into.

    longest   tokens of the longest chunk
    context   keys of the longest sequence
    top       the most likeliest tokens that any draw is to come with
    plain     that is none, and no draw has a top_k, top_p or min_p
    singles   chunks of one token before the first that has more
    """

    tokens: int
    sequences: int
    draws: int
    longest: int
    context: int
    top: int
    plain: bool
    singles: int


@functools.lru_cache(1024)
def _places(part: Body | Head) -> tuple[dict[str, tuple[int, type, int]], int]:
    """Of each column its first byte, dtype and length; and the bytes of all."""
    found, at = {}, 0
    for name, kind, count in part.columns():
        found[name] = at, kind, count
        at += _lines(count * np.dtype(kind).itemsize)
    return found, at


class Host:
    """Memory of the host that a step goes through, in and out; its own until the device is through with it. A GPU's
    kernels read and write it where it lies."""

    def __init__(self, size: int, draws: int, device: torch.device):
        pinned = device.type == "cuda"
        self.words = torch.zeros(size // 8, dtype=torch.int64, pin_memory=pinned)
        self.drawn = torch.zeros(4 * draws, dtype=torch.int32, pin_memory=pinned)
        self.bytes, self.numbers = self.words.view(torch.uint8).numpy(), self.drawn.numpy()
        self.address = self.drawn.data_ptr()
        self.event = torch.cuda.Event() if pinned else None

    def wait(self) -> None:
        """Until what was last fetched is there."""
        if self.event is not None:
            self.event.synchronize()

    def columns(self, part: Body | Head, middle: int) -> dict[str, np.ndarray]:
        places, size = _places(part)
        first = middle if isinstance(part, Body) else middle - size
        return {name: np.ndarray(count, kind, self.bytes, first + at) for name, (at, kind, count) in places.items()}


@dataclass(frozen=True)
class _Layout:
    """A step's columns in a host's memory, from byte `first` to `end`.

    sizes       of the columns
    pages       how many new ones there are behind them
    news        or those that have a copy of their own
    follow      of a step behind drafts what it depends on, and in which byte its words begin
    """

    body: dict[str, np.ndarray]
    head: dict[str, np.ndarray]
    sizes: tuple[Body, Head | None]
    first: int
    end: int
    pages: int
    news: tuple | None
    follow: tuple[Follow, int] | None


def _draws(wanted: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of a step's draws: whose chunk's each is, whether it is that one's last, and after which token it is. `wanted` of
    each chunk, after its last tokens; each ends before the token of its offset."""
    drawn = np.flatnonzero(wanted)
    if not (wanted > 1).any():
        return drawn, np.ones(len(drawn), bool), offsets[drawn] - 1
    counts = wanted[drawn]
    left = np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum())  # of the same chunk, this one included
    drawn = np.repeat(drawn, counts)
    return drawn, left == 1, offsets[drawn] - left


def send(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy of its own, for what is rare. The host does not wait for it."""
    return sent(torch.from_numpy(np.ascontiguousarray(values)), device)


class Buffers:
    """The rows of all slots, and the step's inputs and outputs, on one device.

    slots       sequences that run at once. One more row is for padding: it has page 0
    max_pages   of a sequence
    tokens      of a step, at most
    """

    def __init__(self, caches: Caches, page_size: int, slots: int, max_pages: int, tokens: int, device: torch.device):
        self.caches, self.device, self.slots = caches, device, slots
        self.page_size = page_size
        self.rows = Rows(slots, max_pages)
        self._pages = torch.zeros((slots + 1) * max_pages, dtype=torch.int32, device=device)
        self.table = self._pages.view(slots + 1, max_pages)
        self.beside: Tensor | None = None  # of each page the one of layers with a window, where those have their own
        most = Body(tokens, tokens + slots + 1, tokens, tokens, tokens, max_pages)
        last = _lines(8 * (slots + 1))
        self.middle = last + _places(Head(tokens, plain=False))[1]
        size = self.middle + _places(most)[1] + _lines(4 * most_words(slots))
        self._size, self._draws = size + _MOST_PAGES * 12, tokens
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.words = self.memory.view(torch.int64)
        self.last = self.words[: slots + 1]
        self.drawn = torch.zeros(tokens, dtype=torch.int64, device=device)  # in the last step, by its rows
        if device.type == "cuda":
            from . import triton  # on a CPU it need not be installed

            self._kernels = triton
        else:  # torch's
            self._kernels, self._drawn = None, torch.zeros(4 * tokens, dtype=torch.int32)
        self._copies, self._lie = None, []  # of states and their snapshots, as they lay when it was made
        self._hosts: list[Host] = []  # all there are: one that is lost with its step may still be read by kernels
        self._free: list[Host] = []

    def stand_beside(self, pages: int) -> None:
        """Layers with a window have pages of their own. Before any graph is captured that stays."""
        size = self.table.numel()
        self._pages = self._pages.new_zeros(size + pages)  # one piece: a step's news of both are written alike
        self.table, self.beside = self._pages[:size].view_as(self.table), self._pages[size:]

    @property
    def max_pages(self) -> int:
        return self.table.shape[1]

    # A step's way in

    def work(self, step: Step) -> Work:
        """Take in what the step says of slots."""
        chunks = step.chunks
        slots, lengths = chunks["slot"][chunks["draws"] > 0], chunks["length"]
        self._new = self.rows.apply(step), step.page_ids
        if len(step.windowed):
            beside = self.table.numel() + step.windowed["page"].astype(np.int64), step.windowed["own"]
            self._new = tuple(np.concatenate(both) for both in zip(self._new, beside))
        drawn = self.rows.occupants[slots]
        top = int(drawn["top"].max(initial=0))
        plain = not (top or drawn["top_k"].any() or drawn["min_p"].any() or (drawn["top_p"] < 1).any())
        context = int((chunks["start"] + lengths).max())
        draws = int(chunks["draws"].sum())
        sizes = len(step.token_ids), len(chunks), draws, int(lengths.max())
        return Work(*sizes, context, top, plain, leading_singles(lengths))

    def send(
        self,
        step: Step | None,
        body: Body,
        head: Head | None,
        ids: Callable | None = None,
        follow: Follow | None = None,
    ) -> Host:
        """Write a step's columns, padded to these sizes, and begin to copy them.

        step     None: padding alone, to rehearse and to time
        ids      count -> token ids for the padding
        follow   what it depends on, if it is one behind drafts: its rows are moved once they are there
        """
        host, laid = self._lay(step, body, head, ids, follow)
        with self.kept(host):
            self._post(host, laid)
        return host

    def _lay(
        self, step: Step | None, body: Body, head: Head | None, ids: Callable | None, follow: Follow | None
    ) -> tuple[Host, _Layout]:
        if not self._free:
            self._free.append(Host(self._size, self._draws, self.device))
            self._hosts += self._free
        host = self._free.pop()
        first, end = self.middle, self.middle + _places(body)[1]
        to = of_body = host.columns(body, self.middle)
        if step is None:
            tokens = count = draws = 0
            chosen = ends = rows = positions = np.zeros(0, np.int64)
            latest = np.zeros(0, bool)
        else:
            tokens, count = len(step.token_ids), len(step.chunks)
            slots, begins, lengths, wanted, _ = (step.chunks[name].astype(np.int64) for name in step.chunks.dtype.names)
            ends = begins + lengths
            offsets = np.cumsum(lengths)
            drawn, latest, rows = _draws(wanted, offsets)
            draws = len(drawn)
            if tokens == count:
                owners, positions = slots, begins
            else:
                owner = np.repeat(np.arange(count), lengths)
                owners, positions = slots[owner], np.arange(tokens) + (ends - offsets)[owner]
            page, offset = np.divmod(positions, self.page_size)
            to["ids"][:tokens] = step.token_ids
            known = self.middle // 8 + np.arange(tokens)
            to["sources"][:tokens] = known if follow else np.where(step.token_ids < 0, owners, known)
            to["positions"][:tokens] = positions + self.rows.occupants["shift"][owners]
            to["places"][:tokens] = self.rows.table[owners, page].astype(np.int64) * self.page_size + offset
            if not body.all_drawn:
                to["rows"][:draws] = rows
            chosen = slots[drawn]
            if body.apart:
                count, slots, ends, offsets = tokens, owners, positions + 1, np.arange(1, tokens + 1)
            to["slots"][:count] = to["states"][:count] = slots
            to["starts"][1 : count + 1] = offsets
            to["context"][:count] = ends
        to["starts"][0] = 0
        missing = body.tokens - tokens
        to["slots"][count:], to["states"][count:] = self.slots, -1
        if missing:
            to["ids"][tokens:] = 0 if ids is None else ids(missing)
            to["sources"][tokens:] = self.middle // 8 + np.arange(tokens, body.tokens)
            to["places"][tokens:] = -1
        if count < body.sequences:
            padded = tokens + body.padding * np.arange(1, body.sequences - count + 1)
            to["starts"][count + 1 :] = np.minimum(padded, body.tokens)
            lengths = np.diff(to["starts"][count:])
            to["context"][count:] = lengths
            if missing and body.padding == 1:
                to["positions"][tokens:] = 0
            elif missing:
                to["positions"][tokens:] = np.arange(missing) % body.padding
        to["rows"][draws:] = 0
        to = {}
        if head is not None:
            first -= _places(head)[1]
            to = host.columns(head, self.middle)
            occupants = self.rows.occupants[chosen]
            to["slots"][:draws], to["slots"][draws:] = np.where(latest, chosen, self.slots), self.slots
            to["seeds"][:draws], to["seeds"][draws:] = occupants["seed"], 0
            to["positions"][:draws], to["positions"][draws:] = positions[rows] + 1, 0
            warm = 0.0 if step is not None else 1.0  # greedy rows cost less than others, which are to be timed
            for name, padding in (("top_k", 0), ("temperature", warm), ("top_p", 1.0), ("min_p", 0.0)):
                to[name][:draws], to[name][draws:] = occupants[name], padding
            to["address"][0] = host.address
        behind = None if follow is None else (follow, end)
        if follow is not None:
            words, end = host.bytes[end:].view(np.int32), end + _lines(follow.words.nbytes)
            words[: len(follow.words)] = follow.words
        where, pages = self._new if step is not None else ((), ())
        apart = len(pages) > _MOST_PAGES or not self._kernels
        if not apart:
            numbers = end + 8 * len(pages)
            host.bytes[end:numbers].view(np.int64)[:] = where
            host.bytes[numbers : numbers + 4 * len(pages)].view(np.int32)[:] = pages
        news = (where, pages) if apart and len(pages) else None
        count = 0 if apart else len(pages)
        return host, _Layout(of_body, to, (body, head), first, end, count, news, behind)

    def _post(self, host: Host, laid: _Layout) -> None:
        first, end = laid.first // 8, laid.end // 8
        if laid.follow and not self._kernels:  # what the step before has drawn is there
            follow, apart = laid.follow[0], laid.sizes[0].apart
            settle(follow, self.drawn.numpy(), laid.body, laid.head, self.rows.table, self.page_size, apart)
        if self._kernels:
            self._kernels.receive(host.words, self.words, self._pages, first, end, laid.pages)
        else:
            self.words[first:end] = host.words[first:end]
        if laid.news is not None:
            self._pages.index_copy_(0, *(send(part, self.device) for part in laid.news))
        if laid.follow and self._kernels:
            follow, facts = laid.follow
            self._settle(facts, follow.chunks, *laid.sizes)

    def rehearse(self, drafts: bool) -> None:
        """What not all steps have, before anybody has a slot: it is compiled then. Behind drafts, that is moves of no
        rows; and copies of states, where there are any."""
        if self._kernels and any(copies is not None for copies in self.caches.snapshots):
            self._copy(np.zeros(1, COPY), back=False)
        if self._kernels and drafts:
            body, head = Body(1, 1, 1, 1, 1, self.max_pages, all_drawn=True, apart=True), Head(1, plain=True)
            facts = self.middle + _places(body)[1]
            self.memory[facts : facts + 4 * len(FACTS)].zero_()
            self._settle(facts, 1, body, head)

    def _settle(self, facts: int, chunks: int, body: Body, head: Head) -> None:
        (forward, _), (draw, size) = _places(body), _places(head)
        at = [self.middle + forward[name][0] for name in ("ids", "positions", "places", "context")]
        at.append(self.middle - size + draw["positions"][0])
        columns = [place // 8 for place in (*at, facts)]
        self._kernels.settle(self.words, self.drawn, self.table, chunks, *columns, body.apart, self.page_size)

    @contextlib.contextmanager
    def long_padding(self, body: Body, lengths: Sequence[int]) -> Iterator[None]:
        """Decodes that are padding have slots and so many keys meanwhile, in pages at random: for the time that steps
        take. They still store nothing. Nobody may have a slot."""
        columns, count = self.columns(body), body.sequences
        context, slots, states = columns["context"], columns["slots"], columns["states"]
        own, table = torch.arange(count), self.table[: min(count, self.slots)]
        beyond = own >= self.slots  # these have no tokens
        counts = [len(cache) for cache in self.caches.keys if cache is not None]
        table.random_(max(counts, default=1))
        beside = None if self.beside is None else self.beside.clone()  # the prefix cache may know pages
        if self.beside is not None:
            self.beside.random_(min(counts))
        context.copy_(torch.tensor(lengths, dtype=torch.int32))
        slots.copy_(own.clamp(max=self.slots))
        states.copy_(own.masked_fill(beyond, -1))
        try:
            yield
        finally:
            if self.beside is not None:
                self.beside.copy_(beside)
            table.zero_()
            context.fill_(1)
            slots.fill_(self.slots)
            states.fill_(-1)

    # On the device

    def columns(self, part: Body | Head) -> dict[str, Tensor]:
        places, size = _places(part)
        first = self.middle if isinstance(part, Body) else self.middle - size
        found = {}
        for name, (at, kind, count) in places.items():
            begin = first + at
            piece = self.memory[begin : begin + count * np.dtype(kind).itemsize]
            found[name] = piece.view(_TORCH[kind])
        return found

    def batch(self, body: Body, embedding: Tensor | None = None) -> tuple[Batch, Tensor]:
        """The batch, and the rows that are drawn after. A last token that is none (-1: what it was to be drawn from was
        not finite) is computed as token 0: it must not be an index, and nobody will ask for what comes of it.

        embedding   whose rows may be gathered with the ids, if the forward has use for them
        """
        c, embedded = self.columns(body), None
        if self._kernels:
            gathered = self.words, c["sources"], self.table, c["slots"], body.width, embedding
            input_ids, table, embedded = self._kernels.inputs(*gathered)
        else:
            input_ids = self.words[c["sources"]].clamp_(min=0)
            table = self.table[:, : body.width][c["slots"]]
        keys, values, states, _ = self.caches
        step = c["places"], table, c["context"], c["starts"], body.longest
        slots = c["states"] if states else None
        paged = vx.patch.PagedBatch(keys, values, *step, states, slots, singles=body.singles)
        if self.beside is not None:
            windowed = self._kernels.windowed if self._kernels else _windowed
            paged.windowed = windowed(self.beside, c["places"], table, self.page_size)
        return Batch(input_ids, c["positions"], paged, embedded=embedded, apart=body.apart), c["rows"]

    def restore(self, step: Step) -> None:
        """Before a step: states that its sequences go on from."""
        self._copy(step.restores, back=True)

    def save(self, step: Step) -> None:
        """Behind a step: copies of states that others may go on from."""
        self._copy(step.saves, back=False)

    def _copy(self, copies: np.ndarray, back: bool) -> None:
        if not len(copies):
            return
        kept = zip(self.caches.states, self.caches.snapshots)
        pairs = [pair for states, own in kept if states is not None and own is not None for pair in zip(states, own)]
        rows = send(np.stack([copies["slot"], copies["snapshot"]]).astype(np.int64), self.device)
        if self._kernels and pairs:
            lie = [t.data_ptr() for pair in pairs for t in pair]  # tensors that slept may have woken up elsewhere
            if lie != self._lie:
                self._copies, self._lie = self._kernels.copies_of(pairs), lie
            self._kernels.copy(self._copies, rows, back)
            return
        slots, places = rows
        for state, snapshot in pairs:
            if back:
                state.index_copy_(0, slots, snapshot.index_select(0, places))
            else:
                snapshot.index_copy_(0, places, state.index_select(0, slots))

    def take(self, hidden: Tensor, rows: Tensor, out: Tensor) -> None:
        """out[:] = hidden[rows]."""
        if self._kernels and hidden.is_contiguous():
            self._kernels.take(hidden, rows, out)
        else:
            torch.ops.aten.index.Tensor_out(hidden, [rows], out=out)

    def keep(self, columns: dict[str, Tensor], ids: Tensor, values: Sequence[Tensor]) -> None:
        """Note what was drawn: the ids for the slots' next tokens, all of it for the host."""
        if self._kernels:
            self._kernels.keep(columns["slots"], ids, *values, self.last, self.drawn, columns["address"])
        else:
            self.last.index_copy_(0, columns["slots"], ids)
            self.drawn[: len(ids)] = ids
            parts = [t.view(torch.int32) for t in (ids, *values)]
            torch.cat(parts, out=self._drawn[: 4 * len(ids)])

    def width(self, context: int) -> int:
        """Pages for so many keys, for a step of its own."""
        pages = -(-context // self.page_size)
        return min(-(-pages // _WIDTH) * _WIDTH, self.max_pages)

    # Its way out

    def fetch(self, host: Host, draws: int) -> None:
        """Behind all of a step: what was drawn is with the host once the event has come."""
        if not self._kernels:
            host.drawn[: 4 * draws] = self._drawn[: 4 * draws]
        if host.event is not None:
            host.event.record()

    def read(self, host: Host, draws: int, count: int) -> tuple[list[int], list[float], list[float]]:
        """Of `draws` draws the first `count`, once they are there."""
        ids = host.numbers[: 2 * draws].view(np.int64)[:count].tolist()
        values = host.numbers[2 * draws : 4 * draws].view(np.float32).reshape(2, draws)[:, :count].tolist()
        return ids, *values

    def give_back(self, host: Host) -> None:
        self._free.append(host)

    @contextlib.contextmanager
    def kept(self, host: Host) -> Iterator[None]:
        """Of a step that fails meanwhile, the next one has it, once the device is through with it."""
        try:
            yield
        except BaseException:
            if host.event is not None:
                torch.cuda.current_stream(self.device).synchronize()
            self.give_back(host)
            raise


def _windowed(beside: Tensor, places: Tensor, table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Places and pages of layers with a window; a place that is none stays so."""
    page, offset = places // page_size, places % page_size
    return torch.where(places < 0, places, beside[page] * page_size + offset), beside[table]


_TORCH = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}
