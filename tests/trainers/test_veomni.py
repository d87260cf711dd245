"""vx.patch.veomni of models that VeOmni builds and shards over two ranks: log-probabilities of the engine, in bytes."""

import json
import os
import subprocess
import sys

import pytest
import torch

from .environment import environment
from .models import build, save
from .veomni_ranks import CASES, CHECKS, DEVICE, RANKS, TEMPERATURE, config_of, has_stock

SKIPPED = {"stock kernels differ", "undone"}  # where VeOmni's eager kernels do not compute it


def make(name: str, folder) -> None:
    """A model, and what the engine says of it: two prompts for each rank, and what was sampled."""
    from vexact_engine import Engine, EngineConfig, SamplingParams

    torch.manual_seed(3)
    model = build(config_of(name))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else 1 + noise * 0.1)
    save(model.to(torch.bfloat16), folder / "model")
    prompts = [torch.randint(3, 288, (n,)).tolist() for n in (5, 19, 1, 11)]
    options = dict(*CASES[name][4:])
    config = EngineConfig(
        num_pages=64,
        max_num_seqs=4,
        kv_segment=options.get("kv_segment"),
        latent_attention=options.get("latent", False),
    )
    engine = Engine.from_pretrained(str(folder / "model"), device=DEVICE, dtype="bfloat16", config=config)
    params = SamplingParams(max_new_tokens=14, temperature=TEMPERATURE, seed=7, ignore_eos=True)
    try:
        made = engine.generate(prompts, params)
    finally:
        engine.close()
    samples = [
        {"ids": [*prompt, *c.token_ids], "prompt": len(prompt), "logprobs": c.logprobs}
        for prompt, c in zip(prompts, made)
    ]
    (folder / "given.json").write_text(json.dumps([samples[:2], samples[2:]]))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(case, check, rank) -> "" or what was wrong."""
    folder = tmp_path_factory.mktemp("veomni")
    for name in CASES:
        (folder / name).mkdir()
        make(name, folder / name)
    ranks = []
    for rank in range(RANKS):
        env = {**os.environ, **environment(), "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        command = [sys.executable, "-m", "trainers.veomni_ranks", str(folder), *CASES]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        said = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()

    def found(case: str, check: str, rank: int) -> str:
        path = folder / case / f"{rank}.json"
        got = json.loads(path.read_text()) if path.exists() else {}
        return got.get(check, f"not checked: {got.get('ran', said[rank][-4000:])}")

    return found


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks(results, case, check):
    if check in SKIPPED and not has_stock(case):
        pytest.skip("VeOmni's eager experts know no expert parallelism, and its eager delta nets no packed rows")
    for rank in range(RANKS):
        wrong = results(case, check, rank)
        assert not wrong, f"rank {rank}: {wrong}"
