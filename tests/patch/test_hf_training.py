"""Training under FSDP2 on one rank and on two: the engine's log-probabilities in every step, the same step twice."""

import pytest
import torch
from conftest import made_once
from families import rounded
from training import CASES, DTYPE, STEPS, a_rank, micro_batches, model_of

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_ops.testing import assert_bitwise

KINDS = pytest.mark.parametrize("name", [name for name in CASES if name != "stock"])


def by_engine(name: str, rank: int, weights: dict | None = None, device: str = "cpu") -> list[list[torch.Tensor]]:
    """Of each micro-batch of a rank, of each sequence: the engine's log-probability of every token but the first."""
    model = model_of(CASES[name], DTYPE, device).eval()
    if weights:
        model.load_state_dict({key: value.to(model.state_dict()[key].dtype) for key, value in weights.items()})
    rounded(model, DTYPE)  # routers that stay in fp32 too: the trainer's forward has them so
    config = EngineConfig(num_pages=32, max_num_seqs=8, enforce_eager=True)
    ask = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    with Engine.from_pretrained(model, device=device, config=config) as engine:
        batches = [engine.generate([s.tolist() for s in seqs], ask) for seqs in micro_batches(rank)]
    return [[torch.tensor(done.prompt_logprobs[1:]) for done in batch] for batch in batches]


def of_sequences(name: str, rank: int, values: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What a rank computed of packed rows, cut as by_engine's: the last value of a sequence is of no token."""
    return [[part[:-1] for part in row.split([len(s) for s in seqs])] for row, seqs in zip(values, micro_batches(rank))]


@pytest.fixture(
    scope="module", params=[("cpu", 1), ("cpu", 2), ("cuda", 1), ("cuda", 2)], ids=lambda p: f"{p[0]}-{p[1]}"
)
def trained(request, tmp_path_factory):
    device, ranks = request.param
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, torch sees {torch.cuda.device_count()}")

    def train(folder):
        torch.multiprocessing.spawn(a_rank, (ranks, device, str(folder), list(CASES)), nprocs=ranks)

    folder = made_once(tmp_path_factory, f"ranks-{device}-{ranks}", train)
    return device, [torch.load(f"{folder}/rank{rank}.pt") for rank in range(ranks)]


@KINDS
def test_log_probabilities_are_the_engine_s(name, trained):
    device, ranks = trained
    for rank, found in enumerate(ranks):
        first = found[name][0]
        assert len(first["seen"]) == STEPS
        got = of_sequences(name, rank, first["seen"][0])
        assert_bitwise(got, by_engine(name, rank, device=device), f"rank {rank}, before")
        after = of_sequences(name, rank, first["after"])
        expected = by_engine(name, rank, first["weights"], device)
        assert_bitwise(after, expected, f"rank {rank}, after")
        assert not torch.equal(torch.cat(first["after"]), torch.cat(first["seen"][0])), "nothing was learnt"


@KINDS
def test_a_step_is_repeatable(name, trained):
    for rank, found in enumerate(trained[1]):
        once, again = found[name]
        for what in ("seen", "norms", "after"):
            assert_bitwise(again[what], once[what], f"rank {rank}: {what}")
        assert_bitwise(list(again["weights"].values()), list(once["weights"].values()), f"rank {rank}: weights")


def test_ranks_have_the_same_weights(trained):
    for name in CASES:
        first, *others = [found[name][0]["weights"] for found in trained[1]]
        for other in others:
            assert_bitwise(list(other.values()), list(first.values()), name)


@pytest.mark.parametrize("name", ["offloaded", "checkpointed", "checkpointed-reentrant", "root"])
def test_what_wraps_a_model_changes_no_bit(name, trained):
    for found in trained[1]:
        assert_bitwise(found[name][0]["seen"], found["qwen3"][0]["seen"], "log-probabilities")
        got, expected = found[name][0]["weights"], found["qwen3"][0]["weights"]
        if trained[0] == "cpu" or name != "offloaded":  # there AdamW runs on the CPU
            assert_bitwise([got[key] for key in expected], list(expected.values()), "weights")


def test_the_stock_model_fails_it(trained):
    for rank, found in enumerate(trained[1]):
        got = of_sequences("stock", rank, found["stock"][0]["seen"][0])
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise(got, by_engine("stock", rank, device=trained[0]))
