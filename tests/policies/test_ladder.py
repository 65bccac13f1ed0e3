"""The ladder: skip, roll back, stop; budgets that do not reset themselves (S16, BR-02, BR-46, BR-51)."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from resilient.policies import Ladder, PolicyConfig, RollbackConfig, SkipConfig
from resilient.signals import Decision, Finding, Severity, Verdict

CONFIG = PolicyConfig(
    skip=SkipConfig(max_in_a_row=2, stretch=4, budget=6, window=100),
    rollback=RollbackConfig(budget=2, cooldown=1, lr_factor=0.5, clip_factor=0.5, rewarm=4),
)


def verdict(step: int, **changes) -> Verdict:
    base = Verdict(
        cause="data", severity=Severity.ACT, ranks=(), onset_step=step, confidence=0.5, evidence=("bad",), findings=()
    )
    return replace(base, **changes)


def run(
    ladder: Ladder, verdicts: list[Verdict | None], step: int = 10, attempt: int = 10, targets: int = 2
) -> list[Decision]:
    taken = []
    for v in verdicts:
        decision = ladder.decide(v, step=step, attempt=attempt, targets=targets)
        ladder.settle(decision)
        taken.append(decision)
        attempt += 1
        step += decision.action == "apply"
    return taken


def test_skips_then_rolls_back_before_the_first_onset_then_recovers():
    ladder = Ladder(CONFIG)
    actions = run(ladder, [verdict(10), verdict(10), verdict(10), None])
    assert [d.action for d in actions] == ["skip", "skip", "rollback", "apply"]
    assert actions[2].onset_step == 10 and actions[2].skip_data
    assert (actions[2].knobs.lr_factor, actions[2].knobs.clip_factor) == (0.5, 0.5)


def test_lr_comes_back_linearly_and_clip_with_it():
    ladder = Ladder(CONFIG)
    run(ladder, [verdict(10)] * 3)
    factors = []
    for _ in range(6):
        decision = ladder.decide(None, step=9, attempt=99, targets=2)
        factors.append((decision.knobs.lr_factor, decision.knobs.clip_factor))
        ladder.settle(decision)
    assert [f for f, _ in factors] == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]
    assert [c for _, c in factors] == [0.5] * 4 + [1.0] * 2


def test_a_communication_verdict_keeps_the_data_and_the_lr():
    ladder = Ladder(CONFIG)
    taken = run(ladder, [verdict(10, cause="communication", ranks=(1,))] * 3)
    assert taken[2].action == "rollback" and not taken[2].skip_data and taken[2].knobs.neutral


def test_data_refused_beside_a_communication_fault_stay_too():
    """One row of refusals: the window that the wire has spoiled is between the onset and now, so nothing of it is left out.
    The bad batch comes again after the rollback and is then the only one."""
    for kinds in (["communication", "data", "data"], ["data", "compute", "data"]):
        ladder = Ladder(CONFIG)
        taken = run(ladder, [verdict(10, cause=kind) for kind in [*kinds, "data"]])
        assert taken[3].action == "rollback" and not taken[3].skip_data, kinds
        assert run(ladder, [verdict(10)] * 3, attempt=14)[2].skip_data, kinds
    ladder = Ladder(CONFIG)
    run(ladder, [verdict(10, cause="communication"), None])
    assert run(ladder, [verdict(12)] * 3, step=12, attempt=12)[2].skip_data


def test_a_fault_of_machine_or_wire_is_run_again_then_gone_back_from_and_costs_no_data():
    for cause in ("compute", "communication"):
        ladder = Ladder(CONFIG)
        taken = run(ladder, [verdict(10, cause=cause)] * 3)
        assert [d.action for d in taken] == ["retry", "retry", "rollback"], cause
        assert not any(d.skip_data for d in taken) and taken[2].knobs.neutral and taken[0].incident
        assert ladder.refused_in_a_row == 0  # it was always the same batch: that says nothing about the weights
    ladder = Ladder(CONFIG)
    assert [d.action for d in run(ladder, [verdict(10, cause="compute"), None, verdict(12, cause="compute")])] == [
        "retry",
        "apply",
        "retry",
    ]
    ladder = Ladder(CONFIG)  # nowhere to go back to: its batch is left, rather than the job
    taken = run(ladder, [verdict(10, cause="compute")] * 3, targets=0)
    assert [d.action for d in taken] == ["retry", "retry", "skip"]


def test_a_fault_of_machine_or_wire_that_does_not_pass_ends_the_job_rather_than_its_data():
    ladder = Ladder(CONFIG)
    taken = run(ladder, [verdict(10, cause="compute")] * 12)
    actions = [d.action for d in taken]
    end = actions.index("stop")
    assert (
        actions[:end].count("rollback") == CONFIG.rollback.budget and "skip" not in actions[: actions.index("rollback")]
    )


def test_a_retry_counts_in_the_budget_and_is_only_told_when_observing():
    ladder = Ladder(replace(CONFIG, skip=replace(CONFIG.skip, budget=1)))
    assert [d.action for d in run(ladder, [verdict(10, cause="compute")] * 2)] == ["retry", "rollback"]
    ladder = Ladder(replace(CONFIG, mode="observe"))
    (taken,) = run(ladder, [verdict(10, cause="compute")])
    assert (taken.action, taken.would) == ("apply", "retry")


def test_what_the_wire_has_spoiled_is_remembered_across_a_restart():
    ladder, twin = Ladder(CONFIG), Ladder(CONFIG)
    run(ladder, [verdict(10, cause="communication"), verdict(10)])
    twin.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
    assert not run(twin, [verdict(10)], attempt=12)[0].skip_data


def test_replicas_that_differ_are_rolled_back_at_once_and_never_trained_on():
    """BR-39: the weights in force are wrong; refusing a step would keep them."""
    found = Finding("replicas", "digest_parameters", Severity.ACT, 1.0, 96, 88, (2,), statistic="replica")
    differ = verdict(88, cause="compute", ranks=(2,), findings=(found,))
    ladder = Ladder(CONFIG)
    (taken,) = run(ladder, [differ], step=96)
    assert (taken.action, taken.onset_step, taken.skip_data) == ("rollback", 88, False)
    assert taken.knobs.neutral and taken.incident
    assert run(ladder, [differ], step=96, attempt=11)[0].action == "rollback"
    assert run(ladder, [differ], step=96, attempt=12)[0].action == "stop"  # the budget
    assert run(Ladder(CONFIG), [differ], step=96, targets=0)[0].action == "stop"
    watched = replace(differ, severity=Severity.WARN, findings=(replace(found, severity=Severity.WARN),))
    assert run(Ladder(CONFIG), [watched], step=96)[0].action == "apply"


def test_repeats_cut_harder_and_go_further_back():
    ladder = Ladder(CONFIG)
    run(ladder, [verdict(10)] * 3)
    assert ladder.repeats == 1
    again = run(ladder, [verdict(10)] * 3, attempt=13)  # at once: the restored weights have proved nothing
    assert again[2].action == "rollback" and again[2].knobs.lr_factor == 0.25
    run(ladder, [None] * CONFIG.rollback.rewarm)
    assert ladder.repeats == 0 and not ladder.weights_proven  # probation passed


def test_once_restored_weights_ran_cleanly_a_bad_stretch_of_data_is_passed_over():
    ladder = Ladder(CONFIG)
    run(ladder, [verdict(10)] * 3 + [None])
    assert ladder.weights_proven
    assert [d.action for d in run(ladder, [verdict(10)] * 3 + [None], attempt=14)] == ["skip", "skip", "skip", "apply"]
    # but not for ever: the stretch has an end
    taken = [d.action for d in run(ladder, [verdict(11)] * 4, attempt=18)]
    assert taken == ["skip", "rollback", "stop", "stop"]


def test_a_fault_that_always_returns_ends_after_exactly_the_budget():
    ladder = Ladder(CONFIG)
    taken = run(ladder, [verdict(10)] * 40)
    assert [d.action for d in taken].count("rollback") == CONFIG.rollback.budget
    stop = next(i for i, d in enumerate(taken) if d.action == "stop")
    assert [d.action for d in taken[:stop]].count("skip") == CONFIG.skip.budget
    assert "budget" in taken[stop].reason


def test_budget_survives_a_round_trip_through_json():
    ladder, twin = Ladder(CONFIG), Ladder(CONFIG)
    run(ladder, [verdict(10)] * 3 + [None])
    twin.load_state_dict(json.loads(json.dumps(ladder.state_dict())))
    assert run(ladder, [verdict(11)] * 8, attempt=14) == run(twin, [verdict(11)] * 8, attempt=14)


def test_without_a_target_it_keeps_skipping_and_then_stops():
    taken = run(Ladder(CONFIG), [verdict(10)] * 10, targets=0)
    assert [d.action for d in taken[:7]] == ["skip"] * 6 + ["stop"]


def test_an_ordinary_overflow_costs_no_budget_and_is_no_incident():
    ladder = Ladder(CONFIG)
    overflow = verdict(10, cause="precision", scale_overflow=True)
    taken = run(ladder, [overflow] * CONFIG.max_overflows_in_a_row)
    assert all(d.action == "skip" and d.overflow and not d.incident for d in taken)
    assert ladder.skips_left(99) == CONFIG.skip.budget
    assert run(ladder, [overflow])[0].incident  # and one too many is not a scale problem any more


def test_warnings_do_not_act():
    assert run(Ladder(CONFIG), [verdict(10, severity=Severity.WARN)])[0].action == "apply"


def test_observe_says_what_it_would_do_and_applies():
    ladder = Ladder(replace(CONFIG, mode="observe"))
    taken = run(ladder, [verdict(10)] * 3)
    assert [(d.action, d.would) for d in taken] == [("apply", "skip"), ("apply", "skip"), ("apply", "rollback")]
    assert all(d.knobs.neutral for d in taken)


@given(st.lists(st.sampled_from(["ok", "bad", "comm", "overflow"]), max_size=80), st.integers(0, 3))
def test_budgets_are_never_exceeded_and_the_digest_depends_on_the_inputs_only(kinds: list[str], targets: int):
    made = {
        "ok": None,
        "bad": verdict(10),
        "comm": verdict(10, cause="communication"),
        "overflow": verdict(10, scale_overflow=True),
    }
    one, two = (run(Ladder(CONFIG), [made[k] for k in kinds], targets=targets) for _ in range(2))
    assert [d.digest() for d in one] == [d.digest() for d in two]
    assert sum(d.action == "rollback" for d in one) <= CONFIG.rollback.budget
    spoiled = False
    for kind, d in zip(kinds, one, strict=True):
        spoiled = (spoiled or kind == "comm") and kind != "ok"
        assert not (spoiled and d.skip_data)
        spoiled = spoiled and d.action != "rollback"
        if d.action == "stop":
            break
    if targets == 0:
        assert not any(d.action == "rollback" for d in one)
