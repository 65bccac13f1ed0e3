"""From a verdict to a decision: ladder, budgets, knobs; pure."""

from resilient.policies.config import PolicyConfig, RollbackConfig, SkipConfig
from resilient.policies.ladder import Ladder

__all__ = ["Ladder", "PolicyConfig", "RollbackConfig", "SkipConfig"]
