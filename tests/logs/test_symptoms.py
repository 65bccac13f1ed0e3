"""The symptom table (S18, S20, T5, T8, T10): its rows, what they match, and the page made of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from resilient.diagnosis.symptom_table import FACTS, SYMPTOMS, Sign
from resilient.diagnosis.symptoms import causes, markdown
from resilient.signals import Alarm, Finding, Severity

ROOT = Path(__file__).parents[2]


def alarm(
    signal: str, statistic: str = "point", step: int = 100, onset: int | None = None, ranks: tuple[int, ...] = ()
) -> Alarm:
    return Alarm(step, "warn", signal, statistic, 9.0, step if onset is None else onset, 0.8, f"{signal} is off", ranks)


DIVERGED = {"diverged": "the loss left its trend at step 100"}
SPIKED = {"spiked": "the loss left its trend at step 100 and was back at step 110"}
NAN = {"not_finite": "not finite from step 100 on"}

CASES = {
    "S18 slow loss rise": ([alarm("loss", "trend")], DIVERGED, "slow_loss_rise", "optimizer"),
    "S18 sudden NaN": ([alarm("loss", "nonfinite")], NAN, "sudden_nan", "precision"),
    "S18 NaN after growth": (
        [alarm("grad_norm", "trend", 90), alarm("loss", "nonfinite", 100)], NAN, "nan_after_growth", "optimizer",
    ),
    "S18 gradient oscillates, then explodes": (
        [alarm("grad_norm", "scale", 60), alarm("grad_norm", "point", 95), alarm("loss", "point", 100)],
        DIVERGED, "gradient_oscillates_then_explodes", "optimizer",
    ),
    "S8 growing logits, normal loss": ([alarm("logit_max", "trend")], {}, "logits_grow", "optimizer"),
    "S9 attention entropy": ([alarm("attention_entropy", "level")], {}, "attention_entropy_jump", "optimizer"),
    "S18 multi-node loss jump": ([alarm("loss", "ranks", ranks=(2, 3))], {}, "multi_node_loss_jump", "communication"),
    "S19 spike with ranks": ([alarm("grad_norm", "ranks", ranks=(1,))], {}, "single_spike_on_a_rank", "communication"),
    "S19 spike without ranks": ([alarm("grad_norm", "point")], {}, "single_gradient_spike", "unknown"),
    "C2 reduction check": ([alarm("reduction", "check", ranks=(1,))], {}, "reduction_fails", "communication"),
    "BR-39 replicas": ([alarm("digest_parameters", "replica", ranks=(1,))], {}, "replicas_differ", "communication"),
    "S19 slow wire": ([alarm("collective_s", "time")], {}, "slow_wire", "communication"),
    "S19 straggler": ([alarm("compute_s", "time", ranks=(3,))], {}, "straggler", "compute"),
    "S18 shuffle mismatch": (
        [alarm("digest_sampler", "batch", ranks=(1,)), alarm("loss", "ranks", ranks=(1,))], {}, "shuffle_mismatch", "data",
    ),
    "S18 fed alike": ([alarm("digest_batch", "batch", ranks=(1, 3))], {}, "fed_alike", "data"),
    "BR-14 random streams": ([alarm("digest_rng_own", "replica", ranks=(1, 3))], {}, "random_streams", "data"),
    "S4 loss scale": ([alarm("loss_scale", "drop")], {}, "loss_scale_falls", "precision"),
    "BR-07 update norm first": (
        [alarm("update_norm", "trend", 80), alarm("grad_norm", "point", 100)], {}, "update_norm_first", "optimizer",
    ),
    "S3 one layer first": (
        [alarm("grad_norm/embedding", "point", 80), alarm("grad_norm", "point", 100)], {}, "one_layer_first", "optimizer",
    ),
    "S3 layers together": ([alarm("layers", "layers", 90), alarm("grad_norm", "point", 100)], {}, "one_layer_first", "optimizer"),
    "T10 evaluation alarm": ([alarm("eval_loss", "collapse")], {}, "overfitting", "data"),
    "S5 data window": ([alarm("loss", "level", 100)], SPIKED, "data_window", "data"),
    "S20 cut that helped briefly": (
        [alarm("loss")], {**SPIKED, "lr_cut_brief": "cut from 1e-3 to 5e-4"}, "lr_cut_helped_briefly", "data",
    ),
    "T8 explosion": ([alarm("grad_norm", "point", 98), alarm("loss", "point", 100)], DIVERGED, "gradient_explosion", "optimizer"),
    "T8 every step clips": ([], {"clips_always": "above 1 on 99 % of the rows"}, "every_step_clips", "optimizer"),
    "T8 lengths": ([alarm("longest", "point"), alarm("grad_norm", "point")], {}, "extreme_lengths", "data"),
    "T5 LR and warm-up": ([alarm("loss")], {**DIVERGED, "warming_up": "the LR was still rising"}, "lr_too_high", "optimizer"),
    "T5 LR rose": ([alarm("loss")], {**SPIKED, "lr_rose": "from 1e-4 to 1e-3"}, "lr_too_high", "optimizer"),
    "T5 never learned": ([], {"never_learned": "6.9 at the start, 6.9 at the end"}, "never_learned", "optimizer"),
    "T10 overfitting": ([], {"eval_rises": "best 2.1 at step 50, 2.6 at step 100"}, "overfitting", "data"),
    "S1 silent collapse": ([alarm("repetition", "collapse")], {}, "silent_collapse", "optimizer"),
    "T9 restart": ([alarm("loss")], {**SPIKED, "restarted": "began again at step 99"}, "resume_mismatch", "optimizer"),
    "T2 broken logger": ([], {"constant": "loss is 0 on all rows"}, "broken_logger", "unknown"),
    "T10 staircase": ([], {"staircase": "at 100, 200, 300"}, "epoch_staircase", "data"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_row_leads(name: str) -> None:
    """The symptom's own row is the most confident one, or level with it."""
    alarms, facts, symptom, cause = CASES[name]
    found = causes(alarms, facts)
    best = [report for report in found if report.confidence == found[0].confidence]
    report = next((r for r in best if r.symptom == symptom), None)
    assert report is not None, [(r.symptom, r.confidence) for r in found]
    assert report.cause == cause and report.evidence and report.remedies and report.rows
    assert 0 < report.confidence <= 1
    assert [r.confidence for r in found] == sorted((r.confidence for r in found), reverse=True)


def test_every_row_of_the_table_can_lead_or_stand_beside() -> None:
    """No row that nothing can reach."""
    reached = {report.symptom for alarms, facts, *_ in CASES.values() for report in causes(alarms, facts, limit=99)}
    more: list[tuple[list[Alarm], dict[str, str]]] = [
        ([], {**NAN, "early": "in the first tenth"}),
        ([], {**DIVERGED, "abrupt": "nothing before", "early": "in the first tenth"}),
        ([], {**DIVERGED, "abrupt": "nothing before"}),
        ([alarm("grad_norm", "scale")], SPIKED),
        ([], {"level_shift": "2.0 -> 2.5"}),
        ([], {"reinitialised": "jumped to 33"}),
    ]
    reached |= {report.symptom for alarms, facts in more for report in causes(alarms, facts, limit=99)}
    assert {row.id for row in SYMPTOMS} - reached == set()


def test_order_in_time_decides() -> None:
    """The same two alarms: the update first is the optimizer's, the gradient first is not told by that row."""
    late, early = alarm("update_norm", onset=100), alarm("grad_norm", onset=90)
    assert "update_norm_first" not in {r.symptom for r in causes([late, early])}
    assert "update_norm_first" in {r.symptom for r in causes([alarm("update_norm", onset=80), early])}


def test_a_spike_with_its_loss_is_not_the_wire() -> None:
    spike = alarm("grad_norm", "ranks", ranks=(1,))
    assert causes([spike])[0].cause == "communication"
    assert "single_spike_on_a_rank" not in {r.symptom for r in causes([spike, alarm("loss", "ranks", ranks=(1,))])}


def test_more_evidence_is_more_confidence() -> None:
    alone, both = (
        causes([alarm("logit_max", "trend")])[0],
        causes([alarm("logit_max", "trend"), alarm("grad_norm", "scale")]),
    )
    assert next(r for r in both if r.symptom == "logits_grow").confidence > alone.confidence


def test_what_is_only_watched_is_no_symptom() -> None:
    watched = Finding("trend", "logit_max", Severity.WATCH, 4.0, 100, 90, statistic="trend")
    assert causes([watched]) == ()
    warned = Finding("trend", "logit_max", Severity.WARN, 8.0, 100, 90, statistic="trend")
    assert causes([warned])[0].symptom == "logits_grow"


def test_nothing_off_is_no_cause_and_the_unexplained_is_said() -> None:
    assert causes([]) == ()
    (report,) = causes([alarm("loss_of_the_critic", "scale")])
    assert (report.cause, report.symptom) == ("unknown", "unexplained") and report.confidence < 0.3
    assert "loss_of_the_critic" in report.evidence[0]


def test_an_unknown_fact_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such facts: sunspots"):
        causes([], {"sunspots": "many"})


def test_an_infinite_score_can_be_told() -> None:
    found = causes([Alarm(5, "act", "loss", "nonfinite", float("inf"), 5, 1.0, "")], NAN)
    assert "sudden_nan" in {r.symptom for r in found}


def test_the_table_is_consistent() -> None:
    assert [name for name, count in Counter(row.id for row in SYMPTOMS).items() if count > 1] == []
    assert [title for title, count in Counter(row.symptom for row in SYMPTOMS).items() if count > 1] == []
    for row in SYMPTOMS:
        conditions = [*row.needs, *row.either, *row.unless, *(condition for condition, _ in row.stronger)]
        assert row.needs or row.either, row.id
        assert {c for c in conditions if isinstance(c, str)} <= FACTS.keys(), row.id
        assert row.rows and row.remedies and row.detail and 0.2 < row.confidence < 0.9, row.id
        assert all(c.signals for c in conditions if isinstance(c, Sign)), row.id
    named = {requirement for row in SYMPTOMS for requirement in row.rows}
    told = ["C2", "S1", "S3", "S4", "S5", "S8", "S9", "S12", "S18", "S19", "S20", "T2", "T5", "T8", "T9", "T10"]
    assert set(told) <= named
    used = {c for row in SYMPTOMS for c in (*row.needs, *row.either, *row.unless, *(c for c, _ in row.stronger))}
    assert FACTS.keys() - used == set()


def test_the_page_of_the_documentation_is_the_table() -> None:
    """docs/symptoms.md is written by `markdown()`; after a change of the table:
    python -c "from resilient.diagnosis.symptoms import markdown; print(markdown(), end='')" > docs/symptoms.md"""
    text = markdown()
    assert (ROOT / "docs" / "symptoms.md").read_text(encoding="utf-8") == text
    for row in SYMPTOMS:
        assert f"## {row.symptom}\n" in text and f"`{row.id}`" in text
        assert all(str(remedy)[1:] in text for remedy in row.remedies)
