"""Peers side by side: what each says of bits, whether its rows were seen to depend on their batch, and what that costs
beside PyTorch, as the kept records have it."""

from collections import defaultdict

from ..peers import OURS, PEERS
from .records import by_case, geomean, peers_of, ratios
from .tables import markdown

Kept = dict[str, list[dict]]
ENGINES = ("vllm", "vllm batch-invariant")


def table(kept: Kept, device: str = "h200") -> str:
    """A line for us and for each library that was measured on the device, then the engines."""
    heads = ["library", "says of bits", "measured in (cases)", "rows alone have the bits they have in their batch"]
    heads += ["its time / PyTorch's", "vexact's time / its"]
    cases = {key: by for key, by in by_case(kept[device]).items() if "vexact" in by}
    rows = [_ours(list(cases.values()))]
    rows += [_library(name, {k: by for k, by in cases.items() if name in by}) for name in peers_of(cases.values())]
    return markdown(heads, rows + _engines(kept))


def _ours(cases: list[dict[str, dict]]) -> list[str]:
    compared = [by["vexact"] for by in cases if by["vexact"]["bits_equal"] is not None]
    equal = sum(r["bits_equal"] for r in compared)
    return [
        f"**{OURS.label}**",
        OURS.says,
        f"{len({r['room'] for r in compared})} rooms ({len(compared)})",
        f"**in {equal} of {len(compared)}**",
        "below",
        "",
    ]


def _library(name: str, cases: dict[tuple, dict[str, dict]]) -> list[str]:
    peer = PEERS.get(name)
    asked = [by[name] for by in cases.values() if by[name]["bits_equal"] is not None]
    equal = sum(r["bits_equal"] for r in asked)
    label = name if peer is None else f"[{peer.label}]({peer.link})" if peer.link else peer.label
    version = next((by[name]["version"] for by in reversed(cases.values()) if by[name].get("version")), None)
    rooms: dict[str, list[dict]] = defaultdict(list)
    for (room, _), by in cases.items():
        rooms[room].append(by)
    stock = [] if name == "torch" else [f"{room} {_over(name, 'torch', mine)}" for room, mine in rooms.items()]
    return [
        " ".join(filter(None, (label, version))),
        "" if peer is None else peer.says,
        ", ".join(f"{room} ({len(mine)})" for room, mine in rooms.items()),
        f"in {equal} of {len(asked)}" if asked else "not asked",
        ", ".join(stock),
        ", ".join(f"{room} {_ratio(geomean(ratios(by, name)[1] for by in mine))}" for room, mine in rooms.items()),
    ]


def _over(name: str, other: str, cases: list[dict[str, dict]]) -> str:
    return _ratio(geomean(by[name]["us"] / by[other]["us"] for by in cases if other in by)) or "-"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def steps(kept: Kept) -> dict[tuple, dict[str, dict]]:
    """(model, latent, sequences) -> engine -> its newest record; of ours those alone whose tokens were verified."""
    found: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for record in kept["engine"] + kept["h200"]:
        seen = record["backend"] != "vexact" or record.get("verify_tokens")
        seen = seen and all(record.get(f"{kind}_parallel_size", 1) == 1 for kind in ("pipeline", "tensor"))
        if record["room"] == "engine" and record.get("step_ms") and record.get("batch") in (1, 256) and seen:
            found[record["model"], record.get("latent", False), record["batch"]][record["backend"]] = record
    return found


def _engines(kept: Kept) -> list[list[str]]:
    """Whole engines: a step over that of vLLM's default mode."""
    cases, rows = steps(kept), []
    for name in ENGINES:
        mine = [by for by in cases.values() if name in by]
        if not mine:
            continue
        both = [by for by in mine if "vexact" in by]
        version = next((by[name]["version"] for by in mine if by[name].get("version")), None)
        cost = "" if name == "vllm" else _step_ratio(mine, name, "vllm", " of vLLM's default mode")
        label = f"[{PEERS[name].label}]({PEERS[name].link})"
        where = f"decode steps of the engine, apart from ours ({len(mine)})"
        cells = [" ".join(filter(None, (label, version))), PEERS[name].says, where, "not asked"]
        rows.append([*cells, cost, f"steps {_step_ratio(both, 'vexact', name)}"])
    return rows


def _step_ratio(cases: list[dict[str, dict]], name: str, other: str, of: str = "") -> str:
    mean = geomean(by[name]["step_ms"] / by[other]["step_ms"] for by in cases if name in by and other in by)
    return "" if mean is None else f"{mean:.2f}{of}"


def verified(records: list[dict]) -> dict[str, tuple[int, int]]:
    """Who -> (log-probabilities that differ from the trainer's, all of them)."""
    tokens, wrong = (sum(r[key] + r["batch_" + key] for r in records) for key in ("tokens", "mismatched"))
    stock, off = (sum(r["stock_" + key] or 0 for r in records) for key in ("tokens", "mismatched"))
    return {"vexact": (wrong, tokens), "stock": (off, stock)}
