"""What has passed is skipped for just as long as nothing that it depends on has changed, and says so."""

import shutil
import subprocess
import sys
from pathlib import Path

import proofs
import pytest

TESTS = Path(__file__).parent


@pytest.fixture
def checkout(tmp_path):
    """A copy of what tests of rooms depend on."""
    for name in ("vexact_ops", "tests"):
        shutil.copytree(TESTS.parent / name, tmp_path / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    return tmp_path


def changing(root, *files, test="ops/test_linear_silu_mul.py"):
    """Changes one file after another, and says of each whether a test file's key is another one from then on."""
    before = proofs.Sources(root).key(root / "tests" / test)
    for changed in files:
        path = root / changed
        path.write_text(path.read_text() + "\n# changed\n")
        after = proofs.Sources(root).key(root / "tests" / test)
        yield changed, after != before
        before = after


def test_what_it_depends_on_changes_the_key(checkout):
    files = (
        "tests/ops/test_linear_silu_mul.py",
        "tests/conftest.py",
        "vexact_ops/linear_silu_mul/op.py",
        "vexact_ops/linear_silu_mul/cpu.py",  # the room's backend, which nothing imports by its name
        "vexact_ops/linear/op.py",  # what it is composed of
        "vexact_ops/_core/operator.py",
        "vexact_ops/testing/properties.py",
        "pyproject.toml",
    )
    for changed, is_another in changing(checkout, *files):
        assert is_another, changed


def test_what_it_does_not_depend_on_leaves_it(checkout):
    files = "vexact_ops/moe_route/op.py", "tests/ops/test_mean.py", "tests/attack.py"
    for changed, is_another in changing(checkout, *files):
        assert not is_another, changed


def test_patches_depend_on_every_room_and_where_they_are_asked_the_engine():
    sources, root = proofs.Sources(), proofs.ROOT
    for path in sorted((root / "tests" / "patch").glob("test_*.py")):
        found, text = sources.closure(path), path.read_text()
        if "vx.patch" in text:
            assert {root / "vexact_ops" / room / "op.py" for room in ("linear", "attention", "rope")} <= set(found), (
                path
            )
        if "import vexact_engine" in text or "from vexact_engine" in text:
            assert root / "vexact_engine" / "engine.py" in found, path


def test_versions_builds_and_settings_count(monkeypatch):
    path, sources = proofs.ROOT / "tests" / "ops" / "test_mean.py", proofs.Sources()

    def key():
        proofs._machine.cache_clear()
        return sources.key(path)

    first = key()
    assert key() == first
    with monkeypatch.context() as patch:
        patch.setenv("VEXACT_EXAMPLES", "3")
        assert key() != first
    with monkeypatch.context() as patch:
        patch.setattr(proofs, "version", lambda name: "another")
        assert key() != first
    with monkeypatch.context() as patch:
        patch.setattr(proofs, "_native", lambda rooms: "another build")
        assert key() != first
    assert key() == first


def test_tests_of_an_installed_package_are_no_proofs(pytestconfig, tmp_path):
    """As .ci/package has them: no sources are beside them."""
    found = proofs.Proofs(pytestconfig, tmp_path, Path.write_text, tmp_path)
    assert not found.reads and not found.writes


TOY = """
import pytest

def test_one():
    assert {ok}

def test_two():
    pass

@pytest.mark.cuda
def test_of_a_gpu():
    pass
"""
CONFTEST = """
from pathlib import Path
import proofs

pytest_addoption = proofs.pytest_addoption
proofs.Sources.key = lambda self, path, *more, **facts: str(hash(path.read_text())) + str(path.stem)

def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: ...")
    config.pluginmanager.register(proofs.Proofs(config, Path({folder!r}), Path.write_text, Path({root!r})))
"""


@pytest.mark.process
def test_a_file_that_has_passed_is_skipped_until_it_changes(tmp_path):
    file = tmp_path / "tests" / "ops" / "test_toy.py"
    file.parent.mkdir(parents=True)
    for folder in ("vexact_ops", "kept"):
        (tmp_path / folder).mkdir()
    (tmp_path / "vexact_ops" / "__init__.py").write_text("")
    (tmp_path / "conftest.py").write_text(CONFTEST.format(folder=str(tmp_path / "kept"), root=str(tmp_path)))

    def run(*options, ok=True, **env):
        file.write_text(TOY.format(ok=ok))
        command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", str(tmp_path), "-rs", *options]
        env = {"PYTHONPATH": str(TESTS), "PATH": "", "HOME": str(tmp_path), "PYTHONHASHSEED": "0", **env}
        done = subprocess.run([*command, "tests/ops"], cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.stdout

    assert "1 failed, 2 passed" in run(ok=False) and "1 failed" in run(ok=False), "what failed is not remembered"
    assert "1 passed" in run("-k", "two") and "3 passed" in run("-n", "2"), "nor what ran in part"
    found = run()
    assert "1 passed, 2 skipped" in found and "proven before: with the same sources" in found
    assert "2 tests of 1 files were proven before" in found
    assert "1 passed, 2 skipped" in run("-n", "2")
    assert "3 passed" in run("--anew") and "3 passed" in run(CI="1"), "all of it runs where that is asked for"
    assert "1 failed" in run(ok=False), "another key"
