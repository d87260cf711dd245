"""What a runner is told of a plan: differences by slot, in numbers alone, so that it can be sent.

A runner keeps a row for each slot: whose turn it is there (seed, sampling parameters) and the pages of that sequence.
A `Step` says what changes in those rows, and then what is computed: chunks of slots, and their token ids. A token that
is still being drawn when its step is made is PLACEHOLDER: it is the one last drawn in its slot, and lies on the device.

Steps are made (`Encoder`) and applied (`Rows`) in the order of their plans, each once. What was made for a plan that
failed may be lost, for `Scheduler.cancel` preempts all sequences of such plans, and a sequence that has let go of its
pages is told anew. So a receiver may also forget everything, or be replaced, after `Scheduler.reset_cache`.
"""

import itertools
from array import array
from dataclasses import dataclass

import numpy as np

from ..request import Sequence
from .plan import PLACEHOLDER, StepPlan

_FP32_TINY = float(np.finfo(np.float32).tiny)  # a top_p that fp32 would round to zero keeps the likeliest token too

# Who a slot is given to. Drawn with these; `top` likeliest tokens are wanted beside each draw, and `prompt_top` beside
# each target. What the model turns by is a token's place in the sequence and `shift`.
OCCUPANT = np.dtype(
    [
        ("slot", np.int32),
        ("top", np.int32),
        ("seed", np.int64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("prompt_top", np.int32),
        ("shift", np.int32),
    ]
)
# Pages of a slot, `count` from its `first` on.
PAGES = np.dtype([("slot", np.int32), ("first", np.int32), ("count", np.int32)])
# Tokens start .. start + length - 1 of a slot. After each of the last `draws` of them a token is drawn; after each of
# the first `scored` of them the log-probability of a target is wanted.
CHUNK = np.dtype([(name, np.int32) for name in ("slot", "start", "length", "draws", "scored")])

# A page of layers with a window that stands beside one of the pool from here on.
BESIDE = np.dtype([(name, np.int32) for name in ("page", "own")])

# The state of a slot is copied from a snapshot before anything is computed, or to one once all is.
COPY = np.dtype([(name, np.int32) for name in ("slot", "snapshot")])

_PARTS = {
    "occupants": OCCUPANT,
    "pages": PAGES,
    "page_ids": np.dtype(np.int32),
    "chunks": CHUNK,
    "token_ids": np.dtype(np.int32),
    "targets": np.dtype(np.int32),
    "restores": COPY,
    "saves": COPY,
    "windowed": BESIDE,
}
_MAGIC = 0x35504554535856  # "VXSTEP5"


@dataclass(slots=True, eq=False)
class Step:
    """One plan, for a runner. NumPy arrays, of the types above.

    number      of the steps of one encoder, from 0 on
    occupants   slots that somebody else has from here on, with no pages yet
    pages       what is added to the pages of slots, and `page_ids` which ones, one part after the other
    chunks      what is computed, and `token_ids` of it, one chunk after the other
    targets     the tokens whose log-probabilities are wanted, one chunk after the other
    restores, saves   states that are copied before and after all this
    windowed    what stands beside pages, where layers with a window have pages of their own
    """

    number: int
    occupants: np.ndarray
    pages: np.ndarray
    page_ids: np.ndarray
    chunks: np.ndarray
    token_ids: np.ndarray
    targets: np.ndarray
    restores: np.ndarray
    saves: np.ndarray
    windowed: np.ndarray

    def to_bytes(self) -> bytes:
        parts = [getattr(self, name) for name in _PARTS]
        header = np.array([_MAGIC, self.number, *map(len, parts)], np.int64)
        return b"".join((header.tobytes(), *(part.tobytes() for part in parts)))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Step":
        """The arrays share the memory of `data`. ValueError if that is no whole step."""
        size = 8 * (2 + len(_PARTS))
        header = np.frombuffer(data, np.int64, size // 8) if len(data) >= size else (0,)
        if header[0] != _MAGIC:
            raise ValueError(f"Step: got {len(data)} bytes that do not begin like one")
        parts, offset = [], size
        for kind, count in zip(_PARTS.values(), header[2:].tolist()):
            end = offset + count * kind.itemsize
            if count < 0 or end > len(data):
                raise ValueError(f"Step: got {len(data)} bytes, expected {end} or more")
            parts.append(np.frombuffer(data, kind, count, offset))
            offset = end
        if offset != len(data):
            raise ValueError(f"Step: got {len(data)} bytes, expected {offset}")
        return cls(int(header[1]), *parts)


class Encoder:
    """Turns plans into steps, in the order they are made. It remembers what each slot has been told.

    bare   for a model that drafts: tokens alone are wanted, and nothing of what a request may ask for beside them
    """

    def __init__(self, bare: bool = False):
        self._bare = bare
        self._rows: dict[int, tuple[Sequence, int, int]] = {}  # slot -> sequence, epoch, pages told
        self._number = 0

    def encode(self, plan: StepPlan) -> Step:
        """At once after `schedule`, before anything else happens to the plan's sequences."""
        rows, occupants = self._rows, []
        pages, page_ids, chunks, ids, targets, restores, saves = (array("i") for _ in range(7))
        for chunk in plan.chunks:
            sequence, slot, start, end, epoch = chunk.sequence, chunk.slot, chunk.start, chunk.end, chunk.epoch
            held, count = chunk.pages, 0
            row = rows.get(slot)
            if row is not None and row[0] is sequence and row[1] == epoch:
                count = row[2]
            else:
                occupants.append(_occupant(slot, sequence, self._bare))
            if count < len(held):
                pages.extend((slot, count, len(held) - count))
                page_ids.extend(held[count:] if count else held)
                rows[slot] = sequence, epoch, len(held)
            if chunk.restore is not None:
                restores.extend((slot, chunk.restore))
            if chunk.save is not None:
                saves.extend((slot, chunk.save))
            tokens = sequence.tokens
            if end - start == 1:
                ids.append(tokens[start] if start < len(tokens) else PLACEHOLDER)
            else:
                ids.extend(chunk.token_ids)
            scored = 0
            if sequence.prompt_logprobs is not None and start + 1 < sequence.num_prompt and not self._bare:
                wanted = tokens[start + 1 : min(end + 1, sequence.num_prompt)]
                targets.extend(wanted)
                scored = len(wanted)
            draws = chunk.draws if chunk.draft else chunk.needs_sample
            chunks.extend((slot, start, end - start, draws, scored))
        number, self._number = self._number, self._number + 1
        windowed = array("i", itertools.chain.from_iterable(plan.windowed.items()))
        given = pages, page_ids, chunks, ids, targets, restores, saves, windowed
        kinds = list(_PARTS.values())[1:]
        return Step(
            number, np.array(occupants, OCCUPANT), *(np.frombuffer(part, kind) for part, kind in zip(given, kinds))
        )


def _occupant(slot: int, sequence: Sequence, bare: bool) -> tuple:
    p = sequence.params
    top_p, pictures = max(p.top_p, _FP32_TINY), None if bare else sequence.request.pictures
    shift = 0 if pictures is None else pictures.shift
    tops = (0, 0) if bare else (p.num_top_logprobs, p.num_prompt_top_logprobs)
    return slot, tops[0], sequence.seed, p.top_k, p.temperature, top_p, p.min_p, tops[1], shift


class Rows:
    """What a runner knows of its slots, on the host: steps are applied to it one after the other.

    occupants   (slots,) OCCUPANT
    table       (slots, pages) int32: the pages of each slot's sequence in order; behind the last of them lie others
                that some sequence had there before, all in range
    """

    def __init__(self, max_num_seqs: int, max_pages: int):
        self.occupants = np.zeros(max_num_seqs, OCCUPANT)
        self.table = np.zeros((max_num_seqs, max_pages), np.int32)

    def apply(self, step: Step) -> np.ndarray:
        """Returns where in the flattened table the step's `page_ids` stand now, (N,) int64."""
        if len(step.occupants):
            self.occupants[step.occupants["slot"]] = step.occupants
        if not len(step.pages):
            return _NOWHERE
        slots, first, count = (step.pages[name].astype(np.int64) for name in PAGES.names)
        most = int((first + count).max())
        if most > self.table.shape[1]:
            raise ValueError(f"Rows: a sequence of {most} pages, expected at most {self.table.shape[1]}")
        where = slots * self.table.shape[1] + first
        if len(where) != len(step.page_ids):
            before = np.cumsum(count) - count
            where = np.repeat(where - before, count) + np.arange(len(step.page_ids))
        self.table.reshape(-1)[where] = step.page_ids
        return where


_NOWHERE = np.zeros(0, np.int64)
