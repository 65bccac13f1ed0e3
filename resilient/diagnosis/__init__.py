"""From findings to a cause, with evidence and confidence; pure."""

from resilient.diagnosis.verdict import diagnose

__all__ = ["diagnose"]
