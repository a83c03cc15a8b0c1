"""The rules of an audit's verdict, on records made by hand."""

from __future__ import annotations

import random

import pytest

from omni_notebook.protocol import GIB, MIB
from omni_notebook.verbs.auditing.judging import GROWTH_CYCLES, judge_cycle, judge_growth, tolerance, trend, verdict_of
from omni_notebook.verbs.auditing.record import Cycle, OutputLine, ProbeLine, ProcessLine, RankLine, Source, Verdict


def rank(**known):
    known = {"sleep_status": "SUCCESS", "freed_bytes": 100 * MIB, "wake_status": "SUCCESS", **known}
    return RankLine(stage_id=0, replica=0, rank=0, pid=1, device="cpu", **known)


def process(told=100 * MIB, left=100 * MIB, back=100 * MIB, floor=50 * MIB, **known):
    known = {"pid": 1, "device": "cpu", "ranks": ("stage 0 · rank 0",), "source": Source.SMAPS, **known}
    return ProcessLine(
        before_bytes=floor + left,
        asleep_bytes=floor,
        awake_bytes=floor + back,
        freed_bytes=told,
        mapped_bytes=told,
        tolerance_bytes=tolerance(told, known["device"]),
        **known,
    )


def cycle(number=1, ranks=None, processes=None, **known):
    return Cycle(number=number, ranks=ranks or (rank(),), processes=processes or (process(),), **known)


def output(**known):
    given = {"covers": (0, 1), "tokens": 9, "tokens_sha256": "a", "images": 1, "images_sha256": "b"}
    return OutputLine(**given, weight_versions={}, **{"others": False, "ms": 1.0, "same_tokens": True, **known})


def verdict(made):
    return str(verdict_of(judge_cycle(made)))


@pytest.mark.parametrize(
    ("off", "expected"), [(0, "PASS"), (2 * MIB, "PASS"), (2 * MIB + 1, "FAIL"), (-2 * MIB, "PASS"), (-3 * MIB, "FAIL")]
)
def test_ack_and_outside_may_differ_by_two_percent(off, expected):
    assert verdict(cycle(processes=(process(left=100 * MIB + off),))) == expected
    assert verdict(cycle(number=2, processes=(process(back=100 * MIB + off),))) == expected


@pytest.mark.parametrize(
    ("number", "off", "expected"),
    [(1, 4, "PASS"), (1, 5, "FAIL"), (2, 4, "FAIL"), (1, -4, "FAIL"), (2, -4, "FAIL")],
)
def test_only_the_first_wake_may_bring_code_and_tables_along(number, off, expected):
    assert verdict(cycle(number=number, processes=(process(back=(100 + off) * MIB),))) == expected


@pytest.mark.parametrize(
    ("n_bytes", "device", "expected"),
    [
        (100 * MIB, "cpu", 2 * MIB),
        (8 * MIB, "cpu", 1 * MIB),
        (2 * MIB, "cpu", MIB // 2),
        (0, "cpu", 1 * MIB),
        (100 * MIB, "cuda:0", 25 * MIB),
        (10 * GIB, "cuda:1", 10 * GIB // 50),
        (1 * GIB, "cuda", 64 * MIB),
    ],
)
def test_the_tolerance_is_that_of_the_acks(n_bytes, device, expected):
    assert tolerance(n_bytes, device) == expected


def test_an_error_of_a_rank_fails_and_an_absent_one_too():
    assert verdict(cycle(ranks=(rank(sleep_status="ERROR", sleep_error="no"),))) == "FAIL"
    assert verdict(cycle(ranks=(rank(wake_status="ERROR", wake_error="no"),))) == "FAIL"
    assert verdict(cycle(ranks=(rank(sleep_status=None),))) == "FAIL"


def test_what_nobody_could_look_at_warns():
    blind = process(source=None, why_not="NVML is not available here")
    (finding,) = (f for f in judge_cycle(cycle(processes=(blind,))) if f.severity is Verdict.WARN)
    assert "not available (NVML is not available here)" in finding.text


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"same_images": True, "max_difference": 0}, "PASS"),
        ({"same_images": False, "max_difference": 1, "others": True}, "WARN"),
        ({"same_images": False, "max_difference": 1, "others": False}, "FAIL"),
        ({"same_images": False, "max_difference": 2, "others": True}, "FAIL"),
        ({"same_images": False, "max_difference": None, "others": True}, "FAIL"),
        ({"same_tokens": False, "same_images": True}, "FAIL"),
        ({"same_images": True, "same_weights": False}, "FAIL"),
    ],
)
def test_outputs_are_exact_or_at_most_one_step_of_a_pixel_beside_other_requests(known, expected):
    assert verdict(cycle(output=output(**known))) == expected


def test_a_probe_that_did_not_get_all_warns():
    probe = ProbeLine(asked_bytes=2 * MIB, taken_bytes=MIB, available_bytes=MIB, pid=1, ms=1.0, outcome="stopped")
    assert verdict(cycle(probe=probe)) == "WARN"


# ------------------------------------------------------------------------------------------ growth


def growth(held, freed=100 * MIB):
    """The verdict on a process that holds these bytes while asleep."""
    lines = [process(floor=n_bytes, told=freed, left=freed, back=freed) for n_bytes in held]
    return [str(f.severity) for f in judge_growth([cycle(n, processes=(line,)) for n, line in enumerate(lines, 1)])]


def series(count, slope=0, noise=0, first=0, seed=1):
    rng = random.Random(seed)
    return [200 * MIB - (first if n == 0 else 0) + n * slope + rng.randint(-noise, noise) for n in range(count)]


def test_a_flat_residual_passes():
    assert growth(series(10)) == ["PASS"]


def test_too_few_cycles_are_not_judged():
    assert growth(series(GROWTH_CYCLES - 1, slope=50 * MIB)) == []
    assert growth(series(GROWTH_CYCLES, slope=50 * MIB)) == ["FAIL"]


def test_warming_up_in_the_first_cycle_is_no_growth():
    assert growth(series(4, first=80 * MIB)) == ["PASS"]
    assert growth(series(10, first=80 * MIB)) == ["PASS"]


def test_a_single_step_is_no_growth():
    held = series(10)
    assert growth([n + (20 * MIB if place >= 6 else 0) for place, n in enumerate(held)]) == ["PASS"]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_growth(seed):
    assert growth(series(10, noise=8 * MIB, seed=seed)) == ["PASS"]
    assert growth(series(4, noise=MIB // 4, seed=seed)) == ["PASS"]


@pytest.mark.parametrize("seed", range(20))
def test_a_leak_is_found_within_noise(seed):
    assert growth(series(10, slope=4 * MIB, noise=4 * MIB, seed=seed)) == ["FAIL"]
    assert growth(series(5, slope=8 * MIB, noise=MIB, seed=seed)) == ["FAIL"]


def test_a_leak_in_every_other_cycle_is_found():
    assert growth([200 * MIB + (n // 2) * 16 * MIB for n in range(10)]) == ["FAIL"]


def test_an_allocator_that_settles_is_no_growth():
    assert growth([200 * MIB + n * MIB // 2 for n in range(12)]) == ["PASS"]


def test_a_large_model_may_differ_by_a_thousandth():
    assert growth(series(6, slope=10 * MIB), freed=14 * GIB) == ["PASS"]
    assert growth(series(6, slope=20 * MIB), freed=14 * GIB) == ["FAIL"]


def test_the_trend_is_the_median_slope_and_the_scatter_around_it():
    assert trend([0, 10, 20, 30]) == (10.0, 0.0)
    slope, scatter = trend([0, 10, 20, 1000])
    assert slope < 500
    assert scatter > 0
