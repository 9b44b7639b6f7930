"""The policy of a manager that is told how much device memory there is, and nothing else."""

from __future__ import annotations

import logging
import os

from .device import Device
from .measured_link import measured
from .policies import Link, PlannedPolicy, Policy
from .rehearsal import rehearsed
from .sizes import format_bytes, parse_bytes

_log = logging.getLogger("tiered_mem.automatic")

# Of the device's memory, for what lies in torch's pool in pieces that nobody can use.
_FRAGMENTS = 0.04
# A link of 50 GB/s takes a third of a millisecond for this, a hundred times its latency.
_MEASURED_BYTES = 16 << 20


def planned_policy(
    device: Device, device_budget: int | str | None, slowdown: float | None, host_bytes: int | None
) -> Policy:
    """Measures the link, and makes the policy. Arguments and errors are those of TieringManager.

    TIERED_MEM_DEVICE_BUDGET in the environment counts in place of device_budget.
    """
    device_budget = os.environ.get("TIERED_MEM_DEVICE_BUDGET", device_budget)
    usable, total = device.usable_and_total()
    if total == 0:
        raise ValueError(f"policy='auto' needs a device that counts its memory, and {device.kind} does not")
    budget = int(usable - _FRAGMENTS * total) if device_budget is None else parse_bytes(device_budget)
    if not 0 < budget <= total:
        raise ValueError(
            f"device_budget is {format_bytes(budget)}, and the device has {format_bytes(total)}, of which this "
            f"process can use {format_bytes(usable)}"
        )
    speed = measured(device, _MEASURED_BYTES, rounds=3)
    out, back = speed.from_device * 1e9, speed.to_device * 1e9
    both = min(1.0, speed.both * 1e9 / (out + back))
    _log.info(
        "budget %s; the link moves %.1f GB/s to the host and %.1f GB/s back, and %.0f %% of these together",
        *(format_bytes(budget), speed.from_device, speed.to_device, 100 * both),
    )
    link = Link(out, back, both=both)
    return rehearsed(PlannedPolicy(budget, link, slowdown=slowdown, host_bytes=host_bytes))
