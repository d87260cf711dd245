"""The kernel of few single rows without a GPU: csrc/gated_delta/small_decode.cuh beside decode.cuh, whose bits
admission compares with the canonical kernel's. Threads of a block take turns, and the matrix unit has a stand-in whose
sums depend on what the unit's do. Changed ones must be found."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
COMPILER = shutil.which("c++")

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of 16 bits: known of x86-64 alone"),
]


def built(folder: Path, changed: tuple[str, str] | None = None) -> Path:
    """changed   what stands in the kernel once, and what is to stand there"""
    (folder / "gated_delta").mkdir()
    for name in ("decode.cuh", "gates.cuh", "small_decode.cuh"):
        text = (TESTS.parent / "csrc" / "gated_delta" / name).read_text()
        if changed and name == "small_decode.cuh":
            assert text.count(changed[0]) == 1, changed[0]
            text = text.replace(*changed)
        (folder / "gated_delta" / name).write_text(text)
    command = [COMPILER, "-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    # what is read only where it was written
    command += ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]
    command += [f"-DSTEP_ALONE={int(changed is not None)}"]
    source = TESTS / "emulated" / "single_rows.cpp"
    done = subprocess.run(
        [*command, f"-I{source.parent}", f"-I{folder}", str(source), "-o", str(folder / "single_rows")],
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    return folder / "single_rows"


def run(program: Path, *how: str) -> subprocess.CompletedProcess:
    return subprocess.run([program, *how], capture_output=True, text=True, timeout=240)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("single_rows"))


@pytest.mark.parametrize("kind", ["plain", "cancelling", "special"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("part", ["decode", "step"])
def test_few_rows_have_the_bits_of_any_number(program, part, dtype, kind):
    """Also where what is read before the kernel before has ended is any number: no address leaves the tensors then."""
    done = run(program, part, dtype, kind)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stdout + done.stderr


SLOTS = "unsigned(raw.slot) < unsigned(args.slot_count)"
WRONG = {
    "state's dims descending": (
        "for (int n = 0; n < DK / 8; ++n) {\n      const float a[4]",
        "for (int n = DK / 8 - 1; n >= 0; --n) {\n      const float a[4]",
    ),
    "own block's rows descending": (
        "for (int j = 0; j < 15; ++j)\n      if (j < (i & 15)) sum",
        "for (int j = 14; j >= 0; --j)\n      if (j < (i & 15)) sum",
    ),
    "a factor is cut off": ("rounded_operand(two.x), rounded_operand(two.y)", "two.x, two.y"),
    "a state is read that is not there": ("raw.length <= kChunk;\n  of.there", "raw.length < kChunk;\n  of.there"),
    "the ring's oldest input is another's": ("at >= 0) in[w][m]", "at >= 1) in[w][m]"),
    "rows of sequences of two": ("raw.behind - raw.t == 1", "raw.behind - raw.t >= 1"),
    "a chunk goes on": ("i != kChunk - 1;", "i != kChunk;"),
    "no barrier before factors": ("  wait_at(1, kThreads);\n", ""),
    "any slot below": (SLOTS, "raw.slot < args.slot_count"),
    "hints are believed": ("    if (known(raw)) {", "    if (raw.length >= 1) {"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_found(wrong, tmp_path):
    program = built(tmp_path, WRONG[wrong])
    done = (run(program, "step", "bf16", kind) for kind in ("cancelling", "special"))
    first = next((one for one in done if one.returncode), None)
    assert first and first.returncode in (1, 4, 5), first
