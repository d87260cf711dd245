"""One run of verl's main_ppo, on this machine alone, and what it left: metrics, and every log-probability's bits."""

import contextlib
import datetime
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import rewards, workers
from .environment import environment
from .models import make_prompts

if TYPE_CHECKING:
    import torch

# verl's own names: what its users look at. All are 0.0 where rollout and trainer agree in every bit.
ZERO = (
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/log_ppl_abs_diff",
    "actor/ppo_kl",
)
# What Ray says where its own processes have not begun within 30 s, which no setting changes: nothing has run by then.
NOT_STARTED, STARTS = "The current node timed out during startup", 3


@dataclass(frozen=True)
class Case:
    """One run. `ranks` trainers, and as many of the rollout; separate_async: half of them for each."""

    family: str
    engine: str = "fsdp2"  # or veomni
    ranks: int = 2
    mode: str = "sync"
    vendor: str | None = "vexact"  # None: verl's own actor
    steps: int = 3
    lr: float = 1e-3
    device: str = "cpu"  # or cuda
    rewards: str | None = None  # of a model: "colocated" with the trainers, or on a GPU "apart"
    turns: bool = False  # answers have what tools said between what was drawn
    ulysses: int = 1  # ranks that share a row
    experts: int = 1  # ranks that share a layer's experts
    replica: int = 1  # ranks of one engine
    lora: int = 0  # rank of adapters, which are trained alone, held against a reference policy without them
    whole: bool = False  # weights' gradients are those of one rank to a row; the trained weights are kept
    first_gpu: int = 0  # the ranks' are this one and those behind it
    overrides: tuple[str, ...] = ()

    def __str__(self):
        changed = "" if self.vendor else "-stock"
        layout = self.layout.replace(" ", "").lower()
        return f"{self.engine}-{self.family}-{self.ranks}rank-{self.mode}{layout and '-'}{layout}{changed}"

    @property
    def layout(self) -> str:
        """Beside FSDP alone, in words."""
        parts = ("Ulysses", self.ulysses), ("EP", self.experts), ("rollout TP", self.replica), ("LoRA", self.lora)
        found = " x ".join(f"{name} {size}" for name, size in parts if size > 1)
        return f"{found} whole".strip() if self.whole else found


@dataclass
class Run:
    """metrics: a dict a step; steps: the samples of each batch trained on; training: what recorder.recorded saw"""

    case: Case
    folder: Path
    metrics: list[dict]
    steps: list[dict]
    training: list[dict]
    seconds: float


def selected(request) -> list[Case]:
    """Of the module that a fixture is made for: the cases of the tests that run, each once."""
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    given = (value for item in here for value in item.callspec.params.values())
    return list(dict.fromkeys(value for value in given if isinstance(value, Case)))


def overrides(case: Case, model: Path, prompts: Path, folder: Path) -> list[str]:
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    external = ["trainers.recorder", *(["vexact_engine.verl.actor"] if case.vendor else [])]
    given = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": prompts,
        "data.val_files": prompts,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 16,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.external_lib": f"[{','.join(external)}]",
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.policy_loss.loss_mode": "recorded",
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.ppo_micro_batch_size_per_gpu": 2,
        f"{actor}.use_kl_loss": False,
        f"{actor}.use_dynamic_bsz": False,
        f"{actor}.use_torch_compile": False,
        f"{actor}.optim.lr": case.lr,
        f"{rollout}.name": "vexact",
        f"{rollout}.n": 2,
        f"{rollout}.tensor_model_parallel_size": case.replica,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 2,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.dtype": "bfloat16",
        "reward.num_workers": 1,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": case.mode,
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": case.ranks,
        "trainer.val_before_train": False,
        "trainer.total_training_steps": case.steps,
        "trainer.total_epochs": 1,
        **on_this_machine(case.device, case.ranks + (case.rewards == "apart"), folder),
    }
    if case.vendor is None:
        given["+actor_rollout_ref.model.override_config.attn_implementation"] = "sdpa"
    if case.engine == "fsdp2":
        given[f"{actor}.strategy"] = "fsdp2"
        given[f"{actor}.fsdp_config.use_torch_compile"] = False
    else:
        given["model_engine"] = case.engine
        given["actor_rollout_ref.model.use_fused_kernels"] = True
        if case.vendor is None:
            given[f"{actor}.veomni.attn_implementation"] = "sdpa"
            given[f"{actor}.veomni.moe_implementation"] = "eager"
    if case.mode == "separate_async":
        given["trainer.n_gpus_per_node"] = case.ranks // 2
        given[f"{rollout}.nnodes"] = 1
        given[f"{rollout}.n_gpus_per_node"] = case.ranks // 2
        given[f"{rollout}.checkpoint_engine.backend"] = "vexact"
        given[f"{rollout}.checkpoint_engine.custom_backend_module"] = "vexact_engine.verl.checkpoint"
        given["trainer.v1.separate_async.parameter_sync_step"] = 1
    if case.ulysses > 1 and case.engine == "fsdp2":
        given[f"{actor}.fsdp_config.ulysses_sequence_parallel_size"] = case.ulysses
    if case.engine == "veomni" and case.ulysses * case.experts > 1:
        given[f"{actor}.veomni.ulysses_parallel_size"] = case.ulysses
        given[f"{actor}.veomni.expert_parallel_size"] = case.experts
    if case.lora:
        given["actor_rollout_ref.model.lora_rank"] = case.lora
        given["actor_rollout_ref.model.lora_alpha"] = 2 * case.lora
        given[f"{actor}.use_kl_loss"] = True
        given["actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"] = 2
    if case.whole:  # answers are the same in every run too, and in the same order
        given |= {
            "+actor_rollout_ref.model.fused_kernel_options.vexact.whole_gradients": True,
            f"{rollout}.full_determinism": True,
            "trainer.v1.sampler.custom_sampler.path": "pkg://vexact_engine.verl.sampler",
            "trainer.v1.sampler.custom_sampler.name": "Ordered",
            "trainer.save_freq": case.steps,
            f"{actor}.checkpoint.save_contents": "[model]",
        }
    told = case.overrides
    if case.rewards:
        told = (*rewards.options(rewards.make_model(folder / "reward_model"), case.rewards == "apart"), *told)
    given.update(override.split("=", 1) for override in told)
    return [f"{key}={value}" for key, value in given.items()]


def on_this_machine(device: str, gpus: int, folder: Path) -> dict[str, object]:
    """What a run needs beside its own settings: a small Ray cluster of its own, and nothing left elsewhere."""
    return {
        "trainer.device": device,
        "trainer.logger": "[console,file]",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "reward.custom_reward_function.path": Path(__file__).parent / "models.py",
        "reward.custom_reward_function.name": "compute_score",
        "+ray_kwargs.ray_init.num_gpus": gpus,  # on a CPU none of them is there
        "ray_kwargs.ray_init.num_cpus": 24,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 200_000_000,
        "hydra.run.dir": folder / "hydra",
    }


def launch(command: list[str], env: dict[str, str], folder: Path, timeout: float, forked: bool = True) -> None:
    """Runs it to its end. raises AssertionError with the end of its log where that is no good one

    forked  it is a fork, as Ray's workers are, where they may be (workers.py); False: they begin as for users
    """
    for _ in range(STARTS):
        code, end = _launched(command, env, folder, timeout, forked)
        if code == 0 or NOT_STARTED not in end:
            break
    assert code == 0, f"{' '.join(command[:4])} ...: {code}\n{end}"


def _launched(command: list[str], env: dict[str, str], folder: Path, timeout: float, forked: bool) -> tuple:
    """Its exit status, or why it has none, and the end of its log."""
    short = tempfile.mkdtemp(prefix="vx-", dir="/tmp")  # Ray's sockets are in it, whose names may not be long
    command, env = [*command, f"+ray_kwargs.ray_init._temp_dir={short}"], {**os.environ, **env}
    with open(folder / "log.txt", "w") as log, contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, short, ignore_errors=True)
        if forked and env["VERL_PLATFORM"] == "cpu":  # no fork may use a GPU
            command[0] = stack.enter_context(workers.forking(env))
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=folder)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"not done after {timeout} s"
        finally:
            process.kill()
            process.wait()
    return code, "\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-80:])


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics_in(folder: Path) -> list[dict]:
    return [line["data"] for line in lines(folder / "metrics.jsonl")]


def run(case: Case, model: Path, folder: Path, timeout: float = 900) -> Run:
    """One case from its model to its end."""
    folder.mkdir(parents=True)
    prompts = make_prompts(folder / "data", max(32, 4 * case.steps))
    record = {"VEXACT_RECORD": str(folder), "VERL_FILE_LOGGER_PATH": str(folder / "metrics.jsonl")}
    command = [sys.executable, "-W", "ignore", "-m", "trainers.recorder", *overrides(case, model, prompts, folder)]
    if case.device == "cuda":
        record["CUDA_VISIBLE_DEVICES"] = ",".join(gpus()[case.first_gpu :][: case.ranks + (case.rewards == "apart")])
    begun = time.monotonic()
    launch(command, environment(case.vendor, case.device, **record), folder, timeout)
    training = [record for path in sorted(folder.glob("training.*.jsonl")) for record in lines(path)]
    took = time.monotonic() - begun
    return Run(case, folder, metrics_in(folder), lines(folder / "steps.jsonl"), training, took)


def gpus() -> list[str]:
    """What those that are visible here are called."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return given if given != [""] else [str(i) for i in range(torch.cuda.device_count())]


def trained_weights(ran: Run) -> list[tuple[str, "torch.Tensor"]]:
    """Of a case that keeps them: whole, however the ranks had cut them by rows."""
    return weights_after(ran, ran.case.steps)


def weights_after(ran: Run, step: int) -> list[tuple[str, "torch.Tensor"]]:
    import torch

    folder, ranks = ran.folder / "checkpoints" / f"global_step_{step}" / "actor", ran.case.ranks
    files = [folder / f"model_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    parts = [torch.load(file, map_location="cpu", weights_only=False) for file in files]
    return [(name, torch.cat([part[name].to_local() for part in parts])) for name in parts[0]]


def compared(samples: list[dict]) -> tuple[int, int]:
    """How many tokens have log-probabilities of rollout and trainer, and how many of them differ in bits."""
    pairs = [pair for s in samples for pair in zip(*(drawn(s, f"{who}_log_probs") for who in ("rollout", "old")))]
    return len(pairs), sum(a != b for a, b in pairs)


def drawn(sample: dict, name: str) -> list:
    """Of the response's tokens those that the model drew."""
    return [value for value, own in zip(sample[name], sample["response_mask"], strict=True) if own]


def keep(ran: Run, file: str) -> None:
    """Appends what came out, as a line of JSON: benchmarks/results/main_ppo.jsonl has some."""
    import torch
    import transformers

    from vexact_engine.proof.machine import commit
    from vexact_engine.recipes import digests
    from vexact_engine.verl import SERVED

    case = ran.case
    tokens, mismatched = compared([sample for step in ran.steps for sample in step["samples"]])
    record = {
        "room": "main_ppo",
        "case": f"{case.family} {case.engine} {case.layout}".strip(),
        "backend": case.vendor or "verl",
        "ranks": case.ranks,
        "steps": len(ran.steps),
        "tokens": tokens,
        "mismatched": mismatched,
        "probs_diff_max": max(step["training/rollout_probs_diff_max"] for step in ran.metrics),
        "kl": max((step["rollout_corr/kl"] for step in ran.metrics), key=abs),
        "step_s": round(statistics.median(step["timing_s/step"] for step in ran.metrics), 2),
        "seconds": round(ran.seconds),
        **({"sha256": digests.sha256(trained_weights(ran))} if case.whole else {}),
        "device": case.device,
        "gpu": torch.cuda.get_device_name() if case.device == "cuda" else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **SERVED,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    with open(file, "a") as lines:
        lines.write(json.dumps(record) + "\n")


def check_step(samples: list[dict], version: int, turns: bool = False) -> int:
    """Rollout and trainer have the same bits for each token of a batch. -> how many tokens that are"""
    tokens = 0
    for sample in samples:
        length = len(sample["responses"])
        assert sample["first_version"] == sample["last_version"] == version, f"weights of another step: {sample}"
        assert length and len(sample["response_mask"]) == length and (turns or sample["response_mask"] == [1] * length)
        for name in ("rollout_log_probs", "old_log_probs"):
            assert len(sample[name]) == length, f"{name}: {len(sample[name])} of {length} tokens"
        count, differ = compared([sample])
        assert not differ, f"rollout and trainer differ in {differ} of {count} tokens of {sample['key']}"
        tokens += count
    return tokens


def check(ran: Run) -> int:
    """Zero in verl's own metrics, and equal bits in all three places, none missing. -> how many tokens that are"""
    case = ran.case
    assert len(ran.metrics) == len(ran.steps) == case.steps
    tokens = 0
    for number, (metrics, step) in enumerate(zip(ran.metrics, ran.steps)):
        assert {name: metrics[name] for name in ZERO} == dict.fromkeys(ZERO, 0.0)
        assert metrics["training/rollout_probs_diff_valid"] == 1
        # the next step has other weights; VeOmni's schedule ends at 0 behind the last one
        assert metrics["actor/grad_norm"] > 1e-3 and (metrics["actor/lr"] > 0 or number + 1 == case.steps)
        assert step["step"] == number + 1 and len(step["samples"]) == 8
        tokens += check_step(step["samples"], number, case.turns)
        check_samples(step["samples"])
    check_training(ran)
    assert tokens > case.steps * 8 * 4
    return tokens


def check_samples(samples: list[dict]) -> None:
    """Two answers to a prompt are the same where that one was likely: an end of text at once, or a model that says one
    thing alone; else they were drawn from the same noise."""
    import torch

    answers: dict[tuple, list[dict]] = {}
    for sample in samples:
        answers.setdefault((tuple(sample["prompts"]), tuple(sample["responses"])), []).append(sample)
    for same in answers.values():
        logprobs = torch.tensor(drawn(same[0], "rollout_log_probs"), dtype=torch.int32).view(torch.float32)
        assert len(same) == 1 or logprobs.sum() > math.log(1e-3), "two samples of a prompt are one"


def check_training(ran: Run) -> None:
    """The training forward saw each token once, on each of the ranks that share it, and gave it the bits that it had
    before."""
    assert {record["dtype"] for record in ran.training} == {"torch.float32"}
    differ = sum(a != b for record in ran.training for a, b in zip(record["training"], record["old"], strict=True))
    assert not differ, f"the training forward and old_log_probs differ in {differ} tokens"
    forward = sorted(x for record in ran.training for x in record["training"])
    batches = [x for step in ran.steps for sample in step["samples"] for x in drawn(sample, "old_log_probs")]
    expected = sorted(batches * ran.case.ulysses)
    assert forward == expected, "the training forward has other log-probabilities than the batches"
