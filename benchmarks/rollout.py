"""What a request costs through verl: its LLMServerClient and our server, a Ray actor with an engine.

python -m benchmarks rollout --device cpu --calls 2048

All requests of a round at once, of 8 tokens for one: ours against an actor that answers each at once, plus the time
that the engine needs for them without verl and Ray. The model is the smallest that is one, so that the rest is seen.
In a checkout, where verl is installed (its README says how); on a CPU with the platform of tests/trainers.
"""

import argparse
import asyncio
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
    group.add_argument("--calls", type=int, default=2048, help="at once")


def run(args: argparse.Namespace) -> Iterator[dict]:
    if not (ROOT / "tests" / "trainers").is_dir():
        raise ValueError("rollout: expected a checkout: the model and the platform are those of tests/trainers")
    sys.path.insert(0, str(ROOT / "tests"))
    from trainers.environment import environment as variables

    variables = variables(None)
    if args.device == "cuda":
        variables |= {"VERL_PLATFORM": "", "VERL_USE_EXTERNAL_MODULES": "vexact_engine.verl.register"}
    os.environ.update(variables)
    with tempfile.TemporaryDirectory(prefix="vx-", dir="/tmp") as folder:  # short: Ray's sockets are in it
        yield _measure(args, Path(folder), variables)


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
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=200_000_000,
        _temp_dir=str(folder),
        log_to_driver=False,
        runtime_env={"env_vars": variables},
    )
    try:
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
    finally:
        ray.shutdown()
    us = {name: statistics.median(r[name] for r in rounds) / count * 1e6 for name in timed}
    return {
        "room": "rollout",
        "case": f"{count} requests of one token",
        **{f"us_{name}": round(value, 1) for name, value in us.items()},
        "x_of_instant_and_engine": round(us["ours"] / (us["instant"] + us["engine"]), 3),
        **environment(args.device),
    }
