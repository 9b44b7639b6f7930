"""Plans which blocks leave the device in a step, and when, from what one step did. No torch and no device."""

from .planner import plan
from .profile import BudgetTooSmall, Cause, Link, Plan, PlannedStall, Profile

__all__ = ["BudgetTooSmall", "Cause", "Link", "Plan", "PlannedStall", "Profile", "plan"]
