"""What a training log says: alarms, when trouble began, what became of the run, and what it points to.

Rows are taken one by one into the same monitor that guards a live run, so that an alarm at a step depends on rows up to
it only, and on our own steps.jsonl the alarms are those of the live run. The verdict looks at the whole file:

| verdict | when (the first that holds) |
|---|---|
| nonfinite | the last loss is NaN or Inf, or 8 losses in a row were without a restart after them; or, with a finite loss that is not away from its trend, the last 8 gradient norms were |
| unclear | fewer than 32 losses, no loss at all, or one and the same value throughout |
| diverged | the loss broke away from its trend (course.py) and has not come back by the end; not if it has only moved to a new level, calm since |
| collapse | it never learned, or its output collapsed (statistic `collapse`; an evaluation loss that climbs is a warning: overfitting breaks no run) |
| loss_spike | it broke away and came back, once or more |
| healthy | none of these; there may be warnings |

Never learned: in a log of at least 100 losses that begins with the run, the loss stands clearly above its first points
in most of the log, and above them at its end; or it lies on a plateau from the first twentieth on: above 1 (a nat: below it most is learned), no
wider than 1 % and fallen by less than 4 % since. Refused attempts (`applied` false: the guard, or an ordinary fp16 overflow)
never reach the weights and count only when the log ends in five or more of them.

Going back. In our own format a step that is applied again follows a rollback or a restart, in which the live run had
rewound its detectors to the state after the step before it; so does this. States are kept every 256 attempts, 16 of them:
a run that goes back more than about 4000 attempts at once is continued from the oldest state held, with a note. In any
other format a step that goes back is a restart: named in `restarts`, no alarm, and nothing is rewound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

from resilient.detectors import DetectorConfig, Monitor, build_monitor
from resilient.diagnosis.symptoms import CauseReport, causes
from resilient.logs.clues import Clues, reinitialised
from resilient.logs.course import BreakAway, LossCourse
from resilient.logs.rows import Log, Remarks, Row
from resilient.logs.series import Series
from resilient.signals import Alarm, Observation, StabilityLevel

Verdict = Literal["healthy", "loss_spike", "diverged", "nonfinite", "collapse", "unclear"]

BROKEN: frozenset[str] = frozenset({"diverged", "nonfinite", "collapse"})
_DRAWN = ("loss", "grad_norm", "eval_loss", "lr", "loss_scale", "logit_max", "attention_entropy", "update_norm")
_FEW = 32  # losses, below which a verdict is not supported
_LONG = 100  # losses, from which "never learned" can be said
_IN_A_ROW = 8  # non-finite values that are no ordinary overflow any more
_REFUSED = 5  # refused attempts at the end that are the end
_CHAIN = 50  # points between alarms of one episode; as false alarms are merged
_STATE_EVERY, _STATES = 256, 16
_GENERATION = "generation"  # of our own format: one start of the run; no signal


@dataclass(frozen=True)
class Analysis:
    """What `resilient analyze` knows about one file.

    rows: read, of all kinds. first_alarm_step: of a warn or act alarm. onset_step, onset_confidence: beginning of the
    trouble that the verdict is about (a healthy run's: of its first alarms). blowup_step: the loss left its trend or was not
    finite any more. restarts: (step before, step begun again at). away: how often the loss broke away."""

    file: str
    rows: int
    signals: tuple[str, ...]
    verdict: Verdict
    first_alarm_step: int | None
    onset_step: int | None
    onset_confidence: float | None
    blowup_step: int | None
    alarms: tuple[Alarm, ...]
    causes: tuple[CauseReport, ...]
    remarks: Remarks
    level: StabilityLevel
    rates: dict[str, float]  # Monitor.rates()
    restarts: tuple[tuple[int, int], ...]
    away: int
    last_step: int | None
    summary: str
    series: dict[str, Series] = field(compare=False)  # over x: the step, counted on where the file's counter began anew
    alarm_x: tuple[float, ...] = ()
    counter_began_anew: bool = False

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 warnings, 2 a broken run."""
        if self.verdict in BROKEN:
            return 2
        return 1 if self.alarms or self.verdict == "loss_spike" else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; what is not finite is null."""
        return _strict(
            {
                "file": self.file,
                "rows": self.rows,
                "signals": self.signals,
                "verdict": self.verdict,
                "summary": self.summary,
                "first_alarm_step": self.first_alarm_step,
                "onset_step": self.onset_step,
                "onset_confidence": self.onset_confidence,
                "blowup_step": self.blowup_step,
                "last_step": self.last_step,
                "break_aways": self.away,
                "alarms": [asdict(alarm) for alarm in self.alarms],
                "causes": [report.as_dict() for report in self.causes],
                "format": self.remarks.format,
                "notes": self.remarks.notes,
                "unread": self.remarks.unread,
                "restarts": [{"after": before, "at": at} for before, at in self.restarts],
                "level": self.level.letter,
                "stability": self.level.number,
                "drivers": [{"signal": name, "share": share} for name, share in self.level.drivers],
                "forecast": None if self.level.forecast is None else asdict(self.level.forecast),
                "alarm_rate": {
                    "per": 10_000,
                    "predicted": {name: self.rates[f"predicted_{name}"] for name in ("warn", "act")},
                    "realised": {name: self.rates[f"realised_{name}"] for name in ("warn", "act")},
                },
            }
        )


def analyze(log: Log, *, seen: Callable[[Log], None] | None = None) -> Analysis:
    """Read `log` to its end. seen: called once, when the first row has come (so that a person sees that it works)."""
    analyzer = Analyzer()
    for row in log.rows():
        if seen is not None:
            seen(log)
            seen = None
        analyzer.add(row)
    return analyzer.result(log.path, log.remarks)


class Analyzer:
    """Takes rows as they come; `add` returns the alarms that a row raises. `result` may be asked at any time."""

    def __init__(self, monitor: Monitor | None = None) -> None:
        self.monitor = monitor if monitor is not None else build_monitor(DetectorConfig())
        self.course = LossCourse()
        self.clues = Clues()
        self.rows = 0
        self.alarms: list[Alarm] = []
        self.signals: dict[str, None] = {}  # in the order they appeared
        self.series: dict[str, Series] = {}
        self.restarts: list[tuple[int, int]] = []
        self.notes: list[str] = []
        self._points: list[int] = []  # of the alarms
        self._alarm_x: list[float] = []
        self._past = _Past(self.monitor)
        self._step: int | None = None  # last training row's
        self._first_step: int | None = None
        self._applied_step: int | None = None
        self._generation: float | None = None
        self._rolled_back = False
        self._shift = 0  # of the x axis, when the file's counter began anew
        self._norm_run = 0  # gradient norms in a row that were not finite
        self._refused: deque[float] = deque(
            maxlen=_REFUSED
        )  # losses of the refused attempts since the last applied one

    def add(self, row: Row) -> tuple[Alarm, ...]:
        """Judge the row against what came before, then let it in."""
        self.rows += 1
        if not row.evaluation:
            self._follow_steps(row)
        values = {k: v for k, v in row.values.items() if k != _GENERATION} if row.attempt else row.values
        observation = Observation(row.step, row.attempt or self.rows, values)
        findings = self.monitor.observe(observation)
        alarms = self.monitor.absorb(observation, findings, row.applied)
        if row.attempt:
            self._past.push(observation, row.applied)
        self.alarms += alarms
        self._points += [self.course.points] * len(alarms)
        self._alarm_x += [float(row.step + self._shift)] * len(alarms)
        self._record(row)
        return alarms

    def result(self, file: str, remarks: Remarks) -> Analysis:
        """Verdict, onset and causes of everything so far."""
        verdict, summary = self._verdict()
        blowup = self._blowup(verdict)
        focus = self._leading_episode(blowup)
        onset, sure = self._onset(verdict, blowup, focus)
        alarms = [self.alarms[i] for i in focus] if focus else self.alarms
        facts = self._facts(verdict, blowup, onset, focus)
        notes = list(dict.fromkeys([*remarks.notes, *self.notes]))
        return Analysis(
            file=file,
            rows=self.rows,
            signals=tuple(self.signals),
            verdict=verdict,
            first_alarm_step=self.alarms[0].step if self.alarms else None,
            onset_step=onset,
            onset_confidence=sure,
            blowup_step=None if blowup is None else blowup[0],
            alarms=tuple(self.alarms),
            causes=causes(alarms, facts),
            remarks=Remarks(remarks.format, notes, dict(remarks.unread)),
            level=self.monitor.level(),
            rates=self.monitor.rates(),
            restarts=tuple(self.restarts),
            away=self.course.break_count,
            last_step=self._step,
            summary=summary,
            series=self.series,
            alarm_x=tuple(self._alarm_x),
            counter_began_anew=self._shift > 0,
        )

    # -- rows --------------------------------------------------------------------------------------------------------

    def _follow_steps(self, row: Row) -> None:
        """Has training gone back since the last row? In our own format also when a new start of the run (`generation`) lost
        refused attempts only, so that no step goes back."""
        last = self._applied_step if row.attempt else self._step
        generation = row.values.get(_GENERATION) if row.attempt else None
        anew = generation is not None and self._generation is not None and generation > self._generation
        self._generation = generation
        if last is not None and (anew or (row.step <= last if row.attempt else row.step < last)):
            self._go_back(row, last)
        elif self._rolled_back:  # to the very step that was in force: only refused attempts are taken back
            self._past.rewind(row.step - 1)
        self._rolled_back = row.rolled_back
        self._step = row.step
        if self._first_step is None:
            self._first_step = row.step
        if row.applied:
            self._applied_step = row.step

    def _go_back(self, row: Row, last: int) -> None:
        self._applied_step = row.step - 1
        self.restarts.append((last, row.step))
        self.clues.restarts.append((row.step, self.course.points))
        if row.attempt and not self._past.rewind(row.step - 1):
            self.notes.append(
                f"Line {row.line}: the run went back to step {row.step}, further than states are held: references were kept "
                "from the oldest of them."
            )
        assert self._first_step is not None
        if row.step <= self._first_step and not row.attempt:
            self._shift += last - row.step + max(self.course.interval, 1)
            self.notes.append(f"The step counter began anew at {row.step}, after {last}: drawn one behind the other.")
        else:
            for series in self.series.values():
                series.cut(row.step + self._shift)

    def _record(self, row: Row) -> None:
        """Everything that is not the monitor's: pictures, course and clues. After it, so that its points match."""
        values, x = row.values, row.step + self._shift
        for name in values:
            if name not in self.signals and not (row.attempt and name == _GENERATION):
                self.signals[name] = None
        if not row.applied:
            if "loss" in values:
                self._refused.append(values["loss"])
            self._count_norm(values.get("grad_norm"))
            return
        for name in _DRAWN:
            if name in values:
                self.series.setdefault(name, Series()).add(x, values[name])
        course = self.course
        level = course.present if math.isfinite(course.present) else math.inf
        self.clues.add(row.step, course.points, values, level, course.spread)
        if row.evaluation:
            return
        self._count_norm(values.get("grad_norm"))
        if "loss" in values:
            self._refused.clear()
            course.add(row.step, values["loss"])

    def _count_norm(self, norm: float | None) -> None:
        if norm is not None:
            self._norm_run = 0 if math.isfinite(norm) else self._norm_run + 1

    # -- verdict -----------------------------------------------------------------------------------------------------

    def _verdict(self) -> tuple[Verdict, str]:
        """The table of the module's docstring, with a sentence for people."""
        course = self.course
        refused = list(self._refused) if len(self._refused) == _REFUSED else []
        if course.nonfinite_run:
            return "nonfinite", f"the loss is not finite at the end ({_points(course.nonfinite_run)})"
        if refused and not all(map(math.isfinite, refused)):
            return "nonfinite", f"the last {len(refused)} attempts were refused, with a loss that is not finite"
        if course.nonfinite_longest >= _IN_A_ROW and not self._restarted_since(course.nonfinite_step):
            return "nonfinite", f"{course.nonfinite_longest} losses in a row were not finite"
        away = course.open
        if self._norm_run >= _IN_A_ROW and away is None:
            return "nonfinite", f"the gradient norm is not finite at the end ({_points(self._norm_run)})"
        if not course.points:
            return "unclear", "no training loss was found"
        if course.points < _FEW:
            return "unclear", f"only {_points(course.points)}: too few for a verdict"
        if not course.distinct:
            return "unclear", "the loss has one and the same value on every row: a placeholder or a broken logger"
        if refused and median(refused) > course.limit():
            return "diverged", f"the last {len(refused)} attempts were refused, with a loss of {median(refused):.4g}"
        if away is not None and not course.shifted():
            return (
                "diverged",
                f"the loss left its trend of {away.level:.4g} at step {away.blowup_step}, peaked at {away.peak:.4g} and "
                f"ends at {course.present:.4g}",
            )
        stuck = self._never_learned()
        if stuck:
            return "collapse", stuck
        silent = next(
            (alarm for alarm in self.alarms if alarm.statistic == "collapse" and alarm.signal != "eval_loss"), None
        )
        if silent is not None:
            return "collapse", f"silent collapse: {silent.message or silent.signal}"
        closed = [b for b in course.breaks if b.over_step is not None]
        if closed:
            worst = max(closed, key=lambda b: b.peak - b.level if math.isfinite(b.peak) else math.inf)
            times = "once" if course.break_count == 1 else f"{course.break_count} times"
            return (
                "loss_spike",
                f"the loss left its trend {times} and came back; worst at step {worst.peak_step}: "
                f"{worst.level:.4g} -> {worst.peak:.4g}",
            )
        if away is not None:
            return (
                "healthy",
                f"the loss moved from {away.level:.4g} to {course.present:.4g} at step {away.blowup_step} and stays there calmly",
            )
        return "healthy", f"the loss follows its trend: {course.start:.4g} -> {course.present:.4g}"

    def _restarted_since(self, step: int | None) -> bool:
        return step is not None and any(before >= step for before, _ in self.restarts)

    def _never_learned(self) -> str:
        """Why it can be said that the run never learned; empty if it cannot."""
        course = self.course
        means = self.series["loss"].means() if "loss" in self.series else []
        fresh = course.start_step <= 2 * max(course.interval, 1)  # else it goes on from an earlier log
        if course.points < _LONG or len(means) < 24 or not fresh or self.restarts:
            return ""
        parts = [median(means[i * len(means) // 12 : (i + 1) * len(means) // 12]) for i in range(12)]
        above = course.start + max(0.002 * abs(course.start), 2.0 * course.spread)  # three errors of a median of eight
        if course.start >= 0.5 and parts[-1] > course.start and sum(part > above for part in parts) >= 9:
            return f"the loss never stayed below where it began: {course.start:.4g} -> {course.present:.4g}"
        plateau = median(means[len(means) // 20 : len(means) // 10 + 1])
        fallen = (plateau - parts[-1]) / max(abs(plateau), 1e-12)
        calm = course.present_spread < 0.01 * abs(course.present)
        if course.present > 1.0 and calm and -0.04 < fallen < 0.04:
            return (
                f"the loss lies on a plateau of {course.present:.4g} from the first twentieth of the log on, "
                f"fallen by {fallen:.1%} since"
            )
        return ""

    # -- when it began -------------------------------------------------------------------------------------------------

    def _blowup(self, verdict: Verdict) -> tuple[int, int] | None:
        """(step, point) at which the loss first left its trend or was no longer finite; of lasting trouble only."""
        course = self.course
        found = [(b.blowup_step, b.blowup_point) for b in course.breaks[:1]]
        if found and course.breaks[0] is course.open and course.shifted():
            found = []
        if verdict == "nonfinite" and course.nonfinite_step is not None:
            run = course.nonfinite_run or course.nonfinite_longest
            found.append((course.nonfinite_step, max(course.points - run, 0)))
        return min(found, key=lambda f: f[1], default=None)

    def _leading_episode(self, blowup: tuple[int, int] | None) -> list[int]:
        """Indices of the alarms that belong to the trouble the verdict is about: those around the blow-up, and before it as
        long as one follows the other within 50 points; without a blow-up, the first such chain."""
        points = self._points
        if not points:
            return []
        first = last = 0
        if blowup is not None:
            near = [i for i, point in enumerate(points) if blowup[1] - _CHAIN <= point <= blowup[1] + 30]
            if not near:
                return []
            first, last = near[0], near[-1]
            while first > 0 and points[first] - points[first - 1] <= _CHAIN:
                first -= 1
        while last + 1 < len(points) and points[last + 1] - points[last] <= _CHAIN:
            last += 1
        return list(range(first, last + 1))

    def _onset(
        self, verdict: Verdict, blowup: tuple[int, int] | None, focus: list[int]
    ) -> tuple[int | None, float | None]:
        """First abnormal step and how sure: the earliest onset of the episode's alarms, or the blow-up itself."""
        early = min((self.alarms[i] for i in focus), key=lambda a: a.onset_step, default=None)
        if early is not None and (blowup is None or early.onset_step <= blowup[0]):
            return early.onset_step, early.onset_confidence
        if blowup is not None:
            return blowup[0], 0.5  # nobody saw it come: at least then
        if verdict == "collapse":
            return self._first_step, 0.3
        return None, None

    # -- what it points to -----------------------------------------------------------------------------------------------

    def _facts(
        self, verdict: Verdict, blowup: tuple[int, int] | None, onset: int | None, focus: list[int]
    ) -> dict[str, str]:
        course = self.course
        facts = self.clues.standing(course.present)
        trouble = verdict in ("diverged", "loss_spike", "nonfinite")
        point = min((self._points[i] for i in focus), default=0)
        if blowup is not None:
            point = min(point, blowup[1]) if focus else blowup[1]
        if onset is not None:
            troubles = sorted([*self._points, *(b.blowup_point for b in course.breaks)])
            around = self.clues.around(onset, point, course.points, troubles)
            if not trouble:  # an alarm during warm-up is no blow-up during warm-up
                around = {k: v for k, v in around.items() if k in ("restarted", "scale_fell", "lr_cut_brief")}
            facts |= around
        away: BreakAway | None = course.breaks[0] if course.breaks else None
        if away is not None:
            last = course.open
            if last is not None and course.shifted():
                facts["level_shift"] = f"{last.level:.4g} -> {course.present:.4g} at step {last.blowup_step}"
            elif last is not None:
                facts["diverged"] = (
                    f"the loss left its trend at step {last.blowup_step} and has not come back: {last.level:.4g} -> "
                    f"{course.present:.4g}"
                )
            if away.over_step is not None:
                facts["spiked"] = (
                    f"the loss left its trend at step {away.blowup_step} and was back at step {away.over_step}: "
                    f"{away.level:.4g} -> {away.peak:.4g}"
                )
            again = reinitialised(away, course.first)
            if again:
                facts["reinitialised"] = again
        if verdict == "nonfinite":
            facts["not_finite"] = f"not finite from step {course.nonfinite_step or self._step} on"
        if verdict == "collapse" and not any(
            a.statistic == "collapse" and a.signal != "eval_loss" for a in self.alarms
        ):
            facts["never_learned"] = f"{course.start:.4g} at the start, {course.present:.4g} at the end"
        lead = [i for i in focus if blowup is not None and self._points[i] < blowup[1] - 5]
        if blowup is not None and not lead and verdict in ("diverged", "loss_spike"):
            facts["abrupt"] = f"no alarm more than 5 points before the loss broke away at step {blowup[0]}"
        return facts


class _Past:
    """The monitor's states at intervals and the attempts since, so that it can be rewound as the live run's was."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._start = monitor.state_dict()
        self._complete = True  # nothing has been forgotten yet
        self._stretches: deque[_Stretch] = deque([_Stretch(self._start)])

    def push(self, observation: Observation, applied: bool) -> None:
        """An attempt that the monitor has absorbed."""
        stretch = self._stretches[-1]
        stretch.attempts.append((observation, applied))
        if len(stretch.attempts) >= _STATE_EVERY:
            if len(self._stretches) == _STATES:
                self._stretches.popleft()
                self._complete = False
            self._stretches.append(_Stretch(self._monitor.state_dict()))

    def rewind(self, step: int) -> bool:
        """Put the monitor into the state right after the last applied attempt at or before `step`. False if that lies
        further back than states are held; then it is in the oldest state held."""
        while True:
            stretch = self._stretches[-1]
            kept = [i for i, (seen, applied) in enumerate(stretch.attempts) if applied and seen.step <= step]
            if kept or len(self._stretches) == 1:
                break
            self._stretches.pop()
        if not kept and step <= 0:
            self._stretches = deque([_Stretch(self._start)])
            self._complete = True
            self._monitor.load_state_dict(self._start)
            return True
        stretch.attempts = stretch.attempts[: kept[-1] + 1] if kept else []
        self._monitor.load_state_dict(stretch.state)
        for observation, applied in stretch.attempts:
            self._monitor.absorb(observation, self._monitor.observe(observation), applied)
        return bool(kept) or self._complete


@dataclass
class _Stretch:
    """state: of the monitor before the attempts."""

    state: dict[str, Any]
    attempts: list[tuple[Observation, bool]] = field(default_factory=list)


def _points(count: int) -> str:
    return "1 point" if count == 1 else f"{count} points"


def _strict(value: Any) -> Any:
    """JSON without NaN and Infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return value
