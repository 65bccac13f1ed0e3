"""What is measured: the schema of a step's record and the vocabulary of what follows from it."""

from resilient.signals.checks import CheckPlan, Checks, Confirmation, LinkReport, Located
from resilient.signals.findings import (
    Action,
    Alarm,
    Cause,
    Decision,
    Finding,
    Forecast,
    Knobs,
    Severity,
    StabilityLevel,
    Verdict,
)
from resilient.signals.places import PLACES, Place
from resilient.signals.record import COLUMNS, Flag, Kind, Observation, StepRecord
from resilient.signals.step_sketch import Exchanged, StepSketch
from resilient.signals.table import StepTable

__all__ = [
    "COLUMNS",
    "PLACES",
    "Action",
    "Alarm",
    "Cause",
    "CheckPlan",
    "Checks",
    "Confirmation",
    "Decision",
    "Exchanged",
    "Finding",
    "Flag",
    "Forecast",
    "Kind",
    "Knobs",
    "LinkReport",
    "Located",
    "Observation",
    "Place",
    "Severity",
    "StabilityLevel",
    "StepRecord",
    "StepSketch",
    "StepTable",
    "Verdict",
]
