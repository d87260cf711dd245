"""The trainer: a Hugging Face model with fp32 masters, on aligned ops or as it comes; on several ranks under FSDP2."""

import contextlib
import itertools
import logging
import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import vexact_ops as vx
from vexact_ops.patch.batch import sent

from ..weights.random import own_generators
from . import digests
from .masters import Masters
from .options import SEQUENCES, Options

log = logging.getLogger(__name__)

FORWARD_TOKENS = 8192  # of a forward, about: of few rows a GPU's kernels are through before others are called
COUNTED = 1 << 26  # weights of which it is counted at once how many have moved
NARROW = 1024  # features up to which a GPU takes twice as many: its kernels have half the work of the next size's


class Diverged(RuntimeError):
    """A gradient is no finite number, and the weights after it are of no use."""


@dataclass
class Sample:
    """One answer, on its way from the engine to a gradient.

    rollout     the engine's log-probability of each of its tokens
    old         what the ratio is taken against: the rollout's where the trainer has the same bits, else its own
    new         the trainer's, from the first forward that trained on it
    entropy     of each token's distribution, then
    """

    prompt_ids: list[int]
    token_ids: list[int]
    rollout: Tensor
    reward: float
    advantage: float = 0.0
    old: Tensor | None = None
    new: Tensor | None = None
    entropy: Tensor | None = None


class Trainer:
    """One rank. All ranks call the same methods in the same order.

    weights   a module with the fp32 masters under the model's names: what is trained, digested and kept
    aligned   False: the stock stack, for contrast. Padded batches, the model's own attention, and log_softmax of its
              logits
    """

    def __init__(self, options: Options, mesh: DeviceMesh, device: torch.device, aligned: bool):
        self.options, self.device, self.aligned = options, device, aligned
        self._mesh, self._dtype = mesh, getattr(torch, options.dtype)
        loaded = options.load("float32", device)
        self.model, self.tokenizer = loaded.model.requires_grad_(True).train(), loaded.tokenizer
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]
        # Masters stay fp32; layers compute in copies rounded to nearest even, which is what the engine is sent.
        self._masters = Masters(self.model, self._dtype) if mesh.size() == 1 else None
        narrow = device.type == "cuda" and self.model.get_input_embeddings().weight.shape[1] <= NARROW
        self._forward_tokens = FORWARD_TOKENS * (2 if narrow else 1)
        self._handle = vx.patch.hf(self.model) if aligned else None  # before FSDP or after it, it makes no difference
        if self._masters is None:
            policy = MixedPrecisionPolicy(param_dtype=self._dtype, reduce_dtype=torch.float32)
            for layer in self.model.base_model.layers:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.weights: torch.nn.Module = self.model if self._masters is None else self._masters
        self._parameters = list(self.weights.parameters())
        self._tree = vx.patch.TreeGradients(self.weights) if options.any_layout else None
        rates = {"lr": options.learning_rate, "weight_decay": options.weight_decay}
        # One kernel where it computes each element alike wherever it lies; a CPU's does not.
        self.optimizer = torch.optim.AdamW(self._parameters, **rates, fused=device.type == "cuda")

    def close(self) -> None:
        if self._handle is not None:
            self._handle.undo()

    def round_masters(self) -> Tensor | None:
        """The masters have other values: rounded, they are what the model computes with. How many of its weights have
        moved, where that is known at once."""
        return None if self._masters is None else self._masters.round()

    def numerics(self) -> dict:
        """What fixes this trainer's bits, for the engine to compare with its own."""
        return vx.numerics(self.device) if self._handle is None else self._handle.numerics(self.device, rounded=True)

    @torch.no_grad()
    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, whole and rounded, one at a time. Every rank has to take every one: each is gathered then."""
        given = set()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if id(tensor) in given:
                continue  # tied: once
            given.add(id(tensor))
            if isinstance(tensor, torch.nn.Parameter):
                tensor = tensor.detach().to(self._dtype)  # half the bytes to gather
            yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def digests(self) -> dict[str, str]:
        """Of each fp32 parameter, see digests.of_parameters. Every rank has to call."""
        return digests.of_parameters(dict(self.weights.named_parameters()), self._mesh.get_group())

    def sha256(self) -> str:
        """Of all of them, see digests.sha256. Every rank has to call."""
        return digests.sha256(self.weights.named_parameters())

    def prepare(self, trained: Sequence[Sample], scored: Sequence[Sample]) -> None:
        """On one rank: compute as with the answers of a step, with such as nobody has given: kernels are compiled,
        verified and loaded then, while an engine starts beside. What has to be timed is left to the step. Nothing is
        left of it: no gradient is kept, no weight moves, and no random number is drawn that others would have had.

        trained, scored   those of the first mini-batch, and those that are scored before
        """
        # without its threads, autograd is where the with block is
        alone = torch.autograd.set_multithreading_enabled(False)
        try:
            with alone, vx.without_races(), vx.must_admit(), own_generators(self.device, self.options.seed):
                for batch in _ends(self._batches(scored, 2)):
                    with torch.no_grad(), self._timed("scored", batch):
                        self._forward(batch, entropy=False)
                for batch in _ends(self._batches(trained)):
                    with self._timed("trained on", batch):
                        self._train(batch, 1)
                torch.nn.utils.clip_grad_norm_(self._parameters, self.options.max_grad_norm)
        except torch.OutOfMemoryError:  # answers may well be shorter
            log.info("no memory to prepare for answers of %d tokens", self.options.max_new_tokens, exc_info=True)
        self.optimizer.zero_grad()
        self.round_masters()
        if self.aligned:
            self.numerics()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # the engine takes its own by now

    @contextlib.contextmanager
    def _timed(self, what: str, batch: Sequence[Sample]) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._wait()
        log.info("%s %d answers that nobody has given, in %.2f s", what, len(batch), time.perf_counter() - begin)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # Log-probabilities

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Log-probabilities of the answers' tokens, before training. In other batches than training's: aligned ones do
        not mind."""
        found = []
        for batch in self._batches(samples, 2):
            values, _ = self._forward(batch, entropy=False)
            found += values.split([len(s.token_ids) for s in batch])
        return [v.cpu() for v in found]

    def _batches(self, samples: Sequence[Sample], parts: int = 1) -> list[Sequence[Sample]]:
        """What one forward each computes, with training's batches in two parts, say: on every rank as many. Of nothing
        none: no answer of a step may be scored twice."""
        if not samples:
            return []
        size = self.options.micro_batch
        if size is None and self.aligned and self._tree is None:
            lengths = [len(s.prompt_ids) + len(s.token_ids) for s in samples]
            count = -(-sum(lengths) * parts // self._forward_tokens)
            if self._mesh.size() > 1:
                most = self._integers([count])
                dist.all_reduce(most, dist.ReduceOp.MAX, self._mesh.get_group())
                count = int(most)
            return cut(samples, lengths, min(count, len(samples)))
        size = max(1, (size or SEQUENCES) // parts)
        return [samples[start : start + size] for start in range(0, len(samples), size)]

    def _forward(self, batch: Sequence[Sample], entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(T,) fp32 log-probabilities at the rollout's temperature of all answers' tokens, and the entropies there.
        Prompts are read and not scored: this is the mask."""
        return self._packed(batch, entropy) if self.aligned else self._padded(batch, entropy)

    def _packed(self, batch: Sequence[Sample], entropy: bool) -> tuple[Tensor, Tensor | None]:
        rows = [s.prompt_ids + s.token_ids for s in batch]
        ends = [0, *itertools.accumulate(map(len, rows))]
        ids = self._integers([token for row in rows for token in row])
        bounds = torch.tensor(ends, dtype=torch.int32)
        # The value at t is of token t + 1: an answer's begin at its prompt's last token.
        places = [t for s, end in zip(batch, ends[1:]) for t in range(end - len(s.token_ids) - 1, end - 1)]
        index, answers = torch.tensor(places, dtype=torch.int64), torch.zeros(ends[-1], dtype=torch.bool)
        answers[index] = True
        options = {"cu_seqlens": bounds, "temperature": self.options.temperature, "return_entropy": entropy}
        found = self._handle.logprobs(ids, where=answers, **options)
        index = sent(index, self.device)
        return (found[0][index], found[1][index]) if entropy else (found[index], None)

    def _padded(self, batch: Sequence[Sample], entropy: bool) -> tuple[Tensor, Tensor | None]:
        rows = [s.prompt_ids + s.token_ids for s in batch]
        width = max(map(len, rows))
        ids = self._integers([row + [0] * (width - len(row)) for row in rows])
        mask = self._integers([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        begins = [i * width + len(s.prompt_ids) - 1 for i, s in enumerate(batch)]
        places = [at for begin, s in zip(begins, batch) for at in range(begin, begin + len(s.token_ids))]
        # all at once: the gradient of each slice for itself would be as large as all logits
        kept = logits.flatten(0, 1).index_select(0, self._integers(places))
        every = torch.log_softmax(kept.float() / self.options.temperature, -1)
        target = self._integers([token for s in batch for token in s.token_ids])
        flat = every if self.options.entropy_coefficient else every.detach()
        spread = -(flat.exp() * flat).sum(-1) if entropy else None
        return every.gather(1, target[:, None])[:, 0], spread

    def _integers(self, values: list) -> Tensor:
        return sent(torch.tensor(values, dtype=torch.int64), self.device)

    # Training

    def step(self, samples: Sequence[Sample], tokens: Sequence[int]) -> dict[str, float]:
        """Trains on this rank's answers, in mini-batches of equal numbers of them.

        tokens    of each mini-batch on all ranks together: a token weighs the same wherever it is
        returns   gradient norm of the last mini-batch, and how many weights, as the engine will hold them, have moved
        raises    Diverged
        """
        counts = self._masters is not None and self._masters.counts and len(tokens) == 1
        before = [] if counts else list(self._held())
        size, seen, moved = len(samples) // self.options.mini_batches, [], None
        for number, total in enumerate(tokens):
            self.optimizer.zero_grad()
            for batch in self._batches(samples[number * size : (number + 1) * size]):
                seen.append((batch, *self._train(batch, total)))
                if self._tree is not None:
                    self._tree.add()
            if self._tree is not None:
                norm = self._tree.finish(self.options.max_grad_norm)
            else:
                norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.options.max_grad_norm)
            self.optimizer.step()
            moved = self.round_masters()
        for batch, *both in seen:  # at the end: until then nobody waits for the device
            lengths = [len(s.token_ids) for s in batch]
            for sample, *values in zip(batch, *(v.cpu().split(lengths) for v in both)):
                sample.new, sample.entropy = values
        if not counts:
            moved = sum((now != old).sum() for now, old in zip(self._held(), before))
        dist.all_reduce(moved, group=self._mesh.get_group())
        norm = (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()
        if not math.isfinite(norm):
            side = "aligned" if self.aligned else "stock"
            raise Diverged(
                f"recipe: {side}: the gradient's norm is {norm}: training has diverged, and what was saved before this "
                f"step is the last that can be used. Expected: a lower learning_rate than {self.options.learning_rate}"
            )
        return {"grad_norm": norm, "moved": moved.item() / sum(p.numel() for p in self._parameters)}

    def _held(self) -> Iterator[Tensor]:
        """Copies of this rank's part of the weights, as the engine will hold them: many parameters in one tensor, for a
        few kernels each of some hundreds would be thousands of launches."""
        kept: list[Tensor] = []
        for p in self._parameters if self._masters is None else self._masters.rounded():
            part = p.detach().to_local() if hasattr(p, "to_local") else p.detach()
            kept.append(part.to(self._dtype).flatten())
            if sum(map(torch.numel, kept)) >= COUNTED:
                yield torch.cat(kept)
                kept.clear()
        if kept:
            yield torch.cat(kept)

    def _train(self, batch: Sequence[Sample], total: int) -> tuple[Tensor, Tensor]:
        """Adds to the gradients. Returns log-probabilities and entropies of all answers' tokens."""
        values, entropies = self._forward(batch, entropy=True)
        old = sent(torch.cat([s.old for s in batch]), self.device)
        weight = torch.tensor([s.advantage for s in batch], dtype=torch.float32)
        lengths = torch.tensor([len(s.token_ids) for s in batch], dtype=torch.int64)
        advantage = sent(weight.repeat_interleave(lengths), self.device)
        loss = policy_loss(values, old, advantage, self.options.clip)
        if self.options.entropy_coefficient:
            loss = loss - self.options.entropy_coefficient * entropies
        ranks = self._mesh.size() if self._tree is None else 1  # FSDP2 takes the mean over ranks, the tree the sum
        (loss.sum() * (ranks / total)).backward()
        return values.detach(), entropies.detach()


def _ends(batches: list) -> list:
    """The first and the last: those between have as many tokens, about."""
    return batches[:1] + batches[1:][-1:]


def cut(samples: Sequence, lengths: Sequence[int], count: int) -> list[Sequence]:
    """In so many parts, none of them empty, each of about as many tokens."""
    ends, bounds = [0, *itertools.accumulate(lengths)], [0]
    for part in range(1, count):
        wanted = ends[-1] * part / count
        near = bisect_left(ends, wanted)
        near -= wanted - ends[near - 1] <= ends[near] - wanted
        bounds.append(min(max(near, bounds[-1] + 1), len(samples) - (count - part)))
    return [samples[begin:end] for begin, end in itertools.pairwise([*bounds, len(samples)])]


def policy_loss(new: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's clipped surrogate of each token, negated. On policy new and old are the same bits: the ratio is exactly 1,
    and the gradient is REINFORCE's."""
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
