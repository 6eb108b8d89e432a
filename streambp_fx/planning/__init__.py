"""Plan a training run before renting a GPU: the longest sequence that fits, and the chunk sizes.

A configuration is traced on tensors without data at a few layers and lengths. Memory is affine in
the number of layers, and what is known at those points is carried to the whole model.
"""

from __future__ import annotations

from .models import BUNDLED, ConfigError
from .plan import Plan, WayPlan, plan
from .setting import Setting
from .timelines import PlanningError

__all__ = ["BUNDLED", "ConfigError", "Plan", "PlanningError", "Setting", "WayPlan", "plan"]
