import argparse
import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.published.offloads import PUBLISHED, Figures, Published, modelled
from benchmarks.published.rows import Row, read_rows
from benchmarks.published.study import Comparison, Result, compare, factor_of, fit, run


def main() -> None:
    options = _parse()
    rows = [row for row in read_rows() if row.chip in (options.chip or row.chip) and options.row in row.name]
    console, written = Console(), []
    for (chip, host_bound), group in groupby(rows, key=lambda row: (row.chip, row.host_bound)):
        results: list[Result] = []
        for result in run(group):
            console.print(f"{chip}, {result.row.name}: {result.modelled:.2f} ms")
            results.append(result)
        factor = fit(results) * (1.0 if host_bound else factor_of(chip))
        comparisons = compare(results)
        title = f"{'the host of ' if host_bound else ''}{chip}: a factor of {factor:.3f}"
        for fitted, of_these in ((True, title), (False, f"{title} made without these")):
            if some := [each for each in comparisons if each.row.fitted == fitted]:
                console.print(_table(of_these, some))
        written.append(
            {"chip": chip, "host_bound": host_bound, "factor": factor}
            | {"rows": [asdict(each) for each in comparisons]}
        )
    offloads = [(each, modelled(each)) for each in PUBLISHED if not options.chip or each.chip in options.chip]
    console.print(_offload_table(offloads))
    if options.json is not None:
        found = {
            "rows": written,
            "offloads": [asdict(each) | {"modelled": asdict(figures)} for each, figures in offloads],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description="Published training steps beside modelled ones."
    )
    parser.add_argument("--chip", action="append", help="only rows of this chip; may be given several times")
    parser.add_argument("--row", default="", help="only rows with this in their names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    return parser.parse_args()


def _table(title: str, comparisons: list[Comparison]) -> Table:
    table = Table(title=title)
    table.add_column("row")
    for heading in ("published", "modelled", "error", "without a factor"):
        table.add_column(heading, justify="right")
    for each in comparisons:
        times = (_speed(each.row, time) for time in (each.row.milliseconds, each.modelled))
        table.add_row(each.row.name, *times, f"{each.calibrated:+.1%}", f"{each.uncalibrated:+.1%}")
    table.add_section()
    errors = (_mean_and_worst(comparisons, name) for name in ("calibrated", "uncalibrated"))
    table.add_row("mean and worst", "", "", *errors)
    return table


def _offload_table(offloads: list[tuple[Published, Figures]]) -> Table:
    table = Table(title="offloads")
    table.add_column("row")
    for heading in ("published slowdown", "modelled", "published GB saved", "modelled"):
        table.add_column(heading, justify="right")
    for each, found in offloads:
        slowdowns = (f"{figures.slowdown:+.1%}" for figures in (each.figures, found))
        table.add_row(each.name, *slowdowns, *(f"{figures.saved:.2f}" for figures in (each.figures, found)))
    return table


def _speed(row: Row, milliseconds: float) -> str:
    return f"{1e3 * row.tokens / milliseconds:.0f} tokens/s" if not row.host_bound else f"{milliseconds:.1f} ms"


def _mean_and_worst(comparisons: list[Comparison], name: str) -> str:
    errors = [abs(getattr(each, name)) for each in comparisons]
    return f"{sum(errors) / len(errors):.1%}, {max(errors):.1%}"


if __name__ == "__main__":
    main()
