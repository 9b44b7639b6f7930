"""All parts of a run: their progress, and what they have found."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.fuzz.part import Part
from tests.fuzz.processes import Processes


def run_parts(
    parts: Sequence[Part], *, first: int, seconds: float, jobs: int, arguments: Sequence[str], once: bool
) -> bool:
    """Runs the parts, as many at a time as there are jobs, and shows what came of it. Whether something was found.

    first: the parts take turns with the cases from there on. seconds: in all. once: that case only, in each part.
    """
    console = Console()
    texts = TextColumn("{task.description}"), TextColumn("{task.fields[says]}")
    share = seconds * min(jobs, len(parts)) / len(parts)
    with (
        Progress(texts[0], BarColumn(), texts[1], TimeElapsedColumn(), console=console) as progress,
        ThreadPoolExecutor(jobs) as pool,
    ):
        runs = []
        for number, part in enumerate(parts):
            task = progress.add_task(str(part), total=share, says="")
            begins = first if once else first + number
            told = partial(_show, progress, task, part)
            runs.append(pool.submit(Processes(part, begins, len(parts), arguments, told).run, share, once=once))
        for run in runs:
            run.result()
    for part in parts:
        _tell(console, part)
    console.print(_table(parts))
    return any(part.findings for part in parts)


def _show(progress: Progress, task: TaskID, part: Part) -> None:
    says = f"{part.kinds.total()} cases, {len(part.findings)} findings"
    progress.update(task, completed=part.seconds, says=says)


def _tell(console: Console, part: Part) -> None:
    plainly = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    for case, why, text in part.findings:
        plainly(f"\n{part}: {why}", style="red")
        plainly(text)
        plainly(f"again with: {part.again(case)}", style="bold")
    for why, count in part.reasons.most_common():
        plainly(f"{part}: {count} left out: {why}")


def _table(parts: Sequence[Part]) -> Table:
    table = Table("", title="random programs, tiered beside plain")
    for column in ("cases", "right", "left out", "findings", "with blocks that left", "cases a minute"):
        table.add_column(column, justify="right")
    for part in parts:
        counts = (part.kinds.total(), part.kinds["right"], part.kinds["left out"], len(part.findings), part.moved)
        pace = f"{60 * part.kinds.total() / part.seconds:.0f}" if part.seconds else ""
        table.add_row(str(part), *map(str, counts), pace)
    return table
