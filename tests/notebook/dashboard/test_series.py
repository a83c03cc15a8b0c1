import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from omni_notebook.notebook.dashboard.series import CAPACITY, PERIOD_S, Clock, Key, Timeline, decimated, extremes

KEYS = (Key(0, 0, 0, "weights"), Key(0, 0, 0, "kv_cache"))


class Time:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


# ------------------------------------------------------------------------------------------- clock


def test_the_clock_ticks_at_multiples_of_its_period_however_late_each_tick_is_taken():
    now = Time()
    clock = Clock(0.2, now)
    taken = []
    for late_s in (0.0, 0.05, 0.11, 0.0, 0.17, 0.03):
        now.now_s += clock.wait_s() + late_s
        assert clock.tick() == 0
        taken.append(now.now_s - late_s)
    assert taken == pytest.approx([100.2, 100.4, 100.6, 100.8, 101.0, 101.2])


def test_a_thousand_late_ticks_do_not_drift():
    now = Time()
    clock = Clock(0.2, now)
    for _ in range(1000):
        now.now_s += clock.wait_s() + 0.013
        clock.tick()
    assert now.now_s == pytest.approx(100 + 200 + 0.013)


def test_missed_ticks_are_counted_and_not_made_up():
    now = Time()
    clock = Clock(0.2, now)
    now.now_s += 1.05
    assert clock.wait_s() == 0.0
    assert clock.tick() == 4
    assert clock.wait_s() == pytest.approx(0.15)


def test_a_clock_that_is_set_back_waits_a_period_and_goes_on():
    now = Time()
    clock = Clock(0.2, now)
    now.now_s += 0.2
    clock.tick()
    now.now_s -= 3600
    assert clock.wait_s() == 0.2
    now.now_s += 0.2
    assert clock.tick() == 0
    assert clock.wait_s() == pytest.approx(0.2)


# ---------------------------------------------------------------------------------------- timeline


def filled(n, **options):
    timeline = Timeline(**options)
    for place in range(n):
        timeline.add(place * PERIOD_S, KEYS, (place, 2 * place))
    return timeline


def test_the_newest_samples_are_kept_in_order():
    window = filled(1000, capacity=100).window()
    assert window.keys == KEYS
    assert window.values.shape == (2, 100)
    assert window.values[0].tolist() == list(range(900, 1000))
    assert window.values[1].tolist() == list(range(1800, 2000, 2))
    assert np.diff(window.times) == pytest.approx(PERIOD_S)


def test_fewer_samples_than_fit_are_all_there():
    assert filled(7).window().values[0].tolist() == list(range(7))


def test_an_empty_timeline_has_an_empty_window():
    window = Timeline().window()
    assert (window.keys, window.times.size, window.values.shape) == ((), 0, (0, 0))
    assert math.isnan(Timeline().latest_s)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, None])
def test_what_is_no_number_of_bytes_counts_as_unknown(wrong):
    timeline = Timeline()
    timeline.add(0.0, KEYS, (wrong, 5))
    assert np.isnan(timeline.window().values[0, 0])
    assert timeline.window().values[1, 0] == 5


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_sample_without_a_time_is_left_out(wrong):
    timeline = filled(3)
    timeline.add(wrong, KEYS, (7, 7))
    assert timeline.window().times.size == 3


def test_a_clock_that_jumps_back_an_hour_is_carried_on_from_the_last_sample():
    timeline = filled(5)
    for place in range(5):
        timeline.add(-3600 + place * PERIOD_S, KEYS, (100 + place, 0))
    window = timeline.window()
    assert window.values[0].tolist() == [0, 1, 2, 3, 4, 100, 101, 102, 103, 104]
    assert np.diff(window.times) == pytest.approx(PERIOD_S)


def test_a_long_silence_is_a_gap_and_not_a_line():
    timeline = filled(3)
    timeline.add(60.0, KEYS, (9, 9))
    values = timeline.window().values[0]
    assert np.isnan(values).tolist() == [False, False, False, True, False]


def test_a_rank_that_goes_and_one_that_comes_keep_their_own_pasts():
    timeline = filled(3)
    new = (Key(0, 0, 1, "weights"),)
    timeline.add(3 * PERIOD_S, new, (50,))
    window = timeline.window()
    assert window.keys == KEYS + new
    assert window.values[0].tolist()[:3] == [0, 1, 2]
    assert np.isnan(window.values[0, 3])
    assert np.isnan(window.values[2, :3]).all()
    assert window.values[2, 3] == 50


def test_rows_that_have_left_the_window_are_given_up():
    timeline = Timeline(capacity=20)
    for life in range(200):
        for _ in range(10):
            timeline.add(timeline.latest_s + PERIOD_S if life else 0.0, (Key(0, 0, life, "weights"),), (1,))
    assert len(timeline.window().keys) <= 4


def test_ten_thousand_samples_of_256_ranks_take_no_more_memory_than_the_first_thousand():
    keys = tuple(Key(0, 0, rank, tag) for rank in range(256) for tag in ("weights", "kv_cache", "ballast"))
    values = [1.0] * len(keys)
    timeline = Timeline()
    sizes = []
    for place in range(10_000):
        timeline.add(place * PERIOD_S, keys, values)
        if place % 1000 == 999:
            sizes.append(timeline.n_bytes)
    assert len(set(sizes)) == 1
    assert sizes[0] < 1.3 * len(keys) * CAPACITY * 8


# -------------------------------------------------------------------------------------- decimation

ANY = arrays(
    np.float64,
    st.tuples(st.integers(1, 4), st.integers(1, 300)),
    elements=st.one_of(st.just(math.nan), st.integers(0, 9).map(float)),
)


@given(ANY, st.integers(1, 60))
def test_every_row_keeps_its_peaks_and_its_lows(values, buckets):
    picked = decimated(values, buckets)
    assert picked.tolist() == sorted(set(picked.tolist()))
    for row in values:
        known = row[~np.isnan(row)]
        if known.size:
            kept = row[picked][~np.isnan(row[picked])]
            assert (kept.min(), kept.max()) == (known.min(), known.max())


@given(ANY, st.integers(1, 60))
def test_extremes_keep_every_peak_and_low_too(values, buckets):
    starts, picked = extremes(values, buckets)
    assert (np.diff(starts) >= 0).all()
    assert picked.shape == (len(values), len(starts))
    for row, kept in zip(values, picked, strict=True):
        known = row[~np.isnan(row)]
        if known.size:
            assert (np.nanmin(kept), np.nanmax(kept)) == (known.min(), known.max())


def test_a_peak_of_one_sample_in_ten_thousand_survives():
    values = np.ones((3, 10_000))
    values[1, 4321] = 7.0
    picked = decimated(values, 100)
    assert 4321 in picked
    assert len(picked) < 10


def test_memory_that_stands_still_is_two_points():
    assert decimated(np.full((3, 600), 5.0), 120).tolist() == [0, 599]


def test_a_jump_stays_a_jump():
    values = np.where(np.arange(600) < 333, 8.0, 0.0)[None, :]
    assert decimated(values, 100).tolist() == [0, 332, 333, 599]


def test_where_a_row_begins_and_ends_to_be_known_is_kept():
    values = np.full((1, 600), 5.0)
    values[0, 100:200] = math.nan
    assert {99, 100, 199, 200} <= set(decimated(values, 20).tolist())


def test_noise_is_bounded_by_the_buckets():
    values = np.random.default_rng(0).random((3, 600))
    assert len(decimated(values, 30)) <= 30 * 2 * 3 * 2 + 2
