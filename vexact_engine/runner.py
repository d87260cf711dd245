"""Owns the model and the KV caches, and runs a plan: one forward, logits of the rows that are sampled, one draw."""

import torch
from torch import Tensor

import vexact_ops as vx

from . import models
from .batch import Batch, BatchBuilder
from .config import EngineConfig
from .scheduler import Sampled, StepPlan


class Runner:
    """One model on one device. Not thread-safe: its owner runs one plan at a time.

    model    a Hugging Face causal language model, with `handle` its patch
    config   with num_pages set
    path     how hidden states are computed: "fused", or "patched: " and why
    """

    def __init__(self, model: torch.nn.Module, handle, config: EngineConfig, device: torch.device):
        self.model, self.handle, self.device = model, handle, device
        layers, heads, dim = models.cache_shape(model)
        dtype = next(model.parameters()).dtype
        shape = config.num_pages, config.page_size, heads, dim
        # Not zeroed: nobody reads what has not been stored, and on a CPU untouched memory is never taken.
        self.k_caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.v_caches = [torch.empty(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.builder = BatchBuilder(config, device)
        self.forward, self.path = models.forward(model, kv_segment=config.kv_segment)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Sampled:
        """What the plan draws; -1 for a sequence whose logits are not numbers."""
        batch = self.builder.build(plan)
        hidden = self.forward(batch, self.k_caches, self.v_caches)
        rows = batch.sample_rows.shape[0]
        if rows == 0:
            return Sampled([], [], [], [])
        if rows != hidden.shape[0]:
            hidden = hidden.index_select(0, batch.sample_rows)
        logits = self.handle.logits(hidden)
        ids, logprobs, raw = vx.sample(
            logits,
            batch.seeds,
            batch.draw_positions,
            temperature=batch.temperature,
            top_k=batch.top_k,
            top_p=batch.top_p,
            min_p=batch.min_p,
        )
        top = self._top_logprobs(plan, batch, logits) if batch.num_top_logprobs else None
        return Sampled(ids.tolist(), logprobs.tolist(), raw.tolist(), top)

    def _top_logprobs(self, plan: StepPlan, batch: Batch, logits: Tensor) -> list[dict[int, float] | None]:
        """The likeliest ids at temperature 1, for the rows that want them."""
        counts = [chunk.sequence.params.num_top_logprobs for chunk in plan.sampled_chunks]
        wanted = [row for row, count in enumerate(counts) if count]
        chosen = logits if len(wanted) == len(counts) else logits[wanted]
        values, ids = vx.log_softmax(chosen).topk(min(batch.num_top_logprobs, logits.shape[1]), dim=1)
        found: list[dict[int, float] | None] = [None] * len(counts)
        for row, row_ids, row_values in zip(wanted, ids.tolist(), values.tolist()):
            found[row] = dict(zip(row_ids[: counts[row]], row_values))
        return found
