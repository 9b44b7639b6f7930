"""A drive whose operations end when a test says so."""

from __future__ import annotations

from dataclasses import dataclass, field

from ascend_emulator.drives import ModelledDrive


@dataclass
class SlowOperation:
    """began, ended: set by the test. waited: for how many seconds somebody waited, each time."""

    nbytes: int
    read: bool
    begun: bool = False
    done: bool = False
    cancelled: bool = False
    times: tuple[float, float] = (0.0, 0.0)
    waited: list[float | None] = field(default_factory=list)

    def end(self, began: float = 0.0, ended: float = 0.0) -> None:
        self.begun = self.done = True
        self.times = (began, ended)

    def wait(self, seconds: float | None = None) -> bool:
        """One without a limit ends it."""
        self.waited.append(seconds)
        if seconds is None and not self.done:
            self.end()
        return self.done

    def cancel(self) -> bool:
        if self.begun or self.cancelled:
            return False
        self.done = self.cancelled = True
        return True


@dataclass
class SlowDrive(ModelledDrive):
    """seconds: what time it is."""

    operations: list[SlowOperation] = field(default_factory=list)
    seconds: float = 0.0
    dry: bool = False

    def submit(self, nbytes: int, *, read: bool) -> SlowOperation:
        self.operations.append(SlowOperation(nbytes, read))
        return self.operations[-1]

    def now(self) -> float:
        return self.seconds
