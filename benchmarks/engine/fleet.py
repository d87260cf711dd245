"""Replicas of the engine that a benchmark measures, each made by its own process as the benchmark would make one."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from vexact_engine import Engine, EngineConfig
from vexact_engine.parallel import messages
from vexact_engine.parallel.replicas import Replicas, places


def replicas(args: argparse.Namespace, source: str, dtype: str) -> Replicas:
    """args.replicas of them: on a GPU each of its own, one a stage and rank; on a CPU they share the cores."""
    config = messages.as_dict(args.config)
    environments, threads = places(args.device, args.replicas, args.config.processes)
    what = {"model": args.model, "device": args.device, "layers": args.layers}
    arguments = {"args": what, "source": source, "dtype": dtype, "config": config, "threads": threads}
    return Replicas("benchmarks.engine.fleet:made", [arguments] * args.replicas, environments=environments)


def made(args: Mapping[str, Any], source: str, dtype: str, config: Mapping[str, Any], threads: int | None) -> Engine:
    """What a replica's process calls."""
    from . import load

    if threads is not None:
        torch.set_num_threads(threads)
    made = EngineConfig(**config)
    return Engine(load(argparse.Namespace(**args), source, dtype, whole=made.processes == 1)[0], made)
