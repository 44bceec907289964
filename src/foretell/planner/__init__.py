"""Planners: whether and how far to speculate."""

from foretell.planner.adaptive import AdaptivePlanner
from foretell.planner.base import Planner, StepReport
from foretell.planner.cost import CostTable, load_or_measure
from foretell.planner.fixed import FixedPlanner

__all__ = ["AdaptivePlanner", "CostTable", "FixedPlanner", "Planner", "StepReport", "load_or_measure"]
