"""The table of causes (DESIGN 5, issue 4 item 7): which rank, which cause, on what evidence, and what was not checked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.diagnosis import diagnose, wants_confirmation, wants_probe
from resilient.signals import (
    CheckPlan,
    Checks,
    Confirmation,
    Finding,
    LinkReport,
    Observation,
    Severity,
    Verdict,
)

WORLD = 4
HOSTS = ("n0", "n0", "n1", "n1")
ACT, WARN, WATCH = Severity.ACT, Severity.WARN, Severity.WATCH


def observation(
    check: bool = False,
    norms: tuple[float, ...] = (1.0,) * WORLD,
    tokens: tuple[float, ...] = (64.0,) * WORLD,
    **values,
) -> Observation:
    """check: there are sums of a reduction check, all of them measured."""
    world = len(norms)
    checks = None
    if check:
        plan = CheckPlan(("b0",), tuple((r,) for r in range(world)), 2.0**-24)
        checks = Checks(plan, np.ones((world, 1)), np.full((world, 1), float(world)), np.ones((world, 1)))
    per_rank = {"loss": np.full(world, 2.0), "local_grad_norm": np.array(norms), "tokens": np.array(tokens)}
    return Observation(100, 100, {"grad_norm": 1.0, "loss_scale": 1.0, **values}, per_rank, checks=checks)


def finding(
    signal: str, statistic: str, ranks: tuple[int, ...] = (), severity: Severity = ACT, onset: int = 100, **more
) -> Finding:
    base = Finding("d", signal, severity, 20.0, 100, onset, ranks, statistic=statistic, message=f"{signal} is off")
    return replace(base, **more)


NORM = finding("local_grad_norm", "ranks", (2,), place="backward", score=50.0)
LOSS = finding("loss", "ranks", (2,), place="loss")
NAN = finding("loss", "nonfinite", (2,), place="loss", score=math.inf)
NAN_GRAD = finding("grad_norm", "nonfinite", (2,), place="backward", score=math.inf)
NAN_ALL = replace(NAN, ranks=(0, 1, 2, 3))
NAN_REDUCED = finding("grad_norm", "nonfinite", (2,), place="reduction", score=math.inf)
CHECK = finding("reduction", "check", (2,), place="reduction")
LOST = replace(CHECK, ranks=())
REPLICA = finding("digest_parameters", "replica", (2,), onset=96)
PAIR = replace(REPLICA, ranks=(0, 1), message="ranks 0, 1; of two, none can be told to be right")
SPIKE = finding("grad_norm", "point")
CLEAN_PEER = Confirmation(2, True, True, 0, False, True, (50.0, 50.0, 1.0))
BAD_PEER = replace(CLEAN_PEER, peer_bad=True)
PASSED = Confirmation(2, False, False, norms=(50.0, 1.0))
NO_PEER = Confirmation(2, True, True, note="there is no other machine")
UNSTEADY = Confirmation(2, same_again=False)
CONTRADICTION = Confirmation(2, False, False, 0, True)
LINKS_FINE = LinkReport()

# name: (findings, options of `observation`, options of `diagnose`, cause, ranks, least confidence, most)
TABLE: dict[str, tuple] = {
    "outlier with its loss": ([NORM, LOSS], {"check": True}, {}, "data", (2,), 0.7, 0.7),
    "outlier with its loss, no check": ([NORM, LOSS], {}, {}, "data", (2,), 0.7, 0.7),
    "outlier of the loss only": ([LOSS], {}, {}, "data", (2,), 0.7, 0.7),
    "outlier, normal loss, check holds": ([NORM], {"check": True}, {}, "compute", (2,), 0.6, 0.6),
    "outlier, normal loss, no check (S19)": ([NORM], {}, {}, "communication", (2,), 0.5, 0.5),
    "S19, links in order": ([NORM], {}, {"links": LINKS_FINE}, "communication", (2,), 0.3, 0.4),
    "S19, a slow link": ([NORM], {}, {"links": LinkReport(slow_pairs=((1, 2),))}, "communication", (2,), 0.75, 0.8),
    "S19, a slow link elsewhere": ([NORM], {}, {"links": LinkReport(slow_pairs=((0, 1),))}, "communication", (2,), 0.3, 0.4),
    "S19, wrong bits": ([NORM], {}, {"links": LinkReport(wrong_pairs=((2, 3),))}, "communication", (2,), 0.95, 1.0),
    "outlier, wrong matmul": ([NORM], {"check": True}, {"links": LinkReport(wrong_ranks=(2,))}, "compute", (2,), 0.95, 1.0),
    "outlier, clean again": ([NORM], {"check": True}, {"confirmation": PASSED}, "compute", (2,), 0.9, 0.9),
    "outlier, clean on a peer": ([NORM], {"check": True}, {"confirmation": CLEAN_PEER}, "compute", (2,), 0.9, 0.9),
    "outlier, clean on a peer of the same host": (
        [NORM], {"check": True}, {"confirmation": replace(CLEAN_PEER, other_host=False)}, "compute", (2,), 0.75, 0.75,
    ),
    "outlier, off on the peer too": ([NORM], {"check": True}, {"confirmation": BAD_PEER}, "data", (2,), 0.9, 0.9),
    "S19, off on the peer too": ([NORM], {}, {"confirmation": BAD_PEER}, "data", (2,), 0.9, 0.9),
    "S19, clean again": ([NORM], {}, {"confirmation": PASSED}, "compute", (2,), 0.9, 0.9),
    "odd loss too, clean on a peer": ([NORM, LOSS], {}, {"confirmation": CLEAN_PEER}, "compute", (2,), 0.9, 0.9),
    "off again, no peer": ([NORM], {"check": True}, {"confirmation": NO_PEER}, "unknown", (2,), 0.5, 0.5),
    "other bits": ([NORM], {"check": True}, {"confirmation": UNSTEADY}, "compute", (2,), 0.6, 0.6),
    "runs that contradict": ([NORM], {"check": True}, {"confirmation": CONTRADICTION}, "unknown", (2,), 0.4, 0.4),
    "one step within the noise": ([replace(NORM, plausible=True)], {"check": True}, {}, "unknown", (2,), 0.4, 0.4),
    "one step within the noise, no check": ([replace(NORM, plausible=True)], {}, {}, "unknown", (2,), 0.4, 0.4),
    "one step within the noise, clean again": (
        [replace(NORM, plausible=True)], {"check": True}, {"confirmation": PASSED}, "compute", (2,), 0.9, 0.9,
    ),
    "one step within the noise, wrong bits": (
        [replace(NORM, plausible=True)], {}, {"links": LinkReport(wrong_pairs=((2, 3),))}, "communication", (2,), 0.95, 1.0,
    ),
    "a re-run of somebody else": (
        [NORM], {"check": True}, {"confirmation": replace(BAD_PEER, rank=1)}, "compute", (2,), 0.6, 0.6,
    ),
    "two ranks": ([NORM, replace(NORM, ranks=(3,), score=40.0)], {"check": True}, {}, "compute", (2, 3), 0.6, 0.6),
    "the global norm, and with it one rank's": (
        [SPIKE, replace(NORM, severity=WARN)], {"check": True}, {}, "compute", (2,), 0.6, 0.6,
    ),
    "the global norm, and a rank's odd loss": ([SPIKE, replace(LOSS, severity=WARN)], {"check": True}, {}, "data", (), 0.5, 0.5),
    "an empty batch": ([NORM, LOSS], {"tokens": (64, 64, 0, 64)}, {}, "data", (2,), 0.8, 0.8),
    "NaN of an empty batch": ([NAN], {"tokens": (64, 64, 0, 64)}, {}, "data", (2,), 0.8, 0.8),
    "NaN on one rank": ([NAN], {"check": True}, {}, "unknown", (2,), 0.5, 0.5),
    "NaN that follows the batch (BR-37)": ([NAN], {}, {"confirmation": BAD_PEER}, "data", (2,), 0.9, 0.9),
    "NaN of that machine (BR-37)": ([NAN_GRAD], {}, {"confirmation": CLEAN_PEER}, "compute", (2,), 0.9, 0.9),
    "NaN on all ranks at once": ([NAN_ALL], {}, {}, "precision", (0, 1, 2, 3), 0.5, 0.5),
    "NaN after growth": (
        [NAN_ALL, finding("update_norm", "drift", severity=WARN, onset=80)], {}, {}, "optimizer", (0, 1, 2, 3), 0.6, 0.6,
    ),
    "fp16 overflow": (
        [NAN_GRAD], {"loss_scale": 65536.0}, {"dynamic_scale": True}, "precision", (2,), 0.8, 0.8,
    ),
    "fp16 overflow of the sum": (
        [NAN_REDUCED], {"loss_scale": 65536.0}, {"dynamic_scale": True}, "precision", (2,), 0.6, 0.6,
    ),
    "NaN in the reduction (BR-03)": ([NAN_REDUCED], {}, {}, "communication", (2,), 0.8, 0.8),
    "NaN in the reduction, fp16, far from its range": (
        [NAN_REDUCED], {"loss_scale": 8.0}, {"dynamic_scale": True}, "communication", (2,), 0.8, 0.8,
    ),
    "check fails": ([CHECK], {"check": True}, {}, "communication", (2,), 0.9, 0.9),
    "check fails, receiver unknown": ([LOST], {"check": True}, {}, "communication", (), 0.9, 0.9),
    "check fails, beside an outlier": ([CHECK, NORM], {"check": True}, {}, "communication", (2,), 0.9, 0.9),
    "check fails, wrong bits": (
        [CHECK], {"check": True}, {"links": LinkReport(wrong_pairs=((2, 3),))}, "communication", (2,), 0.95, 1.0,
    ),
    "check fails, links in order": ([CHECK], {"check": True}, {"links": LINKS_FINE}, "communication", (2,), 0.9, 0.9),
    "check fails and NaN": ([NAN_REDUCED, replace(CHECK, score=math.inf)], {"check": True}, {}, "communication", (2,), 0.9, 0.9),
    "a lossy transport": ([replace(CHECK, severity=WARN)], {"check": True}, {}, "precision", (), 0.4, 0.4),
    "replicas differ, check holds": ([REPLICA], {"check": True}, {}, "compute", (2,), 0.7, 0.7),
    "replicas differ, no check (BR-39)": ([REPLICA], {}, {}, "communication", (2,), 0.4, 0.4),
    "two replicas": ([PAIR], {"check": True}, {}, "compute", (0, 1), 0.7, 0.7),
    "one random stream (BR-14)": (
        [finding("digest_rng_own", "replica", (1, 3), WARN)], {}, {}, "data", (1, 3), 0.7, 0.7,
    ),
    "buffers differ": ([finding("digest_buffers", "replica", (1,), WARN)], {}, {}, "unknown", (1,), 0.4, 0.4),
    "shuffle mismatch (S18)": ([finding("digest_sampler", "batch", (3,), WARN)], {}, {}, "data", (3,), 0.8, 0.9),
    "fed alike (S18)": ([finding("digest_batch", "batch", (1, 3), WARN)], {}, {}, "data", (1, 3), 0.8, 0.9),
    "straggler": ([finding("compute_s", "time", (1,), WARN)], {}, {}, "compute", (1,), 0.7, 0.7),
    "straggler, slow in the self-test": (
        [finding("compute_s", "time", (1,), WARN)], {}, {"links": LinkReport(slow_ranks=(1,))}, "compute", (1,), 0.9, 0.9,
    ),
    "slow wire": ([finding("collective_s", "time", (), WARN)], {}, {}, "communication", (), 0.6, 0.6),
    "slow wire, probed": (
        [finding("collective_s", "time", (), WARN)], {}, {"links": LinkReport(slow_pairs=((0, 3), (1, 3)))},
        "communication", (3,), 0.75, 0.8,
    ),
    "slow wire between two ranks": (
        [finding("collective_s", "time", (), WARN)], {"norms": (1.0, 1.0), "tokens": (64.0, 64.0)}, {},
        "communication", (0, 1), 0.6, 0.6,
    ),
    "a rank that all wait for (S19)": ([finding("collective_s", "time", (1,), WARN)], {}, {}, "communication", (1,), 0.6, 0.6),
    "a rank that all wait for, a slow link": (
        [finding("collective_s", "time", (1,), WARN)], {}, {"links": LinkReport(slow_pairs=((1, 2),))},
        "communication", (1,), 0.75, 0.8,
    ),
    "a rank that all wait for, links in order": (
        [finding("collective_s", "time", (1,), WARN)], {}, {"links": LINKS_FINE}, "communication", (1,), 0.3, 0.4,
    ),
    "the same samples (S18)": ([finding("digest_sample", "batch", (0, 2), WARN)], {}, {}, "data", (0, 2), 0.8, 0.9),
    "off on all ranks, and past": ([finding("loss", "passed", severity=WARN, onset=99)], {}, {}, "data", (), 0.65, 0.65),
    "off on all ranks and past, after an LR that rose": (
        [finding("loss", "passed", severity=WARN, onset=99)], {}, {"lr_change": 30.0}, "optimizer", (), 0.75, 0.75,
    ),
    "off on all ranks and past, the update first": (
        [finding("loss", "passed", severity=WARN, onset=99), finding("update_norm", "point", severity=WARN, onset=98)],
        {}, {}, "optimizer", (), 0.65, 0.65,
    ),
    "all ranks, once": ([SPIKE], {}, {}, "data", (), 0.5, 0.5),
    "all ranks, the weights stood still": ([SPIKE], {}, {"refused_in_a_row": 2}, "optimizer", (), 0.6, 0.6),
    "all ranks, weights proven": (
        [SPIKE], {}, {"refused_in_a_row": 2, "weights_proven": True}, "data", (), 0.6, 0.6,
    ),
    "all ranks, the update first": (
        [SPIKE, finding("update_norm", "point", severity=WARN)], {}, {}, "optimizer", (), 0.65, 0.65,
    ),
    "all ranks, the update later": (
        [replace(SPIKE, onset_step=90), finding("update_norm", "point", severity=WARN)], {}, {}, "data", (), 0.5, 0.5,
    ),
    "all ranks, the LR rose": ([SPIKE], {}, {"lr_change": 30.0}, "optimizer", (), 0.75, 0.75),
    "all ranks, logits before": (
        [SPIKE, finding("logit_max", "trend", severity=WARN, onset=60)], {}, {}, "optimizer", (), 0.5, 0.5,
    ),
    "all ranks, logits with it": ([SPIKE, finding("logit_max", "point", severity=WARN)], {}, {}, "data", (), 0.5, 0.5),
    "a norm that no mean has": ([SPIKE], {"grad_norm": 9.0}, {}, "communication", (), 0.6, 0.6),
    "a norm that no mean has, but the check holds": ([SPIKE], {"grad_norm": 9.0, "check": True}, {}, "data", (), 0.5, 0.5),
    "the loss scale falls": ([finding("loss_scale", "drop", severity=ACT)], {}, {}, "precision", (), 0.7, 0.7),
    "a spike while the loss scale falls": (
        [SPIKE, finding("loss_scale", "drop", severity=WARN, onset=70)], {}, {}, "precision", (), 0.7, 0.7,
    ),
    "a slow rise": ([finding("loss", "drift", severity=WARN)], {}, {}, "unknown", (), 0.3, 0.3),
    "a gradient that widens": ([finding("grad_norm", "scale", severity=WARN)], {}, {}, "optimizer", (), 0.4, 0.4),
    "overfitting": ([finding("eval_loss", "collapse", severity=WARN)], {}, {}, "data", (), 0.4, 0.4),
}  # fmt: skip


def judged(findings: list[Finding], seen: dict, known: dict) -> Verdict:
    known = {"dynamic_scale": False, "refused_in_a_row": 0, "hosts": HOSTS, **known}
    verdict = diagnose(observation(**seen), findings, **known)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    findings, seen, known, cause, ranks, least, most = TABLE[name]
    verdict = judged(findings, seen, known)
    assert (verdict.cause, verdict.ranks) == (cause, ranks), verdict
    assert least <= verdict.confidence <= most, verdict
    assert verdict.evidence and all(isinstance(e, str) and e for e in (*verdict.evidence, *verdict.unchecked))
    assert verdict.hosts == tuple(dict.fromkeys(HOSTS[r] for r in ranks))
    assert verdict.onset_step <= 100 and verdict.findings == tuple(findings)


def test_nothing_found_is_no_verdict() -> None:
    assert diagnose(observation(check=True), [], dynamic_scale=False, refused_in_a_row=0) is None


def test_severity_is_that_of_what_is_about_the_attempt() -> None:
    assert judged([finding("loss", "drift")], {}, {}).severity is WARN
    assert judged([finding("compute_s", "time", (1,))], {}, {}).severity is WARN
    assert judged([CHECK], {}, {}).severity is judged([REPLICA], {}, {}).severity is ACT
    assert judged([finding("digest_batch", "batch", (1, 3), WATCH)], {}, {}).severity is WATCH


def test_an_overflow_is_the_scalers_business_and_a_sum_that_cannot_overflow_is_not() -> None:
    assert judged(*TABLE["fp16 overflow"][:3]).scale_overflow
    assert judged(*TABLE["fp16 overflow of the sum"][:3]).scale_overflow
    assert not judged(*TABLE["NaN in the reduction, fp16, far from its range"][:3]).scale_overflow


class TestWhatIsMissing:
    def test_an_outlier_is_worth_a_rerun_until_it_was_made(self) -> None:
        for findings in ([NORM], [replace(NORM, plausible=True)], [NORM, LOSS], [NAN], [NAN_GRAD]):
            assert wants_confirmation(judged(findings, {"check": True}, {})) == 2
            for made in (PASSED, CLEAN_PEER, BAD_PEER, NO_PEER, UNSTEADY, Confirmation(2, note="no time was left")):
                again = judged(findings, {"check": True}, {"confirmation": made})
                assert wants_confirmation(again) is None and again.confidence >= 0.4

    def test_the_worst_of_several_is_run_again(self) -> None:
        verdict = judged([NORM, replace(NORM, ranks=(3,), score=400.0)], {"check": True}, {})
        assert wants_confirmation(verdict) == 3

    @pytest.mark.parametrize("findings", [[CHECK], [REPLICA], [SPIKE], [NAN_ALL], [replace(NORM, severity=WARN)]])
    def test_nothing_else_is(self, findings: list[Finding]) -> None:
        assert wants_confirmation(judged(findings, {"check": True}, {})) is None

    def test_an_overflow_is_not(self) -> None:
        assert wants_confirmation(judged(*TABLE["fp16 overflow"][:3])) is None

    def test_a_wire_is_probed_once(self) -> None:
        for findings in (
            [CHECK],
            [LOST],
            [NORM],
            [NAN_REDUCED],
            [REPLICA],
            [finding("collective_s", "time", (), WARN)],
        ):
            assert wants_probe(judged(findings, {}, {}))
            assert not wants_probe(judged(findings, {}, {"links": LINKS_FINE}))
        for findings in ([NORM], [REPLICA], [SPIKE], [NAN], [NORM, LOSS]):
            assert not wants_probe(judged(findings, {"check": True}, {}))

    def test_what_was_not_established_is_said(self) -> None:
        assert "the reduction was not checked" in judged([NORM], {}, {}).unchecked
        assert "the reduction was not checked" not in judged([NORM], {"check": True}, {}).unchecked
        assert any(
            "same machine" in u for u in judged(*TABLE["outlier, clean on a peer of the same host"][:3]).unchecked
        )
        assert "there is no other machine" in judged(*TABLE["off again, no peer"][:3]).unchecked
        assert "which of them is wrong" in judged(*TABLE["two replicas"][:3]).unchecked

    def test_a_check_that_could_not_measure_does_not_hold(self) -> None:
        seen = observation(check=True)
        assert seen.checks is not None
        seen.checks.before[1, 0] = np.nan
        verdict = diagnose(seen, [NORM], dynamic_scale=False, refused_in_a_row=0)
        assert verdict is not None and verdict.cause == "communication"


def test_ranks_of_one_machine_are_said_to_be() -> None:
    verdict = judged([NORM, replace(NORM, ranks=(3,))], {"check": True}, {})
    assert verdict.hosts == ("n1",) and "all of these ranks are on n1" in verdict.evidence


def test_evidence_has_the_numbers() -> None:
    told = " ".join(judged([NORM], {"check": True}, {"confirmation": CLEAN_PEER}).evidence)
    assert "its loss 2 is as usual" in told and "50, 50, 1" in told and "rank 0, another machine" in told


_KINDS = st.sampled_from([NORM, LOSS, NAN, NAN_GRAD, CHECK, REPLICA, NAN_REDUCED, replace(NORM, severity=WARN)])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(_KINDS, st.integers(0, WORLD - 1)), min_size=1, max_size=4),
    st.permutations(range(WORLD)),
    st.booleans(),
    st.sampled_from([None, PASSED, CLEAN_PEER, BAD_PEER]),
)
def test_permuting_ranks_permutes_the_verdict(
    kinds: list[tuple[Finding, int]], order: list[int], check: bool, confirmed: Confirmation | None
) -> None:
    """No rank is special: rank r renamed order[r] everywhere gives the same verdict about order[r]."""
    plain = [replace(f, ranks=(r,), score=f.score + i) for i, (f, r) in enumerate(kinds)]
    renamed = [replace(f, ranks=(order[f.ranks[0]],)) for f in plain]
    moved = None
    if confirmed is not None:
        peer = None if confirmed.peer is None else order[confirmed.peer]
        moved = replace(confirmed, rank=order[confirmed.rank], peer=peer)
    hosts = ["" for _ in order]
    for r, o in enumerate(order):
        hosts[o] = HOSTS[r]
    a = judged(plain, {"check": check}, {"confirmation": confirmed})
    b = judged(renamed, {"check": check}, {"confirmation": moved, "hosts": tuple(hosts)})
    assert (a.cause, a.confidence, a.severity, a.place) == (b.cause, b.confidence, b.severity, b.place)
    assert tuple(sorted(order[r] for r in a.ranks)) == b.ranks and set(a.hosts) == set(b.hosts)
    assert wants_probe(a) == wants_probe(b)
    first = wants_confirmation(a)
    assert (None if first is None else order[first]) == wants_confirmation(b)
