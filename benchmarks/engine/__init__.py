"""The engine as a rollout engine is judged: requests and tokens per second, time to the first token and per token, a
step over its roof, how long the GPU stands idle; and afterwards whether the trainer's forward has the same bits.

python -m benchmarks engine --shape qwen3-1.7b --batch 1,64,256 --prompt 512 --new 512
python -m benchmarks engine --model DIR --workload sharegpt,mix --requests 100,1000 --concurrency 8,64,256 --plot
python -m benchmarks engine --shape qwen3-8b --profile traces
python -m benchmarks engine --shape qwen3-8b --batch 256 --engine pipeline_parallel_size=2 --sleep
python -m benchmarks engine --shape qwen3-8b --batch 256 --replicas 2
python -m benchmarks engine --device cpu
"""

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import torch

from ..harness import ceilings, environment, quantile
from . import peers, roof, timing, trace, workloads
from .proof import prove

WORKLOADS = ("fixed", "sharegpt", "mix")
DEFAULTS = {  # of the sizes: what takes a few minutes
    "cpu": {"batch": "1,8", "prompt": 64, "new": 32, "requests": "16"},
    "cuda": {"batch": "1,64,256", "prompt": 512, "new": 512, "requests": "100"},
}
PROFILED = 32  # decode steps that a profile looks at
SMOLLM2 = "smollm2"  # --model: the small real one that is fetched


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--workload", metavar="KIND,KIND", help=f"of: {', '.join(WORKLOADS)} (fixed; with --requests-file that file's)")
    add("--batch", metavar="N,N", help=f"fixed: numbers of sequences ({_defaults('batch')})")
    add("--prompt", type=int, metavar="N", help=f"fixed: tokens of a prompt; mix: their median ({_defaults('prompt')})")
    add("--new", type=int, metavar="N", help=f"fixed: tokens of an answer; mix: their median ({_defaults('new')})")
    add("--requests", metavar="N,N", help=f"sharegpt, mix: numbers of requests ({_defaults('requests')})")
    add("--requests-file", type=Path, metavar="FILE", help="a workload that --write-requests has written (none)")
    add("--write-requests", type=Path, metavar="FILE", help="write the one workload asked for, and stop (run it)")
    add("--concurrency", metavar="N,N", help="sharegpt, mix: so many requests at a time (all at once)")
    add("--rate", metavar="R,R", help="sharegpt, mix: requests per second, at random times (all at once)")
    add("--seed", type=int, default=0, metavar="N", help="of lengths, prompts and arrivals (0)")
    add("--engine", default="", metavar="KEY=VALUE,...", help="fields of EngineConfig (its defaults)")
    add("--replicas", type=int, default=1, metavar="N", help="engines that share the requests, each a process (1)")
    add("--profile", type=Path, metavar="FOLDER", help="a Chrome trace and a table of where a step goes (none)")
    add("--sleep", action="store_true", help="put the engine to sleep afterwards: seconds, and memory")
    add("--no-verify", action="store_true", help="do not compare with the trainer's forward afterwards")
    add(
        "--peer-seconds",
        type=float,
        default=60,
        metavar="S",
        help="where a peer would take longer, it generates fewer tokens (60)",
    )


def _defaults(name: str) -> str:
    """What stands for an option that is not given, as help says it."""
    return f"{DEFAULTS['cpu'][name]} on a CPU, {DEFAULTS['cuda'][name]} on a GPU"


def check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Fill in defaults, turn texts into values; an option that cannot be used is named."""
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    numbers = {"batch": int, "requests": int, "concurrency": int, "rate": float}
    for name, kind in numbers.items():
        given = getattr(args, name) or ""
        try:
            values = [kind(text) for text in given.split(",") if text]
            if not all(value > 0 for value in values):
                raise ValueError
        except ValueError:
            parser.error(f"--{name}: got {given!r}, expected positive numbers such as 1,64,256")
        setattr(args, name, values)
    for name in ("prompt", "new"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: got {getattr(args, name)}, expected 1 or more")
    args.workload = (args.workload or ("" if args.requests_file else "fixed")).split(",")
    args.workload = [name for name in args.workload if name]
    for name in args.workload:
        if name not in WORKLOADS:
            parser.error(f"--workload: got {name!r}, expected one of {', '.join(WORKLOADS)}")
    drawn = {"sharegpt", "mix"} & set(args.workload)
    reads = {
        "batch": "fixed" in args.workload,
        "prompt": {"fixed", "mix"} & set(args.workload),
        "new": {"fixed", "mix"} & set(args.workload),
        "requests": drawn,
        "concurrency": drawn or args.requests_file is not None,
        "rate": drawn or args.requests_file is not None,
    }
    for name, read in reads.items():
        if name in args.given and not read:
            parser.error(f"--{name}: --workload {','.join(args.workload) or 'of a file'} does not read it")
    if args.requests_file is not None and not args.requests_file.is_file():
        parser.error(f"--requests-file: got {args.requests_file}, expected a file that --write-requests has written")
    args.peers_only = None if args.peers is None else [name for name in args.peers.split(",") if name]
    for name in args.peers_only or ():
        if name not in peers.PEERS:
            parser.error(f"--peers: got {name!r}, expected some of {', '.join(peers.PEERS)}")
    try:
        args.config = _config(args.engine)
    except (TypeError, ValueError) as error:
        parser.error(f"--engine: {error}")
    if args.latent:
        args.config = replace(args.config, latent_attention=True)
    if args.replicas < 1:
        parser.error(f"--replicas: got {args.replicas}, expected 1 or more")
    if args.profile is not None and args.replicas > 1:
        parser.error("--profile: replicas compute in other processes, expected --replicas 1")


_SAID = "pipeline_parallel_size", "tensor_parallel_size", "latent_attention", "num_pages"


def _settings(text: str) -> str:
    """What a case is apart by from one of EngineConfig's own settings, but for what it says anyway, and room."""
    return ", ".join(item for item in filter(None, text.split(",")) if item.partition("=")[0] not in _SAID)


def _config(text: str):
    """EngineConfig of "max_num_seqs=64,enforce_eager=True"."""
    import ast

    from vexact_engine import EngineConfig

    known = {field.name for field in fields(EngineConfig)}
    given = {"show_progress": False}
    for item in filter(None, text.split(",")):
        name, equals, value = item.partition("=")
        if not equals or name not in known:
            raise ValueError(f"got {item!r}, expected a field of EngineConfig and its value, such as max_num_seqs=64")
        try:
            given[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"{name}: got {value!r}, expected a number, True, False or None") from None
    return EngineConfig(**given)


def run(args: argparse.Namespace) -> Iterator[dict]:
    """One record per model, dtype, workload and engine: ours first, then the peers on the same prompts."""
    for source in _sources(args):
        for dtype in args.dtype.split(","):
            yield from _model(args, source, dtype)


def _sources(args: argparse.Namespace) -> list[str]:
    if args.model:
        return [args.model]
    return [SMOLLM2] if args.device == "cpu" and not args.shape_given else args.shape.split(",")


def load(args: argparse.Namespace, source: str, dtype: str, whole: bool = True):
    """(Loaded, what it is called, where its weights are from). Not whole: its weights are loaded by other processes."""
    from vexact_engine.weights.fetch import fetch_smollm2
    from vexact_engine.weights.load import load, load_in_stages
    from vexact_engine.weights.random import load_random

    read = load if whole else load_in_stages
    if source == SMOLLM2:
        return read(fetch_smollm2(), device=args.device, dtype=dtype), "smollm2-135m-instruct", "of the model"
    if args.model:
        return read(source, device=args.device, dtype=dtype), Path(source).name, "of the model"
    cut = "" if args.layers is None else f" {args.layers} layer{'s' * (args.layers != 1)}"
    made = load_random(source, device=args.device, dtype=dtype, layers=args.layers, whole=whole)
    return made, source + cut, "random"


def _model(args: argparse.Namespace, source: str, dtype: str) -> Iterator[dict]:
    from vexact_engine import Engine
    from vexact_engine.core import garbage

    if args.replicas > 1:
        from .fleet import replicas

    limits = ceilings(args.device)
    on_gpu = args.device == "cuda"
    _free(on_gpu)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    stages, ranks, several = args.config.pipeline_parallel_size, args.config.tensor_parallel_size, args.replicas > 1
    whole = args.config.processes == 1 and not several  # else other processes hold the weights
    loaded, name, weights = load(args, source, dtype, whole)
    if on_gpu:
        torch.cuda.synchronize()
    load_s = time.perf_counter() - began
    asked = list(_workloads(args, loaded))
    if args.write_requests is not None:
        if len(asked) != 1:
            raise ValueError(f"--write-requests: got {len(asked)} workloads, expected one")
        workloads.write(asked[0], args.write_requests)
        return
    size = roof.sizes(loaded.model, latent=args.config.latent_attention)
    about = {
        "model": name,
        "weights": weights,
        "dtype": dtype,
        "layers": args.layers,
        "latent": args.config.latent_attention,
        "pipeline_parallel_size": stages,
        **({"tensor_parallel_size": ranks} if ranks > 1 else {}),
        **({"replicas": args.replicas} if several else {}),
        **({"settings": settings} if (settings := _settings(args.engine)) else {}),
    }
    began = time.perf_counter()
    engine = replicas(args, source, dtype) if several else Engine(loaded, args.config)
    about |= {"load_s": round(load_s, 2), "start_s": round(time.perf_counter() - began, 2)}
    records, runs = [], []
    try:
        _warm_up(engine, asked)
        for workload in asked:
            engine.reset_prefix_cache()
            garbage.freeze()  # as in a process that is an engine's alone: a collection of all holds every thread
            runs.append(timing.measure(engine, workload, args.seed))
            records.append(_record(about, engine, workload, runs[-1], limits))
            if args.profile is not None:
                records[-1] |= _profiled(args, engine, workload, records[-1]["case"])
        if args.sleep:
            records[-1]["sleep"] = _sleeps(engine, runs[-1])
    finally:
        engine.close()
        gc.unfreeze()
    del engine
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    about = {
        "peak_gib": round(peak / 2**30, 2) if whole else None,
        "device": args.device,
        **environment(args.device),
    }
    _free(on_gpu)
    for record, done in zip(records, runs):  # should what follows fail, the times are known all the same
        steady = _over_roof(record, done, size, limits, None)
        print(f"measured, to be verified: {json.dumps(record | steady | about)}", file=sys.stderr, flush=True)
    if not whole and not args.no_verify:
        loaded = load(args, source, dtype)[0]  # by one process
    for record, done in zip(records, runs):
        touched = None
        if not args.no_verify:
            proof = prove(loaded.model, done, args.config, size, batch=_steady_batch(record), seed=args.seed)
            touched = proof.touched
            record |= proof.figures()
        record |= _over_roof(record, done, size, limits, touched)
        yield {key: value for key, value in record.items() if key[0] != "_"} | about
    del loaded, runs, done
    _free(on_gpu)
    for workload in asked:
        yield from _peers(args, source, dtype, name, weights, workload, about)


def _free(on_gpu: bool) -> None:
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def _workloads(args: argparse.Namespace, loaded) -> Iterator[workloads.Workload]:
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    if "fixed" in args.workload:
        for batch in args.batch:
            yield workloads.fixed(batch, args.prompt, args.new, vocabulary, args.seed)
    for kind in args.workload:
        for requests in args.requests if kind != "fixed" else ():
            if kind == "mix":
                made = workloads.mix(requests, args.prompt, args.new, vocabulary, args.seed)
            else:
                tokenizer, whose = _tokenizer(args, loaded)
                encode = partial(tokenizer, add_special_tokens=False)
                made = workloads.sharegpt(requests, lambda text, e=encode: e(text)["input_ids"], args.seed)
                made = replace(made, about={"tokenizer": whose})
            yield from workloads.sent(made, args.concurrency, args.rate)
    if args.requests_file is not None:
        yield from workloads.sent(workloads.read(args.requests_file), args.concurrency, args.rate)


def _tokenizer(args: argparse.Namespace, loaded):
    """The model's own; SmolLM2's where it has none, whose ids every model here knows. And whose it is."""
    if loaded.tokenizer is not None:
        return loaded.tokenizer, Path(args.model).name if args.model else "smollm2-135m-instruct"
    from transformers import AutoTokenizer

    from vexact_engine.weights.fetch import fetch_smollm2

    path = fetch_smollm2()
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name), "smollm2-135m-instruct"


def _warm_up(engine, asked: list[workloads.Workload]) -> None:
    """A few tokens at each batch size: what a first call does must not count."""
    for batch in sorted({min(w.batch, engine.config.max_num_seqs) for w in asked}):
        timing.measure(engine, workloads.fixed(batch, 8, 4, engine.vocab_size, seed=1 << 20))


def _sleeps(engine, done: timing.Run) -> list[dict]:
    """Of sleeps of each kind (for the first, memory of the host has to be pinned yet): seconds, GiB given back, and how
    many numbers of some of the same requests are others afterwards. At the end the weights are gone."""
    prompts, found = [c.prompt_ids for c in done.completions[:16]], []
    from vexact_engine import SamplingParams

    few = [SamplingParams(max_new_tokens=8, seed=i, ignore_eos=True) for i in range(len(prompts))]
    expected = [(c.token_ids, c.logprobs) for c in engine.generate(prompts, few)]
    for level, tags in ((1, None), (1, None), (1, ["kv_cache"]), (2, None)):
        began = time.perf_counter()
        given = engine.sleep(level, tags)
        slept = time.perf_counter()
        engine.wake_up()
        woken = time.perf_counter()
        found.append(
            {"level": level, "tags": tags, "sleep_s": round(slept - began, 3), "wake_s": round(woken - slept, 3)}
        )
        found[-1]["given_gib"] = {tag: round(count / 2**30, 2) for tag, count in given.items()}
        if level == 1:
            again = [(c.token_ids, c.logprobs) for c in engine.generate(prompts, few)]
            pairs = [pair for a, b in zip(again, expected) for column in zip(a, b) for pair in zip(*column)]
            found[-1]["differ"] = sum(a != b for a, b in pairs)
    return found


def _record(about: dict, engine, workload: workloads.Workload, done: timing.Run, limits: tuple[float, float]) -> dict:
    count, stages = len(workload.jobs), about["pipeline_parallel_size"]
    apart = f", {stages} pipeline stages" if stages > 1 else ""
    apart += f", {about['tensor_parallel_size']} ranks" if "tensor_parallel_size" in about else ""
    apart += f", {about['replicas']} replicas" if "replicas" in about else ""
    apart += f", {about['settings']}" if "settings" in about else ""
    alike = workload.rate is None and len({job.new for job in workload.jobs}) == 1
    return {
        "room": "engine",
        "case": f"{about['model']}{' latent' * about['latent']} {workload.name} {about['dtype']}{apart}",
        "backend": "vexact",
        **about,
        **_asked(workload),
        "workload": workload.name + apart,
        "batch": min(workload.batch, engine.config.max_num_seqs),
        "seconds": round(done.seconds, 4),
        "requests_per_s": round(count / done.seconds, 3),
        "tokens_per_s": round(done.generated / done.seconds, 1),
        "total_tokens_per_s": round((done.generated + done.prompts) / done.seconds, 1),
        "ttft_ms": timing.spread(done.first_token()),
        "tpot_ms": timing.spread(done.per_token()),
        "itl_ms": timing.spread(done.between_tokens()),
        "steps": len(done.steps),
        "preemptions": done.preemptions,
        "path": engine.path,
        "eager": engine.config.enforce_eager,
        "kv_pages": engine.config.num_pages,
        "copy_gbps": round(limits[0] * 1e-9, 1),
        "product_tflops": round(limits[1] * 1e-12, 2),
        "steps_by_size": None if alike else timing.by_size(done.decode_steps()),
        "_alike": alike,
    }


def _asked(workload: workloads.Workload) -> dict:
    return {
        "workload": workload.name,
        "batch": workload.batch,
        "prompt": workload.prompt,
        "new": workload.new,
        "requests": len(workload.jobs),
        "concurrency": workload.concurrency,
        "rate": workload.rate,
        **workload.about,
    }


def _steady_batch(record: dict) -> int | None:
    """Where all requests run from the first to the last step, a decode step is one of all of them, or their share."""
    return -(-record["batch"] // record["pipeline_parallel_size"]) if record["_alike"] else None


def _over_roof(
    record: dict, done: timing.Run, size: roof.Sizes, limits: tuple[float, float], touched: float | None
) -> dict:
    """The median decode step, and the time that bandwidth and arithmetic allow for what such steps do on the mean. In
    stages a step is of as many plans as there are stages, each with its share of the sequences: a token for all of
    them. Ranks have their shares at once."""
    stages, steady = record["pipeline_parallel_size"], done.decode_steps(_steady_batch(record))
    if not steady:
        return {"step_ms": None, "roof_ms": None}
    _, sequences, context = (sum(column) / len(steady) for column in zip(*steady))
    touched_by_chance = size.touched(round(sequences))
    bandwidth, rate = (record.get("tensor_parallel_size", 1) * limit for limit in limits)
    by_bytes, least = (1e3 * s for s in size.seconds(round(sequences), context, bandwidth, rate, touched))
    times = [stages * seconds for seconds, _, _ in steady]
    step = timing.median_ms(times)
    found = {
        "step_ms": step,
        "step_p10_ms": round(1e3 * quantile(times, 0.1), 4),
        "step_p90_ms": round(1e3 * quantile(times, 0.9), 4),
        "roof_ms": round(least, 4),
        "step_over_roof": round(step / least, 3),
        "bytes_ms": round(by_bytes, 4),
        "decode_steps": len(steady),
        "decode_tokens_per_s": round(sum(s[1] for s in steady) / sum(s[0] for s in steady), 1),
        "mean_context": round(context / sequences, 1),
    }
    if size.experts:
        found["experts_touched"] = round(touched_by_chance if touched is None else touched, 2)
        found["experts_counted"] = touched is not None  # else: what chance would touch
    return found


def _profiled(args: argparse.Namespace, engine, workload: workloads.Workload, case: str) -> dict:
    """A window of decode steps looked at: of the same requests again, or, where all are alike, of some whose contexts
    are as long as theirs are half way."""
    steps = max(1, min(PROFILED, workload.new // 4))
    batch, skip = None, min(PROFILED // 2, steps)
    if "fixed" in args.workload and workload.name == f"{workload.batch} x {workload.prompt} + {workload.new}":
        batch = min(workload.batch, engine.config.max_num_seqs)
        middle = workload.prompt + workload.new // 2
        prefill = -(
            -batch * middle // engine.config.max_num_batched_tokens
        )  # steps that the first is ahead of the last
        prompt = max(1, middle - steps - skip - prefill // 2)
        new = prefill + skip + 2 * steps + 4
        workload = workloads.fixed(workload.batch, prompt, new, engine.vocab_size, args.seed + 1)
    stem = case.replace(" ", "-").replace("/", "-").replace(",", "")
    engine.reset_prefix_cache()
    where = args.profile / f"{stem}.json.gz"
    if engine.config.pipeline_parallel_size > 1:  # whose plans have some of them each
        batch = None
    with trace.Profiler(engine, batch=batch, skip=skip, steps=steps, trace=where) as profiler:
        timing.measure(engine, workload, args.seed)
    if profiler.window is None:
        return {"profiled_steps": 0}
    (args.profile / f"{stem}.txt").write_text(f"{case}\n{profiler.window.table()}\n")
    return profiler.window.figures()


def _peers(args, source: str, dtype: str, name: str, weights: str, workload, about: dict) -> Iterator[dict]:
    task = {
        "source": source,
        "model": args.model,
        "layers": args.layers,
        "device": args.device,
        "dtype": dtype,
        "jobs": [[job.prompt_ids, job.new] for job in workload.jobs],
        "seconds": args.peer_seconds,
    }
    if workload.concurrency is not None or workload.rate is not None or args.config.latent_attention:
        return  # peers answer whole lists
    for peer in peers.chosen(args.peers_only):
        found = peers.measure(peer, task)
        if found is not None:
            head = {"room": "engine", "case": f"{name} {workload.name} {dtype}", "backend": peer, "model": name}
            yield {**head, "weights": weights, "dtype": dtype, **_asked(workload), **found, **about, "peak_gib": None}
