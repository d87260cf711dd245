"""Notices that somebody else has written into a model's tensors, put others in their place, hung hooks on it, set a
forward or a class of a module's own, or switched adapters."""

import operator
from itertools import repeat

import torch
from torch.nn.modules import module as of_all

from vexact_ops.patch.lora import SWITCHES

_version, _pointer = operator.attrgetter("_version"), torch.Tensor.data_ptr


class Watch:
    """What a model's tensors are now. A write through `.data`, which torch does not count, is not seen.

    It is asked before every step, so nothing here is a loop of Python's own: 71 us for the 311 tensors and 427 modules
    of 28 layers. A tensor that was replaced stays in memory until then. Modules that are put in or taken out are the
    patch's to notice: `note` comes after that.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.note()

    def note(self) -> None:
        """From here on, this is how they should be."""
        modules = list(self._model.modules())
        stores = [s for module in modules for s in (module._parameters, module._buffers)]
        self._stores = [s for s in stores if s]
        self._holders = [store for store in self._stores for _ in store]
        self._names = [name for store in self._stores for name in store]
        self._held = [tensor for store in self._stores for tensor in store.values()]
        hooks = [h for module in modules for h in (module._forward_pre_hooks, module._forward_hooks)]
        hooks += [of_all._global_forward_pre_hooks, of_all._global_forward_hooks]  # take part in every module's forward
        self._empty = [table for table in stores + hooks if not table]
        self._hooked = [h for h in hooks if h]
        self._hung = list(map(tuple, self._hooked))  # by number, of which no two are the same
        self._tensors = [t for t in self._held if t is not None]
        self._counting = [t for t in self._tensors if not t.is_inference()]  # others know no version
        self._pointers = list(map(_pointer, self._tensors))
        self._versions = list(map(_version, self._counting))
        self._modules, self._classes = modules, list(map(type, modules))
        self._own = list(map(vars, modules))
        self._forwards = list(map(dict.get, self._own, repeat("forward")))
        self._adapted = [own for own in self._own if "_active_adapter" in own]
        self._switched = self._switches()

    def _switches(self) -> list:
        """Which adapters are active, merged or disabled, and their scalings."""
        found = [own.get(name) for own in self._adapted for name in SWITCHES]
        return [value.copy() if isinstance(value, list | dict) else value for value in found]

    def note_written(self) -> None:
        """`note` after values have changed, and nothing else should have."""
        if self.changed() == "replaced":
            self.note()
        else:
            self._versions = list(map(_version, self._counting))

    def note_moved(self) -> None:
        """`note` after tensors have got other memory and values, and nothing else should have."""
        self._pointers, self._versions = list(map(_pointer, self._tensors)), list(map(_version, self._counting))

    def changed(self) -> str:
        """Nothing where all is as noted, "written" where values have changed, "replaced" where a tensor is another, has
        come or gone, other hooks take part in the modules' forwards, a module has another forward or class, or adapters
        were switched."""
        if any(self._empty) or list(map(tuple, self._hooked)) != self._hung:
            return "replaced"
        if not all(map(operator.is_, map(dict.get, self._own, repeat("forward")), self._forwards)):
            return "replaced"
        if list(map(type, self._modules)) != self._classes:
            return "replaced"
        if self._adapted and self._switches() != self._switched:
            return "replaced"
        # by identity: tensors that are compared are computed with
        others = not all(map(operator.is_, map(dict.get, self._holders, self._names), self._held))
        if others or sum(map(len, self._stores)) != len(self._held):
            return "replaced"
        if list(map(_pointer, self._tensors)) != self._pointers:
            return "replaced"
        return "written" if list(map(_version, self._counting)) != self._versions else ""
