"""What a file of results says of the machine, beside what its worker knows of the device."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path

import psutil

from ..tiers.host_budget import cgroup_limits
from ..versions import versions


def machine() -> dict[str, object]:
    """The date, versions, the kernel and the host's memory in bytes."""
    limits = cgroup_limits(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "ram_bytes": psutil.virtual_memory().total,
        "cgroup_limits_bytes": [limit.nbytes for limit in limits],
    }
