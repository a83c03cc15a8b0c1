"""Samples over time, in bounded memory: a clock without drift, a ring of columns, a decimation that keeps every peak.

Pure: no engine, no IPython, no thread. Times are seconds of any clock, values bytes.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

CAPACITY = 600
PERIOD_S = 0.2
GAP_PERIODS = 5.0
"""A silence longer than so many periods is drawn as a gap, not as a line across it."""


class Key(NamedTuple):
    """Whose bytes: one tag of one rank."""

    stage_id: int
    replica: int
    rank: int
    tag: str


class Window(NamedTuple):
    """A copy of what is kept, oldest first: `times` [n], `values` [row, n] with NaN where nothing is known."""

    keys: tuple[Key, ...]
    times: NDArray[np.float64]
    values: NDArray[np.float64]


class Clock:
    """Ticks at whole multiples of a period after its start; ticks that were missed are left out, never made up."""

    def __init__(self, period_s: float = PERIOD_S, now: Callable[[], float] = time.monotonic) -> None:
        self._period_s = period_s
        self._now = now
        self._start_s = now()
        self._ticks = 0

    def wait_s(self) -> float:
        """Seconds until the next tick, 0 when it is due; never more than a period, even if the clock was set back."""
        left = self._start_s + (self._ticks + 1) * self._period_s - self._now()
        if not left <= self._period_s:
            self._start_s, self._ticks, left = self._now(), 0, self._period_s
        return max(0.0, left)

    def tick(self) -> int:
        """Take the tick that is due; how many before it were missed."""
        due = int((self._now() - self._start_s) / self._period_s + 1e-9)
        missed = max(0, due - self._ticks - 1)
        self._ticks = max(due, self._ticks + 1)
        return missed


class Timeline:
    """The newest samples of many rows, all taken at the same moments.

    A row that has left the samples keeps its past until that has left the window too. Memory is bounded by
    `capacity` and the most rows that were ever in one window.
    """

    def __init__(self, capacity: int = CAPACITY, gap_s: float = GAP_PERIODS * PERIOD_S) -> None:
        self._capacity = capacity
        self._gap_s = gap_s
        self._room = capacity + max(capacity // 4, 1)  # slack, so that a window is one view and seldom moved
        self._keys: tuple[Key, ...] = ()
        self._places: dict[Key, int] = {}
        self._times = np.full(self._room, math.nan)
        self._values = np.full((0, self._room), math.nan)
        self._end = 0
        self._shift_s = 0.0

    def add(self, time_s: float, keys: tuple[Key, ...], values: Sequence[float | None]) -> None:
        """Take one sample: `values[i]` belongs to `keys[i]`; what is no number of bytes ≥ 0 counts as unknown.

        A clock that was set back is carried on from the last sample; one that is not a number is ignored.
        """
        if not math.isfinite(time_s):
            return
        time_s = self._monotonic(time_s)
        if self._end and time_s - self._times[self._end - 1] > self._gap_s:
            self._append(self._times[self._end - 1] + self._gap_s, (), np.empty(0))
        self._append(time_s, keys, _cleaned(values))

    def _monotonic(self, time_s: float) -> float:
        last = self._times[self._end - 1] if self._end else -math.inf
        if time_s + self._shift_s <= last:
            self._shift_s = float(last) + PERIOD_S - time_s
        return time_s + self._shift_s

    def _append(self, time_s: float, keys: tuple[Key, ...], values: NDArray[np.float64]) -> None:
        if self._end == self._room:
            self._move()
        rows = self._rows(keys)
        self._times[self._end] = time_s
        self._values[:, self._end] = math.nan
        self._values[rows, self._end] = values
        self._end += 1

    def _move(self) -> None:
        """The window to the front; rows that only the past before it knew go."""
        kept = slice(self._end - self._capacity, self._end)
        known = ~np.isnan(self._values[:, kept]).all(axis=1)
        if not known.all():
            self._values = self._values[known]
            self._set_keys(tuple(key for key, there in zip(self._keys, known, strict=True) if there))
        self._values[:, : self._capacity] = self._values[:, kept]
        self._times[: self._capacity] = self._times[kept]
        self._end = self._capacity

    def _rows(self, keys: tuple[Key, ...]) -> slice | list[int]:
        if keys == self._keys:
            return slice(None)
        new = tuple(key for key in keys if key not in self._places)
        if new:
            self._values = np.vstack([self._values, np.full((len(new), self._room), math.nan)])
            self._set_keys(self._keys + new)
        return [self._places[key] for key in keys]

    def _set_keys(self, keys: tuple[Key, ...]) -> None:
        self._keys = keys
        self._places = {key: place for place, key in enumerate(keys)}

    @property
    def keys(self) -> tuple[Key, ...]:
        """The rows that are known now."""
        return self._keys

    @property
    def latest_s(self) -> float:
        """The last sample's time as kept here; NaN before the first."""
        return float(self._times[self._end - 1]) if self._end else math.nan

    @property
    def n_bytes(self) -> int:
        """Memory that is held."""
        return self._times.nbytes + self._values.nbytes

    def window(self) -> Window:
        """What is kept now."""
        kept = slice(max(0, self._end - self._capacity), self._end)
        return Window(self._keys, self._times[kept].copy(), self._values[:, kept].copy())


def _cleaned(values: Sequence[float | None]) -> NDArray[np.float64]:
    numbers = np.array(values, dtype=np.float64)  # None becomes NaN
    numbers[~(numbers >= 0) | np.isinf(numbers)] = math.nan
    return numbers


def decimated(values: NDArray[np.float64], buckets: int) -> NDArray[np.intp]:
    """Which samples to draw: in each bucket of time every row's least and greatest, and where rows begin and end.

    The sample before each of them is drawn too, so that a jump stays one.
    `values` is [row, n]. Of those, the ones that are as their neighbours add nothing to a line and are left out.
    Returns indices in order: a few for memory that stands still.
    """
    n = values.shape[1]
    if n <= 2:
        return np.arange(n)
    unknown = np.isnan(values)
    marks = np.zeros(n, dtype=bool)
    marks[[0, -1]] = True
    bounds = np.unique(np.linspace(0, n, min(buckets, n) + 1).astype(np.intp))
    places = _extremes(np.where(unknown, np.inf, values), np.where(unknown, -np.inf, values), bounds)
    marks[places] = marks[np.maximum(places - 1, 0)] = True
    edges = np.flatnonzero((unknown[:, 1:] != unknown[:, :-1]).any(axis=0))
    marks[edges] = marks[edges + 1] = True
    chosen = np.flatnonzero(marks)
    return chosen[~_flat(values[:, chosen])]


def _extremes(low: NDArray[np.float64], high: NDArray[np.float64], bounds: NDArray[np.intp]) -> NDArray[np.intp]:
    """The place of each row's least and greatest value in each bucket."""
    width = int(np.diff(bounds).max())
    steps = np.minimum(bounds[:-1, None] + np.arange(width), bounds[1:, None] - 1)  # [bucket, width], last one repeated
    places = np.arange(len(steps))[:, None]
    least = low[:, steps].argmin(axis=2).T
    greatest = high[:, steps].argmax(axis=2).T
    return np.unique(np.concatenate([steps[places, least].ravel(), steps[places, greatest].ravel()]))


def extremes(values: NDArray[np.float64], buckets: int) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Every row's least and greatest value in each bucket, in the order in which they came.

    `values` is [row, n] with n ≥ 1. Returns the sample at which each column begins, and [row, 2 × buckets].
    """
    n = values.shape[1]
    bounds = np.unique(np.linspace(0, n, min(buckets, n) + 1).astype(np.intp))
    width = int(np.diff(bounds).max())
    steps = np.minimum(bounds[:-1, None] + np.arange(width), bounds[1:, None] - 1)
    cut = values[:, steps]
    unknown = np.isnan(cut)
    low, high = np.where(unknown, np.inf, cut), np.where(unknown, -np.inf, cut)
    first, last = low.argmin(axis=2), high.argmax(axis=2)
    pair = np.sort(np.stack([first, last], axis=2), axis=2)
    picked = np.take_along_axis(cut, pair, axis=2)
    starts = np.repeat(bounds[:-1], 2)
    starts[1::2] += np.maximum(1, np.diff(bounds)) // 2
    return starts, picked.reshape(len(values), -1)


def _flat(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where every row is as just before and just after."""
    same = ((values[:, 1:] == values[:, :-1]) | (np.isnan(values[:, 1:]) & np.isnan(values[:, :-1]))).all(axis=0)
    flat = np.zeros(values.shape[1], dtype=bool)
    flat[1:-1] = same[1:] & same[:-1]
    return flat
