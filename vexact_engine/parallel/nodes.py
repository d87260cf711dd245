"""The machines of a Ray cluster that an engine's stages lie on: an actor on each starts and ends their processes.

Ray finds the machines and carries the calls that start and end; what stages are told goes over wire.Door's connections.
"""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from ..config import EngineConfig
from ..runner import saver
from . import limits
from .wire import interface_of

if TYPE_CHECKING:
    from ray.actor import ActorHandle

_LOOK = 0.2  # seconds between two looks at what Ray has done
CODE = "from vexact_engine.parallel.stage import main; main()"


class Start(msgspec.Struct):
    """What a stage's process is given on its standard input, where no other process can read it.

    address, secret   of the engine's Door
    rank              which process it is
    is_first          of those on its node: weights that a sender of that node brings come to it
    parent            whose end is its own
    """

    address: tuple[str, int]
    secret: bytes
    rank: int
    is_first: bool = False
    parent: int = 0


def variables() -> dict[str, str]:
    """Of every stage's process: it imports what this one does."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    found.setdefault("NCCL_MAX_P2P_NCHANNELS", "4")  # hidden states are small; the SMs are wanted elsewhere
    return found


class Node:
    """On one machine. As a Ray actor it needs a thread for each of its processes, and some more."""

    def __init__(self) -> None:
        self._processes: dict[str, subprocess.Popen] = {}
        self._unwanted: set[str] = set()
        self._lock = threading.Lock()

    def where(self) -> tuple[str, str]:
        """Its address, and Ray's name of it."""
        import ray

        return ray.util.get_node_ip_address().strip("[]"), ray.get_runtime_context().get_node_id()

    def run(self, key: str, start: bytes, sleep_backend: str, device: str) -> int:
        """A stage's process, from its beginning to its end: how that was, as waiting for it gives it."""
        told = msgspec.msgpack.decode(start, type=Start)
        told.parent = os.getpid()
        environment = variables() | saver.environment(sleep_backend, device)
        interface = interface_of(self.where()[0])
        if interface is not None:  # and on no other do stages listen for each other
            environment.setdefault("GLOO_SOCKET_IFNAME", interface)
            environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        with self._lock:
            if key in self._unwanted:
                return -signal.SIGKILL
            process = subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, env=environment)
            self._processes[key] = process
        try:
            process.communicate(msgspec.msgpack.encode(told))
            return process.returncode
        finally:
            with self._lock:
                del self._processes[key]

    def kill(self, key: str) -> None:
        with self._lock:
            self._unwanted.add(key)
            if key in self._processes:
                self._processes[key].kill()


class RemoteProcess:
    """A stage's process on another machine, with a Popen's methods that its engine needs.

    gone   why nothing is known of its end: the machine itself is not there, or it could not be begun; "" otherwise
    """

    def __init__(self, node: "ActorHandle", where: str, key: str, start: Start, sleep_backend: str, device: str):
        self._node, self._where, self._key = node, where, key
        self.returncode: int | None = None
        self.gone = ""
        self._running = node.run.remote(key, msgspec.msgpack.encode(start), sleep_backend, device)

    def poll(self) -> int | None:
        """As Popen's; -1 where it is `gone`."""
        import ray

        if self.returncode is None and ray.wait([self._running], timeout=0)[0]:
            try:
                self.returncode = ray.get(self._running)
            except Exception as error:
                what = "is gone" if isinstance(error, ray.exceptions.RayActorError) else "could not begin it"
                self.returncode = -1
                self.gone = f"its node, {self._where}, {what}: {type(error).__name__}: {' '.join(str(error).split())}"
        return self.returncode

    def kill(self) -> None:
        self._node.kill.remote(self._key)


class Nodes:
    """Those of one engine: processes / nodes of its stages and ranks on each, in their order.

    address   of this process's machine, at which it listens for them
    names     of each Ray's id, and what people call it
    """

    def __init__(self, actors: "Sequence[ActorHandle]", each: int, group: Any = None):
        import ray

        self._actors, self._each, self._group = list(actors), each, group
        self.address = ray.util.get_node_ip_address().strip("[]")
        own = ray.get_runtime_context().get_node_id()
        try:
            found = ray.get([actor.where.remote() for actor in self._actors], timeout=limits.PLACE)
        except Exception as error:
            self.close()
            raise RuntimeError(f"EngineConfig: nodes: one is gone: {error}") from error
        self.names = [(name, f"{address} (node {name[:8]})") for address, name in found]
        self._local = [name == own for _, name in found]

    @classmethod
    def placed(cls, config: EngineConfig, device: str, meanwhile: Callable[[], None]) -> "Nodes":
        """In a placement group of the cluster that this process is of, or else of RAY_ADDRESS's, this machine's, or one
        that is begun here. ModuleNotFoundError without Ray, ValueError where the cluster is too small, TimeoutError
        where others have what is needed."""
        ray = imported("EngineConfig: nodes")
        if not ray.is_initialized():
            ray.init()
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        each = config.processes // config.nodes
        bundle = demand(each, device)
        needed = [bundle] * config.nodes
        check_room("EngineConfig: nodes", 1, needed)
        group = placement_group(needed, strategy="STRICT_SPREAD")
        try:
            ready, end = [group.ready()], time.monotonic() + limits.PLACE
            while not ray.wait(ready, timeout=_LOOK)[0]:
                meanwhile()
                check_room("EngineConfig: nodes", 1, needed)  # a node may have gone, or be known to have
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"EngineConfig: nodes: Ray has found no {config.nodes} nodes with {words(bundle)} free within "
                        f"{limits.PLACE:.0f} s: others use them"
                    )
            actors = []
            for index in range(config.nodes):
                strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                options = {"scheduling_strategy": strategy, "num_cpus": each, "num_gpus": bundle.get("GPU", 0)}
                actors.append(actor(each, **options).remote())
            return cls(actors, each, group)
        except BaseException:
            ray.util.remove_placement_group(group)
            raise

    @property
    def whole(self) -> bool:
        """Whether all of the actors answer."""
        import ray

        asked = [actor.where.remote() for actor in self._actors]
        try:
            return len(ray.get(asked, timeout=limits.ANSWER)) == len(asked)
        except Exception:
            return False

    def near(self, rank: int) -> bool:
        """Whether that process sees this one's memory."""
        return self._local[rank // self._each]

    def name(self, rank: int) -> str:
        return self.names[rank // self._each][1]

    def first(self, rank: int) -> int:
        """Of those on its machine."""
        return rank // self._each * self._each

    def run(self, start: Start, key: str, sleep_backend: str, device: str) -> RemoteProcess:
        node = self._actors[start.rank // self._each]
        return RemoteProcess(node, self.name(start.rank), key, start, sleep_backend, device)

    def close(self) -> None:
        """Actors that Ray has placed for this engine end; others are whose they are."""
        if self._group is not None:
            import ray

            group, self._group = self._group, None
            if ray.is_initialized():
                ray.util.remove_placement_group(group)


def imported(who: str) -> Any:
    try:
        import ray
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(f"{who}: ray is not installed. Run: pip install ray") from missing
    return ray


@functools.cache
def _actor_class() -> Any:
    import ray

    return ray.remote(max_restarts=0)(Node)


def actor(processes: int, **options: Any) -> Any:
    """A Node's class, for so many processes; `options` are Ray's."""
    return _actor_class().options(max_concurrency=2 * processes + 4, **options)


def demand(processes: int, device: str) -> dict[str, float]:
    """Of Ray's resources, of so many processes on one machine."""
    return {"CPU": processes} | ({"GPU": processes} if device == "cuda" else {})


def check_room(what: str, count: int, bundles: Sequence[dict[str, float]]) -> None:
    """ValueError unless the cluster has room for so many times these, those of one time on different machines, be it in
    use now. They are alike."""
    import ray

    every = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    each = [min(int(has.get(name, 0) / wanted) for name, wanted in bundles[0].items()) for has in every]
    most = 0
    while len(bundles) * (most + 1) <= sum(min(room, most + 1) for room in each):
        most += 1
    if most < count:
        has = "; ".join(words({name: node.get(name, 0) for name in bundles[0]}) for node in every)
        nodes = "a node" if len(bundles) == 1 else f"{len(bundles)} nodes"
        raise ValueError(
            f"{what}: each takes {nodes} with {words(bundles[0])}, and Ray's cluster has room for {most}, expected "
            f"{count}: its nodes have {has or 'nothing'}"
        )


def words(resources: dict[str, float]) -> str:
    return " and ".join(f"{count:g} {name}s" for name, count in resources.items())
