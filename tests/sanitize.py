"""compute-sanitizer over small cases of the suite: `python tests/sanitize.py [--jobs 24] [--tool memcheck] [ROOM ...]`.

The tests of a room run in one to four processes in which each tensor has an allocation of its own, so that an access
beyond it is found; --jobs of these at a time, and a line as each comes to its end; where one is not clean, its errors
follow: each once, with how often it came. The exit status is that of the worst. A GPU and the CUDA toolkit are needed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROGRAM = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
# What of a room's GPU tests: few, small, and each kernel at least once; each selection runs in a process of its own.
# CUDA graphs need the caching allocator.
CASES = {
    "causal_conv": ("bf16 and (stand_alone or any_split or come_first or gradients) or no_slot",),
    "gated_delta": (
        "bf16 and (stand_alone or any_split or come_first or gradients_of) or a_slot_is or no_slot or without_rows"
        " or kernel_of_few",
    ),
    "attention": (
        "bf16 and (every_path or queries_stand or gradients_of_a_sequence)",
        "decode_of_few and (140-300 or 80-900) and heads8 or prompt_in_chunks and 16 or latent_gradients",
        "latent_keys and 16-torch and (None-None or 256-70)",
        "few_queries_of_any and bf16",
    ),
    "fused_moe": (
        "bf16 and (stand_alone or empty_slots)",
        "the_cuda_kernels and bf16 and (6-130 or 8-768 or 11-8) or rows_go_where",
    ),
    "grouped_linear": (
        "bf16 and (expert_stand_alone or rows_behind) or no_rows",
        "our_kernels_have and (5-272 or 33-144) or gated_product or rows_are_gathered or of_any_values",
        "few_rows and (bf16 or any_value or behind_the_last)",
    ),
    "kv_cache": ("slot",),
    "layer_norm": ("stand_alone and bf16",),
    "linear": (
        "bf16 and (rows_stand_alone or strides)",
        "every_admitted and bf16 and 64",
        "every_admitted and bf16 and (8-plain or 256-plain)",
        "every_tile and bf16",
    ),
    "linear_cross_entropy": (
        "not fp16 and not fp32 and (ignored_tokens and mean or not_ignored or chunks and some or probability)",
        "canonical_bytes and (300 or 70000-64 or 129-2500-64)",
        "however_many and cuda-cuda",
    ),
    "linear_sample": ("bf16 and (stand_alone or minus_one or ties) or canonical_bytes and 64",),
    "linear_silu_mul": ("every_kernel and bf16", "stand_alone and bf16"),
    "log_softmax": ("stand_alone and bf16",),
    "mean": ("stand_alone and bf16",),
    "moe_route": ("ties or routed_alone or no_number",),
    "rmsnorm": ("stand_alone and bf16",),
    "rope": ("stand_alone and bf16",),
    "sampler": ("stand_alone or ties or minus_one or programs",),
    "silu_mul": ("stand_alone and bf16",),
}


def files(room: str) -> list[Path]:
    """Where a room's tests are."""
    names = room, f"{room}_gpu", f"{room}_singles", f"{room}_step"
    return [path for name in names if (path := ROOT / "tests" / "ops" / f"test_{name}.py").exists()]


# What the sanitizer says: a report begins behind one space, its further lines are indented; test's dots may precede.
SAID = re.compile(r"={9}( *)(.*)")
# Lines of a report that do not tell one error from another, and the frames of its backtrace.
ASIDE = re.compile(r"by thread|Saved host backtrace|Host Frame:|Device Frame:")
FRAME = re.compile(r"Host Frame: *(?P<name>[^\s\[].*?)(?: \[0x[0-9a-f]+\])? in (?P<file>\S+|<.+>:\d+)$")
# No error: cuda-bindings, which kernels in CuTe load, knows more driver functions than an older driver has and asks for
# each by its name, once a process. No memory, kernel or launch has part in it.
LOOK_UP = re.compile(
    r"Program hit CUDA_ERROR_(NOT_FOUND|INVALID_VALUE) .* on CUDA API call to cuGetProcAddress(_v2)?\."
)
BINDINGS = re.compile(r"Host Frame:.* in (cy)?driver\.cpython-\S+\.so")


def is_look_up(report: list[str]) -> bool:
    """Whether a report is of such a question, by those who may ask it."""
    frames = [line for line in report if line.startswith("Host Frame:") and not line.endswith(" in libcuda.so.1")]
    return LOOK_UP.fullmatch(report[0]) is not None and bool(frames) and BINDINGS.fullmatch(frames[0]) is not None


def callers(frames: list[str]) -> str:
    """Of a backtrace on the host, innermost first: the first function with a name, two lines of Python, the test's."""
    found = [match for frame in frames if (match := FRAME.match(frame))]
    of_python = [match for match in found if re.search(r"(\.py|>):\d+$", match["file"])]
    tests = [match for match in of_python if match["name"].startswith("test_")]
    chosen = [*found[:1], *of_python[:2], *tests[:1]]
    return " < ".join(dict.fromkeys(f"{match['name']} ({match['file']})" for match in chosen))


def reports_in(said: str) -> list[list[str]]:
    """The sanitizer's reports: the lines of each."""
    reports: list[list[str]] = []
    inside = False
    for line in said.splitlines():
        match = SAID.search(line)
        indent, text = (len(match[1]), match[2].strip()) if match else (0, "")
        if indent == 1 and text and "SUMMARY: " not in text and text != "COMPUTE-SANITIZER":
            reports.append([text])
            inside = True
        elif indent > 1 and text and inside:
            reports[-1].append(text)
        elif match:
            inside = False
    return reports


def count_in(said: str) -> int | None:
    """How many errors the sanitizer says that there were, shown or not; None where it came to no end."""
    found = re.findall(
        r"(?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed.*)\s*$", said, re.M
    )
    return sum(int(one or other) for one, other in found) if found else None


def errors_in(reports: list[list[str]]) -> Counter[str]:
    """Reports in one line each and without what differs from thread to thread, and how often."""
    errors: Counter[str] = Counter()
    for kind, *lines in reports:
        caller = callers([line for line in lines if line.startswith("Host Frame:")])
        parts = [kind, *(line for line in lines if not ASIDE.match(line)), *([f"called by {caller}"] if caller else [])]
        text = re.sub(r"\d+ bytes (?=after|before|inside)", "... bytes ", "; ".join(parts))
        errors[re.sub(r"(?<!\+)0x[0-9a-f]+", "0x...", text)] += 1
    return errors


def account(said: str, most: int = 40, tail: int = 3000) -> str:
    """What to say of a process that was not clean: its errors, most frequent first, and how the rest ended."""
    errors = errors_in(reports_in(said)).most_common()
    lines = [f"  {count:5} x {error}" for error, count in errors[:most]]
    lines += [f"  and {len(errors) - most} other kinds of error"] if len(errors) > most else []
    rest = "\n".join(line for line in said.splitlines() if not SAID.search(line) and line.strip())
    return "\n".join([*lines, rest[-tail:]])


def pytest_sessionstart() -> None:
    """This file is a plugin of the processes below: there candidates race in plain launches, as CUDA graphs need the
    caching allocator. Each would fail otherwise, and the tests see none but the canonical kernels."""
    from vexact_ops._core import race

    race.cuda_graph = lambda run, pool: run


def sanitized(arguments: list[str], tool: str, limit: float) -> tuple[int | None, str]:
    """pytest with these arguments under the sanitizer: its exit status (none: it was not done) and all it said."""
    command = [PROGRAM, "--tool", tool, "--error-exitcode", "9", "--print-limit", "1000"]
    command += [sys.executable, "-m", "pytest", "-p", Path(__file__).stem]
    command += ["-n", "0", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short", "-q", "--disable-warnings"]
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "VEXACT_EXAMPLES": "1", "CI": "1"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), env.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as cache:
        env["VEXACT_CACHE"] = cache  # every candidate is verified here, and what was measured here serves nobody
        try:
            done = subprocess.run([*command, *arguments], cwd=ROOT, env=env, capture_output=True, timeout=limit)
            status, said = done.returncode, done.stdout + done.stderr
        except subprocess.TimeoutExpired as late:
            status, said = None, (late.stdout or b"") + (late.stderr or b"")
    return status, said.decode(errors="replace")


def run(room: str, cases: str, tool: str, limit: float) -> tuple[bool, float, str]:
    """Whether some cases of a room are clean, after how many seconds, and what there is to say of them."""
    begin = time.monotonic()
    status, said = sanitized([*map(str, files(room)), "-k", f"cuda and ({cases})"], tool, limit)
    seconds = time.monotonic() - begin
    if status is None:
        return False, seconds, f"not done within {limit:.0f} s\n{account(said)}"
    reports, count, passed = reports_in(said), count_in(said), re.search(r"\d+ passed.*", said)
    of_look_ups = [report for report in reports if is_look_up(report)]
    # 9: the tests passed and there were errors, of which each must have been shown to be judged
    harmless = status == 9 and count == len(reports) == len(of_look_ups) > 0
    clean = passed is not None and ((status == 0 and count == 0) or harmless)
    found = "no word of the sanitizer" if count is None else f"{count} error{'' if count == 1 else 's'}"
    found += f", {len(of_look_ups)} of them look-ups of driver functions" if of_look_ups else ""
    summary = f"{passed[0] if passed else 'no test passed'}; {found}"
    return clean, seconds, summary if clean else f"{summary}\n{account(said)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rooms", nargs="*", metavar="ROOM", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--tool", default="memcheck", choices=["memcheck", "racecheck", "initcheck", "synccheck"])
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs: got {args.jobs}, expected 1 or more")
    if shutil.which(PROGRAM) is None:
        parser.error("there is no compute-sanitizer here; it comes with the CUDA toolkit")
    unknown = set(args.rooms) - set(CASES)
    if unknown:
        parser.error(f"no cases of {', '.join(sorted(unknown))}")
    dirty = 0
    with ThreadPoolExecutor(args.jobs) as pool:
        chosen = {room: CASES[room] for room in args.rooms or CASES}
        names = {
            (room, cases): room + (f" {number} of {len(parts)}" if len(parts) > 1 else "")
            for room, parts in chosen.items()
            for number, cases in enumerate(parts, 1)
        }
        begun = {pool.submit(run, *one, args.tool, args.limit): name for one, name in names.items()}
        for one in as_completed(begun):
            clean, seconds, text = one.result()
            dirty += not clean
            sys.stdout.write(f"{begun[one]:<29} {'clean' if clean else 'NOT CLEAN'} {seconds:6.1f} s  {text}\n")
            sys.stdout.flush()
    return min(dirty, 1)


if __name__ == "__main__":
    sys.exit(main())
