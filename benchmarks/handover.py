"""Weights from a trainer's process to an engine's in another one (vexact_engine/handover): how fast they arrive, how
long the engine stands still, and whether fifty updates leave anything behind.

python -m benchmarks handover --shape qwen3-8b
python -m benchmarks handover --shape qwen3-8b --resident bfloat16,float32 --mode in_place,staged --bucket-mib 256,512
python -m benchmarks handover --trainer-device cuda:1
python -m benchmarks handover --device cpu --shape smollm2-135m

What is counted are the bytes that arrive, in the engine's dtype, while the engine has nothing to do, and the trainer
nothing else; `decoding` is the same while it has a request, on the same cores or the same GPU: then a set waits for the
end of a step before its first bucket is written. `stock` is one large copy by one of the two processes, with all its
threads (on a GPU the device's own, from one GPU to the other between two), one after each hand-over; on a CPU `memcpy`
is the same by one thread, as the function of that name has it. Bits come first: every tensor is compared with what the
trainer holds, rounded, after the first hand-over.
"""

import argparse
import gc
import itertools
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .harness import environment

WARM = 3
_STALLS = 3  # updates while the engine computes


@dataclass(frozen=True)
class Case:
    """One way of handing over.

    resident   dtype that the trainer holds its weights in
    """

    resident: str
    mode: str
    transport: str
    bucket: int


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("handover")
    add = group.add_argument
    add(
        "--resident",
        default="bfloat16,float32",
        metavar="TYPE,TYPE",
        help="dtypes that the trainer holds its weights in (bfloat16,float32)",
    )
    add("--mode", default="in_place,staged", metavar="MODE,MODE", help="of: in_place, staged (both)")
    add(
        "--transport",
        metavar="NAME,NAME",
        help="of: cuda_ipc, shared_memory (on a GPU the first, else the second)",
    )
    add("--bucket-mib", default="512", metavar="N,N", help="MiB of a bucket (512; between CPUs 8 at most)")
    add("--trainer-device", metavar="DEVICE", help="where the trainer's weights are (where the engine's are)")
    add("--updates", type=int, default=50, metavar="N", help="of the first case, to see whether memory stays flat (50)")


def run(args: argparse.Namespace) -> Iterator[dict]:
    """One record per shape and case."""
    for shape in args.shape.split(","):
        with _Pair(args, shape) as pair:
            first = True
            for transport in (args.transport or {"cpu": "shared_memory", "cuda": "cuda_ipc"}[args.device]).split(","):
                for mode in args.mode.split(","):
                    for resident in args.resident.split(","):
                        for bucket in args.bucket_mib.split(","):
                            case = Case(resident, mode, transport, int(bucket) << 20)
                            yield pair.measure(case, args.updates if first else args.repeats)
                            first = False


class _Pair:
    """An engine here, a trainer's process, and a pipe to that."""

    def __init__(self, args: argparse.Namespace, shape: str):
        self._args, self._shape = args, shape
        self._trainer_device = args.trainer_device or args.device
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_trainer, args=(theirs,), daemon=True)

    def __enter__(self) -> "_Pair":
        from vexact_engine import Engine, EngineConfig
        from vexact_engine.weights.random import load_random

        self._process.start()
        args = self._args
        loaded = load_random(self._shape, device=args.device, layers=args.layers)
        config = EngineConfig(num_pages=512, max_num_seqs=8, max_num_batched_tokens=256, show_progress=False)
        self._engine = Engine(loaded, config)
        shapes = {name: (tuple(p.shape), p.dtype) for name, p in loaded.model.named_parameters()}
        self._size = sum(p.nbytes for p in loaded.model.parameters())
        self._ask("hold", shapes, self._trainer_device)
        large = 1 << (30 if args.device == "cuda" else 28)
        self._source = torch.ones(large, dtype=torch.uint8, device=self._trainer_device)
        self._target = torch.empty_like(self._source, device=args.device)
        return self

    def __exit__(self, *exception) -> None:
        self._pipe.send(None)
        self._process.join(30)
        self._engine.close()
        gc.collect()

    def _ask(self, *what):
        self._pipe.send(what)
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _copy(self) -> float:
        """GB/s of a large copy into the engine's memory, each byte counted once."""
        wait = torch.cuda.synchronize if self._args.device == "cuda" else lambda: None
        wait()
        begin = time.perf_counter()
        self._target.copy_(self._source)
        wait()
        return len(self._source) / (time.perf_counter() - begin) / 1e9

    def _memcpy(self) -> float:
        """The same by one thread, on a CPU."""
        if self._args.device != "cpu":
            return 0.0
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._copy()
        finally:
            torch.set_num_threads(threads)

    def measure(self, case: Case, updates: int) -> dict:
        from vexact_engine import WeightReceiver
        from vexact_engine.handover.sender import CACHED

        engine, device = self._engine, self._args.device
        with WeightReceiver(engine, mode=case.mode) as receiver:
            wanted = self._ask("open", case, receiver.address, engine.numerics())
            seconds = [self._hand_over(receiver) for _ in range(WARM)]
            first = seconds[0]
            found = {name: _digest(p) for name, p in engine.model.named_parameters()}
            differ = sorted(name for name in found if found[name] != wanted[name])
            if differ:
                raise AssertionError(f"handover: {case}: {len(differ)} tensors differ, {differ[0]} first")
            before = self._held()
            rounds = [(self._hand_over(receiver), self._copy(), self._memcpy()) for _ in range(updates)]
            seconds, copies, alone = zip(*rounds)
            after = self._held()
            stalls, step, decoding = self._stalls(receiver)
        self._ask("close")
        gbps = [self._size / s / 1e9 for s in seconds]
        copy = statistics.median(copies)
        kind = {"cuda_ipc": "CUDA IPC", "shared_memory": "shared memory"}[case.transport]
        where = "" if self._trainer_device == device else f" from {self._trainer_device}"
        size = case.bucket if {self._trainer_device, device} != {"cpu"} else min(case.bucket, CACHED)
        layers = "" if self._args.layers is None else f" {self._args.layers} layers"
        return {
            "room": "handover",
            "case": f"{self._shape}{layers} of {case.resident}{where} {case.mode}, {kind}, {size >> 20} MiB",
            "backend": "vexact",
            "ours": round(statistics.median(gbps), 2),
            "stock": round(copy, 2),
            "ratio": round(statistics.median(gbps) / copy, 4),
            "unit": "GB/s",
            "best": round(max(gbps), 2),
            "worst": round(min(gbps), 2),
            "best_copy": round(max(copies), 2),
            **({"memcpy": round(statistics.median(alone), 2)} if device == "cpu" else {}),
            "decoding": round(self._size / statistics.median(decoding) / 1e9, 2),
            "updates": updates,
            "gib": round(self._size / 2**30, 3),
            "ms": round(1e3 * statistics.median(seconds), 3),
            "first_ms": round(1e3 * first, 1),
            "stall_ms": [round(1e3 * s, 1) for s in stalls],
            "step_ms": round(1e3 * step, 2),
            "grown": {name: after[name] - before[name] for name in before},
            "device": device,
            **environment(device),
        }

    def _hand_over(self, receiver) -> float:
        """Seconds, as the sender sees it."""
        self._pipe.send(("send",))
        receiver.receive(60)
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _stalls(self, receiver) -> tuple[list[float], float, list[float]]:
        """The longest time between two tokens of a request around each of some updates, and the usual one; and how long
        these updates took."""
        from vexact_engine import SamplingParams

        times, done = [], threading.Event()
        params = SamplingParams(max_new_tokens=4096, ignore_eos=True, seed=0)
        ticket = self._engine.submit(
            list(range(16)), params, notify=done.set, listen=lambda _: times.append(time.perf_counter())
        )
        found, seconds = [], []
        try:
            while len(times) < 16:
                time.sleep(0.01)
            steps = [b - a for a, b in itertools.pairwise(times[4:])]
            for _ in range(_STALLS):
                begin = len(times) - 1
                seconds.append(self._hand_over(receiver))
                came = len(times)
                while len(times) < came + 8 and not done.is_set():
                    time.sleep(0.01)
                window = times[begin : came + 8]
                found.append(max(b - a for a, b in itertools.pairwise(window)))
        finally:
            self._engine.withdraw(ticket)
        return found, statistics.median(steps), seconds

    def _held(self) -> dict[str, int]:
        """Bytes and files of both processes."""
        if self._args.device == "cuda":
            torch.cuda.synchronize()
        theirs = self._ask("held")
        free = {} if self._args.device != "cuda" else {"gpu_bytes": -torch.cuda.mem_get_info()[0]}
        named = os.statvfs("/dev/shm")
        return (
            {f"engine_{k}": v for k, v in _held().items()}
            | {f"trainer_{k}": v for k, v in theirs.items()}
            | free
            | {"dev_shm_bytes": (named.f_blocks - named.f_bfree) * named.f_frsize}
        )


def _held() -> dict[str, int]:
    with open("/proc/self/status") as status:
        shared = next(int(line.split()[1]) << 10 for line in status if line.startswith("RssShmem"))
    with open("/proc/self/maps") as maps:
        mapped = sum("vexact-weights" in line for line in maps)
    return {"fds": len(os.listdir("/proc/self/fd")), "shared_bytes": shared, "mappings": mapped} | (
        {"torch_bytes": torch.cuda.memory_reserved()} if torch.cuda.is_initialized() else {}
    )


def _digest(tensor: Tensor) -> int:
    from vexact_engine.handover.buffers import checksum

    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return checksum(torch.cat([raw, raw.new_zeros(-len(raw) % 8)]))


def _trainer(pipe) -> None:
    """The other process: holds tensors, and sends them when it is told to."""
    from vexact_engine import WeightSender

    wanted: dict = {}
    weights: dict[str, Tensor] = {}
    resident, sender, device = "", None, torch.device("cpu")
    while (message := pipe.recv()) is not None:
        try:
            what, *given = message
            answer = None
            if what == "hold":
                wanted, device = given[0], torch.device(given[1])
                if device.type == "cuda":
                    device = torch.device("cuda", device.index or 0)
                    torch.cuda.set_device(device)
            elif what == "open":
                case, address, numerics = given
                if case.resident != resident:
                    weights.clear()
                    weights = _weights(wanted, getattr(torch, case.resident), device)
                    resident = case.resident
                sender = WeightSender(
                    address, numerics=numerics, bucket_bytes=case.bucket, transport=case.transport, timeout=120
                )
                answer = {name: _digest(weights[name].to(dtype)) for name, (_, dtype) in wanted.items()}
            elif what == "send":
                if device.type == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                sender.send(weights)
                answer = time.perf_counter() - begin
            elif what == "held":
                answer = _held()
            elif what == "close":
                sender.close()
        except Exception as error:
            answer = RuntimeError(f"the trainer: {type(error).__name__}: {error}")
        pipe.send(answer)


def _weights(shapes: dict, resident: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Random ones with which a model computes finite logits; in fp32 with bits that rounding drops."""
    generator = torch.Generator(device).manual_seed(1)
    found = {}
    for name, (shape, _) in shapes.items():
        drawn = torch.randn(shape, generator=generator, device=device, dtype=resident)
        found[name] = drawn.mul_(0.02).add_(float(len(shape) == 1))
    return found
