"""Owns the model, the KV caches and the buffers, and runs steps: one forward, logits of the rows that are drawn after,
one draw.

A step is launched, and waited for later: what the next one needs of it, the tokens that it draws, stays on the device.
On a GPU both are CUDA graphs wherever that is faster than launching their kernels one by one: of a step of single
tokens one, of a step with chunks one of the forward and one of the draw. What no graph is large enough for is computed
call by call, with the same bits, and so is a step that log-probabilities of a prompt are wanted of.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import vexact_ops as vx
from vexact_ops.patch.description import Pages, State

from ..config import EngineConfig
from ..core.scheduler import Sampled
from ..core.step import Step
from ..progress import Progress, bar
from . import graphs, memory, saver, shapes, sizes
from .batch import Batch
from .buffers import Body, Buffers, Head, Host, Work, send
from .decoder import Decoder, Weights
from .forward import Forward, forward
from .memory import Caches
from .sleep import parted

log = logging.getLogger(__name__)

_TUNED_CONTEXT = 1024  # keys of the longest sequence in the steps that products' kernels are chosen in
_PADDING, _PADDING_OF_CHUNKS = 0.02, 0.1  # share of its time that padding a step to the next size may cost
_FEWER = 2, 4  # steps with chunks of so many times fewer sequences than may run have graphs of their own
_MOST_GRAPHS = 128  # that room is left for
_LIKELIEST_ROWS = 64  # whose logits are there at once: what it takes is not reckoned with at the start
_HIDDEN = 1.25  # a forward whose kernels take that much longer than the host takes to launch them needs no graph


class Pending:
    """A step that was launched."""

    def __init__(
        self, buffers: Buffers, host: Host, draws: int, count: int, top: "_Top | None", scores: "_Scores | None"
    ):
        self._buffers, self._host, self._draws, self._count = buffers, host, draws, count
        self._top, self._scores = top, scores

    def ready(self) -> bool:
        """Whether `wait` returns, or raises, at once."""
        return self._host is None or self._host.event is None or self._host.event.query()

    def wait(self) -> Sampled:
        """What was drawn, one for each chunk that was to be drawn after; id -1 where logits are no numbers. Once."""
        host, self._host = self._host, None
        if host.event is not None:
            host.event.synchronize()
        ids, logprobs, raw = self._buffers.read(host, self._draws, self._count)
        self._buffers.give_back(host)
        scores, tops = self._scores.read() if self._scores else (None, None)
        return Sampled(ids, logprobs, raw, self._top and self._top.read(), scores, tops)


class _Likeliest:
    """The likeliest ids of some rows at temperature 1, on their way to the host.

    counts   for each row of `hidden` how many
    """

    def __init__(self, handle, hidden: Tensor, counts: np.ndarray):
        self._counts, self._found = counts, []
        most = int(counts.max())
        for begin in range(0, len(counts), _LIKELIEST_ROWS):
            logits = handle.logits(hidden[begin : begin + _LIKELIEST_ROWS])
            found = vx.log_softmax(logits).topk(min(most, logits.shape[1]), dim=1)
            self._found.append([_to_host(part) for part in found])

    def read(self) -> list[dict[int, float]]:
        rows = (row for values, ids in self._found for row in zip(ids.tolist(), values.tolist()))
        return [dict(zip(ids[:count], values)) for (ids, values), count in zip(rows, self._counts.tolist())]


class _Top:
    """The likeliest ids beside each draw."""

    def __init__(self, handle, hidden: Tensor, counts: np.ndarray):
        self._draws, self._wanted = len(counts), np.flatnonzero(counts)
        rows = hidden.index_select(0, send(self._wanted, hidden.device))
        self._likeliest = _Likeliest(handle, rows, counts[self._wanted])

    def read(self) -> list[dict[int, float] | None]:
        found: list[dict[int, float] | None] = [None] * self._draws
        for row, top in zip(self._wanted.tolist(), self._likeliest.read()):
            found[row] = top
        return found


class _Scores:
    """Log-probabilities of the prompts' own tokens, on their way to the host, and the likeliest ids at their places.

    tops   for each chunk how many of those
    """

    def __init__(self, handle, hidden: Tensor, step: Step, tops: np.ndarray):
        self._counts = step.chunks["scored"].astype(np.int64)
        before = np.cumsum(step.chunks["length"]) - step.chunks["length"]
        wanted = np.repeat(before - (np.cumsum(self._counts) - self._counts), self._counts)
        rows, target = (
            send(x, hidden.device) for x in (wanted + np.arange(len(wanted)), step.targets.astype(np.int64))
        )
        scored = hidden.index_select(0, rows)
        self._found = _to_host(handle.score(scored, target))
        self._tops, each = tops, np.repeat(tops, self._counts)
        self._likeliest = None
        if each.any():
            rows = send(np.flatnonzero(each), hidden.device)
            self._likeliest = _Likeliest(handle, scored.index_select(0, rows), each[each > 0])

    def read(self) -> tuple[list[list[float]], list[list[dict[int, float]] | None] | None]:
        values = [part.tolist() for part in np.split(self._found.numpy(), np.cumsum(self._counts)[:-1])]
        if self._likeliest is None:
            return values, None
        tops = iter(self._likeliest.read())
        counts = zip(self._tops.tolist(), self._counts.tolist())
        return values, [[next(tops) for _ in range(count)] if top else None for top, count in counts]


def _to_host(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


class Runner:
    """One model on one device. Not thread-safe: its owner launches steps one after another, and waits for them in that
    order.

    model    a Hugging Face causal language model, with `handle` its patch
    config   as given; in it, num_pages is filled in where it is None
    path     how hidden states are computed: "fused", or "patched: " and why
    eager    why there are no CUDA graphs, "" where there are
    regions  of memory that is paused while it sleeps: "weights", "buffers", "kv_cache", "graphs". None where storages
             are emptied instead; `sleep_backend` says which, and why
    captured  whether there are graphs now
    """

    draws = True  # a stage of a pipeline that is not the last one draws nothing

    def __init__(self, model: torch.nn.Module, handle, config: EngineConfig, device: torch.device):
        self.model, self.handle, self.device = model, handle, device
        self.memories = self._memories()
        self.dtype = next(model.parameters()).dtype
        if memory.chunk_of(handle.memories()) is not None:
            kept = -(-config.max_num_seqs // 4) if config.num_snapshots is None else config.num_snapshots
            config = replace(config, num_snapshots=kept if config.enable_prefix_cache else 0)
        self.config = config
        self._tokens = config.max_num_batched_tokens
        self._slots = min(config.max_num_seqs, self._tokens)  # no more run at once
        self._random = np.random.default_rng(0)
        self._hidden: Tensor | None = None  # of the rows that are drawn after
        found, self.sleep_backend = saver.choose(config.sleep_backend, device)
        names = ("weights", "buffers", "kv_cache", "graphs") if found else ()
        self.regions = {name: found.region(name) for name in names}
        self._recorder = None if config.enforce_eager else graphs.recorder(device, self.regions.get("graphs"))
        self.eager = "" if self._recorder else "enforce_eager" if config.enforce_eager else "no GPU"
        self._chosen: dict[str, list[int]] = {}  # sizes of graphs, once they are known
        self._met: set[str] = set()  # kinds of graphs whose kernels have been compiled, verified and chosen
        with bar(config.show_progress) as progress, vx.must_admit():
            try:
                self.make_forward()
                self._start(progress)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    "Engine: out of memory at the start: lower gpu_memory_utilization (or num_pages, if given), "
                    f"max_num_batched_tokens (now {self._tokens}) or max_num_seqs (now {config.max_num_seqs}), or "
                    f"free memory that others hold on the device. {error}"
                ) from error

    def _start(self, progress: Progress) -> None:
        config = self.config
        stand_in = self._caches(1, slots=1, one=True)
        per_token = memory.bytes_per_token(self.memories, self.dtype)
        states = self._slots * memory.bytes_per_slot(self.memories, self.dtype)
        states += (config.num_snapshots or 0) * memory.bytes_per_snapshot(self.memories, self.dtype)
        pages = memory.most_pages(config, per_token, self.device)
        self.buffers = Buffers(stand_in, config.page_size, self._slots, pages, self._tokens, self.device)
        if config.num_pages is None:  # behind the forward: what that moves and takes is in use by now
            step = self._rehearse(progress) if self.device.type == "cuda" else 0
            length = config.max_model_len or 1 << 20
            count = memory.default_num_pages(config, per_token, length, self.device, step, states)
            self.config = replace(config, num_pages=self._agree(count))
        with self.regions["kv_cache"].allocating() if self.regions else contextlib.nullcontext():
            self.buffers.caches = self._caches(self.config.num_pages, self._slots)
        log.info("cache: %s", memory.sizes(self.memories, self.config, self._slots, self.dtype))
        self.capture(progress)

    def longest_first(self) -> bool:
        """Whether attention of single tokens wants those of most keys first: on an H200 its kernel has a block on each
        multiprocessor, which takes one sequence's keys of a head and, once done, the next ones that nobody has."""
        latent = any(isinstance(kept, Pages) and kept.shared for kept in self.memories)
        return self.device.type == "cuda" and self.config.kv_segment is None and not latent

    # What a stage of a pipeline does otherwise (stages.py)

    def _memories(self) -> tuple[Pages | State, ...]:
        """What the layers remember that are computed here."""
        return self.handle.memories()

    def _agree(self, pages: int) -> int:
        """As many as everybody has room for."""
        return pages

    def _forward_of(self, batch: Batch) -> Tensor | None:
        """Final hidden states, where they are computed here."""
        return self.forward(batch)

    def _receive(self, step: Step) -> None:
        """What comes from other stages, behind the step's columns and before its forward."""

    def _hand_on(self, step: Step, work: Work) -> None:
        """What goes to other stages, behind the draw."""

    def make_forward(self) -> None:
        """Of the tensors that the model holds now. Graphs of others are no longer used: `capture` makes new ones."""
        self.release()
        self.forward, self.path = self._forward()
        if self.strays():
            del self.forward  # it holds the memory that they leave
            for name, tensors in zip(("weights", "buffers"), parted(self.model)):
                self.regions[name].take_in(tensors)
            self.forward, self.path = self._forward()

    def follow(self, spare: Forward | None = None) -> None:
        """The model's tensors lie elsewhere, each one laid out as before: the same forward, of them, or one that was
        made of them before. No graph may have been made of the others, and bits that were compared need not be again.
        """
        if self.path == "fused" and spare is not None:
            self.forward = spare
        elif self.path == "fused":
            described = self.handle.describe()
            self.forward = Decoder(Weights(self.model), described, range(len(described.layers)))

    def strays(self) -> bool:
        """Whether some weights are to lie in regions, and lie elsewhere."""
        pairs = zip(("weights", "buffers"), parted(self.model)) if self.regions else ()
        return any(self.regions[name].strays(tensors) for name, tensors in pairs)

    def _forward(self) -> tuple[Forward, str]:
        return forward(self.handle)

    def _caches(self, pages: int, slots: int, one: bool = False) -> Caches:
        snapshots = 0 if one else self.config.num_snapshots or 0
        made = self.config.page_size, slots, self.dtype, self.device, one, snapshots
        return memory.make(self.memories, pages, *made)

    # A step

    @torch.inference_mode()
    def launch(self, step: Step) -> Pending:
        """Begin to compute a step, behind those launched before."""
        buffers = self.buffers
        work = buffers.work(step)
        scored = self.draws and len(step.targets) > 0
        forward = draw = None
        if not scored:
            if not self._all_drawn(work):
                forward = next((few for most, few in self._mixed_few if work.sequences <= most), self._mixed)
            else:
                forward = self._decode if work.plain else self._decode_cut
            forward = forward.fit(work.tokens)
        if work.draws and not (forward and forward.head):
            draw = (self._heads if work.plain else self._heads_cut).fit(work.draws)
        body = forward.body if forward else self._body(work)
        recorded = draw or forward
        head = (recorded and recorded.head) or (Head(work.draws, work.plain) if work.draws else None)
        host = buffers.send(step, body, head)
        with buffers.kept(host):
            self._receive(step)
            buffers.restore(step)
            top = scores = None
            if forward:
                forward.replay()
            else:
                hidden = self._compute(body, whole=scored)
                if scored:
                    tops = buffers.rows.occupants["prompt_top"][step.chunks["slot"]]
                    scores = _Scores(self.handle, hidden, step, tops)
            if draw:
                draw.replay()
            elif head and not (forward and forward.head):
                self._draw(head, self._hidden)
            if work.top and self.draws:
                slots = step.chunks["slot"][step.chunks["draws"] > 0]
                top = _Top(self.handle, self._hidden, buffers.rows.occupants["top"][slots])
            self._hand_on(step, work)
            buffers.save(step)
            draws = head.draws if head else 0
            buffers.fetch(host, draws)
            return Pending(buffers, host, draws, work.draws, top, scores)

    def _body(self, work: Work) -> Body:
        """Without padding, but for rows behind the last attention: as many as steps of decodes have, whose products'
        kernels have been chosen. Others' would be under the request that first meets them."""
        decodes = self._decode.fit(work.draws) if 0 < work.draws < work.tokens else None
        draws = min(decodes.body.tokens, work.tokens) if decodes else work.draws
        width, all_drawn = self.buffers.width(work.context), self._all_drawn(work)
        return Body(work.tokens, work.sequences, draws, work.longest, 1, width, all_drawn)

    @staticmethod
    def _all_drawn(work: Work) -> bool:
        return work.longest == 1 and work.draws == work.tokens

    def _compute(self, body: Body, whole: bool = False, aside: bool = True) -> Tensor | None:
        """Final hidden states, of all tokens where `whole` says so; those that are drawn after are put aside."""
        embedding = self.forward.embedding if isinstance(self.forward, Decoder) else None
        batch, rows = self.buffers.batch(body, embedding)
        if self.draws and not whole and body.draws < body.tokens:
            batch.rows = rows if body.draws else rows.new_zeros(1)  # some token: ops of no rows are not worth a thought
        hidden = self._forward_of(batch)
        if hidden is None:
            return None
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self._slots, hidden.shape[1])
        if aside and body.draws:
            if batch.rows is None and not body.all_drawn:
                self.buffers.take(hidden, rows, self._hidden[: body.draws])
            else:
                self._hidden[: body.draws].copy_(hidden)
        return hidden

    def _draw(self, head: Head, hidden: Tensor) -> None:
        """After its first rows."""
        columns = self.buffers.columns(head)
        cuts = {} if head.plain else {name: columns[name] for name in ("top_k", "top_p", "min_p")}
        ids, *values = self.handle.sample(
            hidden[: head.draws],
            columns["seeds"],
            columns["positions"],
            temperature=columns["temperature"],
            **cuts,
        )
        self.buffers.keep(columns, ids, values)

    # Graphs

    def _decode_body(self, rows: int) -> Body:
        return Body(rows, rows, rows, 1, 1, self.buffers.max_pages, all_drawn=True)

    def _mixed_body(self, rows: int, most: int | None = None) -> Body:
        capacity = self.buffers.max_pages * self.config.page_size
        sequences = min(most or self._slots, rows)
        spare = -(-rows // capacity)
        return Body(rows, sequences + spare, sequences, rows, capacity, self.buffers.max_pages)

    def release(self) -> None:
        """Give back the graphs and their memory; steps are computed call by call until `capture`."""
        self._mixed = self._decode = self._decode_cut = self._heads = self._heads_cut = graphs.Ladder()
        self._mixed_few: list[tuple[int, graphs.Ladder]] = []  # by the most sequences, ascending
        self.captured = False
        if self._recorder:
            self._recorder.release()

    @torch.inference_mode()
    def capture(self, progress: Progress | None = None) -> None:
        """Make the graphs, of the weights, caches and buffers as they are now."""
        if not self._recorder:
            return
        self.release()
        begin = time.perf_counter()
        with bar(self.config.show_progress) if progress is None else contextlib.nullcontext(progress) as shown:
            self._record(shown)
        self.captured = not self.eager
        if not self.eager:
            found = {name: f"{len(own)} up to {max(own, default=0)} rows" for name, own in self._chosen.items()}
            log.info("CUDA graphs: %s, in %.1f s", found, time.perf_counter() - begin)

    def _record(self, progress: Progress) -> None:
        plain, cut = (functools.partial(Head, plain=kind) for kind in (True, False))
        make = functools.partial(self._ladder, progress)
        kept, most, pages = None, self._most_rows(), self.buffers.max_pages
        if self._recorder.lasting:
            how = _PADDING, _PADDING_OF_CHUNKS, _HIDDEN
            kept = sizes.Kept(sizes.about(self.model, self.path, self.config, most, pages, how), most, self.device)
            self._chosen = self._chosen or kept.recall()
        known = dict(self._chosen)
        try:
            with self._recorder.session():
                self._mixed = make("chunks", self._mixed_body, None)
                for share in _FEWER:
                    self._fewer(progress, -(-self._slots // share))
                self._decode = self._decode_cut = make("decodes", self._decode_body, plain)
                if self.draws:
                    self._decode_cut = make("decodes with cuts", self._decode_body, cut, like="decodes")
                    self._heads = make("draws", None, plain)
                    self._heads_cut = make("draws with cuts", None, cut, like="draws")
            if kept and self._chosen != known:
                kept.remember(self._chosen)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.release()
            self.eager = f"the forward cannot be recorded: {type(error).__name__}: {error}"
            log.warning("CUDA graphs: none: %s", self.eager, exc_info=True)
            self._recorder = None

    def _most_rows(self) -> dict[str, int]:
        """The most rows of a graph of each kind."""
        chunks = ["chunks", *(f"chunks of {-(-self._slots // share)} sequences" for share in _FEWER)]
        single = ["decodes", *(["decodes with cuts", "draws", "draws with cuts"] if self.draws else [])]
        return dict.fromkeys(chunks, self._tokens) | dict.fromkeys(single, self._slots)

    def _ladder(
        self,
        progress: Progress,
        name: str,
        body_of: Callable[[int], Body] | None,
        head_of: Callable[[int], Head] | None,
        like: str | None = None,
    ) -> graphs.Ladder:
        """Graphs of forwards of so many rows, of draws, or of both; of the sizes that another kind has.

        Kernels are compiled, verified and chosen where they are first met, and not while recording: what has not been
        run yet is run before.
        """
        ladder = graphs.Ladder()

        def record(size: int, known_body: bool, known_head: bool) -> None:
            body, head = (of and of(size) for of in (body_of, head_of))
            if not (known_body and known_head):
                self._pad(body, head)
                self._run(None if known_body else body, None if known_head else head)
            ladder.put(size, graphs.Recorded(body, head, self._recorder.record(lambda: self._run(body, head))))

        def seconds(size: int) -> float:
            progress(f"graphs of {name}", len(ladder.sizes), len(ladder.sizes) + 1, f"{size} rows")
            held = self._tune(body_of(size), head_of(size)) if body_of and head_of else None
            record(size, False, False)
            del held
            return self._recorder.seconds(ladder.fit(size).replay)

        met = name in self._met
        if like or name in self._chosen:
            known = self._chosen[name] = self._chosen[like or name]
            for done, size in enumerate(reversed(known)):
                progress(f"graphs of {name}", done, len(known), f"{size} rows")
                held = self._tune(body_of(size), head_of(size)) if body_of and head_of and not (met or like) else None
                record(size, met or like is not None, met)
                del held
        else:
            most, tolerance = (self._slots, _PADDING) if head_of else (self._most_mixed(), _PADDING_OF_CHUNKS)
            self._chosen[name] = graphs.choose(seconds, most, tolerance) if most else []
            ladder.keep(set(self._chosen[name]))
        self._met.add(name)
        return ladder

    def _fewer(self, progress: Progress, most: int) -> None:
        """Graphs of steps with chunks of at most so many sequences. Attention's grid is made for the worst that these
        may be, so a sequence that is padding costs some in every layer. Where that is not worth a graph, a size has
        that of more sequences."""
        more = self._mixed_few[0][1] if self._mixed_few else self._mixed
        ladder, name, own = graphs.Ladder(), f"chunks of {most} sequences", []
        known = self._chosen.get(name)
        for done, size in enumerate(more.sizes):
            found, body = more.fit(size), self._mixed_body(size, most)
            if body != found.body and (known is None or size in known):
                progress(f"graphs of {name}", done, len(more.sizes), f"{size} rows")
                if name not in self._met:
                    self._pad(body, None)
                    self._compute(body)
                made = graphs.Recorded(body, None, self._recorder.record(lambda body=body: self._run(body, None)))
                if known is not None or self._wins(made, found):
                    found = made
                    own.append(size)
            ladder.put(size, found)
        self._chosen[name] = own
        self._met.add(name)
        if own:
            self._mixed_few.insert(0, (most, ladder))

    def _wins(self, one: graphs.Recorded, other: graphs.Recorded) -> bool:
        """Whether a forward takes less than another by more than padding may cost."""
        took = self._recorder.seconds(one.replay)
        self._pad(other.body, None)
        return took * (1 + _PADDING) < self._recorder.seconds(other.replay)

    def _tune(self, body: Body, head: Head) -> list[graphs.Run]:
        """Choose products' kernels by the time of a whole step of decodes, the longest of so many keys, the shortest of
        an eighth of that, the longest first. Returns the last graph that was timed, in a list: the memory that all
        graphs share is given back with the last of them.

        Up to eight graphs of a size are there at once. What they compute with is the same memory, for nothing of it
        outlives a capture; what each has of its own is little, and there is room for that of `_MOST_GRAPHS`."""
        longest = min(_TUNED_CONTEXT, self.buffers.max_pages * self.config.page_size)
        lengths = [max(1, int(length)) for length in np.linspace(longest, longest / 8, body.sequences)]
        held: list[graphs.Run] = []

        def step() -> None:
            self._run(body, head)

        def capture() -> Callable[[], float]:
            replay = self._recorder.record(step)
            held[:] = [replay]  # the others go when they have been compared
            return lambda: self._recorder.seconds(replay, 1)

        self._pad(body, head)
        with self.buffers.long_padding(body, lengths):
            tuned = vx.tune(step, capture, f"decodes of {body.tokens} rows: {memory.text(self.memories)}")
        changed = [f"{one.product}: {one.chosen}, not {one.raced}" for one in tuned if one.chosen != one.raced]
        if changed:
            log.info("in a step of %d rows other kernels are faster than alone: %s", body.tokens, "; ".join(changed))
        return held

    def _run(self, body: Body | None, head: Head | None) -> None:
        straight = body and body.all_drawn and head and head.plain  # what is drawn from need not be put aside
        hidden = self._compute(body, aside=not straight) if body else None
        if head:
            self._draw(head, hidden if straight else self._hidden)

    def _pad(self, body: Body | None, head: Head | None) -> None:
        """Nothing but padding in these columns; with ids at random, or rows that are alike would all go to the same
        experts of a mixture, and seem cheaper than they are."""
        vocabulary = shapes.vocab_size(self.model)
        body = body or self._decode_body(1)
        host = self.buffers.send(None, body, head, lambda count: self._random.integers(vocabulary, size=count))
        self.buffers.fetch(host, 0)
        Pending(self.buffers, host, 0, 0, None, None).wait()

    def _most_mixed(self) -> int:
        """The most tokens of a step with chunks that is worth a graph: those for which kernels take little longer than
        the host takes to launch them."""
        size = self._tokens
        while size > 1:
            body = self._mixed_body(size)
            self._pad(body, None)
            self._compute(body)
            device = self._recorder.seconds(lambda body=body: self._compute(body))
            begin = time.perf_counter()
            self._compute(body)
            host = time.perf_counter() - begin
            if device <= _HIDDEN * host:
                return size
            size //= 2
        return 0

    @torch.inference_mode()
    def _rehearse(self, progress: Progress) -> int:
        """Bytes that the largest step and the graphs take beside weights and caches. Without graphs, steps of every
        power of two of tokens go first, of single tokens and with a chunk among them: kernels are compiled, verified
        and chosen here, and not under a request. With them, that is done for each of their sizes."""
        powers = () if self._recorder else range(self._tokens.bit_length())
        for done, size in enumerate(1 << i for i in powers):
            progress("kernels", done, len(powers), f"{size} rows")
            rows = min(size, self._slots)
            for body, plain in ((self._mixed_body(size), True), (self._decode_body(rows), False)):
                self._pad(body, Head(rows, plain))
                self._run(body, Head(rows, plain))
        most = self._mixed_body(self._tokens), Head(self._slots, plain=False)
        progress("kernels", 0, 1, f"{self._tokens} rows")
        self._pad(*most)
        self._run(*most)
        torch.cuda.current_stream(self.device).synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self._run(*most)
        step = torch.cuda.max_memory_allocated(self.device) - before
        return step + (self._room_for_graphs(*most) if self._recorder else 0)

    def _room_for_graphs(self, body: Body, head: Head) -> int:
        """Bytes that they take: they share the memory of the largest one, and each has some of its own."""

        def used(*kinds: tuple) -> int:
            torch.cuda.empty_cache()
            before, _ = torch.cuda.mem_get_info(self.device)
            held.extend(self._recorder.record(functools.partial(self._run, *kind)) for kind in kinds)
            torch.cuda.empty_cache()
            return max(0, before - torch.cuda.mem_get_info(self.device)[0])

        held: list[graphs.Run] = []
        small = self._decode_body(1)
        self._pad(small, None)
        self._compute(small)
        try:
            with self._recorder.session():
                shared = used((body, head), (self._decode_body(self._slots), head))
                own = used(*[(small, None)] * 4) // 4
        except torch.OutOfMemoryError:
            raise
        except Exception:  # `_record` will say so
            return 0
        finally:
            held.clear()
            self._recorder.release()
        return shared + own * _MOST_GRAPHS
