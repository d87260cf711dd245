"""Weights that come to an engine in stages, and to replicas: each takes what is its own from the sender's memory."""

import contextlib
import os
import signal
import struct
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from engine_models import build
from handovers import CONFIG, MODES, PARAMS, PROMPTS, asking_first, expected, left, other, receiving, sender, texts

from vexact_engine import Engine, HandoverFailed, Replicas, StageDied, WeightsTorn
from vexact_engine.handover import buffers
from vexact_engine.parallel.messages import Open
from vexact_engine.parallel.pipeline import PipelineWorker, ReadingOfStages
from vexact_engine.parallel.replicas import places
from vexact_engine.weights.experts import per_expert


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


def test_stages_are_told_of_a_bucket_before_they_have_answered_for_the_one_before(saved, sockets, monkeypatch):
    path, family = saved
    new, said = other(build(family)), []
    take, wait = PipelineWorker.take_bucket, PipelineWorker.await_answers

    def takes(worker, bucket):
        if not said:
            time.sleep(0.5)  # the sender has filled others by then
        said.append("take")
        return take(worker, bucket)

    def waits(worker, key):
        said.append("wait")
        return wait(worker, key)

    monkeypatch.setattr(PipelineWorker, "take_bucket", takes)
    monkeypatch.setattr(PipelineWorker, "await_answers", waits)
    monkeypatch.setattr(ReadingOfStages, "done", False)  # on a GPU copies take their time
    with in_stages(path) as engine, receiving(engine) as (receiver, start):
        with sender(receiver, bucket_bytes=4096, checksum=True) as out:
            result = start()
            assert out.send(new.state_dict()) == 1 == result()
        assert said[:3] == ["take"] * 3 and said.count("take") == said.count("wait") > 10
        assert texts(engine) == expected(family, new)


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
                    patched.setattr("vexact_engine.handover.filling.checksum", lambda used: true(used) + 1)
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
def test_every_replica_takes_the_weights(saved, mode, sockets, monkeypatch):
    path, family = saved
    model = build(family)
    new = other(model)
    wanted = expected(family, new)
    with Replicas.from_pretrained(path, replicas=2, config=CONFIG) as replicas:
        old = texts(replicas)
        with (
            receiving(replicas, mode) as (receiver, start),
            sender(receiver, bucket_bytes=4096, checksum=True) as out,
        ):
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
            left(replicas, mode, wanted)
            result = start()
            with pytest.raises(HandoverFailed, match="missing: "):
                out.send(dict(list(new.state_dict().items())[2:]))
            with pytest.raises(HandoverFailed, match="missing: "):
                result()
            assert replicas.weight_version == 3
            for _ in range(2):  # as after a set that was in doubt
                result = start()
                assert out.send(model.state_dict(), version=7) == 7 == result() == replicas.weight_version
                assert texts(replicas) == old
            assert set(replicas.generate(PROMPTS, PARAMS)[0].weight_versions) == {7}
            answers, result = asking_first(monkeypatch), start()
            with pytest.raises(HandoverFailed, match="missing: "):
                out.send(dict(list(new.state_dict().items())[2:]))
            with pytest.raises(HandoverFailed, match="missing: "):
                result()
            assert not answers
            left(replicas, mode, old)
            result = start()
            assert out.send(model.state_dict()) == 8 == result() and texts(replicas) == old and len(answers) == 1


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
        end = time.monotonic() + 300
        while not replicas.replicas[1].alive and time.monotonic() < end:
            time.sleep(0.05)
        assert [r.fresh for r in replicas.replicas] == [True, False]
        result = start()
        assert out.send(new.state_dict()) == 2 == result()
        assert [r.fresh for r in replicas.replicas] == [True, True]
        assert texts(replicas) == wanted


@pytest.mark.parametrize("saved", ["Llama"], indirect=True)
def test_replicas_in_stages(saved, sockets):
    """What each takes of a family's tensors is tested above, of replicas and of stages."""
    path, family = saved
    new = other(build(family))
    with (
        Replicas.from_pretrained(path, replicas=2, config=replace(CONFIG, pipeline_parallel_size=2)) as replicas,
        receiving(replicas, "staged") as (receiver, start),
        sender(receiver, bucket_bytes=4096) as out,
    ):
        result = start()
        assert out.send(new.state_dict()) == 1 == result()
        assert texts(replicas) == expected(family, new)


def test_replicas_in_stages_have_a_gpu_for_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found, threads = places("cuda", 2, 2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["4,5", "6,7"] and threads is None
    with pytest.raises(ValueError, match="got 3, expected at most 2: there are 4 GPUs, and each takes 2"):
        places("cuda", 3, 2)


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
                        nowhere = [struct.pack("<qq", os.getpid(), 99999)] * len(message.offer.handles)
                        message = Open(message.key, msgspec.structs.replace(message.offer, handles=nowhere))
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
