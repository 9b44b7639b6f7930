"""What a torch_npu needs of CANN to be loaded, and the emulated one lacks: by its wheels, which need no torch.

    pip download --no-deps torch_npu==2.14.0
    python emulator/missing_symbols.py torch_npu-*.whl

Needs nm (Debian: binutils) and the built libraries. The exit status is 1 where a name is missing. What torch_npu
asks for by dlsym, and can do without, is not looked at.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ascend_emulator.libraries import folder

# The libraries that are loaded by `import torch_npu`.
LOADED = ("lib/libtorch_npu.so", "lib/libop_plugin_atb.so", "lib/libnpu_profiler.so", "torch_npu/_C.")
# How CANN's functions are named.
OF_CANN = ("acl", "Hccl", "Hcom", "Prof", "Msprof", "mspti", "Adx", "hal", "rt", "_ZN2ge")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    options = parser.parse_args()
    have = {name for library in folder().glob("*.so") for name in symbols(library, "--defined-only")}
    complete = True
    for wheel in options.wheels:
        needed = wanted(wheel)
        missing = sorted(needed - have)
        complete = complete and not missing
        print(f"{wheel.name}: {len(needed)} functions, {len(missing)} missing", *missing, sep="\n  ")
    return 0 if complete else 1


def wanted(wheel: Path) -> set[str]:
    """The functions of CANN without which torch_npu is not loaded."""
    found: set[str] = set()
    with tempfile.TemporaryDirectory() as work, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith(".so") and any(part in name for part in LOADED):
                found.update(symbols(Path(archive.extract(name, work)), "--undefined-only"))
    return {name for name in found if name.startswith(OF_CANN)}


def symbols(library: Path, which: str) -> list[str]:
    done = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True)
    return [line.split()[-1].partition("@")[0] for line in done.stdout.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
