"""Kernels' own source, one header of it changed or not, as a program of the host: what tests/emulated is for."""

import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COMPILER = shutil.which("c++")
_FLAGS = "-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Werror", "-Wno-unknown-pragmas"

marks = [
    pytest.mark.process,
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(
        platform.machine() != "x86_64", reason="of 16 bytes at once, and numbers of 16 bits: x86-64 alone"
    ),
]


def built(
    folder: Path, program: str, room: str, headers: Sequence[str], flags: Sequence[str] = (),
    changed: tuple[str, str, str] | None = None,
) -> Path:  # fmt: skip
    """tests/emulated's program, of some headers of a room of csrc.

    changed   a header, what stands in it once, and what is to stand there
    """
    (folder / room).mkdir()
    for name in headers:
        text = (TESTS.parent / "csrc" / room / name).read_text()
        if changed and changed[0] == name:
            assert text.count(changed[1]) == 1, f"{name}: {changed[1]}"
            text = text.replace(*changed[1:])
        (folder / room / name).write_text(text)
    source = TESTS / "emulated" / f"{program}.cpp"
    includes = f"-I{source.parent}", f"-I{folder}"
    command = [COMPILER, *_FLAGS, *flags, *includes, str(source), "-o", str(folder / program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return folder / program


def run(program: Path, *given: object) -> subprocess.CompletedProcess:
    return subprocess.run([program, *map(str, given)], capture_output=True, text=True, timeout=240)
