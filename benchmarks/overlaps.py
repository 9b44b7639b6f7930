"""What an optimizer's step may go on beside, as register_optimizer has it: each is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch has to find the device first
    from tiered_mem.optimizer.registered import Overlap

OVERLAPS: tuple[Overlap, ...] = ("backward", "forward")
