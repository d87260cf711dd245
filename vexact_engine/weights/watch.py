"""Notices that somebody else has written into a model's tensors, put others in their place, or hung hooks on it."""

import operator

import torch

_version, _pointer = operator.attrgetter("_version"), torch.Tensor.data_ptr


class Watch:
    """What a model's tensors are now. A write through `.data`, which torch does not count, is not seen.

    It is asked before every step: a tenth of a millisecond for the 330 tensors of 36 layers on a busy machine. A
    parameter that was replaced stays in memory until then.
    """

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.note()

    def note(self) -> None:
        """From here on, this is how they should be."""
        stores = (s for module in self._model.modules() for s in (module._parameters, module._buffers))
        self._stores = list({id(store): store for store in stores if store}.values())
        self._hooks = [
            h for module in self._model.modules() for h in (module._forward_pre_hooks, module._forward_hooks)
        ]
        self._hung = [tuple(hooks) for hooks in self._hooks if hooks]  # by number, of which no two are the same
        self._tensors = [t for store in self._stores for t in store.values() if t is not None]
        self._counting = [t for t in self._tensors if not t.is_inference()]  # others know no version
        self._held = [list(map(id, store.values())) for store in self._stores]
        self._pointers = list(map(_pointer, self._tensors))
        self._versions = list(map(_version, self._counting))

    def note_written(self) -> None:
        """`note` after values have changed, and nothing else should have."""
        if self.changed() == "replaced":
            self.note()
        else:
            self._versions = list(map(_version, self._counting))

    def changed(self) -> str:
        """Nothing where all is as noted, "written" where values have changed, "replaced" where a tensor is another or
        other hooks take part in the modules' forwards."""
        if [tuple(hooks) for hooks in self._hooks if hooks] != self._hung:
            return "replaced"
        held = [list(map(id, store.values())) for store in self._stores]
        if held != self._held or list(map(_pointer, self._tensors)) != self._pointers:
            return "replaced"
        return "written" if list(map(_version, self._counting)) != self._versions else ""
