"""Packed lines between ranks without a GPU: kernels of csrc/common/packed_kernels.cuh, by processes that share memory,
a thread of the host for each of a block. Changed ones must be found."""

from pathlib import Path

import on_host
import pytest

pytestmark = on_host.marks


def built(folder: Path, changed: tuple[str, str, str] | None = None) -> Path:
    return on_host.built(folder, "packed", "common", ("packed.cuh", "packed_kernels.cuh"), ["-pthread"], changed)


def run(program: Path, ranks: int, times: int, limit: int = 60_000, present: int = 0):
    return on_host.run(program, ranks, times, limit, present or ranks)


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    return built(tmp_path_factory.mktemp("packed"))


@pytest.mark.parametrize(("ranks", "times"), [(2, 530), (3, 60)])
def test_columns_of_every_rank_come_as_they_were(program, ranks, times):
    """530 times: a flag counts to 256 in each of two turns."""
    done = run(program, ranks, times)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stdout + done.stderr


def test_a_rank_that_does_not_come_is_named(program):
    done = run(program, 2, 1, limit=300, present=1)
    assert done.returncode == 3 and set(done.stdout.split("\n")) == {"missing: 1", ""}


@pytest.mark.parametrize(
    "changed",
    [
        ("packed.cuh", "(time + 1) / 2 & 255u", "(time + 1) / 2 & 0u"),
        ("packed.cuh", "(word >> i % 4 * 8) << 24", "(word >> i % 3 * 8) << 24"),
        ("packed_kernels.cuh", "const int turn = ++time & 1;", "const int turn = ++time & 0;"),
        ("packed_kernels.cuh", "if (threadIdx.x == 0) *p.times_of_row(row) = time;", ""),
        ("packed_kernels.cuh", "found = whole(found, bytes, unit % kPackedUnits);", ""),
    ],
    ids=["no flags", "other bytes", "one turn", "time stands still", "flags for bytes"],
)
def test_what_is_wrong_is_found(changed, tmp_path):
    assert run(built(tmp_path, changed), 2, 40, limit=2000).returncode in (1, 3)
