"""The part of the machine's memory that is near a device."""

from __future__ import annotations

import re
from pathlib import Path


def node_of_pci(bus_id: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Return the NUMA node that a PCI device is attached to; None where the system does not know.

    bus_id: such as "0000:3d:00.0". Raises ValueError for any other text.
    """
    match = re.fullmatch(r"([0-9a-f]{1,8}):([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-7])", bus_id.lower())
    if match is None:
        raise ValueError(f"{bus_id!r} is not a PCI address such as '0000:3d:00.0'")
    domain, bus, device, function = (int(part, 16) for part in match.groups())
    entry = root / f"{domain:04x}:{bus:02x}:{device:02x}.{function}" / "numa_node"
    try:
        node = int(entry.read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node
