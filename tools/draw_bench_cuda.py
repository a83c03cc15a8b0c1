"""Draw `benchmarks/results/*-cuda.json` as a picture beside it.

    python tools/draw_bench_cuda.py benchmarks/results/2026-12-01-h200-cuda.json

The file is a list of runs, each as `$OMNI_BENCH_RAW` of `benchmarks.bench_cuda` has it (times by "PEER WEIGHTS:CACHE");
the first has all peers on one size, the others are ours at other sizes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from benchmarks.bench_cuda import NAMES
from omni_notebook.palette import BLUE, GREEN, GREY, ORANGE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(NAMES, (BLUE, ORANGE, GREEN, GREY), strict=True))
STEPS = {
    "sleep 1, all changed": "level-1 sleep,\nall changed",
    "sleep 1, unchanged": "level-1 sleep,\nnothing changed",
    "wake 1": "level-1 wake",
    "sleep 2": "level-2 sleep",
}
RATIOS = {
    "sleep 1, all changed": ("level-1 sleep, all changed", "floor out", BLUE, "o", 1.05),
    "wake 1": ("level-1 wake", "floor in", GREEN, "s", 1.12),
    "wake 2 to verified weights, the cache later": ("level-2 wake to verified weights", "floor in", RED, "^", 1 / 0.6),
}
"""What is told beside the link: its name, which way, colour, mark, and the design's bar."""
WIDTH = 0.2


def best(answer: dict[str, Any], step: str) -> float | None:
    """The best of a step's times in milliseconds, None where it has none."""
    return min(answer["times"].get(step, ()), default=None)


def peers(axes: Axes, run: dict[str, Any]) -> None:
    """One size, everybody."""
    size = next(iter(run)).split()[1]
    for place, (name, answer) in enumerate(run.items()):
        peer = name.split()[0]
        times = [best(answer, step) for step in STEPS]
        known = [(number, ms) for number, ms in enumerate(times) if ms is not None]
        at = [number + (place - 1.5) * WIDTH for number, _ in known]
        bars = axes.bar(at, [ms for _, ms in known], WIDTH * 0.92, color=COLOURS[peer], label=NAMES[peer])
        axes.bar_label(bars, [f"{ms:,.0f}" for _, ms in known], fontsize=7, padding=1)
    link = min(run[f"ours {size}"]["times"]["floor out"])
    axes.axhline(link, color="black", linewidth=0.8, linestyle="--")
    axes.text(1.32, link * 0.9, f"the link alone, {link:.0f} ms", ha="center", va="top", fontsize=7)
    axes.set_xlim(-0.5, len(STEPS) - 0.5)
    axes.set_yscale("log")
    axes.set_ylim(20, 20_000)
    axes.set_xticks(range(len(STEPS)), STEPS.values(), fontsize=8)
    axes.set_ylabel("milliseconds (log), less is better")
    axes.set_title("{} GiB of weights, {} GiB of cache, in one run".format(*size.split(":")), fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="upper right")


def sizes(axes: Axes, runs: list[dict[str, Any]]) -> None:
    """Ours beside the link, at every size."""
    found = {name.split()[1]: answer for run in runs[1:] for name, answer in run.items()}
    names = sorted(found, key=lambda size: [int(number) for number in size.split(":")])
    for number, (step, (title, link, colour, mark, bar)) in enumerate(RATIOS.items()):
        points = [
            (place + (number - 1) * WIDTH, ms / min(found[size]["times"][link]))
            for place, size in enumerate(names)
            if (ms := best(found[size], step)) is not None
        ]
        axes.plot(*zip(*points, strict=True), mark, color=colour, label=f"{title} (bar {bar:.2f})")
        axes.axhline(bar, color=colour, linewidth=0.8, linestyle=":")
        for place, ratio in points:
            axes.annotate(f"{ratio:.2f}", (place, ratio), (0, 6), textcoords="offset points", fontsize=7, ha="center")
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(names)), [name.replace(":", " + ") for name in names], fontsize=8)
    axes.set_xlim(-0.4, len(names) - 0.4)
    axes.set_ylim(0.9, 2.3)
    axes.set_xlabel("GiB of weights + cache", fontsize=8)
    axes.set_ylabel("time ÷ the link's for the weights alone")
    axes.set_title("ours beside the link", fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="upper right")


def main() -> None:
    """Draw one file."""
    file = Path(sys.argv[1])
    runs = json.loads(file.read_text(encoding="utf-8"))
    figure = Figure(figsize=(12, 4.6), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[3, 2])
    peers(left, runs[0])
    sizes(right, runs)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file.with_suffix(".png"))


if __name__ == "__main__":
    main()
