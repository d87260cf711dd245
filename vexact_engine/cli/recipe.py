"""`vexact recipe`: whole training loops."""

import argparse
import json
import logging
import os
import sys
import time
from dataclasses import fields

from ..core import garbage
from . import options

_ROLLOUT = "vexact_engine.recipes.rollout"


def add_recipe(commands) -> None:
    text = "train a model with the engine, and compare every log-probability of rollout and trainer"
    examples = (
        "vexact recipe grpo",
        "vexact recipe grpo --unaligned --plot grpo.png",
        "vexact recipe grpo --task letter_counting --steps 50 --json -",
        "vexact recipe grpo --model qwen3-1.7b --device cuda --prompts 8",
        "vexact recipe grpo --model DIR --ranks 2",
        "vexact recipe grpo --save run --record run.jsonl --steps 1000 --resume",
        "vexact recipe grpo --replicas 2 --verify-against run.jsonl",
        "vexact recipe report run.jsonl --plot run.svg",
    )
    debug = "; on standard error also what the first step waits for"
    recipe = options.command(commands, "recipe", run_recipe, text, examples, debug)
    recipe.add_argument(
        "recipe", choices=("grpo", "report"), metavar="RECIPE",
        help="grpo: rewards from a program, no critic; report: what records show, of runs that were cut off too",
    )  # fmt: skip
    recipe.add_argument(
        "records", nargs="*", default=[], metavar="RECORD", help="of report: what --record wrote, or that in a .gz"
    )
    recipe.add_argument(
        "--model", default="smollm2", metavar="DIR|GGUF|HUB-ID|SHAPE",
        help="smollm2 (default; about 90 MB are downloaded once); qwen3-1.7b, ...: random weights at its sizes",
    )  # fmt: skip
    recipe.add_argument(
        "--layers", type=options.positive, metavar="N", help="random weights: the first N layers alone (all)"
    )
    recipe.add_argument(
        "--task", metavar="NAME", help="a dataset of reasoning-gym (chain_sum), or evens (without a tokenizer)"
    )
    recipe.add_argument(
        "--task-options", type=_object, metavar="JSON", help='of the dataset, such as {"max_terms": 3} (its own)'
    )
    options.tokenizer(recipe)
    options.where(recipe)
    options.seed_option(recipe)
    recipe.add_argument(
        "--ranks", type=options.positive, default=1, metavar="N", help="trainer processes under FSDP2 (1)"
    )
    step = recipe.add_argument_group("a step")
    _number(step, "steps", 10, "how many of them")
    step.add_argument(
        "--epoch-steps", type=options.positive, metavar="N", help="ask the first questions again after N steps (never)"
    )
    _number(step, "prompts", 4, "questions")
    _number(step, "samples", 8, "answers to each")
    _number(step, "max-new-tokens", 32, "tokens of an answer, at most")
    _number(step, "max-prompt-tokens", 512, "tokens of a question, at most")
    step.add_argument(
        "--speculation",
        type=options.count,
        metavar="N",
        help="draft up to N tokens of an answer at once (8 with --epoch-steps, else none; 0: none)",
    )
    step.add_argument("--temperature", type=float, default=1.0, metavar="T", help="of rollout and training (1.0)")
    training = recipe.add_argument_group("training")
    training.add_argument(
        "--advantage", choices=("grpo", "rloo"), default="grpo", help="of an answer over its group (grpo)"
    )
    _real(training, "learning-rate", 2e-5, "of AdamW")
    _real(training, "weight-decay", 0.0, "of AdamW")
    _real(training, "clip", 0.2, "of the ratio")
    _real(training, "entropy-coefficient", 0.0, "what entropy is worth")
    _real(training, "max-grad-norm", 1.0, "longer gradients are cut to it")
    training.add_argument(
        "--any-layout", action="store_true", help="sum gradients in one tree: the same parameters on 1, 2, 4 .. ranks"
    )
    _number(training, "mini-batches", 1, "optimizer steps of a step")
    training.add_argument(
        "--micro-batch", type=options.positive, metavar="N",
        help="sequences of a forward, on each rank (to some 8,192 tokens, of narrow models on a GPU 16,384)",
    )  # fmt: skip
    training.add_argument(
        "--check-every", type=options.count, default=10, metavar="N",
        help="score a part of the answers twice in every Nth step, and end where bytes differ (10; 0: never)",
    )  # fmt: skip
    _real(training, "check-share", 0.25, "of the answers, which part")
    engine = recipe.add_argument_group("engine (none of it changes a bit)")
    _number(engine, "replicas", 1, "engines that share the answers")
    _number(engine, "page-size", 16, "tokens per page of the cache")
    for name, text in (
        ("num-pages", "pages of the cache"),
        ("max-num-seqs", "sequences computed at once"),
        ("max-num-batched-tokens", "tokens computed in a step"),
    ):
        engine.add_argument(
            f"--{name}", type=options.positive, metavar="N", help=f"{text} (room for all answers of a step)"
        )
    engine.add_argument(
        "--no-prefix-cache",
        dest="enable_prefix_cache",
        action="store_false",
        help="compute prompts from their start",
    )
    kept = recipe.add_argument_group("keeping a run")
    kept.add_argument("--save", metavar="FOLDER", help="keep all that a run goes on from there (nowhere)")
    _number(kept, "save-every", 10, "steps between two that are kept; the last one always is")
    _number(kept, "keep", 2, "the newest so many are left")
    kept.add_argument("--resume", action="store_true", help="go on from the newest in --save; where none is, begin")
    kept.add_argument(
        "--record", metavar="FILE", help="a line of JSON for each step and its digests, as soon as it is through (none)"
    )
    kept.add_argument(
        "--verify-against", metavar="RECORD", help="end at the first step and tensor with other bits than there (none)"
    )
    beside = recipe.add_mutually_exclusive_group()
    beside.add_argument("--unaligned", action="store_true", help="as --sides aligned,stock")
    beside.add_argument(
        "--sides", type=_sides, default=["aligned"], metavar="A,B",
        help="what trains, one after another: aligned (default); for contrast stock, the stock trainer on the same "
        "engine, and generate, the stock trainer on its own model's generate",
    )  # fmt: skip
    options.json_file(recipe, "every figure")
    recipe.add_argument("--plot", type=options.picture, metavar="FILE", help="draw them (.png, .svg, .pdf)")


def run_recipe(args) -> int:
    return _report(args) if args.recipe == "report" else _grpo(args)


def _report(args) -> int:
    options.check_writable(args.json, args.plot)
    for name in sorted(args.given - {"command", "run", "recipe", "records", "plot", "json", "debug", "quiet"}):
        options.expect_without(args, "report", "--" + name.replace("_", "-"))
    if not args.records:
        raise ValueError("RECORD: expected one or more after report")
    from ..recipes import report

    found = report.read(args.records)
    for text in (text for one in found for text in report.summary(one)):
        print(text)
    if args.json:
        options.write_json(args, {"runs": [{"name": o.name, "sha256": o.sha256, "steps": o.run.steps} for o in found]})
    if args.plot:
        report.plot(args.plot, report.heading(found[0].options), {one.name: one.run for one in found})
    return 1 if any(one.differs for one in found) else 0


def _grpo(args) -> int:
    begun = time.perf_counter()
    if args.records:
        raise ValueError(f"RECORD: got {args.records[0]}, expected none after grpo")
    options.check_writable(args.json, args.plot, args.record)
    options.expect_with(args, bool(args.save), "--save", "--save-every", "--keep", "--resume")
    # Of one trainer it is known by now that engines are wanted: they import while this process does.
    alone = args.ranks == 1 and "WORLD_SIZE" not in os.environ and {*args.sides} != {"generate"}
    from ..parallel.prestart import prestarted

    with prestarted(f"{_ROLLOUT}:engine", args.replicas * alone, f"{_ROLLOUT}:import_ahead", args.device):
        return _train(args, begun, alone)


def _train(args, begun: float, alone: bool) -> int:
    with garbage.left():
        from ..proof.compare import LogprobsDiffer
        from ..proof.machine import environment, made_by
        from ..recipes import record, report
        from ..recipes.checkpoint import Saving
        from ..recipes.grpo import ALIGNED
        from ..recipes.launch import launch, placed
        from ..recipes.options import Options
        from ..recipes.rollout import import_ahead, log_start

    device = options.device(args.device)
    if args.debug:
        log_start("trainer")
    given = {field.name: getattr(args, field.name) for field in fields(Options)}
    given |= {"device": str(device), "task_options": args.task_options or {}}
    chosen = placed(Options(**given))
    chosen.check_model()
    if alone:
        import_ahead(args.device)
    saving = Saving(args.save, args.save_every, args.keep, args.resume) if args.save else None
    sides = ["aligned", "stock"] if args.unaligned else args.sides
    against = record.Against(args.verify_against, chosen) if args.verify_against else None
    if args.record and args.resume and os.path.exists(args.record):
        chosen.check_same(record.read(args.record).options, f"{args.record}, which this run goes on with,")
    out, recorder, ends = report.lines(sys.stdout), None, {}
    with options.progress(args, lines=False) as progress:
        heard = False

        def show(kind: str, *values) -> None:
            nonlocal heard, recorder
            if not heard:  # of several processes under torchrun the first alone is heard
                out(report.heading(chosen.to_json()))
                heard = True
                if args.record:
                    about = {"options": chosen.to_json(), "environment": environment(chosen.device)}
                    resumed = {side: saving.newest(side) for side in sides} if args.resume else None
                    recorder = record.Recorder(args.record, made_by("recipe-record", args.line) | about, resumed)
            if kind == "phase":
                progress(*values)
            elif kind == "step":
                out(report.line(*values, chosen.steps))
            elif kind == "start" and args.debug:
                logging.getLogger(__name__).info("%s", report.start(*values))
            elif kind == "end":
                side, ends[side] = values
            for seen in filter(None, (recorder, against)):
                seen(kind, *values)

        try:
            watch = bool(args.record or args.verify_against)
            runs = launch(chosen, sides=sides, report=show, saving=saving, watch=watch, begun=begun)
        except (record.RunDiffers, LogprobsDiffer) as error:
            out(str(error))
            return 1
    if not heard:
        return 0
    for side, run in runs.items():
        out(report.verdict(side, run))
    for side, digest in ends.items():
        out(f"{side}: parameters have SHA-256 {digest}")
    if against is not None:
        none = "" if against.compared else ": it has nothing of what this run has done"
        out(f"as {args.verify_against}: {against.compared} figures and digests compared, 0 differ{none}")
    aligned = runs.get(ALIGNED)
    resumed_at_its_end = args.resume and aligned is not None and not aligned.steps
    equal = None if aligned is None or resumed_at_its_end else aligned.equal  # None: nothing was to be
    if args.json:
        steps = {side: run.steps for side, run in runs.items()}
        options.write_json(
            args, {"options": chosen.to_json(), "environment": environment(chosen.device), "equal": equal, **steps}
        )
    if args.plot:
        report.plot(args.plot, report.heading(chosen.to_json()), runs)
    return 1 if equal is False or (against is not None and not against.compared) else 0


def _number(group, name: str, default: int, text: str) -> None:
    group.add_argument(f"--{name}", type=options.positive, default=default, metavar="N", help=f"{text} ({default})")


def _real(group, name: str, default: float, text: str) -> None:
    group.add_argument(f"--{name}", type=float, default=default, metavar="X", help=f"{text} ({default})")


def _sides(text: str) -> list[str]:
    from ..recipes.grpo import SIDES

    names = options.names(text)
    if not set(names) <= set(SIDES) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected some of {', '.join(SIDES)}, each once")
    return names


def _object(text: str) -> dict:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a JSON object")
    return value
