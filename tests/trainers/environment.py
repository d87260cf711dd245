"""The environment variables of a process that runs verl, and of every Ray worker below it, in these tests."""

import importlib.util
import os
from pathlib import Path

TESTS = Path(__file__).parent.parent
_ENGINE = importlib.util.find_spec("vexact_engine")
PACKAGES = Path(_ENGINE.submodule_search_locations[0]).parent  # the tree, or where a wheel was installed


def environment(vendor: str | None = "vexact", device: str = "cpu", **more: str) -> dict[str, str]:
    """vendor None: verl's own engines."""
    on_cpu = device == "cpu"
    ours = [*(["trainers.cpu_platform"] if on_cpu else []), "vexact_engine.verl.register"]
    path = [str(TESTS), str(PACKAGES), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "VERL_PLATFORM": "cpu" if on_cpu else "nvidia",
        "VERL_USE_EXTERNAL_MODULES": ",".join(ours),
        # the stock classes are registered for cuda; ours for the CPU too
        **({"VERL_ENGINE_DEVICE": "cuda"} if vendor is None else {"VERL_ENGINE_VENDOR": vendor}),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HYDRA_FULL_ERROR": "1",
        "PYTHONWARNINGS": "ignore",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it would kill workers where other programs fill the memory
        "RAY_prestart_worker_first_driver": "0",  # a process for each CPU that it is told of: nobody asks for them
        "RAY_worker_niceness": "0",  # at Ray's own 15 a run waits until whoever else tests on this machine is done
        "HF_HUB_OFFLINE": "1",
        **more,
    }
