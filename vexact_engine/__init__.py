"""A thin inference engine that consumes vexact_ops alone. Names load lazily; importing has no side effects."""

import importlib
from typing import TYPE_CHECKING

# public name -> module that holds it
_WHERE = {
    "Engine": "engine",
    "EngineConfig": "config",
    "SamplingParams": "config",
    "Speculation": "config",
    "Classification": "classify",
    "Completion": "request",
    "Increment": "outputs",
    "Load": "outputs",
    "Metrics": "request",
    "EngineAsleep": "errors",
    "EngineClosed": "errors",
    "EngineForked": "errors",
    "HandoverFailed": "errors",
    "ModelInUse": "errors",
    "NodeReceivers": "parallel.coordinator",
    "PeerLost": "errors",
    "ReplicaDied": "errors",
    "ReplicaInfo": "parallel.replicas",
    "Replicas": "parallel.replicas",
    "RequestError": "errors",
    "ShardedWeightSender": "handover.shards",
    "StageDied": "errors",
    "StepFailed": "errors",
    "UpdateIncomplete": "errors",
    "WeightsMissing": "errors",
    "WeightReceiver": "handover.receiver",
    "WeightSender": "handover.sender",
    "WeightsTorn": "errors",
}
__all__ = [
    "Classification",
    "Completion",
    "Engine",
    "EngineAsleep",
    "EngineClosed",
    "EngineConfig",
    "EngineForked",
    "HandoverFailed",
    "Increment",
    "Load",
    "Metrics",
    "ModelInUse",
    "NodeReceivers",
    "PeerLost",
    "ReplicaDied",
    "ReplicaInfo",
    "Replicas",
    "RequestError",
    "SamplingParams",
    "ShardedWeightSender",
    "Speculation",
    "StageDied",
    "StepFailed",
    "UpdateIncomplete",
    "WeightReceiver",
    "WeightSender",
    "WeightsMissing",
    "WeightsTorn",
]


def _load(name: str) -> object:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers know the names below and no others
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if TYPE_CHECKING:
    from .classify import Classification
    from .config import EngineConfig, SamplingParams, Speculation
    from .engine import Engine
    from .errors import (
        EngineAsleep,
        EngineClosed,
        EngineForked,
        HandoverFailed,
        ModelInUse,
        PeerLost,
        ReplicaDied,
        RequestError,
        StageDied,
        StepFailed,
        UpdateIncomplete,
        WeightsMissing,
        WeightsTorn,
    )
    from .handover.receiver import WeightReceiver
    from .handover.sender import WeightSender
    from .handover.shards import ShardedWeightSender
    from .outputs import Increment, Load
    from .parallel.coordinator import NodeReceivers
    from .parallel.replicas import ReplicaInfo, Replicas
    from .request import Completion, Metrics
