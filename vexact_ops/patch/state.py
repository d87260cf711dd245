"""All that is changed about one model, and how it is put in, taken out and found again."""

import contextlib
import logging
import re
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from html import escape

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule

from .._core.operator import watched
from . import facts, forwards, layer, lora, plan, prompt_learning, rotary, slots, whole
from .describe import describe, read
from .description import Decoder, Head, NotDescribed, Pages, State
from .pieces import class_of, computes_itself, refuse_training
from .recognise import INNER
from .report import table
from .trace import hidden_states
from .ulysses import Ulysses

LOCK = threading.RLock()
ACTIVE: "weakref.WeakSet[Patch]" = weakref.WeakSet()  # of this process
_LOG = logging.getLogger(__name__)
FUSE_ON_CPUS = False  # where kernels take longer than Python between them, and finding out is not worth the time


@dataclass(frozen=True)
class Row:
    """What became of one module."""

    path: str
    cls: str
    replacement: str  # the aligned ops that compute it now, or "" where it stays stock
    note: str


class Report(list):
    """The rows, one per module; as a string a table with one line for all modules that are alike."""

    HEADS = ("module", "class", "aligned ops", "note")

    def _lines(self) -> list[tuple[str, ...]]:
        alike = Counter((re.sub(r"\.\d+(?=\.|$)", ".*", r.path), r.cls, r.replacement or "-", r.note) for r in self)
        return [(f"{p or '(root)'}" + (f" x{n}" if n > 1 else ""), *rest) for (p, *rest), n in alike.items()]

    def __str__(self) -> str:
        return table(self.HEADS, self._lines())

    def _repr_html_(self) -> str:
        """The same table in a notebook."""

        def row(cells: tuple[str, ...], tag: str) -> str:
            return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

        return f"<table>{row(self.HEADS, 'th')}{''.join(row(line, 'td') for line in self._lines())}</table>"


@dataclass
class _Change:
    module: nn.Module
    forward: Callable  # (self, ...) -> ...
    name: str = "forward"  # of the method that it stands for


@dataclass
class _Buffer:
    """A buffer that is another one while the patch lasts."""

    store: dict[str, torch.Tensor]
    name: str
    before: torch.Tensor
    after: torch.Tensor


@contextlib.contextmanager
def _isolated(model: nn.Module) -> Iterator[None]:
    """Pieces are tried on small tensors, whatever the caller's default device, autocast and ranks are."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(slots.one_rank(model))
        if torch.get_default_device().type != "cpu":  # torch asks Python for one at every call
            stack.enter_context(torch.device("cpu"))
        for kind in {"cpu", next(model.parameters()).device.type} - {"meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


class Patch:
    """All that is changed about one model, shared by its nested handles. Lives in the `__dict__` of what it changed."""

    def __init__(
        self, model: nn.Module, options: dict, strict: bool, trains: bool = True, whole_gradients: bool = False
    ):
        self.model, self.options, self.strict, self.handles = model, options, strict, 0
        self.trains, self.whole_gradients = trains, whole_gradients
        self.wrapper = model  # PEFT's around it, where there was one
        self.ulysses: Ulysses | None = None
        self.builds = 0
        self.compiled: dict[Callable, bool] = {}  # what modules' compile() has made: whether it rounds as they do
        self.holders: set[int] = set()  # how many held a parameter when no DistributedDataParallel was among them
        self.unprompted: set[int] = set()  # how many held the embedding when no learned prompts were among them
        self.clear()

    def clear(self) -> None:
        self.report, self.problems, self.changes, self.cause = Report(), [], [], None
        self.base = self.head = self.loss = self.seen = None
        self.heads: set[int] = set()  # the output layer, or its copies
        self.made = None  # what the output layer has just returned, before its hooks
        self.rows = whole.Rows() if self.whole_gradients else None
        self.classifies = False  # whether the output layer is a score of sequences
        self.scale, self.softcap = 1.0, None
        self.cache = forwards.CACHES[0]  # by which name the decoder's own forward takes one
        self.lax = False  # whether arguments that no forward knows go by, if they are no cache
        self.own_masks = False  # whether attention that stays stock wants the model's own masks
        self.tables: set[str] = set()  # in which layouts rotary tables are made or taken
        self.headless = False  # whether the output layer, or the forward around it, stays stock
        self.by_mask = False  # whether the layout comes to attention with the mask alone
        self.vision = None  # of a model of images: vision.Vision
        self.states = False  # whether layers have a state, which no cache of transformers holds
        self.packed = False  # whether the decoder's layers, VeOmni's, want to be told where sequences begin
        self.description = None  # or why there is none
        self.described: list = []  # the dtypes of the parameters that it was made of, and which adapters are active
        self.attended: tuple[Pages | State, ...] = ()  # what each layer remembers, by what the audit saw
        self.facts: tuple | None = None  # what facts.py has read, and of which state
        self.tried = {}  # what is known of modules that are alike
        self.blocks: dict[str, str] = {}  # feed-forward blocks without an aligned form, by path, and why
        self.inner: set[int] = set()  # modules whose block computes what they would
        self.between: set[int] = set()  # experts whose block changes their weights after the router
        self.idle: list[dict] = []  # where their hooks would be, of which none would run
        self.silent: list[dict] = []  # and where a forward of their own would be
        self.call: tuple | None = None  # what the whole model was called with, and has returned, when it was tried
        self.hung: tuple[int, ...] = ()  # hooks on the whole model
        self.judged: set[int] = set()  # those on what it returns
        self.modules: list[nn.Module] = []  # whose own forward does not run
        self.owns: list[dict] = []  # what those hold of their own, and how much that is
        self.lengths: list[int] = []
        self.methods: list[list[str]] = []  # of it what stands for a method of their class
        self.classes: list[type] = []  # of them
        self.plain: list[type] = []  # and what FSDP2 has made those of
        self.tree: tuple[list, list, list] = [], [], []
        self.numbers: tuple[list, list, list] = [], [], []
        self.held: tuple[list[dict], list[str]] = [], []  # where parameters stand, and their names
        self.kinds: set[type] = set()  # which classes of tensors they are of
        self.buffers: list[_Buffer] = []
        self.frequencies: list[list] = []  # where they stand, their names, and what they were when last looked at
        self.tensors: list[tuple] = []
        self.rates: list[tuple[nn.Module, dict[str, float]]] = []  # what would be dropped if an engine's were trained
        self.around: list[nn.Module] = []  # attention, and what it is in below the decoder
        self.fused: list[nn.Module] | None = None  # layers that are computed in one node; None: not looked for

    def build(self, audited: bool = True) -> None:
        """Find out what becomes of each module, and change them; an error leaves the model as it was.

        audited  run it, to see that nothing else reduces: False where only its trace is wanted
        """
        with _isolated(self.model):
            plan.find(self)
            self.hung, self.judged = plan.around_the_whole(self), set(self.model._forward_hooks)
            self.apply()
            try:
                if audited and not self.strict:
                    plan.leave_head_stock(self)
                if audited:
                    plan.check_runs(self)
                if self.strict:
                    plan.refuse_problems(self)
                elif audited:
                    plan.leave_stock(self)
            except BaseException:
                self.revert()
                raise
        children = [module._modules for module in self.model.modules()]
        parents = [c for c in children if c]
        self.tree = parents, [tuple(c.values()) for c in parents], [c for c in children if not c]
        self.numbers, self.tensors = plan.numbers(self), plan.tensors(self.model)
        stores = [module._parameters for module in self.model.modules()]
        held = [(store, name) for store in stores for name, p in store.items() if p is not None]
        self.held = [store for store, _ in held], [name for _, name in held]
        self.kinds = self._kinds() | {type(None)}
        inner = [module for module in self.model.modules() if id(module) in self.inner]
        self.idle = [hooks for module in inner for hooks in plan.hooks_of(module) if not hooks]
        self.silent = [vars(module) for module in inner if "forward" not in vars(module)]
        self.modules = [*inner, *(change.module for change in self.changes)]
        self.owns, self.methods = list(map(vars, self.modules)), list(map(plan.own_methods, self.modules))
        self.lengths = list(map(len, self.owns))
        self.classes, self.plain = list(map(type, self.modules)), list(map(class_of, self.modules))
        with _isolated(self.model):
            self.frequencies = [
                [module._buffers, name, value]
                for module in self.model.modules()
                for name, value in rotary.frequencies(module, self.options["longrope"]).items()
            ]
        self.around, self.rates = plan.around_attention(self), plan.passed_over(self)
        self.builds += 1

    def fuse(self, device: torch.device) -> None:
        """Before a forward with gradients: each layer that can be is computed in one node of autograd (layer.py)."""
        if self.fused is not None or not self.trains or (device.type != "cuda" and not FUSE_ON_CPUS):
            return
        if self.seen is not None or self.rows is not None or self.vision is not None or watched():
            return
        with LOCK:
            if self.fused is None:
                self.fused = layer.fuse(self)

    def sharded(self) -> bool:
        """Whether attention is in a unit of FSDP2's that the decoder calls, which may cast what it is called with."""
        return any(isinstance(module, FSDPModule) for module in self.around)

    sharded._dynamo_marked_constant = True

    def rounds(self) -> bool:
        """Whether FSDP2 casts what a forward returns, and with it log-probabilities, to 16 bits."""
        units = (module for module in (self.model, self.base, *self.around) if isinstance(module, FSDPModule))
        return any(map(forwards.rounds, units))

    rounds._dynamo_marked_constant = True

    def changed(self) -> bool:
        """A module of the tree has other children than when it was patched, or a number another value that was read
        then, or another config or method, or a bias where there was none, or a weight of an arithmetic of its own, or a
        hook that would not run; or rotary frequencies have been cast. 71 us for the 727 of 48 layers."""
        parents, children, leaves = self.tree
        holders, names, values = self.numbers
        others = [tuple(c.values()) for c in parents] != children or any(leaves)
        others = others or any(self.idle) or any("forward" in own for own in self.silent)
        others = (
            others
            or self._of_other_classes()
            or self._of_other_methods()
            or any(map(computes_itself, self._kinds() - self.kinds))
        )
        return others or list(map(dict.get, holders, names)) != values or self._recast()

    def _kinds(self) -> set[type]:
        return set(map(type, map(dict.get, *self.held)))

    def _of_other_classes(self) -> bool:
        """Whether a module whose own forward does not run is of another class now; FSDP2 makes one of each."""
        now = list(map(type, self.modules))
        if now == self.classes:
            return False
        if list(map(class_of, self.modules)) != self.plain:
            return True
        self.classes = now
        return False

    def _of_other_methods(self) -> bool:
        """Whether somebody has put a function on such a module in the place of a method of its class."""
        now = list(map(len, self.owns))
        if now == self.lengths:
            return False
        if list(map(plan.own_methods, self.modules)) != self.methods:
            return True
        self.lengths = now
        return False

    def _recast(self) -> bool:
        """Whether rotary frequencies are others than when last looked at. A move to another device makes other tensors
        of them, a cast of the model other numbers: they are read once for every tensor."""
        for known in self.frequencies:
            store, name, before = known
            now = store.get(name)
            if now is before or isinstance(now, FakeTensor) or (now is not None and now.is_meta):
                continue
            if now is None or now.dtype != before.dtype or not torch.equal(now.cpu(), before.cpu()):
                return True
            known[2] = now
        return False

    changed._dynamo_marked_constant = True  # a new trace looks at the modules of now (as _core/backend.py's _reason)

    def unrounded(self) -> str:
        """Which module, by its compile(), is Inductor's without the roundings between kernels that it joins; or ""."""
        for module in (self.model, self.base, *self.around):
            compiled = module.__dict__.get("_compiled_call_impl")
            if compiled is None:
                continue
            if compiled not in self.compiled:
                config = getattr(compiled, "get_compiler_config", dict)() or {}
                self.compiled[compiled] = config.get("emulate_precision_casts", True)
            narrow = self.sharded() or any(p.dtype != torch.float32 for p in module.parameters())  # what is rounded
            if narrow and not self.compiled[compiled]:
                return next(path for path, m in self.model.named_modules() if m is module) or "the model"
        return ""

    unrounded._dynamo_marked_constant = True

    def check(self) -> None:
        """Before a forward: cover what has been put in or set since, or refuse it."""
        if where := self.unrounded():
            raise RuntimeError(
                f"patch.hf: {where}: got compile() by Inductor, which leaves out roundings between kernels that it "
                'joins: compile it with options={"emulate_precision_casts": True}, or by another backend'
            )
        if not self.changed():
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "patch.hf: modules were put in or taken out after the patch, or numbers set: call the model once "
                "without torch.compile, which covers them or says why not, and compile it then"
            )
        with LOCK:
            if self.changed():
                self.renew()

    def check_rates(self) -> None:
        """Before a forward: of what a patch for an engine has passed over, nothing is trained after all."""
        for module, rates in self.rates:
            if module.training:
                name, value = next(iter(rates.items()))
                refuse_training(module, name, value)

    def check_tensors(self) -> None:
        """As `check`, of what no forward looks for: 0.6 ms for 28 layers. Hooks on the whole model are of it, which an
        engine does not run: whoever only looks at a forward puts one on, and is not to be shown fake tensors."""
        with LOCK:
            if plan.tensors(self.model) != self.tensors or plan.around_the_whole(self) != self.hung:
                self.renew()

    def unjudged_hook(self) -> bool:
        """Whether a hook has been put on the whole model that was not there when it was tried, and is none of torch's
        own (FSDP2's)."""
        later = self.model._forward_hooks.keys() - self.judged
        if not later or torch.compiler.is_compiling():
            return False
        modules = (getattr(self.model._forward_hooks[number], "__module__", None) for number in later)
        return any(not str(module).startswith("torch.distributed.") for module in modules)

    def train(self) -> None:
        """What was patched for an engine is to be trained too: cover it for that, or refuse it."""
        self.trains = True
        try:
            self.renew()
        except BaseException:
            self.trains = False
            raise

    def renew(self) -> None:
        """Cover what is there now, or refuse it: then the patch is as it was."""
        before = self.__dict__ | {"fused": None}
        self.revert()
        self.clear()
        try:
            self.build()
        except BaseException:
            self.__dict__.update(before)
            self.apply()
            raise

    def describe(self) -> Decoder:
        self.check()
        of: list = [(name, p.dtype) for name, p in self.model.named_parameters(remove_duplicate=False)]
        of += lora.switches(self.model)
        if self.description is None or self.described != of:
            self.description, self.described, head = None, of, self.described_head()
            try:
                with _isolated(self.model):
                    found = describe(self.model, self.base, head, self.options["kv_segment"])
                self.description = (
                    found
                    if self.vision is None
                    else replace(found, images=self.vision.described(), tower=self._tower_names())
                )
            except NotDescribed as reason:
                self.description = reason
        if isinstance(self.description, NotDescribed):
            raise self.description.with_traceback(None)
        return self.description

    def described_in_fp32(self) -> Decoder:
        """The description of the decoder if all its parameters were fp32, whichever of a sharded model's are whole now,
        and with that in another dtype than the others. Raises NotDescribed."""
        dtypes = {name: torch.float32 for name, p in self.model.named_parameters() if p.is_floating_point()}
        with _isolated(self.model):
            return read(hidden_states(self.model, self.base, dtypes), None, self.options["kv_segment"])

    def _tower_names(self) -> tuple[str, ...]:
        tower = self.base._modules[self.vision.tower]
        path = next(path for path, module in self.model.named_modules() if module is tower)
        named = (*tower.named_parameters(), *tower.named_buffers())
        return tuple(f"{path}.{name}" for name, _ in named)

    def memories(self) -> tuple[Pages | State, ...]:
        try:
            return tuple(layer.memory for layer in self.describe().layers)
        except NotDescribed:
            return self.attended

    def described_head(self) -> Head | None:
        weight, bias = (getattr(self.head, name, None) for name in ("weight", "bias"))
        names = {id(p): name for name, p in self.model.named_parameters()}
        name = names.get(id(weight))
        return None if name is None else Head(name, self.scale, self.softcap, names.get(id(bias)))

    def numerics(self, rounded: bool = False) -> dict:
        self.check()
        prompt_learning.check(self, "numerics")
        with _isolated(self.model):
            return facts.facts(self, rounded)

    def replace(self, path: str, module: nn.Module, forward: Callable, ops: str, note: str = "", name: str = "forward"):
        if self.rows is not None and name == "forward":
            forward = self.rows.cover(module, forward, ops, lambda reason: self.refuse(path, module, reason))
        if id(module) in self.heads:
            forward = forwards.noted(forward)
        self.changes.append(_Change(module, forward, name))
        self.report.append(Row(path, type(module).__name__, ops, note))

    def put(self, module: nn.Module, name: str, tensor: torch.Tensor) -> None:
        """A buffer that has to be another one."""
        self.buffers.append(_Buffer(module._buffers, name, module._buffers[name], tensor))

    def keep(self, path: str, module: nn.Module, note: str) -> None:
        if id(module) in self.inner:
            note = INNER
        self.report.append(Row(path, type(module).__name__, "", note))

    def refuse(self, path: str, module: nn.Module, reason: str, cause: BaseException | None = None) -> None:
        problem = path, type(module).__name__, reason
        if problem in self.problems:
            return
        if cause is not None:
            _LOG.debug("patch.hf: %s (%s): %s", path or "(root)", type(module).__name__, reason, exc_info=cause)
            self.cause = self.cause or cause
        self.problems.append(problem)
        self.report = Report(row for row in self.report if row.path != path or row.replacement)
        reasons = "; ".join(why for where, _, why in self.problems if where == path)
        self.keep(path, module, f"NOT COVERED: {reasons}")

    def apply(self) -> None:
        for change in self.changes:
            change.module.__dict__["_vexact"] = self
            change.module.__dict__[change.name] = types.MethodType(change.forward, change.module)
        for buffer in self.buffers:
            if buffer.store.get(buffer.name) is buffer.before:
                buffer.store[buffer.name] = buffer.after
        ACTIVE.add(self)
        if self.loss:
            self.model.__dict__["_loss_function"] = forwards.aligned_loss

    def take_back(self, change: _Change) -> None:
        """One of those that have been applied."""
        self.changes.remove(change)
        del change.module.__dict__[change.name], change.module.__dict__["_vexact"]

    def revert(self) -> None:
        layer.unfuse(self.fused or ())
        for change in self.changes:
            forward = change.module.__dict__.get(change.name)
            if getattr(forward, "__func__", None) is not change.forward:
                raise RuntimeError(
                    f"undo: something replaced the {change.name} of a {type(change.module).__name__} after the patch; "
                    "take that back first"
                )
        for change in self.changes:
            del change.module.__dict__[change.name], change.module.__dict__["_vexact"]
        ACTIVE.discard(self)
        for buffer in self.buffers:
            if buffer.store.get(buffer.name) is buffer.after:
                buffer.store[buffer.name] = buffer.before
        if self.loss and self.model.__dict__.get("_loss_function") is forwards.aligned_loss:
            del self.model.__dict__["_loss_function"]

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a patched model cannot be copied or pickled: undo its patch first, or use its state_dict (PEFT copies "
            "modules_to_save: wrap first, then patch)"
        )
