"""The rules of pausing, the tests that prove each, and what came of a run of them; the specification's support matrix.

    python tools/pause_rules.py            run all of them, print both tables as Markdown
    python tools/pause_rules.py --list     run nothing, print each rule and its tests
    python tools/pause_rules.py --write    run all of them, put both tables into docs/pausing.md

What pytest says goes to stderr. The exit status is 1 if a test failed or a rule has none.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.engine.rules import MATRIX, Rule  # noqa: E402  (after the path)

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = ROOT / "docs" / "pausing.md"
WHERE = "tests/engine"
CELL = "cell"
"""The property by which a test of the matrix tells what it saw."""


class Seen:
    """A pytest plugin: keeps the tests that carry a rule, and what became of them."""

    def __init__(self) -> None:
        self.tests: dict[Rule, list[str]] = defaultdict(list)
        self.outcomes: dict[str, str] = {}
        self.cells: dict[str, str] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Deselect what proves no rule."""
        rules = {item: [rule for mark in item.iter_markers("rule") for rule in mark.args] for item in items}
        for item, proven in rules.items():
            for rule in proven:
                self.tests[rule].append(item.nodeid)
        config.hook.pytest_deselected(items=[item for item in items if not rules[item]])
        items[:] = [item for item in items if rules[item]]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test's outcome is that of its body, or of the step that kept it from running."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome
            properties: dict[str, Any] = dict(report.user_properties)
            if CELL in properties:
                self.cells[report.nodeid] = properties[CELL]


def look(*options: str) -> Seen:
    """Let pytest collect the marked tests, and run them unless the options say otherwise."""
    seen = Seen()
    with contextlib.redirect_stdout(sys.stderr):
        pytest.main(["-q", "-p", "no:randomly", "--rootdir", str(ROOT), *options, str(ROOT / WHERE)], plugins=[seen])
    return seen


def _names(nodes: Iterable[str]) -> dict[str, list[str]]:
    """Test functions and their variants, by `file::function`."""
    found: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        path, _, rest = node.partition("::")
        name, _, variant = rest.partition("[")
        found[f"{Path(path).name}::{name}"].append(variant.removesuffix("]"))
    return found


def _outcome(nodes: list[str], seen: Seen) -> str:
    if not nodes:
        return "**no test**"
    if not seen.outcomes:
        return "not run"
    counts = Counter(seen.outcomes.get(node, "not run") for node in nodes)
    return ", ".join(f"{n} {what}" if what == "passed" else f"**{n} {what}**" for what, n in sorted(counts.items()))


def rules_table(seen: Seen) -> str:
    """Rule → tests → outcome."""
    rows = ["| from | rule | tests | outcome |", "| --- | --- | --- | --- |"]
    for rule in Rule:
        nodes = seen.tests[rule]
        tests = "<br>".join(f"`{name}`" for name in _names(nodes))
        rows.append(f"| {rule.source} | {rule.text} | {tests} | {_outcome(nodes, seen)} |")
    return "\n".join(rows) + "\n"


def matrix_table(seen: Seen) -> str:
    """The specification's support matrix; each cell is what the tests of this run saw."""
    rows = ["| configuration | `mode`, on a diffusion stage with a batch on its device |", "| --- | --- |"]
    for rule in (rule for rule in Rule if rule.source == MATRIX):
        nodes = seen.tests[rule]
        cells = [f"`{_variant(node)}` {seen.cells[node]}" for node in nodes if node in seen.cells]
        rows.append(f"| {rule.text} | {'<br>'.join(cells) or '–'}<br>{_outcome(nodes, seen)} |")
    return "\n".join(rows) + "\n"


def _variant(node: str) -> str:
    return node.partition("[")[2].removesuffix("]").replace("|", "\\|")


def put(page: str, name: str, table: str) -> str:
    """A page with a table in its place."""
    return re.sub(rf"(?<=<!-- {name}:begin -->\n).*?(?=<!-- {name}:end -->)", lambda _old: table, page, flags=re.DOTALL)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="pause_rules", description="Print the rules of pausing and their tests.")
    parser.add_argument("--list", action="store_true", help="collect only: run nothing")
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.relative_to(ROOT)}")
    args = parser.parse_args()
    seen = look("--collect-only") if args.list else look()
    print(rules_table(seen))
    if not args.list:
        print(matrix_table(seen))
    if args.write:
        page = put(PAGE.read_text(encoding="utf-8"), "rules", rules_table(seen))
        PAGE.write_text(put(page, "matrix", matrix_table(seen)), encoding="utf-8")
    whole = all(seen.tests[rule] for rule in Rule)
    return 0 if whole and set(seen.outcomes.values()) <= {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main())
