"""One run of verl's main_ppo on this machine's CPU, and what it left: metrics, and every log-probability's bits."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .environment import environment
from .models import make_prompts

# verl's own names: what its users look at. All are 0.0 where rollout and trainer agree in every bit.
ZERO = (
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_mean",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/log_ppl_abs_diff",
    "actor/ppo_kl",
)


@dataclass(frozen=True)
class Case:
    """One run. `ranks` trainers, and as many replicas; separate_async: half of them for each."""

    family: str
    engine: str = "fsdp2"  # or veomni
    ranks: int = 2
    mode: str = "sync"
    vendor: str | None = "vexact"  # None: verl's own actor
    steps: int = 3
    lr: float = 1e-3
    overrides: tuple[str, ...] = field(default=())

    def __str__(self):
        changed = "" if self.vendor else "-stock"
        return f"{self.engine}-{self.family}-{self.ranks}rank-{self.mode}{changed}"


@dataclass
class Run:
    """metrics: a dict a step; steps: the samples of each batch trained on; training: what recorder.recorded saw"""

    case: Case
    folder: Path
    metrics: list[dict]
    steps: list[dict]
    training: list[dict]
    seconds: float


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
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        f"{actor}.policy_loss.loss_mode": "recorded",
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.ppo_micro_batch_size_per_gpu": 2,
        f"{actor}.use_kl_loss": False,
        f"{actor}.use_dynamic_bsz": False,
        f"{actor}.use_torch_compile": False,
        f"{actor}.optim.lr": case.lr,
        f"{rollout}.name": "vexact",
        f"{rollout}.n": 2,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.calculate_log_probs": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 2,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.dtype": "bfloat16",
        "reward.custom_reward_function.path": Path(__file__).parent / "models.py",
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.use_v1": True,
        "trainer.v1.trainer_mode": case.mode,
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": case.ranks,
        "trainer.logger": "[console,file]",
        "trainer.val_before_train": False,
        "trainer.total_training_steps": case.steps,
        "trainer.total_epochs": 1,
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / "checkpoints",
        "+ray_kwargs.ray_init.num_gpus": case.ranks,
        "ray_kwargs.ray_init.num_cpus": 24,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 200_000_000,
        "+ray_kwargs.ray_init._temp_dir": folder / "ray",
        "hydra.run.dir": folder / "hydra",
    }
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
        given["trainer.v1.separate_async.parameter_sync_step"] = 1
    given.update(override.split("=", 1) for override in case.overrides)
    return [f"{key}={value}" for key, value in given.items()]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(case: Case, model: Path, folder: Path, timeout: float = 600) -> Run:
    """raises AssertionError with the end of the log where main_ppo does not end well"""
    import time

    folder.mkdir(parents=True)
    prompts = make_prompts(folder / "data")
    short = Path(tempfile.mkdtemp(prefix="vx-", dir="/tmp"))  # Ray's sockets are in it, and have short names
    (folder / "ray").symlink_to(short)
    env = {
        **os.environ,
        **environment(case.vendor, VEXACT_RECORD=str(folder), VERL_FILE_LOGGER_PATH=str(folder / "metrics.jsonl")),
    }
    arguments = [x.replace(str(folder / "ray"), str(short)) for x in overrides(case, model, prompts, folder)]
    begun = time.monotonic()
    with open(folder / "log.txt", "w") as log:
        command = [sys.executable, "-W", "ignore", "-m", "trainers.recorder", *arguments]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env, cwd=folder)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = f"not done after {timeout} s"
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(short, ignore_errors=True)
    end = "\n".join((folder / "log.txt").read_text(errors="replace").splitlines()[-80:])
    assert code == 0, f"{case}: main_ppo: {code}\n{end}"
    metrics = [line["data"] for line in lines(folder / "metrics.jsonl")]
    training = [record for path in sorted(folder.glob("training.*.jsonl")) for record in lines(path)]
    return Run(case, folder, metrics, lines(folder / "steps.jsonl"), training, time.monotonic() - begun)
