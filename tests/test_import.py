"""Importing has no effects: nothing printed, no CUDA, no torch flag, no operator or plugin registered elsewhere."""

import os
import subprocess
import sys
from pathlib import Path

import vexact_ops as vx

ROOT = Path(__file__).parent.parent

PROBE = """
import sys, torch
flags = lambda: (
    torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(),
    torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32,
    torch.get_float32_matmul_precision(), torch.cuda.is_initialized(), torch.initial_seed() * 0,
)
before, modules = flags(), set(sys.modules)
import vexact_ops, vexact_engine
for name in [*vexact_ops.__all__, "sum"]:
    getattr(vexact_ops, name)
for name in getattr(vexact_engine, "__all__", ()):
    getattr(vexact_engine, name)
assert flags() == before, (before, flags())
new = {name.split(".")[0] for name in set(sys.modules) - modules}
banned = new & {"triton", "verl", "ray", "veomni", "quack", "flash_attn", "matplotlib"}
assert not banned, f"imported eagerly: {banned}"
"""


def test_import_has_no_effects():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_importing_the_ops_alone_needs_no_transformers():
    code = "import sys, vexact_ops; [getattr(vexact_ops, n) for n in vexact_ops.__all__ if n != 'patch']"
    code += "; assert 'transformers' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr


def test_every_public_name_resolves_and_is_documented():
    for name in [*vx.__all__, "sum"]:
        assert getattr(vx, name).__doc__, name


def test_import_star_leaves_python_s_own_names_alone():
    import builtins

    assert not set(vx.__all__) & set(dir(builtins))
    names: dict = {}
    exec("from vexact_ops import *", names)
    assert names.get("sum", sum) is sum and names["rmsnorm"] is vx.rmsnorm and "sum" in dir(vx)
