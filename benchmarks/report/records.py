"""Kept records: read, sorted into cases, summed up."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from ..harness import RESULTS, quantile
from ..shapes import SHAPES


def load(path: Path) -> list[dict]:
    """All records of a results file; of a case measured twice, the newest only."""
    newest = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(text)
            newest[record["room"], record["case"], record["backend"]] = record
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a benchmark record: {error}") from None
    return list(newest.values())


def kept() -> dict[str, list[dict]]:
    """Name of a results file -> its records."""
    return {path.stem: load(path) for path in sorted(RESULTS.glob("*.jsonl"))}


_COUNT = re.compile(r"\b([A-Z])=(\d+)\b ?")
_SIZES = re.compile(
    r"\b(page \d+|kv_segment=\d+|\d+ x \d+|\d+ of \d+|of \d+|float32|bfloat16|float16|t=[\d.]+|top_[pk]=[\d.]+)\b"
    rf"|\b({'|'.join(map(re.escape, SHAPES))})(?= |$)|\S+=\d+(,\S+=\d+)*"
)


def series(case: str) -> tuple[str, int | None]:
    """A case's name without its row count (or its number of keys, S=), and that: "qwen3-8b M=16 bf16" ->
    ("qwen3-8b bf16", 16)."""
    found = _COUNT.search(case)
    return (_COUNT.sub("", case, count=1).strip(), int(found[2])) if found else (case, None)


def axis(case: str) -> str | None:
    """What the number in a case's name counts: "rows", or "keys"."""
    found = _COUNT.search(case)
    return None if found is None else "keys" if found[1] == "S" else "rows"


def kind(case: str) -> str:
    """A case's name without model, dtype and sizes: "decode", "training fwd+bwd", "qkv"."""
    return " ".join(_SIZES.sub("", _COUNT.sub("", case)).split())


def natural(text: str) -> list:
    """A key that sorts numbers in a name by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


def by_case(records: Iterable[dict]) -> dict[tuple[str, str], dict[str, dict]]:
    """(room, case) -> backend -> record, of those that are times of kernels; sorted by room and name. A peer that was
    not in the run of our newest record is left out: times of two runs are not compared."""
    found: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for record in records:
        if "us" in record:
            found[record["room"], record["case"]][record["backend"]] = record
    for key, by in found.items():
        if "over" in by.get("vexact", {}):
            found[key] = {b: r for b, r in by.items() if b.startswith("vexact") or b in by["vexact"]["over"]}
    return dict(sorted(found.items(), key=lambda item: (item[0][0], natural(item[0][1]))))


def with_spread(cases: dict[tuple, dict[str, dict]]) -> dict[tuple, dict[str, dict]]:
    """Of each room the cases whose records have a spread, which are newer, where there are any."""
    newer = {room for (room, _), by in cases.items() if "over" in by.get("vexact", {})}
    return {key: by for key, by in cases.items() if key[0] not in newer or "over" in by.get("vexact", {})}


def ratios(by: dict[str, dict], peer: str) -> list[float] | None:
    """[p10, median, p90] of our time over the peer's in one case; without a spread, the median thrice."""
    ours = by.get("vexact")
    if ours is None or peer not in by:
        return None
    if peer in ours.get("over", {}):
        return ours["over"][peer]
    return [ours["us"] / by[peer]["us"]] * 3


def peers_of(cases: Iterable[dict[str, dict]]) -> list[str]:
    from ..peers import PEERS

    seen = {name for by in cases for name in by if not name.startswith("vexact")}
    order = list(PEERS)
    return sorted(seen, key=lambda name: (order.index(name) if name in order else len(order), name))


def geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def percentile(values: list[float], share: float) -> float:
    """The smallest of the values that at least this share of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spreads(records: Iterable[dict], room: str, drawn: str) -> list[dict]:
    """How our time over stock spreads over the cases of one room: a record for each shape, and one for all."""
    ours = [r for r in records if r["room"] == room and r["backend"] == "vexact" and r.get("ratio_to_stock")]
    by_shape: dict[str, list[dict]] = defaultdict(list)
    for record in ours:
        by_shape[record["case"].split()[0]].append(record)
    groups = {**by_shape, f"{len(by_shape)} shapes": ours} if len(by_shape) > 1 else by_shape
    about = ("device", "gpu", "cpu", "torch", "triton", "commit", "date")
    found = []
    for name, members in groups.items():
        values = [r["ratio_to_stock"] for r in members]
        worst = sorted(members, key=lambda r: r["ratio_to_stock"], reverse=True)[:5]
        found.append(
            {
                "room": room,
                "case": f"{name} rows {drawn}",
                "backend": "vexact",
                "cases": len(members),
                "geomean_to_stock": round(geomean(values), 4),
                "p10_to_stock": round(quantile(values, 0.1), 3),
                "p90_to_stock": round(quantile(values, 0.9), 3),
                "p95_to_stock": percentile(values, 0.95),
                "worst": [[r["case"], r["us"], r["ratio_to_stock"]] for r in worst],
                **{key: members[0].get(key) for key in about},
            }
        )
    return found


def over_shapes(records: Iterable[dict], room: str) -> dict:
    """What the kept spreads of a room say of all its shapes together, of the rows that most cases were drawn for: runs
    of some shapes each are one. `p95_to_stock` is that of the shape where it is highest: of all cases together it
    is no higher."""
    drawn: dict[str, list[dict]] = defaultdict(list)
    for record in records:
        if record["room"] == room and "geomean_to_stock" in record and record["case"].split()[0] in SHAPES:
            drawn[record["case"].partition(" rows ")[2]].append(record)
    rows, shapes = max(drawn.items(), key=lambda item: sum(r["cases"] for r in item[1]))
    cases = sum(r["cases"] for r in shapes)
    return {
        "case": f"{len(shapes)} shapes rows {rows}",
        "cases": cases,
        "geomean_to_stock": math.exp(sum(r["cases"] * math.log(r["geomean_to_stock"]) for r in shapes) / cases),
        "p95_to_stock": max(r["p95_to_stock"] for r in shapes),
        "worst_to_stock": max(r["worst"][0][2] for r in shapes),
    }
