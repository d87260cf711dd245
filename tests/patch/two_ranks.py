"""FSDP2 over several ranks, each with a batch of its own: the bits of a run on one device.

torchrun --nproc-per-node 2 tests/patch/two_ranks.py                                   # every family, tiny
torchrun --nproc-per-node 2 tests/patch/two_ranks.py --shape qwen3-30b-a3b --layers 2  # layers of true dimensions

Each rank first runs the whole model alone on every rank's batch, so it knows what is to come out: its own
log-probabilities, and the mean of all gradients in fp32, which two ranks cannot add in two orders.
"""

import argparse

import torch
import torch.distributed as dist
from families import gradients, pack, sequences, tiny, world
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise

RANKS = 2
LENGTHS = [(7, 1, 11), (3, 14)]
LONGER = [(700, 1, 330), (64, 900)]  # for layers of true dimensions
TINY = ("llama", "qwen3_moe", "deepseek_v3")


def shard(model, mesh, **options):
    for layer in model.model.layers:
        dtype = layer.post_attention_layernorm.weight.dtype
        for (
            part
        ) in layer.modules():  # FSDP2 wants one dtype in a unit: routers that stay in fp32 are units of their own
            if any(p.dtype != dtype for p in part.parameters(recurse=False)):
                fully_shard(part, mesh=mesh, **options)
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def trained(model, handle, device, lengths=LENGTHS[0], seed=1):
    """Log-probabilities of a packed batch, and every gradient of their sum."""
    ids, cu, _ = pack(sequences(lengths, seed, device=device))
    values = handle.logprobs(ids, cu_seqlens=cu)
    return values.detach(), gradients(model, values.sum())


def trained_sharded(model, handle, device, lengths=LENGTHS[0], seed=1):
    model.zero_grad()
    ids, cu, _ = pack(sequences(lengths, seed, device=device))
    values = handle.logprobs(ids, cu_seqlens=cu)
    values.sum().backward()
    return values.detach(), {name: whole(p.grad) for name, p in model.named_parameters()}


def check(model, mesh, rank: int, device: str, batches=LENGTHS) -> None:
    """Raises AssertionError where a rank's log-probabilities, or the gradients they all get, have other bits."""
    with vx.patch.hf(model) as handle:
        alone = [trained(model, handle, device, lengths, seed) for seed, lengths in enumerate(batches)]
        values = alone[rank][0]
        expected = {
            name: sum((grads[name].float() for _, grads in alone[1:]), first.float()).div_(RANKS).to(first.dtype)
            for name, first in alone[0][1].items()
        }
        del alone
        shard(model, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        got, grads = trained_sharded(model, handle, device, batches[rank], rank)
    assert_bitwise(got, values, f"rank {rank}: log-probabilities")
    assert grads.keys() == expected.keys()
    for name, gradient in grads.items():
        assert_bitwise(gradient, expected[name], f"rank {rank}: {name}")


def one_of_two(rank: int, device: str, path: str, names=("llama", "qwen3_moe")) -> None:
    """A rank that talks through a file."""
    torch.set_num_threads(1)
    own = device if device == "cpu" else f"{device}:{rank}"
    with world(device, rank, RANKS, dist.FileStore(path, RANKS)) as mesh:
        for name in names:
            check(tiny(name, torch.bfloat16, device=own).train(), mesh, rank, own)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", help="layers of a known model's true dimensions instead of tiny families")
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    store, rank, size = next(dist.rendezvous("env://"))
    if size != RANKS:
        raise SystemExit(f"two_ranks: got {size} ranks, expected {RANKS}")
    own = args.device if args.device == "cpu" else f"{args.device}:{rank}"
    with world(args.device, rank, size, store) as mesh:
        for name in [args.shape] if args.shape else TINY:
            if args.shape:
                from vexact_engine.weights.random import load_random

                model = load_random(name, device=own, layers=args.layers).model.requires_grad_(True).train()
            else:
                model = tiny(name, torch.bfloat16, device=own).train()
            check(model, mesh, rank, own, LONGER if args.shape else LENGTHS)
            if rank == 0:
                print(f"{name}: log-probabilities of {size} ranks and the mean of their gradients: equal bits")  # noqa: T201


if __name__ == "__main__":
    main()
