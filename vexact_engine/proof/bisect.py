"""The first difference between two stacks: the first module, and in it the first op, whose output differs, and why.

Both stacks run the same tokens. Of every module, and of every op in it, each token's output is kept as a 64-bit digest
of its bits, wherever that token lay: in a padded batch, in a packed row, in a chunk or in a decode step. The first
that differs in the order of execution is then computed once more on both sides, with its values; experiments
(bisect_causes.py) say which known cause it has.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from torch import Tensor

import vexact_ops as vx

from ..progress import Progress, quiet
from . import bisect_causes
from .compare import finite
from .machine import environment, now
from .recording import INTS, LOGITS, Entry, Key, Trace, differ, trace
from .stacks import Stack


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
    cause: bisect_causes.Cause | None = None
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
    sequences = [list(s) for s in sequences]
    if not sequences or not all(sequences):
        raise ValueError("bisect: sequences: got none, or an empty one, expected token ids")
    progress(f"a: {a.name}", 0, 1)
    of_a = trace(a, sequences)
    progress(f"b: {b.name}", 0, 1)
    of_b = trace(b, sequences)
    shared = [key for key in of_a.entries if key in of_b.entries and _same_code(of_a, of_b, key)]
    shared = [key for key in shared if _is_compared(of_a.entries[key], of_b.entries[key])]
    differing = [key for key in shared if differ(of_a.entries[key], of_b.entries[key]).any()]
    found = Bisection(
        a.name,
        b.name,
        len(sequences),
        sum(map(len, sequences)),
        compared=len(shared),
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


def _is_compared(a: Entry, b: Entry) -> bool:
    return a.width == b.width and bool((a.present & b.present).any())


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
            and _is_compared(a.entries[k], mine)
        ]
        same = {k: int((~differ(a.entries[k], mine)).sum()) for k in alike}
        if alike and max(same.values()) < len(mine.digests):
            return max(reversed(alike), key=same.__getitem__), key
    return None


def _fill(found: Bisection, a: Entry, b: Entry, sequences: Sequence[Sequence[int]]) -> None:
    at = differ(a, b)
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
    return f"{value.reshape(1).view(INTS[size]).item() & (256**size - 1):0{2 * size}x}"
