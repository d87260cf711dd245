"""Owns the model and the KV caches, and runs a plan: one forward, logits of the rows that are sampled, one draw."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import vexact_ops as vx

from ..config import EngineConfig
from ..core.scheduler import Sampled, StepPlan
from . import memory, shapes
from .batch import Batch, BatchBuilder, Caches, plain
from .forward import forward


class Runner:
    """One model on one device. Not thread-safe: its owner runs one plan at a time.

    model    a Hugging Face causal language model, with `handle` its patch
    config   as given; in it, num_pages is filled in where it is None
    path     how hidden states are computed: "fused", or "patched: " and why
    """

    def __init__(self, model: torch.nn.Module, handle, config: EngineConfig, device: torch.device):
        self.model, self.handle, self.device = model, handle, device
        self.shape = shapes.cache_shape(model, latent=config.latent_attention)
        self.dtype = next(model.parameters()).dtype
        self.page_size = config.page_size
        self.make_forward()
        if config.num_pages is None:  # behind the forward: what that moves and takes is in use by now
            per_token = self.shape.per_token * self.dtype.itemsize
            step = self._rehearse(config) if device.type == "cuda" else 0
            pages = memory.default_num_pages(config, per_token, config.max_model_len or 1 << 20, device, step)
            config = replace(config, num_pages=pages)
        self.config = config
        # Nobody's bits depend on what has not been stored, and on a CPU untouched memory is never taken; on a GPU it is
        # zeroed, as attention is faster where what lies behind a sequence's last key is finite.
        self.builder = BatchBuilder(config, device, self._caches(config.num_pages, self.shape.layers))

    def make_forward(self) -> None:
        """Of the tensors that the model holds now."""
        self.forward, self.path = forward(self.handle)

    def _caches(self, pages: int, layers: int) -> Caches:
        """Those of the keys and those of the values, for some layers."""
        made = pages, self.page_size, self.shape.heads
        new = torch.zeros if self.device.type == "cuda" else torch.empty
        k, v = (
            [new(*made, dim, dtype=self.dtype, device=self.device) for _ in range(layers if own else 0)]
            for dim, own in ((self.shape.k_dim, True), (self.shape.v_dim, not self.shape.shared))
        )
        return k, v or [keys[..., : self.shape.v_dim] for keys in k]

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sampled:
        """What the plan draws; -1 for a sequence whose logits are not numbers. The host waits once, for the draw."""
        batch = self.builder.build(plan)
        if batch.sampling.rows.shape[0] == 0:
            self.forward(batch)
            return Sampled([], [], [], [])
        logits, drawn = self._step(batch)
        most = batch.sampling.num_top_logprobs
        top = self._top_logprobs(plan, logits, most) if most else None
        return Sampled(*_to_host(*drawn), top)

    def _step(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Logits of the sampled rows, and ids, log-probabilities and raw ones drawn from them."""
        hidden, sampling = self.forward(batch), batch.sampling
        if sampling.rows.shape[0] != hidden.shape[0]:
            hidden = hidden.index_select(0, sampling.rows)
        logits = self.handle.logits(hidden)
        drawn = vx.sample(
            logits,
            sampling.seeds,
            sampling.positions,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        return logits, drawn

    @torch.inference_mode()
    def _rehearse(self, config: EngineConfig) -> int:
        """Bytes that the largest step takes beside weights and caches.

        Steps of every power of two of sequences go first, of single tokens and with a chunk among them: kernels that
        are compiled, verified and chosen for a shape when they first meet it do so here, and not under a request.
        """
        tokens, most = config.max_num_batched_tokens, min(config.max_num_seqs, config.max_num_batched_tokens)
        k, v = (cache * self.shape.layers for cache in self._caches(1, 1))
        limit = config.max_model_len or tokens

        def step(*lengths: int) -> None:
            """One that stores nothing and reads one page over and over; none longer than a sequence may be."""
            spans = [(0, min(limit, length - at)) for length in lengths for at in range(0, length, limit)]
            tables = [[0] * -(-end // config.page_size) for _, end in spans]
            self._step(plain((k, v), tables, spans, store=False))

        counts = {min(1 << i, most) for i in range(most.bit_length() + 1)}
        for count in sorted(counts):
            step(*[1] * count)
            if tokens > count:
                step(2, *[1] * (count - 1))
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        step(tokens - most + 1, *[1] * (most - 1))
        return torch.cuda.max_memory_allocated(self.device) - before

    def _top_logprobs(self, plan: StepPlan, logits: Tensor, most: int) -> list[dict[int, float] | None]:
        """The likeliest ids at temperature 1, for the rows that want them."""
        counts = [chunk.sequence.params.num_top_logprobs for chunk in plan.sampled_chunks]
        wanted = [row for row, count in enumerate(counts) if count]
        chosen = logits
        if len(wanted) != len(counts):
            chosen = logits[torch.tensor(wanted, dtype=torch.int64, device=logits.device)]
        values, ids = vx.log_softmax(chosen).topk(min(most, logits.shape[1]), dim=1)
        found: list[dict[int, float] | None] = [None] * len(counts)
        for row, row_ids, row_values in zip(wanted, ids.tolist(), values.tolist()):
            found[row] = dict(zip(row_ids[: counts[row]], row_values))
        return found


def _to_host(ids: Tensor, *values: Tensor) -> tuple[list, ...]:
    """(S,) int64 and some (S,) fp32 as lists, in one copy."""
    if ids.device.type == "cpu":
        return ids.tolist(), *(v.tolist() for v in values)
    words = torch.cat([t.contiguous().view(torch.int32) for t in (ids, *values)]).cpu().numpy()
    count = ids.shape[0]
    parts = words[2 * count :].view(np.float32).reshape(len(values), count)
    return words[: 2 * count].view(np.int64).tolist(), *parts.tolist()
