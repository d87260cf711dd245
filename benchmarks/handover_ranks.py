"""Weights from a trainer's ranks, sharded by FSDP2, to engines of tensor-parallel ranks: how fast they arrive.

python -m benchmarks handover_ranks --shape qwen3-8b --layouts 1:1x2,2:1x2 --by whole,shards
python -m benchmarks handover_ranks --shape qwen3-8b --layouts 2:2x2,4:4x1 --by shards --held-in bfloat16,float32
python -m benchmarks handover_ranks --device cpu --shape qwen3-0.6b --layers 2 --layouts 2:2x2

2:2x2 are two ranks of a trainer and two replicas of two ranks each, on four GPUs; the trainer's lie evenly among them.
By `whole` tensors every rank takes part in making each of them whole, and the first of a replica's sends it there;
`gathering` is that alone. By `shards` each rank sends what it holds, to all replicas at once (ShardedWeightSender).
Each engine's rank takes its rows of what comes. GB/s are of what arrives at a replica, at all of its ranks together,
from the first tensor that is asked for to the engine's answer, of the replica that takes longest. Bits come first:
after the first hand-over every log-probability of some prompts, at every replica, is compared with that of the
trainer's own model, patched, in bf16.
"""

import argparse
import contextlib
import itertools
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.multiprocessing
from torch import Tensor

from .harness import environment
from .peers import say_once

WARM, LIMIT, BUCKET = 2, 300.0, 512  # hand-overs that are not timed; seconds of any answer; MiB
DTYPES = "bfloat16", "float32"
WAYS = "whole", "shards"


@dataclass(frozen=True)
class Layout:
    """Ranks of the trainer, and replicas of so many ranks each."""

    trainers: int
    replicas: int
    ranks: int

    def __str__(self):
        several = self.trainers > 1
        to = f"{self.replicas} x TP {self.ranks}" if self.replicas > 1 else f"TP {self.ranks}"
        return f"from {self.trainers} rank{'s' * several} to {to}"

    @property
    def gpus(self) -> int:
        return max(self.trainers, self.replicas * self.ranks)

    def gpu(self, trainer: int) -> int:
        return trainer * (self.gpus // self.trainers)

    def replica(self, trainer: int) -> int | None:
        """Which it sends to; None: to none."""
        each = self.trainers // self.replicas
        return None if trainer % each else trainer // each


def layouts(text: str) -> list[Layout]:
    found = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+):(\d+)x(\d+)", item)
        if not match or min(map(int, match.groups())) < 1:
            raise argparse.ArgumentTypeError(f"got {item!r}, expected trainers:replicasxranks, such as 2:2x2")
        found.append(Layout(*map(int, match.groups())))
        if found[-1].trainers % found[-1].replicas:
            raise argparse.ArgumentTypeError(f"got {item!r}, expected as many ranks of the trainer for each replica")
    return found


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("handover_ranks")
    add = group.add_argument
    add("--layouts", type=layouts, default=layouts("1:1x2"), metavar="T:RxN,T:RxN", help="see above (1:1x2)")
    add(
        "--held-in",
        default="bfloat16",
        metavar="TYPE,TYPE",
        help=f"what the trainer holds: of {', '.join(DTYPES)} (bfloat16)",
    )
    add("--by", default="whole", metavar="WAY,WAY", help=f"of: {', '.join(WAYS)}, where ranks are several (whole)")
    add("--bucket", type=int, default=BUCKET, metavar="N", help=f"MiB of a bucket ({BUCKET}; between CPUs 8 at most)")


def run(args: argparse.Namespace) -> Iterator[dict]:
    """A record for each shape, layout and dtype.

    raises   ValueError where there are fewer GPUs, or a dtype is none; AssertionError where a bit differs
    """
    if unknown := [name for name in args.held_in.split(",") if name not in DTYPES]:
        raise ValueError(f"handover_ranks: --held-in: got {unknown[0]!r}, expected some of {', '.join(DTYPES)}")
    ways = args.by.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        raise ValueError(f"handover_ranks: --by: got {unknown[0]!r}, expected some of {', '.join(WAYS)}")
    most = max(layout.gpus for layout in args.layouts)
    if args.device == "cuda" and torch.cuda.device_count() < most:
        seen = torch.cuda.device_count()
        raise ValueError(f"handover_ranks: --layouts: torch sees {seen} GPUs, expected {most} or more")
    for shape, layout in itertools.product(args.shape.split(","), args.layouts):
        for dtype, way in itertools.product(args.held_in.split(","), ways):
            if way == "shards" and layout.trainers == 1:
                say_once(f"handover_ranks: {layout}: one rank holds no shards, left out")
                continue
            yield _measure(args, shape, layout, dtype, way)


def _measure(args: argparse.Namespace, shape: str, layout: Layout, dtype: str, way: str) -> dict:
    from vexact_engine import Engine, EngineConfig, WeightReceiver
    from vexact_engine.weights.random import load_random

    config = EngineConfig(
        num_pages=512, max_num_seqs=8, max_num_batched_tokens=256, show_progress=False, enforce_eager=True,
        tensor_parallel_size=layout.ranks,
    )  # fmt: skip
    pipes, theirs = zip(*(torch.multiprocessing.Pipe() for _ in range(layout.trainers)))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        what = {"device": args.device, "shape": shape, "layers": args.layers, "dtype": dtype, "way": way}
        given = (layout, f"{folder}/store", theirs, what)
        trainers = torch.multiprocessing.spawn(_trainer, given, nprocs=layout.trainers, join=False, daemon=True)
        stack.callback(_end, trainers, pipes)
        engines = []
        for number in range(layout.replicas):
            device = f"cuda:{number * layout.ranks}" if args.device == "cuda" else "cpu"
            loaded = load_random(shape, device=device, layers=args.layers, whole=layout.ranks == 1)
            engines.append(stack.enter_context(Engine(loaded, config)))
        receivers = [stack.enter_context(WeightReceiver(engine, timeout=LIMIT)) for engine in engines]
        address = {"addresses": [receiver.address for receiver in receivers], "numerics": engines[0].numerics()}
        made = _ask(pipes, trainers, "open", {**address, "bucket": args.bucket << 20})
        expected, size = made[0]

        def hand_over() -> list[float]:
            return _hand_over(receivers, pipes, trainers)

        before = [_found(engine) for engine in engines]
        first = max(hand_over())
        _compare(layout, expected, before, [_found(engine) for engine in engines])
        for _ in range(WARM - 1):
            hand_over()
        seconds = [max(hand_over()) for _ in range(args.repeats)]
        gathering = [max(_ask(pipes, trainers, "gather")) for _ in range(3) if way == "whole"]
        for receiver in receivers:  # first: who lends memory waits for those that read it
            receiver.close()
        _ask(pipes, trainers, "close")
    gbps = [size / s / 1e9 for s in seconds]
    layers = "" if args.layers is None else f" {args.layers} layers"
    how = "by shards, " * (way == "shards") + "in_place" + f", {args.bucket} MiB" * (args.bucket != BUCKET)
    return {
        "room": "handover",
        "case": f"{shape}{layers} of {dtype} {layout}, {how}",
        "backend": "vexact",
        "ours": round(statistics.median(gbps), 2),
        "unit": "GB/s",
        "best": round(max(gbps), 2),
        "worst": round(min(gbps), 2),
        "together": round(layout.replicas * statistics.median(gbps), 2),
        "updates": len(gbps),
        "gib": round(size / 2**30, 3),
        "ms": round(1e3 * statistics.median(seconds), 3),
        "first_ms": round(1e3 * first, 1),
        "gathering_ms": round(1e3 * min(gathering), 1) if gathering else None,
        "logprobs": len(engines) * sum(map(len, expected)),
        "differ": 0,
        "device": args.device,
        **environment(args.device),
    }


def _prompts(vocabulary: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocabulary, (n,), generator=g).tolist() for n in (64, 33, 7)]


def _found(engine) -> list[list[float]]:
    """Its log-probability of every token of some prompts but their first."""
    from vexact_engine import SamplingParams

    params = SamplingParams(max_new_tokens=1, prompt_logprobs=True)
    engine.reset_prefix_cache()
    done = engine.generate(_prompts(engine.vocab_size), params, raise_on_error=True)
    return [list(completion.prompt_logprobs[1:]) for completion in done]


def _bits(values: list[list[float]]) -> Tensor:
    return torch.tensor([value for row in values for value in row], dtype=torch.float32).view(torch.int32)


def _compare(layout: Layout, expected: list, before: list, after: list) -> None:
    for number, (then, now) in enumerate(zip(before, after)):
        differ = int((_bits(now) != _bits(expected)).sum())
        if differ:
            raise AssertionError(f"handover_ranks: {layout}: replica {number}: {differ} log-probabilities differ")
        if torch.equal(_bits(then), _bits(expected)):
            raise AssertionError(f"handover_ranks: {layout}: replica {number} had these weights before")


def _hand_over(receivers: list, pipes, trainers) -> list[float]:
    """Seconds of each replica's, as the rank that sends sees them."""
    failed: list[BaseException] = []

    def receive(receiver) -> None:
        try:
            receiver.receive(LIMIT)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=receive, args=(receiver,)) for receiver in receivers]
    for thread in threads:
        thread.start()
    seconds = [took for took in _ask(pipes, trainers, "send") if took is not None]
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return seconds


def _ask(pipes, trainers, *what) -> list:
    """Of every rank the same."""
    for pipe in pipes:
        pipe.send(what)
    until = time.monotonic() + LIMIT
    while not all(pipe.poll(0.1) for pipe in pipes):
        trainers.join(0)  # raises where one has failed
        if time.monotonic() > until:
            raise TimeoutError(f"handover_ranks: {what[0]}: no answer of every rank in {LIMIT:.0f} s")
    return [pipe.recv() for pipe in pipes]


def _end(trainers, pipes) -> None:
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.send(None)
    for process in trainers.processes:
        process.join(20)
        process.kill()


def _trainer(rank: int, layout: Layout, store: str, pipes, what: dict) -> None:
    """One rank: a whole model first, whose log-probabilities are wanted, and its shards from then on."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from vexact_engine import ShardedWeightSender, WeightSender
    from vexact_engine.weights.random import load_random

    kind, pipe = what["device"], pipes[rank]
    device = torch.device("cuda", layout.gpu(rank)) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if kind == "cuda" else "gloo"
    options = {"init_method": f"file://{store}", "rank": rank, "world_size": layout.trainers}
    dist.init_process_group(backend, **options)
    model = load_random(what["shape"], dtype=what["dtype"], device=device, layers=what["layers"], seed=1).model
    size = 2 * sum(p.numel() for p in model.parameters())
    expected = _expected(model) if not rank else None
    if layout.trainers > 1:
        mesh = init_device_mesh(kind, (layout.trainers,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def whole() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in model.state_dict().items():
            yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    by_shards = what["way"] == "shards"

    def wait() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    sender = None
    while (message := pipe.recv()) is not None:
        name, *given = message
        answer = None
        if name == "open":
            (about,) = given
            limits = {"bucket_bytes": about["bucket"], "timeout": LIMIT}
            if by_shards:
                sender = ShardedWeightSender(about["addresses"], numerics=about["numerics"], **limits)
            elif (replica := layout.replica(rank)) is not None:
                sender = WeightSender(about["addresses"][replica], numerics=about["numerics"], **limits)
            answer = expected, size
        elif name in ("send", "gather"):
            wait()
            dist.barrier()
            begin = time.perf_counter()
            if name == "send" and sender is not None:
                sender.send(model.state_dict() if by_shards else whole())
            else:
                for _ in whole():
                    pass
                wait()
            answer = time.perf_counter() - begin if name == "gather" or sender is not None else None
        elif name == "close" and sender is not None:
            sender.close()
        pipe.send(answer)
    dist.destroy_process_group()


def _expected(model: torch.nn.Module) -> list[list[float]]:
    import copy

    import vexact_ops as vx

    if next(model.parameters()).dtype != torch.bfloat16:
        model = copy.deepcopy(model).bfloat16()
    device = next(model.parameters()).device
    with torch.no_grad(), vx.patch.hf(model) as handle:
        rows = [
            torch.tensor([prompt], dtype=torch.int64, device=device) for prompt in _prompts(model.config.vocab_size)
        ]
        return [handle.logprobs(row)[0, :-1].tolist() for row in rows]
