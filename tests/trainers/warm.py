"""A model with layers of true dimensions, and what each of its runs on a GPU would compile and verify, done once.

python -m trainers.warm FOLDER/FAMILY    # the folder is made

A run has four processes on its GPUs, and several runs go side by side: each would find the same kernels for itself.
Here one process does what they will do, a training step and an engine with its graphs, while they still begin; verdicts
and compiled kernels are then on disk. Nothing of it is needed: runs without it take longer.
"""

import sys
import time
from pathlib import Path

import torch

from . import pictures
from .models import TRUE_LAYERS, make_model

ENGINE = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "num_pages": 1024}  # others are on the same GPU
RESPONSE = 64
PROMPT = 1280  # tokens at most of one with pictures and films
LENGTHS = (97, 101)  # of a micro-batch of two: a prompt of these tests, and a response


def _of_pictures(folder: Path) -> bool:
    return folder.name in pictures.TRUE


def step(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    import vexact_ops as vx

    kind = AutoModelForImageTextToText if _of_pictures(folder) else AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    ids, given = torch.randint(3, 256, (sum(LENGTHS),)).tolist(), {}
    if _of_pictures(folder):
        picture, given = pictures.shown(model.config)
        ids[: len(picture)] = picture
    ids = torch.tensor([ids], device="cuda")
    given = {name: value.cuda() for name, value in given.items()}
    cu = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
    with vx.patch.hf(model.train()) as handle:
        with torch.no_grad():
            handle.logprobs(ids, cu_seqlens=cu, return_entropy=True, **given)
        handle.logprobs(ids, cu_seqlens=cu, **given).mean().backward()
    torch.cuda.synchronize()


def rollout(folder: Path) -> None:
    from vexact_engine import Engine, EngineConfig, SamplingParams

    with Engine.from_pretrained(str(folder), device="cuda", config=EngineConfig(**ENGINE)) as engine:
        prompts = [[3 + i] * (30 + i) for i in range(ENGINE["max_num_seqs"])]
        if _of_pictures(folder):
            ids, given = pictures.shown(engine.model.config)
            prompts = [{"prompt_token_ids": prompt + ids, **given} for prompt in prompts]
        engine.generate(prompts, SamplingParams(max_new_tokens=RESPONSE, ignore_eos=True), raise_on_error=True)


def model(folder: Path) -> None:
    part = folder.with_suffix(".part")
    if _of_pictures(folder):
        made = pictures.make_model(folder.name, part, device="cuda")
    else:
        made = make_model(folder.name, part, sizes=TRUE_LAYERS[folder.name])
    made.rename(folder)  # all of it is there at once


def main() -> None:
    for part in (model, step, rollout):
        begun = time.monotonic()
        part(Path(sys.argv[1]))
        torch.cuda.empty_cache()
        sys.stdout.write(f"{part.__name__}: {time.monotonic() - begun:.1f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
