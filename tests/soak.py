"""Soaks the engine: `python tests/soak.py [--minutes 30] [--device cuda]`.

Engines of random configurations, one after the other, on caches that are too small: threads and asyncio loops send
requests of all kinds, abort and cancel them, stream and leave, pause and resume, write new weights, put the engine to
sleep and wake it. In between all stops, and nothing may be held: no page, no slot, no request. Every completion, whole
or aborted, is computed again by the training forward of the weights that its tokens were drawn with: token ids, both
log-probabilities and the likeliest ones are compared as bytes. The engines of the second half of the time are those of
the first half once more, and where they meet nothing new neither memory nor objects may grow (growth.py).
The last line is a JSON object; the exit status is 1 where anything differs, is lost, grows or hangs.
"""

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import queue
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "engine"))
sys.path.insert(0, str(Path(__file__).parent.parent))

from engine_models import build, byte_tokenizer, check_idle
from growth import Growth

import vexact_ops as vx
from benchmarks.harness import environment
from vexact_engine import Completion, Engine, EngineClosed, EngineConfig, SamplingParams, Speculation
from vexact_engine.core.loop import Loop
from vexact_engine.outputs import Ticket
from vexact_engine.request import Request, Sequence, derive_seed
from vexact_ops.testing import different

VOCABULARY = 300  # the byte tokenizer has 259
LONGEST_PROMPT, MOST_NEW = 60, 48
STATES = 2  # of the weights
BY_MODEL = "a model of the same family, with the weights of one of them"
SHOWN = 20  # failures, at most
HANG = 300  # seconds without an end of what should take one
ONE_ARENA = -8, 1  # for mallopt: else every thread has a heap of its own, and how those fill hides what leaks
FAMILIES = {
    "cpu": [
        ("Llama", torch.bfloat16),
        ("Qwen3", torch.float32),
        ("Gemma2", torch.bfloat16),
        ("Qwen3Moe", torch.bfloat16),
    ],
    "cuda": [("Qwen3", torch.bfloat16), ("Qwen3Moe", torch.bfloat16)],
}
SIZES = {  # on a GPU such that its own kernels are used
    "cpu": {},
    "cuda": {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 4},
}
EXPERTS = {"cpu": {}, "cuda": {"moe_intermediate_size": 128}}
OURS = (Engine, Loop, Ticket, Request, Sequence)


def model_of(family: str, dtype: torch.dtype, device: str, state: int) -> torch.nn.Module:
    sizes = SIZES[device] | (EXPERTS[device] if family == "Qwen3Moe" else {})
    return build(family, dtype, seed=state, device=device, vocab_size=VOCABULARY, **sizes)


class Oracle:
    """The training forward with one state of the weights, of what the sampler then draws."""

    def __init__(self, family: str, dtype: torch.dtype, device: str, state: int):
        self.model, self.device = model_of(family, dtype, device, state), device
        self.handle = vx.patch.hf(self.model)

    @torch.no_grad()
    def differ(self, wanted: list[tuple[Completion, SamplingParams, list[int]]]) -> int:
        """Of completions, their parameters and which of their tokens are meant: how many tokens are others, or have
        other log-probabilities."""
        ids, positions, rows, drawn = [], [], [], []
        for completion, params, chosen in wanted:
            prompt, first = len(completion.prompt_ids), len(ids)
            ids += completion.prompt_ids + completion.token_ids
            positions += range(len(ids) - first)
            rows += [first + prompt + k - 1 for k in chosen]
            drawn += [(completion, params, k) for k in chosen]
        there = {"device": self.device, "dtype": torch.int64}
        packed, where = (torch.tensor([values], **there) for values in (ids, positions))
        hidden = self.model.get_decoder()(input_ids=packed, position_ids=where, use_cache=False).last_hidden_state[0]
        logits = self.handle.logits(hidden[torch.tensor(rows, **there)])
        params = [p for _, p, _ in drawn]

        def column(values, dtype=torch.float32):
            return torch.tensor(values, dtype=dtype, device=self.device)

        tokens, logprobs, raw = vx.sample(
            logits,
            column([derive_seed(c.seed, c.index) for c, _, _ in drawn], torch.int64),
            column([len(c.prompt_ids) + k for c, _, k in drawn], torch.int64),
            temperature=column([p.temperature for p in params]),
            top_k=column([p.top_k for p in params], torch.int64),
            top_p=column([p.top_p for p in params]),
            min_p=column([p.min_p for p in params]),
        )
        bad = tokens.cpu() != torch.tensor([c.token_ids[k] for c, _, k in drawn], dtype=torch.int64)
        for got, name in ((logprobs, "logprobs"), (raw, "raw_logprobs")):
            bad |= different(got.cpu(), torch.tensor([getattr(c, name)[k] for c, _, k in drawn], dtype=torch.float32))
        # what a trainer calls gives them too, in its own form
        expected = torch.tensor([c.logprobs[k] for c, _, k in drawn], dtype=torch.float32)
        for temperature in {p.temperature for p in params}:
            scores = self.handle.logprobs(packed, position_ids=where, temperature=temperature or 1.0)[0]
            of = torch.tensor([p.temperature == temperature for p in params], dtype=torch.bool)
            bad |= of & different(scores[torch.tensor(rows, **there)].cpu(), expected)
        likeliest = vx.log_softmax(logits).cpu()
        for row, (completion, p, k) in enumerate(drawn):
            if p.num_top_logprobs:
                values, top = (x[: p.num_top_logprobs] for x in likeliest[row].sort(descending=True, stable=True))
                bad[row] |= completion.top_logprobs[k] != dict(zip(top.tolist(), values.tolist()))
        return int(bad.sum())


class Checker(threading.Thread):
    """Takes completions from the clients, compares them, counts."""

    def __init__(self, oracles: list[Oracle], counts: Counter):
        super().__init__(name="checker", daemon=True)
        self.oracles, self.counts, self.versions = oracles, counts, {}
        self.inbox: queue.Queue = queue.Queue(maxsize=500)  # clients wait while this is behind
        self.updating = threading.Lock()  # held while a version is being written: then nobody knows its state yet
        self.failures: list[str] = []

    def run(self) -> None:
        while True:
            batch = [self.inbox.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < 64:
                    batch.append(self.inbox.get_nowait())
            try:
                self._check([item for item in batch if item is not None])
            except Exception as error:
                self.fail(f"the oracle: {type(error).__name__}: {error}")
            for _ in batch:
                self.inbox.task_done()
            if None in batch:
                return

    def fail(self, what: str) -> None:
        self.failures.append(what)
        if len(self.failures) <= SHOWN:
            sys.stdout.write(what + "\n")
            sys.stdout.flush()

    def _check(self, items: list[tuple[Completion, SamplingParams]]) -> None:
        with self.updating:
            versions = dict(self.versions)
        by_state: dict[int, list] = {}
        for completion, params in items:
            self.counts[completion.finish_reason] += 1
            refused = any(word in (completion.error or "") for word in ("expected", "is not done yet"))
            if completion.finish_reason == "error" and not refused:
                self.fail(f"a request failed: {completion.error}")
            if completion.finish_reason == "length" and len(completion.token_ids) != params.max_new_tokens:
                self.fail(f"a request is too short: {completion.error}")
            states: dict[int, list[int]] = {}
            for k, version in enumerate(completion.weight_versions):
                if version not in versions:
                    self.fail(f"a token was drawn with weights {version}, known are {sorted(versions)}")
                states.setdefault(versions[version], []).append(k)
            for state, chosen in states.items():
                by_state.setdefault(state, []).append((completion, params, chosen))
        for state, wanted in by_state.items():
            differ = self.oracles[state].differ(wanted)
            self.counts["checked"] += sum(len(chosen) for *_, chosen in wanted)
            self.counts["differ"] += differ
            if differ:
                self.fail(f"{differ} tokens differ among {[(c.request_id, p) for c, p, _ in wanted]}")


class Client:
    """What one thread does with an engine, one thing after the other, until it is told to stop."""

    def __init__(self, engine: Engine, checker: Checker, rng: random.Random, states: list[dict], stop: threading.Event):
        self.engine, self.checker, self.rng, self.states, self.stop = engine, checker, rng, states, stop
        self.counts = checker.counts

    def prompt(self):
        rng = self.rng
        if rng.random() < 0.2:
            return "".join(rng.choices("abc \u00e9\U0001f600", k=rng.randint(1, LONGEST_PROMPT // 4)))
        start = [3 + (i * 7) % 200 for i in range(rng.choice([0, 0, 8, 20]))]  # that others begin with, too
        if start and rng.random() < 0.4:  # it has been answered before
            return start
        return start + rng.choices(range(3, VOCABULARY), k=rng.randint(1, LONGEST_PROMPT - len(start)))

    def params(self) -> SamplingParams:
        rng = self.rng
        new = rng.choice([1, 2, rng.randint(1, 12), rng.randint(1, MOST_NEW)])
        return SamplingParams(
            max_new_tokens=new,
            temperature=rng.choice([1.0, 1.0, 0.7, 0.0, 1.3]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            top_k=rng.choice([0, 0, 20, 1]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            n=rng.choice([1, 1, 1, 2, 5]),
            seed=rng.choice([None, rng.getrandbits(64), 2**64 - 1, 0]),
            stop_token_ids=tuple(rng.choices(range(VOCABULARY), k=rng.choice([0, 0, 5]))),
            stop=rng.choice([(), (), ("a",), ("\u00e9", "bb")]),
            ignore_eos=rng.random() < 0.5,
            num_top_logprobs=rng.choice([0, 0, 0, 4]),
            draft=[rng.choices(range(VOCABULARY), k=rng.randint(1, 9)) for _ in range(rng.choice([0, 0, 0, 2]))],
        )

    def take(self, asked: list[SamplingParams], done: list[Completion]) -> None:
        if len(done) != sum(p.n for p in asked):
            self.checker.fail(f"{len(done)} completions came, expected {sum(p.n for p in asked)}")
        each = [p for p in asked for _ in range(p.n)]
        for params, completion in zip(each, done):
            self.checker.inbox.put((completion, params))

    # actions

    def generate(self) -> None:
        asked = [self.params() for _ in range(self.rng.choice([1, 2, 6, 12]))]
        prompts = [self.prompt() for _ in asked]
        if self.rng.random() < 0.2:
            prompts[0] = self.rng.choice([[], [VOCABULARY + 5], [-1], None, [1.5]])
        names = None if self.rng.random() < 0.5 else [f"{self.rng.choice('abc')}{i}" for i in range(len(asked))]
        self.take(asked, self.engine.generate(prompts, asked, request_ids=names))

    def agenerate(self) -> None:
        asked = [self.params() for _ in range(self.rng.choice([1, 3]))]
        patience = self.rng.choice([None, self.rng.random() * 0.05])

        async def main():
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                done = self.engine.agenerate([self.prompt() for _ in asked], asked)
                self.take(asked, await asyncio.wait_for(done, patience))
                return
            self.counts["cancelled"] += 1

        asyncio.run(main())

    def stream(self) -> None:
        params, leave = self.params(), self.rng.choice([None, self.rng.randint(1, 20)])

        async def main():
            seen = []
            async for increment in self.engine.stream(self.prompt(), params):
                seen.append(increment)
                if len(seen) == leave:
                    break
            return seen

        seen = asyncio.run(main())
        self.counts["streams"] += 1
        for done in (i.completion for i in seen if i.completion is not None):
            mine = [i for i in seen if i.index == done.index]
            tokens = [t for i in mine for t in i.token_ids]
            if tokens != done.token_ids or "".join(i.text for i in mine) != done.text:
                self.checker.fail(f"a stream gave {tokens}, its completion has {done.token_ids} ({done.text!r})")
            self.checker.inbox.put((done, params))

    def abort(self) -> None:
        self.engine.abort(f"{self.rng.choice('abc')}{self.rng.randint(0, 11)}")

    def pause(self) -> None:
        self.counts["pauses"] += 1
        try:
            self.engine.pause(self.rng.choice(["keep", "wait", "abort"]))
            time.sleep(self.rng.random() * 0.02)
        finally:
            self.engine.resume()

    def forget(self) -> None:
        self.engine.reset_prefix_cache()

    ACTIONS = ("generate",) * 6 + ("agenerate",) * 3 + ("stream",) * 3 + ("abort",) * 4 + ("pause", "forget")

    def run(self, closing: bool) -> None:
        """closing: the engine may be closed meanwhile."""
        try:
            while not self.stop.is_set():
                getattr(self, self.rng.choice(self.ACTIONS))()
        except EngineClosed:
            if not closing:
                self.checker.fail("an engine says that it is closed")
        except Exception as error:
            self.checker.fail(f"{type(error).__name__}: {error}")


class Controller(Client):
    """One thread alone writes weights and puts the engine to sleep: who wakes it must know what is asleep."""

    def update(self) -> None:
        state = self.rng.randrange(STATES)
        weights = self.states[state]
        specs = None
        if self.engine._draft is not None and self.rng.random() < 0.5:
            drafts = self.rng.choice(self.states)
            weights = weights | {f"draft.{name}": value for name, value in drafts.items()}
        if self.rng.random() < 0.5:
            specs = {name: (value.shape, value.dtype) for name, value in weights.items()}
        with self.checker.updating:
            version = self.engine.update_weights(iter(weights.items()), specs=specs, numerics=self.engine.numerics())
            self.checker.versions[version] = state
        self.counts["updates"] += 1

    def sleep(self) -> None:
        level, mode = self.rng.choice([1, 1, 2]), self.rng.choice(["keep", "keep", "wait", "abort"])
        tags = None if level == 2 else self.rng.choice([None, ["kv_cache"], ["weights"], ["graphs"]])
        self.counts["sleeps"] += 1
        try:
            self.engine.sleep(level, tags, mode)
            time.sleep(self.rng.random() * 0.05)
        finally:
            if level == 2:
                self.engine.wake_up(["weights"])
                self.update()
            self.engine.wake_up()

    ACTIONS = ("update", "update", "sleep", "wait", "wait", "wait")

    def wait(self) -> None:
        self.stop.wait(self.rng.random())


def configuration(rng: random.Random, device: str) -> EngineConfig:
    """Any that can hold the longest request; often hardly more."""
    page = rng.choice([1, 3, 4, 16]) if device == "cpu" else rng.choice([4, 16, 64])
    pages = -(-(LONGEST_PROMPT + MOST_NEW + 1) // page) + rng.choice([0, 0, 4, 20, 100])
    options = {"async_scheduling": rng.choice([None, True, False]), "record_ahead": rng.random() < 0.5}
    if rng.random() < 0.6:
        options["speculation"] = Speculation(
            max_draft_tokens=rng.choice([1, 3, 8, 20]),
            sources=rng.choice([("given",), ("text",), Speculation.sources]),
            answer_tokens=rng.choice([100, 1 << 20]),
            always=rng.random() < 0.7,
            draft_model=rng.choice([None, BY_MODEL]),
        )
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    return EngineConfig(
        page_size=page,
        num_pages=pages,
        max_num_seqs=rng.choice([2, 4, 16, 64]),
        max_num_batched_tokens=rng.choice([1, 5, 16, 64, 256]),
        enable_prefix_cache=rng.random() < 0.7,
        reserve=rng.choice([None, 0.0, 0.0, 1.0]),
        enforce_eager=rng.random() < 0.2,
        show_progress=False,
        **{name: value for name, value in options.items() if name in known},
    )


class Soak:
    def __init__(self, args: argparse.Namespace):
        self.args, self.counts, self.rng = args, Counter(), random.Random(args.seed)
        ctypes.CDLL(None).mallopt(*ONE_ARENA)
        self.failures: list[str] = []
        self.growth = Growth(args.device)
        self.met: list[tuple] = []  # kinds of engines
        self.oracles: dict = {}
        self.began = time.monotonic()

    def kind(self) -> tuple:
        """Of an engine: its model, with which weights it begins, and its configuration."""
        rng = self.rng
        self.met.append((*rng.choice(list(self.oracles)), rng.randrange(STATES), configuration(rng, self.args.device)))
        return self.met[-1]

    def round(self, seconds: float, family: str, dtype: torch.dtype, first: int, config: EngineConfig) -> None:
        """One engine, from start to close."""
        rng, device, oracles = self.rng, self.args.device, self.oracles[family, dtype]
        states = [{name: value.detach() for name, value in o.model.state_dict().items()} for o in oracles]
        checker = Checker(oracles, self.counts)
        checker.versions[0] = first
        checker.start()
        model = model_of(family, dtype, device, first)
        if config.speculation is not None and config.speculation.drafts_by_model:
            draft = model_of(family, dtype, device, rng.randrange(STATES))
            config = dataclasses.replace(config, speculation=dataclasses.replace(config.speculation, draft_model=draft))
        try:
            engine = Engine.from_pretrained(model, device=device, config=config, tokenizer=byte_tokenizer())
        except BaseException:
            self.failures.append(f"no engine: {family} {config}")
            raise
        self.counts["engines"] += 1
        bouts, closing = rng.choice([1, 2, 4]), rng.random() < 0.2
        for bout in range(bouts):
            self._bout(engine, checker, states, seconds / bouts, closing and bout == bouts - 1)
            if not engine._loop.closed:
                self._check_nothing_is_held(engine, checker)
        for name in ("preemptions", "steps", "prefix_tokens", "mixed_steps", "drafted_tokens", "accepted_tokens"):
            self.counts[name] += getattr(engine.stats, name)
        engine.close()
        checker.inbox.put(None)
        checker.join(HANG)
        chosen = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        chosen = {name: value for name, value in chosen.items() if value != getattr(EngineConfig(), name)}
        self.failures += [f"{family} {chosen}: {failure}" for failure in checker.failures]

    def _bout(self, engine, checker, states, seconds: float, close: bool) -> None:
        """Threads at work for some seconds. close: the engine is closed while they are."""
        stop, kinds = threading.Event(), [Controller] + [Client] * self.rng.choice([2, 4, 8])
        clients = [kind(engine, checker, random.Random(self.rng.random()), states, stop) for kind in kinds]
        threads = [
            threading.Thread(target=client.run, args=(close,), name=f"client {i}", daemon=True)
            for i, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        if close:
            engine.close()
        stop.set()
        deadline = time.monotonic() + HANG
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self._hangs(engine, thread.name)
        checker.inbox.join()

    def _hangs(self, engine: Engine, who: str) -> None:
        """Nothing can go on from here: say all that is known, and end."""
        loop = engine._loop
        state = f"{engine.state}, asleep {engine.asleep}, missing {loop.missing}, torn {loop.torn}, {engine.config}"
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
        self.failures.append(
            f"{who} waits for ever: {len(loop._tickets.running)} requests, {len(loop._tickets.held)} held, {state}"
        )
        self.finish()
        os._exit(1)

    def _check_nothing_is_held(self, engine, checker: Checker) -> None:
        scheduler = engine._scheduler
        try:
            check_idle(engine)
        except AssertionError as error:
            held = scheduler.pool.num_pages - scheduler.pool.num_available
            self.counts["leaked_pages"] += held
            checker.fail(f"{held} pages are held though nothing runs: {error}")
        lost = scheduler._max_running - len(set(scheduler._slots))
        if lost or len(scheduler._slots) != scheduler._max_running:
            self.counts["leaked_slots"] += lost
            checker.fail(f"{lost} slots are held though nothing runs")

    def look(self, judged: bool) -> None:
        """At memory and objects, with no engine there."""
        found = self.growth.look(judged)
        alive, threads = Counter(type(o).__name__ for o in gc.get_objects() if type(o) in OURS), found["threads"]
        if alive or threads:
            self.failures.append(
                f"after round {len(self.growth.rounds)} there are still {dict(alive)}, {threads} threads"
            )

    def run(self) -> dict:
        args = self.args
        for family, dtype in FAMILIES[args.device] if args.minutes else ():
            self.oracles[family, dtype] = [Oracle(family, dtype, args.device, state) for state in range(STATES)]
        self.began = time.monotonic()
        end, repeated = self.began + 60 * args.minutes, 0
        while (left := end - time.monotonic()) > 0 and not self.failures and not self.has_seen_enough():
            again = bool(self.met) and left < 30 * args.minutes
            seconds = min(left, self.rng.uniform(0.3, 1.7) * args.round)
            self.round(seconds, *(self.met[repeated % len(self.met)] if again else self.kind()))
            repeated += again
            self.look(again)
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{left:6.0f} s left, {dict(self.counts)}, {self.growth.rounds[-1]}")
        self.failures += self.growth.failures()
        if self.counts["checked"] == 0:
            self.failures.append("nothing was checked")
        return self.finish()

    def has_seen_enough(self) -> bool:
        """Before the time is over: never, but in a test."""
        return False

    def finish(self) -> dict:
        """The last line, written."""
        args, shown = self.args, ("checked", "differ", "leaked_pages", "leaked_slots")
        rounds = self.growth.rounds
        found = {
            "room": "soak",
            "case": f"{args.device} {args.minutes:g} minutes",
            "backend": "vexact",
            "device": args.device,
            "minutes": round((time.monotonic() - self.began) / 60, 2),
            "seed": args.seed,
            "rounds": len(rounds),
            "judged": len(self.growth.added("decisions")) if rounds else 0,
            **{name: self.counts[name] for name in shown},
            "counts": {name: count for name, count in sorted(self.counts.items()) if name not in shown},
            "growth": self.growth.total(),
            "growth_per_round": self.growth.per_round(),
            "grown": self.growth.what(),
            "memory": rounds[:: max(1, len(rounds) // 40)],
            "failures": self.failures[:SHOWN],
            **{name: environment(args.device)[name] for name in ("gpu", "cpu", "torch", "triton", "commit", "date")},
        }
        line = json.dumps(found)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
        if args.json is not None:
            with args.json.open("a") as file:
                file.write(line + "\n")
        return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--round", type=float, help="mean seconds of an engine's life, else for 40 of them, at most 20")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the last line to it")
    args = parser.parse_args(argv)
    if args.round is None:
        args.round = min(20.0, max(1.0, 60 * args.minutes / 40))
    found = Soak(args).run()
    return int(bool(found["failures"] or found["differ"]))


if __name__ == "__main__":
    raise SystemExit(main())
