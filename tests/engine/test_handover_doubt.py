"""Weights from a trainer's process to an engine's whose receiver stalls at the end of a set: whether they were taken is
known to both, or the sender says that it does not know, and sending them again ends in agreement."""

import contextlib
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from engine_models import build, until
from handovers import CONFIG, MODES, expected, left, other, patient, receiving, sender, texts

import vexact_ops as vx
from vexact_engine import Engine, HandoverFailed, PeerLost, WeightSender
from vexact_engine.handover import buffers, messages, protocol


@contextlib.contextmanager
def meeting(monkeypatch, last, mode="in_place"):
    """An engine, its receiver, what starts that, a sender that has little patience from the message `last` on, and
    what ends both that and the stall."""
    go_on = threading.Event()
    with (
        Engine.from_pretrained(build("Qwen3"), config=CONFIG) as engine,
        receiving(engine, mode) as (receiver, start),
        sender(receiver) as out,
    ):
        post = out._post

        def hurry(message):
            post(message)
            if isinstance(message, last) and not go_on.is_set():
                out.timeout = 0.5

        monkeypatch.setattr(out, "_post", hurry)
        try:
            yield engine, receiver, start, out, go_on
        finally:
            go_on.set()


def _stall(receiver, where, go_on, monkeypatch):
    finish, post = receiver._intake.finish, receiver._post

    def stall_and_finish():
        assert go_on.wait(300)
        return finish()

    def stall_and_post(to, message):
        if isinstance(message, messages.Done):
            assert go_on.wait(300)
        post(to, message)

    if where == "before":
        monkeypatch.setattr(receiver._intake, "finish", stall_and_finish)
    else:
        monkeypatch.setattr(receiver, "_post", stall_and_post)


@MODES
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_set_in_doubt_is_sent_again(where, mode, sockets, monkeypatch):
    """Before the engine has taken it or after, the sender says the same, for it knows the same."""
    new = other(build("Qwen3"))
    with meeting(monkeypatch, messages.Finish, mode) as (engine, receiver, start, out, go_on):
        with monkeypatch.context() as patched:
            _stall(receiver, where, go_on, patched)
            result = start()
            said = r"the new version did not come within 0\.5 s\. In doubt: .*weight_version is 7; it was 0\)"
            with pytest.raises(PeerLost, match=said) as caught:
                out.send(new.state_dict(), version=7)
            assert caught.value.in_doubt and pickle.loads(pickle.dumps(caught.value)).in_doubt
            if where == "after":
                until(lambda: engine.weight_version == 7)  # the sender gave up after half a second, come to that or not
            assert engine.weight_version == (0 if where == "before" else 7)
            with pytest.raises(PeerLost, match=r"a welcome did not come .* In doubt: ") as caught:  # it stalls still
                out.send(new.state_dict(), version=7)
            assert caught.value.in_doubt
            go_on.set()
            assert result() == 7 == engine.weight_version
        assert texts(engine) == expected("Qwen3", new)
        out.timeout = 300
        result = start()  # the second, which has no sender any more, is passed over
        assert out.send(new.state_dict(), version=7) == 7 == result() == engine.weight_version
        assert texts(engine) == expected("Qwen3", new)
        result = start()
        assert out.send(build("Qwen3").state_dict()) == 8 == result()


@MODES
def test_sets_that_were_broken_off_while_nobody_listened_are_passed_over(mode, sockets, monkeypatch, caplog):
    """The one that is taken is whole, and the last."""
    wrong, right = other(build("Qwen3"), 8), other(build("Qwen3"))
    with meeting(monkeypatch, messages.Hello, mode) as (engine, receiver, start, out, go_on):
        old = texts(engine)
        for _ in range(3):
            with pytest.raises(PeerLost, match="a welcome did not come") as caught:
                out.send(wrong.state_dict(), version=9)
            assert not caught.value.in_doubt
        said = r"no sender came within 0\.3 s, but one that broke off: PeerLost: .* a welcome did not come"

        def skipped():
            return caplog.text.count("skipped a set that its sender broke off before it began")

        with monkeypatch.context() as patched, ThreadPoolExecutor(1) as pool:
            looks_on = patient(receiver, patched)  # until it has heard of all of them

            def end():
                try:
                    until(lambda: skipped() == 3)
                finally:
                    looks_on.set()

            ending = pool.submit(end)
            with pytest.raises(TimeoutError, match=said):
                receiver.receive(0.3)
            ending.result()
        assert skipped() == 3
        with pytest.raises(PeerLost, match="a welcome did not come"):
            out.send(wrong.state_dict(), version=9)
        assert texts(engine) == old and engine.weight_version == 0
        go_on.set()
        out.timeout = 300
        result = start()
        assert out.send(right.state_dict()) == 1 == result() == engine.weight_version
        assert texts(engine) == expected("Qwen3", right)


@MODES
def test_a_set_that_is_broken_off_when_it_would_begin_gives_way_to_the_next(mode, sockets, monkeypatch):
    """The receiver has read that a set comes, and stalls before it says so: one `receive` takes the one after."""
    wrong, right = other(build("Qwen3"), 8), other(build("Qwen3"))
    with meeting(monkeypatch, messages.Hello, mode) as (engine, receiver, start, out, go_on):
        begin = receiver._intake.begin

        def stall_and_begin(*given):
            assert go_on.wait(300)
            begin(*given)

        monkeypatch.setattr(receiver._intake, "begin", stall_and_begin)
        result = start()
        with pytest.raises(PeerLost, match="a welcome did not come"):
            out.send(wrong.state_dict(), version=9)
        monkeypatch.setattr(out, "_post", lambda message: (WeightSender._post(out, message), go_on.set()))
        out.timeout = 300
        assert out.send(right.state_dict()) == 1 == result() == engine.weight_version
        assert texts(engine) == expected("Qwen3", right)


class Script:
    """A socket at which all of this has come, in this order."""

    def __init__(self, *comes):
        self.comes, self.sent = list(comes), []

    def poll(self, _=0):
        return bool(self.comes)

    def recv_multipart(self):
        by, message = self.comes.pop(0)
        return [by, messages.encode(message)]

    def send_multipart(self, parts):
        self.sent.append((parts[0], messages.decode(parts[1], "the receiver")))


@pytest.mark.parametrize("gave_up", [True, False])
def test_who_comes_again_is_not_refused_for_a_set_that_it_has_given_up(gave_up, sockets, monkeypatch):
    """What it says on its new socket may be heard before its last word on the old one."""
    me = messages.Peer.self("the trainer")
    hello, cancel = messages.Hello(messages.VERSION, me, vx.numerics("cpu")), messages.Cancel("PeerLost: it stalls")
    with meeting(monkeypatch, ()) as (_engine, receiver, *_):
        monkeypatch.setattr(protocol.Wait, "until_heard", lambda *_: None)
        with monkeypatch.context() as patched:
            script = Script((b"again", hello), *([(b"first", cancel)] if gave_up else []))
            patched.setattr(receiver, "_socket", script)
            patched.setattr(receiver, "_poller", script)
            if gave_up:
                assert receiver._next(b"first", me) == cancel and script.sent == []
                assert receiver._await(None, None) == (b"again", hello)
            else:
                with pytest.raises(IndexError):  # nothing more comes
                    receiver._next(b"first", me)
                ((to, refused),) = script.sent
                assert to == b"again" and "is sending its own at the moment" in refused.reason


@MODES
def test_a_set_that_is_in_doubt_without_a_number_counts_twice(mode, sockets, monkeypatch):
    new = other(build("Qwen3"))
    with meeting(monkeypatch, messages.Finish, mode) as (engine, receiver, start, out, go_on):
        with monkeypatch.context() as patched:
            _stall(receiver, "before", go_on, patched)
            result = start()
            with pytest.raises(PeerLost, match="weight_version is above 0") as caught:
                out.send(new.state_dict())
            assert caught.value.in_doubt
            go_on.set()
            assert result() == 1
        out.timeout = 300
        result = start()
        assert out.send(new.state_dict()) == 2 == result() == engine.weight_version
        assert texts(engine) == expected("Qwen3", new)


@MODES
@pytest.mark.parametrize("after", [False, True], ids=["before it is read", "before it is acknowledged"])
def test_a_set_whose_last_bucket_is_not_given_back_is_not_taken(after, mode, sockets, monkeypatch):
    """The sender is not in doubt, and may do with its memory what it likes: it was read, and taken."""
    new = other(build("Qwen3"))
    with meeting(monkeypatch, messages.Bucket, mode) as (engine, receiver, start, out, go_on):
        old, take, acknowledge, stalled = texts(engine), receiver._take, receiver._acknowledge, []

        def stall_and_take(sender, message):
            if isinstance(message, messages.Bucket):
                stalled.append(message)
                assert go_on.wait(300)
            take(sender, message)

        def stall_and_acknowledge(sender):
            stalled.append(None)
            assert go_on.wait(300)
            acknowledge(sender)

        with monkeypatch.context() as patched:
            if after:
                patched.setattr(receiver, "_acknowledge", stall_and_acknowledge)
            else:
                patched.setattr(receiver, "_take", stall_and_take)
            result = start()
            with pytest.raises(PeerLost, match=r"an acknowledgement did not come within 0\.5 s") as caught:
                out.send(new.state_dict(), version=7)
            assert not caught.value.in_doubt
            for memory in out._buffers[buffers.HOST].tensors:
                memory.zero_()
            go_on.set()
            with pytest.raises(HandoverFailed, match="the sender broke off: PeerLost"):
                result()
            assert len(stalled) == 1
        assert engine.weight_version == 0
        left(engine, mode, old)
        out.timeout = 300
        result = start()
        assert out.send(new.state_dict(), version=7) == 7 == result()
        assert texts(engine) == expected("Qwen3", new)


def test_a_set_that_fails_at_the_very_end_leaves_no_doubt(sockets, monkeypatch):
    with meeting(monkeypatch, ()) as (_engine, _receiver, start, out, _):
        model = build("Qwen3")
        result = start()
        with pytest.raises(HandoverFailed, match=r"missing.*has no weights now"):
            out.send(list(model.state_dict().items())[:-2])
        with pytest.raises(HandoverFailed, match="missing"):
            result()
        out.timeout = 0.5
        with pytest.raises(PeerLost, match=r"a welcome did not come within 0\.5 s$") as caught:
            out.send(model.state_dict())
        assert not caught.value.in_doubt


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", 2**53, 2**70])
def test_a_version_that_is_none(version, sockets, monkeypatch):
    said = r"version: got .*, expected None, or 1 to 9007199254740991"
    with meeting(monkeypatch, ()) as (*_, out, _), pytest.raises(ValueError, match=said):
        out.send({}, version=version)


@pytest.mark.parametrize("lives", [None, True])
def test_what_came_while_this_process_stood_still_has_come(lives, monkeypatch):
    """All of the time that the wait may take passes between two looks at what has come: one more look decides."""
    monkeypatch.setattr(protocol, "time", SimpleNamespace(monotonic=lambda: next(times)))
    peer = lives and messages.Peer.self("a sender")

    def looks_until(comes):
        looks = 0

        def poll(milliseconds):
            nonlocal looks
            looks += 1
            return looks >= comes

        with contextlib.suppress(PeerLost):
            protocol.Wait(peer, 60.0, "a word").until_heard(SimpleNamespace(poll=poll))
            return looks
        return "lost"

    for comes, looks in ((1, 1), (2, 3), (3, "lost")):
        times = iter([0.0, 100.0, 200.0])
        assert looks_until(comes) == looks
