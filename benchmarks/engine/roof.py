"""The least a decode step must read: every weight that takes part, and the keys and values of all contexts, once."""

from dataclasses import dataclass

import torch

import vexact_ops as vx
from vexact_engine.runner import memory, shapes


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
    config = shapes.decoder_config(model)
    with vx.patch.hf(model, latent=latent) as handle:
        memories = handle.memories()
    table = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is table
    shared = expert = layers = experts = 0
    for parameter in model.parameters():  # each once: a tied one too
        if parameter.dim() == 3:  # the stacked experts of a layer: gate and up in one, down in the other
            expert += parameter.nbytes // parameter.shape[0]
            experts, layers = parameter.shape[0], layers + 1
        elif parameter is not table or tied:
            shared += parameter.nbytes
    layers //= 2
    return Sizes(
        shared=shared,
        row=0 if tied else table.nbytes // table.shape[0],
        expert=expert // layers if layers else 0,
        layers=layers,
        experts=experts,
        top_k=getattr(config, "num_experts_per_tok", 0) if experts else 0,
        per_token=memory.bytes_per_token(memories, table.dtype),
    )
