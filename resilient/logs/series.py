"""A bounded copy of a signal for pictures: per bucket the lowest and highest value, so that no spike is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

_BUCKETS = 1536


@dataclass(slots=True)
class Bucket:
    """Neighbouring points. nonfinite: how many of them are NaN or Inf; low and high are over the others."""

    x: float  # of the first point
    last: float  # of the last point
    count: int = 0
    nonfinite: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    low_x: float = 0.0
    high_x: float = 0.0

    @property
    def mean(self) -> float:
        """Over the finite points; NaN without any."""
        finite = self.count - self.nonfinite
        return self.total / finite if finite else math.nan

    def add(self, x: float, value: float) -> None:
        self.last = x
        self.count += 1
        if not math.isfinite(value):
            self.nonfinite += 1
            return
        self.total += value
        if value < self.low:
            self.low, self.low_x = value, x
        if value > self.high:
            self.high, self.high_x = value, x

    def merge(self, other: Bucket) -> None:
        """Take in the bucket that follows."""
        self.last = other.last
        self.count += other.count
        self.nonfinite += other.nonfinite
        self.total += other.total
        if other.low < self.low:
            self.low, self.low_x = other.low, other.low_x
        if other.high > self.high:
            self.high, self.high_x = other.high, other.high_x


class Series:
    """At most _BUCKETS buckets of equally many points; when full, neighbours merge and buckets grow to twice the size."""

    def __init__(self, limit: int = _BUCKETS) -> None:
        self._limit = limit
        self._size = 1  # points a bucket
        self.buckets: list[Bucket] = []

    def __bool__(self) -> bool:
        return bool(self.buckets)

    def add(self, x: float, value: float) -> None:
        if not self.buckets or self.buckets[-1].count >= self._size:
            if len(self.buckets) >= self._limit:
                self._halve()
            self.buckets.append(Bucket(x, x))
        self.buckets[-1].add(x, value)

    def cut(self, x: float) -> None:
        """Forget what lies at `x` and after it: training went back there. A bucket across it keeps its earlier points'
        extremes only as far as they lie before `x`."""
        while self.buckets and self.buckets[-1].x >= x:
            self.buckets.pop()
        if self.buckets and self.buckets[-1].last >= x:
            bucket = self.buckets[-1]
            bucket.last = bucket.x
            mean = bucket.mean
            if bucket.high_x >= x:
                bucket.high, bucket.high_x = mean, bucket.x
            if bucket.low_x >= x:
                bucket.low, bucket.low_x = mean, bucket.x

    def points(self) -> Iterator[tuple[float, float]]:
        """(x, value) in order: of each bucket its lowest and highest; (x, NaN) where all of it is non-finite."""
        for b in self.buckets:
            if b.count == b.nonfinite:
                yield b.x, math.nan
            elif b.low_x == b.high_x:
                yield b.low_x, b.low
            else:
                yield from sorted(((b.low_x, b.low), (b.high_x, b.high)))

    def nonfinite(self) -> list[float]:
        """Where values were NaN or Inf."""
        return [b.x for b in self.buckets if b.nonfinite]

    def means(self) -> list[float]:
        """One finite mean per bucket, in order."""
        return [b.mean for b in self.buckets if b.count > b.nonfinite]

    def _halve(self) -> None:
        merged = []
        for i in range(0, len(self.buckets), 2):
            bucket = self.buckets[i]
            if i + 1 < len(self.buckets):
                bucket.merge(self.buckets[i + 1])
            merged.append(bucket)
        self.buckets = merged
        self._size *= 2
