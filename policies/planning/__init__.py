"""Plans which blocks leave the device in a step, and when, from what one step did. No torch and no device."""

from .plan import BudgetTooSmall, Cause, Link, Plan, PlannedStall
from .planner import plan
from .profile import Profile

__all__ = ["BudgetTooSmall", "Cause", "Link", "Plan", "PlannedStall", "Profile", "plan"]
