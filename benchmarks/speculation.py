"""What drafted tokens are worth: seconds of generated tokens with them over those without, and that no byte differs.

python -m benchmarks speculation --shape qwen3-8b --batch 1,16,64,256
python -m benchmarks speculation --device cpu --layers 4
python -m benchmarks speculation --shape qwen3-8b --batch 1,16,64 --draft-layers 4
python -m benchmarks speculation --shape qwen3-8b --batch 16 --case 70%

Each batch generates its answers without drafts, and again with those handed in, of which a share of the tokens is
another one: --right of them are right, and none. Which ones are wrong is drawn --draws times, for a batch waits for its
unluckiest sequence: the record has the mean, and the ratio of each draw. Then eight samples of one prompt, whose drafts
are their own text and that of each other, greedy and at 0.7. With --draft-layers a model drafts: the first so many
layers, where the others add nothing to the residual stream, so that it is always right, and one with random weights,
which never is. The seconds are those of all tokens but the first, the second time of two.
"""

import argparse
import copy
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation
from vexact_engine.weights.load import Loaded

from .engine import load
from .harness import environment
from .output import Refused

DEFAULTS = {
    "cpu": {"batch": "1,4", "prompt": 64, "new": 32},
    "cuda": {"batch": "1,16,64,256", "prompt": 512, "new": 256},
}
SAMPLES, TEMPERATURES = 8, (0.0, 0.7)
FIRST, RANDOM = "first layers", "random layers"
ROUNDS = 2  # the first meets sizes of steps that were not there yet


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    add = group.add_argument
    add("--right", type=_share, default=0.7, metavar="SHARE", help="tokens of a draft that are right (0.7)")
    add("--draws", type=int, default=8, metavar="N", help="of which tokens of a draft are wrong (8)")
    add("--drafted", type=int, default=8, metavar="N", help="tokens of a sequence in a step, at most (8)")
    add("--draft-layers", type=int, metavar="N", help="also: a model of so many layers drafts (none)")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a share from 0 to 1")
    return share


@dataclass(frozen=True)
class _Ask:
    """Prompts, and how each is sampled.

    sources   where drafts come from: texts, or "first layers" and "random layers" of a model
    right     of "given" ones
    """

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    sources: str
    right: float | None = None

    def drafted(self, answers: list, rng: random.Random, vocabulary: int) -> list[SamplingParams]:
        if self.right is None:
            return self.params
        return [
            replace(params, draft=[_spoilt(c.token_ids, self.right, rng, vocabulary)])
            for params, c in zip(self.params, answers)
        ]


def _spoilt(tokens, right: float, rng: random.Random, vocabulary: int) -> list[int]:
    """`right` of them, each by itself; the others are other ones."""
    return [t if rng.random() < right else (t + rng.randrange(1, vocabulary)) % vocabulary for t in tokens]


def run(args: argparse.Namespace) -> Iterator[dict]:
    """A record for each way to ask: `plain` and `ours` in milliseconds per token of a sequence, `ratio`, `differ`."""
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if not _asked(args, vocabulary=1):
        raise Refused(f"--case: got {args.case!r}, which no case has in its name")
    for source in [args.model] if args.model else args.shape.split(","):
        for dtype in args.dtype.split(",")[:1]:
            yield from _model(args, source, dtype)


def _asked(args: argparse.Namespace, vocabulary: int) -> list[_Ask]:
    rng = random.Random(args.seed)

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(vocabulary) for _ in range(args.prompt)] for _ in range(count)]

    base = SamplingParams(max_new_tokens=args.new, ignore_eos=True)
    batches, found = [int(text) for text in str(args.batch).split(",")], []
    for batch in batches:
        params = [replace(base, seed=seed) for seed in range(batch)]
        asked = prompts(batch)
        found.append(_Ask(f"{batch} given, {args.right:.0%} right", asked, params, "given", args.right))
        if batch == max(batches):
            found.append(_Ask(f"{batch} given, none right", asked, params, "given", 0.0))
        if args.draft_layers is not None:
            found += [_Ask(f"{batch} by {by}", asked, params, by) for by in (FIRST, RANDOM)]
    for temperature in TEMPERATURES:
        params = replace(base, n=SAMPLES, temperature=temperature, seed=0)
        found.append(_Ask(f"{SAMPLES} samples at {temperature}", prompts(1), [params], "samples"))
    return [ask for ask in found if args.case is None or args.case in ask.name]


def _model(args: argparse.Namespace, source: str, dtype: str) -> Iterator[dict]:
    loaded, name, weights = load(args, source, dtype)
    config = EngineConfig(show_progress=False)
    if args.draft_layers is not None:
        _empty(loaded, args.draft_layers)
    with Engine(loaded, config) as engine:
        asked, met = _asked(args, engine.vocab_size), {}
        for ask in asked:  # the same prompts are asked in several ways
            if id(ask.prompts) not in met:
                met[id(ask.prompts)] = _timed(engine, ask.prompts, ask.params)
        plain = [met[id(ask.prompts)] for ask in asked]
        vocabulary = engine.vocab_size
    for drafts in dict.fromkeys(ask.sources for ask in asked):
        how: dict = {"sources": (drafts,)}
        if drafts in (FIRST, RANDOM):
            how = {"sources": (), "draft_model": _draft(loaded, args.draft_layers, drafts == FIRST)}
        speculation = Speculation(max_draft_tokens=args.drafted, **how)
        with Engine(loaded, replace(config, speculation=speculation)) as engine:
            for ask, (before, answers) in zip(asked, plain):
                if ask.sources != drafts:
                    continue
                count = engine.stats.drafted_tokens, engine.stats.accepted_tokens
                every, pairs, tokens = [], [], args.new - 1
                for draw in range(args.draws if ask.right else 1):
                    params = ask.drafted(answers, random.Random(args.seed + draw), vocabulary)
                    seconds, found = _timed(engine, ask.prompts, params, rounds=1 if draw else ROUNDS)
                    every.append(seconds)
                    pairs += [pair for a, b in zip(found, answers) for pair in _numbers(a, b)]
                seconds = statistics.mean(every)
                yield {
                    "room": "speculation",
                    "case": f"{name} {ask.name}",
                    "backend": "vexact",
                    "unit": "ms",
                    "weights": weights,
                    "dtype": dtype,
                    "prompt": args.prompt,
                    "new": args.new,
                    "ours": round(1e3 * seconds / tokens, 4),
                    "plain": round(1e3 * before / tokens, 4),
                    "ratio": round(seconds / before, 4),
                    **({"ratios": [round(each / before, 4) for each in every]} if len(every) > 1 else {}),
                    "drafted_tokens": engine.stats.drafted_tokens - count[0],
                    "accepted_tokens": engine.stats.accepted_tokens - count[1],
                    "numbers": len(pairs),
                    "differ": sum(a != b for a, b in pairs),
                    "device": args.device,
                    **environment(args.device),
                }


@torch.no_grad()
def _empty(loaded: Loaded, first: int) -> None:
    """Layers from this one on add nothing, in the same time."""
    layers = loaded.model.base_model.layers
    if not 0 < first <= len(layers):
        raise ValueError(f"--draft-layers: got {first}, expected 1 to {len(layers)}, those of {loaded.name}")
    for layer in layers[first:]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


@torch.no_grad()
def _draft(loaded: Loaded, layers: int, right: bool) -> torch.nn.Module:
    """A model of the first layers alone, with their weights or with others."""
    config, like = copy.deepcopy(loaded.model.config), next(loaded.model.parameters())
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    with torch.device(like.device):
        model = type(loaded.model)._from_config(config, dtype=like.dtype)
    if right:
        model.load_state_dict(loaded.model.state_dict(), strict=False)
    return model.eval().requires_grad_(False)


def _timed(engine: Engine, prompts: list, params: list[SamplingParams], rounds: int = ROUNDS) -> tuple[float, list]:
    """(seconds of all tokens but the first, completions), of the last time."""
    first = [replace(one, max_new_tokens=1, draft=()) for one in params]
    for _ in range(rounds):
        seconds = []
        for asked in (first, params):
            engine.reset_prefix_cache()
            begin = time.perf_counter()
            done = engine.generate(prompts, asked)
            seconds.append(time.perf_counter() - begin)
    return seconds[1] - seconds[0], done


def _numbers(a, b) -> list[tuple]:
    """Pairs of all that two completions say."""
    return [*zip(a.token_ids, b.token_ids, strict=True), *zip(a.logprobs, b.logprobs, strict=True)]
