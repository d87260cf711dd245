"""`vexact generate`: what a model answers."""

import sys

from . import options


def add_generate(commands) -> None:
    generate = options.command(
        commands,
        "generate",
        run_generate,
        "print what the model answers",
        (
            'vexact generate --model DIR "Once upon a time"',
            "vexact generate --model DIR --temperature 0 - < question.txt",
            "vexact generate --model DIR --prompts prompts.jsonl --samples 4 --json answers.json",
        ),
    )
    options.model(generate)
    generate.add_argument("prompt", nargs="?", metavar="PROMPT", help="a text, or - for standard input")
    generate.add_argument("--prompts", metavar="FILE", help="many prompts: .txt, .jsonl or ShareGPT .json")
    options.chat(generate, "the model's template where it has one")
    options.sampling(generate, max_new_tokens=256)
    generate.add_argument("--samples", type=options.positive, default=1, metavar="N", help="answers per prompt (1)")
    generate.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end there (nowhere; repeat)")
    generate.add_argument("--no-stream", action="store_true", help="print answers when they are whole")
    options.json_file(generate, "answers, ids and log-probabilities")


def run_generate(args) -> int:
    from dataclasses import replace

    from ..config import EngineConfig, SamplingParams
    from ..engine import Engine
    from ..proof.prompts import Prompt, encode, read_prompts

    options.check_writable(args.json)
    params = SamplingParams(**options.sampling_of(args), n=args.samples, stop=tuple(args.stop))
    if (args.prompt is None) == (args.prompts is None):
        raise ValueError("expected either PROMPT (- for standard input) or --prompts FILE")
    if args.prompts:
        prompts = read_prompts(args.prompts)
    else:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
        if not text.strip():
            raise ValueError("the prompt is empty")
        prompts = [Prompt("prompt", text=text)]
    device, lines = options.device(args.device), bool(args.prompts)
    with options.progress(args, lines) as progress:
        progress("load", 0, 1)
        loaded = options.load(args, device)
    chat = bool(getattr(loaded.tokenizer, "chat_template", None)) if args.chat is None else args.chat
    ids = encode(prompts, loaded.tokenizer, chat=chat)
    config = EngineConfig(max_num_seqs=max(1, min(256, len(ids) * args.samples)))
    each = [replace(params, seed=(args.seed + i) % 2**64) for i in range(len(ids))]
    with Engine(loaded, config) as engine:
        if len(ids) == 1 and args.samples == 1 and not (args.json or args.no_stream or loaded.tokenizer is None):
            return _stream(engine, ids[0], each[0])
        with options.progress(args, lines):  # the engine's own bar is inside this one
            completions = engine.generate(ids, each)
    if args.json:
        sources = [prompt for prompt in prompts for _ in range(args.samples)]
        options.write_json(args, {"model": loaded.name, "completions": list(map(_record, sources, completions))})
    failed = False
    for index, completion in enumerate(completions):
        source = prompts[index // args.samples]
        if completion.finish_reason == "error":
            failed = True
            print(f"vexact generate: {source.source}: {completion.error}", file=sys.stderr)
        elif args.json != "-":
            if len(completions) > 1:
                print(f"[{source.source}] {options.shorten(source.shown)}")
            text = " ".join(map(str, completion.token_ids)) if loaded.tokenizer is None else completion.text
            print(text.strip())
            if len(completions) > 1:
                print()
    return 2 if failed else 0


def _stream(engine, ids, params) -> int:
    import asyncio

    async def run() -> int:
        async for increment in engine.stream(ids, params):
            sys.stdout.write(increment.text)
            sys.stdout.flush()
            if increment.finish_reason == "error":
                raise ValueError(increment.completion.error)
        sys.stdout.write("\n")
        return 0

    return asyncio.run(run())


def _record(prompt, completion) -> dict:
    from ..proof.compare import finite

    return finite(
        {
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
    )
