"""The command `vexact`: demo, verify, generate, doctor.

Exit codes: 0 equal or done, 1 something differs or a check failed, 2 usage or environment, 130 Ctrl-C. Results go to
standard output; progress (on a terminal only) and errors, one line each, to standard error.
"""

import argparse
import json
import os
import sys

from .extras import check_installed
from .progress import bar

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPES |= {name: name for name in DTYPES.values()}


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        check_installed(args)
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"vexact {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has gone (`| head`): nothing more to say, and no traceback at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        known = isinstance(error, ValueError | TypeError | OSError | RuntimeError)
        print(f"vexact {args.command}: {text if known else f'{type(error).__name__}: {text}'}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vexact", description="Rollout and trainer log-probabilities, equal bit for bit."
    )
    parser.add_argument("--version", action="version", version=f"vexact {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = _command(commands, "demo", _demo, "prove it on a small real model (about 90 MB are downloaded once)")
    demo.add_argument("--dtype", type=_dtype, default="bfloat16", help="bf16 (default) or fp32")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument("--no-stock", action="store_true", help="leave out the stock Hugging Face stack")
    _outputs(demo)

    verify = _command(commands, "verify", _verify, "compare rollout and training on your model and your prompts")
    _model(verify, or_config=True)
    source = verify.add_argument_group("prompts (random token ids, unless a file is given)")
    source.add_argument("--prompts", metavar="FILE", help=".txt (a prompt a line), .jsonl, or .json as ShareGPT has it")
    source.add_argument("--limit", type=_positive, metavar="N", help="no more than N prompts of the file")
    source.add_argument("--num-prompts", type=_positive, default=8, metavar="N", help="how many random ones (8)")
    source.add_argument("--lengths", type=_lengths, default=[16, 64, 33, 200], metavar="N,N", help="their lengths")
    _chat(source, "no template for plain text")
    _sampling(verify, max_new_tokens=64)
    verify.add_argument("--samples", type=_positive, default=1, metavar="N", help="answers per prompt (1)")
    engine = verify.add_argument_group("engine")
    engine.add_argument("--page-size", type=_positive, default=16)
    engine.add_argument("--num-pages", type=_positive, help="pages in the KV cache; few of them force preemptions")
    engine.add_argument("--max-num-seqs", type=_positive, default=256)
    engine.add_argument("--max-num-batched-tokens", type=_positive, default=2048)
    engine.add_argument("--max-model-len", type=_positive)
    engine.add_argument("--no-prefix-cache", action="store_true")
    engine.add_argument("--kv-segment", type=_positive, help="attention's key segment; part of the numerics")
    engine.add_argument("--latent-attention", action="store_true", help="cache compressed keys (DeepSeek)")
    verify.add_argument("--pack-tokens", type=_positive, help="tokens in one packed training batch")
    verify.add_argument("--random-weights", action="store_true", help="from config.json alone, at its true dimensions")
    verify.add_argument("--layers", type=_positive, metavar="N", help="random weights: the first N layers alone")
    verify.add_argument(
        "--warm", action="store_true", help="roll out once more while the prefix cache knows the prompts"
    )
    verify.add_argument(
        "--batch-sizes", type=_lengths, default=[], metavar="N,N", help="roll out again, so many prompts at a time"
    )
    verify.add_argument(
        "--share-weights", action="store_true", help="engine and trainer take turns on one copy of them"
    )
    verify.add_argument("--stock", action="store_true", help="put the same question to the stock Hugging Face stack")
    verify.add_argument("--stock-prompts", type=_positive, metavar="N", help="for the first N prompts alone")
    verify.add_argument("--show", type=int, default=2, metavar="N", help="answers to print (2)")
    _outputs(verify)

    generate = _command(commands, "generate", _generate, "print what the model answers")
    _model(generate)
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="a text, or - for standard input")
    generate.add_argument("--prompts", metavar="FILE", help="many prompts: .txt, .jsonl or ShareGPT .json")
    _chat(generate, "the model's template where it has one")
    _sampling(generate, max_new_tokens=256)
    generate.add_argument("--samples", type=_positive, default=1, metavar="N", help="answers per prompt (1)")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end there (may be repeated)")
    generate.add_argument("--no-stream", action="store_true", help="print answers when they are whole")
    generate.add_argument("--json", action="store_true", help="a JSON object a line, with ids and log-probabilities")

    doctor = _command(commands, "doctor", _doctor, "what runs here, and a quick check that the contract holds")
    doctor.add_argument("--device", choices=["cpu", "cuda"], help="check this device alone")
    doctor.add_argument("--json", metavar="FILE", help="write the findings")
    ahead = doctor.add_argument_group("fast kernels, verified ahead of a model's first run (GPU)")
    ahead.add_argument(
        "--admit", action="store_true", help="verify them for the model or matrices given below, and nothing else"
    )
    ahead.add_argument("--model", metavar="DIR|HUB-ID", help="those of a model, from its configuration")
    ahead.add_argument("--shapes", type=_shapes, metavar="NxK,NxK", help="weights of N output and K input features")
    ahead.add_argument("--rows", type=_positive, default=512, metavar="N", help="steps of up to so many rows (512)")
    ahead.add_argument(
        "--training", type=_positive, nargs="?", const=8192, metavar="N",
        help="what a trainer's batches of N tokens need, gradients too (8192)",
    )  # fmt: skip
    ahead.add_argument("--page-size", type=_positive, default=16, metavar="N", help="of the engine's cache (16)")
    ahead.add_argument("--kv-segment", type=_positive, metavar="N", help="as engine and trainer set it")
    ahead.add_argument("--dtype", type=_dtype, default="bfloat16", help="bf16 (default)")
    return parser


def _command(commands, name, run, text):
    parser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.set_defaults(run=run)
    parser.add_argument("--debug", action="store_true", help="a traceback instead of one line where something fails")
    return parser


def _outputs(parser):
    parser.add_argument("--json", metavar="FILE", help="write every figure, text and log-probability")
    parser.add_argument("--html", metavar="FILE", help="write a report with plots")


def _model(parser, or_config=False):
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--model", metavar="DIR|GGUF|HUB-ID", help="safetensors directory, GGUF file or Hub name")
    if or_config:
        group.add_argument("--config", metavar="NAME", help="random weights at a known model's sizes: qwen3-8b, ...")
    parser.add_argument("--dtype", type=_dtype, default="bfloat16", help="bf16 (default), fp32, or on a GPU fp16")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")


def _chat(parser, default):
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help=f"wrap texts into the model's chat template (default: {default})",
    )


def _sampling(parser, max_new_tokens):
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=_positive, default=max_new_tokens, help=f"({max_new_tokens})")
    group.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (1.0)")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--ignore-eos", action="store_true", help="generate past the end of the text")


def _dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected bf16, fp16 or fp32")
    return DTYPES[text]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 1 or more")
    return int(text)


def _lengths(text: str) -> list[int]:
    return [_positive(part.strip()) for part in text.split(",")]


def _shapes(text: str) -> list[tuple[int, int]]:
    pairs = [part.lower().split("x") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NxK,NxK such as 6144x4096,4096x4096")
    return [(_positive(n.strip()), _positive(k.strip())) for n, k in pairs]


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("vexact")
    except metadata.PackageNotFoundError:
        import vexact_ops

        return vexact_ops.__version__


# Commands


def _demo(args) -> int:
    _check_writable(args.json, args.html)
    from .proof import demo

    with bar() as progress:
        verification = demo.demo(
            dtype=args.dtype, stock=not args.no_stock, seed=args.seed, show_bars=None, progress=progress
        )
    print(f"{demo.MODEL} answers {len(demo.PROMPTS)} prompts at temperature 1\n")
    _print_samples(verification.aligned.samples, whole=4)
    return _conclude(verification, args)


def _verify(args) -> int:
    _check_writable(args.json, args.html)
    from .config import EngineConfig, SamplingParams
    from .proof.prompts import read_prompts, synthetic_prompts
    from .proof.verify import verify
    from .weights.random import CONFIGS, load_random

    if args.config is not None and args.config not in CONFIGS:
        raise ValueError(f"--config: got {args.config!r}, expected one of {', '.join(CONFIGS)}")
    if args.layers is not None and not (args.config or args.random_weights):
        raise ValueError("--layers: expected --config or --random-weights with it")
    params = SamplingParams(**_sampling_of(args), n=args.samples)
    config = EngineConfig(
        page_size=args.page_size,
        num_pages=args.num_pages,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len,
        enable_prefix_cache=not args.no_prefix_cache,
        kv_segment=args.kv_segment,
        latent_attention=args.latent_attention,
    )
    prompts = read_prompts(args.prompts, args.limit) if args.prompts else None  # before the model: it is quicker
    device = _device(args.device)
    with bar() as progress:
        progress("load", 0, 1)
        if args.config or args.random_weights:
            source = args.config or args.model
            loaded = load_random(source, dtype=args.dtype, device=device, seed=args.seed, layers=args.layers)
        else:
            loaded = _load(args, device)
        if prompts is None:
            size = loaded.model.get_input_embeddings().weight.shape[0]
            prompts = synthetic_prompts(args.num_prompts, args.lengths, size, args.seed)
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
        )
    _print_samples(verification.aligned.samples[: max(0, args.show)], whole=args.show)
    for error in verification.errors:
        print(f"vexact verify: {error}", file=sys.stderr)
    return _conclude(verification, args)


def _generate(args) -> int:
    from dataclasses import replace

    from .config import EngineConfig, SamplingParams
    from .engine import Engine
    from .proof.prompts import Prompt, encode, read_prompts

    params = SamplingParams(**_sampling_of(args), n=args.samples, stop=tuple(args.stop))
    if (args.prompt is None) == (args.prompts is None):
        raise ValueError("expected either PROMPT (- for standard input) or --prompts FILE")
    if args.prompts:
        prompts = read_prompts(args.prompts)
    else:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        if not text.strip():
            raise ValueError("the prompt is empty")
        prompts = [Prompt("prompt", text=text)]
    with bar() as progress:
        progress("load", 0, 1)
        loaded = _load(args, _device(args.device))
    chat = bool(getattr(loaded.tokenizer, "chat_template", None)) if args.chat is None else args.chat
    ids = encode(prompts, loaded.tokenizer, chat=chat)
    config = EngineConfig(max_num_seqs=max(1, min(256, len(ids) * args.samples)))
    each = [replace(params, seed=(args.seed + i) % 2**64) for i in range(len(ids))]
    with Engine(loaded, config) as engine:
        if len(ids) == 1 and args.samples == 1 and not (args.json or args.no_stream or loaded.tokenizer is None):
            return _stream(engine, ids[0], each[0])
        completions = engine.generate(ids, each)
    failed = False
    for index, completion in enumerate(completions):
        source = prompts[index // args.samples]
        failed |= completion.finish_reason == "error"
        if args.json:
            print(_completion_json(source, completion))
        elif completion.finish_reason == "error":
            print(f"vexact generate: {source.source}: {completion.error}", file=sys.stderr)
        else:
            if len(completions) > 1:
                print(f"[{source.source}] {_shorten(source.shown)}")
            print((completion.text or " ".join(map(str, completion.token_ids))).strip())
            if len(completions) > 1:
                print()
    return 2 if failed else 0


def _stream(engine, ids, params) -> int:
    import asyncio

    async def run() -> int:
        async for news in engine.stream(ids, params):
            sys.stdout.write(news.text)
            sys.stdout.flush()
            if news.finish_reason == "error":
                raise ValueError(news.completion.error)
        sys.stdout.write("\n")
        return 0

    return asyncio.run(run())


def _completion_json(prompt, completion) -> str:
    from .proof.compare import finite

    record = {
        "source": prompt.source,
        "prompt": prompt.shown,
        "index": completion.index,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_token_ids": completion.prompt_ids,
        "token_ids": completion.token_ids,
        "logprobs": completion.logprobs,
        "raw_logprobs": completion.raw_logprobs,
        "seed": completion.seed,
        "error": completion.error,
    }
    return json.dumps(finite(record), ensure_ascii=False, allow_nan=False)


def _doctor(args) -> int:
    _check_writable(args.json)
    if args.admit:
        return _admit(args)
    if args.model or args.shapes:
        raise ValueError("--model and --shapes say what --admit is to verify: expected --admit with them")
    import vexact_ops as vx

    from .proof import doctor

    description = doctor.describe()
    _print_pairs("Environment", description)
    _print_pairs("Backends", vx.backends())
    devices = [args.device] if args.device else doctor.devices()
    if "cuda" in devices:
        _device("cuda")
    numerics = {device: vx.numerics(device) for device in devices}
    for device, found in numerics.items():
        rooms = ", ".join(f"{room} {revision}" for room, revision in found["rooms"].items())
        _print_pairs(f"Numerics on {device}", {"class": found["class"], "contract": found["contract"], "rooms": rooms})
    checks = []
    for device in devices:
        print(f"Contract on {device}")
        for check in doctor.self_check(device):
            checks.append(check)
            mark = "ok    " if check.ok else "FAILED"
            print(f"  {mark}  {check.room:<22} {check.dtype:<9} {check.claim}  ({check.seconds:.1f} s)")
            if not check.ok:
                print(f"          {check.error}")
    failed = sum(not check.ok for check in checks)
    print(f"\n{len(checks) - failed} of {len(checks)} checks hold")
    if args.json:
        from dataclasses import asdict

        found = {"environment": description, "backends": vx.backends(), "numerics": numerics}
        _write_json(args.json, found | {"checks": [asdict(check) for check in checks]})
    return 1 if failed else 0


def _admit(args) -> int:
    if not (args.model or args.shapes):
        raise ValueError("--admit: expected --model DIR or --shapes NxK,NxK")
    import torch

    import vexact_ops as vx

    from .proof import doctor

    _device("cuda")
    found = vx.admit(
        doctor.needs(args.model, args.shapes or ()),
        rows=args.rows,
        training_rows=[args.training] if args.training else (),
        dtype=getattr(torch, args.dtype),
        page_size=args.page_size,
        kv_segment=args.kv_segment,
        progress=True,
    )
    for decision in found:
        print(f"{decision.key}: {_shorten(str(decision.chosen.name), 76)}  ({decision.seconds:.2f} s)")
    for key, what in found.refused:
        print(f"refused for {key}: {what}")
    verified = sum(len(decision.verdicts) for decision in found)
    print(f"\n{len(found)} kinds of calls, {verified} kernels verified, {len(found.refused)} refused", end="")
    print(f" ({found.seconds:.1f} s)")
    if args.json:
        from dataclasses import asdict

        record = [
            {"key": d.key, "chosen": d.chosen.name, "why": d.why, "seconds": d.seconds,
             "verdicts": [asdict(v) for v in d.verdicts]}
            for d in found
        ]  # fmt: skip
        _write_json(args.json, {"admissions": record})
    return 0


# Pieces


def _sampling_of(args) -> dict:
    return {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "ignore_eos": args.ignore_eos,
    }


def _device(name: str):
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: got {name!r}, expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: got {name!r}, expected cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"--device: got {name!r}, but torch sees {count} CUDA devices")
    return device


def _load(args, device):
    from .weights.load import load

    return load(args.model, dtype=args.dtype, device=device)


def _check_writable(*paths: str | None) -> None:
    """Before minutes of work, not after."""
    for path in filter(None, paths):
        folder = os.path.dirname(path) or "."
        if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise OSError(f"{path}: cannot be written: expected a file name in a folder that exists")


def _write_json(path: str, value: dict) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, indent=2, allow_nan=False)
        file.write("\n")


def _conclude(verification, args) -> int:
    """Table, verdict, files, exit code."""
    _print_run(verification)
    _print_table(verification)
    print(verification.comparison.verdict())
    if args.json:
        _write_json(args.json, verification.to_json())
    if args.html:
        from .proof.report import write_report

        write_report(args.html, verification)
    written = " and ".join(filter(None, (args.json, args.html)))
    print(f"{verification.seconds:.0f} s in all" + (f"; wrote {written}" if written else ""))
    return 0 if verification.equal else 1


def _print_samples(samples, whole: int) -> None:
    for index, sample in enumerate(samples):
        text = sample.error or sample.text or " ".join(map(str, sample.token_ids))
        if index < whole and not sample.error:
            print(f"> {_shorten(sample.prompt_text)}")
            print("  " + text.strip().replace("\n", "\n  ") + ("" if sample.finish_reason == "stop" else " ..."))
            print()
        else:
            print(f"> {_shorten(sample.prompt_text, 44):<44}  {_shorten(text, 70)}")
    if len(samples) > whole:
        print()


def _shorten(text: str, width: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


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
    if v.gradients is not None:
        g = v.gradients
        state = "all finite" if g.finite else f"NOT FINITE: {', '.join(g.nonfinite[:4]) or 'the loss'}"
        print(
            f"trainer: backward through {g.sequences} packed sequences ({g.tokens} tokens), "
            f"{g.tensors} gradients, {state}, norm {g.norm:.4g}"
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


def _print_pairs(title: str, pairs: dict) -> None:
    print(title)
    width = max(map(len, pairs))
    for key, value in pairs.items():
        print(f"  {key:<{width}}  {value}")
    print()


if __name__ == "__main__":
    sys.exit(main())
