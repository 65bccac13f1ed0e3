"""From a verdict to a decision: ladder, budgets, knobs; pure."""

from resilient.policies.config import PolicyConfig, RetryConfig, RollbackConfig, SkipConfig
from resilient.policies.ladder import Ladder

__all__ = ["Ladder", "PolicyConfig", "RetryConfig", "RollbackConfig", "SkipConfig"]
