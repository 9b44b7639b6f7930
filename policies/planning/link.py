"""How fast copies are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What `tiered-mem probe` measures of the link between device and host, or host and drive.

    Args:
        out: Bytes each second, away from the device.
        back: Bytes each second, back to the device.
        both: Each direction's share of its rate while the other is busy, above 0 and up to 1.
        latency: Seconds that a copy takes beside its bytes.
        drive: The same of the drive below the host; None where there is none.

    Raises:
        ValueError: A rate or a share is not above 0, a share is above 1, or a latency is below 0.
    """

    out: float
    back: float
    both: float = 1.0
    latency: float = 12e-6
    drive: Link | None = None

    def __post_init__(self) -> None:
        if not (self.out > 0 and self.back > 0 and 0 < self.both <= 1 and self.latency >= 0):
            raise ValueError(
                f"a link has rates above 0 bytes a second, a share above 0 and up to 1, and a latency of 0 s or "
                f"more, not {self.out:g} and {self.back:g} bytes a second, {self.both:g} and {self.latency:g} s"
            )

    def exchange(self, nbytes: int) -> float:
        """The seconds in which bytes cross it in both directions, side by side.

        Args:
            nbytes: The bytes of each direction.
        """
        return nbytes / (min(self.out, self.back) * self.both)
