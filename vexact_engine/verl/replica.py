"""A replica as verl's trainer holds it: where its server runs, and what that is told."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import check_versions

check_versions()
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.rollout.replica import RolloutReplica

from ..parallel.nodes import actor
from ..runner import saver
from .server import Server, engine_options, server_name

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from verl.single_controller.ray import RayResourcePool, RayWorkerGroup


class Replica(RolloutReplica):
    """One engine, of pipeline x tensor_model_parallel_size GPUs of one host or, by whole stages, of several. Made as
    any of verl's."""

    _nodes: "Sequence[ActorHandle]" = ()  # where there are several
    _trainers: "Sequence[ActorHandle]" = ()  # whose weights it gets, where it shares their GPUs
    _seen: Sequence[tuple] = ()  # where all of those are

    async def init_hybrid(self, worker_group: "RayWorkerGroup") -> None:
        self._trainers = worker_group.workers
        await super().init_hybrid(worker_group)

    async def init_hybrid_colocated(self, worker_group: "RayWorkerGroup", resource_pool: "RayResourcePool") -> None:
        self._trainers = worker_group.workers
        await super().init_hybrid_colocated(worker_group, resource_pool)

    async def launch_servers(self) -> None:
        """One, on the GPUs of the replica's workers. Again: in the place of one that has died. Where it may read what
        each of its node's trainers holds, it sees the GPUs of them all, behind its own."""
        options, own = engine_options(self.config)
        sleeps = options.sleep_backend
        self._check_nodes()

        def place(worker) -> tuple[str, str, dict[str, str]]:
            """Where the server is to be: what it is started with is of that machine."""
            context = ray.get_runtime_context()
            device = context.get_accelerator_ids()[get_resource_name()][0]
            return context.get_node_id(), device, saver.environment(sleeps, get_device_name())

        others = [worker for worker in self._trainers if worker not in self.workers and own["shards"] == "replicas"]
        found = await asyncio.gather(*(worker.__ray_call__.remote(place) for worker in (*self.workers, *others)))
        found, self._seen = found[: len(self.workers)], found
        each = self.gpus_per_replica_node
        places = [found[first : first + each] for first in range(0, len(found), each)]
        for index, of_node in enumerate(places):
            if len({node for node, *_ in of_node}) > 1:
                ranks = f"{index * each} to {index * each + each - 1}"
                raise ValueError(f"vexact: replica {self.replica_rank}: its ranks {ranks} are not on one node")
        for node in self._nodes:  # of one that has died
            ray.kill(node)
        self._nodes = self._begin_nodes(places) if self.nnodes > 1 else ()
        options = self._options(places[0], 0) | {"max_concurrency": self.max_concurrency}
        make = ray.remote(Server).options(**options).remote
        server = make(self.config, self.model_config, self.rollout_mode, self.replica_rank, self._nodes or None)
        await server.launch_server.remote()
        self._server_address = await server.get_server_address.remote()
        self.servers, self._server_handle = [server], server

    def _check_nodes(self) -> None:
        stages = self.config.pipeline_model_parallel_size
        if stages % self.nnodes:
            raise ValueError(
                f"vexact: rollout.pipeline_model_parallel_size: got {stages}, expected a multiple of {self.nnodes}: a "
                f"replica of {self.world_size} GPUs is on {self.nnodes} nodes of {self.gpus_per_node}, and the ranks "
                "of one stage are on one node"
            )

    def _options(self, places: list, node: int, name: bool = True) -> dict[str, Any]:
        """Of an actor on a node. It computes on the GPUs of the replica's workers there, which it sees first: they are
        cuda:0 and so on. Behind them are those of other trainers there."""
        (first, _, preload), platform = places[0], get_platform()
        variables = {name: "1" for name in platform.ray_noset_envvars()} | platform.rollout_env_vars() | preload
        seen = dict.fromkeys(device for node, device, _ in (*places, *self._seen) if node == first)
        variables[platform.visible_devices_envvar()] = ",".join(seen)
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        options = {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=first, soft=False),
            "runtime_env": {"env_vars": variables},
        }
        return options | ({"name": server_name(self.replica_rank, kind, self.name_suffix, node)} if name else {})

    def _begin_nodes(self, places: list[list]) -> "list[ActorHandle]":
        """That begin the stages' processes; the first node's has no name, which is the server's."""
        found = []
        for index, of_node in enumerate(places):
            options = self._options(of_node, index, name=index > 0)
            found.append(actor(len(of_node), **options).remote())
        return found

    async def sleep(self) -> None:
        """Once the requests that are there are done; release_kv_cache likewise."""
        await self._server_handle.wait_for_requests_to_drain.remote()
        await super().sleep()

    async def release_kv_cache(self) -> None:
        await self._server_handle.wait_for_requests_to_drain.remote()
        await super().release_kv_cache()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """As the server's, with what it counts: {"aborted_count": ..., "request_ids": [...]}."""
        return await self._server_handle.abort_all_requests.remote(reject_request=reject_request)
