"""What is measured: the schema of a step's record and the vocabulary of what follows from it."""

from resilient.signals.findings import Action, Cause, Decision, Finding, Knobs, Severity, Verdict
from resilient.signals.places import PLACES, Place
from resilient.signals.record import COLUMNS, Flag, Kind, Observation, StepRecord, StepTable

__all__ = [
    "COLUMNS",
    "PLACES",
    "Action",
    "Cause",
    "Decision",
    "Finding",
    "Flag",
    "Kind",
    "Knobs",
    "Observation",
    "Place",
    "Severity",
    "StepRecord",
    "StepTable",
    "Verdict",
]
