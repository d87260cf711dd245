"""A replica as verl's trainer holds it: where its server runs, and what that is told."""

import asyncio
from typing import Any

from . import check_versions

check_versions()
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.rollout.replica import RolloutReplica

from ..runner import saver
from .server import Server, engine_options, server_name


class Replica(RolloutReplica):
    """One engine, of pipeline x tensor_model_parallel_size GPUs of one host. Made as any of verl's."""

    async def launch_servers(self) -> None:
        """One, on the GPUs of the replica's workers. Again: in the place of one that has died."""
        sleeps = engine_options(self.config)[0].sleep_backend
        if self.nnodes > 1:
            got = f"got {self.world_size}, expected at most {self.gpus_per_node}"
            name = "pipeline_model_parallel_size x tensor_model_parallel_size"
            raise ValueError(f"vexact: rollout.{name}: {got}: a replica is on one host")

        def place(worker) -> tuple[str, str, dict[str, str]]:
            """Where the server is to be: what it is started with is of that machine."""
            context = ray.get_runtime_context()
            device = context.get_accelerator_ids()[get_resource_name()][0]
            return context.get_node_id(), device, saver.environment(sleeps, get_device_name())

        places = await asyncio.gather(*(worker.__ray_call__.remote(place) for worker in self.workers))
        nodes, devices, preloads = zip(*places)
        platform = get_platform()
        variables = {name: "1" for name in platform.ray_noset_envvars()} | platform.rollout_env_vars()
        variables |= preloads[0] | {platform.visible_devices_envvar(): ",".join(devices)}
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        options = {
            "name": server_name(self.replica_rank, kind, self.name_suffix),
            "num_cpus": 0,
            "max_concurrency": self.max_concurrency,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=nodes[0], soft=False),
            "runtime_env": {"env_vars": variables},
        }
        make = ray.remote(Server).options(**options).remote
        server = make(self.config, self.model_config, self.rollout_mode, self.replica_rank)
        await server.launch_server.remote()
        self._server_address = await server.get_server_address.remote()
        self.servers, self._server_handle = [server], server

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
