"""The kernel of few single rows without a GPU: csrc/gated_delta/small_decode.cuh beside decode.cuh, whose bits
admission compares with the canonical kernel's. Threads of a block take turns, and the matrix unit has a stand-in whose
sums depend on what the unit's do. Changed ones must be found."""

from pathlib import Path

import on_host
import pytest

pytestmark = on_host.marks


def built(folder: Path, changed: tuple[str, str] | None = None) -> Path:
    """changed   what stands in the kernel once, and what is to stand there"""
    flags = ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option"]  # what is read only where it was written
    flags.append(f"-DSTEP_ALONE={int(changed is not None)}")
    headers, kernel = ("decode.cuh", "gates.cuh", "small_decode.cuh"), "small_decode.cuh"
    return on_host.built(folder, "single_rows", "gated_delta", headers, flags, changed and (kernel, *changed))


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("single_rows"))


@pytest.mark.parametrize("kind", ["plain", "cancelling", "special"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("part", ["decode", "step"])
def test_few_rows_have_the_bits_of_any_number(program, part, dtype, kind):
    """Also where what is read before the kernel before has ended is any number: no address leaves the tensors then."""
    done = on_host.run(program, part, dtype, kind)
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
    done = (on_host.run(program, "step", "bf16", kind) for kind in ("cancelling", "special"))
    first = next((one for one in done if one.returncode), None)
    assert first and first.returncode in (1, 4, 5), first
