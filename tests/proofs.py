"""A pytest plugin: proofs are remembered as verdicts on kernels are.

What the CPU tests of a file in tests/ops or tests/patch depend on is digested: the file, what it imports of the tests,
the rooms that it names and those that they are composed of, all of _core, the native sources behind them, versions, the
CPU's instruction set and the settings. Where all of them have passed under just that key, they are skipped, and say so.
Tests for a GPU are never; nor is anything where CI is set, or with --anew. A key that has passed is kept in the user's
cache directory; a run of chosen tests (-k, -m, a test's name) keeps none.
"""

import ast
import datetime
import functools
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = "ops", "patch"
INTERPRETED = "test_triton_interpreted.py"  # whose items run files of tests/ops
ALWAYS = "_core", "testing"  # parts of vexact_ops that every test goes through
VERSIONS = "torch", "triton", "numpy", "hypothesis", "pytest", "transformers", "peft"
# They name rooms and the engine, and use none.
PLUGINS = "conftest", "forks", "interpreter", "on_gpu", "processes", "proofs"
PROVEN = "proven before: "


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--anew", action="store_true", help="run what has passed with the same sources and versions too")


# --- what a file's tests depend on ----------------------------------------------------------------------------------


class Sources:
    """A checkout's files, by what they import, in functions too."""

    def __init__(self, root: Path = ROOT):
        self.root = root
        self._names: dict[Path, tuple[set[str], set[str], bool]] = {}

    @functools.cached_property
    def _where(self) -> dict[str, str]:
        return dict(self._public())

    def _public(self) -> Iterator[tuple[str, str]]:
        """Public names of vexact_ops, and the parts that they come from."""
        tree = ast.parse((self.root / "vexact_ops" / "__init__.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values):
                    yield ast.literal_eval(key), ast.literal_eval(value).split(".")[0]

    @functools.cached_property
    def parts(self) -> set[str]:
        return {path.name for path in (self.root / "vexact_ops").iterdir() if path.is_dir() and path.name[:2] != "__"}

    def names(self, path: Path) -> tuple[set[str], set[str], bool]:
        if path not in self._names:
            self._names[path] = self._names_in(path)
        return self._names[path]

    def _names_in(self, path: Path) -> tuple[set[str], set[str], bool]:
        """(other modules of the tests, parts of vexact_ops, whether the engine) that a file imports or names."""
        modules, parts, engine = set(), set(), False
        package = path.relative_to(self.root).parts[:-1]
        of_tests = package[0] == "tests"  # that name rooms in texts too
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1]
                found = [".".join((*base, *(node.module or "").split("."))).strip(".")]
                found += [f"{found[0]}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vx":
                found = [f"vexact_ops.{self._where.get(node.attr, node.attr)}"]
            elif of_tests and isinstance(node, ast.Constant) and isinstance(node.value, str):
                # room_backends("linear"), monkeypatch.setattr("vexact_ops.linear.cpu. ...")
                found = [f"vexact_ops.{node.value}"] if node.value in self.parts else []
                found += re.findall(r"vexact_ops\.\w+|vexact_engine", node.value)
            else:
                continue
            for name in found:
                first, _, rest = name.partition(".")
                part = rest.split(".")[0]
                if first == "vexact_ops":
                    parts |= {self._where.get(part, part)} & self.parts
                elif first == "vexact_engine":
                    engine = True
                else:
                    modules.add(first)
        return modules, parts, engine

    def closure(self, path: Path) -> list[Path]:
        """All files of Python that the tests of a file may run."""
        found, todo, parts, engine = set(), [path, self.root / "tests" / "conftest.py"], set(ALWAYS), False
        while todo:
            one = todo.pop()
            if one in found or not one.exists():
                continue
            found.add(one)
            modules, named, uses_engine = self.names(one)
            if one.stem not in PLUGINS:
                parts |= named
                engine |= uses_engine
            todo += [folder / f"{name}.py" for name in modules for folder in (path.parent, self.root / "tests")]
        if engine:
            parts |= self.parts
            found |= set((self.root / "vexact_engine").rglob("*.py"))
        done = set()
        while parts - done:
            part = min(parts - done)
            done.add(part)
            files = set((self.root / "vexact_ops" / part).rglob("*.py"))
            found |= files
            if part not in ALWAYS:  # these ask for rooms by a name that they are given
                parts |= {name for file in files for name in self.names(file)[1]}
        return sorted(found | {self.root / "vexact_ops" / "__init__.py", self.root / "pyproject.toml"})

    def key(self, path: Path, *more: Path, **facts: object) -> str:
        """A digest of these files, and of the native sources behind the rooms among them, of versions and settings."""
        digest = hashlib.sha256()
        files = sorted({*self.closure(path), *more})
        for file in files:
            content = file.read_bytes()
            digest.update(f"{file.relative_to(self.root).as_posix()} {len(content)}\n".encode() + content)
        paths = (file.relative_to(self.root).parts for file in files)
        rooms = {parts[1] for parts in paths if parts[0] == "vexact_ops"}
        digest.update(json.dumps([_machine(), _native(rooms), facts], sort_keys=True).encode())
        return digest.hexdigest()[:32]


def _native(rooms: Iterable[str]) -> dict[str, str | None]:
    from vexact_ops._core.digest import of_extension

    return {room: of_extension(room, "cpu") for room in sorted(rooms)}


@functools.cache
def _machine() -> list:
    from vexact_ops._core import native

    def version_of(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    settings = {name: value for name, value in os.environ.items() if re.match("VEXACT_|OMP_|TRITON_", name)}
    settings.pop("VEXACT_CACHE", None)
    isa = None if native.unavailable() else native.cpu_isa()
    versions = {name: version_of(name) for name in VERSIONS}
    return [platform.machine(), platform.system(), sys.version, isa, versions, sorted(settings.items())]


# --- the plugin -----------------------------------------------------------------------------------------------------


class Proofs:
    """Skips what has passed, and keeps what passes."""

    def __init__(
        self, config: pytest.Config, folder: Path | None, store: Callable[[Path, str], object], root: Path = ROOT
    ):
        self.config, self.sources, self._store = config, Sources(root), store
        self.folder = folder if (root / "vexact_ops").is_dir() else None  # an installed package's sources are elsewhere
        self._keys: dict[str, str | None] = {}
        self._expected: set[str] = set()
        self._outcomes: dict[str, set[str]] = {}

    @property
    def reads(self) -> bool:
        return self.folder is not None and not (self.config.getoption("anew") or os.environ.get("CI"))

    @property
    def writes(self) -> bool:
        option = self.config.option
        chosen = option.keyword or option.markexpr not in ("", "not process") or option.deselect
        chosen = chosen or getattr(option, "lf", False)
        names = any("::" in str(arg) for arg in self.config.invocation_params.args)
        return self.folder is not None and not (chosen or names or hasattr(self.config, "workerinput"))

    def unit(self, nodeid: str) -> str | None:
        """What is remembered as one: a file; of the interpreted ones an item."""
        path = Path(nodeid.partition("::")[0])
        if path.name == INTERPRETED:
            return nodeid if "[" in nodeid else None
        return path.as_posix() if path.parts[-3:-1] in {("tests", folder) for folder in FOLDERS} else None

    def key(self, unit: str) -> str | None:
        if unit not in self._keys:
            self._keys[unit] = self._key(unit)
        return self._keys[unit]

    def _key(self, unit: str) -> str | None:
        path, _, item = unit.partition("::")
        path, facts = self.sources.root / path, {"profile": self.config.getoption("hypothesis_profile", None)}
        if not item:
            return self.sources.key(path, **facts) if path.exists() else None
        import test_triton_interpreted as interpreted

        paths = [interpreted.TESTS / name for name in interpreted.FILES.get(item.partition("[")[2].rstrip("]"), ())]
        more = path, interpreted.TESTS / "interpreter.py"
        keys = [self.sources.key(one, *more, **facts) for one in paths]
        return hashlib.sha256("".join(keys).encode()).hexdigest()[:32] if keys else None

    def passed(self, unit: str) -> dict | None:
        """What is known of a run under this key."""
        try:
            return json.loads((self.folder / f"{self.key(unit)}.json").read_text())
        except (OSError, ValueError):
            return None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if not self.reads:
            return
        known: dict[str, dict | None] = {}
        for item in items:
            unit = self.unit(item.nodeid)
            if unit is None or item.get_closest_marker("cuda"):
                continue
            if unit not in known:
                known[unit] = self.passed(unit)
            if known[unit]:
                reason = f"{PROVEN}with the same sources, tests and versions, {known[unit]['date']} (--anew runs it)"
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_collection_finish(self, session):
        self._expected |= {item.nodeid for item in session.items}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self._expected |= set(ids)

    def pytest_runtest_logreport(self, report):
        outcome = report.outcome
        if outcome == "skipped" and PROVEN in str(report.longrepr):
            outcome = "proven"
        self._outcomes.setdefault(report.nodeid, set()).add(f"{report.when} {outcome}")

    def pytest_sessionfinish(self, session):
        if not self.writes:
            return
        units: dict[str, list[str]] = {}
        for nodeid in self._expected:
            if unit := self.unit(nodeid):
                units.setdefault(unit, []).append(nodeid)
        for unit, nodeids in units.items():
            if self._all_passed(unit, nodeids):
                self._keep(unit, len(nodeids))

    def _all_passed(self, unit: str, nodeids: list[str]) -> bool:
        path = self.sources.root / unit.partition("::")[0]
        if self.config.option.markexpr and (processes.is_whole(path) or processes.tests_of(path)):
            return False  # some of it was left out
        found = [self._outcomes.get(nodeid, set()) for nodeid in nodeids]
        fine = all("teardown passed" in one and not any("failed" in o or "proven" in o for o in one) for one in found)
        return fine and any("call passed" in one for one in found)

    def _keep(self, unit: str, tests: int) -> None:
        content = {"unit": unit, "tests": tests, "date": datetime.date.today().isoformat()}
        self._store(self.folder / f"{self.key(unit)}.json", json.dumps(content))

    def pytest_terminal_summary(self, terminalreporter):
        skipped = [r for r in terminalreporter.stats.get("skipped", ()) if PROVEN in str(r.longrepr)]
        if skipped:
            files = {self.unit(r.nodeid) for r in skipped}
            terminalreporter.write_line(
                f"{len(skipped)} tests of {len(files)} files were proven before, with the same sources, tests and "
                "versions (--anew runs them)"
            )
