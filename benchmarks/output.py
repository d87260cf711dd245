"""Where records go: a JSON document as every command of ours writes it, a CSV file, lines of JSON."""

import argparse
import csv
import importlib.util
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from vexact_engine.extras import pip_line
from vexact_engine.proof.machine import commit, made_by

from . import harness


class Refused(ValueError):
    """What was asked for cannot be written, or not here; nothing was measured."""


def check(args: argparse.Namespace) -> None:
    """Before minutes of work, not after: what is kept is of a commit and can be written, what is drawn can be drawn."""
    _check_charts("--plot", args.plot)
    for name in ("json", "csv", "lines"):
        path = getattr(args, name)
        if path is not None and str(path) != "-" and (Path(path).is_dir() or not Path(path).parent.is_dir()):
            raise Refused(f"--{name}: got {path}, expected a file name in a folder that exists")
    if args.save:
        _check_tree("--save")
        found = commit()
        if found is None or found.endswith("+"):
            state = "files that were changed since" if found else "no commit"
            raise Refused(
                f"--save: this tree has {state}: a kept record names the commit that it was measured at; "
                "commit first, or write elsewhere with --lines FILE"
            )


def _check_tree(what: str) -> None:
    if not (harness.ROOT / "pyproject.toml").exists():
        raise Refused(f"{what}: records are kept in a source tree, expected one: --lines FILE writes them anywhere")


def _check_charts(what: str, asked: object) -> None:
    if asked and importlib.util.find_spec("matplotlib") is None:
        raise Refused(f"{what}: charts are drawn by matplotlib, which is not installed. Run: {pip_line('report')}")


def check_report(args: argparse.Namespace) -> None:
    _check_tree("report")
    _check_charts("report: --readme", args.readme)
    _check_charts("report: --plot", args.plot)


def files(args: argparse.Namespace) -> list[Path]:
    """Files of lines that records are appended to."""
    saved = [harness.results_file(args.device)] if args.save else []
    return ([args.lines] if args.lines else []) + saved


def write(args: argparse.Namespace, line: str, records: Sequence[dict], failures: Sequence[str]) -> None:
    """The documents that were asked for, whole, also of a run that ended early."""
    if args.json:
        document = made_by("bench", line) | {"failures": list(failures), "records": list(records)}
        _put(args.json, json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False) + "\n")
    if args.csv:
        _put(args.csv, table(records))


def _put(path: str, text: str) -> None:
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        Path(path).write_text(text, encoding="utf-8")


def table(records: Sequence[dict]) -> str:
    """CSV: a column for each field that any record has, in the order of their first appearance; a field of a dictionary
    is one of its own, `rows_alone.differ`."""
    flat = [_flat(record) for record in records]
    columns = list(dict.fromkeys(name for record in flat for name in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(record: dict, prefix: str = "") -> dict:
    found = {}
    for name, value in record.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = json.dumps(value) if isinstance(value, list) else value
    return found
