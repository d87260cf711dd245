"""A folder with a random model of true sizes and a tokenizer, as on a hub: python -m benchmarks.rl.model FOLDER SHAPE
LAYERS DEVICE. In a process of its own, which leaves nothing on the GPU. In a checkout."""

import shutil
import sys
from pathlib import Path

import torch

from vexact_engine.weights.random import config_of, load_random


def make(folder: Path, shape: str, layers: int, device: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from trainers.models import TOKENS, tokenizer

    if (family := config_of(shape).model_type) not in TOKENS:
        raise ValueError(f"rl_step: {shape}: got a {family}, expected one of {', '.join(TOKENS)}")
    model = load_random(shape, dtype=torch.bfloat16, device=device, layers=layers or None).model
    words = tokenizer(family, model.config.vocab_size)
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.eos_token_id = words.pad_token_id, words.eos_token_id
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    words.save_pretrained(part)
    part.rename(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
