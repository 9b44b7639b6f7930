"""The trainings of Llama 2 that are measured, each with the memory that it is to have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """One sequence of so many tokens, within a budget in GiB.

    goal: how long forward and backward of policy="auto" may take at most, over plain's; None is no goal.
    """

    model: str
    tokens: int
    budget: float
    goal: float | None

    def __str__(self) -> str:
        return f"Llama 2 {self.model.upper()}, 1 x {self.tokens} tokens, {self.budget:g} GiB"


SIZES = {
    "7b-4096": Size("7b", 4096, 29, 1.06),
    "7b-8192": Size("7b", 8192, 34, 1.05),
    "7b-32768": Size("7b", 32768, 52, 1.04),
    "13b-8192": Size("13b", 8192, 60, None),
}
