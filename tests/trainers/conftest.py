"""What these tests share. Where verl, VeOmni or what they need is missing, every file here is skipped and says so.
Where TRL can be imported its own file runs, and no other: verl 0.9.1 fails beside TRL 1.16."""

import importlib.util
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

NEEDED = ("verl", "veomni", "ray", "transfer_queue", "tensordict", "hydra", "torchdata")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
TRL = importlib.util.find_spec("trl") is not None
if not MISSING:  # before anything imports verl: it looks once
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "trainers.cpu_platform")

# Of the checkout what reads its README files needs `benchmarks`: behind all that is installed, a wheel of ours too.
sys.path.append(str(Path(__file__).parents[2]))

SECONDS = float(os.environ.get("VEXACT_TRAINERS_SECONDS", "900"))  # of one run of main_ppo, its start included
RUN_BYTES = 6 << 30  # of memory, for the ten to fifteen processes of a run


class Skipped(pytest.Module):
    reason = f"not installed: {', '.join(MISSING)} (.ci/trainers makes an environment)"

    def collect(self):
        pytest.skip(self.reason, allow_module_level=True)


class SkippedForTRL(Skipped):
    reason = "TRL is for test_trl.py alone (.ci/trainers has a folder of it)"


def pytest_pycollect_makemodule(module_path, parent):
    kind = Skipped if MISSING else SkippedForTRL if (module_path.name == "test_trl.py") != TRL else None
    return kind.from_parent(parent, path=module_path) if kind else None


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """models(family) -> the folder of a tiny model with its tokenizer, made once."""
    from .models import tiny_models

    return tiny_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def trained(request, models, tmp_path_factory):
    """trained(case) -> its Run of main_ppo. All cases that this session asks of the module run one after the other, as
    many of them side by side as there is room for: a run is its processes' start, and those wait for one another. A
    module may have prepare(case, folder, models) -> the case as it is run, and its model's folder."""
    from vexact_engine.runner.memory import available_bytes

    from .ppo import run, selected

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    room = min(cores // request.module.CORES_PER_RUN, available_bytes() // RUN_BYTES)
    folder, begun = tmp_path_factory.mktemp("ppo"), {}
    with ThreadPoolExecutor(max(1, room)) as pool:
        prepare = getattr(request.module, "prepare", lambda case, folder, models: (case, models(case.family)))
        for case in selected(request):
            made = prepare(case, folder / f"{case}-given", models)
            begun[case] = pool.submit(run, *made, folder / str(case), SECONDS)
        yield lambda case: begun[case].result()
        for later in begun.values():
            later.cancel()


@pytest.fixture(scope="module")
def ray_cluster():
    """A Ray cluster of this module's own, with four GPUs that are not there. -> its address"""
    import ray

    from . import workers

    with workers.of_ray() as (folder, runtime_env):
        context = ray.init(
            num_cpus=24,
            num_gpus=4,
            include_dashboard=False,
            object_store_memory=200_000_000,
            _temp_dir=folder,
            log_to_driver=False,
            runtime_env=runtime_env,
        )
        yield context.address_info["address"]
