"""Write the README's table of verbs from the registry: `python tools/readme_verbs.py`."""

from __future__ import annotations

import re
from pathlib import Path

from omni_notebook.verbs import registry

README = Path(__file__).resolve().parent.parent / "README.md"
_TABLE = re.compile(r"(?<=<!-- verbs:begin -->\n).*?(?=<!-- verbs:end -->)", re.DOTALL)


def table() -> str:
    """The table: a verb, what it does, the call that does the same in Python."""
    rows = ["| verb | what it does | in Python |", "| --- | --- | --- |"]
    for name, verb in registry.verbs().items():
        python = registry.python_name(verb)
        rows.append(f"| `{name}` | {registry.summary(verb)} | {f'`{python}`' if python else '–'} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    README.write_text(_TABLE.sub(lambda _old: table(), README.read_text(encoding="utf-8")), encoding="utf-8")
