"""From findings to a cause, with evidence and confidence; pure."""

from resilient.diagnosis.verdict import diagnose, wants_confirmation, wants_probe

__all__ = ["diagnose", "wants_confirmation", "wants_probe"]
