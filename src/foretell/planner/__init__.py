"""Planners: whether and how far to speculate."""

from foretell.planner.base import Planner
from foretell.planner.fixed import FixedPlanner

__all__ = ["FixedPlanner", "Planner"]
