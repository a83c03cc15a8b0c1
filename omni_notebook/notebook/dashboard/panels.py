"""From samples, a status and a log to what is drawn: a panel a rank, or above 16 ranks a panel a stage and a strip.

Pure; ages are seconds before now (0 … span), bytes are bytes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from omni_notebook import units
from omni_notebook.notebook.dashboard import looks
from omni_notebook.notebook.dashboard.log import RESTARTS, place_of
from omni_notebook.notebook.dashboard.series import decimated, extremes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from omni_notebook.notebook.dashboard.log import Answered, Log, Place
    from omni_notebook.notebook.dashboard.series import Window
    from omni_notebook.protocol import EngineStatus, RankStatus, StageStatus

MOST_PANELS = 16
MOST_LARGE = 4
"""So many panels are drawn large and fine."""
MOST_ROWS = 32
_SPANS_S = (15.0, 30.0, 60.0, 120.0)
_LARGE_BUCKETS, _SMALL_BUCKETS, _STRIP_BUCKETS = 120, 48, 60
_DIFFER = 0.1
"""Ranks of one row of a strip differ if their resident shares are further apart than this."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A sleep, a wake, a restart or a failure at `age_s`."""

    age_s: float
    label: str
    order: str
    ok: bool


@dataclass(frozen=True, slots=True)
class Panel:
    """Stacked memory over time.

    `ages_s` is [n], `values` [kind of tag, n] (NaN = not known); `mapped_bytes` is what the mappings span now,
    `full_bytes` what the height stands for.
    """

    title: str
    ages_s: NDArray[np.float64]
    values: NDArray[np.float64]
    mapped_bytes: int
    resident_bytes: int
    full_bytes: int
    marks: tuple[Mark, ...]
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Strip:
    """Ranks as rows, time as columns; a column reaches from its age to the next one's.

    `levels` is [row, column]: 0 … 4 of how much is resident, -1 = not known. `differ` is of the same shape: whether
    the ranks of the row are not alike.
    """

    labels: tuple[str, ...]
    ages_s: NDArray[np.float64]
    levels: NDArray[np.int8]
    differ: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Chart:
    """All that is drawn over time."""

    span_s: float
    panels: tuple[Panel, ...]
    strip: Strip | None
    n_ranks: int


def chart(window: Window, status: EngineStatus, log: Log) -> Chart:
    """What to draw of the window's last seconds."""
    n_ranks = sum(len(stage.ranks) for stage in status.stages)
    now_s = float(window.times[-1]) if window.times.size else 0.0
    ages = now_s - window.times
    span_s = next((span for span in _SPANS_S if not ages.size or ages[0] <= span), _SPANS_S[-1])
    buckets = _SMALL_BUCKETS if MOST_LARGE < n_ranks <= MOST_PANELS else _LARGE_BUCKETS
    view = _View(ages, window.values, _rows(window), log, now_s, buckets, status.closed)
    if n_ranks <= MOST_PANELS:
        return Chart(span_s, tuple(p for stage in status.stages for p in _rank_panels(stage, view)), None, n_ranks)
    panels = tuple(_stage_panel(stage, view) for stage in status.stages)
    return Chart(span_s, panels, _strip(status, view, n_ranks), n_ranks)


@dataclass(frozen=True, slots=True)
class _View:
    ages_s: NDArray[np.float64]
    values: NDArray[np.float64]
    rows: dict[Place, dict[int, list[int]]]
    log: Log
    now_s: float
    buckets: int
    closed: bool

    def stack(self, places: Iterable[Place]) -> NDArray[np.float64]:
        """[kind of tag, n]: the sums over these ranks; NaN where none of them is known."""
        picked: dict[int, list[int]] = defaultdict(list)
        for place in places:
            for kind, rows in self.rows.get(place, {}).items():
                picked[kind] += rows
        sums = np.zeros((len(looks.TAGS), self.ages_s.size))
        known = np.zeros(self.ages_s.size, dtype=bool)
        for kind, rows in picked.items():
            part = self.values[rows]
            unknown = np.isnan(part)
            sums[kind] = np.where(unknown, 0.0, part).sum(axis=0)
            known |= ~unknown.all(axis=0)
        sums[:, ~known] = np.nan
        return sums


def _rows(window: Window) -> dict[Place, dict[int, list[int]]]:
    """Each rank's rows of the window, by kind of tag."""
    rows: dict[Place, dict[int, list[int]]] = {}
    for row, (stage, replica, rank, tag) in enumerate(window.keys):
        rows.setdefault((stage, replica, rank), {}).setdefault(looks.kind_of(tag), []).append(row)
    return rows


def _place(stage: StageStatus, rank: RankStatus) -> Place:
    return stage.stage_id, rank.replica, rank.rank


def _rank_panels(stage: StageStatus, view: _View) -> list[Panel]:
    stacks = [view.stack([_place(stage, rank)]) for rank in stage.ranks]
    mapped = [_mapped(rank) for rank in stage.ranks]
    full = max([*mapped, *(_peak(stack) for stack in stacks), 1])
    return [
        _panel(
            f"{stage.stage_id} {stage.name} · {_rank_words(rank)}",
            stack,
            (span, _resident(rank), full),
            _marks(view, stage.stage_id, [_place(stage, rank)]),
            view,
            alive=rank.alive or view.closed,
        )
        for rank, stack, span in zip(stage.ranks, stacks, mapped, strict=True)
    ]


def _stage_panel(stage: StageStatus, view: _View) -> Panel:
    places = [_place(stage, rank) for rank in stage.ranks]
    stack = view.stack(places)
    mapped = sum(map(_mapped, stage.ranks))
    return _panel(
        f"{stage.stage_id} {stage.name} · sum of {len(places)} ranks",
        stack,
        (mapped, sum(map(_resident, stage.ranks)), max(mapped, _peak(stack), 1)),
        _marks(view, stage.stage_id, places),
        view,
        alive=view.closed or all(rank.alive for rank in stage.ranks),
    )


def _panel(
    title: str,
    stack: NDArray[np.float64],
    sizes: tuple[int, int, int],
    marks: tuple[Mark, ...],
    view: _View,
    *,
    alive: bool,
) -> Panel:
    picked = decimated(stack, view.buckets)
    return Panel(title, view.ages_s[picked], stack[:, picked], *sizes, marks, alive)


def _peak(stack: NDArray[np.float64]) -> int:
    totals = stack.sum(axis=0)
    totals = totals[~np.isnan(totals)]
    return int(totals.max()) if totals.size else 0


def _rank_words(rank: RankStatus) -> str:
    return f"rank {rank.rank}" + (f" of replica {rank.replica}" if rank.replica else "")


def _mapped(rank: RankStatus) -> int:
    return sum(tag.mapped_bytes for tag in rank.tags.values())


def _resident(rank: RankStatus) -> int:
    return sum(tag.resident_bytes for tag in rank.tags.values())


# ------------------------------------------------------------------------------------------- marks


def _marks(view: _View, stage_id: int, places: Sequence[Place]) -> tuple[Mark, ...]:
    wanted = set(places)
    found = [_mark(view, answered, wanted) for answered in view.log.orders]
    fails = [
        Mark(view.now_s - move.at_s, "FAILED", "failed", ok=False)
        for move in view.log.moves
        if move.failed and move.stage_id == stage_id
    ]
    restarts = [
        Mark(view.now_s - move.at_s, "restart", "restart", ok=True)
        for move in view.log.moves
        if move.words == RESTARTS and move.stage_id == stage_id
    ]
    return tuple(sorted((mark for mark in (*found, *fails, *restarts) if mark), key=lambda mark: mark.age_s))


def _mark(view: _View, answered: Answered, places: set[Place]) -> Mark | None:
    acks = [ack for ack in answered.acks if place_of(ack) in places]
    if not acks or all(ack.metadata.get("noop") for ack in acks):
        return None
    moved = sum(ack.freed_bytes or ack.metadata.get("mapped_bytes") or 0 for ack in acks)
    sign = "−" if answered.order == "sleep" else "+"
    wrong = sum(not ack.ok for ack in acks)
    label = f"{answered.title} {sign}{units.size(moved)}" if moved else answered.title
    return Mark(view.now_s - answered.at_s, label + (" ERROR" if wrong else ""), answered.order, not wrong)


# ------------------------------------------------------------------------------------------- strip


def _strip(status: EngineStatus, view: _View, n_ranks: int) -> Strip:
    size = -(-n_ranks // MOST_ROWS)
    labels: list[str] = []
    shares: list[NDArray[np.float64]] = []
    spreads: list[NDArray[np.float64]] = []
    for stage in status.stages:
        replicas = any(rank.replica for rank in stage.ranks)
        for first in range(0, len(stage.ranks), size):
            group = stage.ranks[first : first + size]
            share = _shares(stage, group, view)
            unknown = np.isnan(share)
            low, high = np.where(unknown, np.inf, share).min(axis=0), np.where(unknown, -np.inf, share).max(axis=0)
            known = ~unknown.all(axis=0)
            total = np.where(unknown, 0.0, share).sum(axis=0)
            shares.append(np.where(known, total / np.maximum((~unknown).sum(axis=0), 1), np.nan))
            spreads.append(np.where(known, high - low, 0.0))
            labels.append(_group_words(stage.stage_id, group, replicas=replicas))
    if not view.ages_s.size:
        return Strip(tuple(labels), np.empty(0), np.empty((len(labels), 0), np.int8), np.empty((len(labels), 0), bool))
    starts, share = extremes(np.array(shares), _STRIP_BUCKETS)
    _, spread = extremes(np.array(spreads), _STRIP_BUCKETS)
    levels = np.where(np.isnan(share), -1, _levels(np.nan_to_num(share)))
    return Strip(tuple(labels), view.ages_s[starts], levels.astype(np.int8), spread > _DIFFER)


def _levels(share: NDArray[np.float64]) -> NDArray[np.float64]:
    """0 only for nothing and 4 only for all; a quarter each between."""
    top = len(looks.LEVELS) - 1
    inner = np.clip(np.round(share * top), 1, top - 1)
    return np.where(share < 0.005, 0, np.where(share > 0.995, top, inner))


def _shares(stage: StageStatus, group: Sequence[RankStatus], view: _View) -> NDArray[np.float64]:
    """[rank, n]: how much of what a rank has mapped was resident."""
    rows = [view.stack([_place(stage, rank)]).sum(axis=0) / max(_mapped(rank), 1) for rank in group]
    shares: NDArray[np.float64] = np.minimum(np.array(rows), 1.0)
    return shares


def _group_words(stage_id: int, group: Sequence[RankStatus], *, replicas: bool) -> str:
    def name(rank: RankStatus) -> str:
        return f"{rank.replica}.{rank.rank}" if replicas else str(rank.rank)

    ends = name(group[0]) + (f"–{name(group[-1])}" if len(group) > 1 else "")
    return f"stage {stage_id} · {'rank' if len(group) == 1 else 'ranks'} {ends}"
