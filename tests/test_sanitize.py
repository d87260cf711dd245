"""What tests/sanitize.py makes of the sanitizer's words."""

import subprocess
from pathlib import Path

import pytest
import sanitize

ACCESS = """
========= Invalid __global__ read of size 2 bytes
=========     at void rows_kernel<(int)2>(const float *, int)+0x1f0 in rows.cuh:41
=========     by thread ({thread},0,0) in block (3,0,0)
=========     Access at 0x7f0000{thread:04x} is out of bounds
=========     and is {thread} bytes after the nearest allocation at 0x7f0000000000 of size 1,024 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame:  [0x31be92] in libcuda.so.1
=========         Host Frame: launch(int) [0x31be] in _native.abi3.so
=========         Host Frame: rows in {file}.py:7
=========         Host Frame: test_of_rows in test_rows.py:{line}
=========         Host Frame: _main in main.py:384
========= """
CALL = """\
========= Program hit CUDA_ERROR_NOT_FOUND (error 500) due to "named symbol not found" on CUDA API call to cuFind.
=========     Saved host backtrace up to driver entry point at error
=========         Host Frame: [0x31be92] in libcuda.so.1
=========         Host Frame: <module> in <frozen runpy>:198
========= """
ASKED = CALL.replace("cuFind", "cuGetProcAddress_v2")
LOOK_UP = ASKED.replace(
    "<module> in", "[0x5] in cydriver.cpython-312-x86_64-linux-gnu.so\n=========         Host Frame: ask in"
)
RACE = """========= Error: Race reported between Write access at joined(float *)+0x20 in joined.cu:9
=========     and Read access at joined(float *)+0x40 in joined.cu:11 [16 hazards]
========="""


def said(*reports, end="2 passed in 1.0s\n========= ERROR SUMMARY: {} errors\n"):
    return "\n".join(["========= COMPUTE-SANITIZER", *reports, ".  [100%]", end.format(len(reports))])


def test_an_error_is_told_once_with_its_place_and_its_test():
    text = said(*(ACCESS.format(thread=thread, file="rows", line=12) for thread in range(1, 6)), "." + CALL, RACE)
    access, call, race = sanitize.errors_in(sanitize.reports_in(text)).most_common()
    assert access[1] == 5 and access[0].split("; ") == [
        "Invalid __global__ read of size 2 bytes",
        "at void rows_kernel<(int)2>(const float *, int)+0x1f0 in rows.cuh:41",
        "Access at 0x... is out of bounds",
        "and is ... bytes after the nearest allocation at 0x... of size 1,024 bytes",
        "called by launch(int) (_native.abi3.so) < rows (rows.py:7) < test_of_rows (test_rows.py:12)",
    ]
    assert call[1] == 1 and call[0].startswith("Program hit CUDA_ERROR_NOT_FOUND") and "call to cuFind" in call[0]
    assert race == (
        "Error: Race reported between Write access at joined(float *)+0x20 in joined.cu:9; "
        "and Read access at joined(float *)+0x40 in joined.cu:11 [16 hazards]",
        1,
    )


def test_errors_of_two_lines_are_two():
    text = said(ACCESS.format(thread=1, file="rows", line=12), ACCESS.format(thread=1, file="rows", line=13))
    assert sorted(sanitize.errors_in(sanitize.reports_in(text)).values()) == [1, 1]


def test_errors_come_first_and_the_rest_is_cut():
    lines = sanitize.account("warned\n" * 9000 + said(CALL, CALL), tail=200).splitlines()
    assert lines[0].startswith("      2 x Program hit CUDA_ERROR_NOT_FOUND")
    assert lines[-1].startswith("2 passed") and sum(map(len, lines[1:])) < 200
    many = [ACCESS.format(thread=1, file="rows", line=line) for line in range(60)]
    assert "  and 20 other kinds of error" in sanitize.account(said(*many)).splitlines()


@pytest.mark.parametrize(
    "status,text,clean",
    [
        (0, said(), True),
        (9, said(), False),
        (9, said(CALL), False),
        (9, said(LOOK_UP, LOOK_UP), True),
        (0, said(LOOK_UP), False),
        (1, said(LOOK_UP), False),
        (9, said(LOOK_UP, CALL), False),
        (9, said(ASKED), False),
        (9, said(LOOK_UP, ACCESS.format(thread=1, file="rows", line=1)), False),
        (9, said(LOOK_UP, end="1 passed\n========= ERROR SUMMARY: 2 errors"), False),
        (9, said(LOOK_UP.replace("NOT_FOUND (error 500)", "OUT_OF_MEMORY (error 2)")), False),
        (0, said(end="1 passed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"), True),
        (9, said(RACE, end="1 passed\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)"), False),
        (0, "2 passed in 1.0s", False),
        (5, said(end="no tests ran\n========= ERROR SUMMARY: {} errors"), False),
        (1, said(end="1 failed, 2 passed in 1.0s\n========= ERROR SUMMARY: {} errors"), False),
    ],
)
def test_only_what_ran_without_an_error_is_clean(monkeypatch, status, text, clean):
    asked = []

    def ran(command, **options):
        asked.append(command)
        return subprocess.CompletedProcess(command, status, text.encode(), b"")

    monkeypatch.setattr(subprocess, "run", ran)
    assert sanitize.run("rope", "slow", "memcheck", 1.0)[0] == clean
    assert "cuda and (slow)" in asked[0]


def test_what_was_not_done_tells_its_errors(monkeypatch):
    def ran(command, **options):
        raise subprocess.TimeoutExpired(command, 1.0, said(CALL).encode())

    monkeypatch.setattr(subprocess, "run", ran)
    clean, _, text = sanitize.run("rope", "slow", "memcheck", 1.0)
    assert not clean and text.startswith("not done within 1 s\n      1 x Program hit CUDA_ERROR_NOT_FOUND")


def test_candidates_race_without_graphs_in_the_sanitizers_processes(monkeypatch):
    from vexact_ops._core import race

    monkeypatch.setattr(race, "cuda_graph", race.cuda_graph)
    calls = []
    sanitize.pytest_sessionstart()
    race._captured([lambda: calls.append(0), lambda: calls.append(1)], pool=(0, 0))()
    assert calls == [0, 0, 1]


def test_the_plugin_is_found_and_no_cache_is_shared(monkeypatch, tmp_path):
    """A process as the sanitizer's are, with echo in its place."""
    program = tmp_path / "sanitizer"
    program.write_text('#!/bin/sh\nwhile [ "$1" != -m ]; do shift; done\necho $VEXACT_CACHE\nexec python "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sanitize, "PROGRAM", str(program))
    status, said = sanitize.sanitized(
        ["--collect-only", str(sanitize.ROOT / "tests" / "test_digest.py")], "memcheck", 120
    )
    assert status == 0 and "test_digest.py" in said, said
    cache = Path(said.splitlines()[0])
    assert cache.is_absolute() and not cache.exists()
