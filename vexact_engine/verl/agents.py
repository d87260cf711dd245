"""verl's agent loops, watched.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=vexact_engine.verl.agents.Manager

verl 0.9.1 waits without a limit for the samples of an agent-loop worker that has died. Under this manager the run ends
with an error that says so. Nor does it begin where the data has images or videos that verl could not open: verl drops
prompts that fail, and goes on.
"""

import ctypes
import logging
import threading

from . import check_versions

check_versions()
import ray
from ray.exceptions import RayActorError
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from .data import check_data

log = logging.getLogger(__name__)

_EVERY = 5.0  # seconds between two looks


class AgentLoopWorkerDied(RuntimeError):
    def __init__(
        self, text: str = "vexact: an agent-loop worker has died, and its samples will not come: the log says which"
    ) -> None:
        super().__init__(text)  # which is all that another process makes one of


class Manager(AgentLoopManagerTQ):
    """verl's own, for a trainer that makes it on the thread that it runs on."""

    def __init__(self, config, *args, **kwargs):
        check_data(config)
        super().__init__(config, *args, **kwargs)

    def generate_sequences(self, prompts) -> None:
        try:
            super().generate_sequences(prompts)
        except RayActorError as error:  # before anybody has looked
            raise AgentLoopWorkerDied from error

    async def _init_agent_loop_workers(self) -> None:
        await super()._init_agent_loop_workers()
        trainer = threading.main_thread().ident  # where Ray runs a task runner
        watch = threading.Thread(target=_watch, args=(list(self.agent_loop_workers), trainer), daemon=True)
        watch.start()


def _watch(workers: list, trainer: int) -> None:
    """Raises AgentLoopWorkerDied in the trainer's thread once a worker has died. One that is busy is only late."""
    asked = {worker.__ray_ready__.remote(): worker for worker in workers}
    over = threading.Event()
    while True:
        done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_EVERY)
        for answer in done:
            worker = asked.pop(answer)
            try:
                ray.get(answer)
            except RayActorError as error:
                log.error("vexact: an agent-loop worker has died: %s", error)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(trainer), ctypes.py_object(AgentLoopWorkerDied)
                )
                return
            asked[worker.__ray_ready__.remote()] = worker
        over.wait(_EVERY)
