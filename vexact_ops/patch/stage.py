"""Some layers of a patched decoder, by its own Python."""

import types

import torch
from torch import Tensor, nn

from . import forwards
from .batch import PagedBatch
from .description import Decoder
from .images import Encoded
from .pieces import twin


class Stage:
    """Layers of a decoder in a range: with the embedding where the first is among them, and with the final norm where
    the last is. Nothing else of the model is read, so nothing else has to be materialised (but the frequencies of the
    rotation: Decoder.names says what is read). The model is not touched; its own modules are what computes.

    input_ids, positions  (T,) of a step
    paged                 with the caches of these layers alone, in their order
    hidden                (T, H) the residual stream, for a stage that is not the first
    axes                  (3, T) positions of a step with tokens of images
    images                what stands among its tokens, for a stage that embeds them, or adds rows behind its layers
    returns               (T, H) the residual stream, or the final hidden states from the last stage
    """

    def __init__(self, base: nn.Module, described: Decoder, layers: range):
        self.layers, self.hidden = layers, None
        count = len(described.layers)
        if not layers or layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
            raise ValueError(f"stage: layers: got {layers}, expected some of range(0, {count}), in order")
        vision = base._vexact.vision
        decoder = base if vision is None else base._modules[vision.decoder]
        children = dict(decoder.named_children())
        stack = next((n for n, m in children.items() if isinstance(m, nn.ModuleList) and len(m) == count), None)
        norm = described.norm.weight.split(".")[-2]
        if stack is None or norm not in children:
            raise ValueError(
                f"stage: {type(decoder).__name__}: its {count} layers and its norm are no children of it, so none can "
                "be left out"
            )
        parts = {stack: nn.ModuleList([self._layer(i, layer) for i, layer in enumerate(children[stack])])}
        if layers.stop < count:
            parts[norm] = nn.Identity()
        own = twin(decoder, parts)
        self.base = own if vision is None else twin(base, {vision.decoder: own})
        self.base.__dict__["forward"] = types.MethodType(forwards.base_forward, self.base)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        paged: PagedBatch,
        hidden: Tensor | None = None,
        axes: Tensor | None = None,
        images: Encoded | None = None,
    ) -> Tensor:
        first, self.hidden = self.layers.start == 0, None if hidden is None else hidden[None]
        if first != (hidden is None):
            raise ValueError(f"stage: hidden: got {'none' if hidden is None else 'some'} for layers {self.layers}")
        given = {"input_ids": input_ids[None]} if first else {"inputs_embeds": self.hidden}
        if images is not None:  # behind layers that are not here nothing is added
            given["vexact_images"] = images._replace(deepstack=images.deepstack[: self.layers.stop])
        places = positions[None] if axes is None else torch.cat((positions[None], axes))[:, None]
        try:
            out = self.base(
                **given,
                position_ids=places,
                use_cache=False,
                return_dict=True,
                vexact_paged=paged,
                vexact_checked=True,
            )
        finally:
            self.hidden = None
        return out.last_hidden_state[0]

    def _layer(self, i: int, layer: nn.Module) -> nn.Module:
        if i == self.layers.start and i > 0:
            other = twin(layer)
            other.__dict__["forward"] = lambda _, *args, **kwargs: layer(self.hidden, *args, **kwargs)
            return other
        if i in self.layers:
            return layer
        other = twin(layer)
        other.__dict__["forward"] = _same
        return other


def _same(hidden_states: Tensor, *args, **kwargs) -> Tensor:
    return hidden_states
