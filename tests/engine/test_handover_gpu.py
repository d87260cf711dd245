"""Weights from a trainer's process to an engine's on a GPU: by CUDA IPC, by shared memory where that is asked for."""

import multiprocessing
import threading

import pytest
import torch
from engine_models import build

pytest.importorskip("zmq", reason="pyzmq is not installed")
pytest.importorskip("msgspec", reason="msgspec is not installed")

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, HandoverFailed, SamplingParams, WeightReceiver, WeightSender
from vexact_engine.weights.buffers import CUDA, HOST

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CONFIG = EngineConfig(page_size=16, num_pages=64, max_num_seqs=4, max_num_batched_tokens=64, show_progress=False)
PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7]]
PARAMS = SamplingParams(max_new_tokens=8, seed=1, ignore_eos=True)


def texts(engine):
    return [(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, PARAMS)]


def new_state(device, dtype):
    model = build("Qwen3")
    generator = torch.Generator().manual_seed(3)
    state = {}
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
        state[name] = (value.float() + 0.05 * noise).to(device, dtype)
    return state


def _send(address, transport, dtype, times, answers, device="cuda"):
    """A trainer: fp32 masters or bf16, on a GPU."""
    state = new_state(device, dtype)
    with WeightSender(address, numerics=vx.numerics("cuda"), bucket_bytes=1 << 20, transport=transport) as sender:
        for _ in range(times):
            try:
                answers.put((sender.send(state), sorted(sender._buffers)))
            except HandoverFailed as error:
                answers.put(str(error))


@pytest.mark.parametrize("mode", ["in_place", "staged"])
@pytest.mark.parametrize(
    "transport,dtype", [("cuda_ipc", torch.float32), ("cuda_ipc", torch.bfloat16), ("shared_memory", torch.float32)]
)
def test_weights_arrive_from_another_process(transport, dtype, mode):
    model = build("Qwen3")
    model.load_state_dict(new_state("cpu", torch.float32))
    with Engine.from_pretrained(model.cuda(), device="cuda", config=CONFIG) as engine:
        wanted = texts(engine)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with Engine.from_pretrained(build("Qwen3").cuda(), device="cuda", config=CONFIG) as engine:
        assert texts(engine) != wanted
        with WeightReceiver(engine, mode=mode) as receiver:
            process = context.Process(target=_send, args=(receiver.address, transport, dtype, 3, answers))
            process.start()
            try:
                for version in (1, 2, 3):
                    assert receiver.receive(120) == version
                    assert texts(engine) == wanted
                    if version == 2:
                        held = torch.cuda.memory_allocated(), len(receiver._opened)
                assert (torch.cuda.memory_allocated(), len(receiver._opened)) == held
            finally:
                process.join(60)
        kind = CUDA if transport == "cuda_ipc" else HOST
        assert [answers.get(timeout=10) for _ in range(3)] == [(v, [kind]) for v in (1, 2, 3)]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("mode", ["in_place", "staged"])
@pytest.mark.parametrize("trainer,engine", [("cuda:1", "cuda:0"), ("cuda:0", "cuda:1")])
def test_weights_arrive_from_another_gpu(trainer, engine, mode):
    model = build("Qwen3")
    model.load_state_dict(new_state("cpu", torch.float32))
    with Engine.from_pretrained(model.to(engine), device=engine, config=CONFIG) as made:
        wanted = texts(made)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with (
        Engine.from_pretrained(build("Qwen3").to(engine), device=engine, config=CONFIG) as made,
        WeightReceiver(made, mode=mode) as receiver,
    ):
        given = receiver.address, "cuda_ipc", torch.float32, 2, answers, trainer
        process = context.Process(target=_send, args=given)
        process.start()
        try:
            for version in (1, 2):
                assert receiver.receive(120) == version
                assert texts(made) == wanted
        finally:
            process.join(60)
    assert [answers.get(timeout=10) for _ in range(2)] == [(v, [CUDA]) for v in (1, 2)]


def test_one_process_opens_no_memory_of_its_own_and_goes_on_by_shared_memory(caplog):
    """The driver does not let a process open its own handle: the fallback is taken, and said."""
    with (
        Engine.from_pretrained(build("Qwen3").cuda(), device="cuda", config=CONFIG) as engine,
        WeightReceiver(engine) as receiver,
    ):
        sender = WeightSender(receiver.address, numerics=vx.numerics("cuda"), bucket_bytes=1 << 20)
        thread = threading.Thread(target=receiver.receive, args=(60,))
        thread.start()
        try:
            assert sender.send(new_state("cuda", torch.bfloat16)) == 1
        finally:
            thread.join(60)
            sender.close()
        assert list(sender._buffers) == [] and HOST in caplog.text and "SYS_PTRACE" in caplog.text
