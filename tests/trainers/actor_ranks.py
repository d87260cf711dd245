"""verl's own training engines on a few ranks, without Ray: what they compute of a rollout, and what they learn from it.

python -m trainers.actor_ranks JOBS RANK SIZE   # one rank; JOBS is a folder with jobs.pt, and takes the results
"""

import contextlib
import functools
import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vexact_engine.errors import HandoverFailed
from vexact_engine.proof.compare import LogprobsDiffer
from vexact_engine.recipes import digests

from .environment import environment

TIMEOUT = 600


@dataclass(frozen=True)
class Job:
    """One engine, built, asked and trained. Groups of overrides go to verl's dataclasses of these names."""

    name: str
    model: str
    rows: list[tuple[list[int], list[int]]]  # prompt and response
    backend: str = "fsdp2"
    model_config: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)  # what verl puts beside a batch
    temperature: Any = 1.0  # a number, or one for each row
    steps: int = 0
    actor: dict[str, Any] = field(default_factory=dict)
    entropy_coeff: float = 0.01
    saved: str | None = None  # a folder: the checkpoint of what `after` is of, written, moved away from, and read back
    refused: bool = False  # building it, or asking it, raises: what it says is all there is
    set_in_code: dict[str, Any] = field(default_factory=dict)  # on the trainer's configuration, by nobody's option
    pictures: list[dict[str, torch.Tensor]] = field(default_factory=list)  # of each row, with position_ids (4, tokens)
    handed_over: bool = False  # to an engine of the same folder, in bf16, once it has been asked
    drawn: list[torch.Tensor] = field(default_factory=list)  # of each row, what the rollout says of its response
    digested: bool = False
    replica: int = 0  # ranks that share a rollout of this folder, which takes what they have at the end: handing.py
    rollout: dict[str, Any] = field(default_factory=dict)  # that engine's configuration
    group: int = 0  # ranks that send to their replicas together; none said: of each replica
    node: int = 8  # GPUs of a node
    shards: str = ""  # engine_kwargs.vexact.shards
    reference: dict[str, Any] | None = None  # of its engine's config: a reference policy, made before as verl makes it

    @property
    def ulysses(self) -> int:
        """Ranks that share a batch's rows."""
        return self.engine.get("ulysses_sequence_parallel_size", self.engine.get("ulysses_parallel_size", 1))


@dataclass
class Result:
    """Of each row of a job, in order, a value for each of its tokens; and the weights that a rollout would get."""

    logprobs: list[torch.Tensor] = field(default_factory=list)
    entropy: list[torch.Tensor] = field(default_factory=list)
    after: list[torch.Tensor] = field(default_factory=list)  # log-probabilities after the steps
    trained: list[list[torch.Tensor]] = field(default_factory=list)  # those of each step's own forward
    metrics: list[dict[str, float]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    restored: list[torch.Tensor] = field(default_factory=list)  # log-probabilities after reading the checkpoint back
    error: str | None = None
    sha256: str | None = None  # of the parameters that were trained, in fp32
    handed: list[dict[str, Any]] = field(default_factory=list)  # what a hand-over of a replica was, on each rank
    base: list[list[torch.Tensor]] = field(default_factory=list)  # log-probabilities without adapters: first, and after


def run(jobs: list[Job], folder: Path, ranks: int, vendor: str | None = "vexact") -> dict[str, Result]:
    """Processes of their own, one a rank, that do all jobs one after the other."""
    folder.mkdir(parents=True)
    torch.save(jobs, folder / "jobs.pt")
    command = [sys.executable, "-m", "trainers.actor_ranks", str(folder)]
    given = environment(vendor) | {"VERL_USE_EXTERNAL_MODULES": "trainers.cpu_platform"}
    env = {**os.environ, **given}
    logs = [open(folder / f"log{rank}.txt", "w") for rank in range(ranks)]  # noqa: SIM115
    started = [
        subprocess.Popen([*command, str(rank), str(ranks)], env=env, stdout=log, stderr=subprocess.STDOUT)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(TIMEOUT) for process in started]
    finally:
        for process, log in zip(started, logs):
            process.kill()
            process.wait()
            log.close()
    if any(codes):
        tail = "\n".join((folder / f"log{rank}.txt").read_text()[-4000:] for rank, code in enumerate(codes) if code)
        raise AssertionError(f"{ranks} ranks ended with {codes}:\n{tail}")
    parts = [torch.load(folder / f"result{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {job.name: _joined([part[job.name] for part in parts[:: 1 if job.refused else job.ulysses]]) for job in jobs}


def _joined(parts: list[Result]) -> Result:
    first = parts[0]

    def every(name: str):
        return [row for part in parts for row in getattr(part, name)]

    trained, base = (
        [[row for part in parts for row in getattr(part, name)[i]] for i in range(len(getattr(first, name)))]
        for name in ("trained", "base")
    )
    rows = every("logprobs"), every("entropy"), every("after")
    told = first.error, first.sha256, every("handed")
    return Result(*rows, trained, first.metrics, first.weights, every("restored"), *told, base)


# ---- in a rank


def batch_of(job: Job, own: slice, temperatures) -> Any:
    """As verl's trainer hands it to an engine: nested, nothing padded."""
    from verl.utils import tensordict_utils as tu

    def nested(parts, dtype=torch.int64):
        return torch.nested.as_nested_tensor([torch.tensor(part, dtype=dtype) for part in parts], layout=torch.jagged)

    rows = job.rows[own]
    both = [prompt + response for prompt, response in rows]
    tensors = {
        "input_ids": nested(both),
        "position_ids": nested([list(range(len(row))) for row in both]),
        "prompts": nested([prompt for prompt, _ in rows]),
        "responses": nested([response for _, response in rows]),
        "response_mask": nested([[1] * len(response) for _, response in rows]),
        "loss_mask": nested([[1] * len(response) for _, response in rows]),
        "advantages": nested([[(-1.0) ** i * 0.5] * len(r) for i, (_, r) in enumerate(rows)], torch.float32),
        "old_log_probs": nested([[-1.0] * len(response) for _, response in rows], torch.float32),
    }
    if job.drawn:
        tensors["rollout_log_probs"] = torch.nested.as_nested_tensor(job.drawn[own], layout=torch.jagged)
    if pictures := job.pictures[own]:
        places = [given["position_ids"] for given in pictures]
        tensors["position_ids"] = torch.nested.nested_tensor_from_jagged(
            torch.cat(places, 1), torch.tensor([0, *(p.shape[1] for p in places)]).cumsum(0), jagged_dim=2
        )
        tensors["multi_modal_inputs"] = [
            {name: value for name, value in given.items() if name != "position_ids"} for given in pictures
        ]
    if isinstance(temperatures, torch.Tensor):
        tensors["temperature"] = temperatures
    others = {
        "use_remove_padding": True,
        "use_fused_kernels": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "max_token_len_per_gpu": 64,
        "calculate_entropy": True,
        "pad_token_id": 0,
        "global_batch_size": len(job.rows),
        **job.data,
    }
    if not isinstance(temperatures, torch.Tensor):
        others["temperature"] = temperatures
    return tu.get_tensordict(tensor_dict=tensors, non_tensor_dict=others)


def configs(job: Job) -> dict[str, Any]:
    from verl.trainer.config import CheckpointConfig
    from verl.workers import config

    model = {
        "use_remove_padding": job.data.get("use_remove_padding", True),
        "use_fused_kernels": job.data.get("use_fused_kernels", False),
        "fused_kernel_options": {"impl_backend": "torch"},
        "enable_gradient_checkpointing": False,
        "external_lib": "vexact_engine.verl.actor" if os.environ.get("VERL_ENGINE_VENDOR") else None,
        # the stock actor's attention; an aligned one is built without any of its own
        "override_config": {} if os.environ.get("VERL_ENGINE_VENDOR") else {"attn_implementation": "sdpa"},
        **job.model_config,
    }
    if job.backend == "veomni":
        engine = {"strategy": "veomni", "attn_implementation": "sdpa", "use_torch_compile": False, **job.engine}
        return {
            "model_config": config.HFModelConfig(path=job.model, **model),
            "engine_config": config.VeOmniEngineConfig(**engine),
            "optimizer_config": config.VeOmniOptimizerConfig(lr=1e-2, total_training_steps=100, **job.optimizer),
            "checkpoint_config": CheckpointConfig(),
        }
    # what is left out, "extra", holds a state of the accelerator's generator, of which this platform has none
    saved = CheckpointConfig(
        save_contents=["model", "optimizer", "extra", "hf_model"], load_contents=["model", "optimizer"]
    )
    engine = {"strategy": job.backend, "use_torch_compile": False, **job.engine}
    return {
        "model_config": config.HFModelConfig(path=job.model, **model),
        "engine_config": config.FSDPEngineConfig(**engine),
        "optimizer_config": config.FSDPOptimizerConfig(lr=1e-2, total_training_steps=100, **job.optimizer),
        "checkpoint_config": saved,
    }


def do(job: Job) -> Result:
    from torch.distributed.fsdp import FSDPModule
    from verl.workers.config import FSDPActorConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils.losses import ppo_loss

    torch.manual_seed(0)
    if job.backend == "veomni":  # which would take the last job's ranks, whatever it is told
        from veomni.distributed.parallel_state import clear_parallel_state

        clear_parallel_state()
    rank, batches = dist.get_rank(), max(1, dist.get_world_size() // job.ulysses)
    share = len(job.rows) // batches
    own = slice(rank // job.ulysses * share, (rank // job.ulysses + 1) * share)
    temperature = job.temperature
    if not isinstance(temperature, float):
        temperature = torch.tensor(temperature)[own]

    def batch():
        return batch_of(job, own, temperature)

    kept = configs(job)
    for name, value in job.set_in_code.items():
        setattr(kept["model_config"].hf_config, name, value)

    def made(kept: dict[str, Any]):
        engine = EngineRegistry.new(model_type="language_model", backend=job.backend, **kept)
        engine.initialize()
        return engine

    reference = None  # alive while the actor is made
    if job.reference is not None:
        reference = made(configs(replace(job, engine={"forward_only": True, **job.reference})))
    engine = made(kept)
    if job.backend == "veomni" and not job.refused:
        from veomni.distributed.parallel_state import get_parallel_state

        state = get_parallel_state()
        assert (state.ulysses_size, state.ep_size) == (job.ulysses, job.engine.get("expert_parallel_size", 1))
        for unit in (module for module in engine.module.modules() if isinstance(module, FSDPModule)):
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum that divides by anything but its ranks

    def inferred(adapted: bool = True) -> dict[str, list[torch.Tensor]]:
        with engine.eval_mode(), contextlib.nullcontext() if adapted else engine.disable_adapter():
            found = engine.infer_batch(batch())["model_output"]
        return {name: [row.clone() for row in value.unbind()] for name, value in found.items()}

    adapted = job.model_config.get("lora_rank", 0) > 0
    about = engine.get_per_tensor_param()[0].about if adapted else None  # before all else, as verl hands over
    base = [inferred(False)["log_probs"]] if adapted else []
    first = inferred()
    if reference is not None:
        with reference.eval_mode():
            found = reference.infer_batch(batch())["model_output"]["log_probs"]
        assert all(map(torch.equal, found.unbind(), first["log_probs"])), "the reference policy is not the actor's"
    actor = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=2,
        entropy_coeff=job.entropy_coeff,
        **job.actor,
    )
    seen, metrics = [], []

    def recorded(config, model_output, data, dp_group=None):
        seen[-1].extend(row.detach().clone() for row in model_output["log_probs"].unbind())
        return ppo_loss(config, model_output, data, dp_group)

    loss = functools.partial(recorded, config=actor)  # as verl's worker makes its own

    if job.engine.get("forward_only"):
        return Result(first["log_probs"], first.get("entropy", []))

    def train() -> None:
        seen.append([])
        with engine.train_mode():
            metrics.append(engine.train_batch(batch(), loss)["metrics"])

    if job.handed_over:
        from vexact_engine import Engine, EngineConfig

        from .handing import hand_over

        with Engine.from_pretrained(job.model, config=EngineConfig(num_pages=64)) as rollout:
            hand_over(rollout, engine.get_per_tensor_param()[0], kept["model_config"], step=6)
    for _ in range(job.steps):
        train()
    after = inferred()["log_probs"] if job.steps else []
    base += [inferred(False)["log_probs"]] if adapted else []
    assert about is None or about == engine.get_per_tensor_param()[0].about
    weights = {}
    for name, tensor in engine.get_per_tensor_param()[0]:
        if rank == 0:  # the others take part in making it whole
            weights[name] = tensor.detach().to("cpu", copy=True)
    handed = []
    if job.replica:
        from .handing import of_a_replica

        handed = [of_a_replica(engine, job, kept["model_config"], rank)]
    restored, sha256 = [], digests.sha256(engine.module.named_parameters()) if job.digested else None
    if job.saved:
        engine.save_checkpoint(job.saved)
        train()
        moved = inferred()["log_probs"]
        assert not all(torch.equal(a, b) for a, b in zip(moved, after)), "the step changed nothing"
        engine.load_checkpoint(job.saved, del_local_after_load=False)
        restored = inferred()["log_probs"]
        del seen[-1], metrics[-1]
    names = ("grad_norm", "rollout_checked")
    norms = [{name: step[name] for name in names if name in step} for step in metrics]  # some ranks have none
    said = first["log_probs"], first.get("entropy", []), after
    return Result(*said, seen, norms, weights, restored, None, sha256, handed, base)


def offload_without_pinning() -> None:
    """verl's reference policy offloads to pinned memory, which torch has beside an accelerator alone."""
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    transformer_impl.CPUOffloadPolicy = lambda pin_memory: CPUOffloadPolicy(pin_memory=False)


def main(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        offload_without_pinning()
    dist.init_process_group("cpu:gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    results = {}
    for job in torch.load(folder / "jobs.pt", weights_only=False):
        try:
            results[job.name] = do(job)
        except (NotImplementedError, ValueError, TypeError, HandoverFailed, LogprobsDiffer) as error:
            if not job.refused:
                raise
            results[job.name] = Result(error=str(error))
    torch.save(results, folder / f"result{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    from trainers import actor_ranks  # under its own name, as what it saves is read

    actor_ranks.main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
