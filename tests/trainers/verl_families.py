"""Every family that the patch covers, tiny and random, under verl's own training engines: how many log-probabilities of
the trainer's are other floats than the rollout's, before a step and, after a hand-over, behind it.

    python -m trainers.verl_families fsdp2             # or veomni, or both; then names of families, or none for all
    python -m trainers.verl_families fsdp2 --lines benchmarks/results/verl_families.jsonl   # then tests/readme.py write

All families of one engine are done in one process a rank, without Ray.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .environment import TESTS, environment

RANKS = {"fsdp2": 1, "veomni": 2}  # VeOmni has no FSDP for one
# Of those that are covered; VeOmni knows no others ("Unknown Modeling name").
OF_VEOMNI = ("deepseek_v3", "gemma3_text", "llama", "qwen2", "qwen3", "qwen3_moe", "seed_oss")
LENGTHS = (5, 9, 3, 12)
TIMEOUT = 900


@dataclass
class Outcome:
    """Of one family: how many tokens were compared, how many of them differ, or what was refused."""

    family: str
    tokens: int = 0
    before: int = 0
    after: int = 0
    refused: str = ""


def differing(a: list[torch.Tensor], b: list[torch.Tensor]) -> int:
    return sum(int((x.view(torch.int32) != y.view(torch.int32)).sum()) for x, y in zip(a, b, strict=True))


def one(name: str, backend: str, folder: Path) -> Outcome:
    from test_covered import small
    from verl.workers.config import FSDPActorConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.utils.losses import ppo_loss

    from vexact_engine import Engine, EngineConfig

    from .actor_ranks import Job, batch_of, configs
    from .handing import hand_over, scored

    if dist.get_rank() == 0:
        small(name).to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 61, (n + 9,), generator=generator).tolist() for n in LENGTHS]
    pairs = [(row[:n], row[n:]) for row, n in zip(rows, LENGTHS)]
    veomni = backend == "veomni"
    job = Job(
        name,
        str(folder),
        pairs,
        backend=backend,
        model_config={"load_tokenizer": False},
        engine={"mixed_precision": True} if veomni else {},
        data={"use_fused_kernels": veomni},
    )
    kept, found = configs(job), Outcome(name)
    with Engine.from_pretrained(folder, config=EngineConfig(num_pages=64, show_progress=False)) as engine:
        rollout = scored(engine, rows)
        trainer = EngineRegistry.new(model_type="language_model", backend=backend, **kept)
        trainer.initialize()

        def inferred() -> list[torch.Tensor]:
            with trainer.eval_mode():
                values = trainer.infer_batch(batch_of(job, slice(None), 1.0))["model_output"]["log_probs"]
            return [row[:-1].float() for row in values.unbind()]

        found.tokens, found.before = sum(map(len, rollout)), differing(inferred(), rollout)
        actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01)

        def loss(model_output, data, dp_group=None):
            return ppo_loss(actor, model_output, data, dp_group)

        with trainer.train_mode():
            trainer.train_batch(batch_of(job, slice(None), 1.0), loss)
        trained = inferred()
        if not differing(trained, rollout):
            raise AssertionError(f"{name}: the step changed nothing")
        weights, adapters = trainer.get_per_tensor_param()
        hand_over(engine, weights, kept["model_config"], adapters=adapters)
        found.after = differing(trained, scored(engine, rows))
    return found


def rank(backend: str, names: list[str], folder: Path, number: int) -> None:
    from .actor_ranks import offload_without_pinning

    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        offload_without_pinning()
    size = RANKS[backend]
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("cpu:gloo", store=store, rank=number, world_size=size)
    with open(folder / f"outcomes{number}.jsonl", "w") as lines:
        for name in names:
            try:
                outcome = one(name, backend, folder / name)
            except Exception as error:  # a refusal, or what somebody has to look at: the reader sees which
                outcome = Outcome(name, refused=f"{type(error).__name__}: {error}")
            lines.write(json.dumps(asdict(outcome)) + "\n")
            lines.flush()
    dist.destroy_process_group()


def run(backend: str, names: list[str] | tuple[str, ...], folder: Path) -> list[Outcome]:
    """Of all these families. Every rank compares what its own engine and trainer say: the worst of them counts."""
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | environment() | {"VERL_USE_EXTERNAL_MODULES": "trainers.cpu_platform"}
    command = [sys.executable, "-m", "trainers.verl_families", backend, *names, "--folder", str(folder), "--rank"]
    logs = [open(folder / f"log{number}.txt", "w") for number in range(RANKS[backend])]  # noqa: SIM115
    started = [
        subprocess.Popen(
            [*command, str(number)], env={**env, "RANK": str(number)}, stdout=log, stderr=subprocess.STDOUT
        )
        for number, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(TIMEOUT) for process in started]
    finally:
        for process, log in zip(started, logs):
            process.kill()
            process.wait()
            log.close()
    if any(codes):
        tail = "\n".join((folder / f"log{number}.txt").read_text()[-4000:] for number, c in enumerate(codes) if c)
        raise AssertionError(f"{len(codes)} ranks ended with {codes}:\n{tail}")
    parts = [
        [Outcome(**json.loads(line)) for line in (folder / f"outcomes{number}.jsonl").read_text().splitlines()]
        for number in range(len(codes))
    ]
    return [max(same, key=lambda o: (bool(o.refused), o.before + o.after)) for same in zip(*parts, strict=True)]


def record(backend: str, outcome: Outcome) -> dict:
    import transformers

    from vexact_engine.proof.machine import commit
    from vexact_engine.verl import SERVED

    return {
        "room": "verl_families",
        "case": f"{outcome.family} {backend}",
        "backend": "vexact",
        **{name: value for name, value in asdict(outcome).items() if name != "family"},
        "device": "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **SERVED,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def main() -> int:
    from vexact_ops.patch import COVERED

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", choices=RANKS)
    parser.add_argument("families", nargs="*", metavar="FAMILY")
    parser.add_argument("--lines", type=Path, help="append what came out to this file, a line of JSON for each family")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(TESTS / "patch"))
    names = args.families or (OF_VEOMNI if args.backend == "veomni" else COVERED)
    if args.rank is not None:
        rank(args.backend, names, args.folder, args.rank)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = run(args.backend, names, args.folder or Path(folder))
    for outcome in found:
        said = outcome.refused or f"{outcome.before} and {outcome.after} of {outcome.tokens} differ"
        sys.stdout.write(f"{outcome.family:20} {said.splitlines()[0]}\n")
    if args.lines:
        with open(args.lines, "a") as lines:
            lines.writelines(json.dumps(record(args.backend, outcome)) + "\n" for outcome in found)
    return any(outcome.before + outcome.after for outcome in found)


if __name__ == "__main__":
    sys.exit(main())
