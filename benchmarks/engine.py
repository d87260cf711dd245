"""Rollout speed of the engine against Hugging Face generate: same model, prompts and token counts, one process."""

import argparse
import statistics
import time
from collections.abc import Iterator

import torch

from .harness import environment

# (prompt tokens, new tokens): one request, and sixteen of mixed length
ONE = [(32, 128)]
MIXED = [(16 + 16 * (i % 16), 16 + (i * 7 % 16) * 16) for i in range(16)]


def _prompts(lengths: list[tuple[int, int]], vocabulary: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(10, vocabulary, (length,), generator=g).tolist() for length, _ in lengths]


def _stock(model, prompts: list[list[int]], news: list[int]) -> float:
    """Seconds of one left-padded batch generate: it runs until the longest request is done, as stock users do."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], dtype=torch.int64, device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], dtype=torch.int64, device=model.device
    )
    options = dict(max_new_tokens=max(news), min_new_tokens=max(news), do_sample=True, temperature=1.0, top_k=0)
    begin = time.perf_counter()
    with torch.no_grad():
        model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options)
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _ours(engine, params, prompts: list[list[int]]) -> float:
    begin = time.perf_counter()
    done = engine.generate(prompts, params)
    seconds = time.perf_counter() - begin
    short = [c for c, p in zip(done, params) if len(c.token_ids) != p.max_new_tokens]
    if short:
        raise RuntimeError(f"engine: {len(short)} requests ended early: {short[0].finish_reason} {short[0].error}")
    return seconds


def run(args: argparse.Namespace) -> Iterator[dict]:
    """One record per dtype and load: useful new tokens per second, medians of turns taken about."""
    from transformers import AutoModelForCausalLM

    from vexact_engine import Engine, EngineConfig, SamplingParams
    from vexact_engine.weights.fetch import fetch_smollm2

    path = fetch_smollm2()
    for dtype in args.dtype.split(","):
        stock = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=getattr(torch, dtype))
        stock = stock.to(args.device).eval()
        with Engine.from_pretrained(path, device=args.device, dtype=dtype, config=EngineConfig()) as engine:
            for label, lengths in (("1 request", ONE), ("16 mixed requests", MIXED)):
                prompts, news = _prompts(lengths, stock.config.vocab_size), [new for _, new in lengths]
                params = [
                    SamplingParams(max_new_tokens=new, temperature=1.0, seed=i, ignore_eos=True)
                    for i, new in enumerate(news)
                ]
                times: dict[str, list[float]] = {"ours": [], "stock": []}
                engine.generate(prompts[:1], params[:1])
                for _ in range(max(3, args.repeats // 5)):
                    times["ours"].append(_ours(engine, params, prompts))
                    times["stock"].append(_stock(stock, prompts, news))
                rates = {who: sum(news) / statistics.median(seconds) for who, seconds in times.items()}
                yield {
                    "room": "engine",
                    "case": f"smollm2-135m {label} {dtype}",
                    "backend": "vexact",
                    "ours": round(rates["ours"], 1),
                    "stock": round(rates["stock"], 1),
                    "ratio": round(rates["ours"] / rates["stock"], 3),
                    "unit": "tokens/s",
                    "device": args.device,
                    **environment(args.device),
                }
