"""What torch's allocator did, told so that two processes can be compared."""

import torch


def allocations() -> list[tuple[str, int, int, int, int]]:
    """Since it records, on this device. Streams by their first use, addresses by segment and offset."""
    trace = torch.npu.memory._snapshot()["device_traces"][torch.npu.current_device()]
    streams: dict[int, int] = {}
    segments: dict[int, int] = {}
    rows = []
    for entry in trace:
        address = entry["addr"]
        if entry["action"] == "segment_alloc":
            segments[address] = len(segments)
        segment = max((start for start in segments if start <= address), default=0)
        stream = streams.setdefault(entry["stream"], len(streams))
        rows.append((entry["action"], entry["size"], stream, segments.get(segment, -1), address - segment))
    return rows
