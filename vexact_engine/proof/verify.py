"""The question this library exists for: does the trainer compute the log-probabilities that the rollout reported?

The engine rolls out with continuous batching over a paged cache. Then a Hugging Face model with the same weights,
patched, scores every generated token again as a trainer would: packed sequences, in another order and in other
company, with autograd recording, and with a backward pass run on one of the packed batches. The two lists are compared
bit for bit. Beside it, if asked for, the same question to the stock stack.
"""

import copy
import functools
import gc
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

import vexact_ops as vx

from ..config import EngineConfig, SamplingParams
from ..engine import Engine
from ..progress import Progress, quiet
from ..request import Completion
from ..weights.load import Loaded, load
from .compare import Comparison, Sample, Side, finite
from .machine import environment, now
from .prompts import Prompt, decoder, encode
from .stock import run_stock

# The engine's counts that tell what a run exercised; see scheduler.Stats.
STATISTICS = (
    "steps",
    "mixed_steps",
    "partial_prefills",
    "preemptions",
    "prefix_tokens",
    "prefill_tokens",
    "decode_tokens",
)


class VerifyError(ValueError):
    """The question cannot be asked: nothing to compare, or sampling that hides the log-probabilities."""


@dataclass(frozen=True)
class Gradients:
    """What the backward pass on one packed batch gave. loss is -mean(log-probability) over its generated tokens."""

    sequences: int
    tokens: int
    loss: float
    tensors: int
    missing: tuple[str, ...]
    nonfinite: tuple[str, ...]
    norm: float

    @property
    def finite(self) -> bool:
        return not self.nonfinite and math.isfinite(self.loss)

    def verdict(self) -> str:
        """ "all finite", or which are not."""
        if self.finite:
            return "all finite"
        lost = self.nonfinite or ("the loss",)
        more = f" and {len(lost) - 4} more" if len(lost) > 4 else ""
        return f"NOT FINITE: {', '.join(lost[:4])}{more}"


@dataclass(frozen=True)
class Batches:
    """The same requests again, this many at a time: tokens and log-probabilities against those of the first rollout.

    mismatched_tokens   of `tokens`, those whose id or either of whose log-probabilities has other bits
    prefix_tokens       not computed, because the prefix cache had them
    """

    batch_size: int
    requests: int
    tokens: int
    mismatched_tokens: int
    seconds: float
    prefix_tokens: int = 0

    @property
    def equal(self) -> bool:
        return self.tokens > 0 and self.mismatched_tokens == 0


@dataclass
class Verification:
    """All that `verify` found out.

    aligned      the engine against the patched model; `comparison` has its figures
    batches      the engine against itself at other batch sizes
    warm         the engine against itself with every prompt in its prefix cache
    stock        the stock stack against itself, one Side per dtype asked for
    statistics   of the engine's run: steps, chunks, preemptions, prefix hits
    gradients    of the backward pass
    shown        greedy answers to some of the prompts, compared like the others
    date         when it was done; `command` is the command line that did it, if one did
    """

    title: str
    model: str
    dtype: str
    device: str
    aligned: Side
    stock: list[Side]
    statistics: dict[str, int]
    gradients: Gradients | None
    settings: dict
    numerics: dict
    environment: dict
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)
    batches: list[Batches] = field(default_factory=list)
    warm: Batches | None = None
    shown: Side | None = None
    date: str = field(default_factory=now)
    command: str | None = None

    @property
    def comparison(self) -> Comparison:
        return self.aligned.comparison

    @property
    def failures(self) -> list[str]:
        """What is not as it should be, each by name. Empty: every prompt was answered, and every log-probability has
        the same bits, at every batch size and with a warm cache; each of these compared at least one; and gradients
        are finite."""
        return self._differing + ([self._refusal] if self.unverified else [])

    @property
    def unverified(self) -> int:
        """Prompts that were at fault, so that nothing, or not all, is known of their answers."""
        return len({sample.source for sample in self.aligned.samples if sample.error})

    @property
    def prompts(self) -> int:
        return len({sample.source for sample in self.aligned.samples})

    @property
    def _refusal(self) -> str:
        count, named = self.unverified, self.errors[:3]
        more = [f"and {len(self.errors) - len(named)} more"] if len(self.errors) > len(named) else []
        was = "prompt was" if self.prompts == 1 else "prompts was" if count == 1 else "prompts were"
        return f"{count} of {self.prompts} {was} not verified: {'; '.join(named + more)}"

    @property
    def _differing(self) -> list[str]:
        found = []
        if not self.comparison.tokens:
            found.append("nothing was generated, so nothing was compared")
        elif not self.comparison.equal:
            found.append(f"rollout against training: {self.comparison.verdict()}")
        if self.shown is not None and not self.shown.comparison.equal:
            found.append(f"greedy answers: {self.shown.comparison.verdict()}")
        for batch in self.batches:
            if not batch.equal:
                found.append(
                    f"rollout with {batch.batch_size} prompts at a time: {batch.mismatched_tokens} of {batch.tokens} "
                    "tokens differ"
                )
        if self.warm is not None and not self.warm.prefix_tokens:
            found.append("warm cache: none of the prompts was in it any more, so nothing warm was compared")
        elif self.warm is not None and not self.warm.equal:
            found.append(f"warm cache: {self.warm.mismatched_tokens} of {self.warm.tokens} tokens differ")
        if self.gradients is not None and not self.gradients.finite:
            found.append(f"gradients: {self.gradients.verdict()}")
        return found

    @property
    def equal(self) -> bool:
        return not self.failures

    def verdict(self) -> str:
        """The line that says it, whatever it is: "0 of 812 log-probabilities differ (max |diff| 0.0, KL 0.0)"; "NOT
        EQUAL: " and all that failed; or "NOT VERIFIED: " and which prompts, where all others are equal."""
        if self.equal:
            return self.comparison.verdict()
        if self._differing:
            return f"NOT EQUAL: {'; '.join(self.failures)}"
        return f"NOT VERIFIED: {self._refusal}. Of the others, {self.comparison.verdict()}"

    def __repr__(self) -> str:
        return f"<Verification of {self.model}, {self.dtype} on {self.device}: {self.verdict()}>"

    def _repr_html_(self) -> str:
        from .report import fragment

        return fragment(self)

    def to_json(self) -> dict:
        """The figures for JSON: "aligned" and "stock" with the same four keys, and the rest."""
        same_dtype = [side for side in self.stock if side.dtype == self.dtype] or self.stock
        return finite(
            {
                "aligned": self.comparison.to_json(),
                "stock": same_dtype[0].comparison.to_json() if same_dtype else None,
                "stock_by_dtype": {side.dtype: side.comparison.to_json() for side in self.stock},
                "equal": self.equal,
                "verdict": self.verdict(),
                "failures": self.failures,
                "batches": [asdict(batch) for batch in self.batches],
                "warm": asdict(self.warm) if self.warm else None,
                "model": self.model,
                "dtype": self.dtype,
                "device": self.device,
                "prompts": self.prompts,
                "unverified": self.unverified,
                "seconds": round(self.seconds, 2),
                "numerics": self.numerics,
                "timings": {"aligned": self.aligned.seconds} | {f"stock {s.dtype}": s.seconds for s in self.stock},
                "statistics": self.statistics,
                "gradients": asdict(self.gradients) if self.gradients else None,
                "settings": self.settings,
                "environment": self.environment,
                "errors": self.errors,
                "samples": [sample.to_json() for sample in self.aligned.samples],
                "shown": self.shown and self.shown.comparison.to_json(),
                "shown_samples": [sample.to_json() for sample in self.shown.samples] if self.shown else [],
            }
        )


def verify(
    source,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: str | None = None,
    config: EngineConfig | None = None,
    chat: bool = False,
    stock: Sequence[str] = (),
    stock_prompts: int | None = None,
    stock_new_tokens: int | None = None,
    pack_tokens: int | None = None,
    batch_sizes: Sequence[int] = (),
    warm: bool = False,
    share_weights: bool = False,
    show: Sequence[int] = (),
    seed: int = 0,
    title: str = "Rollout against training",
    progress: Progress = quiet,
    rollout: Loaded | None = None,
) -> Verification:
    """Roll out, re-score in training form, compare.

    source         a Loaded model, or what weights.load.load takes: a path, a Hub name, a Hugging Face causal LM.
                   `device` and `dtype` are for loading. The model is left as it was: unpatched
    prompts        a prompt that is itself at fault (too long, an unknown id) is reported and the others go on; the
                   verdict is not "equal" then
    params         one for all prompts or one for each; where the seed is None, prompt i gets `seed` + i
    stock          dtypes in which the stock stack answers the same question. `stock_prompts` limits how many prompts,
                   and `stock_new_tokens` their answers' length, which is the longest one's otherwise
    pack_tokens    tokens in one packed training batch; by default a third of all, at most 4096
    batch_sizes    roll out again, so many prompts at a time (eight prompts at least, all at most), each computed anew,
                   and compare
    warm           roll out once more while the prefix cache knows the prompts, and compare
    share_weights  the engine runs the model itself, before it trains, instead of a copy: for models that take more than
                   half of a device's memory
    rollout        of an engine in stages or ranks: the same model as load_in_stages gives it
    show           prompts, by index, that are answered greedily too, to be read: what is drawn at temperature 1 often
                   makes less sense. Compared apart, at temperature 1, which has to be the others' then
    returns        a Verification
    raises         VerifyError where nothing was generated at all, or where no prompt is longer than a page and `warm`
                   is asked for; ValueError on the seed; PromptError for prompts that cannot be encoded
    """
    begin = time.perf_counter()
    if not 0 <= seed < 2**64:
        raise ValueError(f"verify: seed: got {seed}, expected 0 to 2**64 - 1")
    loaded = source if isinstance(source, Loaded) else load(source, device=device, dtype=dtype)
    model, tokenizer = loaded.model, loaded.tokenizer
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    device = next(model.parameters()).device
    config = config or EngineConfig(show_progress=False)
    each = _params(params or SamplingParams(), len(prompts), seed)
    prompt_ids = encode(prompts, tokenizer, chat=chat)
    if warm:
        check_warm(config, max(map(len, prompt_ids), default=0))
    temperatures = {p.temperature for p in each}
    if len(temperatures) > 1:
        raise VerifyError(f"verify: params: got temperatures {sorted(temperatures)}, expected one for all prompts")
    if show and temperatures - {0.0, 1.0}:
        raise VerifyError(f"verify: show: got {list(show)} at temperature {temperatures.pop()}, expected 1")

    progress("rollout", 0, len(prompts))
    started = time.perf_counter()
    samples, statistics, first, warmed, batches, shown = _rollout(
        loaded, config, prompts, prompt_ids, each, batch_sizes, warm, share_weights, show, progress, rollout
    )
    seconds = {"rollout": first, "again": round(time.perf_counter() - started - first, 3)}
    if not any(sample.token_ids for sample in samples):
        why = next((sample.error for sample in samples if sample.error), "every answer was empty")
        raise VerifyError(f"verify: no token was generated, so there is nothing to compare: {why}")

    started = time.perf_counter()
    gradients = rescore(
        model,
        [sample for sample in samples + shown if sample.token_ids],
        temperature=temperatures.pop(),
        options=config.patch_options,
        pack_tokens=pack_tokens,
        seed=seed,
        progress=progress,
    )
    seconds["rescore"] = round(time.perf_counter() - started, 3)

    sides = []
    usable = [list(ids) for ids in dict.fromkeys(tuple(s.prompt_ids) for s in samples if not s.error)][:stock_prompts]
    for stock_dtype in stock if usable else ():
        sides.append(
            run_stock(
                model,
                usable,
                dtype=stock_dtype,
                max_new_tokens=stock_new_tokens or max(p.max_new_tokens for p in each),
                temperature=each[0].temperature,
                top_k=each[0].top_k,
                top_p=each[0].top_p,
                min_p=each[0].min_p,
                eos_token_ids=loaded.eos_token_ids,
                seed=seed,
                progress=progress,
            )
        )
    return Verification(
        title=title,
        model=loaded.name,
        dtype=dtype,
        device=str(device),
        aligned=Side("aligned", dtype, samples, seconds),
        stock=sides,
        statistics=statistics,
        gradients=gradients,
        settings={"engine": asdict(config), "sampling": asdict(each[0]) | {"seed": seed}, "chat": chat},
        numerics=vx.numerics(
            device,
            kv_segment=config.kv_segment,
            latent_attention=config.latent_attention or None,
            longrope=config.longrope,
        ),
        environment=environment(device),
        seconds=time.perf_counter() - begin,
        errors=list(dict.fromkeys(f"{sample.source}: {sample.error}" for sample in samples if sample.error)),
        batches=batches,
        warm=warmed,
        shown=Side("greedy", dtype, shown) if show else None,
    )


def check_warm(config: EngineConfig, longest: int) -> None:
    """Whether a prefix cache could keep anything of prompts that have `longest` tokens at most. VerifyError if not."""
    if not config.enable_prefix_cache:
        raise VerifyError("verify: warm: got True, but the configuration has no prefix cache")
    if longest <= config.page_size:  # its last token is always computed
        raise VerifyError(
            f"verify: warm: no prompt fills a page that the prefix cache could keep: the longest has {longest} tokens, "
            f"expected more than page_size, {config.page_size}"
        )


def _params(params, count: int, seed: int) -> list[SamplingParams]:
    each = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(each) != count:
        raise VerifyError(f"verify: params: got {len(each)}, expected one for all or one for each of {count} prompts")
    return [p if p.seed is not None else replace(p, seed=(seed + i) % 2**64) for i, p in enumerate(each)]


def _rollout(
    loaded, config, prompts, prompt_ids, params, batch_sizes, warm, share_weights, show, progress, rollout
) -> tuple[list[Sample], dict[str, int], float, Batches | None, list[Batches], list[Sample]]:
    """Generate; on a copy of the model unless told otherwise, so that engine and trainer share no memory, let alone a
    patched module."""
    started = time.perf_counter()
    device = next(loaded.model.parameters()).device
    model = loaded.model if share_weights or rollout else copy.deepcopy(loaded.model)
    with Engine(rollout or replace(loaded, model=model), config) as engine:
        completions = engine.generate(prompt_ids, params)
        statistics = engine_statistics(engine)
        seconds = round(time.perf_counter() - started, 3)
        warmed, batches, greedy = None, [], []
        if warm:
            progress("rollout, warm", 0, 1)
            warmed = _in_batches(engine, prompt_ids, params, completions, len(prompt_ids))
        if show:
            progress("rollout, greedy", 0, 1)
            greedy = engine.generate([prompt_ids[i] for i in show], [replace(params[i], temperature=0.0) for i in show])
        for number, size in enumerate(batch_sizes):
            progress(f"rollout, {size} at a time", number, len(batch_sizes))
            engine.reset_prefix_cache()
            batches.append(_in_batches(engine, prompt_ids, params, completions, size))
    del engine, model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    decode = functools.cache(lambda *ids: decoder(loaded.tokenizer)(ids))

    def samples(chosen: Sequence[int], done: Sequence[Completion]) -> list[Sample]:
        sources = [(prompts[i], prompt_ids[i]) for i in chosen for _ in range(params[i].n)]
        return [_sample(prompt, ids, completion, decode) for (prompt, ids), completion in zip(sources, done)]

    made = samples(range(len(prompts)), completions)
    return made, statistics, seconds, warmed, batches, samples(show, greedy)


def _sample(prompt: Prompt, ids: list[int], completion: Completion, decode: Callable[..., str]) -> Sample:
    return Sample(
        source=prompt.source,
        prompt_text=prompt.shown,
        prompt_ids=ids,
        token_ids=list(completion.token_ids),
        rollout=torch.tensor(completion.logprobs, dtype=torch.float32),
        text=decode(*completion.token_ids),
        finish_reason=completion.finish_reason,
        error=completion.error if completion.finish_reason == "error" else None,
        pieces=[decode(token) for token in completion.token_ids],
    )


def _in_batches(engine, prompt_ids, params, expected, size: int) -> Batches:
    count = min(len(prompt_ids), max(size, 8))
    started, known_before = time.perf_counter(), engine.stats.prefix_tokens
    done = []
    for begin in range(0, count, size):
        chosen = slice(begin, min(begin + size, count))
        done += engine.generate(prompt_ids[chosen], params[chosen])
    seconds = time.perf_counter() - started
    tokens = mismatched = 0
    for ours, first in zip(done, expected):
        tokens += len(first.token_ids)
        most, least = (f(len(ours.token_ids), len(first.token_ids)) for f in (max, min))
        a, b = (torch.tensor([c.logprobs[:least], c.raw_logprobs[:least]], dtype=torch.float32) for c in (ours, first))
        ids = (torch.tensor(c.token_ids[:least], dtype=torch.int64) for c in (ours, first))
        differs = vx.different(a, b).any(0) | vx.different(*ids)
        mismatched += most - least + int(differs.sum())
    return Batches(size, count, tokens, mismatched, round(seconds, 3), engine.stats.prefix_tokens - known_before)


def engine_statistics(engine) -> dict[str, int]:
    """The counts of the engine's run so far."""
    stats = engine.stats
    return {name: getattr(stats, name) for name in STATISTICS}


@dataclass(frozen=True)
class Pack:
    """One packed training batch: sequences end to end in one row.

    ids         (1, T) int64
    cu_seqlens  (N + 1,) int32
    members     (sample, offset of its first token) each
    """

    ids: Tensor
    cu_seqlens: Tensor
    members: tuple[tuple[Sample, int], ...]


def pack(samples: Sequence[Sample], pack_tokens: int, seed: int, device="cpu") -> list[Pack]:
    """The samples shuffled and laid end to end, at most `pack_tokens` in a batch unless one sequence is longer."""
    order = list(samples)
    random.Random(seed).shuffle(order)
    groups, room = [], 0
    for sample in order:
        length = len(sample.prompt_ids) + len(sample.token_ids)
        if not groups or length > room:
            groups.append([])
            room = pack_tokens
        groups[-1].append(sample)
        room -= length
    packs = []
    for group in groups:
        ids, ends, members = [], [0], []
        for sample in group:
            members.append((sample, len(ids)))
            ids += sample.prompt_ids + sample.token_ids
            ends.append(len(ids))
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
        packs.append(Pack(torch.tensor([ids], dtype=torch.int64, device=device), cu_seqlens, tuple(members)))
    return packs


def rescore(
    model,
    samples: Sequence[Sample],
    *,
    temperature: float = 1.0,
    options: Mapping[str, Any] = MappingProxyType({}),
    pack_tokens: int | None = None,
    seed: int = 0,
    progress: Progress = quiet,
) -> Gradients:
    """Fill every sample's `trainer` with the patched model's log-probabilities, in training form.

    model     patched for the time, in training mode, every parameter requiring its gradient; then as it was
    options   of the patch
    returns   what the backward pass gave on the packed batch with the most sequences
    raises    patch.hf's UnsupportedModule, for dropout among other things
    """
    lengths = [len(sample.prompt_ids) + len(sample.token_ids) for sample in samples]
    if pack_tokens is None:
        pack_tokens = min(4096, max(max(lengths), math.ceil(sum(lengths) / 3)))
    packs = pack(samples, pack_tokens, seed, next(model.parameters()).device)
    with_backward = max(packs, key=lambda p: len(p.members))
    training, wanted = model.training, {p: p.requires_grad for p in model.parameters()}
    model.train()
    model.requires_grad_(True)
    gradients = None
    try:
        with vx.patch.hf(model, **options) as handle, torch.enable_grad():
            for number, batch in enumerate(packs):
                progress("re-score", number, len(packs))
                picked = _score(handle, batch, temperature)
                for (sample, _), scores in zip(batch.members, picked):
                    sample.trainer = scores.detach().float().cpu()
                if batch is with_backward:
                    gradients = _backward(model, batch, picked)
                del picked
            progress("re-score", len(packs), len(packs))
    finally:
        model.zero_grad(set_to_none=True)
        model.train(training)
        for parameter, value in wanted.items():
            parameter.requires_grad_(value)
    return gradients


def _score(handle, batch: Pack, temperature: float) -> list[Tensor]:
    """Log-probabilities of each member's generated tokens, differentiable."""
    scores = handle.logprobs(batch.ids, cu_seqlens=batch.cu_seqlens, temperature=temperature or 1.0)[0]
    picked = []
    for sample, offset in batch.members:
        first = offset + len(sample.prompt_ids) - 1  # the position that predicts the first generated token
        picked.append(scores[first : first + len(sample.token_ids)])
    return picked


def _backward(model, batch: Pack, picked: list[Tensor]) -> Gradients:
    """Each gradient is looked at and dropped as soon as it is whole: all of them together are as large as the model."""
    named, squares = dict(model.named_parameters()), {}

    def look(parameter: Tensor) -> None:
        squares[id(parameter)] = _square_sum(parameter.grad)
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(look) for parameter in named.values()]
    try:
        loss = -torch.cat(picked).mean()
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    found = {name: squares[id(p)].item() for name, p in named.items() if id(p) in squares}
    return Gradients(
        sequences=len(batch.members),
        tokens=batch.ids.numel(),
        loss=loss.item(),
        tensors=len(found),
        missing=tuple(name for name in named if name not in found),
        # the square of a finite number of these types is finite in float64
        nonfinite=tuple(name for name, square in found.items() if not math.isfinite(square)),
        norm=math.sqrt(sum(found.values())),
    )


def _square_sum(gradient: Tensor) -> Tensor:
    """In float64, a piece at a time: the experts of a layer are gigabytes."""
    pieces = gradient.detach().flatten().split(1 << 24)
    return torch.stack([piece.double().square().sum() for piece in pieces]).sum()
