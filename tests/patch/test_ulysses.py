"""Ranks that hold a packed row in equal shares (Ulysses): log-probabilities, entropies, gradients of activations, and
with whole_gradients those of weights, are those of one rank, byte for byte, whatever sequence crosses a cut."""

import pytest
import torch
import torch.distributed as dist
from families import pack, sequences, tiny, world
from transformers import AutoModelForSequenceClassification

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise

pytestmark = pytest.mark.process
LENGTHS = (7, 1, 22, 5, 10, 3)  # 48 rows: cuts at 12, 24 and 36 of four ranks, none of them where a sequence begins
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
FAMILIES = {
    "llama": {},  # two key heads: of four ranks two have none
    "gemma2": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},  # windows, softcaps
    "qwen3_moe": HEADS,
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "cohere": {**HEADS, "use_qk_norm": True},  # norms of heads
    "phi": HEADS,  # an output layer with a bias
}


def packed(device):
    return pack(sequences(LENGTHS, device=device))


def share(group):
    rows = sum(LENGTHS) // dist.get_world_size(group)
    return slice(dist.get_rank(group) * rows, (dist.get_rank(group) + 1) * rows)


def seen(model, embeds, positions, cu, target, temperature, weight):
    """Log-probabilities, entropies, and the gradient of what every layer is given."""
    given, hooks = [], []
    for layer in model.model.layers:
        hooks.append(layer.register_forward_pre_hook(lambda _, args: (args[0].retain_grad(), given.append(args[0]))[1]))
    embeds = embeds.clone().requires_grad_()
    asked = vx.patch.Score(target, None, temperature, True)
    logprobs, entropies = model(
        inputs_embeds=embeds * 1, position_ids=positions, cu_seq_lens_q=cu, use_cache=False, vexact_score=asked
    )
    ((logprobs + entropies * 0.5) * weight).sum().backward()
    for hook in hooks:
        hook.remove()
    return logprobs.detach(), entropies.detach(), embeds.grad[0], *(each.grad[0] for each in given)


def check(name: str, changes: dict, groups: list, device: str, latent: bool = False) -> None:
    model = tiny(name, torch.bfloat16, device=device, **changes).train()
    ids, cu, positions = packed(device)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
    target, rows = ids[0].roll(-1), ids.shape[1]
    g = torch.Generator().manual_seed(3)
    temperature, weight = ((torch.rand(rows, generator=g) + 0.5).to(device) for _ in range(2))
    with vx.patch.hf(model, latent=latent):
        expected = seen(model, embeds, positions, cu, target, temperature, weight)
    for group in groups:
        own = share(group)
        with vx.patch.hf(model, latent=latent, sequence_parallel=group) as handle:
            handle.numerics()  # which no other rank takes part in
            for given in (cu, None) if name == "llama" else (None,):
                got = seen(model, embeds[:, own], positions[:, own], given, target[own], temperature[own], weight[own])
                what = f"{name}, {dist.get_world_size(group)} ranks, cu {given is not None}"
                for number, (a, b) in enumerate(zip(got, expected, strict=True)):
                    assert_bitwise(a, b[own], f"{what}: value {number}")


def learnt(model, ids, positions, target, temperature, weight, tokens=None):
    """Log-probabilities, and the gradient of every weight."""
    model.zero_grad()
    asked = vx.patch.Score(target, None, temperature, True, tokens)
    values = model(input_ids=ids, position_ids=positions, use_cache=False, vexact_score=asked)
    ((values[0] + values[1] * 0.5) * weight).sum().backward()
    return values[0].detach(), {name: p.grad for name, p in model.named_parameters()}


FILLED = 3  # rows at the end of the last rank's share that stand for nothing


def check_weights(name: str, changes: dict, groups: list, device: str, latent: bool = False) -> None:
    """With whole_gradients ranks' gradients of weights add up to those of one rank; without, they do not."""
    model = tiny(name, torch.bfloat16, device=device, **changes).train()
    ids, _, positions = packed(device)
    there = ids.shape[1] - FILLED
    ids[:, there:], positions[:, there:] = 0, torch.arange(FILLED, device=device)
    g = torch.Generator().manual_seed(3)
    temperature, weight = ((torch.rand(ids.shape[1], generator=g) + 0.5).to(device) for _ in range(2))
    weight[there:] = 0
    target = ids[0].roll(-1)
    with vx.patch.hf(model, latent=latent):
        cut = slice(0, there)
        values, expected = learnt(model, ids[:, cut], positions[:, cut], target[cut], temperature[cut], weight[cut])
    for group in groups:
        own = share(group)
        for whole in (True, False) if name == "llama" else (True,):
            with vx.patch.hf(model, latent=latent, sequence_parallel=group, whole_gradients=whole):
                of_share = ids[:, own], positions[:, own], target[own], temperature[own], weight[own], there
                got, grads = learnt(model, *of_share)
            what = f"{name}, {dist.get_world_size(group)} ranks, whole {whole}"
            assert_bitwise(got[: max(0, there - own.start)], values[own], what)
            differ = []
            for each, grad in grads.items():
                total = grad.float()
                dist.all_reduce(total, group=group)
                if not torch.equal(total.view(torch.int32), expected[each].float().view(torch.int32)):
                    differ.append(each)
            assert bool(differ) != whole, f"{what}: {differ}"


def alone_differs(device: str) -> None:
    """The twin that must fail: a share whose rank asks no other one."""
    model = tiny("llama", torch.bfloat16, device=device)
    ids, cu, positions = packed(device)
    own = share(dist.group.WORLD)
    with torch.no_grad(), vx.patch.hf(model):
        asked = vx.patch.Score(ids[0].roll(-1))
        (whole,) = model(ids, cu_seq_lens_q=cu, vexact_score=asked)
        logits = model(ids[:, own], position_ids=positions[:, own], use_cache=False).logits[0]  # a score is refused
        alone = vx.log_softmax(logits).gather(1, asked.target[own, None])[:, 0]
    assert torch.equal(alone, whole[own]) == (dist.get_rank() == 0)


def refused(device: str) -> None:
    ids, cu, positions = packed(device)
    group, own, size = dist.group.WORLD, share(dist.group.WORLD), dist.get_world_size()
    model = tiny("qwen3", torch.bfloat16, device=device)
    asked = vx.patch.Score(ids[0, own])
    with vx.patch.hf(model, sequence_parallel=group) as handle:
        with pytest.raises(ValueError, match="labels: got some under sequence_parallel"):
            model(ids[:, own], labels=ids[:, own])
        with pytest.raises(ValueError, match="logprobs: the model is patched with sequence_parallel"):
            handle.logprobs(ids[:, own])
        with pytest.raises(ValueError, match="sequence_parallel: expected a share of one packed row"):
            model(ids[:, own], attention_mask=torch.ones_like(ids[:, own]))
        with pytest.raises(ValueError, match="use_cache"):
            model(ids[:, own], position_ids=positions[:, own], use_cache=True)
        if device == "cpu":  # where they are looked at
            with pytest.raises(ValueError, match=r"cu_seq_lens_q: got .*expected an ascent from 0 to the 48 tokens"):
                model(ids[:, own], cu_seq_lens_q=torch.tensor([0, 12]), vexact_score=asked)
        with pytest.raises(ValueError, match="sequence_parallel: got another group"):
            vx.patch.hf(model)
        with pytest.raises(ValueError, match="whole_gradients: got another choice"):
            vx.patch.hf(model, sequence_parallel=group, whole_gradients=True)
    with vx.patch.hf(model, sequence_parallel=group, whole_gradients=True):
        some = vx.patch.Score(ids[0, own][:2], torch.arange(2, device=device))
        with pytest.raises(ValueError, match="rows: got some with whole_gradients, expected None"):
            model(ids[:, own], cu_seq_lens_q=cu, vexact_score=some)
    scores = AutoModelForSequenceClassification.from_config(model.config).to(device)
    with pytest.raises(ValueError, match=r"got ranks for a Qwen3ForSequenceClassification, which scores a sequence's"):
        vx.patch.hf(scores, sequence_parallel=group)
    keys = size + 1
    heads = {"linear_num_key_heads": keys, "linear_num_value_heads": keys}
    hybrid = tiny("qwen3_next", torch.bfloat16, device=device, **heads)
    told = pytest.raises(ValueError, match=f"{size} ranks for a gated delta net of {keys} key heads, expected a div")
    with vx.patch.hf(hybrid, sequence_parallel=group), told:
        hybrid(ids[:, own], cu_seq_lens_q=cu, vexact_score=asked)


def a_rank(rank: int, path: str, device: str, ranks: int) -> None:
    torch.set_num_threads(1)
    own = device if device == "cpu" else f"{device}:{rank}"
    with world(device, rank, ranks, dist.FileStore(path, ranks)):
        groups = [dist.group.WORLD]
        if ranks == 4:
            groups.append([dist.new_group(list(half)) for half in ((0, 1), (2, 3))][rank // 2])
        for name, changes in FAMILIES.items():
            check(name, changes, groups, own)
            check_weights(name, changes, groups if name == "llama" else groups[:1], own)
        check("deepseek_v3", {}, groups, own, latent=True)
        check_weights("deepseek_v3", {}, groups[:1], own, latent=True)
        alone_differs(own)
        refused(own)


@pytest.mark.parametrize("device, ranks", [("cpu", 4), ("cuda", 2), ("cuda", 4)], ids=["cpu", "cuda-2", "cuda-4"])
def test_shares_of_a_row_have_the_bits_of_one_rank(device, ranks, tmp_path):
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, torch sees {torch.cuda.device_count()}")
    torch.multiprocessing.spawn(a_rank, (str(tmp_path / "store"), device, ranks), nprocs=ranks)


def test_one_rank_has_all():
    with world("cpu"):
        assert vx.patch.ulysses.Ulysses.of(dist.group.WORLD) is None
        check("llama", {}, [dist.group.WORLD], "cpu")
