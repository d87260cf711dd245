"""Where an engine's stages and ranks run: processes of this machine, or of several of a Ray cluster."""

import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..config import EngineConfig
from ..runner import saver
from . import limits
from . import messages as m
from .member import Member
from .nodes import Nodes, Start
from .store import Board
from .wire import Door


class Placement:
    """Of one engine.

    actors     nodes.Node on each machine, where EngineConfig.nodes is more than 1; None: Ray places them
    meanwhile  called now and then while something takes long
    store      the file in which the processes that `begin` has begun find each other; "": they ask this process
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, actors: Sequence[Any] | None, meanwhile: Callable[[], None]
    ):
        self._config, self._device, self._given, self._meanwhile = config, device, actors, meanwhile
        self._nodes: Nodes | None = None
        self._door: Door | None = None
        self._folder: tempfile.TemporaryDirectory | None = None
        self.store = ""
        if actors is not None and len(actors) != config.nodes:
            raise ValueError(f"Engine: nodes: got {len(actors)} actors, expected {config.nodes}: EngineConfig.nodes")
        if config.nodes == 1 and device.type == "cuda":
            first, seen = device.index or 0, torch.cuda.device_count()
            if seen < config.processes + first:
                name, got = "pipeline_parallel_size", str(config.processes)
                if config.tensor_parallel_size > 1:
                    name += " x tensor_parallel_size"
                    got = f"{config.pipeline_parallel_size} x {config.tensor_parallel_size}"
                raise ValueError(
                    f"EngineConfig: {name}: got {got}, expected at most {seen - first}: a stage has a GPU of its own"
                )

    def begin(self, into: list[Member]) -> None:
        """All their processes, in order; those that are begun are in the list whatever fails."""
        self.end()
        if self._config.nodes == 1:
            self._folder = tempfile.TemporaryDirectory(prefix="vexact-")
            self.store = str(Path(self._folder.name, "store"))
            variables = saver.environment(self._config.sleep_backend, self._device.type)
            for rank in range(self._config.processes):
                into.append(Member.here(self._name(rank), variables, self._meanwhile))
            return
        nodes = self._placed()
        every = range(self._config.processes)
        firsts = {rank for rank in every if nodes.first(rank) == rank}
        door = self._door = Door(nodes.address, len(every), Board().serve, firsts)
        key, kind = secrets.token_hex(8), self._device.type
        for rank in every:
            start = Start(door.address, door.secret, rank, rank in firsts)
            process = nodes.run(start, f"{key}-{rank}", self._config.sleep_backend, kind)
            name = f"{self._name(rank)} on {nodes.name(rank)}"
            into.append(Member(name, process, self._meanwhile, nodes.near(rank)))
        end = time.monotonic() + limits.START
        for rank, member in enumerate(into):
            member.arrive(door, rank, end, rank in firsts)

    def _placed(self) -> Nodes:
        if self._nodes is not None and not self._nodes.whole:
            self._nodes.close()
            self._nodes = None
        if self._nodes is None:
            if self._given is None:
                self._nodes = Nodes.placed(self._config, self._device.type, self._meanwhile)
            else:
                self._nodes = Nodes(self._given, self._config.processes // self._config.nodes)
        return self._nodes

    def _name(self, rank: int) -> str:
        return m.name_of(rank, self._config.tensor_parallel_size)

    def device(self, rank: int) -> str:
        """As that process calls it."""
        if self._device.type != "cuda":
            return self._device.type
        first = self._device.index or 0 if self._nodes is None else -self._nodes.first(rank)
        return f"cuda:{first + rank}"

    def by_node(self, members: Sequence[Member]) -> list[list[Member]]:
        """Of several machines; [] where there is one, or they are dead."""
        if self._nodes is None or not members:
            return []
        each = len(members) // self._config.nodes
        return [list(members[first : first + each]) for first in range(0, len(members), each)]

    def apart(self, members: Sequence[Member]) -> list[list[Member]]:
        """Those that do not see this process's memory, by their machines."""
        return [group for group in self.by_node(members) if not group[0].near]

    @property
    def nodes(self) -> list[tuple[str, str]]:
        """Of each machine, where there are several, Ray's id and what people call it."""
        return [] if self._nodes is None else self._nodes.names

    def end(self) -> None:
        """The processes have ended: nothing more is kept for them."""
        if self._door is not None:
            self._door.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._door = self._folder = None
        self.store = ""

    def close(self) -> None:
        self.end()
        if self._nodes is not None:
            self._nodes.close()
            self._nodes = None
