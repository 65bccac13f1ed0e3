"""The reduction check judged: silent on healthy rounding, and it names who received something else (C2, S19, BR-03)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilient.detectors.reduction import ReductionCheck, located, rounding
from resilient.signals import CheckPlan, Checks, Finding, Located, Observation, Severity

UNIT = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}


def rounded(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """float32 -> the nearest values of the dtype, as float32."""
    if dtype == "fp32":
        return lambda x: x.astype(np.float32)
    if dtype == "fp16":
        return lambda x: x.astype(np.float16).astype(np.float32)

    def bf16(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        return ((bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) & np.uint32(0xFFFF0000)).view(np.float32)

    return bf16


def simulated(
    dtype: str,
    world: int,
    steps: int,
    *,
    seed: int = 0,
    cells: int = 2,
    size: int = 32,
    scale: float = 1.0,
    common: float = 0.5,
    uneven: float = 0.0,
    sharded: bool = False,
) -> Iterator[Observation]:
    """Gradients that were really added rank by rank in the dtype. common: share that all ranks have; uneven: spread of
    the ranks' sizes, in log units."""
    rng, to = np.random.default_rng(seed), rounded(dtype)
    signs = rng.choice([-1.0, 1.0], (cells, size))
    names = tuple(f"bucket {c}" for c in range(cells))
    ranks = tuple(range(world))
    plan = CheckPlan(names, (ranks,) if sharded else tuple((r,) for r in ranks), UNIT[dtype])
    for at in range(0, steps, 64):
        batch = min(64, steps - at)
        noise = rng.standard_normal((batch, world, cells, size)) * np.exp(
            uneven * rng.standard_normal((1, world, 1, 1))
        )
        sizes = scale * np.exp(rng.standard_normal((batch, 1, cells, size)))
        gradient = ((common * rng.standard_normal((batch, 1, cells, size)) + noise) * sizes).astype(np.float32)
        sent = to(to(gradient) * np.float32(1 / world))
        total = sent[:, 0]
        for r in range(1, world):
            total = to(total + sent[:, r])
        before = (sent.astype(np.float64) * signs).sum(-1).astype(np.float32).astype(np.float64)
        sq = np.square(sent, dtype=np.float64).sum(-1)
        whole = total.astype(np.float64) * signs
        if sharded:
            owner = np.arange(size) * world // size
            after = np.stack([(whole * (owner == r)).sum(-1) for r in ranks], axis=1)
        else:
            after = np.repeat(whole.sum(-1)[:, None], world, axis=1)
        norm = np.sqrt(np.square(total, dtype=np.float64).sum((1, 2)))
        for i in range(batch):
            checks = Checks(plan, before[i], after[i], sq[i])
            yield Observation(at + i, at + i, {"grad_norm": float(norm[i])}, checks=checks)


def feed(detector: ReductionCheck, observations: Iterator[Observation]) -> list[Finding]:
    found = []
    for observation in observations:
        findings = detector.observe(observation)
        detector.absorb(observation, findings, not findings)
        found += findings
    return found


def changed(observation: Observation, **parts: np.ndarray) -> Observation:
    assert observation.checks is not None
    return replace(observation, checks=replace(observation.checks, **parts))


def sums(observation: Observation) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    assert observation.checks is not None
    return observation.checks.before.copy(), observation.checks.after.copy(), observation.checks.sq.copy()


def after_some(world: int = 4, dtype: str = "fp32", **options) -> tuple[ReductionCheck, Observation]:
    """A detector that has seen 20 clean windows, and the next one."""
    detector = ReductionCheck()
    *seen, ahead = simulated(dtype, world, 21, size=256, **options)
    assert feed(detector, iter(seen)) == []
    return detector, ahead


CLEAN = [
    ("fp32", 2, {}),
    ("fp32", 64, {"uneven": 3.0}),
    ("fp32", 4, {"scale": 1e-30}),
    ("fp32", 4, {"scale": 1e15, "sharded": True}),
    ("fp32", 4, {"scale": 1e-42}),  # denormal: squares of it are 0
    ("fp32", 8, {"scale": 0.0}),
    ("bf16", 2, {"sharded": True}),
    ("bf16", 8, {"common": 10.0, "sharded": True}),
    ("bf16", 32, {"uneven": 2.0}),
    ("bf16", 3, {"scale": 1e-6}),
    ("fp16", 4, {"sharded": True}),
    ("fp16", 16, {"scale": 100.0, "common": 2.0}),
    ("fp16", 2, {"scale": 1e-6}),  # fp16 denormals
]


class TestSilence:
    @pytest.mark.parametrize(("dtype", "world", "options"), CLEAN)
    def test_healthy_rounding_is_no_finding(self, dtype: str, world: int, options: dict) -> None:
        assert feed(ReductionCheck(), simulated(dtype, world, 400, **options)) == []

    @pytest.mark.parametrize("dtype", UNIT)
    def test_nor_is_a_large_world(self, dtype: str) -> None:
        assert feed(ReductionCheck(), simulated(dtype, 1024, 2, size=64, uneven=1.0)) == []

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize(("dtype", "world", "options"), CLEAN)
    def test_nor_in_1e5_steps(self, dtype: str, world: int, options: dict) -> None:
        """1e5 steps over the table (Must reach: no false communication verdict)."""
        assert feed(ReductionCheck(), simulated(dtype, world, 100_000 // len(CLEAN), seed=9, **options)) == []

    def test_without_checks_it_says_nothing(self) -> None:
        detector, observation = ReductionCheck(), Observation(1, 1, {"loss": 1.0})
        assert detector.observe(observation) == [] and detector.failed_cells(observation) == ()
        detector.absorb(observation, [], True)

    def test_a_rank_that_sent_nan_or_could_not_measure_is_another_detectors_business(self) -> None:
        detector, ahead = after_some()
        before, after, _ = sums(ahead)
        before[1, 0] = np.nan
        after[:, 0] = np.nan
        assert detector.observe(changed(ahead, before=before, after=after)) == []
        after[2, 1] *= 2  # the other cell is still judged
        (found,) = detector.observe(changed(ahead, before=before, after=after))
        assert found.ranks == (2,) and found.message.startswith("bucket 1:")


class TestNaming:
    @pytest.mark.parametrize("world", [2, 3, 8])
    @pytest.mark.parametrize(("dtype", "relative"), [("fp32", 1e-3), ("bf16", 5e-2)])
    def test_one_receiver(self, world: int, dtype: str, relative: float) -> None:
        """A change of one element is seen in full: |r.d| = |d|."""
        for rank in range(world):
            detector, ahead = after_some(world, dtype)
            _, after, sq = sums(ahead)
            after[rank, 1] += relative * np.sqrt(sq[:, 1].sum())
            (found,) = detector.observe(changed(ahead, after=after))
            assert (found.ranks, found.severity, found.place) == ((rank,), Severity.ACT, "reduction")
            assert (found.signal, found.statistic, found.detector) == ("reduction", "check", "reduction")
            assert detector.failed_cells(changed(ahead, after=after)) == (1,)

    @pytest.mark.parametrize(("dtype", "world", "relative"), [("fp32", 64, 1e-3), ("bf16", 4, 5e-2)])
    def test_a_shard_is_left_to_the_second_pass(self, dtype: str, world: int, relative: float) -> None:
        detector, ahead = after_some(world, dtype, sharded=True)
        _, after, sq = sums(ahead)
        after[2, 0] += relative * np.sqrt(sq[:, 0].sum())
        (found,) = detector.observe(changed(ahead, after=after))
        assert found.ranks == () and "second pass" in found.message and found.severity is Severity.ACT

    def test_a_change_that_cancels_on_the_first_lane_shows_on_another(self) -> None:
        """C2: and it is left to the second pass who received it, also where each rank receives everything."""
        for sharded in (False, True):
            detector, ahead = after_some(sharded=sharded)
            checks = ahead.checks
            assert checks is not None
            lanes = np.zeros((*checks.before.shape, 7))
            assert detector.observe(changed(ahead, lanes=lanes)) == []
            lanes[2, 1, 4] = -1e-3 * np.sqrt(checks.sq[:, 1].sum())
            (found,) = detector.observe(changed(ahead, lanes=lanes))
            assert found.severity is Severity.ACT and found.ranks == () and found.message.startswith("bucket 1:")
            assert detector.failed_cells(changed(ahead, lanes=lanes)) == (1,)

    def test_sums_of_all_ranks_judge_like_the_ranks_themselves(self) -> None:
        """Sketch mode: single ranks are not known; the number of ranks is."""
        _, ahead = after_some(8, "bf16", sharded=True)
        checks = ahead.checks
        assert checks is not None
        parts = (checks.before, checks.after, checks.sq)
        plan = replace(checks.plan, receivers=((0,),))
        before, after, sq = (part.sum(axis=0, keepdims=True) for part in parts)
        together = replace(ahead, checks=Checks(plan, before, after, sq, sq, world=8))
        assert ReductionCheck().observe(together) == []
        wrong = replace(ahead, checks=Checks(plan, before, after + 5e-2 * np.sqrt(sq), sq, sq, world=8))
        assert len(ReductionCheck().failed_cells(wrong)) == 2
        (found,) = ReductionCheck().observe(replace(together, checks=Checks(plan, before, 2 * before, sq, sq, world=8)))
        assert found.ranks == () and "rank 0" not in found.message, "a sum over all ranks is no rank's contribution"

    def test_not_finite_on_one_receiver_and_on_all(self) -> None:
        """BR-03: all that was sent is finite."""
        detector, ahead = after_some(sharded=True)
        _, after, _ = sums(ahead)
        after[3, 1] = np.nan
        (found,) = detector.observe(changed(ahead, after=after))
        assert found.ranks == (3,) and found.score == np.inf and "not finite" in found.message
        after[:, 1] = np.inf
        (found,) = detector.observe(changed(ahead, after=after))
        assert found.ranks == () and detector.failed_cells(changed(ahead, after=after)) == (1,)

    @pytest.mark.parametrize("divided", [True, False])
    def test_a_skipped_reduction(self, divided: bool) -> None:
        detector, ahead = after_some()
        before, _, _ = sums(ahead)
        (found,) = detector.observe(changed(ahead, after=before * (1 if divided else 4)))
        assert found.ranks == () and "was not reduced" in found.message

    def test_one_rank_that_kept_its_own(self) -> None:
        detector, ahead = after_some()
        before, after, _ = sums(ahead)
        after[2] = 4 * before[2]
        (found,) = detector.observe(changed(ahead, after=after))
        assert found.ranks == (2,) and "not reduced there" in found.message

    @pytest.mark.parametrize("sharded", [False, True])
    def test_a_lost_contribution(self, sharded: bool) -> None:
        detector, ahead = after_some(sharded=sharded)
        before, after, _ = sums(ahead)
        after = after - (before[1] / 4 if sharded else before[1])
        (found,) = detector.observe(changed(ahead, after=after))
        assert found.ranks == (1,) and "contribution of rank 1 is missing" in found.message

    @pytest.mark.parametrize("sharded", [False, True])
    @pytest.mark.parametrize("dtype", ["fp32", "bf16"])
    def test_a_stale_buffer(self, sharded: bool, dtype: str) -> None:
        detector = ReductionCheck()
        *seen, last, ahead = simulated(dtype, 4, 22, size=256, sharded=sharded)
        feed(detector, iter([*seen, last]))
        (found,) = detector.observe(changed(ahead, after=sums(last)[1]))
        assert found.ranks == () and "stale" in found.message
        if not sharded:
            after = sums(ahead)[1]
            after[3] = sums(last)[1][3]
            (found,) = detector.observe(changed(ahead, after=after))
            assert found.ranks == (3,) and "stale" in found.message

    def test_zeros_and_sums_for_means(self) -> None:
        detector, ahead = after_some()
        _, after, _ = sums(ahead)
        assert "it is zero" in detector.observe(changed(ahead, after=0 * after))[0].message
        assert "sum where the mean" in detector.observe(changed(ahead, after=4 * after))[0].message

    def test_the_same_wrong_result_everywhere_names_nobody(self) -> None:
        detector, ahead = after_some()
        _, after, sq = sums(ahead)
        (found,) = detector.observe(changed(ahead, after=after + 0.31 * np.sqrt(sq.sum(0))))
        assert found.ranks == () and "all receivers hold the same" in found.message

    def test_two_receivers_of_which_none_is_the_better_one(self) -> None:
        """bf16: both are within rounding of what was sent, and yet not the same bits."""
        detector, ahead = after_some(2, "bf16")
        _, after, sq = sums(ahead)
        step = 1e-3 * np.sqrt(sq[:, 0].sum())
        middle = sums(ahead)[0][:, 0].sum()
        after[:, 0] = middle - step, middle + step
        (found,) = detector.observe(changed(ahead, after=after))
        assert found.ranks == (0, 1) and "none can be told" in found.message

    def test_a_replica_made_of_shards(self) -> None:
        """HSDP 2x2: a group of receivers fails; which rank of it is for the second pass."""
        detector, ahead = after_some(4, sharded=True)
        before, whole, sq = sums(ahead)
        plan = CheckPlan(("bucket 0", "bucket 1"), ((0, 1), (2, 3)), UNIT["fp32"])
        total = whole.sum(0)
        after = np.stack([0.3 * total, 0.7 * total, 0.3 * total, 0.7 * total])
        clean = replace(ahead, checks=Checks(plan, before, after, sq))
        detector = ReductionCheck()
        assert feed(detector, iter([clean] * 3)) == []
        after = after.copy()
        after[3, 0] += 0.01 * np.sqrt(sq[:, 0].sum())
        (found,) = detector.observe(replace(ahead, checks=Checks(plan, before, after, sq)))
        assert found.ranks == () and "the replica on ranks 2, 3" in found.message

    def test_permuted_ranks_are_named_permuted(self) -> None:
        detector, ahead = after_some(5)
        before, after, sq = sums(ahead)
        after[4, 0] *= 1.5
        order = np.array([3, 4, 0, 2, 1])
        (found,) = detector.observe(changed(ahead, before=before[order], after=after[order], sq=sq[order]))
        assert found.ranks == (1,)


class TestLimits:
    def test_a_lossy_transport_is_told_once_and_then_is_the_habit(self) -> None:
        """fp8 on the wire, say: off by 5 % of the gradient from the first window on."""
        rng = np.random.default_rng(3)

        def lossy(steps: int) -> Iterator[Observation]:
            for o in simulated("fp32", 4, steps, size=256, sharded=True):
                _, after, sq = sums(o)
                after[0] += 0.05 * rng.choice([-1, 1]) * rng.uniform(0.5, 1.5, 2) * np.sqrt(sq.sum(0))
                yield changed(o, after=after)

        detector = ReductionCheck()
        found = feed(detector, lossy(400))
        assert [(f.severity, f.step) for f in found] == [(Severity.WARN, 0)] and "first window" in found[0].message
        (ahead,) = lossy(1)
        _, after, sq = sums(ahead)
        after[1] += 0.5 * np.sqrt(sq.sum(0))
        assert detector.observe(changed(ahead, after=after))[0].severity is Severity.ACT

    def test_a_run_that_was_exact_once_has_no_such_excuse_and_a_fault_that_stays_alarms_for_ever(self) -> None:
        detector, ahead = after_some(sharded=True)
        _, after, sq = sums(ahead)
        wrong = changed(ahead, after=after + 0.02 * np.sqrt(sq.sum(0)))
        found = feed(detector, iter([replace(wrong, step=30 + i) for i in range(100)]))
        assert len(found) == 100 and all(f.severity is Severity.ACT for f in found)
        assert {f.onset_step for f in found} == {30}
        assert detector.observe(replace(ahead, step=200)) == []

    def test_new_buckets_begin_anew(self) -> None:
        detector, ahead = after_some(sharded=True)
        for other in simulated("fp32", 4, 30, cells=5, sharded=True, seed=4):
            assert detector.observe(other) == []
            detector.absorb(other, [], True)
        assert detector.observe(ahead) == []

    def test_the_state_is_small_and_exact(self) -> None:
        one, ahead = after_some(8, "bf16")
        two = ReductionCheck()
        state = json.loads(json.dumps(one.state_dict()))
        assert len(json.dumps(state)) < 4096
        two.load_state_dict(state)
        _, after, _ = sums(ahead)
        after[5, 0] *= 1.4
        wrong = changed(ahead, after=after)
        for observation in (ahead, wrong, ahead):
            found = [d.observe(observation) for d in (one, two)]
            assert found[0] == found[1]
            for d in (one, two):
                d.absorb(observation, found[0], True)
            assert one.state_dict() == two.state_dict()


def test_the_second_pass_names_rank_and_parameters() -> None:
    detector, ahead = after_some(sharded=True)
    _, after, sq = sums(ahead)
    after[2, 0] += 0.1 * np.sqrt(sq[:, 0].sum())
    (found,) = detector.observe(changed(ahead, after=after))
    places = [Located(2, "bucket 0", "layers.1.weight", 1, 0.9)]
    named = located(found, places)
    assert named.ranks == (2,) and "layers.1.weight" in named.message and named.score == found.score
    assert located(found, []).ranks == () and "found nothing" in located(found, []).message


@given(
    world=st.integers(2, 4096),
    square=st.floats(1e-12, 1e12),
    coherent=st.floats(0.0, 1.0),
    spread=st.floats(0.0, 10.0),
    unit=st.sampled_from(sorted(UNIT.values())),
)
def test_rounding_grows_with_the_sum_and_with_what_is_not_known(
    world: int, square: float, coherent: float, spread: float, unit: float
) -> None:
    """The tolerance scales with the gradient, is at least that of one rounding, and largest where least is known."""
    size = np.array(square * (1 + coherent * (world - 1)))
    sigma = rounding(unit, world, np.array(square), size, spread)
    assert sigma >= 0.43 * unit * np.sqrt(square)
    np.testing.assert_allclose(rounding(unit, world, 4 * np.array(square), 4 * size, spread), 2 * sigma, rtol=1e-9)
    assert rounding(unit, world, np.array(square), size) >= sigma * (1 - 1e-12)
    most = rounding(unit, world, np.array(square), np.array(np.nan))
    assert most >= rounding(unit, world, np.array(square), np.array(world * square)) * (1 - 1e-12)
