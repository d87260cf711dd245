"""Weights of which a sender on each node brings all: on every node or on none. Here two nodes are in one process, each
with half of the tensors; sockets, receivers, senders and memory are the real ones. trainers/test_nodes.py has Ray's."""

import contextlib
import itertools
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from engine_models import build, until
from handovers import MODES, asking_first, other

import vexact_ops as vx
from vexact_engine import HandoverFailed, NodeReceivers, PeerLost, StageDied, WeightSender
from vexact_engine.handover import messages, protocol
from vexact_engine.handover.buffers import Memories
from vexact_engine.handover.intake import EngineIntake
from vexact_engine.handover.session import WeightUpdate
from vexact_engine.parallel import coordinator, limits
from vexact_engine.parallel.line import Line
from vexact_engine.parallel.participant import Participant
from vexact_engine.parallel.update import UpdateOfStages
from vexact_engine.weights.update import Places, Update

NAMES = ("left", "right")


class Loop:
    """An engine's thread that has nothing else to do."""

    def __init__(self):
        self.updating, self.closed, self._lock = False, False, threading.RLock()
        self.torn = self.missing = None

    def call(self, function, when=None):
        with self._lock:
            return function()

    beside = call

    def may_change_weights(self):
        return True


class Worker:
    """What coordinator.py asks of a PipelineWorker, of two nodes with a stage each."""

    takes_in_caller, dead = False, ""

    def __init__(self):
        self.models = [build("Qwen3") for _ in NAMES]
        self.places = Places.of(self.models[0])
        self.seen = [set() for _ in NAMES]  # memory that each node's stage has opened
        self.hung_up = []
        self.start()

    def start(self):
        self.dead, self.stages, self.participants = "", [], []
        self.memories = [Memories(torch.device("cpu")) for _ in NAMES]
        for _ in NAMES:
            ours, theirs = socket.socketpair()
            self.stages.append(Line(ours))
            self.participants.append(Participant(Line(theirs)))

    def lines(self):
        if self.dead:
            self.start()
        return [(name[0], name, line) for name, line in zip(NAMES, self.stages)]

    def why_dead(self, otherwise, seconds=0):
        self.dead = self.dead or otherwise
        self.end()
        return self.dead

    def end(self):
        for node, line in enumerate(self.stages):
            line.close()
            self.participants[node].close()
            self.memories[node].close()

    def own(self, node):
        return list(self.places.targets)[node::2]

    def ask(self, what, staged=False, **_):
        if what == "begin":
            for places in self.copies if staged else []:
                for tensor in places.targets.values():
                    tensor.detach().zero_()
            made = self.copies if staged else [Places.of(model) for model in self.models]
            self.updates = [Update(places) for places in made]

    def make_copy(self, device):
        self.copies = [Places.of(build("Qwen3")) for _ in NAMES]
        return SimpleNamespace(device=device)

    def begin(self, specs, staging=None):
        return UpdateOfStages(self, specs, staging)

    def touched(self): ...

    whole = adopt = touched

    def open_on(self, node, offer):
        self.seen[node].add(offer.name)
        self.memories[node].open(offer)

    def let_go_on(self, node):
        self.memories[node].close()

    def take_each(self, update, taken):
        if self.dead:
            raise StageDied(self.dead)
        for each in taken:
            update.note_bucket(each.bucket, each.node)
            pairs = self.memories[each.node].values(each.bucket)
            self.updates[each.node].write(pair for pair in pairs if pair[0] in self.own(each.node))
            each.done = True

    def commit(self, update, tear):
        tear()
        for node, model in enumerate(self.models):
            for name in self.own(node):
                model.state_dict()[name].copy_(self.copies[node].targets[name])


class FakeEngine:
    def __init__(self):
        self._loop, self._worker, self._updates = Loop(), Worker(), threading.Lock()
        self.config, self.weight_version = SimpleNamespace(nodes=2), 0

    def numerics(self):
        return vx.numerics("cpu")

    def begin_update(self, numerics=None, version=None, staging=None):
        def renewed():
            self._loop.torn = None
            self.weight_version = self.weight_version + 1 if version is None else version
            return self.weight_version

        return WeightUpdate(self._loop, self._worker, self._updates, renewed, None, staging)

    def intake(self, mode, staging):
        worker = self._worker
        return EngineIntake(self._loop, worker, self.begin_update, worker.places, torch.device("cpu"), mode, staging)

    def holds(self, model):
        """Whether each node has its tensors of that model, bit for bit."""
        given, worker = model.state_dict(), self._worker
        return [
            all(torch.equal(own.state_dict()[name], given[name].bfloat16()) for name in worker.own(node))
            for node, own in enumerate(worker.models)
        ] == [True, True]


class Meeting:
    """An engine on two nodes, its receivers, and a sender on each node."""

    def __init__(self, stack, mode, timeout, **options):
        self.engine = FakeEngine()
        stack.callback(self.engine._worker.end)
        self.receivers = stack.enter_context(NodeReceivers(self.engine, mode=mode, timeout=timeout))
        self.pool = stack.enter_context(ThreadPoolExecutor(4))
        self.options = {
            "numerics": vx.numerics("cpu"),
            "timeout": 60,
            "bucket_bytes": 4096,
            "checksum": True,
            **options,
        }
        self.senders, self._stack = [], stack
        self.reach()

    def reach(self):
        for out in self.senders:
            out.close()
        made = (WeightSender(address, **self.options) for address in self.receivers.addresses.values())
        self.senders = [self._stack.enter_context(out) for out in made]

    def receive(self, timeout=60):
        return self.pool.submit(self.receivers.receive, timeout)

    def send(self, node, model, **options):
        given = model.state_dict() if isinstance(model, torch.nn.Module) else model
        return self.pool.submit(self.senders[node].send, given, **options)

    def both(self, *given, **options):
        """What receives, and the two that send."""
        return self.receive(), *(self.send(node, each, **options) for node, each in enumerate(given))

    def left(self, mode, old):
        """A set that has failed."""
        assert (self.engine._loop.torn is not None) == (mode == "in_place")
        if mode == "staged":
            assert self.engine.holds(old)

    def heals(self, model):
        found = [each.result(60) for each in self.both(model, model)]
        assert found == [self.engine.weight_version] * 3
        assert self.engine.holds(model) and self.engine._loop.torn is None


@pytest.fixture
def meeting(sockets):
    with contextlib.ExitStack() as stack:

        def make(mode="in_place", timeout=60, **options):
            found = Meeting(stack, mode, timeout, **options)
            return found

        yield make


@MODES
def test_each_node_takes_from_its_own_sender(mode, meeting):
    at, (one, two) = meeting(mode), [other(build("Qwen3"), seed) for seed in (7, 8)]
    assert list(at.receivers.addresses) == ["l", "r"], "by node, in their order"
    for version, model in ((5, one), (6, two)):
        assert [each.result(60) for each in at.both(model, model, version=version)] == [version] * 3
        assert at.engine.holds(model)
    own = [{buffers.name for buffers in out._buffers.values()} for out in at.senders]
    assert at.engine._worker.seen == own, "what each node's stages have opened is its own sender's memory"


@MODES
def test_a_node_says_whether_its_set_is_whole(mode, meeting, monkeypatch):
    answers, at, new = asking_first(monkeypatch), meeting(mode), other(build("Qwen3"))
    assert [each.result(60) for each in at.both(new, new)] == [1] * 3 and len(answers) == 2
    few = dict(list(new.state_dict().items())[:-1])
    for each in at.both(few, few):
        with pytest.raises(HandoverFailed, match="missing: "):
            each.result(60)
    assert len(answers) == 2 and at.engine.weight_version == 1
    at.left(mode, new)
    at.heals(new)


@MODES
def test_a_set_that_ends_while_memory_is_offered_says_nothing_of_the_memory(mode, meeting, monkeypatch):
    """Another node's failure comes before an offer is answered: its sender offers the same memory again."""
    at, new, opened = meeting(mode), other(build("Qwen3")), coordinator._Set.open

    def late(self, node, offer):
        while node == 1 and self._why is None:
            time.sleep(0.01)
        return opened(self, node, offer)

    def breaks():
        yield from list(new.state_dict().items())[:3]
        raise KeyError("a rank has failed")

    with monkeypatch.context() as patched:
        patched.setattr(coordinator._Set, "open", late)
        received, first, second = at.both(breaks(), new)
        for each, kind in ((received, HandoverFailed), (first, KeyError), (second, HandoverFailed)):
            with pytest.raises(kind, match="a rank has failed"):
                each.result(60)
    assert not at.senders[1]._refused
    at.heals(new)


@MODES
def test_a_node_without_a_sender_is_named_and_nothing_is_written(mode, meeting):
    at, new = meeting(mode, timeout=0.5), other(build("Qwen3"))
    received, sent = at.receive(), at.send(0, new)
    said = r"right: no sender came within 0\.45 s of that on left\. The engine goes on with the weights that it had"
    with pytest.raises(HandoverFailed, match=f"^weights: {said}"):
        received.result(60)
    with pytest.raises(HandoverFailed, match=f"^weights: refused on every node: {said}"):
        sent.result(60)
    assert at.engine.holds(build("Qwen3")) and at.engine._loop.torn is None
    at.receivers.timeout = 60
    at.heals(new)


@MODES
@pytest.mark.parametrize("how, node", [("missing", 0), ("missing", 1), ("unknown", 1), ("raises", 0)])
def test_what_one_node_lacks_is_taken_on_none(how, node, mode, meeting):
    at, new = meeting(mode), other(build("Qwen3"))
    whole = list(new.state_dict().items())

    def breaks():
        yield from whole[:3]
        raise KeyError("a rank has failed")

    wrong = {"missing": whole[:-1], "unknown": [*whole[:5], ("no.such", whole[0][1]), *whole[5:]], "raises": breaks()}
    given = [whole, whole]
    given[node] = wrong[how]
    received, *sent = at.both(*given)
    why = {"missing": "missing: lm_head.weight", "unknown": "unknown: no.such", "raises": "a rank has failed"}[how]
    with pytest.raises(HandoverFailed, match=f"^weights: {NAMES[node]}: .*{why}.* The engine "):
        received.result(60)
    with pytest.raises((HandoverFailed, ValueError, KeyError), match=why):
        sent[node].result(60)
    with pytest.raises(HandoverFailed, match=f"refused on every node: {NAMES[node]}: .*{why}"):
        sent[1 - node].result(60)
    at.left(mode, build("Qwen3"))
    at.heals(new)


@MODES
def test_sets_that_are_not_one(mode, meeting):
    at, new = meeting(mode), other(build("Qwen3"))
    received, *sent = at.receive(), at.send(0, new, version=3), at.send(1, new, version=4)
    for each in (received, *sent):
        with pytest.raises(HandoverFailed, match="version: got 3 on left, 4 on right, expected the same"):
            each.result(60)
    at.senders[1].numerics["class"] = "another"
    received, first = at.receive(), at.send(0, new)
    until(lambda: at.receivers._set is not None and 0 in at.receivers._set._came)  # who comes behind a set is in none
    sent = first, at.send(1, new)
    with pytest.raises(HandoverFailed, match=r"right: refused: numerics: class: the trainer has 'another'"):
        received.result(60)
    for each in sent:
        with pytest.raises(HandoverFailed, match="refused: numerics: class"):
            each.result(60)
    assert at.engine.holds(build("Qwen3")) and at.engine._loop.torn is None
    at.senders[1].numerics["class"] = "cpu"
    at.heals(new)


@contextlib.contextmanager
def begun(at, node, peer):
    """A sender on that node that has said that it has something, and then says nothing."""
    dealer = protocol.zmq.Context.instance().socket(protocol.zmq.DEALER)
    dealer.linger, dealer.rcvtimeo = 0, 30_000
    dealer.connect(list(at.receivers.addresses.values())[node])
    dealer.send(messages.encode(messages.Hello(messages.VERSION, peer, vx.numerics("cpu"))))
    try:
        yield dealer
    finally:
        dealer.close()


@contextlib.contextmanager
def doomed():
    """A process, as a sender calls itself."""
    with subprocess.Popen(["sleep", "600"]) as child:
        try:
            started = messages._status(child.pid)[1]
            yield child, messages.Peer(child.pid, started, f"the trainer (process {child.pid})")
        finally:
            child.kill()


@MODES
def test_a_sender_that_is_killed_is_named(mode, meeting):
    """Of its own node nothing has come; what another one has brought is torn all the same."""
    at, new = meeting(mode), other(build("Qwen3"))
    with doomed() as (child, peer), begun(at, 0, peer):
        received, sent = at.receive(), at.send(1, new)
        until(lambda: at.engine._loop.torn if mode == "in_place" else at.engine._worker.seen[1])
        child.kill()
        said = rf"left: the trainer \(process {child.pid}\) has died while the next message was waited for"
        with pytest.raises(PeerLost, match=f"^weights: {said}.* The engine ") as caught:
            received.result(60)
        assert ("has no weights now" in str(caught.value)) == (mode == "in_place")
        with pytest.raises(HandoverFailed, match=f"refused on every node: {said}"):
            sent.result(60)
    at.left(mode, build("Qwen3"))
    at.heals(new)


def test_who_says_nothing_is_told_at_once_that_another_node_has_failed(meeting):
    at, me = meeting(), messages.Peer.self("the trainer")
    with doomed() as (child, peer), begun(at, 0, me) as silent, begun(at, 1, peer) as dying:
        received = at.receive()
        for dealer in (silent, dying):
            assert isinstance(messages.decode(dealer.recv(), "it"), messages.Welcome)
        child.kill()
        with pytest.raises(PeerLost, match=r"^weights: right: the trainer"):
            received.result(60)
        said = messages.decode(silent.recv(), "it")
        assert isinstance(said, messages.Failed) and "refused on every node: right: the trainer" in said.reason
    at.heals(other(build("Qwen3")))


@MODES
def test_a_node_that_goes_away_is_named_and_healed(mode, meeting):
    at, new, dies = meeting(mode), other(build("Qwen3")), threading.Event()

    def dying():
        for number, item in enumerate(new.state_dict().items()):
            if number == 4:
                at.engine._worker.dead = "stage 1 on right has died (signal 9)"
                at.engine._worker.stages[1].close()
                dies.set()
            yield item

    received, *sent = at.both(new, dying())
    with pytest.raises(StageDied, match=r"^stage 1 on right has died \(signal 9\)$"):
        received.result(60)
    for each in sent:
        with pytest.raises((HandoverFailed, RuntimeError)):
            each.result(60)
    assert dies.is_set()
    at.reach()
    at.heals(new)


def test_a_node_that_stands_still_is_named_within_its_limit(meeting, monkeypatch):
    """Its process answers nothing, not even that it is there."""
    at, new = meeting(timeout=0.3), other(build("Qwen3"))
    monkeypatch.setattr(coordinator, "_PATIENCE", 200.0)  # of senders: these come late
    monkeypatch.setattr(limits, "ANSWER", 0.3)
    go_on = threading.Event()
    monkeypatch.setattr(at.engine._worker.participants[1], "do_ping", lambda: go_on.wait(60))
    received, sent = at.receive(), at.send(0, new)
    try:
        with pytest.raises(StageDied, match="the stages stand still: nothing comes from right"):
            received.result(60)
    finally:
        go_on.set()
    with pytest.raises(HandoverFailed, match=r"refused on every node: right: the stages stand still|is gone"):
        sent.result(60)


def test_nobody_comes_and_the_receivers_end(meeting):
    at, new = meeting(), other(build("Qwen3"))
    with pytest.raises(TimeoutError, match=r"no sender came within 0\.05 s"):
        at.receivers.receive(0.05)
    with pytest.raises(ValueError, match="the engine has others, expected none: close those first"):
        NodeReceivers(at.engine)
    at.heals(new)
    waits = at.receive(None)
    until(lambda: at.receivers._set is not None)
    at.receivers.close()
    with pytest.raises(HandoverFailed, match="the receivers are closed"):
        waits.result(60)
    for late in (at.receivers.receive, lambda: at.receivers.addresses):
        with pytest.raises(HandoverFailed, match="the receivers are closed"):
            late()
    with NodeReceivers(at.engine) as others:
        assert len(others.addresses) == 2


def test_receivers_that_end_before_a_node_has_heard_of_the_set(meeting, monkeypatch):
    at = meeting()
    numerics = at.engine.numerics

    def late():  # asked between the set's beginning and what the nodes are told
        until(lambda: at.receivers._set._why is not None)
        return numerics()

    monkeypatch.setattr(at.engine, "numerics", late)
    waits = at.receive(None)
    until(lambda: at.receivers._set is not None)
    with ThreadPoolExecutor(1) as ends:
        closed = ends.submit(at.receivers.close)
        with pytest.raises(HandoverFailed, match="the receivers are closed"):
            waits.result(10)
        closed.result(10)


def test_bad_input(sockets):
    engine = SimpleNamespace(config=SimpleNamespace(nodes=1), _worker=SimpleNamespace(lines=list))
    with pytest.raises(ValueError, match="got a SimpleNamespace of 1, expected an Engine of 2 nodes or more"):
        NodeReceivers(engine)
    with pytest.raises(ValueError, match="timeout: got 0, expected seconds above 0"):
        NodeReceivers(engine, timeout=0)
    with pytest.raises(ValueError, match="mode: got 'both', expected one of in_place, staged"):
        NodeReceivers(engine, mode="both")


# The line


def test_each_question_has_its_own_answer():
    with contextlib.ExitStack() as stack:
        ours, theirs = map(Line, socket.socketpair())
        stack.callback(ours.close)
        later, counts = [], itertools.count()

        def answers(what, each):
            if what == "wrong":
                raise ValueError("no such thing")
            if what == "later":
                later.append(ThreadPoolExecutor(1))
                return [later[0].submit(lambda: "late")]
            return [next(counts) + given["more"] for given in each]

        theirs.serve(object(), answers)
        asked = [ours.ask("count", more=10) for _ in range(5)]
        assert ours.ask("later").result(60) == "late"
        assert [each.result(60) for each in asked] == [10, 11, 12, 13, 14]
        with pytest.raises(ValueError, match="no such thing"):
            ours.ask("wrong").result(60)
        ended = threading.Event()
        ours.serve(object(), answers, ended.set)
        theirs.close()
        assert ended.wait(60)
        with pytest.raises(ConnectionError, match="the other end is gone"):
            ours.ask("count", more=1).result(60)
