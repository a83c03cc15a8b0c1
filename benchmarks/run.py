"""Run every `benchmarks/bench_*.py`, each in a process of its own, and print one table.

    python -m benchmarks.run                all of them
    python -m benchmarks.run import cpu     some of them (bench_import.py, bench_cpu.py)

A benchmark module has `measure()`, which returns or yields `Figure`s. The exit status is 1 if a benchmark failed or
missed its bar.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import Figure

HERE = Path(__file__).parent
TIMEOUT_S = 1800
PIPE_WIDTH = 180


def names() -> list[str]:
    """The benchmarks that are there."""
    return sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))


def measure_here(name: str, answer: Path) -> None:
    """Run one benchmark in this process and write its figures to `answer` as JSON."""
    figures = import_module(f"benchmarks.bench_{name}").measure()
    answer.write_text(json.dumps([asdict(figure) for figure in figures]), encoding="utf-8")


def measure(name: str) -> list[Figure] | str:
    """One benchmark's figures from a fresh process, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.run", "--answer", str(answer), name]
        try:
            done = subprocess.run(command, cwd=HERE.parent, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return f"not finished after {TIMEOUT_S} s"
        if done.returncode != 0:
            return f"ended with status {done.returncode}"
        return [Figure(**figure) for figure in json.loads(answer.read_text(encoding="utf-8"))]


def verdict(figure: Figure) -> str:
    """The table's last word on a figure."""
    if not figure.bar:
        return ""
    if figure.met is None:
        return "not resolved"
    return "met" if figure.met else "[bold]MISSED[/bold]"


def table(results: dict[str, list[Figure] | str]) -> Table:
    """One table of all figures."""
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    title = f"Python {platform.python_version()}, {platform.machine()}, {cores} cores, load {load:.1f} at the end"
    drawn = Table("benchmark", "what", "measured", "floor (same run)", "bar", "", "note", title=title)
    for name, figures in results.items():
        if isinstance(figures, str):
            drawn.add_row(name, figures, "", "", "", "[bold]FAILED[/bold]", "")
            continue
        for figure in figures:
            floor = "" if figure.floor is None else f"{figure.floor:.4g} {figure.unit} {figure.floor_is}".rstrip()
            measured = f"{figure.value:.4g} {figure.unit}"
            drawn.add_row(name, figure.what, measured, floor, figure.bar, verdict(figure), figure.note)
    return drawn


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.run", description="Run the benchmarks and print one table.")
    parser.add_argument("names", nargs="*", help=f"which; all if none is given ({', '.join(names()) or 'none yet'})")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = sorted(set(args.names) - set(names()))
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; there are: {', '.join(names())}")
    if args.answer is not None:
        measure_here(args.names[0], args.answer)
        return 0
    results = {name: measure(name) for name in args.names or names()}
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table(results))
    return 1 if any(map(_bad, results.values())) else 0


def _bad(figures: list[Figure] | str) -> bool:
    return isinstance(figures, str) or any(figure.met is False for figure in figures)


if __name__ == "__main__":
    sys.exit(main())
