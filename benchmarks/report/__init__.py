"""From JSON lines to the tables in the README files and to charts: records (read and summed up), tables, compare (with
peers), charts (what is in them), draw (with matplotlib), readme (where they go)."""

import argparse
import sys
from pathlib import Path

from . import charts, compare, readme, tables
from .records import kept, load, over_shapes, percentile, series, spreads
from .tables import engine_table, soak_table, spread_line, spread_table, summary, table, verify_table

READMES, headlines = readme.READMES, readme.headlines
update_readme, update_readmes = readme.update_readme, readme.update_readmes

__all__ = [
    "READMES",
    "charts",
    "compare",
    "engine_table",
    "headlines",
    "load",
    "main",
    "over_shapes",
    "percentile",
    "plot",
    "readme",
    "series",
    "soak_table",
    "spread_line",
    "spread_table",
    "spreads",
    "summary",
    "table",
    "tables",
    "update_readme",
    "update_readmes",
    "verify_table",
]


def main(args: argparse.Namespace) -> int:
    """`report`: the summary and the comparison on standard output; with --readme, all that is generated, anew."""
    if args.plot:
        for path in plot_kept(args.plot):
            print(path)
    if args.readme:
        update_readmes()
        plot_kept(charts.PLOTS)
        wanted = {charts.PLOTS / chart.path for chart in charts.everything()}
        for path in set(charts.drawn()) - wanted:
            path.unlink()
    elif not args.plot:
        print(f"{headlines()}\n\n{compare.table(kept())}")
        print("nothing was written: --readme rewrites README files and charts", file=sys.stderr)
    return 0


def plot(records: list[dict], folder: Path) -> list[Path]:
    """The charts of one run's records, into a folder."""
    from .draw import draw

    return draw(charts.of({".": records}), folder)


def plot_kept(folder: Path) -> list[Path]:
    from .draw import draw

    return draw(charts.everything(), folder)
