"""Weights from a trainer's process to an engine's: either of them killed, one that stalls, and two jobs on one host."""

import multiprocessing
import os
import signal
import threading

import pytest
from engine_models import build
from handovers import CONFIG, MODES, expected, left, other, receiving, sender, texts

import vexact_ops as vx
from vexact_engine import Engine, HandoverFailed, PeerLost, WeightReceiver, WeightSender
from vexact_engine.handover import protocol


def _send_and_hang(address, after):
    model = build("Qwen3")

    def give():
        for number, item in enumerate(model.state_dict().items()):
            if number == after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    WeightSender(address, numerics=vx.numerics("cpu"), bucket_bytes=4096).send(give())


def _receive_and_die(address, mode, ready, after):
    engine = Engine.from_pretrained(build("Qwen3"), config=CONFIG)
    receiver = WeightReceiver(engine, address, mode=mode)
    ready.set()
    count, take = [0], receiver._take

    def counted(*args):
        count[0] += 1
        if count[0] == after:
            os.kill(os.getpid(), signal.SIGKILL)
        take(*args)

    receiver._take = counted
    receiver.receive(300)


@MODES
def test_a_sender_that_is_killed(mode, sockets):
    model = build("Qwen3")
    context = multiprocessing.get_context("spawn")
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode) as (receiver, start),
    ):
        old = texts(engine)
        result = start()
        process = context.Process(target=_send_and_hang, args=(receiver.address, 9))
        process.start()
        with pytest.raises(PeerLost, match="has died"):
            result()
        process.join()
        left(engine, mode, old)
        with sender(receiver) as out:
            result = start()
            assert out.send(model.state_dict()) == 1 == result()
        assert texts(engine) == old


@MODES
def test_a_receiver_that_is_killed_and_comes_back(mode, sockets):
    context, model = multiprocessing.get_context("spawn"), build("Qwen3")
    address, ready = protocol.new_address(), context.Event()
    process = context.Process(target=_receive_and_die, args=(address, mode, ready, 6))
    process.start()
    assert ready.wait(300)
    with WeightSender(address, numerics=vx.numerics("cpu"), bucket_bytes=4096, timeout=300) as out:
        with pytest.raises(PeerLost, match="has died"):
            out.send(model.state_dict())
        process.join()
        with Engine.from_pretrained(model, config=CONFIG) as engine:
            receiver = WeightReceiver(engine, address, mode=mode)
            thread = threading.Thread(target=receiver.receive, args=(300,))
            thread.start()
            assert out.send(model.state_dict()) == 1
            thread.join()
            receiver.close()


@MODES
def test_a_receiver_that_stalls(mode, sockets, monkeypatch):
    model = build("Qwen3")
    new = other(model)
    go_on, buckets = threading.Event(), []
    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine, mode) as (receiver, start):
        old, take = texts(engine), receiver._take

        def stall(*args):
            buckets.append(args)
            if len(buckets) == 5:
                out.timeout = 3  # of the acknowledgement after this one's
            if len(buckets) == 6:
                go_on.wait(300)
            take(*args)

        monkeypatch.setattr(receiver, "_take", stall)
        with sender(receiver, bucket_bytes=4096) as out:
            result = start()
            with pytest.raises(
                PeerLost, match=r"the engine \(process \d+\): an acknowledgement did not come within 3 s"
            ):
                out.send(new.state_dict())
            go_on.set()
            with pytest.raises(HandoverFailed, match=r"the sender broke off: PeerLost: .* did not come within 3 s"):
                result()
            left(engine, mode, old)
            out.timeout = 60
            result = start()
            assert out.send(new.state_dict()) == 1 == result()
        assert texts(engine) == expected("Qwen3", new)


def _send_one(address, seed, bucket_bytes):
    new = other(build("Qwen3"), seed)
    with WeightSender(address, numerics=vx.numerics("cpu"), bucket_bytes=bucket_bytes, timeout=300) as out:
        for _ in range(3):
            out.send(new.state_dict())


def test_two_jobs_on_one_host_do_not_meet(sockets):
    """Both at the same time, from one folder of sockets, in either mode."""
    context = multiprocessing.get_context("spawn")
    with (
        Engine.from_pretrained(build("Qwen3"), config=CONFIG) as first,
        Engine.from_pretrained(build("Qwen3"), config=CONFIG) as second,
        receiving(first, "in_place") as (one, start_one),
        receiving(second, "staged") as (two, start_two),
    ):
        assert one.address != two.address
        jobs = ((one.address, 5, 4096), (two.address, 6, 1 << 16))
        processes = [context.Process(target=_send_one, args=job) for job in jobs]
        for process in processes:
            process.start()
        for version in (1, 2, 3):
            results = start_one(), start_two()
            assert [result() for result in results] == [version, version]
        for process in processes:
            process.join(300)
            assert process.exitcode == 0
        assert texts(first) == expected("Qwen3", other(build("Qwen3"), 5))
        assert texts(second) == expected("Qwen3", other(build("Qwen3"), 6))
