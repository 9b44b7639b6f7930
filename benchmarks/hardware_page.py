"""Makes docs/hardware.md of the files that `tiered-mem check -o FILE` has written: `make hardware-page`.

python -m benchmarks.hardware_page            # of benchmarks/results/hardware/*.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "hardware"
PAGE = ROOT / "docs" / "hardware.md"
# The emulator's library in place of Ascend's.
EMULATED = "ascend_emulator/"
COLUMNS = (
    *("device", "date", "tiered_mem", "torch", "torch_npu, CANN, driver", "passed", "failed", "not applicable"),
    *("to the host", "to the device", "both at once", "under compute"),
)
ABOUT = """# Hardware

Which devices have been qualified, by `tiered-mem check` ([the command line](command_line.md)). The page is made by
`make hardware-page` of the files in `benchmarks/results/hardware/`.

{state}

```sh
tiered-mem check -o tiered-mem-check.json
```

It takes about two minutes, and up to 1 GiB of the device, of the host, and of the drive where temporary files go
(`--dir` chooses another). Attach the file to an issue, or add it to `benchmarks/results/hardware/` and run
`make hardware-page`. It holds versions, the names of the device and the kernel, sizes of memory, and what each
check has found. It holds no name of the host or the user, but the words of an error may hold a path. Where a line
fails, [troubleshooting](troubleshooting.md#tiered-mem-check) says what it means. `make silicon` runs the tests and
the benchmarks on top of it.
"""


@dataclass(frozen=True)
class Result:
    """One file of `tiered-mem check`."""

    found: dict[str, Any]

    @property
    def kind(self) -> str:
        """ "real", "emulated" or "cpu"."""
        device = self.found["device"]
        if device["kind"] == "cpu":
            return "cpu"
        return "emulated" if EMULATED in (device["runtime"] or "") else "real"

    def row(self) -> list[str]:
        """What COLUMNS name."""
        versions, verdicts = self.found["versions"], self.found["verdicts"]
        driver = versions["ascend_driver"] or versions["nvidia_driver"]
        remark = {"real": "", "emulated": ", **emulated**", "cpu": ", **no accelerator**"}[self.kind]
        return [
            f"{self.found['device']['name']}{remark}",
            self.found["date"][:10],
            versions["tiered_mem"],
            versions["torch"] or "-",
            ", ".join(each or "-" for each in (versions["torch_npu"], versions["cann"], driver)),
            *(str(verdicts.get(name, 0)) for name in ("pass", "fail", "not applicable")),
            *(self._figure(name) for name in ("to_host", "to_device", "both")),
            " / ".join(self._figure(f"{name}_under_compute") for name in ("to_host", "to_device")),
        ]

    def failures(self) -> Iterator[str]:
        for check in self.found["checks"]:
            if check["verdict"] == "fail":
                where = f"{self.found['device']['name']}, {self.found['date'][:10]}"
                yield f"- {where}: {check['name']}: {check['reason']}"

    def _figure(self, name: str) -> str:
        rates = next(check["figures"] for check in self.found["checks"] if check["name"] == "link rates")
        return f"{rates[name]['value']:.3g} {rates[name]['unit']}" if name in rates else "-"


def page(results: Sequence[Result]) -> str:
    """docs/hardware.md, real devices first."""
    real = [result for result in results if result.kind == "real"]
    if real:
        names = ", ".join(sorted({result.found["device"]["name"] for result in real}))
        state = f"Real devices in the table: {names}. For another one, or other versions, one command adds a row:"
    else:
        state = (
            "**No real device has been qualified yet.** All rows are examples: of the emulated NPU, which is the "
            "real torch_npu over an\nemulated CANN and shows nothing of a real link's speed, and of a cpu. Whoever "
            "has an Ascend NPU or a GPU can change that by\none command:"
        )
    parts = [ABOUT.format(state=state)]
    for title, kinds in (("Devices", ("real",)), ("Examples, of no real device", ("emulated", "cpu"))):
        rows = [result.row() for result in results if result.kind in kinds]
        if rows:
            lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
            parts.append(f"## {title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n")
    failures = [line for result in results for line in result.failures()]
    if failures:
        parts.append("## What failed\n\n" + "\n".join(failures) + "\n")
    parts.append(
        'Rates are in 1e9 bytes per second. "Both at once" is the sum of both directions. "Under compute" is the '
        "rate of a copy\nbeside work that keeps the device busy, as a share of that alone, to the host and to the "
        "device.\n"
    )
    return "\n".join(parts)


def read(folder: Path) -> list[Result]:
    """Sorted by the device, the newest first. Raises ValueError for a file that is not one of the command's."""
    results = []
    for path in sorted(folder.glob("*.json")):
        found = json.loads(path.read_text())
        if found.get("command") != "tiered-mem check" or found.get("schema") != 1:
            raise ValueError(f"{path} is not what tiered-mem check writes")
        results.append(Result(found))
    results.sort(key=lambda result: result.found["date"], reverse=True)
    return sorted(results, key=lambda result: result.found["device"]["name"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    PAGE.write_text(page(read(RESULTS)))
    print(PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
