"""Digests across ranks: what must be alike, what must not, who is named and from when on (BR-14, BR-39, S18)."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilient.detectors.replicas import Replicas
from resilient.signals import Finding, Observation, Severity

NAN = float("nan")


def at(step: int, tokens: Sequence[float] | None = None, **digests: Sequence[float]) -> Observation:
    per_rank = {f"digest_{kind}": np.asarray(values, dtype=float) for kind, values in digests.items()}
    if tokens is not None:
        per_rank["tokens"] = np.asarray(tokens, dtype=float)
    return Observation(step, step, {}, per_rank)


def feed(detector: Replicas, observations: Sequence[Observation]) -> list[list[Finding]]:
    found = []
    for observation in observations:
        findings = detector.observe(observation)
        detector.absorb(observation, findings, True)
        found.append(findings)
    return found


def detector(*groups: tuple[int, ...]) -> Replicas:
    return Replicas({kind: groups for kind in ("parameters", "optimizer", "buffers")})


class TestAlike:
    @pytest.mark.parametrize("kind", ["parameters", "optimizer", "buffers"])
    def test_the_majority_is_right(self, kind: str) -> None:
        (found,) = detector((0, 1, 2, 3)).observe(at(8, **{kind: [5, 5, 9, 5]}))
        assert found.ranks == (2,) and found.statistic == "replica" and found.signal == f"digest_{kind}"
        assert found.severity is (Severity.WARN if kind == "buffers" else Severity.ACT)
        assert found.place == "optimizer" and "rank 2 against 3 others" in found.message

    def test_of_two_none_is_wrong(self) -> None:
        (found,) = detector((0, 1)).observe(at(8, parameters=[5, 9]))
        assert found.ranks == (0, 1) and "none can be told" in found.message

    def test_without_a_majority_the_camps_are_told(self) -> None:
        (found,) = detector((0, 1, 2, 3)).observe(at(8, parameters=[5, 9, 9, 5]))
        assert found.ranks == (0, 1, 2, 3) and "ranks 0, 3 against ranks 1, 2" in found.message

    def test_only_groups_are_compared_and_what_is_not_measured_is_not(self) -> None:
        """HSDP: shards differ, their replicas must not."""
        sharded = detector((0, 2), (1, 3))
        assert sharded.observe(at(8, parameters=[5, 7, 5, 7])) == []
        assert sharded.observe(at(8, parameters=[5, 7, NAN, 7])) == []
        (found,) = sharded.observe(at(8, parameters=[5, 7, 5, 8]))
        assert found.ranks == (1, 3)
        assert Replicas().observe(at(8, parameters=[1, 2, 3])) == []  # sharded over all ranks: nothing is alike

    def test_the_onset_is_the_first_step_whose_update_may_have_done_it(self) -> None:
        """Alike as step 16 began, not as step 24 did."""
        d = detector((0, 1, 2))
        found = feed(
            d, [at(8, parameters=[1, 1, 1]), at(16, parameters=[2, 2, 2]), at(17), at(24, parameters=[3, 4, 3])]
        )
        assert [len(f) for f in found] == [0, 0, 0, 1]
        assert found[3][0].onset_step == 16 and "from 16 on" in found[3][0].message
        assert feed(d, [at(32, parameters=[3, 4, 3])])[0][0].onset_step == 16
        assert feed(d, [at(40, parameters=[3, 3, 3]), at(48, parameters=[3, 3, 4])])[1][0].onset_step == 40

    @pytest.mark.parametrize("kind", ["rng_shared", "sampler"])
    def test_what_all_ranks_share(self, kind: str) -> None:
        """S18: a seed or epoch that differs is named before it shows in the loss."""
        (found,) = Replicas().observe(at(3, **{kind: [5, 5, 5, 6]}))
        assert found.ranks == (3,) and found.severity is Severity.WARN
        assert found.statistic == ("batch" if kind == "sampler" else "replica")


class TestUnlike:
    def test_two_ranks_with_one_random_stream(self) -> None:
        """BR-14."""
        d = Replicas()
        found = feed(d, [at(1, rng_own=[1, 2, 3, 4]), at(2, rng_own=[1, 2, 3, 2]), at(3, rng_own=[1, 2, 3, 2])])
        assert found[0] == [] and [f[0].ranks for f in found[1:]] == [(1, 3)] * 2
        assert [f[0].onset_step for f in found[1:]] == [2, 2] and "dropout masks" in found[1][0].message

    def test_the_same_samples_on_two_ranks_warn_when_it_comes_back(self) -> None:
        d = Replicas()
        found = feed(d, [at(i, batch=[i, 7 + i, 100 + i, 7 + i]) for i in range(4)])
        assert [f[0].severity for f in found] == [Severity.WATCH] * 2 + [Severity.WARN] * 2
        assert all(f[0].ranks == (1, 3) and f[0].onset_step == 0 for f in found)
        assert "ranks 1, 3 are fed the same samples" in found[2][0].message

    def test_once_an_epoch_is_a_samplers_padding(self) -> None:
        d = Replicas()
        found = feed(d, [at(i, batch=[i, 50 + i, 50 + i if i % 20 == 0 else 90 + i]) for i in range(100)])
        assert {f.severity for fs in found for f in fs} == {Severity.WATCH}

    def test_windows_of_padding_are_no_duplicates(self) -> None:
        d = Replicas()
        observations = [at(i, tokens=[64, 0, 0, 64], batch=[i, 5, 5, 900 + i]) for i in range(10)]
        assert not any(feed(d, observations))

    def test_all_ranks_on_one_shard(self) -> None:
        found = feed(Replicas(), [at(i, batch=[i] * 4) for i in range(3)])
        assert found[2][0].ranks == (0, 1, 2, 3) and "DistributedSampler" in found[2][0].message

    def test_ranks_of_one_model_replica_may_be_fed_alike(self) -> None:
        d = Replicas({"batch": ((0, 2), (1, 3))})  # 0 and 1 are two slices of one model
        assert not any(feed(d, [at(i, batch=[i, i, 50 + i, 50 + i]) for i in range(5)]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=2, max_size=9), st.randoms(use_true_random=False))
def test_permuted_ranks_are_named_permuted(values: list[int], random) -> None:
    order = list(range(len(values)))
    random.shuffle(order)  # new rank i is old rank order[i]
    group = tuple(range(len(values)))
    for kind in ("parameters", "rng_own"):
        old = detector(group).observe(at(1, **{kind: values}))
        new = detector(group).observe(at(1, **{kind: [values[o] for o in order]}))
        assert {f.ranks for f in old} == {tuple(sorted(order[r] for r in f.ranks)) for f in new}


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.integers(0, 1000))
def test_a_clean_run_says_nothing(world: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    own = rng.permutation(10_000)[:world]
    d = detector(tuple(range(world)))
    for i in range(5):
        same = float(rng.integers(1 << 48))
        alike = {kind: [same] * world for kind in ("parameters", "optimizer", "buffers", "rng_shared", "sampler")}
        assert feed(d, [at(i, rng_own=own + i, batch=own * 7 + i, **alike)]) == [[]]


def test_the_state_is_exact() -> None:
    one, two = detector((0, 1, 2)), detector((0, 1, 2))
    feed(one, [at(i, batch=[1, 1, 2], parameters=[i, i, i]) for i in range(2)])
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    ahead = at(5, batch=[1, 1, 2], parameters=[3, 4, 3], rng_own=[1, 1, 1])
    assert one.observe(ahead) == two.observe(ahead) and len(one.observe(ahead)) == 3
    feed(one, [ahead])
    feed(two, [ahead])
    assert one.state_dict() == two.state_dict()


def test_no_digest_no_word() -> None:
    assert Replicas().observe(Observation(1, 1, {"loss": 1.0}, {"loss": np.ones(4)})) == []
