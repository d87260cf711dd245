"""Weights of a trainer's ranks to several receivers at once, of engines of one rank and of two: each computes the bits
of one with the same weights, or none has taken any."""

import contextlib
import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_models import build
from handovers import CONFIG, expected, left, other, receiving, texts
from test_handover_shards import FAMILY, SEEDS, WAYS, attempt, connected, joined, spawned, while_they_run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import vexact_ops as vx
from vexact_engine import (
    Engine,
    HandoverFailed,
    PeerLost,
    ShardedWeightSender,
    WeightReceiver,
    WeightSender,
    WeightsTorn,
)
from vexact_engine.handover import buffers, fanout
from vexact_engine.handover import messages as m

pytestmark = pytest.mark.process


def trainer(rank: int, path: str, size: int, way: str, addresses: list[str]) -> None:
    connected(rank, path, size)
    options = {"numerics": vx.numerics("cpu"), "bucket_bytes": 4096, "checksum": True, "timeout": 300}
    with ShardedWeightSender(None if rank else addresses, **options) as sender:
        assert sender.addresses == tuple(addresses)
        for number, seed in enumerate(SEEDS, 1):
            weights = WAYS[way](other(build(FAMILY), seed), size)
            assert sender.send(weights, version=10 * number) == 10 * number
            if sender.rank == 0:
                filled = sender._receivers._posted
                assert filled > 100 and sender._receivers._acknowledged == [filled] * len(addresses)
    dist.destroy_process_group()


@pytest.mark.parametrize(("way", "size", "kinds"), [("fsdp", 2, "two"), ("hybrid", 4, "one"), ("mixed", 3, "mixed")])
def test_shards_arrive_at_every_receiver(way, size, kinds, tmp_path, sockets):
    build(FAMILY).save_pretrained(tmp_path / "model")
    wanted = [expected(FAMILY, other(build(FAMILY), seed)) for seed in SEEDS]
    ranks = {"two": [2, 2], "one": [1, 1, 1, 1], "mixed": [1, 2]}[kinds]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                Engine.from_pretrained(
                    tmp_path / "model", device="cpu", config=replace(CONFIG, tensor_parallel_size=count)
                )
            )
            for count in ranks
        ]
        modes = ["in_place", "staged"] * len(engines)
        receivers = [stack.enter_context(receiving(engine, mode)) for engine, mode in zip(engines, modes)]
        addresses = [receiver.address for receiver, _ in receivers]
        trainers = spawned(trainer, str(tmp_path / "store"), size, way, addresses, size=size)
        for number, then in enumerate(wanted, 1):
            results = [start() for _, start in receivers]
            assert [while_they_run(trainers, result) for result in results] == [10 * number] * len(engines)
            assert [texts(engine) for engine in engines] == [then] * len(engines)
        joined(trainers)


def sending(rank: int, path: str, addresses: list[str], folder: str, sets: list[str], timeout: float) -> None:
    """Sets, and what this rank is told of each."""
    connected(rank, path, 2)
    mesh = init_device_mesh("cpu", (2,))
    whole = other(build(FAMILY), SEEDS[0]).state_dict()
    weights = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    options = {"numerics": vx.numerics("cpu"), "bucket_bytes": 4096, "timeout": timeout}
    with ShardedWeightSender(addresses, **options) as sender:
        for name in sets:
            try:
                told = str(sender.send(weights, version=7))
            except Exception as error:
                told = f"{type(error).__name__}: {error}" + " in doubt" * getattr(error, "in_doubt", False)
            with open(f"{folder}/{name}-{rank}", "w") as file:
                file.write(told)
            dist.barrier()


def told(folder, name):
    return [(folder / f"{name}-{rank}").read_text() for rank in range(2)]


class Two:
    """Two engines and their receivers, and the trainer's ranks; the second receiver is the one with a fault, or the
    first that the trainer has, where it is `turned`."""

    def __init__(self, stack, folder, mode, sets, timeout=300.0, turned=False, **second):
        config = replace(CONFIG, **second.pop("config", {}))
        models = [build(FAMILY), build(**{"family": FAMILY, **second})]
        self.engines = [
            stack.enter_context(Engine.from_pretrained(model, config=c)) for model, c in zip(models, (CONFIG, config))
        ]
        self.old = [texts(engine) for engine in self.engines]
        self._receivers = [stack.enter_context(receiving(engine, mode)) for engine in self.engines]
        self.second = self._receivers[1][0]
        addresses = [receiver.address for receiver, _ in self._receivers]
        self.named = f"receiver {1 if turned else 2} of 2 ({addresses[1]}"
        addresses = addresses[::-1] if turned else addresses
        given = str(folder / "store"), addresses, str(folder), sets, timeout
        self.started = [start() for _, start in self._receivers]
        self.ranks = spawned(sending, *given, size=2)

    def results(self):
        """What came of one set at each."""
        found = [attempt(lambda result=result: while_they_run(self.ranks, result)) for result in self.started]
        self.started = []
        return found

    def again(self):
        self.started = [start() for _, start in self._receivers]


def rows_short(intake, monkeypatch):
    """A bucket is lost on its way."""
    take, count = intake.take, [0]

    def taken(bucket):
        count[0] += 1
        return buffers.READ if count[0] == 7 else take(bucket)

    monkeypatch.setattr(intake, "take", taken)


def fails_to(name, number=1):
    def fail(intake, monkeypatch):
        count = [0]
        method = getattr(intake, name)

        def failing(*given):
            count[0] += 1
            if count[0] == number:
                raise RuntimeError("no more memory")
            return method(*given)

        monkeypatch.setattr(intake, name, failing)

    return fail


FAULTS = {  # of the second receiver: what the first rank is told of it
    "takes": (fails_to("take", 9), "no more memory"),
    "missing": (rows_short, "came in part only"),
    "checks": (fails_to("check"), "no more memory"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("mode", ["in_place", "staged"])
def test_a_fault_of_one_receiver_ends_the_set_for_all_and_the_next_one_comes(
    mode, fault, tmp_path, sockets, monkeypatch
):
    new = expected(FAMILY, other(build(FAMILY), SEEDS[0]))
    spoil, said = FAULTS[fault]
    with contextlib.ExitStack() as stack:
        both = Two(stack, tmp_path, mode, ["fails", "heals"])
        with monkeypatch.context() as patch:
            spoil(both.second._intake, patch)
            first, second = both.results()
            assert isinstance(first, HandoverFailed) and "the sender broke off" in str(first) and said in str(first)
            assert isinstance(second, Exception) and said in str(second)
            for engine, old in zip(both.engines, both.old):
                left(engine, mode, old)
            assert [engine.weight_version for engine in both.engines] == [0, 0]
        both.again()
        assert both.results() == [7, 7] and [texts(engine) for engine in both.engines] == [new, new]
        joined(both.ranks)
    here, there = told(tmp_path, "fails")
    assert here.startswith(f"HandoverFailed: weights: {both.named}") and said in here
    assert there == f"HandoverFailed: rank 0: {here.removeprefix('HandoverFailed: ')}"
    assert told(tmp_path, "heals") == ["7", "7"]


OTHERS = {
    "numerics": ({"config": {"kv_segment": 64}}, "refused: numerics: "),
    "numerics-first": ({"config": {"kv_segment": 64}, "turned": True}, "refused: numerics: "),
    "tensors": ({"num_hidden_layers": 3}, "it takes other tensors than receiver 1 of 2 (ipc://"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_a_receiver_that_is_another_ones_is_named_and_none_has_lost_anything(kind, tmp_path, sockets):
    second, said = OTHERS[kind]
    with contextlib.ExitStack() as stack:
        both = Two(stack, tmp_path, "in_place", ["fails"], **second)
        found = both.results()
        assert all(isinstance(error, HandoverFailed) for error in found)
        assert f"the sender broke off: HandoverFailed: weights: {both.named}" in str(found[0])
        assert [texts(engine) for engine in both.engines] == both.old
        joined(both.ranks)
    here, there = told(tmp_path, "fails")
    assert here.startswith(f"HandoverFailed: weights: {both.named}") and f"): {said}" in here
    assert there == f"HandoverFailed: rank 0: {here.removeprefix('HandoverFailed: ')}"


def test_one_that_fails_as_it_puts_them_in_place_is_named_beside_those_that_did(tmp_path, sockets, monkeypatch):
    new = expected(FAMILY, other(build(FAMILY), SEEDS[0]))
    with contextlib.ExitStack() as stack:
        both = Two(stack, tmp_path, "in_place", ["fails", "heals"])
        with monkeypatch.context() as patch:
            fails_to("finish")(both.second._intake, patch)
            first, second = both.results()
            assert first == 7 and texts(both.engines[0]) == new and isinstance(second, RuntimeError)
            with pytest.raises(WeightsTorn):
                texts(both.engines[1])
        both.again()
        assert both.results() == [7, 7] and [texts(engine) for engine in both.engines] == [new, new]
        joined(both.ranks)
    here, _ = told(tmp_path, "fails")
    assert here.startswith(f"HandoverFailed: weights: {both.named}") and "no more memory" in here
    assert here.endswith("Of 2 receivers these have taken the set: 1")
    assert told(tmp_path, "heals") == ["7", "7"]


def dying(address: str, ready, when: str) -> None:
    """A receiver's process, which ends in the midst of a set."""
    engine = Engine.from_pretrained(build(FAMILY), config=CONFIG)
    receiver = WeightReceiver(engine, address, timeout=300)
    count, method = [0], getattr(receiver._intake, when)

    def counted(*given):
        count[0] += 1
        if count[0] == (9 if when == "take" else 1):
            os._exit(0)
        return method(*given)

    setattr(receiver._intake, when, counted)
    ready.set()
    receiver.receive(300)


@pytest.mark.parametrize("when", ["take", "check", "finish"])
def test_a_receiver_that_dies_is_named(when, tmp_path, sockets):
    context, new = multiprocessing.get_context("spawn"), expected(FAMILY, other(build(FAMILY), SEEDS[0]))
    address, ready = fanout.protocol.new_address(), context.Event()
    process = context.Process(target=dying, args=(address, ready, when))
    process.start()
    assert ready.wait(300)
    with Engine.from_pretrained(build(FAMILY), config=CONFIG) as engine, receiving(engine, "staged") as (first, start):
        old, result = texts(engine), start()
        given = str(tmp_path / "store"), [first.address, address], str(tmp_path), ["dies"], 300.0
        ranks = spawned(sending, *given, size=2)
        if when == "finish":
            assert while_they_run(ranks, result) == 7 and texts(engine) == new
        else:
            with pytest.raises(HandoverFailed, match=r"receiver 2 of 2 .* has died"):
                while_they_run(ranks, result)
            assert texts(engine) == old and engine.weight_version == 0
        joined(ranks)
    process.join()
    Path(address.removeprefix("ipc://")).unlink()  # as whoever makes the next one does
    here, there = told(tmp_path, "dies")
    assert here.startswith(f"PeerLost: weights: receiver 2 of 2 ({address}, the engine (process {process.pid}))")
    assert "has died" in here and there.startswith("HandoverFailed: rank 0: weights: receiver 2 of 2")
    assert here.endswith(" in doubt") == (when == "finish")
    assert ("these have taken the set: 1" in here) == (when == "finish")


def test_a_receiver_that_stalls_is_named(tmp_path, sockets, monkeypatch):
    with contextlib.ExitStack() as stack:
        both = Two(stack, tmp_path, "staged", ["stalls"], timeout=20.0)
        take, goes_on, count = both.second._intake.take, threading.Event(), [0]

        def stalled(bucket):
            count[0] += 1
            if count[0] == 9:
                assert goes_on.wait(600)
            return take(bucket)

        monkeypatch.setattr(both.second._intake, "take", stalled)
        first = attempt(lambda: while_they_run(both.ranks, both.started[0]))
        goes_on.set()
        assert isinstance(first, HandoverFailed) and "receiver 2 of 2" in str(first)
        assert isinstance(attempt(both.started[1]), HandoverFailed)
        assert [texts(engine) for engine in both.engines] == both.old
        joined(both.ranks)
    here, _ = told(tmp_path, "stalls")
    assert here.startswith(f"PeerLost: weights: {both.named}") and "an acknowledgement did not come within 20 s" in here
    assert "receiver 1" not in here


def test_memory_that_one_cannot_open(tmp_path, sockets, monkeypatch):
    with contextlib.ExitStack() as stack:
        both = Two(stack, tmp_path, "in_place", ["opens", "heals"])
        opens, count = both.second._intake.open, [0]

        def refused(offer):
            count[0] += 1
            if count[0] == 2:  # another rank's
                raise HandoverFailed("weights: no right to")
            opens(offer)

        monkeypatch.setattr(both.second._intake, "open", refused)
        found = both.results()
        assert all(isinstance(error, HandoverFailed) for error in found)
        assert [texts(engine) for engine in both.engines] == both.old
        both.again()
        assert both.results() == [7, 7]
        joined(both.ranks)
    here, there = told(tmp_path, "opens")
    assert here.startswith(f"HandoverFailed: rank 1: weights: {both.named}") and here.endswith("no right to")
    assert there == f"HandoverFailed: rank 0: {here.removeprefix('HandoverFailed: ')}"


@pytest.mark.parametrize("keep", [False, True])
def test_buckets_that_one_of_several_may_have_opened_are_kept(keep, monkeypatch):
    sender, made = WeightSender("ipc:///a", numerics=vx.numerics("cpu")), {}

    class Made:
        closed = False

        def close(self):
            self.closed = True

    def offered(kind, device):
        sender._buffers[kind] = made[kind] = Made()
        return kind

    monkeypatch.setattr(sender, "offered", offered)
    monkeypatch.setattr("vexact_engine.handover.sender.gpu_named", lambda name: None)
    welcome = m.Welcome(m.Peer.self("x"), {}, "in_place", "cuda", "", 0)
    found = sender._open(torch.device("cuda:0"), welcome, lambda kind: None if kind == buffers.HOST else "no", keep)
    assert found is made[buffers.HOST] and not found.closed
    assert made[buffers.CUDA].closed != keep
    assert (buffers.CUDA in sender._buffers) == keep


def test_addresses_that_are_none(tmp_path):
    joined(spawned(wrong, str(tmp_path / "store"), size=2))


def wrong(rank: int, path: str) -> None:
    connected(rank, path, 2)
    twice = ["ipc:///a", "ipc:///a"]
    for given, said in (([], "addresses: got []"), (None, "got None"), (twice, "expected each once")):
        with pytest.raises(HandoverFailed if rank else ValueError, match="rank 0" if rank else "") as found:
            ShardedWeightSender(given, numerics=vx.numerics("cpu"))
        assert said in str(found.value)
    dist.destroy_process_group()


class End:
    """A receiver's, which has said so many acknowledgements."""

    def __init__(self, name, alive=True):
        self._receiver, self._socket, self.address = Peer(name, alive), object(), f"ipc://{name}"

    def _answer(self, what, *kinds):
        return m.Ack(0)


class Peer:
    def __init__(self, name, alive):
        self.name, self.alive = name, alive


def of(*ends):
    found = fanout.Fanout([], numerics=vx.numerics("cpu"))
    found.ends, found._acknowledged = list(ends), [0] * len(ends)
    return found


def test_a_bucket_is_given_back_once_all_have_read_it():
    ends = [End("a"), End("b"), End("c")]
    every, (a, b, c) = of(*ends), (end._socket for end in ends)
    every._posted = 3
    given = [every.given_back(dict.fromkeys(ready, 1)) for ready in ([a, b], [a], [c], [b, c], [a, b, c], [c])]
    assert given == [0, 0, 1, 1, 1, 0]
    assert every._acknowledged == [3, 3, 4] and every._given_back == 3


def test_who_is_waited_for():
    every = of(End("a"), End("b"), End("c", alive=False))
    assert not every.peer.alive and every.peer.name == "receiver 3 of 3 (ipc://c, c)"
    every.ends[2]._receiver.alive = True
    assert every.peer.alive and every.peer.name == "the trainer"
    every._posted, every._acknowledged = 4, [3, 4, 2]
    assert every.peer.name == "receiver 1 of 3 (ipc://a, a) and receiver 3 of 3 (ipc://c, c)"
    one = of(End("a"))
    assert one.peer is one.ends[0]._receiver


def test_buckets_that_all_can_open_lie_on_a_gpu_that_all_share():
    def welcome(gpu, device="cuda", shape=(2, 3)):
        return m.Welcome(m.Peer.self("x"), {"a": (shape, "bfloat16")}, "in_place", device, gpu, 3)

    every = of(End("a"), End("b"))
    assert every._agreed([welcome("G"), welcome("G")]).gpu == "G"
    assert every._agreed([welcome("G"), welcome("H")]).gpu == ""
    with pytest.raises(HandoverFailed, match=r"receiver 2 of 2 .*: a: got bfloat16 \(5,\), expected bfloat16 \(2, 3\)"):
        every._agreed([welcome("G"), welcome("G", shape=(5,))])
    with pytest.raises(HandoverFailed, match=r"receiver 2 of 2 .* computes on cpu, receiver 1 of 2 .* on cuda"):
        every._agreed([welcome("G"), welcome("", "cpu")])


def test_buckets_are_given_back_once_all_have_let_go_of_them():
    said = []

    class Leaving(End):
        def __getattr__(self, name):
            return lambda *given, **options: said.append((name, self._receiver.name))

    ends = Leaving("a"), Leaving("b")
    ends[0]._buffers = {buffers.CUDA: None}
    of(*ends).close()
    steps = ("_say_bye", "_await_gone", "_drop_socket")
    assert said == [*((step, name) for step in steps for name in "ab"), ("_free", "a")]


def test_what_one_says_is_said_of_it():
    every, error = of(End("a"), End("b")), PeerLost("weights: no", in_doubt=True)
    named = every._of(1, error)
    assert isinstance(named, PeerLost) and named.in_doubt and str(named) == "weights: receiver 2 of 2 (ipc://b, b): no"
    assert of(End("a"))._of(0, error) is error
