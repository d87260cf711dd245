"""Where answers come from and weights go: engines in processes of their own, or the stock model's `generate`."""

import contextlib
import importlib
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import SamplingParams
from ..core import garbage
from ..engine import Engine
from ..errors import HandoverFailed
from ..handover.receiver import WeightReceiver
from ..handover.sender import WeightSender
from ..parallel.replicas import Replicas
from ..proof import compare as proof
from ..proof.stock import run_stock
from ..request import Completion, Metrics
from ..weights.config import import_transformers
from .options import Options

logger = logging.getLogger(__name__)
MAKE = f"{__name__}:engine"


def log_start(who: str) -> None:
    """What takes a process's time until a first step is through goes to standard error, each verdict on kernels too."""
    logging.basicConfig(level=logging.INFO, format=f"%(relativeCreated)7d ms, {who}, %(name)s: %(message)s")
    logging.getLogger("vexact_ops._core").setLevel(logging.DEBUG)


class Rollout:
    """Engines in processes of their own, and a way to them for weights. A context manager: close() ends them. They are
    made while others do something else: until `wait_until_ready` has returned, nothing but close() may be called.

    raises     from every method: ReplicaDied once the process is gone, and how it ended; what making the engine raises
    """

    def __init__(self, options: Options, device: torch.device):
        made = {"options": options.to_json(), "device": str(device), "log": logging.getLogger().level}
        self._engine = Replicas(MAKE, [made] * options.replicas, wait=False)
        self._receiver: WeightReceiver | None = None
        self._receiving = ThreadPoolExecutor(1, thread_name_prefix="vexact-weights")
        self._sender: WeightSender | None = None

    def wait_until_ready(self) -> None:
        """The engines are made. Again does nothing."""
        if self._receiver is not None:
            return
        self._engine.wait_until_ready()
        # Both ends of the hand-over are in this process; the bytes go from its memory to the replicas'.
        self._receiver = WeightReceiver(self._engine, f"inproc://vexact-rollout-{id(self)}")

    def numerics(self) -> dict:
        """What fixes the engine's bits."""
        return self._engine.numerics()

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        """As Engine.generate; a request that is itself at fault is an error of the whole."""
        return self._engine.generate(prompts, params, raise_on_error=True)

    def pids(self) -> list[int]:
        """The engines' processes."""
        return [replica.pid for replica in self._engine.replicas if replica.pid is not None]

    def update(
        self, named_tensors: Iterable[tuple[str, Tensor]], numerics: Callable[[], dict], *, version: int | None = None
    ) -> int:
        """Hands all weights over, by CUDA IPC on a GPU and by shared memory on a CPU. Returns their version.

        numerics   says, once, before the first of them, what fixes the trainer's bits
        """
        if self._sender is None:
            self._sender = WeightSender(self._receiver.address, numerics=numerics())
        received = self._receiving.submit(self._receiver.receive)
        try:
            return self._sender.send(named_tensors, version=version)
        except HandoverFailed:
            with contextlib.suppress(TimeoutError):
                received.result(10)  # raises what the other end knows of it
            raise

    def save_answers(self, path: Path) -> None:
        """Where they are kept."""
        if self._engine.config.speculation is not None:
            self._engine.save_answers(path)

    def load_answers(self, path: Path) -> None:
        """Where they are kept, and were."""
        self.wait_until_ready()
        if self._engine.config.speculation is not None and path.exists():
            self._engine.load_answers(path)

    def close(self) -> None:
        """Again does nothing."""
        if self._sender is not None:
            self._receiving.submit(self._receiver.receive)  # who listens hears that it has to let go of the buckets
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
        self._receiving.shutdown()
        self._engine.close()

    def __enter__(self) -> "Rollout":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class Generate:
    """For contrast, what many a script has: `generate` of the stock model in the run's dtype, in the trainer's process.
    Its methods are Rollout's."""

    def __init__(self, options: Options, device: torch.device):
        self._options, self._version = options, 0
        self._loaded = options.load(options.dtype, device)

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Completion]:
        """All answers in one batch, drawn with the first request's seed."""
        rows = [prompt for prompt, asked in zip(prompts, params) for _ in range(asked.n)]
        side = run_stock(
            self._loaded.model,
            rows,
            dtype=self._options.dtype,
            max_new_tokens=self._options.max_new_tokens,
            temperature=self._options.temperature,
            eos_token_ids=self._loaded.eos_token_ids,
            seed=params[0].seed,
            batch_size=len(rows),
            rescore=False,
        )
        return [self._completion(sample) for sample in side.samples]

    def _completion(self, sample: proof.Sample) -> Completion:
        tokenizer, logprobs = self._loaded.tokenizer, sample.rollout.tolist()
        return Completion(
            sample.prompt_ids,
            sample.token_ids,
            logprobs,
            logprobs,
            sample.finish_reason,
            "" if tokenizer is None else tokenizer.decode(sample.token_ids, skip_special_tokens=True),
            self._version,
            weight_versions=[self._version] * len(sample.token_ids),
            metrics=Metrics(0.0, None, [], 0.0),
        )

    def wait_until_ready(self) -> None:
        """It is made."""

    def numerics(self) -> dict:
        """Nothing is promised of it."""
        return {}

    def save_answers(self, path: Path) -> None:
        """It drafts nothing: there are none to keep."""

    def load_answers(self, path: Path) -> None:
        """Nor to load."""

    def pids(self) -> list[int]:
        return []

    @torch.no_grad()
    def update(
        self, named_tensors: Iterable[tuple[str, Tensor]], numerics: Callable[[], dict], *, version: int | None = None
    ) -> int:
        """Copies all weights. Returns their version."""
        own = self._loaded.model.state_dict()
        for name, tensor in named_tensors:
            own[name].copy_(tensor)
        self._version = self._version + 1 if version is None else version
        return self._version

    def __enter__(self) -> "Generate":
        return self

    def __exit__(self, *exception) -> None:
        del self._loaded


def import_ahead(device: str) -> None:
    """What an engine, or a trainer, comes to in this process, and the GPU's context beside it: that needs no lock of
    Python's. What fails is met again.

    device   as --device names it
    """
    with garbage.left(), ThreadPoolExecutor(1) as beside:
        gpu = device != "cpu" and torch.cuda.is_available()
        if gpu:
            place = "cuda" if device == "auto" else device
            beside.submit(torch.zeros, 1, dtype=torch.int32, device=place)
        import_transformers()
        if gpu:
            with contextlib.suppress(Exception):
                importlib.import_module("vexact_ops.attention.cute").import_ahead()


def engine(options: dict[str, Any], device: str, log: int = logging.WARNING) -> Engine:
    """What is made in that process. log: the level of what it says on standard error."""
    if log <= logging.INFO:
        log_start("engine")
    chosen, begin = Options(**options), time.perf_counter()
    loaded = chosen.load(chosen.dtype, torch.device(device))
    logger.info("weights are there after %.1f s", time.perf_counter() - begin)
    made = Engine(loaded, chosen.engine_config())
    logger.info("engine made after %.1f s", time.perf_counter() - begin)
    return made
