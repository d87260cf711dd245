"""Weights from a trainer's process to an engine's on a GPU: by CUDA IPC, by shared memory where that is asked for."""

import contextlib
import multiprocessing
import threading

import pytest
import torch
from engine_models import build

pytest.importorskip("zmq", reason="pyzmq is not installed")
pytest.importorskip("msgspec", reason="msgspec is not installed")

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams, WeightReceiver, WeightSender
from vexact_engine.handover.buffers import CUDA, HOST

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CONFIG = EngineConfig(
    page_size=16, num_pages=64, max_num_seqs=4, max_num_batched_tokens=64, enforce_eager=True, show_progress=False
)
PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7]]
PARAMS = SamplingParams(max_new_tokens=8, seed=1, ignore_eos=True)
MODES = pytest.mark.parametrize("mode", ["in_place", "staged"])
KINDS = {"cuda_ipc": CUDA, "shared_memory": HOST}


def texts(engine):
    return [(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, PARAMS)]


def new_state(device, dtype, seed):
    model = build("Qwen3")
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
        state[name] = (value.float() + 0.05 * noise).to(device, dtype)
    return state


def trainer_process(pipe):
    """A trainer: fp32 masters or bf16, on a GPU."""
    senders = {}
    while (message := pipe.recv()) is not None:
        address, transport, dtype, device, seed = message
        try:
            if address not in senders:
                numerics = vx.numerics("cuda")
                senders[address] = WeightSender(
                    address, numerics=numerics, bucket_bytes=1 << 16, transport=transport, timeout=30
                )
            version = senders[address].send(new_state(device, dtype, seed))
            pipe.send((version, sorted(senders[address]._buffers)))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
    for sender in senders.values():
        sender.close()


@pytest.fixture(scope="module")
def trainer():
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=trainer_process, args=(theirs,))
    process.start()
    yield pipe
    pipe.send(None)
    process.join(30)


@pytest.fixture(scope="module")
def wanted():
    """What engines with the new weights say, by seed."""
    found = {}
    for seed in (1, 2):
        model = build("Qwen3", device="cuda")
        model.load_state_dict(new_state("cpu", torch.float32, seed))
        with Engine.from_pretrained(model, device="cuda", config=CONFIG) as engine:
            found[seed] = texts(engine)
    assert found[1] != found[2]
    return found


def hand_over(trainer, receiver, *what):
    trainer.send((receiver.address, *what))
    try:
        return receiver.receive(60)
    except Exception as error:
        pytest.fail(f"{error!r}; the trainer: {trainer.recv() if trainer.poll(30) else 'says nothing'}")


@MODES
@pytest.mark.parametrize(
    "transport,dtype", [("cuda_ipc", torch.float32), ("cuda_ipc", torch.bfloat16), ("shared_memory", torch.float32)]
)
def test_weights_arrive_from_another_process(transport, dtype, mode, trainer, wanted):
    with (
        Engine.from_pretrained(build("Qwen3", device="cuda"), device="cuda", config=CONFIG) as engine,
        WeightReceiver(engine, mode=mode) as receiver,
    ):
        for version in (1, 2, 3, 4):
            seed = 1 + version % 2
            assert hand_over(trainer, receiver, transport, dtype, "cuda", seed) == version
            assert trainer.recv() == (version, [KINDS[transport]])
            assert texts(engine) == wanted[seed]
            if version == 2:
                held = torch.cuda.memory_allocated(), len(engine._worker._memories)
        assert (torch.cuda.memory_allocated(), len(engine._worker._memories)) == held
        state = new_state("cpu", dtype, seed)
        for name, value in engine.model.state_dict().items():
            assert torch.equal(value.cpu(), state[name].to(value.dtype)), name


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@MODES
@pytest.mark.parametrize("there,here", [("cuda:1", "cuda:0"), ("cuda:0", "cuda:1")])
def test_weights_arrive_from_another_gpu(there, here, mode, trainer, wanted):
    with (
        Engine.from_pretrained(build("Qwen3", device=here), device=here, config=CONFIG) as engine,
        WeightReceiver(engine, mode=mode) as receiver,
    ):
        for version in (1, 2):
            assert hand_over(trainer, receiver, "cuda_ipc", torch.float32, there, version) == version
            assert trainer.recv() == (version, [CUDA])
            assert texts(engine) == wanted[version]


def test_one_process_opens_no_memory_of_its_own_and_goes_on_by_shared_memory(caplog, wanted):
    """The driver does not let a process open its own handle: the fallback is taken, and said."""
    with (
        Engine.from_pretrained(build("Qwen3", device="cuda"), device="cuda", config=CONFIG) as engine,
        WeightReceiver(engine, timeout=30) as receiver,
        contextlib.closing(
            WeightSender(receiver.address, numerics=vx.numerics("cuda"), bucket_bytes=1 << 16, timeout=30)
        ) as sender,
    ):
        thread = threading.Thread(target=receiver.receive, args=(60,))
        thread.start()
        assert sender.send(new_state("cuda", torch.float32, 1)) == 1
        thread.join(60)
        assert list(sender._buffers) == [HOST] and HOST in caplog.text and "SYS_PTRACE" in caplog.text
        assert texts(engine) == wanted[1]
