"""A few steps of a trainer on patched models, as FSDP2's users wrap them: fp32 masters, bf16 inside, one rank or two.

Each rank trains on a batch of its own and saves what it saw: log-probabilities, gradient norms, the weights after it.
"""

from dataclasses import dataclass

import torch
from families import pack, sequences, tiny, world
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import vexact_ops as vx
from vexact_ops.patch import state

DTYPE = torch.bfloat16
LENGTHS = (7, 1, 11), (3, 14), (9, 2, 5), (8, 8)  # two micro-batches a rank
STEPS = 2


@dataclass(frozen=True)
class Case:
    family: str = "qwen3"
    tied: bool = False
    own_units: bool = True  # of the output layer and the embedding, as verl has them; else both lie in the root
    offload: bool = False
    deferred: bool = False  # gradients meet after the last micro-batch alone
    kept: bool = False  # weights stay whole from forward to backward, and between micro-batches
    checkpointing: str | None = None  # or reentrant, not reentrant
    rows: str = "lengths"  # cu_seq_lens_q and _k; or positions: position_ids that restart
    patched: bool = True
    fused: bool = False  # each layer in one node, on a CPU too


CASES = {
    "qwen3": Case(),
    "tied": Case(tied=True, own_units=False),
    "qwen3_moe": Case("qwen3_moe", fused=True),
    "deepseek_v3": Case("deepseek_v3", rows="positions"),
    "gemma2": Case("gemma2", own_units=False),
    "root": Case(own_units=False, rows="positions", fused=True),
    "deferred": Case(deferred=True),
    "deferred-kept": Case(deferred=True, kept=True, rows="positions"),
    "offloaded": Case(offload=True, fused=True),
    "offloaded-deferred": Case(offload=True, deferred=True, rows="positions"),
    "checkpointed": Case(checkpointing="not reentrant", fused=True),
    "checkpointed-reentrant": Case(checkpointing="reentrant", rows="positions", fused=True),
    "moe-of-all": Case("qwen3_moe", offload=True, deferred=True, checkpointing="not reentrant", rows="positions"),
    "stock": Case(patched=False),
}


def model_of(case: Case, dtype: torch.dtype, device="cpu") -> nn.Module:
    return tiny(case.family, dtype, device=device, tie_word_embeddings=case.tied).train()


def micro_batches(rank: int) -> list[list[torch.Tensor]]:
    return [sequences(lengths, 7 * rank + i) for i, lengths in enumerate(LENGTHS[2 * rank : 2 * rank + 2])]


def shard(case: Case, model: nn.Module, mesh) -> None:
    options = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32),
        "reshard_after_forward": not case.kept,
    }
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for layer in model.model.layers:
        fully_shard(layer, **options)
    if case.own_units:
        for unit in (model.model.embed_tokens, model.lm_head):
            fully_shard(unit, **options)
    fully_shard(model, **options)


def score(case: Case, model: nn.Module, seqs: list[torch.Tensor], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of every token after it, and entropy, of a packed row."""
    ids, cu, positions = (t.to(device) for t in pack(seqs))
    longest = max(len(s) for s in seqs)
    how = {"position_ids": positions}
    if case.rows == "lengths":
        how = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    target = ids[0].roll(-1)
    if case.patched:
        asked = vx.patch.Score(target, return_entropy=True)
        with torch.autocast(device.type, DTYPE):
            return model(ids, use_cache=False, vexact_score=asked, **how)
    logits = model(ids, position_ids=positions, use_cache=False).logits[0].float()
    every = logits.log_softmax(-1)
    return every.gather(1, target[:, None])[:, 0], -(every.exp() * every).sum(-1)


def run(case: Case, rank: int, mesh, device) -> dict:
    """Train from the start, and say what was seen."""
    state.FUSE_ON_CPUS = case.fused
    model = model_of(case, torch.float32, device)
    handle = vx.patch.hf(model) if case.patched else None
    if case.checkpointing:
        reentrant = case.checkpointing == "reentrant"
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:  # it passes gradients through inputs that want one
            model.enable_input_require_grads()
    shard(case, model, mesh)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    batches, seen, norms = micro_batches(rank), [], []
    for _ in range(STEPS):
        seen.append([])
        for i, seqs in enumerate(batches):
            last = i == len(batches) - 1
            model.set_requires_gradient_sync(last or not case.deferred)
            if case.kept:
                model.set_reshard_after_backward(last)
            logprobs, entropy = score(case, model, seqs, device)
            seen[-1].append(logprobs.detach().cpu())
            sign = torch.arange(len(logprobs), device=device) % 3 - 1.0
            (-(logprobs * sign).mean() - 0.01 * entropy.mean()).backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.5)).cpu())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = [score(case, model, seqs, device)[0].cpu() for seqs in batches]
    if case.fused:
        assert [layer.forward.vexact_fused.verified for layer in model.model.layers] == [True, True]
    weights = {name: whole(value).cpu() for name, value in model.state_dict().items()}
    if handle is not None:
        handle.undo()
    return {"seen": seen, "norms": norms, "after": after, "weights": weights}


def whole(value: torch.Tensor) -> torch.Tensor:
    if not hasattr(value, "full_tensor"):
        return value.clone()
    if value.device.type != value.device_mesh.device_type:
        value = value.to(value.device_mesh.device_type)
    return value.full_tensor()


def a_rank(rank: int, ranks: int, kind: str, folder: str, names: list[str]) -> None:
    """Every case twice, in a process of its own."""
    torch.set_num_threads(1)
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    store = torch.distributed.FileStore(f"{folder}/store", ranks)
    with world(kind, rank, ranks, store) as mesh:
        found = {name: [run(CASES[name], rank, mesh, device) for _ in range(2)] for name in names}
    torch.save(found, f"{folder}/rank{rank}.pt")
