"""From records to Markdown tables. Figures are generated here, never typed."""

from collections import defaultdict
from collections.abc import Iterable

from .records import axis, by_case, geomean, natural, peers_of, series


def markdown(heads: list[str], rows: Iterable[list[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def table(records: Iterable[dict]) -> str:
    """A line per room and case without its row count, a column per row count that occurs; a cell is our time in us and,
    in brackets, that over stock. Sweeps over the number of keys have a table of their own."""
    lines: dict[str, dict[tuple, dict]] = {"rows": defaultdict(dict), "keys": defaultdict(dict)}
    for record in records:
        if record["backend"] == "vexact":
            name, count = series(record["case"])
            lines[axis(record["case"]) or "rows"][record["room"], name][count] = record
    return "\n\n".join(_wide(unit, found) for unit, found in lines.items() if found)


def _wide(unit: str, lines: dict[tuple, dict]) -> str:
    counts = sorted({count for cells in lines.values() for count in cells}, key=lambda c: -1 if c is None else c)
    heads = ["room", "case", *("" if count is None else f"{count} {unit}" for count in counts)]
    ordered = sorted(lines.items(), key=lambda item: (item[0][0], natural(item[0][1])))
    return markdown(heads, ([*key, *(_cell(cells.get(count)) for count in counts)] for key, cells in ordered))


def _cell(record: dict | None) -> str:
    if record is None:
        return ""
    ratio = f" ({record['ratio_to_stock']:.2f})" if record["ratio_to_stock"] else ""
    return f"{record['us']:.4g}{ratio}"


def summary(records: Iterable[dict]) -> str:
    """A line per room and row count, geometric means over its cases of ours / each other backend and of the share of
    the roof."""
    cases = by_case(records)
    others = peers_of(cases.values())
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for (room, case), by in cases.items():
        if "vexact" in by:
            groups[room, series(case)[1]].append(by)
    rows = []
    for (room, count), members in sorted(groups.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        share = geomean(by["vexact"]["roof_us"] / by["vexact"]["us"] for by in members)
        means = [geomean(by["vexact"]["us"] / by[b]["us"] for by in members if b in by) for b in others]
        cells = ["" if r is None else f"{r:.2f}" for r in means]
        rows.append([room, "" if count is None else str(count), str(len(members)), f"{100 * share:.0f} %", *cells])
    return markdown(["room", "rows", "cases", "of roof", *(f"ours / {b}" for b in others)], rows)


def spread_line(record: dict) -> str:
    case, us, ratio = record["worst"][0]
    return (
        f"{record['room']} {record['case']}: time / stock over {record['cases']} cases: geometric mean "
        f"{record['geomean_to_stock']:.3f}, 95th percentile {record['p95_to_stock']:.3f}, worst {ratio:.3f} ({case}, "
        f"{us:.1f} us)"
    )


def spread_table(records: Iterable[dict]) -> str:
    """Our time over stock at row counts drawn at random."""
    heads = ["room", "shapes, rows", "cases", "geometric mean", "95th percentile", "worst"]
    rows = []
    for r in records:
        case, _, ratio = r["worst"][0]
        means = [f"{r['geomean_to_stock']:.2f}", f"{r['p95_to_stock']:.2f}"]
        rows.append([r["room"], r["case"], str(r["cases"]), *means, f"{ratio:.2f} ({case})"])
    return markdown(heads, rows)


def verify_table(records: Iterable[dict]) -> str:
    """How many log-probabilities of the rollout differ from the trainer's, ours and stock."""
    heads = ["model", "weights", "tokens", "differ", "max diff", "again in batches of", "differ", "warm cache: differ"]
    heads += ["stock: differ", "stock: max diff"]
    rows = []
    for r in records:
        sizes = ", ".join(map(str, r["batch_sizes"]))
        again = f"{r['batch_mismatched']} of {r['batch_tokens']}" if sizes else ""
        warm = f"{r['warm_mismatched']} of {r['warm_tokens']}" if "warm_tokens" in r else ""
        stock = [f"{r['stock_mismatched']} of {r['stock_tokens']}", f"{r['stock_max_abs_diff']:.3g}"]
        ours = [str(r["tokens"]), str(r["mismatched"]), f"{r['max_abs_diff']:.3g}"]
        rows.append([r["case"], r["weights"], *ours, sizes, again, warm, *stock])
    return markdown(heads, rows)


def engine_table(records: Iterable[dict]) -> str:
    """What was sent to an engine, how fast it answered, and how many log-probabilities the training
    forward computes otherwise."""
    heads = ["model", "requests", "engine", "step, ms", "roof, ms", "step / roof", "output tokens/s", "requests/s"]
    heads += ["first token p50 / p99, ms", "per token p50 / p99, ms", "GPU idle", "start, s", "differ"]
    rows = []
    for r in sorted(
        records, key=lambda r: (r["model"], bool(r.get("latent")), r["workload"], r["backend"] != "vexact")
    ):
        ours = r["backend"] == "vexact"
        about = " ".join(filter(None, (r["model"], "latent" * bool(r.get("latent")), r["dtype"])))
        least = f" (at most {r['new_at_most']} new)" if r.get("new_at_most", r["new"]) < r["new"] else ""
        backend = " ".join(filter(None, (r["backend"], r.get("version"))))
        cells = [about, r["workload"] + least, backend, _figure(r.get("step_ms")), _figure(r.get("roof_ms"))]
        cells += [f"{r['step_over_roof']:.2f}" if r.get("step_over_roof") else "", f"{r['tokens_per_s']:,.0f}"]
        cells += [_figure(r["requests_per_s"])]
        for name in ("ttft_ms", "tpot_ms"):
            cells.append(f"{_figure(r[name]['p50'])} / {_figure(r[name]['p99'])}" if r.get(name) else "")
        cells.append(f"{r['gpu_idle']:.1%}" if r.get("gpu_idle") is not None else "")
        cells.append(_figure(r["start_s"]) if ours else "")
        differ = f"{r['verify_mismatched']} of {r['verify_tokens']}" if "verify_tokens" in r else ""
        if "compared_tokens" in r:
            differ = f"{r['compared_differ']} of {r['compared_tokens']}, from one GPU's"
        rows.append([*cells, differ])
    return markdown(heads, rows)


def sleep_table(records: Iterable[dict]) -> str:
    """How long an engine takes to give its memory back and to take it again, and what it computes differently then. For
    the first sleep of level 1 memory of the host has to be pinned."""
    heads = ["engine", "level", "of", "falls asleep, s", "wakes up, s", "given back, GiB", "differ"]
    rows = []
    for r in records:
        replicas = f", {r['replicas']} replicas" if r.get("replicas") else ""
        stages = f", {r['pipeline_parallel_size']} stages" if r.get("pipeline_parallel_size", 1) > 1 else ""
        for one in r["sleep"]:
            given = ", ".join(f"{tag} {count:,.2f}" for tag, count in one["given_gib"].items())
            cells = [
                f"{r['model']} {r['dtype']}{replicas}{stages}",
                str(one["level"]),
                ", ".join(one["tags"] or ["all"]),
            ]
            cells += [_figure(one["sleep_s"]), _figure(one["wake_s"]), given]
            rows.append([*cells, str(one["differ"]) if "differ" in one else "not asked: weights are gone"])
    return markdown(heads, rows)


def soak_table(records: Iterable[dict]) -> str:
    """What random use of the engine has brought to light."""
    heads = ["on", "minutes", "engines", "steps", "preemptions", "updates", "sleeps", "aborted", "tokens checked"]
    heads += ["differ", "pages, slots held", "memory, MiB"]
    rows = []
    for r in records:
        counts, grown = r["counts"], r["growth"] or {}
        cells = [r["gpu"] or r["cpu"], f"{r['minutes']:.0f}"]
        cells += [
            f"{counts.get(name, 0):,}" for name in ("engines", "steps", "preemptions", "updates", "sleeps", "abort")
        ]
        cells += [f"{r['checked']:,}", str(r["differ"]), f"{r['leaked_pages']}, {r['leaked_slots']}"]
        cells.append(", ".join(f"{grown[n]:+.1f} {label}" for n, label in _SOAKED.items() if n in grown))
        rows.append(cells)
    return markdown(heads, rows)


_SOAKED = {"rss_mib": "resident", "cuda_mib": "on the GPU"}


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def handover_table(records: Iterable[dict]) -> str:
    """How fast weights come to an engine in another process, and how long that stands still."""
    heads = ["weights of a trainer", "GiB", "ms", "GB/s", "of a copy", "while it decodes", "engine stands still, ms"]
    heads += ["grown"]
    rows = []
    for r in records:
        cells = [r["case"], f"{r['gib']:.1f}", f"{r['ms']:.1f}", f"{r['ours']:.3g}"]
        if "ratio" in r:  # without verl
            grown = ", ".join(f"{name} {count:+}" for name, count in r["grown"].items() if count > 0) or "nothing"
            decoding = f"{r['decoding']:.3g} GB/s" if "decoding" in r else ""
            ratio = f"{r['ratio']:.0%}" + (f"; {r['ours'] / r['memcpy']:.0%} of one thread's" if "memcpy" in r else "")
            cells += [ratio, decoding, f"{max(r['stall_ms']):.0f} (a step: {r['step_ms']:.1f})"]
            cells += [f"{grown} in {r['updates']} updates"]
        else:
            ms = r["gathering_ms"]
            cells += ["", "", "", "nothing is gathered" if ms is None else f"of it gathering: {ms:.1f} ms"]
        rows.append(cells)
    return markdown(heads, rows)


def training_table(records: Iterable[dict]) -> str:
    """A training step of the trainer's own kernels beside aligned ones; GiB are on top of weights and optimizer."""
    heads = ["a training step", "its own kernels", "ms", "GiB", "vexact, ms", "GiB", "time", "log-probabilities equal"]
    rows = []
    for r in records:
        gib = [f"{r['gib'][who]:.1f}" if r["gib"] else "" for who in ("stock", "ours")]
        times = [f"{r['stock']:.1f}", gib[0], f"{r['ours']:.1f}", gib[1], f"{r['ratio']:.2f} x"]
        rows.append([r["case"], r["kernels"], *times, r["bits"]])
    return markdown(heads, rows)


def rl_step_table(records: Iterable[dict]) -> str:
    """A whole step of GRPO under verl on each side, and where its time went. GiB are all processes' on the fullest GPU;
    time is ours over that of verl's own side."""
    parts = {"rollout": "gen", "scoring": "old_log_prob", "actor": "update_actor", "weights": "update_weights"}
    heads = ["a step", "rollout and actor", "s", *(f"{name}, s" for name in parts), "rest, s"]
    records = list(records)
    theirs = {r["case"]: r["seconds"] for r in records if r["backend"] != "vexact"}
    rows = []
    for r in sorted(records, key=lambda r: (natural(r["case"]), r["backend"] != "vexact")):
        told = [r["parts"].get(name, 0) for name in parts.values()]
        seconds = (r["seconds"], *told, r["seconds"] - sum(told))
        cells = [r["case"], " ".join(filter(None, (r["backend"], r.get("vllm")))), *(f"{s:.2f}" for s in seconds)]
        beside = theirs.get(r["case"]) if r["backend"] == "vexact" else None
        time = f"{r['seconds'] / beside:.2f} x" if beside else ""
        rows.append([*cells, f"{r['tokens_per_s']:,}", _figure(r["peak_gib"]), time])
    return markdown([*heads, "tokens/s", "GiB", "time"], rows)


def speculation_table(records: Iterable[dict]) -> str:
    """Time per token of a sequence with drafted tokens over that without. Drafted and accepted tokens are of both times
    that were asked; `differ` counts token ids and log-probabilities of the second."""
    rows = [
        [
            r["case"],
            f"{r['plain']:.2f}",
            f"{r['ours']:.2f}",
            f"{r['ratio']:.2f} x",
            f"{r['accepted_tokens']:,} of {r['drafted_tokens']:,}",
            f"{r['differ']} of {r['numbers']}",
        ]
        for r in records
    ]
    return markdown(["sequences and drafts", "ms per token without", "with", "time", "accepted", "differ"], rows)


def images_table(records: Iterable[dict]) -> str:
    """An image encoder beside its peers, and decodes with images in the cache beside those of text alone."""
    heads = [
        "images",
        "kernels",
        "ms",
        "vexact's time over it; of a decode, over text's",
        "differ from the trainer",
        "again",
    ]
    rows = [
        [
            *(r["case"], r["backend"], f"{r['ours']:.2f}", f"{r['ratio']:.2f}"),
            f"{r['differ']} of {r['numbers']:,}" if "differ" in r else "",
            f"{r['again_differ']} of {r['again_numbers']:,}" if r.get("again_numbers") else "",
        ]
        for r in records
    ]
    return markdown(heads, rows)


def start_table(records: Iterable[dict]) -> str:
    """Seconds until an engine can compute, and what of them was verifying kernels."""
    heads = ["engine", "starts in, s", "verifying, s", "kernels verified", "compiled", "weights, s", "imports, s"]
    names = "ours", "verifying_s", "kernels", "compiled", "weights_s", "import_s"
    return markdown(heads, [[r["case"], *(str(r.get(name, "")) for name in names)] for r in records])


def program_table(records: Iterable[dict]) -> str:
    """The whole-program records (engine, memory)."""
    heads = ["program", "case", "ours", "stock", "unit", "ours / stock", "others"]
    rows = []
    for r in sorted(records, key=lambda r: (r["room"], natural(r["case"]))):
        others = {who: peak for who, peak in r.get("peaks", {}).items() if who not in ("vexact", "torch")}
        cells = [r["room"], r["case"], str(r["ours"]), str(r["stock"]), r["unit"], f"{r['ratio']:.2f}"]
        rows.append([*cells, ", ".join(f"{who}: {peak}" for who, peak in others.items())])
    return markdown(heads, rows)
