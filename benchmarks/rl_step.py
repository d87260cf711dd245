"""Whole steps of GRPO under verl: our rollout and actor, beside vLLM's rollout and verl's own actor.

python -m benchmarks rl_step --shape qwen3-1.7b --vllm-path SITE --keep runs
python -m benchmarks rl_step --shape qwen3-30b-a3b --layers 3 --gpus 2 --vllm-path SITE
python -m benchmarks rl_step --sides vexact --device cpu --model DIR --question 48 --answer-tokens 16 --prompts 2

Each side is a run of verl's main_ppo in processes of its own, one after the other: `vexact` as our recipe has it (what
the rollout says of its tokens is trained on, nothing is computed again), `vllm` as verl has it by default (the actor
computes old_log_probs again). Both train by FSDP2 with fp32 masters, in micro-batches of --micro-tokens at most, on the
same prompts of one length and answers of one length. A record has the medians of what verl says of its steps, without
the first two. Weights are random at the true sizes; the tokenizer has a token for each byte. A run that is ended by
--limit has a record of the steps that it made. In a checkout, where verl is installed; on a CPU ours alone.
"""

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from .harness import environment
from .peers import say_once

ROOT = Path(__file__).parent.parent
SIDES = {"vexact": "vexact", "vllm": "verl with vllm"}  # and what records call them
WARM_UP = 2  # steps at first in which kernels are compiled
PARTS = ("gen", "old_log_prob", "reward", "adv", "update_actor", "update_weights")
DEFAULTS = {"steps": 8, "prompts": 32, "samples": 8}  # options that other programs have too
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "rl_step", "beside --steps (8, the first two left out), --prompts (32) and --samples (8 to each)"
    )
    add = group.add_argument
    add("--sides", default="vexact,vllm", metavar="NAME,NAME", help="of: vexact, vllm, in this order (vexact,vllm)")
    add("--vllm-path", metavar="DIRS", help="PYTHONPATH of vLLM's side, where its packages are others than ours (ours)")
    add("--gpus", type=int, default=1, metavar="N", help="trainers, and as many replicas (1)")
    add("--question", type=int, default=256, metavar="N", help="tokens of a prompt (256)")
    add("--answer-tokens", type=int, default=512, metavar="N", help="of each answer (512)")
    add("--micro-tokens", type=int, default=16384, metavar="N", help="of a micro-batch at most (16384)")
    add("--share", type=float, default=0.5, metavar="X", help="of the GPU's memory is the rollout's (0.5)")
    add("--limit", type=int, default=900, metavar="S", help="seconds of a side, its start included (900)")
    add("--keep", type=Path, metavar="FOLDER", help="where models, logs and verl's metrics stay (nowhere)")
    add("--override", action="append", default=[], metavar="KEY=VALUE", help="of verl's, for all sides (none)")


@dataclass
class Side:
    """One run of main_ppo. metrics: verl's, a dict a step; peak: bytes of the fullest GPU above those before the
    run, in the steps that count"""

    name: str
    folder: Path
    metrics: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    peak: int | None = None
    ended: str = ""


def run(args: argparse.Namespace) -> Iterator[dict]:
    """A record for each shape and side. A side that fails is said, and does not stop the other."""
    if not (ROOT / "tests" / "trainers").is_dir():
        raise ValueError("rl_step: expected a checkout: models and settings are those of tests/trainers")
    sys.path.insert(0, str(ROOT / "tests"))
    for name, value in DEFAULTS.items():
        if name not in args.given:
            setattr(args, name, value)
    sides = args.sides.split(",")
    if unknown := [name for name in sides if name not in SIDES]:
        raise ValueError(f"rl_step: --sides: got {unknown[0]!r}, expected one of {', '.join(SIDES)}")
    if args.device == "cpu" and "vllm" in sides:
        raise ValueError("rl_step: --sides: got vllm on a CPU, expected vexact alone: vLLM's packages are for GPUs")
    if args.steps <= WARM_UP:
        raise ValueError(f"rl_step: --steps: got {args.steps}, expected more than the {WARM_UP} that are left out")
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.keep or Path(scratch)).absolute()
        for shape in ["model"] if args.model else args.shape.split(","):
            model = Path(args.model).absolute() if args.model else _model(args, shape, folder)
            prompts = _prompts(args, model, folder / f"{shape}-prompts")
            done: dict[str, dict] = {}
            for name in sides:
                side = Side(name, folder / f"{shape}-{name}")
                try:
                    _measure(args, side, model, prompts)
                    done[name] = _record(args, shape, side)
                except Exception as error:
                    say_once(f"rl_step: {shape} {name}: {type(error).__name__}: {error}\n{_end_of_log(side.folder)}")
                    continue
                if len(done) == len(SIDES):
                    ratio = done["vexact"]["seconds"] / done["vllm"]["seconds"]
                    done[name]["vexact_of_vllm"] = round(ratio, 3)
                yield done[name]


def _model(args: argparse.Namespace, shape: str, folder: Path) -> Path:
    """Its folder."""
    made = folder / (f"{shape}-{args.layers}-layers" if args.layers else shape)
    if not (made / "config.json").exists():
        command = [sys.executable, "-m", "benchmarks.rl.model", str(made), shape, str(args.layers or 0), args.device]
        subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr, timeout=args.limit)
    return made


def _prompts(args: argparse.Namespace, model: Path, folder: Path) -> Path:
    """As many as all steps take, each another one, of --question tokens: a digit is one."""
    import random

    import pandas
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(model)
    empty = words.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True, tokenize=False)
    room = args.question - len(words(empty, add_special_tokens=False)["input_ids"])
    if room < 8:
        raise ValueError(f"rl_step: --question: got {args.question}, expected {8 - room} more: the template's are some")
    source = random.Random(0)
    rows = [
        {
            "data_source": "vexact",
            "prompt": [{"role": "user", "content": "".join(source.choice("0123456789") for _ in range(room))}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "0"},
            "extra_info": {"index": i},
        }
        for i in range(args.steps * args.prompts)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(folder / "prompts.parquet")
    return folder / "prompts.parquet"


def overrides(args: argparse.Namespace, side: Side, model: Path, prompts: Path) -> list[str]:
    from trainers.ppo import on_this_machine

    cpu = args.device == "cpu"
    given = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": prompts,
        "data.val_files": prompts,
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": args.question,
        "data.max_response_length": args.answer_tokens,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        f"{ACTOR}.strategy": "fsdp2",
        f"{ACTOR}.ppo_mini_batch_size": args.prompts,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": args.micro_tokens,
        f"{ACTOR}.use_kl_loss": False,
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ROLLOUT}.n": args.samples,
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.ignore_eos": True,
        f"{ROLLOUT}.gpu_memory_utilization": args.share,
        f"{ROLLOUT}.max_num_seqs": 256,
        f"{ROLLOUT}.max_num_batched_tokens": 8192,
        f"{ROLLOUT}.max_model_len": args.question + args.answer_tokens,
        f"{ROLLOUT}.agent.num_workers": 1 if cpu else 4,
        "reward.num_workers": 1 if cpu else 2,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": "sync",
        "trainer.v1.sampler.custom_sampler.path": "pkg://benchmarks.rl.sampler",
        "trainer.v1.sampler.custom_sampler.name": "Impatient",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": args.gpus,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.total_training_steps": args.steps,
        "trainer.total_epochs": 1,
        **on_this_machine(args.device, args.gpus, side.folder),
        "reward.custom_reward_function.path": ROOT / "benchmarks" / "rl" / "reward.py",
    }
    if side.name == "vexact":  # as recipes/verl/common.yaml has it
        given |= {
            "algorithm.rollout_correction.bypass_mode": True,
            "actor_rollout_ref.model.external_lib": "vexact_engine.verl.actor",
            "+actor_rollout_ref.model.fused_kernel_options.vexact.check_every": 10,
            "+actor_rollout_ref.model.fused_kernel_options.vexact.check_share": 0.25,
            f"{ROLLOUT}.name": "vexact",
            f"{ROLLOUT}.calculate_log_probs": True,
            f"+{ROLLOUT}.agent.agent_loop_manager_class": "vexact_engine.verl.agents.Manager",
        }
    else:
        given |= {
            "actor_rollout_ref.model.external_lib": "benchmarks.rl.stock",
            "+actor_rollout_ref.model.override_config.attn_implementation": "torch_varlen",
            f"{ROLLOUT}.name": "vllm",
        }
    if cpu:
        given |= {f"{ACTOR}.use_torch_compile": False, f"{ACTOR}.fsdp_config.use_torch_compile": False}
    given.update(override.split("=", 1) for override in args.override)
    return [f"{key}={value}" for key, value in given.items()]


def variables(args: argparse.Namespace, side: Side) -> dict[str, str]:
    from trainers.environment import environment as of_trainers

    env = {**os.environ, **of_trainers("vexact" if side.name == "vexact" else None, args.device)}
    path = env["PYTHONPATH"].split(os.pathsep)
    if side.name == "vllm":
        env |= {"VERL_USE_EXTERNAL_MODULES": "", "VERL_USE_EXTERNAL_PLUGINS": "none"}
        if args.vllm_path:
            path = [*args.vllm_path.split(os.pathsep), str(ROOT / "tests")]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*path, str(ROOT)]))
    return env | {"VERL_FILE_LOGGER_PATH": str(side.folder / "metrics.jsonl")}


def _measure(args: argparse.Namespace, side: Side, model: Path, prompts: Path) -> None:
    shutil.rmtree(side.folder, ignore_errors=True)
    side.folder.mkdir(parents=True)
    env = variables(args, side)
    short = tempfile.mkdtemp(prefix="vx-", dir="/tmp")  # Ray's sockets are in it, whose names may not be long
    command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *overrides(args, side, model, prompts)]
    command.append(f"+ray_kwargs.ray_init._temp_dir={short}")
    watch = _Watch(args.device)
    begun = time.monotonic()
    try:
        with open(side.folder / "log.txt", "w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=side.folder, start_new_session=True
            )
            with watch.over(process):
                side.ended = _wait(args, side, process, watch, begun + args.limit)
    finally:
        side.seconds, side.peak = time.monotonic() - begun, watch.peak
        shutil.rmtree(short, ignore_errors=True)
    watch.wait_until_free()


def _wait(args: argparse.Namespace, side: Side, process: subprocess.Popen, watch: "_Watch", until: float) -> str:
    """How it ended: once all steps are written down nothing more is waited for."""
    from trainers.ppo import metrics_in

    while time.monotonic() < until:
        code = process.poll()
        before = len(side.metrics)
        with contextlib.suppress(ValueError):  # a line that is being written
            side.metrics = metrics_in(side.folder)
        if before < WARM_UP <= len(side.metrics):
            watch.peak = None  # of starts and compilations nobody asks
        if len(side.metrics) >= args.steps:
            return "all steps"
        if code is not None:
            return f"exit code {code}"
        time.sleep(0.5)
    return f"not done after {args.limit} s"


def _visible(count: int) -> list[int]:
    """The numbers of the GPUs that a run may use, where they are said as numbers; else of all."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return [int(number) for number in said] if all(map(str.isdecimal, said)) else list(range(count))


class _Watch:
    """Of a run: memory of the fullest GPU, ten times a second, and every process below it, for its end."""

    def __init__(self, device: str):
        self.peak: int | None = None
        self._nvml, self._gpus, self._seen = None, [], {}
        if device == "cuda":
            try:
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml
                self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in _visible(pynvml.nvmlDeviceGetCount())]
            except Exception as error:  # the figure is left out then, and the times are what is asked for
                say_once(f"rl_step: memory of GPUs is not measured: {type(error).__name__}: {error}")
        self._before = self._used()

    def _used(self) -> list[int]:
        return [self._nvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in self._gpus]

    def over(self, process: subprocess.Popen) -> "_Watch":
        self._process, self._stop = process, threading.Event()
        return self

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        import psutil

        turns = 0
        while not self._stop.wait(0.1):
            if self._gpus:
                most = max(now - before for now, before in zip(self._used(), self._before))
                self.peak = max(self.peak or 0, most)
            if turns % 10 == 0:
                with contextlib.suppress(psutil.Error):  # one that ends meanwhile
                    for child in psutil.Process(self._process.pid).children(recursive=True):
                        self._seen[child.pid, child.create_time()] = child
            turns += 1

    def __exit__(self, *_) -> None:
        import psutil

        self._stop.set()
        self._thread.join()
        self._process.send_signal(signal.SIGKILL)
        for child in self._seen.values():
            with contextlib.suppress(psutil.Error):
                child.kill()  # psutil looks whether the number is still that process's
        self._process.wait()

    def wait_until_free(self, seconds: float = 30) -> None:
        """The next run is not to find this one's memory in use."""
        until = time.monotonic() + seconds
        while self._gpus and time.monotonic() < until:
            if all(now - before < 1 << 30 for now, before in zip(self._used(), self._before)):
                return
            time.sleep(0.2)


def _record(args: argparse.Namespace, shape: str, side: Side) -> dict:
    """raises AssertionError where it has no step to tell of, or one that is not as long as it should be"""
    steps = side.metrics[WARM_UP:]
    assert steps, f"{side.ended}: {len(side.metrics)} steps, expected more than {WARM_UP}"
    for step in steps:
        lengths = [step[f"response_length/{what}"] for what in ("min", "max")]
        assert lengths == [args.answer_tokens] * 2, f"answers of {lengths} tokens, expected {args.answer_tokens}"
    kl = max((abs(step["actor/ppo_kl"]) for step in side.metrics), default=None)
    if side.name == "vexact":
        assert kl == 0, f"actor/ppo_kl is {kl}: rollout and actor have other log-probabilities"
    seconds = statistics.median(step["timing_s/step"] for step in steps)
    parts = {
        name: round(statistics.median(step[f"timing_s/{name}"] for step in steps), 3)
        for name in PARTS
        if f"timing_s/{name}" in steps[0]
    }
    tokens = statistics.median(step["perf/total_num_tokens"] for step in steps)
    gpus = f", {args.gpus} GPUs" if args.gpus > 1 else ""
    layers = f" {args.layers} layers" if args.layers else ""
    case = f"{shape}{layers} {args.prompts} x {args.samples} of {args.question} + {args.answer_tokens} tokens{gpus}"
    return {
        "room": "rl_step",
        "case": case,
        "backend": SIDES[side.name],
        "seconds": round(seconds, 3),
        "seconds_of_steps": [round(step["timing_s/step"], 3) for step in side.metrics],
        "parts": parts | {"other": round(seconds - sum(parts.values()), 3)},
        "tokens_per_s": round(tokens / seconds),
        "peak_gib": None if side.peak is None else round(side.peak / 2**30, 2),
        "trainer_gib": round(max(step.get("actor/perf/max_memory_allocated_gb", 0) for step in steps), 2),
        "ppo_kl": kl,
        "actor": _actor(args, side),
        "micro_tokens": args.micro_tokens,
        "overrides": args.override,
        "run_s": round(side.seconds, 1),
        "ended": side.ended,
        "device": args.device,
        **_versions(args, side),
        **environment(args.device),
    }


def _actor(args: argparse.Namespace, side: Side) -> str:
    """Its kernels, where verl takes what it finds: without flash-attn's it makes a call for each token's logits."""
    if side.name == "vexact":
        return "vexact"
    path = args.vllm_path.split(os.pathsep) if args.vllm_path else sys.path
    found = any(Path(folder, "flash_attn", "ops", "triton", "cross_entropy.py").exists() for folder in path)
    if not found:
        say_once(
            "rl_step: vllm: no flash_attn.ops.triton.cross_entropy: verl's actor is slow without, and not to compare"
        )
    return "flash attention 2, " + ("flash-attn's cross entropy" if found else "log_softmax of one token at a time")


def _versions(args: argparse.Namespace, side: Side) -> dict[str, str]:
    """Of what the side is made of, where it found it."""
    own = side.name == "vllm" and args.vllm_path
    path = [*(args.vllm_path.split(os.pathsep) if own else []), *sys.path]
    found = {}
    for name in ("verl", "transformers", *(["vllm"] if side.name == "vllm" else [])):
        here = next(iter(metadata.distributions(name=name, path=path)), None)
        found[name] = here.version if here else None
    return found


def _end_of_log(folder: Path, count: int = 40) -> str:
    path = folder / "log.txt"
    return "\n".join(path.read_text(errors="replace").splitlines()[-count:]) if path.exists() else ""
