"""One rank of ulysses.py: python -m benchmarks.rl.ulysses OPTIONS RANK, with OPTIONS in JSON."""

import functools
import json
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

SHARES = (0.22, 0.15, 0.11, 0.25, 0.04, 0.085, 0.12)  # of the tokens, one sequence each; what is left is another
WARM, FAR = 3, 0.5


def rows(count: int, vocabulary: int) -> list[tuple[list[int], list[int]]]:
    """Prompts of a quarter, and responses."""
    generator = torch.Generator().manual_seed(5)
    lengths = [max(2, int(share * count)) for share in SHARES]
    lengths.append(count - sum(lengths))
    drawn = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return [(ids[: max(1, len(ids) // 4)], ids[max(1, len(ids) // 4) :]) for ids in drawn]


def expected(given: dict, job) -> torch.Tensor:
    """The patched model's, of one rank, of all tokens but the first of each row."""
    from transformers import AutoModelForCausalLM

    import vexact_ops as vx

    model = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.bfloat16).to(given["device"])
    ids = [prompt + response for prompt, response in job.rows]
    cu = torch.tensor([0, *map(len, ids)], dtype=torch.int64).cumsum(0).int()
    with torch.no_grad(), vx.patch.hf(model) as handle:
        packed = torch.tensor([token for row in ids for token in row], dtype=torch.int64, device=given["device"])
        values = handle.logprobs(packed[None], cu_seqlens=cu.to(given["device"]))[0].cpu()
    return torch.cat([row[:-1] for row in values.split([len(row) for row in ids])])


def compare(given: dict, wanted: torch.Tensor, found: list[torch.Tensor]) -> dict:
    """With these. A row's last value is of a token that is not there.

    raises  AssertionError where ours have other bytes, or verl's are others by more than rounding
    """
    got = torch.cat([row.cpu()[:-1].float() for row in found])
    differ, most = int((wanted.view(torch.int32) != got.view(torch.int32)).sum()), (wanted - got).abs().max().item()
    if (differ and given["side"] == "vexact") or most > FAR:
        raise AssertionError(f"ulysses: {differ} of {len(got)} log-probabilities are not those of one rank, by {most}")
    return {"bits": f"{len(got) - differ} of {len(got)}", "max_diff": round(most, 4)}


def kernels() -> str:
    try:
        found = find_spec("flash_attn.ops.triton.cross_entropy") is not None
    except ModuleNotFoundError:
        found = False
    return "flash attention 2, " + ("flash-attn's cross entropy" if found else "log_softmax of one token at a time")


def main(given: dict, rank: int) -> None:
    cuda, ours, folder = given["device"] == "cuda", given["side"] == "vexact", Path(given["folder"])
    if cuda:
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"{given['side']}.store"), given["ranks"])
    backend = "cpu:gloo,cuda:nccl" if cuda else "cpu:gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=given["ranks"])
    from trainers.actor_ranks import Job, batch_of, configs
    from transformers import AutoConfig
    from verl.workers.config import FSDPActorConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils.losses import ppo_loss

    if not ours:
        from . import stock
    job = Job(
        "step",
        given["model"],
        rows(given["packed"], AutoConfig.from_pretrained(given["model"]).vocab_size),
        engine={"ulysses_sequence_parallel_size": given["ranks"], "use_torch_compile": cuda},
        model_config={
            "enable_gradient_checkpointing": True,
            "override_config": {} if ours else {"attn_implementation": stock.NAME},
        },
        data={"use_dynamic_bsz": True, "max_token_len_per_gpu": -(-given["packed"] // given["ranks"])},
    )
    engine = EngineRegistry.new(model_type="language_model", backend="fsdp2", **configs(job))
    engine.initialize()

    def batch():
        return batch_of(job, slice(None), 1.0)

    with engine.eval_mode():
        found = engine.infer_batch(batch())["model_output"]["log_probs"].unbind()
    compared, kept = {}, folder / "expected.pt"  # of our side, which is the first
    if not rank:
        if ours:
            torch.save(expected(given, job), kept)
        compared = compare(given, torch.load(kept), found)
    actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=8, entropy_coeff=0.01)
    loss = functools.partial(ppo_loss, config=actor)

    def step() -> float:
        asked = batch()
        dist.barrier()
        begin = time.perf_counter()
        with engine.train_mode():
            engine.train_batch(asked, loss)
        if cuda:
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return 1e3 * took.item()

    for _ in range(WARM):
        step()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    steps = [step() for _ in range(given["repeats"])]
    if not rank:
        gib = round((torch.cuda.max_memory_allocated() - held) / 2**30, 3) if cuda else None
        told = {"ms": statistics.median(steps), "steps": [round(ms, 1) for ms in steps], "gib": gib, **compared}
        (folder / f"{given['side']}.json").write_text(json.dumps({**told, "kernels": kernels()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]))
