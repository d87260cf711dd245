"""Digests of what fixes bits: our sources, in Python and in the extension, and versions of what lowers them.

The fingerprint (numerics.py) and the keys of verdicts on kernels (admit.py) are made of these. Content counts, comments
included; line endings do not. What a file is composed of is read from its own imports and includes, never from a list
kept by hand. The native sources are digested by the build (`of_csrc`) and stored in the extension, so that an installed
wheel knows what it was made from. A digest is computed on first use and kept for the life of the process: like the
modules themselves, it does not follow files that are edited meanwhile.

The build loads this file on its own: it imports nothing but the standard library, and the rest inside functions.
"""

import ast
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
# Files of _core that do no arithmetic. Whatever else a kernel imports counts, files that are new here included.
_NO_ARITHMETIC = {
    "__init__",
    "admit",
    "backend",
    "check",
    "choices",
    "digest",
    "disk",
    "explain",
    "gpu",
    "graph",
    "native",
    "numerics",
    "operator",
    "race",
    "registry",
    "sequences",
    "tune",
}
_NOT_OPS = {"__init__", "reference", "cpu", "triton", "cuda", "tiles"}
_NOT_OPS |= {"cute", "cute_arithmetic", "cute_backward", "cute_backward_kernel", "cute_forward_kernel", "cute_objects"}
_NOT_OPS |= {"triton_backward", "triton_gates", "triton_prepare"}
_NOT_ROOMS = {"patch", "testing"}  # no op is computed in them


def _hash(files: Iterable[tuple[str, bytes]], facts: Mapping[str, object]) -> str:
    digest = hashlib.sha256()
    for name, content in files:
        content = content.replace(b"\r\n", b"\n")
        digest.update(f"{name} {len(content)}\n".encode() + content)
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()[:16]


@functools.cache
def version(distribution: str) -> str | None:
    """The installed version of a distribution, as pip names it; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def driver() -> str | None:
    """The version of the installed driver, such as "580.65.06"; None where nothing tells."""
    try:
        nvml, version = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.create_string_buffer(96)
        if nvml.nvmlInit_v2() == 0:
            found = nvml.nvmlSystemGetDriverVersion(version, len(version)) == 0
            nvml.nvmlShutdown()
            if found:
                return version.value.decode()
    except (OSError, AttributeError):
        pass
    with contextlib.suppress(OSError):
        found = re.search(r"Kernel Module\D*([\d.]+)", Path("/proc/driver/nvidia/version").read_text())
        return found and found[1]
    return None


@functools.cache
def of_files(*paths: str | Path, **facts) -> str:
    """A digest of the files as they are (and not of what they import), and of further facts such as versions:
    of_files(cute.__file__, quack=version("quack-kernels")). Where the files lie does not count, their names do."""
    return _hash(((Path(path).name, Path(path).read_bytes()) for path in paths), facts)


# --- Python ---------------------------------------------------------------------------------------------------------


@functools.cache
def _imported(path: Path) -> tuple[Path, ...]:
    """The files of ours that a Python file imports, at its top or inside functions, as far as they do arithmetic."""
    package = path.relative_to(PACKAGE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = PACKAGE.joinpath(*package[: len(package) - node.level + 1])
        base = base.joinpath(*node.module.split(".")) if node.module else base
        if base.with_suffix(".py").exists():
            found.add(base.with_suffix(".py"))
        elif base.is_dir():
            found |= {file for alias in node.names if (file := base / f"{alias.name}.py").exists()}

    def counts(file: Path) -> bool:
        folder, *rest = file.relative_to(PACKAGE).parts
        idle = folder == "_core" and (rest[0] == "proof" or file.stem in _NO_ARITHMETIC)
        return folder not in _NOT_ROOMS and not idle

    return tuple(sorted(file for file in found if counts(file)))


def _closure(start: Iterable[Path], backends: Iterable[str]) -> list[Path]:
    """The files and all that they import. A room that is reached through its op.py runs on one of these backends."""
    backends = tuple(backends)
    found, todo = set(), list(start)
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found.add(path)
        todo += _imported(path)
        if path.name == "op.py":
            todo += [file for name in backends if (file := path.parent / f"{name}.py").exists()]
    return sorted(found)


def _of_python(files: Iterable[Path], facts: dict) -> str:
    """Of these files, of the native sources behind those of them that call the extension, and of facts."""
    files = list(files)
    kinds = {(path.parent.name, path.stem) for path in files if path.stem in ("cpu", "cuda")}
    facts = {**facts, "native": {f"{room} {kind}": of_extension(room, kind) for room, kind in sorted(kinds)}}
    return _hash(((path.relative_to(PACKAGE).as_posix(), path.read_bytes()) for path in files), facts)


@functools.cache
def _sources(room: str, backends: tuple[str, ...]) -> str:
    ops = (path for path in (PACKAGE / room).glob("*.py") if path.stem not in _NOT_OPS)  # op.py, and bmm.py beside it
    return _of_python(_closure(ops, backends), {})


def sources(room: str, backends: Iterable[str]) -> str:
    """A digest of everything of ours that fixes the bits of a room on these backends: its ops, their files, the files
    and rooms that those are composed of, and the native sources behind them."""
    return _sources(room, tuple(sorted(backends)))


@functools.cache
def canonical(room: str, backend: str = "triton") -> str:
    """A digest of the canonical kernel alone, for the key of a verdict on candidates: <room>/<backend>.py, what it is
    composed of, the native sources behind it, and the version of what lowers it."""
    facts = {"triton": version("triton")} if backend == "triton" else {}
    return _of_python(_closure([PACKAGE / room / f"{backend}.py"], (backend,)), facts)


# --- the extension --------------------------------------------------------------------------------------------------


@functools.cache
def _stored() -> dict[str, dict[str, str]] | None:
    from . import native

    if native.unavailable():
        return None
    return json.loads(native.ops().source_digests() or "{}")


def of_extension(room: str, kind: str) -> str | None:
    """What the extension was built from for a room: kind "cpu" or "cuda". None where it is missing or has no such
    kernels. An extension that names no digests (built by other means than setup.py) counts by its own bytes."""
    stored = _stored()
    if stored is None:
        return None
    if not stored:
        from . import native

        return native.fingerprint()
    return stored.get(kind, {}).get(room)  # of a build for CPUs alone there is no other kind


@functools.cache
def of_all_extensions() -> str | None:
    """What the extension was built from, all rooms together; None where it is missing."""
    from . import native

    stored = _stored()
    return stored if stored is None else _hash([], stored) if stored else native.fingerprint()


def _included(path: Path, csrc: Path) -> set[Path]:
    names = re.findall(rb'^\s*#\s*include\s*"([^"]+)"', path.read_bytes(), re.MULTILINE)
    tried = ((csrc / name.decode(), path.parent / name.decode()) for name in names)
    return {found.resolve() for both in tried if (found := next((p for p in both if p.exists()), None))}


def of_csrc(csrc: Path, kinds: Mapping[str, tuple[str, object]]) -> dict[str, dict[str, str]]:
    """What the build stores in the extension: {kind: {room: digest}}.

    kinds   {"cpu": (".cpp", facts), "cuda": (".cu", facts)}: the suffix of the sources, and what else decides the bits
            of what is compiled from them, such as flags
    A room's digest is over its sources of the kind, all that they include, and the same of every room of which they
    include something: a header declares what another file of that room defines.
    """
    csrc = csrc.resolve()
    rooms = sorted(path.parent.name for path in csrc.glob("*/kernels.h"))

    def files(room: str, suffix: str) -> set[Path]:
        found, todo = set(), set(csrc.glob(f"{room}/*{suffix}"))
        if todo:
            todo |= set(csrc.glob(f"common/*{suffix}"))
        while todo:
            path = todo.pop()
            found.add(path)
            other = path.parent.name
            more = _included(path, csrc) | (set(csrc.glob(f"{other}/*{suffix}")) if other in rooms else set())
            todo |= more - found
        return found

    stored = {}
    for kind, (suffix, facts) in kinds.items():
        found = {room: sorted(files(room, suffix)) for room in rooms}
        stored[kind] = {
            room: _hash(((path.relative_to(csrc).as_posix(), path.read_bytes()) for path in paths), {"facts": facts})
            for room, paths in found.items()
            if paths
        }
    return stored
