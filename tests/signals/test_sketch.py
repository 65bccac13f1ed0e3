"""The sketch says what the table says: the same global signals, the same outlier, at a size that does not grow (C2, S19)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import reduce

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.detectors import CrossRankConfig, CrossRankOutlier, StragglersConfig
from resilient.detectors.crossrank import SketchOutlier
from resilient.detectors.stragglers import SketchStragglers
from resilient.signals import CheckPlan, Finding, Flag, Severity, StepTable
from resilient.signals.checks import LANE_COLUMNS
from resilient.signals.history import RankHistory
from resilient.signals.record import COLUMNS, INDEX, row_width
from resilient.signals.sketch import SketchSummary, read
from resilient.signals.sketch_codes import MOST_RANKS
from resilient.signals.sketch_pack import MOST_BYTES, WITH_PAST, Sketch, SketchLayout, SketchState, merge, pack

LAYOUT = SketchLayout()
_PLAIN = {
    "kind": 1.0, "loss": 2.0, "loss_max": 3.0, "tokens": 2048.0, "next_tokens": 2048.0, "has_next": 1.0, "lr": 1e-3,
    "loss_scale": 1.0, "digest": 7.0, "longest": 128.0, "padding": 0.25, "compute_s": 1.0, "local_grad_norm": 1.0,
    "reduced_sq_share": 0.5, "nonfinite_forward": 0.0, "nonfinite_loss": 0.0, "nonfinite_backward": 0.0, "flags": 0.0,
    "asked": 0.0, "leftover_sq": 0.0,
}  # fmt: skip


def table_of(
    world: int,
    step: int = 1,
    *,
    layers: tuple[str, ...] = (),
    plan: CheckPlan | None = None,
    **columns: np.ndarray | float,
) -> StepTable:
    rows = np.full((world, row_width(len(layers), len(plan.names) if plan else 0)), np.nan)
    for name, values in {**_PLAIN, "step": step, "attempt": step, **columns}.items():
        rows[:, INDEX[name]] = values
    return StepTable(rows, (tuple(range(world)),), layers, plan)


def summary_of(table: StepTable, state: SketchState | None = None, layout: SketchLayout = LAYOUT) -> SketchSummary:
    state = state or SketchState(range(table.world_size))
    return read(layout, pack(layout, table, state), state.centre)


def disagree(summary: SketchSummary) -> list[str]:
    return [name for name in summary.ends if summary.differ(name)]


def settle(history: RankHistory, offset: np.ndarray, scale: np.ndarray, level: np.ndarray) -> RankHistory:
    """A history that has seen all it remembers."""
    state = {
        "offset": offset,
        "scale": scale,
        "level": level,
        "points": np.full(len(offset), float(history.history)),
        "away": np.zeros(len(offset)),
        "moved": np.zeros(len(offset)),
    }
    return RankHistory.from_state(state, history.floor, history.history, history.start, history.accept_after)


class World:
    """Simulated ranks of different size and noise, with a table detector and a sketch that know them equally well."""

    def __init__(self, ranks: int, seed: int, ties: bool = False, quiet: tuple[int, ...] = ()) -> None:
        self.rng = np.random.default_rng(seed)
        self.ties = ties
        self.usual = np.zeros(ranks) if ties else self.rng.normal(0.0, 1.0, ranks)
        self.sigma = np.where(self.rng.random(ranks) < 0.1, 0.4, 0.05)
        self.sigma[list(quiet)] = 0.05
        self.detector = CrossRankOutlier(CrossRankConfig())
        self.sketched = SketchOutlier(CrossRankConfig())
        self.state = SketchState(range(ranks))
        past = settle(self.state.histories["local_grad_norm"], self.usual, self.sigma, self.usual)
        self.detector._history = past
        self.state.histories["local_grad_norm"] = past

    def norms(self, common: float) -> np.ndarray:
        noise = self.sigma * np.clip(self.rng.standard_normal(len(self.usual)), -3.0, 3.0)
        if self.ties:
            noise = np.round(noise, 1)
        return np.exp(self.usual + common + noise)

    def judge(self, norms: np.ndarray) -> tuple[list[Finding], list[Finding]]:
        """(by the table, by the sketch)"""
        table = table_of(len(norms), local_grad_norm=norms)
        return self.detector.observe(table.observation()), self.sketched.observe(summary_of(table, self.state))


worlds = st.one_of(st.integers(2, 40), st.integers(41, 3000), st.sampled_from([8192, 16384, 50_000, 100_000]))


class TestTheSameOutlier:
    @settings(max_examples=40, deadline=None)
    @given(
        ranks=worlds,
        seed=st.integers(0, 2**31),
        factor=st.floats(5.0, 1e6),
        common=st.floats(-0.5, 4.0),
        ties=st.booleans(),
        data=st.data(),
    )
    def test_one_rank(self, ranks: int, seed: int, factor: float, common: float, ties: bool, data: st.DataObject):
        rank = data.draw(st.integers(0, ranks - 1))
        world = World(ranks, seed, ties, quiet=(rank, (rank + 1) % ranks))  # its peer, too, if there is but one
        norms = world.norms(common)
        norms[rank] = math.exp(world.usual[rank] + common) * factor
        by_table, by_sketch = world.judge(norms)
        assert [f.ranks for f in by_table] == [f.ranks for f in by_sketch] == [(rank,)]
        assert by_sketch[0].score == pytest.approx(by_table[0].score, rel=0.1)

    @settings(max_examples=40, deadline=None)
    @given(ranks=worlds, seed=st.integers(0, 2**31), common=st.floats(-3.0, 6.0), ties=st.booleans())
    def test_none(self, ranks: int, seed: int, common: float, ties: bool):
        """Ranks that are larger or noisier than others, and a spike of all of them, have no outlier."""
        world = World(ranks, seed, ties)
        assert world.judge(world.norms(common)) == ([], [])

    @pytest.mark.parametrize("ranks", [16, 1024, 20_000])
    def test_several_worst_first(self, ranks: int):
        world = World(ranks, 5, quiet=tuple(range(ranks)))
        norms = world.norms(0.0)
        for rank, factor in ((11, 30.0), (2, 500.0), (7, 30.0)):
            norms[rank] = math.exp(world.usual[rank]) * factor
        by_table, by_sketch = world.judge(norms)
        assert {f.ranks for f in by_sketch} == {f.ranks for f in by_table} == {(2,), (7,), (11,)}
        assert by_sketch[0].ranks == by_table[0].ranks == (2,)

    @pytest.mark.parametrize("ranks", [2, 3, 500])
    def test_each_with_its_own_history_from_the_first_step_on(self, ranks: int):
        """Including a stretch in which a rank is off, and a rank that has no tokens once."""
        rng = np.random.default_rng(ranks)
        usual = rng.normal(0.0, 1.0, ranks)
        detector, sketched = CrossRankOutlier(CrossRankConfig()), SketchOutlier(CrossRankConfig())
        each = [SketchState([rank]) for rank in range(ranks)] if ranks < 4 else [SketchState(range(ranks))]
        named: list[tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = []
        for step in range(1, 90):
            norms = np.exp(usual + 0.05 * rng.standard_normal(ranks) + 2.0 * math.exp(-step / 30))
            tokens = np.full(ranks, 9.0)
            if step in (50, 70, 71, 72):
                norms[1] *= 50.0
            if step == 60 and ranks > 2:
                norms[0], tokens[0] = 0.0, 0.0
            table = table_of(ranks, step, local_grad_norm=norms, tokens=tokens)
            rows = [StepTable(table.rows[s.ranks], layers=()) for s in each]
            merged = reduce(merge, [pack(LAYOUT, row, s) for row, s in zip(rows, each, strict=True)])
            summary = read(LAYOUT, merged, each[0].centre)
            found, told = detector.observe(table.observation()), sketched.observe(summary)
            named.append(([f.ranks for f in found], [f.ranks for f in told]))
            detector.absorb(table.observation(), found, True)
            sketched.absorb(summary, told, True)
            for row, state in zip(rows, each, strict=True):
                state.learn(row, summary, True)
            assert len({tuple(s.centre.values()) for s in each}) == 1  # what they share, they share exactly
            assert [f.onset_step for f in told] == [f.onset_step for f in found]
        expected = [[(1,)] if step in (50, 70, 71, 72) else [] for step in range(1, 90)]
        assert named == [(ranks_, ranks_) for ranks_ in expected]


class TestTheSameSignals:
    @pytest.mark.parametrize("ranks", [1, 5, 300])
    def test_global_signals_are_those_of_the_table(self, ranks: int):
        rng = np.random.default_rng(ranks)
        layers = ("a", "b", "c")
        table = table_of(
            ranks,
            9,
            layers=layers,
            loss=rng.uniform(1, 3, ranks),
            loss_max=rng.uniform(3, 4, ranks),
            tokens=np.where(np.arange(ranks) == 2, 0.0, rng.integers(1, 99, ranks)),
            reduced_sq_share=rng.random(ranks),
            weight_sq_share=rng.random(ranks),
            logit_max=np.where(np.arange(ranks) % 2, np.nan, rng.random(ranks)),
            attention_entropy=np.where(np.arange(ranks) % 2, np.nan, rng.random(ranks)),
            eval_loss=np.where(np.arange(ranks) % 2, np.nan, 2.5),
            longest=rng.integers(1, 99, ranks),
            padding=rng.random(ranks),
        )
        table.rows[:, len(COLUMNS) :] = rng.random((ranks, 9))
        summary = summary_of(table, layout=SketchLayout(layers))
        expected = table.observation().values
        assert summary.values == pytest.approx(dict(expected)) and summary.observation().step == 9
        assert "adam_lag" in expected and "eval_step" in expected and "update_norm" not in expected
        assert (summary.world, summary.totals["has_next"], summary.totals["next_tokens"]) == (
            ranks,
            ranks,
            2048.0 * ranks,
        )

    def test_what_is_not_finite_is_counted_named_and_kept(self):
        bad = np.zeros(200)
        bad[[3, 150]] = 1.0
        loss = np.where(bad > 0, np.nan, 2.0)
        table = table_of(200, loss=loss, loss_max=loss, nonfinite_forward=bad, local_grad_norm=np.where(bad, np.inf, 1))
        summary = summary_of(table)
        assert summary.named == {"forward": (2, (3, 150))}
        assert math.isnan(summary.values["loss"]) and math.isnan(summary.values["loss_max"])
        assert summary.compared("local_grad_norm") == 198
        shares = np.ones(200)
        shares[77] = np.inf
        assert summary_of(table_of(200, reduced_sq_share=shares)).named == {"reduction": (1, (77,))}
        assert summary_of(table_of(200, reduced_sq_share=shares)).values["grad_norm"] == math.inf

    def test_flags_and_columns_that_must_be_equal(self):
        flags = np.zeros(64)
        flags[[9, 40]] = float(Flag.NO | Flag.GUARD_FAILED)
        assert summary_of(table_of(64, flags=flags)).named == {Flag.NO: (2, (9, 40)), Flag.GUARD_FAILED: (2, (9, 40))}
        assert disagree(summary_of(table_of(64, digest_parameters=5.0))) == []
        other = np.full(64, 2.0**48 - 1)
        other[13] -= 1.0
        assert disagree(summary_of(table_of(64, digest=other, digest_optimizer=other))) == [
            "digest",
            "digest_optimizer",
        ]
        has_next = np.ones(64)
        has_next[5] = 0.0
        assert summary_of(table_of(64, has_next=has_next)).totals["has_next"] == 63.0

    @pytest.mark.parametrize("whole", [True, False])
    def test_the_reduction_check(self, whole: bool):
        """whole: every rank receives all of the gradient, else its shard."""
        ranks = 6
        receivers = tuple((r,) for r in range(ranks)) if whole else (tuple(range(ranks)),)
        plan = CheckPlan(("b0", "b1"), receivers, 2.0**-24)
        table = table_of(ranks, plan=plan)
        rng = np.random.default_rng(0)
        before = rng.standard_normal((ranks, 2))
        after = np.tile(before.sum(axis=0), (ranks, 1)) if whole else rng.standard_normal((ranks, 2))
        if not whole:
            after[-1] = before.sum(axis=0) - after[:-1].sum(axis=0)
        after[4, 1] += 0.5
        lanes = [np.zeros((ranks, 2))] * len(LANE_COLUMNS)
        table.rows[:, len(COLUMNS) :] = np.concatenate([before, after, before**2, before**2, *lanes], axis=1)
        summary = summary_of(table, layout=SketchLayout(plan=plan))
        checks = summary.checks
        assert checks is not None and checks.ranks == ranks and len(checks.plan.receivers) == (2 if whole else 1)
        np.testing.assert_allclose(checks.before.sum(axis=0), before.sum(axis=0))
        off = checks.after - checks.before.sum(axis=0)
        np.testing.assert_allclose(off[0], [0.0, 0.5], atol=1e-12)  # whoever received it, it is not averaged away
        if whole:
            np.testing.assert_allclose(off[1], 0.0, atol=1e-12)


class TestTheSketch:
    def test_its_size_is_constant_and_small(self):
        layout = SketchLayout(
            tuple(f"layer.{i}" for i in range(64)), CheckPlan(tuple(map(str, range(64))), ((0,),), 2.0**-24)
        )
        assert layout.bytes <= MOST_BYTES == 64 * 1024
        sizes = set()
        for ranks in (2, 5000):
            sketch = pack(LAYOUT, table_of(ranks), SketchState(range(ranks)))
            sizes.add(sketch.sums.nbytes + sketch.largest.nbytes)
        assert sizes == {LAYOUT.bytes}
        with pytest.raises(ValueError, match="too large"):
            SketchLayout(tuple(map(str, range(2000))))

    @settings(max_examples=20, deadline=None)
    @given(ranks=st.integers(2, 300), seed=st.integers(0, 2**31), data=st.data())
    def test_merging_in_any_order_is_packing_together(self, ranks: int, seed: int, data: st.DataObject):
        rng = np.random.default_rng(seed)
        norms = np.exp(rng.standard_normal(ranks))
        table = table_of(ranks, local_grad_norm=norms, loss=np.exp(rng.standard_normal(ranks)))
        together = pack(LAYOUT, table, SketchState(range(ranks)))
        cuts = sorted({0, ranks, *data.draw(st.lists(st.integers(1, ranks - 1), max_size=5))})
        parts = [
            pack(LAYOUT, StepTable(table.rows[a:b], layers=()), SketchState(range(a, b)))
            for a, b in itertools.pairwise(cuts)
        ]
        for order in (parts, parts[::-1]):
            merged: Sketch = reduce(merge, order)
            np.testing.assert_allclose(merged.sums, together.sums, rtol=1e-12)
            np.testing.assert_array_equal(merged.largest, together.largest)

    def test_ranks_beyond_what_it_can_name_are_refused(self):
        with pytest.raises(ValueError, match="names ranks from 0"):
            SketchState([MOST_RANKS])

    def test_rewinds_exactly(self):
        def go(
            states: list[SketchState], judge: CrossRankOutlier, steps: range, spike: int
        ) -> Mapping[int, list[Finding]]:
            found = {}
            for step in steps:
                rng = np.random.default_rng(step)
                norms = np.exp(0.1 * rng.standard_normal(20))
                norms[3] *= 20.0 if step == spike else 1.0
                table = table_of(20, step, local_grad_norm=norms)
                (state,) = states
                summary = summary_of(table, state)
                observation = summary.observation()
                found[step] = judge.observe(observation)
                judge.absorb(observation, found[step], True)
                state.learn(table, summary, True)
            return found

        first, second = SketchState(range(20)), SketchState(range(20))
        judge, twin = CrossRankOutlier(CrossRankConfig()), CrossRankOutlier(CrossRankConfig())
        go([first], judge, range(1, 40), 0)
        second.load_state_dict(first.state_dict())
        twin.load_state_dict(judge.state_dict())
        expected = go([first], judge, range(40, 80), 70)
        assert expected[70][0].ranks == (3,) and go([second], twin, range(40, 80), 70) == expected

    def test_the_signals_with_a_past_have_the_floors_of_the_table(self):
        """Or the two would score the same step differently."""
        from resilient.detectors import DetectorConfig

        assert {c.signal: c.floor for c in DetectorConfig().cross_rank} == dict(WITH_PAST)


def test_a_straggler_is_named_from_sketches():
    """In 3,000 ranks with 30 % jitter: by how often it is among the slowest, also if it has been slow from the start."""
    rng = np.random.default_rng(0)
    detector, state = SketchStragglers(StragglersConfig()), SketchState(range(3000))
    found: dict[int, list[Finding]] = {}
    for step in range(1, 61):
        compute = np.exp(0.3 * rng.standard_normal(3000))
        if step > 30:
            compute[1234] *= 4.0
        summary = summary_of(table_of(3000, step, compute_s=compute), state)
        findings = detector.observe(summary)
        detector.absorb(summary, findings, True)
        if findings:
            found[step] = findings
    assert 38 <= min(found) <= 42 and len(found) >= 17
    assert {f.ranks for each in found.values() for f in each} == {(1234,)}
    assert {f.severity for each in found.values() for f in each} == {Severity.WARN}
    twin = SketchStragglers(StragglersConfig())
    twin.load_state_dict(detector.state_dict())
    last = summary_of(table_of(3000, 61, compute_s=np.where(np.arange(3000) == 1234, 4.0, 1.0)), state)
    assert twin.observe(last) == detector.observe(last) != []
