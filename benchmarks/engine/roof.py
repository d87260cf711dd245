"""The least time of a decode step. It moves every weight that takes part, the keys and values of all contexts that a
query may see, and of sequences that have a state that state with half of an open chunk's rows, all read once; a state
is written once a chunk. And it multiplies each row by the weights: where that takes longer than to read them, it counts
instead."""

from dataclasses import dataclass

import torch

import vexact_ops as vx
from vexact_engine.runner import memory
from vexact_ops.patch.description import Mixture, State


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model, and what its weights are multiplied by.

    shared      weights that every step reads: all but the embedding's table (of which a step reads a row a sequence;
                where the head is tied to it, the head reads it) and the routed experts
    expert      of one expert of one layer; 0 where there are none
    layers, experts, top_k   of the mixture: layers with routed experts, of how many, of which a token takes
    per_token   keys and values of one token, of all layers whose queries see every key
    windows     of each width of a window, in order: (tokens, keys and values of one token of all layers that have it)
    state       of one sequence's states, all layers: what a step moves of them
    products, expert_products   FLOP of a row with the matrices of `shared`, and with one expert of one layer
    """

    shared: int
    row: int
    expert: int
    layers: int
    experts: int
    top_k: int
    per_token: int
    windows: tuple[tuple[int, int], ...] = ()
    state: float = 0.0
    products: int = 0
    expert_products: int = 0

    def touched(self, batch: int) -> float:
        """Experts of a layer that a step of so many tokens reads, if every choice were as likely."""
        return self.experts * (1 - (1 - self.top_k / self.experts) ** batch) if self.experts else 0.0

    def step(self, batch: int, context: float, touched: float | None = None) -> float:
        """Bytes that a step of `batch` decodes moves, whose contexts are `context` tokens all together, each about as
        long as the others."""
        touched = self.touched(batch) if touched is None else touched
        seen = context * self.per_token + sum(min(context, batch * width) * kept for width, kept in self.windows)
        return self.shared + batch * (self.row + self.state) + self.layers * touched * self.expert + seen

    def seconds(
        self, batch: int, context: float, bandwidth: float, rate: float, touched: float | None = None
    ) -> tuple[float, float]:
        """Of such a step: by its bytes alone, and where weights count as the longer of reading and multiplying them.

        bandwidth, rate   bytes and FLOP a second
        """
        touched = self.touched(batch) if touched is None else touched
        read = self.step(batch, context, touched) / bandwidth
        experts = self.layers * touched * self.expert / bandwidth
        more = max(0.0, batch * self.products / rate - self.shared / bandwidth)
        more += max(0.0, batch * self.layers * self.top_k * self.expert_products / rate - experts)
        return read, read + more


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
    shared = expert = products = expert_products = 0
    for name, parameter in model.named_parameters():  # each once: a tied one too
        if name in stacked:  # the experts of a layer: gate and up in one, down in the other
            expert += parameter.nbytes // parameter.shape[0]
            expert_products += 2 * parameter.numel() // parameter.shape[0]
        elif parameter is not table or tied:
            shared += parameter.nbytes
            products += 2 * parameter.numel() if parameter.dim() > 1 else 0
    layers, routers = len(mixtures), [part.router for part in mixtures]
    windows = sorted({memory.window for memory in memories} - {None})
    kept = {width: [memory for memory in memories if memory.window == width] for width in (None, *windows)}
    return Sizes(
        shared=shared,
        row=0 if tied else table.nbytes // table.shape[0],
        expert=expert // layers if layers else 0,
        layers=layers,
        experts=routers[0].linear.features if routers else 0,
        top_k=routers[0].top_k if routers else 0,
        per_token=memory.bytes_per_token(kept[None], table.dtype),
        windows=tuple((width, memory.bytes_per_token(kept[width], table.dtype)) for width in windows),
        state=sum(_moved(of, table.dtype) for of in memories if isinstance(of, State)),
        products=products,
        expert_products=expert_products // layers if layers else 0,
    )


def _moved(state: State, dtype: torch.dtype) -> float:
    """Bytes of a step, the mean over a chunk: what is kept over its end is read, and written by one step of a chunk; of
    the open rows those before are read, one is written."""
    whole = sum(kept.bytes(dtype) for kept in state.tensors)
    rows = sum(row.bytes(dtype) for row in state.open_rows)
    return whole * (1 + 1 / state.chunk) + rows * ((state.chunk - 1) / 2 + 1)
