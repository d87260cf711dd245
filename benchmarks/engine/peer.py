"""The process of a peer: reads what it is to do on standard input, writes what it found as its last line of output.

python -m benchmarks.engine.peer transformers|vllm
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable

PROBE = 17  # tokens that say how long a whole run would take
AGAIN = 8  # times that both runs are repeated at most, where more tokens seem to take no longer than one


def figures(runs: dict[int, float], jobs: list, new: int) -> dict:
    """Of whole runs with so many new tokens a request at most: {1: seconds, new: seconds}. A step is told by their
    difference, where there is one."""
    tokens = sum(min(job[1], new) for job in jobs)
    step = (runs[new] - runs[1]) / (new - 1) if runs[new] > runs[1] else None
    return {
        "new_at_most": new,
        "seconds": round(runs[new], 4),
        "prefill_s": round(runs[1], 4),
        "step_ms": None if step is None else round(step * 1e3, 4),
        "requests_per_s": round(len(jobs) / runs[new], 3),
        "tokens_per_s": round(tokens / runs[new], 1),
        "total_tokens_per_s": round((tokens + sum(len(job[0]) for job in jobs)) / runs[new], 1),
    }


def timed(generate: Callable[[int], None], jobs: list, seconds: float) -> dict:
    """generate(new) answers every job with at most `new` tokens. First of one token, then of a few, then of all that
    fit into the time. Each time is the least of its runs: what holds up one token alone (another program, for a while)
    would make a step shorter than it is, or less than nothing."""
    most = max(job[1] for job in jobs)
    generate(min(2, most))  # what a first call does must not count
    runs = {}

    def run(new: int) -> None:
        began = time.perf_counter()
        generate(new)
        runs[new] = min(runs.get(new, math.inf), time.perf_counter() - began)

    run(1)
    new = min(most, PROBE)
    if new > 1:
        run(new)
        step = max((runs[new] - runs[1]) / (new - 1), 1e-6)
        fits = int((seconds - runs[1]) / step)
        if fits > new < most:
            new = min(most, fits)
            run(new)
        for _ in range(AGAIN):
            if runs[new] > runs[1]:
                break
            run(1)
            run(new)
    return figures(runs, jobs, new)


def _transformers(task: dict) -> dict:
    import torch

    from . import load

    given = argparse.Namespace(device=task["device"], model=task["model"], layers=task["layers"])
    loaded, _, _ = load(given, task["source"], task["dtype"])
    model, jobs = loaded.model.eval(), task["jobs"]
    width = max(len(ids) for ids, _ in jobs)
    padded = [([0] * (width - len(p)) + p, [0] * (width - len(p)) + [1] * len(p)) for p, _ in jobs]
    ids, mask = (torch.tensor(part, dtype=torch.int64, device=model.device) for part in zip(*padded))

    def generate(new: int) -> None:
        """One batch, padded on the left; it runs until the longest answer is done, as stock users have it."""
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "temperature": 1.0, "top_k": 0}
        with torch.no_grad():
            model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options)
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    return timed(generate, jobs, task["seconds"])


def _vllm(task: dict) -> dict:
    from vllm import LLM, SamplingParams

    jobs = task["jobs"]
    options = {"dtype": task["dtype"], "enable_prefix_caching": False, "skip_tokenizer_init": True, "seed": 0}
    options |= {"max_model_len": max(len(ids) + new for ids, new in jobs)}
    with tempfile.TemporaryDirectory() as folder:
        if task["model"] is None:  # random weights of the same sizes
            from transformers import AutoConfig
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

            from vexact_engine.weights.random import CONFIGS, _cut

            config = AutoConfig.for_model(**CONFIGS[task["source"]])
            config.architectures = [CLASSES[config.model_type]]
            if task["layers"] is not None:
                _cut(config, task["source"], task["layers"])
            config.save_pretrained(folder)
            engine = LLM(folder, load_format="dummy", **options)
        else:
            engine = LLM(task["source"], **options)
    prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]

    def generate(new: int) -> None:
        params = [
            SamplingParams(max_tokens=min(n, new), temperature=1.0, ignore_eos=True, detokenize=False) for _, n in jobs
        ]
        engine.generate(prompts, params, use_tqdm=False)

    return timed(generate, jobs, task["seconds"]) | {"version": __import__("vllm").__version__}


def main() -> int:
    task = json.load(sys.stdin)
    found = {"transformers": _transformers, "vllm": _vllm}[sys.argv[1]](task)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
