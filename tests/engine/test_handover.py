"""Weights from a trainer's process to an engine's: names and dtypes as they come, and each way in which it can fail.

More than 600 lines in one file because all of them take one trainer's process, one engine's and the faults between
them, and because files of tests are what is given to processes: sessions and their sockets are made once.
"""

import asyncio
import contextlib
import gc
import math
import os
import resource
import socket
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
from engine_models import VOCAB, build, held
from handovers import CONFIG, MODES, PARAMS, PROMPTS, expected, left, other, patient, receiving, sender, texts

import vexact_ops as vx
from vexact_engine import (
    Engine,
    HandoverFailed,
    PeerLost,
    SamplingParams,
    WeightReceiver,
    WeightSender,
    WeightsTorn,
)
from vexact_engine.handover import buffers, messages, protocol
from vexact_engine.handover.session import WeightUpdate
from vexact_engine.handover.threads import half_the_threads
from vexact_engine.weights.experts import per_expert
from vexact_engine.weights.update import Update


@contextlib.contextmanager
def handover(model, mode="in_place", **options):
    """An engine, its receiver, what starts that, and a sender."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine.from_pretrained(model, config=CONFIG))
        receiver, start = stack.enter_context(receiving(engine, mode))
        yield engine, receiver, start, stack.enter_context(sender(receiver, **options))


def untied(model):
    """Of tied names one, as named_parameters() has it."""
    return {id(value): (name, value) for name, value in model.state_dict(keep_vars=True).items()}.values()


@MODES
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Qwen3Moe", "DeepseekV3", "Mixtral"])
def test_weights_arrive(family, mode, sockets):
    model = build(family)
    new = other(model)
    wanted = expected(family, new)
    shapes = [
        lambda: untied(new),
        lambda: new.state_dict(),
        lambda: {name: value.to(model.state_dict()[name].dtype) for name, value in new.state_dict().items()},
        lambda: per_expert(new),
    ]
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode) as (receiver, start),
    ):
        old = texts(engine)
        assert old != wanted
        with sender(receiver, bucket_bytes=4096, checksum=True) as out:  # smaller than most tensors
            for version, give in enumerate(shapes, 1):
                result = start()
                assert out.send(give()) == version == result()
                assert texts(engine) == wanted
                assert engine.weight_version == version
                with torch.no_grad():
                    for p in engine.model.parameters():
                        p.zero_()
        assert all(set(c.weight_versions) == {5} for c in engine.generate(PROMPTS, PARAMS))  # the zeroes count as one


def test_asynchronous_iterators(sockets):
    model = build("Qwen3")
    new = other(model)

    async def give():
        for item in new.state_dict().items():
            await asyncio.sleep(0)
            yield item

    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine) as (receiver, start):
        with sender(receiver) as out:
            result = start()
            assert asyncio.run(out.asend(give())) == 1 == result()
        assert texts(engine) == expected("Qwen3", new)


@MODES
@pytest.mark.parametrize(
    "fault,text",
    [
        ("missing", "missing: "),
        ("buffer", r"missing: .*e_score_correction_bias \(buffers of checkpoints"),
        ("extra", "unknown: nobody"),
        ("wrapped", "unknown: module.* 'module.' of DistributedDataParallel: strip that"),
        ("repeated", "repeated: "),
        ("shape", r"is \(3,\), expected"),
        ("dtype", "is torch.int64, expected"),
        ("iterator", "the gathering failed"),
        ("untied", "are tied, but hold different values"),
    ],
)
def test_a_set_that_is_wrong_is_refused(fault, text, mode, sockets):
    family = {"untied": "Llama", "buffer": "DeepseekV3"}.get(fault, "Qwen3")
    model = build(family)
    new = other(model)
    state = dict(new.named_parameters() if fault == "buffer" else new.state_dict())
    names = list(state)
    last = names[-1]

    def give():
        for name in names[:-1] if fault == "missing" else names:
            yield (
                name,
                torch.zeros(3)
                if (name, fault) == (last, "shape")
                else state[name].long()
                if (
                    name,
                    fault,
                )
                == (last, "dtype")
                else state[name],
            )
        if fault in ("extra", "wrapped"):
            yield "nobody.weight" if fault == "extra" else f"module.{names[0]}", torch.zeros(3)
        if fault == "repeated":
            yield names[0], state[names[0]]
        if fault == "iterator":
            raise KeyError("the gathering failed")

    if fault == "untied":
        state["lm_head.weight"] = state["lm_head.weight"] + 1
        names = list(state)
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode) as (receiver, start),
    ):
        old = texts(engine)
        with sender(receiver, bucket_bytes=4096) as out:
            result = start()
            with pytest.raises((HandoverFailed, ValueError, TypeError, KeyError), match=text):
                out.send(give())
            with pytest.raises(HandoverFailed, match=text) as caught:
                result()
            assert engine.weight_version == 0
            if mode == "staged":
                assert "goes on with the weights that it had" in str(caught.value)
                assert texts(engine) == old
            else:
                assert "has no weights now" in str(caught.value)
                with pytest.raises(WeightsTorn):
                    texts(engine)
            result = start()
            assert out.send(new.state_dict()) == 1 == result()
            assert texts(engine) == expected(family, new)


class Scaled(torch.Tensor):
    """Numbers that mean something with their scale alone, as quantised weights are."""

    @staticmethod
    def __new__(cls, numbers):
        made = torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)
        made.numbers = numbers
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return function(*(a.numbers if isinstance(a, cls) else a for a in args), **(kwargs or {}))


NO_SETS = [
    (lambda state: None, "named_tensors: got a NoneType, expected a mapping"),
    (lambda state: iter(state), "named_tensors: got a str for a name and a tensor"),
    (lambda state: {3: torch.zeros(3)}, "named_tensors: got a int for the name of a tensor"),
    (lambda state: {n: t.to(torch.float8_e4m3fn) for n, t in state.items()}, "is torch.float8_e4m3fn, expected torch"),
    (lambda state: {n: Scaled(t) for n, t in state.items()}, "is a Scaled, expected a plain tensor"),
]


def test_what_no_set_is_made_of(sockets):
    """Numbers without their scales among them: they would be rounded as if they were the weights."""
    model = build("Qwen3")
    with handover(model) as (_, _receiver, start, out):
        for given, text in NO_SETS:
            result = start()
            with pytest.raises(TypeError, match=f"^weights: .*{text}"):
                out.send(given(model.state_dict()))
            with pytest.raises(HandoverFailed, match=text):
                result()
        result = start()
        assert out.send(model.state_dict()) == 1 == result()


@MODES
def test_another_fingerprint_is_refused(mode, sockets):
    model = build("Qwen3")
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode) as (receiver, start),
    ):
        old = texts(engine)
        with sender(receiver, numerics=vx.numerics("cpu", kv_segment=256)) as out:
            result = start()
            said = "options.kv_segment: the trainer has 256, the engine None"
            with pytest.raises(HandoverFailed, match=said):
                out.send(model.state_dict())
            with pytest.raises(HandoverFailed, match=said):
                result()
        assert texts(engine) == old


def test_a_fingerprint_with_other_gradients_alone_is_taken(sockets):
    """A trainer with flash-attn-4, say, and an engine without."""
    model = build("Qwen3")
    new, numerics = other(model), vx.numerics("cpu")
    numerics = {**numerics, "gradients": {"flash-attn-4": "4.0.0b36"}}
    with handover(model, numerics=numerics) as (engine, _receiver, start, out):
        result = start()
        assert out.send(new.state_dict()) == 1 == result()
        assert engine.update_weights(model.state_dict(), numerics=numerics) == 2
        numerics["rooms"] = {**numerics["rooms"], "linear": "of other sources"}
        with pytest.raises(ValueError, match=r"rooms\.linear: got 'of other sources'") as caught:
            engine.update_weights(model.state_dict(), numerics=numerics)
        assert "flash-attn-4" not in str(caught.value)


def test_another_version_of_the_protocol_is_refused(sockets, monkeypatch):
    model = build("Qwen3")
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine) as (receiver, start),
        sender(receiver) as out,
    ):
        session = messages.Hello(messages.VERSION + 1, messages.Peer.self("an old trainer"), out.numerics)
        out._connect()
        result = start()
        out._post(session)
        ours = messages.VERSION
        with pytest.raises(HandoverFailed, match=f"sender's version is {ours + 1}, the receiver's {ours}"):
            out._answer("a welcome", messages.Welcome)
        with pytest.raises(HandoverFailed, match="protocol"):
            result()


def test_a_second_sender_is_told_who_is_at_it(sockets):
    model = build("Qwen3")
    with handover(model) as (_, receiver, start, first), sender(receiver) as second:
        result = start()

        def give():
            for number, item in enumerate(model.state_dict().items()):
                if number == 3:
                    with pytest.raises(HandoverFailed, match=r"the trainer .* is sending its own"):
                        second.send(model.state_dict())
                yield item

        assert first.send(give()) == 1 == result()
        result = start()
        assert second.send(model.state_dict()) == 2 == result()


def test_nobody_comes_and_nobody_answers(sockets):
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine, receiving(engine) as (receiver, _start):
        with pytest.raises(TimeoutError, match=r"no sender came within 0\.3 s"):
            receiver.receive(0.3)
        with (
            sender(receiver, timeout=0.3) as out,
            pytest.raises(PeerLost, match=r"a welcome did not come within 0\.3 s"),
        ):
            out.send({})


@MODES
def test_a_sender_that_stalls(mode, sockets, monkeypatch):
    model = build("Qwen3")
    with handover(model, mode, bucket_bytes=4096) as (engine, receiver, start, out):
        patience, receiver.timeout = receiver.timeout, 0.5
        old, stalls = texts(engine), patient(receiver, monkeypatch)
        result = start()

        def give():
            for number, item in enumerate(model.state_dict().items()):
                if number == 5:  # until it is given up
                    stalls.set()
                    with pytest.raises(PeerLost, match="did not come within"):
                        result()
                    out.timeout = 1.0  # nobody answers any more
                yield item

        with pytest.raises(HandoverFailed, match="did not come within"):
            out.send(give())
        with pytest.raises(PeerLost, match="did not come within"):
            result()
        left(engine, mode, old)
        receiver.timeout = out.timeout = patience
        result = start()
        assert out.send(model.state_dict()) == 1 == result()
        assert texts(engine) == old


@contextlib.contextmanager
def no_room(how, monkeypatch):
    if how == "limit":  # the kernel itself refuses
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        yield


@MODES
@pytest.mark.parametrize("how", ["limit", "full"])
def test_no_room_for_a_bucket(how, mode, sockets, monkeypatch):
    model = build("Qwen3")
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode) as (receiver, start),
    ):
        old = texts(engine)
        with sender(receiver, bucket_bytes=1 << 16) as out:
            with no_room(how, monkeypatch):
                result = start()
                with pytest.raises(HandoverFailed, match="there is no room for it"):
                    out.send(model.state_dict())
                with pytest.raises(HandoverFailed, match=r"no room.*goes on with the weights that it had"):
                    result()
            assert texts(engine) == old
            result = start()
            assert out.send(model.state_dict()) == 1 == result()


def test_memory_that_does_not_open(sockets, monkeypatch):
    model = build("Qwen3")
    with handover(model) as (_engine, _receiver, start, out):

        class Lost(buffers.Buckets):
            def _add(self):
                super()._add()
                self.handles[-1] = struct.pack("<qq", os.getpid(), 99999)

        monkeypatch.setattr("vexact_engine.handover.sender.Buckets", Lost)
        result = start()
        with pytest.raises(HandoverFailed, match="of one user and in one PID namespace"):
            out.send(model.state_dict())
        with pytest.raises(HandoverFailed, match="PID namespace"):
            result()


def test_bytes_that_change_on_the_way(sockets, monkeypatch):
    model = build("Qwen3")
    with handover(model, "staged", checksum=True) as (_engine, _receiver, start, out):
        true = buffers.checksum
        monkeypatch.setattr("vexact_engine.handover.filling.checksum", lambda used: true(used) + 1)
        result = start()
        with pytest.raises(HandoverFailed, match="not what was sent"):
            out.send(model.state_dict())
        with pytest.raises(HandoverFailed, match="checksum"):
            result()


def test_the_checksum_sees_words_that_change_and_words_that_change_places():
    words = torch.randint(-(2**62), 2**62, (64,))
    total = buffers.checksum(words.view(torch.uint8))
    for place in range(64):
        changed = words.clone()
        changed[place] ^= 1 << (place % 63)
        assert buffers.checksum(changed.view(torch.uint8)) != total
    swapped = words.clone()
    swapped[[3, 9]] = words[[9, 3]]
    assert buffers.checksum(swapped.view(torch.uint8)) != total


def test_a_bucket_is_given_back_before_another_that_lies_there_is_read(sockets, monkeypatch):
    """Two that were filled were both read before the first was acknowledged: filling and reading took turns."""
    model = build("Qwen3")
    said, take, post, last = [], WeightReceiver._take, WeightReceiver._post, list(model.state_dict())[-1]

    def wait_and_take(self, sender, message):
        if isinstance(message, messages.Bucket):
            said.append(("taken", message.buffer))
            end = message.parts[-1]
            whole = end.name == last and end.start + end.count == math.prod(end.shape)
            assert whole or self._socket.poll(60_000)  # another bucket: the end comes once all are given back
        take(self, sender, message)

    def note(self, to, message):
        if isinstance(message, messages.Ack):
            said.append(("given back", message.buffer))
        post(self, to, message)

    monkeypatch.setattr(WeightReceiver, "_take", wait_and_take)
    monkeypatch.setattr(WeightReceiver, "_post", note)
    with handover(model, bucket_bytes=16384) as (_engine, _receiver, start, out):
        result = start()
        assert out.send(model.state_dict()) == 1 == result()
        assert sum(bucket.nbytes for bucket in out._buffers[buffers.HOST].tensors) == 2 * 16384
    buckets = [buffer for what, buffer in said if what == "taken"]
    assert len(buckets) > 4
    assert said == [(what, buffer) for buffer in buckets for what in ("taken", "given back")]


@MODES
def test_nothing_else_is_done_in_the_engine_s_thread_while_a_bucket_is_written(mode, sockets, monkeypatch):
    """It is written in the thread that it came in. What others want done meanwhile waits for that."""
    model, order, asked = build("Qwen3"), [], []
    new = other(model)
    with handover(model, mode, bucket_bytes=65536) as (engine, _receiver, start, out):
        loop, write = engine._loop, Update.write

        def ask():
            loop.call(lambda: order.append("called"))

        def busy_write(self, *args, **options):
            if threading.current_thread() is not loop._thread and not asked:
                asked.append(threading.Thread(target=ask))
                asked[0].start()
                deadline = time.monotonic() + 120
                while not order and time.monotonic() < deadline and not waits_for(loop):
                    time.sleep(0.001)
                order.append("written")
            write(self, *args, **options)

        def waits_for(loop):  # it has been taken out of the inbox, and its thread waits
            return asked[0].is_alive() and not loop._inbox and _in_thread(loop._thread, "_do")

        monkeypatch.setattr(Update, "write", busy_write)
        result = start()
        assert out.send(new.state_dict()) == 1 == result()
        asked[0].join(300)
    assert order == ["written", "called"]


def _in_thread(thread, function):
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def test_a_bucket_that_comes_when_its_update_has_been_given_up(sockets, monkeypatch):
    """Between the question whether it is open and the writing: into weights that somebody else may have by then."""
    model = build("Qwen3")
    new, first = other(model), {name: value.clone() for name, value in model.state_dict().items()}
    with handover(model, bucket_bytes=4096) as (engine, _receiver, start, out):
        old, loop, seen = texts(engine), engine._loop, []
        call_here = loop.call_here

        def late(function, when=None):
            if when is not None and loop.updating and not seen:
                seen.append(given_up)
                given_up.abandon()
                assert not loop.updating
            return call_here(function, when)

        init = WeightUpdate.__init__

        def note(self, *args, **options):
            nonlocal given_up
            init(self, *args, **options)
            given_up = self

        given_up = None
        monkeypatch.setattr(WeightUpdate, "__init__", note)
        monkeypatch.setattr(loop, "call_here", late)
        result = start()
        with pytest.raises(HandoverFailed):
            out.send(new.state_dict())
        with pytest.raises(RuntimeError, match="WeightUpdate: it has ended"):
            result()
        assert seen and not loop.updating and not engine._updates.locked()
        result = start()
        assert out.send(first) == 1 == result()
        assert texts(engine) == old


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_copies_take_half_of_a_thread_s_threads(threads):
    def ask():
        seen.append(torch.get_num_threads())

    before, seen = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        with pytest.raises(KeyError), half_the_threads():
            assert torch.get_num_threads() == max(1, threads // 2)
            other_thread = threading.Thread(target=ask)
            other_thread.start()
            other_thread.join()
            raise KeyError
        assert torch.get_num_threads() == threads and seen == [threads]
    finally:
        torch.set_num_threads(before)


@MODES
def test_fifty_updates_leave_nothing(mode, sockets):
    model = build("Qwen3")
    new = other(model)
    with (
        Engine.from_pretrained(model, config=CONFIG) as engine,
        receiving(engine, mode) as (receiver, start),
    ):
        with sender(receiver, bucket_bytes=65536) as out:

            def left():
                gc.collect()  # what others have left
                return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("vexact-weights")

            for number in range(52):
                result = start()
                assert out.send(new.state_dict()) == number + 1 == result()
                if number == 3:
                    files, mapped = left()
            now = left()
            assert now[0] <= files and now[1] == mapped  # files of others may have been closed meanwhile
        engine.reset_prefix_cache()
    del model, engine, receiver, start, out  # the weights may lie in such memory
    assert left()[1] == 0


def test_a_receiver_whose_engine_closes_at_that_moment_leaves_nothing(sockets, monkeypatch):
    model = build("Qwen3")
    with handover(model) as (engine, receiver, start, out):
        result = start()
        assert out.send(model.state_dict()) == 1 == result()
        engine.close()
        monkeypatch.setattr(type(engine._loop), "closed", property(lambda self: False))  # asked before it was
        receiver.close()
        assert receiver._socket.closed


def test_a_sender_comes_again_after_another_process(sockets, monkeypatch):
    """Its memory was let go of meanwhile, as it hears sooner or later."""
    model = build("Qwen3")
    new = other(model)
    with handover(model) as (_engine, receiver, start, out):
        result = start()
        assert out.send(model.state_dict()) == 1 == result()
        receiver._let_go()
        assert out._socket.poll(60_000)
        result = start()
        with monkeypatch.context() as patched:
            patched.setattr(out, "_connect", lambda: None)  # that is still to be read
            assert out.send(new.state_dict()) == 2 == result()


@pytest.mark.parametrize("listens", ["receiving", "in a hand-over", "closed", "idle"])
def test_buckets_are_given_back_once_the_receiver_has_let_go(listens, sockets, monkeypatch, caplog):
    """As those on a GPU are; a receiver that nobody asks to listen is waited for until a limit."""
    monkeypatch.setattr("vexact_engine.handover.sender.CUDA", buffers.HOST)
    monkeypatch.setattr("vexact_engine.handover.sender.GOODBYE", 0.5 if listens == "idle" else 120.0)
    model, order, said = build("Qwen3"), [], threading.Event()
    post, close = WeightReceiver._post, buffers.Buckets.close

    def noted(self, to, message):  # before the sender hears of it
        if isinstance(message, messages.Gone) and "let go" not in order:
            order.append("let go")
        post(self, to, message)

    monkeypatch.setattr(WeightReceiver, "_post", noted)
    monkeypatch.setattr(buffers.Buckets, "close", lambda self: (close(self), order.append("freed")))

    def give():
        for number, item in enumerate(model.state_dict().items()):
            if number == 3:
                closer.start()
                assert said.wait(300)
            yield item

    with handover(model) as (_, receiver, start, out), sender(receiver) as second:
        result = start()
        assert out.send(model.state_dict()) == 1 == result()
        order.clear()
        closer = threading.Thread(target=out.close)
        if listens == "receiving":
            result = start()
            out.close()
            assert second.send(model.state_dict()) == 2 == result()
        elif listens == "in a hand-over":
            result, wait = start(), out._await_gone
            monkeypatch.setattr(out, "_await_gone", lambda: (said.set(), wait()))
            assert second.send(give()) == 2 == result()
            closer.join(300)
            assert not closer.is_alive()
        else:
            if listens == "closed":
                receiver.close()
            out.close()
        assert order[:2] == (["freed"] if listens == "idle" else ["let go", "freed"])[:2]
        assert ("did not come within" in caplog.text) == (listens == "idle")
        monkeypatch.setattr("vexact_engine.handover.sender.GOODBYE", 0.5)  # nobody listens any more


def test_versions_of_running_requests(sockets):
    model = build("Qwen3")
    new = other(model)
    params = SamplingParams(max_new_tokens=240, seed=1, ignore_eos=True)
    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine) as (receiver, start):

        async def run():
            stream = engine.stream(PROMPTS[0], params)
            seen = [await anext(stream) for _ in range(5)]
            assert await asyncio.to_thread(reached.wait, 60)
            engine.pause("keep")
            with sender(receiver) as out:
                result = start()
                assert out.send(new.state_dict()) == 1 == result()
            engine.resume()
            async for item in stream:
                seen.append(item)
            return seen[-1].completion

        with held(engine, 20) as (reached, _):
            versions = asyncio.run(run()).weight_versions
        assert versions == sorted(versions) and set(versions) == {0, 1} and versions[0] == 0


def test_sockets_of_dead_processes_are_removed_and_those_of_living_ones_stay(sockets):
    protocol.folder()
    dead = sockets / "weights-1-dead.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(dead))
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine:
        first = WeightReceiver(engine)
        assert not dead.exists()
        second = WeightReceiver(engine)  # another job's, say
        assert first.address != second.address
        assert Path(first.address.removeprefix("ipc://")).exists()
        assert (sockets.stat().st_mode & 0o777) == 0o700
        first.close(), second.close(), second.close()


def test_a_folder_that_others_may_enter_is_refused(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        Path(folder, "vexact").mkdir(mode=0o755)
        with pytest.raises(PermissionError, match="nobody else may enter"):
            protocol.new_address()


@pytest.mark.parametrize(
    "options,error",
    [
        ({"transport": "pigeon"}, ValueError),
        ({"bucket_bytes": 100}, ValueError),
        ({"timeout": 0}, ValueError),
        ({"numerics": None}, TypeError),
    ],
)
def test_arguments_of_a_sender(options, error):
    with pytest.raises(error):
        WeightSender("ipc:///nowhere", **{"numerics": vx.numerics("cpu"), **options})


def test_arguments_of_a_receiver(sockets):
    protocol.folder()
    with Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine:
        for options in ({"mode": "soon"}, {"staging": "cpu"}, {"timeout": -1}):
            with pytest.raises(ValueError):
                WeightReceiver(engine, **options)
    assert VOCAB


@pytest.mark.parametrize("begun", [False, True])
def test_a_receiver_that_is_closed_while_a_thread_receives(sockets, begun):
    """That thread is told; the engine goes on, or says that it has no weights."""
    model = build("Qwen3")
    closing = threading.Event()

    def give():
        for number, item in enumerate(model.state_dict().items()):
            if number == 9:
                closing.set()
                with pytest.raises(HandoverFailed, match="the receiver is closed"):
                    result()
                out.timeout = 1.0  # nobody answers any more
            yield item

    with handover(model, bucket_bytes=4096) as (engine, receiver, start, out):
        old = texts(engine)
        result = start()
        closer = threading.Thread(target=lambda: (closing.wait(300), receiver.close()))
        closer.start()
        if begun:
            with pytest.raises(HandoverFailed):
                out.send(give())
            with pytest.raises(WeightsTorn):
                texts(engine)
        else:
            closing.set()
            with pytest.raises(HandoverFailed, match="the receiver is closed"):
                result()
            assert texts(engine) == old
        closer.join(300)
        assert not closer.is_alive()
        receiver.close()
        with pytest.raises(HandoverFailed, match="the receiver is closed"):
            receiver.receive(1)
