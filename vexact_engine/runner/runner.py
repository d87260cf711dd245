"""Owns the model, the KV caches and the buffers, and runs steps: one forward, logits of the rows that are drawn after,
one draw.

A step is launched, and waited for later: what the next one needs of it, the tokens that it draws, stays on the device.
On a GPU both are CUDA graphs wherever that is faster than launching their kernels one by one: of a step of single
tokens one, of a step with chunks one of the forward and one of the draw. What no graph is large enough for is computed
call by call, with the same bits, and so is a step that log-probabilities of a prompt are wanted of.
"""

import bisect
import contextlib
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

import vexact_ops as vx
from vexact_ops.patch.description import Images, Pages, State

from ..config import EngineConfig
from ..core.plan import MOST_VERIFIED, Sampled
from ..core.step import Step
from ..core.windows import least_pages
from ..media.images import Scene
from ..progress import Progress, bar, logged
from . import memory, saver, shapes
from .batch import Batch
from .buffers import Body, Buffers, Head, Host, Work, send
from .decoder import Decoder
from .follow import Follow
from .forward import Forward, forward
from .memory import Caches
from .pictures import Gallery
from .projections import Weights
from .ranks import Alone, Ranks
from .record import Graphs
from .sleep import weights_and_buffers

if TYPE_CHECKING:
    from .drafting import DraftRunner

log = logging.getLogger(__name__)

_NUMBERS = 1 << 20  # of pages that take no memory
_LIKELIEST_ROWS = 64  # whose logits are there at once: what it takes is not reckoned with at the start


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
        host.wait()
        ids, logprobs, raw = self._buffers.read(host, self._draws, self._count)
        self._buffers.give_back(host)
        scores, tops = self._scores.read() if self._scores else (None, None)
        return Sampled(ids, logprobs, raw, self._top and self._top.read(), scores, tops)


class _Likeliest:
    """The likeliest ids of some rows at temperature 1, on their way to the host: by their log-probabilities, or, of a
    head that classifies, with its scores.

    counts   for each row of `hidden` how many
    """

    def __init__(self, head, hidden: Tensor, counts: np.ndarray):
        self._counts, self._found = counts, []
        most = int(counts.max())
        for begin in range(0, len(counts), _LIKELIEST_ROWS):
            logits = head.logits(hidden[begin : begin + _LIKELIEST_ROWS])
            values = logits if getattr(head, "classifies", False) else vx.log_softmax(logits)
            found = _largest(values, min(most, logits.shape[1]))
            self._found.append([_to_host(part) for part in found])

    def read(self) -> list[dict[int, float]]:
        rows = (row for values, ids in self._found for row in zip(ids.tolist(), values.tolist()))
        return [dict(zip(ids[:count], values)) for (ids, values), count in zip(rows, self._counts.tolist())]


class _Top:
    """The likeliest ids beside each draw."""

    def __init__(self, head, hidden: Tensor, counts: np.ndarray):
        self._draws, self._wanted = len(counts), np.flatnonzero(counts)
        rows = hidden.index_select(0, send(self._wanted, hidden.device))
        self._likeliest = _Likeliest(head, rows, counts[self._wanted])

    def read(self) -> list[dict[int, float] | None]:
        found: list[dict[int, float] | None] = [None] * self._draws
        for row, top in zip(self._wanted.tolist(), self._likeliest.read()):
            found[row] = top
        return found


class _Scores:
    """Log-probabilities of the prompts' own tokens, on their way to the host, and the likeliest ids at their places.

    tops   for each chunk how many of those
    """

    def __init__(self, head, hidden: Tensor, step: Step, tops: np.ndarray):
        self._counts = step.chunks["scored"].astype(np.int64)
        before = np.cumsum(step.chunks["length"]) - step.chunks["length"]
        wanted = np.repeat(before - (np.cumsum(self._counts) - self._counts), self._counts)
        rows, target = (
            send(x, hidden.device) for x in (wanted + np.arange(len(wanted)), step.targets.astype(np.int64))
        )
        scored = hidden.index_select(0, rows)
        self._found = _to_host(head.score(scored, target))
        self._tops, each = tops, np.repeat(tops, self._counts)
        self._likeliest = None
        if each.any():
            rows = send(np.flatnonzero(each), hidden.device)
            self._likeliest = _Likeliest(head, scored.index_select(0, rows), each[each > 0])

    def read(self) -> tuple[list[list[float]], list[list[dict[int, float]] | None] | None]:
        values = [part.tolist() for part in np.split(self._found.numpy(), np.cumsum(self._counts)[:-1])]
        if self._likeliest is None:
            return values, None
        tops = iter(self._likeliest.read())
        counts = zip(self._tops.tolist(), self._counts.tolist())
        return values, [[next(tops) for _ in range(count)] if top else None for top, count in counts]


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As topk of fp32 rows, but of equal ones those of the lower ids come first, however many there are of others:
    which of them topk takes changes with `count`, and that is the most that any row of a step wants."""
    bits = values.view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    places = torch.arange(values.shape[1], device=values.device)
    keys = ordered.bitwise_left_shift_(32).sub_(places).topk(count, dim=1).values
    ids = keys.neg_().bitwise_and_(0xFFFFFFFF)
    return values.gather(1, ids), ids


def _to_host(x: Tensor) -> Tensor:
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


class Runner:
    """One model on one device. Not thread-safe: its owner launches steps one after another, and waits for them in that
    order.

    model    a Hugging Face causal language model, with `handle` its patch
    config   as given; in it, numbers of pages are filled in
    path     how hidden states are computed: "fused", or "patched: " and why
    graphs   of its steps, where there are any
    tokens, slots, most_draws   of a step at most
    beside   another one, that is started with it and has pages of the same numbers
    regions  of memory that is paused while it sleeps: "weights", "buffers", "kv_cache", "graphs". None where storages
             are emptied instead; `sleep_backend` says which, and why
    """

    draws = True  # a stage of a pipeline that is not the last one draws nothing
    ranks: Ranks = Alone()  # over which the weights are cut

    def __init__(
        self,
        model: torch.nn.Module,
        handle,
        config: EngineConfig,
        device: torch.device,
        beside: "DraftRunner | None" = None,
    ):
        self.model, self.handle, self.device, self.beside = model, handle, device, beside
        self.memories = memory.forgetting(self._memories(), config)
        self.dtype = next(model.parameters()).dtype
        if memory.chunk_of(handle.memories()) is not None:
            kept = -(-config.max_num_seqs // 4) if config.num_snapshots is None else config.num_snapshots
            config = replace(config, num_snapshots=kept if config.enable_prefix_cache else 0)
        elif config.num_snapshots is not None:
            got = config.num_snapshots
            raise ValueError(
                f"EngineConfig: num_snapshots: got {got}, expected None: no layer of the model has a state"
            )
        self.config = config
        self.tokens = config.max_num_batched_tokens
        self.slots = min(config.max_num_seqs, self.tokens)  # no more run at once
        verified = 0 if config.speculation is None else min(MOST_VERIFIED, self.tokens)
        self.most_draws = max(self.slots, verified)
        self.images, self.gallery, self.undrawn = self._images(), None, None
        if self.images is not None:
            self.gallery = Gallery(handle, device, config.image_cache_tokens)
            names = ("image_token_id", "video_token_id")
            ids = sorted({i for name in names if (i := getattr(model.config, name, None)) is not None})
            ids = ids[: bisect.bisect_left(ids, self.vocabulary)]  # the defaults of a small one lie beyond
            self.undrawn = torch.tensor(ids, dtype=torch.int64, device=device)
        if beside is not None:
            beside.undrawn = self.undrawn
        self.hidden: Tensor | None = None  # of the rows that are drawn after
        found, self.sleep_backend = saver.choose(config.sleep_backend, device)
        names = ("weights", "buffers", "kv_cache", "graphs") if found else ()
        self.regions = {name: found.region(name) for name in names}
        self.graphs = Graphs(self)
        with bar(config.show_progress) as drawn, vx.must_admit():
            progress, begin = logged(drawn, log), time.perf_counter()
            try:
                progress("forward", 0, 1)
                self.make_forward()
                self._start(progress)
            except torch.OutOfMemoryError as error:
                raise torch.OutOfMemoryError(
                    "Engine: out of memory at the start: lower gpu_memory_utilization (or num_pages, if given), "
                    f"max_num_batched_tokens (now {self.tokens}) or max_num_seqs (now {config.max_num_seqs}), or "
                    f"free memory that others hold on the device. {error}"
                ) from error
        log.info("started in %.1f s", time.perf_counter() - begin)

    def _start(self, progress: Progress) -> None:
        runners = [self] if self.beside is None else [self.beside, self]
        # behind the forwards: what these move and take is in use by now
        step = sum([runner.prepare(progress) for runner in runners])
        self.config = self._counted(step)
        for runner in runners:
            runner.fill(self.config.num_pages, progress)

    @property
    def state_bytes(self) -> int:
        """Of all slots and snapshots."""
        states = self.slots * memory.bytes_per_slot(self.memories, self.dtype)
        return states + (self.config.num_snapshots or 0) * memory.bytes_per_snapshot(self.memories, self.dtype)

    def prepare(self, progress: Progress) -> int:
        """Make buffers, with a cache of one page. Returns bytes that the largest step and graphs take, where these
        decide how many pages there will be."""
        stand_in, per_token = self._caches(1, slots=1, one=True), memory.bytes_per_token(self.memories, self.dtype)
        config = replace(self.config, num_pages=None) if self.numbers_alone else self.config
        pages = memory.most_pages(config, 0 if self.numbers_alone else per_token, self.device)
        self.buffers = Buffers(stand_in, self.config.page_size, self.slots, pages, self.tokens, self.device)
        wanted = self.config.num_pages is None and self.device.type == "cuda"
        return self.graphs.rehearse(progress) if wanted else 0

    def fill(self, pages: int, progress: Progress) -> None:
        """Make the cache, and graphs of it."""
        self.config = replace(self.config, num_pages=pages)
        with self.regions["kv_cache"].allocating() if self.regions else contextlib.nullcontext():
            self.buffers.caches = self._caches(pages, self.slots)
        if self.config.num_window_pages is not None:
            self.buffers.stand_beside(pages)
        self.buffers.rehearse(drafts=self.config.speculation is not None)
        log.info("cache: %s", memory.sizes(self.memories, self.config, self.slots, self.dtype))
        self.graphs.capture(progress)

    def _counted(self, step: int) -> EngineConfig:
        """With its numbers of pages filled in, which all stages agree on: those of layers with a window None, where
        they are as many as all others, or one sequence could need more."""
        config, whole = self.config, self.handle.memories()
        length, windows = config.max_model_len or 1 << 20, memory.windowed(self.memories)
        all_bytes, window_bytes = (memory.bytes_per_token(kept, self.dtype) for kept in (self.memories, windows))
        states = self.state_bytes
        if self.beside is not None:  # all of its layers keep all keys
            all_bytes += memory.bytes_per_token(self.beside.memories, self.beside.dtype)
            states += self.beside.state_bytes

        def room(per_token: int, beside: int = 0) -> int:
            if config.num_pages is not None:
                return config.num_pages
            made = config, per_token, length, self.device, step, states, beside * config.page_size * window_bytes
            return self._agree(memory.default_num_pages(*made))

        reach, count = memory.reach(whole), config.num_window_pages
        if reach is None:
            if count is not None:
                raise ValueError(
                    f"EngineConfig: num_window_pages: got {count}, expected None: no layer of the model has a window"
                )
            return replace(config, num_pages=room(all_bytes))
        least = least_pages(reach, config.page_size)
        if count is not None and count < least:
            raise ValueError(
                f"EngineConfig: num_window_pages: got {count}, expected at least {least}: one sequence needs so many"
            )
        pages = room(all_bytes) if count is None else room(all_bytes - window_bytes, count)
        most = memory.window_pages(config, reach) if count is None else count
        if self.numbers_alone:
            own = min(pages if count is None else count, most)
            pages = max(pages, min(self.slots * -(-length // config.page_size), _NUMBERS))
        else:
            own = min(pages, most)
            if count is None and own < pages:
                pages = room(all_bytes - window_bytes, own)
        return replace(config, num_pages=pages, num_window_pages=own if least <= own < pages else None)

    @property
    def numbers_alone(self) -> bool:
        """Whether all layers that keep keys have a window: pages take memory where those have their own, not else."""
        return memory.numbers_alone(self.handle.memories(), self.config)

    def longest_first(self) -> bool:
        """Whether attention of single tokens wants those of most keys first: on an H200 its kernel has a block on each
        multiprocessor, which takes one sequence's keys of a head and, once done, the next ones that nobody has."""
        latent = any(isinstance(kept, Pages) and kept.shared for kept in self.memories)
        return self.device.type == "cuda" and self.config.kv_segment is None and not latent

    # What a stage of a pipeline does otherwise (stages.py)

    @property
    def vocabulary(self) -> int:
        """Tokens that the embedding has."""
        return shapes.vocab_size(self.model)

    @property
    def head(self):
        """What makes logits, draws and log-probabilities of final hidden states."""
        return self.handle

    def _memories(self) -> tuple[Pages | State, ...]:
        """What the layers remember that are computed here."""
        return self.handle.memories()

    def _images(self) -> Images | None:
        """What the model takes of images."""
        try:
            return self.handle.describe().images
        except vx.patch.NotDescribed as reason:
            if getattr(self.model.config, "model_type", None) in vx.patch.WITH_IMAGES:
                log.warning("%s: images are not taken, text alone is: %s", type(self.model).__name__, reason)
            return None

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
        """Of the tensors that the model holds now. Graphs of others are no longer used: new ones are captured."""
        self.graphs.release()
        self.forward, self.path = self._forward()
        if self.misplaced():
            del self.forward  # it holds the memory that they leave
            for name, tensors in zip(("weights", "buffers"), weights_and_buffers(self.model)):
                self.regions[name].take_in(tensors)
            self.forward, self.path = self._forward()
        if self.beside is not None:
            self.beside.forward_changed()

    def rebind(self, spare: Forward | None = None) -> None:
        """The model's tensors lie elsewhere, each one laid out as before: the same forward, of them, or one that was
        made of them before. No graph may have been made of the others, and bits that were compared need not be again.
        """
        if self.path == "fused" and spare is not None:
            self.forward = spare
        elif self.path == "fused":
            described = self.handle.describe()
            self.forward = Decoder(Weights(self.model), described, range(len(described.layers)))

    def misplaced(self) -> bool:
        """Whether some weights are to lie in regions, and lie elsewhere."""
        pairs = zip(("weights", "buffers"), weights_and_buffers(self.model)) if self.regions else ()
        return any(self.regions[name].misplaced(tensors) for name, tensors in pairs)

    def _forward(self) -> tuple[Forward, str]:
        return forward(self.handle)

    def _caches(self, pages: int, slots: int, one: bool = False) -> Caches:
        snapshots = 0 if one else self.config.num_snapshots or 0
        windows = None if one else self.config.num_window_pages
        made = self.config.page_size, slots, self.dtype, self.device, one, snapshots, windows
        return memory.make(self.memories, pages, *made)

    # A step

    @torch.inference_mode()
    def launch(self, step: Step, scene: Scene | None = None, epoch: int = 0, follow: Follow | None = None) -> Pending:
        """Begin to compute a step, behind those launched before.

        scene    places on three axes, and images, where tokens of prompts with some are among its own
        epoch    images that were encoded in another one are encoded anew
        follow   what it depends on, where the last step's outcome decides where its chunks begin
        """
        if self.gallery is not None and self.gallery.epoch != epoch:
            self.gallery.clear()
            self.gallery.epoch = epoch
        buffers = self.buffers
        work = buffers.work(step)
        if follow is not None:
            work = replace(work, context=work.context + follow.most)
        scored = self.draws and len(step.targets) > 0
        forward, draw = self.graphs.fit(work, whole=scored or scene is not None)
        body = forward.body if forward else self.graphs.body(work)
        recorded = draw or forward
        head = (recorded and recorded.head) or (Head(work.draws, work.plain) if work.draws else None)
        host = buffers.send(step, body, head, follow=follow)
        with buffers.kept(host):
            self._receive(step)
            buffers.restore(step)
            top = scores = None
            if forward:
                forward.replay()
            else:
                hidden = self.compute(body, whole=scored, scene=scene)
                if scored:
                    tops = buffers.rows.occupants["prompt_top"][step.chunks["slot"]]
                    scores = _Scores(self.head, hidden, step, tops)
            if draw:
                draw.replay()
            elif head and not (forward and forward.head):
                self.draw(head, self.hidden)
            if work.top and self.draws:
                slots = np.repeat(step.chunks["slot"], step.chunks["draws"])
                top = _Top(self.head, self.hidden, buffers.rows.occupants["top"][slots])
            self._hand_on(step, work)
            buffers.save(step)
            draws = head.draws if head else 0
            buffers.fetch(host, draws)
        return Pending(buffers, host, draws, work.draws, top, scores)

    def compute(self, body: Body, whole: bool = False, aside: bool = True, scene: Scene | None = None) -> Tensor | None:
        """Final hidden states, of all tokens where `whole` says so; those that are drawn after are put aside."""
        embedding = self.forward.embedding if isinstance(self.forward, Decoder) else None
        batch, rows = self.buffers.batch(body, embedding)
        reader = self.beside if self.beside is not None and self.beside.reads else None
        if self.draws and not whole and reader is None and body.draws < body.tokens:
            batch.rows = rows if body.draws else rows.new_zeros(1)  # some token: ops of no rows are not worth a thought
        if scene is not None:
            batch.axes = torch.from_numpy(scene.axes).to(self.device)
            batch.images = self.gallery.of_step(scene.rows, body.tokens)
        hidden = self._forward_of(batch)
        if hidden is None:
            return None
        if reader is not None:
            reader.keep(hidden, batch.paged.slot_mapping)
        if self.hidden is None:
            self.hidden = hidden.new_zeros(self.most_draws, hidden.shape[1])
        if aside and body.draws:
            if batch.rows is None and not body.all_drawn:
                self.buffers.take(hidden, rows, self.hidden[: body.draws])
            else:
                self.hidden[: body.draws].copy_(hidden)
        return hidden

    def one_of_each(self) -> contextlib.AbstractContextManager:
        """In a with block `compute` leaves layers out that launch what others do."""
        return self.forward.one_of_each() if isinstance(self.forward, Decoder) else contextlib.nullcontext()

    def draw(self, head: Head, hidden: Tensor) -> None:
        """After its first rows."""
        columns = self.buffers.columns(head)
        cuts = {} if head.plain else {name: columns[name] for name in ("top_k", "top_p", "min_p")}
        rows, asked = hidden[: head.draws], (columns["seeds"], columns["positions"])
        if self.undrawn is None:
            ids, *values = self.head.sample(rows, *asked, temperature=columns["temperature"], **cuts)
        else:
            ids, *values = self._draw_text(rows, asked, columns["temperature"], cuts)
        self.buffers.keep(columns, ids, values)

    def _draw_text(self, rows: Tensor, asked: tuple, temperature: Tensor, cuts: dict) -> tuple[Tensor, ...]:
        """As sample, but that what stands for an image is never drawn; log-probabilities are over all, as a trainer
        has them."""
        logits = self.head.logits(rows)
        ids, *_ = vx.sample(logits.index_fill(1, self.undrawn, float("-inf")), *asked, temperature=temperature, **cuts)
        there, own = ids.clamp(min=0)[:, None], torch.where(temperature > 0, temperature, 1.0)[:, None]
        logprobs, raw_logprobs = (vx.log_softmax(of).gather(1, there)[:, 0] for of in (logits / own, logits))
        return ids, logprobs, raw_logprobs

    def forget_images(self) -> None:
        """Give back what an encoder has made of them."""
        if self.gallery is not None:
            self.gallery.clear()
