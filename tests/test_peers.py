"""Columns that go through memory of each other's GPUs: bytes are moved, whatever the shapes; who does not come, or
cannot be reached, is named. On one GPU two processes share it."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import vexact_ops as vx
from vexact_ops._core import native, peers
from vexact_ops.fused_moe import cuda as fused_moe

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def run(folder: Path, size: int, what: str) -> list[subprocess.CompletedProcess]:
    (folder / "end").mkdir()
    count = max(1, torch.cuda.device_count())
    command = [sys.executable, str(Path(__file__).with_name("peers.py"))]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    about = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    started = [
        subprocess.Popen(
            [*command, *map(str, (rank, size, rank % count, folder, what))], text=True, stdout=-1, stderr=-1, env=about
        )
        for rank in range(size)
    ]
    return [
        subprocess.CompletedProcess(process.args, process.wait(), *texts)
        for process, texts in [(process, process.communicate(timeout=240)) for process in started]
    ]


@GPU
@pytest.mark.process
@pytest.mark.parametrize("size", [2, 3, 4])
def test_columns_of_every_rank_in_their_order(size, tmp_path):
    for done in run(tmp_path, size, "gathers"):
        assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@GPU
@pytest.mark.process
@pytest.mark.parametrize("size", [2, 3, 4])
def test_what_is_sent_is_what_one_gpu_computes(size, tmp_path):
    for done in run(tmp_path, size, "sent"):
        assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@GPU
@pytest.mark.process
@pytest.mark.parametrize("size", [2, 3, 4])
def test_mixtures_that_are_sent_are_what_one_gpu_computes(size, tmp_path):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels for SM90 send them")
    for done in run(tmp_path, size, "mixtures"):
        assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@GPU
@pytest.mark.process
@pytest.mark.parametrize("how", ["late", "late, packed", "late, packed and normed", "late, received", "late, normed"])
def test_a_rank_that_does_not_come_is_named(how, tmp_path):
    assert [done.stdout for done in run(tmp_path, 2, how)] == ["", "missing: 0\n"]


@GPU
@pytest.mark.process
def test_memory_that_cannot_be_reached_is_refused_on_every_rank(tmp_path):
    for done in run(tmp_path, 2, "unreachable"):
        assert done.returncode == 1 and "Peers: rank 1 cannot reach the others' memory: " in done.stderr


@GPU
def test_what_is_no_number_of_its_kind_is_no_address():
    ops, words = native.ops(), torch.zeros(9, dtype=torch.int64)
    x, out = (torch.zeros(2, columns, dtype=torch.uint8, device="cuda") for columns in (8, 16))
    bases, missing = words[:2], torch.zeros(1, dtype=torch.int32, pin_memory=True)
    for other in (torch.float32, torch.int32, torch.bfloat16):
        with pytest.raises(RuntimeError, match="found: expected int64"):
            ops.peers_take(words.to(other), 2, 0)
        with pytest.raises(RuntimeError, match="found: expected int64"):
            ops.peers_land(words.to(other), 64, 0)
        with pytest.raises(RuntimeError, match="handle: expected int64"):
            ops.peers_open(words[:8].to(other), 0)
        with pytest.raises(RuntimeError, match="bases: expected int64"):
            ops.peers_gather(x, out, bases.to(other), 0, 1, missing)
        with pytest.raises(RuntimeError, match="bases: expected int64"):
            ops.peers_meet(x, bases.to(other), 0, 1, missing)
        with pytest.raises(RuntimeError, match="expected contiguous bytes"):
            ops.peers_gather(x.to(other), out, bases, 0, 1, missing)
    with pytest.raises(RuntimeError, match="missing: expected int32"):
        ops.peers_gather(x, out, bases, 0, 1, missing.long())
    with pytest.raises(RuntimeError, match="expected contiguous bytes, 16 and 16 of them"):
        ops.peers_gather_packed(x, out, bases, 0, 1, missing)
    with pytest.raises(RuntimeError, match="missing: expected int32"):
        ops.peers_meet(x, bases, 0, 1, missing.long())
    for rank, of in ((2, bases), (-1, bases), (0, words[:1]), (0, words)):
        with pytest.raises(RuntimeError, match="bases: of 2 to 8 ranks"):
            ops.peers_meet(x, of, rank, 1, missing)
    with pytest.raises(RuntimeError, match="peers_land: 0 bytes are none"):
        ops.peers_land(words, 0, 0)
    with pytest.raises(RuntimeError, match="2 to 8 ranks"):
        ops.peers_take(words, 9, 0)


def test_sizes_are_refused():
    for rank, size in ((0, 1), (0, 9), (2, 2), (-1, 2)):
        with pytest.raises(ValueError, match=f"Peers: got rank {rank} of {size}, expected one of 2 to 8"):
            vx.Peers(rank, size, torch.device("cuda", 0), lambda data: [data])


def of_two(race, monkeypatch) -> list[peers.Peers]:
    """Two ranks as threads of one process, without a GPU: race(rank, packed, bytes) is what each has measured."""
    meeting, made = threading.Barrier(2), []

    def times(rivals, rounds, finalists):
        assert finalists == 0, "what is timed again would not be alike on all ranks"
        x = rivals[0][0].__defaults__[0]
        return [race(threading.current_thread().name, by, x.numel()) for by in (False, True)]

    monkeypatch.setattr(peers, "race_on_gpu", times)
    said: dict[str, bytes] = {}

    def exchange(data: bytes) -> list[bytes]:
        said[threading.current_thread().name] = data
        meeting.wait(60)
        found = [said[name] for name in "01"]
        meeting.wait(60)
        return found

    for _ in range(2):
        one = peers.Peers.__new__(peers.Peers)
        one.size, one.device, one._exchange = 2, torch.device("cpu"), exchange
        made.append(one)
    failed = []

    def run(one: peers.Peers) -> None:
        try:
            one.race()
        except BaseException as error:
            failed.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(one,), name=name) for one, name in zip(made, "01")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return made


def by_two(function) -> list:
    """function(landing) by two ranks that are threads, without a GPU."""
    meeting, said, found = threading.Barrier(2), [b"", b""], [None, None]

    def run(rank: int) -> None:
        def exchange(data: bytes) -> list[bytes]:
            said[rank] = data
            meeting.wait(60)
            every = list(said)
            meeting.wait(60)
            return every

        one = peers.Peers.__new__(peers.Peers)
        one.rank, one.size, one.device, one._exchange = rank, 2, torch.device("cpu"), exchange
        one._bases, one._limit_ms, one._missing = torch.zeros(2, dtype=torch.int64), 1, torch.zeros(1)
        try:
            bases = torch.zeros(2, dtype=torch.int64)
            found[rank] = function(peers.Landing(one, bases, torch.zeros(1024, dtype=torch.uint8)))
        except BaseException as error:
            found[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_rank_alone_sends_nothing():
    """Else it would write where another gathers, and wait for it."""
    kind, half, single = ("a product", 8), torch.bfloat16, torch.float32

    def ask(landing):
        failure = "its kernel has other bits" if landing.peers.rank == 1 else ""
        assert landing.admit(kind, failure) == "rank 1: its kernel has other bits"
        assert not landing.takes(kind, 1, 8, half)
        assert landing.admit(kind, "") == ""
        assert not landing.takes(("a product", 16), 1, 8, half)
        return [landing.takes(kind, *of) for of in ((32, 8, half), (33, 8, half), (32, 9, half), (17, 8, single))]

    assert by_two(ask) == [[True, False, False, False]] * 2
    assert by_two(lambda landing: landing.view(3, 8, half).shape) == [(3, 16)] * 2


def test_mixtures_are_sent_by_shapes_alone():
    """Whatever a rank has raced; what it has not room for, or cannot send, is known before any of them begins to."""
    gate_up = torch.zeros(4, 32, 8, dtype=torch.bfloat16)

    def ask(landing, admitted=gate_up):
        landing.peers.gather = lambda x: x.repeat(1, 2)
        assert vx.fused_moe_send(landing, gate_up, 2) == "rank 0: it takes this library's CUDA kernels"
        landing.memory = torch.zeros(1, dtype=torch.uint8).expand(1 << 20)
        landing.admit(fused_moe.kind_of(admitted, False), "")

        def sends(slots, dtype=torch.bfloat16, weight=gate_up, gelu=False):
            return fused_moe.sends(landing, torch.zeros(1, 8, dtype=dtype), weight, slots, gelu)

        most = (1 << 20) // (16 * 2 * 2)
        assert most > fused_moe.SENDS
        assert sends(fused_moe.SENDS) and sends(most)
        assert not sends(fused_moe.SENDS - 1) and not sends(most + 1)
        assert not sends(most, torch.float16) and not sends(most, gelu=True)
        assert not sends(most, weight=gate_up.half()) and not sends(most, weight=gate_up[:3])
        assert not sends(most, weight=gate_up.transpose(1, 2).contiguous().transpose(1, 2))
        return True

    assert by_two(ask) == [True, True]


def test_a_rank_that_cannot_verify_says_so_before_any_sends(monkeypatch):
    """What one of them does alone would leave the others waiting."""
    gate_up = torch.zeros(4, 32, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(fused_moe.gpu, "not_sm90", lambda device: None)

    def broken(landing, *_):
        if landing.peers.rank:
            raise torch.OutOfMemoryError("no memory")
        return iter([])

    monkeypatch.setattr(fused_moe, "_sent_cases", broken)

    def ask(landing):
        why = fused_moe.admit_sends(landing, gate_up, 2, False)
        return why, landing.takes(fused_moe.kind_of(gate_up, False), 1, 16, torch.bfloat16)

    assert by_two(ask) == [("rank 1: OutOfMemoryError: no memory", False)] * 2
    for wrong, says in (
        (gate_up.float(), "it takes bfloat16, not float32"),
        (gate_up[:, :24], "it takes multiples of 8 columns on a rank and at most 512 experts, not (4, 24, 8)"),
        (gate_up.transpose(0, 1), "at most 512 experts"),
        (torch.zeros(4, 8, 32, dtype=torch.bfloat16).transpose(1, 2), "it takes matrices side by side"),
    ):
        for why in by_two(lambda landing, wrong=wrong: fused_moe.admit_sends(landing, wrong, 2, False)):
            assert why.startswith("rank 0: ") and says in why, why
    monkeypatch.setenv("VEXACT_ADMIT", "0")
    why = "rank 0: VEXACT_ADMIT=0: nothing is verified"
    assert by_two(lambda landing: fused_moe.admit_sends(landing, gate_up, 2, False)) == [why] * 2


@pytest.mark.parametrize("spoilt", [False, True])
def test_what_is_sent_is_compared_with_a_gather(spoilt, monkeypatch):
    """Of every ring, and by all ranks: one byte on one of them is enough."""
    gate_up, rings = torch.zeros(4, 32, 8, dtype=torch.bfloat16), []
    expected = torch.arange(48, dtype=torch.bfloat16).view(3, 16)
    monkeypatch.setattr(fused_moe.gpu, "not_sm90", lambda device: None)
    monkeypatch.setattr(fused_moe, "_sent_cases", lambda *_: iter([(gate_up, gate_up, expected)] * 2))

    def send_by(ring, rows, weight, offsets, gelu, landing):
        found = landing.view(3, 16, torch.bfloat16)
        assert found.view(torch.uint8).eq(0xFF).all(), "what was there before could pass for what was sent"
        found.copy_(expected.repeat(1, 2))
        if spoilt and landing.peers.rank and ring == fused_moe.grouped.OWN[2]:
            found[2, 31] += 1
        rings.append(ring)
        return found

    monkeypatch.setattr(fused_moe.grouped, "send_by", send_by)
    monkeypatch.setattr(peers.Landing, "meet", lambda self: None)
    monkeypatch.setattr(peers.Peers, "gather", lambda self, x: x.repeat(1, 2))

    def ask(landing):
        why = fused_moe.admit_sends(landing, gate_up, 2, True)
        return why, landing.takes(fused_moe.kind_of(gate_up, True), 1, 16, torch.bfloat16)

    says = "rank 1: other bytes came than a gather brings" if spoilt else ""
    assert by_two(ask) == [(says, not spoilt)] * 2
    assert sorted(rings) == sorted(fused_moe.grouped.OWN * 4)


def test_ranks_take_the_kernel_that_is_faster_on_the_slowest(monkeypatch):
    """Though each of them has measured other times: or one would wait for what another never sends."""

    def race(rank, packed, size):
        if packed:
            return 6.0 if rank == "0" else 7.0
        return {1 << 20: 8.0, 1 << 22: 9.0}.get(size, 5.0) + (rank == "0") * (size == 1 << 16) * 1.5

    for one in of_two(race, monkeypatch):
        assert one.packs(256, 4096) and one.packs(300, 4096) and one.packs(1024, 4096)
        assert not one.packs(16, 4096) and not one.packs(256, 4096 * 2)
        assert not one.packs(256, 4090)  # no whole units
        assert not one.sends(256, 2048, torch.bfloat16) and one.sends(64, 2048, torch.bfloat16)
    assert peers.Peers._packed == frozenset()


def test_the_largest_class_stands_for_all_above(monkeypatch):
    for one in of_two(lambda rank, packed, size: float(packed) if size < 4 << 20 else 1.0 - packed, monkeypatch):
        assert one.packs(2048, 1 << 15) and one.packs(1024, 4096) and not one.packs(256, 4096)


def test_packed_lines_of_rows():
    """Fifteen of sixteen bytes where they were, the last ones of fifteen units in a line of their own, and flags."""
    for columns in (8, 120, 128, 2048):
        x = torch.randint(256, (3, 2 * columns), dtype=torch.uint8).view(torch.bfloat16)
        units, last = peers.packed_rows(x)
        assert (units[..., 15] == 1).all() and (last[..., 15] == 1).all() and last.shape[1] == -(-columns // 8 // 15)
        found = torch.cat([units[..., :15], last[..., :15].reshape(3, -1)[:, : columns // 8, None]], 2)
        assert torch.equal(found.view(3, -1), x.view(torch.uint8))


def test_what_was_sent_is_seen_in_one_ranks_memory():
    loop = peers.Loopback.__new__(peers.Loopback)
    loop.size = 2
    loop._lay_out(2, torch.device("cpu"))
    own, other = (torch.randn(5, 2048, dtype=torch.float32).bfloat16() for _ in range(2))
    loop.begin_packed([other])
    units, last = peers.packed_rows(own)
    for where, lines in ((slice(0, 256), units), (slice(512, 512 + 18), last)):
        assert not loop.has_sent(own)
        loop._rows(0, 5)[:, where] = lines
    assert loop.has_sent(own) and not loop.has_sent(other) and not loop.has_sent(own[:4])
    loop._rows(0, 6)[5, 7, 3] = 1
    assert not loop.has_sent(own)


def test_rows_of_one_width_are_normed_where_they_come():
    one = peers.Peers.__new__(peers.Peers)
    one.size, one._packed = 2, frozenset(range(64))
    assert one.norms(256, 2048, torch.bfloat16) and one.norms(512, 4096, torch.float16)
    for rows, columns in ((64, 2048), (513, 2048), (256, 2050), (256, 4104)):  # rows, sent; too many; no units; wide
        assert not one.norms(rows, columns, torch.bfloat16)
    assert not one.norms(256, 2048, torch.float32)
    one._normed = 4096
    assert one.norms(65, 2048, torch.bfloat16) and not one.norms(65, 1024, torch.bfloat16)
    one._packed = frozenset()
    assert not one.norms(256, 2048, torch.bfloat16)
