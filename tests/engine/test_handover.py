"""Weights from a trainer's process to an engine's: names and dtypes as they come, and each way in which it can fail."""

import asyncio
import contextlib
import copy
import multiprocessing
import os
import signal
import socket
import struct
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import VOCAB, build

import vexact_ops as vx
from vexact_engine import (
    Engine,
    EngineConfig,
    HandoverFailed,
    PeerLost,
    Replicas,
    SamplingParams,
    StageDied,
    WeightReceiver,
    WeightSender,
    WeightsTorn,
)
from vexact_engine.parallel.messages import Open
from vexact_engine.weights import buffers, messages, protocol
from vexact_engine.weights.experts import per_expert

CONFIG = EngineConfig(page_size=4, num_pages=64, max_num_seqs=8, max_num_batched_tokens=64, show_progress=False)
PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7]]
PARAMS = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)
MODES = pytest.mark.parametrize("mode", ["in_place", "staged"])


def texts(engine):
    return [(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, PARAMS)]


def other(model, seed=7):
    """The same model with other weights, in fp32: what a trainer holds."""
    new = copy.deepcopy(model).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return new


def expected(family, new):
    model = build(family)
    model.load_state_dict(new.state_dict())  # rounds
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        return texts(engine)


@pytest.fixture
def sockets(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # a short name: sockets have at most 107 characters
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "vexact"
        assert not list(Path(folder, "vexact").glob("*")), "a socket was left behind"


@contextlib.contextmanager
def receiving(engine, mode="in_place", **options):
    """A receiver, and a function that receives one set in a thread and returns a function for what came of it."""
    with WeightReceiver(engine, mode=mode, **options) as receiver:

        def start(timeout=20):
            found = {}

            def run():
                try:
                    found["version"] = receiver.receive(timeout)
                except Exception as error:
                    found["error"] = error

            thread = threading.Thread(target=run)
            thread.start()

            def result():
                thread.join(30)
                assert not thread.is_alive()
                if "error" in found:
                    raise found["error"]
                return found["version"]

            return result

        yield receiver, start


def sender(receiver, **options):
    return WeightSender(receiver.address, **{"numerics": vx.numerics("cpu"), "timeout": 10, **options})


@contextlib.contextmanager
def handover(model, mode="in_place", **options):
    """An engine, its receiver, what starts that, and a sender."""
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine.from_pretrained(model, config=CONFIG))
        receiver, start = stack.enter_context(receiving(engine, mode))
        yield engine, receiver, start, stack.enter_context(sender(receiver, **options))


@MODES
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Qwen3Moe", "DeepseekV3", "Mixtral"])
def test_weights_arrive(family, mode, sockets):
    model = build(family)
    new = other(model)
    wanted = expected(family, new)
    shapes = [
        lambda: new.named_parameters(),
        lambda: new.state_dict(),
        lambda: {name: value.to(model.state_dict()[name].dtype) for name, value in new.state_dict().items()},
        lambda: per_expert(new),
    ]
    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine, mode) as (receiver, start):
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
        ("extra", "unknown: nobody"),
        ("repeated", "repeated: "),
        ("shape", r"is \(3,\), expected"),
        ("dtype", "is torch.int64, expected"),
        ("iterator", "the gathering failed"),
        ("untied", "are tied, but hold different values"),
    ],
)
def test_a_set_that_is_wrong_is_refused(fault, text, mode, sockets):
    model = build("Llama" if fault == "untied" else "Qwen3")
    new = other(model)
    state = dict(new.state_dict())
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
        if fault == "extra":
            yield "nobody.weight", torch.zeros(3)
        if fault == "repeated":
            yield names[0], state[names[0]]
        if fault == "iterator":
            raise KeyError("the gathering failed")

    if fault == "untied":
        state["lm_head.weight"] = state["lm_head.weight"] + 1
        names = list(state)
    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine, mode) as (receiver, start):
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
            assert texts(engine) == expected("Llama" if fault == "untied" else "Qwen3", new)


def test_another_fingerprint_is_refused(sockets):
    model = build("Qwen3")
    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine) as (receiver, start):
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


def test_what_is_no_message_is_refused(sockets):
    with handover(build("Qwen3")) as (_engine, _receiver, start, out):
        out._connect()
        result = start()
        out._socket.send(b"\x80\x04K\x07.")  # a pickle
        with pytest.raises(HandoverFailed, match="no message"):
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
def test_a_sender_that_stalls(mode, sockets):
    model = build("Qwen3")
    with handover(model, mode, bucket_bytes=4096) as (engine, receiver, start, out):
        receiver.timeout = 0.5
        old = texts(engine)
        result = start()

        def give():
            for number, item in enumerate(model.state_dict().items()):
                if number == 5:
                    time.sleep(2)
                yield item

        with pytest.raises(HandoverFailed, match="did not come within"):
            out.send(give())
        with pytest.raises(PeerLost, match="did not come within"):
            result()
        result = start()
        assert out.send(model.state_dict()) == 1 == result()
        assert texts(engine) == old


def test_no_room_for_a_bucket(sockets, monkeypatch):
    model = build("Qwen3")

    def full(*args):
        raise OSError(28, "No space left on device")

    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine) as (receiver, start):
        old = texts(engine)
        with sender(receiver) as out:
            with monkeypatch.context() as patched:
                patched.setattr(os, "posix_fallocate", full)
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

        class Lost(buffers.Buffers):
            def _add(self):
                super()._add()
                self.handles[-1] = struct.pack("<qq", os.getpid(), 99999)

        monkeypatch.setattr("vexact_engine.weights.sender.Buffers", Lost)
        result = start()
        with pytest.raises(HandoverFailed, match="of one user and in one PID namespace"):
            out.send(model.state_dict())
        with pytest.raises(HandoverFailed, match="PID namespace"):
            result()


def test_bytes_that_change_on_the_way(sockets, monkeypatch):
    model = build("Qwen3")
    with handover(model, "staged", checksum=True) as (_engine, _receiver, start, out):
        true = buffers.checksum
        monkeypatch.setattr("vexact_engine.weights.sender.checksum", lambda used: true(used) + 1)
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


def test_fifty_updates_leave_nothing(sockets):
    model = build("Qwen3")
    new = other(model)
    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine) as (receiver, start):
        with sender(receiver, bucket_bytes=65536) as out:

            def files():
                return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("vexact-weights")

            for number in range(52):
                result = start()
                assert out.send(new.state_dict()) == number + 1 == result()
                if number == 1:
                    before = files()
            assert files() == before
        engine.reset_prefix_cache()
    assert files()[1] == 0


def test_versions_of_running_requests(sockets):
    model = build("Qwen3")
    new = other(model)
    params = SamplingParams(max_new_tokens=240, seed=1, ignore_eos=True)
    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine) as (receiver, start):

        async def run():
            stream = engine.stream(PROMPTS[0], params)
            seen = [await anext(stream) for _ in range(5)]
            engine.pause("keep")
            with sender(receiver) as out:
                result = start()
                assert out.send(new.state_dict()) == 1 == result()
            engine.resume()
            async for item in stream:
                seen.append(item)
            return seen[-1].completion

        versions = asyncio.run(run()).weight_versions
        assert versions == sorted(versions) and set(versions) == {0, 1} and versions[0] == 0


# --- processes that are killed ---------------------------------------------------------------------------------------


def _send_and_hang(address, after):
    model = build("Qwen3")

    def give():
        for number, item in enumerate(model.state_dict().items()):
            if number == after:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    WeightSender(address, numerics=vx.numerics("cpu"), bucket_bytes=4096).send(give())


def _receive_and_die(address, ready, after):
    engine = Engine.from_pretrained(build("Qwen3"), config=CONFIG)
    receiver = WeightReceiver(engine, address)
    ready.set()
    count, take = [0], receiver._take

    def counted(*args):
        count[0] += 1
        if count[0] == after:
            os.kill(os.getpid(), signal.SIGKILL)
        take(*args)

    receiver._take = counted
    receiver.receive(30)


@MODES
def test_a_sender_that_is_killed(mode, sockets):
    model = build("Qwen3")
    context = multiprocessing.get_context("spawn")
    with Engine.from_pretrained(model, config=CONFIG) as engine, receiving(engine, mode) as (receiver, start):
        old = texts(engine)
        result = start(60)
        process = context.Process(target=_send_and_hang, args=(receiver.address, 9))
        process.start()
        with pytest.raises(PeerLost, match="has died"):
            result()
        process.join()
        if mode == "staged":
            assert texts(engine) == old
        else:
            with pytest.raises(WeightsTorn):
                texts(engine)
        with sender(receiver) as out:
            result = start()
            assert out.send(model.state_dict()) == 1 == result()
        assert texts(engine) == old


def test_a_receiver_that_is_killed_and_comes_back(sockets):
    context, model = multiprocessing.get_context("spawn"), build("Qwen3")
    address, ready = protocol.new_address(), context.Event()
    process = context.Process(target=_receive_and_die, args=(address, ready, 6))
    process.start()
    assert ready.wait(60)
    with WeightSender(address, numerics=vx.numerics("cpu"), bucket_bytes=4096, timeout=20) as out:
        with pytest.raises(PeerLost, match="has died"):
            out.send(model.state_dict())
        process.join()
        with Engine.from_pretrained(model, config=CONFIG) as engine:
            receiver = WeightReceiver(engine, address)
            thread = threading.Thread(target=receiver.receive, args=(20,))
            thread.start()
            assert out.send(model.state_dict()) == 1
            thread.join()
            receiver.close()


# --- an engine in stages, and replicas -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["Llama", "Qwen3Moe"])
def saved(request, tmp_path_factory):
    """A model's directory, and its family. Llama's heads are tied: first and last stage have that tensor."""
    path = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(path)
    return path, request.param


@contextlib.contextmanager
def in_stages(path):
    with Engine.from_pretrained(path, config=replace(CONFIG, pipeline_parallel_size=2)) as engine:
        yield engine


@MODES
def test_each_stage_takes_its_own_layers(saved, mode, sockets):
    path, family = saved
    model = build(family)
    new = other(model)
    wanted = expected(family, new)
    shapes = [lambda: new.named_parameters(), lambda: new.state_dict(), lambda: per_expert(new)]
    with in_stages(path) as engine, receiving(engine, mode) as (receiver, start):
        old = texts(engine)
        with sender(receiver, bucket_bytes=4096, checksum=True) as out:
            for version, give in enumerate(shapes, 1):
                result = start()
                assert out.send(give()) == version == result()
                assert texts(engine) == wanted != old
            result = start()
            assert out.send(model.state_dict()) == 4 == result()
            assert texts(engine) == old


@MODES
@pytest.mark.parametrize("fault", ["missing", "repeated", "untied", "checksum"])
def test_what_is_wrong_is_refused_by_stages(fault, mode, saved, sockets, monkeypatch):
    path, family = saved
    model = build(family)
    state = dict(other(model).state_dict())
    if fault == "untied" and family != "Llama":
        pytest.skip("nothing is tied")
    if fault == "untied":
        state["lm_head.weight"] = state["lm_head.weight"] + 1
    with in_stages(path) as engine, receiving(engine, mode) as (receiver, start):
        old = texts(engine)
        with sender(receiver, bucket_bytes=4096, checksum=True) as out:
            items = list(state.items())
            given = {"missing": [items[0], *items[2:]], "repeated": [*items, items[0]]}.get(fault, items)
            with monkeypatch.context() as patched:
                if fault == "checksum":
                    true = buffers.checksum
                    patched.setattr("vexact_engine.weights.sender.checksum", lambda used: true(used) + 1)
                result = start()
                says = {"untied": "tied, but hold different values", "checksum": "not what was sent"}.get(fault, fault)
                with pytest.raises((HandoverFailed, ValueError), match=says):
                    out.send(given)
                with pytest.raises(HandoverFailed, match=says) as caught:
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
            assert out.send(model.state_dict()) == 1 == result()
            assert texts(engine) == old


@MODES
def test_a_stage_that_dies_while_weights_come(mode, saved, sockets):
    path, family = saved
    model = build(family)
    with in_stages(path) as engine, receiving(engine, mode) as (receiver, start):
        old = texts(engine)

        def give():
            for number, item in enumerate(model.state_dict().items()):
                if number == 9:
                    os.kill(engine._worker._stages[1].process.pid, signal.SIGKILL)
                yield item

        with sender(receiver, bucket_bytes=4096) as out:
            result = start()
            with pytest.raises(HandoverFailed, match="stage 1 has died"):
                out.send(give())
            with pytest.raises(StageDied, match="stage 1 has died"):
                result()
            result = start()
            assert out.send(model.state_dict()) == 1 == result()
        assert texts(engine) == old


@MODES
def test_every_replica_takes_the_weights(saved, mode, sockets):
    path, family = saved
    model = build(family)
    new = other(model)
    wanted = expected(family, new)
    with Replicas.from_pretrained(path, replicas=2, config=CONFIG) as replicas:
        old = texts(replicas)
        with receiving(replicas, mode) as (receiver, start), sender(receiver, bucket_bytes=4096, checksum=True) as out:
            for version, give in enumerate((new.named_parameters, new.state_dict, lambda: per_expert(new)), 1):
                result = start()
                assert out.send(give()) == version == result()
                assert texts(replicas) == wanted != old
                assert replicas.weight_version == version and all(r.fresh for r in replicas.replicas)
            result = start()
            with pytest.raises(ValueError, match="repeated"):
                out.send([*new.state_dict().items(), *new.state_dict().items()])
            with pytest.raises(HandoverFailed, match="goes on" if mode == "staged" else "has no weights now"):
                result()
            if mode == "staged":
                assert texts(replicas) == wanted
            else:
                with pytest.raises(WeightsTorn):
                    texts(replicas)
            result = start()
            with pytest.raises(HandoverFailed, match="missing: "):
                out.send(dict(list(new.state_dict().items())[2:]))
            with pytest.raises(HandoverFailed, match="missing: "):
                result()
            assert replicas.weight_version == 3
            result = start()
            assert out.send(model.state_dict()) == 4 == result()
            assert texts(replicas) == old


def test_a_replica_that_dies_while_weights_come_and_one_that_comes_back(saved, sockets, caplog):
    path, family = saved
    new = other(build(family))
    wanted = expected(family, new)
    with (
        Replicas.from_pretrained(path, replicas=2, config=CONFIG, max_restarts=1) as replicas,
        receiving(replicas) as (receiver, start),
        sender(receiver, bucket_bytes=4096) as out,
    ):

        def give():
            for number, item in enumerate(new.state_dict().items()):
                if number == 9:
                    os.kill(replicas.replicas[1].pid, signal.SIGKILL)
                yield item

        result = start()
        assert out.send(give()) == 1 == result()
        assert texts(replicas) == wanted
        end = time.monotonic() + 60
        while not replicas.replicas[1].alive and time.monotonic() < end:
            time.sleep(0.05)
        assert [r.fresh for r in replicas.replicas] == [True, False]
        result = start()
        assert out.send(new.state_dict()) == 2 == result()
        assert [r.fresh for r in replicas.replicas] == [True, True]
        assert texts(replicas) == wanted


@MODES
def test_actors_on_another_machine_are_carried_the_bytes(mode, saved, sockets, monkeypatch):
    """One of the two is told of memory that it cannot open, as if it were on another machine."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    path, family = saved
    new = other(build(family))
    root = str(Path(__file__).parent.parent.parent)
    env = {"env_vars": {"PYTHONPATH": os.pathsep.join((root, str(Path(__file__).parent)))}}
    ray.init(num_cpus=3, include_dashboard=False, configure_logging=False, log_to_driver=False, runtime_env=env)
    try:
        with Replicas.from_pretrained(path, replicas=2, config=CONFIG, ray=True) as replicas:
            sent = replicas._front.send

            def send(replica, make):
                def lost(key):
                    message = make(key)
                    if isinstance(message, Open) and replica.index == 1:
                        message.offer.handles[:] = [struct.pack("<qq", os.getpid(), 99999)] * len(message.offer.handles)
                    return message

                return sent(replica, lost)

            monkeypatch.setattr(replicas._front, "send", send)
            with receiving(replicas, mode) as (receiver, start), sender(receiver, bucket_bytes=4096) as out:
                for version in (1, 2):
                    result = start()
                    assert out.send(new.state_dict()) == version == result()
                    assert receiver._intake._remote == {1} and all(r.fresh for r in replicas.replicas)
            assert texts(replicas) == expected(family, new)
    finally:
        ray.shutdown()


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
