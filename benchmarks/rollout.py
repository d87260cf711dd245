"""What a request costs through verl: its LLMServerClient and our server, a Ray actor with an engine; and how fast
weights come that way.

python -m benchmarks rollout --device cpu --calls 2048
python -m benchmarks rollout --weights --shape qwen3-8b

All requests of a round at once, of 8 tokens for one: ours against an actor that answers each at once, plus the time
that the engine needs for them without verl and Ray. The model is the smallest that is one, so that the rest is seen.
Weights: fp32 masters under FSDP2 on one GPU, gathered and handed over by verl's own worker to a hybrid replica that has
slept; GB/s of what arrives, bytes compared first. In a checkout, where verl is installed (its README says how); on a
CPU with the platform of tests/trainers.
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from .harness import environment

ROOT = Path(__file__).parent.parent
PROMPT = [5, 6, 7, 8, 9, 10, 11]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True, "max_tokens": 1}


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rollout")
    group.add_argument("--calls", type=int, default=2048, metavar="N", help="requests at once (2048)")
    group.add_argument(
        "--weights", action="store_true", help="update the weights of --shape instead of sending requests"
    )


def run(args: argparse.Namespace) -> Iterator[dict]:
    if not (ROOT / "tests" / "trainers").is_dir():
        raise ValueError("rollout: expected a checkout: the model and the platform are those of tests/trainers")
    sys.path.insert(0, str(ROOT / "tests"))
    from trainers.environment import environment as variables

    variables = variables(None, args.device)
    os.environ.update(variables)
    with tempfile.TemporaryDirectory(prefix="vx-", dir="/tmp") as folder:  # short: Ray's sockets are in it
        if not args.weights:
            yield _measure(args, Path(folder), variables)
            return
        for shape in args.shape.split(","):
            yield _measure_weights(args, shape, Path(folder), variables)


@contextlib.contextmanager
def _cluster(folder: Path, variables: dict[str, str], **options) -> Iterator[None]:
    import ray

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200_000_000,
        _temp_dir=str(folder),
        log_to_driver=False,
        runtime_env={"env_vars": variables},
        **options,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _measure(args: argparse.Namespace, folder: Path, variables: dict[str, str]) -> dict:
    import ray
    from trainers.models import make_model
    from trainers.rollout_trainer import rollout_config
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.replica import RolloutMode, TokenOutput
    from verl.workers.rollout.router import get_router_handle

    from vexact_engine import Engine, SamplingParams
    from vexact_engine.verl.server import Server, engine_options

    class Instant:
        """An actor that answers at once, with as much."""

        async def generate(self, **asked) -> TokenOutput:
            extra = {"global_steps": None, "min_global_steps": None, "max_global_steps": None}
            extra |= {"weight_versions": [0], "num_cached_tokens": 0}
            return TokenOutput(
                token_ids=[1], log_probs=[-1.0], stop_reason="completed", num_preempted=0, extra_fields=extra
            )

    model = make_model("qwen3", folder / "model")
    config = rollout_config(model, "actor_rollout_ref.rollout.load_format=auto")
    rollout, given = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    count, gpus = args.calls, int(args.device == "cuda")
    with _cluster(folder, variables):
        concurrency = {"max_concurrency": max(1000, count + 16)}
        ours = ray.remote(Server).options(**concurrency, num_gpus=gpus)
        ours = ours.remote(rollout, given, RolloutMode.STANDALONE, 0)
        instant = ray.remote(Instant).options(**concurrency).remote()
        ray.get(ours.launch_server.remote())

        def through(name: str, server) -> Callable[[], float]:
            client = LLMServerClient(config, get_router_handle({name: server}))

            async def requests() -> float:
                begin = time.perf_counter()
                calls = (client.generate(f"r{i}", prompt_ids=PROMPT, sampling_params=SAMPLING) for i in range(count))
                outputs = await asyncio.gather(*calls)
                seconds = time.perf_counter() - begin
                if any(len(output.token_ids) != 1 for output in outputs):
                    raise AssertionError("rollout: an answer is not of one token")
                return seconds

            return lambda: asyncio.run(requests())

        from verl.utils.config import omega_conf_to_dataclass

        own, _ = engine_options(omega_conf_to_dataclass(rollout))
        if args.device == "cpu":
            torch.set_num_threads(1)  # as the server has it
        with Engine.from_pretrained(model, device=args.device, dtype=rollout.dtype, config=own) as engine:

            def alone() -> float:
                begin = time.perf_counter()
                engine.generate([PROMPT] * count, SamplingParams(max_new_tokens=1))
                return time.perf_counter() - begin

            timed = {"ours": through("ours", ours), "instant": through("instant", instant), "engine": alone}
            for fn in timed.values():
                fn()
            rounds = [{name: fn() for name, fn in timed.items()} for _ in range(args.repeats)]
    us = {name: statistics.median(r[name] for r in rounds) / count * 1e6 for name in timed}
    least = us["instant"] + us["engine"]
    return {
        "room": "rollout",
        "case": f"{count} requests of one token through verl",
        "backend": "vexact",
        "ours": round(us["ours"], 1),
        "stock": round(least, 1),
        "ratio": round(us["ours"] / least, 3),
        "unit": "us a request",
        **{f"us_{name}": round(us[name], 1) for name in ("instant", "engine")},
        "device": args.device,
        **environment(args.device),
    }


def _measure_weights(args: argparse.Namespace, shape: str, folder: Path, variables: dict[str, str]) -> dict:
    import importlib

    import ray
    from trainers.models import make_model
    from trainers.rollout_trainer import rollout_config
    from transformers import AutoModelForCausalLM
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.llm_server import LLMServerManager

    from vexact_engine.weights.random import config_of

    from .verl_trainer import Trainer, digests

    importlib.import_module("vexact_engine.verl.register")
    model = make_model("qwen3", folder / "model")  # for its tokenizer
    next(model.glob("*.safetensors")).unlink()
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config_of(shape, args.layers))
    empty.config.architectures = [type(empty).__name__]
    empty.config.save_pretrained(model)
    size = 2 * sum(p.numel() for p in empty.parameters())
    whole = rollout_config(
        model,
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=2048",
        "actor_rollout_ref.rollout.enforce_eager=true",  # nothing is computed, and graphs would be made at each update
    )
    with _cluster(folder, variables, num_gpus=1):
        trainer = RayClassWithInitArgs(ray.remote(Trainer), whole.actor_rollout_ref, shape, args.layers)
        pool = RayResourcePool([1], use_gpu=True, max_colocate_count=2)
        trainers = RayWorkerGroup(pool, trainer, device_name=args.device)
        manager = LLMServerManager.create(whole, worker_group=trainers)
        (replica,) = manager.get_replicas()
        updates = CheckpointEngineManager(
            omega_conf_to_dataclass(whole.actor_rollout_ref.rollout.checkpoint_engine), trainers, [replica]
        )

        def update(step: int) -> float:
            updates.sleep_replicas()
            begin = time.perf_counter()
            updates.update_weights(step)
            return time.perf_counter() - begin

        outer = [update(1)]
        (wanted,) = trainers.digests()
        held = replica.server_handle.__ray_call__.remote(
            lambda self: digests(dict(self.engine.model.named_parameters()))
        )
        found = ray.get(held)
        differ = sorted(name for name in found if found[name] != wanted[name])
        if differ or not found:
            raise AssertionError(f"rollout: {len(differ)} tensors differ, {differ[:1]} first")
        outer += [update(step) for step in range(2, 2 + args.repeats)]
        (seconds,) = trainers.get_seconds()
        gathering = [trainers.gather()[0] for _ in range(3)]
    gbps = [size / s / 1e9 for s in seconds[1:]]
    return {
        "room": "handover",
        "case": f"{shape}{'' if args.layers is None else f' {args.layers} layers'} of float32 by verl's update_weights",
        "backend": "vexact",
        "ours": round(statistics.median(gbps), 2),
        "unit": "GB/s",
        "best": round(max(gbps), 2),
        "worst": round(min(gbps), 2),
        "updates": len(gbps),
        "gib": round(size / 2**30, 3),
        "ms": round(1e3 * statistics.median(seconds[1:]), 3),
        "first_ms": round(1e3 * seconds[0], 1),
        "gathering_ms": round(1e3 * min(gathering), 1),
        "with_waking_up_ms": round(1e3 * statistics.median(outer[1:]), 1),
        "device": args.device,
        **environment(args.device),
    }
