"""The record of a run: a line of JSON for each thing that was seen, written as soon as it was; and another run held
against it."""

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .options import Options


class RunDiffers(RuntimeError):
    """A run has other bits than the record that it was held against. The message names the first that does."""


@dataclass
class Read:
    """What a record says. steps: (side, step) -> its figures; parameters: (side, step) -> digests of parameters after
    it, of step 0 before the first; ends: side -> SHA-256 of all parameters."""

    options: dict[str, Any]
    steps: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    parameters: dict[tuple[str, int], dict[str, str]] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)


def read(path: str | Path) -> Read:
    """A record, packed where its name ends in .gz, whose last line may be cut off, as by a kill.

    raises   OSError; ValueError names the line that is none of a record
    """
    found = None
    whole = Path(path).read_bytes()
    lines = (gzip.decompress(whole) if str(path).endswith(".gz") else whole).decode().split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            entry = json.loads(line)
            if found is None:
                found = Read(entry["options"])
            elif entry["kind"] == "step":
                found.steps[entry["side"], entry["step"]] = entry
            elif entry["kind"] == "parameters":
                found.parameters[entry["side"], entry["step"]] = entry["digests"]
            elif entry["kind"] == "end":
                found.ends[entry["side"]] = entry["sha256"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines) and found is not None:
                break  # a whole line ends in a newline
            raise ValueError(f"{path}: line {number} is none of a record of `vexact recipe`: {error!r}") from error
    if found is None:
        raise ValueError(f"{path}: is empty, expected a record of `vexact recipe`")
    return found


class Recorder:
    """Writes a record as a run's Report; each line is in the file when the call returns.

    head      the first line
    resumed   side -> the last step that is kept of a record that stands at `path`: what is after it is cut off, since
              the run goes on from there; other sides stay. None: there may be no file, or it is written over
    """

    def __init__(self, path: str | Path, head: dict[str, Any], resumed: dict[str, int] | None = None):
        kept = [head] if resumed is None or not Path(path).exists() else [*_until(path, resumed)]
        text = "".join(map(_line, kept))
        self._path = Path(path)
        if resumed is None:
            self._path.write_text(text, encoding="utf-8")
        else:  # a full disk or a kill leaves what is there
            part = self._path.with_name(f"{self._path.name}.part")
            part.write_text(text, encoding="utf-8")
            os.replace(part, self._path)

    def __call__(self, kind: str, *values: Any) -> None:
        if kind == "step":
            side, step = values
            self._write(_line({"kind": kind, "side": side, **step}))
        elif kind == "start":
            side, step, seconds = values
            self._write(_line({"kind": kind, "side": side, "step": step, "seconds": seconds}))
        elif kind == "parameters":
            side, step, digests = values
            self._write(_line({"kind": kind, "side": side, "step": step, "digests": digests}))
        elif kind == "end":
            side, digest = values
            self._write(_line({"kind": kind, "side": side, "sha256": digest}))

    def _write(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n"


def _until(path: str | Path, steps: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Lines of a record up to these steps of these sides, and of all others."""
    read(path)  # a file that is something else stays as it is
    for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]:
        entry = json.loads(line)
        last = steps.get(entry.get("side"))
        if last is None or ("step" in entry and entry["step"] <= last):
            yield entry


class Against:
    """A run's Report that holds it against a record: RunDiffers at the first thing that has other bits.

    Steps that the record has not are passed, and so is the end where it has another last step. `compared` counts what
    was equal.
    raises   ValueError where an option that changes bits is another one in the record
    """

    def __init__(self, path: str | Path, options: Options):
        self._path, self._read, self.compared = path, read(path), 0
        self._last: dict[str, int] = {}  # side -> the step that it is through with
        options.check_same(self._read.options, f"{path}, which this run is held against,")

    def __call__(self, kind: str, *values: Any) -> None:
        if kind == "step":
            side, step = values
            expected = self._read.steps.get((side, step["step"]))
            for name in ("answers", "tokens", "reward", "entropy", "grad_norm"):
                self._check(f"{side}, step {step['step']}: {name}", step[name], expected and expected[name])
        elif kind == "parameters":
            side, step, digests = values
            self._last[side] = step
            expected = self._read.parameters.get((side, step))
            when = f"after step {step}" if step else "before the first step"
            for name, digest in digests.items():
                self._check(f"{side}, {when}: parameter {name}", digest, expected and expected.get(name))
        elif kind == "end":
            side, digest = values
            if self._last.get(side) == max((step for of, step in self._read.parameters if of == side), default=None):
                self._check(f"{side}: SHA-256 of all parameters", digest, self._read.ends.get(side))

    def _check(self, what: str, got: Any, expected: Any) -> None:
        if expected is None:
            return
        if got != expected:
            raise RunDiffers(f"recipe: {what}: got {got}, {self._path} has {expected}")
        self.compared += 1
