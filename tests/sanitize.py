"""compute-sanitizer over small cases of the test suite: `python tests/sanitize.py [--tool memcheck] [ROOM ...]`.

Every room's tests run in a process of their own in which each tensor has an allocation of its own, so that an access
beyond it is found. The exit status is that of the worst room. A GPU and the CUDA toolkit are needed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What of a room's GPU tests: few, small, and each kernel at least once. CUDA graphs need the caching allocator.
CASES = {
    "attention": "bf16 and (every_path or queries_stand or gradients_of_a_sequence)",
    "fused_moe": "bf16 and (stand_alone or empty_slots)",
    "grouped_linear": "bf16 and (expert_stand_alone or rows_behind or no_rows)",
    "kv_cache": "store or slot or minus_one",
    "linear": "bf16 and (rows_stand_alone or gpu_has or special_values or strides)",
    "linear_cross_entropy": "not fp16 and not fp32"
    " and (ignored_tokens and mean or canonical_bytes and 300 or not_ignored or pieces and some or probability)",
    "linear_sample": "bf16 and (stand_alone or minus_one or ties) or canonical_bytes and 64",
    "log_softmax": "stand_alone and bf16",
    "mean": "stand_alone and bf16",
    "moe_route": "ties or routed_alone or no_number",
    "rmsnorm": "stand_alone and bf16",
    "rope": "stand_alone and bf16",
    "sampler": "stand_alone or ties or minus_one or programs",
    "silu_mul": "stand_alone and bf16",
}


def run(room: str, tool: str, limit: float) -> tuple[bool, str]:
    """Whether a room's cases are clean, and what there is to say of them."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    command = [program, "--tool", tool, "--error-exitcode", "9", "--print-limit", "10", sys.executable, "-m", "pytest"]
    command += ["-n", "0", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", "-q"]
    command += [f"tests/ops/test_{room}.py", "-k", f"cuda and ({CASES[room]})"]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "VEXACT_EXAMPLES": "1", "CI": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return False, f"not done within {limit:.0f} s"
    said = done.stdout + done.stderr
    errors = re.search(r"ERROR SUMMARY: .*", said)
    passed = re.search(r"\d+ passed.*", said)
    clean = done.returncode == 0 and passed is not None and errors is not None
    summary = f"{passed[0] if passed else 'no test passed'}; {errors[0] if errors else 'no word of the sanitizer'}"
    return clean, summary if clean else f"{summary}\n{said[-6000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one room")
    args = parser.parse_args()
    unknown = set(args.rooms) - set(CASES)
    if unknown:
        parser.error(f"no cases of {', '.join(sorted(unknown))}")
    dirty = 0
    for room in args.rooms or CASES:
        begin = time.monotonic()
        clean, text = run(room, args.tool, args.limit)
        dirty += not clean
        sys.stdout.write(f"{room:<22} {'clean' if clean else 'NOT CLEAN'} {time.monotonic() - begin:6.1f} s  {text}\n")
        sys.stdout.flush()
    return min(dirty, 1)


if __name__ == "__main__":
    sys.exit(main())
