"""Graphs of a runner's steps: recorded at the start, found for each step, given back.

Of single tokens one graph has the forward and the draw. Chunks have graphs of the forward alone, and the draw behind it
has its own. Which sizes there are is chosen by time (graphs.py) and remembered (sizes.py). `rehearse` runs the largest
step beforehand, to know what memory is left for the cache. Of sizes that are remembered a graph may be recorded only
when a step wants it (EngineConfig.record_ahead): kernels are compiled, verified and chosen at the start all the same.
"""

import contextlib
import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

import vexact_ops as vx

from ..core.plan import MOST_VERIFIED
from ..progress import Progress, bar
from . import graphs, memory, shapes, sizes
from .buffers import Body, Head, Work

if TYPE_CHECKING:
    from .runner import Runner

log = logging.getLogger(__name__)

_TUNED_CONTEXT = 1024  # keys of the longest sequence in the steps that products' kernels are chosen in
_PADDING, _PADDING_OF_CHUNKS = 0.02, 0.1  # share of its time that padding a step to the next size may cost
_FEWER = 2, 4  # steps with chunks of so many times fewer sequences than may run have graphs of their own
_MOST_GRAPHS = 128  # that room is left for
_ONE_BY_ONE = 32  # rows of a step with drafts that attention takes one by one
_HIDDEN = 1.25  # a forward whose kernels take that much longer than the host takes to launch them needs no graph


class Graphs:
    """Of one runner, which they are made with: its buffers, `compute` and `draw`.

    eager     why there are none, "" where there are
    captured  whether there are some now
    verified  rows -> seconds of steps that verify drafts, as they were first made
    """

    def __init__(self, runner: "Runner"):
        self._runner: Runner = weakref.proxy(runner)  # no circle: memory goes with the runner's last reference
        config = runner.config
        region = runner.regions.get("graphs")
        self._recorder = None if config.enforce_eager else graphs.recorder(runner.device, region)
        self.eager = "" if self._recorder else "enforce_eager" if config.enforce_eager else "no GPU"
        self._chosen: dict[str, list[int]] = {}  # sizes, once they are known
        self._kept: list[sizes.Kept] = []
        self._met: set[str] = set()  # kinds whose kernels have been compiled, verified and chosen
        # What a draft is verified from lies where padding is drawn; other processes would have to record with this one.
        self._ahead = config.record_ahead or config.speculation is not None or config.processes > 1
        self._later = False  # whether graphs are recorded when steps want them
        self.verified: dict[int, float] = {}
        self._random = np.random.default_rng(0)

    def fit(self, work: Work, whole: bool = False) -> tuple[graphs.Recorded | None, graphs.Recorded | None]:
        """Of a step its forward, with the draw where that is in it, and else its draw; None is computed call by call.

        whole   hidden states of all tokens are wanted, which no graph hands on
        """
        forward = draw = None
        if not whole:
            if work.longest > 1 and self._all_drawn(work):
                ladder = self.verify if work.plain else self.verify_cut
            elif not self._all_drawn(work):
                ladder = next((few for most, few in self.mixed_few if work.sequences <= most), self.mixed)
            else:
                ladder = self.decode if work.plain else self.decode_cut
            forward = ladder.fit(work.tokens)
        if work.draws and not (forward and forward.head):
            draw = (self.heads if work.plain else self.heads_cut).fit(work.draws)
        return forward, draw

    def body(self, work: Work) -> Body:
        """Without padding, but for rows behind the last attention: as many as steps of decodes have, whose products'
        kernels have been chosen. Others' would be under the request that first meets them."""
        decodes = self.decode.size(work.draws) if 0 < work.draws < work.tokens else None
        draws = min(decodes, work.tokens) if decodes else work.draws
        width, all_drawn = self._runner.buffers.width(work.context), self._all_drawn(work)
        return Body(work.tokens, work.sequences, draws, work.longest, 1, width, all_drawn, singles=work.singles)

    @staticmethod
    def _all_drawn(work: Work) -> bool:
        return work.draws == work.tokens

    def decode_body(self, rows: int) -> Body:
        return Body(rows, rows, rows, 1, 1, self._runner.buffers.max_pages, all_drawn=True)

    def _verify_body(self, rows: int) -> Body:
        """Of decodes with drafts. Of padding no sequence is longer than those are. Few rows go to attention one by one,
        to its kernel for single tokens, which no benchmark has timed yet; a state takes a sequence's together."""
        longest = 1 + self._runner.config.speculation.max_draft_tokens
        if rows <= _ONE_BY_ONE and memory.chunk_of(self._runner.memories) is None:
            return dataclasses.replace(self.decode_body(rows), apart=True)
        sequences = min(rows, self._runner.slots + -(-rows // longest))
        return Body(rows, sequences, rows, longest, longest, self._runner.buffers.max_pages, all_drawn=True)

    def _mixed_body(self, rows: int, most: int | None = None) -> Body:
        capacity = self._runner.buffers.max_pages * self._runner.config.page_size
        sequences = min(most or self._runner.slots, rows)
        spare = -(-rows // capacity)
        return Body(rows, sequences + spare, sequences, rows, capacity, self._runner.buffers.max_pages)

    def release(self) -> None:
        """Give back the graphs and their memory; steps are computed call by call until `capture`."""
        self.mixed = self.decode = self.decode_cut = self.heads = self.heads_cut = graphs.Ladder()
        self.verify = self.verify_cut = graphs.Ladder()
        self.mixed_few: list[tuple[int, graphs.Ladder]] = []  # by the most sequences, ascending
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
        with bar(self._runner.config.show_progress) if progress is None else contextlib.nullcontext(progress) as shown:
            self._record(shown)
        self.captured = not self.eager
        if not self.eager:
            found = {name: f"{len(own)} up to {max(own, default=0)} rows" for name, own in self._chosen.items()}
            when = ", each once a step wants it" if self._later else ""
            log.info("CUDA graphs: %s%s, in %.1f s", found, when, time.perf_counter() - begin)

    def _record(self, progress: Progress) -> None:
        plain, cut = (functools.partial(Head, plain=kind) for kind in (True, False))
        make = functools.partial(self._ladder, progress)
        if self._recorder.lasting and not self._kept:
            self._kept = self._known_sizes()
            for one in self._kept:
                self._chosen |= one.recall()
        self._later = not self._ahead and self._chosen.keys() >= self._most_rows().keys()
        try:
            with self._recorder.session():
                self.mixed = make("chunks", self._mixed_body, None)
                for share in _FEWER:
                    self._fewer(progress, -(-self._runner.slots // share))
                self.decode = self.decode_cut = make("decodes", self.decode_body, plain)
                if self._runner.config.speculation is not None:
                    self.verify = self.verify_cut = make("drafts", self._verify_body, plain)
                    self.verified = self.verified or {
                        rows: self._took(self.verify.fit(rows), long=True) for rows in self.verify.sizes
                    }
                    if self._runner.draws:
                        self.verify_cut = make("drafts with cuts", self._verify_body, cut, like="drafts")
                if self._runner.draws:
                    self.decode_cut = make("decodes with cuts", self.decode_body, cut, like="decodes")
                    self.heads = make("draws", None, plain)
                    self.heads_cut = make("draws with cuts", None, cut, like="draws")
            for one in self._kept:
                one.remember(self._chosen)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self._runner.ranks.size > 1:  # the others have graphs, in which they wait for this one
                raise
            self.release()
            self.eager = f"the forward cannot be recorded: {type(error).__name__}: {error}"
            log.warning("CUDA graphs: none: %s", self.eager, exc_info=True)
            self._recorder = None

    def _wanted(self, body: Body | None, head: Head | None) -> graphs.Recorded | None:
        """Recorded between two steps. None: no memory is left, or it cannot be done. Then no other is tried, and steps
        without a graph are computed call by call until `capture`."""
        if not self._later:
            return None
        begin, rows = time.perf_counter(), body.tokens if body else head.draws
        try:
            with self._recorder.session(collect=False), vx.must_admit():
                made = self._record_met(body, head, (body, head))
        except Exception as error:
            self._later = False
            what = f"{type(error).__name__}: {error}"
            log.warning("CUDA graphs: no more than there are: of %d rows: %s", rows, what, exc_info=True)
            return None
        log.info("CUDA graphs: one of %d rows was wanted, recorded in %.2f s", rows, time.perf_counter() - begin)
        return made

    def _put_later(
        self, ladder: graphs.Ladder, size: int, body: Body | None, head: Head | None, known_body: bool, known_head: bool
    ) -> None:
        """As the others, but that it is recorded later."""
        self._meet(body, head, known_body, known_head)
        own = weakref.proxy(self)  # no circle
        ladder.put_later(size, body, lambda: own._wanted(body, head))

    def _known_sizes(self) -> list[sizes.Kept]:
        """What is known of sizes. Steps without drafts have those of an engine that knows none: what one of them has
        chosen serves the other."""
        of, most = self._runner, self._most_rows()
        how: tuple[float | str, ...] = _PADDING, _PADDING_OF_CHUNKS, _HIDDEN
        if of.ranks.size > 1:
            how = *how, f"{of.ranks.size} ranks by {of.ranks.by.partition(':')[0]}"

        def kept(drafts: bool, how: tuple[float | str, ...]) -> sizes.Kept:
            about = sizes.about(of.model, of.path, of.config, most, of.buffers.max_pages, how)
            own = {name: rows for name, rows in most.items() if name.startswith("drafts") is drafts}
            return sizes.Kept(about, own, of.device, of.ranks)

        if of.config.speculation is None:
            return [kept(False, how)]
        return [kept(False, how), kept(True, (*how, of.config.speculation.max_draft_tokens))]

    def _most_rows(self) -> dict[str, int]:
        """The most rows of a graph of each kind."""
        chunks = ["chunks", *(f"chunks of {-(-self._runner.slots // share)} sequences" for share in _FEWER)]
        single = ["decodes", *(["decodes with cuts", "draws", "draws with cuts"] if self._runner.draws else [])]
        most = dict.fromkeys(chunks, self._runner.tokens) | dict.fromkeys(single, self._runner.slots)
        if self._runner.config.speculation is not None:
            drafts = ["drafts", *(["drafts with cuts"] if self._runner.draws else [])]
            most |= dict.fromkeys(drafts, self._most_verified())
        return most

    def _most_verified(self) -> int:
        """Rows of a step of drafts that has a graph."""
        longest = 1 + self._runner.config.speculation.max_draft_tokens
        return min(self._runner.tokens, self._runner.slots * longest, MOST_VERIFIED)

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

        def record(size: int, known_body: bool, known_head: bool, later: bool = False) -> None:
            body, head = (of and of(size) for of in (body_of, head_of))
            if later:
                self._put_later(ladder, size, body, head, known_body, known_head)
            else:
                ladder.put(size, self._recorded(body, head, known_body, known_head))

        def tune(size: int) -> list[graphs.Run] | None:
            body = body_of and head_of and body_of(size)
            return self._tune(body, head_of(size)) if body and body.longest == 1 and not body.apart else None

        def seconds(size: int) -> float:
            progress(f"graphs of {name}", len(ladder.sizes), len(ladder.sizes) + 1, f"{size} rows")
            held = tune(size)
            record(size, False, False)
            del held
            return self._seconds(ladder.fit(size).replay)

        met = name in self._met
        if like or name in self._chosen:
            known = self._chosen[name] = self._chosen[like or name]
            for done, size in enumerate(reversed(known)):
                progress(f"graphs of {name}", done, len(known), f"{size} rows")
                held = None if met or like else tune(size)
                # what was timed holds the graphs' memory: one of them at least does from here on
                record(size, met or like is not None, met, self._later and not held)
                del held
        else:
            progress(f"graphs of {name}", 0, 1)
            most = self._most_rows()[name] if head_of else self._most_mixed()
            tolerance = _PADDING if head_of and body_of is not self._verify_body else _PADDING_OF_CHUNKS
            self._chosen[name] = graphs.choose(seconds, most, tolerance) if most else []
            ladder.keep(set(self._chosen[name]))
        self._met.add(name)
        return ladder

    def _recorded(
        self, body: Body | None, head: Head | None, known_body: bool = False, known_head: bool = False
    ) -> graphs.Recorded:
        """What is not known is met first."""
        if known_body and known_head:
            return graphs.Recorded(body, head, self._recorder.record(functools.partial(self._run, body, head)))
        self._meet(body, head, known_body, known_head)
        return self._record_met(body, head, (None if known_body else body, None if known_head else head))

    def _meet(self, body: Body | None, head: Head | None, known_body: bool = False, known_head: bool = False) -> None:
        """What is not known has its kernels compiled, verified and chosen, in one layer of each kind."""
        if known_body and known_head:
            return
        self._pad(body, head)
        with self._runner.one_of_each():
            self._run(None if known_body else body, None if known_head else head)

    def _record_met(
        self, body: Body | None, head: Head | None, again: tuple[Body | None, Head | None]
    ) -> graphs.Recorded:
        """Where one layer of each kind has left something to be met while recording, which cannot settle it, all layers
        are run, of what is to be run `again`."""
        run = functools.partial(self._run, body, head)
        alone = self._runner.ranks.size == 1  # others would not know whether this one runs all layers
        replay = self._recorder.record(run, if_settled=alone)
        if replay is None:
            self._pad(body, head)
            self._run(*again)
            replay = self._recorder.record(run)
        return graphs.Recorded(body, head, replay)

    def _fewer(self, progress: Progress, most: int) -> None:
        """Graphs of steps with chunks of at most so many sequences. Attention's grid is made for the worst that these
        may be, so a sequence that is padding costs some in every layer. Where that is not worth a graph, a size has
        that of more sequences."""
        more = self.mixed_few[0][1] if self.mixed_few else self.mixed
        ladder, name, own = graphs.Ladder(), f"chunks of {most} sequences", []
        known = self._chosen.get(name)
        for done, size in enumerate([*more.sizes]):
            body = self._mixed_body(size, most)
            if self._later:
                if size in known and body != more.body(size):
                    progress(f"graphs of {name}", done, len(more.sizes), f"{size} rows")
                    self._put_later(ladder, size, body, None, name in self._met, True)
                    own.append(size)
                else:
                    ladder.put_later(size, more.body(size), functools.partial(more.fit, size))
                continue
            found = more.fit(size)
            if body != found.body and (known is None or size in known):
                progress(f"graphs of {name}", done, len(more.sizes), f"{size} rows")
                made = self._recorded(body, None, name in self._met, known_head=True)
                if known is not None or self._wins(made, found):
                    found = made
                    own.append(size)
            ladder.put(size, found)
        self._chosen[name] = own
        self._met.add(name)
        if own:
            self.mixed_few.insert(0, (most, ladder))

    def _wins(self, one: graphs.Recorded, other: graphs.Recorded) -> bool:
        """Whether a forward takes less than another by more than padding may cost."""
        took = self._seconds(one.replay)
        return took * (1 + _PADDING) < self._took(other)

    def _took(self, found: graphs.Recorded, long: bool = False) -> float:
        """long: with as many keys as decodes are tuned with."""
        self._pad(found.body, found.head)
        with self._long(found.body) if long else contextlib.nullcontext():
            return self._seconds(found.replay)

    def _long(self, body: Body) -> contextlib.AbstractContextManager:
        """Padding has keys meanwhile: the longest sequence, which is first, so many, the shortest an eighth of that."""
        longest = min(_TUNED_CONTEXT, self._runner.buffers.max_pages * self._runner.config.page_size)
        lengths = np.linspace(longest, longest / 8, body.sequences)
        least = min(body.longest, longest)
        return self._runner.buffers.long_padding(body, [max(least, int(length)) for length in lengths])

    def _seconds(self, run: graphs.Run) -> float:
        return self._agreed(self._recorder.seconds(run))

    def _agreed(self, seconds: float) -> float:
        """The most that it took on any rank: all of them have graphs of the same sizes, for in each all take part."""
        ranks = self._runner.ranks
        if ranks.size == 1:
            return seconds
        own = torch.tensor([[seconds]], dtype=torch.float64, device=self._runner.device)
        return float(ranks.gather(own).max())

    def _tune(self, body: Body, head: Head) -> list[graphs.Run]:
        """Choose products' kernels by the time of a whole step of decodes. Returns the last graph that was timed, in a
        list: the memory that all graphs share is given back with the last of them.

        Up to eight graphs of a size are there at once. What they compute with is the same memory, for nothing of it
        outlives a capture; what each has of its own is little, and there is room for that of `_MOST_GRAPHS`.

        Ranks choose alone, each product by itself: they would have to time the same steps together."""
        if self._runner.ranks.size > 1:
            return []
        held: list[graphs.Run] = []

        def step() -> None:
            self._run(body, head)

        def products() -> None:
            with self._runner.one_of_each():
                step()

        def capture() -> Callable[[], float]:
            replay = self._recorder.record(step)
            held[:] = [replay]  # the others go when they have been compared
            return lambda: self._recorder.seconds(replay, 1)

        self._pad(body, head)
        with self._long(body):
            tuned = vx.tune(products, capture, f"decodes of {body.tokens} rows: {memory.text(self._runner.memories)}")
        changed = [f"{one.product}: {one.chosen}, not {one.raced}" for one in tuned if one.chosen != one.raced]
        if changed:
            log.info("in a step of %d rows other kernels are faster than alone: %s", body.tokens, "; ".join(changed))
        return held

    def _run(self, body: Body | None, head: Head | None) -> None:
        straight = body and body.all_drawn and head and head.plain  # what is drawn from need not be put aside
        hidden = self._runner.compute(body, aside=not straight) if body else None
        if head:
            self._runner.draw(head, hidden if straight else self._runner.hidden)

    def _pad(self, body: Body | None, head: Head | None) -> None:
        """Nothing but padding in these columns; with ids at random, or rows that are alike would all go to the same
        experts of a mixture, and seem cheaper than they are."""
        vocabulary = shapes.vocab_size(self._runner.model)
        body = body or self.decode_body(1)
        host = self._runner.buffers.send(None, body, head, lambda count: self._random.integers(vocabulary, size=count))
        self._runner.buffers.fetch(host, 0)
        host.wait()
        self._runner.buffers.give_back(host)

    def _most_mixed(self) -> int:
        """The most tokens of a step with chunks that is worth a graph: those for which kernels take little longer than
        the host takes to launch them."""
        size = self._runner.tokens
        while size > 1:
            body = self._mixed_body(size)
            self._pad(body, None)
            self._runner.compute(body)
            device = self._seconds(lambda body=body: self._runner.compute(body))
            begin = time.perf_counter()
            self._runner.compute(body)
            host = self._agreed(time.perf_counter() - begin)
            if device <= _HIDDEN * host:
                return size
            size //= 2
        return 0

    @torch.inference_mode()
    def rehearse(self, progress: Progress) -> int:
        """Bytes that the largest step and the graphs take beside weights and caches. Without graphs, steps of every
        power of two of tokens go first, of single tokens and with a chunk among them: kernels are compiled, verified
        and chosen here, and not under a request. With them, that is done for each of their sizes."""
        powers = () if self._recorder else range(self._runner.tokens.bit_length())
        for done, size in enumerate(1 << i for i in powers):
            progress("kernels", done, len(powers), f"{size} rows")
            rows = min(size, self._runner.slots)
            for body, plain in ((self._mixed_body(size), True), (self.decode_body(rows), False)):
                self._pad(body, Head(rows, plain))
                self._run(body, Head(rows, plain))
        most = self._mixed_body(self._runner.tokens), Head(self._runner.most_draws, plain=False)
        progress("kernels", 0, 1, f"{self._runner.tokens} rows")
        self._pad(*most)
        self._run(*most)
        torch.cuda.current_stream(self._runner.device).synchronize()
        torch.cuda.reset_peak_memory_stats(self._runner.device)
        before = torch.cuda.memory_allocated(self._runner.device)
        self._run(*most)
        step = torch.cuda.max_memory_allocated(self._runner.device) - before
        return step + (self._room_for_graphs(*most) if self._recorder else 0)

    def _room_for_graphs(self, body: Body, head: Head) -> int:
        """Bytes that they take: they share the memory of the largest one, and each has some of its own."""

        def used(*kinds: tuple) -> int:
            torch.cuda.empty_cache()
            before, _ = torch.cuda.mem_get_info(self._runner.device)
            held.extend(self._recorder.record(functools.partial(self._run, *kind)) for kind in kinds)
            torch.cuda.empty_cache()
            return max(0, before - torch.cuda.mem_get_info(self._runner.device)[0])

        held: list[graphs.Run] = []
        small = self.decode_body(1)
        self._pad(small, None)
        self._runner.compute(small)
        try:
            with self._recorder.session():
                shared = used((body, head), (self.decode_body(self._runner.slots), head))
                own = used(*[(small, None)] * 4) // 4
        except torch.OutOfMemoryError:
            raise
        except Exception:  # `_record` will say so
            return 0
        finally:
            held.clear()
            self._recorder.release()
        return shared + own * _MOST_GRAPHS
