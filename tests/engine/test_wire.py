"""Who gets in at the door of an engine whose stages are on other machines, and what they can leave word with."""

import contextlib
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest
import torch
from engine_models import until

from vexact_engine import EngineConfig
from vexact_engine.parallel import limits, wire
from vexact_engine.parallel import messages as m
from vexact_engine.parallel.frames import Frames, write_frame
from vexact_engine.parallel.member import Member
from vexact_engine.parallel.pipeline import PipelineWorker
from vexact_engine.parallel.placement import Placement
from vexact_engine.parallel.store import Board, BoardStore
from vexact_engine.parallel.wire import Caller, Door, call, interface_of

HERE = "127.0.0.1"


@contextlib.contextmanager
def opened(count=1, board=None):
    door = Door(HERE, count, (board or Board()).serve)
    try:
        yield door
    finally:
        door.close()


def arrived(door, rank):
    found = []
    until(lambda: found.append(door.take(rank)) or found[-1])
    return found[-1]


def enter(door, rank, what="told"):
    return call(door.address, door.secret, Caller(rank, what))


def refused(door):
    """Nobody listens there any more."""
    with pytest.raises(OSError):
        socket.create_connection(door.address, 5).close()


def test_who_knows_the_secret_comes_in_once_and_nobody_after_the_last():
    with opened(count=2) as door:
        ours = [enter(door, rank) for rank in (1, 0)]
        for rank, at in ((0, ours[1]), (1, ours[0])):
            theirs = arrived(door, rank)
            write_frame(theirs, b"%d" % rank)
            assert Frames(at).read() == [b"%d" % rank]
            theirs.close()
        asking = [enter(door, rank, "ask") for rank in (0, 1)]
        until(lambda: not door._expected)
        refused(door)
        for each in (*ours, *asking):
            each.close()


def test_nothing_listens_at_another_address():
    with opened() as door:
        assert door.address[0] == HERE
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", door.address[1]), 5).close()
    refused(door)


@pytest.fixture
def silent(monkeypatch):
    """(door) -> a connection that says nothing and soon has to leave. Those who say something have their time."""
    ports, handshake = set(), wire._handshake
    monkeypatch.setattr(
        wire, "_handshake", lambda came, seconds: handshake(came, 0.3 if came.getpeername()[1] in ports else seconds)
    )

    def connect(door):
        stranger = socket.socket()
        stranger.bind((HERE, 0))
        ports.add(stranger.getsockname()[1])
        stranger.connect(door.address)
        return stranger

    return connect


@pytest.mark.parametrize("how", ["another secret", "silence", "noise", "a rank that is there", "no such rank", "goes"])
def test_a_stranger_stays_outside_and_holds_nobody_up(how, silent, caplog):
    with opened(count=2) as door, contextlib.ExitStack() as stack:
        mine = stack.enter_context(enter(door, 0))
        until(lambda: (0, "told") not in door._expected)  # or whoever comes after it might be let in as that
        if how == "another secret":
            with pytest.raises(AuthenticationError):
                call(door.address, b"x" * 32, Caller(1, "told"))
        elif how in ("a rank that is there", "no such rank"):
            rank = 0 if how == "a rank that is there" else 2
            late = stack.enter_context(enter(door, rank))
            assert Frames(late).read() is None
        elif how == "silence":
            stack.enter_context(silent(door))
        else:
            stranger = stack.enter_context(socket.create_connection(door.address))
            if how == "noise":
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 40)
            if how == "goes":
                stranger.close()
        until(lambda: "a stranger at 127.0.0.1 is not let in" in caplog.text)
        second = stack.enter_context(enter(door, 1))
        theirs = [stack.enter_context(arrived(door, rank)) for rank in (0, 1)]
        for at, there in zip((mine, second), theirs):
            write_frame(there, b"word")
            assert Frames(at).read() == [b"word"]


def test_many_who_say_nothing_are_not_in_the_way(silent):
    with opened() as door, contextlib.ExitStack() as stack:
        for _ in range(70):
            stack.enter_context(silent(door))
        stack.enter_context(enter(door, 0))
        stack.enter_context(arrived(door, 0))


def test_a_door_that_is_somebody_elses_is_noticed(caplog):
    caplog.set_level(logging.WARNING)
    with opened() as door, pytest.raises((AuthenticationError, EOFError, OSError)):
        call(door.address, b"", Caller(0, "told"))
    listening = socket.create_server((HERE, 0))

    def pretend():
        came, _ = listening.accept()
        with came, Connection(came.detach()) as connection:
            connection.send_bytes(b"#CHALLENGE#" + b"x" * 20)
            connection.recv_bytes()
            connection.send_bytes(b"#WELCOME#")
            with contextlib.suppress(EOFError, OSError):
                connection.recv_bytes()
                connection.send_bytes(b"anything")

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(AuthenticationError):
        call(listening.getsockname()[:2], b"s" * 32, Caller(0, "told"))
    thread.join()
    listening.close()


def test_a_silent_machine_is_gone_after_a_while():
    """What the kernel is told: a test cannot pull a plug."""
    with opened() as door, enter(door, 0) as ours, arrived(door, 0) as theirs:
        for at in (ours, theirs):
            assert at.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, every, count = (
                at.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle + every * count == limits.SILENT
            assert at.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * limits.SILENT


def test_interfaces():
    assert interface_of(HERE) == "lo"
    assert interface_of("192.0.2.1") is None and interface_of("2001:db8::1") is None


# The Board


def test_processes_find_what_others_have_left():
    with opened(count=2) as door, contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        one, two = (BoardStore(Connection(stack.enter_context(enter(door, rank, "ask")).detach())) for rank in (0, 1))
        late = pool.submit(two.get, "key")
        one.set("key", "value")
        assert late.result(120) == b"value" == one.get("key")
        assert [one.add("n", 2), two.add("n", 3)] == [2, 5] and one.get("n") == b"5"
        assert one.check(["key", "n"]) and not two.check(["key", "m"]) and one.num_keys() == 2
        assert two.compare_set("key", b"other", b"new") == b"value"
        assert two.compare_set("key", b"value", b"new") == b"new" == one.get("key")
        assert one.compare_set("fresh", b"", b"it") == b"it"
        begin = time.monotonic()
        with pytest.raises(RuntimeError, match="m did not come in time"):
            one.wait(["key", "m"], timedelta(seconds=0.2))
        assert time.monotonic() - begin < 60
        waits = pool.submit(two.wait, ["m"])
        one.set("m", b"")
        waits.result(120)
        assert one.delete_key("m") and not one.delete_key("m")
        for store in (one, two):
            store._connection.close()


class Ended:
    """A process that has been killed."""

    returncode = -9

    def poll(self):
        return self.returncode

    def kill(self):
        pass


def test_who_has_ended_without_a_word_is_named_and_not_who_failed_by_it(monkeypatch):
    monkeypatch.setattr(limits, "WHY", 120.0)  # it is over with that end
    worker = PipelineWorker.__new__(PipelineWorker)
    worker._stages, worker.dead, worker.meanwhile = [], "", lambda: None
    worker._placement = Placement(EngineConfig(), torch.device("cpu"), None, worker.meanwhile)
    theirs = []
    for rank in range(2):
        ours, other = socket.socketpair()
        worker._stages.append(Member(f"stage {rank}", Ended(), worker.meanwhile))
        worker._stages[-1].reach(ours)
        theirs.append(other)
    write_frame(theirs[0], m.encode([m.Failed(m.failure(RuntimeError("Connection closed by peer")))]))
    with ThreadPoolExecutor(1) as pool:
        ends = pool.submit(lambda: (time.sleep(0.1), theirs[1].close()))
        worker.listen(120)
        ends.result()
    assert worker.dead == "stage 1 has died (signal 9)"
    theirs[0].close()
