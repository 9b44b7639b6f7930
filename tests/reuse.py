"""The next use of memory that was given back: for tests of when that may be."""

from __future__ import annotations

import torch

PADDING = 512  # torch_npu asks its allocator for some bytes more than are wanted
SMALL = 1 << 20  # what is larger comes from other segments


def use_free_memory(device: str) -> int:
    """Writes all that torch's allocator has free for the current stream, and gives the number of bytes.

    So the race detector, which compares memory when it is used again, sees what was given back too early, whichever
    block the allocator would hand out by itself.
    """
    module = torch.get_device_module(device)
    stream = getattr(module.current_stream(), f"{device}_stream")
    pieces: list[int] = []
    for segment in module.memory_snapshot():
        if segment["stream"] == stream:
            largest = SMALL if segment["segment_type"] == "small" else segment["total_size"]
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    whole, rest = divmod(block["size"], largest)
                    pieces += [largest] * whole + [rest]
    # The largest first: a smaller one would be cut out of their blocks.
    pieces = sorted((piece - PADDING for piece in pieces if piece > PADDING), reverse=True)
    taken = [torch.zeros(piece, dtype=torch.uint8, device=device) for piece in pieces]
    return sum(tensor.nbytes for tensor in taken)
