"""What strangers say at a receiver's socket, what a sender says that is not so, and addresses of somebody else's."""

import contextlib
import errno
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
import zmq
from engine_models import build
from handovers import CONFIG, MODES, expected, left, other, receiving, sender, texts

import vexact_ops as vx
from vexact_engine import Engine, HandoverFailed, PeerLost, WeightReceiver
from vexact_engine.handover import buffers, messages, protocol
from vexact_engine.parallel import replicas

NO_MESSAGES = {
    "pickle": b"\x80\x04K\x07.",
    "empty": b"",
    "text": b"\x82\xa4type\xa4Done\xa6reason\xa2\xff\xfe",  # no UTF-8
    "key": b"\x81\xa2\xff\xfe\x01",
    "nested": b"\x91" * 100_000,
    "nested-numerics": b"\x84\xa4type\xa5Hello\xa7version\x06\xa4peer\x93\x01\x01\xa1a\xa8numerics"
    + 10**5 * b"\x81\xa1a",
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "other": b"\x81\xa4type\xa7Borrow ",
    "large": b"\xc6\xff\xff\xff\xff",
}


@contextlib.contextmanager
def stranger(receiver):
    with zmq.Context.instance().socket(zmq.DEALER) as at:
        at.linger = 0
        at.connect(receiver.address)
        yield at


@contextlib.contextmanager
def handover(model, mode="in_place", **options):
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode) as (receiver, start),
        sender(receiver, bucket_bytes=4096, **options) as out,
    ):
        yield engine, receiver, start, out


@pytest.mark.parametrize("when", ["before", "between", "at the end"])
@MODES
def test_what_is_no_message_is_dropped(when, mode, sockets):
    model, new = build("Qwen3"), other(build("Qwen3"))
    with handover(model, mode) as (engine, receiver, start, out), stranger(receiver) as at:

        def say():
            for data in NO_MESSAGES.values():
                at.send(data)
                at.send_multipart([data, b"", data])

        last = {"between": 3, "at the end": len(new.state_dict()) - 1}.get(when)

        def give():
            for number, item in enumerate(new.state_dict().items()):
                if number == last:
                    say()
                    while not receiver._dropped:
                        time.sleep(0.001)
                yield item

        if when == "before":
            say()
            assert receiver._socket.poll(60_000)
        result = start()
        assert out.send(give()) == 1 == result()
        assert texts(engine) == expected("Qwen3", new)


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_a_sender_that_says_it_ends_its_own_set_alone(data, sockets):
    model = build("Qwen3")
    with handover(model) as (engine, _receiver, start, out):
        old, result = texts(engine), start()

        def give():
            for number, item in enumerate(model.state_dict().items()):
                if number == 5:
                    out._socket.send(data)
                yield item

        with pytest.raises(HandoverFailed, match="no message of version"):
            out.send(give())
        with pytest.raises(HandoverFailed, match="no message of version"):
            result()
        left(engine, "in_place", old)
        result = start()
        assert out.send(model.state_dict()) == 1 == result()
        assert texts(engine) == old


def test_what_a_stranger_says_does_not_end_a_set(sockets):
    model = build("Qwen3")
    with handover(model) as (_, receiver, start, out), sender(receiver) as second, stranger(receiver) as at:
        result = start()

        def give():
            for number, item in enumerate(model.state_dict().items()):
                if number == 3:
                    for message in (messages.Finish(), messages.Cancel("so"), messages.Bucket(0, []), messages.Done(3)):
                        at.send(messages.encode(message))
                    second._connect()
                    second._socket.send_multipart([b"GET / HTTP/1.1", b"", b"x"])
                    with pytest.raises(HandoverFailed, match="is sending its own"):  # heard after those
                        second._post(messages.Hello(messages.VERSION, messages.Peer.self("x"), second.numerics))
                        second._answer("a welcome", messages.Welcome)
                yield item

        assert out.send(give()) == 1 == result()


@pytest.mark.parametrize("data", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_a_receiver_closes_whatever_lies_in_its_socket(data, sockets):
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine:
        receiver = WeightReceiver(engine)
        with stranger(receiver) as at:
            at.send(data)
            assert receiver._socket.poll(60_000)
            receiver.close()
        assert receiver._socket.closed
    assert not Path(receiver.address[6:]).exists()


def test_a_receiver_closes_though_its_engine_fails_to_let_go(sockets, monkeypatch):
    model = build("Qwen3")
    with handover(model) as (_, receiver, start, out):
        result = start()
        assert out.send(model.state_dict()) == 1 == result()
        real = receiver._intake.let_go

        def let_go():
            real()
            raise RuntimeError("a device is gone")

        monkeypatch.setattr(receiver._intake, "let_go", let_go)
        with pytest.raises(RuntimeError, match="a device is gone"):
            receiver.close()
        assert receiver._socket.closed and not Path(receiver.address[6:]).exists()


@contextlib.contextmanager
def talking(receiver):
    """A stranger that talks without an end."""
    over = threading.Event()

    def talk():
        with stranger(receiver) as at:
            while not over.is_set():
                with contextlib.suppress(zmq.Again):
                    at.send(b"\xff", zmq.NOBLOCK)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        assert receiver._socket.poll(60_000)
        yield
    finally:
        over.set()
        thread.join()


def test_a_stranger_that_talks_without_an_end_holds_nobody_up(sockets):
    model = build("Qwen3")
    with handover(model) as (_engine, receiver, start, out), talking(receiver):
        result = start()
        assert out.send(model.state_dict()) == 1 == result()
        with pytest.raises(TimeoutError, match="no sender came within"):
            receiver.receive(0.5)
        receiver.timeout = 0.5
        result = start()

        def give():
            for number, item in enumerate(model.state_dict().items()):
                if number == 5:  # it stalls, and the stranger's messages are not its own
                    with pytest.raises(PeerLost, match="the next message did not come within"):
                        result()
                    out.timeout = 1.0
                yield item

        with pytest.raises(HandoverFailed):
            out.send(give())
        receiver.timeout = 300.0
        with stranger(receiver) as at:  # who has died is noticed at once all the same
            process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            dead = messages.Peer(process.pid, messages._status(process.pid)[1], "a sender")
            result = start()
            at.send(messages.encode(messages.Hello(messages.VERSION, dead, vx.numerics("cpu"))))
            assert at.poll(60_000)
            process.communicate()
            with pytest.raises(PeerLost, match="a sender has died"):
                result()
        begin = time.monotonic()
        receiver.close()
        assert time.monotonic() - begin < 30


def bucket(**changes):
    part = {"name": "model.norm.weight", "shape": [64], "dtype": "float32", "start": 0, "count": 64, "offset": 0}
    part |= changes
    return {"type": "Bucket", "buffer": 0, "parts": [list(part.values())], "checksum": None} | {
        k: changes[k] for k in ("buffer", "checksum") if k in changes
    }


def offer(**changes):
    given = {"type": "Offer", "kind": buffers.HOST, "name": "a", "size": 4096, "handles": [b"\0" * 16], "gpu": ""}
    return given | changes


LIES = {
    "negative-shape": bucket(shape=[-64]),
    "two-negatives": bucket(shape=[-8, -8]),
    "negative-start": bucket(start=-1),
    "negative-count": bucket(count=-64),
    "no-count": bucket(count=0),
    "negative-offset": bucket(offset=-16),
    "huge-count": bucket(count=2**62),
    "huger-count": bucket(count=2**64 - 1),
    "huge-start": bucket(start=2**62),
    "huge-shape": bucket(shape=[2**40, 2**40]),
    "unaligned": bucket(offset=4),
    "outside": bucket(offset=1 << 30),
    "no-dtype": bucket(dtype="nn"),
    "another-dtype": bucket(dtype="quint8"),
    "sub-byte": bucket(dtype="uint4"),
    "dtype-of-bits": bucket(dtype="bits1x8"),
    "no-buffer": bucket(buffer=-1),
    "another-buffer": bucket(buffer=99),
    "many-dimensions": bucket(shape=[1] * 100 + [64]),
    "text-for-a-number": bucket(count="64"),
    "short-handle": offer(handles=[b"\0" * 3]),
    "long-handle": offer(handles=[b"\0" * 300]),
    "negative-process": offer(handles=[struct.pack("<qq", -1, -1)]),
    "no-handles": offer(handles=[]),
    "many-handles": offer(handles=[b"\0" * 16] * 1000),
    "negative-size": offer(size=-1),
    "no-size": offer(size=0),
    "huge-size": offer(size=2**63),
    "no-kind": offer(kind="a pigeon"),
    "short-gpu-handle": offer(kind=buffers.CUDA, gpu="GPU-0"),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_what_is_not_so_ends_as_a_set_that_failed(lie, sockets):
    model = build("Qwen3")
    with handover(model, "staged") as (engine, _receiver, start, out):
        old = texts(engine)
        result = start()

        def give():
            for number, item in enumerate(model.state_dict().items()):
                if number == 2:
                    out._socket.send(msgspec.msgpack.encode(lie))
                yield item

        with pytest.raises(HandoverFailed):
            out.send(give())
        with pytest.raises(HandoverFailed, match="goes on with the weights that it had"):
            result()
        assert texts(engine) == old
        result = start()
        assert out.send(model.state_dict()) == 1 == result()


@pytest.mark.parametrize("version", [0, -1, 2**53, 2**63, 2**64 - 1])
def test_a_version_out_of_bounds_is_no_message(version, sockets):
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine, receiving(engine) as (receiver, _):
        with stranger(receiver) as at:
            hello = messages.Hello(messages.VERSION, messages.Peer.self("x"), vx.numerics("cpu"))
            hello.weight_version = version
            at.send(messages.encode(hello))
            assert receiver._socket.poll(60_000)
            with pytest.raises(TimeoutError):
                receiver.receive(0.3)
        assert receiver._dropped == 1 and engine.weight_version == 0
        with pytest.raises(ValueError, match="begin_update: version: got "):
            engine.begin_update(numerics=engine.numerics(), version=version)


@pytest.mark.parametrize("numerics", [{}, {"class": 3}, {1: 2}, {"a": [[[[]]]]}], ids=str)
def test_a_fingerprint_that_is_none_is_refused(numerics, sockets):
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine, receiving(engine) as (receiver, start):
        result = start()
        with stranger(receiver) as at:
            at.send(messages.encode(messages.Hello(messages.VERSION, messages.Peer.self("x"), numerics)))
            assert at.poll(60_000)
            assert "refused: numerics" in messages.decode(at.recv(), "the receiver").reason
            with pytest.raises(HandoverFailed, match="refused: numerics"):
                result()


def test_memory_whose_size_could_change_is_refused(sockets, monkeypatch):
    """Who maps what is cut off later ends by SIGBUS."""
    model = build("Qwen3")
    monkeypatch.setattr(fcntl, "fcntl", lambda *given: 0)
    with handover(model) as (_, _receiver, start, out):
        result = start()
        with pytest.raises(HandoverFailed, match="is not sealed"):
            out.send(model.state_dict())
        with pytest.raises(HandoverFailed, match="is not sealed"):
            result()


def test_memory_of_a_hand_over_keeps_its_size(sockets):
    memory = buffers.HostMemory.made("a", 4096)
    _, file = struct.unpack("<qq", memory.handle)
    for size in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(file, size)
    memory.close()


@pytest.mark.parametrize("opened", [False, True])
def test_memory_of_a_hand_over_is_there_while_somebody_has_a_view_of_it(opened, sockets):
    """Otherwise what is mapped there next would be read and written by that."""
    memory = made = buffers.HostMemory.made("viewed", 4096)
    if opened:
        memory = buffers.HostMemory.opened(made.handle, "viewed", 4096)
    view = memory.tensor[64:128]
    view.fill_(7)
    made.close()
    memory.close()
    assert memory.tensor is None
    assert "vexact-weights-viewed" in Path("/proc/self/maps").read_text()
    assert view.tolist() == [7] * 64
    del view
    assert "vexact-weights-viewed" not in Path("/proc/self/maps").read_text()


# DTensors


def test_sharded_tensors_are_named(sockets, tmp_path):
    """As FSDP2's parameters are."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = build("Qwen3")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        name, value = next(iter(model.state_dict().items()))
        shards = {name: distribute_tensor(value.clone(), mesh, [Shard(0)])}
        with handover(model) as (_, _receiver, start, out):
            result = start()
            with pytest.raises(TypeError, match=rf"{name} is sharded .*give its full_tensor\(\)"):
                out.send(shards)
            with pytest.raises(HandoverFailed, match="is sharded"):
                result()
            with pytest.raises(TypeError, match=rf"{name} is sharded .*give its full_tensor\(\)"):  # to replicas
                next(replicas._checked(shards.items(), {}, dict.fromkeys(shards, True)))
            result = start()
            whole = {n: shards[n].full_tensor() if n in shards else t for n, t in model.state_dict().items()}
            assert out.send(whole) == 1 == result()
    finally:
        dist.destroy_process_group()


# Addresses


def test_a_file_at_the_address_stays(tmp_path):
    for make in (lambda path: path.write_text("mine"), Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/nowhere")):
        path = tmp_path / "at"
        make(path)
        with pytest.raises(FileExistsError, match="is a file, expected none, or a socket"):
            protocol.Listener(f"ipc://{path}")
        assert os.path.lexists(path)
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("stalls", [False, True], ids=["lives", "stalls"])
def test_an_address_at_which_somebody_listens_is_refused(stalls, tmp_path):
    address = f"ipc://{tmp_path}/at"
    code = f"""
import sys, time
from vexact_engine.handover.protocol import Listener
held = Listener({address!r})
print("there", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"there\n"
        if stalls:
            process.send_signal(signal.SIGSTOP)
        for _ in range(300 if stalls else 1):  # until nobody else has room to wait to be heard
            with pytest.raises(OSError, match="somebody listens at") as caught:
                protocol.Listener(address)
            assert caught.value.errno == errno.EADDRINUSE
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with contextlib.closing(protocol.Listener(address)) as listener:  # of a dead one
        assert listener.address == address
    assert not (tmp_path / "at").exists()


def test_a_receiver_removes_its_own_socket_alone(tmp_path):
    path = tmp_path / "at"
    older = protocol.Listener(f"ipc://{path}")
    path.unlink()  # somebody has cleaned up
    newer = protocol.Listener(f"ipc://{path}")
    older.close()
    older.close()
    assert path.exists()
    with zmq.Context.instance().socket(zmq.DEALER) as at:
        at.connect(newer.address)
        at.send(b"there")
        assert newer.socket.poll(60_000)
    newer.close()
    assert not path.exists()


def test_one_of_several_that_come_at_once_has_the_address(tmp_path):
    path, barrier, made, refused = tmp_path / "at", threading.Barrier(16), [], []
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))

    def make():
        barrier.wait()
        try:
            made.append(protocol.Listener(f"ipc://{path}"))
        except OSError as error:
            refused.append(error.errno)

    threads = [threading.Thread(target=make) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and refused == [errno.EADDRINUSE] * 15
    made[0].close()
    assert not path.exists()


def test_addresses_of_other_kinds(tmp_path):
    with contextlib.closing(protocol.Listener("tcp://127.0.0.1:0")) as listener:
        assert not listener.address.endswith(":0")
        with pytest.raises(OSError, match="Address already in use") as caught:
            protocol.Listener(listener.address)
        assert caught.value.errno == errno.EADDRINUSE
    for wrong, error in (("there", ValueError), ("ipc://" + "a" * 200, ValueError), ("", ValueError), (7, TypeError)):
        with pytest.raises(error, match="WeightReceiver: address"):
            protocol.Listener(wrong)
    with pytest.raises(FileNotFoundError):
        protocol.Listener(f"ipc://{tmp_path}/none/at")
