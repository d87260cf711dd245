"""New weights for a running model, in place: checked before anything is written.

Either all at once (`plan_update`, `apply_update`): all of them fit and are copied, or nothing changes. Or piece by
piece (`Update`): names, shapes and dtypes come first and are checked; then buckets of tensors are written as they come,
so that the new weights never lie in memory as a whole beside the old ones.
"""

import functools
import math
from bisect import bisect, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from vexact_ops import same_bits
from vexact_ops.patch import lora

from .directory import some
from .experts import aliases, expert_views
from .names import hint, passed_over, peft_aliases

if TYPE_CHECKING:
    from .draft import Draft

Range = tuple[int, int]

_AT_ONCE = 256 << 20  # bytes that are handed over at once
_BUFFERS = "buffers of checkpoints, which named_parameters() leaves out: give what state_dict() has"


def pairs_of(given: object, op: str = "update_weights") -> Iterator[tuple[str, Tensor]]:
    """Names and tensors, of a mapping or of an iterable that may make each as it is asked for. TypeError at once for
    what is neither, and in its turn for what is no pair."""
    if isinstance(given, Tensor | str | bytes) or not isinstance(given, Iterable):
        kind = type(given).__name__
        raise TypeError(f"{op}: named_tensors: got a {kind}, expected a mapping of names to tensors, or pairs of them")
    return _pairs(given.items() if isinstance(given, Mapping) else given, op)


def _pairs(given: Iterable, op: str) -> Iterator[tuple[str, Tensor]]:
    for pair in given:
        if not isinstance(pair, Sequence) or isinstance(pair, str) or len(pair) != 2:
            what = f"{len(pair)} of them" if isinstance(pair, tuple | list) else f"a {type(pair).__name__}"
            raise TypeError(f"{op}: named_tensors: got {what} for a name and a tensor")
        name, tensor = pair
        if not isinstance(name, str):
            raise TypeError(f"{op}: named_tensors: got a {type(name).__name__} for the name of a tensor")
        if what := wrapped(tensor):
            raise TypeError(f"{op}: named_tensors: {name} is {what}")
        yield name, tensor


def grouped(pairs: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Several at a time, as they come: each is handed over to the engine's thread."""
    group, size = [], 0
    for name, tensor in pairs:
        group.append((name, tensor))
        size += tensor.nbytes if isinstance(tensor, Tensor) else 0
        if size >= _AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group


def wrapped(tensor: object) -> str:
    """What a tensor is whose memory is not its values alone, and what to give instead; "" for a plain one."""
    if not isinstance(tensor, Tensor) or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__:
        return ""
    kind = type(tensor).__name__
    if hasattr(tensor, "full_tensor"):
        return (
            f"a {kind}, of which each rank of a parallel trainer has a shard, expected a whole tensor: give its "
            "full_tensor(), which every rank has to call"
        )
    return f"a {kind}, expected a plain tensor: one that is quantised or wrapped has to be converted first"


class Spec(NamedTuple):
    """What a tensor will be."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def targets(model: torch.nn.Module) -> dict[str, Tensor]:
    """Every name that an update may give, and the tensor it is copied into. Tied names share theirs."""
    return model.state_dict(keep_vars=True)


class Fresh:
    """Whether adapters are those that an engine begins with, B = 0, and so of no step of a trainer's: until then the
    base alone may come, as nothing is mixed from two steps."""

    still = True

    @classmethod
    def of(cls, adapter: object) -> "Fresh | None":
        """Of EngineConfig.adapter: None where no adapters are, or some that have values."""
        return cls() if isinstance(adapter, Mapping) else None


@dataclass(frozen=True)
class Places:
    """Where weights are written: a model's own memory, or a second copy of it.

    targets   every name that may be given, and the tensor it is copied into. Tied names share theirs
    views     name of one expert's tensor -> the name of the stacked one, and the view of it there (experts.py)
    old       old names of whole parameters -> their names now
    optional  names that an update brings all of or none: those of a model that drafts
    beneath   likewise, where the model has adapters (LoRA): those of all else
    adapters  those of the adapters, which an update may leave out while they are `fresh`
    """

    targets: dict[str, Tensor]
    views: dict[str, tuple[str, Tensor]]
    old: dict[str, str]
    optional: frozenset[str] = frozenset()
    beneath: frozenset[str] = frozenset()
    adapters: frozenset[str] = frozenset()
    fresh: "Fresh | None" = None
    spare: dict[str, object] = field(default_factory=dict)  # of whoever computes: what was made of a copy's memory

    @classmethod
    def of(cls, model: torch.nn.Module, draft: "Draft | None" = None, fresh: "Fresh | None" = None) -> "Places":
        own = cls(targets(model), expert_views(model), aliases(model))
        if adapters := lora.adapters(model):
            every = own.targets.keys() | own.views.keys()
            old = own.old | peft_aliases({name: name for name in every} | own.old, adapters)
            parts = {"beneath": frozenset(every - adapters), "adapters": frozenset(adapters)}
            own = replace(own, old=old, fresh=fresh, **parts)
        if draft is None:
            return own
        drafts, before = cls.of(draft.module), draft.prefix
        found = {before + name: tensor for name, tensor in drafts.targets.items()}
        views = {before + name: (before + stacked, view) for name, (stacked, view) in drafts.views.items()}
        old = {before + name: before + now for name, now in drafts.old.items()}
        drafting = frozenset(found.keys() | views.keys())
        return replace(own, targets=own.targets | found, views=own.views | views, old=own.old | old, optional=drafting)

    @property
    def groups(self) -> tuple[frozenset[str], ...]:
        """Names of which an update may bring none."""
        fresh = self.fresh is not None and self.fresh.still
        return self.optional, self.beneath, self.adapters if fresh else frozenset()

    def whole(self) -> "Places":
        """Where nothing stands there that an update might leave out, but what drafts."""
        return replace(self, beneath=frozenset(), fresh=None)

    @functools.cached_property
    def passed(self) -> tuple[str, ...]:
        """What names begin with that are passed over: see names.passed_over."""
        return passed_over((*self.targets, *self.old))

    def present(self) -> "Places":
        """Those that are not on meta: of a process that holds a few layers."""
        here = {name: tensor for name, tensor in self.targets.items() if not tensor.is_meta}
        views = {name: where for name, where in self.views.items() if where[0] in here}
        return replace(self, targets=here, views=views, spare={})

    def note(self, given: Iterable[str]) -> None:
        """That an update brings these."""
        if self.fresh is not None and not self.adapters.isdisjoint(given):
            self.fresh.still = False

    def every(self) -> dict[str, Tensor]:
        """By all names that may be given, single experts' and old ones among them."""
        found = self.targets | {name: view for name, (_, view) in self.views.items()}
        return found | {old: found[new] for old, new in self.old.items() if new in found}

    def copy(self, device: torch.device | str) -> "Places":
        """The same names, tied where these are, in memory of their own that holds nothing yet; pinned where it is the
        host's and these are a GPU's. From host to host it is laid out as theirs is: see `exchange`."""
        made: dict[int, Tensor] = {}
        distinct = {id(target): target for target in self.targets.values()}
        laid = _HostLayout(distinct.values()) if torch.device(device).type == "cpu" else None
        for key, target in distinct.items():
            if laid is not None and laid.knows(target):
                copied = laid.copy(target)
            else:
                pin = torch.device(device).type == "cpu" and target.is_cuda
                copied = torch.empty(target.shape, dtype=target.dtype, device=device, pin_memory=pin)
            made[key] = torch.nn.Parameter(copied, False) if isinstance(target, torch.nn.Parameter) else copied
        views = {}
        for name, (stacked, view) in self.views.items():
            whole, copied = self.targets[stacked], made[id(self.targets[stacked])]
            offset = view.storage_offset() - whole.storage_offset() + copied.storage_offset()
            views[name] = stacked, copied.as_strided(view.shape, view.stride(), offset)
        return replace(self, targets={n: made[id(t)] for n, t in self.targets.items()}, views=views, spare={})

    def memory(self) -> set[tuple]:
        return {_memory(tensor) for tensor in self.targets.values()}

    @torch.no_grad()
    def exchange(self, copy: "Places", names: Iterable[str], every: Iterable[Tensor]) -> bool:
        """Tensors of these names, and all views of them here, have the memory that they have in a copy, and the copy
        has theirs: nothing is copied. Who holds another view of one sees what it was.

        every     what the model has whose these are: parameters and buffers
        returns   False, and nothing is done, where somebody else may count on the memory being the same: the device of
                  one is not the host, it is shared with other processes, or with tensors that keep theirs
        """
        own = {id(self.targets[name]): (self.targets[name], copy.targets[name]) for name in names}
        for pair in own.values():
            if any(t.device.type != "cpu" or t.is_inference() or not t.is_contiguous() for t in pair):
                return False
        moving, copied = ({_memory(pair[i]): pair[i] for pair in own.values()} for i in (0, 1))
        if any(t.is_shared() for t in (*moving.values(), *copied.values())):
            return False
        if any(_memory(tensor) in moving for tensor in every if id(tensor) not in own):
            return False
        views = [(view, copy.views[name][1]) for name, (_, view) in self.views.items() if _memory(view) in moving]
        for one, other in (*own.values(), *views):
            one.data, other.data = other.data, one.data
        return True


def plan_update(
    model: torch.nn.Module | Places, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> list[tuple[Tensor, Tensor]]:
    """(target, source) for each tensor of the model, or of its places, once everything has been checked.

    named_tensors   a state dict, or pairs; every parameter under its Hugging Face name, of the model's shape and dtype,
                    on any device. Of tied names one is enough; if several are given they must hold the same bits.
                    Stacked experts may come one by one instead, under the names of old checkpoints (see experts.py).
                    Buffers that checkpoints hold (DeepSeek's e_score_correction_bias) are among them, as state_dict()
                    has them: a trainer may have changed those too. Sources may be the model's own tensors, under other
                    names too
    raises          ValueError: missing, unknown, repeated or misshapen; TypeError: no tensor, or another dtype
    """
    places = model if isinstance(model, Places) else Places.of(model)
    pairs = [pair for pair in pairs_of(named_tensors) if not pair[0].startswith(places.passed)]
    given = _unrepeated(places, pairs)
    wanted = _targets_of(places, given)
    plan: dict[int, tuple[str, Tensor, Tensor]] = {}
    for name, source in given.items():
        first = plan.setdefault(id(wanted[name]), (name, wanted[name], source))
        if first[2] is not source and not same_bits(first[2].detach(), source.detach()):
            raise ValueError(f"update_weights: {first[0]} and {name} are tied, but hold different values")
    places.note(given)
    own = places.memory()
    return [(target, _readable(target, source, own)) for _, target, source in plan.values()]


@torch.no_grad()
def apply_update(plan: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Copy, in place: whoever holds a view of a parameter sees the new values."""
    for target, source in plan:
        if source is not target:
            target.copy_(_on_the_gpu_of(source, target))


class Piece(NamedTuple):
    """A run of a tensor's elements, in the order of its memory, where the tensor comes in several."""

    start: int
    values: Tensor | Spec


class Update:
    """All weights, bucket by bucket.

    places   where they go, or the model whose they are
    specs    name -> Spec (or anything with shape and dtype) of all that will come, names as for plan_update. None: they
             are checked as they come, and `finish` says what is missing
    raises   as plan_update
    """

    def __init__(self, places: Places | torch.nn.Module, specs: Mapping[str, Spec] | None = None):
        self.places = places = places if isinstance(places, Places) else Places.of(places)
        self._own: set[tuple] | None = None
        self._stacked = {name: stacked for name, (stacked, _) in places.views.items()}
        self._announced: set[str] | None = None
        if specs is None:
            self._targets = places.targets | {name: view for name, (_, view) in places.views.items()}
        else:
            check_specs(specs)
            specs = {name: spec for name, spec in specs.items() if not name.startswith(places.passed)}
            given = _unrepeated(places, [(name, _spec(name, spec)) for name, spec in specs.items()])
            self._targets = _targets_of(places, given)
            self._announced = set(given)
        self._came: dict[str, int] = {}  # name -> elements
        self._pieces: dict[str, list[Range]] = {}  # of those that have come in part: which
        self._parts: set[str] = set()  # stacked parameters of which single experts have come
        self._written: dict[int, str] = {}

    @property
    def begun(self) -> bool:
        """Whether anything has been written."""
        return bool(self._written)

    def expect_whole(self) -> None:
        """Before anything comes: what was there is gone, or torn, and nothing of it may be left out. ValueError where
        what was announced leaves some out."""
        self.places = self.places.whole()
        if self._announced is not None:
            _check_names(self.places, self._announced)

    @torch.no_grad()
    def write(self, bucket: Iterable[tuple[str, Tensor | Piece]], foreign: bool = False) -> None:
        """Raises ValueError or TypeError for a tensor that does not fit, came before, was not announced where all have
        to be, or is memory of the model itself, unless all is known to be `foreign`. Pieces come in any order."""
        if self._own is None and not foreign:
            self._own = self.places.memory()
        for given, value in bucket:
            if given.startswith(self.places.passed):
                continue
            target, first = self.note(given, value)
            parts = _runs(target, *value) if isinstance(value, Piece) else [(target, value)]
            for part, source in parts:
                if not foreign and _memory(source) in self._own and not _is(source, part):
                    raise ValueError(f"update_weights: {given} is memory of the model that is updated: give a copy")
                if not first:
                    part.copy_(_on_the_gpu_of(source, part))
                elif not same_bits(part.detach(), source.detach()):
                    raise ValueError(f"update_weights: {first} and {given} are tied, but hold different values")

    def note(self, given: str, value: "Tensor | Spec | Piece") -> tuple[Tensor, str]:
        """Record that a tensor comes, checked as `write` does: its target, and who brought that memory before."""
        name = self.places.old.get(given, given)
        target = self._target(given, name, value)
        kind = value.values if isinstance(value, Piece) else value
        self._came[name] = self._came.get(name, 0) + math.prod(kind.shape)
        if self._came[name] == target.numel():
            self._pieces.pop(name, None)
        elif isinstance(value, Piece):
            insort(self._pieces.setdefault(name, []), (value.start, value.start + math.prod(kind.shape)))
        if name in self._stacked:
            self._parts.add(self._stacked[name])
        first = self._written.setdefault(id(self._targets[name]), name)
        return target, "" if first == name else first

    def knows(self, given: str) -> bool:
        return self.places.old.get(given, given) in self._targets

    def _target(self, given: str, name: str, value: Tensor | Piece) -> Tensor:
        came = self._came.get(name)
        if self._announced is not None and name not in self._announced:
            raise ValueError(f"update_weights: {given} was not announced")
        target = self._targets.get(name)
        if target is None:
            said = hint([given], self._targets.keys())
            raise ValueError(f"update_weights: unknown: {given}" + (f" ({said})" if said else ""))
        if came is not None and (came == target.numel() or not isinstance(value, Piece)):
            raise ValueError(f"update_weights: repeated: {given} came before")
        if name in self._parts or self._came.get(self._stacked.get(name, "")) is not None:
            raise ValueError(f"update_weights: repeated: {given}, stacked and expert by expert")
        if not isinstance(value, Piece):
            _check(name, value, target)
            return target
        start, values = value
        is_tensor = isinstance(values, Tensor) and not values.is_meta and not wrapped(values)
        if not (is_tensor or isinstance(values, Spec)) or len(values.shape) != 1:
            raise TypeError(f"update_weights: {given}: a piece is {_kind(values)}, expected a tensor of one dimension")
        if values.dtype != target.dtype:
            raise TypeError(f"{name} is {values.dtype}, expected {target.dtype}")
        (count,) = values.shape
        pieces, end = self._pieces.get(name, []), start + count
        at = bisect(pieces, (start, end))
        low, high = pieces[at - 1][1] if at else 0, pieces[at][0] if at < len(pieces) else target.numel()
        if not low <= start < end <= high:
            raise ValueError(
                f"update_weights: {given}: got elements {start} to {end} of {target.numel()}, expected some that have "
                f"not come ({low} to {high}, say)"
            )
        return target

    def finish(self) -> None:
        """Raises as `check`."""
        self.check()
        self.places.note(self._came)

    def check(self) -> None:
        """Raises ValueError where something is missing. A tensor without an element has nothing to bring."""
        cut = [name for name, count in self._came.items() if count != self._targets[name].numel()]
        if cut:
            raise ValueError(f"update_weights: came in part only: {some(cut)}")
        empty = {n for n, t in self.places.targets.items() if not t.numel() and n not in self._parts}
        empty -= frozenset().union(*self.places.groups)
        if self._announced is None:
            _check_names(self.places, self._came.keys() | empty)
        elif left := self._announced - self._came.keys() - empty:
            raise ValueError(f"update_weights: announced, but did not come: {some(left)}")

    def came(self) -> dict[str, Tensor]:
        """What has been written, by name; of experts that came one by one the stacked tensor."""
        names = dict.fromkeys(self._stacked.get(name, name) for name in self._came)
        return {name: self.places.targets[name] for name in names}


def _runs(target: Tensor, start: int, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of a target and the values of a piece that belong there: one, unless the target's rows lie apart."""
    if target.dim() <= 1 or target.is_contiguous():
        target = target.view(-1) if target.dim() != 1 else target
        yield target[start : start + len(values)], values
        return
    inner, at = target[0].numel(), 0
    while at < len(values):
        row, begin = divmod(start + at, inner)
        rows = (len(values) - at) // inner
        if begin == 0 and rows:
            yield target[row : row + rows], values[at : at + rows * inner].view(rows, *target.shape[1:])
            at += rows * inner
        else:
            count = min(inner - begin, len(values) - at)
            yield from _runs(target[row], begin, values[at : at + count])
            at += count


def _unrepeated(places: Places, pairs: list[tuple[str, object]]) -> dict[str, object]:
    """By today's names, each once."""
    pairs = [(places.old.get(name, name), value) for name, value in pairs]
    given = dict(pairs)
    if len(given) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"update_weights: repeated: {some({n for n in names if names.count(n) > 1})}")
    return given


def _check_names(places: Places, given: Set[str]) -> None:
    """ValueError unless they are all that there are."""
    wanted, views = places.targets, places.views
    for group in places.groups:
        if not given & group:
            wanted, views = ({n: v for n, v in d.items() if n not in group} for d in (wanted, views))
    twice = {name for name in given & views.keys() if views[name][0] in given}
    if twice:
        raise ValueError(f"update_weights: repeated: {some(twice)}, beside the stacked {views[min(twice)][0]}")
    unknown = given - wanted.keys() - views.keys()
    covered = {id(wanted[name]) for name in given & wanted.keys()}
    in_parts = {views[name][0] for name in given & views.keys()}
    missing = [name for name, target in wanted.items() if id(target) not in covered and name not in in_parts]
    missing += [name for name, (stacked, _) in views.items() if stacked in in_parts and name not in given]
    said = hint(unknown, wanted.keys() | views.keys())
    wrong = [f"unknown: {some(unknown)}" + (f" ({said})" if said else "")] if unknown else []
    if missing:
        buffers = all(name in wanted and not isinstance(wanted[name], torch.nn.Parameter) for name in missing)
        wrong.append(f"missing: {some(missing)}" + (f" ({_BUFFERS})" if buffers else ""))
    if wrong:
        raise ValueError(f"update_weights: {'; '.join(wrong)}")


def _targets_of(places: Places, given: Mapping[str, object]) -> dict[str, Tensor]:
    """What each of the names is copied into, once names, shapes and dtypes are known to fit."""
    _check_names(places, given.keys())
    wanted = places.targets | {name: view for name, (_, view) in places.views.items()}
    shapes, dtypes = [], []
    for name, value in given.items():
        try:
            _check(name, value, wanted[name])
        except ValueError as error:
            shapes.append(str(error))
        except TypeError as error:
            dtypes.append(str(error))
    if shapes:
        raise ValueError(f"update_weights: {some(shapes)}")
    if dtypes:
        raise TypeError(f"update_weights: {some(dtypes)}")
    return {name: wanted[name] for name in given}


def _check(name: str, given, target: Tensor) -> None:
    """ValueError or TypeError unless a tensor, or what is said of one, fits."""
    if what := wrapped(given):
        raise TypeError(f"{name} is {what}")
    is_tensor = isinstance(given, Tensor) and given.layout is torch.strided and not given.is_meta
    if not is_tensor and not isinstance(given, Spec):
        raise TypeError(f"{name} is {_kind(given)}, expected a dense tensor")
    if tuple(given.shape) != tuple(target.shape):
        raise ValueError(f"{name} is {tuple(given.shape)}, expected {tuple(target.shape)}")
    if given.dtype != target.dtype:
        raise TypeError(f"{name} is {given.dtype}, expected {target.dtype}")


def check_specs(specs: object) -> None:
    if not isinstance(specs, Mapping):
        kind = type(specs).__name__
        raise TypeError(f"update_weights: specs: got a {kind}, expected a mapping of names to (shape, dtype)")
    for name in specs:
        if not isinstance(name, str):
            raise TypeError(f"update_weights: specs: got a {type(name).__name__} for the name of a tensor")


def _spec(name: str, given) -> Spec:
    if isinstance(given, tuple) and len(given) == 2:
        shape, dtype = given
    elif hasattr(given, "shape") and hasattr(given, "dtype"):
        shape, dtype = given.shape, given.dtype
    else:
        raise TypeError(f"update_weights: specs: {name} is {_kind(given)}, expected (shape, dtype)")
    return Spec(tuple(shape), dtype)


def _on_the_gpu_of(source: Tensor, target: Tensor) -> Tensor:
    """The source, or a copy on the target's GPU where it is on another one: what the target lies in may be mapped for
    its own GPU alone (runner/saver.py), and torch copies from the source's side."""
    apart = source.is_cuda and target.is_cuda and source.device != target.device
    return source.to(target.device) if apart else source


class _HostLayout:
    """Storages for copies of tensors on the host, and in each of them what lies there as it does in theirs."""

    def __init__(self, tensors: Iterable[Tensor]):
        self._held: dict[int, int] = {}
        self._stores: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            self._held[key] = self._held.get(key, 0) + tensor.nbytes

    def knows(self, tensor: Tensor) -> bool:
        """Whether it is on the host and its storage has little else in it."""
        storage = tensor.untyped_storage()
        whole = storage.nbytes() <= 2 * self._held[storage._cdata]
        return tensor.device.type == "cpu" and tensor.is_contiguous() and whole

    def copy(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._stores:
            self._stores[storage._cdata] = torch.UntypedStorage(storage.nbytes())
        there = torch.empty(0, dtype=tensor.dtype)
        return there.set_(self._stores[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())


def _memory(tensor: Tensor) -> tuple:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _is(source: Tensor, target: Tensor) -> bool:
    """Whether copying one into the other does nothing."""
    return source.data_ptr() == target.data_ptr() and source.stride() == target.stride()


def _readable(target: Tensor, source: Tensor, own: set[tuple]) -> Tensor:
    """The source, or a copy where it is memory that this update may write into before it is read."""
    if _memory(source) not in own:
        return source
    return target if _is(source, target) else source.detach().clone()


def _kind(value) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return "a meta tensor" if value.is_meta else f"a tensor of layout {value.layout}"
