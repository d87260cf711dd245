"""Weights of a trainer's ranks, each of which sends the shards that it holds: to an engine of one rank and of two. The
engine computes the bits of one with the same weights, or all ranks are told why not."""

import contextlib
import os
import tempfile
import threading
import types
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from engine_models import build
from handovers import CONFIG, expected, left, other, receiving, texts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import vexact_ops as vx
from vexact_engine import Engine, HandoverFailed, ShardedWeightSender
from vexact_engine.handover import buffers
from vexact_engine.handover import messages as m
from vexact_engine.handover.shards import Known, _First, own_piece
from vexact_engine.weights.update import Piece, Places, Update

pytestmark = pytest.mark.process
FAMILY, SEEDS = "Qwen3Moe", (7, 8)


def fsdp(model, size):
    mesh = init_device_mesh("cpu", (size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.state_dict()


def hybrid(model, size):
    """Two copies, of which each is cut."""
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.state_dict()


def mixed(model, size):
    """By columns, whole on each rank as a DTensor, and plain."""
    mesh = init_device_mesh("cpu", (size,))
    ways = [[Shard(1)], [Replicate()], None, [Shard(0)]]
    given = {}
    for number, (name, tensor) in enumerate(model.state_dict().items()):
        way = ways[number % 4] if tensor.dim() > 1 else [Shard(0)]
        given[name] = tensor if way is None else distribute_tensor(tensor, mesh, way)
    return given


WAYS = {"fsdp": fsdp, "hybrid": hybrid, "mixed": mixed}


def connected(rank, path, size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=rank, world_size=size)


def trainer(rank: int, path: str, size: int, way: str, addresses: list[str]) -> None:
    connected(rank, path, size)
    options = {"numerics": vx.numerics("cpu"), "bucket_bytes": 4096, "checksum": True, "timeout": 300}
    with contextlib.ExitStack() as stack:
        senders = [
            stack.enter_context(ShardedWeightSender(None if rank else address, **options)) for address in addresses
        ]
        for number, seed in enumerate(SEEDS, 1):
            weights = WAYS[way](other(build(FAMILY), seed), size)
            for sender in senders:
                assert sender.send(weights, version=10 * number) == 10 * number
            dist.barrier()
    dist.destroy_process_group()


def spawned(function, *given, size):
    return torch.multiprocessing.spawn(function, given, nprocs=size, join=False)


def joined(ranks):
    while not ranks.join():
        pass


def while_they_run(ranks, result):
    """What comes of `result`, unless a rank fails before."""
    found = []
    thread = threading.Thread(target=lambda: found.append(attempt(result)), daemon=True)
    thread.start()
    while thread.is_alive():
        ranks.join(0.1)  # raises
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def attempt(result):
    try:
        return result()
    except Exception as error:
        return error


@pytest.mark.parametrize(("way", "size"), [("fsdp", 2), ("fsdp", 3), ("hybrid", 4), ("mixed", 2)])
def test_shards_arrive_at_one_rank_and_at_two(way, size, tmp_path, sockets):
    build(FAMILY).save_pretrained(tmp_path / "model")
    wanted = [expected(FAMILY, other(build(FAMILY), seed)) for seed in SEEDS]
    assert wanted[0] != wanted[1]
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(Engine.from_pretrained(tmp_path / "model", device="cpu", config=config))
            for config in (replace(CONFIG, tensor_parallel_size=2), CONFIG)
        ]
        places = [(engines[0], "in_place"), (engines[0], "staged"), (engines[1], "in_place")]
        receivers = [stack.enter_context(receiving(engine, mode)) for engine, mode in places]
        addresses = [receiver.address for receiver, _ in receivers]
        ranks = spawned(trainer, str(tmp_path / "store"), size, way, addresses, size=size)
        for number, then in enumerate(wanted, 1):
            results = [start() for _, start in receivers]
            assert [while_they_run(ranks, result) for result in results] == [10 * number] * len(places)
            assert all(texts(engine) == then for engine in engines)
        joined(ranks)


FAULTS = {  # of the second rank's, but for the last three: what each rank is told
    "unknown": ("HandoverFailed: rank 1: weights: unknown: model.unknown", "ValueError: weights: unknown"),
    "shape": ("HandoverFailed: rank 1: weights: ", "ValueError: weights: "),
    "raises": ("HandoverFailed: rank 1: no more memory", "RuntimeError: no more memory"),
    "order": ("ValueError: weights: rank 1 gave other tensors", "HandoverFailed: rank 0: weights: rank 1 gave other"),
    "missing": ("HandoverFailed: update_weights: missing", "HandoverFailed: rank 0: update_weights: missing"),
    "none": ("ValueError: weights: no tensors", "HandoverFailed: rank 0: weights: no tensors"),
    "numerics": ("HandoverFailed: weights: refused", "HandoverFailed: rank 0: weights: refused"),
}
UNTOUCHED = "none", "numerics"  # nothing has come when they are seen
DIES = ("HandoverFailed: weights: rank 1 of the trainer", "")


def failing(rank: int, path: str, faults: list[str], address: str, folder: str) -> None:
    """Sets with a fault, behind each of them one without, and what this rank is told of each."""
    connected(rank, path, 2)
    mesh = init_device_mesh("cpu", (2,))
    whole = other(build(FAMILY), SEEDS[0]).state_dict()
    weights = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    numerics, last = vx.numerics("cpu"), list(weights)[-1]
    others = {**numerics, "options": {**numerics["options"], "kv_segment": 64}}
    options = {"bucket_bytes": 4096, "timeout": 300}

    def given(fault):
        found = dict(weights)
        if fault == "unknown" and rank:
            found["model.unknown"] = found.pop(last)
        elif fault == "shape" and rank:
            found[last] = DTensor.from_local(torch.zeros(2, 5), mesh, [Shard(0)])
        elif fault == "order" and rank:
            found = dict(reversed(found.items()))
        elif fault == "missing":
            del found[last]
        elif fault == "none":
            found = {}
        pairs = list(found.items())
        yield from pairs[:-1]
        if fault == "raises" and rank:
            raise RuntimeError("no more memory")
        if fault == "dies" and rank:
            os._exit(0)
        yield from pairs[-1:]

    with (
        ShardedWeightSender(address, numerics=numerics, **options) as right,
        ShardedWeightSender(address, numerics=others, **options) as wrong,
    ):
        for number, fault in enumerate(faults, 1):
            try:
                (wrong if fault == "numerics" else right).send(given(fault))
            except Exception as error:
                with open(f"{folder}/{fault}-{rank}", "w") as file:
                    file.write(f"{type(error).__name__}: {error}")
            if fault != "dies":
                assert right.send(weights) == number


@pytest.mark.parametrize("mode", ["in_place", "staged"])
def test_a_fault_of_one_rank_ends_the_set_for_all_and_the_next_one_comes(mode, tmp_path, sockets):
    new = expected(FAMILY, other(build(FAMILY), SEEDS[0]))
    with Engine.from_pretrained(build(FAMILY), config=CONFIG) as engine:
        now = texts(engine)
        assert now != new
        with receiving(engine, mode) as (receiver, start):
            result = start()
            given = str(tmp_path / "store"), list(FAULTS), receiver.address, str(tmp_path)
            ranks = spawned(failing, *given, size=2)
            for number, fault in enumerate(FAULTS, 1):
                with pytest.raises(HandoverFailed):
                    while_they_run(ranks, result)
                left(engine, "staged" if fault in UNTOUCHED else mode, now)
                result = start()
                assert while_they_run(ranks, result) == number
                now = texts(engine)
                assert now == new
                result = start() if number < len(FAULTS) else None
            joined(ranks)
    for fault, told in FAULTS.items():
        for rank, said in enumerate(told):
            assert (tmp_path / f"{fault}-{rank}").read_text().startswith(said), (fault, rank)


def test_a_rank_that_dies_is_named(tmp_path, sockets):
    with Engine.from_pretrained(build(FAMILY), config=CONFIG) as engine, receiving(engine) as (receiver, start):
        result = start()
        ranks = spawned(failing, str(tmp_path / "store"), ["dies"], receiver.address, str(tmp_path), size=2)
        with pytest.raises(HandoverFailed, match=r"rank 1 of the trainer .* has died"):
            while_they_run(ranks, result)
        joined(ranks)
    assert (tmp_path / "dies-0").read_text().startswith(DIES[0])


def test_memory_of_a_rank_that_does_not_open(tmp_path, sockets, monkeypatch):
    opens, names = buffers.OpenedBuckets, []

    def second(kind, name, *given):
        names.append(name)
        if len(names) == 2:
            raise HandoverFailed("weights: no right to")
        return opens(kind, name, *given)

    monkeypatch.setattr(buffers, "OpenedBuckets", second)
    with Engine.from_pretrained(build(FAMILY), config=CONFIG) as engine, receiving(engine) as (receiver, start):
        old, result = texts(engine), start()
        ranks = spawned(failing, str(tmp_path / "store"), ["opens"], receiver.address, str(tmp_path), size=2)
        with pytest.raises(HandoverFailed, match="rank 1: weights: no right to"):
            while_they_run(ranks, result)
        assert texts(engine) == old
        assert while_they_run(ranks, start()) == 1
        joined(ranks)
    told = [(tmp_path / f"opens-{rank}").read_text() for rank in range(2)]
    assert told == [
        "HandoverFailed: rank 1: weights: no right to",
        "HandoverFailed: rank 0: rank 1: weights: no right to",
    ]


def deaf(rank: int, path: str, folder: str) -> None:
    connected(rank, path, 2)
    if rank == 0:
        os.environ.pop("XDG_RUNTIME_DIR", None)
        tempfile.tempdir = folder
    try:
        ShardedWeightSender("ipc:///tmp/nobody", numerics=vx.numerics("cpu"))
    except Exception as error:
        with open(f"{folder}/told-{rank}", "w") as file:
            file.write(f"{type(error).__name__}: {error}")
    dist.destroy_process_group()


def test_a_first_rank_that_cannot_listen_is_named(tmp_path):
    (tmp_path / f"vexact-{os.getuid()}").mkdir(0o755)  # which anybody may enter
    joined(spawned(deaf, str(tmp_path / "store"), str(tmp_path), size=2))
    first, second = ((tmp_path / f"told-{rank}").read_text() for rank in range(2))
    assert first.startswith("PermissionError: weights: ") and second == f"HandoverFailed: rank 0: {first[17:]}"


class Said:
    """The first rank's socket, with what two others have said, in the order that it is read."""

    def __init__(self, *said):
        self.said = [(by, m.encode(message)) for by, message in said]

    def recv_multipart(self):
        return self.said.pop(0)

    def poll(self, _):
        return len(self.said)


def test_a_rank_that_begins_the_next_set_is_known_there_whatever_is_read_first(monkeypatch):
    """Its last words of this one come by another socket: of two that is read first which happens to be."""
    me = m.Peer.self("a rank")
    monkeypatch.setattr("vexact_engine.handover.shards.protocol.Wait.until_heard", lambda self, poller: None)
    sender = types.SimpleNamespace(_early={}, _size=3, _peers=[me] * 3, _listener=None, _receivers=None, timeout=1.0)
    one = _First(sender, None)
    one._router = Said((b"a", m.Here(1)), (b"b", m.Here(2)), (b"z", m.Here(7)))
    one._await_ranks()
    assert one._at == {1: b"a", 2: b"b"} and sender._early == {}
    one._router = Said(
        (b"c", m.Here(1)), (b"a", m.Failed("full")), (b"d", m.Here(2)), (b"e", m.Here(2)), (b"c", m.Failed(""))
    )
    assert one._heard()[0] is None and one._heard() == (1, m.Failed("full"))
    assert [one._heard()[0] for _ in range(2)] == [None, None] and sender._early == {1: b"c", 2: b"e"}
    assert one._heard()[0] is None and sender._early == {2: b"e"}  # it has given up since
    two = _First(sender, None)
    two._router = Said((b"f", m.Here(1)), (b"b", m.Ended("")))
    two._await_ranks()
    assert two._at == {1: b"f", 2: b"e"} and two._ranks == {b"f": 1, b"e": 2}


def test_what_is_a_run_of_elements_and_what_is_not(tmp_path):
    ranks = spawned(runs, str(tmp_path / "store"), size=3)
    joined(ranks)


def runs(rank: int, path: str) -> None:
    connected(rank, path, 3)
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.arange(7 * 4).view(7, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    known = Known.of("a", rows)
    begin, end = ((0, 12), (12, 24), (24, 28))[rank]
    for more in (0, 100):  # the second by what is known of the first
        tensor = distribute_tensor(whole + more, mesh, [Shard(0)])
        assert known.still(tensor)
        piece = own_piece(tensor, known.begin)
        assert piece.start == begin and piece.values.tolist() == list(range(begin + more, end + more))
    few, columns, same = (
        distribute_tensor(tensor, mesh, [placement])
        for tensor, placement in ((whole[:2], Shard(0)), (whole, Shard(1)), (whole, Replicate()))
    )
    assert not any(map(known.still, (few, columns, same)))
    assert not known.still(distribute_tensor(whole, init_device_mesh("cpu", (3,)), [Shard(0)]))
    found = own_piece(few, Known.of("a", few).begin)
    assert (found is None) == (rank == 2) and (found is None or len(found.values) == 4)
    assert Known.of("a", columns).begin is None
    found = own_piece(same, Known.of("a", same).begin)
    assert (found is None) == (rank > 0) and (found is None or len(found.values) == 28)
    said = {Known.of("a", tensor).said for tensor in (rows, few, columns, same)} | {Known.of("b", rows).said}
    assert len(said) == 5
    dist.destroy_process_group()


def test_pieces_come_in_any_order_and_each_once():
    model = build("Llama")
    places = Places.of(model)
    name, target = next((n, t) for n, t in places.targets.items() if t.dim() == 2)
    values = torch.randn(target.numel(), dtype=target.dtype)
    third = target.numel() // 3
    cuts = [(2 * third, target.numel()), (0, third), (third, 2 * third)]
    update = Update(places)
    for begin, end in cuts[:2]:
        update.write([(name, Piece(begin, values[begin:end]))])
    for begin, end in ((0, third), (third - 1, third + 1), (2 * third - 1, 2 * third + 1), (2 * third, 2 * third + 1)):
        with pytest.raises(ValueError, match="expected some that have not come"):
            update.write([(name, Piece(begin, values[begin:end]))])
    with pytest.raises(ValueError, match="came in part only"):
        update.finish()
    begin, end = cuts[2]
    update.write([(name, Piece(begin, values[begin:end]))])
    assert torch.equal(places.targets[name].view(-1), values)
    with pytest.raises(ValueError, match="repeated"):
        update.write([(name, Piece(0, values[:1]))])
