"""A replica as verl's trainer holds it: where its server runs, and what all of them are told."""

import asyncio
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_resource_name
from verl.workers.rollout.replica import RolloutReplica

from . import check_versions
from .server import Options, Server, server_name


class Replica(RolloutReplica):
    """One engine, of one GPU or of pipeline_model_parallel_size of one host.

    raises   ValueError, TypeError, naming options of the rollout that it does not have
    """

    def __init__(
        self,
        replica_rank: int,
        config,
        model_config,
        gpus_per_node: int = 8,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ) -> None:
        check_versions()
        Options.of(omega_conf_to_dataclass(config))
        super().__init__(
            replica_rank, config, model_config, gpus_per_node, is_reward_model, is_teacher_model, name_suffix
        )
        if self.nnodes > 1:
            raise ValueError(
                f"vexact: rollout.pipeline_model_parallel_size: got {self.world_size}, expected at most "
                f"{gpus_per_node}: the stages of a replica are on one host"
            )

    async def launch_servers(self) -> None:
        """One, on the GPUs of the replica's workers. Again: in the place of one that has died."""

        def place(worker) -> tuple[str, str]:
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_accelerator_ids()[get_resource_name()][0]

        if len(self.workers) != self.world_size:
            raise ValueError(
                f"vexact: replica {self.replica_rank}: got {len(self.workers)} workers of {self.world_size}"
            )
        places = await asyncio.gather(*(worker.__ray_call__.remote(place) for worker in self.workers))
        nodes, devices = zip(*places)
        platform = get_platform()
        variables = {name: "1" for name in platform.ray_noset_envvars()} | platform.rollout_env_vars()
        variables[platform.visible_devices_envvar()] = ",".join(devices)
        kind = "reward_" if self.is_reward_model else "teacher_" if self.is_teacher_model else ""
        server = (
            ray.remote(Server)
            .options(
                name=server_name(self.replica_rank, kind, self.name_suffix),
                num_cpus=0,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=nodes[0], soft=False),
                runtime_env={"env_vars": variables},
            )
            .remote(self.config, self.model_config, self.rollout_mode, self.replica_rank)
        )
        await server.launch_server.remote()
        host, port = await server.get_server_address.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def sleep(self) -> None:
        """Once the requests that are there are done."""
        await self._drain()
        await super().sleep()

    async def release_kv_cache(self) -> None:
        await self._drain()
        await super().release_kv_cache()

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Requests under way end with the tokens that they have; others wait for resume_generation.

        reject_request  those that come meanwhile end at once instead, "aborted" and empty
        returns         {"aborted_count": ..., "request_ids": [...]}
        """
        answers = [server.abort_all_requests.remote(reject_request=reject_request) for server in self.servers]
        ids = [name for answer in await asyncio.gather(*answers) for name in answer["request_ids"]]
        return {"aborted_count": len(ids), "request_ids": ids}

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        answers = await asyncio.gather(*(server.abort_request.remote(request_id) for server in self.servers))
        return next((answer for answer in answers if answer["aborted"]), answers[0])

    async def _drain(self) -> None:
        await asyncio.gather(*(server.wait_for_requests_to_drain.remote() for server in self.servers))
