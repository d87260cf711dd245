"""What drafted tokens are worth: seconds of generated tokens with them over those without, and that no byte differs.

python -m benchmarks speculation --shape qwen3-8b --batch 1,16,64,256
python -m benchmarks speculation --device cpu --layers 4

Each batch generates its answers without drafts, and again with those handed in, of which a share of the tokens is
another one: --right of them are right, and none. Then eight samples of one prompt, whose drafts are their own text and
that of each other, greedy and at 0.7. The seconds are those of all tokens but the first, the second time of two.
"""

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation

from .engine import load
from .harness import environment

DEFAULTS = {
    "cpu": {"batch": "1,4", "prompt": 64, "new": 32},
    "cuda": {"batch": "1,16,64,256", "prompt": 512, "new": 256},
}
SAMPLES, TEMPERATURES = 8, (0.0, 0.7)
ROUNDS = 2  # the first meets sizes of steps that were not there yet


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    add = group.add_argument
    add("--right", type=_share, default=0.7, metavar="SHARE", help="tokens of a draft that are right (0.7)")
    add("--drafted", type=int, default=8, metavar="N", help="tokens of a sequence in a step, at most (8)")


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

    sources   where drafts come from
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
    for temperature in TEMPERATURES:
        params = replace(base, n=SAMPLES, temperature=temperature, seed=0)
        found.append(_Ask(f"{SAMPLES} samples at {temperature}", prompts(1), [params], "samples"))
    return found


def _model(args: argparse.Namespace, source: str, dtype: str) -> Iterator[dict]:
    loaded, name, weights = load(args, source, dtype)
    config = EngineConfig(show_progress=False)
    with Engine(loaded, config) as engine:
        asked = _asked(args, engine.vocab_size)
        plain = [_timed(engine, ask.prompts, ask.params) for ask in asked]
        vocabulary = engine.vocab_size
    for drafts in dict.fromkeys(ask.sources for ask in asked):
        speculation = Speculation(max_draft_tokens=args.drafted, sources=(drafts,))
        with Engine(loaded, replace(config, speculation=speculation)) as engine:
            for ask, (before, answers) in zip(asked, plain):
                if ask.sources != drafts:
                    continue
                params = ask.drafted(answers, random.Random(args.seed), vocabulary)
                count = engine.stats.drafted_tokens, engine.stats.accepted_tokens
                seconds, found = _timed(engine, ask.prompts, params)
                pairs = [pair for a, b in zip(found, answers) for pair in _numbers(a, b)]
                tokens = args.new - 1
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
                    "drafted_tokens": engine.stats.drafted_tokens - count[0],
                    "accepted_tokens": engine.stats.accepted_tokens - count[1],
                    "numbers": len(pairs),
                    "differ": sum(a != b for a, b in pairs),
                    "device": args.device,
                    **environment(args.device),
                }


def _timed(engine: Engine, prompts: list, params: list[SamplingParams]) -> tuple[float, list]:
    """(seconds of all tokens but the first, completions), of the second time."""
    first = [replace(one, max_new_tokens=1, draft=()) for one in params]
    for _ in range(ROUNDS):
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
