"""What commands share: groups of options, types of their values, and what is made of them."""

import argparse
import difflib
import json
import os
import re

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DTYPES |= {name: name for name in DTYPES.values()}


class Parser(argparse.ArgumentParser):
    """Of a command. What is wrong is said in its name and in one line: all its options would bury it."""

    def error(self, message):
        asked = re.fullmatch(r"unrecognized arguments: (-\S+)( .*)?", message)
        known = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(asked[1].split("=")[0], known, 1) if asked else []
        hint = f": is it {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message}{hint} ({self.prog} --help has every option)\n")


def command(commands, name, run, text, examples=(), debug=""):
    """A command's parser. Names of options are taken in full alone: one that is added breaks no call.

    debug   what else --debug does
    """
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog="\n".join(("examples:", *(f"  {example}" for example in examples))) if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    text = f"a traceback instead of one line where something fails{debug}"
    parser.add_argument("--debug", action="store_true", help=text)
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    return parser


def json_file(parser, what):
    parser.add_argument("--json", metavar="FILE", help=f"write {what} as one JSON document; - for standard output")


def outputs(parser):
    json_file(parser, "every figure, text and log-probability")
    parser.add_argument("--html", metavar="FILE", help="write a report with plots, to be read in a browser")


def model(parser, or_config=False):
    group = parser.add_mutually_exclusive_group(required=True) if or_config else parser
    group.add_argument(
        "--model",
        required=not or_config,
        metavar="DIR|GGUF|HUB-ID",
        help="safetensors directory, GGUF file or Hub name",
    )
    if or_config:
        group.add_argument("--config", metavar="NAME", help="random weights at a known model's sizes: qwen3-8b, ...")
    adapter(parser)
    tokenizer(parser)
    where(parser)


def adapter(parser):
    parser.add_argument(
        "--adapter", metavar="DIR|HUB-ID", help="LoRA that the model is computed with, unmerged: PEFT's files (none)"
    )


def tokenizer(parser):
    parser.add_argument(
        "--tokenizer", metavar="DIR|HUB-ID|none",
        help="where the tokenizer is (beside the weights); none: prompts are token ids",
    )  # fmt: skip
    parser.add_argument(
        "--trust-remote-code", action="store_true",
        help="run the Python that a directory brings for its tokenizer (never, and nobody is asked)",
    )  # fmt: skip


def where(parser):
    parser.add_argument(
        "--dtype", type=dtype, default="bfloat16", metavar="TYPE", help="bf16 (default), fp32, or on a GPU fp16"
    )
    device_option(parser)


def device_option(parser):
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ...; auto (default): the GPU where there is one"
    )


def chat(parser, default):
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help=f"wrap texts into the model's chat template (default: {default})",
    )


def prompts(parser, number: int, lengths_of: list[int], limit: str):
    """Where prompts come from; `limit` is the default of --limit, in words."""
    source = parser.add_argument_group("prompts (random token ids, unless a file is given)")
    source.add_argument("--prompts", metavar="FILE", help=".txt (a prompt a line), .jsonl, or .json as ShareGPT has it")
    source.add_argument("--limit", type=positive, metavar="N", help=f"no more than N prompts of the file ({limit})")
    text = f"how many random ones ({number})"
    source.add_argument("--num-prompts", type=positive, default=number, metavar="N", help=text)
    text = f"of random ones, in turn ({','.join(map(str, lengths_of))})"
    source.add_argument("--lengths", type=lengths, default=lengths_of, metavar="N,N", help=text)
    return source


def sampling(parser, max_new_tokens):
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens", type=positive, default=max_new_tokens, metavar="N",
        help=f"tokens of an answer, at most ({max_new_tokens})",
    )  # fmt: skip
    group.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (1.0)")
    group.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="the likeliest tokens up to this mass (1.0: all)"
    )
    group.add_argument("--top-k", type=top_k, default=0, metavar="K", help="so many of the likeliest (0 or -1: all)")
    group.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="no token below this share of the likeliest (0.0: all)"
    )
    seed_option(group)
    group.add_argument("--ignore-eos", action="store_true", help="generate past the end of the text")


def seed_option(parser):
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="what all draws are a function of, 0 to 2**64 - 1 (0)"
    )


def engine(parser):
    group = parser.add_argument_group("engine")
    group.add_argument("--page-size", type=positive, default=16, metavar="N", help="tokens per page of the cache (16)")
    group.add_argument(
        "--num-pages", type=positive, metavar="N", help="pages of the KV cache (what fits); too few force preemptions"
    )
    group.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of a GPU's memory, for weights, cache and all else (0.9)",
    )
    group.add_argument(
        "--max-num-seqs", type=positive, default=256, metavar="N", help="sequences computed at once (256)"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=positive, default=2048, metavar="N", help="tokens computed in a step (2048)"
    )
    group.add_argument(
        "--max-model-len", type=positive, metavar="N", help="tokens of prompt and answer together (the model's)"
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="compute every prompt from its beginning")
    group.add_argument(
        "--num-snapshots", type=count, metavar="N", help="copies of states that the prefix cache keeps (hybrid models)"
    )
    group.add_argument(
        "--num-window-pages", type=positive, metavar="N", help="pages of layers with a window (what sequences need)"
    )
    group.add_argument(
        "--kv-segment", type=positive, metavar="N", help="attention's key segment; part of the numerics (none)"
    )
    group.add_argument("--latent-attention", action="store_true", help="cache compressed keys (DeepSeek)")
    group.add_argument(
        "--longrope", choices=("short", "long"), help="factors of all sequences (Phi-3 of a long context, dynamic NTK)"
    )
    group.add_argument(
        "--speculation", type=positive, metavar="N", help="draft up to N tokens of a sequence for one step (none)"
    )
    group.add_argument(
        "--draft-sources", type=names, metavar="A,B", help="of drafts: given, answers, samples, text (all of them)"
    )
    group.add_argument("--draft-model", metavar="MODEL", help="a small model of the same vocabulary drafts too (none)")
    group.add_argument("--mtp", action="store_true", help="the checkpoint's own heads draft too (Qwen3.5, DeepSeek-V3)")


def dtype(text: str) -> str:
    if text not in DTYPES:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected bf16, fp16 or fp32")
    return DTYPES[text]


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 1 or more")
    return int(text)


def count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 0 or more")
    return int(text)


def top_k(text: str) -> int:
    return 0 if text == "-1" else count(text)  # vLLM's word for all of them


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**64:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number from 0 to 2**64 - 1")
    return int(text)


def picture(text: str) -> str:
    if not text.lower().endswith((".svg", ".png", ".pdf")):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a name that ends in .svg, .png or .pdf")
    return text


def names(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def lengths(text: str) -> list[int]:
    return [positive(part.strip()) for part in text.split(",")]


def shapes(text: str) -> list[tuple[int, int]]:
    pairs = [part.lower().split("x") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NxK,NxK such as 6144x4096,4096x4096")
    return [(positive(n.strip()), positive(k.strip())) for n, k in pairs]


# What is made of them


def sampling_of(args) -> dict:
    return {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "min_p": args.min_p,
        "ignore_eos": args.ignore_eos,
    }


def engine_of(args) -> dict:
    return {
        "page_size": args.page_size,
        "num_pages": args.num_pages,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len,
        "enable_prefix_cache": not args.no_prefix_cache,
        "num_snapshots": args.num_snapshots,
        "num_window_pages": args.num_window_pages,
        "kv_segment": args.kv_segment,
        "latent_attention": args.latent_attention,
        "longrope": args.longrope,
        "speculation": speculation_of(args),
        "adapter": args.adapter,
    }


def speculation_of(args) -> dict | None:
    if args.speculation is None:
        return None
    sources = {} if args.draft_sources is None else {"sources": args.draft_sources}
    return {"max_draft_tokens": args.speculation, "draft_model": args.draft_model, "mtp": args.mtp, **sources}


def parallel(group) -> None:
    """How many processes an engine computes in."""
    group.add_argument(
        "--pipeline-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="stages that one engine's layers are cut into, each on a GPU of its own (1)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=positive,
        default=1,
        metavar="N",
        help="ranks that the weights of a stage are cut over, each on a GPU of its own (1)",
    )
    group.add_argument(
        "--nodes",
        type=positive,
        default=1,
        metavar="N",
        help="machines of a Ray cluster that the stages lie on, equally many on each (1)",
    )


def parallel_of(args) -> dict:
    return {name: getattr(args, name) for name in ("pipeline_parallel_size", "tensor_parallel_size", "nodes")}


def device(name: str):
    """The torch.device of --device. ValueError where torch does not see it, BackendUnavailable where nothing of ours
    can compute on it: before anything is fetched or loaded."""
    import vexact_ops as vx

    found = visible_device(name)
    state = vx.backends()["cpu"]
    if found.type == "cpu" and vx.current_backend() is None and state != "available":
        raise vx.BackendUnavailable(state)
    return found


def visible_device(name: str):
    """The same for who only looks at it."""
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device: got {name!r}, expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device: got {name!r}, expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"--device: got {name!r}, but torch sees {count} CUDA devices")
    return device


def load(args, device):
    from ..weights.load import load

    return load(args.model, dtype=args.dtype, device=device, adapter=args.adapter, **tokenizer_of(args))


def load_in_stages(args, device, config):
    """The same for an engine in several processes."""
    from ..weights.load import load_in_stages

    chosen = {"adapter": args.adapter, **tokenizer_of(args)}
    return load_in_stages(args.model, dtype=args.dtype, device=device, asked=config.parallel, **chosen)


def tokenizer_of(args) -> dict:
    """The tokenizer options of the loaders."""
    chosen = False if args.tokenizer == "none" else args.tokenizer
    return {"tokenizer": chosen, "trust_remote_code": args.trust_remote_code}


def progress(args, lines=True):
    """A bar on a terminal, plain lines elsewhere if there may be any, nothing with --quiet."""
    from ..progress import bar

    return bar(False if args.quiet else None, lines=lines)


def check_prompts(args, *of_a_file: str) -> None:
    """What `prompts` has added, and options that mean something for a file's prompts alone."""
    if args.prompts is None:
        expect_with(args, False, "--prompts", "--limit", *of_a_file)
    else:
        expect_without(args, "--prompts", "--num-prompts", "--lengths")


def check_config(args) -> None:
    from ..weights.random import CONFIGS

    if args.config is not None and args.config not in CONFIGS:
        raise ValueError(f"--config: got {args.config!r}, expected one of {', '.join(CONFIGS)}")


def random_prompts(args, model) -> list:
    """Those of --num-prompts and --lengths, for a model's vocabulary."""
    from ..proof.prompts import synthetic_prompts

    return synthetic_prompts(args.num_prompts, args.lengths, model.get_input_embeddings().weight.shape[0], args.seed)


def check_engine(args, device) -> None:
    """What can be said of the engine's options before a model is loaded."""
    from vexact_ops.patch.hf import check_kv_segment

    check_kv_segment(args.kv_segment, device)
    if device.type == "cpu":
        expect_with(args, False, "a GPU", "--gpu-memory-utilization")
    expect_with(args, args.speculation is not None, "--speculation", "--draft-sources", "--draft-model", "--mtp")
    if args.num_pages is not None:
        expect_without(args, "--num-pages", "--gpu-memory-utilization")


def expect_with(args, wanted: bool, owner: str, *dependents: str) -> None:
    """Options that mean something beside another one alone are refused without it, not ignored."""
    lost = [name for name in dependents if dest(name) in args.given]
    if lost and not wanted:
        raise ValueError(f"{lost[0]}: expected {owner} with it")


def expect_without(args, owner: str, *others: str) -> None:
    """Options that another one makes meaningless are refused beside it."""
    lost = [name for name in others if dest(name) in args.given]
    if lost:
        raise ValueError(f"{lost[0]}: not together with {owner}")


def dest(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def given(parser: argparse.ArgumentParser, commands, argv: list[str]) -> set[str]:
    """The names of what the command line says itself. Leaves the parser without its defaults."""
    for command in commands.choices.values():
        for action in command._actions:
            action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(argv)))


def flags(command: argparse.ArgumentParser) -> dict[str, str]:
    """What each of a command's values is called there."""
    return {a.dest: a.option_strings[-1] if a.option_strings else a.dest.upper() for a in command._actions}


# Names of fields that are not those of their options.
_OPTION_OF = {
    "max_draft_tokens": "speculation",
    "sources": "draft_sources",
    "n": "samples",
    "enable_prefix_cache": "no_prefix_cache",
    "latent": "latent_attention",
}
_FIELD = re.compile(r"[\w.-]+: (\w+)( is|:) (.*)")


def name_option(text: str, flags: dict[str, str]) -> str:
    """An error of the Python interface about a field, in the words of the command line: what it calls that field."""
    found = _FIELD.fullmatch(text)
    flag = found and flags.get(_OPTION_OF.get(found[1], found[1]))
    if flag:
        return f"{flag}: {'got ' if found[2] == ' is' else ''}{found[3]}"
    if text.startswith("weights: ") and "model" in flags:
        return f"{flags['model']}: {text.removeprefix('weights: ')}"
    return text


def check_writable(*paths: str | None) -> None:
    """Before minutes of work, not after."""
    for path in filter(None, paths):
        folder = os.path.dirname(path) or "."
        if path != "-" and (os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK)):
            raise OSError(f"{path}: cannot be written: expected a file name in a folder that exists")


def write_json(args, value: dict) -> None:
    """`value` where --json says, after what it is and how it came about."""
    from ..proof.machine import made_by

    document = made_by(args.command, args.line) | value
    text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    if args.json == "-":
        args.stdout.write(text)
        args.stdout.flush()
    else:
        with open(args.json, "w", encoding="utf-8") as file:
            file.write(text)


def shorten(text: str, width: int = 100) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."


def print_pairs(title: str, pairs: dict) -> None:
    print(title)
    width = max(map(len, pairs))
    for key, value in pairs.items():
        print(f"  {key:<{width}}  {value}")
    print()
