"""The first difference between two stacks: the first module, and in it the first op, whose output differs, and why.

Both stacks run the same tokens. Of every module, and of every op in it, each token's output is kept as a 64-bit digest
of its bits, wherever that token lay: in a padded batch, in a packed row, in a chunk or in a decode step. The first
that differs in the order of execution is then computed once more on both sides, with its values; experiments
(bisect_causes.py) say which known cause it has.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vexact_ops as vx

from ..progress import Progress, quiet
from .compare import finite
from .machine import environment, now
from .stacks import Call, Stack

LOGITS = "(logits)"
# Ops that compute nothing, whatever they are given.
_NOT_COMPUTED = re.compile(
    r"aten\.(view|_unsafe_view|reshape|alias|detach|empty|new_empty|zeros|ones|full|arange|lift)"
)
_PLAIN_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Key:
    """What is compared: one tensor of one event. kind: "in", "out" or "op"; number: which of its tensors."""

    module: str
    call: int
    kind: str
    op: str = ""
    count: int = 0
    number: int = 0


@dataclass
class Entry:
    """A tensor as tokens have it: a digest of each one's row, from whichever forward it came in."""

    digests: Tensor  # (N,) int64
    present: Tensor  # (N,) bool
    dtype: torch.dtype
    width: int
    values: Tensor | None = None  # (N, width), where they were asked for


@dataclass
class Trace:
    """What a stack did: entries in the order of execution, and the ops that each module ran itself.

    ops       (module, call) -> [(place in the order of entries, name)], of the first forward
    callers   (module, call) -> the module whose code called it
    """

    entries: dict[Key, Entry] = field(default_factory=dict)
    callers: dict[tuple[str, int], str] = field(default_factory=dict)
    ops: dict[tuple[str, int], list[tuple[int, str]]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Hooks on every module and a look at every op. `wanted` are the keys whose values are kept, beside digests."""

    def __init__(self, model: nn.Module, tokens: int, wanted: set[Key] | None = None):
        super().__init__()
        self.model, self.tokens, self.wanted = model, tokens, wanted
        self.trace = Trace()
        self.running: list[tuple[str, int]] = []
        self._weights: dict[tuple[int, torch.device], Tensor] = {}
        self._hooks: list = []
        self._off = False
        self.forwards = 0

    def record(self, call: Call) -> Tensor:
        """Run one forward."""
        self.rows, self.shape = call.rows, tuple(call.rows.shape)
        self.flat = call.rows.flatten()
        self.keep = (self.flat >= 0).nonzero()[:, 0]
        self.to = self.flat[self.keep]
        self.calls: dict[str, int] = {}
        self.counts: dict[tuple, int] = {}
        self.running = []
        self.forwards += 1
        with self._hooked(), self:
            logits = call.run()
        self._note(LOGITS, 0, "out", [logits])
        return logits

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        for name, module in self.model.named_modules():
            before = module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
            after = module.register_forward_hook(self._leave(name), always_call=True)
            self._hooks += [before, after]
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _enter(self, name: str) -> Callable:
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            call = self.calls[name] = self.calls.get(name, -1) + 1
            self.trace.callers[name, call] = self.running[-1][0] if self.running else ""
            given = {k: v for k, v in kwargs.items() if k != "attention_mask"}
            with self._apart():
                self._note(name, call, "in", tree_leaves((args, given)))
            self.running.append((name, call))

        return enter

    def _leave(self, name: str) -> Callable:
        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            _, call = self.running.pop()
            with self._apart():
                self._note(name, call, "out", tree_leaves(output))

        return leave

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """What the recorder computes is none of the model's ops."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self._off and self.running:
            name = str(func).removesuffix(".default")
            outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            given = {_memory(t) for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)}
            if outs and not _NOT_COMPUTED.match(name) and not all(_memory(t) in given for t in outs):
                path, call = self.running[-1]
                count = self.counts[path, call, name] = self.counts.get((path, call, name), -1) + 1
                if self.forwards == 1:
                    self.trace.ops.setdefault((path, call), []).append((len(self.trace.entries), name))
                with self._apart():
                    self._note(path, call, "op", outs, name, count)
        return out

    def _note(self, module: str, call: int, kind: str, tensors: list, op: str = "", count: int = 0) -> None:
        for number, tensor in enumerate(t for t in tensors if isinstance(t, Tensor)):
            rows = self._rows(tensor, kind)
            if rows is None:
                continue
            key = Key(module, call, kind, op, count, number)
            entry = self.trace.entries.get(key)
            if entry is None:
                made = torch.zeros(self.tokens, dtype=torch.int64), torch.zeros(self.tokens, dtype=torch.bool)
                entry = self.trace.entries[key] = Entry(*made, tensor.dtype, rows.shape[1])
            if entry.width != rows.shape[1]:  # such as scores over as many keys as this forward has
                entry.present[self.to] = False
                continue
            entry.digests[self.to] = self._digest(rows).cpu()
            entry.present[self.to] = True
            if self.wanted is not None and key in self.wanted:
                if entry.values is None:
                    entry.values = torch.zeros(self.tokens, rows.shape[1], dtype=tensor.dtype)
                entry.values[self.to] = rows.detach().cpu()

    def _rows(self, tensor: Tensor, kind: str) -> Tensor | None:
        """A tensor as (tokens of this forward, width); None where it has no row for each."""
        batch, length = self.shape
        if tensor.layout != torch.strided or tensor.dim() < 2 or not (tensor.is_floating_point() or kind == "out"):
            return None
        if tensor.dim() == 4 and tensor.shape[0] == batch and tensor.shape[2] == length != tensor.shape[1]:
            if tensor.shape[3] == length and kind == "op":  # scores: a column is a key, wherever that lies
                return None
            tensor = tensor.transpose(1, 2)
        if tensor.shape[:2] == (batch, length):
            flat = tensor.reshape(batch * length, -1)
        elif tensor.shape[:2] == (1, length) and kind != "op":  # the same for all of the batch
            flat = tensor.expand(batch, *tensor.shape[1:]).reshape(batch * length, -1)
        elif tensor.shape[0] == batch * length:
            flat = tensor.reshape(batch * length, -1)
        else:
            return None
        return flat[self.keep.to(flat.device)] if flat.shape[1] else None

    def _digest(self, rows: Tensor) -> Tensor:
        """(R,) int64 of (R, F): equal for equal bits; all NaN are one. Integers wrap: no order of summation counts."""
        rows = rows.detach()
        bits = rows.contiguous()
        if rows.is_floating_point():
            bits = torch.where(rows.isnan(), torch.full_like(rows, float("nan")), rows).contiguous()
            bits = bits.view(_PLAIN_INTS[rows.element_size()])
        at = rows.shape[1], rows.device
        if at not in self._weights:
            g = torch.Generator().manual_seed(rows.shape[1])
            drawn = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=g, dtype=torch.int64)
            self._weights[at] = (2 * drawn + 1).to(rows.device)
        return ((bits.to(torch.int64) + 1) * self._weights[at]).sum(1)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def trace(stack: Stack, sequences: Sequence[Sequence[int]], wanted: set[Key] | None = None) -> Trace:
    """Run a stack and keep what it did."""
    with torch.no_grad(), stack.calls(sequences) as (model, calls):
        recorder = Recorder(model, sum(map(len, sequences)), wanted)
        for call in calls:
            recorder.record(call)
    return recorder.trace


@dataclass(frozen=True)
class Element:
    """One element that differs: of which token and feature, its two values and their bits."""

    sequence: int
    position: int
    feature: int
    a: float
    b: float
    a_bits: str
    b_bits: str


@dataclass(frozen=True)
class Cause:
    """Which known cause it is, in a word, and what was seen that says so."""

    name: str
    why: str


@dataclass
class Bisection:
    """What `bisect` found.

    a, b            the stacks' names
    equal           whether nothing differs: of `compared` tensors of modules and ops, for every token
    module, cls     the first module whose output differs while all that it was given is equal, and its class
    part            "output": of the module as it returns it; "inside": of its own code, before another module or an op
                    got it
    ops_a, ops_b    the ops that this code ran, from what is still equal to what is not
    tokens          of all, those at which it differs; `elements` are how many, `first` the first ones
    cause           see bisect_causes.py
    later           modules behind it that differ too
    unseen          why the logits were not compared for every token, "" where they were: nothing is equal then
    """

    a: str
    b: str
    sequences: int
    tokens_in_all: int
    compared: int
    module: str | None = None
    cls: str | None = None
    part: str = ""
    ops_a: tuple[str, ...] = ()
    ops_b: tuple[str, ...] = ()
    dtype_a: str = ""
    dtype_b: str = ""
    tokens: int = 0
    elements: int = 0
    width: int = 0
    max_abs_diff: float = 0.0
    first: tuple[Element, ...] = ()
    cause: Cause | None = None
    later: tuple[str, ...] = ()
    unseen: str = ""
    environment: dict = field(default_factory=dict)
    date: str = field(default_factory=now)
    command: str | None = None

    @property
    def equal(self) -> bool:
        return self.compared > 0 and self.module is None and not self.unseen

    def verdict(self) -> str:
        """The line that says it."""
        if not self.compared:
            return "nothing was compared: the two have no module of one name"
        if self.module is None and self.unseen:
            return f"{self.compared} tensors are equal, but the logits could not be compared: {self.unseen}"
        if self.module is None:
            return f"no difference: {self.compared} tensors of {self.tokens_in_all} tokens are equal, bit for bit"
        cause = f": {self.cause.name}" if self.cause else ""
        return f"first difference in {self.module} ({self.cls}){cause}"

    def __repr__(self) -> str:
        return f"<Bisection of {self.a} and {self.b}: {self.verdict()}>"

    def _repr_html_(self) -> str:
        from .bisect_report import fragment

        return fragment(self)

    def to_json(self) -> dict:
        return finite({"equal": self.equal, "verdict": self.verdict(), **asdict(self)})


def bisect(
    a: Stack,
    b: Stack,
    sequences: Sequence[Sequence[int]],
    *,
    progress: Progress = quiet,
) -> Bisection:
    """Run both stacks on the same tokens and find the first difference.

    a, b        stacks.stock(...), stacks.patched(...), stacks.engine(...), or stacks.own(...): any model whose modules
                have the same names. They may share one model; each leaves it as it was
    sequences   token ids, one or more lists of them
    returns     a Bisection
    raises      ValueError where there are no tokens
    """
    from . import bisect_causes

    sequences = [list(s) for s in sequences]
    if not sequences or not all(sequences):
        raise ValueError("bisect: sequences: got none, or an empty one, expected token ids")
    progress(f"a: {a.name}", 0, 1)
    of_a = trace(a, sequences)
    progress(f"b: {b.name}", 0, 1)
    of_b = trace(b, sequences)
    shared = [key for key in of_a.entries if key in of_b.entries and _same_code(of_a, of_b, key)]
    differing = [key for key in shared if _differs(of_a.entries[key], of_b.entries[key]).any()]
    found = Bisection(
        a.name,
        b.name,
        len(sequences),
        sum(map(len, sequences)),
        compared=sum(_is_compared(of_a.entries[key], of_b.entries[key]) for key in shared),
        unseen=_unseen(of_a, of_b, sum(map(len, sequences))),
        environment=environment(a.device),
    )
    if not differing:
        return found
    first = differing[0]
    module, part = _blame(of_a, first)
    spans = [_span(t, module, first, shared, set(differing)) for t in (of_a, of_b)]
    key_a, key_b = pair = (_narrow(of_a, of_b, spans) if first.kind == "in" else None) or (first, first)
    found.ops_a, found.ops_b = (_ops(t, module, s, key) for t, s, key in zip((of_a, of_b), spans, pair))
    progress("the values", 0, 1)
    given = {k for k in shared if (k.module, k.call, k.kind) == (first.module, first.call, "in")}
    again_a, again_b = trace(a, sequences, {key_a} | given), trace(b, sequences, {key_b} | given)
    found.module, found.part = module or "(root)", "inside" if key_a != first else part
    with a.calls(sequences) as (model, _):
        found.cls = type(dict(model.named_modules()).get(module, model)).__name__
    _fill(found, again_a.entries[key_a], again_b.entries[key_b], sequences)
    found.later = tuple(
        dict.fromkeys(k.module for k in differing if k.kind == "out" and k.module not in ("", module, first.module))
    )
    stable = all(
        bool((old.entries[key].digests == new.entries[key].digests).all())
        for old, new, key in ((of_a, again_a, key_a), (of_b, again_b, key_b))
    )
    progress("the cause", 0, 1)
    found.cause = bisect_causes.cause(a, b, sequences, first, module, found, (again_a, again_b), pair, stable)
    return found


def _unseen(a: Trace, b: Trace, tokens: int) -> str:
    """Why the logits of the two cannot be compared for every token; "" where they can."""
    x, y = found = [t.entries.get(Key(LOGITS, 0, "out")) for t in (a, b)]
    for name, entry in zip("ab", found):
        count = 0 if entry is None else int(entry.present.sum())
        if count < tokens:
            return f"those of {name} have a row for {count} of {tokens} tokens"
    return "" if x.width == y.width else f"those of a have {x.width} columns, those of b {y.width}"


def _same_code(a: Trace, b: Trace, key: Key) -> bool:
    """Whether a tensor is the same one in both: an op is known by its name and count, if those around it are alike."""
    if key.kind != "op":
        return True
    mine, theirs = (t.ops.get((key.module, key.call), []) for t in (a, b))
    return [name for _, name in mine] == [name for _, name in theirs]


def differs_at(a: Trace, b: Trace, key: Key) -> Tensor:
    """(N,) the tokens at which two traces have other digests; none where one of them lacks the key."""
    if key not in a.entries or key not in b.entries:
        return torch.zeros(1, dtype=torch.bool)
    return _differs(a.entries[key], b.entries[key])


def _is_compared(a: Entry, b: Entry) -> bool:
    return a.width == b.width and bool((a.present & b.present).any())


def _differs(a: Entry, b: Entry) -> Tensor:
    if a.width != b.width:
        return torch.zeros_like(a.present)
    if a.dtype != b.dtype:
        return a.present & b.present
    return a.present & b.present & (a.digests != b.digests)


def _blame(trace: Trace, key: Key) -> tuple[str, str]:
    """The module whose own code computed it, and which part of it that is."""
    if key.module == LOGITS:
        return "", "output"
    if key.kind == "in":  # what a module is given was made by the code of the one around it
        return trace.callers[key.module, key.call], "inside"
    return key.module, "output" if key.kind == "out" else "inside"


def _span(trace: Trace, module: str, first: Key, shared: list[Key], differing: set[Key]) -> tuple[int, int]:
    """From the last tensor that is equal to the first that is not, as places in the order of a trace."""
    order = {key: index for index, key in enumerate(trace.entries)}
    end = order[first]
    return max((order[k] for k in shared if k not in differing and order[k] < end), default=-1), end


def _ops(trace: Trace, module: str, span: tuple[int, int], last: Key) -> tuple[str, ...]:
    """The ops of a module's own code within a span, up to the one that made `last`; the last of them, where all that
    they gave is equal still."""
    begin, end = span
    if last.kind == "op":
        end = list(trace.entries).index(last) - last.number
    ran = [(place, name) for (path, _), of in trace.ops.items() if path == module for place, name in of]
    until = [(place, name) for place, name in sorted(ran, key=lambda op: op[0]) if place <= end]
    return tuple(name for place, name in until if place > begin) or tuple(name for _, name in until[-1:])


def _narrow(a: Trace, b: Trace, spans: list[tuple[int, int]]) -> tuple[Key, Key] | None:
    """Where the two ran other ops: the first op of b's whose output is none of those that ops of a gave, though of
    their size, and which of them comes nearest."""
    keys_a, keys_b = (list(t.entries)[begin + 1 : end + 1] for t, (begin, end) in zip((a, b), spans))
    if {k.op for k in keys_a} == {k.op for k in keys_b}:
        return None
    for key in keys_b:
        mine = b.entries[key]
        alike = [
            k
            for k in keys_a
            if k.kind == key.kind == "op"
            and (a.entries[k].width, a.entries[k].dtype) == (mine.width, mine.dtype)
            and ("attention" in k.op) == ("attention" in key.op)
        ]
        same = {k: int((a.entries[k].digests == mine.digests).sum()) for k in alike}
        if alike and max(same.values()) < len(mine.digests):
            return max(reversed(alike), key=same.__getitem__), key
    return None


def _fill(found: Bisection, a: Entry, b: Entry, sequences: Sequence[Sequence[int]]) -> None:
    at = _differs(a, b)
    x, y = a.values[at], b.values[at]
    found.dtype_a, found.dtype_b = (str(e.dtype).removeprefix("torch.") for e in (a, b))
    found.tokens, found.width = int(at.sum()), a.width
    if a.dtype == b.dtype:
        other = vx.different(x, y)
    else:
        other = x.double() != y.double()
    found.elements = int(other.sum())
    gap = (x.double() - y.double()).abs()
    found.max_abs_diff = gap[other].max().item() if found.elements else 0.0
    owners = [(s, p) for s, sequence in enumerate(sequences) for p in range(len(sequence))]
    tokens = at.nonzero()[:, 0].tolist()
    found.first = tuple(
        Element(
            *owners[tokens[row]],
            feature,
            x[row, feature].item(),
            y[row, feature].item(),
            bits_of(x[row, feature]),
            bits_of(y[row, feature]),
        )
        for row, feature in other.nonzero()[:8].tolist()
    )


def bits_of(value: Tensor) -> str:
    size = value.element_size()
    return f"{value.reshape(1).view(_PLAIN_INTS[size]).item() & (256**size - 1):0{2 * size}x}"
