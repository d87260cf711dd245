"""One training step of a model of true dimensions and few layers: the trainer's own kernels against aligned ones.

python -m benchmarks training --shape qwen3-8b --layers 4
python -m benchmarks training --shape qwen3-8b,qwen3-30b-a3b --layers 4 --trainer veomni,fsdp2 --objective rl,sft
python -m benchmarks training --shape qwen3-0.6b,qwen3-1.7b --trainer recipe --tokens 16384

On one device. veomni: models of its build_foundation_model in bf16 (at world size 1 it shards nothing), its best
kernels that run here against vx.patch.veomni; fsdp2: transformers' models under fully_shard, fp32 masters and bf16
compute, against vx.patch.hf. Both checkpoint every layer. recipe: a step of `vexact recipe grpo`'s own trainer on
answers of one length in two forwards, against its stock side, and what of a large product's rate it reaches. rl: log-
probabilities and entropies of packed sequences and a step on them; sft: the loss. A step is forward, backward, clipping
and AdamW. Bits come first: the engine samples, and the trainer's log-probabilities of the same tokens must be its own
in bytes.
"""

import argparse
import contextlib
import copy
import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import vexact_ops as vx

from .harness import environment, time_one

TRAINERS, OBJECTIVES = ("veomni", "fsdp2", "recipe"), ("rl", "sft")
SHARES = (0.22, 0.15, 0.11, 0.25, 0.04, 0.085, 0.12)  # of the tokens, one sequence each; what is left is another
_TEMPERATURE = 0.7


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training")
    add = group.add_argument
    add("--trainer", default="veomni,fsdp2", metavar="NAME,NAME", help=f"of: {', '.join(TRAINERS)} (veomni,fsdp2)")
    add("--objective", default="rl,sft", metavar="NAME,NAME", help=f"of: {', '.join(OBJECTIVES)} (rl,sft)")
    add(
        "--moe-implementation",
        default="fused_quack,fused_triton,eager",
        metavar="NAME,NAME",
        help="VeOmni's own kernels for a mixture, in the order in which they are tried; fused_quack tunes itself for "
        "minutes (fused_quack,fused_triton,eager)",
    )
    add("--tokens", type=int, default=8192, metavar="N", help="of a step, in eight packed sequences (8192)")


def run(args: argparse.Namespace) -> Iterator[dict]:
    """One record per shape, trainer and objective."""
    with _world(args.device):
        for shape in args.shape.split(","):
            for name in args.trainer.split(","):
                if name == "recipe":
                    yield _recipe(args, shape)
                else:
                    yield from _measure(args, shape, {"veomni": _VeOmni, "fsdp2": _Fsdp2}[name])
                gc.collect()


@contextlib.contextmanager
def _world(device: str) -> Iterator[None]:
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[device]
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass
class _Packed:
    """Sequences in one row, and what of them a trainer is given."""

    sequences: list[list[int]]
    device: str

    def __post_init__(self):
        lengths = [len(s) for s in self.sequences]
        self.longest = max(lengths)
        self.ids = torch.tensor([[t for s in self.sequences for t in s]], dtype=torch.int64, device=self.device)
        self.cu = torch.tensor([0, *lengths], dtype=torch.int64, device=self.device).cumsum(0).int()
        self.positions = torch.cat([torch.arange(n) for n in lengths])[None].to(self.device)
        self.next = self.ids.roll(-1, 1)

    def arguments(self) -> dict:
        longest = {"max_length_q": self.longest, "max_length_k": self.longest}
        packed = {"cu_seq_lens_q": self.cu, "cu_seq_lens_k": self.cu, **longest, "use_cache": False}
        return {"input_ids": self.ids, "position_ids": self.positions, **packed}


def _random(args, vocabulary: int) -> _Packed:
    generator = torch.Generator().manual_seed(5)
    lengths = [max(1, int(share * args.tokens)) for share in SHARES]
    lengths.append(args.tokens - sum(lengths))
    draw = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    return _Packed(draw, args.device)


class _VeOmni:
    def __init__(self, args, config):
        from veomni.distributed.parallel_state import init_parallel_state

        self.args, self.config = args, copy.deepcopy(config)
        self.config._experts_implementation = None  # transformers' own, which VeOmni's classes refuse
        self.veomni = vx.patch.veomni()
        init_parallel_state(dp_size=1, dp_mode="fsdp2")

    def close(self) -> None:
        from veomni.distributed.parallel_state import clear_parallel_state

        self.veomni.undo()
        clear_parallel_state()

    def _build(self, fields: dict) -> nn.Module:
        from veomni.arguments import MixedPrecisionConfig, OpsImplementationConfig
        from veomni.distributed.torch_parallelize import build_parallelize_model
        from veomni.models.auto import build_foundation_model

        ops = OpsImplementationConfig(**fields, load_balancing_loss_implementation="eager")
        # at world size 1 "cuda" is what VeOmni calls a model that is not sharded
        model = build_foundation_model(
            self.config, None, "bfloat16", init_device=self.args.device, ops_implementation=ops
        )
        return build_parallelize_model(
            model, init_device="cuda", mixed_precision=MixedPrecisionConfig(enable=False)
        ).train()

    def ours(self, weights: dict) -> nn.Module:
        model = self._build(dict(self.veomni.fields))
        model.load_state_dict(weights)
        self.veomni.cover(model)
        return model

    def stock(self, weights: dict, batch: _Packed) -> tuple[nn.Module, str]:
        """On the first of VeOmni's kernels, fastest first, that run here."""
        mixture = getattr(self.config, "num_experts_per_tok", None)
        asked = self.args.moe_implementation.split(",") if mixture else ("fused_triton", "eager")
        refused = []
        for attention in ("flash_attention_4", "flash_attention_3", "flash_attention_2", "sdpa"):
            for moe in asked:
                rest = dict.fromkeys(self.veomni.fields, "eager" if moe == "eager" else "liger_kernel")
                chosen = {**rest, "attn_implementation": attention, "moe_implementation": moe}
                try:
                    model = self._build(chosen)
                    model.load_state_dict(weights)
                    self.rl(model, batch).backward()
                    model.zero_grad(set_to_none=True)
                    experts = f", {moe}" if mixture else ""
                    return model, f"{attention}{experts}, {chosen['rms_norm_implementation']}"
                except Exception as error:
                    refused.append(f"{attention}, {moe}: {type(error).__name__}")
                    model = None
                    gc.collect()
        raise RuntimeError(f"training: none of VeOmni's kernels runs here: {'; '.join(refused)}")

    def score(self, model: nn.Module, batch: _Packed, temperature: float) -> tuple[Tensor, Tensor]:
        asked = {"labels": batch.ids, "shift_labels": batch.next, "return_log_probs": True, "temperature": temperature}
        aux = model(**batch.arguments(), **asked).fused_linear_aux
        return aux.log_probs, aux.entropy

    def rl(self, model: nn.Module, batch: _Packed) -> Tensor:
        return _objective(*self.score(model, batch, 1.0))

    def sft(self, model: nn.Module, batch: _Packed) -> Tensor:
        return model(**batch.arguments(), labels=batch.ids).loss


class _Fsdp2:
    def __init__(self, args, config):
        self.args, self.config, self.aligned = args, config, None

    def close(self) -> None:
        pass

    def _build(self, weights: dict, attention: str = "sdpa") -> nn.Module:
        from transformers import AutoModelForCausalLM

        with torch.device(self.args.device):
            model = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32, attn_implementation=attention)
        model.load_state_dict(weights)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def _shard(self, model: nn.Module) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.args.device, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def ours(self, weights: dict) -> nn.Module:
        model = self._build(weights)
        self.aligned = vx.patch.hf(model)
        return self._shard(model)

    def stock(self, weights: dict, batch: _Packed) -> tuple[nn.Module, str]:
        """With the first attention, fastest first, that runs here, and what else transformers takes by itself."""
        refused = []
        for attention in ("flash_attention_4", "flash_attention_3", "flash_attention_2", "sdpa"):
            try:
                model = self._shard(self._build(weights, attention))
                self.rl(model, batch).backward()
                model.zero_grad(set_to_none=True)
                mixture = getattr(model.config, "num_experts_per_tok", None)
                experts = f", {model.config._experts_implementation or 'eager'} experts" if mixture else ""
                return model, f"{attention}{experts}, torch"
            except Exception as error:
                refused.append(f"{attention}: {type(error).__name__}: {error}")
            model = None
            gc.collect()
        raise RuntimeError(f"training: none of transformers' kernels runs here: {'; '.join(refused)}")

    def score(self, model: nn.Module, batch: _Packed, temperature: float) -> tuple[Tensor, Tensor]:
        if model is self.aligned.model:
            asked = vx.patch.Score(batch.next[0], None, temperature, True)
            return model(**batch.arguments(), vexact_score=asked)
        logits = model(**self._packed(model, batch)).logits[0]
        logits = (logits if temperature == 1 else logits / temperature).float()
        lse = logits.logsumexp(-1)
        values = logits.gather(1, batch.next[0][:, None])[:, 0] - lse
        return values, lse - (logits.softmax(-1) * logits).sum(-1)

    def rl(self, model: nn.Module, batch: _Packed) -> Tensor:
        return _objective(*self.score(model, batch, 1.0))

    def sft(self, model: nn.Module, batch: _Packed) -> Tensor:
        if model is self.aligned.model:
            return model(**batch.arguments(), labels=batch.ids, skip_logits=True).loss
        return model(**self._packed(model, batch), labels=batch.ids).loss

    @staticmethod
    def _packed(model: nn.Module, batch: _Packed) -> dict:
        """Flash attention is told where sequences begin, with the longest as an int: from the positions alone
        transformers makes a tensor of that, which flash-attn-4 refuses. Others see it from the positions."""
        if model.config._attn_implementation.startswith("flash"):
            return batch.arguments()
        return {"input_ids": batch.ids, "position_ids": batch.positions, "use_cache": False}


def _objective(log_probs: Tensor, entropy: Tensor) -> Tensor:
    return (log_probs * 0.37).mean() + 0.01 * entropy.mean()


def _measure(args, shape: str, trainer_class) -> Iterator[dict]:
    from vexact_engine.weights.random import load_random

    model = load_random(shape, device=args.device, layers=args.layers).model
    config, weights = model.config, model.state_dict()
    config.architectures = [type(model).__name__]
    trainer = trainer_class(args, config)
    try:
        ours = trainer.ours(weights)
        bits = _bits(trainer, ours, model, args)
        del model
        batch = _random(args, config.vocab_size)
        stock, kernels = trainer.stock(weights, batch)
        del weights
        for objective in args.objective.split(","):
            step = getattr(trainer, objective)
            race = [_step(model, lambda m, step=step: step(m, batch)) for model in (ours, stock)]
            times, gib = _race(*race, args)
            case = f"{trainer_class.__name__[1:].lower()} {objective}, {args.tokens} tokens"
            yield _record(args, shape, case, times, gib=gib, kernels=kernels, bits=bits)
    finally:
        trainer.close()


class _Recipe:
    """One side of the recipe's trainer, as `_bits` and `_race` ask for it: forwards are as many as it makes by itself
    or, of the stock one, which holds their logits, of so many tokens that those fit beside both sides."""

    PROMPT, FORWARDS, STOCK_TOKENS = 0.25, 2, 4096

    def __init__(self, args, shape: str, aligned: bool):
        from torch.distributed.device_mesh import init_device_mesh

        from vexact_engine.recipes.options import Options
        from vexact_engine.recipes.trainer import Trainer

        self.length = min(256, args.tokens // (2 * self.FORWARDS))
        sequences = args.tokens // self.length
        chosen = {"model": shape, "layers": args.layers, "device": args.device, "learning_rate": 1e-6}
        forwards = max(self.FORWARDS, -(-args.tokens // self.STOCK_TOKENS))
        cut = None if aligned else -(-sequences // forwards)
        options = Options(**chosen, prompts=sequences // 2, samples=2, micro_batch=cut)
        device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        self.trainer = Trainer(options, init_device_mesh(args.device, (1,)), device, aligned)

    def score(self, _, batch: _Packed, temperature: float) -> tuple[Tensor, None]:
        handle = self.trainer._handle
        return handle.logprobs(batch.ids[0], cu_seqlens=batch.cu, temperature=temperature), None

    def samples(self, count: int) -> list:
        from vexact_engine.recipes.trainer import Sample

        generator, prompt = torch.Generator().manual_seed(5), int(self.PROMPT * self.length)
        draw = torch.randint(3, self.trainer.vocab_size, (count, self.length), generator=generator).tolist()
        old = torch.full((self.length - prompt,), -11.0, dtype=torch.float32)
        return [
            Sample(ids[:prompt], ids[prompt:], old, 0.0, advantage=(-1.0) ** i, old=old) for i, ids in enumerate(draw)
        ]

    def step(self) -> Callable[[], None]:
        samples = self.samples(self.trainer.options.prompts * 2)
        total = sum(len(sample.token_ids) for sample in samples)
        return lambda: self.trainer.step(samples, [total])


def _products(model: nn.Module, tokens: int, answers: int) -> float:
    """Operations of a step's products with weights: each token's with all but the table of embeddings and, of a
    mixture's experts, with those that it takes; an answer's with the head. Attention's own are left out."""
    config = model.config.get_text_config()
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    count = answers * head.numel()
    for p in model.parameters():
        if p is not table and p is not head and p.dim() > 1:
            count += tokens * p.numel() * (config.num_experts_per_tok / p.shape[0] if p.dim() == 3 else 1)
    return 6.0 * count


def _recipe(args, shape: str) -> dict:
    from vexact_engine.weights.random import load_random

    sides = [_Recipe(args, shape, aligned) for aligned in (True, False)]
    try:
        trainer = sides[0].trainer
        model = load_random(shape, device=args.device, layers=args.layers).model
        model.load_state_dict(dict(trainer.named_tensors()), strict=False)  # of tied ones there is one
        model.tie_weights()
        bits = _bits(sides[0], trainer.model, model, args)
        del model
        times, gib = _race(*(side.step() for side in sides), args)
        answers = sum(len(sample.token_ids) for sample in sides[0].samples(args.tokens // sides[0].length))
        tflops = _products(trainer.model, args.tokens, answers) / times[0] / 1e9
        rates = {"tflops": round(tflops, 2), "of_product": round(tflops / _product(args.device), 3)}
        ours, stock = (len(side.trainer._batches(side.samples(args.tokens // side.length))) for side in sides)
        case = f"recipe rl, {ours} x {args.tokens // ours} tokens"
        kernels = f"sdpa, torch, padded, {stock} x {args.tokens // stock} tokens"
        return _record(args, shape, case, times, **rates, gib=gib, kernels=kernels, bits=bits)
    finally:
        for side in sides:
            side.trainer.close()


def _record(args, shape: str, case: str, times: list[float], **more) -> dict:
    layers = "" if args.layers is None else f" {args.layers} layers"
    return {
        "room": "training",
        "case": f"{shape}{layers} {case}",
        "backend": "vexact",
        "ours": round(times[0], 2),
        "stock": round(times[1], 2),
        "ratio": round(times[0] / times[1], 4),
        "unit": "ms",
        **more,
        "device": args.device,
        **environment(args.device),
    }


def _product(device: str) -> float:
    """TFLOP/s of a large product of torch's."""
    size = 8192 if device == "cuda" else 512
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2e-12 * size**3 / time_one(lambda: x @ x, device, repeats=10)


def _bits(trainer, ours: nn.Module, model: nn.Module, args) -> str:
    """How many log-probabilities of sampled tokens are the engine's in bytes. Raises AssertionError unless all are."""
    from vexact_engine import Engine, EngineConfig, SamplingParams

    generator = torch.Generator().manual_seed(2)
    vocabulary = model.config.vocab_size
    prompts = [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in (7, 130, 64, 1, 33, 300)]
    config = EngineConfig(
        num_pages=256, max_num_seqs=8, max_num_batched_tokens=512, enforce_eager=True, show_progress=False
    )
    with Engine.from_pretrained(model, device=args.device, config=config) as engine:
        made = engine.generate(
            prompts, SamplingParams(max_new_tokens=24, temperature=_TEMPERATURE, seed=1, ignore_eos=True)
        )
    batch = _Packed([[*p, *c.token_ids] for p, c in zip(prompts, made)], args.device)
    with torch.no_grad():
        got = trainer.score(ours, batch, _TEMPERATURE)[0].flatten()
    differ = compared = 0
    for start, prompt, completion in zip(batch.cu.tolist(), prompts, made):
        first = start + len(prompt) - 1
        theirs = torch.tensor(completion.logprobs, dtype=torch.float32, device=got.device)
        mine = got[first : first + len(theirs)].clone()
        differ += int((mine.view(torch.int32) != theirs.view(torch.int32)).sum())
        compared += len(theirs)
    if differ:
        raise AssertionError(f"training: {differ} of {compared} log-probabilities are not the engine's")
    return f"{compared} of {compared}"


def _race(ours: Callable[[], None], stock: Callable[[], None], args) -> tuple[list[float], dict]:
    """ms of each step, in turns, and the GiB that each needs beside weights and the optimizer's state."""
    steps = ours, stock
    for step in steps * 2:
        step()
    times = [[], []]
    for _ in range(max(3, args.repeats // 3)):
        for own, step in zip(times, steps):
            own.append(1e3 * time_one(step, args.device, repeats=1))
    gib = {} if args.device == "cpu" else {n: round(_peak(s), 3) for n, s in zip(("ours", "stock"), steps)}
    return [statistics.median(own) for own in times], gib


def _step(model: nn.Module, loss: Callable) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        loss(model).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _peak(step: Callable[[], None]) -> float:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**30
