"""The least a decode step must read: every weight that takes part, and the keys and values of all contexts, once."""

from dataclasses import dataclass

import torch

import vexact_ops as vx
from vexact_engine.runner import memory
from vexact_ops.patch.description import Mixture


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model.

    shared      weights that every step reads: all but the embedding's table (of which a step reads a row a sequence;
                where the head is tied to it, the head reads it) and the routed experts
    expert      of one expert of one layer; 0 where there are none
    layers, experts, top_k   of the mixture: layers with routed experts, of how many, of which a token takes
    per_token   keys and values of one token, all layers
    """

    shared: int
    row: int
    expert: int
    layers: int
    experts: int
    top_k: int
    per_token: int

    def touched(self, batch: int) -> float:
        """Experts of a layer that a step of so many tokens reads, if every choice were as likely."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** batch) if self.experts else 0.0

    def step(self, batch: int, context: float, touched: float | None = None) -> float:
        """Bytes that a step of `batch` decodes reads, whose contexts are `context` tokens all together."""
        touched = self.touched(batch) if touched is None else touched
        return self.shared + batch * self.row + self.layers * touched * self.expert + context * self.per_token


def sizes(model: torch.nn.Module, *, latent: bool = False) -> Sizes:
    with vx.patch.hf(model, latent=latent) as handle:
        described = handle.describe()
    memories = [layer.memory for layer in described.layers]
    parts = [block.part for layer in described.layers for block in layer.blocks]
    mixtures = [part for part in parts if isinstance(part, Mixture)]
    stacked = {name for part in mixtures for name in (part.experts.gate_up, part.experts.down)}
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    shared = expert = 0
    for name, parameter in model.named_parameters():  # each once: a tied one too
        if name in stacked:  # the experts of a layer: gate and up in one, down in the other
            expert += parameter.nbytes // parameter.shape[0]
        elif parameter is not table or tied:
            shared += parameter.nbytes
    layers, routers = len(mixtures), [part.router for part in mixtures]
    return Sizes(
        shared=shared,
        row=0 if tied else table.nbytes // table.shape[0],
        expert=expert // layers if layers else 0,
        layers=layers,
        experts=routers[0].linear.features if routers else 0,
        top_k=routers[0].top_k if routers else 0,
        per_token=memory.bytes_per_token(memories, table.dtype),
    )
