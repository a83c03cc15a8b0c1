"""docs/pausing.md lists the rules and tests that there are; outcomes belong to whoever ran them last."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.engine.rules import Rule

ROOT = Path(__file__).parents[2]


def lines(text: str) -> list[tuple[str, str, str]]:
    """(source, rule, tests) of each row, without the outcome."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [(row[0], row[1], row[2]) for row in rows if len(row) == 4 and row[0] not in {"from", "---"}]


def test_the_page_lists_every_rule_with_the_tests_that_prove_it() -> None:
    command = [sys.executable, "tools/pause_rules.py", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    page = (ROOT / "docs" / "pausing.md").read_text(encoding="utf-8")
    written = re.search(r"<!-- rules:begin -->\n(.*)<!-- rules:end -->", page, re.DOTALL)
    assert written is not None
    assert lines(written[1]) == lines(done.stdout)
    assert [row[1] for row in lines(done.stdout)] == [rule.text for rule in Rule]
    assert all("::test_" in row[2] for row in lines(done.stdout))
