"""Between CPUs a sender writes into the engine's own memory: who is killed, who stalls and writes on, what moves, and
what goes by buckets all the same."""

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from engine_models import build, held
from handovers import CONFIG, MODES, PARAMS, PROMPTS, expected, left, other, patient, receiving, sender, texts

import vexact_ops as vx
from vexact_engine import Engine, HandoverFailed, PeerLost, WeightReceiver, WeightSender, WeightsTorn
from vexact_engine.handover import messages, protocol
from vexact_engine.handover.lent import Segment
from vexact_engine.runner.worker import Worker
from vexact_engine.weights.experts import per_expert


def _where(model) -> dict[str, int]:
    return {name: p.data_ptr() for name, p in model.named_parameters()}


def _mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("vexact-weights")


def _send(start, out, given):
    result = start()
    version = out.send(given)
    assert version == result()
    return version


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "DeepseekV3"])
def test_a_copy_and_the_weights_take_turns_in_two_segments(family, sockets):
    """With the forward that was made of each. After a set that has failed, the copy lies in another one."""
    model = build(family)
    sets = [other(model, seed) for seed in (7, 8, 9, 10, 11)]
    wanted = [expected(family, new) for new in sets]

    def broken():
        yield from list(per_expert(sets[0]))[:-1]
        raise KeyError("no more")

    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, "staged", lend=True) as (receiver, start),
        sender(receiver, bucket_bytes=4096) as out,
    ):
        places, forwards, opened = [], [], []
        for number, (new, texted) in enumerate(zip(sets, wanted), 1):
            assert _send(start, out, per_expert(new)) == number
            places.append(_where(engine.model))
            forwards.append(engine._worker._runner.forward)
            opened.append(set(out._borrowed))
            assert texts(engine) == texted
        assert engine._worker.path == "fused"
        assert places[1:3] == places[3:5] and not set(places[3].values()) & set(places[4].values())
        assert forwards[1:3] == forwards[3:5] and forwards[3] is not forwards[4]
        assert opened[1] == opened[4] and len(opened[4]) == 2
        result = start()
        with pytest.raises(KeyError):
            out.send(broken())
        with pytest.raises(HandoverFailed, match="goes on with the weights that it had"):
            result()
        assert texts(engine) == wanted[4] and _where(engine.model) == places[4]
        _send(start, out, per_expert(sets[0]))
        assert texts(engine) == wanted[0]
        assert not set(_where(engine.model).values()) & {p for each in places[3:] for p in each.values()}


def test_weights_are_moved_once_and_away_when_a_set_has_failed(sockets):
    model = build("Qwen3")
    new = other(model)
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, lend=True) as (receiver, start),
        sender(receiver) as out,
    ):
        places = [_where(engine.model)]
        for _ in range(2):
            _send(start, out, new.state_dict())
            places.append(_where(engine.model))
        assert places[1] == places[2] and not set(places[0].values()) & set(places[1].values())
        result = start()
        with pytest.raises(HandoverFailed, match="missing"):
            out.send(list(new.state_dict().items())[:-2])
        with pytest.raises(HandoverFailed, match="has no weights now"):
            result()
        assert not set(places[1].values()) & set(_where(engine.model).values()) and not _mapped()
        with pytest.raises(WeightsTorn):
            texts(engine)
        _send(start, out, new.state_dict())
        assert texts(engine) == expected("Qwen3", new)


@MODES
@pytest.mark.parametrize("revoked", [True, False], ids=["revoked", "twin"])
def test_a_sender_that_has_stalled_writes_on(revoked, mode, sockets, monkeypatch):
    """When another one's set has come: into memory that nobody uses. Its twin, whose memory was not taken away from it,
    spoils that set."""
    if not revoked:
        monkeypatch.setattr(Worker, "take_back", lambda *_: None)
    model = build("Qwen3")
    late, new = other(model, 8), other(model)
    go_on, failed = threading.Event(), []

    def give():
        for number, item in enumerate(late.state_dict().items()):
            if number == 5:
                stalls.set()
                assert go_on.wait(300)
            yield item

    def send_late():
        try:
            first.send(give())
        except HandoverFailed as error:
            failed.append(error)

    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode, lend=True) as (receiver, start),
        sender(receiver) as first,
    ):
        old, patience, receiver.timeout = texts(engine), receiver.timeout, 0.5
        stalls = patient(receiver, monkeypatch)
        result = start()
        thread = threading.Thread(target=send_late)
        thread.start()
        with pytest.raises(PeerLost, match="did not come within"):
            result()
        left(engine, mode, old)
        receiver.timeout = patience
        with sender(receiver) as second:
            _send(start, second, new.state_dict())
        first.timeout = 1.0  # nobody listens to it any more
        go_on.set()
        thread.join(300)
        assert not thread.is_alive() and len(failed) == 1
        assert (texts(engine) == expected("Qwen3", new)) == revoked
        if revoked:
            first.timeout = 300
            _send(start, first, late.state_dict())
            assert texts(engine) == expected("Qwen3", late)


def _receive_and_die(address, mode, ready, after):
    engine = Engine.from_pretrained(build("Qwen3"), config=CONFIG)
    receiver = WeightReceiver(engine, address, mode=mode)
    ready.set()
    count, take = [0], receiver._take

    def counted(sender, message):
        count[0] += isinstance(message, messages.Wrote)
        if count[0] == after:
            os.kill(os.getpid(), signal.SIGKILL)
        take(sender, message)

    receiver._take = counted
    receiver.receive(300)


@MODES
def test_a_receiver_that_is_killed_while_its_memory_is_written(mode, sockets, monkeypatch):
    """The trainer hears of it at once, and keeps nothing of its memory."""
    monkeypatch.setattr("vexact_engine.handover.sender._SAID", 1)  # tensor by tensor
    context, model = multiprocessing.get_context("spawn"), build("Qwen3")
    new = other(model)
    address, ready = protocol.new_address(), context.Event()
    process = context.Process(target=_receive_and_die, args=(address, mode, ready, 6))
    process.start()
    assert ready.wait(300)

    def give():
        for number, item in enumerate(new.state_dict().items()):
            if number == 9:
                process.join(300)
            yield item

    with WeightSender(address, numerics=vx.numerics("cpu"), timeout=300) as out:
        with pytest.raises(PeerLost, match="has died while its memory was written"):
            out.send(give())
        assert not _mapped()
        with Engine.from_pretrained(model, config=CONFIG) as engine:
            with WeightReceiver(engine, address, mode=mode) as receiver:
                thread = threading.Thread(target=receiver.receive, args=(300,))
                thread.start()
                assert out.send(new.state_dict()) == 1
                thread.join()
            assert texts(engine) == expected("Qwen3", new)


@MODES
def test_a_receiver_that_stalls_while_its_memory_is_written(mode, sockets, monkeypatch):
    """The trainer does not wait for ever. What it had sent by then was whole, and is taken when it is found."""
    model = build("Qwen3")
    new, go_on = other(model), threading.Event()
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode, lend=True) as (receiver, start),
        sender(receiver) as out,
    ):
        old, take = texts(engine), receiver._take

        def stall(sender, message):
            if isinstance(message, messages.Wrote):
                assert go_on.wait(300)
            take(sender, message)

        def give():
            yield from new.state_dict().items()
            out.timeout = 3

        with monkeypatch.context() as patched:
            patched.setattr(receiver, "_take", stall)
            result = start()
            with pytest.raises(PeerLost, match=r"the engine \(process \d+\): the new version did not come within 3 s"):
                out.send(give())
            if mode == "staged":
                assert texts(engine) == old
            go_on.set()
            assert result() == 1
        out.timeout = 300
        assert texts(engine) == expected("Qwen3", new)
        assert _send(start, out, model.state_dict()) == 2


@MODES
@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_an_engine_that_computes_keeps_half_of_the_threads(busy, mode, sockets, monkeypatch):
    """Of those that a sender would write with: two that want the same cores wait for each other. In place nothing is
    computed while it writes."""
    halved = []

    @contextlib.contextmanager
    def half():
        halved.append(True)
        yield

    monkeypatch.setattr("vexact_engine.handover.sender.half_the_threads", half)
    model = build("Qwen3")
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode, lend=True) as (receiver, start),
        sender(receiver) as out,
    ):
        with held(engine, 3, asked=False) as (reached, _):
            ticket = engine.submit(PROMPTS[0], PARAMS, notify=lambda: None)
            assert reached.wait(300) and engine._loop.computes
            engine._loop.abort([ticket])
        engine.generate(PROMPTS, PARAMS)
        assert not engine._loop.computes
        computes = property(lambda self: busy and not self.updating)
        monkeypatch.setattr(type(engine._loop), "computes", computes)
        assert _send(start, out, model.state_dict()) == 1
    assert bool(halved) == (busy and mode == "staged")


def test_what_does_not_open_goes_by_buckets(sockets, monkeypatch, caplog):
    model = build("Qwen3")
    new, lend = other(model), Segment.lend

    def lost(self, *args):
        return messages.Lent(**{**_fields(lend(self, *args)), "handle": b"\0" * 16})

    monkeypatch.setattr(Segment, "lend", lost)
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        with (
            receiving(engine, lend=True) as (receiver, start),
            sender(receiver) as out,
            caplog.at_level(logging.WARNING),
        ):
            for _ in range(2):
                _send(start, out, new.state_dict())
            assert caplog.text.count("going on by buckets") == 1 and out._buffers and not out._borrowed
        assert texts(engine) == expected("Qwen3", new)


def _fields(message):
    return {name: getattr(message, name) for name in message.__struct_fields__}


@pytest.mark.parametrize("early", [False, True], ids=["meanwhile", "before anybody listens"])
def test_who_says_that_it_wrote_what_was_not_lent_is_refused(sockets, early):
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine:
        old = texts(engine)
        with receiving(engine) as (receiver, start), sender(receiver) as out:
            out._connect()
            if not early:
                result = start()
            out._post(messages.Hello(messages.VERSION, messages.Peer.self("a trainer"), out.numerics))
            out._post(messages.Wrote(["lm_head.weight"]))
            if early:
                assert receiver._socket.poll(60_000)
                result = start()
            with pytest.raises(HandoverFailed, match=r"nothing was lent.*goes on with the weights"):
                result()
        assert texts(engine) == old


def test_weights_that_were_dropped_in_their_sleep_stay_where_they_are(sockets):
    """Their memory is given back, and not moved at every set from then on."""
    model = build("Qwen3")
    new = other(model)
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, lend=True) as (receiver, start),
    ):
        with sender(receiver) as out:
            _send(start, out, new.state_dict())
            assert _mapped() == 2  # by each end
        assert _mapped() == 1
        engine.sleep(level=2)
        assert _mapped() == 0
        engine.wake_up(["weights"])
        before = _where(engine.model)
        with sender(receiver) as out:
            _send(start, out, new.state_dict())
            assert out._buffers and not out._borrowed
        assert _where(engine.model) == before
        engine.wake_up()
        assert texts(engine) == expected("Qwen3", new)


def test_a_buffer_is_not_lent(sockets):
    """An update may leave it out: what it lies in must not change hands."""
    model = build("DeepseekV3")
    new = other(model)
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, "staged", lend=True) as (receiver, start),
        sender(receiver) as out,
    ):
        for given in (new.named_parameters, new.state_dict, new.named_parameters):
            _send(start, out, given())
            names = {name for name, _ in engine.model.named_parameters()}
            assert names <= set().union(*(each.tensors for each in out._borrowed.values()))
            assert not any("e_score_correction_bias" in n for b in out._borrowed.values() for n in b.tensors)
            assert texts(engine) == expected("DeepseekV3", new)


def test_a_fork_that_lets_go_empties_nothing():
    segment = Segment(1 << 16)
    tensor = torch.empty(0, dtype=torch.uint8).set_(segment.storage(1 << 16)).fill_(7)
    pid = os.fork()
    if pid == 0:
        del tensor, segment
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert bool((tensor == 7).all())


def test_memory_ends_with_the_last_tensor_in_it():
    """Whoever still has it open: a sender that stalls keeps nothing."""
    segment = Segment(1 << 16)
    first, last = (torch.empty(0, dtype=torch.uint8).set_(segment.storage(1 << 15)).fill_(3) for _ in range(2))
    assert (segment.offset(first), segment.offset(last), segment.offset(torch.ones(4))) == (0, 1 << 15, None)
    file = os.open(f"/proc/self/fd/{segment._file}", os.O_RDWR)
    try:
        held = os.fstat(file).st_blocks
        del segment, first
        assert os.fstat(file).st_blocks == held == (1 << 16) // 512
        del last
        assert os.fstat(file).st_blocks == 0 and not _mapped()
    finally:
        os.close(file)
