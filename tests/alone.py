"""Tests marked `alone` measure the very process they run in: each module's run in a fresh pytest of its own.

The process of a long suite takes and gives back megabytes by itself (heaps, arenas, code read for the first time): more
than a bound that means something allows. The child's findings are told as this run's, test by test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPORT = "OMNI_TEST_ALONE"
"""Set in the child: the file that its findings go to, a JSON line each."""
LIMIT_S = 600


def is_child() -> bool:
    return REPORT in os.environ


class Alone(pytest.Item):
    """A test that a child runs, and what it found there."""

    ids: list[str]  # of all that the child runs
    found: dict[str, list[dict[str, str]]]  # one for the module, filled by the first of them

    def runtest(self) -> None:
        if not self.found:
            self.found.update(_run(self.ids, Path(str(self.config.rootpath))))
        phases = self.found.get(self.nodeid)
        if phases is None:
            pytest.fail(f"the child ended before this test:\n{self.found[''][0]['text']}", pytrace=False)
        for phase in phases:
            if phase["outcome"] == "failed":
                pytest.fail(f"{phase['when']} in a process of its own:\n{phase['text']}", pytrace=False)
            if phase["outcome"] == "skipped":
                pytest.skip(phase["text"])

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.name


def _run(ids: list[str], root: Path) -> dict[str, list[dict[str, str]]]:
    with tempfile.TemporaryDirectory(prefix="omni-alone-") as folder:
        report = Path(folder, "report.jsonl")
        report.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *ids]
        done = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, REPORT: str(report)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        found: dict[str, list[dict[str, str]]] = {}
        for line in report.read_text(encoding="utf-8").splitlines():
            phase = json.loads(line)
            found.setdefault(phase["id"], []).append(phase)
    found[""] = [{"text": f"exit status {done.returncode}\n{done.stdout[-4000:]}"}]
    return found


def replace(items: list[pytest.Item]) -> None:
    """Put what a child runs in the place of the tests marked `alone`."""
    ids: dict[Path, list[str]] = {}
    found: dict[Path, dict[str, list[dict[str, str]]]] = {}
    for at, item in enumerate(items):
        if item.get_closest_marker("alone") is None:
            continue
        made = Alone.from_parent(item.parent, name=item.name)
        made.add_marker(pytest.mark.timeout(LIMIT_S + 30))
        made.ids = ids.setdefault(item.path, [])
        made.ids.append(item.nodeid)
        made.found = found.setdefault(item.path, {})
        items[at] = made


def tell(report: pytest.TestReport) -> None:
    """In the child: one phase of one test."""
    if report.when == "call" or report.outcome != "passed":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        line = {"id": report.nodeid, "when": report.when, "outcome": report.outcome, "text": text}
        with Path(os.environ[REPORT]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
