"""Runs a part of a benchmark in a process of its own, and shows how far it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rich.progress import Progress


def found_by(
    module: str, arguments: Sequence[str], name: str, progress: Progress, doing: str = ""
) -> dict[str, Any]:
    """The last line of JSON that a module writes. Those before it say by "doing" how far it is.

    name: as it is shown, with what it begins with in `doing`. Raises CalledProcessError where the process fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    task = progress.add_task(name, total=1, doing=doing)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        with ThreadPoolExecutor(1) as pool:
            errors = pool.submit(child.stderr.read)
            said: dict[str, Any] = {}
            for line in child.stdout:
                if not line.startswith("{"):  # torch_npu writes there too
                    continue
                said = json.loads(line)
                progress.update(task, doing=said.get("doing", "done"))
    if child.returncode:
        progress.console.print(errors.result())
        raise subprocess.CalledProcessError(child.returncode, command)
    progress.update(task, completed=1)
    return said
