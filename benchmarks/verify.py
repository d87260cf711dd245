"""`vexact verify` as a record: rollout against training, token by token, at a model's true sizes; stock beside it."""

import argparse
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from .harness import environment

NEW_TOKENS, LENGTHS = 16, [16, 64, 33, 200]
PROMPTS = {"cpu": 8, "cuda": 256}  # 4,096 tokens on a GPU
STOCK_PROMPTS = {"cpu": 8, "cuda": 32}
STEP_TOKENS = {"cpu": 128, "cuda": 8192}  # less than all prompts together: they go in chunks, beside decodes
BATCH_SIZES = (1, 8, 64, 256)
PACK_TOKENS = 2048


def run(args: argparse.Namespace) -> Iterator[dict]:
    """One record per shape (random weights), or for `--model`, and dtype: how many log-probabilities differ in their
    bits, on the aligned stack and on the stock one, and how many tokens at other batch sizes."""
    from vexact_engine.config import EngineConfig, SamplingParams
    from vexact_engine.prompts import synthetic_prompts
    from vexact_engine.verify import verify
    from vexact_engine.weights.load import load
    from vexact_engine.weights.random import load_random

    prompts = PROMPTS[args.device]
    pages = prompts * -(-(max(LENGTHS) + NEW_TOKENS) // 16)
    # no prefix cache: every batch size computes its prompts anew
    options = {"max_num_seqs": prompts, "max_num_batched_tokens": STEP_TOKENS[args.device]}
    config = EngineConfig(num_pages=pages, enable_prefix_cache=False, show_progress=False, **options)
    for source in [args.model] if args.model else args.shape.split(","):
        for dtype in args.dtype.split(","):
            make = load if args.model else load_random
            loaded = make(source, device=args.device, dtype=dtype)
            found = verify(
                loaded,
                synthetic_prompts(prompts, LENGTHS, loaded.model.get_input_embeddings().weight.shape[0], seed=0),
                SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True),
                config=config,
                stock=(dtype,),
                stock_prompts=STOCK_PROMPTS[args.device],
                pack_tokens=PACK_TOKENS,
                batch_sizes=[size for size in BATCH_SIZES if size <= prompts],
            )
            ours, stock, gradients = found.comparison, found.stock[0].comparison, found.gradients
            yield {
                "room": "verify",
                "case": f"{Path(source).name if args.model else source} {dtype}",
                "backend": "vexact",
                "weights": "of the model" if args.model else "random",
                "tokens": ours.tokens,
                "mismatched": ours.mismatched_tokens,
                "max_abs_diff": ours.max_abs_diff,
                "k3_kl": ours.k3_kl,
                "batch_sizes": [batch.batch_size for batch in found.batches],
                "batch_tokens": sum(batch.tokens for batch in found.batches),
                "batch_mismatched": sum(batch.mismatched_tokens for batch in found.batches),
                "gradients": gradients.tensors,
                "gradient_norm": gradients.norm,
                "gradients_finite": gradients.finite,
                "stock_tokens": stock.tokens,
                "stock_mismatched": stock.mismatched_tokens,
                "stock_max_abs_diff": stock.max_abs_diff,
                "seconds": round(found.seconds, 1),
                "device": args.device,
                "transformers": metadata.version("transformers"),
                **environment(args.device),
            }
