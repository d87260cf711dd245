"""`vexact verify` as a record: rollout against training, token by token, at a model's true sizes; stock beside it.

Models that take most of a GPU's memory fit too: from a sixteenth of it on, engine and trainer take turns on one copy of
the weights, and no gradient outlives the look at it.
"""

import argparse
import gc
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from .harness import environment

NEW_TOKENS, LENGTHS = 16, [16, 64, 33, 200]
PROMPTS = {"cpu": 8, "cuda": 256}  # 4,096 tokens on a GPU
STOCK_PROMPTS = {"cpu": 8, "cuda": 32}
STOCK_PROMPTS_DELTA = 4  # a delta net without kernels of others: transformers goes through its chunks in Python
STEP_TOKENS = {"cpu": 128, "cuda": 8192}  # less than all prompts together: they go in chunks, beside decodes
BATCH_SIZES = (1, 8, 64, 256)
PACK_TOKENS = 2048


def run(args: argparse.Namespace) -> Iterator[dict]:
    """One record per shape (random weights), or for `--model`, and dtype: how many log-probabilities differ in their
    bits, on the aligned stack and on the stock one, how many tokens at other batch sizes, each computed anew, and how
    many with every prompt in the prefix cache."""
    for source in [args.model] if args.model else args.shape.split(","):
        for dtype in args.dtype.split(","):
            yield _record(args, source, dtype)


def _record(args: argparse.Namespace, source: str, dtype: str) -> dict:
    from vexact_engine.config import EngineConfig, SamplingParams
    from vexact_engine.proof.prompts import synthetic_prompts
    from vexact_engine.proof.verify import verify
    from vexact_engine.weights.load import load
    from vexact_engine.weights.random import load_random

    count = PROMPTS[args.device]
    on_gpu = args.device == "cuda"
    if on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    if args.model:
        loaded, name = load(source, device=args.device, dtype=dtype), Path(source).name
    else:
        loaded, name = load_random(source, device=args.device, dtype=dtype, layers=args.layers), source
    if on_gpu:
        torch.cuda.synchronize()
    loading = time.perf_counter() - began
    size = sum(p.nbytes for p in loaded.model.parameters())
    share = on_gpu and 16 * size > torch.cuda.get_device_properties(args.device).total_memory
    prompts = synthetic_prompts(count, LENGTHS, loaded.model.get_input_embeddings().weight.shape[0], seed=0)
    config = EngineConfig(
        num_pages=sum(-(-(len(prompt.token_ids) + NEW_TOKENS) // 16) for prompt in prompts),  # for all of them
        max_num_seqs=count,
        max_num_batched_tokens=STEP_TOKENS[args.device],
        latent_attention=args.latent,
        show_progress=False,
    )
    found = verify(
        loaded,
        prompts,
        SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True),
        config=config,
        stock=(dtype,),
        stock_prompts=STOCK_PROMPTS_DELTA if _has_delta(loaded.model) else STOCK_PROMPTS[args.device],
        pack_tokens=PACK_TOKENS,
        batch_sizes=[size for size in BATCH_SIZES if size <= count],
        warm=True,
        share_weights=share,
    )
    layers = "" if args.layers is None or args.model else f" {args.layers} layer{'s' * (args.layers != 1)}"
    ours, stock, gradients = found.comparison, found.stock[0].comparison, found.gradients
    return {
        "room": "verify",
        "case": f"{name}{layers}{' latent' if args.latent else ''} {dtype}",
        "backend": "vexact",
        "weights": "of the model" if args.model else "random",
        "layers": loaded.model.config.get_text_config(decoder=True).num_hidden_layers,
        "latent": args.latent,
        "shared_weights": share,
        "tokens": ours.tokens,
        "mismatched": ours.mismatched_tokens,
        "max_abs_diff": ours.max_abs_diff,
        "k3_kl": ours.k3_kl,
        "batch_sizes": [batch.batch_size for batch in found.batches],
        "batch_tokens": sum(batch.tokens for batch in found.batches),
        "batch_mismatched": sum(batch.mismatched_tokens for batch in found.batches),
        "warm_tokens": found.warm.tokens,
        "warm_mismatched": found.warm.mismatched_tokens,
        "warm_prefix_tokens": found.warm.prefix_tokens,
        "chunks": found.statistics["partial_prefills"],
        "gradients": gradients.tensors,
        "gradient_norm": gradients.norm,
        "gradients_finite": gradients.finite,
        "failures": found.failures,
        "stock_tokens": stock.tokens,
        "stock_mismatched": stock.mismatched_tokens,
        "stock_max_abs_diff": stock.max_abs_diff,
        "seconds": round(found.seconds, 1),
        "phases": {"load": round(loading, 1)} | {k: round(v, 1) for k, v in _phases(found).items()},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1) if on_gpu else None,
        "device": args.device,
        "transformers": metadata.version("transformers"),
        **environment(args.device),
    }


def _has_delta(model: torch.nn.Module) -> bool:
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return "linear_attention" in (kinds or ())


def _phases(found) -> dict[str, float]:
    return found.aligned.seconds | {"stock": sum(found.stock[0].seconds.values())}
