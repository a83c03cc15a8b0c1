"""A process that looks at others from outside: run as a file, it needs nothing but Python.

Each line on stdin holds process ids; each line on stdout is a JSON object {pid: {"anonymous", "rss", "swap"} or the
reason as a text}, bytes. Source: proc_pid_smaps(5), smaps_rollup. It ends with its stdin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_FIELDS = {"Anonymous": "anonymous", "Rss": "rss", "Swap": "swap"}


def look(pid: str) -> dict[str, int] | str:
    """One process's memory, or why it can not be seen."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError as error:
        return f"/proc/{pid}/smaps_rollup: {error.strerror}"
    pairs = (line.partition(":") for line in text.splitlines())
    return {_FIELDS[key]: int(value.split()[0]) * 1024 for key, _, value in pairs if key in _FIELDS}


def main() -> None:
    """Answer until nobody asks any more."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps({pid: look(pid) for pid in line.split()}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
