"""Weights over NCCL between GPUs, as verl has them brought: what test_verl_nccl.py runs in processes of its own.

python -m trainers.gpu_updates ranks        the checkpoint engine's class, from one process to another
python -m trainers.gpu_updates cluster DIR  a trainer's group, a hybrid replica on its GPU and a standalone one on
                                            another, by verl's LLMServerManager and CheckpointEngineManager
"""

import asyncio
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time

import torch

SHAPES = {"a": (1000, 700), "b": (3,), "c": (64, 64, 33), "d": (257, 1025), "e": (1,)}
DTYPES = {"b": torch.float32, "d": torch.float32, "e": torch.int64}
BUCKET = 1 << 18  # less than half of the larger ones
LARGE = {f"w{i}": (16384, 16384) for i in range(16)}  # 8 GiB


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def tensors(seed, shapes, device):
    for number, (name, shape) in enumerate(shapes.items()):
        generator = torch.Generator(device).manual_seed(100 * seed + number)
        dtype = DTYPES.get(name, torch.bfloat16)
        drawn = torch.randint(-32768, 32768, shape, generator=generator, device=device)
        yield name, drawn.short().view(torch.bfloat16) if dtype == torch.bfloat16 else drawn.to(dtype)


def checksums(items):
    from vexact_engine.handover.buffers import checksum

    found = {}
    for name, tensor in items:
        raw = tensor.reshape(-1).view(torch.uint8)
        words = checksum(torch.cat([raw, raw.new_zeros(-len(raw) % 8)]))
        found[name] = tuple(tensor.shape), str(tensor.dtype), words
    return found


def rank(number, pipe, timeout):
    """One process: what it is told, until it is told to end."""
    from verl.checkpoint_engine import CheckpointEngineRegistry
    from verl.utils.device import get_device_name

    importlib.import_module("vexact_engine.verl.checkpoint")
    device = get_device_name()
    if device == "cuda":
        torch.cuda.set_device(number)
    engines = {
        size: CheckpointEngineRegistry.new("vexact", bucket_size=size, is_master=number == 0, timeout=timeout)
        for size in (BUCKET, 512 << 20)
    }

    async def receive(engine, seed, shapes, die):
        items, taken = [], 0
        async for name, tensor in engine.receive_weights(global_steps=seed):
            if die:
                os.kill(os.getpid(), signal.SIGKILL)
            if shapes is LARGE:
                taken += tensor.nbytes
            else:
                items.append((name, tensor.clone()))
        return checksums(items)

    while (message := pipe.recv()) is not None:
        what, size, *given = message
        engine = engines[size]
        try:
            if what == "update":
                seed, which, die = given
                shapes = LARGE if which == "large" else SHAPES
                sent = dict(tensors(seed, shapes, device)) if number == 0 else {}
                if device == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                if number == 0:
                    asyncio.run(engine.send_weights(iter(sent.items()), global_steps=seed))
                    found = {} if which == "large" else checksums(sent.items())
                else:
                    found = asyncio.run(receive(engine, seed, shapes, die))
                if device == "cuda":
                    torch.cuda.synchronize()
                answer = found, time.perf_counter() - begin
            else:
                answer = getattr(engine, what)(*given)
        except Exception as error:
            answer = error
        pipe.send(answer)


def ranks(large=True):
    from vexact_engine.verl.checkpoint import Broadcast

    context, pipes, processes = multiprocessing.get_context("spawn"), [], []

    def start(number, timeout):
        pipe, theirs = context.Pipe()
        processes.append(context.Process(target=rank, args=(number, theirs, timeout), daemon=True))
        processes[-1].start()
        theirs.close()
        return pipe

    def both(size, what, *given):
        for pipe in pipes:
            pipe.send((what, size, *given))
        return [pipe.recv() for pipe in pipes]

    def update(size, seed, which="small", die=False):
        meet(size)
        for pipe in pipes:
            pipe.send(("update", size, seed, which, die))
        answers = []
        for pipe in pipes:
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append(None)
        return answers

    def meet(size):
        of_trainer, of_rollout = Broadcast.build_topology(1, 1, both(size, "prepare"))
        for pipe, of in zip(pipes, (of_trainer, of_rollout)):
            given = [of[name][0] for name in ("rank", "members", "store", "name")]
            pipe.send(("init_process_group", size, *given))
        for pipe in pipes:
            if isinstance(answer := pipe.recv(), Exception):
                raise answer

    def same(seed):
        sent, received = update(BUCKET, seed)
        for answer in (sent, received):
            if isinstance(answer, Exception):
                raise answer
        if sent[0] != received[0] or len(sent[0]) != len(SHAPES):
            raise AssertionError(f"set {seed}: sent {sent[0]}, received {received[0]}")

    pipes += [start(0, 20.0), start(1, 20.0)]
    for seed in (1, 2, 3):
        same(seed)
    say("ranks: 3 sets, bytes equal")
    if large and torch.cuda.is_available():
        seconds = []
        for seed in (4, 5, 6):
            sent, received = update(512 << 20, seed, "large")
            if isinstance(sent, Exception) or isinstance(received, Exception):
                raise AssertionError(f"{sent!r} {received!r}")
            seconds.append(max(sent[1], received[1]))
        rates = [round((8 << 30) / s / 1e9, 1) for s in seconds]
        say(f"ranks: 8 GiB of bf16 over NCCL in GB/s, update by update: {rates}")
    begin = time.monotonic()
    sent, received = update(BUCKET, 7, die=True)
    if received is not None or not isinstance(sent, Exception):
        raise AssertionError(f"a receiver that was killed: the sender says {sent!r}")
    seconds = time.monotonic() - begin
    say(f"ranks: a receiver is killed: {type(sent).__name__} after {seconds:.1f} s: {sent}")
    processes[1].join(10)
    pipes[1] = start(1, 20.0)
    same(8)
    say("ranks: its successor has a whole set, bytes equal")
    for pipe in pipes:
        pipe.send(None)
    for process in processes:
        process.join(30)
    if processes[0].exitcode:
        raise AssertionError(f"the sender ended with {processes[0].exitcode}")


def cluster(path):
    import ray
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.device import get_device_name
    from verl.workers.rollout.llm_server import LLMServerManager

    from vexact_engine import Engine, EngineConfig, SamplingParams

    from .environment import environment
    from .rollout_trainer import Trainer, rollout_config, weights

    importlib.import_module("vexact_engine.verl.register")
    device = get_device_name()
    section = "actor_rollout_ref.rollout.checkpoint_engine"
    backend = [f"{section}.backend=vexact", f"{section}.custom_backend_module=vexact_engine.verl.checkpoint"]
    backend += [f"+{section}.engine_kwargs.vexact.timeout=60"]
    variables = environment(device=device)
    asked = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": True, "ignore_eos": True, "seed": 3}

    def whole(seed):
        config = EngineConfig(num_pages=64, show_progress=False)
        model = weights(path, seed, torch.bfloat16).to(device)
        with Engine.from_pretrained(model, device=device, config=config) as engine:
            (done,) = engine.generate([[5, 6, 7, 8]], SamplingParams(max_new_tokens=16, seed=3, ignore_eos=True))
        return done.token_ids, done.logprobs

    def same(replica, seed):
        call = replica.server_handle.generate.remote(prompt_ids=[5, 6, 7, 8], sampling_params=asked, request_id="a")
        found = ray.get(call)
        if (found.token_ids, found.log_probs) != whole(seed):
            raise AssertionError(f"replica {replica.replica_rank}: weights of {seed} say something else")

    with tempfile.TemporaryDirectory(prefix="vx-", dir="/tmp") as folder:
        ray.init(
            num_cpus=16,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            _temp_dir=folder,
            log_to_driver=False,
            runtime_env={"env_vars": variables},
        )
        try:
            config = rollout_config(path, *backend, "actor_rollout_ref.rollout.n_gpus_per_node=1")
            rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
            trainer = RayClassWithInitArgs(ray.remote(Trainer), rollout, model)
            pool = RayResourcePool([1], use_gpu=True, max_colocate_count=2)
            trainers = RayWorkerGroup(pool, trainer, device_name=device)
            hybrid = LLMServerManager.create(config, worker_group=trainers)
            naive = omega_conf_to_dataclass(rollout.checkpoint_engine)
            naive.backend = "naive"
            near = CheckpointEngineManager(naive, trainers, hybrid.get_replicas())
            near.sleep_replicas()
            near.update_weights(3)
            same(hybrid.get_replicas()[0], 3)
            say("cluster: the hybrid replica has the trainer's weights, by the memory of its GPU")
            apart = rollout_config(
                path, *backend, "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1"
            )
            manager = LLMServerManager.create(apart, start_rank=1)
            engine = omega_conf_to_dataclass(apart.actor_rollout_ref.rollout.checkpoint_engine)
            far = CheckpointEngineManager(engine, trainers, manager.get_replicas())
            for seed in (7, 8, 9):
                far.update_weights(seed)
                same(manager.get_replicas()[0], seed)
            say("cluster: the standalone replica has the trainer's weights, three times")
            trainers.set_spoil("raise")
            try:
                far.update_weights(10)
            except ray.exceptions.RayTaskError as error:
                if "a rank has failed" not in str(error):
                    raise
            else:
                raise AssertionError("an update with a rank that fails was none")
            trainers.set_spoil(None)
            far.update_weights(11)
            same(manager.get_replicas()[0], 11)
            say("cluster: after a rank that failed the next update heals it")
        finally:
            ray.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        ranks()
    else:
        cluster(sys.argv[2])
