"""A platform of verl's for a machine without accelerators: gloo, and Ray told of GPUs that are not there.

For tests alone: named first in VERL_USE_EXTERNAL_MODULES, with VERL_PLATFORM=cpu.
"""

import contextlib
import itertools
import os
import types

import torch
import verl.utils.distributed as verl_distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.single_controller.ray.base import RayWorkerGroup

NOTHING = {
    "empty_cache",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "reset_peak_memory_stats",
    "set_device",
    "synchronize",
}
BYTES = {"memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"}


class _Device(types.ModuleType):
    """torch.cpu, and what verl asks torch.cuda for beside it."""

    def __getattr__(self, name):
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name in ("get_rng_state", "set_rng_state"):  # of the one generator that there is
            return getattr(torch, name)
        if name in NOTHING:
            return lambda *args, **kwargs: None
        if name in BYTES:
            return lambda *args, **kwargs: 0
        if name == "mem_get_info":
            return lambda *args, **kwargs: (8 << 30, 16 << 30)
        if name == "get_device_name":
            return lambda *args, **kwargs: "cpu"
        raise AttributeError(f"the CPU platform of the tests has no {name}")


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = _Device("vexact_test_device")

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return "cpu"  # verl gives it to .to()

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    def rollout_env_vars(self):
        return {}

    def get_collective_module(self):
        return None

    def cudart(self):
        return None


_initialize = verl_distributed.initialize_global_process_group_ray


def _initialize_on_gloo(timeout_second=None, backend=None):
    # verl asks for "cpu:gloo,cpu:gloo" where the device is the CPU, which torch refuses
    return _initialize(timeout_second, backend or "cpu:gloo")


verl_distributed.initialize_global_process_group_ray = _initialize_on_gloo


# verl names a free port seconds before a worker listens at it. Among those that the system gives out whoever else tests
# on this machine can have it by then: so it is one below them, and each process, each group of workers asks at its own.
_PORTS, _WIDTH = range(20000, 32000), 8
_groups = itertools.count()
_choose = RayWorkerGroup._get_master_addr_port


def _choose_below(self, pg, bundle_index=0, master_port_range=None):
    first = _PORTS[(os.getpid() * 40 + next(_groups) * _WIDTH) % len(_PORTS)]
    return _choose(self, pg, bundle_index, master_port_range or [first, first + _WIDTH])


RayWorkerGroup._get_master_addr_port = _choose_below
