"""`vexact bisect`: the first module and op whose output differs between two ways to run a model, and why."""

import contextlib
import copy
import importlib.util
import inspect

from . import options

_STACKS = """\
stacks, each with options behind a colon:
  stock      the Hugging Face model as it is: batch=N (all), pad=left|right, chunk=N (all at once; 1 decodes)
  patched    vx.patch.hf(model), packed as a trainer does: kv_segment=N, latent=true, pack=false, batch=N, pad=...
  engine     the patched model on a paged cache: chunk=N (16; 1 decodes), kv_segment=N, latent=true;
             tp=N: over N ranks, of which layers, the final norm and logits are seen
             both: longrope=short|long
  FILE.py:NAME   NAME(model) of a file of yours, given a copy: a model whose modules have the same names, or a Stack"""


def add_bisect(commands) -> None:
    bisect = options.command(
        commands,
        "bisect",
        run_bisect,
        "find the first difference between two ways to run a model: module, op, element, bits, and why",
        (
            "vexact bisect --model DIR stock:batch=1 stock:pad=left",
            "vexact bisect --model DIR --prompts prompts.jsonl stock:batch=1 stock:batch=1,chunk=1",
            "vexact bisect --model DIR --device cuda patched engine:chunk=1 --html where.html",
            "vexact bisect --config qwen3-0.6b --layers 2 stock mine.py:faster",
        ),
    )
    bisect.epilog = f"{_STACKS}\n\n{bisect.epilog}"
    bisect.add_argument("a", metavar="STACK_A", nargs="?", default="stock:batch=1", help="(stock:batch=1)")
    bisect.add_argument("b", metavar="STACK_B", nargs="?", default="stock", help="(stock: all in one padded batch)")
    options.model(bisect, or_config=True)
    bisect.add_argument("--layers", type=options.positive, metavar="N", help="--config: the first N layers alone (all)")
    source = options.prompts(bisect, 4, [16, 33, 7, 70], limit="8")
    options.seed_option(source)
    options.outputs(bisect)


def run_bisect(args) -> int:
    options.check_writable(args.json, args.html)
    options.expect_with(args, args.config is not None, "--config", "--layers")
    options.check_prompts(args)
    options.check_config(args)
    if args.config is not None:
        options.expect_without(args, "--config", "--adapter")
    parsed = [_parse(flag, text) for flag, text in (("STACK_A", args.a), ("STACK_B", args.b))]
    from vexact_ops.patch.hf import check_kv_segment

    from ..proof import bisect_report
    from ..proof.bisect import bisect
    from ..proof.prompts import encode, read_prompts
    from ..weights.random import load_random

    prompts = read_prompts(args.prompts, args.limit or 8) if args.prompts else None
    device = options.device(args.device)
    for flag, (_, chosen) in zip(("STACK_A", "STACK_B"), parsed):
        with _named(flag):
            check_kv_segment(chosen.get("kv_segment"), device)
    with options.progress(args) as progress:
        progress("load", 0, 1)
        if args.config:
            chosen = {"seed": args.seed, "layers": args.layers, **options.tokenizer_of(args)}
            loaded = load_random(args.config, dtype=args.dtype, device=device, **chosen)
        else:
            loaded = options.load(args, device)
        if prompts is None:
            prompts = options.random_prompts(args, loaded.model)
        stacks = [_stack(flag, *each, loaded.model) for flag, each in zip(("STACK_A", "STACK_B"), parsed)]
        found = bisect(*stacks, encode(prompts, loaded.tokenizer), progress=progress)
    found.command = args.line
    print("\n".join(bisect_report.lines(found)))
    if args.json:
        options.write_json(args, found.to_json())
    if args.html:
        bisect_report.write_report(args.html, found)
    return 0 if found.equal else 1


def _parse(flag: str, text: str) -> tuple[str, dict]:
    """ "stock:batch=1,pad=left" as its name and options. A file's name keeps its colon."""
    if text.partition(".py:")[2]:
        return text, {}
    kind, _, rest = text.partition(":")
    if kind not in ("stock", "patched", "engine"):
        raise ValueError(f"{flag}: got {text!r}, expected stock, patched, engine or FILE.py:NAME")
    found = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        words = {"true": True, "false": False, "none": None, "all": None}
        found[key] = int(value) if value.isdecimal() else words.get(value.lower(), value)
    return kind, found


def _stack(flag: str, kind: str, chosen: dict, model):
    from ..proof import stacks

    if kind in stacks.KINDS:
        known = [name for name in inspect.signature(stacks.KINDS[kind]).parameters if name not in ("model", "name")]
        if unknown := sorted(set(chosen) - set(known)):
            raise ValueError(f"{flag}: {kind} has no option {unknown[0]!r}, expected {', '.join(known)}")
        with _named(flag):
            return stacks.KINDS[kind](model, **chosen)
    path, _, name = kind.rpartition(":")
    spec = importlib.util.spec_from_file_location("vexact_own_stack", path)
    made = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(made)
    except OSError as error:
        raise ValueError(f"{flag}: {path}: {error.strerror}") from None
    except Exception as error:
        raise ValueError(f"{flag}: {path} fails: {type(error).__name__}: {error}") from error
    if not hasattr(made, name):
        raise ValueError(f"{flag}: {path} has no {name}")
    own = getattr(made, name)(copy.deepcopy(model))
    if isinstance(own, stacks.Stack):
        return own
    with _named(flag):
        return stacks.own(own, name=kind)


@contextlib.contextmanager
def _named(flag: str):
    try:
        yield
    except (TypeError, ValueError) as error:
        text = str(error).removeprefix("stack: ").removeprefix("patch.hf: ")
        raise ValueError(f"{flag}: {text.split('() ')[-1]}") from None
