"""Gives verl the rollout of the name "vexact": imported by verl, through the entry point of the group `verl.plugins` or
through VERL_USE_EXTERNAL_MODULES=vexact_engine.verl.register. Twice is as good as once.

Only names are registered; what they name checks verl's version when it is wanted.
"""

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

NAME = "vexact"


def _replica() -> type[RolloutReplica]:
    from .replica import Replica

    return Replica


RolloutReplicaRegistry.register(NAME, _replica)
try:
    base._ROLLOUT_REGISTRY[NAME, "async"] = "vexact_engine.verl.adapter.ServerAdapter"
except AttributeError as error:
    from . import check_versions

    check_versions()
    raise ImportError("vexact_engine.verl: this verl has no verl.workers.rollout.base._ROLLOUT_REGISTRY") from error
