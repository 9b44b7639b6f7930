"""What a benchmark ran on, as one line of JSON. A process of its own, so that nobody else has to load torch."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PEERS = ("torchtune", "trl", "transformer_engine", "deepspeed")
NEEDED = ("torch", "torch_npu", "numpy", "psutil", "rich", "safetensors", "xxhash", "pytest", "hypothesis")
_DRIVER = Path("/proc/driver/nvidia/version")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "npu", "cpu"], required=True)
    print(json.dumps(machine(parser.parse_args().device)))


def machine(kind: str) -> dict[str, object]:
    """Raises what torch raises where it does not load, and ValueError where it has no such device."""
    torch = importlib.import_module("torch")
    module = None if kind == "cpu" else getattr(torch, kind, None)
    if kind != "cpu" and (module is None or not module.is_available()):
        raise ValueError(f"torch {torch.__version__} finds no {kind} device here")
    found: dict[str, object] = {
        "device": platform.processor() or platform.machine() if module is None else module.get_device_name(),
        "kind": kind,
        "driver": driver() if kind == "cuda" else None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "host_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": {name: version_of(name) for name in (*NEEDED, *PEERS)},
    }
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"device_bytes": properties.total_memory, "capability": f"{properties.major}.{properties.minor}"}
    return found


def driver() -> str | None:
    """Of NVIDIA's devices; None where nobody tells."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return _DRIVER.read_text().split("\n")[0] if _DRIVER.exists() else None


def version_of(package: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
