"""Gives verl the rollout "vexact". verl imports this, by the entry point in the group `verl.plugins` or by
VERL_USE_EXTERNAL_MODULES=vexact_engine.verl.register; twice is as good as once. Only names are given: what they name
checks verl's version, where nobody swallows the error."""

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry


def _replica():
    from .replica import Replica

    return Replica


RolloutReplicaRegistry.register("vexact", _replica)
getattr(base, "_ROLLOUT_REGISTRY", {})["vexact", "async"] = "vexact_engine.verl.adapter.ServerAdapter"
