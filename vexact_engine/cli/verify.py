"""`vexact demo` and `vexact verify`: the main job, on a small model that is fetched or on one's own."""

import functools
import os
import sys

from . import options


def add_demo(commands) -> None:
    demo = options.command(
        commands,
        "demo",
        run_demo,
        "prove it on a small real model (about 90 MB are downloaded once)",
        ("vexact demo", "vexact demo --html demo.html", "vexact demo --device cuda --json -"),
    )
    demo.add_argument("--dtype", type=options.dtype, default="bfloat16", metavar="TYPE", help="bf16 (default) or fp32")
    options.device_option(demo)
    options.seed_option(demo)
    demo.add_argument("--no-stock", action="store_true", help="leave out the stock Hugging Face stack")
    options.outputs(demo)
    _plot(demo)


def add_verify(commands) -> None:
    verify = options.command(
        commands,
        "verify",
        run_verify,
        "compare rollout and training on your model and your prompts",
        (
            "vexact verify --model DIR --prompts prompts.jsonl --stock --html report.html",
            "vexact verify --model DIR --num-prompts 32 --lengths 16,200 --batch-sizes 1,8 --warm",
            "vexact verify --config qwen3-8b --layers 2 --json -",
        ),
    )
    options.model(verify, or_config=True)
    source = options.prompts(verify, 8, [16, 64, 33, 200], limit="all")
    options.chat(source, "no template for plain text")
    options.sampling(verify, max_new_tokens=64)
    verify.add_argument("--samples", type=options.positive, default=1, metavar="N", help="answers per prompt (1)")
    options.engine(verify)
    options.parallel(verify)
    verify.add_argument(
        "--pack-tokens", type=options.positive, metavar="N",
        help="tokens in one packed training batch (a third of all, at most 4096)",
    )  # fmt: skip
    verify.add_argument("--random-weights", action="store_true", help="from config.json alone, at its true dimensions")
    verify.add_argument(
        "--layers", type=options.positive, metavar="N", help="random weights: the first N layers alone (all)"
    )
    verify.add_argument(
        "--warm", action="store_true", help="roll out once more while the prefix cache knows the prompts"
    )
    verify.add_argument(
        "--batch-sizes", type=options.lengths, default=[], metavar="N,N",
        help="roll out again, so many prompts at a time (none)",
    )  # fmt: skip
    verify.add_argument(
        "--share-weights", action="store_true", help="engine and trainer take turns on one copy of them"
    )
    verify.add_argument("--stock", action="store_true", help="put the same question to the stock Hugging Face stack")
    verify.add_argument(
        "--stock-prompts", type=options.positive, metavar="N", help="--stock: for the first N prompts alone (all)"
    )
    verify.add_argument("--show", type=options.count, default=2, metavar="N", help="answers to print (2)")
    options.outputs(verify)
    _plot(verify)


def run_demo(args) -> int:
    options.check_writable(args.json, args.html, args.plot)
    from ..proof import demo

    device = options.device(args.device)
    with options.progress(args) as progress:
        verification = demo.demo(
            dtype=args.dtype,
            device=device,
            stock=not args.no_stock,
            seed=args.seed,
            show_bars=None,
            progress=progress,
        )
    print(f"{demo.MODEL} on {device}, {args.dtype}; its weights come from {demo.WEIGHTS}. Greedy answers:\n")
    _print_samples(verification.shown.samples, whole=len(demo.SHOWN))
    print(f"Measured is what it answers to {len(demo.PROMPTS)} prompts at temperature 1, where every token counts:\n")
    return _conclude(verification, args)


def _plot(parser) -> None:
    text = "draw how many tokens differ, and by how much (.svg, .png, .pdf)"
    parser.add_argument("--plot", type=options.picture, metavar="FILE", help=text)


def run_verify(args) -> int:
    options.check_writable(args.json, args.html, args.plot)
    options.expect_with(args, args.stock, "--stock", "--stock-prompts")
    options.check_prompts(args, "--chat")
    options.check_config(args)
    random_weights = bool(args.config or args.random_weights)
    options.expect_with(args, random_weights, "--config or --random-weights", "--layers")
    if random_weights:
        options.expect_without(args, "random weights", "--adapter")
    from ..config import EngineConfig, SamplingParams
    from ..proof.prompts import read_prompts
    from ..proof.verify import check_warm, verify
    from ..weights.random import load_random

    params = SamplingParams(**options.sampling_of(args), n=args.samples)
    config = EngineConfig(**options.engine_of(args), **options.parallel_of(args))
    if config.processes > 1:
        options.expect_without(args, f"--{config.parallel.replace('_', '-')}", "--share-weights")
    prompts = read_prompts(args.prompts, args.limit) if args.prompts else None  # before the model: it is quicker
    device = options.device(args.device)
    options.check_engine(args, device)
    if args.warm:  # of a file's prompts only the tokenizer knows how long they are
        known = args.lengths[: args.num_prompts] if prompts is None else [sys.maxsize]
        check_warm(config, max(known))
    with options.progress(args) as progress:
        progress("load", 0, 1)
        if random_weights:
            source = args.config or args.model
            chosen = {"seed": args.seed, "layers": args.layers, **options.tokenizer_of(args)}
            read = functools.partial(load_random, source, dtype=args.dtype, device=device, **chosen)
            loaded, rollout = read(), read(whole=False) if config.processes > 1 else None
        else:
            loaded = options.load(args, device)
            rollout = options.load_in_stages(args, device, config) if config.processes > 1 else None
        if prompts is None:
            prompts = options.random_prompts(args, loaded.model)
        verification = verify(
            loaded,
            prompts,
            params,
            config=config,
            chat=bool(args.chat),
            stock=(args.dtype,) if args.stock else (),
            stock_prompts=args.stock_prompts,
            pack_tokens=args.pack_tokens,
            batch_sizes=args.batch_sizes,
            warm=args.warm,
            share_weights=args.share_weights,
            seed=args.seed,
            title=f"VeXact verify: {os.path.basename(loaded.name.rstrip('/'))}",
            progress=progress,
            rollout=rollout,
        )
    _print_samples(verification.aligned.samples[: args.show], whole=args.show)
    for error in verification.errors:
        print(f"vexact verify: {error}", file=sys.stderr)
    return _conclude(verification, args)


def _conclude(verification, args) -> int:
    """Table, verdict, files, exit code."""
    _print_run(verification)
    _print_table(verification)
    print(verification.verdict())
    verification.command = args.line
    if args.json:
        options.write_json(args, verification.to_json())
    if args.html:
        from ..proof.report import write_report

        write_report(args.html, verification)
    if args.plot:
        from ..proof.report import write_plot

        write_plot(args.plot, verification)
    written = " and ".join(path for path in (args.json, args.html, args.plot) if path and path != "-")
    print(f"{verification.seconds:.0f} s in all" + (f"; wrote {written}" if written else ""))
    return 0 if verification.equal else 1


def _print_samples(samples, whole: int) -> None:
    for index, sample in enumerate(samples):
        text = sample.error or sample.text or " ".join(map(str, sample.token_ids))
        if index < whole and not sample.error:
            print(f"> {options.shorten(sample.prompt_text)}")
            print("  " + text.strip().replace("\n", "\n  ") + ("" if sample.finish_reason == "stop" else " ..."))
            print()
        else:
            print(f"> {options.shorten(sample.prompt_text, 44):<44}  {options.shorten(text, 70)}")
    if len(samples) > whole:
        print()


def _print_run(v) -> None:
    s = v.statistics
    preempted = f"{s['preemptions']} preemption{'s' * (s['preemptions'] != 1)}"
    print(
        f"engine: {s['steps']} steps, {s['mixed_steps']} of them mixed; {s['partial_prefills']} prompt chunks, "
        f"{preempted}, {s['prefix_tokens']} tokens from the prefix cache"
    )
    for batch in v.batches:
        print(
            f"engine: {batch.requests} prompts again, {batch.batch_size} at a time: {batch.mismatched_tokens} of "
            f"{batch.tokens} tokens differ ({batch.seconds:.1f} s)"
        )
    if v.warm is not None:
        print(
            f"engine: {v.warm.requests} prompts again, {v.warm.prefix_tokens} of their tokens from the prefix cache: "
            f"{v.warm.mismatched_tokens} of {v.warm.tokens} tokens differ ({v.warm.seconds:.1f} s)"
        )
    if v.shown is not None:
        print(f"engine: {len(v.shown.samples)} greedy answers: {v.shown.comparison.verdict()}")
    if v.gradients is not None:
        g = v.gradients
        print(
            f"trainer: backward through {g.sequences} packed sequences ({g.tokens} tokens), "
            f"{g.tensors} gradients, {g.verdict()}, norm {g.norm:.4g}"
        )
    print()


def _print_table(v) -> None:
    rows = [("rollout -> trainer", "dtype", "tokens", "differ", "max |diff|", "KL (k3)", "seconds")]
    for side in (v.aligned, *v.stock):
        c = side.comparison
        name = "vexact engine -> patched HF, packed" if side.name == "aligned" else "stock HF generate -> HF forward"
        figures = (str(c.tokens), str(c.mismatched_tokens), f"{c.max_abs_diff:.3g}", f"{c.k3_kl:.3g}")
        rows.append((name, side.dtype, *figures, " + ".join(f"{side.seconds[k]:.1f}" for k in ("rollout", "rescore"))))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("-" * w for w in widths))
    print()
