import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from published.rows import Row, read_rows
from published.study import Comparison, Result, compare, factor_of, fit, run


def main() -> None:
    options = _parse()
    rows = [row for row in read_rows() if row.chip in (options.chip or row.chip) and options.row in row.name]
    console = Console()
    written = {}
    for chip in dict.fromkeys(row.chip for row in rows):
        of_chip = []
        for result in run(row for row in rows if row.chip == chip):
            console.print(f"{chip}, {result.row.name}: {result.modelled:.2f} ms")
            of_chip.append(result)
        comparisons = compare(of_chip)
        _print(chip, of_chip, comparisons)
        written[chip] = {"factor": factor_of(chip) * fit(of_chip), "rows": [asdict(each) for each in comparisons]}
    if options.json is not None:
        options.json.write_text(json.dumps(written, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m published", description=(__doc__))
    parser.add_argument("--chip", action="append", help="only rows of this chip; may be given several times")
    parser.add_argument("--row", default="", help="only rows with this in their names")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the results")
    return parser.parse_args()


def _print(chip: str, results: list[Result], comparisons: list[Comparison]) -> None:
    table = Table(title=f"{chip}: factor {factor_of(chip) * fit(results):.3f} fits all rows, {factor_of(chip):g} is set")
    table.add_column("row")
    for heading in ("published", "modelled", "error", "without a factor"):
        table.add_column(heading, justify="right")
    for each in comparisons:
        table.add_row(
            each.row.name, *(_speed(each.row, time) for time in (each.row.milliseconds, each.modelled)),
            f"{each.calibrated:+.1%}", f"{each.uncalibrated:+.1%}",
        )
    table.add_section()
    table.add_row("mean and worst", "", "", *(_mean_and_worst(comparisons, name) for name in ("calibrated", "uncalibrated")))
    Console().print(table)


def _speed(row: Row, milliseconds: float) -> str:
    return f"{1e3 * row.tokens / milliseconds:.0f} tokens/s" if row.tokens else f"{milliseconds:.1f} ms"


def _mean_and_worst(comparisons: list[Comparison], name: str) -> str:
    errors = [abs(getattr(each, name)) for each in comparisons]
    return f"{sum(errors) / len(errors):.1%}, {max(errors):.1%}"


if __name__ == "__main__":
    main()
