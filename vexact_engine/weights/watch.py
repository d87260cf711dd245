"""Notices that somebody else has written into a model's tensors, or put others in their place."""

import torch


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Watch:
    """What a model's tensors are now. A write through `.data`, which torch does not count, is not seen."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.note()

    def note(self) -> None:
        """From here on, this is how they should be."""
        stores = [s for module in self._model.modules() for s in (module._parameters, module._buffers)]
        places = {(id(store), name): (store, name) for store in stores for name, t in store.items() if t is not None}
        self._places = list(places.values())
        self._seen = [(id(t), t.data_ptr(), _version(t)) for t in (store[name] for store, name in self._places)]

    def changed(self) -> str:
        """Nothing where all is as noted, "written" where values have changed, "replaced" where a tensor is another."""
        written = False
        for (store, name), (identity, pointer, version) in zip(self._places, self._seen):
            tensor = store.get(name)
            if id(tensor) != identity or tensor.data_ptr() != pointer:
                return "replaced"
            written |= _version(tensor) != version
        return "written" if written else ""
